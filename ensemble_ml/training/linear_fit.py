"""Fits the linear correction of `models.linear` to the training dates: ridge regression in closed form.

Axes: T lead, F field (variables and levels, then surface variables), C channel, O output, P point, K predictor (a
channel at one of nine offsets), Y latitude, X longitude.

Targets, in typical spreads: y - m - bias (without the date itself) for the mean, S - s1 for the spread, from a few
ensemble sizes M < N at once. Predictors are standardised; each output takes the penalty of a list with the smallest
squared error on the validation dates (a fifth of the training dates where there are none), or no correction at all.
What a target is missing of is taken to be like the rest of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.heads import typical_spread
from ensemble_ml.models.linear import KINDS, TERMS, LinearCorrection, departures
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample

log = logging.getLogger(__name__)

PENALTIES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)
_MOST_OPERATIONS = 1e13  # of the sums: on large grids a random part of the points
_FEWEST_DATES = 10  # of which a fifth is held out
_SIZES = 3
_TINY = 1e-12

Targets = Callable[[int, Sample, int], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Linear:
    """The correction as the fits of `climate_fit` apply it: `anchor`, `climatology` (T, F, Y, X), `shrink` (T, F)."""

    module: LinearCorrection
    anchor: Tensor
    climatology: Tensor
    shrink: Tensor

    def __post_init__(self) -> None:
        self.typical = typical_spread(self.climatology)[..., None, None]

    def __call__(self, mean: Tensor, spread: Tensor, members: int) -> tuple[Tensor, Tensor]:
        """What is added to mean and spread (T, F, Y, X) of M members."""
        added = self.module(self.channels(mean, spread, members)[None], torch.tensor([float(members)]))[0]
        shift, more = self._unordered(added.unflatten(0, (KINDS, -1))) * self.typical
        return shift, more

    def channels(self, mean: Tensor, spread: Tensor, members: int) -> Tensor:
        """Departures (C, Y, X) in the order of the model's channels."""
        count = torch.tensor([float(members)])
        shrink = self.shrink[..., None, None]
        given = mean[None], spread[None], count, self.anchor, self.climatology, shrink, self.typical
        return self.ordered(departures(*given)[0])

    def ordered(self, values: Tensor) -> Tensor:
        """(KINDS, T, F, Y, X) -> (C, Y, X): pressure levels of all leads, then the surface of all leads."""
        return values.flatten(1, 2)[:, self._order].flatten(0, 1)

    def _unordered(self, values: Tensor) -> Tensor:
        """(KINDS, T * F, Y, X) in the order of channels -> (KINDS, T, F, Y, X)."""
        return values[:, torch.argsort(self._order)].unflatten(1, self.anchor.shape[:2])

    @property
    def _order(self) -> Tensor:
        spec = self.module.spec
        places = torch.arange(self.anchor.shape[0] * self.anchor.shape[1]).view(self.anchor.shape[:2])
        upper = len(spec.variables) * len(spec.levels)
        return torch.cat([places[:, :upper].flatten(), places[:, upper:].flatten()])


def mean_state(dates: Dates, chosen: np.ndarray) -> Tensor:
    """The anchor: mean of the full ensemble's mean over dates (T, F, Y, X), zero where there is no value."""
    total = torch.zeros(*dates.shape, *dates.spec.grid.shape, dtype=torch.float64)
    count = torch.zeros_like(total)
    for date in chosen:
        values = dates.target(Part.MEAN, int(date))
        there = torch.isfinite(values)
        total += torch.where(there, values, 0.0)
        count += there
    return (total / count.clamp(min=1)).float()


def fit_linear(
    linear: Linear, dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int], targets: Targets
) -> None:
    """Give `linear` its weights.

    Args:
        train, validation: indices of start dates.
        sizes: numbers of members that the training will show.
        targets: from a date, its sample and M: errors of mean and spread to explain, (T, F, Y, X), NaN where absent.
    """
    if not len(validation):
        kept = len(train) - len(train) // 5
        train, validation = train[:kept], train[kept:]
    if len(train) + len(validation) < _FEWEST_DATES:
        log.info("linear correction: %d training dates are too few, so there is none", len(train) + len(validation))
        return
    rows = _Rows(linear, dates, targets, train)
    shown = _three(sorted({s for s in sizes if s < dates.reader.full_size} | {dates.members}))
    centre = float(np.mean([1 / size for size in shown]))
    gram, right = _sums(rows, train, shown, centre)
    solved = _solutions(gram, right)  # (penalty, TERMS * K, O)
    candidates = torch.cat([torch.zeros_like(solved[:1]), solved]).float()
    errors = torch.stack([_errors(rows, date, candidates, centre) for date in validation]).sum(0)
    best = errors.argmin(0)
    chosen = candidates.gather(0, best.expand(1, candidates.shape[1], -1))[0]
    first, second = chosen.unflatten(0, (TERMS, -1))
    weight = torch.stack([first - centre * second, second]).unflatten(1, (-1, 3, 3)).permute(0, 4, 1, 2, 3)
    linear.module.weight.copy_(weight)
    gain = 1 - (errors.gather(0, best[None])[0] / errors[0].clamp(min=_TINY)).sqrt()
    mean, spread = (100 * float(part.mean()) for part in gain.chunk(KINDS))
    log.info("linear correction: RMSE on the validation dates %.1f %% (mean), %.1f %% (spread) lower", mean, spread)


