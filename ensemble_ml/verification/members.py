"""Score an ensemble as the sample that it is: CRPS, ranks, energy score and variogram score.

Members come first (M, ...). A missing member is NaN and makes the CRPS, energy and variogram scores of the point NaN.
Leaving the point out is the task of masks.

Up to 64 members are sorted by a network of minima and maxima, which NumPy applies to whole fields at once. It takes
O(M log^2 M) passes. More members are sorted by np.sort.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_ascending_bounds, check_count, check_uniform

_NETWORK_UP_TO = 64  # members up to which the network is used; np.sort is as fast for more


@cache
def sorting_network(n: int) -> tuple[tuple[int, int], ...]:
    """Return the comparisons of the odd-even merge sort of Batcher (1968), doi:10.1145/1468075.1468121.

    The pairs (low, high) of positions among `n` values are to be put in order, one after the other.
    """
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
    """Sort members in ascending order at each point.

    A NaN at a point spreads to all its members in the network, and comes last where np.sort is used. Either way
    `pair_sum` gives NaN there.

    Args:
        members: (M, ...) float, which is overwritten.
        spare: (...) memory of the same type, which is overwritten as well; None allocates it.

    Returns:
        M fields (...), in ascending order. They are views of `members`, and one of them may be `spare`.
    """
    rows = list(members)
    if len(rows) > _NETWORK_UP_TO:
        members.sort(axis=0)
        return rows
    free = np.empty_like(rows[0]) if spare is None else spare
    for low, high in sorting_network(len(rows)):
        # The minimum goes to the spare field, which then takes the place of the row. No copy is needed.
        np.minimum(rows[low], rows[high], out=free)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], free = free, rows[low]
    return rows


def pair_sum(ordered: list[np.ndarray]) -> np.ndarray:
    """Return the sum of |x_i - x_j| over all pairs of members, (...).

    With x_(1) <= ... <= x_(M) it is the sum over k <= M / 2 of (M + 1 - 2 k) (x_(M+1-k) - x_(k)), which needs M / 2
    differences in place of M (M - 1) / 2.

    Args:
        ordered: M fields (...) in ascending order.
    """
    m = len(ordered)
    total = np.zeros_like(ordered[0])
    for k in range(m // 2):
        total += (m - 1 - 2 * k) * (ordered[m - 1 - k] - ordered[k])
    return total


def crps_members(members: np.ndarray, y: np.ndarray, *, fair: bool) -> np.ndarray:
    """Compute the CRPS of an ensemble, (...) float64 in the units of `y`.

        fair:      mean_i |x_i - y| - sum_{i<j} |x_i - x_j| / (M (M - 1))
        ordinary:  mean_i |x_i - y| - sum_{i<j} |x_i - x_j| / M^2

    The fair score is an unbiased estimate of the score of the distribution that the members come from, if they are raw,
    exchangeable members. Its formula is equation 3 of Ferro (2014), doi:10.1002/qj.2270.

    Args:
        members: (M, ...); two or more if `fair`.
        y: (...) truth.
        fair: Compute the fair score rather than the ordinary one.

    Raises:
        UserError: A fair score is asked of one member, or there is no member.
    """
    m = len(members)
    divisor = _divisor(m, fair)
    distance = np.asarray(members, np.float64) - y  # in float64, so that large values lose no digits
    flat = np.ascontiguousarray(distance.reshape(m, -1))
    error = np.abs(flat).mean(0)
    score = error - pair_sum(sort_members(flat)) / divisor
    return score.reshape(distance.shape[1:])


def _divisor(count: int, fair: bool) -> int:
    """Check the number of members, and return by what the sum over their pairs is divided."""
    if fair:
        check_count("members", count, 2, "a fair score compares them with each other")
    check_count("members", count, 1, "an ensemble has members")
    return count * (count - 1) if fair else count * count


def crps_members_weighted(
    members: np.ndarray, y: np.ndarray, *, fair: bool, lower: float = -np.inf, upper: float = np.inf
) -> np.ndarray:
    """Compute the threshold-weighted CRPS, in which only values between `lower` and `upper` count.

    It is the CRPS of members and truth that are clipped to the interval (section 3 of Allen et al. 2023,
    doi:10.1137/22M1532184). Limits are in the units of `y`, and the other arguments are those of `crps_members`.

    Raises:
        UserError: `lower` is not below `upper`, or there are too few members.
    """
    check_ascending_bounds(lower, upper)
    return crps_members(np.clip(members, lower, upper), np.clip(y, lower, upper), fair=fair)


def rank_of_truth(members: np.ndarray, y: np.ndarray, uniform: np.ndarray | None = None) -> np.ndarray:
    """Count the members that lie below the truth, (...) int, 0..M.

    A comparison with NaN is false, so a missing member counts as lying above the truth, and a missing truth has rank 0.

    Args:
        members: (M, ...).
        y: (...) truth.
        uniform: (...) random numbers in [0, 1). Where members equal the truth (dry points), its rank is drawn among
            theirs. With None, equal members count as above the truth.

    Raises:
        UserError: `uniform` is outside of [0, 1).
    """
    check_uniform(uniform)
    # A loop over members needs no array of the size of the ensemble.
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
    """Compute the energy score of vectors along the second axis, (...) float64 in the units of the variables.

        mean |X - y| - mean |X - X'| / 2      with Euclidean norms

    It is equation 22 of Gneiting & Raftery (2007), doi:10.1198/016214506000001437, with the sign reversed, so that
    smaller is better. Bring the variables to one scale first.

    Args:
        members: (M, V, ...).
        y: (V, ...) truth.
        fair: Divide the sum over pairs by M (M - 1) instead of M^2.

    Raises:
        UserError: A fair score is asked of one member, or there is no member.
    """
    m = len(members)
    divisor = _divisor(m, fair)
    norm = lambda a: np.sqrt((a * a).sum(0))  # noqa: E731
    # One member or pair at a time: all pairs at once would need M times the memory of the ensemble.
    error = sum(norm(np.asarray(member, np.float64) - y) for member in members) / m
    pairs = np.zeros(np.broadcast_shapes(np.shape(members)[2:], np.shape(y)[1:]))
    for i in range(m):
        for j in range(i):
            pairs += norm(np.asarray(members[i], np.float64) - members[j])
    return error - pairs / divisor


def variogram_score(members: np.ndarray, y: np.ndarray, order: float = 0.5) -> np.ndarray:
    """Compute the variogram score of vectors along the second axis, (...) float64.

        sum_ij (|y_i - y_j|^p - mean_m |x_mi - x_mj|^p)^2

    All pairs (i, j) have the same weight, and each pair counts twice. The unit is that of the variables to the power of
    2 p, so bring the variables to one scale first. Source: Scheuerer & Hamill (2015), doi:10.1175/MWR-D-14-00269.1.

    Args:
        members: (M, V, ...).
        y: (V, ...) truth.
        order: p, above 0.

    Raises:
        UserError: There is only one variable, which has no pairs, or no member; or `order` is not above 0 and finite.
    """
    check_count("members", len(members), 1, "an ensemble has members")
    check_count("variables", len(y), 2, "a variogram is of pairs of variables")
    if not 0 < order < np.inf:
        raise UserError(f"order={order}: must be above 0, and finite; 0.5 is usual")
    y = np.asarray(y, np.float64)  # differences of unsigned integers would wrap around
    total = np.zeros(np.broadcast_shapes(np.shape(members)[2:], y.shape[1:]))
    for i in range(len(y)):
        for j in range(i):
            forecast = (np.abs(np.asarray(members[:, i], np.float64) - members[:, j]) ** order).mean(0)
            total += 2 * (np.abs(y[i] - y[j]) ** order - forecast) ** 2
    return total
