"""What a forward makes of the shape at hand: refused where ranks would compute other values, else as in one process."""

import math
import random
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parallel.ranks import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ensemble_ml.distributed import Mesh
from ensemble_ml.distributed.echo import Traffic, echo_mesh
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from examples.stock_layers.layers import partition

ROWS, COLUMNS = 16, 24


class Net(nn.Module):
    """A function in the way that people write them, between two convolutions."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(1, 3, 3, padding=1)
        self.norm, self.down, self.up = nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
        self.drop, self.mlp, self.enlarge = nn.Dropout(0.3), nn.Linear(2, 4), nn.ConvTranspose2d(4, 4, 2, 2)
        self.gate = nn.Parameter(torch.zeros(1))
        self.rows, self.columns = nn.Parameter(torch.zeros(ROWS)), nn.Parameter(torch.zeros(COLUMNS))
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


def marked(_, x):
    rows = x.new_zeros(x.shape[2])
    rows[0] = 1
    return x + rows[:, None]


def mesh_of(x):
    rows, columns = torch.meshgrid(torch.arange(x.size(2)), torch.arange(x.size(3)), indexing="ij")
    return torch.stack([rows, columns]).to(x.dtype)


PART = "one rank's shard of the field fails where the whole does not ("
REFUSED = {
    "mul() ": {
        "a number": lambda _, x: x * x.shape[2],
        "all points": lambda _, x: x * x.numel(),
        "a share": lambda _, x: x * (1 / math.sqrt(x.shape[-1] * x.shape[-2])),
        "rows by len": lambda _, x: x * len(x[0, 0]),
        "a factor on a condition": lambda _, x: x * (2 if x.shape[2] > 12 else 3),
    },
    "div() ": {
        "by rows": lambda _, x: x / x.shape[2],
        "by points": lambda _, x: x.sum(1, keepdim=True).expand(x.shape) / (x.shape[2] * x.shape[3]),
    },
    "linspace() ": {
        "cosine of latitude": lambda _, x: x * torch.cos(spaced(x))[:, None],
        "a channel": lambda _, x: torch.cat([x, spaced(x)[None, None, :, None].expand(len(x), 1, *x.shape[2:])], 1),
        "behind a gate that is shut": lambda net, x: x + net.gate * spaced(x)[:, None],
        "beside large values": lambda _, x: x + 1e-6 * (x * spaced(x)[:, None]),
        "made once and kept": cached,
        "taken away": lambda _, x: x - spaced(x)[:, None],
        "a mask": lambda _, x: torch.where(spaced(x)[:, None] > 0, x, 0),
    },
    "arange() ": {
        "rows": lambda _, x: x + torch.arange(x.shape[2])[:, None],
        "waves": lambda _, x: x + torch.sin(torch.arange(x.size(-2), dtype=x.dtype) / 10)[:, None],
        "a mesh": lambda _, x: torch.cat([x, mesh_of(x).expand(len(x), -1, -1, -1)], 1),
        "a mesh through a layer": lambda net, x: x + net.mlp(mesh_of(x).movedim(0, -1)).movedim(-1, 0),
    },
    "randn() ": {"noise": lambda _, x: x + torch.randn(x.shape, dtype=x.dtype)},
    "rand() ": {"noise in rows": lambda _, x: x + 0.1 * torch.rand(x.shape[2], 1, dtype=x.dtype)},
    "tensor() ": {"a number of a size": lambda _, x: x * torch.tensor(float(x.shape[2]))},
    "full() ": {"values of a size": lambda _, x: x + torch.full(x.shape, float(x.shape[2]), dtype=x.dtype)},
    "tril() ": {"a triangle": lambda _, x: x + torch.tril(torch.ones(x.shape[2:], dtype=x.dtype))},
    "__getitem__() ": {
        "weights by numpy": lambda _, x: x * torch.from_numpy(np.linspace(-1, 1, x.shape[2]))[:, None],
        "the first rows of weights": lambda net, x: x * (1 + net.rows[: x.shape[2], None]),
        "the first rows of a map": lambda net, x: x + net.map[..., : x.shape[2], : x.shape[3]],
        "the first rows of a mask": lambda net, x: x * net.mask[: x.shape[2], : x.shape[3]],
        "a row that is marked": marked,
    },
    PART: {
        "a map": lambda net, x: x + net.map,
        "weights": lambda net, x: x * net.rows[:, None],
        "a mask": lambda net, x: x.masked_fill(net.mask == 0, 0),
    },
    "what reaches layer second ": {
        "a norm on a condition": lambda net, x: net.norm(x) if x.shape[2] > 12 else x,
        "functions on a condition": lambda _, x: x.relu().mul(3) if x.shape[2] > 12 else x.mul(2),
    },
    "sum() ": {"means": lambda _, x: x - (x.sum((2, 3)) / (x.shape[2] * x.shape[3]))[..., None, None]},
    "bernoulli() ": {"a random mask": lambda _, x: x * torch.bernoulli(torch.full(x.shape, 0.5, dtype=x.dtype))},
    "dropout() ": {"dropout": lambda net, x: F.dropout(x)},
    "interpolate() ": {"bilinear": lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear")},
}
HARMLESS = {
    "zeros": lambda _, x: x + x.new_zeros(x.shape) + torch.zeros_like(x) + torch.zeros(x.shape[2], 1),
    "a channel of ones": lambda _, x: torch.cat([x, torch.ones(len(x), 1, *x.shape[2:], dtype=x.dtype)], 1),
    "a full field": lambda _, x: x * torch.full(x.shape, 2.0, dtype=x.dtype),
    "memory that is filled": lambda _, x: [y := torch.empty_like(x), y.copy_(x)][1],
    "memory by views": lambda _, x: [y := x.new_empty(x.shape), y[:, :2].copy_(x[:, 2:]), y[:, 2:].fill_(1), y][-1],
    "memory for several": lambda _, x: [y := x.new_empty(x.shape), y.__setitem__(slice(None), x)][0],
    "a view": lambda _, x: x.view(*x.shape[:2], x.size(2), x.size(3)).reshape(len(x), 2, 2, *x.shape[2:]).mean(1),
    "a bias": lambda net, x: x + net.mlp(torch.ones(2, dtype=x.dtype))[:, None, None].expand(-1, *x.shape[2:]),
    "nearest": lambda net, x: net.down(F.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3]))),
    "a unet": lambda net, x: (
        x + net.enlarge(net.drop(net.down(x)).relu(), output_size=x.shape[2:])[..., : x.shape[2], :]
    ),
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
    "a step of time with axes": lambda _, x, t: x * t[:, None, None, None].expand(-1, 4, 1, 1),
    "given points": lambda net, x, t, coordinates, latitudes, points: x + net.mlp(points).movedim(-1, 0),
}
OTHERS = {  # arguments beside the field
    "a step of time": 1,
    "a step of time with axes": 1,
    "given coordinates": 2,
    "given latitudes": 3,
    "given points": 4,
}
# Where longitude is whole on each rank, places and sizes along it are those of one process.
LONGITUDES = {"longitudes": lambda _, x: x * spaced(x, 3), "columns": lambda net, x: x / x.shape[3] + net.columns}


def net_of(function):
    torch.manual_seed(0)
    return Net(function).double()


def slices(mesh):
    """The rows and columns of a rank."""
    found = []
    for length, comm in ((ROWS, mesh.lat), (COLUMNS, mesh.lon)):
        found.append(slice(length * comm.rank // comm.size, length * (comm.rank + 1) // comm.size))
    return tuple(found)


def inputs(count, mesh):
    """A rank's part of the field and of `count` other arguments."""
    numbers, (rows, columns) = torch.Generator().manual_seed(1), slices(mesh)
    x = torch.randn(2, 4, ROWS, COLUMNS, dtype=torch.float64, generator=numbers)[:, :, rows, columns]
    points = torch.randn(ROWS, COLUMNS, 2, dtype=torch.float64, generator=numbers)[rows, columns]
    latitudes = torch.linspace(-1, 1, ROWS, dtype=torch.float64)[rows]
    t = torch.tensor([1.0, 2.0], dtype=torch.float64)
    return (x, *[t, x[:, :1] * 2, latitudes, points][:count])


