"""What a forward makes of the shape at hand: refused where ranks would compute other values, equal to one process else."""

import copy
import math

import numpy as np
import pytest
import torch
from parallel.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ensemble_ml.distributed import Mesh
from ensemble_ml.distributed.layers import partition
from ensemble_ml.errors import UserError

ROWS, COLUMNS = 16, 24


class Net(nn.Module):
    """A function in the way that people write them, between two convolutions."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(1, 3, 3, padding=1)
        self.norm, self.down, self.up = nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
        self.drop, self.mlp, self.enlarge = nn.Dropout(0.3), nn.Linear(2, 4), nn.ConvTranspose2d(4, 4, 2, 2)
        self.gate = nn.Parameter(torch.zeros(1))
        self.rows = nn.Parameter(torch.zeros(ROWS))
        self.map = nn.Parameter(torch.zeros(1, 4, ROWS, COLUMNS))
        self.register_buffer("mask", torch.ones(ROWS, COLUMNS))
        self.grid, self.calls = None, 0

    def forward(self, x, *others):
        self.calls += 1
        return self.second(self.function(self, self.first(x), *others).sum(1, keepdim=True))


def spaced(x, axis=2):
    return torch.linspace(-1, 1, x.shape[axis], dtype=x.dtype)


def cached(net, x):
    if net.grid is None:
        net.grid = spaced(x)[:, None]
    return x * net.grid


def marked(x):
    rows = x.new_zeros(x.shape[2])
    rows[0] = 1
    return x + rows[:, None]


def mesh_of(x):
    rows, columns = torch.meshgrid(torch.arange(x.size(2)), torch.arange(x.size(3)), indexing="ij")
    return torch.stack([rows, columns]).to(x.dtype)


REFUSED = {
    "mul": {
        "a column of weights from numpy": lambda _, x: x * torch.from_numpy(np.linspace(-1, 1, x.shape[2]))[:, None],
        "a number": lambda _, x: x * x.shape[2],
        "the size of the whole": lambda _, x: x * x.numel(),
        "a share": lambda _, x: x * (1 / math.sqrt(x.shape[-1] * x.shape[-2])),
        "of rows": lambda _, x: x * len(x[0, 0]),
        "on a condition": lambda _, x: x * (2 if x.shape[2] > 12 else 3),
    },
    "div": {
        "the rows": lambda _, x: x / x.shape[2],
        "the points": lambda _, x: x.sum(1, keepdim=True).expand(x.shape) / (x.shape[2] * x.shape[3]),
    },
    "linspace": {
        "latitudes": lambda _, x: x * torch.cos(spaced(x))[:, None],
        "a channel": lambda _, x: torch.cat([x, spaced(x)[None, None, :, None].expand(len(x), 1, *x.shape[2:])], 1),
        "behind a gate that is shut": lambda net, x: x + net.gate * spaced(x)[:, None],
        "beside large values": lambda _, x: x + 1e-6 * (x * spaced(x)[:, None]),
        "kept": cached,
        "taken away": lambda _, x: x - spaced(x)[:, None],
        "a condition": lambda _, x: torch.where(spaced(x)[:, None] > 0, x, 0),
    },
    "arange": {
        "rows": lambda _, x: x + torch.arange(x.shape[2])[:, None],
        "waves": lambda _, x: x + torch.sin(torch.arange(x.size(-2), dtype=x.dtype) / 10)[:, None],
        "a mesh": lambda _, x: torch.cat([x, mesh_of(x).expand(len(x), -1, -1, -1)], 1),
        "through a layer": lambda net, x: x + net.mlp(mesh_of(x).movedim(0, -1)).movedim(-1, 0),
    },
    "randn": {"noise": lambda _, x: x + torch.randn(x.shape, dtype=x.dtype)},
    "rand": {"noise in rows": lambda _, x: x + 0.1 * torch.rand(x.shape[2], 1, dtype=x.dtype)},
    "bernoulli": {"a mask": lambda _, x: x * torch.bernoulli(torch.full(x.shape, 0.5, dtype=x.dtype))},
    "tensor": {"a number of a size": lambda _, x: x * torch.tensor(float(x.shape[2]))},
    "full": {"values of a size": lambda _, x: x + torch.full(x.shape, float(x.shape[2]), dtype=x.dtype)},
    "zeros": {},
    "__getitem__": {
        "the first rows of weights": lambda net, x: x * (1 + net.rows[: x.shape[2], None]),
        "the first rows of a map": lambda net, x: x + net.map[..., : x.shape[2], : x.shape[3]],
        "the first rows of a mask": lambda net, x: x * net.mask[: x.shape[2], : x.shape[3]],
    },
    "add": {"the first row is marked": lambda _, x: marked(x)},
    "tril": {"a triangle": lambda _, x: x + torch.tril(torch.ones(x.shape[2:], dtype=x.dtype))},
    "a rank's part of the field fails where the whole does not": {
        "a map": lambda net, x: x + net.map,
        "weights": lambda net, x: x * net.rows[:, None],
        "a mask": lambda net, x: x.masked_fill(net.mask == 0, 0),
    },
    "what reaches layer": {
        "on a condition": lambda net, x: net.norm(x) if x.shape[2] > 12 else x,
        "twice on a condition": lambda _, x: x.relu().mul(3) if x.shape[2] > 12 else x.mul(2),
    },
    "sum() between the layers of the model would see one rank's part": {
        "means": lambda _, x: x - (x.sum((2, 3)) / (x.shape[2] * x.shape[3]))[..., None, None],
    },
    "dropout() between the layers of the model would see one rank's part": {"": lambda net, x: F.dropout(x)},
    "grid_sample() between the layers of the model would see one rank's part": {
        "": lambda _, x: F.grid_sample(x, F.affine_grid(torch.eye(2, 3, dtype=x.dtype)[None].expand(2, 2, 3), x.shape)),
    },
}
HARMLESS = {
    "zeros": lambda _, x: x + x.new_zeros(x.shape) + torch.zeros_like(x) + torch.zeros(x.shape[2], 1),
    "a channel of ones": lambda _, x: torch.cat([x, torch.ones(len(x), 1, *x.shape[2:], dtype=x.dtype)], 1),
    "a full field": lambda _, x: x * torch.full(x.shape, 2.0, dtype=x.dtype),
    "memory that is filled": lambda _, x: [y := torch.empty_like(x), y.copy_(x)][1],
    "memory for several": lambda _, x: [y := x.new_empty(x.shape), y.__setitem__(slice(None), x)][0],
    "a view": lambda _, x: x.view(*x.shape[:2], x.size(2), x.size(3)).reshape(len(x), 2, 2, *x.shape[2:]).mean(1),
    "a bias": lambda net, x: x + net.mlp(torch.ones(2, dtype=x.dtype))[:, None, None].expand(-1, *x.shape[2:]),
    "nearest": lambda net, x: net.down(F.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3]))),
    "a unet": lambda net, x: x + net.enlarge(net.drop(net.down(x)).relu(), output_size=x.shape[2:])[..., : x.shape[2], :],
    "upsampled": lambda net, x: net.norm(x) + net.up(net.down(x)),
    "in place": lambda net, x: net.norm(x).mul_(2).add_(1).relu_(),
    "a gate": lambda net, x: x + net.gate * x,
    "a constant": lambda _, x: x / (ROWS * COLUMNS),
    "channels counted": lambda _, x: x * torch.arange(x.shape[1])[:, None, None] / x.shape[1] / len(x),
    "a check": lambda _, x: x if x.shape[2] >= 4 and x.numel() else None,
    "a size that does not matter": lambda _, x: [torch.tensor(x.shape), torch.arange(x.shape[2]), x][-1],
    "samples dropped": lambda _, x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5) + torch.rand(()),
    "computed again": lambda net, x: checkpoint(lambda y: net.norm(y).relu(), x, use_reentrant=False),
    "calls counted": lambda net, x: x * net.calls,
    "layers twice": lambda net, x: net.norm(net.first(net.norm(x))),
    "a step of time": lambda net, x, t: x + net.mlp(torch.stack([t, t.cos()], 1))[..., None, None],
    "given coordinates": lambda _, x, __, coordinates: torch.cat([x, coordinates], 1),
    "given latitudes": lambda _, x, t, coordinates, latitudes: x * latitudes.cos()[:, None],
    "given points": lambda net, x, t, coordinates, latitudes, points: x + net.mlp(points).movedim(-1, 0),
}
OTHERS = {"a step of time": 1, "given coordinates": 2, "given latitudes": 3, "given points": 4}  # arguments beside x


def net_of(function):
    torch.manual_seed(0)
    return Net(function).double()


def inputs(count, place=None, meshes=(1, 1)):
    """The field and `count` other arguments, or a rank's part of them."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, ROWS, COLUMNS, dtype=torch.float64, generator=numbers)
    points = torch.randn(ROWS, COLUMNS, 2, dtype=torch.float64, generator=numbers)
    latitudes = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    t = torch.tensor([1.0, 2.0], dtype=torch.float64)
    if place is not None:
        rows, columns = (slice_of(n, i, k) for n, i, k in zip((ROWS, COLUMNS), place, meshes, strict=True))
        x, points, latitudes = x[:, :, rows, columns], points[rows, columns], latitudes[rows]
    return (x, *[t, x[:, :1] * 2, latitudes, points][:count])


def slice_of(length, index, count):
    return slice(length * index // count, length * (index + 1) // count)


def outcomes(session, names):
    """What is said of each network that is refused; the largest error of each that is not."""
    mesh, found = session.mesh, {}
    place, meshes = (mesh.lat.rank, mesh.lon.rank), (mesh.lat.size, mesh.lon.size)
    rows, columns = (slice_of(n, i, k) for n, i, k in zip((ROWS, COLUMNS), place, meshes, strict=True))
    for name, function, count in names:
        whole = partition(net_of(function), Mesh())
        mine = partition(net_of(function), mesh)
        errors = []
        try:
            for _ in range(2):
                results = []
                for net, given in ((whole, inputs(count)), (mine, inputs(count, place, meshes))):
                    torch.manual_seed(5)
                    results.append(net(*given))
                expected, got = results[0][..., rows, columns], results[1]
                errors.append((got - expected).abs().max())
                expected.square().sum().backward(), got.square().sum().backward()
            found[name] = torch.stack(errors).max().item()
        except UserError as error:
            found[name] = str(error)
    return found
