"""Latency and bandwidth between ranks, measured by short exchanges, all ranks at once.

In a step a rank computes between two messages, and its neighbours are not there at the same moment: they wait for each
other, and where ranks share cores also for their turn on one. So here, too, each computes between exchanges, and what
an exchange takes is by how much it lengthens the same work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from ensemble_ml.distributed.communicator import Communicator, Pending
from ensemble_ml.distributed.costs import AT_ONCE, Link, Links
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.models.speed import settle

_SMALL, _MIDDLE, _LARGE = 1 << 10, 1 << 17, 1 << 20  # bytes out of each rank
_ROUNDS, _REPEATS = 6, 7
_WORK = 448  # rows of the matrix that is squared in between: a millisecond or so on one core

Make = Callable[[Communicator, int], Callable[[], object]]
Known = dict[tuple[object, ...], Link]  # by what was measured, and the `id` of its communicators


def measured_links(mesh: Mesh, known: Known | None = None, device: torch.device | None = None) -> Links:
    """The links of halo exchanges on each split axis and on both at once, and that of sums; the same on all ranks.

    `known`: links that need not be measured again, and where new ones are added; `device`: where what a step sends
    lies, the host by default.
    """
    known, place = {} if known is None else known, device or torch.device("cpu")
    world, links = mesh.world, dict[tuple[str, ...], Link]()

    def measure(name: str, group: Communicator, make: Make, *of: Communicator) -> Link:
        key = name, *map(id, of or (group,))
        if key not in known:
            known[key] = _fitted(group, make, world, place)
        return known[key]

    split = [axis for axis in ("lat", "lon") if mesh.along(axis).size > 1]
    for axis in split:
        links[(axis,)] = measure("swap", mesh.along(axis), lambda group, size: _waiting(_swap(group, size, place)))
    if len(split) == 2:
        lat, lon = mesh.along("lat"), mesh.along("lon")

        def swaps(_: Communicator, size: int) -> Callable[[], object]:
            return _waiting(_swap(lat, size // 2, place), _swap(lon, size // 2, place))

        links[AT_ONCE] = measure("swaps", mesh.along("lat", "lon"), swaps, lat, lon)
    everyone = mesh.model
    if everyone.size == 1:
        return links | {(): Link(0.0, 0.0)}
    found = measure("sum", everyone, lambda group, size: _sum(group, size, place))
    return links | {(): Link(found.alpha / math.log2(everyone.size), found.beta)}


def _fitted(group: Communicator, make: Make, world: Communicator, device: torch.device) -> Link:
    small, middle, large = (_seconds(make(group, size), group, world, device) for size in (_SMALL, _MIDDLE, _LARGE))
    beta = max(0.0, (large - middle) / (_LARGE - _MIDDLE))
    free = (small - middle) / beta + _MIDDLE if beta else 0.0  # where the line through both meets the small one's time
    return Link(small / 2, beta, min(max(0.0, free), float(_MIDDLE)))


def _seconds(run: Callable[[], object], group: Communicator, world: Communicator, device: torch.device) -> float:
    """Seconds by which an exchange lengthens the work around it: median over repeats, of the slowest rank."""
    x = torch.ones(_WORK, _WORK, device=device)

    def work() -> None:
        torch.mm(x, x)

    def both() -> None:
        work()
        run()

    both()
    found = []
    for _ in range(_REPEATS):
        busy, all_of_it = _round(work, group, device), _round(both, group, device)
        found.append(max(0.0, all_of_it - busy) / _ROUNDS)
    slowest = torch.tensor([statistics.median(found)], dtype=torch.float64)
    world.all_reduce(slowest, op="max")
    return float(slowest)


def _round(run: Callable[[], object], group: Communicator, device: torch.device) -> float:
    group.barrier()
    settle(device)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        run()
    settle(device)
    return time.perf_counter() - start


def _swap(group: Communicator, size: int, device: torch.device) -> Callable[[], Pending]:
    """Begins an exchange of halos with both neighbours, `size` bytes out of each rank."""
    sent = [0] * group.size
    for neighbour in (group.rank - 1, group.rank + 1):
        sent[neighbour % group.size] += size // 8
    given, taken = torch.zeros(sum(sent), device=device), torch.empty(sum(sent), device=device)
    return lambda: group.all_to_all_single(taken, given, sent, sent, async_op=True)


def _waiting(*begin: Callable[[], Pending]) -> Callable[[], object]:
    """Begins all, then waits for all."""

    def run() -> None:
        for pending in [one() for one in begin]:
            pending.wait()

    return run


def _sum(group: Communicator, size: int, device: torch.device) -> Callable[[], object]:
    """A sum over ranks that sends `size` bytes out of each."""
    x = torch.zeros(max(1, size // 4 * group.size // (2 * (group.size - 1))), device=device)
    return lambda: group.all_reduce(x)
