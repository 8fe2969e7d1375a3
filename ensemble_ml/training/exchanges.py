"""Build the exchange by which the ranks of a run combine their gradients, and record which ranks are in its votes.

A run whose votes need not wait for all ranks (`optim.quorum`) keeps the record, and can be repeated bit for bit:

    runs/NAME/votes.jsonl

The first line identifies the run: {"run": hash, "ranks": P, "quorum": N, "bound": B}. Each further line is a vote:
{"vote": k, "ranks": [...]}, where k counts from 1. A rank begins its next gradient after each vote that it was in, so
the record determines which gradient it casts in each vote. A repetition needs nothing else but settings and data.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ensemble_ml.config import ClipBy, TrainConfig
from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.choice import make_exchange, process_group
from ensemble_ml.distributed.exchange import GradientAverage
from ensemble_ml.distributed.quorum import QuorumVote
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.optim import Exchange
from ensemble_ml.training.agreement import deciding_settings

log = logging.getLogger(__name__)
VOTES = "votes.jsonl"


def run_exchange(config: TrainConfig, session: Session, made: list[Communicator] | None = None) -> Exchange:
    """Build the exchange of a run. All ranks must call this.

    The loss of a rank is its part of the loss of the whole batch, so gradients are summed over ranks, not averaged.

    With a list `made`, the exchange is only for timing steps: new communicators are added to the list for the caller to
    close, and nothing is logged.

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


class VoteLog:
    """A writer of the votes of a run, on the first rank.

    Args:
        folder: the run folder.
        first: the result of `first_line`.
        step: number of steps that are done. Later votes in the file are removed: a killed run wrote them after its last
            checkpoint. So are votes under another first line, such as one of other ranks: no run can repeat both.
    """

    def __init__(self, folder: Path, first: dict[str, Any], step: int):
        path = folder / VOTES
        before, *votes = (path.read_text() if step and path.exists() else "").splitlines() or [""]
        head = json.dumps(first)
        old = votes[:step] if before == head else []
        if len(old) < step:
            other = " with these ranks and settings" if before not in ("", head) else ""
            text = "resume: %s holds %d of the %d votes so far%s, so the run cannot be repeated"
            log.warning(text, path, len(old), step, other)
        write_whole(path, "".join(f"{line}\n" for line in [head, *old]))
        self._stream = open(path, "a")  # noqa: SIM115 - closed by `close`

    def __call__(self, vote: int, ranks: tuple[int, ...]) -> None:
        """Write the ranks whose ballots a vote counted, and its number, which is given from 0."""
        self._stream.write(json.dumps({"vote": vote + 1, "ranks": ranks}) + "\n")

    def flush(self) -> None:
        """Flush the file. Call this before a checkpoint, which needs the votes before it."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def first_line(config: TrainConfig, fingerprint: str, exchange: QuorumVote) -> dict[str, Any]:
    """Return the first line of a run's record."""
    settings = json.dumps([deciding_settings(config), fingerprint], sort_keys=True)
    rule = {"quorum": exchange.rule.ballots, "bound": exchange.rule.bound}
    return {"run": hashlib.sha256(settings.encode()).hexdigest()[:16], "ranks": exchange.group.size, **rule}


def read_votes(path: Path, expected: dict[str, Any], meets: Callable[[int], bool]) -> dict[int, list[int]]:
    """Read the votes of an earlier run.

    `expected` is the first line that a record of this run would have. `meets` returns whether all ranks have to be in a
    vote, from the number of steps done after it.

    Returns:
        The ranks of each vote, by its number, which counts from 0.

    Raises:
        UserError: the file cannot be read, is damaged, or is of another run.
    """
    key = f"optim.replay={path}"
    try:
        first, *votes = [json.loads(line) for line in path.read_text().splitlines()]
        found = {line["vote"] - 1: list(map(int, line["ranks"])) for line in votes}
        of_run = {name: first[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: cannot be read ({error}); give the {VOTES} of a run with optim.quorum") from error
    for name in ("ranks", "quorum", "bound"):
        if of_run[name] != expected[name]:
            raise UserError(f"{key}: its run had {name}={of_run[name]}, this one has {expected[name]}; give the same")
    if of_run != expected:
        raise UserError(f"{key}: is of a run with other settings or data; give those of that run, seed included")
    if [*found] != [*range(len(votes))]:
        raise UserError(f"{key}: its votes do not count from 1, or some are missing; the file is damaged")
    size = expected["ranks"]
    for vote, ranks in found.items():
        least = size if meets(vote + 1) else expected["quorum"]
        if not least <= len({*ranks} & {*range(size)}) == len(ranks):
            raise UserError(f"{key}: vote {vote + 1} cannot be of ranks {ranks}; the file is damaged")
    return found
