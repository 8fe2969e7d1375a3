"""Choose the precision and the order of axes in memory by timing what the hardware offers.

With channels first in memory, torch's float32 conv3d does not use oneDNN for some shapes and is then about ten times
slower. This did not happen with channels last on the machines that were measured. bfloat16 is up to twice as fast as
float32 where the CPU has it. A 2D convolution with the levels as samples or channels was not faster.

The fastest choice depends on machine and shape. So each is timed on the real shapes, and a checkpoint records the
choice. A resumed run uses it again, so its results are equal bit for bit.

A forward pass in training mode changes the running statistics of batch norms, so timing restores them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ensemble_ml.config import Precision
from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes
_SECONDS = 3.0  # for all trials together

Record = Callable[[Callable[[], Any]], tuple[Callable[[], Any], Any]]  # call -> (call that does the same, its result)


@dataclass(frozen=True)
class Speed:
    """The precision of the convolutions, and the order of axes in memory.

    Heads and losses keep the dtype of the weights.
    """

    precision: Precision = Precision.float32
    channels_last: bool = True

    @property
    def low(self) -> bool:
        """Return True if convolutions run in bfloat16."""
        return self.precision is Precision.bfloat16

    def arrange(self, x: Tensor) -> Tensor:
        """Return a tensor (B, C, Y, X[, Z]) in the chosen order of axes."""
        return x.contiguous(memory_format=_LAST[x.ndim] if self.channels_last else torch.contiguous_format)

    def apply(self, model: nn.Module) -> None:
        """Set a model to this speed: the memory order of its kernels, its dtype for float64, and `model.speed`.

        For the whole process, TF32 is turned off and cuDNN takes deterministic kernels.
        """
        for module in model.modules():
            # A kernel made from a bank (`models.bank`) is no parameter, and has channels last anyway.
            if isinstance(module, nn.Conv3d | nn.Conv2d) and isinstance(module.weight, nn.Parameter):
                order = torch.contiguous_format if not self.channels_last else _LAST[module.weight.ndim]
                module.weight.data = module.weight.data.contiguous(memory_format=order)
        # Only float64 changes the dtype of the weights. With bfloat16 they stay float32, and autocast casts them in
        # each pass.
        if self.precision is Precision.float64:
            model.double()
        # With TF32, a GPU would round the mantissas of float32 to ten bits. For speed there is bfloat16.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # also for the timing, which is then that of the training
        model.speed = self  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"precision": self.precision.value, "channels_last": self.channels_last}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Speed:
        """Build the speed that `to_json` wrote."""
        return cls(Precision(plain["precision"]), bool(plain["channels_last"]))


def choose(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    wanted: Precision = Precision.auto,
    seconds: float = _SECONDS,
    record: Record | None = None,
) -> Speed:
    """Time `step` at each speed, set the model to the fastest, and return it.

    Weights and running statistics keep their values; only their order in memory may change. One line of the log names
    the speeds tried, their milliseconds and the choice.

    Args:
        model: the model.
        step: a forward and backward pass of `model` on a real batch.
        wanted: `auto` tries all that the hardware has; another precision is fixed, and only the order of axes is
            chosen.
        seconds: limit for all trials together. A speed that takes four times as long as the best is not repeated. On a
            GPU, the first run of each speed, which loads and compiles kernels, does not count.
        record: on a GPU, turns `step` into a CUDA graph that does the same, as training does where possible
            (`training.recorded`).

    Raises:
        UserError: `wanted` is bfloat16, and `has_bfloat16` is False.
        torch.OutOfMemoryError: the step does not fit into the GPU at any speed.
    """
    device = next(model.parameters()).device
    tried: dict[Speed, float] = {}
    running = Running(model)
    deadline = time.perf_counter() + seconds
    for speed in candidates(device, wanted):
        # Channels-last speeds come first. So each precision is timed at least once, however slow the machine is.
        if time.perf_counter() > deadline and not speed.channels_last:
            continue
        speed.apply(model)
        try:
            play, spent = _prepared(model, step, record) if device.type == "cuda" else (step, 0.0)
            deadline += spent
            tried[speed] = _milliseconds(play, device, deadline, min(tried.values(), default=float("inf")))
        except torch.OutOfMemoryError as error:  # bfloat16 may fit where float32 does not
            log.info("speed: %s: %s", _name(speed), str(error).split(". ")[0])
            lacking = error.with_traceback(None)  # the frames of a traceback would keep the tensors of the pass alive
        play = step  # a recording is dropped, which frees its memory
        model.zero_grad(set_to_none=True)
    if not tried:
        raise lacking
    best = min(tried, key=lambda speed: tried[speed])
    best.apply(model)
    running.put_back()
    log.info("speed: %s; taken: %s", ", ".join(f"{_name(s)} {ms:.0f} ms" for s, ms in tried.items()), _name(best))
    return best


def candidates(device: torch.device, wanted: Precision) -> list[Speed]:
    """Return the speeds that the device offers for the setting `model.precision`, probably fast ones first.

    Channels last come before channels first, and bfloat16 before float32.

    Raises:
        UserError: bfloat16 is wanted, and `has_bfloat16` is False.
    """
    low = has_bfloat16(device)
    if wanted is Precision.bfloat16 and not low:
        lacks = "has no bfloat16 arithmetic"
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            version = torch.backends.cudnn.version()
            lacks = f"has cuDNN {version}, and before 91500 (9.15) bfloat16 gives wrong results or is slow"
        raise UserError(f"model.precision=bfloat16: {device_name(device)} {lacks}; use auto or float32")
    kinds = [Precision.float32] + [Precision.bfloat16] * low if wanted is Precision.auto else [wanted]
    return [Speed(kind, last) for last in (True, False) for kind in reversed(kinds)]


def has_bfloat16(device: torch.device) -> bool:
    """Return True if bfloat16 gives right results on `device`, and may be faster than float32."""
    if device.type == "cuda":
        # Before cuDNN 9.15, some bfloat16 conv3d kernels gave wrong results (9.10.2) or were slow.
        known = torch.cuda.is_bf16_supported(including_emulation=False)
        return known and (torch.backends.cudnn.version() or 0) >= 91500
    capability = torch.backends.cpu.get_cpu_capability()
    return device.type == "cpu" and capability.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the instruction set that torch uses on a CPU.

    Between devices of different names, the last bits of results may differ.
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def settle(device: torch.device) -> None:
    """Wait until a GPU has finished all work it was given, so that the host's clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prepared(model: nn.Module, step: Callable[[], Any], record: Record | None) -> tuple[Callable[[], Any], float]:
    """Let a GPU load and compile its kernels, and record the step. Return the call to time, and the seconds spent."""
    began, play = time.perf_counter(), step
    step()
    settle(next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    if record is not None:
        try:
            play, _ = record(step)
        # There is too little memory, or something cannot be recorded. Training will fail here as well, and log why.
        except RuntimeError:
            model.zero_grad(set_to_none=True)
    return play, time.perf_counter() - began


def _milliseconds(step: Callable[[], Any], device: torch.device, deadline: float, fastest: float) -> float:
    """Return the time of the fastest of up to three runs after a warm-up, or of the warm-up if no run followed."""
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
    """Return a name of a speed for the log."""
    return f"{speed.precision.value} {'channels last' if speed.channels_last else 'channels first'}"


class Running:
    """A copy of a model's running statistics, used to restore them after passes that must not change the model."""

    def __init__(self, model: nn.Module):
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._kept = [(norm, {name: values.clone() for name, values in norm.named_buffers()}) for norm in norms]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the statistics to the values they had when this object was made."""
        for norm, values in self._kept:
            for name, before in values.items():
                getattr(norm, name).copy_(before)
