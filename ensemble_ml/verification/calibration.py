"""Is it calibrated: PIT and rank histograms by date, and reliability of the probability of an unusual value.

Everything is a sum of cell areas in bins, so parts add up, and the bootstrap draws dates of it as of any other score.
Axes: D start date, C column, K bin, Z level.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import cdf
from ensemble_ml.verification.members import rank_of_truth
from ensemble_ml.verification.probability import Reliability, bin_of, pit, shares

BINS = 10
UPPER_TENTH = 1.2815515655446004  # standard deviations above the mean of a normal climate


@dataclass(eq=False)
class Calibration:
    """`histograms` by (kind, entrant), kind being "pit" or "rank": (D, C, K). `reliability` by (column, entrant)."""

    dates: int
    columns: int
    area: np.ndarray
    seed: int = 0
    histograms: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    reliability: dict[tuple[int, str], Reliability] = field(default_factory=dict)

    def record_pit(
        self, entrant: str, date: int, columns: slice, law: tuple[Family, np.ndarray, np.ndarray], y: np.ndarray,
        mask: np.ndarray,
    ) -> None:  # fmt: skip
        """Add the forecast distributions (family, location, scale) (Z, Y, X) of one date."""
        uniform = self._uniform(date, columns, y.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            where = bin_of(pit(*law, y, uniform), BINS)
        self._count("pit", entrant, date, columns, where, mask, BINS)

    def record_ranks(
        self, entrant: str, date: int, columns: slice, members: np.ndarray, y: np.ndarray, mask: np.ndarray
    ) -> None:
        """Add a raw ensemble (M, Z, Y, X) of one date."""
        ranks = rank_of_truth(members, y, self._uniform(date, columns, y.shape))
        self._count("rank", entrant, date, columns, ranks, mask, len(members) + 1)

    def record_event(
        self, entrant: str, columns: slice, probability: np.ndarray, event: np.ndarray, mask: np.ndarray
    ) -> None:
        """Add predicted probabilities (Z, Y, X) of an event."""
        for z, column in enumerate(range(columns.start, columns.stop)):
            table = self.reliability.setdefault((column, entrant), Reliability.zeros(BINS))
            table.record(probability[z], event[z], self.area, mask[z])

    def share(self, kind: str, entrant: str, draws: np.ndarray | None = None) -> np.ndarray | None:
        """Shares of the bins (C, K), or (B, C, K) for the dates' counts `draws` (B, D); None where nothing is known."""
        found = self.histograms.get((kind, entrant))
        if found is None:
            return None
        return shares(found.sum(0) if draws is None else np.tensordot(draws, found, axes=1))

    def known(self, kind: str, entrant: str, column: int) -> np.ndarray:
        """Dates (D,) bool that a histogram of a column was made of."""
        return self.histograms[kind, entrant][:, column].sum(-1) > 0

    def _count(
        self, kind: str, entrant: str, date: int, columns: slice, where: np.ndarray, mask: np.ndarray, bins: int
    ) -> None:
        empty = np.zeros((self.dates, self.columns, bins))
        table = self.histograms.setdefault((kind, entrant), empty)
        for z, column in enumerate(range(columns.start, columns.stop)):
            table[date, column] += np.bincount(where[z][mask[z]], self.area[mask[z]], bins)

    def _uniform(self, date: int, columns: slice, shape: tuple[int, ...]) -> np.ndarray:
        """The same draws for every entrant: ties are broken alike."""
        return np.random.default_rng((self.seed, date, columns.start)).random(shape)


def threshold(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """What the truth exceeds one time in ten where the climate of the cell is normal.

    Where it never varies the deviation is that of rounding: a value that is always the same would exceed its own mean.
    """
    return mean + UPPER_TENTH * np.maximum(deviation, 1e-9 * np.abs(mean))


def exceeding(family: Family, location: np.ndarray, scale: np.ndarray, value: np.ndarray) -> np.ndarray:
    """P(value is exceeded)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - cdf(family, location, scale, value)


def members_exceeding(members: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Share of the members (M, ...) above the value."""
    return (members > value).mean(0)
