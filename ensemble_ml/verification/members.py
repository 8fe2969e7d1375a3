"""Scores of an ensemble as the sample that it is: CRPS, ranks, energy and variogram score.

Members come first (M, ...), missing ones are NaN and make the point NaN: leaving it out is the business of masks.
Sorting goes through a network of minima and maxima, which NumPy does for whole fields at once: O(M log^2 M) passes.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_ascending_bounds, check_count, check_uniform

_NETWORK_UP_TO = 64  # members; beyond, np.sort is as fast


@cache
def sorting_network(n: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort of n values: pairs (low, high) to be put in order, one after the other."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                pairs += [
                    (i + j, i + j + k) for i in range(min(k, n - j - k)) if (i + j) // (2 * p) == (i + j + k) // (2 * p)
                ]
            k //= 2
        p *= 2
    return tuple(pairs)


def sort_members(members: np.ndarray, spare: np.ndarray | None = None) -> list[np.ndarray]:
    """Members in ascending order at each point, as a list of fields; `members` is overwritten. NaN spreads to all.

    Args:
        members: (M, ...) float.
        spare: (...) scratch memory of the same type.
    """
    rows = [members[k] for k in range(len(members))]
    if len(rows) > _NETWORK_UP_TO:
        members.sort(axis=0)
        return rows
    free = np.empty_like(rows[0]) if spare is None else spare
    for low, high in sorting_network(len(rows)):
        np.minimum(rows[low], rows[high], out=free)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], free = free, rows[low]
    return rows


def pair_sum(ordered: list[np.ndarray]) -> np.ndarray:
    """Sum over pairs of |x_i - x_j|, from members in ascending order: sum of (M + 1 - 2 k) (x_(M+1-k) - x_(k))."""
    m = len(ordered)
    total = np.zeros_like(ordered[0])
    for k in range(m // 2):
        total += (m - 1 - 2 * k) * (ordered[m - 1 - k] - ordered[k])
    return total


def crps_members(members: np.ndarray, y: np.ndarray, *, fair: bool) -> np.ndarray:
    """CRPS of an ensemble.

    mean_i |x_i - y| - sum_{i<j} |x_i - x_j| / (M (M - 1)) if fair, / M^2 if not. The fair one estimates without bias
    the score of the law that the members come from; it holds for raw, exchangeable members alone. Ferro (2014),
    doi:10.1002/qj.2270, equation 3.

    Args:
        members: (M, ...); two or more if `fair`.
        y: (...) truth.
        fair: which of the two.

    Raises:
        UserError: a fair score of one member, or none at all.
    """
    m = len(members)
    _check_members(m, fair)
    distance = np.asarray(members, np.float64) - y  # large values lose no digits
    flat = np.ascontiguousarray(distance.reshape(m, -1))
    error = np.abs(flat).mean(0)
    score = error - pair_sum(sort_members(flat)) / (m * (m - 1) if fair else m * m)
    return score.reshape(distance.shape[1:])


def _check_members(count: int, fair: bool) -> None:
    if fair:
        check_count("members", count, 2, "a fair score compares them with each other")
    check_count("members", count, 1, "an ensemble has members")


def crps_members_weighted(
    members: np.ndarray, y: np.ndarray, *, fair: bool, lower: float = -np.inf, upper: float = np.inf
) -> np.ndarray:
    """Threshold-weighted CRPS: only what lies between `lower` and `upper` counts.

    That of members and truth brought to the interval. Allen et al. (2023), doi:10.1137/22M1532184, section 3.
    """
    check_ascending_bounds(lower, upper)
    return crps_members(np.clip(members, lower, upper), np.clip(y, lower, upper), fair=fair)


def rank_of_truth(members: np.ndarray, y: np.ndarray, uniform: np.ndarray | None = None) -> np.ndarray:
    """How many members lie below the truth: 0..M, int.

    Args:
        members: (M, ...).
        y: (...) truth.
        uniform: (...) in [0, 1): where members equal the truth (dry points), its rank is drawn among theirs. Without
            it, equal members count as above.
    """
    check_uniform(uniform)
    below = np.zeros(np.shape(y), np.int64)
    for member in members:
        below += member < y
    if uniform is None:
        return below
    equal = np.zeros(np.shape(y), np.int64)
    for member in members:
        equal += member == y
    return below + np.floor(np.asarray(uniform) * (equal + 1)).astype(np.int64)


def energy_score(members: np.ndarray, y: np.ndarray, *, fair: bool = False) -> np.ndarray:
    """Energy score over the second axis: mean |X - y| - mean |X - X'| / 2 with Euclidean norms.

    Gneiting & Raftery (2007), doi:10.1198/016214506000001437, equation 22. Bring the variables to one scale first.

    Args:
        members: (M, V, ...).
        y: (V, ...) truth.
        fair: divide the sum over pairs by M (M - 1) instead of M^2.
    """
    m = len(members)
    _check_members(m, fair)
    norm = lambda a: np.sqrt((a * a).sum(0))  # noqa: E731
    error = sum(norm(np.asarray(member, np.float64) - y) for member in members) / m
    pairs = np.zeros(np.broadcast_shapes(np.shape(members)[2:], np.shape(y)[1:]))
    for i in range(m):
        for j in range(i):
            pairs += norm(np.asarray(members[i], np.float64) - members[j])
    return error - pairs / (m * (m - 1) if fair else m * m)


def variogram_score(members: np.ndarray, y: np.ndarray, order: float = 0.5) -> np.ndarray:
    """Variogram score over the second axis, all pairs (i, j) counting the same, each pair twice.

    sum_ij (|y_i - y_j|^p - mean_m |x_mi - x_mj|^p)^2. Scheuerer & Hamill (2015), doi:10.1175/MWR-D-14-00269.1.

    Args:
        members: (M, V, ...).
        y: (V, ...) truth.
        order: p, above 0.

    Raises:
        UserError: of one variable alone, which has no pairs, or of another order.
    """
    check_count("members", len(members), 1, "an ensemble has members")
    check_count("variables", len(y), 2, "a variogram is of pairs of variables")
    if not 0 < order < np.inf:
        raise UserError(f"order={order}: must be above 0, and finite; 0.5 is usual")
    y = np.asarray(y, np.float64)  # unsigned integers would wrap around
    total = np.zeros(np.broadcast_shapes(np.shape(members)[2:], y.shape[1:]))
    for i in range(len(y)):
        for j in range(i):
            forecast = (np.abs(np.asarray(members[:, i], np.float64) - members[:, j]) ** order).mean(0)
            total += 2 * (np.abs(y[i] - y[j]) ** order - forecast) ** 2
    return total
