"""What a network does between its layers: what needs other ranks' points is refused, all else is left alone."""

import pytest
import torch
from parallel.ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from ensemble_ml.errors import UserError
from examples.stock_layers.between import watch_first_pass
from examples.stock_layers.layers import partition


class Net(nn.Module):
    """A convolution, then a function in the way that people write them."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.norm, self.function = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), function

    def forward(self, x):
        return self.function(self.norm(self.conv(x)))


ACROSS = {
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate by size": lambda x: F.interpolate(x, size=(12, 8)),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "conv2d": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "mean of negative axes": lambda x: x - x.mean(-2, keepdim=True),
    "mean of all": lambda x: x - x.mean(),
    "torch.sum": lambda x: torch.sum(x, dim=3),
    "softmax": lambda x: x.softmax(-1),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "amax": lambda x: x.amax((2, 3)),
    "mean by its names": lambda x: x - torch.mean(input=x, dim=(2, 3), keepdim=True),
    "vector_norm": lambda x: x / torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True),
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "fftn": lambda x: torch.fft.fftn(x).abs(),
    "flatten": lambda x: x * x.flatten(2).mean(-1)[..., None, None],
    "view": lambda x: x * x.view(2, 4, -1).mean(-1)[..., None, None],
    "reshape": lambda x: x.reshape(2, 2, 2, 64),
    "__getitem__": lambda x: x[:, :, 1:] - x[:, :, :-1],
    "__getitem__ of a row": lambda x: x[..., 0, :],
    "normalize": lambda x: F.normalize(x, dim=-1),
    "matmul": lambda x: torch.matmul(x, torch.ones(8, 8)),
    "einsum": lambda x: torch.einsum("bcyx,cd->bdy", x, torch.ones(4, 4)),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(8, 3), 1),
    "tensordot of the second": lambda x: torch.tensordot(torch.ones(3, 8), x, ([1], [2])),
    "matmul of the second": lambda x: torch.matmul(torch.ones(8, 8), x),
    "einsum of the second": lambda x: torch.einsum("cd,bcyx->bdx", torch.ones(4, 4), x),
    "linear": lambda x: F.linear(x, torch.ones(3, 8)),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunk": lambda x: torch.cat(x.chunk(2, 3), 1),
    "select": lambda x: x.select(3, 0),
    "transpose": lambda x: x.transpose(2, 3),
    "permute": lambda x: x.permute(0, 1, 3, 2),
    "__getitem__ of the first": lambda x: x - x[:, :, :1],
    "unbind": lambda x: torch.stack(x.unbind(2)),
    "cummax": lambda x: x.cummax(2)[0],
    "argsort": lambda x: x.argsort(2),
    "aminmax": lambda x: x.aminmax(dim=2)[0],
    "topk": lambda x: x.topk(3, dim=2)[0],
    "trapezoid": lambda x: torch.trapezoid(x, torch.arange(8.0)),
    "tensor_split": lambda x: torch.cat(x.tensor_split(2, 2), 1),
    "gather": lambda x: x.gather(2, torch.zeros_like(x, dtype=torch.long)),
    "__getitem__ of a mask": lambda x: x - x[x > 0].mean(),
    "masked_select": lambda x: x - x.masked_select(x > 0).mean(),
    "where": lambda x: x * len(torch.where(x > 0)[0]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-2:]),
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "special.logsumexp": lambda x: x - torch.special.logsumexp(x, (-2, -1), keepdim=True),
    "matrix_norm": lambda x: x / torch.linalg.matrix_norm(x, keepdim=True),
    "cosine_similarity": lambda x: F.cosine_similarity(x, -x, dim=-1),
    "mse_loss": lambda x: x * F.mse_loss(x, -x),
    "repeat": lambda x: x.repeat(1, 1, 2, 1),
    "tile": lambda x: torch.tile(x, (1, 1, 1, 2)),
    "cat": lambda x: torch.cat([x, x], 2),
    "movedim": lambda x: x.movedim(2, 3),
    "mT": lambda x: x.mT,
    "bmm": lambda x: torch.bmm(x.flatten(0, 1), torch.ones(8, 8, 3)),
    "flipud": lambda x: x.permute(2, 3, 0, 1).flipud(),
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(0, 1), 3),
    "unflatten": lambda x: x.unflatten(3, (4, 2)).mean(-1),
    "std without correction": lambda x: x / x.std(False),
    "diff": lambda x: x.diff(1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "allclose": lambda x: x * torch.allclose(x, -x),
    "mean of a channel": lambda x: x - x[:, 0].mean((1, 2), keepdim=True)[:, None],
    "mean of a mean": lambda x: x - x.mean(1).mean(),
    "mean where channels are last": lambda x: x - x.movedim(1, -1).mean((1, 2))[..., None, None],
    "sub of each from each": lambda x: (x[..., None] - x[..., None, :]).amax(-1),
    "matmul of each with each": lambda x: x.movedim(1, -1) @ x.movedim(1, -1).transpose(-2, -1),
    "einsum of each with each": lambda x: torch.einsum("bcyx,bcyz->bxyz", x, x),
    "__setitem__ of a row": lambda x: [y := x.clone(), y.__setitem__((..., 0, slice(None)), 0)][0],
}
BESIDE = {
    "arithmetic": lambda x: (x * 2 + 1).relu().sqrt().clamp(max=3),
    "over channels": lambda x: x.softmax(1) + x.mean(1, keepdim=True) + x.amax(dim=1, keepdim=True),
    "the larger of two": lambda x: torch.max(x, -x).maximum(x),
    "channels padded": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "rolled channels": lambda x: x.roll(1, 1).flip(1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, size=(2 * x.shape[2], 16), mode="nearest"),
    "put together": lambda x: torch.cat([x, x.unflatten(1, (2, 2)).flatten(1, 2)], 1).permute(0, 2, 3, 1),
    "a vector's mean": lambda x: x * torch.ones(4).mean(),
    "cut to a size": lambda x: x[:, 1:, : x.shape[2], : x.shape[3]] + x[:, :1],
    "channels in groups": lambda x: x.view(2, 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
    "channels mixed": lambda x: torch.einsum("bcyx,cd->bdyx", x, torch.ones(4, 4)) + F.normalize(x),
    "by the rule of einsum": lambda x: torch.einsum("bcyx,cd", x, torch.ones(4, 4)),
    "channels apart": lambda x: torch.cat(x.chunk(2, 1), 1) + x.narrow(1, 0, 1) + torch.cat(x.split(1), 0),
    "over channels by rank": lambda x: x.topk(2, 1)[0].argsort(1) + x.cummax(1)[0][:, :2] + x.unbind(1)[0][:, None],
    "batches and channels": lambda x: x.transpose(0, 1).swapaxes(0, 1).permute(0, 2, 3, 1),
    "channels last and back": lambda x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2),
    "heads before channels": lambda x: x.unflatten(1, (2, 2)).permute(0, 3, 4, 1, 2),
    "channels last": lambda x: F.linear(x.movedim(1, -1).unsqueeze(1), torch.ones(3, 4)),
    "channels chosen": lambda x: x[:, [0, 2]].sum(1) + x[torch.arange(2), torch.tensor([0, 1])] + x[0].mean(0),
    "a bias": lambda x: x + (w := torch.ones(4))[:, None, None] + w.view(1, -1, 1, 1).expand_as(x),
    "values set": lambda x: [y := x.clone(), y.__setitem__(y > 0.5, 0), y.__setitem__((slice(None), 0), x[:, 1])][0],
    "in place": lambda x: x.clone().add_(1).mul_(x).relu_().nan_to_num_(),
    "over channels that are last": lambda x: F.layer_norm(x.movedim(1, -1), (4,)).softmax(-1) @ torch.ones(4, 3),
    "attention at each point": lambda x: (q := x.unflatten(1, (2, 2)).permute(0, 3, 4, 1, 2)) @ q.transpose(-2, -1),
    "einsum with an ellipsis": lambda x: torch.einsum("bc...,cd->bd...", x, torch.ones(4, 4)).mean(1),
    "points repeated": lambda x: x.repeat(1, 2, 1, 1).repeat_interleave(2, dim=3),
    "a table": lambda x: torch.ones(3, 4)[(x[:, 0] > 0.5).long()].sum(-1) + x.mean(1),
    "sample by sample": lambda x: torch.stack([sample.clamp(0) for sample in x]).mean(1, keepdim=True),
    "functions of a point": lambda x: torch.where(x > 0, x, 2 - x) ** 2 / x.new_ones(4, 1, 1) + torch.special.entr(x),
    "over channels by fft": lambda x: torch.fft.fft(x, dim=1).abs() + torch.linalg.vector_norm(x, dim=1, keepdim=True),
}


def watched(function):
    net = Net(function)
    watch_first_pass(net, (2, 3), [net.conv, net.norm])
    return net


def test_a_linear_layer_along_a_split_axis_is_refused():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8))
    watch_first_pass(net, (2, 3), list(net))
    with pytest.raises(UserError, match=r"partition: Linear\(\)"):
        net(torch.rand(2, 4, 8, 8))


@pytest.mark.parametrize("name", ACROSS)
def test_what_takes_points_together_is_refused_once(name):
    net = watched(ACROSS[name])
    with pytest.raises(UserError, match=rf"partition: {name.split()[0].split('.')[-1]}\(\) between the layers"):
        net(torch.rand(2, 4, 8, 8))
    assert net(torch.rand(2, 4, 8, 8)).isfinite().all()  # later passes are nobody's business


@pytest.mark.parametrize("name", BESIDE)
def test_what_acts_on_each_point_is_left_alone(name):
    net, x = watched(BESIDE[name]), torch.rand(2, 4, 8, 8)
    assert torch.equal(net(x).nan_to_num(), Net.forward(net, x).nan_to_num())


def passed(session, function):
    net = partition(Net(function), session.mesh)
    try:
        return tuple(net(torch.rand(2, 4, 4, 8)).shape)
    except UserError as error:
        return str(error)


def test_partitioned_networks_are_watched():
    for found in run_ranks(passed, 2, ACROSS["mean"], lat=2):
        assert "mean() between the layers of the model would see one rank's shard" in found
    assert run_ranks(passed, 2, BESIDE["nearest"], lat=2) == [(2, 4, 8, 16)] * 2
