"""Stock layers over several ranks against one process: output, input and weight gradients, float64."""

import copy
from functools import cache
from itertools import pairwise, product

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.simulated import run_threads
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from ensemble_ml.distributed import Mesh
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.errors import UserError
from examples.stock_layers.layers import partition


def convolutions():
    """Kernel, stride, dilation, padding, padding mode, groups."""
    for k, mode in product(range(1, 8), ("zeros", "replicate", "circular")):
        for s, d, g in ((1, 1, 1), (2, 1, 2), (1, 2, 1)):
            reach = d * (k - 1)
            for p in {reach // 2, 0, min(1, reach)}:
                if k > 3 and (d == 2 or p == 1):
                    continue  # as thick as the parts of this test
                yield (
                    f"k{k} s{s} d{d} p{p} {mode} g{g}",
                    nn.Conv3d(2, 4, k_(k), s_(s), p_(p), s_(d), g, padding_mode=mode),
                )


def k_(k):
    return k, k, min(k, 2)


def s_(s):
    return s, s, 1


def p_(p):
    return p, p, 0


def others():
    for k, s, p, o in (
        (2, 2, 0, 0),
        (3, 2, 1, 1),
        (4, 2, 1, 0),
        (3, 1, 1, 0),
        (5, 2, 2, 1),
        (1, 2, 0, 0),
        (3, 3, 0, 0),
    ):
        yield f"transposed k{k} s{s} p{p} o{o}", nn.ConvTranspose3d(2, 3, (k, k, 1), s_(s), p_(p), (o, o, 0))
    yield "same", nn.Conv3d(2, 3, (4, 3, 2), padding="same")
    yield "two dimensions", Flat(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"))
    for kind in (nn.MaxPool3d, nn.AvgPool3d):
        yield f"{kind.__name__} 2", kind((2, 2, 1))
        yield f"{kind.__name__} 3 by 2", kind((3, 3, 1), (2, 2, 1))
        yield f"{kind.__name__} 3 by 1", kind((3, 2, 1), 1)
    yield "nearest", nn.Upsample(scale_factor=(2, 2, 1))
    yield "trilinear", nn.Upsample(scale_factor=(2, 3, 1), mode="trilinear")
    yield "group norm", nn.GroupNorm(2, 2)
    yield "one group", nn.GroupNorm(1, 2)
    yield "batch norm", nn.BatchNorm3d(2)
    yield "batch norm, all batches alike", nn.BatchNorm3d(2, momentum=None)
    yield "instance norm", nn.InstanceNorm3d(2, affine=True, track_running_stats=True)
    yield "evaluated batch norm", nn.BatchNorm3d(2).eval()
    yield "dropout", nn.Dropout(0.3)
    yield "network", nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular", bias=False), nn.GroupNorm(2, 4), nn.SiLU(),
        nn.AvgPool3d((2, 2, 1)), nn.Conv3d(4, 6, 3, padding=1), nn.ReLU(), nn.Dropout(0.2),
        nn.ConvTranspose3d(6, 3, (2, 2, 1), (2, 2, 1)), nn.Conv3d(3, 2, 1),
    )  # fmt: skip


class Flat(nn.Module):
    """A 2D layer on the first plane."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x[..., 0])


def cases(kind):
    torch.manual_seed(1)
    made = dict(convolutions() if kind == "convolutions" else others())
    return {name: layer.double() for name, layer in made.items()}


def cut(x, lat, lon, mesh):
    return x[:, :, slice(*lat[mesh.lat.rank : mesh.lat.rank + 2]), slice(*lon[mesh.lon.rank : mesh.lon.rank + 2])]


def ratio(layer, axis):
    """Points that come out for one that goes in."""
    if isinstance(layer, Flat):
        return 1
    if isinstance(layer, nn.Upsample):
        return int(layer.scale_factor[axis - 2])
    stride = getattr(layer, "stride", 1)
    stride = stride if isinstance(stride, int) else stride[axis - 2]
    return stride if isinstance(layer, nn.ConvTranspose3d) else 1 / stride


def own_part(layer, whole, lat, lon, mesh, like):
    """This rank's part of an output; the last part has what padding adds or takes."""
    places = []
    for axis, bounds, comm in ((2, lat, mesh.lat), (3, lon, mesh.lon)):
        start = round(bounds[comm.rank] * ratio(layer, axis))
        places.append(slice(start, start + like.shape[axis]))
        if comm.rank == comm.size - 1:
            assert start + like.shape[axis] == whole.shape[axis]
        else:
            assert start + like.shape[axis] == round(bounds[comm.rank + 1] * ratio(layer, axis))
    return whole[:, :, places[0], places[1]]


@cache
def wholes(kind, layouts):
    """Each layer with what one process finds, by its name and layout: once, for all ranks."""
    found = {}
    for lat, lon in layouts:
        x = torch.randn(2, 2, lat[-1], lon[-1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for name, layer in cases(kind).items():
            whole, given = partition(copy.deepcopy(layer), Mesh()), x.clone().requires_grad_()
            torch.manual_seed(3)
            expected = whole(given)
            weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
            (expected * weight).sum().backward()
            found[f"{name} on {lat} x {lon}"] = layer, lat, lon, given, expected.detach(), weight, whole
    return found


def compare(session, wholes, overlap):
    mesh, worst = session.mesh, {}
    for name, (layer, lat, lon, given, expected, weight, whole) in wholes.items():
        mine = partition(copy.deepcopy(layer), mesh, overlap=Overlap(overlap))
        assert list(whole.state_dict()) == list(mine.state_dict())
        b = cut(given.detach(), lat, lon, mesh).clone().requires_grad_()
        torch.manual_seed(3)
        got = mine(b)
        errors = [(got - own_part(layer, expected, lat, lon, mesh, got)).abs().max()]
        (got * own_part(layer, weight, lat, lon, mesh, got)).sum().backward()
        errors.append((b.grad - cut(given.grad, lat, lon, mesh)).abs().max())
        for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
            mesh.model.all_reduce(q.grad)
            errors.append((p.grad - q.grad).abs().max() / p.grad.abs().max())
        for p, q in zip(whole.buffers(), mine.buffers(), strict=True):
            errors.append((p.double() - q.double()).abs().max())
        worst[name] = torch.stack(errors).max().item()
    return worst


LAYOUTS = {
    (1, 2): (((0, 12), (0, 8, 16)), ((0, 9), (0, 12, 20))),
    (2, 1): (((0, 8, 16), (0, 12)), ((0, 12, 19), (0, 10))),
    (2, 2): (((0, 8, 17), (0, 8, 20)),),
    (3, 1): (((0, 8, 16, 24), (0, 12)), ((0, 12, 20, 27), (0, 12))),
    (4, 2): (((0, 8, 16, 24, 33), (0, 8, 18)),),
}


@pytest.mark.parametrize(("kind", "overlap"), [("convolutions", False), ("convolutions", True), ("others", False)])
@pytest.mark.parametrize("mesh", [m if m[0] * m[1] < 3 else pytest.param(m, marks=pytest.mark.slow) for m in LAYOUTS])
def test_layers_equal_one_process(mesh, kind, overlap):
    lat, lon = mesh
    job = wholes(kind, LAYOUTS[mesh]), overlap
    if kind == "convolutions" and mesh != (2, 2):
        found = run_threads(compare, *job, lat=lat, lon=lon)
    else:  # dropout draws from the process's own random numbers
        found = run_ranks(compare, lat * lon, *job, lat=lat, lon=lon)
    for worst in found:
        assert len(worst) == len(cases(kind)) * len(LAYOUTS[mesh])
        assert {k: v for k, v in worst.items() if not v < 1e-12} == {}


NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(3),
    "batch norm that keeps nothing": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "group norm": lambda: nn.GroupNorm(1, 3),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True),
    "instance norm that keeps statistics": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
}


def sharing_the_batch(session, counts):
    """Largest errors of norms where data ranks have `counts` samples each: output, gradients, what they keep."""
    mesh, found = session.mesh, {}
    own_rows = slice(8 * mesh.lat.rank // mesh.lat.size, 8 * (mesh.lat.rank + 1) // mesh.lat.size)
    data = mesh.topology.place.data
    own = slice(sum(counts[:data]), sum(counts[: data + 1]))
    random = torch.Generator().manual_seed(6)
    # Every sample has a mean and a spread of its own.
    x = torch.randn(sum(counts), 3, 8, 6, dtype=torch.float64, generator=random)
    x = x * torch.arange(1, len(x) + 1).view(-1, 1, 1, 1) + x[:, :, :1, :1]
    weight = torch.randn(x.shape, dtype=torch.float64, generator=random)
    for name, make in NORMS.items():
        whole = make().double()
        mine = partition(copy.deepcopy(whole), mesh)
        a, b = x.clone().requires_grad_(), x[own, :, own_rows].clone().requires_grad_()
        errors = []
        for _ in range(2):
            expected, got = whole(a), mine(b)
            (expected * weight).sum().backward()
            (got * weight[own, :, own_rows]).sum().backward()
            errors.append(got - expected[own, :, own_rows])
        errors.append(b.grad - a.grad[own, :, own_rows])
        for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
            mesh.model.all_reduce(q.grad)
            errors.append((p.grad - q.grad) / p.grad.abs().max())
        errors += [p.double() - q.double() for p, q in zip(whole.buffers(), mine.buffers(), strict=True)]
        found[name] = torch.cat([e.flatten() for e in errors]).abs().max().item()
    return found


@pytest.mark.parametrize(("lat", "counts"), [(1, (2, 2)), (1, (3, 1)), (2, (2, 2)), (2, (2, 0)), (1, (0, 0, 2))])
def test_norms_over_a_batch_that_is_shared_out(lat, counts):
    for found in run_ranks(sharing_the_batch, lat * len(counts), counts, lat=lat, data=len(counts)):
        assert len(found) == len(NORMS)
        assert {k: v for k, v in found.items() if not v < 1e-12} == {}


def kinds_of(session):
    made = nn.BatchNorm3d(2), nn.InstanceNorm3d(2), nn.GroupNorm(1, 2), nn.Conv3d(2, 2, 3), nn.Dropout()
    return [type(partition(layer, session.mesh)).__name__ for layer in made]


def test_data_ranks_change_what_depends_on_the_batch():
    names = ["PartBatchNorm3d", "PartInstanceNorm3d", "GroupNorm", "Conv3d", "PartDropout"]
    assert run_ranks(kinds_of, 2, data=2) == [names] * 2


def checkpointed(session):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Dropout(0.3), nn.Conv3d(3, 2, 3, padding=1)
    )
    net = partition(net.double(), session.mesh)
    x = torch.randn(1, 2, 6, 8, 3, dtype=torch.float64)
    grads = []
    for again in (False, True):
        net.zero_grad()
        torch.manual_seed(5)
        (checkpoint(net, x, use_reentrant=False) if again else net(x)).square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_activation_checkpointing():
    assert run_ranks(checkpointed, 2, lat=2) == [True, True]


def test_dropout_drops_its_share():
    layer = partition(nn.Dropout(0.3), Mesh())
    x = layer(torch.ones(4, 8, 16, 32))
    assert (x == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert x.mean().item() == pytest.approx(1, abs=0.02) and not torch.equal(x, layer(torch.ones_like(x)))
    assert layer.eval()(x) is x
    x = torch.ones(2, 3, 4, 4, requires_grad=True)
    y = partition(nn.Dropout(1), Mesh())(x)
    y.sum().backward()
    assert not y.any() and not x.grad.any()  # NaN would be any


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Sequential(nn.ReLU(), nn.LSTM(2, 2)), r"layer 1 \(LSTM\): cannot be shared out"),
        (nn.Conv3d(2, 2, 3, padding=1, padding_mode="reflect"), r"layer model \(Conv3d\): padding_mode=reflect"),
        (nn.Sequential(nn.MaxPool3d(3, 2, 1)), r"layer 0 \(MaxPool3d\): padding=1 cannot be shared out"),
        (nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True), "align_corners=True cannot be shared out"),
        (nn.LayerNorm(3), r"layer model \(LayerNorm\): cannot"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), r"layer 0 \(MultiheadAttention\): cannot be shared out"),
        (weight_norm(nn.Conv3d(2, 2, 3)), r"\(ParametrizedConv3d\): its weights are parametrised"),
        (type("Own", (nn.Conv3d,), {})(2, 2, 3), r"layer model \(Own\): cannot be shared out"),
    ],
)
def test_layers_that_cannot_be_shared_out(layer, text):
    with pytest.raises(UserError, match=text):
        partition(layer, Mesh())