def errors(session, functions):
    """The largest error of each network's results and weight gradients."""
    mesh, found = session.mesh, {}
    for name in functions:
        function, count = {**HARMLESS, **LONGITUDES}[name], OTHERS.get(name, 0)
        whole, mine = partition(net_of(function), Mesh()), partition(net_of(function), mesh)
        worst = 0.0
        for _ in range(2):  # the first pass is tried
            torch.manual_seed(5)
            expected = whole(*inputs(count, Mesh()))
            torch.manual_seed(5)
            got = mine(*inputs(count, mesh))
            worst = max(worst, (got - expected[..., *slices(mesh)]).abs().max().item())
            expected.square().sum().backward()
            got.square().sum().backward()
        for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
            if p.grad is not None:
                mesh.model.all_reduce(q.grad)
                worst = max(worst, ((p.grad - q.grad).abs().max() / p.grad.abs().max().clamp(min=1)).item())
        found[name] = worst
    return found


@pytest.mark.parametrize(
    ("lat", "lon"), [(2, 1), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((1, 2), (2, 2)))]
)
def test_harmless_networks_equal_one_process(lat, lon):
    names = [*HARMLESS, *(LONGITUDES if lon == 1 else {})]
    for found in run_ranks(errors, lat * lon, names, lat=lat, lon=lon):
        assert list(found) == names
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


