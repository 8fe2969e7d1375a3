"""Load any data set with a loader that knows all its reads in advance.

    loader = ClairvoyantLoader(dataset, batch_size=8, epochs=10, seed=0, ram=4 << 30)
    for batch in loader:
        loss = step(batch["0"])

The seed fixes the order of all samples, so the loader plans every read of the run before the first one (`plan.py`).
Threads fetch packed samples in the planned order and decode them into buffers. A buffer is reused as soon as nothing
refers to the batch in it any more. No process is forked and nothing is pickled.
"""

from __future__ import annotations

import mmap
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
from ensemble_ml.loading.batches import pages, wait_for_copies
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
from ensemble_ml.loading.threads import Workers
from ensemble_ml.loading.tiers import Tiers
from ensemble_ml.loading.wire import Gather, this_node
from ensemble_ml.machine import free_memory

_ALGORITHM = "philox-argsort-1"  # how the order is drawn; part of the state
Buffers = dict[str, np.ndarray]  # memory of a batch, (b, ...) by name


class Batch(dict[str, torch.Tensor]):
    """A batch of tensors (b, ...) by name, with its step and its samples.

    The attributes are `step`, the global step of the run; `samples`, the numbers of the samples; and `positions`, their
    places in the global batch.

    The tensors keep their values for as long as anything refers to them, unless the loader was made with
    `reuse_buffers=True`. Copies to a GPU may be `non_blocking`: a request for the next batch waits until they are done.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], step: int, positions: np.ndarray, samples: np.ndarray):
        super().__init__(tensors)
        self.step, self.positions, self.samples = step, positions, samples


class ClairvoyantLoader:
    """A loader of the batches of one rank, from `start_step` to the end of the last epoch.

    It is used once, and may be closed early by `with` or `close`. A loop that was left early is continued by the next
    loop; `next(iter(loader))` therefore consumes one batch.

    Batches may be kept, like those of torch's DataLoader. The memory of a batch is reused only when no tensor, view,
    NumPy array or autograd graph refers to it any more. Batches that are kept need memory in addition to `memory`.

    Args:
        source: `Items`, or any map-style dataset (`len` and `[i]`) of arrays or tensors of fixed shape, as
            `DatasetItems` accepts them.
        batch_size: Number of samples of the global batch, which all ranks share.
        epochs: Number of times that every sample is used.
        seed: Seed of the order.
        rank: This process among those that share the batch, from 0.
        ranks: Number of processes that share the batch.
        gather: All-gather of bytes: it returns every rank's bytes on all ranks. It is required where ranks > 1.
        ram: Bytes of memory in which this rank holds samples, the same on all ranks. None divides half of the free
            memory of each node among its ranks, and gives every rank the smallest share. Samples are held packed, or
            decompressed where all of them fit and, on several nodes, ranks need not exchange more bytes.
        disk: Bytes of local disk for the same purpose.
        folder: Folder of the cache on local disk, required where `disk` is above 0. A later run with the same plan
            finds it filled where `source` names its content (`StoreItems`, or `DatasetItems(dataset, name)`).
        assign: `Assign.fixed` or `Assign.locality` of `ensemble_ml.config`, see `Plan`.
        threads: Number of threads that fetch and decode.
        ahead: Number of batches of look-ahead.
        start_step: First global step; `load_state_dict` sets it, too.
        host: Name under which other nodes reach this one.
        node: Name that ranks share only where they share memory; None takes host name and device of /dev/shm.
        reuse_buffers: Whether the memory of a batch is overwritten once the next batch is requested, even if something
            still refers to it. This saves the memory of one batch, but a batch that is kept changes silently: copy what
            you keep.

    Raises:
        UserError: Settings do not fit, or differ between ranks. A loop also raises it after all batches were handed out
            or the loader was closed, also within the loop, if another loop over it is under way, or if ranks are at
            different steps.
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
        assign: Assign | str = Assign.fixed,
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
        rank, ranks, disk, start_step = _whole_numbers(rank=rank, ranks=ranks, disk=disk, start_step=start_step)
        ram = None if ram is None else _whole_numbers(ram=ram)[0]
        assign = _rule(assign)
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
        # A collective operation: its condition is the same on all ranks, so either all of them take part or none.
        if ram is None or isinstance(self.items, Openable):
            nodes, share = _neighbours(gather, node or this_node())
        # A cache on disk belongs to one plan, and the plan depends on the memory. Free memory is rounded coarsely, so
        # that a small change does not make the cache useless.
        if ram is None and disk:
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
        # The finalizer frees files and connections also where the user drops the loader without closing it.
        self._release = weakref.finalize(self, _close, self.tiers, self._peers)

    def _open(self, items: Openable, *, together: bool) -> None:
        """Hold samples decompressed if all of them fit, which saves decompression in later epochs.

        On several nodes (not `together`) this is done only if no more bytes travel between ranks for it.
        """
        opened, plan = items.opened(), self.plan
        wide = replace(plan, sizes=opened.sizes, stored=opened.stored, heads=False)
        if wide.holds_all and (together or wide.explain().peers <= plan.explain().peers):
            self.items, self.plan = opened, wide

    @property
    def steps(self) -> int:
        """Return the number of global steps of the whole run."""
        return self.plan.epochs * self.plan.order.steps_per_epoch

    @property
    def memory(self) -> int:
        """Return the most bytes of memory that the loader takes.

        They hold the cache, the decoded batches, and one or two packed samples for each thread of this rank and for the
        threads that serve other ranks. Batches that the user keeps for longer than one step are not included.
        """
        order, ranks = self.plan.order, self.plan.ranks
        batch = -(-min(order.batch_size, order.n) // ranks) * sum(one.bytes for one in self.items.arrays.values())
        packed = 0 if self.plan.stored is None else int(self.plan.stored.max())
        sample = int(self.items.sizes.max()) + packed
        batches = self._ahead + 1 + (not self._reuse_buffers)  # the user holds one batch until the next one is ready
        return self.plan.tiers.ram + batches * batch + ranks * self._threads * sample

    def __len__(self) -> int:
        return self.steps - self.step

    def __iter__(self) -> Iterator[Batch]:
        # Without this error, `for epoch in ...: for batch in loader` would find no batch after the first pass, and
        # training would do nothing in all later epochs, without a message.
        if self._engine is not None and self.step == self.steps:
            raise UserError(
                f"ClairvoyantLoader: one loop gives the batches of all its {self.plan.epochs} epochs, and it is over;"
                " make another loader for more"
            )
        self._check_open()
        if self._looped:
            raise UserError("ClairvoyantLoader: another loop over it is under way; both would get each batch once")
        if self._gather is not None:
            # Ranks at different steps would train on samples of different global batches, so this is checked first.
            steps = [int(step) for step in self._gather(str(self.step).encode())]
            if len(set(steps)) > 1:
                raise UserError(f"loading: ranks are at steps {steps}; load the same state on all of them")
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
        self._release()

    def _check_open(self) -> None:
        """Raise a UserError if the loader was closed or has handed out all batches."""
        if not self._release.alive:
            raise UserError("ClairvoyantLoader: it was closed, or has handed out all batches; make another loader")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the last batch that was handed out, about a hundred bytes.

        It names seed, number of samples, global batch size, next step, algorithm of the order, and fingerprint of the
        data. The number of ranks is not part of it, because the global batches do not depend on it.
        """
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
        """Continue from `state`, on any number of ranks.

        Raises:
            UserError: The state belongs to another order or to other data, its step is beyond the end of the run, or
                this loader is closed, or a loop over it is under way.
        """
        self._check_open()
        if self._looped:  # the loop would go on with the batches that it has planned
            raise UserError("ClairvoyantLoader: a loop over it is under way; leave it before you load a state")
        mine = self.state_dict()
        differ = [key for key in mine if key != "step" and mine[key] != state.get(key)]
        if differ:
            pairs = ", ".join(f"{key}={state.get(key)} (here {mine[key]})" for key in differ)
            raise UserError(f"state of a loader: {pairs}; give the same data, seed and batch size")
        (step,) = _whole_numbers(step=state.get("step"))
        if not 0 <= step <= self.steps:
            raise UserError(f"state of a loader: step {step}, and the run has {self.steps}; give more epochs")
        self.step = step

    def close(self) -> None:
        """End threads and connections, and free the memory. Calling it again does nothing.

        While a thread still waits for storage, the memory stays.
        """
        if self._engine is not None and not self._engine.close():
            self._release.detach()  # the threads that are left write to it
        self._release()

    def __enter__(self) -> ClairvoyantLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_numbers(**settings: Any) -> list[int]:
    """Return the values as `int`, or raise a UserError here, so that the error does not come from a thread later."""
    for key, value in settings.items():
        if not isinstance(value, Integral):
            raise UserError(f"{key}={value!r}: must be a whole number")
    return [int(value) for value in settings.values()]


def _rule(assign: Assign | str) -> Assign:
    """Return the rule of assignment that a text names, or raise a UserError."""
    try:
        return Assign(assign)
    except ValueError:
        raise UserError(f"assign={assign!r}: {', '.join(one.value for one in Assign)} are allowed") from None


def _adopt(dataset: Any, batch_size: int, seed: int, rank: int, ranks: int, gather: Gather | None) -> DatasetItems:
    """Wrap a dataset as items whose shapes are read from the first sample that this rank uses.

    If the first batch is smaller than the number of ranks, some ranks use no sample of it. They receive the shapes from
    the others, and need not read a sample only for its shapes.
    """
    check_map_style(dataset)
    order = Order(seed, len(dataset), batch_size)
    batch = order.step(0)[1]
    own = batch[shares(order, ranks, np.zeros(len(batch), int), np.arange(len(batch))) == rank]
    items = DatasetItems(dataset, first=int(own[0])) if len(own) else None
    if gather is not None and len(batch) < ranks:  # true on all ranks or on none, so all of them gather
        texts = gather(b"" if items is None else shapes_to_json(items.arrays).encode())
        if items is None:
            items = DatasetItems(dataset, like=shapes_from_json(next(text for text in texts if text).decode()))
    assert items is not None
    return items


def _neighbours(gather: Gather | None, node: str) -> tuple[int, int]:
    """Return the number of nodes of the ranks, and the bytes of memory that each rank may take.

    A rank may take half of the free memory of its node, divided by the number of ranks on that node. All ranks get the
    smallest of these numbers, in whole pages, because the plan must be the same on all of them.
    """
    own = f"{free_memory()} {node}".encode()
    every = [one.decode().split(" ", 1) for one in (gather(own) if gather is not None else [own])]
    ranks = Counter(name for _, name in every)
    least = min(int(free) // 2 // ranks[name] for free, name in every)
    return len(ranks), least // mmap.PAGESIZE * mmap.PAGESIZE


def _coarse(size: int) -> int:
    """Round `size` down to its three leading bits, by less than a fifth."""
    unit = 1 << max(size.bit_length() - 3, 0)
    return size // unit * unit


def _close(tiers: Tiers, peers: Peers | None) -> None:
    """Close the connections first, and the caches only if no thread still answers other ranks from them."""
    if peers is None or peers.close():
        tiers.close()


class Engine(Workers):
    """The threads that run through a plan, and the buffers into which they decode.

    A batch passes through these states: its buffers are taken from `_spare` (or made), filled by the threads
    (`_filled`), handed out to the user (`_lent`), and returned to `_spare` when nothing refers to its arrays any more.
    """

    def __init__(self, loader: ClairvoyantLoader, run: Iterator[tuple[int, np.ndarray, np.ndarray]]):
        super().__init__(loader.tiers)
        self.items, self.tiers = loader.items, loader.tiers
        self._run, self._reuse = run, loader._reuse_buffers
        order, ranks = loader.plan.order, loader.plan.ranks
        self._most = -(-min(order.batch_size, order.n) // ranks)
        self._free = loader._ahead + 1  # batches that may be started; the user holds one
        self._spare: list[Buffers] = []  # buffers that are free for another batch
        self._filled: dict[int, Buffers] = {}  # batch number -> buffers that it is decoded into
        self._lent: dict[int, tuple[Buffers, list[weakref.ref]]] = {}  # batch number -> buffers in use
        self._returned: deque[int] = deque()  # batch number, once for each array that was released
        self._let_go: Counter[int] = Counter()  # batch number -> number of arrays that were released
        self._missing: dict[int, int] = {}  # batch number -> samples that are not decoded yet
        self._made: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self._start(loader._threads)

    def _list_tasks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (batch number, place in the batch, sample) and wait while enough batches are ahead."""
        for number, (step, positions, samples) in enumerate(self._run):
            with self._change:
                while not self._free and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                self._free -= 1
                buffers = self._spare.pop() if self._spare else None
            if buffers is None:  # outside the lock, because pinning memory is slow
                buffers = {k: _buffer((self._most, *one.shape), one.dtype) for k, one in self.items.arrays.items()}
            with self._change:
                self._filled[number] = buffers
                self._missing[number] = len(samples)
                self._made.append((step, positions, samples))
                self._change.notify_all()
            for place, sample in enumerate(samples.tolist()):
                yield number, place, sample
        self._end_tasks()

    def _work(self) -> None:
        """Fetch and decode samples until the tasks end."""
        packed = _scratch(max(1, int(self.items.sizes.max())))
        while not self._stopped:
            task = self._next_task()
            if task is None:
                return
            self._make(packed, *task)

    def _make(self, packed: memoryview, number: int, place: int, sample: int) -> None:
        """Fetch one packed sample and decode it into its place in the batch."""
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
            finally:  # also where the user leaves the loop, and its memory is freed
                unused = self._unused()
                wait_for_copies()  # a tensor may be gone while its copy to a GPU is still running
            with self._change:
                del self._missing[number]
                self._free += 1
                self._spare += unused
                del self._spare[self._free :]  # batches that the user kept return more buffers than can be used
                self._change.notify_all()
            number += 1

    def _lend(self, number: int) -> Batch:
        """Hand out a batch, and watch when nothing refers to its arrays any more."""
        # The storage of a tensor refers to the array that it was made from, and so does everything that shares the
        # storage: views, tensors that autograd has saved, and `tensor.numpy()`. These may outlive the tensor, so the
        # array is watched and not the tensor.
        buffers, (step, positions, samples) = self._filled.pop(number), self._made.popleft()
        arrays = {name: array[: len(samples)] for name, array in buffers.items()}
        returned = self._returned

        # Python calls this wherever the last reference ends: in any thread, between any two instructions. It therefore
        # takes no lock and does a single atomic operation; `_unused` does the counting.
        def let_go(_: weakref.ref) -> None:
            """Note that nothing refers to an array of the batch any more."""
            returned.append(number)

        self._lent[number] = buffers, [weakref.ref(array, let_go) for array in arrays.values()]
        return Batch({name: torch.from_numpy(array) for name, array in arrays.items()}, step, positions, samples)

    def _unused(self) -> list[Buffers]:
        """Return the buffers of batches to which nothing refers any more, or of all batches with `reuse_buffers`."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._let_go.update(returned)
        numbers = list(self._lent)
        if not self._reuse:
            numbers = [number for number in set(returned) if self._let_go[number] == len(self._lent[number][1])]
        for number in numbers:
            del self._let_go[number]
        return [self._lent.pop(number)[0] for number in numbers]

    def _wait_for(self, number: int) -> bool:
        """Wait until a batch is decoded; return False after the last batch. Raise the error of a loading thread."""
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
                if self._stopped:  # its threads are gone
                    raise UserError("ClairvoyantLoader: it was closed within its loop; leave the loop by break instead")
                self._wait()


def _scratch(size: int) -> memoryview:
    """Return memory for one packed sample."""
    try:
        return memoryview(mmap.mmap(-1, size))
    except OSError as error:  # most likely the memory limit of the process
        raise UserError(
            f"loading: no {size / 1e6:.0f} MB for a sample ({error.strerror}); use fewer threads"
        ) from error


def _buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return page-aligned memory for one array of a batch, pinned where there is a GPU."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return pages(size)[:size].view(dtype).reshape(shape)
