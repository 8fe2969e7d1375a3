"""Compute local area-wise standardisation (LAS): a mean and a standard deviation for every grid point.

The mean and the standard deviation of a point are taken over all members' values of the chosen init times and leads, in
a window around the point (7 x 7 points). Both maps are then smoothed by a Gaussian (sigma 10 points). The method is
that of Grönquist et al. 2021, "Deep learning for post-processing ensemble weather forecasts",
doi:10.1098/rsta.2020.0092.

The maps are computed from the mean m_d and spread s_d of all members at each init time d, one lead and one variable at
a time. No member is read, and memory does not grow with the number of init times. With M members and D init times, for
one lead:

    mean = sum_d m_d / D
    M2   = sum_d [(M - 1) s_d^2 + M (m_d - mean)^2]

The same formulas then pool the points of each window. On a grid around the globe, longitude wraps. At other edges and
at the poles, window and Gaussian end, and the remaining weights are scaled up. A point with no value in reach takes the
plain mean over all points with values.

Left out are init times at which fewer than two members have the field, points of an init time at which one of these
members has no value, and leads at which the field is zero by nature (rain at lead 0).

Axes: T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.store.source import Layout, Part, Selection, Source, zero_by_nature

WINDOW = 7
SIGMA = 10.0
_LEAST = 0.02  # smallest standard deviation, as a fraction of the root mean square of its map


@dataclass(frozen=True, eq=False)
class LocalStatistics:
    """The maps of mean and standard deviation (ddof = 0) in the fields' units, float64.

    Those of variables on pressure levels are (V, Z, Y, X), those of surface variables (S, Y, X).
    """

    mean_p: np.ndarray
    std_p: np.ndarray
    mean_s: np.ndarray
    std_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Pooled:
    """The count, mean and sum of squared deviations of the values at each point, (..., Y, X) float64."""

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Pooled:
        """Return the moments of no values."""
        return cls(*(np.zeros(shape) for _ in range(3)))

    def add(self, count: np.ndarray, mean: np.ndarray, m2: np.ndarray) -> None:
        """Add more values, in place (Chan, Golub & LeVeque 1979; see `Moments.merge`).

        Points where `mean` or `m2` is not finite, or `count` is zero, are left out.
        """
        there = np.isfinite(mean) & np.isfinite(m2) & (count > 0)
        more = np.where(there, count, 0.0)
        total = self.count + more
        share = np.divide(more, total, out=np.zeros_like(total), where=total > 0)
        delta = np.where(there, mean - self.mean, 0.0)
        self.m2[...] += np.where(there, m2, 0.0) + delta**2 * self.count * share
        self.mean[...] += delta * share
        self.count[...] = total


def check_window(grid: Grid) -> None:
    """Check that the grid has at least as many columns as the window.

    Raises:
        UserError: It has fewer.
    """
    if grid.shape[1] < WINDOW:
        raise UserError(f"local statistics: a window of {WINDOW} points is wider than the grid ({grid.describe()})")


def local_statistics(
    source: Source,
    dates: Sequence[int] | np.ndarray,
    *,
    leads: Sequence[int] | None = None,
    variables: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
    surface: Sequence[str] | None = None,
    sigma: float = SIGMA,
) -> LocalStatistics:
    """Compute the maps of mean and standard deviation from all chosen init times and leads together.

    Args:
        source: Store or archive with mean and spread of its members.
        dates: Indices of init times.
        leads: Lead times in hours; None takes all.
        variables: Variables on pressure levels; None takes all.
        levels: Levels in hPa; None takes all.
        surface: Surface variables; None takes all.
        sigma: Standard deviation of the Gaussian, in points.

    Raises:
        UserError: The source has no mean and spread, the grid has fewer columns than the window, or a field is missing
            for all init times, or zero by nature at all leads.
    """
    lay = source.layout
    if not (source.has(Part.MEAN) and source.has(Part.SPREAD)):
        raise UserError(f"{source.path}: has no mean and spread of its members; local statistics need two members")
    check_window(lay.grid)
    used = tuple(lay.lead_hours if leads is None else leads)
    heights = tuple(lay.levels if levels is None else levels)
    maps = []
    for names, depth, shape in (
        (lay.variables if variables is None else variables, heights, (len(heights), *lay.grid.shape)),
        (lay.surface if surface is None else surface, (), lay.grid.shape),
    ):
        each = [_of_variable(source, dates, used, name, depth, sigma) for name in names]
        maps += [np.stack([one[part] for one in each]) if each else np.zeros((0, *shape)) for part in (0, 1)]
    return LocalStatistics(*maps)


def _of_variable(
    source: Source,
    dates: Sequence[int] | np.ndarray,
    leads: tuple[int, ...],
    name: str,
    levels: tuple[int, ...],
    sigma: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the maps of one variable: (Z, Y, X), or (Y, X) at the surface, where `levels` is empty."""
    lay = source.layout
    points = Pooled.nothing((max(1, len(levels)), *lay.grid.shape))
    for lead in leads:
        if not levels and zero_by_nature(name, lead):
            continue
        for date in dates:
            points.add(*_of_date(source, int(date), lead, name, levels))
    if not (points.count > 0).any((-2, -1)).all():
        raise UserError(f"{source.path}: {name} is missing for all init times of the local statistics; leave it out")
    mean, std = smoothed(windows(points, lay.grid.wraps), lay.grid.wraps, sigma)
    return (mean, std) if levels else (mean[0], std[0])


