"""The halo exchange against padding of the whole field in one process: values and gradients, float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from parallel.ranks import run_ranks
from parallel.simulated import run_threads
from torch.nn import functional as F

from benchmarks.spatial.exactness import serial_padding
from ensemble_ml.distributed.halo import Across, Filling, Side, halo
from ensemble_ml.errors import UserError
from ensemble_ml.models.padding import Beyond, EdgeRule

RULES = {
    "zero": (EdgeRule(Beyond.ZERO), EdgeRule(Beyond.ZERO)),
    "replicate": (EdgeRule(Beyond.REPLICATE), EdgeRule(Beyond.REPLICATE)),
    "cross": (EdgeRule(Beyond.MIRROR, 0), EdgeRule(Beyond.MIRROR, 1)),
    "mixed": (EdgeRule(Beyond.MIRROR, 1), EdgeRule(Beyond.REPLICATE)),
}


def field(rows, columns):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, rows, columns, 2, dtype=torch.float64, generator=generator)
    sign = torch.tensor([[1.0, -1], [-1, 1], [1, 1]], dtype=torch.float64)
    return x, sign, torch.randn(3, 2, dtype=torch.float64, generator=generator)


def one_case(mesh, lat, lon, widths, rules, wraps, last):
    """Largest errors of this rank's part: values, and gradient against a fixed random adjoint."""
    x, sign, offset = field(lat[-1], lon[-1])
    rows, columns = (slice(*bounds[c.rank : c.rank + 2]) for bounds, c in ((lat, mesh.lat), (lon, mesh.lon)))
    own = (
        x[:, :, rows, columns]
        .clone()
        .contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    )
    own.requires_grad_()
    top, bottom, left, right = widths
    side_lat = Side(2, top, bottom, None, False, *rules, mesh.lat)
    replicate = EdgeRule(Beyond.REPLICATE)
    side_lon = Side(3, left, right, None, wraps, replicate, replicate, mesh.lon)
    across = Across(tuple(pairwise(lon)), sign, offset)
    found = halo(own, side_lat, side_lon, across)

    whole = x.clone().requires_grad_()
    padded = serial_padding(whole, widths, rules, "circular" if wraps else "replicate", sign, offset)
    part = (slice(rows.start, rows.stop + top + bottom), slice(columns.start, columns.stop + left + right))
    values = (found - padded[:, :, part[0], part[1]]).abs().max().item()

    # Every rank takes the same adjoint of its own padded part: the whole's gradient is that of the sum over ranks.
    def adjoint(shape, rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    found.backward(adjoint(found.shape, mesh.topology.rank))
    total = torch.zeros(())
    for i in range(len(lat) - 1):
        for j in range(len(lon) - 1):
            piece = padded[:, :, lat[i] : lat[i + 1] + top + bottom, lon[j] : lon[j + 1] + left + right]
            total = total + (piece * adjoint(piece.shape, i * (len(lon) - 1) + j)).sum()
    total.backward()
    gradient = (own.grad - whole.grad[:, :, rows, columns]).abs().max().item()
    return values, gradient


WIDTHS = [(1, 1, 1, 1), (0, 1, 2, 0), (3, 2, 1, 3)]
SPLITS = {
    (1, 2): [((0, 6), (0, 4, 8)), ((0, 6), (0, 5, 8))],
    (2, 1): [((0, 4, 8), (0, 8)), ((0, 5, 9), (0, 6))],
    (2, 2): [((0, 4, 8), (0, 4, 8)), ((0, 6, 10), (0, 3, 8))],
    (3, 1): [((0, 4, 8, 12), (0, 4))],
    (1, 3): [((0, 4), (0, 4, 8, 12)), ((0, 4), (0, 3, 7, 12))],
    (4, 2): [((0, 4, 8, 12, 16), (0, 4, 8)), ((0, 5, 10, 14, 18), (0, 3, 8))],
}


def table(session, splits):
    worst = {}
    for lat, lon in splits:
        for widths in WIDTHS:
            for name, rules in RULES.items():
                for wraps in (True, False):
                    if not wraps and name in ("cross", "mixed"):
                        continue
                    for last in (True, False):
                        errors = one_case(session.mesh, lat, lon, widths, rules, wraps, last)
                        worst[f"{lat} {lon} {widths} {name} wraps={wraps} last={last}"] = np.max(errors)
    return worst


def wrong(worst):
    return {k: v for k, v in worst.items() if not v < 1e-12}  # NaN is wrong, too


@pytest.mark.parametrize("mesh", SPLITS)
def test_halo_is_padding_of_the_whole(mesh):
    lat, lon = mesh
    found = run_threads(table, SPLITS[mesh], lat=lat, lon=lon)
    if mesh == (2, 2):
        assert run_ranks(table, 4, SPLITS[mesh], lat=lat, lon=lon) == found  # bit for bit
    for worst in found:
        assert len(worst) == 36 * len(SPLITS[mesh])
        assert wrong(worst) == {}


def test_a_halo_of_nan_is_wrong(monkeypatch):
    def finish_strips(self):
        if self.side.meets:
            for part, received in zip(self._into, self._swap.wait(), strict=True):
                part.of(self.padded, self.side.dim).copy_(received * np.nan)

    monkeypatch.setattr(Filling, "finish_strips", finish_strips)
    first, last = run_ranks(table, 2, SPLITS[2, 1][:1], lat=2)
    assert len(first) == 36 and wrong(first).keys() == first.keys()
    assert wrong(last)  # not all: its halo may have no width


def test_the_serial_padding_is_that_of_torch():
    x, _, _ = field(6, 8)
    zero = serial_padding(x, (1, 2, 2, 1), RULES["zero"], "circular")
    wrapped = F.pad(F.pad(x.movedim(-1, 2), (2, 1, 0, 0, 0, 0), mode="circular"), (0, 0, 1, 2)).movedim(2, -1)
    assert torch.equal(zero, wrapped)
    same = serial_padding(x, (1, 2, 2, 1), RULES["replicate"], "replicate")
    assert torch.equal(same, F.pad(x.movedim(-1, 2), (2, 1, 1, 2, 0, 0), mode="replicate").movedim(2, -1))


def cropped(session):
    x = torch.arange(12.0).reshape(1, 1, 12, 1)
    own = x[:, :, 6 * session.topology.place.lat :][:, :, :6]
    return halo(own, Side(2, 1, -2, 0, comm=session.mesh.lat), None).flatten().tolist()


def test_negative_widths_crop():
    first, last = run_ranks(cropped, 2, lat=2)
    assert first == [0, 0, 1, 2, 3]
    assert last == [5, 6, 7, 8, 9, 10, 11]  # the last rank's own width


def thin(session):
    x = torch.zeros(1, 1, 4 if session.topology.rank else 2, 4)
    halo(x, Side(2, 3, 3, comm=session.mesh.lat), None)


def test_a_part_thinner_than_the_halo():
    ends = run_ranks(thin, 2, lat=2, statuses=True, silence=2)
    assert all(code != 0 for code, _, _ in ends)
    text = "halo: axis 2 of rank 0 of 2 has 2 points, a neighbour needs 3 of them; split this axis over fewer ranks"
    assert text in ends[0][2]
    with pytest.raises(UserError, match="has 2 points"):
        halo(torch.zeros(1, 1, 2, 4), Side(2, 3, 3, periodic=True), None)


def test_rows_that_are_too_few_to_mirror():
    rows, columns = Side(2, 2, 0, first=EdgeRule(Beyond.MIRROR, 1)), Side(3, 1, 1, periodic=True)
    across = Across(((0, 4),))
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    assert halo(x, rows, columns, across)[0, 0, :2, 1:-1].tolist() == x[0, 0, [2, 1]].roll(2, 1).tolist()
    with pytest.raises(UserError, match="axis 2 has 2 points, and the padding at its ends is made of 3; take"):
        halo(x[:, :, :2], rows, columns, across)
    with pytest.raises(UserError, match="axis 2 has 1 points"):
        halo(x[:, :, :1], rows, columns, across)
    alone = halo(x[:, :, :1], Side(2, 1, 0, first=EdgeRule(Beyond.MIRROR, 1)), columns, across)
    assert alone[0, 0, 0, 1:-1].tolist() == [2, 3, 0, 1]


def sent(session):
    x = torch.zeros(2, 3, 4, 8, 5)
    before = session.mesh.bytes_sent
    rows, columns = Side(2, 1, 1, comm=session.mesh.lat), Side(3, 1, 2, periodic=True, comm=session.mesh.lon)
    halo(x, rows, columns)
    return session.mesh.bytes_sent - before


def test_bytes_are_those_of_the_surface():
    plane = 2 * 3 * 5 * 4  # batch, channels, levels, bytes
    row, column = 8 * plane, (4 + 2) * plane  # columns go second, with the rows beyond them
    assert run_ranks(sent, 4, lat=2, lon=2) == [row + 3 * column] * 4
    assert np.all(np.array(run_ranks(sent, 2, lat=2)) == row)


def test_gradient_by_finite_differences():
    x = torch.randn(1, 2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    rows = Side(2, 1, 2, first=RULES["cross"][0], last=EdgeRule(Beyond.REPLICATE))
    across = Across(((0, 4),), torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))
    assert torch.autograd.gradcheck(lambda t: halo(t, rows, Side(3, 2, 1, periodic=True), across), x)
