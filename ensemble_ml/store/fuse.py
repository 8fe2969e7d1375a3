"""Compute mean, spread and moments of an ensemble in one pass over its packed values, a block of rows at a time.

Every point is decoded to float32, the value that readers of the store will see. The first member is subtracted first:
sums of large values would lose precision. Differences and their squares are summed pairwise. With M members x and the
first one x1:

    d = x - x1
    m = x1 + sum d / M
    s = sqrt((sum d^2 - (sum d)^2 / M) / (M - 1))

Largest errors against float64: of the mean, one unit in the last place of float32 plus 2^-21 of the range of the
members; of the spread, a relative error of 1e-6 for ten members (M (M + 1) 2^-24 where the first member is an outlier).
A 16-bit packing step of a field is many times larger.

Mean and spread are computed point by point in the order of the members, so they do not depend on how a field is cut
into blocks. The moments of the members follow from mean m and spread s:

    m2 = (M - 1) sum s^2 + M sum (m - mean of m)^2

Axes: M member, Z level, R rows of a block, X longitude.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from ensemble_ml.store import native
from ensemble_ml.store.statistics import Moments, moments_of

_local = threading.local()


@dataclass(frozen=True, eq=False)
class Fused:
    """The results for one block of rows.

    Mean and spread lie in memory that the same thread overwrites with its next block.

    Attributes:
        mean: (Z, R, X) float32, NaN where fewer than two members are there, or one of them has no value.
        spread: (Z, R, X) float32, ddof = 1, NaN as the mean.
        moments: Moments of all members' values, (Z,).
        of_mean: Moments of the mean as a field, (Z,).
        of_spread: Moments of the spread as a field, (Z,).
    """

    mean: np.ndarray
    spread: np.ndarray
    moments: Moments
    of_mean: Moments
    of_spread: Moments


@dataclass(frozen=True, eq=False)
class Members:
    """A block of rows of all members.

    Attributes:
        values: (M, Z, R, X) uint16 or float32.
        reference: (M, Z) float64, as in `PackedBlock`.
        scale: (M, Z) float64.
        decimal: (M, Z) float64.
        present: (M, Z) bool, whether each field is there.
        exact: (M, Z) bool, whether `packing.exact_fields` holds.
        extremes: (2, M, Z) float32 smallest and largest value, if they are known from the packed integers; else None.
        mask: (M, Z, R, X) bool, True where a point has no value; None where every point has one.
    """

    values: np.ndarray
    reference: np.ndarray
    scale: np.ndarray
    decimal: np.ndarray
    present: np.ndarray
    exact: np.ndarray
    extremes: np.ndarray | None = None
    mask: np.ndarray | None = None

    @classmethod
    def plain(cls, values: np.ndarray, present: np.ndarray) -> Members:
        """Wrap float32 values (M, Z, R, X), NaN where a point has no value, which need no decoding."""
        none, one = np.zeros(present.shape), np.ones(present.shape)
        return cls(values, none, one, one, present, present)


def fuse(members: Members) -> Fused:
    """Compute mean, spread (ddof = 1) and moments of the members of one block of rows.

    Mean and spread are NaN where any member that is there has no value, and at levels where fewer than two members are
    there. The moments count every value that is there.
    """
    levels, rows, columns = members.values.shape[1:]
    shape = levels, rows * columns
    mean, spread = scratch("mean", shape, np.float32), scratch("spread", shape, np.float32)
    sums, ends = np.zeros((levels, native.SUMS)), np.zeros((levels, 4), np.float32)
    done, extremes = _compiled(members, mean, spread, sums, ends)
    count = members.present.sum(0)
    found: list[tuple[float, float] | Moments] = []  # extremes of a level, or all its moments where points are missing
    for level in range(levels):
        if done[level]:
            found.append((float(extremes[level, 0]), float(extremes[level, 1])))
            continue
        values = _decoded(members, level)
        found.append(_extremes(members, level, values))
        if count[level]:
            lost = _mean_and_spread(values, mean[level], spread[level])
            sums[level], ends[level] = _sums(mean[level], spread[level], lost)
    # A spread needs two members, and the mean is left out with it.
    few = count < 2
    mean[few], spread[few] = np.nan, np.nan
    holes = np.array([isinstance(one, Moments) for one in found]) | few
    both = (
        _field(mean, sums[:, 0:2], ends[:, 0:2], holes),
        _field(spread, sums[:, 2:4], ends[:, 2:4], holes),
    )
    moments = [
        one
        if isinstance(one, Moments)
        else _joint(int(count[level]), one, both[0].at(level), both[1].at(level), sums[level, 4] / mean.shape[1])
        for level, one in enumerate(found)
    ]
    columns_of = zip(*(one.arrays().values() for one in moments), strict=True)
    whole = levels, rows, columns
    return Fused(mean.reshape(whole), spread.reshape(whole), Moments(*map(np.array, columns_of)), *both)


def scratch(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return an array that this thread reuses, because new memory costs a page fault every 4 KB.

    Args:
        name: Name of the array; arrays in use at the same time must have different names.
        shape: Shape of the result, whose contents are undefined.
        dtype: Type of the result.
    """
    held, size = getattr(_local, name, None), int(np.prod(shape))
    if held is None or held.size < size or held.dtype != dtype:
        held = np.empty(size, dtype)
        setattr(_local, name, held)
    return held[:size].reshape(shape)