def lone(net, lat=2, lon=1, rank=0):
    """A partitioned network of one rank; the trial asks no other."""
    return partition(net, echo_mesh(Topology(lat=lat, lon=lon, rank=rank), Traffic()))


def part_of(lat=2, lon=1):
    return torch.randn(2, 4, ROWS // lat, COLUMNS // lon, dtype=torch.float64)


@pytest.mark.parametrize(("lat", "lon", "rank"), [(2, 1, 0), (4, 1, 2), (2, 2, 3)])
@pytest.mark.parametrize(("text", "name"), [(text, name) for text, nets in REFUSED.items() for name in nets])
def test_networks_that_differ_are_refused(text, name, lat, lon, rank):
    with pytest.raises(UserError) as caught:
        lone(net_of(REFUSED[text][name]), lat, lon, rank)(part_of(lat, lon))
    assert str(caught.value).startswith(f"partition: {text}") and "\n" not in str(caught.value)
    assert "use a layer for it" in str(caught.value) or "as channels of the input" in str(caught.value)


class Large(nn.Module):
    """A function between layers that need even rows, on a field that is tried in small."""

    def __init__(self, function):
        super().__init__()
        self.function, self.conv, self.down = function, nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2)
        self.map, self.columns = nn.Parameter(torch.zeros(1, 2, 176, 360)), nn.Parameter(torch.zeros(360))

    def forward(self, x):
        return self.down(self.function(self, self.conv(x)))


LARGE = {
    "linspace() ": lambda _, x: x * spaced(x)[:, None],
    "mul() ": lambda _, x: x * (2 if x.shape[2] > 100 else 3),
    "cos() ": lambda _, x: x.sin() if x.shape[2] > 100 else x.cos(),
    "div() ": lambda net, x: (x + net.columns) / x.shape[2],
    PART: lambda net, x: x + net.map,
}


@pytest.mark.parametrize("text", LARGE)
def test_large_fields_are_tried_in_small_and_without_values(text):
    with pytest.raises(UserError, match=f"partition: {re.escape(text)}"):
        lone(Large(LARGE[text]))(torch.randn(1, 2, 88, 360))


@pytest.mark.parametrize(
    ("kind", "factor"),
    [*[(torch.float32, f) for f in (1e-6, 1e-5, 1e-4)], *[(torch.bfloat16, f) for f in (0.02, 0.03)]],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x + net.gate * spaced(x)[:, None],
        lambda net, x: x * (1 + net.gate * spaced(x)[:, None]),
        lambda net, x: x + net.mlp(net.gate * mesh_of(x).movedim(0, -1)).movedim(-1, 0),
        lambda net, x: torch.addcmul(x, net.gate, spaced(x)[:, None].to(x)),
        lambda net, x: x + net.gate.item() * spaced(x)[:, None],
    ],
)
def test_a_small_factor_hides_no_positions(kind, factor, function):
    net = net_of(function)
    net.gate.data.fill_(factor)
    with pytest.raises(UserError, match=r"partition: (linspace|arange)\(\) between the layers"):
        lone(net.to(kind))(part_of().to(kind))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_small_factors_and_numbers_that_are_the_same_everywhere_are_let_pass(kind, caplog):
    def function(net, x):
        alternating = (torch.arange(x.shape[2]).to(x) % 2)[:, None]
        rows = torch.tensor(float(x.shape[2])).to(x)
        return x * net.gate + alternating * net.gate + rows / rows

    net = net_of(function).to(kind)
    net.gate.data.fill_(1e-6)
    assert lone(net)(part_of().to(kind)).isfinite().all()
    assert not caplog.records


def test_large_networks_that_are_right_are_let_pass(caplog):
    net = lone(Large(lambda net, x: x * net.columns + x.new_zeros(x.shape)))
    assert net(torch.randn(1, 2, 88, 360)).shape == (1, 2, 44, 180)
    assert not caplog.records


