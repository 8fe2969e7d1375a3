"""List all batches of a run, make those for training and for validation, and bring them to the device of the model.

Training takes random dates and members, validation fixed ones. The schedule lists every batch in the order of use. It
follows from the seed, the dates and the settings alone, so it is the same on every rank, and all reads can be planned
from it. On a GPU batches are copied on a CUDA stream of their own, so that copies and compute overlap.

Axes: B init time in a batch, M member, T lead, F field (variables and levels, then surface variables), Y latitude,
X longitude.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order, member_subset, withheld_member
from ensemble_ml.loading.plan import to_holders
from ensemble_ml.loading.reader import Reader, day_of_year, iso
from ensemble_ml.models.inputs import EnsembleInput, valid_shares
from ensemble_ml.store.source import Fields, Part

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]  # arrays of a sample by name, without the axis B
NewArray = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]  # memory for one array of a batch


@dataclass(frozen=True, eq=False)
class Draw:
    """One sample: an init time (an index into those of the store) and the positions of the members that it shows.

    `withheld` is the position of the member that stands for the truth; None where the source gives the truth.
    """

    date: int
    members: np.ndarray
    withheld: int | None = None

    @property
    def read(self) -> np.ndarray:
        """Return the positions of all members that are read: those that are shown, then the withheld one."""
        return self.members if self.withheld is None else np.append(self.members, self.withheld)


@dataclass(eq=False)
class Batch:
    """A batch of inputs and targets.

    Targets are (B, T_out, F, Y, X) at the predicted leads, NaN where absent. They are None where the model has no head
    for them.

    `target_spread` is NaN for a sample that shows all complete members of its date. The spread of its inputs is the
    target itself, so such a sample trains the distribution of the truth only.

    A rank whose share of a short batch is empty gets a stand-in sample with NaN targets (`idle`). It has weight zero in
    the loss, but the rank still takes part in every exchange between ranks.
    """

    inputs: EnsembleInput
    init_time: list[str]
    truth: Tensor | None = None
    target_spread: Tensor | None = None
    idle: bool = False

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, *, non_blocking: bool = False) -> Batch:
        """Return the same batch on another device and in another type."""
        how = {"device": device, "dtype": dtype, "non_blocking": non_blocking}
        moved: dict[str, Any] = {k: v.to(**how) for k, v in vars(self).items() if isinstance(v, Tensor)}  # type: ignore[call-overload]
        return Batch(self.inputs.to(**how), self.init_time, **moved, idle=self.idle)

    def __len__(self) -> int:
        return 0 if self.idle else len(self.init_time)


class Batches:
    """The training batches of the global steps `start_step` to `steps` - 1 of a run.

    Iterating twice gives the same batches twice.

    Args:
        dates: Indices of the training dates.
        batch_size: Dates per step; the last batch of an epoch may be shorter.
        seed: Seed of dates and members (`order.py`).
        sizes: Numbers of members that a sample may show.
        steps: Number of global steps of the whole run.
        start_step: First global step.
        share: (which, of how many) of the shares into which each batch is cut; their lengths differ by at most one.

    Raises:
        UserError: There is no date, or all `sizes` are too large.
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
            raise UserError("data.train: no init time; name years, dates or ranges that the store holds")
        self.reader, self.dates = reader, np.asarray(dates)
        self.order = Order(seed, len(dates), batch_size)
        self.sizes = self._usable(sizes)
        self.steps, self.start_step, self.share = steps, start_step, share

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(step) for step in range(self.start_step, self.steps))

    def batch(self, step: int) -> Batch:
        """Read this share of the batch of a global step, counted from 0.

        Raises:
            UserError: An input field is missing, a value is not finite where its variable has no mask, or too few
                members of a date are complete.
        """
        draws = self.draws(step, self.share[1])[self.share[0]]
        return collate(self.reader, draws or [self.stand_in(step)], idle=not draws)

    def draws(self, step: int, parts: int, holders: np.ndarray | None = None) -> list[list[Draw]]:
        """Return the samples of a global step in `parts` shares, whose lengths differ by at most one.

        `holders` (dates,) is the share to which each training date should go if possible; None cuts the batch in its
        order.
        """
        epoch, samples = self.order.step(step)
        shares = np.array_split(samples, parts)
        # Each share keeps its length, so that no rank gets more work than with shares cut in order.
        if holders is not None and parts > 1:
            to = to_holders(holders[samples], np.array([len(share) for share in shares]))
            shares = [samples[to == part] for part in range(parts)]
        return [[self.draw(epoch, int(s)) for s in share] for share in shares]

    def stand_in(self, step: int) -> Draw:
        """Return the sample that a rank reads if its share of a step is empty: the first one of the step."""
        epoch, samples = self.order.step(step)
        return self.draw(epoch, int(samples[0]))

    def draw(self, epoch: int, sample: int) -> Draw:
        """Draw the members of a sample and, where a member stands for the truth, that member.

        `sample` is the position of the date among the training dates. The members are ascending, and all of them are
        complete on the date.

        Raises:
            UserError: Every size is larger than the number of complete members of the date that may be shown.
        """
        date, seed, withheld = int(self.dates[sample]), self.order.seed, None
        complete = self.reader.available(date)
        sizes = [size for size in self.sizes if size <= len(complete) - self.reader.spare]
        if self.reader.withhold is not None:
            withheld = withheld_member(seed, 1 + epoch, date, complete)
            complete = complete[complete != withheld]
        return Draw(date, member_subset(seed, epoch, sample, self.reader.full_size, sizes, complete), withheld)

    def _usable(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes that can be drawn. At least `Reader.spare` members of a date are not shown."""
        most = self.reader.full_size - self.reader.spare
        allowed = [size for size in sizes if size <= most]
        if not allowed:
            raise UserError(
                f"data.members={list(sizes)}: at most {most} of {self.reader.full_size} members can be drawn here"
            )
        if left := sorted(set(sizes) - set(allowed)):
            log.info("data.members: %s: not drawn; a sample shows at most %d members", ", ".join(map(str, left)), most)
        return allowed


def fixed_batches(
    reader: Reader,
    dates: Iterable[int],
    members: Sequence[int] | np.ndarray,
    *,
    batch_size: int = 1,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield the validation batches of `dates`, indices of init times, in order.

    `members` are positions among the complete members of each date, without the withheld one. `share` is (which, of how
    many) of the batches, which are dealt out one by one.
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
    """Yield the `fixed_batches` of the first M members, for each M in `sizes`, together with M.

    Batches of the same dates follow each other, and each date is read once for all sizes.
    """
    for group in fixed_draws(reader, dates, np.arange(max(sizes)), batch_size)[share[0] :: share[1]]:
        read = [_read_sizes(reader, draw, sizes) for draw in group]
        # `read` holds the samples by date and then by size; a batch needs them by size.
        for size, samples in zip(sizes, zip(*read, strict=True), strict=True):
            yield size, join(reader, [replace(draw, members=draw.members[:size]) for draw in group], samples)


def fixed_draws(
    reader: Reader, dates: Iterable[int], members: Sequence[int] | np.ndarray, batch_size: int
) -> list[list[Draw]]:
    """Return the samples of all batches of `fixed_batches`, before they are dealt out."""
    chosen = np.asarray(members)
    draws = [Draw(int(date), reader.shown(int(date))[chosen], reader.withheld(int(date))) for date in dates]
    return [draws[i : i + batch_size] for i in range(0, len(draws), batch_size)]


def collate(reader: Reader, draws: Sequence[Draw], *, idle: bool = False) -> Batch:
    """Read the samples of a batch and join them."""
    return join(reader, draws, [read_sample(reader, draw) for draw in draws], idle=idle)


def read_sample(reader: Reader, draw: Draw) -> Arrays:
    """Read inputs and targets of one sample, by name and without the axis B."""
    return _read_sizes(reader, draw, [len(draw.members)])[0]


def _read_sizes(reader: Reader, draw: Draw, sizes: Sequence[int]) -> list[Arrays]:
    """Read a sample once, and return it with its first M members for each M in `sizes`; the targets share memory."""
    members, targets = reader.forecast(draw.date, draw.read), dict[str, np.ndarray]()
    if draw.withheld is not None and reader.spec.config.postprocess:
        withheld = Fields(members.pressure[-1], members.surface[-1]).joined()
        targets["truth"] = withheld[list(reader.spec.lead_positions)]
    for part, name in target_parts(reader):
        targets[name] = reader.target(part, draw.date).joined()
    return [_inputs(reader, Fields(members.pressure[:size], members.surface[:size])) | targets for size in sizes]


def target_parts(reader: Reader) -> list[tuple[Part, str]]:
    """Return the parts of the store that are targets of the model, and their names in a batch."""
    learned = reader.spec.config
    truth = [(Part.TRUTH, "truth")] if learned.postprocess and reader.withhold is None else []
    return truth + [(Part.SPREAD, "target_spread")] * learned.spread


def join(
    reader: Reader, draws: Sequence[Draw], samples: Sequence[Arrays], *, idle: bool = False, new: NewArray | None = None
) -> Batch:
    """Stack samples, each of which is given as arrays by name, to a batch on the CPU.

    The targets of an `idle` batch, which is a stand-in, become NaN. `new` returns memory for an array of the batch;
    None allocates it.
    """
    spec = reader.spec
    counts = [len(draw.members) for draw in draws]
    stacked = {name: _stack(name, [sample[name] for sample in samples], max(counts), new) for name in samples[0]}
    targets = {name: stacked.pop(name) for name in ("truth", "target_spread") if name in stacked}
    times = [reader.time(draw.date) for draw in draws]
    inputs = EnsembleInput(
        count=torch.tensor([float(count) for count in counts]),
        day_of_year=torch.tensor([float(day_of_year(time)) for time in times]),
        **stacked,
    )
    # A sample that shows all complete members has the target spread among its inputs, so it must not train the spread
    # head.
    whole = [i for i, draw in enumerate(draws) if counts[i] == len(reader.available(draw.date))]
    for name, values in targets.items():
        if name == "target_spread":
            values[whole] = torch.nan
        if spec.masked:  # where none of the input members has a value, there is no forecast to correct
            targets[name] = torch.where(torch.isnan(inputs.mean[:, spec.lead_positions]), torch.nan, values)
        if idle:
            targets[name] = torch.full_like(values, torch.nan)
    return Batch(inputs, [iso(time) for time in times], **targets, idle=idle)


def _inputs(reader: Reader, fields: Fields) -> dict[str, np.ndarray]:
    """Reduce the members of a sample to the inputs of the model, by name and without the axis B."""
    spec, found = reader.spec, dict(zip(("mean", "spread"), reader.reduced(fields), strict=True))
    if spec.config.one_member:
        found["member"] = Fields(fields.pressure[0], fields.surface[0]).joined()
    if spec.takes_members:
        found["members"] = fields.joined()
    if spec.masked:
        found["valid"] = valid_shares(spec, fields.pressure, fields.surface)
    return found


def _stack(name: str, arrays: list[np.ndarray], most: int, new: NewArray | None) -> Tensor:
    """Stack one array of all samples along a new first axis; members are filled up to `most`."""
    if name == "members":
        arrays = [filled(values, most) for values in arrays]
    if new is None:
        return torch.from_numpy(np.stack(arrays))
    out = new(name, (len(arrays), *arrays[0].shape), arrays[0].dtype)
    return torch.from_numpy(np.stack(arrays, out=out))


def filled(members: np.ndarray, most: int) -> np.ndarray:
    """Append zeros to the members (M, ...) up to `most`, so that samples of different sizes can be stacked."""
    found = np.zeros((most, *members.shape[1:]), members.dtype)
    found[: len(members)] = members
    return found


Shares = tuple[tuple[Draw, ...], ...]  # samples of each data coordinate


@dataclass(frozen=True, eq=False)
class Turn:
    """One slot of the schedule: what all ranks use at the same time.

    It holds the shares of one global training batch, or one round of validation batches.

    Attributes:
        step: Number of optimizer steps done before it.
        validation: Whether it belongs to a validation.
        shares: Samples of each data coordinate, which is the number of a share of the batch. The ranks of one
            coordinate read the same samples. A share may be empty.
        stand_in: Sample that a data coordinate with an empty share of a training batch reads instead. It has weight
            zero.
    """

    step: int
    validation: bool
    shares: Shares
    stand_in: Draw | None = None

    def read_by(self, coordinate: int) -> tuple[Draw, ...]:
        """Return the samples that the ranks at a data coordinate read."""
        own = self.shares[coordinate]
        return own if own or self.stand_in is None else (self.stand_in,)

    def idle(self, coordinate: int) -> bool:
        """Return whether the ranks at a data coordinate read a stand-in of weight zero."""
        return not self.shares[coordinate] and self.stand_in is not None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The turns of a run, in order.

    Args:
        batches: Global training batches; the schedule covers its first to its last step.
        validation: Batches of one validation, in order. They are dealt out to the data coordinates one by one.
        validate_every: Number of steps between validations. A validation always follows the last step.
        validate_first: Whether the run begins with a validation.
        parts: Number of data coordinates.
        holders: (dates,) data coordinate to which each training date should go if possible; None cuts each batch into
            consecutive shares, in the order in which its dates were drawn.
    """

    batches: Batches
    validation: Sequence[Sequence[Draw]] = ()
    validate_every: int = 1
    validate_first: bool = False
    parts: int = 1
    holders: np.ndarray | None = None

    def __iter__(self) -> Iterator[Turn]:
        first, last = self.batches.start_step, self.batches.steps
        if self.validate_first:
            yield from self._validation(first)
        for step in range(first, last):
            shares = tuple(map(tuple, self.batches.draws(step, self.parts, self.holders)))
            # A rank with an empty share still takes part in every collective operation, so it reads a stand-in.
            yield Turn(step, False, shares, None if all(shares) else self.batches.stand_in(step))
            if step + 1 == last or (step + 1) % self.validate_every == 0:
                yield from self._validation(step + 1)

    def _validation(self, step: int) -> Iterator[Turn]:
        """Yield the rounds of one validation. The last round may be shorter than the number of data coordinates."""
        for first in range(0, len(self.validation), self.parts):
            dealt = [tuple(group) for group in self.validation[first : first + self.parts]]
            yield Turn(step, True, (*dealt, *[()] * (self.parts - len(dealt))))

    @property
    def dates(self) -> np.ndarray:
        """Return the indices of all training dates and of the dates that validations read, ascending."""
        validated = [draw.date for group in self.validation for draw in group]
        return np.unique(np.concatenate([self.batches.dates, np.asarray(validated, int)]))

    def homes(self) -> np.ndarray:
        """Return the data coordinate that holds each of `dates`, an array of the same length.

        For a training date it is the coordinate that uses the date in epoch 0 when every batch is cut in its own order.
        For other dates it is the coordinate that reads the date first in a validation. Shares of a batch differ
        by at most one sample. The first ones get the extra samples, so their coordinates may hold more dates.
        """
        found: dict[int, int] = {}
        order = self.batches.order
        for step in range(order.steps_per_epoch):
            _, samples = order.step(step)
            for part, share in enumerate(np.array_split(samples, self.parts)):
                found |= {int(self.batches.dates[sample]): part for sample in share}
        # Training dates have a home already; this adds the dates that only validations read.
        for number, group in enumerate(self.validation):
            for draw in group:
                found.setdefault(draw.date, number % self.parts)
        return np.array([found[int(date)] for date in self.dates])


class Device:
    """A device to which batches are brought, in the type of the weights.

    A thread of the loader calls `bring` as soon as a batch is complete. The user's thread calls `take` when it needs
    the batch. Call `wait` before the memory that the batch is copied from is used again. On a CPU, `bring` does
    everything.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        self.device, self.dtype = device, dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, batch: Batch) -> tuple[Batch, Any]:
        """Start to copy a batch to the device. Return it, and a CUDA event at the end of the copy (None on a CPU)."""
        if self._stream is None:
            return batch.to(self.device, self.dtype), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # The memory is pinned, so the thread does not wait for the copy. The type is converted on the GPU.
            moved = batch.to(self.device, self.dtype, non_blocking=True)
            return moved, self._stream.record_event()

    def take(self, batch: Batch, ready: Any) -> Batch:
        """Make the batch that `bring` returned, with its event, usable on the current stream, and return it.

        Later kernels of that stream wait for the copy; the calling thread does not.
        """
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in (*vars(batch).values(), *vars(batch.inputs).values()):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)  # else torch could reuse its memory while the stream still needs it
        return batch

    def wait(self, ready: Any) -> None:
        """Wait for the end of the copy, which the event `ready` of `bring` marks."""
        if ready is not None:
            ready.synchronize()


def wait_for_copies() -> None:
    """Return once all GPUs on which this process has memory have completed its work.

    `to("cuda", non_blocking=True)` from pinned memory returns before a byte is read, and users may copy on any stream
    and to any GPU. GPUs without memory of this process are skipped, because the call would open a CUDA context there.
    """
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)


def pages(size: int) -> np.ndarray:
    """Allocate `size` bytes (at least one) that begin at a page, as uint8.

    Where there is a GPU the memory is pinned, so that copies to the GPU are asynchronous.
    """
    if torch.cuda.is_available():
        return torch.empty(max(1, size), dtype=torch.uint8, pin_memory=True).numpy()
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)