def half_norm(session):
    whole = torch.randn(1, 4, 8, 64, 128, generator=torch.Generator().manual_seed(0)).add(20)
    part = whole.chunk(2, 3)[session.topology.place.lat].half()
    layer = partition(nn.GroupNorm(1, 4, dtype=torch.float16), session.mesh, axes=(3, 4))
    return layer(part).float(), nn.GroupNorm(1, 4)(whole).detach().chunk(2, 3)[session.topology.place.lat]


def test_norms_of_half_precision_count_beyond_its_range():
    for found, wanted in run_ranks(half_norm, 2, lat=2):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=1e-2)


def sized(session):
    """Largest error of transposed convolutions that are told their size, and what is said of wrong sizes."""
    torch.manual_seed(0)
    x, own = torch.randn(1, 2, 8, 6, dtype=torch.float64), slice(*((0, 4), (4, 8))[session.mesh.lat.rank])
    errors = []
    for kernel, padding, rows, columns in ((3, 1, 16, 11), (3, 1, 15, 12), (4, 1, 16, 13), (2, 0, 17, 12)):
        layer = nn.ConvTranspose2d(2, 3, kernel, 2, padding).double()
        mine, size = partition(copy.deepcopy(layer), session.mesh), torch.Size((rows, columns))
        part = layer(x, size)[:, :, slice(0, 8) if own.start == 0 else slice(8, None)]
        for given in (part.shape[2:], list(part.shape)):
            errors.append((mine(x[:, :, own], output_size=given) - part).abs().max())
    said = []
    for wrong in ((19, 12), (16,)):
        with pytest.raises(UserError) as caught:
            mine(x[:, :, own], wrong)
        said.append(str(caught.value))
    return torch.stack(errors).max().item(), said


