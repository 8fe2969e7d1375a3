"""Strong and weak scaling to many devices, predicted from measured pieces; as a table and a plot.

Strong: the batch of the run over more and more devices. Weak: the batch grows with the devices, each spatial group
keeping the samples it has on the fewest devices that hold one. What is measured is the local part of a step at the
shapes that the planner measured; at other shapes it is reckoned by the arithmetic that the model itself takes there
(`costs.reckoned`), and messages by the links. So congestion, stragglers and slower links between distant nodes are not
in it.
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
    """The best partition of so many devices: `kind` strong or weak, start dates a step, its cost."""

    kind: str
    devices: int
    batch: int
    best: Candidate

    @property
    def cost(self) -> Cost:
        """Of a step."""
        assert self.best.cost is not None
        return self.best.cost

    @property
    def rate(self) -> float:
        """Start dates a second."""
        return self.batch / self.cost.seconds


def simulated(planner: Planner, found: Sequence[Candidate], pieces: dict[int, Piece], links: Links) -> list[Point]:
    """Points at powers of two up to plan.devices; devices that no partition fits are left out.

    Args:
        found: the candidates that were measured; `pieces` of them by their place.
    """
    known = [(planner.traced(found[i]).flops, piece) for i, piece in pieces.items()]
    points = []
    least = 0
    for devices in _powers(planner.settings.devices):
        best = _best(planner, devices, planner.config.batch_size, known, links)
        if best is not None:
            points.append(Point("strong", devices, planner.config.batch_size, best))
            least = least or devices
        if least:
            batch = max(1, planner.config.batch_size * devices // least)
            best = _best(planner, devices, batch, known, links)
            if best is not None:
                points.append(Point("weak", devices, batch, best))
    return points


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _best(
    planner: Planner, devices: int, batch: int, known: Sequence[tuple[int, Piece]], links: Links
) -> Candidate | None:
    costed = []
    for candidate in planner.open(devices, batch):
        traced = planner.followed(candidate)
        if isinstance(traced, str):  # the optimizer's settings do not go with it
            continue
        if planner.settings.gflops:
            seconds = traced.flops / 1e9 / planner.settings.gflops
            piece = Piece(seconds, 2 / 3 * seconds, measured=False)
        else:
            piece = reckoned(known, traced.flops)
        if traced.memory + planner.base <= planner.memory:
            costed.append(planner.costed(replace(candidate, memory=traced.memory + planner.base), piece, links, traced))
    return pick(costed) if costed else None


def table(points: Sequence[Point]) -> str:
    """The points as lines; efficiency is against the fewest devices of the same kind."""
    widths = (8, 9, 7, 6, 5, 5, 11, 10, 10, 11, 12)
    head = (
        "scaling",
        "devices",
        "batch",
        "data",
        "lat",
        "lon",
        "compute ms",
        "halo ms",
        "exch. ms",
        "dates/s",
        "efficiency",
    )
    lines = ["".join(f"{name:>{n}}" for name, n in zip(head, widths, strict=True))]
    for kind in ("strong", "weak"):
        own = [p for p in points if p.kind == kind]
        for p in own:
            efficiency = p.rate / own[0].rate * own[0].devices / p.devices
            c = p.cost
            words: list[object] = [kind, p.devices, p.batch, *p.best.degrees, f"{1e3 * c.compute:.2f}"]
            words += [f"{1e3 * c.halo:.2f}", f"{1e3 * c.exposed:.2f}", f"{p.rate:.2f}", f"{100 * efficiency:.0f} %"]
            lines.append("".join(f"{word:>{n}}" for word, n in zip(words, widths, strict=True)))
    return "\n".join(lines)


def plot(points: Sequence[Point], path: Path) -> Path:
    """Start dates a second over devices, both kinds beside the ideal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for kind, axes in zip(("strong", "weak"), figure.subplots(1, 2), strict=True):
        own = [p for p in points if p.kind == kind]
        devices = [p.devices for p in own]
        axes.loglog(devices, [p.rate for p in own], "o-", base=2, label="predicted")
        ideal = [own[0].rate * n / own[0].devices for n in devices]
        axes.loglog(devices, ideal, ":", base=2, color="grey", label="ideal")
        axes.set(title=f"{kind} scaling", xlabel="devices", ylabel="start dates a second")
        axes.legend()
    figure.savefig(path, dpi=110)
    return path
