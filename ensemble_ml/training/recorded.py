"""Records the forward and backward pass of a step on a GPU as a CUDA graph, and replays it.

A pass is about 1300 kernels. On grids up to about 128 x 256 points, a GPU finishes each kernel before the host has
started the next. In a graph they follow each other without the host. The result is equal bit for bit, because the same
kernels run on the same numbers. On large grids nothing is gained, and a recording takes the memory of a second pass. So
it is kept only if it is faster.

The first shape of batches that comes several times in a row is recorded. Batches of other shapes, such as the last one
of an epoch, are computed by ordinary calls. Over several ranks nothing is recorded, because the pass itself sends
gradients and halos.
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

Pass = Callable[[Batch], dict[str, Tensor]]  # returns losses, and leaves gradients in a model that had none
_FIRST = 2  # ordinary calls before a recording: one prepares kernels, the next is timed
_GAIN = 0.9  # a recording that takes more than this fraction of the time of an ordinary call is dropped


@dataclass(eq=False)
class _Recording:
    """The memory that a recorded pass reads and writes, and the function that replays it."""

    batch: Batch
    losses: dict[str, Tensor]
    gradients: list[Tensor | None]
    play: Callable[[], object]


@dataclass(eq=False)
class Recorded:
    """A pass that is called for the first batches, then recorded and replayed.

    If memory runs out in an ordinary call beside a recording, the recording is dropped, and the call is made once more.

    Args:
        model: the model that gets the gradients. Its parameters and buffers must stay where they are in memory.
        run: the pass. It may change only gradients, and nothing in it may wait for the GPU.
        record: records a function without arguments, as `cuda_graph` does.
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
        """Compute a pass on a batch, by an ordinary call or by the recording, and return the loss and its parts."""
        shapes = _shapes(batch)
        # Until there is a recording, another shape starts the count again.
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
        """Call the pass; if memory runs out, drop the recording and call the pass once more."""
        try:
            return self.run(batch)
        except torch.OutOfMemoryError:
            if self._recording is None:
                raise
        self._drop("an ordinary pass needs their memory")
        return self.run(batch)

    def _begin(self, batch: Batch) -> None:
        """Record a pass, and keep the recording if it is faster. The model has no gradients afterwards."""
        try:
            # A graph reads fixed addresses, so later batches are copied into a batch of the recording's own.
            own = _cloned(batch)
            play, losses = self.record(lambda: self.run(own))
            recording = _Recording(own, losses, [p.grad for p in self.model.parameters()], play)
            play()  # the first replay is slower, so it is not timed
            _, seconds = _timed(play, self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            broke = error.__context__ or error  # if the pass fails, the end of the recording raises a second error
            why = (str(broke) or type(broke).__name__).splitlines()[0][:120]
            # The traceback would keep the tensors of the failed pass alive.
            del error, broke
            self._drop(why)
            return
        self.model.zero_grad(set_to_none=True)
        if seconds > _GAIN * self._seconds:
            del recording, play, losses
            self._drop(f"{1e3 * seconds:.1f} ms, and {1e3 * self._seconds:.1f} ms without")
            return
        self._recording = recording
        text = "captured a pass on a batch of %d as a CUDA graph: %.1f ms, in place of %.1f ms"
        log.info(text, len(batch), 1e3 * seconds, 1e3 * self._seconds)

    def _drop(self, why: str) -> None:
        """Give up recording, free its memory, and log why."""
        self._dropped, self._recording = True, None
        self.model.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("passes are not captured as CUDA graphs: %s", why)

    def _played(self, recording: _Recording, batch: Batch) -> dict[str, Tensor]:
        """Copy a batch into the recording's memory, replay it, and hand out its gradients and losses."""
        for own, given in zip(_tensors(recording.batch), _tensors(batch), strict=True):
            own.copy_(given)
        recording.play()
        # The graph writes gradients into its own memory, from which the optimizer then reads them.
        for p, gradient in zip(self.model.parameters(), recording.gradients, strict=True):
            p.grad = gradient
        return {name: value.clone() for name, value in recording.losses.items()}  # the next replay overwrites them


def may_record(model: nn.Module, session: Session) -> bool:
    """Return True if it is worth trying to record passes of a model.

    A recording is tried for an `EnsembleModel` on one rank with a GPU. A pass of another model may change more than
    gradients, such as the running statistics of batch norms.
    """
    return session.device.type == "cuda" and session.topology.size == 1 and isinstance(model, EnsembleModel)


def cuda_graph(call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Record a call as a CUDA graph.

    Returns:
        A function that replays it, and its result, whose tensors have values only after the first replay.

    Raises:
        RuntimeError: something in the call cannot be recorded, or memory runs out.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # The loader's threads keep working on streams of their own, which the default capture mode would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = call()
    finally:
        torch.cuda.set_stream(stream)  # torch does not restore the stream if a recording fails
    return graph.replay, found


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of a call, and the seconds until the GPU had done all its work."""
    # Without waiting for the GPU before and after, only the launch of its work would be measured.
    settle(device)
    began = time.perf_counter()
    found = call()
    settle(device)
    return found, time.perf_counter() - began


def _tensors(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch and its inputs."""
    return [value for owner in (batch, batch.inputs) for value in vars(owner).values() if isinstance(value, Tensor)]


def _cloned(batch: Batch) -> Batch:
    """Return a batch with copies of all of its tensors."""

    def of(owner: object) -> dict[str, Any]:
        return {name: value.clone() for name, value in vars(owner).items() if isinstance(value, Tensor)}

    return replace(batch, inputs=replace(batch.inputs, **of(batch.inputs)), **of(batch))


def _shapes(batch: Batch) -> tuple[Any, ...]:
    """Return which tensors a batch has, with their shapes and dtypes."""
    parts = ((name, value) for owner in (batch, batch.inputs) for name, value in vars(owner).items())
    return tuple((name, tuple(value.shape), value.dtype) for name, value in parts if isinstance(value, Tensor))
