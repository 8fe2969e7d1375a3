"""What an exchange of gradients sends, bucket by bucket, found by carrying it out with echoes for the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ensemble_ml.config import ClipBy, OptimConfig
from ensemble_ml.distributed.choice import Connect, make_exchange
from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.echo import Echo, Message, Phase, Traffic
from ensemble_ml.distributed.exchange import BucketExchange
from ensemble_ml.distributed.shard import Shard, mark_own
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.optim import build

MODEL_AXES = ("data", "lat", "lon")


def echoes(traffic: Traffic) -> Connect:
    """Makes communicators of echoes, which note what is sent in `traffic`."""

    def connect(ranks: tuple[int, ...], topology: Topology) -> Communicator | None:
        if topology.rank not in ranks:
            return None
        return Echo(traffic, MODEL_AXES, ranks.index(topology.rank), len(ranks))

    return connect


def check_exchange(config: OptimConfig, topology: Topology, local_size: int) -> None:
    """Raise a UserError where the settings do not fit the ranks."""
    exchange = make_exchange(config, topology, local_size=local_size, connect=echoes(Traffic()))
    if isinstance(exchange, BucketExchange):
        exchange.close()


def exchange_traffic(
    config: OptimConfig,
    shapes: Sequence[torch.Size],
    topology: Topology,
    local_size: int,
    parts: Sequence[Shard | None] | None = None,
    late: Sequence[bool] | None = None,
) -> tuple[list[list[Message]], bool]:
    """The messages that exchange each bucket of gradients of parameters of `shapes`, and whether backward hides them.

    `parts`: what `shard.own_part` says of each parameter; None where all are used whole. `late`: as `buckets` has it.

    Raises:
        UserError: the settings do not fit the ranks.
    """
    traffic = Traffic(phase=Phase.update)
    exchange = make_exchange(config, topology, local_size=local_size, connect=echoes(traffic))
    if not isinstance(exchange, BucketExchange):
        return [], False
    params: list[Tensor] = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for p, part in zip(params, parts or [], strict=False):
        if part is not None:
            mark_own(p, part)
    flags = list(late or [False] * len(params))
    runs = groupby(zip(flags, params, strict=True), key=lambda pair: pair[0])
    build(config, [{"params": [p for _, p in some], "late": flag} for flag, some in runs], 1, exchange)
    for p in params:
        p.grad = torch.zeros_like(p)
    exchange.ready()  # the ranks compare their models, once
    exchange.begin(0)
    sent = []
    for number in range(len(exchange.buckets)):
        before = len(traffic.messages)
        exchange.alone(number)
        sent.append(traffic.messages[before:])
    exchange.close()
    waits = bool(config.clip) and isinstance(exchange, Vote) and config.clip_by is ClipBy.total
    return sent, exchange.overlap and not waits
