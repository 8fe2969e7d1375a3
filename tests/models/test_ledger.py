"""The ledger: bytes, calls, arithmetic and memory of a pass, each against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks.common.memory import peak_bytes
from ensemble_ml.models.ledger import Kind, Ledger, saved_bytes


def test_bytes_by_hand():
    x, narrow = torch.ones(100, 10), torch.ones(100, 1)
    with Ledger() as ledger:
        y = x * 2  # reads 4,000 bytes and writes 4,000
        y.view(10, 100).t()  # views are free
        torch.empty(10_000)  # so is room that nothing is written to
        y += narrow.expand(100, 10)  # reads 4,000 and the 400 of the column, writes 4,000
        y.copy_(x)  # reads one and writes the other
        y.sum(1)  # reads 4,000, writes 400
    assert ledger.total([Kind.POINTWISE]).moved == 8_000 + 8_400
    assert ledger.total([Kind.COPY]).moved == 8_000 and ledger.total([Kind.COPY]).calls == 1
    assert ledger.total([Kind.SUM]).moved == 4_400
    assert ledger.least == 0 and ledger.flops == 0 and ledger.total().moved == 28_800


def test_products_and_convolutions_are_what_no_fusion_saves():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    x, w = torch.ones(1, 3, 6, 6), torch.ones(5, 3, 3, 3)
    with Ledger() as ledger:
        (a @ b).relu()
        F.conv2d(x, w)
    product, convolution = ledger.total([Kind.PRODUCT]), ledger.total([Kind.CONVOLUTION])
    assert product.flops == 2 * 4 * 8 * 2 and product.moved == 4 * (32 + 16 + 8)
    assert convolution.flops == 2 * 5 * 16 * 27 and convolution.moved == 4 * (108 + 135 + 80)
    assert ledger.least == product.moved + convolution.moved < ledger.total().moved


def test_modules_have_their_own_entries_in_both_passes():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with Ledger(by_module=True) as ledger:
        net(torch.ones(5, 8)).sum().backward()
    first, last = (ledger.entries[name, Kind.PRODUCT].flops for name in ("0", "2"))
    # Forward, and the product for the gradient of the weights; that of the input is needed in the last layer alone.
    assert first == 2 * (2 * 5 * 8 * 16) and last == 3 * (2 * 5 * 16 * 4)
    assert ledger.entries["1", Kind.POINTWISE].calls == 2
    assert ledger.total().flops == first + last


def test_tensors_without_memory_give_the_same_counts():
    def count():
        net, x = nn.Conv2d(3, 4, 3), torch.ones(2, 3, 9, 9)
        with Ledger() as ledger:
            F.silu(net(x)).square().mean().backward()
        return {key: (entry.calls, entry.moved, entry.flops) for key, entry in ledger.entries.items()}, ledger.peak

    with FakeTensorMode():
        fake = count()
    real = count()
    assert fake[0] == real[0] and fake[1] == pytest.approx(real[1], rel=0.2)  # torch makes a few scalars more


def test_what_a_pass_keeps():
    weight, x = torch.ones(10, requires_grad=True), torch.ones(7, 10, requires_grad=True)
    # A product keeps both of its factors: the weight is alive anyway, the input counts once.
    assert saved_bytes(lambda: (x * weight) * x, [weight]) == 2 * x.nbytes
    assert saved_bytes(lambda: x + weight) == 0


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize(
    ("channels", "cells", "dtype"),
    [(16, (33, 64, 5), torch.float32), (64, (9, 16, 5), torch.float32), (8, (9, 16, 5), torch.float64)],
    ids=["oneDNN", "unfolded", "float64"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_inside_a_convolution(channels, cells, dtype, last, backward):
    """Against torch's allocator; a kernel that is not in the order of the fields is copied, too."""
    order = torch.channels_last_3d if last else torch.contiguous_format
    work = [(0, 0, 1), (1, 1, 1), False, (0, 0, 0), 1]

    def call():
        x = torch.ones(1, channels, *cells, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)
        kernel = torch.ones(channels, channels, 3, 3, 3, dtype=dtype).contiguous(memory_format=order)
        y = torch.ops.aten.convolution(x, kernel, None, (1, 1, 1), *work)
        if backward:
            torch.ops.aten.convolution_backward(y, x, kernel, None, (1, 1, 1), *work, (True, True, False))

    call()  # what torch makes once
    with FakeTensorMode(), Ledger() as ledger:
        call()
    # oneDNN takes a few kB of room of its own.
    assert ledger.peak == pytest.approx(peak_bytes(call), rel=0.01, abs=10_000)
