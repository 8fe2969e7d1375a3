"""Triton kernels of the one-bit vote, for GPUs: pack, majority and unpack read and write each element once.

The modules `pack` and `vote` call them for CUDA tensors if Triton is installed and its results are right. This is
tested once for each device, with a few hundred numbers. If the kernels fail, or their results differ from those of the
torch operations, the torch operations are used. The kernels work on int32 words of 32 elements; two of them, in
little-endian order, are an int64 word of `pack`.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA comes without Triton
    triton = None

AVAILABLE = triton is not None
_BLOCK = 64  # int32 words that one program of a kernel works on

if triton is not None:

    @triton.jit
    def _pack(u, out, words, even, odd, BLOCK: tl.constexpr):
        word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bit = tl.arange(0, 32)
        at = word[:, None] * 32 + bit[None, :]
        values = tl.load(u + at, mask=word[:, None] < words, other=0.0)
        limit = tl.where((bit & 1) == 0, even, odd)
        bits = (values > limit[None, :]).to(tl.int32) << bit[None, :]
        tl.store(out + word, tl.sum(bits, 1), mask=word < words)

    @triton.jit
    def _unpack(packed, out, words, BLOCK: tl.constexpr):
        word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bit = tl.arange(0, 32)
        held = tl.load(packed + word, mask=word < words, other=0)
        signs = (((held[:, None] >> bit[None, :]) & 1) * 2 - 1).to(out.dtype.element_ty)
        tl.store(out + word[:, None] * 32 + bit[None, :], signs, mask=word[:, None] < words)

    @triton.jit
    def _majority(planes, out, words, ranks, tie, BLOCK: tl.constexpr):
        word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bit = tl.arange(0, 32)
        votes = tl.zeros((BLOCK, 32), tl.int32)
        for rank in range(ranks):
            held = tl.load(planes + rank * words + word, mask=word < words, other=0)
            votes += (held[:, None] >> bit[None, :]) & 1
        half = 2 * votes - ranks
        falls = ((tie >> bit[None, :]) & 1) != 0
        won = (half > 0) | ((half == 0) & falls)
        tl.store(out + word, tl.sum(won.to(tl.int32) << bit[None, :], 1), mask=word < words)


@lru_cache(maxsize=16)
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on `device` and give the right results there."""
    if device.type != "cuda" or not AVAILABLE:
        return False
    u = torch.linspace(-1, 1, 64 * 9).sin().roll(17)
    u[::5] = 0.0
    bits = (u > torch.tensor([-1e-30, 0.0]).repeat(len(u) // 2)).view(3, -1)
    place = 2 ** torch.arange(32)
    words = (bits.view(-1, 32) * place).sum(1).to(torch.int32).view(torch.int64)
    won = (bits.sum(0) > 1).view(-1, 32)
    try:
        packed = pack(u.to(device), -1e-30, 0.0)
        good = torch.equal(packed.cpu(), words)
        good &= torch.equal(unpack(packed, torch.empty(len(u), device=device)).cpu(), bits.flatten() * 2.0 - 1)
        counted = majority(packed.view(3, -1), 0).cpu()
        good &= torch.equal(counted, (won * place).sum(1).to(torch.int32).view(torch.int64))
    except Exception as error:  # many things may keep Triton's compiler from working; the torch operations always work
        log.warning("Triton kernels of the vote: %s; torch operations are used instead", error)
        return False
    if not good:
        log.warning("Triton kernels of the vote differ from the torch operations on %s, which are used instead", device)
    return good


def pack(u: Tensor, even: float, odd: float) -> Tensor:
    """Pack (64 w,) floats into (w,) int64 words: 1 above `even` (elements 0, 2, ...) or `odd` (elements 1, 3, ...)."""
    out = torch.empty(u.numel() // 32, dtype=torch.int32, device=u.device)
    _pack[_grid(out)](u, out, out.numel(), even, odd, BLOCK=_BLOCK)
    return out.view(torch.int64)


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (64 w,) with +1 or -1 for each bit of the int64 words `packed` (w,), and return it."""
    words = packed.view(torch.int32)
    _unpack[_grid(words)](words, out, words.numel(), BLOCK=_BLOCK)
    return out


def majority(ballots: Tensor, tie: int) -> Tensor:
    """Return (w,) int64 words of the bits that more than half of the rows of `ballots` (ranks, w) hold.

    Elements with a tied vote get the bits of `tie`, of which only the low 32 are used.
    """
    words = ballots.contiguous().view(torch.int32)
    out = torch.empty(words.shape[1], dtype=torch.int32, device=ballots.device)
    # A kernel takes a signed int32. Tie bits alternate, so bit 31, which becomes the sign, equals bit 1.
    low = tie & 0x7FFFFFFF
    low = low if not tie & 2 else low - 2**31
    _majority[_grid(out)](words, out, out.numel(), len(words), low, BLOCK=_BLOCK)
    return out.view(torch.int64)


def _grid(words: Tensor) -> tuple[int]:
    """Return the number of programs for `words` (w,), as a grid of one axis."""
    return (-(-words.shape[-1] // _BLOCK),)
