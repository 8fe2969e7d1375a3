"""Batches for training (random dates and members) and for validation (fixed).

Axes: B date in a batch, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order, member_subset
from ensemble_ml.loading.plan import to_holders
from ensemble_ml.loading.reader import Reader, day_of_year, iso
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, valid_shares
from ensemble_ml.store.source import Fields, Part

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]
NewArray = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]  # memory for one array of a batch


@dataclass(frozen=True, eq=False)
class Draw:
    """One sample: a start date (an index into the store's) and the positions of the members that it shows."""

    date: int
    members: np.ndarray


@dataclass(eq=False)
class Batch:
    """Inputs, and targets at the predicted leads: (B, T_out, V, Z, Y, X) and (B, T_out, S, Y, X), NaN where absent.

    Targets are None where the model has no head for them. `target_spread_*` is NaN for a sample that shows all members:
    its spread is the target itself, so it trains the distribution of the truth alone. A rank whose share of a short
    batch is empty gets a sample without targets, `idle`: it weighs nothing, and the rank joins every exchange.
    """

    inputs: EnsembleInput
    init_time: list[str]
    truth_p: Tensor | None = None
    truth_s: Tensor | None = None
    target_spread_p: Tensor | None = None
    target_spread_s: Tensor | None = None
    idle: bool = False

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device, in another type."""
        how = {"device": device, "dtype": dtype, "non_blocking": non_blocking}
        moved: dict[str, Any] = {k: v.to(**how) for k, v in vars(self).items() if isinstance(v, Tensor)}  # type: ignore[call-overload]
        return Batch(self.inputs.to(**how), self.init_time, **moved, idle=self.idle)

    def __len__(self) -> int:
        return 0 if self.idle else len(self.init_time)


class Batches:
    """The batches of global steps `start_step` to `steps` of a run; iterating twice gives the same ones twice.

    Args:
        reader: of the store.
        dates: indices of the training dates.
        batch_size: dates a step; the last batch of an epoch may be shorter.
        seed: of dates and members (`order.py`).
        sizes: how many members a sample may show.
        share: (which, of how many) of the equal shares that each batch is cut into.

    Raises:
        UserError: no date, or no size that leaves something to learn.
    """

    def __init__(
        self,
        reader: Reader,
        dates: Sequence[int] | np.ndarray,
        *,
        batch_size: int,
        seed: int,
        sizes: Sequence[int],
        steps: int,
        start_step: int = 0,
        share: tuple[int, int] = (0, 1),
    ):
        if not len(dates):
            raise UserError("data.train: no start date; name years, dates or ranges that the store holds")
        self.reader, self.dates = reader, np.asarray(dates)
        self._spare = spare_members(reader.spec)
        self.order = Order(seed, len(dates), batch_size)
        self.sizes = self._usable(sizes)
        self.steps, self.start_step, self.share = steps, start_step, share

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(step) for step in range(self.start_step, self.steps))

    def batch(self, step: int) -> Batch:
        """The batch of one global step (counted from 0), or this share of it."""
        draws = self.draws(step, self.share[1])[self.share[0]]
        idle = not draws
        return collate(self.reader, draws or [self.stand_in(step)], idle=idle)

    def draws(self, step: int, parts: int, holders: np.ndarray | None = None) -> list[list[Draw]]:
        """The samples of one global step in `parts` shares, as equal as can be.

        `holders` (F,): the share that each training date should rather go to; None cuts the batch in its order.
        """
        epoch, samples = self.order.step(step)
        shares = np.array_split(samples, parts)
        if holders is not None and parts > 1:
            to = to_holders(holders[samples], np.array([len(share) for share in shares]))
            shares = [samples[to == part] for part in range(parts)]
        return [[Draw(int(self.dates[s]), self.draw(epoch, int(s))) for s in share] for share in shares]

    def stand_in(self, step: int) -> Draw:
        """What a rank reads whose share of a step is empty."""
        epoch, samples = self.order.step(step)
        return Draw(int(self.dates[samples[0]]), self.draw(epoch, int(samples[0])))

    def draw(self, epoch: int, sample: int) -> np.ndarray:
        """Members that a sample shows: of those that its date has whole."""
        there = self.reader.available(int(self.dates[sample]))
        sizes = [size for size in self.sizes if size <= len(there) - self._spare]
        return member_subset(self.order.seed, epoch, sample, self.reader.full_size, sizes, there)

    def _usable(self, sizes: Sequence[int]) -> list[int]:
        """With a spread head alone, samples of all members would teach nothing: they are not drawn."""
        most = self.reader.full_size - self._spare
        allowed = [size for size in sizes if size <= most]
        if not allowed:
            raise UserError(
                f"data.members={list(sizes)}: at most {most} of {self.reader.full_size} members can be drawn here"
            )
        if left := sorted(set(sizes) - set(allowed)):
            log.info("data.members: %s: not drawn, of at most %d here", ", ".join(map(str, left)), most)
        return allowed


def fixed_batches(
    reader: Reader,
    dates: Iterable[int],
    members: Sequence[int] | np.ndarray,
    *,
    batch_size: int = 1,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Batches of `dates` in order, for validation: `members` are positions among the whole members of each date.

    `share`: (which, of how many) of the batches, dealt out one by one.
    """
    groups = fixed_draws(reader, dates, members, batch_size)[share[0] :: share[1]]
    return (collate(reader, group) for group in groups)


def batches_by_size(
    reader: Reader,
    dates: Iterable[int],
    sizes: Sequence[int],
    *,
    batch_size: int = 1,
    share: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, Batch]]:
    """The `fixed_batches` of the first M members for each M of `sizes`, with their M: of the same dates one after the
    other, for which these are read once."""
    for group in fixed_draws(reader, dates, np.arange(max(sizes)), batch_size)[share[0] :: share[1]]:
        read = [_read_sizes(reader, draw, sizes) for draw in group]
        for size, samples in zip(sizes, zip(*read, strict=True), strict=True):
            yield size, join(reader, [Draw(draw.date, draw.members[:size]) for draw in group], samples)


