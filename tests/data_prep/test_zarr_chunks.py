"""Fields of Zarr archives that nobody wrote are absent, whatever their fill value reads as."""

import json
import pickle

import numpy as np
import pytest
import xarray as xr
import zarr

from data_prep import prepare
from data_prep.xarray_files import XarrayFile
from ensemble_ml.config import Gaps, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

PACKED = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": None}
KINDS = {
    "floats of version 2": (2, {"_FillValue": None}),
    "integers of version 2": (2, PACKED),
    "integers of version 3": (3, PACKED),
    "integers of version 3 with another mark": (3, PACKED | {"_FillValue": -32767}),
    "floats of version 3 with another mark": (3, {"_FillValue": np.nan, "fill_value": 0.0}),
}


def archive(path, version, encoding, name="t2m", units="K", written=(0, 2), scale=1.0, chunks=None):
    """Three start dates of two members, of which `written` were ever written."""
    time = np.array(["2020-01-01", "2020-01-02", "2020-01-03"], "datetime64[ns]")
    lead = np.array([24], "timedelta64[h]").astype("timedelta64[ns]")
    values = 280 + np.random.default_rng(0).random((3, 2, 1, 9, 16)).astype(np.float32)
    coords = dict(time=time, number=[1, 2], step=lead, latitude=np.linspace(90, -90, 9), longitude=np.arange(16) * 22.5)
    data = xr.Dataset({name: (tuple(coords), values * np.float32(scale), {"units": units})}, coords)
    data = data.chunk(dict(time=1, number=1, step=1) | (chunks or {}))
    data.to_zarr(path, compute=False, zarr_format=version, encoding={name: encoding}, consolidated=False)
    for date in written:
        part = data.isel(time=[date]).drop_vars(["number", "step", "latitude", "longitude"])
        part.load().to_zarr(path, region={"time": slice(date, date + 1)}, consolidated=False)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_date_that_nobody_wrote_is_a_gap(tmp_path, kind):
    path = archive(tmp_path / "a.zarr", *KINDS[kind])
    with pytest.raises(UserError, match=r"t2m, member 1, 2020-01-02T00, lead 24 h: 144 of 144 values are NaN"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))
    store = open_store(prepare(PrepareConfig(input=path, output=str(tmp_path / "s.zarr"), gaps=Gaps.skip)))
    assert [str(date)[:10] for date in store.layout.init_time] == ["2020-01-01", "2020-01-03"]
    for date in range(2):
        assert 280.4 < store.read(Part.FORECAST, date).surface.mean() < 280.6


def test_a_date_that_nobody_wrote_in_a_chunk_of_several_is_a_gap(tmp_path):
    path = archive(tmp_path / "a.zarr", *KINDS["integers of version 3"], chunks={"time": 3})
    with pytest.raises(UserError, match=r"t2m, member 1, 2020-01-02T00, lead 24 h: 144 of 144 values are NaN"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))


def test_a_field_of_which_a_part_was_never_written_is_a_gap(tmp_path):
    path = archive(tmp_path / "a.zarr", *KINDS["floats of version 2"], written=(0, 1, 2), chunks={"longitude": 8})
    (tmp_path / "a.zarr" / "t2m" / "1.0.0.0.1").unlink()
    with pytest.raises(UserError, match=r"t2m, member 1, 2020-01-02T00, lead 24 h: 144 of 144 values are NaN"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))


@pytest.mark.parametrize("place", ["start", "end"])
def test_a_field_of_which_a_part_of_a_shard_was_never_written_is_a_gap(tmp_path, place):
    path = archive(tmp_path / "a.zarr", *KINDS["floats of version 3 with another mark"], name="u10", units="m s-1")
    group = zarr.open_group(path)
    old = group["u10"]
    values, about = old[:], {"attributes": dict(old.attrs), "dimension_names": old.metadata.dimension_names}
    shards = zarr.codecs.ShardingCodec(chunk_shape=(1, 1, 1, 9, 8), index_location=place)
    about |= {"shape": values.shape, "dtype": values.dtype, "chunks": (1, 2, 1, 9, 16), "codecs": [shards]}
    del group["u10"]
    made = zarr.create(store=path, path="u10", fill_value=0.0, zarr_format=3, **about)
    made[...] = values
    made[1, 0, 0, :, 8:] = values[0, 0, 0, :, 8:]
    made[1, 1] = values[0, 1]
    file = XarrayFile(path)
    np.testing.assert_array_equal(next(file.fields(file.records[3:4])).values, values[0, 1, 0])  # member 2 is whole
    with pytest.raises(UserError, match=r"u10, member 1, 2020-01-02T00, lead 24 h: 144 of 144 values are NaN"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))


def test_a_fill_value_that_reads_as_an_offset_is_no_zero(tmp_path):
    """Column water of 100 everywhere, of a quantity whose zeros a writer may leave out."""
    encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 100.0, "_FillValue": None}
    path = archive(tmp_path / "a.zarr", 3, encoding, "tcwv", "kg m-2")
    with pytest.raises(UserError, match=r"tcwv, member 1, 2020-01-02T00, lead 24 h: 144 of 144 values are NaN"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))


def test_what_may_be_zero_everywhere_is_no_gap(tmp_path):
    """A writer leaves out chunks of nothing but the fill value: cloudless skies, here."""
    encoding = {"dtype": "int16", "scale_factor": 0.01, "_FillValue": None}
    file = XarrayFile(archive(tmp_path / "a.zarr", 3, encoding, "tcc", "1", scale=1 / 300))
    means = [raw.values.mean() for raw in file.fields(file.records)]
    np.testing.assert_allclose(means, np.repeat([0.935, 0, 0.935], 2), atol=0.01)


def test_it_goes_to_other_processes(tmp_path):
    file = XarrayFile(archive(tmp_path / "a.zarr", *KINDS["integers of version 2"]))
    records = file.records[[0, 1]]
    found = [raw.values for raw in pickle.loads(pickle.dumps(file)).fields(records)]
    for raw, other in zip(file.fields(records), found, strict=True):
        np.testing.assert_array_equal(raw.values, other)


@pytest.mark.parametrize("said", [False, True])
def test_zeros_are_values_where_zarr_fills_with_zero(tmp_path, said):
    """Version 2's own fill value of an array that nobody gave one, in the axes, too; but not where an attribute says
    that it marks what is missing."""
    path = archive(
        tmp_path / "a.zarr", 2, {"_FillValue": None}, name="tcc", units="1", written=(0, 1, 2), scale=1 / 400
    )
    made = zarr.open_array(f"{path}/tcc")
    made[0, 0, 0, 2:4] = 0.0
    if said:
        made.attrs["_FillValue"] = 0.0
    for about in (tmp_path / "a.zarr").glob("*/.zarray"):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"fill_value": 0}))
    file = XarrayFile(path)
    assert file.grid.shape == (9, 16) and 0 in file.grid.latitude and file.grid.longitude[0] == 0
    if said:
        with pytest.raises(UserError, match="32 of 144 values are NaN"):
            next(file.fields(file.records[:1]))
        return
    assert (next(file.fields(file.records[:1])).decode() == 0).sum() == 32
