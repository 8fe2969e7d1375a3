"""Maps of means over a few dates, freed from sampling noise scale by scale.

Axes: K scale, T lead, F field (variable and level), Y latitude, X longitude.

The mean of n maps z_t holds a signal and 1/n of the variance between dates. Splitting z into scales (differences of
Gaussian means of 1, 2, 4 ... cells, and the mean of all cells) shows how much of each: with A the mean square of a
scale in single dates and B its square in the mean map,

    noise in B = (A - B) / (n_eff - 1),    weight = max(0, 1 - noise / B),

which is the Wiener filter with both spectra estimated from the maps themselves (empirical Bayes; with one scale it is
the positive-part estimator of James and Stein 1961). n_eff = n (1 - r) / (1 + r) counts dates that resemble their
neighbour (correlation r) as fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.grid import Grid
from ensemble_ml.training.team import Team

_MOST_CORRELATED = 0.9
_PRIOR = 5.0  # how many numbers of its own outweigh a scale's mean over fields
_TINY = 1e-30
_NOTHING = 1e-20  # a weight no sum of float32 notices; products with smaller ones are denormal, ten times slower
_ENOUGH_FOR_BIAS = 8  # pairs below which Kendall's correction of r would divide by next to nothing


class Scales:
    """Splits maps on `grid` into parts of different width that add up to the map."""

    def __init__(self, grid: Grid):
        widths = [1.0]
        while 2 * widths[-1] <= min(grid.shape) / 6:
            widths.append(2 * widths[-1])
        rows, columns = grid.shape
        self._filters = [(_gaussian(rows, w, False), _gaussian(columns, w, grid.wraps).T) for w in widths]
        self.area = torch.from_numpy(grid.area_weights() / (rows * columns)).float()
        self.count = len(widths) + 2
        # Independent numbers in each part of a map, roughly; one in the area mean.
        self.freedom = torch.tensor([max(1.0, rows * columns / (4 * np.pi * w**2)) for w in widths] + [1.0, 1.0])

    def split(self, z: Tensor) -> Iterator[Tensor]:
        """(..., Y, X) float32 -> K parts (..., Y, X), one at a time: of large grids memory holds few. The last part is
        the area mean."""
        wider = z
        for lat, lon in self._filters:
            finer, wider = wider, lat @ z @ lon
            yield finer - wider
        mean = (z * self.area).sum((-2, -1), keepdim=True).expand_as(z)
        yield wider - mean
        yield mean

    def smooth(self, z: Tensor) -> Tensor:
        """Gaussian means one cell wide, (..., Y, X)."""
        lat, lon = self._filters[0]
        return lat @ z @ lon

    def mean(self, z: Tensor, there: Tensor | None = None) -> Tensor:
        """Area mean, (..., Y, X) -> (...) float64; over the points `there` where given, NaN for a field without any."""
        if there is None or bool(there.all()):
            return (z * self.area).sum((-2, -1), dtype=torch.float64)
        area = torch.where(there, self.area, 0.0).sum((-2, -1), dtype=torch.float64)
        total = (torch.where(there, z, 0.0) * self.area).sum((-2, -1), dtype=torch.float64)
        area = torch.where(there.flatten(-2).all(-1), 1.0, area)  # a whole field's mean hangs on no other field
        return total / torch.where(area > 0, area, torch.nan)

    def filled(self, z: Tensor) -> Tensor:
        """Points without a value take the area mean of those that have one: (..., Y, X); nothing has all NaN."""
        there = torch.isfinite(z)
        if bool(there.all()):
            return z
        return torch.where(there, z, self.mean(z, there)[..., None, None].to(z.dtype))


def _gaussian(size: int, width: float, wraps: bool) -> Tensor:
    """Matrix (size, size) of Gaussian means; at an open edge the weights that remain are scaled up."""
    distance = np.abs(np.arange(size)[:, None] - np.arange(size))
    if wraps:
        distance = np.minimum(distance, size - distance)
    weights = np.exp(-0.5 * (distance / width) ** 2)
    weights[weights < _NOTHING] = 0
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).float()


class MapMean:
    """Mean of maps (T, F, Y, X) that come one date at a time, any of them possibly absent for some fields."""

    def __init__(self, scales: Scales, fields: tuple[int, int]):
        self.scales = scales
        rows, columns = scales.area.shape
        self.count = torch.zeros(fields, dtype=torch.float64)
        self.total = torch.zeros(*fields, rows, columns, dtype=torch.float64)
        self._square = torch.zeros(scales.count, *fields, dtype=torch.float64)
        self._lagged, self._pairs = self._square.clone(), self.count.clone()
        self._last: list[Tensor] = []  # parts of the last date
        self._was_valid = torch.zeros(fields, dtype=torch.bool)

    def add(self, z: Tensor, valid: Tensor, *, follows: bool) -> None:
        """Add a date: `z` (T, F, Y, X) float32, `valid` (T, F) bool; `follows`: it is next to the one before."""
        z = torch.where(valid[..., None, None], z, 0.0)
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
        """Let the next date follow this one, which another rank adds."""
        self._last = list(self.scales.split(torch.where(valid[..., None, None], z, 0.0)))
        self._was_valid = valid

    def add_up(self, team: Team) -> None:
        """Take the dates of all ranks together."""
        team.add_up(self.count, self.total, self._square, self._lagged, self._pairs)

    @property
    def mean(self) -> Tensor:
        """(T, F, Y, X) float32, zero where no date was valid."""
        return (self.total / self.count.clamp(min=1)[..., None, None]).float()

    def estimate(self) -> Estimate:
        """Weigh the scales by how much of each is signal."""
        parts = list(self.scales.split(self.mean))
        n = self.count.clamp(min=1)
        averaged = torch.stack([self.scales.mean(part**2) for part in parts])
        between = (self._square / n - averaged).clamp(min=0)
        lagged = torch.where(self._pairs > 0, self._lagged / self._pairs.clamp(min=1) - averaged, 0.0)
        averaged, between, lagged = (self._pooled(v) for v in (averaged, between, lagged))
        r = lagged / between.clamp(min=_TINY)
        # A mean taken from the same dates makes r too small by about (1 + 4 r) / n (Kendall 1954).
        r = torch.where(n > _ENOUGH_FOR_BIAS, (n * r + 1) / (n - 4).clamp(min=1), r) * (self._pairs > 0)
        r = r.clamp(0, _MOST_CORRELATED)
        dates = (n * (1 - r) / (1 + r)).clamp(min=1)
        noise = between / (dates - 1).clamp(min=1e-9)
        weight = torch.where((averaged > 0) & (dates > 1), 1 - noise / averaged.clamp(min=_TINY), 0.0)
        return Estimate(self.scales, parts, weight.clamp(0, 1).float(), dates.float())

    def _pooled(self, values: Tensor) -> Tensor:
        """Lean statistics (K, T, F) of few numbers, those of wide scales, on their mean over all fields of a lead."""
        freedom = self.scales.freedom[:, None, None].double()
        return (freedom * values + _PRIOR * values.mean(-1, keepdim=True)) / (freedom + _PRIOR)


@dataclass(eq=False)
class Estimate:
    """K `parts` (T, F, Y, X) of the mean map; `weight` and effective number of `dates`, both (K, T, F)."""

    scales: Scales
    parts: list[Tensor]
    weight: Tensor
    dates: Tensor

    def map(self) -> Tensor:
        """The mean freed from noise, (T, F, Y, X)."""
        return self._weighed(self.parts)

    def without(self, z: Tensor) -> Tensor:
        """The same had the date with map `z` not been there, so that its residual is one of an unseen date."""
        n = self.dates[..., None, None].clamp(min=1.5)
        own = zip(n, self.parts, self.scales.split(z), strict=True)
        return self._weighed((n * part - mine) / (n - 1) for n, part, mine in own)

    def _weighed(self, parts: Iterable[Tensor]) -> Tensor:
        return sum(weight * part for weight, part in zip(self.weight[..., None, None], parts, strict=True))  # type: ignore[return-value]
