"""The planner: it lists every way to partition a run over ranks, predicts what each would cost, and picks the best.

A partition is (data, lat, lon). It is feasible if the ranks along an axis get whole blocks of 2^depth rows or columns,
no shard at a pole is too thin for the rows beyond it, the batch divides evenly, model and optimizer allow it, and
a step fits into the memory of a rank (`rank_memory`).
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ensemble_ml.config import ParallelConfig
from ensemble_ml.distributed.costs import Cost
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from ensemble_ml.machine import memory_limit, taken_memory


@dataclass(frozen=True)
class Candidate:
    """A possible partition of a run.

    Attributes:
        shape: (Y, X) of the largest shard that a rank holds.
        samples: samples of a rank in a step.
        why: the reason why the partition is not feasible; empty if it is.
        memory: bytes that a step takes on a rank; 0 if not known.
        cost: the predicted cost of a step; None if not known.
    """

    data: int
    lat: int
    lon: int
    shape: tuple[int, int] = (0, 0)
    samples: int = 0
    why: str = ""
    memory: int = 0
    cost: Cost | None = None

    def __str__(self) -> str:
        return f"data={self.data} lat={self.lat} lon={self.lon}"

    @property
    def topology(self) -> Topology:
        """Return the mesh of this partition, seen from the first rank."""
        return Topology(data=self.data, lat=self.lat, lon=self.lon)

    def busiest(self, shard: Callable[[Topology], tuple[int, int]]) -> Topology:
        """Return the mesh, seen from a rank with a largest shard, if possible one between two neighbours.

        Such a rank has the most work and the most messages, so it sets the time of a step.
        """
        # By the rules of `topology.bands`, a largest shard is the second, the first or the last along an axis. The
        # second comes first in the list, and `max` takes the first of equals.
        rows, columns = ((min(1, n - 1), 0, n - 1) for n in (self.lat, self.lon))
        ranks = [self.topology.at(row * self.lon + column) for row in rows for column in columns]
        return max(ranks, key=lambda rank: math.prod(shard(rank)))

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Return (data, lat, lon)."""
        return self.data, self.lat, self.lon


