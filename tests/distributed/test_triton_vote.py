"""Triton kernels against the torch operations: on a GPU, or interpreted where TRITON_INTERPRET=1."""

import os

import numpy as np
import pytest
import torch

from ensemble_ml.distributed import pack, triton_vote
from ensemble_ml.distributed.vote import majority

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not triton_vote.AVAILABLE, reason="no Triton"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("elements", [64, 64 * 33, 4096 * 2 + 64])
def test_pack_and_unpack(elements, step):
    u = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    u[::7] = 0.0
    u[3::11] = -0.0
    above = pack.above(u, *pack._around_zero(u.dtype, step)).numpy()
    wanted = torch.from_numpy(np.packbits(above, bitorder="little").view(np.int64))
    found = triton_vote.pack(u.to(DEVICE), *pack._around_zero(u.dtype, step))
    assert torch.equal(found.cpu(), wanted)
    signs = triton_vote.unpack(found, torch.empty(elements, device=DEVICE)).cpu()
    bits = wanted[:, None] >> torch.arange(64) & 1
    assert torch.equal(signs, bits.flatten() * 2.0 - 1)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_majority(ranks, step):
    generator = torch.Generator().manual_seed(ranks)
    ballots = torch.randint(-(2**63), 2**63 - 1, (ranks, 131), generator=generator)
    found = triton_vote.majority(ballots.to(DEVICE), pack.tie_word(step))
    assert torch.equal(found.cpu(), majority(list(ballots.unbind()), step))


def test_kernels_check_themselves(monkeypatch):
    """`usable` computes the same by torch operations and compares; here on the device of the tests."""

    class Device(str):
        type = "cuda"

    assert triton_vote.usable.__wrapped__(Device(DEVICE))
    monkeypatch.setattr(triton_vote, "majority", lambda ballots, tie: ballots[0])
    assert not triton_vote.usable.__wrapped__(Device(DEVICE))
