"""The project's own model over several ranks: the same modules and names, each computing its shard of the grid.

`partition_model` changes the classes of layers that look beyond a point, or that keep values for each row or grid
point. Parameters, buffers and their names stay whole on every rank, so a checkpoint does not depend on the partition.
Each rank computes exactly its shard of what one process would. Convolutions get their neighbours' rows through a halo
exchange (`halo`), pooling and upsampling never cross a border (`Shard`), and terms of single grid points are sliced. On
one rank the model is left unchanged.

The gradient of a parameter on one rank is that rank's part of a sum: the sum over the ranks of `mesh.model` is the
gradient of the whole. A term of a single grid point has a gradient only on the rank that holds the point. An exchange
may leave it there (`own_part`). Then the term itself is stale on other ranks until `State.complete` gathers it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ensemble_ml.config import Vertical
from ensemble_ml.distributed.halo import Across, Side, halo
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.overlap import Overlap, Window, halo_conv
from ensemble_ml.distributed.topology import Shard, Topology, make_shard, mark_own
from ensemble_ml.errors import UserError
from ensemble_ml.models import EnsembleModel, ModelSpec
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.linear import LinearCorrection
from ensemble_ml.models.padding import Beyond, EdgeRule, Padder, geometries
from ensemble_ml.models.points import PointNetwork
from ensemble_ml.models.unet3d import Convolution

_REPLICATE = EdgeRule(Beyond.REPLICATE)
# Layers that act on each point alone (or are containers), so that a shard of their result needs no neighbours.
_BY_POINT = (nn.Linear, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList)
# The package of the model. Its layers act on each point alone, or their classes are changed below.
_OURS = EnsembleModel.__module__.rpartition(".")[0]


def partition_model(model: EnsembleModel, mesh: Mesh, overlap: Overlap | None = None) -> Shard:
    """Make `model` compute this rank's shard of its grid, in place, and return the shard.

    `overlap` is a switch that makes convolutions compute while their halos travel; None stands for off.

    Raises:
        UserError: the shards are too thin (see `shard_of`).
        TypeError: it is unknown whether a layer of the model looks beyond a point.
    """
    depth, shard = model.spec.config.depth, shard_of(model.spec, mesh.topology)
    if mesh.topology.spatial == 1:
        return shard
    _refuse_unknown(model)
    for module in model.modules():
        if isinstance(module, Padder):
            _swap(module, PartPadder, mesh=mesh, shard=_level_of(module, shard, depth))
        elif isinstance(module, Convolution):
            _swap(module, PartConvolution, overlap=overlap or Overlap())
        elif isinstance(module, Heads):
            _swap(module, PartHeads, shard=shard)
            for name, p in module.named_parameters(recurse=False):
                if isinstance(vars(PartHeads).get(name), property):
                    mark_own(p, shard)
        elif isinstance(module, Features):
            _swap(module, PartFeatures, shard=shard)
        elif isinstance(module, LinearCorrection):
            _swap(module, PartLinear, shard=shard)
        elif isinstance(module, PointNetwork):
            _swap(module, PartPoints, shard=shard)
    _swap(model, PartModel, shard=shard)
    return shard


def _refuse_unknown(model: EnsembleModel) -> None:
    """Raise a TypeError for a layer that may look beyond a point and has no partitioned class.

    It accepts the model's own layers, layers that act on each point, and parts of a `Convolution`, which pads for them.
    """
    inner = {part for module in model.modules() if isinstance(module, Convolution) for part in module.modules()}
    for name, module in model.named_modules():
        ours = type(module).__module__.startswith(_OURS)
        if not (ours or module in inner or isinstance(module, _BY_POINT)):
            raise TypeError(
                f"layer {name} ({type(module).__name__}): what a shard computes is not known for such layers"
            )


def _swap(module: nn.Module, kind: type[nn.Module], **values: Any) -> None:
    """Change the class of a module and set the attributes `part_...` that the new class reads."""
    assert issubclass(kind, type(module)), f"{kind} is no {type(module)}"
    module.__class__ = kind
    for name, value in values.items():
        object.__setattr__(module, f"part_{name}", value)


def _level_of(pad: Padder, shard: Shard, depth: int) -> Shard:
    """Return the shard at the level of a padder. The size of the padder's grid identifies the level."""
    whole = pad.geometry.rows, pad.geometry.columns
    for level in range(depth + 1):
        there = shard.pooled(level)
        if (there.rows[-1][1], there.columns[-1][1]) == whole:
            return there
    raise AssertionError(f"no level has {whole}")


