"""A model over several ranks: the same modules under the same names, each computing its part of the grid.

`partition_model` changes the classes of those layers that look beyond a point, and of those that keep one number a
cell; parameters, buffers and their names stay whole on every rank, so a checkpoint knows nothing of the partition.
What a rank computes is exactly its part of what one process would: convolutions see their neighbours' rows through a
halo exchange (`halo`), pooling and upsampling never cross a border (`shard`), terms of one cell each are sliced. On one
rank the model stays as it is.

Gradients of parameters are this rank's share: their sum over the ranks of `mesh.model` is the gradient of the whole.
Terms of one cell each have a gradient on the rank of that cell alone; an exchange may leave them there
(`shard.own_part`), and then other ranks' values of them are stale until they are brought together (`State.complete`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ensemble_ml.config import Vertical
from ensemble_ml.distributed.halo import Across, Side, halo
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.overlap import Overlap, Window, halo_conv
from ensemble_ml.distributed.shard import Shard, make_shard, mark_own
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from ensemble_ml.models import EnsembleModel, ModelSpec
from ensemble_ml.models.blocks.unet3d import Convolution
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.linear import LinearCorrection
from ensemble_ml.models.padding import Beyond, EdgeRule, Padder, geometries
from ensemble_ml.models.surroundings import Surroundings

_REPLICATE = EdgeRule(Beyond.REPLICATE)
_BY_POINT = (nn.Linear, nn.ModuleList, nn.ModuleDict, nn.Sequential)  # a part of these is what the whole has there
_OURS = EnsembleModel.__module__.rpartition(".")[0]  # layers of this package: by point, or changed below


def partition_model(model: EnsembleModel, mesh: Mesh, overlap: Overlap | None = None) -> Shard:
    """Let `model` compute this rank's part of its grid, in place; return which part that is.

    Args:
        mesh: of the job.
        overlap: switch by which convolutions compute while their halos travel; off where it is None.

    Raises:
        UserError: the parts are too thin (see `shard_of`).
        TypeError: the model has a layer of which nobody knows whether it looks beyond a point.
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
        elif isinstance(module, Surroundings):
            _swap(module, PartSurroundings, shard=shard)
    _swap(model, PartModel, shard=shard)
    return shard


def _refuse_unknown(model: EnsembleModel) -> None:
    """Raise a TypeError where a layer is neither ours, nor by point, nor part of a `Convolution`, which pads for it."""
    inner = {part for module in model.modules() if isinstance(module, Convolution) for part in module.modules()}
    for name, module in model.named_modules():
        ours = type(module).__module__.startswith(_OURS)
        if not (ours or module in inner or isinstance(module, _BY_POINT)):
            raise TypeError(f"layer {name} ({type(module).__name__}): of such layers nobody knows what a part computes")


def _swap(module: nn.Module, kind: type[nn.Module], **values: Any) -> None:
    assert issubclass(kind, type(module)), f"{kind} is no {type(module)}"
    module.__class__ = kind
    for name, value in values.items():
        object.__setattr__(module, f"part_{name}", value)


def _level_of(pad: Padder, shard: Shard, depth: int) -> Shard:
    """The shard at the level of a padder, found by the size of its grid."""
    whole = pad.geometry.rows, pad.geometry.columns
    for level in range(depth + 1):
        there = shard.pooled(level)
        if (there.rows[-1][1], there.columns[-1][1]) == whole:
            return there
    raise AssertionError(f"no level has {whole}")


def shard_of(spec: ModelSpec, topology: Topology) -> Shard:
    """The part of the grid that a rank has of a model of `spec`.

    Raises:
        UserError: the grid does not have a block of 2^depth rows or columns for every rank, or a rank's part is so thin
            at some level that the row beyond the pole would come from its neighbour.
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
    """One row and column on each side, from the neighbours."""

    part_mesh: Mesh
    part_shard: Shard

    def sides(self, x_BCYXZ: Tensor) -> tuple[Side, Side, Across]:
        """What `halo` wants to know."""
        g, mesh = self.geometry, self.part_mesh
        if tuple(x_BCYXZ.shape[2:4]) != self.part_shard.shape:
            raise ValueError(f"rows and columns {tuple(x_BCYXZ.shape[2:4])}; this rank has {self.part_shard.shape}")
        rows = Side(2, 1, 1, first=g.north, last=g.south, comm=mesh.lat)
        columns = Side(3, 1, 1, periodic=g.wraps, first=_REPLICATE, last=_REPLICATE, comm=mesh.lon)
        return rows, columns, Across(self.part_shard.columns, self.sign, self.offset)

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        return halo(x_BCYXZ, *self.sides(x_BCYXZ))


class PartConvolution(Convolution):
    """The same, computed while its halo travels where `part_overlap` says so; weights of each plane's own wait."""

    pad: PartPadder
    part_overlap: Overlap

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        if not self.part_overlap.on or self.vertical is Vertical.full:
            return super().forward(x_BCYXZ)
        conv = self.across if self.vertical is Vertical.separable else self.conv
        window = Window(conv.stride, conv.padding, conv.dilation, conv.groups)  # type: ignore[arg-type]
        found = halo_conv(x_BCYXZ, conv.weight, conv.bias, window, *self.pad.sides(x_BCYXZ), overlap=True)
        return self.along(found) if self.vertical is Vertical.separable else found


def _sliced(name: str) -> Any:
    """A property: this rank's part of a buffer or parameter (..., Y, X) that is kept whole."""

    def part(self: Any) -> Tensor | None:
        whole = self._parameters[name] if name in self._parameters else self._buffers[name]
        return None if whole is None else self.part_shard.cut(whole)

    return property(part)


def _own_rows(name: str) -> Any:
    """A property: this rank's rows of a buffer (..., Y, 1) that is kept whole."""
    return property(lambda self: self._buffers[name][..., slice(*self.part_shard.own_rows), :])


class PartHeads(Heads):
    """Heads on this rank's cells; the gradient of the terms of other cells is zero here."""

    part_shard: Shard
    climatology = _sliced("climatology")
    anchor = _sliced("anchor")
    bias = _sliced("bias")
    inflation = _sliced("inflation")
    local_location = _sliced("local_location")
    local_scale = _sliced("local_scale")
    local_spread = _sliced("local_spread")


class PartFeatures(Features):
    """Features on this rank's cells."""

    part_shard: Shard
    position = _sliced("position")

    def _standard(self, suffix: str) -> tuple[Tensor, Tensor]:
        mean, std = super()._standard(suffix)
        return (self.part_shard.cut(mean), self.part_shard.cut(std)) if self.spec.local else (mean, std)


class PartLinear(LinearCorrection):
    """The parts of bands of latitude that lie in this rank's rows."""

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


class PartSurroundings(Surroundings):
    """The network at this rank's cells."""

    part_shard: Shard

    stretch: Any = _own_rows("stretch")
    hemisphere: Any = _own_rows("hemisphere")


class PartModel(EnsembleModel):
    """A model whose inputs and predictions are this rank's rows and columns."""

    part_shard: Shard

    @property
    def cells(self) -> tuple[int, int]:
        """(Y, X) that this rank takes and gives."""
        return self.part_shard.shape