class TwoGrids(nn.Module):
    """A network of a fine field and a coarse one, which keeps the sizes of the fields that it really computes."""

    def __init__(self, function, ratio):
        super().__init__()
        self.function, self.ratio, self.sizes = function, ratio, []
        self.fine, self.coarse = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.up, self.down = nn.Upsample(scale_factor=2), nn.MaxPool2d(2)

    def forward(self, x, y):
        y = self.coarse(y)
        if not isinstance(x, FakeTensor):
            self.sizes.append(x[0, 0].numel())
        if self.ratio == 2:
            return self.down(self.function(self.fine(x) + self.up(y)))
        return self.function(self.fine(x)), y


def test_fields_of_two_resolutions_are_tried_in_small(caplog):
    x, y = torch.randn(1, 2, 96, 192), torch.randn(1, 2, 48, 96)
    sizes = []
    net = TwoGrids(torch.relu, 2)
    net.__dict__["sizes"] = Shared(sizes)
    assert lone(net)(x, y).shape == (1, 2, 48, 96)
    assert not caplog.records
    assert len(sizes) == 4 and max(sizes[:-1]) < 1000  # three passes of the trial, and the job's
    with pytest.raises(UserError, match=r"partition: linspace\(\) "):
        lone(TwoGrids(lambda x: x * spaced(x)[:, None], 2))(x, y)


class Shared:
    """A list that copies of a module have in common."""

    def __init__(self, ones):
        self.append = ones.append

    def __deepcopy__(self, _):
        return self


def test_large_fields_whose_sizes_have_no_ratio_are_tried_without_values(caplog):
    x, y = torch.randn(1, 2, 96, 192), torch.randn(1, 2, 60, 192)
    sizes = []
    net = TwoGrids(torch.relu, None)
    net.__dict__["sizes"] = Shared(sizes)
    lone(net)(x, y)
    assert sizes == [96 * 192]
    assert "(fields of 60 and 96 points along an axis cannot be made smaller together)" in caplog.text
    with pytest.raises(UserError, match=r"partition: mul\(\) "):
        lone(TwoGrids(lambda x: x * x.shape[2], None))(x, y)


