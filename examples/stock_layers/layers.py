"""Partition of any network of stock layers over several ranks: `partition(model, mesh)`.

Layers change their classes in place and keep parameters, buffers and names. Each computes its shard of the result on
the whole field, with its own padding mode at the outer edges. The halos of convolutions stand in `halo`; the others
are:

    transposed convolution    left = floor((k - 1 - p) / s)   right = ceil(p / s), then crop to the own points
    pooling                   left = 0                        right = k - s
    linear upsampling         left = 1                        right = 1
    nearest upsampling        none

    k   kernel size, gaps of the dilation included
    s   stride
    p   padding

Shards must start at multiples of every stride and scale on the way, as `topology.make_shard` cuts them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.distributed.halo import Side, halo
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.overlap import Overlap, Window, halo_conv
from ensemble_ml.errors import UserError
from ensemble_ml.models.padding import Beyond, EdgeRule
from examples.stock_layers import norms
from examples.stock_layers.between import watch_first_pass
from examples.stock_layers.trial import Layout, try_parts

# What lies beyond the ends of the whole axis, by padding mode. A circular axis has no ends, so its rule is never used.
_RULES = {"zeros": EdgeRule(Beyond.ZERO), "replicate": EdgeRule(Beyond.REPLICATE), "circular": EdgeRule(Beyond.ZERO)}
_REPLICATE = _RULES["replicate"]
# Layers that act on each point alone. Linear acts on the last axis, which must not be a split one.
_POINTWISE = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.ReLU6, nn.Linear,
)  # fmt: skip


def partition(
    model: nn.Module,
    mesh: Mesh,
    *,
    axes: tuple[int, int] = (2, 3),
    overlap: Overlap | None = None,
    trial: bool = True,
) -> nn.Module:
    """Make `model` compute this rank's shard of a field, in place, and return it.

    If several ranks share a sample, the model is checked in two ways. First, a trial runs before the first forward
    pass: copies of the model compute a field in this process, and its first and last shard. A model whose shards differ
    from the whole field is refused, for example one whose forward makes coordinates, weights, divisors or random
    numbers by the shape of its input. A model that cannot be tried, such as one that cannot be copied, only gives a
    warning. So does one with large fields of two sizes of which neither is a multiple of the other. The copies call no
    hooks of the model or its layers. Second, the first forward pass of each mode (training, evaluation) is watched:
    functions between the layers that are not known to work point by point are refused.

    Args:
        model: a network of stock layers.
        mesh: the mesh of the job. Some layers change even if no ranks share a sample: norms over the batch, if ranks
            share the batch, and dropout, whose masks then do not depend on the partition.
        axes: latitude and longitude among the axes of the tensors; (3, 4) for (B, C, Z, Y, X).
        overlap: a switch that makes convolutions compute while their halos travel; None for off.
        trial: whether the trial runs. A model that makes its coordinates by its rank's place needs False.

    Raises:
        UserError: a layer cannot be partitioned; the message has its name and type. The first forward pass raises one
            if the model combines points between its layers, or if a shard differs from the whole field.
    """
    # All classes are chosen first, so that a refused model is left unchanged.
    chosen = {name: _kind(name, module) for name, module in model.named_modules()}
    overlap = overlap or Overlap()
    for name, module in model.named_modules():
        kind = chosen[name]
        # The number of ranks that hold the values which the layer combines.
        sharers = mesh.topology.spatial * (mesh.topology.data if norms.over_batch(module) else 1)
        if kind is None or (kind is not PartDropout and sharers == 1):
            continue
        module.__class__ = kind
        object.__setattr__(module, "part_mesh", mesh)
        object.__setattr__(module, "part_axes", axes)
        object.__setattr__(module, "part_overlap", overlap)
    if mesh.topology.spatial > 1:
        layers = [module for module in model.modules() if next(module.children(), None) is None]
        place, ranks = mesh.topology.place, (mesh.topology.lat, mesh.topology.lon)
        last = place.lat == ranks[0] - 1, place.lon == ranks[1] - 1
        layout = Layout(axes, ranks, {kind: stock for stock, kind in _KINDS.items()}, _rate)

        def before(given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if trial and model not in layers:
                # Under torch.compile, compiling the trial would take minutes, so compilation is switched off for it.
                # `torch.compiler.disable` imports the compiler, which takes seconds, so it is used only if needed.
                compiles = "torch._dynamo" in sys.modules
                (torch.compiler.disable(try_parts) if compiles else try_parts)(model, given, named, layout)

        watch_first_pass(model, axes, layers, last, before=before)
    return model


def _rate(layer: Any, axis: int) -> Fraction:
    """Return the number of output points of a layer for each input point along an axis."""
    if isinstance(layer, nn.Upsample):
        return Fraction(_tuple(layer.scale_factor, axis - 1)[axis - 2])
    stride = Fraction(_tuple(getattr(layer, "stride", 1), axis - 1)[axis - 2])
    return stride if isinstance(layer, _PartTransposed) else 1 / stride


def _kind(name: str, module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a layer changes to, or None if it stays as it is.

    Raises:
        UserError: the layer cannot be partitioned.
    """
    for stock, kind in _KINDS.items():
        if type(module) is stock:
            why = _obstacle(module)
            if why:
                raise UserError(f"layer {name or 'model'} ({type(module).__name__}): {why}")
            return kind
    if type(module) in (*_POINTWISE, nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return None
    if hasattr(module, "parametrizations"):
        raise UserError(
            f"layer {name or 'model'} ({type(module).__name__}): its weights are parametrised; settle them first by"
            " torch.nn.utils.parametrize.remove_parametrizations"
        )
    own = not type(module).__module__.startswith("torch.") and not isinstance(module, (*_KINDS, *_POINTWISE))
    # A user's module that only arranges layers. The layers are examined on their own.
    if own and next(module.children(), None) is not None:
        return None
    known = ", ".join(stock.__name__ for stock in _KINDS)
    raise UserError(
        f"layer {name or 'model'} ({type(module).__name__}): cannot be shared out over ranks; {known} and layers that"
        " act on each point can"
    )


def _obstacle(module: Any) -> str:
    """Return why a layer cannot be partitioned with its settings, or an empty text."""
    if isinstance(module, nn.Conv2d | nn.Conv3d) and module.padding_mode not in _RULES:
        return f"padding_mode={module.padding_mode} cannot be shared out; use {', '.join(_RULES)}"
    if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        sizes = zip(module.kernel_size, module.dilation, module.padding, strict=True)
        if any(d * (k - 1) < p for k, d, p in sizes):  # type: ignore[operator]
            return f"padding={module.padding} is wider than the kernel {module.kernel_size}"
    if isinstance(module, nn.MaxPool2d | nn.MaxPool3d | nn.AvgPool2d | nn.AvgPool3d):
        if any(_tuple(module.padding, 3)):
            return f"padding={module.padding} cannot be shared out; pool without padding"
        if getattr(module, "return_indices", False):
            return "return_indices=True cannot be shared out"
    if isinstance(module, nn.Upsample):
        scales = _tuple(module.scale_factor, 3) if module.scale_factor is not None else (0.5,)
        linear = module.mode in ("bilinear", "trilinear")
        if not (linear or module.mode == "nearest") or module.align_corners or any(s != int(s) for s in scales):
            return (
                f"mode={module.mode} scale_factor={module.scale_factor} align_corners={module.align_corners} cannot be"
                " shared out; nearest and linear upsampling by whole factors can"
            )
    return ""


def _tuple(value: Any, length: int) -> tuple[Any, ...]:
    """Return a value for each axis as a tuple of this length, whether it was one value or several."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * length


def _split(self: Any) -> list[tuple[int, Any]]:
    """Return (axis, communicator) of the split axes, latitude first."""
    comms = (self.part_mesh.lat, self.part_mesh.lon)
    return [(axis, comm) for axis, comm in zip(self.part_axes, comms, strict=True) if comm.size > 1]


def _surrounded(x: Tensor, sides: Sequence[Side]) -> Tensor:
    """Pad a shard by its halo along the split axes."""
    return halo(x, sides[0], sides[1] if len(sides) > 1 else None)


def _check_part(side: Side, length: int, step: int, reach: int) -> None:
    """Raise a UserError if a shard before the last is no multiple of the stride, or one is too short for a result.

    Otherwise the next shard would not begin at a multiple.
    """
    if side.comm.rank < side.comm.size - 1 and length % step:
        raise UserError(
            f"partition: axis {side.dim} of rank {side.comm.rank} of {side.comm.size} has {length} points, not a"
            f" multiple of the stride {step}; partition in whole blocks"
        )
    # Only the last shard can be too short, because its halo is narrower.
    if length + sum(side.widths(side.comm.rank)) < reach:
        raise UserError(
            f"partition: axis {side.dim} of rank {side.comm.rank} of {side.comm.size} has {length} points, fewer than"
            f" the {reach} of a kernel; split this axis over fewer ranks (parallel.lat, parallel.lon)"
        )


class _PartConv:
    """A mixin for convolutions: a halo exchange on the split axes, then the stock convolution."""

    part_mesh: Mesh
    part_axes: tuple[int, int]
    part_overlap: Overlap

    def _conv_forward(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        norms.check_axes(self, x, len(self.kernel_size))
        sides, rest = [], [list(pair) for pair in _pads(self)]
        for axis, comm in _split(self):
            i = axis - 2
            k, s, d = self.kernel_size[i], self.stride[i], self.dilation[i]
            (left, right), rest[i] = rest[i], [0, 0]
            rule, wraps = _RULES[self.padding_mode], self.padding_mode == "circular"
            sides.append(Side(axis, left, d * (k - 1) - left - s + 1, right, wraps, rule, rule, comm))
            _check_part(sides[-1], x.shape[axis], s, d * (k - 1) + 1)
        zeros = self.padding_mode == "zeros"
        # Padding by the convolution itself needs no copy of the field.
        free = tuple(left if zeros and left == right else 0 for left, right in rest)
        rest = [[left - own, right - own] for (left, right), own in zip(rest, free, strict=True)]
        if any(map(any, rest)):
            mode = "constant" if zeros else self.padding_mode
            x = F.pad(x, [n for pair in reversed(rest) for n in pair], mode=mode)
        rows, columns = sides[0] if sides else None, sides[1] if len(sides) > 1 else None
        window = Window(self.stride, free, self.dilation, self.groups)
        return halo_conv(x, weight, bias, window, rows, columns, overlap=self.part_overlap.on)


def _pads(conv: Any) -> list[tuple[int, int]]:
    """Return the padding of a convolution on both sides of each of its axes."""
    if conv.padding == "valid":
        return [(0, 0)] * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in conv.padding]


class PartConv2d(_PartConv, nn.Conv2d):
    """A Conv2d on this rank's shard."""


class PartConv3d(_PartConv, nn.Conv3d):
    """A Conv3d on this rank's shard."""


class _PartTransposed:
    """A mixin for transposed convolutions: a halo exchange, the stock function, then a crop to the own points."""

    part_mesh: Mesh
    part_axes: tuple[int, int]

    def forward(self: Any, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        norms.check_axes(self, x, len(self.kernel_size))
        padding, extra = list(self.padding), list(self.output_padding)
        if output_size is not None:
            extra = self._extra(x, output_size)
        sides, cuts = [], []
        for axis, comm in _split(self):
            i = axis - 2
            k, s, p = self.dilation[i] * (self.kernel_size[i] - 1) + 1, self.stride[i], self.padding[i]
            left, right, n = (k - 1 - p) // s, -(-p // s), x.shape[axis]
            last = comm.rank == comm.size - 1
            sides.append(Side(axis, left, right, 0, comm=comm))
            # Every shard but the last yields n s points. The last one yields what is left of the stock layer's result.
            wanted = (n - 1) * s - 2 * p + k + extra[i] if last else n * s
            there = (n + (0 if last else right) - 1) * s + k - p
            cuts.append((axis, p + left * s, wanted))
            padding[i], extra[i] = 0, max(0, wanted - there)
        x = _surrounded(x, sides)
        function = F.conv_transpose3d if x.ndim == 5 else F.conv_transpose2d
        x = function(x, self.weight, self.bias, self.stride, padding, extra, self.groups, self.dilation)
        for axis, start, length in cuts:
            x = x.narrow(axis, start, length)
        return x

    def _extra(self: Any, x: Tensor, output_size: Sequence[int]) -> list[int]:
        """Return the output padding that gives this rank's shard the size asked for.

        `output_size` is the size of the shard, not of the whole field.
        """
        name = f"{type(self).__name__.removeprefix('Part')} output_size={tuple(output_size)}"
        if len(output_size) not in (x.ndim - 2, x.ndim):
            raise UserError(f"{name}: {x.ndim - 2} or {x.ndim} numbers are wanted")
        found, split = [], dict(_split(self))
        for axis, size in enumerate(output_size[2 - x.ndim :], 2):
            i, n, comm = axis - 2, x.shape[axis], split.get(axis)
            least = (n - 1) * self.stride[i] - 2 * self.padding[i] + self.dilation[i] * (self.kernel_size[i] - 1) + 1
            most = least + self.stride[i] - 1
            # The field continues on the next rank, so the size of this shard is fixed.
            if comm is not None and comm.rank < comm.size - 1:
                least = most = n * self.stride[i]
            if not least <= size <= most:
                raise UserError(f"{name}: this rank's shard of axis {axis} can have {least} to {most} points")
            found.append(size - least)
        return found


class PartConvTranspose2d(_PartTransposed, nn.ConvTranspose2d):  # type: ignore[misc]
    """A ConvTranspose2d on this rank's shard."""


class PartConvTranspose3d(_PartTransposed, nn.ConvTranspose3d):  # type: ignore[misc]
    """A ConvTranspose3d on this rank's shard."""


class _PartPool:
    """A mixin for pooling: a halo exchange on the right, then the stock pooling."""

    part_mesh: Mesh
    part_axes: tuple[int, int]

    def forward(self: Any, x: Tensor) -> Tensor:
        sides, axes = [], 2 if isinstance(self, nn.MaxPool2d | nn.AvgPool2d) else 3
        norms.check_axes(self, x, axes)
        kernel, dilation = _tuple(self.kernel_size, axes), _tuple(getattr(self, "dilation", 1), axes)
        stride = _tuple(self.stride, axes)
        for axis, comm in _split(self):
            i = axis - 2
            reach = dilation[i] * (kernel[i] - 1) + 1
            sides.append(Side(axis, 0, reach - stride[i], 0, comm=comm))
            _check_part(sides[-1], x.shape[axis], stride[i], 1 if self.ceil_mode else reach)
        return super().forward(_surrounded(x, sides))  # type: ignore[misc]


class PartMaxPool2d(_PartPool, nn.MaxPool2d):
    """A MaxPool2d on this rank's shard."""


class PartMaxPool3d(_PartPool, nn.MaxPool3d):
    """A MaxPool3d on this rank's shard."""


class PartAvgPool2d(_PartPool, nn.AvgPool2d):
    """An AvgPool2d on this rank's shard."""


class PartAvgPool3d(_PartPool, nn.AvgPool3d):
    """An AvgPool3d on this rank's shard."""


class PartUpsample(nn.Upsample):
    """A nearest or linear upsampling of this rank's shard."""

    part_mesh: Mesh
    part_axes: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the upsampled field. Linear modes fetch one point from each neighbour.

        Raises:
            UserError: `x` has no batch axis.
        """
        norms.check_axes(self, x)
        if self.mode == "nearest":
            return super().forward(x)
        # Linear weights reach one point beyond the shard. The upsampled neighbours are cut off again.
        scales = _tuple(self.scale_factor, x.ndim - 2)
        split, own = _split(self), x.shape
        edges = [Side(axis, 1, 1, first=_REPLICATE, last=_REPLICATE, comm=comm) for axis, comm in split]
        x = super().forward(_surrounded(x, edges))
        for axis, _ in split:
            scale = int(scales[axis - 2])
            x = x.narrow(axis, scale, own[axis] * scale)
        return x


class PartDropout(nn.Dropout):
    """A dropout whose mask depends on a seed and the place in the whole field, and so not on the partition.

    Ranks that train on other init times draw other masks. The seed comes from torch's generator, which must be in the
    same state on all ranks of a spatial group. A recomputed forward pass (activation checkpointing) therefore draws the
    same mask again.
    """

    part_mesh: Mesh
    part_axes: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Set elements to zero with probability `p` in training mode and divide the others by 1 - p.

        Every call in training mode with 0 < p < 1 takes one number from torch's generator.
        """
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0  # x / (1 - p) would divide by zero
        seed = int(torch.randint(2**62, ()))
        mesh = self.part_mesh
        index = torch.zeros([1] * x.ndim, dtype=torch.int64, device=x.device)
        for axis in range(x.ndim):
            comm = dict(_split(self)).get(axis)
            start, total = (0, x.shape[axis]) if comm is None else _extent(x.shape[axis], comm, x.device)
            places = torch.arange(start, start + x.shape[axis], device=x.device)
            index = index * total + places.view([-1 if a == axis else 1 for a in range(x.ndim)])
        # `index` numbers the elements of the whole field. A hash of seed and index gives each element a random number
        # that does not depend on the shard that it lies in.
        word = _mixed(_mixed(index ^ seed) + mesh.topology.place.data)
        uniform = (word & (2**53 - 1)).double() * 2.0**-53
        return torch.where(uniform >= self.p, x / (1 - self.p), torch.zeros_like(x))


def _extent(length: int, comm: Any, device: torch.device) -> tuple[int, int]:
    """Return where this rank's shard of an axis begins, and the length of the whole axis."""
    lengths = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(lengths, torch.tensor([length], device=device))
    return int(lengths[: comm.rank].sum()), int(lengths.sum())


def _mixed(word: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood 2014) to words of 64 bits, which wrap."""

    def shifted(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)  # the mask removes sign bits, which torch shifts in

    word = (word ^ shifted(word, 30)) * -4658895280553007687
    word = (word ^ shifted(word, 27)) * -7723592293110705685
    return word ^ shifted(word, 31)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: PartConv2d,
    nn.Conv3d: PartConv3d,
    nn.ConvTranspose2d: PartConvTranspose2d,
    nn.ConvTranspose3d: PartConvTranspose3d,
    nn.MaxPool2d: PartMaxPool2d,
    nn.MaxPool3d: PartMaxPool3d,
    nn.AvgPool2d: PartAvgPool2d,
    nn.AvgPool3d: PartAvgPool3d,
    nn.Upsample: PartUpsample,
    nn.GroupNorm: norms.PartGroupNorm,
    nn.BatchNorm2d: norms.PartBatchNorm2d,
    nn.BatchNorm3d: norms.PartBatchNorm3d,
    nn.InstanceNorm2d: norms.PartInstanceNorm2d,
    nn.InstanceNorm3d: norms.PartInstanceNorm3d,
    nn.Dropout: PartDropout,
}
