"""Fields that hold no value at all, though a message or a place is there for them, and archives that change."""

import numpy as np
import pytest
from gribfiles import GLOBE, dataset, message, noise, write

from data_prep import open_archive, prepare
from ensemble_ml.config import Gaps, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

SHAPE = len(GLOBE[0]), len(GLOBE[1])


def grib(path, edition, packing="grid_simple"):
    """Three members of 2 m temperature on two dates; the bitmap of one field hides all of it."""
    messages = []
    for date in (20010101, 20010102):
        for member in (1, 2, 3):
            values, keys = noise(GLOBE, 100 * member + date), {}
            if (date, member) == (20010102, 2):
                values, keys = np.full(SHAPE, 9999.0), {"bitmapPresent": 1, "missingValue": 9999.0}
            made = dict(date=date, member=member, step=24, edition=edition, packing=packing)
            messages.append(message("t2m", values, **made, **keys))
    return str(write(path, messages))


@pytest.mark.parametrize(("edition", "packing"), [(1, "grid_simple"), (2, "grid_simple"), (2, "grid_ccsds")])
def test_a_bitmap_that_hides_a_whole_field_leaves_a_gap(tmp_path, edition, packing):
    path = grib(tmp_path / "a.grib", edition, packing)
    with pytest.raises(UserError, match=r"t2m, member 2, 2001-01-02T00, lead 24 h: all \d+ points are without a value"):
        prepare(PrepareConfig(input=path, output=str(tmp_path / "refused.zarr")))
    store = open_store(prepare(PrepareConfig(input=path, output=str(tmp_path / "s.zarr"), gaps=Gaps.mask)))
    assert store.masked == ()
    assert [store.present(Part.FORECAST, date)[1].ravel().tolist() for date in (0, 1)] == [
        [True, True, True],
        [True, False, True],
    ]
    assert np.isfinite(store.read(Part.MEAN, 1).surface).all()


@pytest.mark.parametrize("edition", [1, 2])
def test_a_mean_of_rain_over_time_is_no_sum(tmp_path, caplog, edition):
    keys = {"timeRangeIndicator": 3} if edition == 1 else {"typeOfStatisticalProcessing": 0}
    one = dict(step="0-24", edition=edition)
    write(tmp_path / "a.grib", [message("t2m", step=24, edition=edition), message("tp", **one, **keys)])
    with caplog.at_level("INFO"):
        assert open_archive(tmp_path / "a.grib").layout.surface == ("t2m",)
    assert "the mean over time and not the sum" in caplog.text or edition == 2  # where ecCodes names it a rate


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tcc", {"edition": 2, "typeOfStatisticalProcessing": 6}),  # deviation
        ("t2m", {"edition": 2, "typeOfStatisticalProcessing": 1}),  # accumulation
        ("t2m", {"edition": 2, "typeOfStatisticalProcessing": 4}),  # difference
        ("t2m", {"edition": 1, "timeRangeIndicator": 123}),  # of analyses
        ("t2m", {"edition": 1, "timeRangeIndicator": 113}),  # of forecasts
    ],
)
def test_statistics_over_time_that_bear_the_name_of_what_they_are_of_are_left_out(tmp_path, caplog, name, kind):
    made = message(name, step="0-24" if kind["edition"] == 2 else 24, **kind)
    write(tmp_path / "a.grib", [message("msl", step=24, edition=kind["edition"]), made])
    with caplog.at_level("INFO"):
        assert open_archive(tmp_path / "a.grib").layout.surface == ("msl",)
    assert "of stepType" in caplog.text


def test_a_member_of_nan_of_a_variable_with_a_mask_is_a_gap(tmp_path):
    data = dataset(t="sst").isel(isobaricInhPa=0, drop=True)
    data.sst[:, :, :, :2] = np.nan  # ice
    data.sst[1, 2, 1] = np.nan
    data.to_netcdf(tmp_path / "a.nc")
    given = dict(input=str(tmp_path / "a.nc"))
    with pytest.raises(UserError, match=r"sst, member 3, 2001-01-03T00, lead 24 h: all \d+ points are without a value"):
        prepare(PrepareConfig(**given, output=str(tmp_path / "refused.zarr")))
    store = open_store(prepare(PrepareConfig(**given, output=str(tmp_path / "s.zarr"), gaps=Gaps.mask)))
    assert store.masked == ("sst",)
    assert store.present(Part.FORECAST, 1)[1][:, 1].ravel().tolist() == [True, True, False]


def test_a_missing_value_that_no_attribute_tells_of(tmp_path):
    data = dataset()
    data.t[1, 0, 1, 0, 3, 5] = -9999
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"t at 850 hPa, member 1, .*: 1 of \d+ values are .*, or not above 0 K"):
        prepare(PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / "s.zarr")))


@pytest.mark.parametrize("part", ["1/1", None])
def test_values_that_have_changed_are_another_archive(tmp_path, part):
    """Of the same names, sizes and axes; a store of the old ones is not complete for them."""
    path = tmp_path / "a.nc"
    dataset().to_netcdf(path)
    before = open_archive(path).fingerprint()
    config = PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"), parts=part, overwrite=True)
    first = open_store(prepare(config)).read(Part.MEAN, 0).pressure
    assert open_archive(path).fingerprint() == before
    (dataset() + 10).assign(t=lambda made: made.t.assign_attrs(units="K")).to_netcdf(tmp_path / "new")
    (tmp_path / "new").replace(path)
    assert open_archive(path).fingerprint() != before
    second = open_store(prepare(config)).read(Part.MEAN, 0).pressure
    np.testing.assert_allclose(second, first + 10, atol=1e-3)


def test_two_axes_along_one_dimension_are_refused(tmp_path):
    """A lagged ensemble, written as one list."""
    data = dataset().isel(time=0, step=0, drop=True)
    starts = np.datetime64("2001-01-01", "ns") - np.arange(3) * np.timedelta64(6, "h")
    data.assign_coords(time=("number", starts)).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="dimension number carries both init and member; give each its own"):
        open_archive(tmp_path / "a.nc")


def test_looking_through_many_files_is_told_by_the_clock_and_not_by_the_file(tmp_path, caplog, monkeypatch):
    for number in range(4):
        data = dataset().isel(time=[0])
        data.assign_coords(time=data.time.values + np.timedelta64(number, "D")).to_netcdf(tmp_path / f"{number}.nc")
    caplog.set_level("INFO")
    settings = {"input": str(tmp_path / "*.nc"), "gaps": Gaps.mask, "index": None}
    prepare(PrepareConfig(output=str(tmp_path / "a.zarr"), **settings))
    assert not [line for line in caplog.messages if "all NaN" in line or "0.nc" in line or "1.nc" in line]
    monkeypatch.setattr("data_prep.catalogue._LINE_EVERY", -1.0)
    prepare(PrepareConfig(output=str(tmp_path / "b.zarr"), **settings))
    told = [line.split(": ", 2)[2] for line in caplog.messages if "all NaN" in line]
    assert told == [f"{number} of 4 files are looked through" for number in range(4)]
