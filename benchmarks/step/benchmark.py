"""Time a training step of our network against the naive form of the same network, and count the bytes that both move.

    ensemble-ml benchmark benchmark=step [only=[bytes,prediction,time]]

The naive form is what one writes first: tensors (B, C, Z, Y, X) in float32, padding by `torch.cat` and `F.pad`, conv3d,
and pooling and upsampling in 3D. It has the same parameters and gives the same numbers, which a test checks. Features,
base, heads, loss and optimizer are the same code in both forms.

A step is forward, closed-form CRPS and spread loss, backward, and Lion. On a GPU the naive form is also timed in
bfloat16, and our form is timed both with and without a CUDA graph (`training.recorded`).

On a CPU, four fifths of a step are arithmetic of convolutions, which both forms have in common. So no claim of speed is
made there. Bytes are counted on tensors without memory (`models.ledger`), and are the same on any machine.

Axes: B date, C channel, Z plane, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.common.turns import take_turns
from ensemble_ml.config import BenchmarkConfig, ModelConfig, Precision, Vertical
from ensemble_ml.distributions import crps
from ensemble_ml.fields import Family
from ensemble_ml.loading.batches import Batch
from ensemble_ml.machine import keep_freed_memory
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, Speed, choose, ensemble_input
from ensemble_ml.models.ledger import Kind, Ledger, saved_bytes
from ensemble_ml.models.linear import LinearCorrection
from ensemble_ml.models.padding import Beyond, EdgeRule, Geometry, Padder
from ensemble_ml.models.speed import has_bfloat16, settle
from ensemble_ml.models.unet3d import Activation, Convolution, PointLinear, UNet3d
from ensemble_ml.optim.lion import Lion
from ensemble_ml.training.recorded import Recorded, cuda_graph

_FEWER, _LESS_KEPT, _WITHIN = 40.0, 30.0, 25.0  # per cent: bytes moved; kept for the backward pass; error of the time
_FASTER = 5.0  # times as fast as the naive form, on a GPU
_NAIVE, _NAIVE_LOW = "naive", "naive in bfloat16"


@dataclass(frozen=True)
class Case:
    """A shape that is raced.

    Attributes:
        name: the shape in words.
        shape: levels, rows and columns.
        batch: init times a step.
        config: settings that differ from the default model.
    """

    name: str
    shape: tuple[int, int, int]
    batch: int
    config: dict[str, int] = field(default_factory=dict)


CASES = (
    Case("8 x 128 x 256, hidden 32, batch 1", (8, 128, 256), 1),
    Case("the quickstart's 4 x 33 x 64, hidden 16, batch 4", (4, 33, 64), 4, {"hidden": 16, "max_hidden": 64}),
)
GPU_CASES = (*CASES, Case("8 x 361 x 720, hidden 32, batch 1", (8, 361, 720), 1))


def _device() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _bytes(bench: Bench) -> None:
    """Count what both forms move, and what a pass keeps for the backward pass with our activation and with autograd's.

    Nothing is computed, so the largest case costs no more than the others.
    """
    rows = []
    for case in GPU_CASES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            # Without the fitted corrections, which both forms have in common and which train nothing.
            spec = benchmark_spec(*case.shape, **case.config, linear=False)
            batch = random_batch(spec, case.batch)
            ours = EnsembleModel(spec, Climate.default(spec))
            naive = naive_form(ours)
            for kind in (Precision.float32, Precision.bfloat16):
                found = {}
                for name, model, last in (("naive", naive, False), ("ours", ours, True)):
                    Speed(kind, last).apply(model)
                    with Ledger() as ledger:
                        _pass(model, batch)()
                    found[name] = ledger.total().moved
                    by_kind = {f"GB, {k.value}": ledger.total([k]).moved / 1e9 for k in Kind}
                    rows.append(
                        {"step": case.name, "form": f"{name}, {kind.value}", "GB": found[name] / 1e9,
                         "least GB": ledger.least / 1e9, "GFLOP": ledger.flops / 1e9, **by_kind}
                    )  # fmt: skip
                fewer = 100 * (1 - found["ours"] / found["naive"])
                bench.claim(f"{case.name}, {kind.value}: bytes of a step below naive", fewer, "%", _FEWER)
                before = _kept(_with_plain_activations(ours), batch)
                for where, kept in _kept(ours, batch).items():
                    words = f"{case.name}, {kind.value}: kept by {where} for the backward pass"
                    bench.figures[words] = Figure.of([kept / 1e6], "MB")
                    bench.claim(
                        f"{words}, below autograd's activation", 100 * (1 - kept / before[where]), "%", _LESS_KEPT
                    )
    bench.tables["Bytes of a training step"] = rows
    bench.notes.append("The paper on data movement (arXiv:2007.00072) moves 22.91 % fewer bytes than its naive form.")


def _kept(model: EnsembleModel, batch: EnsembleInput) -> dict[str, int]:
    """Return the bytes that the U-Net and a whole forward pass keep beyond weights, buffers and the input."""
    given = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    dtype = torch.bfloat16 if model.speed.low else torch.float32
    hidden = torch.zeros(len(batch), model.spec.config.hidden, *model.cells, len(model.spec.levels), dtype=dtype)
    hidden = model.speed.arrange(hidden).requires_grad_()

    def unet() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=model.speed.low):
            return model.unet(hidden)

    weights = [*model.parameters(), *model.buffers()]
    return {
        "the U-Net": saved_bytes(unet, [*weights, hidden]),
        "a pass": saved_bytes(lambda: model(batch), [*weights, *given]),
    }


def _with_plain_activations(model: EnsembleModel) -> EnsembleModel:
    """Return a network of the same shape and speed whose activations are left to autograd."""
    plain = EnsembleModel(model.spec, Climate.default(model.spec))
    model.speed.apply(plain)
    for part in list(plain.modules()):
        for name, child in part.named_children():
            if isinstance(child, Activation):
                setattr(part, name, _PlainActivation(child))
    return plain


class _PlainActivation(nn.Module):
    """The activation as autograd differentiates it."""

    def __init__(self, ours: Activation):
        super().__init__()
        self.weight, self.bias = ours.weight, ours.bias

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        x_BYXZC, dtype = x_BCYXZ.permute(0, 2, 3, 4, 1), x_BCYXZ.dtype
        inner = torch.addcmul(self.bias.to(dtype), x_BYXZC, self.weight.to(dtype))
        return F.silu(inner).permute(0, 4, 1, 2, 3)


def _prediction(bench: Bench) -> None:
    """Predict the time of a pass from the ledger and two speeds of this machine, and measure it."""
    device = _device()
    for case in CASES:
        spec = benchmark_spec(*case.shape, **case.config, linear=False)
        batch = random_batch(spec, case.batch).to(device)
        model = EnsembleModel(spec, Climate.default(spec)).to(device)
        for kind in [Precision.float32] + [Precision.bfloat16] * has_bfloat16(device):
            Speed(kind, True).apply(model)
            run = _pass(model, batch)
            with Ledger(by_module=True) as ledger:
                run()
            # Both speeds and the pass are measured in turns, because the speed of a shared machine changes.
            entrants: dict[str, Callable[[], object]] = {"pass": run, "copy": _sum_of_large(device, model.speed)}
            widths = sorted({len(p) for p in model.unet.parameters() if p.ndim == 5})
            flops = {width: 0 for width in widths}
            for width in widths:
                entrants[f"conv {width}"], flops[width] = _one_convolution(width, case.shape, model.speed, device)
            times = take_turns(entrants, bench.config.repeats, around=partial(settle, device))
            off = []
            for turn, measured in enumerate(times["pass"]):
                predicted = (ledger.total().moved - ledger.least) / (_LARGE / times["copy"][turn])
                for (module, what), entry in ledger.entries.items():
                    if what.computes:
                        width = _width_of(model, module, widths)
                        predicted += entry.flops * times[f"conv {width}"][turn] / flops[width]
                off.append(100 * (predicted / measured - 1))
            name = f"{case.name}, {kind.value}: predicted time of a pass above the measured"
            bench.figures[name] = Figure.of(off, "%")
            bench.claim(f"{name}: size of the median", abs(bench.figures[name].median), "%", _WITHIN, at_most=True)


_LARGE = 3 * (1 << 28)  # bytes that a sum of two large tensors reads and writes


def _sum_of_large(device: torch.device, speed: Speed) -> Callable[[], object]:
    """Return a function that adds two tensors too large for any cache."""
    dtype = torch.bfloat16 if speed.low else torch.float32
    a, b, c = (torch.ones(_LARGE // 3 // dtype.itemsize, dtype=dtype, device=device) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def _one_convolution(
    width: int, shape: tuple[int, int, int], speed: Speed, device: torch.device
) -> tuple[Callable[[], object], int]:
    """Return a function that runs a convolution forward and backward, and its floating point operations."""
    dtype = torch.bfloat16 if speed.low else torch.float32
    planes, rows, columns = shape
    conv = nn.Conv3d(width, width, 3, padding=(0, 0, 1), device=device, dtype=dtype)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last_3d)
    x = torch.randn(1, width, rows, columns, planes, device=device, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d).requires_grad_()

    def run() -> None:
        conv(x).sum().backward()

    with Ledger() as ledger:
        run()
    return run, ledger.flops


def _width_of(model: EnsembleModel, module: str, widths: list[int]) -> int:
    """Return the width of the convolutions in a module, or that of the finest level."""
    found = [len(p) for p in model.get_submodule(module).parameters() if p.ndim == 5] if module else []
    return min(widths, key=lambda width: abs(width - found[0])) if found else widths[0]


def _time(bench: Bench) -> None:
    """Time both forms in turn, at every shape."""
    device = _device()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    for case in CASES if device.type == "cpu" else GPU_CASES:
        found, note = _race_case(case, bench.config.repeats, device)
        bench.figures |= {f"{case.name}: {name}": figure for name, figure in found.items()}
        bench.notes.append(f"{case.name} on {where}: {note}")
        if device.type == "cuda":
            words = f"a step at least 5 times faster than naive fp32 (Z, Y, X) on {where}: {case.name}"
            bench.claim(words, found["naive over ours"].median, "times", _FASTER)


def _bench(config: BenchmarkConfig, folder: Path) -> Bench:
    """Let freed memory stay with the process, as in training; both forms gain from it."""
    keep_freed_memory()
    return Bench(config, folder)


run = benchmark("A training step, ours and naive", {"bytes": _bytes, "prediction": _prediction, "time": _time}, _bench)


def _race_case(case: Case, repeats: int, device: torch.device) -> tuple[dict[str, Figure], str]:
    """Return the figures of one shape, and a sentence on how they were measured."""
    spec = benchmark_spec(*case.shape, **case.config)
    batch = random_batch(spec, case.batch).to(device)
    torch.manual_seed(0)
    ours = EnsembleModel(spec, Climate.default(spec)).to(device)
    gpu = device.type == "cuda"
    naive = [_NAIVE, _NAIVE_LOW] if gpu else [_NAIVE]
    entrants: dict[str, Callable[[], object]] = {}
    for name in naive:
        model = naive_form(ours).to(device)
        Speed(Precision.bfloat16 if name == _NAIVE_LOW else Precision.float32, False).apply(model)
        entrants[name] = training_step(model, batch)
    speed = choose(ours, _pass(ours, batch), wanted=Precision.auto, record=cuda_graph if gpu else None)
    entrants["ours"] = training_step(ours, batch, recorded=gpu)
    if gpu:
        entrants["ours, not recorded"] = training_step(ours, batch)
    plain = EnsembleModel(spec, Climate.default(spec)).to(device)
    Speed(Precision.float32, True).apply(plain)
    entrants["ours in float32"] = training_step(plain, batch)
    times = take_turns(entrants, repeats, around=partial(settle, device))
    shown = {f"step, {name}": Figure.of([1e3 * s for s in seconds], "ms") for name, seconds in times.items()}
    for name in naive:
        ratios = [n / o for n, o in zip(times[name], times["ours"], strict=True)]
        shown[f"{name} over ours"] = Figure.of(ratios, "times")
    note = (
        f"{len(spec.variables)} variables on levels, none at the surface, one lead, {torch.get_num_threads()} threads;"
        f" ours runs in {speed.precision.value}, channels last: {speed.channels_last}."
    )
    return shown, note


def benchmark_spec(levels: int, rows: int, columns: int, **config: object) -> ModelSpec:
    """Return a spec of five variables on levels of a global grid, without surface variables, at lead 48 h.

    The grid has no rows on the poles.

    Args:
        levels: number of levels.
        rows: latitudes.
        columns: longitudes.
        **config: settings of the model.
    """
    latitude = 90 - (np.arange(rows) + 0.5) * 180 / rows
    names, hours = ("t", "z", "u", "v", "q"), (48,)
    pressures = tuple(int(p) for p in np.linspace(1000, 50, levels)[::-1])
    longitude = np.arange(columns) * 360 / columns
    return ModelSpec(ModelConfig(**config), names, pressures, (), hours, hours, tuple(latitude), tuple(longitude))  # type: ignore[arg-type]


def random_batch(spec: ModelSpec, batch: int) -> EnsembleInput:
    """Return a batch of five members of random noise.

    Args:
        spec: the inputs of the model.
        batch: number of init times.
    """
    generator = torch.Generator().manual_seed(0)
    members = torch.randn(batch, 5, len(spec.leads_in), *spec.shape[1:], generator=generator)
    return ensemble_input(members, torch.full((batch,), 100.0))


def _pass(model: EnsembleModel, batch: EnsembleInput) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward on a truth of zero."""

    def run_once() -> Tensor:
        found = model(batch)
        zero = torch.zeros_like(found.location)
        loss = crps(Family.NORMAL, found.location, found.scale, zero).mean()
        loss = loss + (found.spread - 1).square().mean()
        loss.backward()
        return loss

    return run_once


