"""NetCDF and Zarr archives as sources."""

import os

import numpy as np
import pytest
import xarray as xr
import zarr
from gribfiles import GLOBE, archive_of, dataset, ensemble

from data_prep import catalogue, find_gaps, open_archive
from data_prep.xarray_files import XarrayFile
from ensemble_ml.config import Control
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection
from ensemble_ml.store.manifest import stamp


class TestXarray:
    @pytest.mark.parametrize("kind", ["nc", "zarr"])
    @pytest.mark.parametrize(
        "names",
        [
            {},
            {"time": "init_time", "number": "realization", "step": "prediction_timedelta", "isobaricInhPa": "level"},
            {
                "time": "forecast_reference_time",
                "number": "member",
                "step": "lead_time",
                "isobaricInhPa": "plev",
                "t": "ta",
            },
            {"number": "ensemble", "latitude": "lat", "longitude": "lon", "t": "temperature"},
        ],
    )
    def test_names_of_axes_and_variables(self, tmp_path, kind, names):
        data = dataset(**names)
        path = tmp_path / f"a.{kind}"
        data.to_netcdf(path) if kind == "nc" else data.to_zarr(path, consolidated=False)
        source = open_archive(path)
        lay = source.layout
        assert (lay.variables, lay.realization, lay.lead_hours, lay.levels) == (("t",), (1, 2, 3), (0, 24), (500, 850))
        values = dataset()["t"].values
        for date in range(2):
            np.testing.assert_array_equal(source.read(Part.FORECAST, date).pressure[:, :, 0], values[date, :, :, ::-1])

    def test_units_order_and_levels_in_pascal(self, tmp_path):
        data = dataset().isel(latitude=slice(None, None, -1)).transpose("longitude", "step", ...)
        data["t"] = data["t"] - 273.15
        data["t"].attrs["units"] = "degC"
        data = data.assign_coords(isobaricInhPa=data.isobaricInhPa * 100).assign_coords(longitude=GLOBE[1] - 180)
        data.isobaricInhPa.attrs["units"] = "Pa"
        source = archive_of(data, tmp_path)
        expected = np.roll(dataset()["t"].values[0, :, :, ::-1], 6, axis=-1)
        np.testing.assert_allclose(source.read(Part.FORECAST, 0).pressure[:, :, 0], expected, rtol=1e-6)
        assert source.layout.grid.longitude[0] == 0 and source.layout.levels == (500, 850)

    @pytest.mark.parametrize("turned", [False, True])
    def test_a_band_of_rows_is_read_alone(self, tmp_path, turned, monkeypatch):
        data = dataset().isel(latitude=slice(None, None, -1 if turned else 1))
        source, read = archive_of(data, tmp_path), []
        real = xr.DataArray.isel
        monkeypatch.setattr(xr.DataArray, "isel", lambda *given, **more: read.append(real(*given, **more)) or read[-1])
        found = source.read(Part.FORECAST, 1, Selection(rows=(1, 3))).pressure[:, :, 0]
        np.testing.assert_array_equal(found, dataset()["t"].values[1, :, :, ::-1, 1:3])
        assert {array.sizes["latitude"] for array in read} == {2}

    def test_a_meridian_that_stands_there_twice(self, tmp_path):
        data = dataset()
        again = data.isel(longitude=[0]).assign_coords(longitude=[360.0])
        source = archive_of(xr.concat([data, again], "longitude"), tmp_path)
        assert source.layout.grid.shape == (7, 12)
        np.testing.assert_array_equal(source.read(Part.FORECAST, 0).pressure[:, :, 0], data["t"].values[0, :, :, ::-1])

    def test_forecasts_written_along_valid_time(self, tmp_path):
        data = dataset().isel(time=0, drop=True).rename(step="time")
        lead = data.time.values
        start = np.datetime64("2001-01-01", "ns")
        data = data.assign_coords(time=start + lead, forecast_reference_time=start)
        data = data.assign_coords(forecast_period=("time", lead / np.timedelta64(1, "h"), {"units": "hours"}))
        lay = archive_of(data, tmp_path).layout
        assert lay.lead_hours == (0, 24) and lay.init_time.tolist() == [start.astype("datetime64[ns]").item()]

    @pytest.mark.parametrize("first", [0, -6])
    def test_an_interval_ends_at_its_coordinate(self, tmp_path, first):
        data = dataset()
        data["t"].attrs["cell_methods"] = "step: mean"
        step = data.step.values
        hours = step / np.timedelta64(1, "h") if np.issubdtype(step.dtype, np.timedelta64) else step.astype(float)
        data = data.assign_coords(step=("step", hours, {"units": "hours", "bounds": "step_bnds"}))
        data["step_bnds"] = ("step", "two"), np.stack([hours + first, hours + first + 6], 1)
        data.to_netcdf(tmp_path / "a.nc")
        if first == -6:
            open_archive(tmp_path / "a.nc")
            return
        with pytest.raises(UserError, match="step_bnds end elsewhere than at the coordinate"):
            open_archive(tmp_path / "a.nc")

    def test_standard_names_and_variables_without_level(self, tmp_path):
        data = dataset(t="unheard_of").isel(isobaricInhPa=0, drop=True)
        data["unheard_of"].attrs["standard_name"] = "surface_temperature"
        assert archive_of(data, tmp_path).layout.surface == ("skt",)

    @pytest.mark.parametrize(
        ("ticks", "units", "hours"),
        [
            ([0, 24], "hours", (0, 24)),
            ([0.0, 1.0], "days", (0, 24)),
            ([60, 120], "minutes", (1, 2)),
            ([0, 3600], "s", (0, 1)),
        ],
    )
    def test_units_of_lead_time(self, tmp_path, ticks, units, hours):
        data = dataset(step="lead").assign_coords(lead=("lead", np.array(ticks), {"units": units}))
        assert archive_of(data, tmp_path).layout.lead_hours == hours

    @pytest.mark.parametrize(
        ("name", "ticks", "units", "text"),
        [
            ("step", [0, 1], "moons", "step: units 'moons' of lead time"),
            ("step", [30, 60], "minutes", "step: only whole hours of lead time"),
            ("isobaricInhPa", [850.5, 500.5], "hPa", "isobaricInhPa: only levels of whole hPa"),
            ("number", ["a", "b", "c"], "1", "number: members are numbered with integers"),
            ("time", [0, 1], "1", "a.nc: time: units '1' do not make a date"),
        ],
    )
    def test_axes_that_are_not_understood(self, tmp_path, name, ticks, units, text):
        data = dataset().assign_coords({name: (name, np.array(ticks), {"units": units})})
        data.to_netcdf(tmp_path / "a.nc")
        with pytest.raises(UserError, match=text):
            open_archive(tmp_path / "a.nc")

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_values_that_are_no_numbers(self, tmp_path, bad):
        data = dataset()
        data["t"].values[1, 2, 1, 0, 3, 4] = bad
        source = archive_of(data, tmp_path)
        source.read(Part.FORECAST, 0)
        with pytest.raises(
            UserError, match=r"a.nc: t at 850 hPa, member 3, 2001-01-03T00, lead 24 h: 1 of 84 values are NaN"
        ):
            source.read(Part.FORECAST, 1)

    @pytest.mark.parametrize(
        ("spoil", "text"),
        [
            (lambda d: d["t"].attrs.update(units="furlong"), "a.nc: t: units 'furlong': cannot be converted"),
            (lambda d: (d.update(d - 270), d["t"].attrs.clear()), r"a.nc: t: has no units; .* 'units=\{t: K\}'"),
            (lambda d: d.isobaricInhPa.attrs.update(units="m"), "units 'm' of pressure level"),
        ],
    )
    def test_what_is_not_understood(self, tmp_path, spoil, text):
        data = dataset()
        data = data.assign_coords(longitude=("longitude", GLOBE[1].copy()))
        spoil(data)
        data.to_netcdf(tmp_path / "a.nc")
        with pytest.raises(UserError, match=text):
            open_archive(tmp_path / "a.nc")

    def test_an_uneven_grid(self, tmp_path):
        dataset().assign_coords(longitude=GLOBE[1] ** 1.1).to_netcdf(tmp_path / "a.nc")
        with pytest.raises(UserError, match=r"a.nc: longitude: not evenly spaced"):
            open_archive(tmp_path / "a.nc")

    def test_an_unknown_axis_is_named(self, tmp_path):
        dataset().rename(number="colour").drop_vars("colour").to_netcdf(tmp_path / "a.nc")
        with pytest.raises(UserError, match="t: axis colour is not known; known are init: init_time"):
            open_archive(tmp_path / "a.nc")

    def test_grib_and_netcdf_make_one_archive(self, tmp_path):
        dataset().to_netcdf(tmp_path / "a.nc")
        ensemble(tmp_path / "b.grib", dates=(20010101, 20010103), names=("z",))
        source = open_archive(tmp_path)
        assert source.layout.variables == ("t", "z") and find_gaps(source) == []
        assert np.isfinite(source.read(Part.FORECAST, 1).pressure).all()


