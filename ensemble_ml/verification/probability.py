"""Compute calibration scores: PIT and its histograms, reliability, the Brier score and its parts, the quantile score.

A histogram is a sum of weights in bins, so histograms of different points can be added.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def pit(
    family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, uniform: np.ndarray | None = None
) -> np.ndarray:
    """Return the probability integral transform F(y) of the truth, in [0, 1].

    Where a censored distribution has a point mass, F jumps. A random value within the jump makes the PIT of a
    calibrated forecast uniform (Czado et al. 2009, doi:10.1111/j.1541-0420.2009.01191.x).

    Args:
        family: Family of the distribution.
        location: Location of the distribution, in the units of the variable.
        scale: Scale of the distribution, in the same units.
        y: Truth. Values beyond the bounds of the distribution count as the nearer bound.
        uniform: Random numbers in [0, 1) of the shape of `y`; None takes the middle of each jump.

    Raises:
        UserError: A value of `uniform` is outside of [0, 1), or a scale is negative.
    """
    check_uniform(uniform)
    at = np.clip(y, *family.bounds)
    below, above = cdf(family, location, scale, at, left=True), cdf(family, location, scale, at)
    return below + (0.5 if uniform is None else uniform) * (above - below)


def bin_of(probability: np.ndarray, bins: int) -> np.ndarray:
    """Return the number of the bin of [0, 1] that each value falls into, int64 from 0 to `bins` - 1.

    Args:
        probability: Values in [0, 1] of any shape. The value 1 belongs to the last bin. NaN falls into the first bin,
            so the caller must mask it.
        bins: Number of bins of equal width, one or more.

    Raises:
        UserError: `bins` is below one, or values lie outside of [0, 1].
    """
    check_count("bins", bins, 1, "values are counted in equal bins")
    check_probability("probability", probability)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(probability) * bins, 0, bins - 1).astype(np.int64)


def shares(counts: np.ndarray) -> np.ndarray:
    """Convert counts or weights in bins to shares of their sum, (..., K); NaN where the sum is zero.

    Args:
        counts: (..., K) counts or weights, 0 or more.

    Raises:
        UserError: A count is negative.
    """
    check_all("counts", counts, counts < 0, "a count or a weight is 0 or more")
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.full(np.shape(counts), np.nan), where=total > 0)


def flatness(counts: np.ndarray) -> np.ndarray:
    """Return the reliability index of a histogram: sum |share - 1/K|, (...); NaN where the sum of counts is zero.

    It is 0 for a flat histogram and 2 (1 - 1/K) at worst. It is equation 8 of Delle Monache et al. (2006),
    doi:10.1029/2005JD006917.

    Args:
        counts: (..., K) counts or weights, 0 or more.

    Raises:
        UserError: A count is negative.
    """
    return np.abs(shares(counts) - 1 / counts.shape[-1]).sum(-1)


def quantile_score(forecast: np.ndarray, y: np.ndarray, level: float) -> np.ndarray:
    """Return the pinball loss (1{y < q} - level) (q - y) of a predicted quantile q, in the units of `y`.

    The loss is equation 42 of Gneiting & Raftery (2007), doi:10.1198/016214506000001437, with the sign reversed, so
    that smaller is better. Twice its mean over all levels is the CRPS.

    Args:
        forecast: Predicted quantile in the units of `y`.
        y: Truth.
        level: Probability of the quantile, within (0, 1).

    Raises:
        UserError: `level` is not within (0, 1).
    """
    check_level(level)
    return ((y < forecast) - level) * (np.asarray(forecast, np.float64) - y)


def brier_score(probability: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Return the squared difference of a probability and the outcome, after Brier (1950).

    Args:
        probability: Forecast probability in [0, 1].
        event: Outcome, 0 or 1.

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
        """Return an empty table.

        Args:
            bins: Number of bins of equal width, one or more.

        Raises:
            UserError: `bins` is below one.
        """
        check_count("bins", bins, 1, "probabilities are counted in equal bins")
        return cls(*(np.zeros(bins) for _ in range(6)))

    def record(self, probability: np.ndarray, event: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add points of any shape where `mask` holds.

        Args:
            probability: Forecast probabilities in [0, 1].
            event: Outcomes, 0 or 1.
            weights: Weights of the points, 0 or more; they broadcast to `mask`.
            mask: bool, true at points that count.

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
        """Return the reliability curve of the bins that hold any weight.

        Returns:
            Mean probability, frequency of the event, and number of points of each such bin.
        """
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
