"""Reduce the sampling noise in maps of means over a few dates, one spatial scale at a time.

The mean of n maps holds a signal and noise, whose variance is 1/n of that between dates. Each map is split into scales:
differences of Gaussian means of 1, 2, 4, ... cells, and the mean of all cells. For each scale,

    noise   = (A - B) / (n_eff - 1)
    weight  = max(0, 1 - noise / B)
    n_eff   = n (1 - r) / (1 + r)

    A       mean square of the scale in single dates
    B       its mean square in the mean map
    noise   the part of B that is noise
    n_eff   effective number of dates, fewer than n if neighbouring dates are alike
    r       correlation between neighbouring dates

This is the Wiener filter, with the spectra of signal and noise estimated from the maps themselves (empirical Bayes).
With a single scale it is the positive-part estimator of James and Stein (1961).

Axes: K scale, T lead, F field (variable and level), Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.grid import Grid
from ensemble_ml.training.progress import Team

_MOST_CORRELATED = 0.9  # largest r
_PRIOR = 5.0  # weight of the mean over fields, in independent numbers
_TINY = 1e-30
_NOTHING = 1e-20  # too small to change a float32 sum; products with smaller weights are denormal and ten times slower
_ENOUGH_FOR_BIAS = 8  # dates: with no more than these, Kendall's correction of r would divide by almost zero


class Scales:
    """The scales of a grid: maps are split into parts of different width that add up to the map."""

    def __init__(self, grid: Grid):
        # Widths double up to a sixth of the smaller side of the grid.
        widths = [1.0]
        while 2 * widths[-1] <= min(grid.shape) / 6:
            widths.append(2 * widths[-1])
        rows, columns = grid.shape
        self._filters = [(_gaussian(rows, w, False), _gaussian(columns, w, grid.wraps).T) for w in widths]
        self.area = torch.from_numpy(grid.area_weights() / (rows * columns)).float()
        self.count = len(widths) + 2
        # Approximate number of independent values in each part of a map; one in the area mean.
        self.freedom = torch.tensor([max(1.0, rows * columns / (4 * np.pi * w**2)) for w in widths] + [1.0, 1.0])

    def split(self, z: Tensor) -> Iterator[Tensor]:
        """Split a map (..., Y, X), float32, into its K scales, of which the last one is the area mean.

        The parts are yielded one at a time, because memory holds few maps of a large grid.
        """
        wider = z
        # A part is the difference between one filter of the map and the next.
        for lat, lon in self._filters:
            finer, wider = wider, lat @ z @ lon
            yield finer - wider
        mean = (z * self.area).sum((-2, -1), keepdim=True).expand_as(z)
        yield wider - mean
        yield mean

    def smooth(self, z: Tensor) -> Tensor:
        """Smooth a map (..., Y, X) by a Gaussian one cell wide."""
        lat, lon = self._filters[0]
        return lat @ z @ lon

    def mean(self, z: Tensor, there: Tensor | None = None) -> Tensor:
        """Return the area mean of `z` (..., Y, X) over the points `there` or all, (...) float64; NaN without points."""
        if there is None or bool(there.all()):
            return (z * self.area).sum((-2, -1), dtype=torch.float64)
        area = torch.where(there, self.area, 0.0).sum((-2, -1), dtype=torch.float64)
        total = (torch.where(there, z, 0.0) * self.area).sum((-2, -1), dtype=torch.float64)
        # The area of a complete field is exactly one. So its mean does not depend on whether other fields have gaps.
        area = torch.where(there.flatten(-2).all(-1), 1.0, area)
        return total / torch.where(area > 0, area, torch.nan)

    def filled(self, z: Tensor) -> Tensor:
        """Fill NaN in `z`, (..., Y, X), by the area mean of the other points; a field without any value stays NaN."""
        there = torch.isfinite(z)
        if bool(there.all()):
            return z
        return torch.where(there, z, self.mean(z, there)[..., None, None].to(z.dtype))


def _gaussian(size: int, width: float, wraps: bool) -> Tensor:
    """Return the matrix (size, size) of Gaussian means of an axis, `width` cells wide, whose rows add up to one."""
    distance = np.abs(np.arange(size)[:, None] - np.arange(size))
    if wraps:
        distance = np.minimum(distance, size - distance)
    weights = np.exp(-0.5 * (distance / width) ** 2)
    weights[weights < _NOTHING] = 0
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).float()


class MapMean:
    """A mean of maps (T, F, Y, X), which are added one date at a time. Any date may lack some of the (T, F) fields."""

    def __init__(self, scales: Scales, fields: tuple[int, int]):
        self.scales = scales
        rows, columns = scales.area.shape
        self.count = torch.zeros(fields, dtype=torch.float64)
        self.total = torch.zeros(*fields, rows, columns, dtype=torch.float64)
        self._square = torch.zeros(scales.count, *fields, dtype=torch.float64)
        self._lagged, self._pairs = self._square.clone(), self.count.clone()
        self._last: list[Tensor] = []  # the scales of the last date
        self._was_valid = torch.zeros(fields, dtype=torch.bool)

    def add(self, z: Tensor, valid: Tensor, *, follows: bool) -> None:
        """Add a date.

        Args:
            z: (T, F, Y, X) float32, finite for the fields that the date has.
            valid: (T, F) True for the fields that the date has.
            follows: the date is a neighbour in time of the one added before.
        """
        z = torch.where(valid[..., None, None], z, 0.0)
        # A pair counts for r only if both dates have the field and are neighbours in time.
        both = valid & self._was_valid if follows else torch.zeros_like(valid)
        self.count += valid
        self.total += z
        self._pairs += both
        for k, part in enumerate(self.scales.split(z)):
            self._square[k] += self.scales.mean(part**2)
            if both.any():
                self._lagged[k] += torch.where(both, self.scales.mean(part * self._last[k]), 0.0)
            self._last[k : k + 1] = [part]
        self._was_valid = valid

    def stand_before(self, z: Tensor, valid: Tensor) -> None:
        """Set the map before this rank's first date, as in `add`. Another rank adds it; here it counts only for r."""
        self._last = list(self.scales.split(torch.where(valid[..., None, None], z, 0.0)))
        self._was_valid = valid

    def add_up(self, team: Team) -> None:
        """Add up the sums of all ranks."""
        team.add_up(self.count, self.total, self._square, self._lagged, self._pairs)

    @property
    def mean(self) -> Tensor:
        """Return the mean map, (T, F, Y, X) float32; zero for a field that no date has."""
        return (self.total / self.count.clamp(min=1)[..., None, None]).float()

    def estimate(self) -> Estimate:
        """Estimate how much of each scale is signal: its weight, zero if the effective number of dates is one."""
        parts = list(self.scales.split(self.mean))
        n = self.count.clamp(min=1)
        averaged = torch.stack([self.scales.mean(part**2) for part in parts])
        between = (self._square / n - averaged).clamp(min=0)
        lagged = torch.where(self._pairs > 0, self._lagged / self._pairs.clamp(min=1) - averaged, 0.0)
        averaged, between, lagged = (self._pooled(v) for v in (averaged, between, lagged))
        r = lagged / between.clamp(min=_TINY)
        # Because the mean is from the same dates, r is too small by about (1 + 4 r) / n (Kendall 1954,
        # doi:10.1093/biomet/41.3-4.403).
        r = torch.where(n > _ENOUGH_FOR_BIAS, (n * r + 1) / (n - 4).clamp(min=1), r) * (self._pairs > 0)
        r = r.clamp(0, _MOST_CORRELATED)
        dates = (n * (1 - r) / (1 + r)).clamp(min=1)
        noise = between / (dates - 1).clamp(min=1e-9)
        weight = torch.where((averaged > 0) & (dates > 1), 1 - noise / averaged.clamp(min=_TINY), 0.0)
        return Estimate(self.scales, parts, weight.clamp(0, 1).float(), dates.float())

    def _pooled(self, values: Tensor) -> Tensor:
        """Shrink statistics (K, T, F) towards their mean over all fields of a lead.

        Those of wide scales are shrunk most, because they come from few independent values.
        """
        freedom = self.scales.freedom[:, None, None].double()
        return (freedom * values + _PRIOR * values.mean(-1, keepdim=True)) / (freedom + _PRIOR)


@dataclass(eq=False)
class Estimate:
    """An estimate of a mean map with less noise.

    Attributes:
        scales: the scales of the grid.
        parts: K parts (T, F, Y, X) of the mean map.
        weight: (K, T, F) weight of each part, from 0 (all noise) to 1.
        dates: (K, T, F) effective number of dates.
    """

    scales: Scales
    parts: list[Tensor]
    weight: Tensor
    dates: Tensor

    def map(self) -> Tensor:
        """Return the weighted sum of the parts, (T, F, Y, X)."""
        return self._weighed(self.parts)

    def without(self, z: Tensor) -> Tensor:
        """Return `map` as it would be without the date of map `z`, (T, F, Y, X). The weights stay as they are."""
        n = self.dates[..., None, None].clamp(min=1.5)
        # (n mean - map) / (n - 1), with the effective number for n, because dates resemble their neighbours.
        own = zip(n, self.parts, self.scales.split(z), strict=True)
        return self._weighed((n * part - mine) / (n - 1) for n, part, mine in own)

    def _weighed(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the sum of parts times their weights."""
        return sum(weight * part for weight, part in zip(self.weight[..., None, None], parts, strict=True))  # type: ignore[return-value]
