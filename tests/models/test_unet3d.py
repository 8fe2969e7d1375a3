"""The U-Net: sizes, poolings, equivariance, all vertical forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import awake, make_input, make_model, make_spec, tensors
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ensemble_ml.config import Pole, Vertical
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.unet3d import Activation, Convolution, ResidualBlock, UNet3d, add_upsampled, pool


def unet(rows, columns, planes=3, depth=2, vertical=Vertical.shared, pole=Pole.cross):
    grid = Grid(np.linspace(90, -90, rows), np.arange(columns) * 360 / columns)
    return awake(UNet3d(geometries(grid, pole, depth), planes, [4, 8, 8, 8][: depth + 1], 1, vertical))


@pytest.mark.parametrize("vertical", list(Vertical))
@pytest.mark.parametrize("pole", list(Pole))
@pytest.mark.parametrize("planes", [1, 3])
def test_every_form_runs_and_trains(vertical, pole, planes):
    net = unet(9, 16, planes, vertical=vertical, pole=pole)
    x = torch.randn(2, 4, 9, 16, planes)
    out = net(x)
    out.square().mean().backward()
    assert out.shape == x.shape and not torch.equal(out, x)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("vertical", list(Vertical))
def test_what_is_computed_again_changes_no_bit(vertical):
    """And the backward pass keeps less: of a block its input, in the place of seven fields of its size or so."""
    net, x = unet(9, 16, vertical=vertical), torch.randn(2, 4, 9, 16, 3)
    found = {}
    for recompute in (False, True):
        for module in net.modules():
            if isinstance(module, ResidualBlock):
                module.recompute = recompute
        kept: list[int] = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t):
            out = net(x.requires_grad_())
        net.zero_grad()
        x.grad = None
        out.square().mean().backward()
        found[recompute] = [out, x.grad, *(p.grad for p in net.parameters())], sum(kept)
    assert all(torch.equal(a, b) for a, b in zip(found[False][0], found[True][0], strict=True))
    assert found[True][1] < 0.3 * found[False][1]


@pytest.mark.parametrize("rows", [33, 361, 6, 7, 1])
def test_odd_sizes_equal_masked_padding(rows):
    """Pooling valid rows alone is padding to a multiple of 2^L with rows of weight zero."""
    x = torch.randn(1, 2, rows, 8, 2, dtype=torch.float64)
    whole = -rows % 8
    values, mask = F.pad(x, (0, 0, 0, 0, 0, whole)), F.pad(torch.ones_like(x), (0, 0, 0, 0, 0, whole))
    small = x
    for _ in range(3):
        small = pool(small)
        weight = F.avg_pool3d(mask, (2, 2, 1))
        values = F.avg_pool3d(values * mask, (2, 2, 1)) / weight.clamp(min=1e-9)
        mask = (weight > 0).double()
        torch.testing.assert_close(small, values[:, :, : small.shape[2]])
        assert (mask[:, :, small.shape[2] :] == 0).all()


@pytest.mark.parametrize("rows,columns", [(33, 64), (361, 720), (7, 9), (2, 3), (181, 45)])
def test_upsampling_is_nearest_neighbour_cut_to_size(rows, columns):
    like = torch.randn(1, 2, rows, columns, 3)
    small = torch.randn(1, 2, -(-rows // 2), -(-columns // 2), 3)
    expected = small.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, :rows, :columns]
    assert torch.equal(add_upsampled(like, small), like + expected)


@pytest.mark.parametrize("rows,columns", [(4, 6), (5, 3), (1, 2), (2, 1)])
def test_gradients_of_pooling_and_upsampling(rows, columns):
    large = torch.randn(2, 2, rows, columns, 2, dtype=torch.float64, requires_grad=True)
    small = torch.randn(2, 2, -(-rows // 2), -(-columns // 2), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool, large)
    assert torch.autograd.gradcheck(add_upsampled, (large, small))
    last = large.detach().contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    assert pool(last).is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(pool(last), pool(large))


@pytest.mark.parametrize("shift", [4, 8, 12, -4])
@pytest.mark.parametrize("pole", list(Pole))
def test_rolling_longitude_rolls_the_output(shift, pole):
    net, x = unet(9, 16, pole=pole).double(), torch.randn(1, 4, 9, 16, 3, dtype=torch.float64)
    torch.testing.assert_close(net(x.roll(shift, 3)), net(x).roll(shift, 3), rtol=1e-12, atol=1e-12)


def test_seen_from_the_other_side_of_the_pole_nothing_changes():
    """Mirroring the grid north to south mirrors a network with mirrored kernels: both edges follow one rule."""
    net = unet(8, 16, depth=0).double()
    other = unet(8, 16, depth=0).double()
    other.load_state_dict({k: v.flip(2) if v.ndim == 5 else v for k, v in net.state_dict().items()})
    x = torch.randn(1, 4, 8, 16, 3, dtype=torch.float64)
    torch.testing.assert_close(other(x.flip(2)), net(x).flip(2))


def test_full_with_equal_kernels_is_shared():
    grid = Grid(np.linspace(90, -90, 5), np.arange(8) * 45.0)
    pad = Padder(geometries(grid, Pole.cross, 0)[0])
    shared = Convolution(3, 4, 3, Vertical.shared, pad, bias=True)
    full = Convolution(3, 4, 3, Vertical.full, pad, bias=True)
    for conv in full.by_plane:
        conv.load_state_dict(shared.conv.state_dict())
    x = torch.randn(2, 3, 5, 8, 3)
    torch.testing.assert_close(full(x), shared(x), rtol=1e-5, atol=1e-5)


def test_memory_order_changes_nothing():
    net, x = unet(9, 16), torch.randn(1, 4, 9, 16, 3)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert net(last).is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(net(last), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vertical", list(Vertical))
def test_widths_and_inner_channels_are_taken_as_given(vertical):
    spec = make_spec(depth=1, blocks=2, widths=[12, 4], inner=[4, 8, 16, 20, 12, 24], vertical=vertical)
    model = make_model(spec)
    blocks = [module for module in model.unet.modules() if isinstance(module, ResidualBlock)]
    assert [block.scale1.weight.shape[-1] for block in blocks] == [12, 12, 4, 4, 12, 12]
    assert [block.scale2.weight.shape[-1] for block in blocks] == [4, 8, 16, 20, 12, 24]
    found = model(make_input(spec))
    sum(values.square().mean() for values in tensors(found).values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_widths_as_the_default_gives_them_change_nothing():
    plain, same = make_spec(depth=2), make_spec(depth=2, widths=[8, 16, 16], inner=[8, 16, 16, 8, 16])
    torch.manual_seed(0)
    one = make_model(plain)
    torch.manual_seed(0)
    two = make_model(same)
    assert all(torch.equal(a, two.state_dict()[name]) for name, a in one.state_dict().items())
    again = ModelSpec.from_json(same.to_json()).config
    assert (again.widths, again.inner) == (same.config.widths, same.config.inner)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widths": [8, 6, 8]}, r"model.widths=\[8, 6, 8\]: positive multiples of 4"),
        ({"widths": [8, 16]}, r"model.widths=\[8, 16\]: model.depth=2 has 3 levels"),
        ({"inner": [8, 8]}, r"model.inner=\[8, 8\]: model.depth=2 model.blocks=1 make 5 residual blocks"),
        ({"name": "drn", "spread": False, "widths": [8]}, r"model.widths=\[8\]: model.name=drn has none"),
    ],
)
def test_widths_that_cannot_be(given, message):
    with pytest.raises(UserError, match=message):
        make_spec(depth=2, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("planes", [None, 3])
def test_activation_equals_that_of_autograd_bit_for_bit_and_keeps_less(dtype, planes):
    torch.manual_seed(1)
    activation = awake(Activation(8, planes))
    x = torch.randn(2, 8, 9, 16, 3, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)

    def plain(x):
        inner = torch.addcmul(activation.bias.to(dtype), x.permute(0, 2, 3, 4, 1), activation.weight.to(dtype))
        return F.silu(inner).permute(0, 4, 1, 2, 3)

    found = {}
    for form in (plain, activation):
        kept: dict[int, int] = {}
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        activation.zero_grad()
        with saved_tensors_hooks(lambda t, kept=kept: kept.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
            out = form(given)
        (out * torch.arange(16, dtype=dtype)[:, None]).sum().backward()
        found[form] = [out, given.grad, *(p.grad.clone() for p in activation.parameters())], sum(kept.values())
    assert all(torch.equal(a, b) for a, b in zip(found[plain][0], found[activation][0], strict=True))
    assert found[activation][1] < 0.51 * found[plain][1]
