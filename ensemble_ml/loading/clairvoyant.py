"""A loader that knows all its reads in advance.

    loader = ClairvoyantLoader(dataset, batch_size=8, epochs=10, seed=0, ram=4 << 30)
    for batch in loader:
        loss = step(batch["0"])

Threads fetch packed samples in the order of the plan and decode them into buffers that are used again as soon as nobody
holds the batch that lies in them; nothing is forked, and nothing is pickled.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ensemble_ml.config import Assign
from ensemble_ml.errors import UserError
from ensemble_ml.loading.device import pages, wait_for_copies
from ensemble_ml.loading.items import (
    DatasetItems,
    Divisible,
    Items,
    Openable,
    check_map_style,
    shapes_from_json,
    shapes_to_json,
)
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.peers import Peers
from ensemble_ml.loading.plan import Plan, Room, shares
from ensemble_ml.loading.threads import ended, start
from ensemble_ml.loading.tiers import Tiers
from ensemble_ml.loading.wire import Gather, this_node
from ensemble_ml.machine import free_memory

log = logging.getLogger(__name__)

_STALL = 30.0  # seconds of waiting after which slow storage is named
_ALGORITHM = "philox-argsort-1"  # of the order; part of the state


class Batch(dict[str, torch.Tensor]):
    """Tensors (b, ...) by name, with the `step` of the run and the `samples` and `positions` in the global batch.

    Its tensors keep their values for as long as anything refers to them, unless the loader was made with
    `reuse_buffers=True`. Copies to a GPU may be `non_blocking`: asking for the next batch waits until they are made.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], step: int, positions: np.ndarray, samples: np.ndarray):
        super().__init__(tensors)
        self.step, self.positions, self.samples = step, positions, samples


