"""Make a dry run of the training step of one rank in any partition, with invented data and without the other ranks.

Model, partition, halo exchange, loss and backward pass are those of training. Fake communicators stand for the other
ranks (`distributed.echo`). On fake tensors, a dry run counts the messages, memory and operations of a step without
computing it. On real tensors, the step can be timed.

Axes: B initialisation time, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ensemble_ml.config import ExchangeName, LoaderName, OptimName, Precision, TrainConfig
from ensemble_ml.distributed import Mesh, Topology
from ensemble_ml.distributed.echo import EchoShards, Phase, Traffic, echo_mesh
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.distributed.topology import Shard, own_part
from ensemble_ml.loading import Batch
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, Speed
from ensemble_ml.models.ledger import Ledger
from ensemble_ml.training.losses import Loss

_MEMBERS = 5  # members of the invented ensemble


@dataclass
class Rehearsal:
    """The model, batch and loss of one rank in a dry run.

    Args:
        config: settings of the run.
        spec: the model's spec.
        mesh: the ranks of the job, fake or real.
        samples: samples of this rank in a step.
        speed: precision and order of axes.
        device: the device of the model.
        traffic: counts the messages of the fake communicators.
        gloo: sharded weights are exchanged by gloo on CPUs; False for NCCL on GPUs.
    """

    config: TrainConfig
    spec: ModelSpec
    mesh: Mesh
    samples: int
    speed: Speed
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    traffic: Traffic = field(default_factory=Traffic)
    gloo: bool = True

    def __post_init__(self) -> None:
        self.model = EnsembleModel(self.spec, Climate.default(self.spec))
        if self.device.type != "cpu":
            self.model.to(self.device)
        _hasten(self.model, self.speed)
        self.shard = partition_model(self.model, self.mesh)
        self.sharded = self._shared()
        dtype = next(self.model.parameters()).dtype
        self.batch = invented_batch(self.spec, self.shard.shape, self.samples).to(self.device, dtype)
        self.loss = self._loss()

    def step(self) -> dict[str, Tensor]:
        """Run the forward and backward pass, leave the gradients in the model, and return the loss and its parts."""
        with self.traffic.during(Phase.forward):
            losses = self.loss(self.model(self.batch.inputs), self.batch)
        with self.traffic.during(Phase.backward):
            losses["loss"].backward()
        return losses

    def _shared(self) -> EchoShards | None:
        """Make the U-Net take and free memory as if ranks shared its weights; return the hooks, None if they do not."""
        if self.config.parallel.shard == 1:
            return None
        for module in self.model.unet.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    # FSDP2 gathers in bfloat16 what autocast would cast, and needs contiguous tensors.
                    kind = torch.bfloat16 if self.speed.low else p.dtype
                    laid = p.detach().to(kind, memory_format=torch.contiguous_format)
                    module._parameters[name] = nn.Parameter(laid)
        return EchoShards(self.model.unet, self.config.parallel.shard, self.traffic, self.gloo)

    def _loss(self) -> Loss:
        """Build the loss, with scales of one for the spread."""
        error = self.model.get_buffer("error")
        # The values of the scales do not change what a step costs.
        ones = torch.ones(_MEMBERS + 1, *error.shape, device=self.device)
        area = self.shard.cut(torch.from_numpy(self.spec.grid.area_weights()).float()).to(self.device)
        return Loss(self.spec, error, ones, area, self.config.spread_weight, self.mesh.model)


@dataclass(frozen=True)
class Tracing:
    """The costs of a step of one rank.

    Attributes:
        shape: (Y, X) of its shard.
        flops: floating point operations.
        moved: bytes that are read and written by everything but convolutions and products (`models.ledger`).
        traffic: messages.
        activations: peak bytes of forward and backward pass, gradients included, without weights, buffers and batch.
        resident: bytes of this rank's weights and buffers.
        state: bytes of the optimizer, the running average and the exchange.
        loading: bytes of the loader.
        snapshot: bytes of host memory that the first rank needs for a checkpoint that is written while it trains.
        parameters: shapes of the parameters without sharded weights, in the optimizer's order.
        parts: for each of these parameters, the part that this rank keeps up to date (`own_part`); None for all.
        late: for each of these parameters, whether the backward pass reaches it last.
        whole: bytes of all weights and buffers, which every rank builds before they are sharded.
        weights: number of weights of the model.
    """

    shape: tuple[int, int]
    flops: int
    moved: int
    traffic: Traffic
    activations: int
    resident: int
    state: int
    loading: int
    snapshot: int
    parameters: tuple[torch.Size, ...]
    parts: tuple[Shard | None, ...]
    late: tuple[bool, ...]
    whole: int = 0
    weights: int = 0

    @property
    def memory(self) -> int:
        """Return the bytes of a rank at the peak of a step, or while it builds the model if that takes more."""
        return max(self.whole, self.activations + self.resident + self.state + self.loading + self.snapshot)


def trace(
    config: TrainConfig, spec: ModelSpec, topology: Topology, samples: int, speed: Speed, *, gloo: bool = True
) -> Tracing:
    """Count the costs of a step of one rank, from which `topology` is seen, on fake tensors (see `Rehearsal`).

    Raises:
        UserError: the grid cannot be partitioned in this way, or the model cannot be built.
    """
    traffic = Traffic()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rehearsal = Rehearsal(config, spec, echo_mesh(topology, traffic), samples, speed, traffic=traffic, gloo=gloo)
        with Ledger(processor=gloo) as ledger:
            rehearsal.step()
        model, batch = rehearsal.model, rehearsal.batch
        values = sum(p.element_size() * p.numel() for p in model.parameters())
        weights = sum(p.numel() for p in model.parameters())
        whole = own = 0  # bytes of sharded weights, on all ranks together and on this one
        if rehearsal.sharded is not None:
            values -= sum(p.element_size() * p.numel() for p in model.unet.parameters())
            whole, own = rehearsal.sharded.elements, rehearsal.sharded.held
            whole, own = (n * (8 if speed.precision is Precision.float64 else 4) for n in (whole, own))
        buffers = sum(b.element_size() * b.numel() for b in model.buffers())
        held = _bytes_of(batch) + _bytes_of(batch.inputs)
        groups, inner = model.param_groups(), {id(p) for p in model.unet.parameters()}
        exchanged = rehearsal.sharded is None
        named = [
            (p, bool(group.get("late")))
            for group in groups
            for p in group["params"]
            if exchanged or id(p) not in inner  # FSDP2 sums the gradients of sharded weights
        ]
        shapes = tuple(p.shape for p, _ in named)
        parts = tuple(own_part(p) for p, _ in named)
    # AdamW keeps two numbers for each weight and Lion one; a running average adds one. With several ranks the exchange
    # has a buffer of the gradients that are not sharded.
    several = topology.data * topology.spatial > 1
    kept = (2 if config.optim.name is OptimName.adamw else 1) + bool(config.average)
    # Some state differs between ranks. A checkpoint holds it beside the common state: the momenta if ranks vote, and
    # the errors of PowerSGD, which take the place of the buffer of gradients.
    apart = several and ((config.optim.votes and topology.data > 1) or config.optim.exchange is ExchangeName.powersgd)
    snapshot = values + whole + buffers + (kept + apart) * values + kept * own
    return Tracing(
        rehearsal.shard.shape, ledger.flops, ledger.total().moved - ledger.least, traffic, ledger.peak,
        values + own + buffers,
        (kept + several) * values + kept * own, _loading(config, held), snapshot,
        shapes, parts, tuple(late for _, late in named), values + whole + buffers, weights,
    )  # fmt: skip


def _loading(config: TrainConfig, batch: int) -> int:
    """Return the bytes that the loader takes, at least those of two batches of `batch` bytes."""
    if config.loading.name is not LoaderName.clairvoyant:
        return 2 * batch
    # The clairvoyant loader takes `loading.ram`, or else the current batch and the batches read ahead.
    return max(2 * batch, config.loading.ram_bytes or (1 + config.loading.ahead) * batch)


def invented_batch(spec: ModelSpec, cells: tuple[int, int], samples: int) -> Batch:
    """Make a batch of random numbers from 1 to 2 on a shard of `cells`, (Y, X)."""
    ins, outs, config = len(spec.leads_in), len(spec.leads_out), spec.config

    def values(leads: int, fields: int) -> Tensor:
        return 1 + torch.rand(samples, leads, fields, *cells)

    given: dict[str, Any] = {"mean": values(ins, spec.fields), "spread": values(ins, spec.fields)}
    if config.one_member:
        given["member"] = values(ins, spec.fields)
    if spec.masked:
        given["valid"] = values(ins, len(spec.masked_positions))
    # One member less than there are, because the spread of all members is a target.
    count = torch.full((samples,), float(_MEMBERS - 1))
    inputs = EnsembleInput(count=count, day_of_year=torch.full((samples,), 100.0), **given)
    targets: dict[str, Any] = {}
    if config.postprocess:
        targets["truth"] = values(outs, spec.fields)
    if config.spread:
        targets["target_spread"] = values(outs, spec.fields)
    return Batch(inputs, ["invented"] * samples, **targets)


def _hasten(model: EnsembleModel, speed: Speed) -> None:
    """Apply precision and order of axes, also to fake parameters, whose dtype torch cannot change in place."""
    fake = isinstance(next(model.parameters()), FakeTensor)
    if not fake or speed.precision is not Precision.float64:
        speed.apply(model)
        return
    Speed(Precision.float32, speed.channels_last).apply(model)
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = nn.Parameter(p.detach().double()) if p is not None else None
        for name, b in module._buffers.items():
            module._buffers[name] = b.double() if b is not None and b.is_floating_point() else b
    model.speed = speed


def _bytes_of(owner: object) -> int:
    """Return the bytes of all tensors that are attributes of an object."""
    return sum(v.element_size() * v.numel() for v in vars(owner).values() if isinstance(v, Tensor))
