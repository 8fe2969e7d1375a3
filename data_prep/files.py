"""Which files an archive consists of, and what kind each of them is: decided by content, not by name."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from data_prep.file_index import FileIndex
from data_prep.grib import GribFile
from data_prep.identity import NO_OVERRIDES, Overrides
from data_prep.netcdf_classic import check_whole
from data_prep.records import Reader
from data_prep.xarray_files import XarrayFile
from ensemble_ml.config import as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import is_store
from ensemble_ml.store.folder import is_building
from ensemble_ml.wording import shortened

log = logging.getLogger(__name__)

FORECAST, TRUTH = "forecast", "truth"
_SUFFIXES = (".grib", ".grb", ".grib1", ".grib2", ".grb1", ".grb2", ".nc", ".nc4", ".netcdf", ".zarr")
_EMBEDDED = {FORECAST: "ensemble", TRUTH: "truth", "grid": "ensemble", "static": "static.grib"}
"""What of an archive with archive.json stands for it in each role: a sub-folder, or a file."""
_AT_A_TIME = 8
_HEAD = 512  # bytes by which a file is known; bulletins have some lines before their first message
_NETCDF = (b"CDF\x01", b"CDF\x02", b"CDF\x05", b"\x89HDF")  # first letters of its files
_GRIB = re.compile(rb"GRIB...[\x01\x02]", re.DOTALL)  # a word alone may stand in any text; here its edition follows
_COMPRESSED = {  # first letters of files that are to be unpacked first -> what does it
    b"BZh": "bunzip2", b"\x1f\x8b": "gunzip", b"\xfd7zXZ\0": "unxz", b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4", b"PK\x03\x04": "unzip", b"\x1f\x9d": "uncompress", b"7z\xbc\xaf": "7z x",
    b"Rar!": "unrar x", b"\x5d\0\0": "unlzma",
}  # fmt: skip
_TAR = slice(257, 262)  # where an archive of tar says "ustar"
_ZARR_MARKS = ("zarr.json", ".zgroup", ".zmetadata")


def archive_files(paths: Any, *, role: str = FORECAST) -> list[Any]:
    """Expand files, folders, globs or a list of them into data files, sorted, each once, and open Datasets after them.

    A folder that holds `archive.json` (made by `ensemble-ml simulate`) stands for what it has in that role. Tensor
    stores in a folder, or that match a pattern, are no part of an archive: an output may lie inside its input.

    Raises:
        UserError: nothing is there.
    """
    found: dict[str, None] = {}
    given = as_list(paths)
    datasets = [one for one in given if is_dataset(one)]
    for path in (one for one in given if not is_dataset(one)):
        for name in _expand(path, role):
            found.setdefault(name)
    if not found and not datasets:
        raise UserError(f"{role} archive {paths!r}: no path given")
    return [*sorted(found), *datasets]


def _expand(path: str, role: str) -> list[str]:
    if os.path.isdir(path) and not is_zarr(path):
        return _folder(Path(path), role)
    if os.path.exists(path):
        return [path]
    matches = _without_stores(path, glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    if not matches:
        raise UserError(f"{path}: no such file or folder; give the {role} archive's path, a folder or a glob")
    return [name for match in matches for name in _expand(match, role)]


def _without_stores(where: str, paths: list[str]) -> list[str]:
    """`paths` that were found in `where` without tensor stores and folders in which they are built."""
    own = [path for path in paths if os.path.isdir(path) and (is_store(Path(path)) or is_building(Path(path)))]
    if own:
        log.info("%s: %d tensor stores or unfinished ones in it are left out (first %s)", where, len(own), min(own))
    return [path for path in paths if path not in own]


def _folder(folder: Path, role: str) -> list[str]:
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
        paths = {name: os.path.join(root, name) for name in folders}
        whole = [name for name, path in paths.items() if is_zarr(path) or is_building(Path(path))]
        folders[:] = [name for name in folders if name not in whole and not name.startswith(".")]
        kept = []
        for name in sorted(folders, key=lambda name: os.path.islink(os.path.join(root, name))):
            place = os.path.realpath(os.path.join(root, name))
            if place not in seen:  # links may lead round in a circle, or beside themselves
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
            elif not head.strip(b"\0"):  # what a download that was broken off leaves
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
    raise UserError(
        f"{error.filename}: cannot be read ({error.strerror}), and may hold files of the archive; check its permissions"
    )


def _format(head: bytes) -> str:
    """Return what a file is by its first bytes, whether it is named alone or met in a folder: NetCDF, GRIB, or neither
    (empty)."""
    if head.startswith(_NETCDF):
        return "NetCDF"
    return "GRIB" if _GRIB.search(head) else ""


def _head(path: str) -> bytes:
    """Return the first bytes of a file of a folder.

    Raises:
        UserError: it cannot be read, so that nobody knows what it is.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        _refuse(error)


def _unpacked_by(head: bytes) -> str:
    """Return the program that unpacks a file with these first bytes; empty where it is not compressed."""
    if head[_TAR] == b"ustar":
        return "tar xf"
    return next((program for magic, program in _COMPRESSED.items() if head.startswith(magic)), "")


def is_zarr(path: str | os.PathLike) -> bool:
    """Whether a folder is a Zarr group of either version."""
    return any(os.path.isfile(os.path.join(path, mark)) for mark in _ZARR_MARKS)


def open_readers(
    files: Sequence[Any], index: FileIndex | None = None, overrides: Overrides = NO_OVERRIDES
) -> list[Reader]:
    """Index each file, several at a time: an archive's headers lie far apart, and most of the time is waiting.

    Raises:
        UserError: a file is missing, damaged, or of a format that is not read.
    """
    if len(files) == 1:
        return [_open_reader(files[0], index, overrides)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        waiting = [pool.submit(_open_reader, path, index, overrides) for path in files]
        try:
            return [one.result() for one in waiting]
        finally:
            pool.shutdown(cancel_futures=True)


def _open_reader(path: Any, index: FileIndex | None, overrides: Overrides) -> Reader:
    if is_dataset(path):
        return XarrayFile.of_dataset(path, overrides)
    if os.path.isdir(path):
        if not is_zarr(path):
            raise UserError(f"{path}: a folder without Zarr metadata; give GRIB, NetCDF or Zarr")
        return XarrayFile(path, overrides)
    if index is not None and index.holds(path):
        return GribFile(path, index)  # only GRIB files have a table there: the file itself need not be looked at
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if unpack := _unpacked_by(head):
        raise UserError(f"{path}: is compressed; unpack it first ({unpack})")
    if head.startswith(b"CDF"):
        check_whole(path)
    if _format(head) == "NetCDF" or head.startswith(b"CDF"):  # the library says what an unknown version is
        return XarrayFile(path, overrides)
    if _format(head) == "GRIB" or not head:  # an empty file is refused by name there
        return GribFile(path, index)
    raise UserError(f"{path}: neither GRIB nor NetCDF nor Zarr (it begins with {head[:8]!r})")
