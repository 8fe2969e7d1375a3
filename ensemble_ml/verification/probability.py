"""Compute calibration scores (PIT, reliability, Brier, quantile score), and measure the calibration of an evaluation.

A histogram is a sum of weights in bins, so histograms of different points can be added. An evaluation sums cell areas
in bins: PIT and rank histograms, and the reliability of the probability of exceeding a value. Its histograms are kept
by date, because the bootstrap draws dates. Reliability tables are sums over all dates.

Axes: B draw of the bootstrap, D initialisation time, C column, K bin, M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.verification.checks import (
    check_all,
    check_count,
    check_event,
    check_level,
    check_probability,
    check_uniform,
    check_weights,
)
from ensemble_ml.verification.families import cdf
from ensemble_ml.verification.members import rank_of_truth

BINS = 10  # of the PIT histograms and reliability tables of an evaluation
UPPER_TENTH = 1.2815515655446004  # 90 % quantile of the standard normal distribution


def pit(
    family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, uniform: np.ndarray | None = None
) -> np.ndarray:
    """Return the probability integral transform F(y) of the truth, in [0, 1].

    Where a censored distribution has a point mass, F jumps. A random value within the jump makes the PIT of a
    calibrated forecast uniform (Czado et al. 2009, doi:10.1111/j.1541-0420.2009.01191.x): `uniform` holds numbers in
    [0, 1) of the shape of `y`, and None takes the middle of each jump. Values of `y` beyond the bounds of the
    distribution count as the nearer bound.

    Raises:
        UserError: A value of `uniform` is outside of [0, 1), or a scale is negative.
    """
    check_uniform(uniform)
    at = np.clip(y, *family.bounds)
    below, above = cdf(family, location, scale, at, left=True), cdf(family, location, scale, at)
    return below + (0.5 if uniform is None else uniform) * (above - below)


def bin_of(probability: np.ndarray, bins: int) -> np.ndarray:
    """Return the number of the bin of [0, 1] that each value falls into, int64 from 0 to `bins` - 1.

    The value 1 belongs to the last bin. NaN falls into the first bin, so the caller must mask it.

    Raises:
        UserError: `bins` is below one, or values lie outside of [0, 1].
    """
    check_count("bins", bins, 1, "values are counted in equal bins")
    check_probability("probability", probability)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(probability) * bins, 0, bins - 1).astype(np.int64)


def shares(counts: np.ndarray) -> np.ndarray:
    """Convert counts or weights (..., K) in bins to shares of their sum; NaN where the sum is zero.

    Raises:
        UserError: A count is negative.
    """
    check_all("counts", counts, counts < 0, "a count or a weight is 0 or more")
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.full(np.shape(counts), np.nan), where=total > 0)


def flatness(counts: np.ndarray) -> np.ndarray:
    """Return the reliability index of a histogram (..., K): sum |share - 1/K|, (...); NaN where the sum is zero.

    It is 0 for a flat histogram and 2 (1 - 1/K) at worst. It is equation 8 of Delle Monache et al. (2006),
    doi:10.1029/2005JD006917.

    Raises:
        UserError: A count is negative.
    """
    return np.abs(shares(counts) - 1 / counts.shape[-1]).sum(-1)


def quantile_score(forecast: np.ndarray, y: np.ndarray, level: float) -> np.ndarray:
    """Return the pinball loss (1{y < q} - level) (q - y) of a predicted quantile q, in the units of `y`.

    The loss is equation 42 of Gneiting & Raftery (2007), doi:10.1198/016214506000001437, with the sign reversed, so
    that smaller is better. Twice its mean over all levels is the CRPS.

    Raises:
        UserError: `level` is not within (0, 1).
    """
    check_level(level)
    return ((y < forecast) - level) * (np.asarray(forecast, np.float64) - y)


def brier_score(probability: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Return the squared difference of a probability in [0, 1] and the outcome, 0 or 1, after Brier (1950).

    Raises:
        UserError: A probability is outside of [0, 1], or an event is neither 0 nor 1.
    """
    check_probability("forecast", probability)
    check_event("event", event)
    return (np.asarray(probability, np.float64) - np.asarray(event, np.float64)) ** 2


@dataclass(frozen=True)
class BrierParts:
    """The parts of a Brier score, where score = reliability - resolution + uncertainty + within.

    `within` is due to the width of the bins: the variance of the probabilities within a bin, less twice their
    covariance with the event. The first three parts are from Murphy (1973), the last from Stephenson et al. (2008),
    doi:10.1175/2007WAF2006116.1.
    """

    score: float
    reliability: float
    resolution: float
    uncertainty: float
    within: float


