"""The cost model of a training step: measured local compute, and messages over links of measured latency and bandwidth.

The cost of messages is linear in their bytes (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). The cost of sums over S
ranks has the latency of a reduce-scatter and an all-gather by halving and doubling (Thakur, Rabenseifner and Gropp
2005, doi:10.1177/1094342005051521).

    step    = compute + halo + norm + exposed
    halo    = sum of (2 alpha + beta max(0, bytes - free)) over convolutions, split axes and passes
    norm    = sum of (2 alpha log2(S) + beta bytes) over sums and gathers

    alpha     latency of a message, in seconds
    beta      seconds a byte
    free      bytes that pass an idle link at no cost
    S         number of ranks of a sum or gather (norms, the weights of the loss)
    exposed   the part of the gradient exchange that is left when the backward pass is done

Passes are forward, backward, and recomputed forward. Messages that travel along both axes at once have a link of their
own. A rank sends and receives at once, so the larger of the two numbers of bytes counts.

Latency and bandwidth are measured by short exchanges of all ranks at once. In a step, a rank computes between two
messages, and its neighbours do not arrive at the same moment. They wait for each other and, if ranks share cores, also
for their turn on one. So each rank computes between exchanges here, too. The time of an exchange is the amount by which
it lengthens the same work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ensemble_ml.distributed.communicator import Communicator, Pending
from ensemble_ml.distributed.echo import Message
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.models.speed import settle

_SMALL, _MIDDLE, _LARGE = 1 << 10, 1 << 17, 1 << 20  # bytes that each rank sends
_ROUNDS, _REPEATS = 6, 7  # exchanges in a timing, and timings of which the median is taken
_WORK = 448  # rows of the matrix that is squared between exchanges: about a millisecond on one core
AT_ONCE = ("lat and lon",)  # the key of exchanges along both axes that travel at the same time

Make = Callable[[Communicator, int], Callable[[], object]]  # (group, bytes) -> a function that runs one exchange


@dataclass(frozen=True)
class Link:
    """A connection between ranks; its numbers are explained at the top of the file.

    Buffers of switches and traffic shapers let `free` bytes pass at no cost if the link was idle before.
    """

    alpha: float
    beta: float
    free: float = 0.0

    def exchange(self, size: float) -> float:
        """Return the seconds of an exchange with both neighbours, `size` bytes out of (or into) this rank."""
        return 2 * self.alpha + self.beta * max(0.0, size - self.free)

    def collective(self, size: float, ranks: int) -> float:
        """Return the seconds of a sum or a gather of `size` bytes over `ranks`."""
        return 2 * self.alpha * math.log2(max(ranks, 1)) + self.beta * size


Links = Mapping[tuple[str, ...], Link]  # by the axes that messages go along; () holds for all other axes
Known = dict[tuple[object, ...], Link]  # by the kind of measurement and the `id` of its communicators


@dataclass(frozen=True)
class Piece:
    """The local work of one rank in a step, without its neighbours.

    Attributes:
        seconds: duration of the whole step.
        backward: duration of its backward pass.
        ready: for each bucket of gradients, when it is complete, as a fraction of the backward pass.
        measured: whether the times were measured; otherwise they were extrapolated or computed.
    """

    seconds: float
    backward: float
    ready: tuple[float, ...] = (1.0,)
    measured: bool = True


@dataclass(frozen=True)
class Cost:
    """The predicted seconds of a step by their causes, and the bytes that a rank sends in it.

    `exchange` is the time of all exchanges of gradients; only `exposed` of it falls after the backward pass.
    """

    compute: float
    halo: float
    norm: float
    exchange: float
    exposed: float
    sent: int

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.halo + self.norm + self.exposed


def step_cost(
    piece: Piece, messages: Sequence[Message], buckets: Sequence[Sequence[Message]], links: Links, *, overlap: bool
) -> Cost:
    """Predict the cost of a step.

    `messages` are those of the forward and backward passes, `buckets` those that exchange the gradients of each bucket.
    With `overlap`, buckets are exchanged during the backward pass.
    """
    halo = halo_seconds(messages, links)
    norm = sum(message_seconds(m, links) for m in messages if m.kind != "all_to_all")
    times = [sum(message_seconds(m, links) for m in bucket) for bucket in buckets]
    left = exposed(times, piece.ready if overlap else (1.0,), piece.backward)
    sent = sum(m.sent for m in messages) + sum(m.sent for bucket in buckets for m in bucket)
    return Cost(piece.seconds, halo, norm, sum(times), left, sent)


def halo_seconds(messages: Sequence[Message], links: Links) -> float:
    """Return the seconds of all halo exchanges among the messages."""
    total = 0.0
    # Messages of one wave are under way at the same time. If they go along both axes, the link for that applies.
    for _, together in groupby((m for m in messages if m.kind == "all_to_all"), key=lambda m: m.wave):
        wave = list(together)
        if AT_ONCE in links and len({message.axes for message in wave}) > 1:
            total += links[AT_ONCE].exchange(max(sum(m.sent for m in wave), sum(m.received for m in wave)))
        else:
            total += sum(message_seconds(message, links) for message in wave)
    return total


def message_seconds(message: Message, links: Links) -> float:
    """Return the seconds of one collective."""
    link, size = links.get(message.axes) or links[()], max(message.sent, message.received)
    if message.kind == "all_to_all":
        return link.exchange(size)
    return link.collective(size, message.ranks)


def exposed(times: Sequence[float], ready: Sequence[float], backward: float) -> float:
    """Return the seconds that the exchange of buckets takes after the end of the backward pass.

    Buckets are exchanged one after the other, each as soon as it is complete: after the fractions `ready` of the
    backward pass, of which the last holds for all further buckets. All times are in seconds.
    """
    now = 0.0
    for i, seconds in enumerate(times):
        now = max(now, ready[min(i, len(ready) - 1)] * backward) + seconds
    return max(0.0, now - backward)


def reckoned(known: Sequence[tuple[float, Piece]], flops: float) -> Piece:
    """Extrapolate a piece of `flops` floating-point operations from `known` pieces, each with its operations.

    The nearest known piece is scaled along the line a + b flops, with a and b not negative, that fits the seconds of
    the known pieces best by ratio. The constant a stands for work that does not shrink with a rank's shard: the
    optimizer, and kernel launches. It is zero if all known pieces have the same number of operations.
    """
    nearest, piece = min(known, key=lambda pair: abs(pair[0] - flops))
    a, b = _line([f for f, _ in known], [p.seconds for _, p in known])
    factor = (a + b * flops) / (a + b * nearest)
    return Piece(piece.seconds * factor, piece.backward * factor, piece.ready, measured=False)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return a and b, neither below zero, that minimise the sum of ((a + b x) / y - 1)^2."""
    u, v = [1 / one for one in y], [one / other for one, other in zip(x, y, strict=True)]
    uu, uv, vv = (sum(p * q for p, q in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-9 * uu * vv:
        a, b = (vv * sum(u) - uv * sum(v)) / determinant, (uu * sum(v) - uv * sum(u)) / determinant
        # A negative coefficient is set to zero, and the other one is fitted alone.
        if a >= 0 and b >= 0:
            return a, b
        if b < 0:
            return sum(u) / uu, 0.0
    return 0.0, sum(v) / vv


def measured_links(mesh: Mesh, known: Known | None = None, device: torch.device | None = None) -> Links:
    """Measure the links of a mesh: halo exchanges along each split axis and along both at once, and sums over ranks.

    All ranks call this, and get the same numbers.

    Links in `known` are not measured again, and new ones are added to it. Tensors of a step lie on `device`; None
    stands for host memory. The result has the links by mesh axes: `AT_ONCE` is the link of exchanges along both axes at
    the same time, if both are split, and `()` that of sums, with its latency given for one doubling of the number of
    ranks.
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
    """Fit a link to the times of messages of three sizes; that of the small one is two latencies (`Link.exchange`)."""
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

    def both() -> None:
        torch.mm(x, x)
        run()

    both()
    found = []
    for _ in range(_REPEATS):
        busy = _round(lambda: torch.mm(x, x), group, device)
        found.append(max(0.0, _round(both, group, device) - busy) / _ROUNDS)
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
