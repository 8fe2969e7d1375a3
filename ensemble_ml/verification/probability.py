"""Calibration: PIT and ranks in bins, their uniformity, reliability, Brier score and its parts, quantile score.

Histograms are sums of weights in bins, so they add up like every other aggregation.
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
    """Probability integral transform F(y); at a mass of a censored law drawn within the jump.

    Czado et al. (2009), doi:10.1111/j.1541-0420.2009.01191.x.

    Args:
        family, location, scale: the forecast.
        y: truth; beyond the bounds of the law it counts as the nearer one.
        uniform: in [0, 1), the shape of `y`; without it, the middle of the jump.
    """
    check_uniform(uniform)
    at = np.clip(y, *family.bounds)
    below, above = cdf(family, location, scale, at, left=True), cdf(family, location, scale, at)
    return below + (0.5 if uniform is None else uniform) * (above - below)


def bin_of(probability: np.ndarray, bins: int) -> np.ndarray:
    """Which of `bins` equal bins of [0, 1] each value falls into; one belongs to the last.

    NaN falls into the first: leave it out by a mask.
    """
    check_count("bins", bins, 1, "values are counted in equal bins")
    check_probability("probability", probability)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(probability) * bins, 0, bins - 1).astype(np.int64)


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts or weights in bins (..., K) as shares; NaN where there is none."""
    check_all("counts", counts, counts < 0, "a count or a weight is 0 or more")
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.full(np.shape(counts), np.nan), where=total > 0)


def flatness(counts: np.ndarray) -> np.ndarray:
    """Reliability index of a histogram (..., K): sum |share - 1/K|, 0 where flat, 2 (1 - 1/K) at worst.

    Delle Monache et al. (2006), doi:10.1029/2005JD006917, equation 8.
    """
    return np.abs(shares(counts) - 1 / counts.shape[-1]).sum(-1)


def quantile_score(forecast: np.ndarray, y: np.ndarray, level: float) -> np.ndarray:
    """Pinball loss (1{y < q} - level) (q - y); twice its mean over all levels is the CRPS.

    Gneiting & Raftery (2007), doi:10.1198/016214506000001437, equation 42.
    """
    check_level(level)
    return ((y < forecast) - level) * (np.asarray(forecast, np.float64) - y)


def brier_score(probability: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Squared difference of a probability and what happened, 0 or 1. Brier (1950)."""
    check_probability("forecast", probability)
    check_event("event", event)
    return (np.asarray(probability, np.float64) - np.asarray(event, np.float64)) ** 2


@dataclass(frozen=True)
class BrierParts:
    """Murphy's parts of a Brier score; score = reliability - resolution + uncertainty + within.

    `within` is what binning leaves: variance of the probabilities in a bin less twice their covariance with the event.
    Murphy (1973), Stephenson et al. (2008), doi:10.1175/2007WAF2006116.1.
    """

    score: float
    reliability: float
    resolution: float
    uncertainty: float
    within: float


@dataclass(eq=False)
class Reliability:
    """Sums in bins of the forecast probability (K,): weights, count, p, event, p^2 and p event."""

    weight: np.ndarray
    count: np.ndarray
    forecast: np.ndarray
    event: np.ndarray
    square: np.ndarray
    both: np.ndarray

    @classmethod
    def zeros(cls, bins: int = 10) -> Reliability:
        """Nothing recorded yet."""
        check_count("bins", bins, 1, "probabilities are counted in equal bins")
        return cls(*(np.zeros(bins) for _ in range(6)))

    def record(self, probability: np.ndarray, event: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add points of any shape where `mask` holds; `weights` broadcast."""
        p, o = np.asarray(probability, np.float64)[mask], np.asarray(event, np.float64)[mask]
        w = np.broadcast_to(weights, mask.shape)[mask]
        check_event("event", o)
        check_weights(w, weights)
        where = bin_of(p, len(self.weight))
        terms = (w, np.ones_like(w), w * p, w * o, w * p * p, w * p * o)
        for table, values in zip(self._tables(), terms, strict=True):
            table += np.bincount(where, values, len(table))

    def __add__(self, other: Reliability) -> Reliability:
        return Reliability(*(a + b for a, b in zip(self._tables(), other._tables(), strict=True)))

    def _tables(self) -> tuple[np.ndarray, ...]:
        return self.weight, self.count, self.forecast, self.event, self.square, self.both

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean probability, frequency of the event and count, of the bins that hold any."""
        kept = self.weight > 0
        return self.forecast[kept] / self.weight[kept], self.event[kept] / self.weight[kept], self.count[kept]

    def parts(self) -> BrierParts:
        """The Brier score and its parts."""
        kept = self.weight > 0
        w, total = self.weight[kept], self.weight.sum()
        p, o = self.forecast[kept] / w, self.event[kept] / w
        base = self.event.sum() / total
        score = (self.square.sum() - 2 * self.both.sum() + self.event.sum()) / total
        variance = (self.square[kept] / w - p * p) - 2 * (self.both[kept] / w - p * o)
        mean = lambda values: float((w * values).sum() / total)  # noqa: E731
        return BrierParts(
            float(score), mean((p - o) ** 2), mean((o - base) ** 2), float(base * (1 - base)), mean(variance)
        )