def candidates(
    ranks: int, batch: int, wanted: ParallelConfig, shard: Callable[[Topology], tuple[int, int]]
) -> list[Candidate]:
    """List every partition of `ranks`, each with the reason why it is not feasible, if any.

    `batch` is the number of initialisation times in a step. `shard` returns the shard (Y, X) of a topology's rank, or
    raises a UserError if the grid cannot be partitioned so.

    Raises:
        UserError: no partition agrees with the degrees that `wanted` fixes.
    """
    found = [Candidate(data, lat, lon, samples=-(-batch // data)) for data, lat, lon in degrees(ranks, wanted)]
    if not found:
        given = [f"parallel.{k}={v}" for k in ("data", "lat", "lon") if (v := getattr(wanted, k)) != "auto"]
        raise UserError(
            f"{' '.join(given)}: do not divide {ranks} ranks; choose factors of {ranks}, or leave them auto"
        )
    return [_fitted(candidate, batch, shard) for candidate in found]


def _fitted(candidate: Candidate, batch: int, shard: Callable[[Topology], tuple[int, int]]) -> Candidate:
    """Return the candidate with its shape, or with the reason why it is not feasible."""
    if batch % candidate.data:
        why = f"parallel.data={candidate.data}: batch_size={batch} does not divide"
        return replace(candidate, why=f"{why}; use a multiple of {candidate.data}")
    try:
        return replace(candidate, shape=shard(candidate.busiest(shard)))
    except UserError as error:
        return replace(candidate, why=str(error))


def degrees(ranks: int, wanted: ParallelConfig) -> Iterator[tuple[int, int, int]]:
    """Yield all (data, lat, lon) whose product is `ranks` and that agree with the degrees that `wanted` fixes."""
    for lat in _divisors(ranks):
        for lon in _divisors(ranks // lat):
            found = ranks // lat // lon, lat, lon
            given = wanted.data, wanted.lat, wanted.lon
            if all(have == want or want == "auto" for have, want in zip(found, given, strict=True)):
                yield found


def _divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order."""
    # Divisors come in pairs k and n / k, of which one is at most the square root of n.
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def check_any(found: Sequence[Candidate], ranks: int, works: Callable[[int], bool]) -> None:
    """Raise a UserError if no partition of this number of ranks is feasible.

    The message names the nearest numbers of ranks that would work, up to four times `ranks`. `works` returns whether
    another number of ranks has a feasible partition.
    """
    if any(not candidate.why for candidate in found):
        return
    fewer = next((n for n in range(ranks - 1, 0, -1) if works(n)), None)
    more = next((n for n in range(ranks + 1, 4 * ranks + 1) if works(n)), None)
    others = " or ".join(str(n) for n in (fewer, more) if n is not None)
    reasons = "; ".join(dict.fromkeys(candidate.why for candidate in found[:3]))
    raise UserError(
        f"{ranks} ranks: none of {len(found)} partitions fits ({reasons})"
        + (f"; {others} ranks would do" if others else "")
    )


def pick(found: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the shortest predicted step; of equals, that with fewer ranks a sample.

    Raise a UserError if none is feasible.
    """
    fitting = [c for c in found if not c.why and c.cost is not None]
    if not fitting:
        raise UserError("plan: no partition fits; plan.why=true gives the reasons")
    return min(fitting, key=lambda c: (c.cost.seconds if c.cost else 0.0, c.lat * c.lon, c.lon))


def table(found: Sequence[Candidate], batch: int, best: Candidate | None = None) -> str:
    """Format the feasible candidates as a table, fastest first, with the best one marked.

    The column `exchange` has only the part of the gradient exchange that the backward pass does not hide.
    """
    widths = (5, 5, 5, 12, 10, 9, 9, 10, 10, 9, 10)
    names = ("data", "lat", "lon", "part", "compute", "halo", "norm", "exchange", "step", "dates/s", "memory")
    below = ("", "", "", "rows x col", "ms", "ms", "ms", "ms", "ms", "", "MB")
    head, units = ("".join(f"{w:>{n}}" for w, n in zip(words, widths, strict=True)) for words in (names, below))
    fitting = [c for c in found if not c.why]
    fitting.sort(key=lambda c: c.cost.seconds if c.cost else float("inf"))
    return "\n".join([head, units, *(_row(c, batch, c == best) for c in fitting)])


def _row(c: Candidate, batch: int, best: bool) -> str:
    """Format a candidate as a line of the table."""
    part = f"{c.shape[0]} x {c.shape[1]}"
    row = f"{c.data:>5}{c.lat:>5}{c.lon:>5}  {part:>10}"
    if c.cost is None:
        return f"{row}{'':58}{c.memory / 1e6:>9.0f}"
    ms = [1e3 * v for v in (c.cost.compute, c.cost.halo, c.cost.norm, c.cost.exposed, c.cost.seconds)]
    row += f"{ms[0]:>10.1f}{ms[1]:>9.2f}{ms[2]:>9.2f}{ms[3]:>10.2f}{ms[4]:>10.1f}"
    return f"{row}{batch / c.cost.seconds:>9.2f}{c.memory / 1e6:>10.0f}{'  <- best' if best else ''}"


def reasons(found: Sequence[Candidate]) -> list[str]:
    """Return one line for each partition that is not feasible."""
    return [f"{candidate}: {candidate.why}" for candidate in found if candidate.why]


def to_json(candidate: Candidate) -> Mapping[str, Any]:
    """Return a candidate as plain values."""
    plain: dict[str, Any] = {"data": candidate.data, "lat": candidate.lat, "lon": candidate.lon}
    if candidate.why:
        return plain | {"why": candidate.why}
    plain |= {"rows": candidate.shape[0], "columns": candidate.shape[1], "samples": candidate.samples}
    plain["memory_bytes"] = candidate.memory
    if candidate.cost is not None:
        plain |= {**vars(candidate.cost), "seconds": candidate.cost.seconds}
    return plain


def rank_memory(local_size: int, device: torch.device) -> int:
    """Return the bytes that each of `local_size` ranks of this node may use.

    On a GPU this is the whole memory of the GPU. Otherwise it is an equal share of the memory of the job, at most the
    limit on the address space of this process.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    share = memory_limit() // max(local_size, 1)
    return share if own == resource.RLIM_INFINITY else min(own, share)


def in_use(device: torch.device, memory: int) -> int:
    """Return the bytes that a rank takes before it holds a model: the interpreter and its libraries.

    This is 0 on a GPU, whose memory they do not use, and where there is no /proc.

    `memory` is the result of `rank_memory`. If it is a limit on the address space (`ulimit -v`), addresses are counted.
    """
    if device.type == "cuda":
        return 0
    return taken_memory(addresses=memory == resource.getrlimit(resource.RLIMIT_AS)[0]) or 0
