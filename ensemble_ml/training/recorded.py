"""The forward and backward pass of a step on a GPU, recorded once and played again.

A pass is some 1300 kernels. On grids up to some 128 x 256 points a GPU is done with each before the host has called the
next; played again as a CUDA graph they follow each other without the host. What is computed is the same, bit for bit:
the same kernels on the same numbers. On large grids nothing is gained, and the memory of a second pass would be lost:
so a recording is kept where it is faster.

Recorded are batches of the first shape that comes several times in a row; others, such as the last of an epoch, with
which a run may go on, are called. Over several ranks nothing is recorded: gradients and halos travel within the pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ensemble_ml.distributed import Session
from ensemble_ml.loading.batches import Batch
from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.speed import Record, settle

log = logging.getLogger(__name__)

Pass = Callable[[Batch], dict[str, Tensor]]  # leaves gradients where there were none, returns losses
_FIRST = 2  # passes that are called before: one prepares kernels, the next is timed
_GAIN = 0.9  # of the time of a called pass: a recording that takes more is dropped


@dataclass(eq=False)
class _Recording:
    """Memory that a recorded pass reads and writes, and what plays it."""

    batch: Batch
    losses: dict[str, Tensor]
    gradients: list[Tensor | None]
    play: Callable[[], object]


@dataclass(eq=False)
class Recorded:
    """Calls `run` on the first batches, then plays its recording on those that follow.

    Where memory runs out in a pass that is called, the recording is given up, and the pass called once more.

    Args:
        model: whose gradients `run` leaves, and nothing else; its parameters and buffers stay where they are in memory.
        run: the pass; nothing in it may wait for the GPU.
        record: of a call without arguments, which it may make: what plays it, and its result.
    """

    model: nn.Module
    run: Pass
    record: Record

    def __post_init__(self) -> None:
        self._shapes: tuple[Any, ...] | None = None
        self._called, self._seconds = 0, float("inf")
        self._recording: _Recording | None = None
        self._dropped = False

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        shapes = _shapes(batch)
        if self._recording is None and shapes != self._shapes:
            self._shapes, self._called = shapes, 0
        if self._dropped or shapes != self._shapes:
            return self._called_without(batch)
        if self._recording is None and self._called >= _FIRST:
            self._begin(batch)
        if self._recording is not None:
            return self._played(self._recording, batch)
        self._called += 1
        losses, self._seconds = _timed(lambda: self.run(batch), self._device)
        return losses

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _called_without(self, batch: Batch) -> dict[str, Tensor]:
        try:
            return self.run(batch)
        except torch.OutOfMemoryError:
            if self._recording is None:
                raise
        self._drop("a pass that is called needs its memory")
        return self.run(batch)

    def _begin(self, batch: Batch) -> None:
        """Record, and keep the recording if it is faster; the model has no gradients afterwards."""
        try:
            own = _mapped(batch, Tensor.clone)
            play, losses = self.record(lambda: self.run(own))
            recording = _Recording(own, losses, [p.grad for p in self.model.parameters()], play)
            play()  # the first is slower
            _, seconds = _timed(play, self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            broke = error.__context__ or error  # the end of a recording fails of what broke it
            why = (str(broke) or type(broke).__name__).splitlines()[0][:120]
            del error, broke
            self._drop(why)
            return
        self.model.zero_grad(set_to_none=True)
        if seconds > _GAIN * self._seconds:
            del recording, play, losses
            self._drop(f"{1e3 * seconds:.1f} ms, and {1e3 * self._seconds:.1f} ms as it is called")
            return
        self._recording = recording
        text = "recorded a pass on a batch of %d: %.1f ms, in place of %.1f ms"
        log.info(text, len(batch), 1e3 * seconds, 1e3 * self._seconds)

    def _drop(self, why: str) -> None:
        self._dropped, self._recording = True, None
        self.model.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("passes are not recorded: %s", why)

    def _played(self, recording: _Recording, batch: Batch) -> dict[str, Tensor]:
        for own, given in zip(_tensors(recording.batch), _tensors(batch), strict=True):
            own.copy_(given)
        recording.play()
        for p, gradient in zip(self.model.parameters(), recording.gradients, strict=True):
            p.grad = gradient
        return {name: value.clone() for name, value in recording.losses.items()}  # the next play writes over them


def may_record(model: nn.Module, session: Session) -> bool:
    """Whether passes of `model` are worth a try: one rank on a GPU, and nothing that a pass changes but gradients, as
    batch norms' running statistics are."""
    return session.device.type == "cuda" and session.topology.size == 1 and isinstance(model, EnsembleModel)


def cuda_graph(call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """`call` as a CUDA graph: what plays it, and its result, which is there once it was played.

    Raises:
        RuntimeError: something in it cannot be recorded, or memory is short.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # The loader's threads go on meanwhile, on streams of their own.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = call()
    finally:
        torch.cuda.set_stream(stream)  # which torch does not, where a recording fails
    return graph.replay, found


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    settle(device)
    began = time.perf_counter()
    found = call()
    settle(device)
    return found, time.perf_counter() - began


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for owner in (batch, batch.inputs) for value in vars(owner).values() if isinstance(value, Tensor)]


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    def of(owner: Any) -> dict[str, Tensor]:
        return {name: change(value) for name, value in vars(owner).items() if isinstance(value, Tensor)}

    targets: dict[str, Any] = dict(of(batch))
    return replace(batch, inputs=replace(batch.inputs, **of(batch.inputs)), **targets)


def _shapes(batch: Batch) -> tuple[Any, ...]:
    """Which tensors there are, and their shapes and types."""
    parts = ((name, value) for owner in (batch, batch.inputs) for name, value in vars(owner).items())
    return tuple((name, tuple(value.shape), value.dtype) for name, value in parts if isinstance(value, Tensor))
