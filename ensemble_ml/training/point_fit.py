"""Fits a hidden layer of `models.surroundings` to single points of training dates.

Points of one field are alike, those of many dates are not: a step sees `_BATCH` points of as many dates, each reduced
to a few random choices of members, where a step on whole fields sees four dates. Over several ranks each holds the
points of its own dates; a step's points are drawn from those of all, each rank takes the ones that it holds, and
gradients are added up.

Axes: T lead, F field (variables and levels, then surface variables), K input, U output, O = 2 T F outputs of the linear
correction, N row of the pool (a point of a date seen by some members), P point, Y latitude, X longitude.
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
from ensemble_ml.models.surroundings import Surroundings, apply_networks, inputs_of
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import Linear
from ensemble_ml.training.linear_sums import Targets, neighbourhoods
from ensemble_ml.training.progress import CALLED, Pace
from ensemble_ml.training.team import Team

log = logging.getLogger(__name__)

_ROWS = 1_000_000  # points, at most
_LEAST_STEPS = 500
_BATCH = 2048
_CHOICES, _EACH = 4, 500  # choices of members a date, at most; points of each, at least
_RATE, _DECAY, _DROPOUT, _WARM = 1e-3, 0.3, 0.3, 0.1
_PASSES = 4
_LEAST_ROWS = 20_000  # where there are more points, fewer teach nothing that lasts
_SHARE_OF_MEMORY, _MOST_BYTES = 0.15, 3 << 30  # of what the job may use, not of what is free: runs are to be repeatable
_MOST_OPERATIONS = 3e13  # of the passes that are asked for; few points are passed over more often
_LEAST_SPREAD = 0.3  # that place, season and size are divided by: beyond what was seen they stay within a few
LOOKED_AT = 50_000  # rows of a pool: enough for means
_TINY = 1e-12


@dataclass(eq=False)
class Correction:
    """What stands before the U-Net; `position` as `place.position_planes`."""

    linear: Linear
    surroundings: Surroundings | None
    residuals: Surroundings | None
    position: Tensor

    def __call__(self, sample: Sample, members: int) -> tuple[Tensor, Tensor]:
        """What is added to mean and spread (T, F, Y, X) of M members."""
        padded = self.linear.padded(sample.mean, sample.spread, members)
        found = self.linear.module(padded, torch.tensor([float(members)]))
        if self.surroundings is not None:
            found.chunk(KINDS, 1)[1].add_(self.of(self.surroundings, padded, sample, members))
        return self.linear.added(found)

    def expected_errors(self, sample: Sample, members: int) -> Tensor | None:
        """v and w of `models.surroundings`, (2, T, F, Y, X); None where nothing says them."""
        if self.residuals is None:
            return None
        padded = self.linear.padded(sample.mean, sample.spread, members)
        found = self.of(self.residuals, padded, sample, members)
        return self.linear.unordered(found[0].unflatten(0, (2, -1)))

    def of(self, network: Surroundings, padded: Tensor, sample: Sample, members: int) -> Tensor:
        """What a network says of a date, (1, U, Y, X), from departures with a row and a column more on each side."""
        return apply_networks([network], padded, self.linear.relative_climatology, self.common(sample, members))[0]

    def common(self, sample: Sample, members: int) -> Tensor:
        """Place, season and number of members, (1, P, Y, X)."""
        return common_planes(self.position, torch.tensor([float(members)]), torch.tensor([sample.day]))


@dataclass(eq=False)
class Pool:
    """The rows that this rank holds of a pool, from row `first` on; all ranks together hold `rows` of them.

    Inputs (N, K), what the loss is made of (N, F) with nothing where absent, and what fields count for (N, F).
    """

    inputs: Tensor
    given: list[Tensor]
    weight: Tensor
    first: int
    rows: int

    def spaced(self, most: int) -> slice:
        """Return which of its rows this rank has among about `most` evenly spaced ones of all."""
        step = max(1, self.rows // most)
        return slice(-self.first % step, None, step)

    def held(self, rows: Tensor) -> Tensor:
        """Return which of the pool's `rows` this rank holds, as positions among its own."""
        own = rows - self.first
        return own[(own >= 0) & (own < len(self.inputs))]


