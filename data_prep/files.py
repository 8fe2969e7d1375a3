"""Find the files of an archive, recognise the format of each by its content and not by its name, and open its reader.

NetCDF's library reads zeros beyond the end of a truncated classic file, so the length that it must have is read from
its header. The grammar of the header is that of "The NetCDF Classic Format Specification" (Unidata): CDF-1, CDF-2
(offsets of 64 bits) and CDF-5 (also counts of 64 bits). NetCDF-4 files are HDF5, which notices truncation itself.
"""

from __future__ import annotations

import glob
import math
import os
import re
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from data_prep.file_index import FileIndex
from data_prep.grib import GribFile
from data_prep.identity import Overrides
from data_prep.notices import notice_log
from data_prep.records import IS_STATIC, KEYS, Reader
from data_prep.selecting import ALL, Wanted
from data_prep.xarray_files import XarrayFile
from data_prep.zarr_chunks import groups_of, is_zarr, is_zarr_store
from ensemble_ml.config import as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import is_store
from ensemble_ml.store.archive_names import names_several, urls_of_name
from ensemble_ml.store.folder import is_building
from ensemble_ml.store.remote import is_grib, is_remote, reopen, url_of
from ensemble_ml.wording import shortened

log = notice_log(__name__)

FORECAST, TRUTH = "forecast", "truth"
_SUFFIXES = (".grib", ".grb", ".grib1", ".grib2", ".grb1", ".grb2", ".nc", ".nc4", ".netcdf", ".zarr")
# The sub-folder or file of a simulated archive (one with archive.json) that is read in each role.
_EMBEDDED = {FORECAST: "ensemble", TRUTH: "truth", "grid": "ensemble", "static": "static.grib"}
_AT_A_TIME = 8  # files indexed at the same time
_HEAD = 512  # bytes from which a format is recognised; bulletins have some lines before their first message
_NETCDF = (b"CDF\x01", b"CDF\x02", b"CDF\x05", b"\x89HDF")  # first bytes of NetCDF files
# In a classic NetCDF file: octets of a value for each type, and the counts of records that stand for an unknown number.
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}
_STREAMING = {4: 2**32 - 1, 8: 2**64 - 1}
# Three bytes later the edition has to follow, because the word alone may occur in any text.
_GRIB = re.compile(rb"GRIB...[\x01\x02]", re.DOTALL)
_COMPRESSED = {  # first bytes of compressed files -> the program that unpacks them
    b"BZh": "bunzip2", b"\x1f\x8b": "gunzip", b"\xfd7zXZ\0": "unxz", b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4", b"PK\x03\x04": "unzip", b"\x1f\x9d": "uncompress", b"7z\xbc\xaf": "7z x",
    b"Rar!": "unrar x", b"\x5d\0\0": "unlzma",
}  # fmt: skip
_TAR = slice(257, 262)  # position of "ustar" in a tar archive


def archive_files(paths: Any, *, role: str = FORECAST, wanted: Wanted = ALL) -> list[Any]:
    """Return the data files of an archive, sorted and each once, and open Datasets after them.

    A folder with `archive.json` (made by `ensemble-ml simulate`) stands for its part in the given role. Tensor stores
    in a folder, or among the matches of a glob, are no part of an archive, because an output may lie inside its input.

    Args:
        paths: a file, folder, glob, URL, short name of a public archive, open Dataset or DataTree, or a list of them.
        role: "forecast", "truth", "grid" or "static".
        wanted: the fields that are asked for; of an archive with a short name, only the files with these are taken.

    Raises:
        UserError: no path is given, a path does not exist or cannot be read, a folder holds no archive file, or a path
            of an archive is that of a tensor store.
    """
    found: dict[str, None] = {}
    given = as_list(paths)
    datasets = [part for one in given if is_dataset(one) for part in _datasets(one)]
    for path in (one for one in given if not is_dataset(one)):
        for name in _expand(path, role, wanted):
            found.setdefault(name)
    if not found and not datasets:
        raise UserError(f"{role} archive {paths!r}: no path given")
    return [*sorted(found), *datasets]