def test_control_and_moments_are_told_by_their_type(tmp_path):
    for kind, number in (("pf", 1), ("pf", 2), ("cf", 0), ("em", 0), ("es", 0)):
        data = dataset().isel(number=[0]).assign_coords(number=[number])
        data["t"].attrs["GRIB_dataType"] = kind
        data.to_netcdf(tmp_path / f"{kind}{number}.nc")
    source = open_archive(tmp_path)
    assert source.layout.realization == (1, 2) and source.has(Part.CONTROL)
    joined = dataset()  # of all members; the attributes are those of the first
    joined["t"].attrs["GRIB_dataType"] = "cf"
    (tmp_path / "all").mkdir()
    joined.to_netcdf(tmp_path / "all" / "a.nc")
    assert open_archive(tmp_path / "all").layout.realization == (1, 2, 3)
    np.testing.assert_array_equal(source.read(Part.CONTROL, 0).pressure[0, :, 0], data["t"].values[0, 0, :, ::-1])


def test_axes_of_one_file_may_run_differently(tmp_path):
    data = dataset()
    other = dataset(t="u").isel(latitude=slice(None, None, -1)).rename(latitude="lat")
    other["u"].attrs["units"] = "m s-1"
    found = archive_of(xr.merge([data, other]), tmp_path).read(Part.FORECAST, 0).pressure
    np.testing.assert_array_equal(found[:, :, 1], found[:, :, 0])