class Mixed(nn.Module):
    """A network of many layers and functions, none of which needs a place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.down, self.up = nn.Conv2d(8, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 3, 2, 1, 1)
        self.wide, self.last = nn.Linear(8, 8), nn.Conv2d(16, 2, 1)
        self.linear = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x):
        x = self.drop(self.norm(self.first(x))).relu_()
        coarse = F.gelu(self.down(x))
        attention = torch.einsum("bcyx,cd->bdyx", coarse, self.wide.weight).softmax(1)
        points = self.wide(F.layer_norm(coarse.permute(0, 2, 3, 1), (8,))).permute(0, 3, 1, 2)
        x = self.up(coarse * attention + points, output_size=x.shape[2:]) + self.linear(coarse)
        return self.last(torch.cat([x, F.normalize(x)], 1))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_no_difference(kind, caplog):
    net = lone(Mixed().to(kind), 2, 2)
    assert net(part_of(2, 2).to(kind)).isfinite().all()
    assert not caplog.records


def test_autocast_is_no_difference(caplog):
    with torch.autocast("cpu"):
        assert lone(Mixed(), 2, 2)(part_of(2, 2).float()).isfinite().all()
    assert not caplog.records


def test_the_trial_leaves_no_trace():
    net = lone(Mixed())
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random_states = []
    for training in (False, True, True):  # the first and the second pass are tried
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        net.train(training)(part_of().float())
        random_states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
        if not training:
            assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert random_states[1] == random_states[2]
    assert net.norm.num_batches_tracked == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_copies_share_their_weights():
    places = []
    net = net_of(lambda net, x: [places.append(net.map.data_ptr()), x + net.mlp.weight.sum()][-1])
    lone(net)(part_of())
    assert len(places) == 4 and len(set(places[:3])) == 1 and places[3] == net.map.data_ptr() != places[0]


@pytest.mark.slow
def test_a_trial_is_not_compiled():
    compiling = []
    net = nn.Sequential(nn.Conv2d(4, 4, 1), Applied(lambda x: [compiling.append(torch.compiler.is_compiling()), x][1]))
    torch.compile(lone(net), backend="eager")(part_of().float())
    assert compiling[:3] == [False] * 3


def test_hooks_see_no_trial():
    net, calls = net_of(lambda net, x: net.norm(x)), []
    for name in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        getattr(net.norm, f"register_{name}_hook")(lambda *_, name=name: calls.append(name))
    net.register_forward_pre_hook(lambda *_: calls.append("model"))
    lone(net)(part_of()).sum().backward()
    assert calls == ["model", "forward_pre", "forward", "full_backward_pre", "full_backward"]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_make_are_made_in_a_trial(caplog):
    net = net_of(lambda net, x: x + net.mlp(torch.ones(2, dtype=x.dtype))[:, None, None])
    nn.utils.weight_norm(net.mlp)
    assert lone(net)(part_of()).shape == (2, 3, 8, 24)
    assert not caplog.records


def test_activations_that_a_model_keeps_are_no_obstacle(caplog):
    def function(net, x):
        net.last = [x * 2]
        return net.last[0] if net.training else x * spaced(x)[:, None]

    net = lone(net_of(function))
    net(part_of()).sum().backward()
    kept = net.last[0]
    with pytest.raises(UserError, match=r"partition: linspace\(\) "):
        net.eval()(part_of())
    assert net.last[0] is kept and not caplog.records


def test_weights_of_a_layer_that_the_forward_uses_too_stay_as_they_were():
    net = net_of(lambda net, x: x * net.tied[:, None, None])
    net.tied = net.first.bias
    weight = net.tied.detach().clone()
    lone(net)(part_of())
    assert net.first.bias is net.tied and torch.equal(weight, net.tied)


@pytest.mark.parametrize("training", [True, False])
def test_the_other_mode_is_tried_too(training):
    net = lone(net_of(lambda net, x: x * spaced(x)[:, None] if net.training is not training else x))
    net.train(training)(part_of())
    with pytest.raises(UserError, match=r"partition: linspace\(\) "):
        net.train(not training)(part_of())


def test_a_network_that_cannot_be_tried_is_let_pass_with_a_warning(caplog):
    net = net_of(lambda _, x: x.relu())
    net.lock = threading.Lock()
    assert lone(net)(part_of()).shape == (2, 3, 8, 24)
    assert "the model could not be tried on a shard of a field (cannot pickle" in caplog.text


def test_a_rank_that_has_no_sample_tries_nothing(caplog):
    assert lone(net_of(lambda _, x: x.relu()))(part_of()[:0]).shape == (0, 3, 8, 24)
    assert not caplog.records


def test_volumes():
    """(B, C, Z, Y, X), whose split axes are the last two."""
    mesh = echo_mesh(Topology(lat=2, lon=2), Traffic())
    for function, text in ((lambda x: x / x.shape[2], ""), (lambda x: x / x.shape[3], "div() ")):
        net = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), Applied(function), nn.Conv3d(2, 2, 3, padding=1))
        net = partition(net, mesh, axes=(3, 4))
        if not text:
            assert net(torch.randn(1, 2, 3, 8, 8)).shape == (1, 2, 3, 8, 8)
            continue
        with pytest.raises(UserError, match=re.escape(text)):
            net(torch.randn(1, 2, 3, 8, 8))


class Applied(nn.Module):
    """A function as a module of somebody's own."""

    def __init__(self, function):
        super().__init__()
        self.function, self.inner = function, nn.Identity()

    def forward(self, x):
        return self.inner(self.function(x))


def test_alternating_rows_are_right_where_parts_begin_with_even_ones():
    for rows, refused in ((8, False), (7, True), (300, False), (301, True)):
        net = lone(nn.Sequential(nn.Conv2d(1, 1, 1), Applied(lambda x: x * (torch.arange(x.shape[2]) % 2)[:, None])))
        x = torch.randn(1, 1, rows, 64)
        if refused:
            with pytest.raises(UserError, match=r"partition: \S+\(\) between the layers"):
                net(x)
        else:
            assert net(x).shape == x.shape


def test_a_network_that_knows_its_place_is_let_pass_on_demand():
    mesh = echo_mesh(Topology(lat=2, rank=1), Traffic())
    net = net_of(lambda _, x: x * torch.linspace(-1, 1, ROWS, dtype=x.dtype)[ROWS // 2 :, None])
    with pytest.raises(UserError, match=r"trial=False"):
        partition(net_of(lambda _, x: x * (torch.arange(x.shape[2]) + 8)[:, None]), mesh)(part_of())
    assert partition(net, mesh, trial=False)(part_of()).shape == (2, 3, 8, 24)


def test_arguments_without_a_field_are_warned_of(caplog):
    net = nn.Sequential(Unpacked(), nn.Conv2d(1, 1, 1))
    lone(net)(SimpleNamespace(field=torch.randn(1, 1, 8, 8)))
    assert "(none of its arguments has the axes of a field)" in caplog.text


class Unpacked(nn.Module):
    """A module that takes its field out of an object."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, batch):
        return self.inner(batch.field)