def _decoded(members: Members, level: int) -> np.ndarray:
    """Decode one level of the members that are there, (M, points) float32, NaN where masked."""
    there = members.present[:, level]
    chosen = slice(None) if there.all() else np.flatnonzero(there)
    codes = members.values[:, level].reshape(len(there), -1)[chosen]
    out = scratch("decoded", codes.shape, np.float32)
    np.copyto(out, codes)  # a separate cast is faster than one inside the product
    if codes.dtype == np.float32:
        return out
    reference, scale, decimal = (
        part[:, level][chosen][:, None] for part in (members.reference, members.scale, members.decimal)
    )
    # Where float32 arithmetic gives the same bits it is used, because it is faster.
    if members.exact[:, level][chosen].all():
        out *= scale.astype(np.float32)
        out += reference.astype(np.float32)
    else:
        for place, code, low, step, power in zip(out, codes, reference, scale, decimal, strict=True):
            wide = np.multiply(code, step, dtype=np.float64)
            wide += low
            wide *= power
            place[...] = wide
    if members.mask is not None:
        out[members.mask[:, level].reshape(len(there), -1)[chosen]] = np.nan
    return out


def _compiled(
    members: Members, mean: np.ndarray, spread: np.ndarray, sums: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Do the work of `_mean_and_spread` and `_sums` in compiled code, for levels where every member has all points.

    No level is done if any field of the block is absent or any point is masked, or if `native` cannot do the work.

    Returns:
        Which levels are done, (Z,) bool, and the smallest and largest value of their members, (Z, 2).
    """
    levels = len(mean)
    done, extremes = np.zeros(levels, bool), np.empty((levels, 2), np.float32)
    if members.mask is not None or not members.present.all():
        return done, extremes
    if members.values.dtype == np.float32:
        if native.fuse_plain(members.values, mean, spread, sums, ends, extremes):
            done = np.isfinite(sums).all(1)  # a sum is not finite where a point has no value
    elif members.extremes is not None:
        factors = [members.reference, members.scale, members.decimal]
        done[:] = native.fuse(members.values, factors, np.asarray(members.exact.all(0)), mean, spread, sums, ends)
        extremes = np.stack([members.extremes[0].min(0), members.extremes[1].max(0)], axis=1)
    return done, extremes


def _extremes(members: Members, level: int, values: np.ndarray) -> tuple[float, float] | Moments:
    """Return the smallest and the largest value of a level.

    Where points are missing, or fewer than two members are there, it returns all moments of the level.
    """
    if members.extremes is not None and len(values) > 1:
        there = members.extremes[:, members.present[:, level], level]
        return float(there[0].min()), float(there[1].max())
    if len(values) > 1 and not np.isnan(low := values.min()):
        return float(low), float(values.max())
    return moments_of(values[None]).at(0)


def _mean_and_spread(values: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Compute mean and spread of `values` (M, points), which are overwritten.

    Returns:
        The part of the mean that rounding to float32 took away, (points,), in the memory of the first member.
    """
    share = np.float32(1 / len(values))
    freedom = np.float32(1 / max(len(values) - 1, 1))
    first, apart, square = values[0], values[1:], scratch("square", values[1:].shape, np.float32)
    total = scratch("total", first.shape, np.float32)
    apart -= first
    np.multiply(apart, apart, out=square)
    _pairs(apart, total)
    _pairs(square, spread)
    np.multiply(total, total, out=mean)
    mean *= share
    spread -= mean  # s^2 = (sum d^2 - (sum d)^2 / M) / (M - 1)
    # Rounding may leave a tiny negative variance where all members agree.
    np.maximum(spread, 0, out=spread)
    spread *= freedom
    np.sqrt(spread, out=spread)
    total *= share
    np.add(first, total, out=mean)
    first -= mean
    first += total
    return first


def _sums(mean: np.ndarray, spread: np.ndarray, lost: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return five sums and four extremes of a level, from its mean, spread and `lost` (points,).

    The sums are those of the mean's differences from its first point and of their squares, the same two of the spread,
    and that of `lost`, the rounding of the mean. A single value of `lost` is negligible, but its average over many
    points is not. The extremes are smallest and largest mean, then smallest and largest spread.

    Every 256th point is added to the same partial sum, and the partial sums are added by halves. So the order of
    additions does not depend on the processor.
    """
    wide = [field - np.float64(field[0]) for field in (mean, spread)]
    terms = [term for field in wide for term in (field, field * field)]
    return [_in_lanes(term) for term in (*terms, lost)], [end() for f in (mean, spread) for end in (f.min, f.max)]


def _in_lanes(values: np.ndarray) -> np.ndarray:
    """Return the sum of `values` (points,) in float64, in the order that `_sums` describes."""
    lanes, whole = np.zeros(native.LANES), len(values) // native.LANES * native.LANES
    values[:whole].reshape(-1, native.LANES).sum(0, np.float64, lanes)
    lanes[: len(values) - whole] += values[whole:]
    # Adding halves gives the same order of additions as the compiled code.
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def _pairs(rows: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of `rows` (N, points) into `out`, adding halves pairwise; `rows` is overwritten.

    This takes few calls of NumPy, each of which is long enough to let other threads run.
    """
    if not len(rows):
        out[...] = 0
        return
    count = len(rows)
    while count > 2:
        half = count // 2
        rows[:half] += rows[count - half : count]
        count -= half
    if count == 2:
        np.add(rows[0], rows[1], out=out)
    else:
        out[...] = rows[0]


def _field(values: np.ndarray, sums: np.ndarray, ends: np.ndarray, holes: np.ndarray) -> Moments:
    """Return the moments (Z,) of the mean or the spread (Z, points) from its `sums` and `ends` (Z, 2) by `_sums`.

    Levels marked in `holes` lack points, so their moments are computed directly.
    """
    count = np.full(len(values), float(values.shape[1]))
    away, squares = sums.T
    found = Moments(
        count,
        values[:, 0] + away / count,
        np.maximum(squares - away * away / count, 0),
        *_unsigned(ends.T.astype(np.float64)),
    )
    for level in np.flatnonzero(holes):
        for name, number in moments_of(values[None, level]).at(0).arrays().items():
            getattr(found, name)[level] = number
    return found


def _unsigned(ends: np.ndarray) -> np.ndarray:
    """Turn -0.0 into 0.0 in extremes, because which of the two a comparison returns depends on the order."""
    return ends + 0.0


def _joint(members: int, extremes: tuple[float, float], mean: Moments, spread: Moments, rounded: float) -> Moments:
    """Return the moments of all members of a level from those of its mean and spread.

    `rounded` is the part of the mean that rounding took away, averaged over points.
    """
    squares = spread.m2 + spread.count * spread.mean**2
    return Moments(
        members * mean.count,
        mean.mean + rounded,
        (members - 1) * squares + members * mean.m2,
        *_unsigned(np.array(extremes)),
    )