def test_transposed_convolutions_of_a_given_size():
    for rank, (error, said) in enumerate(run_ranks(sized, 2, lat=2)):
        assert error < 1e-12
        range_ = "8 to 9" if rank else "8 to 8"
        assert said == [
            f"ConvTranspose2d output_size=(19, 12): this rank's shard of axis 2 can have {range_} points",
            "ConvTranspose2d output_size=(16,): 2 or 4 numbers are wanted",
        ]


UNBATCHED = [
    (nn.Conv2d(3, 2, 3, padding=1), (3, 8, 8)),
    (nn.Conv3d(3, 2, 3, padding=1), (3, 4, 8, 8)),
    (nn.ConvTranspose2d(3, 2, 2, 2), (3, 8, 8)),
    (nn.MaxPool2d(2), (3, 8, 8)),
    (nn.AvgPool3d(2), (3, 4, 8, 8)),
    (nn.Upsample(scale_factor=2), (3, 8, 8)),
    (nn.GroupNorm(1, 3), (2, 3, 8)),
    (nn.BatchNorm2d(3), (3, 8, 8)),
    (nn.InstanceNorm2d(3), (3, 8, 8)),
    (nn.InstanceNorm3d(3), (3, 4, 8, 8)),
]


def unbatched(session):
    said = []
    for layer, shape in UNBATCHED:
        with pytest.raises(UserError) as caught:
            partition(copy.deepcopy(layer), session.mesh)(torch.zeros(shape))
        said.append(str(caught.value))
    return said


