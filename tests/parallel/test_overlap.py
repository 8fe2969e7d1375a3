"""Convolutions that compute while their halo travels: the choice, and what travels meanwhile."""

from types import SimpleNamespace

import torch
from parallel.ranks import run_ranks

from ensemble_ml.distributed import overlap
from ensemble_ml.distributed.halo import Across, Side
from ensemble_ml.distributed.overlap import Overlap, Window, choose_overlap, halo_conv
from ensemble_ml.models.padding import Beyond, EdgeRule


class Watched:
    """A communicator that notes when an exchange is posted and waited for."""

    def __init__(self, inner, events):
        self._inner, self._events = inner, events

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_to_all_single(self, *args, **settings):
        self._events.append("post")
        pending, events = self._inner.all_to_all_single(*args, **settings), self._events

        class Pending:
            def wait(self):
                events.append("wait")
                pending.wait()

        return Pending()


def order(session, overlap, poles=False, cropped=False):
    events = []
    x = torch.randn(1, 2, 6, 8, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, 1, dtype=torch.float64, requires_grad=True)
    mirror = EdgeRule(Beyond.MIRROR)
    rows = Side(2, 1, 1, right_last=-1 if cropped else None, comm=Watched(session.mesh.lat, events))
    columns, across = None, None
    if poles:
        rows = Side(2, 1, 1, first=mirror, last=mirror)
        columns = Side(3, 1, 1, periodic=True, comm=Watched(session.mesh.lon, events))
        across = Across(((0, 8), (8, 16), (16, 24)))
    window = Window((1, 1, 1), (0, 0, 0), (1, 1, 1))

    class Convolution(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._schema.name in ("aten::convolution", "aten::convolution_backward"):
                whole = function._schema.name.endswith("backward") or args[0].shape[2] > 3
                events.append("compute" if whole else "edge")
            return function(*args, **(kwargs or {}))

    with Convolution():
        halo_conv(x, weight, None, window, rows, columns, across, overlap=overlap).square().sum().backward()
    return events


def test_the_bulk_is_computed_while_strips_travel():
    for events in run_ranks(order, 2, True, lat=2):
        forward = ["post", "compute", "wait", "edge"]  # each of two ranks has one neighbour
        assert events == [*forward, "compute", "post", "compute", "wait"]  # input, then weights under way
    for events in run_ranks(order, 2, False, lat=2):
        assert events == ["post", "wait", "compute", "compute", "post", "wait"]


def test_where_one_rank_cuts_off_all_take_the_same_way():
    """Else one would wait for its halo while another waits for a bucket of gradients."""
    for events in run_ranks(order, 2, True, False, True, lat=2):
        assert events == ["post", "wait", "compute", "compute", "post", "wait"]


def test_rows_from_across_the_poles_travel_with_the_columns():
    for events in run_ranks(order, 3, True, True, lon=3):
        assert events == ["post", "wait", "compute", "compute", "post", "compute", "wait"]


def lowered(session, dtype):
    """Types of a convolution under autocast without and with overlap, and their largest difference."""
    random = torch.Generator().manual_seed(session.mesh.lat.rank)
    x = torch.randn(1, 2, 6, 8, dtype=dtype, generator=random)
    weight = torch.randn(2, 2, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(9))
    window = Window((1, 1), (0, 0), (1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        one, other = (
            halo_conv(x, weight, None, window, Side(2, 1, 1, comm=session.mesh.lat), None, overlap=overlap)
            for overlap in (False, True)
        )
    return one.dtype, other.dtype, (one - other).abs().max().item()


def test_autocast_leaves_float64_alone():
    for one, other, error in run_ranks(lowered, 2, torch.float64, lat=2):
        assert one == other == torch.float64 and error < 1e-12
    for one, other, error in run_ranks(lowered, 2, torch.float32, lat=2):
        assert one == other == torch.bfloat16 and error < 0.2


def chosen(session, slow):
    """Choose by a clock that steps alone let pass: 2 s, and on the second rank 3 s in the slow way."""
    switch, seen, clock = Overlap(), [], [0.0]
    overlap.time = SimpleNamespace(perf_counter=lambda: clock[0])

    def step():
        seen.append(switch.on)
        clock[0] += 2.0 + session.topology.rank * (switch.on == slow)

    found = choose_overlap(switch, step, session.mesh.world)
    return switch.on, found, seen


def test_the_faster_way_is_taken_by_all_ranks():
    """The second rank alone is slower in one way, and decides for both."""
    for slow in (True, False):
        found = {"on" if slow else "off": 3.0, "off" if slow else "on": 2.0}
        assert run_ranks(chosen, 2, slow, lat=2) == [(not slow, found, [False, True] * 4)] * 2
