"""Which arithmetic and which order of axes in memory are fastest here: ask the hardware, then time it.

torch's float32 conv3d leaves oneDNN for a path about ten times slower on some shapes when channels come first in
memory; with channels last it did not on the machines measured, and bfloat16 gains up to two more where the CPU has it.
Forms that fold the levels into the batch or the channels of a 2D convolution were measured too: as fast at best. What
wins depends on machine and shape, so it is measured on the real shapes and the choice is kept as a value that a
checkpoint records: a resumed run takes the same, and is bit for bit the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ensemble_ml.config import Precision
from ensemble_ml.errors import UserError
from ensemble_ml.models.running import Running

log = logging.getLogger(__name__)

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SECONDS = 3.0  # for all trials together

Record = Callable[[Callable[[], Any]], tuple[Callable[[], Any], Any]]  # of a call: one that does the same, its result


@dataclass(frozen=True)
class Speed:
    """Precision of the convolutions and order of axes in memory; heads and losses keep the parameters' own."""

    precision: Precision = Precision.float32
    channels_last: bool = True

    @property
    def low(self) -> bool:
        """Whether convolutions run in bfloat16."""
        return self.precision is Precision.bfloat16

    def arrange(self, x: Tensor) -> Tensor:
        """A tensor (B, C, Y, X[, Z]) in the chosen order of axes."""
        return x.contiguous(memory_format=_LAST[x.ndim] if self.channels_last else torch.contiguous_format)

    def apply(self, model: nn.Module) -> None:
        """Set `model` to this speed: memory order of its kernels, dtype for float64, `model.speed`."""
        for module in model.modules():
            if isinstance(module, nn.Conv3d | nn.Conv2d):
                order = torch.contiguous_format if not self.channels_last else _LAST[module.weight.ndim]
                module.weight.data = module.weight.data.contiguous(memory_format=order)
        if self.precision is Precision.float64:
            model.double()
        # float32 says what it is: bfloat16 is there for speed.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # in all that is timed, too: what is planned is what trains
        model.speed = self  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"precision": self.precision.value, "channels_last": self.channels_last}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Speed:
        """Inverse of `to_json`."""
        return cls(Precision(plain["precision"]), bool(plain["channels_last"]))


def candidates(device: torch.device, wanted: Precision) -> list[Speed]:
    """What the device can do of what is wanted, the likeliest to be fast first.

    Raises:
        UserError: bfloat16 is asked for on a device without it.
    """
    low = has_bfloat16(device)
    if wanted is Precision.bfloat16 and not low:
        lacks = "has no bfloat16 arithmetic"
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            lacks = f"needs cuDNN 9.15, whose bfloat16 is right, and has {torch.backends.cudnn.version()}"
        raise UserError(f"model.precision=bfloat16: {device_name(device)} {lacks}; use auto or float32")
    kinds = [Precision.float32] + [Precision.bfloat16] * low if wanted is Precision.auto else [wanted]
    return [Speed(kind, last) for last in (True, False) for kind in reversed(kinds)]


def device_name(device: torch.device) -> str:
    """A GPU's name, or the instructions that torch uses of the processor: where these differ, so do last bits."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def settle(device: torch.device) -> None:
    """Wait until a GPU has done what it was given: its clock is not the host's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is right, and faster than float32, on `device`."""
    if device.type == "cuda":
        # Before cuDNN 9.15 some bfloat16 conv3d kernels gave wrong results (9.10.2) or were slow.
        known = torch.cuda.is_bf16_supported(including_emulation=False)
        return known and (torch.backends.cudnn.version() or 0) >= 91500
    capability = torch.backends.cpu.get_cpu_capability()
    return device.type == "cpu" and capability.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def choose(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    wanted: Precision = Precision.auto,
    seconds: float = _SECONDS,
    record: Record | None = None,
) -> Speed:
    """Time `step` (a forward and backward pass of `model` on a real batch) at each speed; set and return the fastest.

    Weights and running statistics are untouched but for their order in memory. One line of the log says what was
    tried, the milliseconds and what was taken.

    Args:
        wanted: `auto` tries all that the hardware has; another precision fixes it and chooses the order of axes only.
        seconds: all trials together; one that is far behind is not repeated. The first run of each on a GPU, which
            loads and compiles kernels for as long, is beside them.
        record: what gives a call that does the same as `step`, as training will where it can (`training.recorded`).

    Raises:
        torch.OutOfMemoryError: a GPU holds the step at no speed.
    """
    device = next(model.parameters()).device
    tried: dict[Speed, float] = {}
    running = Running(model)
    deadline = time.perf_counter() + seconds
    for speed in candidates(device, wanted):
        # Each precision gets its turn in channels-last memory, which is listed first, however slow the machine.
        if time.perf_counter() > deadline and not speed.channels_last:
            continue
        speed.apply(model)
        try:
            play, spent = _prepared(model, step, record) if device.type == "cuda" else (step, 0.0)
            deadline += spent
            tried[speed] = _milliseconds(play, device, deadline, min(tried.values(), default=float("inf")))
        except torch.OutOfMemoryError as error:  # float32 may not fit where bfloat16 does
            log.info("speed: %s: %s", _name(speed), str(error).split(". ")[0])
            lacking = error.with_traceback(None)  # whose frames hold what the pass had come to
        play = step  # and the memory of a recording is free
        model.zero_grad(set_to_none=True)
    if not tried:
        raise lacking
    best = min(tried, key=lambda speed: tried[speed])
    best.apply(model)
    running.put_back()
    log.info("speed: %s; taken: %s", ", ".join(f"{_name(s)} {ms:.0f} ms" for s, ms in tried.items()), _name(best))
    return best


def _prepared(model: nn.Module, step: Callable[[], Any], record: Record | None) -> tuple[Callable[[], Any], float]:
    """Let a GPU load and compile kernels, and record: what is to be timed, and the seconds that this took."""
    began, play = time.perf_counter(), step
    step()
    settle(next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    if record is not None:
        try:
            play, _ = record(step)
        except RuntimeError:  # memory is short, or something cannot be: training will come to the same, and say why
            model.zero_grad(set_to_none=True)
    return play, time.perf_counter() - began


def _milliseconds(step: Callable[[], Any], device: torch.device, deadline: float, fastest: float) -> float:
    """The fastest of up to three runs after a first one that prepares kernels; one run where time is out."""
    found: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        settle(device)
        found.append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() > deadline or found[-1] > 4 * fastest:
            break
    return min(found[1:] or found)


def _name(speed: Speed) -> str:
    return f"{speed.precision.value} {'channels last' if speed.channels_last else 'channels first'}"