def test_fields_without_a_batch():
    for said in run_ranks(unbatched, 2, lat=2):
        assert said[0] == (
            "Conv2d: a tensor of 3 axes, (3, 8, 8), whose axes (2, 3) are shared out; over several ranks it takes 4"
            " axes, batch and channels first"
        )
        for (layer, shape), text in zip(UNBATCHED, said, strict=True):
            assert text.startswith(f"{type(layer).__name__}: a tensor of {len(shape)} axes")


def odd(session):
    layer = partition(nn.Conv2d(1, 1, 2, stride=2), session.mesh)
    layer(torch.zeros(1, 1, 5, 4))


def test_a_part_that_is_no_multiple_of_the_stride():
    ends = run_ranks(odd, 2, lat=2, statuses=True, silence=2)
    assert "axis 2 of rank 0 of 2 has 5 points, not a multiple of the stride 2" in ends[0][2]


def thin(session):
    """What is said of a last part that is thinner than a kernel; the first rank has no part in it."""
    said = []
    for layer in (nn.Conv2d(1, 1, 3, padding="valid"), nn.Conv2d(1, 1, 4, 2, dilation=2, padding=2), nn.MaxPool2d(3)):
        if session.mesh.lat.rank:
            with pytest.raises(UserError) as caught:
                partition(layer, session.mesh)(torch.zeros(1, 1, 2, 8))
            said.append(str(caught.value))
    return said


def test_a_last_part_thinner_than_the_kernel():
    assert run_ranks(thin, 2, lat=2)[1] == [
        f"partition: axis 2 of rank 1 of 2 has 2 points, fewer than the {n} of a kernel; split this axis over fewer"
        " ranks (parallel.lat, parallel.lon)"
        for n in (3, 7, 3)
    ]


def test_bounds_of_this_test():
    for layouts in LAYOUTS.values():
        for lat, lon in layouts:
            assert all(b % 4 == 0 for b in (*lat[:-1], *lon[:-1]))
            assert all(b > a for bounds in (lat, lon) for a, b in pairwise(bounds))
