"""Batches on their way to where the model is: on a GPU by a stream of its own, so that copies and compute overlap."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.loading.batches import Batch


class Device:
    """Brings batches to `device`, in the type of the weights.

    `bring` is called by a thread of the loader as soon as a batch is whole; `take` by the user when he wants it; `wait`
    before the memory that the batch was brought from is used again. On a CPU `bring` does it all.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        self.device, self.dtype = device, dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, batch: Batch) -> tuple[Batch, Any]:
        """Begin to copy a batch; returns it as it will be, and what tells that it is there."""
        if self._stream is None:
            return batch.to(self.device, self.dtype), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # From pinned memory, so that the thread does not wait; the type changes on the GPU.
            moved = batch.to(self.device, self.dtype, non_blocking=True)
            return moved, self._stream.record_event()

    def take(self, batch: Batch, ready: Any) -> Batch:
        """The batch, for the stream that is current: later kernels on it wait for the copy, the caller does not."""
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in (*vars(batch).values(), *vars(batch.inputs).values()):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)  # its memory is not given away before the stream is done with it
        return batch

    def wait(self, ready: Any) -> None:
        """Return once the copy is complete."""
        if ready is not None:
            ready.synchronize()


def wait_for_copies() -> None:
    """Return once the GPUs that this process has memory on have done all that it has asked them for.

    From pinned memory `to("cuda", non_blocking=True)` returns before a byte is read, and on which stream or GPU a user
    makes his copies is his affair. GPUs without memory of ours are left alone: a first call would open a context there.
    """
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)


def pages(size: int) -> np.ndarray:
    """`size` bytes, or one where it is 0, that begin at a page; locked for copies to a GPU where there is one."""
    if torch.cuda.is_available():
        return torch.empty(max(1, size), dtype=torch.uint8, pin_memory=True).numpy()
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)