def _datasets(data: Any) -> list[Any]:
    """Return an open Dataset, or those of a DataTree that hold variables."""
    if not hasattr(data, "subtree"):
        return [data]
    return [node.to_dataset() for node in data.subtree if node.data_vars]


def _expand(path: str, role: str, wanted: Wanted) -> list[str]:
    """Return the files of one path: a file, a folder, a glob, a URL or a short name."""
    if is_remote(path):
        parts = {name: getattr(wanted, name) for name in ("variables", "levels", "leads", "dates")}
        found = urls_of_name(path, **parts) if names_several(path) else [url_of(path)]
        for url in found:
            reopen(url)
        return found
    if os.path.isdir(path) and not is_zarr(path):
        return _folder(Path(path), role)
    if os.path.exists(path):
        if role in (FORECAST, TRUTH) and is_store(Path(path)):  # static fields may be read from one
            raise UserError(f"{path}: is a tensor store, and no part of an archive; give it alone")
        return [path]
    matches = _without_stores(path, glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    if not matches:
        raise UserError(f"{path}: no such file or folder; give the {role} archive's path, a folder or a glob")
    return [name for match in matches for name in _expand(match, role, wanted)]


def _without_stores(where: str, paths: list[str]) -> list[str]:
    """Return `paths` without tensor stores and folders in which one is built; `where` is for the log."""
    own = [path for path in paths if os.path.isdir(path) and (is_store(Path(path)) or is_building(Path(path)))]
    if own:
        log.info("%s: %d tensor stores or unfinished ones in it are left out (first %s)", where, len(own), min(own))
    return [path for path in paths if path not in own]


def _folder(folder: Path, role: str) -> list[str]:
    """Return the data files in a folder and its sub-folders. Log what is left out.

    A file with one of `_SUFFIXES` is taken by its name, any other by its first bytes. Hidden files and folders are
    ignored.
    """
    if (folder / "archive.json").is_file():
        folder = folder / _EMBEDDED[role]
        if folder.is_file():
            return [str(folder)]
        if not folder.is_dir():
            raise UserError(f"{folder.parent}: archive.json stands there but no {folder.name}; simulate it anew")
    names: list[str] = []
    zarrs: list[str] = []
    packed: dict[str, str] = {}  # compressed files -> what unpacks them
    foreign: list[str] = []
    seen = {os.path.realpath(folder)}
    for root, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        paths = {name: os.path.join(root, name) for name in folders if not name.startswith(".")}
        whole = [name for name, path in paths.items() if is_zarr(path) or is_building(Path(path))]
        folders[:] = [name for name in paths if name not in whole]
        kept = []
        for name in sorted(folders, key=lambda name: os.path.islink(os.path.join(root, name))):
            place = os.path.realpath(os.path.join(root, name))
            # A link may lead back to a folder above, or to one that is read anyway.
            if place not in seen:
                kept.append(name)
            seen.add(place)
        folders[:] = kept
        zarrs += [paths[name] for name in whole]
        for path in (os.path.join(root, name) for name in sorted(files) if not name.startswith(".")):
            head = b"" if path.lower().endswith(_SUFFIXES) else _head(path)
            if unpack := _unpacked_by(head):
                packed[path] = unpack
            elif path.lower().endswith(_SUFFIXES) or _format(head):
                names.append(path)
            # An interrupted download leaves an empty file, or one that begins with zeros.
            elif not head.strip(b"\0"):
                log.warning("%s: is empty or begins with zeros, and is left out", path)
            else:
                foreign.append(path)
    if packed:
        text = "%s: %d compressed files are left out, unpack them first (%s): %s"
        log.warning(text, folder, len(packed), ", ".join(sorted(set(packed.values()))), shortened(sorted(packed)))
    if foreign:
        log.info("%s: %d files of other kinds are left out (first %s)", folder, len(foreign), min(foreign))
    names += _without_stores(str(folder), zarrs)
    if not names:
        raise UserError(f"{folder}: holds no archive file ({', '.join(_SUFFIXES)})")
    return names


def _refuse(error: OSError) -> NoReturn:
    """Raise a UserError for a file or folder that cannot be read."""
    raise UserError(
        f"{error.filename}: cannot be read ({error.strerror}), but may belong to the archive; check its permissions"
    )


def _format(head: bytes) -> str:
    """Return "NetCDF" or "GRIB" by the first bytes of a file, or an empty text if it is neither.

    It decides whether a file without a known suffix in a folder is taken, and in which format a local file is opened.
    """
    if head.startswith(_NETCDF):
        return "NetCDF"
    return "GRIB" if _GRIB.search(head) else ""


def _head(path: str) -> bytes:
    """Return the first bytes of a file in a folder. Refuse a file that cannot be read: its format is not known."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        _refuse(error)


def _unpacked_by(head: bytes) -> str:
    """Return the program that unpacks a file with these first bytes; an empty text if it is not compressed."""
    if head[_TAR] == b"ustar":
        return "tar xf"
    return next((program for magic, program in _COMPRESSED.items() if head.startswith(magic)), "")


def open_readers(files: Sequence[Any], index: FileIndex | None, overrides: Overrides, wanted: Wanted) -> list[Reader]:
    """Index all files, several at a time, and return their readers. Most of the time is waiting for the disk.

    Args:
        files: paths of files and Zarr folders, URLs, and open Datasets.
        index: keeps the tables of GRIB files; None keeps none.
        overrides: what the user states of variables.
        wanted: the fields that are asked for. Of a variable with very many fields in a NetCDF file, Zarr store or
            Dataset, only these are listed.

    Raises:
        UserError: a file is missing, damaged, or of an unknown format.
    """
    if len(files) == 1:
        return _open(files[0], index, overrides, wanted)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        waiting = [pool.submit(copy_context().run, _open, path, index, overrides, wanted) for path in files]
        try:
            return [reader for one in waiting for reader in one.result()]
        finally:
            pool.shutdown(cancel_futures=True)


def _open(path: Any, index: FileIndex | None, overrides: Overrides, wanted: Wanted) -> list[Reader]:
    """Return the reader of one file, and those of the groups in a Zarr store.

    If the root group has fields, another group is left out with a warning in three cases: it is on another grid, it
    repeats fields of the root, or (in a local store) it cannot be read.
    """
    reader = _open_reader(path, index, overrides, wanted)
    if not isinstance(reader, XarrayFile) or is_dataset(path) or not is_zarr_store(path):
        return [reader]
    readers, main = [reader], len(reader.records) > 0
    for group in groups_of(path):
        try:
            one = XarrayFile(group, overrides, wanted=wanted, stamp=reader.stamp if is_remote(path) else None)
        except UserError as error:
            if not main or is_remote(path):  # a failure of the server may be temporary
                raise
            log.warning("%s: left out, with all that is in it; give it alone if it is wanted", error)
            continue
        if main and (why := _differs(one, reader)):
            log.warning("%s: left out: %s; give it alone if it is wanted", group, why)
        elif one.names:
            readers.append(one)
    return list(readers)


def _differs(one: XarrayFile, other: XarrayFile) -> str:
    """Return why the fields of two groups do not go together; an empty text if they do."""
    assert other.grid is not None
    if one.grid is not None and not one.grid.same_as(other.grid):
        return f"its grid {one.grid.describe()} differs from the store's own, {other.grid.describe()}"
    if one.found.isdisjoint(other.found):
        return ""
    # Of static fields that are repeated, the first one is taken anyway.
    mine, theirs = (file.records[~IS_STATIC[file.records["field"]]][KEYS] for file in (one, other))
    twice = np.isin(mine, theirs)
    return f"{int(twice.sum())} of its fields exist outside of it, too" if twice.any() else ""


def _open_reader(path: Any, index: FileIndex | None, overrides: Overrides, wanted: Wanted) -> Reader:
    """Return the reader of one file, by its format."""
    if is_dataset(path):
        return XarrayFile.of_dataset(path, overrides, wanted)
    if is_remote(path):
        return GribFile(path, index) if is_grib(path) else XarrayFile(path, overrides, wanted=wanted)
    if os.path.isdir(path):
        if not is_zarr(path):
            raise UserError(f"{path}: a folder without Zarr metadata; give GRIB, NetCDF or Zarr")
        return XarrayFile(path, overrides, wanted=wanted)
    if index is not None and index.holds(path):
        # Only GRIB files have a table in the index, so the format is known without opening the file.
        return GribFile(path, index)
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if unpack := _unpacked_by(head):
        raise UserError(f"{path}: is compressed; unpack it first ({unpack})")
    if head.startswith(b"CDF"):
        check_whole(path)
    # A CDF version that is unknown here is named in the library's error.
    if _format(head) == "NetCDF" or head.startswith(b"CDF"):
        return XarrayFile(path, overrides, wanted=wanted)
    # GribFile refuses an empty file, with a message that names it.
    if _format(head) == "GRIB" or not head:
        return GribFile(path, index)
    raise UserError(f"{path}: neither GRIB nor NetCDF nor Zarr (it begins with {head[:8]!r})")


def check_whole(path: str) -> None:
    """Refuse a classic NetCDF file (it begins with CDF) that is shorter than its header states.

    Unknown versions of the format pass.

    Raises:
        UserError: the file is cut short, or its header is damaged.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            version = file.read(4)[3]
            if version not in (1, 2, 5):
                return
            needed = _Header(file, version, size).needed()
        except (struct.error, KeyError, IndexError) as error:
            raise UserError(f"{path}: its NetCDF header is damaged or cut short; fetch it again") from error
    if size < needed:
        raise UserError(f"{path}: is cut short: its header announces {needed} bytes, but it has {size}; fetch it again")


class _Header:
    """The part of a classic header that gives the file's length: dimensions, and shape, type and place of variables."""

    def __init__(self, file: BinaryIO, version: int, size: int):
        self._file, self._size = file, size
        self._count = 8 if version == 5 else 4  # octets of a count
        self._offset = 4 if version == 1 else 8
        self._records = self._number(self._count)
        self._dimensions = [self._dimension() for _ in range(self._elements())]
        self._skip_attributes()
        self._variables = [self._variable() for _ in range(self._elements())]

    def needed(self) -> int:
        """Return the number of octets up to the last value; the padding at the end may be missing."""
        fixed = [begin + size for begin, size, records in self._variables if not records]
        varying = [(begin, size) for begin, size, records in self._variables if records]
        records = 0 if self._records == _STREAMING[self._count] else self._records
        # A record holds each variable padded to four octets, except if the file has only one such variable.
        step = varying[0][1] if len(varying) == 1 else sum(-(-size // 4) * 4 for _, size in varying)
        last = [begin + (records - 1) * step + size for begin, size in varying] if records else []
        return max([*fixed, *last], default=0)

    def _dimension(self) -> int:
        """Return the length of the next dimension, 0 for the record dimension."""
        self._skip_text()
        return self._number(self._count)

    def _variable(self) -> tuple[int, int, bool]:
        """Return where a variable's values begin, their octets (those of one record), and whether it has records."""
        self._skip_text()
        extents = [self._dimensions[self._number(self._count)] for _ in range(self._number(self._count))]
        self._skip_attributes()
        width = _SIZES[self._number(4)]
        self._number(self._count)  # the stated size, which is not reliable because it may exceed 32 bits
        begin = self._number(self._offset)
        records = bool(extents) and extents[0] == 0
        return begin, width * math.prod(extents[1:] if records else extents), records

    def _elements(self) -> int:
        """Return the length of a list, after its tag; both are zero for an absent list."""
        self._number(4)
        return self._number(self._count)

    def _skip_attributes(self) -> None:
        """Skip a list of attributes."""
        for _ in range(self._elements()):
            self._skip_text()
            width = _SIZES[self._number(4)]
            self._skip(width * self._number(self._count))

    def _skip_text(self) -> None:
        """Skip a name with its length."""
        self._skip(self._number(self._count))

    def _skip(self, octets: int) -> None:
        """Skip a number of octets, padded to a multiple of four."""
        # A damaged length may exceed what `seek` takes. Beyond the end of the file, the next read fails as well.
        self._file.seek(min(-(-octets // 4) * 4, self._size), os.SEEK_CUR)

    def _number(self, octets: int) -> int:
        """Return the next big-endian number of four or eight octets."""
        return int(struct.unpack(">I" if octets == 4 else ">Q", self._file.read(octets))[0])