def training_step(model: EnsembleModel, batch: EnsembleInput, *, recorded: bool = False) -> Callable[[], object]:
    """Return a function that runs one training step.

    If `recorded` is on, the step runs as a CUDA graph, as in training on a GPU.
    """
    optimizer, known = Lion(model.param_groups(), lr=1e-5), Batch(batch, [""] * len(batch))

    def run(given: Batch) -> dict[str, Tensor]:
        return {"loss": _pass(model, given.inputs)().detach()}

    forward_backward = Recorded(model, run, cuda_graph) if recorded else run

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward_backward(known)
        optimizer.step()

    # The graph is recorded in the first steps, which do not count.
    for _ in range(4 * recorded):
        step()
    return step


def naive_form(model: EnsembleModel) -> EnsembleModel:
    """Return the same network with the same weights in naive form.

    Args:
        model: our network.

    Raises:
        ValueError: `vertical` is separable or full, for which there is no naive form.
    """
    if model.spec.config.vertical not in (Vertical.shared, Vertical.affine):
        raise ValueError(
            f"vertical={model.spec.config.vertical.value}: the naive form is written for shared and affine"
        )
    naive = _NaiveModel(model.spec, Climate.default(model.spec))
    naive.load_state_dict(model.state_dict())
    with torch.no_grad():
        for part in list(naive.modules()):
            for name, child in part.named_children():
                if name != "out" and not isinstance(part, LinearCorrection):  # heads and base are shared code
                    _replace(part, name, child)
    return naive


