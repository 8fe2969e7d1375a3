"""Fits the point network of `models.points` to single points of training dates.

Neighbouring points of one field are alike, points of many dates are not. So a step of the fit takes `_BATCH` points of
all dates, where a step on whole fields would see only a few dates. Each date is read with a few random choices of its
members. `training.point_targets` describes what the network learns.

Over several ranks, each rank holds the points of its own dates. A step draws its points from those of all ranks, each
rank takes those that it holds, and the gradients are summed.

Axes: T lead, F field (variables and levels, then surface variables), K input, U output, N row of the pool (a point of a
date, with some of its members), P point, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.machine import memory_limit
from ensemble_ml.models.inputs import plane_count
from ensemble_ml.models.points import PointNetwork
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.optim.lion import AdamW
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.progress import NETWORK, Pace, Team

log = logging.getLogger(__name__)

_ROWS = 1_000_000  # most points in a pool
_LEAST_STEPS = 500  # fewest steps of the schedule: small pools get more passes
_BATCH = 2048  # most rows of a step
_CHOICES, _EACH = 4, 500  # most choices of a date's members; fewest points of each
# Largest learning rate; weight decay; fraction of hidden units dropped; fraction of the steps in which the rate rises.
_RATE, _DECAY, _DROPOUT, _WARM = 1e-3, 0.3, 0.3, 0.1
_PASSES = 4  # fewest passes over the pool
_LEAST_ROWS = 20_000  # fewest rows of a pool, unless the dates have fewer: fits to few points do not generalise
# Fraction of the memory that the job may use, not of what is free now, so that runs do not differ.
_SHARE_OF_MEMORY, _MOST_BYTES = 0.15, 3 << 30
_MOST_OPERATIONS = 3e13  # bound on the operations of `_PASSES` passes over the pool
# Least standard deviation by which place, season and number of members are divided. So values outside the range of the
# training dates stay within a few units.
_LEAST_SPREAD = 0.3
LOOKED_AT = 50_000  # rows of a pool from which means are computed
_TINY = 1e-12


@dataclass(eq=False)
class Known:
    """The targets of one loss at the rows of a pool.

    Attributes:
        arrays: the arrays (N, T F) that the loss needs; zero where absent.
        weight: (N, T F) the weight of each field: the area of the cell, or zero where one of the arrays is absent.
    """

    arrays: list[Tensor]
    weight: Tensor

    def at(self, rows: Tensor | slice) -> Known:
        """Return some rows."""
        return Known([values[rows] for values in self.arrays], self.weight[rows])


@dataclass(eq=False)
class Pool:
    """The rows of a pool that this rank holds: from row `first` on. All ranks together hold `rows` of them.

    Attributes:
        inputs: (N, K) inputs x, bfloat16.
        known: the targets of each loss.
        first: number of this rank's first row among all rows.
        rows: number of rows of all ranks.
    """

    inputs: Tensor
    known: list[Known]
    first: int
    rows: int

    def spaced(self, most: int) -> slice:
        """Return a slice of this rank's rows, as its part of about `most` evenly spaced rows of all ranks."""
        step = max(1, self.rows // most)
        return slice(-self.first % step, None, step)

    def held(self, rows: Tensor) -> Tensor:
        """Return the positions among this rank's rows of those `rows` of the whole pool that it holds."""
        own = rows - self.first
        return own[(own >= 0) & (own < len(self.inputs))]


# From a date, its sample, M and points to the inputs x (K, P), and for each loss the arrays (T F, P) that it needs, NaN
# where absent.
Take = Callable[[int, Sample, int, Tensor], tuple[Tensor, list[list[Tensor]]]]
Losses = Callable[[Tensor, list[Known]], list[Tensor]]  # from outputs (P, U) and targets to losses (P, T F)


def gather(
    network: PointNetwork, dates: Dates, train: np.ndarray, sizes: Sequence[int], take: Take, arrays: Sequence[int]
) -> Pool | None:
    """Collect random points of all dates, for each of a few random choices of the date's members.

    Training samples have `sizes` members. `take` returns inputs and arrays at some points of a date; the losses need as
    many of these as `arrays` says.

    Returns:
        This rank's part of the pool; None, which is logged, if `pool_size` allows too few points, if the time for this
        fit ends before they are read, or if no date has a target.
    """
    inputs, area = network.first.shape[1] - 1, torch.from_numpy(dates.spec.grid.area_weights()).float().flatten()
    fields, cells = dates.shape[0] * dates.shape[1], len(area)
    choices, each = pool_size(cells, (len(network.first), inputs + 1), fields, arrays, len(train))
    rows = each * len(train) * choices
    if rows < min(_LEAST_ROWS, len(train) * choices * cells):
        text = "%s: the bounds on memory and operations allow fewer than %d points, so nothing is added"
        log.info(text, NETWORK, _LEAST_ROWS)
        return None
    mine = dates.team.stretch(len(train) * choices)
    held = each * len(mine)
    known = [Known([torch.empty(held, fields) for _ in range(n)], torch.empty(held, fields)) for n in arrays]
    made = Pool(torch.empty(held, inputs, dtype=torch.bfloat16), known, each * mine.start, rows)
    draw, late = np.random.default_rng(2 * dates.seed), False
    with dates.progress.stage(f"{NETWORK}: points", len(mine)) as tick:
        for row, (date, chosen) in enumerate(choices_of(dates, train, sizes, choices, draw), -mine.start):
            picked = draw.choice(cells, each, replace=False)
            # All ranks draw all numbers, so that the pool does not depend on the number of ranks.
            if not 0 <= row < len(mine):
                continue
            if late := dates.progress.is_late():
                break
            at = torch.from_numpy(np.sort(picked))  # `LinearCorrection.at_points` is fastest on sorted points
            values, given = take(date, dates.sample(date, chosen), len(chosen), at)
            place = slice(row * each, (row + 1) * each)
            made.inputs[place] = values.T.bfloat16()
            for of, some in zip(made.known, given, strict=True):
                there = torch.stack([torch.isfinite(values) for values in some]).all(0)
                for kept, values in zip(of.arrays, some, strict=True):
                    kept[place] = torch.where(there, values, 0.0).T
                of.weight[place] = (there * area[at]).T
            tick(1)
    # If one rank ran out of time, all give up, because the pool would lack its dates.
    if dates.team.anywhere(late):
        dates.progress.note_cut("none of its steps")
        return None
    if not dates.team.anywhere(any(bool(of.weight.any()) for of in made.known)):
        log.info("%s: no training date has a target to fit it to, so nothing is added", NETWORK)
        return None
    return made


def pool_size(cells: int, first: tuple[int, int], fields: int, arrays: Sequence[int], dates: int) -> tuple[int, int]:
    """Return the size of a pool that the bounds on memory, rows and operations allow.

    `first` is the shape (H, K + 1) of the network's first weights, `fields` are T F, and each loss needs some `arrays`
    (N, T F).

    Returns:
        Number of choices of a date's members, and number of points of each.
    """
    # Bytes of a row: inputs in bfloat16, arrays and the weight of each loss in float32.
    a_row = 2 * (first[1] - 1) + 4 * (sum(arrays) + len(arrays)) * fields
    budget = min(_MOST_BYTES, _SHARE_OF_MEMORY * memory_limit()) / a_row
    budget = min(budget, _ROWS, _MOST_OPERATIONS / (6 * _PASSES * first[0] * first[1])) / dates
    choices = int(min(_CHOICES, max(1, budget // min(cells, _EACH))))  # few, because each has to be read
    return choices, int(min(cells, budget / choices))


def steps_of(rows: int) -> tuple[int, int, int]:
    """Return the size of a batch, batches of a pass over a pool, and number of passes."""
    batch = min(_BATCH, max(256, rows // 64), rows)
    a_pass = rows // batch
    return batch, a_pass, max(_PASSES, -(-_LEAST_STEPS // a_pass))


def choices_of(
    dates: Dates, train: np.ndarray, sizes: Sequence[int], turns: int, draw: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the index of each date `turns` times, with positions of some of its members.

    The number of members alternates between that of the validation and one drawn from `sizes`: within a date if there
    are several turns, otherwise from date to date.
    """
    # A choice of all members has no target: the spread of all would be its own input.
    shown = sorted({size for size in sizes if size < dates.reader.full_size}) or [dates.members]
    for number, date in enumerate(train):
        for turn in range(turns):
            of_validation = (turn if turns > 1 else number) % 2 == 0
            size = dates.members if of_validation else int(draw.choice(shown))
            yield int(date), dates.drawn(int(date), size, draw)


def _batches(rows: int, batch: int, passes: int) -> Iterator[Tensor]:
    """Yield rows of a pool in random order, `batch` at a time; the rest at the end of a pass is left out."""
    for _ in range(passes):
        order = torch.randperm(rows)
        yield from order[: rows // batch * batch].split(batch)


class _Dropout(nn.Module):
    """A dropout layer that draws one byte for each unit.

    Torch's own layer draws floats, which takes a CPU as long as both layers of the network.
    """

    def __init__(self, share: float, seed: tuple[int, int]):
        super().__init__()
        self.least, self.draw = round(256 * share), np.random.default_rng(seed)

    def forward(self, hidden: Tensor) -> Tensor:
        """Set random units to zero in training, and scale the others up."""
        if not self.training:
            return hidden
        drawn = torch.from_numpy(self.draw.integers(0, 256, hidden.numel(), np.uint8)).view(hidden.shape)
        return hidden * (drawn >= self.least).to(hidden.dtype).mul_(256 / (256 - self.least))


def _add_gradients(layers: nn.Module, team: Team) -> None:
    """Add up the gradients of all ranks, as one tensor."""
    if team.alone:
        return
    gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in gradients])
    team.add_up(whole)
    for gradient, summed in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def _standardisation(pool: Pool, dates: Dates) -> tuple[Tensor, Tensor]:
    """Return mean and spread (K,) of the inputs of a pool; an input that never varies has an infinite spread."""
    common = plane_count(dates.spec)  # the last inputs: place, season and number of members
    # All ranks standardise by the same rows, so that their weights stay equal.
    some = dates.team.joined(pool.inputs[pool.spaced(LOOKED_AT)].float())
    middle, spread = some.mean(0), some.std(0)
    varies = spread > _TINY
    spread[-common:] = spread[-common:].clamp(min=_LEAST_SPREAD)
    return middle, torch.where(varies, spread, torch.inf)


def learn(network: PointNetwork, pool: Pool, losses: Losses, unit: Tensor, dates: Dates) -> bool:
    """Fit the weights of the network to a pool.

    Inputs are standardised and outputs divided by `unit` (U,) for the fit. Finally both scalings go into the weights.

    If there is no time for all steps, each step advances the schedule of the learning rate by more, so that the rate
    still falls to zero at the end. The seed of the dates draws the first weights, the batches and the dropout.

    Returns:
        True if the network was fitted; False if there was no time for any step, and the network is unchanged.
    """
    team = dates.team
    middle, spread = _standardisation(pool, dates)
    hidden, outputs = network.first.shape[0], len(network.second)
    low = has_bfloat16(torch.device("cpu"))
    # The random state of the process is restored at the end, so that the fit does not change what comes after it.
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(dates.seed)  # that of the CPU; a GPU's generator is left alone
        first, second = nn.Linear(len(middle), hidden), nn.Linear(hidden, outputs)
        # The output starts at zero, so the fit starts from the linear correction alone.
        nn.init.zeros_(second.weight)
        nn.init.zeros_(second.bias)
        dropout = _Dropout(_DROPOUT, (dates.seed, pool.first))  # each rank draws for its own points
        layers = nn.Sequential(first, nn.GELU(), dropout, second)
        batch, a_pass, passes = steps_of(pool.rows)
        total = passes * a_pass
        optimizer = AdamW(layers.parameters(), _RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=total + 1, pct_start=_WARM)
        totals = torch.stack([of.weight.sum() for of in pool.known])
        team.add_up(totals)
        # Missing targets make the mean weight smaller. Dividing by it keeps the size of a loss the same.
        shares = (totals / (pool.rows * pool.known[0].weight.shape[1])).clamp(min=_TINY)
        pace, done, taken = Pace(total, dates.progress.deadline), 0, 0
        with dates.progress.stage(NETWORK, total) as tick:
            for drawn in _batches(pool.rows, batch, passes):
                # The pace depends on the clock, so the first rank decides for all.
                if (stride := team.first_says(pace.stride(done))) == 0:
                    break
                chosen = pool.held(drawn)
                inputs = (pool.inputs[chosen].float() - middle) / spread
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    found = layers(inputs)
                known = [of.at(chosen) for of in pool.known]
                costs = [(a * of.weight).sum() for a, of in zip(losses(found.float(), known), known, strict=True)]
                optimizer.zero_grad()
                (torch.stack(costs) / shares / (known[0].weight.shape[1] * batch)).sum().backward()
                _add_gradients(layers, team)
                optimizer.step()
                for _ in range(stride):
                    schedule.step()
                done, taken = done + stride, taken + 1
                tick(stride)
        if 0 < taken < total:
            dates.progress.note_cut(f"{taken} of {total} steps")
    finally:
        torch.set_rng_state(state)
    if not taken:
        dates.progress.note_cut("none of its steps")
        return False
    with torch.no_grad():
        # W1 (x - middle) / spread + bias is again a linear function of x, and the units of the outputs go into W2.
        slopes = first.weight / spread
        network.first.copy_(torch.cat([slopes, (first.bias - slopes @ middle)[:, None]], 1))
        network.second.copy_(torch.cat([second.weight, second.bias[:, None]], 1) * unit[:, None])
    return True