@pytest.mark.parametrize("order", [("longitude", "latitude", ...), ("number", "time", ...)])
def test_axes_in_any_order_are_read_without_asking_for_points(tmp_path, order, monkeypatch):
    data = dataset().transpose(*order)
    data.to_zarr(tmp_path / "a.zarr", consolidated=False)
    source = open_archive(tmp_path / "a.zarr")

    def refused(*_):
        raise AssertionError("points are asked for one by one")

    monkeypatch.setattr(zarr.Array, "vindex", property(refused))
    np.testing.assert_array_equal(source.read(Part.FORECAST, 1).pressure[:, :, 0], dataset()["t"].values[1, :, :, ::-1])


def test_valid_times_after_one_lead_are_brought_back_to_their_starts(tmp_path):
    data = dataset().isel(step=1).rename(time="valid_time")
    lay = archive_of(data, tmp_path).layout
    assert lay.lead_hours == (24,)
    assert lay.init_time.astype("datetime64[D]").astype(str).tolist() == ["2000-12-31", "2001-01-02"]
    data.expand_dims("step").to_netcdf(tmp_path / "c.nc")
    assert open_archive(tmp_path / "c.nc").layout.init_time.tolist() == lay.init_time.tolist()
    dataset().rename(time="valid_time").to_netcdf(tmp_path / "b.nc")
    with pytest.raises(UserError, match="axes valid_time and step: give init times beside the leads"):
        open_archive(tmp_path / "b.nc")


@pytest.mark.parametrize("said", [{"standard_name": "forecast_period"}, {}])
def test_times_beside_a_scalar_lead_are_valid_times_where_both_are_named_in_terms_of_cf(tmp_path, said):
    data = dataset().isel(step=1)
    data.time.attrs["standard_name"] = "time"
    data = data.assign_coords(step=((), 24, {"units": "hours"} | said))
    first = archive_of(data, tmp_path).layout.init_time[0]
    assert str(first)[:10] == ("2000-12-31" if said else "2001-01-01")


def test_a_forecast_that_states_no_lead_is_told_of(tmp_path, caplog):
    dataset().isel(step=0, drop=True).to_netcdf(tmp_path / "a.nc")
    assert open_archive(tmp_path / "a.nc").layout.lead_hours == (0,)
    assert "no field states a lead, so all get lead 0" in caplog.text
    caplog.clear()
    dataset().to_netcdf(tmp_path / "b.nc")
    assert open_archive(tmp_path / "b.nc", leads=[0]).layout.lead_hours == (0,)
    assert "no field states a lead" not in caplog.text


