"""One bank of weights for all convolutions of a U-Net: each kernel is a combination of windows of one shared vector.

    W_i = g_i / sqrt(fan_in) sum over k of a_ik v[o_ik : o_ik + size_i]

    v       the bank; its size is a fraction `share` of the size of all kernels together
    o_ik    first number of window k of convolution i; a window that passes the end of v continues at its start
    a_ik    weight of window k in convolution i
    g_i     a gain of each output channel, zero where a branch starts at zero
    fan_in  numbers of a kernel that make one output

The network then has a fraction of the weights, so ranks exchange a fraction of the bytes. Its forward pass is not
faster, because it first computes the full kernels. For forecasts, `EnsembleModel.settle` replaces the bank by ordinary
kernels.

Sharing windows between convolutions follows Shapeshifter networks (Plummer et al. 2022, arXiv:2006.10598). The gain of
each channel lets layers of different sizes share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ensemble_ml.errors import UserError

_GOLDEN = (sqrt(5) - 1) / 2


class Bank(nn.Module):
    """The shared vector and the coefficients of all convolutions of a network.

    Args:
        network: a network that is just initialised. Its 3D convolutions lose their kernels: they have one while `laid`
            is active, and after `settle`.
        share: size of the bank as a fraction of the size of all kernels.
        templates: number of windows that each kernel combines.

    Raises:
        UserError: the bank has fewer numbers than the widest convolution has outputs.
    """

    def __init__(self, network: nn.Module, share: float, templates: int):
        super().__init__()
        # In a tuple, the convolutions do not become submodules of the bank.
        self._convs = tuple(module for module in network.modules() if isinstance(module, nn.Conv3d))
        sizes, widest = [conv.weight.numel() for conv in self._convs], max(conv.out_channels for conv in self._convs)
        count = round(share * sum(sizes))
        if count < widest:
            least = ceil(1e4 * widest / sum(sizes)) / 1e4
            few = f"{count} numbers for convolutions of up to {widest} outputs"
            raise UserError(f"model.bank={share:g}: {few}; give {least:g} or more")
        self.values = nn.Parameter(torch.randn(count))
        # The fractional parts of multiples of the golden ratio are spread evenly, however many there are. If each
        # window began where the one before it ends, kernels of equal sizes could all take the same window.
        starts = [int(n * _GOLDEN % 1 * count) for n in range(templates * len(sizes))]
        self.offsets = [starts[i : i + templates] for i in range(0, len(starts), templates)]
        mixed = torch.nn.init.orthogonal_(torch.empty(max(templates, len(sizes)), templates))
        self.mix = nn.ParameterList(row / row.norm() for row in mixed[: len(sizes)])
        # A kernel of zeros stays zero, so that its branch starts at zero. The others get the variance of torch's own
        # initialisation, 1 / (3 fan_in).
        gains = (float(bool(conv.weight.any())) / sqrt(3) for conv in self._convs)
        self.gains = nn.ParameterList(
            torch.full((conv.out_channels,), gain) for conv, gain in zip(self._convs, gains, strict=True)
        )
        for conv in self._convs:
            del conv.weight
            conv.weight = None  # type: ignore[assignment]

    def kernels(self) -> list[Tensor]:
        """Return the kernels of all convolutions, in the order of the network, (outputs, inputs, Y, X, Z).

        They lie in memory with channels last.
        """
        found = []
        for conv, offsets, mix, gain in zip(self._convs, self.offsets, self.mix, self.gains, strict=True):
            shape = conv.out_channels, *conv.kernel_size, conv.in_channels
            flat = _Windows.apply(self.values, mix, offsets, prod(shape)).view(shape)
            scale = gain / sqrt(prod(shape[1:]))
            found.append((flat * scale.view(-1, 1, 1, 1, 1)).permute(0, 4, 1, 2, 3))
        return found

    @contextmanager
    def laid(self) -> Iterator[None]:
        """Give all convolutions their kernels, within this context."""
        for conv, kernel in zip(self._convs, self.kernels(), strict=True):
            conv.weight = kernel
        try:
            yield
        finally:
            for conv in self._convs:
                conv.weight = None  # type: ignore[assignment]

    @torch.no_grad()
    def settle(self) -> None:
        """Give all convolutions kernels of their own, with the values that they have now."""
        for conv, kernel in zip(self._convs, self.kernels(), strict=True):
            del conv.weight
            conv.weight = nn.Parameter(kernel)


class _Windows(torch.autograd.Function):
    """The sum of windows of a vector, each times a number, with its backward pass.

    Autograd's own backward pass would make a gradient of the whole vector for each window.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, mix: Tensor, offsets: list[int], size: int) -> Tensor:
        """Return sum over k of mix[k] values[offsets[k] : offsets[k] + size], which wraps round the vector."""
        ctx.save_for_backward(values, mix)
        ctx.offsets = offsets
        found = values.new_zeros(size)
        for k, offset in enumerate(offsets):
            for there, here in _pieces(offset, size, len(values)):
                found[here].addcmul_(values[there], mix[k])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        values, mix = ctx.saved_tensors
        of_values, of_mix = torch.zeros_like(values), torch.zeros_like(mix)
        for k, offset in enumerate(ctx.offsets):
            for there, here in _pieces(offset, len(grad), len(values)):
                of_values[there].addcmul_(grad[here], mix[k])
                of_mix[k] += torch.dot(grad[here], values[there])
        return of_values, of_mix, None, None


def _pieces(offset: int, size: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of a window that wraps round a vector of `count` numbers, as slices of vector and window.

    Most windows have one piece.
    """
    done = 0
    while done < size:
        start = (offset + done) % count
        length = min(count - start, size - done)
        yield slice(start, start + length), slice(done, done + length)
        done += length
