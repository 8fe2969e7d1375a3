"""Compute moments of fields. A store keeps them for each year, so that training can merge its own years only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of sets of values: float64 arrays of one shape, one element for each set.

    A set without values has mean and m2 of 0, a minimum of +infinity and a maximum of -infinity.

    Attributes:
        count: Number of values.
        mean: Mean.
        m2: Sum of squared deviations from the mean.
        minimum: Smallest value.
        maximum: Largest value.
    """

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Moments:
        """Return the moments of no values, which `merge` leaves without effect."""
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of two sets of values together.

        The formula is that of Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances", with index 1 for `self` and 2 for `other`:

            n    = n1 + n2
            d    = mean2 - mean1
            mean = mean1 + d n2 / n
            m2   = m2_1 + m2_2 + d^2 n1 n2 / n
        """
        count = self.count + other.count
        # Where both counts are zero the share is zero, so the result has no values either.
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * share,
            self.m2 + other.m2 + delta**2 * self.count * share,
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
        )

    @property
    def std(self) -> np.ndarray:
        """Return the standard deviation over all values (ddof = 0); NaN where there are none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the five arrays by name."""
        return {name: getattr(self, name) for name in NAMES}

    def at(self, index: int) -> Moments:
        """Return the moments at `index` of the first axis."""
        return Moments(*(array[index] for array in self.arrays().values()))


NAMES = ("count", "mean", "m2", "minimum", "maximum")


@dataclass(frozen=True, eq=False)
class Statistics:
    """The moments of a store over members, dates and grid points, not weighted by area.

    Attributes:
        pressure: (T, V, Z).
        surface: (T, S).
    """

    pressure: Moments
    surface: Moments


def merge_all(moments: Iterable[Moments], shape: tuple[int, ...]) -> Moments:
    """Merge any number of moments of `shape`, in the given order."""
    return reduce(Moments.merge, moments, Moments.nothing(shape))


def stack(moments: Iterable[Moments]) -> Moments:
    """Stack moments of one shape along a new first axis."""
    rows = [list(item.arrays().values()) for item in moments]
    return Moments(*(np.stack(column) for column in zip(*rows, strict=True)))


def moments_of(fields: np.ndarray) -> Moments:
    """Return the moments (Z,) of the finite values of fields (Z, ...), in float64."""
    found = [_moments(field[np.isfinite(field)].astype(np.float64)) for field in fields]
    return Moments(*(np.array(column, np.float64) for column in zip(*found, strict=True)))


def _moments(values: np.ndarray) -> tuple[float, ...]:
    """Return count, mean, m2, minimum and maximum of finite values."""
    if not len(values):
        return 0.0, 0.0, 0.0, np.inf, -np.inf
    centre = values.mean()
    return float(values.size), float(centre), float(((values - centre) ** 2).sum()), values.min(), values.max()
