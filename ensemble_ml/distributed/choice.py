"""The exchange that a configuration asks for, and the part of its state that a checkpoint keeps.

Each exchange gets communicators that nothing else uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.config import ExchangeName, MomentumKept, OptimConfig
from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, TorchCommunicator
from ensemble_ml.distributed.exchange import ADDS_UP, BucketExchange, GradientAverage, Reduction
from ensemble_ml.distributed.hub import join_hub
from ensemble_ml.distributed.mesh import new_group, patience
from ensemble_ml.distributed.powersgd import PowerSGD
from ensemble_ml.distributed.quorum import Join, Quorum, QuorumVote, quorum_of
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.distributed.voting import DistributedLion, LionCub, MomentumPlan, Vote, average
from ensemble_ml.errors import UserError
from ensemble_ml.optim.exchange import Exchange

log = logging.getLogger(__name__)

# A function that makes a communicator of some ranks, and returns None on all others.
Connect = Callable[[tuple[int, ...], Topology], Communicator | None]


def process_group(ranks: tuple[int, ...], topology: Topology) -> Communicator | None:
    """Return a communicator of `ranks`, None on the others. All ranks of the job call this."""
    group = new_group(ranks)
    return TorchCommunicator(group) if topology.rank in ranks else None


def make_exchange(
    config: OptimConfig,
    topology: Topology,
    *,
    local_size: int = 1,
    reduction: Reduction = Reduction.sum,
    connect: Connect = process_group,
) -> Exchange:
    """Make the exchange of `config` between the ranks that train one set of weights. All ranks of the job call this.

    Ranks that share a sample always average in full precision before a vote; with `hierarchical`, so do the
    `local_size` ranks of a node. `reduction` (see `exchange_between`) is ignored if fewer than all ranks can end a vote
    (`quorum`), where the loss of each rank is the mean over its own samples.

    Raises:
        UserError: the settings do not fit the ranks, or the backend cannot sum the type of the exchange.
    """
    ranks = topology.data * topology.spatial
    if ranks == 1:
        quorum_of(config.quorum, 1)
        return Exchange(config.clip)
    if config.exchange is ExchangeName.none:
        raise UserError(f"optim.exchange=none: {ranks} ranks would train apart; use allreduce or vote")
    if not config.waits:
        if topology.spatial > 1:
            raise UserError(
                f"optim.quorum={config.quorum}: {topology.spatial} ranks share a sample, and wait for each other in"
                " every step; use quorum=all, or one rank a sample"
            )
        if (ballots := quorum_of(config.quorum, ranks)) < ranks:
            return quorum_vote(config, consecutive_groups(topology, 1, connect)[0], ballots)
    inner_size = _inner_size(config, topology, local_size) if config.votes else 1
    return exchange_between(config, *consecutive_groups(topology, inner_size, connect), reduction)


def quorum_vote(config: OptimConfig, group: Communicator, ballots: int, join: Join | None = None) -> QuorumVote:
    """Make a vote that `ballots` ranks can end. All ranks of `group` call this.

    `join` connects a rank with the hub of the votes. If it is None, `join_hub` connects processes by TCP.
    """
    join = join or partial(join_hub, seconds=patience())
    rule = Quorum(ballots, config.bound, patience())
    return QuorumVote(group, rule, join, bits=config.bits, scale=config.scale, **_common(config))


def exchange_between(
    config: OptimConfig, outer: Communicator, inner: Communicator, reduction: Reduction = Reduction.sum
) -> Exchange:
    """Make the exchange of `config` over communicators that nothing else uses.

    The ranks `inner` average before the ranks `outer` vote. If `outer` is a single rank, they only average. If the
    exchange does not vote, the ranks `outer` average. `reduction` says whether the batch's gradient is the sum or the
    mean of the ranks' gradients.

    Raises:
        UserError: the settings do not fit the ranks, or the backend cannot sum the type of the exchange.
    """
    if config.votes and outer.size > 1:
        return _vote(config, outer, inner, reduction)
    common: dict[str, Any] = {"reduction": reduction, "clip": config.clip, "bucket_mb": config.bucket_mb}
    if config.votes:
        return GradientAverage(inner, **common)
    if config.exchange is ExchangeName.powersgd:
        return PowerSGD(outer, rank=config.rank, **common)
    if config.exchange is ExchangeName.allreduce:
        return GradientAverage(outer, **common)
    dtype = torch.float16 if config.exchange is ExchangeName.fp16 else torch.bfloat16
    _try_type(outer, dtype, config.exchange)
    return GradientAverage(outer, dtype=dtype, **common)


def _vote(config: OptimConfig, outer: Communicator, inner: Communicator, reduction: Reduction) -> Vote:
    """Make the voting exchange that `config` names."""
    settings = _common(config) | {"inner": inner, "reduction": reduction}
    settings["plan"] = MomentumPlan(config.momentum_sync, config.momentum_every, config.momentum_mb * 1e6)
    if config.exchange is ExchangeName.distributed_lion:
        return DistributedLion(outer, **settings)
    if config.exchange is ExchangeName.lion_cub:
        return LionCub(outer, bits=config.bits, scale=config.scale, **settings)
    return Vote(outer, bits=config.bits, scale=config.scale, **settings)


def _common(config: OptimConfig) -> dict[str, Any]:
    """Return the settings that all exchanges with votes share."""
    return {"clip": config.clip, "clip_by": config.clip_by, "bucket_mb": config.bucket_mb}


def _inner_size(config: OptimConfig, topology: Topology, local_size: int) -> int:
    """Return how many ranks average before a vote: those of a sample, or those of a node.

    Raise a UserError unless a node holds whole samples, and the ranks of one model fill whole nodes.
    """
    if not config.hierarchical:
        return topology.spatial
    ranks = topology.data * topology.spatial
    if local_size % topology.spatial or ranks % local_size:
        raise UserError(
            f"optim.hierarchical=true: {local_size} ranks a node do not make whole groups of {topology.spatial} and"
            f" whole nodes of {ranks}; set hierarchical=false, or start as many ranks on every node"
        )
    return local_size


def consecutive_groups(topology: Topology, inner_size: int, connect: Connect) -> tuple[Communicator, Communicator]:
    """Return the communicators (outer, inner) of this rank. All ranks of the job call this.

    An inner group holds `inner_size` consecutive ranks of one model. An outer group holds the ranks at the same place
    of each inner group of that model. A group of one rank is a null communicator.
    """
    found: dict[str, Communicator] = {"outer": NullCommunicator(), "inner": NullCommunicator()}
    for members in topology.groups("data", "lat", "lon"):
        rows = [members[i : i + inner_size] for i in range(0, len(members), inner_size)]
        for role, sets in (("inner", rows), ("outer", list(zip(*rows, strict=True)))):
            # torch requires every rank to take part in making every group, also those that it does not belong to.
            for ranks in sets:
                made = connect(tuple(ranks), topology) if len(ranks) > 1 else None
                found[role] = made or found[role]
    return found["outer"], found["inner"]


def _try_type(group: Communicator, dtype: torch.dtype, name: ExchangeName) -> None:
    """Sum a few numbers of this type, and raise a UserError if the backend cannot."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        group.all_reduce(torch.ones(2, dtype=dtype, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"optim.exchange={name.value}: the backend cannot sum {dtype} ({error}); use allreduce"
        ) from error