@dataclass(eq=False)
class Reliability:
    """A table of sums in bins of the forecast probability, from which reliability diagrams are drawn.

    Attributes:
        weight: (K,) sum of weights.
        count: (K,) number of points.
        forecast: (K,) weighted sum of the probability p.
        event: (K,) weighted sum of the event.
        square: (K,) weighted sum of p^2.
        both: (K,) weighted sum of p times the event.
    """

    weight: np.ndarray
    count: np.ndarray
    forecast: np.ndarray
    event: np.ndarray
    square: np.ndarray
    both: np.ndarray

    @classmethod
    def zeros(cls, bins: int = 10) -> Reliability:
        """Return an empty table of one or more bins of equal width."""
        check_count("bins", bins, 1, "probabilities are counted in equal bins")
        return cls(*(np.zeros(bins) for _ in range(6)))

    def record(self, probability: np.ndarray, event: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add probabilities in [0, 1] and events of 0 or 1, of any shape, where `mask` holds.

        `weights` are 0 or more, and broadcast to `mask`.

        Raises:
            UserError: Probabilities, events or weights at these points have a value that is not allowed.
        """
        p, o = np.asarray(probability, np.float64)[mask], np.asarray(event, np.float64)[mask]
        w = np.broadcast_to(weights, mask.shape)[mask]
        check_event("event", o)
        check_weights(w, weights)
        # The exact Brier score also needs the sums of p^2 and of p times the event.
        where = bin_of(p, len(self.weight))
        terms = (w, np.ones_like(w), w * p, w * o, w * p * p, w * p * o)
        for table, values in zip(self._tables(), terms, strict=True):
            table += np.bincount(where, values, len(table))

    def __add__(self, other: Reliability) -> Reliability:
        """Return the table of the points of both tables."""
        return Reliability(*(a + b for a, b in zip(self._tables(), other._tables(), strict=True)))

    def _tables(self) -> tuple[np.ndarray, ...]:
        return self.weight, self.count, self.forecast, self.event, self.square, self.both

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean probability, frequency of the event and number of points of each bin with any weight."""
        kept = self.weight > 0
        return self.forecast[kept] / self.weight[kept], self.event[kept] / self.weight[kept], self.count[kept]

    def parts(self) -> BrierParts:
        """Return the Brier score and its parts; NaN if the table has no weight."""
        kept = self.weight > 0
        w, total = self.weight[kept], self.weight.sum()
        p, o = self.forecast[kept] / w, self.event[kept] / w
        # Reliability and resolution use only the means of the bins. `within` makes the parts add up to the exact score;
        # it is computed from sums of squares and products.
        base = self.event.sum() / total
        score = (self.square.sum() - 2 * self.both.sum() + self.event.sum()) / total
        variance = (self.square[kept] / w - p * p) - 2 * (self.both[kept] / w - p * o)
        mean = lambda values: float((w * values).sum() / total)  # noqa: E731
        return BrierParts(
            float(score), mean((p - o) ** 2), mean((o - base) ** 2), float(base * (1 - base)), mean(variance)
        )


@dataclass(eq=False)
class Calibration:
    """A set of histograms and reliability tables.

    Masks must leave out points with a NaN: a missing PIT would count in the first bin, and a missing member as above
    the truth. In methods, `date` is a position on D, and `columns` are a range of positions on C, one for each level.
    Fields and masks (bool, true at points that count) are (Z, Y, X). An entrant is a forecast or a raw ensemble, and a
    kind is "pit" or "rank".

    Attributes:
        dates: Length of D.
        columns: Length of C.
        area: (Y, X) cell areas, the weights of the points.
        histograms: (D, C, K) cell areas in bins by (kind, entrant).
        reliability: Tables by (column, entrant, threshold); None stands for the upper tenth of the cell's climate.
    """

    dates: int
    columns: int
    area: np.ndarray
    histograms: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    reliability: dict[tuple[int, str, float | None], Reliability] = field(default_factory=dict)

    def record_pit(
        self, entrant: str, date: int, columns: slice, predicted: tuple[Family, np.ndarray, np.ndarray], y: np.ndarray,
        mask: np.ndarray,
    ) -> None:  # fmt: skip
        """Add the PIT of the distributions (family, location, scale) that a forecast predicts for one date.

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
        """Add the ranks of the truth among the members (M, Z, Y, X) of a raw ensemble on one date."""
        ranks = rank_of_truth(members, y, self._uniform(date, columns, y.shape))
        self._count("rank", entrant, date, columns, ranks, mask, len(members) + 1)

    def record_event(
        self, entrant: str, columns: slice, probability: np.ndarray, event: np.ndarray, mask: np.ndarray,
        at: float | None = None,
    ) -> None:  # fmt: skip
        """Add probabilities of exceeding the threshold `at`, in the units of the variable; None is the upper tenth.

        Raises:
            UserError: A probability at a point that counts lies outside of [0, 1].
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            table = self.reliability.setdefault((column, entrant, at), Reliability.zeros(BINS))
            table.record(probability[z], event[z], self.area, mask[z])

    def thresholds(self, column: int) -> list[float]:
        """Return the thresholds of a column's reliability tables, ascending, without the upper tenth."""
        return sorted({at for c, _, at in self.reliability if c == column and at is not None})

    def share(self, kind: str, entrant: str, draws: np.ndarray | None = None) -> np.ndarray | None:
        """Return the share of each bin of a histogram, (C, K), NaN where no point was counted.

        It is (B, C, K) with `draws` (B, D), which say how often each draw counts each date; None counts every date
        once. If there is no such histogram, the result is None.
        """
        table = self.histograms.get((kind, entrant))
        if table is None:
            return None
        return shares(table.sum(0) if draws is None else np.tensordot(draws, table, axes=1))

    def known(self, kind: str, entrant: str, column: int) -> np.ndarray:
        """Return the dates that a histogram of a column was made of, (D,) bool."""
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
        return np.random.default_rng((0, date, columns.start)).random(shape)


def threshold(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Return the value that a normal climate exceeds one time in ten.

    Where the climate never varies, its deviation is zero or a rounding error, and rounding could make the constant
    value exceed its own mean. The deviation is therefore taken as at least 1e-9 of the mean.
    """
    return mean + UPPER_TENTH * np.maximum(deviation, 1e-9 * np.abs(mean))


def exceeding(family: Family, location: np.ndarray, scale: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the probability that a distribution exceeds a value.

    Raises:
        UserError: A scale is negative.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - cdf(family, location, scale, value)


def members_exceeding(members: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the share of the members (M, ...) that exceed a value (...).

    A comparison with NaN is false, so a missing member counts as not exceeding the value, and no member exceeds NaN.
    """
    return (members > value).mean(0)
