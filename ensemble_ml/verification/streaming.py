"""Score a raw ensemble in one pass over its fields, block by block, for archives far larger than memory.

One block of points stays in the processor's cache while everything is computed from it: fair and ordinary CRPS, squared
error, variance and ranks. Sums are float64. The terms are computed from differences to the truth, in float32 for
members in float32 and in float64 for all others. Float32 is precise enough for these differences.

This file is for users of the library. `evaluate` does not use it, because it needs more statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_count, check_weights
from ensemble_ml.verification.members import pair_sum, sort_members

_BLOCK = 8192  # points of a block: ten members in float32 fill a third of a megabyte


@dataclass(eq=False)
class EnsembleSums:
    """A set of weighted sums over points, to which the sums of other points can be added.

    Scores are in the units of the members, and squared errors and variances in squared units. Scores without weight are
    NaN.

    Attributes:
        members: Number of members M.
        weight: Sum of weights.
        fair: Sum of the fair CRPS.
        ordinary: Sum of the ordinary CRPS.
        squared_error: Sum of the squared error of the mean.
        variance: Sum of the variance (ddof = 1).
        error: Sum of the ensemble mean less the truth.
        ranks: (M + 1,) sum of weights at each rank of the truth.
        points: Number of all points, including those left out.
        left_out: Number of points where a member or the truth is missing.
    """

    members: int
    weight: float
    fair: float
    ordinary: float
    squared_error: float
    variance: float
    error: float
    ranks: np.ndarray
    points: int
    left_out: int

    @classmethod
    def zeros(cls, members: int) -> EnsembleSums:
        """Return empty sums for ensembles of some number of members."""
        return cls(members, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, np.zeros(members + 1), 0, 0)

    def __add__(self, other: EnsembleSums) -> EnsembleSums:
        """Return the sums over the points of both.

        Raises:
            ValueError: The numbers of members differ.
        """
        if self.members != other.members:
            raise ValueError(f"sums of {self.members} and of {other.members} members cannot be added")
        mine, theirs = vars(self), vars(other)
        return EnsembleSums(self.members, **{k: mine[k] + theirs[k] for k in mine if k != "members"})

    @property
    def crps_fair(self) -> float:
        """Return the mean fair CRPS; NaN for one member."""
        return self.fair / self.weight if self.weight and self.members > 1 else float("nan")

    @property
    def crps(self) -> float:
        """Return the mean ordinary CRPS of the members."""
        return self.ordinary / self.weight if self.weight else float("nan")

    @property
    def rmse(self) -> float:
        """Return the root mean squared error of the ensemble mean."""
        return float(np.sqrt(self.squared_error / self.weight)) if self.weight else float("nan")

    @property
    def bias(self) -> float:
        """Return the mean of the ensemble mean less the truth."""
        return self.error / self.weight if self.weight else float("nan")

    @property
    def spread_skill(self) -> float:
        """Return sqrt((M + 1) / M * mean variance) / RMSE; NaN for one member, or if the RMSE is zero.

        Source: Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1.
        """
        ratio = (1 + 1 / self.members) * self.variance / self.squared_error if self.squared_error else float("nan")
        return float(np.sqrt(ratio)) if self.members > 1 else float("nan")

    @property
    def rank_histogram(self) -> np.ndarray:
        """Return the share of the weight at each rank of the truth, (M + 1,) from 0 (below all members) to M."""
        return self.ranks / self.weight if self.weight else np.full_like(self.ranks, np.nan)


def score_members(
    members: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None, rng: np.random.Generator | None = None
) -> EnsembleSums:
    """Sum the scores of one or more fields. Points where a member or the truth is missing are left out and counted.

    Args:
        members: (M, ...). Float32 is computed in float32, all other types in float64.
        y: (...) truth.
        weights: Weights that broadcast to `y`, such as cell areas (Y, X); None weights all points equally.
        rng: Generator that breaks ties of members with the truth (dry points); None takes seed 0.

    Raises:
        UserError: Truth or weights do not fit the points of the members, weights are negative, or there is no member.
    """
    m, shape = len(members), np.shape(members)[1:]
    if np.shape(y) != shape:
        raise UserError(f"y of shape {np.shape(y)}, members of {m} fields of {shape}: give the truth at their points")
    weights = np.ones(()) if weights is None else weights
    try:
        w = np.broadcast_to(weights, shape).reshape(-1)
    except ValueError:
        raise UserError(f"weights of shape {np.shape(weights)} do not broadcast to y of {shape}") from None
    check_weights(w)
    check_count("members", m, 1, "an ensemble has members")
    dtype = np.float32 if members.dtype == np.float32 else np.float64
    flat, truth = members.reshape(m, -1), np.asarray(y, dtype).reshape(-1)
    rng = rng or np.random.default_rng(0)
    total, buffers = EnsembleSums.zeros(m), _Buffers(m, dtype)
    for start in range(0, truth.size, _BLOCK):
        piece = slice(start, min(start + _BLOCK, truth.size))
        buffers.add(flat[:, piece], truth[piece], np.asarray(w[piece], np.float64), rng, total)
    return total


class _Buffers:
    """A set of buffers for one block, which the next block uses again."""

    def __init__(self, m: int, dtype: type):
        self.distance: np.ndarray = np.empty((m, _BLOCK), dtype)
        self.spare: np.ndarray = np.empty(_BLOCK, dtype)
        self.absolute: np.ndarray = np.empty(_BLOCK, dtype)
        self.below = np.empty(_BLOCK, bool)
        self.rank = np.empty(_BLOCK, np.uint16)

    def add(self, x: np.ndarray, y: np.ndarray, w: np.ndarray, rng: np.random.Generator, total: EnsembleSums) -> None:
        """Add the scores of a block of at most `_BLOCK` points: members (M, n), truth and float64 weights (n,)."""
        m, n = x.shape
        distance, spare, absolute = self.distance[:, :n], self.spare[:n], self.absolute[:n]
        # Most results go into the same buffers in every block, so that these stay in the processor's cache.
        below, rank = self.below[:n], self.rank[:n]
        np.subtract(x, y, out=distance)
        mean = distance.sum(0)
        mean /= m
        total.points += n
        # The mean of the distances is finite only if all members and the truth are. Other points get weight zero. Their
        # distances are set to zero too, because NaN times a zero weight would still be NaN.
        good = np.isfinite(mean)
        if not good.all():
            total.left_out += int(n - good.sum())
            w = np.where(good, w, 0.0)
            distance[:, ~good] = 0
            mean[~good] = 0
        absolute.fill(0)
        rank.fill(0)
        ties = False
        for row in distance:
            np.abs(row, out=spare)
            absolute += spare
            np.less(row, 0, out=below)
            rank += below
            ties = ties or bool(spare.min() == 0)
        # Random numbers are drawn only for blocks with ties; a point that is left out counts as one.
        if ties:
            equal = (distance == 0).sum(0)
            rank += np.floor(rng.random(n) * (equal + 1)).astype(np.uint16)
        variance = np.zeros(n, distance.dtype)
        for row in distance:
            np.subtract(row, mean, out=spare)
            np.multiply(spare, spare, out=spare)
            variance += spare
        pairs = pair_sum(sort_members(distance, spare))
        error = float(w @ absolute) / m
        spread = float(w @ pairs)
        total.weight += float(w.sum())
        total.ordinary += error - spread / (m * m)
        total.fair += error - spread / max(m * (m - 1), 1)
        total.error += float(w @ mean)
        total.squared_error += float(w @ (mean * mean))
        total.variance += float(w @ variance) / max(m - 1, 1)
        total.ranks += np.bincount(rank, w, m + 1)