def fixed_draws(
    reader: Reader, dates: Iterable[int], members: Sequence[int] | np.ndarray, batch_size: int
) -> list[list[Draw]]:
    """The samples of the batches of `fixed_batches`, before they are dealt out."""
    chosen = np.asarray(members)
    draws = [Draw(int(date), reader.available(int(date))[chosen]) for date in dates]
    return [draws[i : i + batch_size] for i in range(0, len(draws), batch_size)]


def spare_members(spec: ModelSpec) -> int:
    """Members of a date that no sample may show: one where only spread is learned, whose target all members make."""
    return 0 if spec.config.postprocess else 1


def collate(reader: Reader, draws: Sequence[Draw], *, idle: bool = False) -> Batch:
    """Read the samples of a batch and put them together."""
    return join(reader, draws, [read_sample(reader, draw) for draw in draws], idle=idle)


def read_sample(reader: Reader, draw: Draw) -> Arrays:
    """Inputs and targets of one sample by name, without the axis B."""
    return _read_sizes(reader, draw, [len(draw.members)])[0]


def _read_sizes(reader: Reader, draw: Draw, sizes: Sequence[int]) -> list[Arrays]:
    """The same of the first members of a sample, of each of `sizes`; the targets are one memory."""
    members, targets = reader.forecast(draw.date, draw.members), dict[str, np.ndarray]()
    for part, name, wanted in target_parts(reader.spec):
        if wanted:
            fields = reader.target(part, draw.date)
            targets |= {f"{name}_p": fields.pressure, f"{name}_s": fields.surface}
    return [_inputs(reader, Fields(members.pressure[:size], members.surface[:size])) | targets for size in sizes]


def target_parts(spec: ModelSpec) -> tuple[tuple[Part, str, bool], ...]:
    """Parts of the store that are targets, their names in a batch, and whether the model learns them."""
    return (Part.TRUTH, "truth", spec.config.postprocess), (Part.SPREAD, "target_spread", spec.config.spread)


def join(
    reader: Reader, draws: Sequence[Draw], samples: Sequence[Arrays], *, idle: bool = False, new: NewArray | None = None
) -> Batch:
    """Stack samples, into memory that `new` gives; the targets of an `idle` batch are NaN."""
    spec = reader.spec
    counts = [len(draw.members) for draw in draws]
    stacked = {name: _stack(name, [sample[name] for sample in samples], max(counts), new) for name in samples[0]}
    targets = {name: stacked.pop(name) for name in list(stacked) if name.startswith(("truth_", "target_"))}
    times = [reader.time(draw.date) for draw in draws]
    inputs = EnsembleInput(
        count=torch.tensor([float(count) for count in counts]),
        day_of_year=torch.tensor([float(day_of_year(time)) for time in times]),
        **stacked,
    )
    whole = [i for i, draw in enumerate(draws) if counts[i] == len(reader.available(draw.date))]
    for name, values in targets.items():
        if name.startswith("target_spread"):
            values[whole] = torch.nan
        if spec.masked:
            targets[name] = _hide(spec, inputs, name, values)
        if idle:
            targets[name] = torch.full_like(values, torch.nan)
    return Batch(inputs, [iso(time) for time in times], **targets, idle=idle)


def _hide(spec: ModelSpec, inputs: EnsembleInput, name: str, target: Tensor) -> Tensor:
    """NaN, which weighs nothing, where no member given has a value: there is nothing to correct."""
    mean = inputs.mean_p if name.endswith("_p") else inputs.mean_s
    return torch.where(torch.isnan(mean[:, spec.lead_positions]), torch.nan, target)


def _inputs(reader: Reader, fields: Fields) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for suffix, values in (("p", fields.pressure), ("s", fields.surface)):
        found[f"mean_{suffix}"], found[f"spread_{suffix}"] = reader.reduce(values)
        if reader.spec.config.one_member:
            found[f"member_{suffix}"] = values[0]
        if reader.spec.takes_members:
            found[f"members_{suffix}"] = values
    if reader.spec.masked:
        found |= valid_shares(reader.spec, fields.pressure, fields.surface)
    return found


def _stack(name: str, arrays: list[np.ndarray], most: int, new: NewArray | None) -> Tensor:
    if name.startswith("members_"):
        arrays = [filled(values, most) for values in arrays]
    if new is None:
        return torch.from_numpy(np.stack(arrays))
    out = new(name, (len(arrays), *arrays[0].shape), arrays[0].dtype)
    return torch.from_numpy(np.stack(arrays, out=out))


def filled(members: np.ndarray, most: int) -> np.ndarray:
    """Zeros behind the members, up to `most`."""
    found = np.zeros((most, *members.shape[1:]), members.dtype)
    found[: len(members)] = members
    return found
