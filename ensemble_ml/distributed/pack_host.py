"""Signs and bits packed by NumPy, for tensors in host memory: the same words as `pack` makes, three times as fast.

A block is compared with its thresholds, and the truth values are packed, while they lie in the second-level cache; so
memory is read or written once for each number. NumPy's comparisons and `packbits` use vector instructions where
torch's comparison on a CPU writes its truth values one by one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

_PART = 1 << 17  # numbers at a time: 0.5 MB, as many of thresholds (which stay in the cache), and their truth values


def usable(x: Tensor) -> bool:
    """Whether NumPy can see the memory of `x` here; a compiler traces the torch operations."""
    known = x.device.type == "cpu" and x.dtype is not torch.bfloat16 and x.is_contiguous()
    return known and not x.requires_grad and not torch.compiler.is_compiling()


def pack_above(x: Tensor, even: float, odd: float) -> Tensor:
    """Pack x (64 w,) into (w,) words: 1 above `even` (elements 0, 2, ...) or `odd` (elements 1, 3, ...)."""
    values, packed = x.numpy(), np.empty(x.numel() // 8, np.uint8)
    size = min(_PART, len(values))
    limits, found = _limits(even, odd, size, values.dtype.str), np.empty(size, bool)
    for start in range(0, len(values), size or 1):
        part = values[start : start + size]
        bits = np.greater(part, limits[: len(part)], out=found[: len(part)])
        packed[start // 8 : (start + len(part)) // 8] = np.packbits(bits, bitorder="little")
    return torch.from_numpy(packed.view(np.int64))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack (64 w,) or (P, 64 w) bool into int64 words."""
    return torch.from_numpy(np.packbits(bits.numpy(), axis=-1, bitorder="little").view(np.int64))


def unpack_signs(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (64 w,) with +1 or -1 for each bit of (w,) words, and return it."""
    held, signs = packed.contiguous().numpy().view(np.uint8), out.numpy()
    for start in range(0, len(signs), _PART):
        part = np.unpackbits(held[start // 8 : (start + _PART) // 8], bitorder="little").view(np.int8)
        np.add(part, part, out=part)
        np.subtract(part, 1, out=part)
        signs[start : start + _PART] = part
    return out


@lru_cache(maxsize=16)
def _limits(even: float, odd: float, size: int, kind: DTypeLike) -> NDArray[np.generic]:
    return np.tile(np.array([even, odd], kind), size // 2)
