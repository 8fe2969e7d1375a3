"""Statistics of the forecast members' values, kept per year so that training can merge its own years and no others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean, sum of squared deviations `m2`, smallest and largest value; float64 arrays of one shape.

    A count of zero goes with mean and m2 of 0, minimum of +infinity and maximum of -infinity.
    """

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Moments:
        """Moments of no value at all: the neutral element of `merge`."""
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf))

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of values together.

        Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
        """
        count = self.count + other.count
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
        """Standard deviation over all values (ddof = 0); NaN where there is none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)

    def arrays(self) -> dict[str, np.ndarray]:
        """The five arrays by name."""
        return {name: getattr(self, name) for name in NAMES}

    def at(self, index: int) -> Moments:
        """The moments at `index` of the first axis."""
        return Moments(*(array[index] for array in self.arrays().values()))


NAMES = ("count", "mean", "m2", "minimum", "maximum")


@dataclass(frozen=True, eq=False)
class Statistics:
    """Moments over members, dates and grid points, not weighted by area: `pressure` (T, V, Z) and `surface` (T, S)."""

    pressure: Moments
    surface: Moments


def merge_all(moments: Iterable[Moments], shape: tuple[int, ...]) -> Moments:
    """Merge any number of moments of `shape`, in the order given."""
    return reduce(Moments.merge, moments, Moments.nothing(shape))


def stack(moments: Iterable[Moments]) -> Moments:
    """Put moments of one shape along a new first axis."""
    rows = [list(item.arrays().values()) for item in moments]
    return Moments(*(np.stack(column) for column in zip(*rows, strict=True)))


def moments_of(fields: np.ndarray) -> Moments:
    """Moments (Z,) of the values of fields (Z, Y, X) that are there, in float64."""
    found = [_moments(field[np.isfinite(field)].astype(np.float64)) for field in fields]
    return Moments(*(np.array(column, np.float64) for column in zip(*found, strict=True)))


def _moments(values: np.ndarray) -> tuple[float, ...]:
    if not len(values):
        return 0.0, 0.0, 0.0, np.inf, -np.inf
    centre = values.mean()
    return float(values.size), float(centre), float(((values - centre) ** 2).sum()), values.min(), values.max()
