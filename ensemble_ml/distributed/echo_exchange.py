"""The messages of a gradient exchange, bucket by bucket, found by a dry run with fake communicators."""

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
    """Return a function that makes fake communicators, which record in `traffic` what is sent."""

    def connect(ranks: tuple[int, ...], topology: Topology) -> Communicator | None:
        if topology.rank not in ranks:
            return None
        return Echo(traffic, MODEL_AXES, ranks.index(topology.rank), len(ranks))

    return connect


def check_exchange(config: OptimConfig, topology: Topology, local_size: int) -> None:
    """Raise a UserError if the settings do not fit the ranks."""
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
    """Find the messages that exchange the gradients of parameters of `shapes`.

    Args:
        config: the optimizer's settings.
        shapes: shapes of the parameters.
        topology: the mesh of the job.
        local_size: ranks of a node.
        parts: what `shard.own_part` returns for each parameter; None if all ranks use all parameters whole.
        late: for each parameter, whether it belongs to the last buckets (see `buckets`); None if none does.

    Returns:
        The messages of each bucket (none for an exchange without buckets), and whether the backward pass hides them.

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
    exchange.ready()  # here the ranks compare their models, which must not count as traffic of a step
    exchange.begin(0)
    sent = []
    for number in range(len(exchange.buckets)):
        before = len(traffic.messages)
        exchange.alone(number)
        sent.append(traffic.messages[before:])
    exchange.close()
    waits = bool(config.clip) and isinstance(exchange, Vote) and config.clip_by is ClipBy.total
    return sent, exchange.overlap and not waits
