"""Convolutions over kernel, stride, dilation, longitude, pole, even and uneven parts, with and without overlap."""

import copy

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.simulated import run_threads

from benchmarks.spatial import exactness
from ensemble_ml.config import OptimName

NAMES = ("forward", "input gradient", "weight gradient")
MESHES = [(1, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (2, 2), (4, 2)))]


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process(mesh):
    lat, lon = mesh
    kernels = [2, 3] if lat * lon > 4 else [2, 3, 7]
    job = {"kernels": kernels}
    if lat * lon == 2:
        rows = run_ranks(exactness.convolutions, 2, job, lat=lat, lon=lon)[0]
    else:
        rows = run_threads(exactness.convolutions, job, lat=lat, lon=lon)[0]
    assert len(rows) == len(kernels) * 2 * 2 * 7 * 4  # stride, dilation, longitude and pole, even and overlap
    assert {(r["longitude"], r["pole"]) for r in rows} >= {("circular", "cross"), ("zeros", "replicate")}
    assert [r for r in rows if not max(r[name] for name in NAMES) < 1e-12] == []


@pytest.mark.parametrize("kind", OptimName)
def test_weights_of_nan_are_wrong(kind):
    whole = torch.nn.Linear(2, 2)
    for p in whole.parameters():
        p.grad = torch.ones_like(p)
    mine = copy.deepcopy(whole)
    mine.weight.data[0, 0] = torch.nan
    assert exactness._after_a_step(whole, mine, kind) == float("inf")
