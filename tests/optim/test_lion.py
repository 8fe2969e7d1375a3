"""Lion against lion-pytorch step by step, and the settings that it refuses."""

import re

import lion_pytorch
import pytest
import torch

from ensemble_ml.errors import UserError
from ensemble_ml.optim import Exchange, Lion

SHAPES = [(7,), (3, 5), (2, 3, 4, 1), (1,)]


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    made = [(torch.randn(s, generator=generator, dtype=dtype), torch.rand(s, generator=generator)) for s in SHAPES]
    return [values * (keep > 0.2) for values, keep in made]  # some are exactly zero


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
def test_equals_lion_pytorch_bit_for_bit(decay, betas):
    ours, theirs = weights(), weights()
    a = Lion(ours, lr=3e-3, betas=betas, weight_decay=decay)
    b = lion_pytorch.Lion(theirs, lr=3e-3, betas=betas, weight_decay=decay)
    for step in range(20):
        for optimizer, params in ((a, ours), (b, theirs)):
            optimizer.param_groups[0]["lr"] = 3e-3 / (1 + step)
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = g.clone()
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True)), step
    assert all(torch.equal(a.state[p]["exp_avg"], b.state[q]["exp_avg"]) for p, q in zip(ours, theirs, strict=True))


def test_first_step_moves_every_weight_by_lr():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    p.grad = torch.tensor([1e-8, -5.0, 0.0])
    Lion([p], lr=0.25, weight_decay=0.0).step()
    assert torch.equal(p.detach(), torch.tensor([0.75, -1.75, 0.5]))


def test_mixed_types_and_absent_gradients():
    a, b, still = weights()[0], weights(torch.float64)[1], torch.nn.Parameter(torch.ones(3))
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    before = a.detach().clone()
    optimizer = Lion([a, b, still], lr=0.1, weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(a.detach(), before - 0.1)
    assert torch.equal(still.detach(), torch.ones(3)) and still not in optimizer.state


def test_state_dict_round_trip():
    first, second = weights(), weights()
    a, b = Lion(first), Lion(second)
    for params, optimizer in ((first, a), (second, b)):
        for p, g in zip(params, gradients(0), strict=True):
            p.grad = g.clone()
        optimizer.step()
    b.load_state_dict(a.state_dict())
    for params, optimizer in ((first, a), (second, b)):
        for p, g in zip(params, gradients(1), strict=True):
            p.grad = g.clone()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_closure_sees_gradients():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([p], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.9))


OUTSIDE = [
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": float("inf")},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, -0.1)},
    {"betas": (0.9, float("nan"))},
    {"betas": (0.9,)},
    {"weight_decay": -1.0},
    {"weight_decay": float("nan")},
]


@pytest.mark.parametrize("setting", OUTSIDE, ids=str)
def test_refuses_settings_outside_their_range(setting):
    [name] = setting
    with pytest.raises(UserError, match=f"^{name}=.*: must be"):
        Lion([torch.nn.Parameter(torch.ones(1))], **setting)
    with pytest.raises(ValueError, match=f"^{name}=.*: must be"):  # as torch's optimizers raise
        Lion([{"params": [torch.nn.Parameter(torch.ones(1))], **setting}])
    optimizer = Lion([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError, match=f"^{name}=.*: must be"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], **setting})


def test_a_group_of_no_learning_rate_stands_still():
    """As with torch's optimizers; a schedule may raise the rate later."""
    still, moving = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([moving], lr=0.5, weight_decay=0.1)
    optimizer.add_param_group({"params": [still], "lr": 0.0})
    still.grad = moving.grad = torch.ones(2)
    optimizer.step()
    assert still.tolist() == [1, 1] and moving.tolist() == pytest.approx([0.45, 0.45])
    assert optimizer.momentum(still).tolist() == pytest.approx([0.01, 0.01])
    all_still = Lion([still], lr=0.0)
    all_still.step()
    assert still.tolist() == [1, 1]
    all_still.param_groups[0]["lr"] = 0.5
    all_still.step()
    assert still.tolist() == pytest.approx([0.45, 0.45])


def test_a_parameter_without_elements():
    p, empty = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(0, 3))
    optimizer = Lion([empty, p], lr=0.5, weight_decay=0.0)
    for _ in range(2):
        (p.sum() + empty.sum()).backward()
        optimizer.step()
    assert empty.grad is not None and p.tolist() == [0, 0]
    Lion([empty]).step()


