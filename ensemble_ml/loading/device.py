"""Bring batches to the device of the model.

On a GPU this uses a CUDA stream of its own, so that copies and compute overlap.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.loading.batches import Batch


class Device:
    """A device to which batches are brought, in the type of the weights.

    A thread of the loader calls `bring` as soon as a batch is complete. The user's thread calls `take` when it needs
    the batch. Call `wait` before the memory that the batch is copied from is used again. On a CPU, `bring` does
    everything.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        self.device, self.dtype = device, dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, batch: Batch) -> tuple[Batch, Any]:
        """Start to copy a batch to the device.

        Returns:
            The batch on the device, and a CUDA event that marks the end of the copy (None on a CPU).
        """
        if self._stream is None:
            return batch.to(self.device, self.dtype), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # The memory is pinned, so the thread does not wait for the copy. The type is converted on the GPU.
            moved = batch.to(self.device, self.dtype, non_blocking=True)
            return moved, self._stream.record_event()

    def take(self, batch: Batch, ready: Any) -> Batch:
        """Return the batch for use on the current stream.

        Later kernels of that stream wait for the copy; the calling thread does not.

        Args:
            batch: The batch that `bring` returned.
            ready: The event that `bring` returned.
        """
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in (*vars(batch).values(), *vars(batch.inputs).values()):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)  # else torch could reuse its memory while the stream still needs it
        return batch

    def wait(self, ready: Any) -> None:
        """Return once the copy that ends with the event `ready` of `bring` is complete."""
        if ready is not None:
            ready.synchronize()


def wait_for_copies() -> None:
    """Return once all GPUs on which this process has memory have completed its work.

    `to("cuda", non_blocking=True)` from pinned memory returns before a byte is read, and users may copy on any stream
    and to any GPU. GPUs without memory of this process are skipped, because the call would open a CUDA context there.
    """
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)


def pages(size: int) -> np.ndarray:
    """Allocate `size` bytes (at least one) that begin at a page, as uint8.

    Where there is a GPU the memory is pinned, so that copies to the GPU are asynchronous.
    """
    if torch.cuda.is_available():
        return torch.empty(max(1, size), dtype=torch.uint8, pin_memory=True).numpy()
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)