class _Rows:
    """Predictors (K, P), targets (O, P) of a date seen by M members, each with the root of its area, and which
    targets are there."""

    def __init__(self, linear: Linear, dates: Dates, targets: Targets, train: np.ndarray):
        self.linear, self.dates, self.targets = linear, dates, targets
        grid = dates.spec.grid
        self.weights = torch.from_numpy(grid.area_weights()).float().sqrt().flatten()
        self.columns = grid.shape[1]
        wanted = 9 * linear.module.weight.shape[2]
        budget = _MOST_OPERATIONS / (2 * wanted**2 * _SIZES * len(train))
        self.points = int(min(len(self.weights), max(1, budget)))

    def __call__(self, date: int, members: int) -> tuple[Tensor, Tensor, Tensor]:
        dates = Dates(self.dates.reader, members)
        sample = dates.sample(int(date))
        at = self._at(int(date))
        channels = self.linear.channels(sample.mean, sample.spread, members)
        padded = self.linear.module.pad(channels[None, ..., None])[0, ..., 0].flatten(1)
        wide = self.columns + 2
        corner = at // self.columns * wide + at % self.columns
        near = torch.stack([padded[:, corner + row * wide + column] for row in range(3) for column in range(3)], 1)
        errors = torch.stack(self.targets(int(date), sample, members)) / self.linear.typical
        wanted = self.linear.ordered(errors).flatten(1)[:, at]
        weights, there = self.weights[at], torch.isfinite(wanted)
        return near.flatten(0, 1) * weights, torch.where(there, wanted, 0.0) * weights, there

    def areas(self, date: int) -> Tensor:
        """Share (P,) of each point of a date."""
        area = self.weights[self._at(int(date))].double() ** 2
        return area / area.sum()

    def _at(self, date: int) -> Tensor:
        """Which points of a date are looked at."""
        if self.points == len(self.weights):
            return torch.arange(self.points)
        return torch.randperm(len(self.weights), generator=torch.Generator().manual_seed(date))[: self.points]


def _three(sizes: list[int]) -> list[int]:
    return [sizes[i] for i in sorted({0, len(sizes) // 2, len(sizes) - 1})]


def _sums(rows: _Rows, train: np.ndarray, sizes: list[int], centre: float) -> tuple[Tensor, Tensor]:
    """Products of predictors (1, 1/M - centre) x K with themselves, and with the targets."""
    gram = right = torch.zeros((), dtype=torch.float64)
    for size in sizes:
        terms = torch.tensor([1.0, 1 / size - centre], dtype=torch.float64)
        own = cross = absent = torch.zeros((), dtype=torch.float64)
        for date in train:
            near, wanted, there = rows(date, size)
            own, cross = own + (near @ near.T).double(), cross + (near @ wanted.T).double()
            absent = absent + (~there).double() @ rows.areas(date)
        gram = gram + torch.kron(torch.outer(terms, terms), own)
        right = right + torch.kron(terms[:, None], cross / (1 - absent / len(train)).clamp(min=_TINY))
    return gram, right


def _solutions(gram: Tensor, right: Tensor) -> Tensor:
    """Coefficients at each of `PENALTIES`, of predictors brought to the same size."""
    size = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(size > _TINY * size.max(), 1 / size.clamp(min=1e-300), 0.0)
    scaled, wanted = gram * scale[:, None] * scale, right * scale[:, None]
    one = torch.eye(len(gram), dtype=gram.dtype)
    found = [torch.cholesky_solve(wanted, torch.linalg.cholesky(scaled + p * one)) for p in PENALTIES]
    return torch.stack(found) * scale[:, None]


def _errors(rows: _Rows, date: int, candidates: Tensor, centre: float) -> Tensor:
    """Squared errors (candidate, O) on a date."""
    members = rows.dates.members
    near, wanted, there = rows(date, members)
    first, second = candidates.unflatten(1, (TERMS, -1)).unbind(1)
    weight = first + (1 / members - centre) * second
    return torch.where(there, (wanted - weight.mT @ near) ** 2, 0.0).sum(-1, dtype=torch.float64)