def _replace(part: nn.Module, name: str, child: nn.Module) -> None:
    """Replace a layer of our network by its naive form."""
    if isinstance(child, Padder):
        setattr(part, name, _NaivePadder(child.geometry, child.sign, child.offset))
    elif isinstance(child, Activation):
        setattr(part, name, _NaiveActivation(child))
    elif isinstance(child, PointLinear):
        conv = nn.Conv3d(child.in_features, child.out_features, 1)
        conv.weight.copy_(child.weight[:, :, None, None, None])
        conv.bias = child.bias
        setattr(part, name, conv)
    elif isinstance(child, Convolution):
        child.conv.weight = nn.Parameter(child.conv.weight.permute(0, 1, 4, 2, 3).contiguous())
        child.conv.padding = (child.deep // 2, 0, 0)


class _NaiveModel(EnsembleModel):
    """Our network with the axes Z, Y, X in their natural order."""

    def _trunk(self, channels_p: Tensor, channels_s: Tensor, common: Tensor) -> Tensor:
        with torch.autocast(common.device.type, torch.bfloat16, enabled=self.speed.low):
            shared = self.common_stem(common[:, :, None])
            planes = []
            for part in self._parts():
                x_BCYXZ = channels_s[..., None] if part.surface else channels_p
                planes.append(part.stem(x_BCYXZ.permute(0, 1, 4, 2, 3).contiguous()) + shared)
            hidden = torch.cat(planes, 2) + self.plane_bias[:, :, None, None]
            found = self.scale(_naive_unet(self.unet, hidden)).permute(0, 1, 3, 4, 2)
            return found.to(self.plane_bias.dtype)


def _naive_unet(net: UNet3d, x_BCZYX: Tensor) -> Tensor:
    """Run the U-Net with pooling and upsampling in 3D."""
    skips = []
    for stage, down in zip(net.encoder, net.down, strict=False):
        x_BCZYX = stage(x_BCZYX)
        skips.append(x_BCZYX)
        x_BCZYX = down(F.avg_pool3d(x_BCZYX, (1, 2, 2), ceil_mode=True, count_include_pad=False))
    x_BCZYX = net.encoder[-1](x_BCZYX)
    for level in reversed(range(len(net.decoder))):
        up = F.interpolate(net.up[level](x_BCZYX), scale_factor=(1, 2, 2), mode="nearest")
        x_BCZYX = net.decoder[level](skips[level] + up[..., : skips[level].shape[3], : skips[level].shape[4]])
    return x_BCZYX


class _NaiveActivation(nn.Module):
    def __init__(self, ours: Activation):
        super().__init__()
        self.weight, self.bias = nn.Parameter(_wide(ours.weight)), nn.Parameter(_wide(ours.bias))

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        return F.silu(x_BCZYX * self.weight + self.bias)


def _wide(values: Tensor) -> Tensor:
    """Return values (C,) or (Z, C) in the shape (C, Z or 1, 1, 1)."""
    return (values.T if values.ndim == 2 else values[:, None])[..., None, None].contiguous()


class _NaivePadder(nn.Module):
    sign: Tensor | None
    offset: Tensor | None

    def __init__(self, geometry: Geometry, sign: Tensor | None, offset: Tensor | None):
        super().__init__()
        self.geometry = geometry
        self.register_buffer("sign", sign)
        self.register_buffer("offset", offset)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        north = self._beyond(x_BCZYX, self.geometry.north)
        south = self._beyond(x_BCZYX.flip(3), self.geometry.south)
        mode = "circular" if self.geometry.wraps else "replicate"
        return F.pad(torch.cat([north, x_BCZYX, south], 3), (1, 1, 0, 0, 0, 0), mode=mode)

    def _beyond(self, x_BCZYX: Tensor, rule: EdgeRule) -> Tensor:
        row = min(rule.source(1), x_BCZYX.shape[3] - 1)
        values = x_BCZYX[:, :, :, row : row + 1]
        if rule.beyond is Beyond.ZERO:
            return torch.zeros_like(values)
        if rule.beyond is Beyond.REPLICATE:
            return values
        values = values.roll(values.shape[4] // 2, 4)
        if self.sign is not None and self.offset is not None:
            values = values * self.sign[:, :, None, None] + self.offset[:, :, None, None]
        return values