def test_a_start_that_is_no_coordinate_of_the_fields(tmp_path):
    """As of an ensemble that is written along valid time, with the start beside it."""
    start = np.datetime64("2001-01-01", "ns")
    data = dataset().isel(time=0, drop=True).rename(step="time")
    data = data.assign_coords(time=start + np.array([0, 24], "timedelta64[h]"))
    data["forecast_reference_time"] = (), start, {"standard_name": "forecast_reference_time"}
    data["t"].encoding["coordinates"] = None
    lay = archive_of(data, tmp_path).layout
    assert lay.lead_hours == (0, 24) and lay.init_time.tolist() == [start.item()]


def test_a_field_in_two_variables_of_a_file(tmp_path):
    data = dataset()
    upper = data.t.sel(isobaricInhPa=[500.0]).rename(isobaricInhPa="level")
    lower = data.t.sel(isobaricInhPa=[850.0]).rename(isobaricInhPa="plev")
    xr.Dataset({"t": upper, "ta": lower.assign_attrs(units="K")}).to_netcdf(tmp_path / "a.nc")
    found = open_archive(tmp_path / "a.nc")
    assert found.layout.levels == (500, 850)
    np.testing.assert_array_equal(found.read(Part.FORECAST, 1).pressure[:, :, 0], data.t.values[1][:, :, ::-1])


def test_a_zarr_archive_that_changes_inside_is_seen(tmp_path):
    dataset().to_zarr(tmp_path / "a.zarr", consolidated=False)
    before = stamp(str(tmp_path / "a.zarr"))
    chunk = max((p for p in (tmp_path / "a.zarr" / "t").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.utime(chunk, ns=(0, chunk.stat().st_mtime_ns + 10**9))
    assert stamp(str(tmp_path / "a.zarr")) != before


class TestFilesThatChange:
    def touched(self, path):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))

    def test_between_index_and_reading(self, tmp_path):
        source = archive_of(dataset(), tmp_path)
        self.touched(tmp_path / "a.nc")
        with pytest.raises(UserError, match=r"a.nc: changed while it was read \(still \d+ bytes"):
            source.read(Part.FORECAST, 0)

    @pytest.mark.parametrize("error", [None, UserError("t: is damaged")])
    def test_while_it_is_indexed(self, tmp_path, monkeypatch, error):
        dataset().to_netcdf(tmp_path / "a.nc")
        real = XarrayFile._index

        def changing(*given):
            self.touched(tmp_path / "a.nc")
            if error is not None:
                raise error
            return real(*given)

        monkeypatch.setattr(XarrayFile, "_index", changing)
        with pytest.raises(UserError, match=r"a.nc: changed while it was read"):
            XarrayFile(str(tmp_path / "a.nc"))

    @pytest.mark.parametrize("name", ["a.nc", "a.zarr", "a.grib"])
    def test_after_it_was_indexed_and_before_the_others_were(self, tmp_path, monkeypatch, name):
        """A catalogue knows a file as it was when it was indexed, so that a build sees that it changed."""
        path = tmp_path / name
        if name == "a.grib":
            ensemble(path)
        elif name == "a.nc":
            dataset().to_netcdf(path)
        else:
            dataset().to_zarr(path, consolidated=False)
        before, real = stamp(str(path)), catalogue.open_readers

        def opened(*given):
            readers = real(*given)
            self.touched(path / "zarr.json" if path.is_dir() else path)
            return readers

        monkeypatch.setattr(catalogue, "open_readers", opened)
        assert open_archive(path).catalogue.stamps == [(str(path), *before)] and stamp(str(path)) != before


def test_a_control_that_was_joined_with_its_members_stays_one(tmp_path):
    """As `xr.concat([cf, pf], "number")` makes it: the type is that of the first, for all."""
    joined = dataset().assign_coords(number=[0, 1, 2])
    joined["t"].attrs["GRIB_dataType"] = "cf"
    source = archive_of(joined, tmp_path)
    assert source.layout.realization == (1, 2) and source.has(Part.CONTROL)
    assert open_archive(tmp_path / "a.nc", control=Control.include).layout.realization == (0, 1, 2)
