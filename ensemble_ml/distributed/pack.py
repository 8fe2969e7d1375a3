"""Signs and small codes packed into words, by torch operations that run on CPU and CUDA and compile; in host memory by
NumPy (`pack_host`), and on a GPU by Triton (`triton_vote`), which give the same words faster.

A word is an int64; element e stands in word e // 64, bit e % 64 (words are little-endian). Packing multiplies eight
bytes of 0 or 1, seen as one int64, by a constant that brings their eight bits together in the highest byte; unpacking
looks each byte up in a table of eight signs. Both touch every element once, 64 bits at a time.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor

from ensemble_ml.distributed import pack_host, triton_vote

WORD = 64
_GATHER = 0x0102040810204080  # byte i of the factor's product meets bit i of the top byte; no two terms coincide
_PART = 1 << 20  # elements that are packed at a time
_WIDTH = 4096  # elements a row of a threshold that alternates: long rows keep the comparison vectorised

assert sys.byteorder == "little", "words are seen as bytes"


def words(elements: int) -> int:
    """Words that hold `elements` bits."""
    return -(-elements // WORD)


def pack_signs(u: Tensor, step: int) -> Tensor:
    """Pack the signs of (64 w,) floats into (w,) words: 1 above zero, 0 below, exact zeros as `tie_bit` says.

    Magnitudes under the smallest normal number count as zero where the tie falls to 1.
    """
    return pack_above(u, *_around_zero(u.dtype, step))


def pack_above(u: Tensor, *limits: float) -> Tensor:
    """Pack (64 w,) numbers into (w,) words: 1 above the first limit (elements 0, 2, ...) or the second."""
    # Limits reach a kernel as float32: the smallest normal number of float64 would be zero there.
    if u.is_floating_point() and u.element_size() <= 4 and triton_vote.usable(u.device):
        return triton_vote.pack(u, *limits)
    if pack_host.usable(u):
        return pack_host.pack_above(u, *limits)
    packed = torch.empty(u.numel() // WORD, dtype=torch.int64, device=u.device)
    for start in range(0, u.numel(), _PART):  # so that what lies between is small, and its memory used again
        eights = above(u[start : start + _PART], *limits).view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
        packed.view(torch.uint8)[start // 8 : (start + _PART) // 8].copy_(eights)
    return packed


def above(x: Tensor, even: float, odd: float) -> Tensor:
    """Whether x (64 w,) lies above `even` (elements 0, 2, ...) or `odd` (elements 1, 3, ...), as bool (64 w,)."""
    found = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    for rows, out in zip(_rows(x), _rows(found), strict=True):
        torch.gt(rows, _alternating(even, odd, rows), out=out)
    return found


def subtract_alternating(x: Tensor, even: float, odd: float) -> Tensor:
    """Subtract `even` and `odd` from the elements of x (64 w,) in turn, in place."""
    for rows in _rows(x):
        rows.sub_(_alternating(even, odd, rows))
    return x


def tie_bit(step: int) -> int:
    """What a tie at element 0 falls to in `step`; it alternates with element and step, the same on every rank."""
    return (step + 1) & 1


def tie_word(step: int) -> int:
    """The 64 tie bits of a word in `step`, as int64."""
    return 0x5555555555555555 if tie_bit(step) else -0x5555555555555556


def _around_zero(dtype: torch.dtype, step: int) -> tuple[float, float]:
    below = -torch.finfo(dtype).smallest_normal
    return (below, 0.0) if tie_bit(step) else (0.0, below)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (64 w,) as rows: long ones, then short ones for the rest."""
    body = x.numel() - x.numel() % _WIDTH
    return x[:body].view(-1, _WIDTH), x[body:].view(-1, WORD)


def _alternating(even: float, odd: float, like: Tensor) -> Tensor:
    return _pattern(even, odd, like.shape[1], like.dtype, like.device)


@lru_cache(maxsize=64)
def _pattern(even: float, odd: float, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([even, odd], dtype=dtype, device=device).repeat(width // 2)


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): the signs of each byte, lowest bit first."""
    byte = torch.arange(256).view(-1, 1)
    return ((byte >> torch.arange(8) & 1) * 2 - 1).to(device=device, dtype=dtype)


def unpack_signs(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (64 w,) with +1 or -1 for each bit of (w,) words, and return it."""
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
    """Pack codes (P, 64 w) uint8 below 2^bits into words (P, bits w); bits 2, 4 or 8.

    A byte holds elements that stand a part of the row apart, so that packing is a few operations on whole bytes.
    """
    parts = codes.view(len(codes), 8 // bits, -1)
    packed = parts[:, 0].clone()
    for i in range(1, 8 // bits):
        packed |= parts[:, i] << (bits * i)
    return packed.view(torch.int64)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Give back the codes (P, 64 w) uint8 of words (P, bits w)."""
    held = packed.view(torch.uint8)
    if bits == 8:
        return held
    parts = [held >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
    return torch.stack(parts, 1).view(len(held), -1)