def shard_of(spec: ModelSpec, topology: Topology) -> Shard:
    """Return the shard of the grid that a rank computes of a model of `spec`.

    Raises:
        UserError: the grid has fewer blocks of 2^depth rows or columns than ranks along an axis. Or a shard is so thin
            at some level that the row beyond the pole would come from a neighbour.
    """
    shard = make_shard(topology, spec.grid.shape, spec.config.depth)
    if topology.spatial == 1:
        return shard
    for level, geometry in enumerate(geometries(spec.grid, spec.config.pole, spec.config.depth)):
        rows = shard.pooled(level).rows
        for rule, (first, last) in ((geometry.north, rows[0]), (geometry.south, rows[-1])):
            if rule.beyond is Beyond.MIRROR and len(rows) > 1 and last - first < rule.skip + 1:
                raise UserError(
                    f"parallel.lat={len(rows)}: the rank at a pole has {last - first} row after {level} poolings,"
                    f" and model.pole=cross needs {rule.skip + 1} there; use fewer ranks, or model.pole=replicate"
                )
    return shard


class PartPadder(Padder):
    """A padder that takes one row and one column on each side from the neighbours."""

    part_mesh: Mesh
    part_shard: Shard

    def sides(self, x_BCYXZ: Tensor) -> tuple[Side, Side, Across]:
        """Return (rows, columns, across) of `halo`; raise a ValueError if `x_BCYXZ` is not this rank's shard."""
        g, mesh = self.geometry, self.part_mesh
        if tuple(x_BCYXZ.shape[2:4]) != self.part_shard.shape:
            raise ValueError(f"rows and columns {tuple(x_BCYXZ.shape[2:4])}; this rank has {self.part_shard.shape}")
        rows = Side(2, 1, 1, first=g.north, last=g.south, comm=mesh.lat)
        columns = Side(3, 1, 1, periodic=g.wraps, first=_REPLICATE, last=_REPLICATE, comm=mesh.lon)
        return rows, columns, Across(self.part_shard.columns, self.sign, self.offset)

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Pad with the neighbours' points: (B, C, Y, X, Z) -> (B, C, Y + 2, X + 2, Z)."""
        return halo(x_BCYXZ, *self.sides(x_BCYXZ))


class PartConvolution(Convolution):
    """A convolution that computes while its halo travels, if `part_overlap` is on.

    With separate weights for each level (`vertical=full`) it always waits for the halo.
    """

    pad: PartPadder
    part_overlap: Overlap

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Convolve this rank's shard: (B, inputs, Y, X, Z) -> (B, outputs, Y, X, Z)."""
        if not self.part_overlap.on or self.vertical is Vertical.full:
            return super().forward(x_BCYXZ)
        conv = self.across if self.vertical is Vertical.separable else self.conv
        window = Window(conv.stride, conv.padding, conv.dilation, conv.groups)  # type: ignore[arg-type]
        found = halo_conv(x_BCYXZ, conv.weight, conv.bias, window, *self.pad.sides(x_BCYXZ), overlap=True)
        return self.along(found) if self.vertical is Vertical.separable else found


def _sliced(name: str) -> Any:
    """Return a property: this rank's shard of a buffer or parameter (..., Y, X) that is kept whole."""

    def part(self: Any) -> Tensor | None:
        whole = self._parameters[name] if name in self._parameters else self._buffers[name]
        return None if whole is None else self.part_shard.cut(whole)

    return property(part)


def _own_rows(name: str) -> Any:
    """Return a property: this rank's rows of a buffer (..., Y, 1) that is kept whole."""
    return property(lambda self: self._buffers[name][..., slice(*self.part_shard.own_rows), :])


class PartHeads(Heads):
    """The heads on this rank's grid points. The gradient of the terms of other points is zero here."""

    part_shard: Shard
    climatology = _sliced("climatology")
    anchor = _sliced("anchor")
    bias = _sliced("bias")
    inflation = _sliced("inflation")
    local_location = _sliced("local_location")
    local_scale = _sliced("local_scale")
    local_spread = _sliced("local_spread")


class PartFeatures(Features):
    """The features on this rank's grid points."""

    part_shard: Shard
    position = _sliced("position")

    def _standard(self) -> tuple[Tensor, Tensor]:
        mean, std = super()._standard()
        return (self.part_shard.cut(mean), self.part_shard.cut(std)) if self.spec.local else (mean, std)


class PartLinear(LinearCorrection):
    """The linear correction on this rank's rows: each latitude basis function is cut to these rows."""

    part_shard: Shard

    def _pieces(self) -> Any:
        start, end = self.part_shard.own_rows
        found = []
        for piece in self.__dict__["pieces"]:
            first, last = max(piece.first, start), min(piece.last, end)
            if first < last:
                found.append(piece._replace(first=first - start, last=last - start))
        return found

    bands: Any = _own_rows("bands")
    pieces: Any = property(_pieces)


class PartPoints(PointNetwork):
    """The point network at this rank's grid points."""

    part_shard: Shard

    stretch: Any = _own_rows("stretch")
    hemisphere: Any = _own_rows("hemisphere")


class PartModel(EnsembleModel):
    """A model whose inputs and predictions cover this rank's rows and columns."""

    part_shard: Shard

    @property
    def cells(self) -> tuple[int, int]:
        """Return (Y, X), the rows and columns of the shard that the model takes and gives."""
        return self.part_shard.shape
