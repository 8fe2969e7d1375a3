"""Zarr stores that are read where they lie: by https, or from the object stores of Amazon and Google, without account.

Requests go through `obstore` (pip install 'ensemble-ml[remote]'), which repeats those that fail on the way. Nothing is
copied: metadata are fetched when a store is opened, and chunks when fields of them are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import google_crc32c

from ensemble_ml.errors import UserError

_SCHEMES = ("https://", "http://", "s3://", "gs://")
_WB2 = "gs://weatherbench2/datasets"
NAMES = {  # short names of archives that anybody can read; their licences are those of who made them
    "wb2:ifs_ens/64x32": f"{_WB2}/ifs_ens/2018-2022-64x32_equiangular_conservative.zarr",
    "wb2:ifs_ens/240x121": f"{_WB2}/ifs_ens/2018-2022-240x121_equiangular_with_poles_conservative.zarr",
    "wb2:ifs_ens/1440x721": f"{_WB2}/ifs_ens/2018-2022-1440x721.zarr",
    "wb2:era5/64x32": f"{_WB2}/era5/1959-2023_01_10-6h-64x32_equiangular_conservative.zarr",
    "arco:era5": "gs://gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3",
}
_MARKS = ("zarr.json", ".zmetadata", ".zgroup")
_RETRIES = 5
_SECONDS = 60  # that all tries of a request may take
_CONCURRENT = 64  # requests; chunks are small, and an answer takes long
_AT_ONCE = "async.concurrency"
_WAITS = (0.1, 0.5, 2.0)  # seconds before an answer that broke off is asked for again

T = TypeVar("T")


def is_remote(path: Any) -> bool:
    """Return whether a path is a URL, or a short name of one."""
    return isinstance(path, str) and (path.startswith(_SCHEMES) or path in NAMES)


def url_of(path: str) -> str:
    """Return the URL of a remote store, without a slash at its end."""
    return NAMES.get(path, path).rstrip("/")


def open_remote(path: str) -> Any:
    """Return a remote store as zarr reads it.

    Args:
        path: a URL or a short name of one.

    Raises:
        UserError: obstore is not installed, there is no Zarr store, or it cannot be reached.
    """
    _fetched(url_of(path))
    return _store(url_of(path))


def remote_stamp(path: str) -> tuple[int, int] | None:
    """Return the size of a store's metadata, and their checksum in place of a time; None if it cannot be reached."""
    try:
        content = _fetched(url_of(path))
    except UserError:
        return None
    return len(content), google_crc32c.value(content)


def open_zarr_array(path: str, name: str) -> Any:
    """Return an array of a Zarr store.

    Args:
        path: a folder, a URL or a short name of one.
        name: the array's path in the store.
    """
    import zarr

    if is_remote(path):
        return zarr.open_array(_store(url_of(path)), path=name, mode="r")
    return zarr.open_array(os.path.join(path, name), mode="r")


def read_part(path: str, key: str, first: int, length: int) -> bytes:
    """Read some bytes of an object of a remote store.

    Args:
        path: a URL or a short name of one.
        key: the object.
        first: position of the first byte; if it is negative, from the end.
        length: number of bytes.

    Raises:
        UserError: they cannot be read.
    """
    obstore, store = _obstore(), _store(url_of(path)).store
    try:
        if first < 0:
            first += obstore.head(store, key)["size"]
        return bytes(obstore.get_range(store, key, start=first, length=length))
    except (obstore.exceptions.BaseError, FileNotFoundError) as error:
        raise UserError(f"{path}/{key}: {reason(error)}") from error


def has_object(path: str, key: str) -> bool:
    """Return whether a remote store has an object, such as a chunk."""
    obstore = _obstore()
    try:
        obstore.head(_store(url_of(path)).store, key)
    except FileNotFoundError:
        return False
    except obstore.exceptions.BaseError as error:
        raise UserError(f"{path}/{key}: {reason(error)}") from error
    return True


def persistently(path: str, read: Callable[[], T]) -> T:
    """Return the result of a function that reads from a store, which is called again if an answer breaks off.

    obstore repeats requests that fail at once, but not those whose answer ends too early.

    Args:
        path: the store; of files, nothing is read again.
        read: the function.
    """
    for wait in _WAITS if is_remote(path) else ():
        try:
            return read()
        except Exception as error:
            if type(error).__name__ != "GenericError":
                raise
            time.sleep(wait)
    return read()


def reason(error: BaseException) -> str:
    """Return in one line why a request has failed."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return "access is refused (403); only what anybody may read is read"
    # obstore tells the whole story of all tries. Its core is the last sentence of the source.
    with suppress(ValueError):
        text = text[: text.index("Debug source")].strip()
    return f"{kind}: {text[:300]}"


def _obstore() -> Any:
    """Return the package obstore.

    Raises:
        UserError: it is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UserError(f"URLs are read by obstore ({error}); pip install 'ensemble-ml[remote]'") from error
    return obstore


@lru_cache(32)
def _store(url: str) -> Any:
    """Return the zarr store of a URL; it makes no request yet."""
    import zarr
    from zarr.storage import ObjectStore

    how: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=_SECONDS), "allow_http": url.startswith("http://")},
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_SECONDS)},
    }
    if url.startswith(("s3://", "gs://")):
        how["skip_signature"] = True
    if url.startswith("s3://"):
        how["region"] = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    if zarr.config.get(_AT_ONCE) < _CONCURRENT:
        zarr.config.set({_AT_ONCE: _CONCURRENT})
    return ObjectStore(_obstore().store.from_url(url, **how), read_only=True)


def _fetched(url: str) -> bytes:
    """Return the metadata of a remote Zarr store, as far as one document has them.

    Raises:
        UserError: there is none, or no answer.
    """
    obstore, refused = _obstore(), None
    for mark in _MARKS:
        try:
            return bytes(obstore.get(_store(url).store, mark).bytes())
        except FileNotFoundError:
            continue
        except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError) as error:
            refused = error  # object stores answer so for objects that are not there, too
        except obstore.exceptions.BaseError as error:
            raise UserError(f"{url}: cannot be reached ({reason(error)}); check the URL and the network") from error
    if refused is not None:
        raise UserError(f"{url}: {reason(refused)}") from refused
    raise UserError(f"{url}: no Zarr store is there (404); only Zarr is read by URL, fetch GRIB and NetCDF first")
