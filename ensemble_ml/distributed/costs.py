"""The cost model of a training step: measured local compute, and messages over links of known latency and bandwidth.

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

Passes are forward, backward, and recomputed forward. Messages along both axes that travel at once have an alpha and a
beta of their own. A rank sends and receives at once, so the larger of the two numbers of bytes counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ensemble_ml.distributed.echo import Message


@dataclass(frozen=True)
class Link:
    """A connection between ranks.

    Attributes:
        alpha: latency of a message, in seconds.
        beta: seconds a byte.
        free: bytes that pass at no cost if the link was idle before (buffers of switches and traffic shapers).
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
AT_ONCE = ("lat and lon",)  # the key of exchanges along both axes that travel at the same time


def message_seconds(message: Message, links: Links) -> float:
    """Return the seconds of one collective."""
    link, size = links.get(message.axes) or links[()], max(message.sent, message.received)
    if message.kind == "all_to_all":
        return link.exchange(size)
    return link.collective(size, message.ranks)


def halo_seconds(messages: Sequence[Message], links: Links) -> float:
    """Return the seconds of all halo exchanges among the messages."""
    total = 0.0
    # Messages of one wave are under way at the same time. If they go along both axes, the link measured for that
    # applies.
    for _, together in groupby((m for m in messages if m.kind == "all_to_all"), key=lambda m: m.wave):
        wave = list(together)
        if AT_ONCE in links and len({message.axes for message in wave}) > 1:
            total += links[AT_ONCE].exchange(max(sum(m.sent for m in wave), sum(m.received for m in wave)))
        else:
            total += sum(message_seconds(message, links) for message in wave)
    return total


@dataclass(frozen=True)
class Piece:
    """The local work of one rank in a step, without its neighbours.

    Attributes:
        seconds: duration of the step.
        backward: duration of the backward pass.
        ready: for each bucket of gradients, when it is complete, as a fraction of the backward pass.
        measured: whether the times were measured; otherwise they were extrapolated or computed.
    """

    seconds: float
    backward: float
    ready: tuple[float, ...] = (1.0,)
    measured: bool = True

    def scaled(self, factor: float) -> Piece:
        """Return the same piece for `factor` times as much work."""
        return Piece(self.seconds * factor, self.backward * factor, self.ready, measured=False)


def reckoned(known: Sequence[tuple[float, Piece]], flops: float) -> Piece:
    """Extrapolate a piece of `flops` floating-point operations from `known` pieces, each with its operations.

    The nearest known piece is scaled along the line a + b flops, with a and b not negative, that fits the seconds of
    the known pieces best by ratio. The constant a stands for work that does not shrink with a rank's shard: the
    optimizer, and kernel launches. It is zero if all known pieces have as many operations.
    """
    nearest, piece = min(known, key=lambda pair: abs(pair[0] - flops))
    a, b = _line([f for f, _ in known], [p.seconds for _, p in known])
    return piece.scaled((a + b * flops) / (a + b * nearest))


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

    Args:
        piece: the local work of a rank.
        messages: the messages of the forward and backward passes.
        buckets: for each bucket, the messages that exchange its gradients.
        links: latency and bandwidth by mesh axes.
        overlap: whether buckets are exchanged during the backward pass.
    """
    halo = halo_seconds(messages, links)
    norm = sum(message_seconds(m, links) for m in messages if m.kind != "all_to_all")
    times = [sum(message_seconds(m, links) for m in bucket) for bucket in buckets]
    ready = piece.ready if overlap else (1.0,)
    left = exposed(times, ready, piece.backward)
    sent = sum(m.sent for m in messages) + sum(m.sent for bucket in buckets for m in bucket)
    return Cost(piece.seconds, halo, norm, sum(times), left, sent)


def exposed(times: Sequence[float], ready: Sequence[float], backward: float) -> float:
    """Return the seconds that the exchange of buckets takes after the end of the backward pass.

    Buckets are exchanged one after the other, each as soon as it is complete.

    Args:
        times: seconds of each bucket's exchange.
        ready: when each bucket is complete, as fractions of the backward pass. The last entry holds for all that
            follow.
        backward: seconds of the backward pass.
    """
    now = 0.0
    for i, seconds in enumerate(times):
        now = max(now, ready[min(i, len(ready) - 1)] * backward) + seconds
    return max(0.0, now - backward)
