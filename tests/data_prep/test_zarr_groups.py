"""Zarr stores with groups: read whole, also where groups share coordinates, and as before where a group is odd."""

import numpy as np
import public_archives
import pytest
import xarray as xr

from benchmarks.remote.server import Plan, serving
from data_prep import open_archive
from data_prep.inspect import describe_archive
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")


def fields(paths):
    """Return names and all values of an archive."""
    source = open_archive(paths)
    read = [source.read(Part.FORECAST, date) for date in range(len(source.layout.init_time))]
    return source.layout.names, source.layout.levels, [one.pressure for one in read], [one.surface for one in read]


def assert_same(one, other):
    assert one[:2] == other[:2]
    for mine, theirs in zip(one[2] + one[3], other[2] + other[3], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def apart(path):
    """Return the parts of the store as flat Datasets, each with all coordinates."""
    tree = xr.open_datatree(path, engine="zarr", decode_timedelta=True)
    return [tree.to_dataset(), tree["pressure_level"].to_dataset()]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_a_group_is_read_with_what_lies_outside_of_it(tmp_path, version, shared):
    pytest.importorskip("obstore", reason="URLs need the extra `remote`")
    path = public_archives.dynamical_46_days(tmp_path, version=version, shared=shared)
    expected = fields(apart(path))
    assert sorted(expected[0]) == ["msl", "q", "t", "tp", "u", "u10", "z"] and expected[1] == (500, 850)
    assert_same(fields(str(path)), expected)
    assert_same(fields(xr.open_datatree(path, engine="zarr", decode_timedelta=True)), expected)
    plan = Plan()
    with serving(tmp_path, plan) as url:
        assert_same(fields(f"{url}/{path.name}"), expected)
    documents = [one for one in plan.asked if one.rsplit("/", 1)[-1] in ("zarr.json", ".zmetadata", ".zgroup")]
    assert len(documents) == len(set(documents)) and not [one for one in documents if "pressure_level" in one]


def test_one_group_alone(tmp_path):
    pytest.importorskip("obstore", reason="URLs need the extra `remote`")
    path = public_archives.dynamical_46_days(tmp_path, shared=True)
    expected = fields(apart(path)[1])
    assert_same(fields(str(path / "pressure_level")), expected)
    with serving(tmp_path) as url:
        assert_same(fields(f"{url}/{path.name}#pressure_level"), expected)


def test_fields_in_groups_alone(tmp_path):
    data = apart(public_archives.dynamical_46_days(tmp_path))
    path = tmp_path / "a.zarr"
    xr.DataTree.from_dict({"/surface": data[0], "/upper/levels": data[1]}).to_zarr(path, zarr_format=3)
    assert_same(fields(str(path)), fields(data))
    found = describe_archive(str(tmp_path / "a.zarr"))
    assert [one["path"] for one in found["files"]] == [
        str(path), str(path / "surface"), str(path / "upper" / "levels"),
    ]  # fmt: skip
    assert not found["other_files"]


@pytest.mark.parametrize("odd", ["grid", "twice", "axes"])
def test_a_group_that_does_not_go_with_the_rest_is_left_out(tmp_path, caplog, odd):
    """Such a store was read without its groups, and still is."""
    root = apart(public_archives.dynamical_46_days(tmp_path))[0]
    group = root.copy(deep=True)
    if odd == "grid":
        group = group.isel(latitude=slice(None, None, 2))
    if odd == "axes":
        group = group.assign_coords(latitude=group.latitude**2).drop_vars(["valid_time"], errors="ignore")
    for name in group.variables:
        group[name].encoding = {}
    root.to_zarr(tmp_path / "a.zarr", zarr_format=3)
    group.to_zarr(tmp_path / "a.zarr", group="other", zarr_format=3, mode="a")
    expected = fields(root)
    caplog.clear()
    assert_same(fields(str(tmp_path / "a.zarr")), expected)
    said = [one.getMessage() for one in caplog.records if "give it alone" in one.getMessage()]
    assert len(said) == 1 and "left out" in said[0] and "other" in said[0]


def test_groups_on_several_grids_need_one(tmp_path):
    data = apart(public_archives.dynamical_46_days(tmp_path))
    data[1] = data[1].isel(latitude=slice(None, None, 2))
    for one in data:
        for name in one.variables:
            one[name].encoding = {}
    xr.DataTree.from_dict({"/surface": data[0], "/levels": data[1]}).to_zarr(tmp_path / "a.zarr", zarr_format=3)
    with pytest.raises(UserError, match="an archive has one grid: prepare with regrid=DEGREES"):
        open_archive(str(tmp_path / "a.zarr"))
