"""The vote against its definition, counted element by element in float64 and integers."""

import math
import os
import signal

import numpy as np
import pytest
import torch
from parallel.simulated import on_ranks

from ensemble_ml.config import VoteScale
from ensemble_ml.distributed import NullCommunicator, pack, pack_host, vote
from ensemble_ml.distributed.vote import count, majority, sign_allreduce, unit
from ensemble_ml.distributed.voting import Vote

LENGTHS = [1, 63, 64, 65, 1000, 4096 + 64 + 3]


def updates(ranks, n, seed=0, zeros=0.2):
    generator = np.random.default_rng(seed)
    u = generator.standard_normal((ranks, n)) * generator.uniform(0.1, 10, (ranks, 1))
    u[generator.random((ranks, n)) < zeros] = 0.0
    u[generator.random((ranks, n)) < zeros / 2] = -0.0
    return u.astype(np.float32)


def by_definition(u, bits, step, scale=VoteScale.l1):
    """Signs of each element, in plain Python."""
    ranks, n = u.shape
    signs = np.empty(n)
    for e in range(n):
        tie = 1 if (e + step) % 2 == 0 else 0
        votes = 0
        for r in range(ranks):
            if bits == 1 or scale is VoteScale.sign:
                code = 0 if u[r, e] > 0 else -1 if u[r, e] < 0 else tie - 1
            else:
                size = np.abs(u[r]).mean(dtype=np.float64) if scale is VoteScale.l1 else np.abs(u[r]).max()
                delta = unit(bits, scale) * float(size)
                if u[r, e] == 0 or delta == 0:
                    code = tie - 1
                else:
                    code = min(max(math.floor(float(u[r, e]) / delta), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
            votes += 2 * code + 1
        signs[e] = np.sign(votes) if votes else 2 * tie - 1
    return signs


def test_packing_is_little_endian_in_words():
    bits = np.random.default_rng(1).random(64 * 70) < 0.5
    packed = pack.pack_above(torch.from_numpy(bits.astype(np.float32)), 0.5, 0.5)
    assert packed.dtype == torch.int64
    assert np.array_equal(packed.numpy().view(np.uint8), np.packbits(bits, bitorder="little"))
    signs = pack.unpack_signs(packed, torch.empty(len(bits)))
    assert np.array_equal(signs.numpy(), np.where(bits, 1.0, -1.0))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("elements", [64, 64 * 33, (1 << 17) + 64 * 5, 1 << 18])
def test_numpy_packs_as_torch_does(elements, step, monkeypatch):
    """In host memory NumPy packs and unpacks, a block at a time; torch's operations say what should come out."""
    u = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    u[::7], u[3::11], u[5::13], u[6::17] = 0.0, -0.0, float("nan"), -float("inf")
    total = torch.randint(-3, 4, (elements,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))

    def everything():
        packed = pack.pack_signs(u, step)
        signs = pack.unpack_signs(packed, torch.empty(elements))
        small = pack.unpack_signs(packed, torch.empty(elements, dtype=torch.int8))
        return packed, signs, small, pack.pack_above(total, 1, 0)

    found = everything()
    monkeypatch.setattr(pack.pack_host, "usable", lambda x: False)
    assert all(torch.equal(a, b) for a, b in zip(found, everything(), strict=True))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_survive_packing(bits):
    codes = torch.from_numpy(np.random.default_rng(2).integers(0, 2**bits, (3, 128), dtype=np.uint8))
    packed = pack.pack_codes(codes, bits)
    assert packed.shape == (3, 2 * bits) and packed.dtype == torch.int64
    assert torch.equal(pack.unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33])
def test_majority_counts_as_a_sum_does(ranks, step):
    bits = np.random.default_rng(ranks).random((ranks, 64 * 9)) < 0.5
    planes = [pack.pack_above(torch.from_numpy(row), 0.5, 0.5) for row in bits.astype(np.float32)]
    won = pack.unpack_signs(majority(planes, step), torch.empty(bits.shape[1])).numpy()
    votes = (2 * bits.astype(int) - 1).sum(0)
    ties = np.where((np.arange(bits.shape[1]) + step) % 2 == 0, 1, -1)
    assert np.array_equal(won, np.where(votes == 0, ties, np.sign(votes)))
    assert ranks % 2 or (votes == 0).any()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_equals_the_definition(bits, ranks):
    for step, n in enumerate(LENGTHS):
        u = updates(ranks, n, seed=n)
        wanted = by_definition(u, bits, step)
        found = on_ranks(ranks, lambda c: sign_allreduce(torch.from_numpy(u[c.rank]), bits, c, step))  # noqa: B023
        assert all(torch.equal(f, found[0]) for f in found)
        # A quotient that float32 rounds onto a whole number falls into the code beside it: never for one bit.
        differ = (found[0].numpy() != wanted).sum()
        assert differ == 0 if bits < 8 else differ <= n * ranks * 1e-3, (n, differ)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_pieces_give_what_the_whole_gives(bits, monkeypatch):
    for ranks, n in ((1, 1349), (2, 64 * 8), (3, 1349), (3, 1)):
        u = [torch.from_numpy(x) for x in updates(ranks, n)]
        whole = on_ranks(ranks, lambda c: sign_allreduce(u[c.rank], bits, c, 1))  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setattr(vote, "_PIECE", 128)
            pieces = on_ranks(ranks, lambda c: sign_allreduce(u[c.rank], bits, c, 1))  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_threads_pack_what_one_does_and_a_fork_too(monkeypatch):
    monkeypatch.setattr(pack_host, "_PART", 1 << 9)
    u = torch.randn(9 * (1 << 9) + 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        packed = pack.pack_signs(u, 0)
        signs = pack.unpack_signs(packed, torch.empty_like(u))
        torch.set_num_threads(2)
        assert torch.equal(pack.pack_signs(u, 0), packed)
        assert torch.equal(pack.unpack_signs(packed, torch.empty_like(u)), signs)
        if child := os.fork():  # which has none of its parent's threads
            assert os.waitpid(child, 0)[1] == 0
        else:
            signal.alarm(20)
            os._exit(not torch.equal(pack.unpack_signs(packed, torch.empty_like(u)), signs))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(signs, u.sign())


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("scale", list(VoteScale))
def test_scales(scale, bits):
    u = updates(3, 500)
    found = on_ranks(3, lambda c: sign_allreduce(torch.from_numpy(u[c.rank]), bits, c, 7, scale=scale))
    assert np.array_equal(found[0].numpy(), by_definition(u, bits, 7, scale))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_zeros_everywhere_fall_by_the_mask_of_the_step(bits):
    for step in range(2):
        found = on_ranks(3, lambda c: sign_allreduce(torch.zeros(10) * (-1) ** c.rank, bits, c, step))  # noqa: B023
        wanted = torch.tensor([1.0, -1.0] * 5) * (1 if step == 0 else -1)
        assert all(torch.equal(f, wanted) for f in found)


@pytest.mark.parametrize("scale", [VoteScale.l1, VoteScale.linf])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_beside_what_is_next_to_nothing_fall_by_the_mask(bits, scale):
    """1 / delta leaves the range of float32 below 2^-128."""
    for exponent in (-148, -140, -133, -129, -127):
        u = torch.zeros(4096)
        u[0] = 2.0**exponent * (4096 if scale is VoteScale.l1 else 1)
        for step in range(2):
            found = on_ranks(2, lambda c: sign_allreduce(u, bits, c, step, scale=scale))  # noqa: B023
            wanted = torch.tensor([1.0, -1.0] * 2048) * (1 if step == 0 else -1)
            assert all(torch.equal(f[1:], wanted[1:]) for f in found), exponent
        views = [u.clone()]
        Vote(NullCommunicator(), bits=bits, scale=scale)._to_units(views, u.sum().view(1))
        assert torch.isfinite(views[0]).all() and not views[0][1:].any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_on_the_wire(bits):
    ranks, n = 4, 64 * 4 * 50
    sent = on_ranks(ranks, lambda c: (sign_allreduce(torch.randn(n), bits, c, 0), c.bytes_sent)[1])
    # all_to_all: bits/8 n (P-1)/P; all_gather: n/8 (P-1)/P
    assert set(sent) == {n * (bits + 1) // 8 * (ranks - 1) // ranks}


def test_precision_does_not_fall_with_the_number_of_ranks():
    """Published 8-bit sums leave no level at 128 ranks; here 300 ranks of 8 bits still tell a faint majority."""
    ranks, n = 300, 64
    codes = np.full((ranks, n), 128, np.uint8)  # all vote +1
    codes[:149] = 127  # 149 vote -1: 151 to 149
    ballots = pack.pack_codes(torch.from_numpy(codes), 8)
    won = pack.unpack_signs(count(ballots, 8, 0), torch.empty(n))
    assert (won == 1).all()


def test_memory_of_the_caller_is_used_and_the_update_kept():
    u, out = torch.randn(1000), torch.empty(2000)
    kept = u.clone()
    found = on_ranks(1, lambda c: [sign_allreduce(u, bits, c, 0, out=out).data_ptr() for bits in (1, 4)])
    assert found == [[out.data_ptr()] * 2] and torch.equal(u, kept)


def test_shape_is_kept():
    u = torch.randn(3, 5, 2)
    [found] = on_ranks(1, lambda c: sign_allreduce(u, 1, c, 0))
    assert torch.equal(found, u.sign())


def test_compiles_without_breaks():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def work(u):
        packed = pack.pack_signs(u, 0)
        won = majority([packed, packed ^ 5, packed & 77], 0)
        return pack.unpack_signs(won, torch.empty_like(u))

    u = torch.randn(4096 * 2 + 64)
    wanted = work(u)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(work, backend=backend, fullgraph=True)(u), wanted)
    assert len(graphs) == 1
