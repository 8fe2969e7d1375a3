"""Pack signs with NumPy, for tensors in host memory: the same words as in `pack`, several times as fast.

A block is compared with its thresholds and packed while it lies in the second-level cache, so each number is read from
memory only once. NumPy's comparisons and `packbits` use vector instructions, while torch's comparison on a CPU writes
its booleans one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

# Numbers packed at a time. As float32 they take 0.5 MB, and their thresholds as much; the booleans take 0.13 MB.
_PART = 1 << 17


def usable(x: Tensor) -> bool:
    """Return whether NumPy can use the memory of `x`. A compiler traces torch operations, not NumPy's."""
    known = x.device.type == "cpu" and x.dtype is not torch.bfloat16 and x.is_contiguous()
    return known and not x.requires_grad and not torch.compiler.is_compiling()


def pack_above(x: Tensor, even: float, odd: float) -> Tensor:
    """Pack x (64 w,) into (w,) words: a bit is 1 above `even` (elements 0, 2, ...) or `odd` (elements 1, 3, ...)."""
    values, packed = x.numpy(), np.empty(x.numel() // 8, np.uint8)
    size = min(_PART, len(values))
    limits = _limits(even, odd, size, values.dtype.str)

    def pack(first: int, last: int) -> None:
        found = np.empty(size, bool)
        for start in range(first, last, _PART):
            part = values[start : min(start + _PART, last)]
            bits = np.greater(part, limits[: len(part)], out=found[: len(part)])
            packed[start // 8 : (start + len(part)) // 8] = np.packbits(bits, bitorder="little")

    _in_threads(pack, len(values))
    return torch.from_numpy(packed.view(np.int64))


def unpack_signs(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (64 w,) with +1 for each bit 1 and -1 for each bit 0 of the words `packed` (w,). Return `out`."""
    held, rows = packed.contiguous().numpy().view(np.uint8), out.numpy().reshape(-1, 8)
    table = _table(rows.dtype.str)

    def unpack(first: int, last: int) -> None:
        for start in range(first // 8, last // 8, _PART // 8):
            part = slice(start, min(start + _PART // 8, last // 8))
            # mode="raise" would fill a buffer first, and no index is out of range anyway.
            np.take(table, held[part].astype(np.intp), axis=0, out=rows[part], mode="clip")

    _in_threads(unpack, out.numel())
    return out


def _in_threads(work: Callable[[int, int], None], elements: int) -> None:
    """Run `work(first, last)` on ranges of whole parts, in at most as many threads as torch uses.

    Threads help because NumPy releases the interpreter lock in these functions.
    """
    parts = -(-elements // _PART)
    # A part takes 30 us, and handing work to a thread 20 us, so each thread gets four parts at least.
    threads = max(1, min(torch.get_num_threads(), parts // 4))
    ends = [min(elements, _PART * (parts * i // threads)) for i in range(threads + 1)]
    others = [_helpers().submit(work, *ends[i : i + 2]) for i in range(1, threads)]
    work(ends[0], ends[1])
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _helpers() -> ThreadPoolExecutor:
    """Return the pool of threads, which is made at the first use."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), "pack")


# A forked child does not have the parent's threads, so it makes its own pool.
os.register_at_fork(after_in_child=_helpers.cache_clear)


@lru_cache(maxsize=16)
def _limits(even: float, odd: float, size: int, kind: DTypeLike) -> NDArray[np.generic]:
    return np.tile(np.array([even, odd], kind), size // 2)


@lru_cache(maxsize=4)
def _table(kind: DTypeLike) -> NDArray[np.generic]:
    """Return the table (256, 8) of the signs of each byte, lowest bit first."""
    return ((np.arange(256)[:, None] >> np.arange(8) & 1) * 2 - 1).astype(kind)
