"""Measure calibration: PIT and rank histograms by date, and the reliability of the probability of exceeding a value.

Everything is a sum of cell areas in bins. Histograms are kept by date, because the bootstrap draws dates. Reliability
tables are sums over all dates.

Axes: B draw of the bootstrap, D initialisation time, C column, K bin, M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import cdf
from ensemble_ml.verification.members import rank_of_truth
from ensemble_ml.verification.probability import Reliability, bin_of, pit, shares

BINS = 10
UPPER_TENTH = 1.2815515655446004  # 90 % quantile of the standard normal distribution


@dataclass(eq=False)
class Calibration:
    """A set of histograms and reliability tables.

    Masks must leave out points with a NaN: a missing PIT would count in the first bin, and a missing member as above
    the truth.

    Attributes:
        dates: Length of D.
        columns: Length of C.
        area: (Y, X) cell areas, the weights of the points.
        seed: Seed of the random numbers that break ties.
        histograms: (D, C, K) cell areas in bins by (kind, entrant), where kind is "pit" or "rank".
        reliability: Tables by (column, entrant, threshold); None stands for the upper tenth of the cell's climate.
    """

    dates: int
    columns: int
    area: np.ndarray
    seed: int = 0
    histograms: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    reliability: dict[tuple[int, str, float | None], Reliability] = field(default_factory=dict)

    def record_pit(
        self, entrant: str, date: int, columns: slice, predicted: tuple[Family, np.ndarray, np.ndarray], y: np.ndarray,
        mask: np.ndarray,
    ) -> None:  # fmt: skip
        """Add the PIT of the forecast distributions of one date.

        Args:
            entrant: Label of the forecast.
            date: Position on D.
            columns: Range of positions on C, one for each level.
            predicted: Family, location and scale of the distributions; both fields are (Z, Y, X).
            y: (Z, Y, X) truth.
            mask: (Z, Y, X) bool, true at points that count.

        Raises:
            UserError: A scale is negative.
        """
        # The PIT is drawn at random where a censored distribution has a point mass. Otherwise all dry points would fall
        # into one bin.
        uniform = self._uniform(date, columns, y.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            where = bin_of(pit(*predicted, y, uniform), BINS)
        self._count("pit", entrant, date, columns, where, mask, BINS)

    def record_ranks(
        self, entrant: str, date: int, columns: slice, members: np.ndarray, y: np.ndarray, mask: np.ndarray
    ) -> None:
        """Add the ranks of the truth among the members of a raw ensemble on one date.

        Args:
            entrant: Name of the ensemble.
            date: Position on D.
            columns: Range of positions on C, one for each level.
            members: (M, Z, Y, X) members.
            y: (Z, Y, X) truth.
            mask: (Z, Y, X) bool, true at points that count.
        """
        ranks = rank_of_truth(members, y, self._uniform(date, columns, y.shape))
        self._count("rank", entrant, date, columns, ranks, mask, len(members) + 1)

    def record_event(
        self, entrant: str, columns: slice, probability: np.ndarray, event: np.ndarray, mask: np.ndarray,
        at: float | None = None,
    ) -> None:  # fmt: skip
        """Add predicted probabilities of an event.

        Args:
            entrant: Forecast or raw ensemble.
            columns: Range of positions on C, one for each level.
            probability: (Z, Y, X) probabilities.
            event: (Z, Y, X) bool, true where it happened.
            mask: (Z, Y, X) bool, true at points that count.
            at: The threshold that is exceeded, in the units of the variable; None for the upper tenth.

        Raises:
            UserError: A probability at a point that counts lies outside of [0, 1].
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            table = self.reliability.setdefault((column, entrant, at), Reliability.zeros(BINS))
            table.record(probability[z], event[z], self.area, mask[z])

    def thresholds(self, column: int) -> list[float]:
        """Return the thresholds of a column's reliability tables, ascending, without the upper tenth.

        Args:
            column: Position on C.
        """
        return sorted({at for c, _, at in self.reliability if c == column and at is not None})

    def share(self, kind: str, entrant: str, draws: np.ndarray | None = None) -> np.ndarray | None:
        """Return the share of each bin of a histogram.

        Args:
            kind: "pit" or "rank".
            entrant: Forecast or raw ensemble.
            draws: (B, D) how often each draw counts each date; None counts every date once.

        Returns:
            (C, K) shares, or (B, C, K) with draws, NaN where no point was counted; None if there is no such histogram.
        """
        table = self.histograms.get((kind, entrant))
        if table is None:
            return None
        return shares(table.sum(0) if draws is None else np.tensordot(draws, table, axes=1))

    def known(self, kind: str, entrant: str, column: int) -> np.ndarray:
        """Return the dates that a histogram of a column was made of, (D,) bool.

        Args:
            kind: "pit" or "rank".
            entrant: Forecast or raw ensemble.
            column: Position on C.

        Raises:
            KeyError: There is no such histogram.
        """
        return self.histograms[kind, entrant][:, column].sum(-1) > 0

    def _count(
        self, kind: str, entrant: str, date: int, columns: slice, where: np.ndarray, mask: np.ndarray, bins: int
    ) -> None:
        empty = np.zeros((self.dates, self.columns, bins))
        table = self.histograms.setdefault((kind, entrant), empty)
        for z, column in enumerate(range(columns.start, columns.stop)):
            table[date, column] += np.bincount(where[z][mask[z]], self.area[mask[z]], bins)

    def _uniform(self, date: int, columns: slice, shape: tuple[int, ...]) -> np.ndarray:
        """Return random numbers that are the same for every entrant, so that ties are broken alike."""
        return np.random.default_rng((self.seed, date, columns.start)).random(shape)


def threshold(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Return the value that a normal climate exceeds one time in ten.

    Where the climate never varies, its deviation is zero or a rounding error, and rounding could make the constant
    value exceed its own mean. The deviation is therefore taken as at least 1e-9 of the mean.

    Args:
        mean: Climatological mean at each cell.
        deviation: Climatological standard deviation at each cell.
    """
    return mean + UPPER_TENTH * np.maximum(deviation, 1e-9 * np.abs(mean))


def exceeding(family: Family, location: np.ndarray, scale: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the probability that a distribution exceeds a value.

    Args:
        family: Family of the distribution.
        location: Location in the units of the variable.
        scale: Scale in the units of the variable.
        value: The value to exceed.

    Raises:
        UserError: A scale is negative.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - cdf(family, location, scale, value)


def members_exceeding(members: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the share of the members that exceed a value.

    A comparison with NaN is false, so a missing member counts as not exceeding the value, and no member exceeds NaN.

    Args:
        members: (M, ...) members.
        value: (...) the value to exceed.
    """
    return (members > value).mean(0)
