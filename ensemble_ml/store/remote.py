"""Read files and Zarr stores by URL: https, http, or public objects of Amazon (s3://) and Google (gs://).

Requests go through `obstore` (pip install 'ensemble-ml[remote]'), which repeats those that fail. Metadata of Zarr
stores and headers of GRIB files are fetched when an archive is opened, and values when fields are read. The ETag of an
object is kept, so that a change while it is read is noticed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import google_crc32c

from ensemble_ml.errors import UserError
from ensemble_ml.store.archive_names import NAMES, names_several

_SCHEMES = ("https://", "http://", "s3://", "gs://")
GROUP = "#"  # between the URL of a Zarr store and a group in it
_MARKS = ("zarr.json", ".zmetadata", ".zgroup")  # a Zarr store has one of these documents
_HEAD = 512  # first bytes of a file, by which GRIB and NetCDF are recognised
_PART, _PARTS_AHEAD = 8 << 20, 8  # bytes of a file in one request, and requests in progress
_RETRIES = 5
_SECONDS = 60  # limit of a request, and of the time in which obstore repeats it
_CONCURRENT = 64  # requests of zarr at the same time; chunks are small, and each answer takes long
_AT_ONCE = "async.concurrency"
_WAITS = (0.1, 0.5, 2.0)  # seconds to wait before a failed request is made again

_opened: dict[str, Any] = {}  # Zarr stores of this process by their URLs
T = TypeVar("T")
# First byte and end; {"suffix": number of last bytes}; {"offset": first byte}, to the end; or None for all bytes.
Range = tuple[int, int] | dict[str, int] | None


def is_remote(path: Any) -> bool:
    """Return whether a path is a URL, or a short name of one URL or several."""
    if not isinstance(path, str):
        return False
    return path.startswith(_SCHEMES) or path.partition(GROUP)[0] in NAMES or names_several(path)


def url_of(path: str) -> str:
    """Return the URL of a remote store or file, without a slash at its end.

    Raises:
        UserError: it has a query, such as the signature of a signed URL, which obstore cannot send.
    """
    store, mark, group = path.partition(GROUP)
    if "?" in store:
        raise UserError(f"{store.partition('?')[0]}: a URL is read without the part behind its ?; download the file")
    return f"{NAMES.get(store, store).rstrip('/')}{mark}{group}"


def _head(url: str) -> bytes:
    """Return the first bytes of the file at a URL; nothing if its name contains ".zarr", or if it cannot be read.

    A URL with a group is that of a Zarr store, so nothing is read from it either.
    """
    if GROUP in url or ".zarr" in url.rsplit("/", 1)[-1]:
        return b""
    try:
        return _asked_head(url)
    except (UserError, FileNotFoundError):  # opening the store will report what is wrong
        return b""


# Errors are not kept, so a file that is missing now is found as soon as it is there.
@lru_cache(4096)
def _asked_head(url: str) -> bytes:
    """Return the first bytes of the file at a URL; raise FileNotFoundError or UserError if it cannot be read."""
    return RemoteFile.open(url).head


def is_grib(path: str) -> bool:
    """Return whether a URL is that of a GRIB file."""
    return b"GRIB" in _head(url_of(path))


def is_file(path: str) -> bool:
    """Return whether a URL is that of one file, GRIB or NetCDF, and not of a Zarr store."""
    return is_grib(path) or _head(url_of(path)).startswith((b"CDF", b"\x89HDF"))


@lru_cache(1)
def _kept() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of downloaded files, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ensemble-ml-")


def fetch(path: str) -> str:
    """Download the file at a URL, and return the path of the copy, which is removed when the process ends.

    NetCDF libraries read files, not URLs. A file that has not changed is downloaded only once.

    Raises:
        UserError: it cannot be read, or changes meanwhile.
    """
    try:
        file = RemoteFile.open(url_of(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: is not there any more (404)") from error
    name = f"{google_crc32c.value(file.url.encode()):08x}-{file.tag:08x}-{os.path.basename(file.url)}"
    place = Path(_kept().name, name)
    if not place.exists():
        with place.with_name(f"{name}.{threading.get_ident()}").open("wb") as out:
            parts = [(first, min(first + _PART, file.size)) for first in range(0, file.size, _PART)]
            asked = deque(file.ask(*part) for part in parts[:_PARTS_AHEAD])
            for number in range(len(parts)):
                out.write(file.answer(asked.popleft()))
                asked.extend(file.ask(*part) for part in parts[number + _PARTS_AHEAD :][:1])
        os.replace(out.name, place)
    return str(place)


def open_remote(path: str) -> Any:
    """Return a remote Zarr store, in the form that zarr reads. `path` is a URL or a short name of one.

    Raises:
        UserError: obstore is not installed, there is no Zarr store, or it cannot be read.
        KeyError: the consolidated metadata lack the group that `path` names.
    """
    store = _store(path)
    _document(store, _root(path))
    _ask_coordinates(store, path)
    return store


def reopen(path: str) -> None:
    """Forget what is cached of a Zarr store, because it is opened again and may have changed since."""
    _opened.pop(_root(path), None)


def remote_stamp(path: str) -> tuple[int, int] | None:
    """Return a size in bytes and a checksum, which show whether a remote file or Zarr store has changed.

    For a file they are its size and the checksum of its ETag, or of its modification time without one. For a store they
    are those of its first metadata document. None if it cannot be read.
    """
    url = url_of(path)
    try:
        if is_file(path):
            file = RemoteFile.open(url)
            return file.size, file.tag
        store = _store(path)
        store.forget_documents()
        content = _document(store, _root(path))
    except (UserError, FileNotFoundError):
        return None
    return len(content), google_crc32c.value(content)


def open_zarr_array(path: str, name: str) -> Any:
    """Return an array of a Zarr store in a folder, or at a URL or a short name of one. `name` is its path in the store.

    Raises:
        UserError: a remote store cannot be read.
        KeyError: a remote store has no such array.
        FileNotFoundError: a folder has no such array.
    """
    import zarr

    if is_remote(path):
        # The consolidated metadata of a group include those of all its arrays.
        return zarr.open_group(_store(path), mode="r")[_in_store(path, name)]
    return zarr.open_array(os.path.join(path, name), mode="r")


def remote_groups(path: str) -> list[str]:
    """Return the URLs of all groups in a remote Zarr store, sorted.

    The result is empty for the URL of a group, and for a store without consolidated metadata.

    Raises:
        UserError: the store cannot be read.
    """
    import zarr

    if GROUP in url_of(path):
        return []
    together = zarr.open_group(_store(path), mode="r").metadata.consolidated_metadata
    nodes = together.flattened_metadata if together else {}
    groups = [name for name, node in nodes.items() if name and type(node).__name__ == "GroupMetadata"]
    return [f"{path}{GROUP}{name}" for name in sorted(groups)]


def without_group(path: str) -> str:
    """Return the URL of the parent of the group that a URL names; for a group at the top, the URL of the store."""
    root, _, group = path.partition(GROUP)
    above = group.rpartition("/")[0]
    return f"{root}{GROUP}{above}" if above else root


def group_in(path: str) -> str:
    """Return the name of the group that the URL of a remote Zarr store names; empty for the root group."""
    return url_of(path).partition(GROUP)[2]


def read_part(path: str, key: str, first: int, length: int) -> bytes:
    """Read `length` bytes of the object `key` of a remote store, from `first` on or, if that is negative, from the end.

    Raises:
        UserError: they cannot be read, or the object has changed since it was last read.
    """
    wanted: Range = {"suffix": -first} if first < 0 else (first, first + length)
    content = _waited(f"{path}/{key}", _store(path).content(_in_store(path, key), wanted))
    if content is None:
        raise UserError(f"{path}/{key}: is not there any more (404)")
    return content[:length]


def has_object(path: str, key: str) -> bool:
    """Return whether a remote store has an object, such as a chunk.

    Raises:
        UserError: it cannot be reached.
    """
    return _waited(f"{path}/{key}", _store(path).exists(_in_store(path, key)))


def _root(path: str) -> str:
    """Return the URL of a Zarr store, without the name of a group in it."""
    return url_of(path).partition(GROUP)[0]


def _in_store(path: str, key: str) -> str:
    """Return the key of an object in the store, given its key in the group of `path`."""
    group = group_in(path)
    return f"{group}/{key}" if group else key


class RemoteFile:
    """A file at a URL that is read by ranges of bytes.

    Args:
        url: the URL.
        size: its size in bytes.
        tag: checksum of its ETag, or of its modification time if the server sends no ETag.
        head: its first bytes, up to 512.
    """

    def __init__(self, url: str, size: int, tag: int, head: bytes = b""):
        self.url, self.size, self.tag, self.head = url, size, tag, head
        self._client, self._key = _client_and_key(url)

    @classmethod
    def open(cls, url: str) -> RemoteFile:
        """Return a file, after fetching its first bytes.

        Raises:
            FileNotFoundError: it is not there.
            UserError: it cannot be reached, or access is refused.
        """
        head, meta = _waited(url, fetched(*_client_and_key(url), (0, _HEAD)))
        return cls(url, int(meta["size"]), _tag(meta), head)

    def ask(self, first: int, end: int) -> Future[bytes]:
        """Request the bytes from `first` to `end` (exclusive); `answer` waits for them."""
        return asyncio.run_coroutine_threadsafe(self._part(first, end), loop())

    def answer(self, asked: Future[bytes]) -> bytes:
        """Return the bytes that were requested by `ask`.

        Raises:
            UserError: they cannot be read, or the file has changed.
        """
        try:
            return _result(self.url, asked)
        except FileNotFoundError as error:
            raise UserError(f"{self.url}: is not there any more (404)") from error

    async def _part(self, first: int, end: int) -> bytes:
        """Read bytes, and raise a UserError if the file has changed since it was opened."""
        if first >= end:
            return b""
        content, meta = await fetched(self._client, self._key, (first, end))
        if (int(meta["size"]), _tag(meta)) != (self.size, self.tag):
            raise UserError(f"{self.url}: changed while it was read; wait until it is complete, and run again")
        return content


def _client_and_key(url: str) -> tuple[Any, str]:
    """Return obstore's store for the host or bucket of a URL, and the object's key in it."""
    parts = urlsplit(url)
    path = unquote(parts.path) if parts.scheme.startswith("http") else parts.path  # obstore encodes % again
    return _client(f"{parts.scheme}://{parts.netloc}"), path.lstrip("/")


def fetch_text(url: str) -> str | None:
    """Return a small text such as an index; None if it is not there, or access is refused (403).

    Raises:
        UserError: it cannot be reached.
    """
    try:
        return _waited(url, fetched(*_client_and_key(url)))[0].decode(errors="replace")
    except FileNotFoundError:
        return None
    except UserError as error:
        if "(403)" in str(error):  # object stores also give this answer for objects that are not there
            return None
        raise


async def fetched(client: Any, key: str, wanted: Range = None) -> tuple[bytes, Any]:
    """Return bytes of an object, and its metadata from the server (size, ETag, modification time).

    obstore itself repeats failed requests. Those that still fail with its GenericError, and those whose answer is
    incomplete, are repeated here.

    Args:
        client: obstore's store.
        key: key of the object.
        wanted: the bytes to read; None reads all.

    Raises:
        FileNotFoundError: the object is not there.
        obstore.exceptions.BaseError: it cannot be read.
    """
    obstore = _obstore()
    for wait in (*_WAITS, None):
        try:
            found = await obstore.get_async(client, key, options=None if wanted is None else {"range": wanted})
            content = bytes(await found.bytes_async())
            first, end = found.range
            if len(content) != end - first:
                raise obstore.exceptions.GenericError(f"{len(content)} of {end - first} bytes came")
            return content, found.meta
        except obstore.exceptions.GenericError:
            if wait is None:
                raise
        await asyncio.sleep(wait)
    raise AssertionError


def _tag(meta: Any) -> int:
    """Return the checksum of an object's ETag, or of its modification time if it has none."""
    return google_crc32c.value(str(meta["e_tag"] or meta["last_modified"]).encode())