class Points:
    """What single points of a date ask of a network."""

    def __init__(self, correction: Correction, dates: Dates, targets: Targets):
        self.correction, self.dates, self.targets = correction, dates, targets
        self.area = torch.from_numpy(dates.spec.grid.area_weights()).float().flatten()
        self.columns = dates.spec.grid.shape[1]

    def wanted(self, date: int, sample: Sample, members: int) -> Tensor:
        """Errors to explain, (O, Y X) in typical spreads, NaN where absent."""
        linear = self.correction.linear
        return linear.ordered(torch.stack(self.targets(date, sample, members)) / linear.typical).flatten(1)

    def at(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x but for the constant, (K, P), errors to explain, and what linear terms explain of them, (O, P)."""
        linear, network = self.correction.linear, self.correction.surroundings
        assert network is not None
        padded = linear.padded(sample.mean, sample.spread, members)
        near, rows = neighbourhoods(padded[0], at), at // self.columns
        fields = linear.relative_climatology, self.correction.common(sample, members)[0]
        cells = near.unflatten(0, (-1, 3, 3)).movedim(-1, 0)
        climatology, common = (values.flatten(1).index_select(1, at).T[..., None, None] for values in fields)
        inputs = inputs_of(cells, climatology, common, network.frame_at(rows))[..., 0, 0].T
        done = linear.module.at_points(near, rows, members)
        return inputs, self.wanted(date, sample, members).index_select(1, at), done


Take = Callable[[int, Sample, int, Tensor], tuple[Tensor, list[Tensor]]]
Loss = Callable[[Tensor, Tensor], Tensor]  # (P, T F), of outputs (P, U) and the rows of the pool that they stand for


def gather(
    name: str, network: Surroundings, points: Points, train: np.ndarray, sizes: Sequence[int], take: Take,
    arrays: int, stream: int,
) -> Pool | None:  # fmt: skip
    """Random points of all dates, each as a few random choices of members see it; none where memory holds too few, or
    the time for this fit ends before they are read, which is told.

    Args:
        name, network: of what will be fitted.
        train: indices of start dates.
        sizes: numbers of members that the training will show.
        take: from a date, its sample, M and points: x (K, P), and `arrays` that the loss is made of, each (T F, P), NaN
            where absent; what lacks one counts for nothing.
        stream: 0 or 1: the two networks see other points, and choices of members, of the dates' seed.
    """
    dates, inputs = points.dates, network.first.shape[1] - 1
    fields = len(points.correction.linear.relative_climatology)
    cells = len(points.area)
    choices, each = pool_size(cells, (len(network.first), inputs + 1), fields, arrays, len(train))
    rows = each * len(train) * choices
    if rows < min(_LEAST_ROWS, len(train) * choices * cells):
        log.info("%s: memory holds fewer than %d points, so nothing is added", name, _LEAST_ROWS)
        return None
    mine = dates.team.stretch(len(train) * choices)
    held = each * len(mine)
    made = Pool(
        torch.empty(held, inputs, dtype=torch.bfloat16),
        [torch.empty(held, fields) for _ in range(arrays)],
        torch.empty(held, fields),
        each * mine.start,
        rows,
    )
    draw, late = np.random.default_rng(2 * dates.seed + stream), False
    with dates.progress.stage(f"{CALLED[name]}: points", len(mine)) as tick:
        for row, (date, chosen) in enumerate(choices_of(dates, train, sizes, choices, draw), -mine.start):
            picked = draw.choice(cells, each, replace=False)
            if not 0 <= row < len(mine):  # another rank's, which draws the same
                continue
            if late := dates.progress.is_late(name):
                break
            sample, members = dates.sample(date, chosen), len(chosen)
            at = torch.from_numpy(np.sort(picked))  # as `at_points` has them soonest
            values, given = take(date, sample, members, at)
            there = torch.stack([torch.isfinite(values) for values in given]).all(0)
            place = slice(row * each, (row + 1) * each)
            made.inputs[place] = values.T.bfloat16()
            for kept, some in zip(made.given, given, strict=True):
                kept[place] = torch.where(there, some, 0.0).T
            made.weight[place] = (there * points.area[at]).T
            tick(1)
    if dates.team.anywhere(late):
        dates.progress.note_cut(name, "none of its steps")
        return None
    if not dates.team.anywhere(bool(made.weight.any())):
        log.info("%s: what it is fitted to is known on no training date, so nothing is added", name)
        return None
    return made


def pool_size(cells: int, first: tuple[int, int], fields: int, arrays: int, dates: int) -> tuple[int, int]:
    """Return how many choices of a date's members a pool shows, and how many of the `cells` points of each, as memory
    and the time of a fit allow.

    Args:
        first: shape (H, K + 1) of the network's first weights.
        fields: T F.
        arrays: of these fields that the loss is made of.
    """
    budget = min(_MOST_BYTES, _SHARE_OF_MEMORY * memory_limit()) / (2 * (first[1] - 1) + 4 * (arrays + 1) * fields)
    budget = min(budget, _ROWS, _MOST_OPERATIONS / (6 * _PASSES * first[0] * first[1])) / dates
    choices = int(min(_CHOICES, max(1, budget // min(cells, _EACH))))  # each has to be read
    return choices, int(min(cells, budget / choices))


def steps_of(rows: int) -> tuple[int, int, int]:
    """Return rows of a batch, batches of a pass over a pool of `rows`, and passes."""
    batch = min(_BATCH, max(256, rows // 64), rows)
    a_pass = rows // batch
    return batch, a_pass, max(_PASSES, -(-_LEAST_STEPS // a_pass))


def choices_of(
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


def _batches(rows: int, batch: int, passes: int) -> Iterator[Tensor]:
    """Yield rows of a pool in random order, `batch` at once; what is left over at the end of a pass is left out."""
    for _ in range(passes):
        order = torch.randperm(rows)
        yield from order[: rows // batch * batch].split(batch)


class _Dropout(nn.Module):
    """Dropout that draws a byte, not a float, for each unit: torch's takes as long as both layers on a processor."""

    def __init__(self, share: float, seed: tuple[int, int]):
        super().__init__()
        self.least, self.draw = round(256 * share), np.random.default_rng(seed)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        drawn = torch.from_numpy(self.draw.integers(0, 256, hidden.numel(), np.uint8)).view(hidden.shape)
        return hidden * (drawn >= self.least).to(hidden.dtype).mul_(256 / (256 - self.least))


def _add_gradients(layers: nn.Module, team: Team) -> None:
    """Add the gradients of all ranks up."""
    if team.alone:
        return
    gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in gradients])
    team.add_up(whole)
    for gradient, summed in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def learn(name: str, network: Surroundings, pool: Pool, loss: Loss, unit: Tensor, dates: Dates) -> bool:
    """Fit the weights to the pool, and undo the standardisation of inputs and outputs in them; say whether any step was
    taken.

    Where the time for this fit is too short for all steps, the schedule of rates is run through in fewer of them: the
    rate still falls to nothing by the end, so what is kept is the best state that the time allowed.

    Args:
        name, network: of what is fitted.
        loss: of outputs (P, U) in `unit`s (U,).
        dates: that the pool is from; their seed is that of the weights.
    """
    team = dates.team
    common = plane_count(dates.spec)  # of the inputs, the last ones: place, season and size
    some = team.joined(pool.inputs[pool.spaced(LOOKED_AT)].float())
    middle, spread = some.mean(0), some.std(0)
    varies = spread > _TINY
    spread[-common:] = spread[-common:].clamp(min=_LEAST_SPREAD)
    spread = torch.where(varies, spread, torch.inf)  # what never varies says nothing
    hidden, outputs = network.first.shape[0], len(network.second)
    low = has_bfloat16(torch.device("cpu"))
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(dates.seed)  # of the CPU alone
        first, second = nn.Linear(len(middle), hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(second.weight)
        nn.init.zeros_(second.bias)
        dropout = _Dropout(_DROPOUT, (dates.seed, pool.first))  # each rank drops units of its own points
        layers = nn.Sequential(first, nn.GELU(), dropout, second)
        batch, a_pass, passes = steps_of(pool.rows)
        total = passes * a_pass
        optimizer = torch.optim.AdamW(layers.parameters(), _RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=total + 1, pct_start=_WARM)
        total_weight = pool.weight.sum()
        team.add_up(total_weight)
        share = total_weight / (pool.rows * pool.weight.shape[1])
        pace, done, taken = Pace(total, dates.progress.deadline(name)), 0, 0
        with dates.progress.stage(CALLED[name], total) as tick:
            for drawn in _batches(pool.rows, batch, passes):
                if (stride := team.first_says(pace.stride(done))) == 0:
                    break
                chosen = pool.held(drawn)
                inputs = (pool.inputs[chosen].float() - middle) / spread
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    found = layers(inputs)
                costs = loss(found.float(), chosen) * pool.weight[chosen]
                optimizer.zero_grad()
                (costs.sum() / (costs.shape[1] * batch) / share).backward()
                _add_gradients(layers, team)
                optimizer.step()
                for _ in range(stride):
                    schedule.step()
                done, taken = done + stride, taken + 1
                tick(stride)
        if 0 < taken < total:
            dates.progress.note_cut(name, f"{taken} of {total} steps")
    finally:
        torch.set_rng_state(state)
    if not taken:
        dates.progress.note_cut(name, "none of its steps")
        return False
    with torch.no_grad():
        slopes = first.weight / spread
        network.first.copy_(torch.cat([slopes, (first.bias - slopes @ middle)[:, None]], 1))
        network.second.copy_(torch.cat([second.weight, second.bias[:, None]], 1) * unit[:, None])
    return True