def test_sparse_gradients_step_as_dense_ones():
    """Of an embedding whose rows are named twice: what is finite is each sum, not each part."""
    tables = [torch.nn.Embedding(5, 3, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [Lion(table.parameters(), lr=0.1) for table in tables]
    factor = torch.tensor([[1.0], [-2.0], [3.0]])
    for rows in ([1, 4, 1], [0, 1, 1]):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            (factor * table(torch.tensor(rows)) ** 2).sum().backward()
            optimizer.step()
    assert tables[0].weight.grad.is_sparse
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=0)
    before = tables[0].weight.detach().clone()
    (torch.inf * tables[0](torch.tensor([2]))).sum().backward()
    with pytest.raises(UserError, match=r"the gradient of parameter 0, of shape .* is not finite"):
        optimizers[0].step()
    assert torch.equal(tables[0].weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(value, dtype):
    """Its momentum would never be finite again, and the weight would stand still or drift, in silence."""
    params = weights(dtype)
    optimizer, without = Lion(params, lr=0.1), weights(dtype)
    reference = Lion(without, lr=0.1)
    for step in range(4):
        for group in (params, without):
            for p, g in zip(group, gradients(step), strict=True):
                p.grad = g.to(dtype)
        if step == 2:
            params[1].grad.view(-1)[1] = value
            shape = re.escape(str(tuple(params[1].shape)))
            with pytest.raises(UserError, match=f"^Lion: the gradient of parameter 1, of shape {shape}, is not finite"):
                optimizer.step()
            continue
        optimizer.step()
        reference.step()
    for p, q in zip(params, without, strict=True):
        assert torch.equal(p, q) and torch.equal(optimizer.momentum(p), reference.momentum(q))


def test_a_large_gradient_whose_square_overflows_is_finite():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3e38, -3e38])
    Lion([p], lr=0.5, weight_decay=0.0).step()
    assert p.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_norm_of_a_gradient_in_half_precision_may_be_larger_than_such_numbers(clip):
    p = torch.nn.Parameter(torch.zeros(2500, dtype=torch.float16))
    optimizer = Lion([p], lr=0.5, weight_decay=0.0, exchange=Exchange(clip))
    p.grad = torch.full_like(p, 3000.0)  # the largest number in float16 is 65504
    outcome = optimizer.exchange.finish()
    assert outcome.finite and outcome.norm == pytest.approx(150_000.0, rel=1e-5)
    assert p.grad.float().norm().item() == pytest.approx(clip or 150_000.0, rel=1e-3)
    optimizer.step()
    assert (p == -0.5).all()


def test_gradients_are_looked_at_once_a_step(monkeypatch):
    """`finish` has looked already, so that training pays for it once; what comes after its step is looked at again."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer, looked = Lion([p], lr=0.1), []
    monkeypatch.setattr("ensemble_ml.optim.lion.total_norm", lambda *_: looked.append(1) or torch.zeros(()))
    p.grad = torch.ones(2)
    assert optimizer.exchange.finish().finite
    optimizer.step()
    assert not looked
    optimizer.step()
    assert len(looked) == 1


def test_an_outcome_that_is_not_finite_is_not_stepped_over():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([p], lr=0.1)
    p.grad = torch.tensor([float("nan"), 1.0])
    assert not optimizer.exchange.finish().finite
    with pytest.raises(UserError, match="parameter 0"):
        optimizer.step()


def test_a_group_that_is_added_later_is_looked_at_too():
    p, late = weights()[:2]
    optimizer = Lion([p], lr=0.1)
    optimizer.add_param_group({"params": [late]})
    p.grad, late.grad = torch.ones_like(p), torch.full_like(late, torch.nan)
    assert not optimizer.exchange.finish().finite


def test_half_precision_keeps_momentum_in_float32():
    exact, half = weights(), [torch.nn.Parameter(p.detach().bfloat16()) for p in weights()]
    a, b = Lion(exact, lr=1e-2), Lion(half, lr=1e-2)
    for step in range(10):
        for optimizer, params in ((a, exact), (b, half)):
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
    for p, q in zip(exact, half, strict=True):
        assert b.momentum(q).dtype is torch.float32
        torch.testing.assert_close(b.momentum(q), a.momentum(p), rtol=2e-2, atol=1e-3)
    restored = Lion([torch.nn.Parameter(q.detach().clone()) for q in half])
    restored.load_state_dict(b.state_dict())
    for p, q in zip(restored.param_groups[0]["params"], half, strict=True):
        assert torch.equal(restored.momentum(p), b.momentum(q)) and restored.momentum(p).dtype is torch.float32
