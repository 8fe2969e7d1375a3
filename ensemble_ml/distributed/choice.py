"""The exchange that a configuration asks for, over communicators of its own, and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ensemble_ml.config import ExchangeName, MomentumKept, OptimConfig
from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, TorchCommunicator
from ensemble_ml.distributed.exchange import BucketExchange, GradientAverage, Reduction
from ensemble_ml.distributed.momentum import MomentumPlan
from ensemble_ml.distributed.powersgd import PowerSGD
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.distributed.voting import DistributedLion, LionCub, Vote
from ensemble_ml.errors import UserError
from ensemble_ml.optim.exchange import Exchange

log = logging.getLogger(__name__)

_VOTES = (ExchangeName.vote, ExchangeName.lion_cub, ExchangeName.distributed_lion)


def make_exchange(
    config: OptimConfig, topology: Topology, *, local_size: int = 1, reduction: Reduction = Reduction.sum
) -> Exchange:
    """The exchange of `config` between the ranks that train one set of weights; all ranks of the job call this.

    Args:
        topology: of the job. Ranks that share a sample always average in full precision before a vote.
        local_size: ranks of a node, which `hierarchical` averages too.
        reduction: sum or mean of the ranks' gradients is that of the whole batch.

    Raises:
        UserError: the settings do not fit the ranks.
    """
    ranks = topology.data * topology.spatial
    if ranks == 1:
        return Exchange(config.clip)
    name = config.exchange
    if name is ExchangeName.none:
        raise UserError(f"optim.exchange=none: {ranks} ranks would train apart; use allreduce or vote")
    if name in _VOTES:
        outer, inner = _groups(topology, _inner_size(config, topology, local_size))
        if outer.size > 1:
            return _vote(config, outer, inner, reduction)
        log.info("optim.exchange=%s: one group of ranks alone, so gradients are averaged in full precision", name.value)
        return GradientAverage(inner, reduction=reduction, clip=config.clip, bucket_mb=config.bucket_mb)
    group, _ = _groups(topology, 1)
    common: dict[str, Any] = {"reduction": reduction, "clip": config.clip, "bucket_mb": config.bucket_mb}
    if name is ExchangeName.powersgd:
        return PowerSGD(group, rank=config.rank, **common)
    if name is ExchangeName.allreduce:
        return GradientAverage(group, **common)
    dtype = torch.float16 if name is ExchangeName.fp16 else torch.bfloat16
    _try_type(group, dtype, name)
    return GradientAverage(group, dtype=dtype, **common)


def _vote(config: OptimConfig, outer: Communicator, inner: Communicator, reduction: Reduction) -> Vote:
    settings: dict[str, Any] = {
        "inner": inner,
        "reduction": reduction,
        "clip": config.clip,
        "clip_by": config.clip_by,
        "bucket_mb": config.bucket_mb,
        "plan": MomentumPlan(config.momentum_sync, config.momentum_every, config.momentum_mb * 1e6),
    }
    if config.exchange is ExchangeName.distributed_lion:
        return DistributedLion(outer, **settings)
    if config.exchange is ExchangeName.lion_cub:
        return LionCub(outer, bits=config.bits, scale=config.scale, **settings)
    return Vote(outer, bits=config.bits, scale=config.scale, **settings)


def _inner_size(config: OptimConfig, topology: Topology, local_size: int) -> int:
    if not config.hierarchical:
        return topology.spatial
    ranks = topology.data * topology.spatial
    if local_size % topology.spatial or ranks % local_size:
        raise UserError(
            f"optim.hierarchical=true: {local_size} ranks a node do not make whole groups of {topology.spatial} and"
            f" whole nodes of {ranks}; set hierarchical=false, or start as many ranks on every node"
        )
    return local_size


def _groups(topology: Topology, inner_size: int) -> tuple[Communicator, Communicator]:
    """(outer, inner): `inner_size` ranks in a row, and the ranks at this place of each such row. Made by all ranks."""
    found: dict[str, Communicator] = {"outer": NullCommunicator(), "inner": NullCommunicator()}
    for members in topology.groups("data", "lat", "lon"):
        rows = [members[i : i + inner_size] for i in range(0, len(members), inner_size)]
        columns = list(zip(*rows, strict=True))
        for role, sets in (("inner", rows), ("outer", columns)):
            for ranks in sets:
                if len(ranks) > 1:
                    group = dist.new_group(list(ranks))
                    if topology.rank in ranks:
                        found[role] = TorchCommunicator(group)
    return found["outer"], found["inner"]


def _try_type(group: Communicator, dtype: torch.dtype, name: ExchangeName) -> None:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        group.all_reduce(torch.ones(2, dtype=dtype, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"optim.exchange={name.value}: the back end has no sum of {dtype} ({error}); use fp16 or allreduce"
        ) from error


def gather_state(exchange: Exchange, kept: MomentumKept = MomentumKept.ranks) -> dict[str, Tensor]:
    """What ranks hold apart, as `rank0.NAME`, `rank1.NAME`, ... on the CPU; every rank calls this.

    `mean` averages momenta instead, in place, so that the run goes on from what the checkpoint says.
    """
    if not isinstance(exchange, BucketExchange):
        return {}
    if isinstance(exchange, Vote) and kept is MomentumKept.mean:
        exchange.average_momenta()
        return {}
    found = {}
    for name, value in exchange.local_state().items():
        own = value.contiguous().view(-1)
        everyone = own.new_empty(exchange.group.size * own.numel())
        exchange.group.all_gather(everyone, own)
        for rank, part in enumerate(everyone.cpu().split(own.numel())):
            found[f"rank{rank}.{name}"] = part.view(value.shape)
    return found


def restore_state(exchange: Exchange, found: dict[str, Tensor]) -> None:
    """Give each rank its tensors back; on another number of ranks, all of them get the mean."""
    if not found:
        return
    size, place = (exchange.group.size, exchange.group.rank) if isinstance(exchange, BucketExchange) else (1, 0)
    ranks = sorted({int(key.split(".")[0].removeprefix("rank")) for key in found})
    names = [key.removeprefix("rank0.") for key in found if key.startswith("rank0.")]
    if len(ranks) == size:
        own = {name: found[f"rank{place}.{name}"] for name in names}
    else:
        log.warning("resume: momenta of %d ranks on %d: every rank goes on from their mean", len(ranks), size)
        own = {name: torch.stack([found[f"rank{r}.{name}"] for r in ranks]).mean(0) for name in names}
    exchange.load_local_state(own)
