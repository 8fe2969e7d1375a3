"""Latency and bandwidth between ranks, measured by short exchanges of all ranks at once.

In a step, a rank computes between two messages, and its neighbours do not arrive at the same moment. They wait for each
other and, if ranks share cores, also for their turn on one. So each rank computes between exchanges here, too. The time
of an exchange is the amount by which it lengthens the same work.
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

_SMALL, _MIDDLE, _LARGE = 1 << 10, 1 << 17, 1 << 20  # bytes that each rank sends
_ROUNDS, _REPEATS = 6, 7
_WORK = 448  # rows of the matrix that is squared between exchanges: about a millisecond on one core

Make = Callable[[Communicator, int], Callable[[], object]]
Known = dict[tuple[object, ...], Link]  # by the kind of measurement and the `id` of its communicators


def measured_links(mesh: Mesh, known: Known | None = None, device: torch.device | None = None) -> Links:
    """Measure the links of a mesh: halo exchanges along each split axis and along both at once, and sums over ranks.

    All ranks call this, and get the same numbers.

    Args:
        mesh: the communicators.
        known: links that need not be measured again; new ones are added.
        device: where the tensors of a step lie; None for host memory.

    Returns:
        The links by mesh axes. `AT_ONCE` is the link of exchanges along both axes at the same time, if both are split.
        `()` is the link of sums, with its latency given for one doubling of the number of ranks.
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
    """Fit a link to the times of messages of three sizes.

    The time of the small one is two latencies (`Link.exchange`).
    """
    small, middle, large = (_seconds(make(group, size), group, world, device) for size in (_SMALL, _MIDDLE, _LARGE))
    beta = max(0.0, (large - middle) / (_LARGE - _MIDDLE))
    # Up to `free` bytes, an exchange takes as long as the small message. Beyond, its time follows the line through the
    # middle and the large size. So `free` is where this line has the time of the small message; it is limited to the
    # range from 0 to the middle size.
    free = (small - middle) / beta + _MIDDLE if beta else 0.0
    return Link(small / 2, beta, min(max(0.0, free), float(_MIDDLE)))


def _seconds(run: Callable[[], object], group: Communicator, world: Communicator, device: torch.device) -> float:
    """Return the seconds by which an exchange lengthens the work around it.

    Each rank takes the median over its repeats, and the result is the largest of these over all ranks.
    """
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
    """Return the seconds of `_ROUNDS` runs, begun by all ranks of the group at the same time."""
    group.barrier()
    settle(device)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        run()
    settle(device)
    return time.perf_counter() - start


def _swap(group: Communicator, size: int, device: torch.device) -> Callable[[], Pending]:
    """Return a function that begins a halo exchange with both neighbours, in which each rank sends `size` bytes."""
    sent = [0] * group.size
    for neighbour in (group.rank - 1, group.rank + 1):
        sent[neighbour % group.size] += size // 8
    given, taken = torch.zeros(sum(sent), device=device), torch.empty(sum(sent), device=device)
    return lambda: group.all_to_all_single(taken, given, sent, sent, async_op=True)


def _waiting(*begin: Callable[[], Pending]) -> Callable[[], object]:
    """Return a function that begins all of these exchanges, then waits for all."""

    def run() -> None:
        for pending in [one() for one in begin]:
            pending.wait()

    return run


def _sum(group: Communicator, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs an all-reduce in which each rank sends about `size` bytes."""
    x = torch.zeros(max(1, size // 4 * group.size // (2 * (group.size - 1))), device=device)
    return lambda: group.all_reduce(x)