@lru_cache(1)
def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests of this process. It runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


def _forget() -> None:
    """Forget connections and the thread of requests, which a forked process does not have."""
    loop.cache_clear()
    _client.cache_clear()
    _opened.clear()


os.register_at_fork(after_in_child=_forget)


def _waited(path: str, request: Coroutine[Any, Any, T]) -> T:
    """Return the answer to a request, or raise a UserError that names the path."""
    return _result(path, asyncio.run_coroutine_threadsafe(request, loop()))


def _result(path: str, asked: Future[T]) -> T:
    """Wait for the answer to a request. A missing object is a FileNotFoundError, other refusals are UserErrors."""
    exceptions = _obstore().exceptions
    try:
        return asked.result()
    except FileNotFoundError:
        raise
    except exceptions.BaseError as error:
        raise refusal(path, error) from error


def refusal(path: str, error: BaseException) -> UserError:
    """Return the UserError for a request that has failed."""
    if "(403)" in reason(error):
        return UserError(f"{path}: {reason(error)}")
    return UserError(f"{path}: cannot be reached ({reason(error)}); check the URL and the network")


def reason(error: BaseException) -> str:
    """Return the reason why a request has failed, in one line."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return "access is refused (403); only public objects can be read"
    if "PROPFIND" in text:  # the request by which WebDAV lists a folder
        return "it has no consolidated metadata, and the server lists no folders; run zarr.consolidate_metadata on it"
    # obstore appends a dump of its internal error, which says nothing to a user.
    text = text.partition("Debug source")[0].strip()
    return f"{kind}: {text[:300]}"


def _obstore() -> Any:
    """Return the package obstore; raise a UserError if it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UserError(f"URLs are read by obstore ({error}); pip install 'ensemble-ml[remote]'") from error
    return obstore


