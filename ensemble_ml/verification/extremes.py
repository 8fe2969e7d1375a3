"""Measure how unusual a forecast is against the model's own climate.

Sources: Lalaurette (2003), doi:10.1256/qj.02.152; Zsoter (2006), ECMWF Newsletter 107.

Axes: M member, K quantile of the climate.
"""

from __future__ import annotations

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_count


def climate_place(climate: np.ndarray, levels: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest probability (...) that values `x` (...) have in the climate.

    The two differ where quantiles are equal, which is where the climate has a point mass (no rain). Between unequal
    quantiles the probability is linear. A point mass begins and ends somewhere between two of the levels. The middle
    between them is taken, which is right to within half their distance. Both are zero below the climate, one above it,
    and NaN where a value is missing. Climate and levels are those of `efi`.
    """
    low = np.zeros(np.shape(x))
    high = np.zeros(np.shape(x))
    tied = climate[1:] == climate[:-1]
    for k in range(len(levels) - 1):
        first, last, middle = climate[k], climate[k + 1], (levels[k] + levels[k + 1]) / 2
        begin = np.where(tied[k - 1], middle, levels[k]) if k else levels[0]
        end = np.where(tied[k + 1], middle, levels[k + 1]) if k + 1 < len(tied) else levels[-1]
        share = np.clip((x - first) / np.where(tied[k], 1.0, last - first), 0, 1)
        place = np.where(tied[k], levels[k + 1], begin + (end - begin) * share)
        low = np.where(x > first, place, low)
        high = np.where(x >= first, place, high)
    bad = np.isnan(x) | np.isnan(climate).any(0)
    return np.where(bad, np.nan, low), np.where(bad, np.nan, high)


def efi(members: np.ndarray, climate: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Compute the extreme forecast index.

        EFI = 2/pi int_0^1 (p - F(q_p)) / sqrt(p (1 - p)) dp

        q_p  quantile of the climate at probability p
        F    distribution function of the members

    With p = (1 - cos theta) / 2 the integral is exact:

        EFI = 2/pi mean_i theta_i - 1
        theta_i = arccos(1 - 2 p_i)

        p_i  probability of member i in the climate

    A member that equals a point mass of the climate (no rain) counts with the mean of theta over the probabilities of
    the mass. A forecast that equals the climate then has an EFI of zero, whether it is dry or not.

    The list of levels leaves an error. A point mass that ends at P, between two levels at a distance d, is taken to end
    at P' in their middle. This moves the EFI up or down by 2/pi |P - P'| times the difference of the mean thetas beyond
    P' and within the mass. The error is at most d, and about 0.02 with the levels of `store.climate`.

    Args:
        members: (M, ...).
        climate: (K, ...) quantiles of the model climate, ascending, from years other than the forecast's.
        levels: (K,) their probabilities, from 0 to 1.

    Returns:
        (...) index, -1 (all members below the climate) to 1 (all above); NaN where a member or a quantile is missing.

    Raises:
        UserError: Levels do not ascend from 0 to 1, quantiles are not as many or fall along them, or there is no
            member.
    """
    levels, climate = np.asarray(levels, np.float64), np.asarray(climate, np.float64)
    check_count("members", len(members), 1, "an ensemble has members")
    if len(levels) < 2 or levels[0] != 0 or levels[-1] != 1 or not (np.diff(levels) > 0).all():
        raise UserError(f"levels {levels.tolist()}: must ascend from 0 to 1")
    if len(climate) != len(levels):
        raise UserError(f"climate: has {len(climate)} quantiles for {len(levels)} levels; give one for each")
    _check_ascending(climate)
    total = np.zeros(np.broadcast_shapes(np.shape(members)[1:], climate.shape[1:]))
    for member in members:
        low, high = climate_place(climate, levels, np.asarray(member, np.float64))
        tied = high - low > 1e-12
        mean = (_integral(high) - _integral(low)) / np.where(tied, high - low, 1.0)
        total += np.where(tied, mean, np.arccos(np.clip(1 - 2 * low, -1, 1)))
    return 2 / np.pi * total / len(members) - 1


def _check_ascending(climate: np.ndarray) -> None:
    """Refuse quantiles (K, ...) that fall along K by more than packing explains."""
    # Each point has its own tolerance. A common one would depend on how a lazy climate is chunked.
    allowed = 1e-2 * (climate.max(0) - climate.min(0)) + 1e-4 * np.abs(climate).max(0)
    if (np.maximum.accumulate(climate) - climate > allowed).any():
        raise UserError("climate: its quantiles fall along the levels; they must ascend with them")


def _integral(p: np.ndarray) -> np.ndarray:
    """Return the integral of arccos(1 - 2 p) from zero to `p`."""
    u = np.clip(1 - 2 * p, -1, 1)
    return (np.sqrt(1 - u * u) - u * np.arccos(u)) / 2