@dataclass(frozen=True)
class OwnState:
    """The state of one rank that differs between ranks.

    Attributes:
        rank: number of this part of the state, from 0.
        ranks: number of parts.
        keep: whether this rank writes the part. Several ranks may hold the same one, and one of them writes it.
    """

    rank: int
    ranks: int
    tensors: dict[str, Tensor]
    keep: bool


def own_state(exchange: Exchange, kept: MomentumKept = MomentumKept.ranks) -> OwnState | None:
    """Return the state that differs between ranks, not copied; None if there is none. Every rank calls this.

    With `mean`, momenta are averaged in place instead, so that the running job continues from the same values as a
    resumed one.
    """
    if not isinstance(exchange, BucketExchange):
        return None
    if isinstance(exchange, Vote) and kept is MomentumKept.mean:
        average(exchange.momenta, exchange.group)
        return None
    found = exchange.local_state()
    if not found:
        return None
    first = not isinstance(exchange, Vote) or exchange.inner.rank == 0
    return OwnState(exchange.group.rank, exchange.group.size, found, first)


def restore_state(exchange: Exchange, ranks: int, read: Callable[[int], Mapping[str, Tensor]]) -> None:
    """Give this rank its tensors back from a checkpoint.

    If the number of parts has changed, or all ranks now hold the same state, all get the mean of the parts. Of tensors
    whose names begin with `ADDS_UP` (errors that PowerSGD has yet to send), each rank gets an equal share of the sum.
    They are lost if the exchange of this run has no such tensors.

    The checkpoint has `ranks` parts; 0 does nothing. `read` returns the tensors of a part; only one part is held in
    memory at a time.
    """
    if not ranks:
        return
    size, place = (exchange.group.size, exchange.group.rank) if isinstance(exchange, BucketExchange) else (1, 0)
    apart = bool(exchange.local_state())
    # The same number of ranks may now share a sample and average gradients. Their momenta must then be equal, so the
    # parts are not given back one by one.
    if ranks == size and apart:
        exchange.load_local_state(dict(read(place)))
        return
    # Otherwise, divide the sum of all parts by their number for a mean, or by the number of ranks for an equal share.
    total = {name: value.clone() for name, value in read(0).items()}
    for rank in range(1, ranks):
        for name, value in read(rank).items():
            total[name] += value
    unsent = [name for name in total if name.startswith(ADDS_UP)]
    if any(name.startswith("momentum.") for name in total):
        now = "" if apart else " that hold them in common"
        log.warning("resume: momenta of %d ranks on %d%s: every rank goes on from their mean", ranks, size, now)
    if unsent:
        now = f"shared out over {size}" if apart else "lost, as nothing is sent any more"
        log.warning("resume: what %d ranks had left to send of their gradients is %s", ranks, now)
    parts = {name: size if name.startswith(ADDS_UP) else ranks for name in total}
    exchange.load_local_state({name: value / parts[name] for name, value in total.items()})
