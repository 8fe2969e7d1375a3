"""Convolutions over kernel, stride, dilation, longitude, pole, even and uneven parts, with and without overlap."""

import pytest
from parallel.ranks import run_ranks

from ensemble_ml.benchmarks.partitioning import exactness

NAMES = ("forward", "input gradient", "weight gradient")
MESHES = [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow), pytest.param((4, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process(mesh):
    lat, lon = mesh
    kernels = [2, 3] if lat * lon > 4 else [2, 3, 7]
    rows = run_ranks(exactness.convolutions, lat * lon, {"kernels": kernels}, lat=lat, lon=lon)[0]
    assert len(rows) == len(kernels) * 2 * 2 * 7 * 4  # stride, dilation, longitude and pole, even and overlap
    assert {(r["longitude"], r["pole"]) for r in rows} >= {("circular", "cross"), ("zeros", "replicate")}
    assert [r for r in rows if not max(r[name] for name in NAMES) < 1e-12] == []