def _neighbours(gather: Gather | None, node: str) -> tuple[int, int]:
    """How many nodes the ranks are on, and the bytes that each of them may take: the same on all, whole pages."""
    own = f"{free_memory()} {node}".encode()
    told = [one.decode().split(" ", 1) for one in (gather(own) if gather is not None else [own])]
    ranks = Counter(name for _, name in told)
    least = min(int(free) // 2 // ranks[name] for free, name in told)
    return len(ranks), least // mmap.PAGESIZE * mmap.PAGESIZE


def _whole_numbers(**settings: Any) -> list[int]:
    """Return the values as `int`; raise a UserError where one is no whole number, before threads stumble over it."""
    for key, value in settings.items():
        if not isinstance(value, Integral):
            raise UserError(f"{key}={value!r}: must be a whole number")
    return [int(value) for value in settings.values()]


class ClairvoyantLoader:
    """The batches of one rank, from `start_step` to the end of the last epoch; used once, or closed by `with`.

    Batches may be kept, as those of torch's DataLoader: the memory of a batch is used again only when no tensor, view,
    NumPy array or autograd graph refers to it any more. What is kept takes memory of its own, beside `memory`.

    Args:
        source: `Items`, or any map-style dataset (`len` and `[i]`) of arrays or tensors of fixed shape, as
            `DatasetItems` wants them.
        batch_size: of the global batch, shared by all ranks.
        epochs: how often every sample is used.
        seed: of the order.
        rank, ranks: this process among those that share the batch.
        gather: brings every rank's bytes to all ranks (an all-gather of objects); needed where ranks > 1.
        ram, disk: bytes of samples to hold on this rank, the same on all; None takes half the free memory of the node
            that has least of it for each of its ranks. They are held packed, or decompressed where all fit so and no
            more travels between nodes for it.
        folder: for the cache on local disk. A later run with the same plan finds it filled where `source` names
            its content (`StoreItems`, or `DatasetItems(dataset, name)`).
        assign: `fixed` or `locality`.
        threads: that fetch and decode.
        ahead: batches of look-ahead.
        start_step: the first global step; `load_state_dict` sets it.
        host: name under which other nodes reach this one.
        node: a name that ranks share only where they share memory; None takes host name and device of /dev/shm.
        reuse_buffers: write over the memory of a batch once the next one is asked for, whoever still holds it. This
            saves the memory of one batch; a batch that is kept then changes in silence, so copy what you keep.

    Raises:
        UserError: settings that do not fit, ranks that differ in them, a second loop when all has been handed out, or
            while another is under way.

    A loop that was left is gone on with by the next one: `next(iter(loader))` uses a batch up.
    """

    def __init__(
        self,
        source: Items | Any,
        batch_size: int,
        epochs: int,
        seed: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        gather: Gather | None = None,
        ram: int | None = None,
        disk: int = 0,
        folder: str | Path | None = None,
        assign: Assign = Assign.fixed,
        threads: int = 4,
        ahead: int = 3,
        start_step: int = 0,
        host: str | None = None,
        node: str | None = None,
        reuse_buffers: bool = False,
    ):
        batch_size, epochs, seed, threads, ahead = _whole_numbers(
            batch_size=batch_size, epochs=epochs, seed=seed, threads=threads, ahead=ahead
        )
        if batch_size < 1 or threads < 1 or ahead < 1:
            raise UserError(f"batch_size={batch_size}, threads={threads}, ahead={ahead}: 1 or more of each is needed")
        if ranks > 1 and gather is None:
            raise UserError(f"ranks={ranks}: needs gather=, an all-gather of bytes over the ranks")
        if not 0 <= rank < ranks:
            raise UserError(f"rank={rank}, ranks={ranks}: ranks are numbered from 0; give the number of them as well")
        self.items: Items = (
            source if isinstance(source, Items) else _adopt(source, batch_size, seed, rank, ranks, gather)
        )
        nodes, share = 1, 0
        if ram is None or isinstance(self.items, Openable):  # alike on all ranks, so all of them gather
            nodes, share = _neighbours(gather, node or this_node())
        if ram is None and disk:  # a cache on disk is of a plan, which free memory shall not change every time
            share = _coarse(share)
        room = Room(share if ram is None else ram, disk)
        order = Order(seed, len(self.items.sizes), batch_size)
        stored = getattr(self.items, "stored", None)
        heads = isinstance(self.items, Divisible)
        self.plan = Plan(order, epochs, self.items.sizes, room, ranks, assign, stored, heads)
        self.rank, self.step, self._gather = rank, start_step, gather
        if not 0 <= start_step <= self.steps:
            raise UserError(f"start_step={start_step}: the run has {self.steps} steps")
        if isinstance(self.items, Openable) and epochs > 1 and self.plan.holds_all:
            self._open(self.items, together=nodes == 1)
        self._threads, self._ahead, self._reuse_buffers = threads, ahead, reuse_buffers
        self.tiers = Tiers(self.plan, rank, self.items, Path(folder) if folder else None)
        self._peers: Peers | None = None
        self._engine: Engine | None = None
        self._looped = False  # whether a loop is under way
        try:
            if ranks > 1:
                assert gather is not None
                self.tiers.others = self._peers = Peers(self.tiers, gather, host, node)
        except BaseException:
            _close(self.tiers, self._peers)
            raise
        self._release = weakref.finalize(self, _close, self.tiers, self._peers)

    def _open(self, items: Openable, *, together: bool) -> None:
        """Keep samples decompressed if all fit: it saves that work in later epochs. On several nodes (not `together`)
        no more bytes may travel for it."""
        opened, plan = items.opened(), self.plan
        wide = replace(plan, sizes=opened.sizes, stored=opened.stored, heads=False)
        if wide.holds_all and (together or wide.explain().peers <= plan.explain().peers):
            self.items, self.plan = opened, wide

    @property
    def steps(self) -> int:
        """Global steps of the whole run."""
        return self.plan.epochs * self.plan.order.steps_per_epoch

    @property
    def memory(self) -> int:
        """Bytes that the loader takes at most: cache, decoded batches, a sample or two a thread, peers' too.

        Batches that the user keeps beyond the next one come on top.
        """
        order, ranks = self.plan.order, self.plan.ranks
        batch = -(-min(order.batch_size, order.n) // ranks) * sum(one.bytes for one in self.items.arrays.values())
        packed = 0 if self.plan.stored is None else int(self.plan.stored.max())
        sample = int(self.items.sizes.max()) + packed
        batches = self._ahead + 1 + (not self._reuse_buffers)  # the last batch is held until the next one is there
        return self.plan.tiers.ram + batches * batch + ranks * self._threads * sample

    def __len__(self) -> int:
        return self.steps - self.step

    def __iter__(self) -> Iterator[Batch]:
        if self._engine is not None and self.step == self.steps:  # else a loop over epochs would learn from one alone
            raise UserError(
                f"ClairvoyantLoader: its {self.plan.epochs} epochs have been handed out, one after the other, in one"
                " loop; make another loader for more"
            )
        self._check_open()
        if self._looped:
            raise UserError("ClairvoyantLoader: another loop over it is under way; both would get each batch once")
        if self._gather is not None:
            steps = [int(told) for told in self._gather(str(self.step).encode())]
            if len(set(steps)) > 1:
                raise UserError(f"loading: ranks stand at steps {steps}; load the same state on all of them")
        self._engine, self._looped = Engine(self, self.plan.run(self.rank, start_step=self.step)), True
        try:
            for batch in self._engine:
                self.step = batch.step + 1
                yield batch
            if self._peers is not None:
                self._peers.finish()
        finally:
            if not self._engine.close():
                self._release.detach()  # the threads that are left write to it
            self._looped = False
        self._release()  # nothing is left to hand out

    def _check_open(self) -> None:
        if not self._release.alive:
            raise UserError("ClairvoyantLoader: it was closed, or has handed out all; make another loader")

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, after the batch that was handed out last: about a hundred bytes."""
        order = self.plan.order
        return {
            "algorithm": _ALGORITHM,
            "seed": order.seed,
            "samples": order.n,
            "batch_size": order.batch_size,
            "step": self.step,
            "data": self.items.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, on any number of ranks.

        Raises:
            UserError: it is of another order or other data, or the loader has come to its end.
        """
        self._check_open()
        mine = self.state_dict()
        differ = [key for key in mine if key != "step" and mine[key] != state.get(key)]
        if differ:
            told = ", ".join(f"{key}={state.get(key)} (here {mine[key]})" for key in differ)
            raise UserError(f"state of a loader: {told}; give the same data, seed and batch size")
        if not 0 <= int(state["step"]) <= self.steps:
            raise UserError(f"state of a loader: step {state['step']}, and the run has {self.steps}; give more epochs")
        self.step = int(state["step"])

    def close(self) -> None:
        """End threads and connections, give back memory; harmless when called again."""
        if self._engine is not None and not self._engine.close():
            self._release.detach()  # the threads that are left write to it
        self._release()

    def __enter__(self) -> ClairvoyantLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(tiers: Tiers, peers: Peers | None) -> None:
    if peers is None or peers.close():
        tiers.close()


def _coarse(size: int) -> int:
    """`size` with its three leading bits: an eighth less at most."""
    unit = 1 << max(size.bit_length() - 3, 0)
    return size // unit * unit


def _adopt(dataset: Any, batch_size: int, seed: int, rank: int, ranks: int, gather: Gather | None) -> DatasetItems:
    """A dataset as items, known from the sample that this rank uses first.

    Ranks that use none of the first batch, which is smaller than their number, hear from others what samples are like:
    to read one for it would be in vain, as others use it.
    """
    check_map_style(dataset)
    order = Order(seed, len(dataset), batch_size)
    batch = order.step(0)[1]
    own = batch[shares(order, ranks, np.zeros(len(batch), int), np.arange(len(batch))) == rank]
    items = DatasetItems(dataset, first=int(own[0])) if len(own) else None
    if gather is not None and len(batch) < ranks:  # alike on all ranks, so all of them gather
        told = gather(b"" if items is None else shapes_to_json(items.arrays).encode())
        if items is None:
            items = DatasetItems(dataset, like=shapes_from_json(next(text for text in told if text).decode()))
    assert items is not None
    return items


Buffers = dict[str, np.ndarray]  # memory of a batch, (b, ...) by name


class Engine:
    """The threads of one run through a plan, and the buffers that they decode into."""

    def __init__(self, loader: ClairvoyantLoader, run: Iterator[tuple[int, np.ndarray, np.ndarray]]):
        self.items, self.tiers = loader.items, loader.tiers
        self._run, self._reuse = run, loader._reuse_buffers
        order, ranks = loader.plan.order, loader.plan.ranks
        self._most = -(-min(order.batch_size, order.n) // ranks)
        self._change = threading.Condition()
        self._free = loader._ahead + 1  # batches that may be begun; one is in the user's hands
        self._spare: list[Buffers] = []  # nobody uses them
        self._filled: dict[int, Buffers] = {}  # number of a batch -> where it is decoded to
        self._lent: dict[int, tuple[Buffers, list[weakref.ref]]] = {}  # number of a batch that is handed out -> its own
        self._returned: deque[int] = deque()  # number of a batch, for each array of it that nobody holds any more
        self._let_go: Counter[int] = Counter()  # number of a batch -> how many of its arrays that is
        self._missing: dict[int, int] = {}  # number of a batch -> samples that are not decoded yet
        self._made: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self._ended, self._stopped = False, False
        self._error: BaseException | None = None
        self._tasks = self._list_tasks()
        self._take = threading.Lock()
        self._left: bool | None = None  # whether threads were left at work; None before the end
        self._workers = start(loader._threads, self._work)

    def _list_tasks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number of the batch, place in it, sample); waits while enough batches are ahead."""
        for number, (step, positions, samples) in enumerate(self._run):
            with self._change:
                while not self._free and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                self._free -= 1
                buffers = self._spare.pop() if self._spare else None
            if buffers is None:  # outside of the lock: to pin memory takes its time
                buffers = {k: _buffer((self._most, *one.shape), one.dtype) for k, one in self.items.arrays.items()}
            with self._change:
                self._filled[number] = buffers
                self._missing[number] = len(samples)
                self._made.append((step, positions, samples))
                self._change.notify_all()
            for place, sample in enumerate(samples.tolist()):
                yield number, place, sample
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _work(self) -> None:
        try:
            packed = _scratch(max(1, int(self.items.sizes.max())))
            while not self._stopped:
                with self._take:
                    task = next(self._tasks, None)
                if task is None:
                    return
                self._make(packed, *task)
        except BaseException as error:
            with self._change:
                self._error = self._error or error
                self._change.notify_all()

    def _make(self, packed: memoryview, number: int, place: int, sample: int) -> None:
        part = self.tiers.fetch(sample, packed[: int(self.items.sizes[sample])])
        buffers = self._filled[number]
        self.items.decode(sample, part, {name: array[place, ...] for name, array in buffers.items()})
        with self._change:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._change.notify_all()

    def __iter__(self) -> Iterator[Batch]:
        number = 0
        while self._wait_for(number):
            try:
                yield self._lend(number)
            finally:  # also where the loop is left, and its memory given back
                unused = self._unused()
                wait_for_copies()  # of what is not held any more, too: its copies may be under way
            with self._change:
                del self._missing[number]
                self._free += 1
                self._spare += unused
                del self._spare[self._free :]  # of batches that were kept for a while: more than can be begun
                self._change.notify_all()
            number += 1

    def _lend(self, number: int) -> Batch:
        # A tensor's storage holds the very array that it was made from, and so does all that shares the storage: views,
        # what autograd has saved, `tensor.numpy()`. The tensor itself may be gone by then, so the array is watched.
        buffers, (step, positions, samples) = self._filled.pop(number), self._made.popleft()
        arrays = {name: array[: len(samples)] for name, array in buffers.items()}
        returned = self._returned

        # It is called wherever the last holder ends, in any thread and in the midst of anything, so it takes no lock
        # and does one thing that cannot be interrupted; `_unused` counts.
        def let_go(_: weakref.ref) -> None:
            returned.append(number)

        self._lent[number] = buffers, [weakref.ref(array, let_go) for array in arrays.values()]
        return Batch({name: torch.from_numpy(array) for name, array in arrays.items()}, step, positions, samples)

    def _unused(self) -> list[Buffers]:
        """Return the buffers of batches that nobody holds any more, or of all with `reuse_buffers`."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._let_go.update(returned)
        numbers = list(self._lent)
        if not self._reuse:
            numbers = [number for number in set(returned) if self._let_go[number] == len(self._lent[number][1])]
        for number in numbers:
            del self._let_go[number]
        return [self._lent.pop(number)[0] for number in numbers]

    def _wait_for(self, number: int) -> bool:
        """Wait for a batch; False after the last."""
        began = time.monotonic()
        with self._change:
            while True:
                if self._error is not None:
                    raise self._error
                if self._missing.get(number) == 0:
                    self.tiers.counters.add(waited=time.monotonic() - began)
                    return True
                if self._ended and number not in self._missing:
                    return False
                if not self._change.wait(_STALL) and (slow := self.tiers.slowest()):
                    log.warning("loading: %s has been read for %.0f s without an answer", *slow)

    def close(self) -> bool:
        """End the threads; False where some wait for storage. Harmless when called again."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if self._left is None:
            self._left = not ended(self._workers, self.tiers.slowest)
        return not self._left


def _scratch(size: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(-1, size))
    except OSError as error:  # of the process's own limit, most likely
        raise UserError(
            f"loading: no {size / 1e6:.0f} MB for a sample ({error.strerror}); take fewer threads"
        ) from error


def _buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return pages(size)[:size].view(dtype).reshape(shape)
