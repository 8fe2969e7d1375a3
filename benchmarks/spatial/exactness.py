"""Compare partitioned convolutions and the partitioned U-Net with one process, in float64.

The whole field is padded point by point from a table of indices, by code that shares nothing with the halo exchange.
torch then convolves it without padding.

Axes: B date, C channel, Y latitude, X longitude, Z plane.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.spatial.network import cut_input, perturbed, small_case, weighted_loss
from ensemble_ml.config import OptimConfig, OptimName
from ensemble_ml.distributed import Session
from ensemble_ml.distributed.halo import Across, Side
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.overlap import Overlap, Window, halo_conv
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.models.padding import Beyond, EdgeRule
from ensemble_ml.optim import build

POLES = {
    "zero": (EdgeRule(Beyond.ZERO), EdgeRule(Beyond.ZERO)),
    "replicate": (EdgeRule(Beyond.REPLICATE), EdgeRule(Beyond.REPLICATE)),
    "cross": (EdgeRule(Beyond.MIRROR, 0), EdgeRule(Beyond.MIRROR, 1)),
}
LONGITUDES = {"circular": True, "replicate": False, "zeros": False}
_REPLICATE, _ZERO = EdgeRule(Beyond.REPLICATE), EdgeRule(Beyond.ZERO)


@dataclass(frozen=True)
class Case:
    """A row of the table: one convolution on a partitioned field."""

    kernel: int
    stride: int
    dilation: int
    longitude: str
    pole: str
    even: bool
    overlap: bool

    @property
    def pad(self) -> int:
        """Return the number of points by which the whole field is padded on each side."""
        return self.dilation * (self.kernel - 1) // 2

    def side(self, dim: int, comm: Any) -> Side:
        """Return the halo of this convolution along an axis.

        Args:
            dim: 2 for latitude, 3 for longitude.
            comm: the ranks along this axis.
        """
        right = self.dilation * (self.kernel - 1) - self.pad - self.stride + 1
        if dim == 2:
            return Side(2, self.pad, right, self.pad, False, *POLES[self.pole], comm)
        rule = _ZERO if self.longitude == "zeros" else _REPLICATE
        return Side(3, self.pad, right, self.pad, LONGITUDES[self.longitude], rule, rule, comm)


def cases(kernels: list[int]) -> Iterator[Case]:
    """Yield all cases. A field that crosses a pole wraps in longitude.

    Args:
        kernels: sizes of the kernel.
    """
    for k, s, d, lon, pole, even, overlap in product(
        kernels, (1, 2), (1, 2), LONGITUDES, POLES, (True, False), (True, False)
    ):
        if (pole == "cross" and lon != "circular") or (k == 1 and d == 2):
            continue
        yield Case(k, s, d, lon, pole, even, overlap)


def bounds(parts: int, even: bool) -> tuple[int, ...]:
    """Return where the parts of an axis begin, and where the last one ends.

    Parts have 16 points, or 18 and 16 in turn.

    Args:
        parts: number of parts.
        even: whether all parts have 16 points.
    """
    sizes = [16 if even or i % 2 else 18 for i in range(parts)]
    return tuple(sum(sizes[:i]) for i in range(parts + 1))


def serial_padding(
    x: Tensor, widths: tuple[int, int, int, int], rules: tuple[EdgeRule, EdgeRule], longitude: str,
    sign: Tensor | None = None, offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Pad the whole field (B, C, Y, X, Z), point by point.

    Args:
        x: the field.
        widths: points at the top, bottom, left and right.
        rules: rules beyond the north and the south pole.
        longitude: "circular", "replicate" or "zeros".
        sign: factor (C, Z) of values from across a pole, or None.
        offset: addend (C, Z) of values from across a pole, or None.
    """
    top, bottom, left, right = widths
    rows, columns = x.shape[2:4]
    lines = []
    for y in range(-top, rows + bottom):
        if 0 <= y < rows:
            lines.append(x[:, :, y])
            continue
        rule, distance = (rules[0], -y) if y < 0 else (rules[1], y - rows + 1)
        line = x[:, :, rule.source(distance) if y < 0 else rows - 1 - rule.source(distance)]
        if rule.beyond is Beyond.ZERO:
            line = torch.zeros_like(line)
        if rule.beyond is Beyond.MIRROR:
            line = torch.stack([line[:, :, (c - columns // 2) % columns] for c in range(columns)], 2)
            line = line if sign is None else line * sign[:, None]
            line = line if offset is None else line + offset[:, None]
        lines.append(line)
    padded = torch.stack(lines, 2)
    if longitude == "zeros":
        return F.pad(padded, (0, 0, left, right))
    wraps = longitude == "circular"
    spots = [(c % columns) if wraps else min(max(c, 0), columns - 1) for c in range(-left, columns + right)]
    return padded[:, :, :, spots]


def convolutions(session: Session, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the largest errors over all ranks for every case, relative to the largest value.

    The ranks' parts are computed on `job["device"]`, the whole on the CPU.

    Args:
        session: the ranks.
        job: `kernels`, and `device`.
    """
    rows = []
    for case in cases(job["kernels"]):
        errors = torch.tensor(_errors(session.mesh, case, job.get("device", "cpu")), dtype=torch.float64)
        session.mesh.world.all_reduce(errors, op="max")
        forward, inputs, weights = errors.tolist()
        found = {"forward": forward, "input gradient": inputs, "weight gradient": weights}
        rows.append({**vars(case), "mesh": f"{session.topology.lat}x{session.topology.lon}", **found})
    return rows


def _errors(mesh: Mesh, case: Case, device: str) -> tuple[float, float, float]:
    lat, lon = bounds(mesh.lat.size, case.even), bounds(mesh.lon.size, case.even)
    if not case.even:
        lat = (*lat[:-1], lat[-1] - 1)  # an odd size of the last part
    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, lat[-1], lon[-1], 3, dtype=torch.float64, generator=random)
    weight = torch.randn(2, 2, case.kernel, case.kernel, 2, dtype=torch.float64, generator=random)
    sign = torch.tensor([[1.0] * 3, [-1.0] * 3], dtype=torch.float64)
    offset = torch.randn(2, 3, dtype=torch.float64, generator=random)
    stride, dilation = (case.stride, case.stride, 1), (case.dilation, case.dilation, 1)
    places = [slice(*bound[c.rank : c.rank + 2]) for bound, c in ((lat, mesh.lat), (lon, mesh.lon))]

    whole, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    padded = serial_padding(whole, (case.pad,) * 4, POLES[case.pole], case.longitude, sign, offset)
    expected = F.conv3d(padded, w, None, stride, 0, dilation)
    adjoint = torch.randn(expected.shape, dtype=torch.float64, generator=random)
    (expected * adjoint).sum().backward()

    part_of_x = x[:, :, places[0], places[1]].contiguous(memory_format=torch.channels_last_3d)
    own, v = (t.to(device, copy=True).requires_grad_() for t in (part_of_x, weight))
    window = Window(stride, (0, 0, 0), dilation)
    across = Across(tuple(pairwise(lon)), sign.to(device), offset.to(device))
    sides = case.side(2, mesh.lat), case.side(3, mesh.lon)
    found = halo_conv(own, v, None, window, *sides, across, overlap=case.overlap)
    starts = [place.start // case.stride for place in places]
    part = [slice(start, start + n) for start, n in zip(starts, found.shape[2:4], strict=True)]
    for place, taken, whole_length, n in zip(places, part, x.shape[2:4], expected.shape[2:4], strict=True):
        assert taken.stop == (n if place.stop == whole_length else place.stop // case.stride), case
    (found * adjoint[:, :, part[0], part[1]].to(device)).sum().backward()
    assert v.grad is not None and w.grad is not None and own.grad is not None and whole.grad is not None
    mesh.model.all_reduce(v.grad)
    return (
        _error(found.detach(), expected[:, :, part[0], part[1]].detach()),
        _error(own.grad, whole.grad[:, :, places[0], places[1]]),
        _error(v.grad, w.grad),
    )


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return _judged(((found.to(expected.device) - expected).abs().max() / expected.abs().max()).item())


def _judged(error: float) -> float:
    """Return an error, or infinity for NaN, which a maximum may pass over."""
    return error if error == error else float("inf")


def networks(session: Session, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the whole U-Net: predictions, gradients of the weights, one step of Lion and of AdamW.

    The ranks' parts are computed on `job["device"]`, the whole on the CPU.

    Args:
        session: the ranks.
        job: `device`.
    """
    rows, device = [], job.get("device", "cpu")
    for even, overlap in product((True, False), (False, True)):
        spec, batch = small_case(session.topology.lat, session.topology.lon, even=even)
        whole = perturbed(spec).double()
        mine = copy.deepcopy(whole).to(device)
        shard = partition_model(mine, session.mesh, Overlap(overlap))
        expected, got = whole(batch), mine(cut_input(shard, batch).to(device))
        names = ("location", "scale", "spread")
        forward = max(_error(getattr(got, n).detach(), shard.cut(getattr(expected, n)).detach()) for n in names)
        weighted_loss(expected, None, spec).backward()
        weighted_loss(got, shard, spec).backward()
        gradients = []
        for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            session.mesh.model.all_reduce(q.grad)
            gradients.append(_error(q.grad, p.grad))
        steps = {f"step of {kind.value}": _after_a_step(whole, mine, kind) for kind in OptimName}
        mesh = f"{session.topology.lat}x{session.topology.lon}"
        found = {"forward": forward, "weight gradient": max(gradients), **steps}
        errors = torch.tensor(list(found.values()), dtype=torch.float64)
        session.mesh.world.all_reduce(errors, op="max")
        rows.append({"mesh": mesh, "even": even, "overlap": overlap, **dict(zip(found, errors.tolist(), strict=True))})
    return rows


def _after_a_step(whole: torch.nn.Module, mine: torch.nn.Module, kind: OptimName) -> float:
    """Return the largest difference of weights after a step, in units of the step.

    Weights whose |gradient| is at most 1e-9 of its mean are left out, because there a sign is a matter of rounding.
    """
    ends = []
    for graded in (whole, mine):
        model = copy.deepcopy(graded)
        for p, q in zip(model.parameters(), graded.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        optimizer, _ = build(OptimConfig(name=kind, lr=1e-2, warmup=0), [{"params": list(model.parameters())}], 10)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    worst = [0.0]
    for p, q, graded_p in zip(*ends, whole.parameters(), strict=True):
        assert graded_p.grad is not None
        size = graded_p.grad.abs()
        sure = ~(size <= 1e-9 * size.mean())
        if bool(sure.any()):
            worst.append(_judged((p - q.to(p.device))[sure].abs().max().item() / 1e-2))
    return max(worst)
