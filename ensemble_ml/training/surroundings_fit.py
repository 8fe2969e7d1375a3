"""Fits the network of `models.surroundings` to what the linear correction leaves, on single points of training dates.

Points of one field are alike, those of many dates are not: a step sees `_BATCH` points of as many dates, each reduced
to a few random choices of members, where a step on whole fields sees four dates. Targets are errors in typical spreads,
each divided by its own root mean square. What the network adds to an output is then scaled by the share of it, none
to all, that leaves the smallest squared error on the validation dates (a fifth of the training dates where there are
none): a field that it learned nothing of keeps its linear correction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.machine import memory_limit
from ensemble_ml.models.linear import KINDS
from ensemble_ml.models.place import common_planes, plane_count
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.models.surroundings import Surroundings
from ensemble_ml.training.climate_data import Dates, Sample, spaced
from ensemble_ml.training.linear_fit import FEWEST_DATES, Linear, Targets, neighbourhoods

log = logging.getLogger(__name__)

_ROWS = 1_000_000  # points, at most
_PASSES, _LEAST_STEPS = 4, 500
_BATCH = 4096
_CHOICES, _EACH = 4, 500  # choices of members a date, at most; points of each, at least
_RATE, _DECAY, _DROPOUT, _WARM = 1e-3, 1e-2, 0.3, 0.1
_LEAST_ROWS = 20_000  # where there are more points, fewer teach nothing that lasts
_SHARE_OF_MEMORY, _MOST_BYTES = 0.15, 3 << 30  # of what the job may use, not of what is free: runs are to be repeatable
_MOST_OPERATIONS = 2e13  # of the steps
_LEAST_SPREAD = 0.3  # that place, season and size are divided by: beyond what was seen they stay within a few
_BEAT = 50  # steps
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
    if len(train) + len(validation) < FEWEST_DATES:
        log.info("surroundings: %d dates are too few, so nothing is added", len(train) + len(validation))
        return
    points = _Points(correction, dates, targets)
    pool = _pool(points, train, sizes)
    if pool is None:
        log.info("surroundings: memory holds fewer than %d points, so nothing is added", _LEAST_ROWS)
        return
    _train(network, pool, plane_count(dates.spec), getattr(dates.reader.source, "beat", lambda: None))
    shares, gain = _shares(points, spaced(validation, _VALIDATION_DATES))
    network.second *= shares[:, None]
    mean, spread = (100 * float(part.mean()) for part in gain.chunk(KINDS))
    told = "surroundings: fitted to %d points; RMSE on the validation dates %.1f %% (mean), %.1f %% (spread) lower"
    log.info(told, len(pool.inputs), mean, spread)


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
        self.columns = dates.spec.grid.shape[1]

    def wanted(self, date: int, sample: Sample, members: int) -> Tensor:
        """Errors to explain, (O, Y X) in typical spreads, NaN where absent."""
        linear = self.correction.linear
        return linear.ordered(torch.stack(self.targets(date, sample, members)) / linear.typical).flatten(1)

    def at(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the network but for the constant, (K, P), and what linear terms leave for it, (O, P)."""
        linear, network = self.correction.linear, self.correction.surroundings
        assert network is not None
        padded = linear.padded(sample.mean, sample.spread, members)
        near = neighbourhoods(padded[0], at)
        others = torch.cat([network.sizes(padded), self.correction.common(sample, members)], 1)
        done = linear.module.at_points(near, at // self.columns, members)
        left = self.wanted(date, sample, members)[:, at] - done
        return torch.cat([near, others[0].flatten(1)[:, at]]), left


def _pool(points: _Points, train: np.ndarray, sizes: Sequence[int]) -> _Pool | None:
    """Random points of all dates, each as a few random choices of members see it; none where there are too few."""
    dates, network = points.dates, points.correction.surroundings
    assert network is not None
    inputs, outputs = network.first.shape[1] - 1, len(network.second)
    cells = len(points.area)
    budget = min(_MOST_BYTES, _SHARE_OF_MEMORY * memory_limit()) / (2 * inputs + 2 * 4 * outputs)
    budget = min(budget, _ROWS, _MOST_OPERATIONS / (6 * _PASSES * network.first.numel())) / len(train)
    choices = int(min(_CHOICES, max(1, budget // min(cells, _EACH))))  # each has to be read
    each = int(min(cells, budget / choices))
    rows = each * len(train) * choices
    if rows < min(_LEAST_ROWS, len(train) * choices * cells):
        return None
    values = torch.empty(2, rows, outputs)
    made = _Pool(torch.empty(rows, inputs, dtype=torch.bfloat16), *values)
    draw = np.random.default_rng(0)
    for row, (date, chosen) in enumerate(_choices(dates, train, sizes, choices, draw)):
        sample, members = dates.sample(date, chosen), len(chosen)
        at = torch.from_numpy(draw.choice(cells, each, replace=False))
        inputs_at, wanted = points.at(date, sample, members, at)
        there = torch.isfinite(wanted)
        place = slice(row * each, (row + 1) * each)
        made.inputs[place] = inputs_at.T.bfloat16()
        made.wanted[place] = torch.where(there, wanted, 0.0).T
        made.weight[place] = (there * points.area[at]).T
    return made


def _choices(
    dates: Dates, train: np.ndarray, sizes: Sequence[int], turns: int, draw: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Dates, each `turns` times, with positions of members: as many as are looked at, then as training shows; by dates
    in turn where each comes but once."""
    shown = sorted({size for size in sizes if size < dates.reader.full_size}) or [dates.members]
    for number, date in enumerate(train):
        for turn in range(turns):
            looked_at = (turn if turns > 1 else number) % 2 == 0
            size = dates.members if looked_at else int(draw.choice(shown))
            yield int(date), dates.drawn(int(date), size, draw)


def _train(network: Surroundings, pool: _Pool, common: int, beat: Callable[[], None]) -> None:
    """Fit the weights to the pool, and undo the standardisation of inputs and targets in them.

    Args:
        common: inputs of place, season and size, the last ones.
        beat: called every few steps.
    """
    some = pool.inputs[:: max(1, len(pool.inputs) // 50_000)].float()
    middle, spread = some.mean(0), some.std(0)
    spread[-common:] = spread[-common:].clamp(min=_LEAST_SPREAD)
    spread = torch.where(spread > _TINY, spread, torch.inf)  # what never varies says nothing
    power = torch.stack(
        [(w**2 * c).sum() / c.sum().clamp(min=_TINY) for w, c in zip(pool.wanted.T, pool.weight.T, strict=True)]
    )
    unit = power.sqrt().clamp(min=_TINY)
    hidden, outputs = network.first.shape[0], len(network.second)
    low = has_bfloat16(torch.device("cpu"))
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(0)  # of the CPU alone
        first, second = nn.Linear(len(middle), hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(second.weight)
        nn.init.zeros_(second.bias)
        layers = nn.Sequential(first, nn.GELU(), nn.Dropout(_DROPOUT), second)
        batch = min(_BATCH, max(256, len(pool.inputs) // 64), len(pool.inputs))
        a_pass = len(pool.inputs) // batch
        passes = max(_PASSES, -(-_LEAST_STEPS // a_pass))
        optimizer = torch.optim.AdamW(layers.parameters(), _RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, _RATE, total_steps=passes * a_pass + 1, pct_start=_WARM
        )
        share = pool.weight.mean()
        for _ in range(passes):
            order = torch.randperm(len(pool.inputs))
            for step, chosen in enumerate(order[: a_pass * batch].split(batch)):
                if step % _BEAT == 0:
                    beat()
                given = (pool.inputs[chosen].float() - middle) / spread
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    found = layers(given)
                error = (found.float() - pool.wanted[chosen] / unit) ** 2 * pool.weight[chosen]
                optimizer.zero_grad()
                (error.mean() / share).backward()
                optimizer.step()
                schedule.step()
    finally:
        torch.set_rng_state(state)
    with torch.no_grad():
        slopes = first.weight / spread
        network.first.copy_(torch.cat([slopes, (first.bias - slopes @ middle)[:, None]], 1))
        network.second.copy_(torch.cat([second.weight, second.bias[:, None]], 1) * unit[:, None])


def _shares(points: _Points, validation: np.ndarray) -> tuple[Tensor, Tensor]:
    """How much of each output to take, (O,), and by what share its root mean square error then falls."""
    both = own = whole = torch.zeros((), dtype=torch.float64)
    linear, network = points.correction.linear, points.correction.surroundings
    assert network is not None
    for date in validation:
        sample, members = points.dates.sample(int(date)), points.dates.members
        padded = linear.padded(sample.mean, sample.spread, members)
        errors = points.wanted(int(date), sample, members)
        errors -= linear.module(padded, torch.tensor([float(members)]))[0].flatten(1)
        weight = torch.isfinite(errors) * points.area
        errors = errors.nan_to_num_()
        found = network(padded, points.correction.common(sample, members))[0].flatten(1)
        both = both + (weight * errors * found).sum(1, dtype=torch.float64)
        own = own + (weight * found**2).sum(1, dtype=torch.float64)
        whole = whole + (weight * errors**2).sum(1, dtype=torch.float64)
    shares = (both / own.clamp(min=_TINY)).clamp(0, 1)
    left = whole - 2 * shares * both + shares**2 * own
    gain = 1 - (left / whole.clamp(min=_TINY)).clamp(0, 1).sqrt()
    return shares.float(), torch.where(whole > 0, gain, 0.0)
