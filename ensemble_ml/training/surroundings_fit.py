"""Fits the network of `models.surroundings` to what the linear correction leaves, on single points of training dates.

Points of one field are alike, those of many dates are not: a step sees `_BATCH` points of as many dates, each reduced
to a few random choices of members, where a step on whole fields sees four dates. Targets are errors in typical spreads,
each divided by its own root mean square. What the network adds to an output is then scaled by the share of it, none
to all, that leaves the smallest squared error on the validation dates (a fifth of the training dates where there are
none): a field that it learned nothing of keeps its linear correction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.memory import free_memory
from ensemble_ml.models.linear import KINDS
from ensemble_ml.models.place import common_planes
from ensemble_ml.models.surroundings import Surroundings
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import Linear, Targets, neighbourhoods

log = logging.getLogger(__name__)

_ROWS = 1_000_000  # points, at most
_EPOCHS, _LEAST_STEPS = 4, 500
_BATCH = 4096
_CHOICES = 4  # of members a date
_RATE, _DECAY, _DROPOUT, _WARM = 1e-3, 1e-2, 0.3, 0.1
_LEAST_ROWS = 20_000  # fewer teach nothing that lasts
_SHARE_OF_MEMORY = 0.2
_MOST_BYTES = 4 << 30
_MOST_OPERATIONS = 1e14  # of the steps
_VALIDATION_DATES = 40
_TINY = 1e-12


@dataclass(eq=False)
class Correction:
    """What stands before the network; `position` as `place.position_planes`."""

    linear: Linear
    surroundings: Surroundings | None
    position: Tensor

    def __call__(self, sample: Sample, members: int) -> tuple[Tensor, Tensor]:
        """What is added to mean and spread (T, F, Y, X) of M members."""
        padded = self.linear.padded(sample.mean, sample.spread, members)
        found = self.linear.module(padded, torch.tensor([float(members)]))
        if self.surroundings is not None:
            found = found + self.surroundings(padded, self.common(sample, members))
        return self.linear.added(found)

    def common(self, sample: Sample, members: int) -> Tensor:
        """Place, season and number of members, (1, P, Y, X)."""
        return common_planes(self.position, torch.tensor([float(members)]), torch.tensor([sample.day]))


def fit_surroundings(
    correction: Correction,
    dates: Dates,
    train: np.ndarray,
    validation: np.ndarray,
    sizes: Sequence[int],
    targets: Targets,
) -> None:
    """Give `correction.surroundings` its weights.

    Args:
        train, validation: indices of start dates.
        sizes: numbers of members that the training will show.
        targets: as `linear_fit.fit_linear` takes them.
    """
    network = correction.surroundings
    assert network is not None
    if not len(validation):
        kept = len(train) - len(train) // 5
        train, validation = train[:kept], train[kept:]
    points = _Points(correction, dates, targets)
    pool = _pool(points, train, sizes)
    if pool is None or not len(validation):
        log.info("surroundings: %d training dates hold too few points, so nothing is added", len(train))
        return
    _train(network, pool)
    shares, gain = _shares(points, validation)
    network.second *= shares[:, None]
    mean, spread = (100 * float(part.mean()) for part in gain.chunk(KINDS))
    log.info("surroundings: RMSE on the validation dates %.1f %% (mean), %.1f %% (spread) lower", mean, spread)


@dataclass(eq=False)
class _Pool:
    """Inputs (N, K), targets (N, O) with nothing where absent, and what each counts for (N, O)."""

    inputs: Tensor
    wanted: Tensor
    weight: Tensor


class _Points:
    """What single points of a date ask of the network."""

    def __init__(self, correction: Correction, dates: Dates, targets: Targets):
        self.correction, self.dates, self.targets = correction, dates, targets
        self.area = torch.from_numpy(dates.spec.grid.area_weights()).float().flatten()

    def errors(self, date: int, sample: Sample, members: int) -> Tensor:
        """What linear terms leave, (O, Y X) in typical spreads, NaN where absent."""
        linear = self.correction.linear
        done = linear(sample.mean, sample.spread, members)
        wanted = torch.stack([a - b for a, b in zip(self.targets(date, sample, members), done, strict=True)])
        return linear.ordered(wanted / linear.typical).flatten(1)

    def inputs(self, sample: Sample, members: int, at: Tensor) -> Tensor:
        """Inputs of the network but for the constant, (K, P)."""
        network = self.correction.surroundings
        assert network is not None
        padded = self.correction.linear.padded(sample.mean, sample.spread, members)
        others = torch.cat([network.sizes(padded), self.correction.common(sample, members)], 1)
        return torch.cat([neighbourhoods(padded[0], at), others[0].flatten(1)[:, at]])


def _pool(points: _Points, train: np.ndarray, sizes: Sequence[int]) -> _Pool | None:
    """Random points of all dates, each as a few random choices of members see it; none where there are too few."""
    dates, network = points.dates, points.correction.surroundings
    assert network is not None
    inputs, outputs = network.first.shape[1] - 1, len(network.second)
    cells = len(points.area)
    budget = min(_MOST_BYTES, _SHARE_OF_MEMORY * free_memory()) / (2 * inputs + 2 * 4 * outputs)
    budget = min(budget, _ROWS, _MOST_OPERATIONS / (6 * _EPOCHS * network.first.numel()))
    each = int(min(cells, budget / max(1, len(train) * _CHOICES)))
    rows = each * len(train) * _CHOICES
    if rows < min(_LEAST_ROWS, len(train) * _CHOICES * cells):
        return None
    values = torch.empty(2, rows, outputs)
    made = _Pool(torch.empty(rows, inputs, dtype=torch.bfloat16), *values)
    draw = np.random.default_rng(0)
    for row, (date, chosen) in enumerate(_choices(dates, train, sizes, draw)):
        sample, members = dates.sample(date, chosen), len(chosen)
        at = torch.from_numpy(draw.choice(cells, each, replace=False))
        wanted = points.errors(date, sample, members)[:, at]
        there = torch.isfinite(wanted)
        place = slice(row * each, (row + 1) * each)
        made.inputs[place] = points.inputs(sample, members, at).T.bfloat16()
        made.wanted[place] = torch.where(there, wanted, 0.0).T
        made.weight[place] = (there * points.area[at]).T
    return made


def _choices(
    dates: Dates, train: np.ndarray, sizes: Sequence[int], draw: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Dates, each `_CHOICES` times, with positions of members: as many as are looked at, then as training shows."""
    shown = sorted({size for size in sizes if size < dates.reader.full_size}) or [dates.members]
    for date in train:
        for turn in range(_CHOICES):
            size = dates.members if turn % 2 == 0 else int(draw.choice(shown))
            yield int(date), dates.drawn(int(date), size, draw)