@lru_cache(64)
def _client(url: str) -> Any:
    """Return obstore's store of all objects below a URL, and make no request yet."""
    how: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=_SECONDS), "allow_http": url.startswith("http://")},
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_SECONDS)},
    }
    if url.startswith(("s3://", "gs://")):
        how["skip_signature"] = True
    if url.startswith("s3://"):
        how["region"] = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    return _obstore().store.from_url(url, **how)


def _store(path: str) -> Any:
    """Return the zarr store of a URL or of a group in it, and make no request yet."""
    url = _root(path)
    if url not in _opened:
        client = _client(url)  # raises a UserError first if obstore is not installed
        import zarr

        from ensemble_ml.store.remote_zarr import RemoteStore

        if zarr.config.get(_AT_ONCE) < _CONCURRENT:
            zarr.config.set({_AT_ONCE: _CONCURRENT})
        _opened.setdefault(url, RemoteStore(client, url))
    return _opened[url]


async def _together(store: Any, keys: Iterable[str]) -> list[Any]:
    """Fetch objects of a store at the same time, and return their bytes; for one that cannot be read, its error."""
    return await asyncio.gather(*map(store.content, keys), return_exceptions=True)


def _ask_coordinates(store: Any, path: str) -> None:
    """Request all coordinates of a single chunk at once: xarray would fetch them one after the other."""
    import zarr

    group: Any = zarr.open_group(store, mode="r")
    if group.metadata.consolidated_metadata is None:
        return
    if group_in(path):
        group = group[group_in(path)]
    for name, array in group.arrays():
        dims = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
        if list(dims) == [name] and array.nchunks == 1:
            key = _in_store(path, f"{name}/{array.metadata.encode_chunk_key((0,))}")
            asyncio.run_coroutine_threadsafe(store.content(key), loop())


def _document(store: Any, url: str) -> bytes:
    """Return the first metadata document of a remote Zarr store, or raise the reason why there is none."""
    # zarr would request these documents one after the other. So they are fetched together here, and kept.
    found = _waited(url, _together(store, (*_MARKS, ".zattrs")))
    refused: BaseException | None = None
    for content in found[: len(_MARKS)]:
        if isinstance(content, BaseException):
            if "(403)" not in str(content):
                raise content
            refused = content  # object stores also give this answer for objects that are not there
        elif content is not None:
            return content
    raise refused or UserError(f"{url}: neither a Zarr store nor a file of GRIB or NetCDF is there (404)")
