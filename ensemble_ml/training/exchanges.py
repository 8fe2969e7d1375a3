"""Build the exchange of a run: the way in which ranks combine their gradients in a step."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ensemble_ml.config import ClipBy, TrainConfig
from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.choice import make_exchange, process_group
from ensemble_ml.distributed.exchange import GradientAverage
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Exchange

log = logging.getLogger(__name__)


def run_exchange(config: TrainConfig, session: Session, made: list[Communicator] | None = None) -> Exchange:
    """Build the exchange of a run. All ranks must call this.

    The loss of a rank is its part of the loss of the whole batch, so gradients are summed over ranks, not averaged.

    Args:
        config: settings of the run.
        session: the ranks of the job.
        made: a list, to which new communicators are added for the caller to close; None for the run itself. With a
            list, the exchange is only for timing steps, and nothing is logged.

    Raises:
        UserError: settings do not fit the ranks, or with `optim.hierarchical` the nodes are not alike.
    """
    # Steps that are only timed need no quorum: a vote of all ranks costs each rank as much. Without a quorum, `bound`
    # and `replay` must have their defaults.
    if made is not None:
        config = replace(config, optim=replace(config.optim, quorum="all", bound=10, replay=None))
    if config.optim.hierarchical:
        _refuse_uneven_nodes(session)

    def connect(ranks: tuple[int, ...], topology: Topology) -> Communicator | None:
        """Make a communicator among some ranks, and add it to `made`."""
        own = process_group(ranks, topology)
        if own is not None and made is not None:
            made.append(own)
        return own

    size, optim = session.world.local_size, config.optim
    exchange = make_exchange(optim, session.topology, local_size=size, connect=connect)
    if made is None and optim.votes and isinstance(exchange, GradientAverage):
        text = "optim.exchange=%s: there is only one group of ranks, so gradients are averaged in full precision%s"
        clipped = ", and clip bounds their total norm" if optim.clip and optim.clip_by is ClipBy.bucket else ""
        log.info(text, optim.exchange.value, clipped)
    return exchange


def _refuse_uneven_nodes(session: Session) -> None:
    """Raise a UserError, on all ranks, if nodes have different numbers of ranks, or ranks that are not consecutive.

    Ranks would then disagree about the groups, and wait for each other forever.
    """
    size, own = session.mesh.world.size, session.world.local_size
    # One sum over ranks shows on every rank whether all numbers are equal, so that all ranks raise the error together.
    sums = torch.tensor([own, own**2], dtype=torch.float64, device=session.device)
    session.mesh.world.all_reduce(sums)
    if int(sums[0]) ** 2 != size * int(sums[1]):  # equal only if all numbers are equal (Cauchy-Schwarz inequality)
        raise UserError(
            f"optim.hierarchical=true: nodes have different numbers of ranks ({own} on the node of rank"
            f" {session.topology.rank}); set hierarchical=false, or start as many ranks on every node"
        )
    # The ranks of a node must also be consecutive, because groups are made of consecutive ranks.
    first = session.topology.rank // own * own
    apart = torch.tensor(float(not session.on_one_host([first])), device=session.device)
    session.mesh.world.all_reduce(apart)
    if apart:
        raise UserError(
            f"optim.hierarchical=true: of {own} consecutive ranks, taken as one node, some are on another; set"
            " hierarchical=false, or let the launcher fill node by node and give the number of ranks on each"
            " (LOCAL_WORLD_SIZE)"
        )
