"""Batches for training (random dates and members) and for validation (fixed), read ahead by a thread.

Axes: B date in a batch, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order, member_subset
from ensemble_ml.loading.reader import Reader, iso
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, valid_shares
from ensemble_ml.store.source import Part

T = TypeVar("T")


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

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """The same batch on another device, in another type."""
        moved: dict[str, Any] = {k: v.to(device, dtype) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Batch(self.inputs.to(device, dtype), self.init_time, **moved, idle=self.idle)

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
        prefetch: batches read ahead; the batches do not depend on it.
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
        prefetch: int = 2,
        share: tuple[int, int] = (0, 1),
    ):
        if not len(dates):
            raise UserError("data.train: no start date; name years, dates or ranges that the store holds")
        self.reader, self.dates = reader, np.asarray(dates)
        self._spare = spare_members(reader.spec)
        self.order = Order(seed, len(dates), batch_size)
        self.sizes = self._usable(sizes)
        self.steps, self.start_step, self.prefetch, self.share = steps, start_step, prefetch, share

    def __iter__(self) -> Iterator[Batch]:
        yield from read_ahead((self.batch(step) for step in range(self.start_step, self.steps)), self.prefetch)

    def batch(self, step: int) -> Batch:
        """The batch of one global step (counted from 0), or this share of it."""
        epoch, samples = self.order.step(step)
        own = np.array_split(samples, self.share[1])[self.share[0]]
        idle = not len(own)
        own = samples[:1] if idle else own
        batch = _collate(self.reader, [int(d) for d in self.dates[own]], [self.draw(epoch, int(s)) for s in own])
        return _without_targets(batch) if idle else batch

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
        return allowed


def fixed_batches(
    reader: Reader,
    dates: Iterable[int],
    members: Sequence[int] | np.ndarray,
    *,
    batch_size: int = 1,
    prefetch: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Batches of `dates` in order, for validation: `members` are positions among the whole members of each date.

    `share`: (which, of how many) of the batches, dealt out one by one.
    """
    order = [int(d) for d in dates]
    groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)][share[0] :: share[1]]
    chosen = np.asarray(members)
    made = (_collate(reader, group, [reader.available(date)[chosen] for date in group]) for group in groups)
    yield from read_ahead(made, prefetch)


def spare_members(spec: ModelSpec) -> int:
    """Members of a date that no sample may show: one where only spread is learned, whose target all members make."""
    return 0 if spec.config.postprocess else 1


def _without_targets(batch: Batch) -> Batch:
    targets = {k: torch.full_like(v, torch.nan) for k, v in vars(batch).items() if isinstance(v, Tensor)}
    return replace(batch, idle=True, **targets)  # type: ignore[arg-type]


def _collate(reader: Reader, dates: list[int], members: list[np.ndarray]) -> Batch:
    spec = reader.spec
    samples = [_inputs(reader, date, drawn) for date, drawn in zip(dates, members, strict=True)]
    most = max(len(drawn) for drawn in members)
    samples = [{k: filled(v, most) if k.startswith("members_") else v for k, v in s.items()} for s in samples]
    stacked = {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    times = [reader.time(date) for date in dates]
    inputs = EnsembleInput(
        count=torch.tensor([float(len(drawn)) for drawn in members]),
        day_of_year=torch.tensor([float(_day_of_year(time)) for time in times]),
        **stacked,
    )
    targets: dict[str, Tensor] = {}
    if spec.config.postprocess:
        targets |= _targets(reader, Part.TRUTH, "truth", dates)
    if spec.config.spread:
        targets |= _targets(reader, Part.SPREAD, "target_spread", dates)
        whole = [i for i, drawn in enumerate(members) if len(drawn) == len(reader.available(dates[i]))]
        for suffix in ("p", "s"):
            targets[f"target_spread_{suffix}"][whole] = torch.nan
    if spec.masked:
        targets = {name: _hide(spec, inputs, name, values) for name, values in targets.items()}
    return Batch(inputs, [iso(time) for time in times], **targets)  # type: ignore[arg-type]


def _hide(spec: ModelSpec, inputs: EnsembleInput, name: str, target: Tensor) -> Tensor:
    """NaN, which weighs nothing, where no member given has a value: there is nothing to correct."""
    mean = inputs.mean_p if name.endswith("_p") else inputs.mean_s
    return torch.where(torch.isnan(mean[:, spec.lead_positions]), torch.nan, target)


def _inputs(reader: Reader, date: int, members: np.ndarray) -> dict[str, np.ndarray]:
    fields = reader.forecast(date, members)
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


def _targets(reader: Reader, part: Part, name: str, dates: list[int]) -> dict[str, Tensor]:
    fields = [reader.target(part, date) for date in dates]
    return {f"{name}_p": _stack([f.pressure for f in fields]), f"{name}_s": _stack([f.surface for f in fields])}


def _stack(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays))


def filled(members: np.ndarray, most: int) -> np.ndarray:
    """Zeros behind the members, up to `most`."""
    found = np.zeros((most, *members.shape[1:]), members.dtype)
    found[: len(members)] = members
    return found


def _day_of_year(time: np.datetime64) -> int:
    return int((time.astype("datetime64[D]") - time.astype("datetime64[Y]")).astype(int)) + 1


def read_ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield `items` in order while a thread makes up to `depth` of them ahead; 0 makes each when it is asked for.

    What goes wrong in the thread is raised here. Leaving the loop early ends the thread, which is waited for.
    """
    if depth < 1:
        yield from items
        return
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            good, item = ready.get()
            if not good:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        stop.set()
        thread.join()


def _fill(items: Iterable[Any], ready: queue.Queue[tuple[bool, Any]], stop: threading.Event) -> None:
    def put(good: bool, item: Any) -> None:
        while not stop.is_set():
            try:
                # The wait is short so that a reader who has left does not hold up the thread's end.
                return ready.put((good, item), timeout=0.1)
            except queue.Full:
                continue

    try:
        for item in items:
            put(True, item)
            if stop.is_set():
                return
        put(False, None)
    except BaseException as error:
        put(False, error)
