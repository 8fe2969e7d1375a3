"""Call the compiled loops of `native.c`, if the package was installed with a C compiler at hand.

Each function returns whether it did the work. Without the library, or for arrays of another type or memory layout, it
does nothing, and the caller computes the same bits with NumPy. ENSEMBLE_ML_NATIVE=0 disables the library.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("native.c")
_LIBRARY = Path(__file__).with_name("_native.so")


def _load() -> ctypes.CDLL | None:
    """Load the compiled library; return None if it is disabled, missing, or compiled from another source."""
    if os.environ.get("ENSEMBLE_ML_NATIVE") == "0":
        return None
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        source = zlib.crc32(_SOURCE.read_bytes())
    except OSError:
        return None
    library.eml_source.restype = ctypes.c_uint32
    if library.eml_source() != source:  # the source has changed since it was compiled
        return None
    address, size, step = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t
    library.eml_decode.argtypes = (address, step, address, step, size, size, *[address] * 3, *[ctypes.c_int] * 2)
    library.eml_fuse.argtypes = (address, step, step, size, size, size, *[address] * 10)
    library.eml_fuse_plain.argtypes = (address, step, step, size, size, size, *[address] * 7)
    library.eml_decode.restype = library.eml_fuse.restype = library.eml_fuse_plain.restype = None
    return library


_library = _load()

LANES, TILE, SUMS = 256, 128, 5  # as in `native.c`


def available() -> bool:
    """Return whether the compiled library is in use."""
    return _library is not None


def decode(codes: np.ndarray, factors: Sequence[np.ndarray], exact: bool, out: np.ndarray) -> bool:
    """Decode packed integers, with one factor of each kind for each field.

    Args:
        codes: (Y, X) or (fields, Y, X) uint16.
        factors: Reference, scale and decimal (see `packing.PackedBlock`), one value for each field.
        exact: Whether `packing.exact_in_float32` holds.
        out: Float32 array of the same shape, which is filled.
    """
    if _library is None or not codes.size or codes.dtype != np.uint16 or codes.ndim > 3:
        return False
    if not (_rows_follow(codes) and _rows_follow(out)):
        return False
    # The loops take a step from field to field, so slices of larger arrays need no copy.
    apart = [array.strides[0] // array.itemsize if array.ndim == 3 else 0 for array in (codes, out)]
    fields = len(codes) if codes.ndim == 3 else 1
    held = [np.ascontiguousarray(factor, np.float64) for factor in factors]
    if any(factor.size != fields for factor in held):
        return False
    points = codes.shape[-2] * codes.shape[-1]
    addresses = [factor.ctypes.data for factor in held]
    _library.eml_decode(codes.ctypes.data, apart[0], out.ctypes.data, apart[1], fields, points, *addresses, exact, 0)
    return True


def decode_field(codes: np.ndarray, factors: Sequence[float], exact: bool, out: np.ndarray) -> bool:
    """Decode one field of either byte order, without the cost of arrays for its factors.

    It is as `decode`, except that `factors` are three numbers. Arrays that are not contiguous are left to the caller.
    """
    if _library is None or codes.dtype.char != "H" or not out.flags.carray:
        return False
    if not (codes.flags.c_contiguous and codes.flags.aligned):
        return False
    numbers = [ctypes.byref(ctypes.c_double(factor)) for factor in factors]
    swapped = not codes.dtype.isnative
    _library.eml_decode(codes.ctypes.data, 0, out.ctypes.data, 0, 1, codes.size, *numbers, exact, swapped)
    return True


def fuse(
    codes: np.ndarray, factors: list[np.ndarray], exact: np.ndarray, mean: np.ndarray, spread: np.ndarray,
    sums: np.ndarray, ends: np.ndarray,
) -> bool:  # fmt: skip
    """Compute mean and spread (ddof = 1) over members without absent fields or masked points.

    Args:
        codes: (M, Z, R, X) uint16.
        factors: Reference, scale and decimal, (M, Z).
        exact: (Z,) whether `packing.exact_in_float32` holds for the members of each level.
        mean: (Z, R * X) float32, which is filled.
        spread: (Z, R * X) float32, which is filled.
        sums: (Z, SUMS) float64, which is filled as in `ensemble_ml.store.fuse`.
        ends: (Z, 4) float32, which is filled as in `ensemble_ml.store.fuse`.
    """
    if _library is None or not _fusible(codes, np.uint16):
        return False
    held = [np.ascontiguousarray(factor, np.float64) for factor in factors]
    held += [np.ascontiguousarray(exact, np.uint8), mean, spread, sums, ends, *_work_memory(len(codes))]
    _library.eml_fuse(*_extent(codes), *(array.ctypes.data for array in held))
    return True


def fuse_plain(
    values: np.ndarray, mean: np.ndarray, spread: np.ndarray, sums: np.ndarray, ends: np.ndarray, extremes: np.ndarray
) -> bool:
    """Do the work of `fuse` for float32 `values` (M, Z, R, X).

    The results of a level are valid only if its `sums` are finite. They are not if a value is NaN or infinite.
    `extremes` (Z, 2) float32 is filled with the smallest and largest value of all members, the rest as by `fuse`.
    """
    if _library is None or not _fusible(values, np.float32):
        return False
    held = [mean, spread, sums, ends, extremes, *_work_memory(len(values))]
    _library.eml_fuse_plain(*_extent(values), *(array.ctypes.data for array in held))
    return True


def _fusible(fields: np.ndarray, dtype: type) -> bool:
    """Return whether the loops can read these fields (M, Z, R, X)."""
    return fields.dtype == dtype and len(fields) > 1 and fields.size > 0 and _rows_follow(fields)


def _work_memory(members: int) -> list[np.ndarray]:
    """Return the working memory of the loops."""
    return [np.empty(2 * members * TILE, np.float32), np.empty(SUMS * LANES)]


def _extent(fields: np.ndarray) -> tuple[int, ...]:
    """Return address, steps between members and levels, and numbers of members, levels and points."""
    steps = (step // fields.itemsize for step in fields.strides[:2])
    return fields.ctypes.data, *steps, *fields.shape[:2], fields.shape[2] * fields.shape[3]


def _rows_follow(array: np.ndarray) -> bool:
    """Return whether the points of each field (Y, X) are contiguous, and all strides are whole elements."""
    size = array.itemsize
    together = array.strides[-2:] == (array.shape[-1] * size, size)
    return together and not any(step % size for step in (array.ctypes.data, *array.strides))
