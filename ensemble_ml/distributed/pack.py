"""Signs and small codes packed into words, by torch operations that run on CPU and CUDA, also under `torch.compile`.

NumPy (`pack_host`, for host memory) and Triton (`triton_vote`, for GPUs) make the same words faster, and are used where
possible.

A word is an int64. Element e is bit e % 64 of word e // 64, and words are little-endian. Packing multiplies eight bytes
of 0 or 1, read as one int64, by a constant that moves their eight bits together into the highest byte. Unpacking looks
up each byte in a table of eight signs. Both touch every element once, 64 bits at a time.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor

from ensemble_ml.distributed import pack_host, triton_vote

WORD = 64
# In the product of eight 0/1 bytes with this factor, bit i of the highest byte is byte i. No two terms coincide, so
# nothing carries over.
_GATHER = 0x0102040810204080
_PART = 1 << 20  # elements that are packed at a time
_WIDTH = 4096  # elements in a row of alternating thresholds: long rows keep the comparison vectorised

assert sys.byteorder == "little", "words are seen as bytes"


def words(elements: int) -> int:
    """Return the number of words that hold `elements` bits."""
    return -(-elements // WORD)


def pack_signs(u: Tensor, step: int) -> Tensor:
    """Pack the signs of (64 w,) floats into (w,) words: 1 above zero, 0 below, exact zeros as `tie_bit` says.

    Negative numbers above minus the smallest normal number count as zero where the tie falls to 1.
    """
    return pack_above(u, *_around_zero(u.dtype, step))


def pack_above(u: Tensor, *limits: float) -> Tensor:
    """Pack (64 w,) numbers into (w,) words: 1 for numbers above a limit.

    Elements 0, 2, ... are compared with the first limit, elements 1, 3, ... with the second.
    """
    # Limits reach a Triton kernel as float32, where the smallest normal number of float64 would become zero.
    if u.is_floating_point() and u.element_size() <= 4 and triton_vote.usable(u.device):
        return triton_vote.pack(u, *limits)
    if pack_host.usable(u):
        return pack_host.pack_above(u, *limits)
    packed = torch.empty(u.numel() // WORD, dtype=torch.int64, device=u.device)
    # In parts, so that the intermediate results are small and their memory is reused.
    for start in range(0, u.numel(), _PART):
        eights = above(u[start : start + _PART], *limits).view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
        packed.view(torch.uint8)[start // 8 : (start + _PART) // 8].copy_(eights)
    return packed


def above(x: Tensor, even: float, odd: float) -> Tensor:
    """Return whether x (64 w,) is above `even` (elements 0, 2, ...) or `odd` (elements 1, 3, ...), as bool (64 w,)."""
    found = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    for rows, out in zip(_rows(x), _rows(found), strict=True):
        torch.gt(rows, _pattern(even, odd, rows.shape[1], rows.dtype, rows.device), out=out)
    return found


def subtract_alternating(x: Tensor, even: float, odd: float) -> Tensor:
    """Subtract `even` and `odd` from the elements of x (64 w,) in turn, in place, and return x."""
    for rows in _rows(x):
        rows.sub_(_pattern(even, odd, rows.shape[1], rows.dtype, rows.device))
    return x


def tie_bit(step: int) -> int:
    """Return the bit that a tie at element 0 falls to in `step`.

    Further bits alternate with the element. The rule depends on element and step only, so it is the same on every rank.
    """
    return (step + 1) & 1


def tie_word(step: int) -> int:
    """Return the 64 tie bits of a word in `step`, as int64."""
    return 0x5555555555555555 if tie_bit(step) else -0x5555555555555556


def _around_zero(dtype: torch.dtype, step: int) -> tuple[float, float]:
    """Return the limits (even, odd) by which exact zeros fall alternately to 1 and 0."""
    below = -torch.finfo(dtype).smallest_normal
    return (below, 0.0) if tie_bit(step) else (0.0, below)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """View x (64 w,) as long rows, and the remainder as short ones."""
    body = x.numel() - x.numel() % _WIDTH
    return x[:body].view(-1, _WIDTH), x[body:].view(-1, WORD)


@lru_cache(maxsize=64)
def _pattern(even: float, odd: float, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([even, odd], dtype=dtype, device=device).repeat(width // 2)


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table (256, 8) of the signs of each byte, lowest bit first."""
    byte = torch.arange(256).view(-1, 1)
    return ((byte >> torch.arange(8) & 1) * 2 - 1).to(device=device, dtype=dtype)


def unpack_signs(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (64 w,) with +1 or -1 for each bit of the words `packed` (w,), and return it."""
    if triton_vote.usable(out.device):
        return triton_vote.unpack(packed.contiguous(), out)
    if pack_host.usable(out):
        return pack_host.unpack_signs(packed, out)
    table, held, rows = _table(out.dtype, out.device), packed.view(torch.uint8), out.view(-1, 8)
    for start in range(0, len(held), _PART // 8):
        part = slice(start, start + _PART // 8)
        torch.index_select(table, 0, held[part].to(torch.int32), out=rows[part])
    return out


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (P, 64 w), uint8 below 2^bits, into words (P, bits w), for 2, 4 or 8 bits.

    A byte holds one element of each of the 8 / bits equal parts of a row, so packing takes few operations on bytes.
    """
    parts = codes.view(len(codes), 8 // bits, -1)
    packed = parts[:, 0].clone()
    for i in range(1, 8 // bits):
        packed |= parts[:, i] << (bits * i)
    return packed.view(torch.int64)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes (P, 64 w), uint8, of words (P, bits w)."""
    held = packed.view(torch.uint8)
    if bits == 8:
        return held
    parts = [held >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
    return torch.stack(parts, 1).view(len(held), -1)
