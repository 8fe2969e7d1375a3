"""Predict strong and weak scaling to many devices, as a table and a plot.

In strong scaling the batch of the run stays the same while devices are added. In weak scaling the batch grows in
proportion to the devices, from the batch of the run on the fewest devices that can train it.

The numbers of devices are the planned ranks, halved and doubled, so that what divides the ranks (`parallel.shard`, a
fixed degree) divides most of them, too. At each number, groups of `parallel.shard` ranks share the weights, and the
groups sum their gradients. Numbers that are not its multiples are left out. The time to gather sharded weights and sum
their gradients counts in full, as if it did not overlap with computation.

The local part of a step is computed from `plan.gflops` if that is given. Otherwise it is measured at the shapes of the
planner, and estimated at other shapes from their number of operations (`costs.reckoned`). Messages are estimated from
the links. So congestion, slow ranks, and slower links between distant nodes are not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ml.distributed.costs import Cost, Links, Piece, reckoned
from ensemble_ml.distributed.planner import Candidate, pick

if TYPE_CHECKING:
    from ensemble_ml.training.plan import Planner


@dataclass(frozen=True)
class Point:
    """The best partition for a number of devices.

    Attributes:
        kind: "strong" or "weak".
        devices: number of devices.
        batch: samples in a step of the whole job.
        best: the partition, with its cost.
    """

    kind: str
    devices: int
    batch: int
    best: Candidate

    @property
    def cost(self) -> Cost:
        """Return the cost of a step."""
        assert self.best.cost is not None
        return self.best.cost

    @property
    def rate(self) -> float:
        """Return samples a second."""
        return self.batch / self.cost.seconds


def simulated(planner: Planner, found: Sequence[Candidate], pieces: dict[int, Piece], links: Links) -> list[Point]:
    """Predict strong and weak scaling up to plan.devices, except where no partition fits; perhaps at no number.

    `found` are the partitions that fit, and `pieces` the measured local work by their positions.
    """
    known = [(planner.traced(found[i]).flops, piece) for i, piece in pieces.items()]
    points = []
    least = 0
    odd = planner.ranks // (planner.ranks & -planner.ranks)
    for devices in (odd << k for k in range((planner.settings.devices // odd).bit_length())):
        best = _best(planner, devices, planner.config.batch_size, known, links)
        if best is not None:
            points.append(Point("strong", devices, planner.config.batch_size, best))
            least = least or devices
        # Weak scaling starts at the fewest devices that can train on the run's batch.
        if least:
            batch = max(1, planner.config.batch_size * devices // least)
            best = _best(planner, devices, batch, known, links)
            if best is not None:
                points.append(Point("weak", devices, batch, best))
    return points


def _best(
    planner: Planner, devices: int, batch: int, known: Sequence[tuple[int, Piece]], links: Links
) -> Candidate | None:
    """Return the fastest partition over `devices` that fits their memory, or None."""
    costed = []
    for candidate in planner.open(devices, batch):
        traced = planner.followed(candidate)
        if isinstance(traced, str):  # the model or the optimizer's settings do not allow this partition
            continue
        piece = planner.computed(traced) if planner.settings.gflops else reckoned(known, traced.flops)
        if traced.memory + planner.base <= planner.memory:
            costed.append(planner.costed(replace(candidate, memory=traced.memory + planner.base), piece, links, traced))
    return pick(costed) if costed else None


def table(points: Sequence[Point], shards: int = 1) -> str:
    """Return the points as a table of text. Efficiency is relative to the fewest devices of the same kind."""
    widths = (8, 9, 8, 7, 6, 5, 5, 12, 10, 10, 10, 11, 12, 9)
    head = (
        "scaling", "devices", "shards", "batch", "data", "lat", "lon", "compute ms", "halo ms", "sums ms", "exch. ms",
        "dates/s", "efficiency", "memory",
    )  # fmt: skip
    lines = ["".join(f"{name:>{n}}" for name, n in zip(head, widths, strict=True))]
    for kind in ("strong", "weak"):
        own = [p for p in points if p.kind == kind]
        for p in own:
            efficiency = p.rate / own[0].rate * own[0].devices / p.devices
            c = p.cost
            words: list[object] = [kind, p.devices, shards, p.batch, *p.best.degrees, f"{1e3 * c.compute:.2f}"]
            words += [f"{1e3 * part:.2f}" for part in (c.halo, c.norm, c.exposed)]
            words += [f"{p.rate:.2f}", f"{100 * efficiency:.0f} %", f"{p.best.memory / 1e9:.3g} GB"]
            lines.append("".join(f"{word:>{n}}" for word, n in zip(words, widths, strict=True)))
    return "\n".join(lines)


def plot(points: Sequence[Point], path: Path) -> Path:
    """Plot samples a second against devices for both kinds, with ideal scaling, and return `path`."""
    # Imported here, because only a plot needs it. `Figure` works without a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for kind, axes in zip(("strong", "weak"), figure.subplots(1, 2), strict=True):
        own = [p for p in points if p.kind == kind]
        devices = [p.devices for p in own]
        axes.loglog(devices, [p.rate for p in own], "o-", base=2, label="predicted")
        ideal = [own[0].rate * n / own[0].devices for n in devices]
        axes.loglog(devices, ideal, ":", base=2, color="grey", label="ideal")
        axes.set(title=f"{kind} scaling", xlabel="devices", ylabel="init times a second")
        axes.legend()
    figure.savefig(path, dpi=110)
    return path
