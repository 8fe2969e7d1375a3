"""The bank: kernels by the formula, gradients, an ordinary model after it is settled."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import awake, make_input, make_model, make_spec, tensors

from ensemble_ml.config import ModelConfig, Precision, Vertical
from ensemble_ml.errors import UserError
from ensemble_ml.models import Climate, EnsembleModel, Speed


def kernels_by_formula(bank):
    """As the module's text has it, with an index for each number of a window."""
    for conv, offsets, mix, gain in zip(bank._convs, bank.offsets, bank.mix, bank.gains, strict=True):
        shape = conv.out_channels, *conv.kernel_size, conv.in_channels
        steps = torch.arange(math.prod(shape))
        windows = torch.stack([bank.values[(offset + steps) % len(bank.values)] for offset in offsets])
        kernel = (mix[:, None] * windows).sum(0).view(shape) * gain.view(-1, 1, 1, 1, 1)
        yield kernel.permute(0, 4, 1, 2, 3) / math.sqrt(math.prod(shape[1:]))


@pytest.mark.parametrize("templates", [1, 2, 4])
@pytest.mark.parametrize("share", [0.03, 0.3, 1.0])
def test_kernels_and_gradients_are_those_of_the_formula(share, templates):
    bank = awake(make_model(make_spec(bank=share, bank_templates=templates)).double()).unet.bank
    found, expected = bank.kernels(), list(kernels_by_formula(bank))
    weights = [torch.randn_like(kernel) for kernel in expected]
    grads = []
    for kernels in (found, expected):
        bank.zero_grad()
        sum((kernel * weight).sum() for kernel, weight in zip(kernels, weights, strict=True)).backward()
        grads.append([p.grad for p in bank.parameters()])
    for a, b in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(kernel.is_contiguous(memory_format=torch.channels_last_3d) for kernel in found)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_all_numbers_are_used_and_no_two_kernels_take_the_same(share):
    """Also where all kernels are of one size, which the bank may hold just once."""
    bank = make_model(make_spec(bank=share, hidden=16)).unet.bank
    sum(kernel.abs().sum() for kernel in bank.kernels()).backward()
    assert (bank.values.grad != 0).all()
    starts = [start for offsets in bank.offsets for start in offsets]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("vertical", list(Vertical))
def test_a_bank_starts_as_kernels_of_their_own_do(vertical):
    """Branches at zero, so that the untrained network is the statistical correction, and a tenth of the weights."""
    spec, plain = make_spec(bank=0.1, vertical=vertical, hidden=16), make_spec(vertical=vertical, hidden=16)
    torch.manual_seed(0)
    model, dense = EnsembleModel(spec, Climate.default(spec)), EnsembleModel(plain, Climate.default(plain))
    x = torch.randn(2, 16, 9, 16, model.plane_bias.shape[1])
    with torch.no_grad():
        with model.unet.bank.laid():
            assert torch.equal(model.unet.encoder[0](x), x)
        assert torch.equal(dense.unet.encoder[0](x), x) and model.unet(x).shape == x.shape
    own, shared = (sum(p.numel() for p in m.unet.encoder.parameters()) for m in (dense, model))
    assert shared < 0.15 * own
    assert len(model.unet.bank.values) == round(
        0.1 * sum(p.numel() for name, p in dense.unet.named_parameters() if p.ndim == 5)
    )
    kernel = model.unet.bank.kernels()[0].detach()
    assert float(kernel.std()) == pytest.approx(1 / math.sqrt(3 * kernel[0].numel()), rel=0.2)


@pytest.mark.parametrize("kind", [Precision.float32, Precision.bfloat16, Precision.float64])
def test_settled_kernels_predict_the_same_bits(kind):
    spec = make_spec(bank=0.2)
    model, x = make_model(spec), make_input(spec)
    Speed(kind, True).apply(model)
    x = x.to(torch.float64) if kind is Precision.float64 else x
    with torch.no_grad():
        before = tensors(model(x))
        model.settle()
        after = tensors(model(x))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.spec.config.bank == 0 and model.unet.bank is None
    plain = EnsembleModel(model.spec, Climate.default(model.spec))
    assert plain.load_state_dict(model.state_dict())
    model.settle()  # nothing is left to do


def test_the_bank_decays_and_comes_last():
    model = make_model(make_spec(bank=0.2))
    groups = {group["name"]: group for group in model.param_groups()}
    assert [p is model.unet.bank.values for p in groups["bank"]["params"]] == [True]
    assert groups["bank"]["late"] and "weight_decay" not in groups["bank"]
    mixed = {id(p) for p in (*model.unet.bank.mix, *model.unet.bank.gains)}
    assert mixed <= {id(p) for p in groups["plain"]["params"]}


def test_banks_that_cannot_be():
    with pytest.raises(UserError, match=r"model.bank=0.0001: \d numbers .* up to 16 outputs; give 0.00"):
        EnsembleModel(spec := make_spec(bank=1e-4), Climate.default(spec))
    for given, message in (
        ({"bank": 1.5}, "a fraction between 0 and 1"),
        ({"bank": 0.1, "recompute": True}, "give model.recompute=false"),
        ({"bank": 0.1, "name": "drn", "spread": False}, "model.name=drn has no U-Net of ours"),
        ({"bank_templates": 0}, "model.bank_templates=0"),
    ):
        with pytest.raises(UserError, match=message):
            ModelConfig(**given)