def _train(network: Surroundings, pool: _Pool) -> None:
    """Fit the weights to the pool, and undo the standardisation of inputs and targets in them."""
    generator = torch.Generator().manual_seed(0)
    some = pool.inputs[:: max(1, len(pool.inputs) // 50_000)].float()
    middle, spread = some.mean(0), some.std(0)
    spread = torch.where(spread > _TINY, spread, torch.inf)  # what never varies says nothing
    power = (pool.wanted**2 * pool.weight).sum(0) / pool.weight.sum(0).clamp(min=_TINY)
    unit = power.sqrt().clamp(min=_TINY)
    hidden, outputs = network.first.shape[0], len(network.second)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Linear(len(middle), hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(second.weight)
        nn.init.zeros_(second.bias)
        layers = nn.Sequential(first, nn.GELU(), nn.Dropout(_DROPOUT), second)
        batch = min(_BATCH, max(256, len(pool.inputs) // 64))
        a_pass = len(pool.inputs) // batch
        passes = max(_EPOCHS, -(-_LEAST_STEPS // a_pass))
        optimizer = torch.optim.AdamW(layers.parameters(), _RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, _RATE, total_steps=passes * a_pass + 1, pct_start=_WARM
        )
        share = pool.weight.mean()
        for _ in range(passes):
            order = torch.randperm(len(pool.inputs), generator=generator)
            for chosen in order[: len(order) // batch * batch].split(batch):
                given = (pool.inputs[chosen].float() - middle) / spread
                with torch.autocast("cpu", torch.bfloat16):
                    found = layers(given)
                error = (found.float() - pool.wanted[chosen] / unit) ** 2 * pool.weight[chosen]
                optimizer.zero_grad()
                (error.mean() / share).backward()
                optimizer.step()
                schedule.step()
    with torch.no_grad():
        slopes = first.weight / spread
        network.first.copy_(torch.cat([slopes, (first.bias - slopes @ middle)[:, None]], 1))
        network.second.copy_(torch.cat([second.weight, second.bias[:, None]], 1) * unit[:, None])


def _shares(points: _Points, validation: np.ndarray) -> tuple[Tensor, Tensor]:
    """How much of each output to take, (O,), and by what share its root mean square error then falls."""
    chosen = validation[np.linspace(0, len(validation) - 1, min(len(validation), _VALIDATION_DATES)).astype(int)]
    both = own = whole = torch.zeros((), dtype=torch.float64)
    network = points.correction.surroundings
    assert network is not None
    for date in chosen:
        sample, members = points.dates.sample(int(date)), points.dates.members
        errors = points.errors(int(date), sample, members)
        weight = (torch.isfinite(errors) * points.area).double()
        errors = torch.nan_to_num(errors).double()
        padded = points.correction.linear.padded(sample.mean, sample.spread, members)
        found = network(padded, points.correction.common(sample, members))[0].flatten(1).double()
        both = both + (weight * errors * found).sum(1)
        own = own + (weight * found**2).sum(1)
        whole = whole + (weight * errors**2).sum(1)
    shares = (both / own.clamp(min=_TINY)).clamp(0, 1)
    left = whole - 2 * shares * both + shares**2 * own
    gain = 1 - (left / whole.clamp(min=_TINY)).clamp(0, 1).sqrt()
    return shares.float(), torch.where(whole > 0, gain, 0.0)
