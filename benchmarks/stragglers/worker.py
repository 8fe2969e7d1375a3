"""One rank of the benchmark of ranks that do not wait: `python -m benchmarks.stragglers.worker JOB FOLDER`.

JOB is a JSON object with its settings. Rank 0 writes the result to FOLDER/results.json.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.jobs import take_part
from benchmarks.stragglers.averaging import (
    DiLoCo,
    GroupRounds,
    LocalSteps,
    Starts,
    TorchAverages,
    WaitAvoiding,
    groups_of,
)
from benchmarks.stragglers.clock import Pace
from ensemble_ml.config import ExchangeName, OptimConfig
from ensemble_ml.distributed import Session
from ensemble_ml.distributed.choice import make_exchange, process_group, quorum_vote
from ensemble_ml.distributed.exchange import Reduction
from ensemble_ml.distributed.hub import join_hub
from ensemble_ml.distributed.mesh import patience
from ensemble_ml.distributed.quorum import QuorumVote
from ensemble_ml.optim import Exchange, Lion

ALLREDUCE, DDP, VOTE, LOCAL = "all-reduce", "DDP", "vote of all", "local SGD"
DROP, PAPER, DILOCO = "WAGMA-SGD without old buffers", "WAGMA-SGD as published", "DiLoCo"
PERIODIC, HIERARCHICAL = "torch's PeriodicModelAverager", "torch's HierarchicalModelAverager"
QUORUM, HUB = "vote of a quorum", "vote of all through the hub"
_LR = 1e-3


class Entrant:
    """A training whose steps are sleeps and a small backward pass.

    Args:
        name: name of the entrant.
        session: the ranks.
        job: settings of the job.
        stack: closes what the entrant opens.
    """

    def __init__(self, name: str, session: Session, job: dict[str, Any], stack: ExitStack):
        torch.manual_seed(0)
        self.rank, self.ranks, self.done, self.ballots = session.topology.rank, session.topology.size, 0, 0
        width = round(job["elements"] ** 0.5)
        self._net: nn.Module = nn.Linear(width, width, bias=False)
        self._x = torch.randn(1, width, generator=torch.Generator().manual_seed(self.rank))
        self.exchange = _exchange(name, session, job)
        stack.callback(self.exchange.close)
        self._optimizer = Lion(self._net.parameters(), lr=_LR, exchange=self.exchange)
        if name == DDP:
            self._net = DistributedDataParallel(self._net)
        if isinstance(self.exchange, QuorumVote):
            self.exchange.record = self._count

    @property
    def weights(self) -> Tensor:
        """Return the weights."""
        return next(self._net.parameters()).detach()

    def run(self, steps: int, pause: Callable[[int], object]) -> None:
        """Take steps, the last of which is a meeting.

        Args:
            steps: number of steps.
            pause: called with the number of a step before its backward pass.
        """
        first = self.done
        while self.done < first + steps:
            pause(self.done - first)
            self._optimizer.zero_grad(set_to_none=True)
            self.exchange.begin(self.done)
            (self._net(self._x) - self._x).square().mean().backward()
            missed = True
            while missed:
                missed = self.exchange.finish().missed
                self._optimizer.step()
                self.exchange.after_step()
                self.done += 1
                self.ballots += 0 if isinstance(self.exchange, QuorumVote) else self.ranks

    def _count(self, vote: int, ranks: tuple[int, ...]) -> None:
        self.ballots += len(ranks)


def _exchange(name: str, session: Session, job: dict[str, Any]) -> Exchange:
    """Return the exchange of an entrant. All ranks call this."""
    if name == DDP:
        return Exchange()
    world, bound, size = session.mesh.world, job["bound"], job["group"]
    if name in (LOCAL, DILOCO):
        return (LocalSteps if name == LOCAL else DiLoCo)(world, bound)
    if name in (PERIODIC, HIERARCHICAL):
        return TorchAverages(world, bound, None if name == PERIODIC else {1: size, bound: world.size})
    if name in (DROP, PAPER):
        return WaitAvoiding(world, bound, partial(_rounds, session, size, bound), drop=name == DROP)
    kind = ExchangeName.allreduce if name == ALLREDUCE else ExchangeName.vote
    config = OptimConfig(exchange=kind)
    if name in (QUORUM, HUB):
        ballots = job["quorum"] if name == QUORUM else session.topology.size
        config = OptimConfig(exchange=kind, quorum=str(ballots), bound=job["bound"])
        return quorum_vote(config, session.mesh.world, ballots)
    return make_exchange(config, session.topology, reduction=Reduction.mean)


def _rounds(session: Session, size: int, bound: int, weights: Tensor) -> GroupRounds:
    """Return the averages of groups of `size` processes. All ranks call this."""
    world, own = session.mesh.world, []
    for phase in groups_of(world.size, size):
        made = [process_group(tuple(group), session.topology) for group in phase]
        own += [group for group in made if group is not None]
    link = join_hub(world, lambda: Starts(world.size), seconds=patience())
    return GroupRounds(link, own, lambda step: step % bound == 0, weights)


def race(session: Session, job: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Time the entrants under each kind of straggler. They take turns, and meet the same stragglers.

    Args:
        session: the ranks.
        job: `entrants`, `kinds`, `steps`, `step`, `late`, `bound`, `group`, `quorum`, `elements` and `repeats`.

    Returns:
        By "kind: entrant": steps and samples a second of each run, and whether replicas were equal after it (1 or 0).
    """
    world, found = session.mesh.world, dict[str, dict[str, list[float]]]()
    with ExitStack() as stack:
        entrants = {name: Entrant(name, session, job, stack) for name in job["entrants"]}
        for entrant in entrants.values():
            entrant.run(job["bound"], lambda step: None)
        for repeat in range(job["repeats"]):
            for kind in job["kinds"]:
                pace = Pace(kind, world.size, job["step"], job["late"], repeat)
                for name, entrant in entrants.items():
                    world.barrier()
                    before, began = entrant.ballots, time.perf_counter()
                    entrant.run(job["steps"], lambda step, p=pace: time.sleep(p.seconds(world.rank, step)))  # type: ignore[misc]
                    world.barrier()
                    took = time.perf_counter() - began
                    told = found.setdefault(f"{kind}: {name}", {"steps": [], "samples": [], "equal": []})
                    told["steps"].append(job["steps"] / took)
                    told["samples"].append((entrant.ballots - before) / took)
                    told["equal"].append(float(_equal(entrant.weights, session)))
    return found


def _equal(weights: Tensor, session: Session) -> bool:
    """Return whether all ranks hold the same bits."""
    own = int.from_bytes(hashlib.sha256(weights.numpy().tobytes()).digest()[:7], "little")
    everyone = torch.zeros(session.mesh.world.size, dtype=torch.int64)
    session.mesh.world.all_gather(everyone, torch.tensor([own]))
    return len(set(everyone.tolist())) == 1


if __name__ == "__main__":
    take_part(race)
