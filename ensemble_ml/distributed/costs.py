"""What a training step costs: measured local work, and messages over links of known latency and bandwidth.

    step      = compute + halo + norm + exposed
    halo      = sum over convolutions, split axes and passes (forward, backward, recomputed) of 2 alpha + beta * bytes;
                messages along both axes that travel at once have an alpha and a beta of their own
    norm      = 2 alpha log2(S) + beta * bytes for each sum or gather over S ranks (norms, the weights of the loss)
    exposed   = what of the exchange of gradients is left when backward is done

Seconds and bytes. Bytes are those of one rank; it sends and receives at once, so the larger of the two counts.
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

    `alpha`: seconds of a message; `beta`: seconds a byte; `free`: bytes that pass without waiting for the line, as long
    as it was idle before (buffers of switches and traffic shapers).
    """

    alpha: float
    beta: float
    free: float = 0.0

    def exchange(self, size: float) -> float:
        """Seconds of an exchange with both neighbours, `size` bytes out of (or into) this rank."""
        return 2 * self.alpha + self.beta * max(0.0, size - self.free)

    def collective(self, size: float, ranks: int) -> float:
        """Seconds of a sum or a gather over `ranks`."""
        return 2 * self.alpha * math.log2(max(ranks, 1)) + self.beta * size


Links = Mapping[tuple[str, ...], Link]  # by the axes that messages go along; () is the one of all others
AT_ONCE = ("lat and lon",)  # of exchanges along both axes that travel at the same time


def link_of(links: Links, axes: tuple[str, ...]) -> Link:
    """The link of messages along `axes`."""
    return links.get(axes) or links[()]


def message_seconds(message: Message, links: Links) -> float:
    """Seconds of one collective."""
    link, size = link_of(links, message.axes), max(message.sent, message.received)
    if message.kind == "all_to_all":
        return link.exchange(size)
    return link.collective(size, message.ranks)


def halo_seconds(messages: Sequence[Message], links: Links) -> float:
    """Seconds of all exchanges of halos."""
    total = 0.0
    for _, together in groupby((m for m in messages if m.kind == "all_to_all"), key=lambda m: m.wave):
        wave = list(together)
        if AT_ONCE in links and len({message.axes for message in wave}) > 1:
            total += links[AT_ONCE].exchange(max(sum(m.sent for m in wave), sum(m.received for m in wave)))
        else:
            total += sum(message_seconds(message, links) for message in wave)
    return total


@dataclass(frozen=True)
class Piece:
    """A step of one rank without its neighbours: seconds of all of it and of backward; when, as shares of backward,
    each bucket of gradients is ready; whether it was measured, or reckoned from another piece."""

    seconds: float
    backward: float
    ready: tuple[float, ...] = (1.0,)
    measured: bool = True

    def scaled(self, factor: float) -> Piece:
        """The same for `factor` times as much work."""
        return Piece(self.seconds * factor, self.backward * factor, self.ready, measured=False)


def reckoned(known: Sequence[tuple[float, Piece]], flops: float) -> Piece:
    """A piece of so many floating-point operations, from those `known` with theirs.

    Seconds go along the line a + b flops that lies nearest to the known ones by ratio, neither a nor b below zero: what
    a step takes whatever its size (the optimizer, calls of kernels) does not shrink with a rank's part of the grid.
    """
    nearest, piece = min(known, key=lambda pair: abs(pair[0] - flops))
    a, b = _line([f for f, _ in known], [p.seconds for _, p in known])
    return piece.scaled((a + b * flops) / (a + b * nearest))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """a and b >= 0 that make the sum of ((a + b x) / y - 1)^2 smallest."""
    u, v = [1 / one for one in y], [one / other for one, other in zip(x, y, strict=True)]
    uu, uv, vv = (sum(p * q for p, q in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-9 * uu * vv:
        a, b = (vv * sum(u) - uv * sum(v)) / determinant, (uu * sum(v) - uv * sum(u)) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if b < 0:
            return sum(u) / uu, 0.0
    return 0.0, sum(v) / vv


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of a step, by what they are spent on, and bytes that a rank sends in it."""

    compute: float
    halo: float
    norm: float
    exchange: float
    exposed: float
    sent: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.halo + self.norm + self.exposed


def step_cost(
    piece: Piece, messages: Sequence[Message], buckets: Sequence[Sequence[Message]], links: Links, *, overlap: bool
) -> Cost:
    """The cost of a step.

    Args:
        messages: of forward and backward.
        buckets: the messages that exchange each bucket of gradients.
        overlap: whether buckets are exchanged while backward goes on.
    """
    halo = halo_seconds(messages, links)
    norm = sum(message_seconds(m, links) for m in messages if m.kind != "all_to_all")
    times = [sum(message_seconds(m, links) for m in bucket) for bucket in buckets]
    ready = piece.ready if overlap else (1.0,)
    left = exposed(times, ready, piece.backward)
    sent = sum(m.sent for m in messages) + sum(m.sent for bucket in buckets for m in bucket)
    return Cost(piece.seconds, halo, norm, sum(times), left, sent)


def exposed(times: Sequence[float], ready: Sequence[float], backward: float) -> float:
    """Seconds after the end of backward that the exchange of buckets takes, one after the other, each once it is there.

    Args:
        times: seconds of each bucket's exchange.
        ready: when each bucket is complete, as shares of backward; the last entry stands for all that follow.
    """
    now = 0.0
    for i, seconds in enumerate(times):
        now = max(now, ready[min(i, len(ready) - 1)] * backward) + seconds
    return max(0.0, now - backward)