def _of_date(
    source: Source, date: int, lead: int, name: str, levels: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return count, mean and M2 of the members of one init time, (Z, Y, X)."""
    chosen = Selection.one(lead, name, surface=not levels, levels=levels or None)
    mean, spread = (source.read(part, date, chosen).one()[0] for part in (Part.MEAN, Part.SPREAD))
    count = _members(source, date, lead, name, levels)[:, None, None]
    return (np.broadcast_to(count, mean.shape), mean.astype(np.float64), (count - 1) * spread.astype(np.float64) ** 2)


def _members(source: Source, date: int, lead: int, name: str, levels: tuple[int, ...]) -> np.ndarray:
    """Return the number of members that have the field, (Z,)."""
    lay: Layout = source.layout
    pressure, ground = source.present(Part.FORECAST, date)
    at = lay.lead_hours.index(lead)
    if not levels:
        return ground[:, at, lay.surface.index(name)].sum(0, keepdims=True).astype(float)
    depth = [lay.levels.index(level) for level in levels]
    return pressure[:, at, lay.variables.index(name)][:, depth].sum(0).astype(float)


def windows(points: Pooled, wraps: bool) -> Pooled:
    """Pool the moments of each point with those of the window of `WINDOW` x `WINDOW` points around it.

    `wraps` is whether the grid goes around the globe, so that longitude wraps.
    """

    def summed(values: np.ndarray) -> np.ndarray:
        """Return the sum over the window around each point; points beyond an edge count as zero."""
        ones = np.ones(WINDOW)
        rows = ndimage.correlate1d(values, ones, axis=-2, mode="constant")
        return ndimage.correlate1d(rows, ones, axis=-1, mode="wrap" if wraps else "constant")

    count = np.rint(summed(points.count))
    some = np.maximum(count, 1)
    # The mean of each field is subtracted first. Otherwise the variations of large values, such as geopotential, would
    # be lost in the rounding of their squares.
    total = points.count.sum((-2, -1), keepdims=True)
    centre = (points.count * points.mean).sum((-2, -1), keepdims=True) / np.maximum(total, 1)
    offset = np.where(points.count > 0, points.mean - centre, 0.0)
    mean = summed(points.count * offset) / some
    m2 = summed(points.m2 + points.count * offset**2) - count * mean**2
    return Pooled(count, np.where(count > 0, mean + centre, 0.0), np.maximum(m2, 0.0))


def smoothed(points: Pooled, wraps: bool, sigma: float = SIGMA) -> tuple[np.ndarray, np.ndarray]:
    """Smooth the maps of mean and standard deviation by a Gaussian, over the points that have values.

    The standard deviation is at least a fraction of its root mean square over all points. Otherwise the first rain at a
    point where it never rained in training would be 1e8 standard deviations.

    `wraps` is whether the grid goes around the globe, so that longitude wraps. `sigma` is in points; 0 does not smooth.

    Returns:
        Maps of mean and standard deviation, (..., Y, X) float64.
    """
    there = (points.count > 0).astype(np.float64)
    std = np.sqrt(points.m2 / np.maximum(points.count, 1))
    found = _gaussian(std, there, wraps, sigma)  # rounding may make it slightly negative
    least = _LEAST * np.sqrt((found**2).mean((-2, -1), keepdims=True))
    return _gaussian(points.mean, there, wraps, sigma), np.maximum(found, least)


def _gaussian(values: np.ndarray, there: np.ndarray, wraps: bool, sigma: float) -> np.ndarray:
    """Return the Gaussian mean of `values` over the points where `there` is 1; the plain mean where none is near."""
    plain = (values * there).sum((-2, -1), keepdims=True) / np.maximum(there.sum((-2, -1), keepdims=True), 1)
    if sigma <= 0:
        return np.where(there > 0, values, plain)

    def blurred(z: np.ndarray) -> np.ndarray:
        """Smooth by a Gaussian that ends at the poles, and wraps or ends along longitude."""
        rows = ndimage.gaussian_filter1d(z, sigma, axis=-2, mode="constant")
        return ndimage.gaussian_filter1d(rows, sigma, axis=-1, mode="wrap" if wraps else "constant")

    # Dividing by the smoothed weights scales up what remains of the Gaussian near edges and gaps. The plain mean is
    # subtracted before and added afterwards, so that points out of reach get the plain mean.
    weight = blurred(there)
    reached = weight > 1e-9
    mean = blurred((values - plain) * there) / np.where(reached, weight, 1.0)
    return np.where(reached, mean, 0.0) + plain
