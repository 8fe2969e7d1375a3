"""Mean, spread and moments of an ensemble in one pass over its packed values, a block of rows at a time.

Every point is decoded to float32 (the values that readers of the store will see), and summed in float64 in the order of
the members: so the result is that of `ensemble_moments` bit for bit, whatever the blocks. A block is small enough for
the second-level cache, so that main memory is read once.

Axes: M member, Z level, R rows of a block, X longitude.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble_ml.store.statistics import Moments, merge_all, stack

_POINTS = 12_000  # points of a block summed at a time: ten members of them in float64 fill 1 MB
_scratch = threading.local()


@dataclass(frozen=True, eq=False)
class Fused:
    """Of one block of rows: mean and spread (Z, R, X) float32, NaN where fewer than two members are; moments (Z,)."""

    mean: np.ndarray
    spread: np.ndarray
    moments: Moments


@dataclass(frozen=True, eq=False)
class Members:
    """One member's part of a block: `values` (Z, R, X) uint16 or float32, factors (Z,), `mask` (Z, R, X) or None.

    `present` (Z,), `exact` (Z,): whether `packing.exact_in_float32` holds, and `extremes` (2, Z) float32: the smallest
    and the largest value, where integers without a mask have told them already.
    """

    values: np.ndarray
    reference: np.ndarray
    scale: np.ndarray
    decimal: np.ndarray
    present: np.ndarray
    exact: np.ndarray
    extremes: np.ndarray | None
    mask: np.ndarray | None


def fuse(members: Sequence[Members]) -> Fused:
    """Mean, spread (ddof = 1) and moments of the members of one block of rows.

    Mean and spread are NaN where any member that is there has no value; moments count every value that is there.
    """
    levels, rows, columns = members[0].values.shape
    mean, spread = (np.full((levels, rows, columns), np.nan, np.float32) for _ in range(2))
    step = max(1, _POINTS // columns)
    moments = []
    for level in range(levels):
        there = [member for member in members if member.present[level]]
        ends = _extremes(there, level)
        pieces = []
        for first in range(0, rows if there else 0, step):
            part = slice(first, first + step)
            values = _decoded(there, level, part)
            pieces.append(_piece(values, ends, mean[level, part].reshape(-1), spread[level, part].reshape(-1)))
        moments.append(merge_all(pieces, ()))
    return Fused(mean, spread, stack(moments))


def _buffer(name: str, shape: tuple[int, int], dtype: type) -> np.ndarray:
    """An array of this thread that is used again: fresh ones cost a page fault every 4 KB."""
    held = getattr(_scratch, name, None)
    size = shape[0] * shape[1]
    if held is None or held.size < size:
        held = np.empty(size, dtype)
        setattr(_scratch, name, held)
    return held[:size].reshape(shape)


def _extremes(members: Sequence[Members], level: int) -> tuple[float, float] | None:
    """Smallest and largest value of all members at one level; None where only the values can tell."""
    known = [member.extremes[:, level] for member in members if member.extremes is not None]
    if len(known) < len(members) or not known:
        return None
    return min(float(low) for low, _ in known), max(float(high) for _, high in known)


def _decoded(members: Sequence[Members], level: int, rows: slice) -> np.ndarray:
    """Values of one level (M, points) float32, NaN where masked."""
    points = members[0].values[level, rows].size
    out = _buffer("decoded", (len(members), points), np.float32)
    for place, member in zip(out, members, strict=True):
        codes = member.values[level, rows].reshape(-1)
        if codes.dtype == np.float32:
            place[...] = codes
            continue
        reference, scale, decimal = member.reference[level], member.scale[level], member.decimal[level]
        if member.exact[level]:
            place[...] = codes
            place *= np.float32(scale)
            place += np.float32(reference)
        else:
            wide = codes.astype(np.float64)
            wide *= scale
            wide += reference
            wide *= decimal
            place[...] = wide
        if member.mask is not None:
            place[member.mask[level, rows].reshape(-1)] = np.nan
    return out


def _piece(values: np.ndarray, ends: tuple[float, float] | None, mean: np.ndarray, spread: np.ndarray) -> Moments:
    """Fill `mean` and `spread` (points,) where there are two members, and return the moments of all `values`."""
    count = len(values)
    wide = _buffer("wide", values.shape, np.float64)
    wide[...] = values
    centre = np.add.reduce(wide, 0)
    centre /= count
    if np.isnan(centre.sum()):
        moments = _of_values(values)
        wide -= centre
        np.multiply(wide, wide, out=wide)
        squares = np.add.reduce(wide, 0)
    else:
        low, high = ends or (values.min(), values.max())
        wide -= centre
        np.multiply(wide, wide, out=wide)
        squares = np.add.reduce(wide, 0)
        middle = centre.mean()
        apart = centre - middle
        m2 = squares.sum() + count * float((apart * apart).sum())
        moments = _moments(float(values.size), middle, m2, low, high)
    if count > 1:
        mean[...] = centre
        squares /= count - 1
        np.sqrt(squares, out=squares)
        spread[...] = squares
    return moments


def _of_values(values: np.ndarray) -> Moments:
    there = values[np.isfinite(values)].astype(np.float64)
    if not len(there):
        return Moments.nothing(())
    middle = there.mean()
    return _moments(float(len(there)), middle, ((there - middle) ** 2).sum(), there.min(), there.max())


def _moments(*numbers: float) -> Moments:
    return Moments(*(np.asarray(number, np.float64) for number in numbers))
