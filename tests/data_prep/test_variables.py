"""All variables of ENS-10 by its own names, GRIB parameters and units; wind speed; sums over intervals."""

import eccodes
import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, archive_of, dataset, decoded, finished, message, noise, write

from data_prep import open_archive, open_pair, prepare
from data_prep.gaps import find_gaps
from data_prep.grib import GribFile
from data_prep.records import RECORD
from data_prep.selecting import chosen
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, field, resolve
from ensemble_ml.store import Part, Selection, open_store

SHAPE = len(GLOBE[0]), len(GLOBE[1])
# ENS-10's names (Ashkboos et al. 2022, table 1), our own, the ECMWF parameter, its units in GRIB.
PRESSURE = [
    ("Z", "z", 129, "m2 s-2"), ("T", "t", 130, "K"), ("U", "u", 131, "m s-1"), ("V", "v", 132, "m s-1"),
    ("Q", "q", 133, "kg kg-1"), ("W", "w", 135, "Pa s-1"), ("D", "d", 155, "s-1"),
]  # fmt: skip
SURFACE = [
    ("SSTK", "sst", 34, "K"), ("TCW", "tcw", 136, "kg m-2"), ("TCWV", "tcwv", 137, "kg m-2"), ("CP", "cp", 143, "m"),
    ("MSL", "msl", 151, "Pa"), ("TCC", "tcc", 164, "1"), ("U10M", "u10", 165, "m s-1"), ("V10M", "v10", 166, "m s-1"),
    ("T2M", "t2m", 167, "K"), ("TP", "tp", 228, "m"), ("SKT", "skt", 235, "K"),
]  # fmt: skip
SUMS = ("tp", "cp")


def encoded(parameter, edition, upper, values, step=24, **keys):
    """A message of any parameter: on 500 hPa, or at the surface."""
    sample = f"regular_ll_{'pl' if upper else 'sfc'}_grib{edition}"
    made = message("t" if upper else "t2m", values, edition=edition, step=step, **keys)
    handle = eccodes.codes_new_from_message(made)
    eccodes.codes_set(handle, "paramId", parameter)
    if upper:
        eccodes.codes_set(handle, "level", 500)
    assert eccodes.codes_get(handle, "paramId") == parameter, sample
    return finished(handle)


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize(("name", "short", "parameter", "units"), [*PRESSURE, *SURFACE])
def test_ens10_in_grib(tmp_path, name, short, parameter, units, edition):
    upper = any(short == row[1] for row in PRESSURE)
    mean = {"K": 280.0, "Pa": 1e5, "kg kg-1": 5e-3, "1": 0.5, "m2 s-2": 5.4e4, "s-1": 1e-4}.get(units, 1.0)
    values = np.abs(noise(mean=mean, std=0.05 * mean))
    path = write(tmp_path / "a.grib", [encoded(parameter, edition, upper, values, member=m) for m in (1, 2)])
    source = open_archive(path)
    assert source.layout.names == (short,) and resolve(name).name == short
    assert field(short).units == units
    found = source.read(Part.FORECAST, 0)
    block = found.pressure[:, 0, 0, 0] if upper else found.surface[:, 0, 0]
    for member, (_, expected) in enumerate(decoded(path)):
        np.testing.assert_array_equal(block[member], expected)
    assert source.layout.levels == ((500,) if upper else ())
    if short in SUMS:
        assert source.lead_bounds == {short: [[0, 24]]}


@pytest.mark.parametrize(("name", "short", "parameter", "units"), [*PRESSURE, *SURFACE])
@pytest.mark.parametrize("by", ["ens10", "short", "parameter"])
def test_ens10_in_netcdf(tmp_path, name, short, parameter, units, by):
    upper = any(short == row[1] for row in PRESSURE)
    axes = {"time": np.array(["2001-01-01"], "datetime64[ns]"), "number": [1, 2], "step": [24.0]}
    axes |= {"isobaricInhPa": [500.0]} if upper else {}
    axes |= {"latitude": GLOBE[0], "longitude": GLOBE[1]}
    values = np.random.default_rng(0).random([len(ticks) for ticks in axes.values()]).astype(np.float32)
    values = values * {"kg kg-1": np.float32(0.01)}.get(units, 1) + np.float32(
        {"K": 270, "Pa": 1e5, "m2 s-2": 5.4e4}.get(units, 0)
    )
    called = {"ens10": name, "short": short, "parameter": "var"}[by]
    attributes = {"units": units} | ({"GRIB_paramId": parameter} if by == "parameter" else {})
    data = xr.Dataset({called: (tuple(axes), values, attributes)}, axes)
    data["step"].attrs["units"] = "hours"
    source = archive_of(data, tmp_path)
    assert source.layout.names == (short,) and source.layout.lead_hours == (24,)
    found = source.read(Part.FORECAST, 0)
    np.testing.assert_array_equal((found.pressure if upper else found.surface).ravel(), values.ravel())


@pytest.mark.parametrize(
    ("short", "parameter", "edition", "value", "factor"),
    [("r", 157, 1, 50.0, 0.01), ("r", 157, 2, 50.0, 0.01), ("u100m", 228246, 1, 5.0, 1), ("u100m", 228246, 2, 5.0, 1),
     ("v100m", 228247, 2, 5.0, 1), ("ws100m", 228249, 2, 5.0, 1), ("d2m", 168, 1, 280.0, 1), ("d2m", 168, 2, 280.0, 1),
     ("r2m", 260242, 2, 50.0, 0.01), ("sf", 144, 1, 0.01, 1), ("sf", 228144, 2, 10.0, 1e-3), ("ssrd", 169, 1, 1e7, 1),
     ("strd", 175, 2, 1e7, 1), ("swe", 141, 1, 0.2, 1), ("swe", 228141, 1, 200.0, 1e-3), ("cape", 59, 1, 500.0, 1),
     ("cape", 59, 2, 500.0, 1), ("lcc", 186, 1, 0.5, 1), ("mcc", 3074, 1, 50.0, 0.01), ("hcc", 188, 1, 0.5, 1),
     ("swh", 140229, 1, 3.0, 1)],
)  # fmt: skip
def test_further_variables_in_grib(tmp_path, short, parameter, edition, value, factor):
    """Each lies where ecCodes puts its parameter, and is brought to the registry's units."""
    upper = not field(short).surface
    values = np.abs(noise(mean=value, std=0.05 * value))
    path = write(tmp_path / "a.grib", [encoded(parameter, edition, upper, values)])
    source = open_archive(path)
    assert source.layout.names == (short,)
    found = source.read(Part.FORECAST, 0)
    block = found.pressure[0, 0, 0, 0] if upper else found.surface[0, 0, 0]
    ((_, expected),) = decoded(path)
    np.testing.assert_allclose(block, expected * factor, rtol=1e-6)


@pytest.mark.parametrize("decimal", [None, 2])
@pytest.mark.parametrize(("edition", "packing"), [(1, "grid_simple"), (2, "grid_simple"), (2, "grid_ccsds")])
def test_geopotential_of_its_height_in_grib(tmp_path, edition, packing, decimal):
    """The integers stay what they are, and decode to ecCodes' values, in double precision, times g."""
    made = encoded(156, edition, True, noise(mean=5500.0, std=100.0), decimal=decimal, packing=packing)
    handle = eccodes.codes_new_from_message(made)
    expected = (eccodes.codes_get_array(handle, "values") * 9.80665).astype(np.float32).reshape(SHAPE)
    assert eccodes.codes_get(handle, "units") == "gpm"
    eccodes.codes_release(handle)
    file = GribFile(str(write(tmp_path / "a.grib", [made])))
    raw = next(file.fields(file.records))
    assert raw.packed == (packing == "grid_simple") and open_archive(file.path).layout.variables == ("z",)
    np.testing.assert_array_equal(raw.decode().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("units", ["gpm", "m"])
@pytest.mark.parametrize(("name", "about"), [("gh", {"GRIB_paramId": 156}), ("zg", {}), ("height", {})])
def test_geopotential_of_its_height_in_netcdf(tmp_path, units, name, about):
    data = dataset(t=name)
    data[name] = data[name] + xr.DataArray([1200.0, 5300.0], dims="isobaricInhPa").astype(np.float32)
    data[name].attrs = {"standard_name": "geopotential_height", "units": units} | about
    source = archive_of(data, tmp_path)
    assert source.layout.variables == ("z",)
    expected = (data[name].values.astype(np.float64) * 9.80665).astype(np.float32)
    np.testing.assert_array_equal(source.read(Part.FORECAST, 1).pressure[:, :, 0], expected[1, :, :, ::-1])


def test_pressure_at_sea_level_as_others_reduce_it(tmp_path):
    """GFS and GEFS have a parameter of their own."""
    handle = eccodes.codes_new_from_message(encoded(260074, 2, False, noise(mean=1e5, std=500.0)))
    eccodes.codes_set(handle, "typeOfLevel", "meanSea")
    assert open_archive(write(tmp_path / "a.grib", [finished(handle)])).layout.surface == ("msl",)


def test_units_of_other_archives(tmp_path):
    rain = encoded(228228, 2, False, np.full(SHAPE, 5.0), step="0-24")  # kg m-2
    cloud = encoded(228164, 2, False, np.full(SHAPE, 50.0))  # per cent
    found = open_archive(write(tmp_path / "a.grib", [rain, cloud])).read(Part.FORECAST, 0).surface[0, 0, :, 0, 0]
    np.testing.assert_allclose(found, [5e-3, 0.5], rtol=1e-6)


class TestMasksInNetcdf:
    def data(self, name, units, hidden=np.nan):
        axes = {"time": np.array(["2001-01-01"], "datetime64[ns]"), "number": [1, 2]}
        axes |= {"latitude": GLOBE[0], "longitude": GLOBE[1]}
        values = np.random.default_rng(0).normal(290, 3, [len(ticks) for ticks in axes.values()]).astype(np.float32)
        values[:, :, 2:4, 5:8] = hidden
        return xr.Dataset({name: (tuple(axes), values, {"units": units})}, axes)

    @pytest.mark.parametrize("fill", [np.nan, 9999.0, -32767.0])
    def test_sea_surface_temperature_over_land(self, tmp_path, fill):
        data = self.data("SSTK", "K")
        data.to_netcdf(tmp_path / "a.nc", encoding={"SSTK": {"_FillValue": np.float32(fill)}})
        source = open_archive(tmp_path / "a.nc")
        assert source.masked == ("sst",)
        found = source.read(Part.FORECAST, 0).surface[:, 0, 0]
        np.testing.assert_array_equal(found, data["SSTK"].values[0])
        for packing in ("uint16", "float32"):
            from ensemble_ml.config import Packing

            settings = PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / f"{packing}.zarr"))
            settings.packing = Packing[packing]
            store = open_store(prepare(settings))
            kept = store.read(Part.FORECAST, 0).surface[:, 0, 0]
            np.testing.assert_array_equal(np.isnan(kept), np.isnan(found))
            bound = max(store.quantisation_error.values(), default=0.0)
            assert np.nanmax(np.abs(kept - found)) <= bound < 1e-3 and store.masked == ("sst",)

    @pytest.mark.parametrize(("name", "units", "hidden"), [("t2m", "K", np.nan), ("SSTK", "K", np.inf)])
    def test_other_holes_are_refused(self, tmp_path, name, units, hidden):
        self.data(name, units, hidden).to_netcdf(tmp_path / "a.nc")
        with pytest.raises(
            UserError, match=r"member 1, 2001-01-01T00, lead 0 h: 6 of 84 values are NaN, infinite or beyond 1e\+15"
        ):
            open_archive(tmp_path / "a.nc").read(Part.FORECAST, 0)


class TestWindSpeed:
    @pytest.fixture
    def archive(self, tmp_path):
        made = []
        for member in (1, 2, 3):
            for day in (20010101, 20010102):
                keys = {"member": member, "date": day, "step": 0}
                for number, name in enumerate(("u", "v")):
                    seed = member * 100 + day + number
                    parameter = {"u": (131, 165), "v": (132, 166)}[name]
                    made.append(encoded(parameter[0], 1, True, noise(seed=seed, mean=0), **keys))
                    made.append(encoded(parameter[1], 2, False, noise(seed=seed + 7, mean=0), **keys))
        write(tmp_path / "f.grib", made)
        truth = [
            encoded(parameter, 1, parameter < 140, noise(seed=parameter + day, mean=0), 0, date=day, member=None)
            for parameter in (131, 132, 165, 166)
            for day in (20010101, 20010102)
        ]
        write(tmp_path / "t.grib", truth)
        return tmp_path

    def test_it_is_that_of_each_member(self, archive):
        parts = open_archive(archive / "f.grib").read(Part.FORECAST, 1)
        source = open_archive(archive / "f.grib", variables=["ws", "ws10"])
        assert source.layout.names == ("ws", "ws10")
        found = source.read(Part.FORECAST, 1)
        u, v = (parts.pressure[:, :, number].astype(np.float64) for number in (0, 1))
        np.testing.assert_array_equal(found.pressure[:, :, 0], np.hypot(u, v).astype(np.float32))
        u, v = (parts.surface[:, :, number].astype(np.float64) for number in (0, 1))
        np.testing.assert_array_equal(found.surface[:, :, 0], np.hypot(u, v).astype(np.float32))
        mean = source.read(Part.MEAN, 1).surface[0, :, 0]
        np.testing.assert_allclose(mean, found.surface[:, :, 0].astype(float).mean(0), rtol=1e-6)
        assert (mean > np.hypot(u.mean(0), v.mean(0))).all()  # the speed of the mean wind is another thing
        assert field("ws10").family is field("ws").family is Family.TRUNCATED_NORMAL

    def test_the_truth_has_its_own(self, archive):
        settings = PrepareConfig(
            input=str(archive / "f.grib"), truth=str(archive / "t.grib"), variables=["u10", "ws10"]
        )
        settings.output = str(archive / "s.zarr")
        store = open_store(prepare(settings))
        assert store.layout.surface == ("u10", "ws10")
        values = {(k["paramId"], k["dataDate"]): v.astype(np.float64) for k, v in decoded(archive / "t.grib")}
        for date, day in enumerate((20010101, 20010102)):
            speed = np.hypot(values[165, day], values[166, day])
            found = store.read(Part.TRUTH, date).surface[0, 0]
            np.testing.assert_array_equal(found[0], values[165, day])
            assert np.abs(found[1] - speed).max() <= store.quantisation_error["ws10"] < 1e-2

    def test_archives_in_place_offer_it(self, archive):
        pair = open_pair(archive / "f.grib", archive / "t.grib")
        assert pair.layout.surface == ("u10", "v10", "ws10") and pair.present(Part.TRUTH, 0)[1].all()
        part = pair.read(Part.FORECAST, 0, Selection(realization=(2,), variables=(), surface=("ws10",), rows=(1, 3)))
        np.testing.assert_array_equal(part.surface[0], pair.read(Part.FORECAST, 0).surface[1, :, 2:, 1:3])

    def test_one_that_the_archive_has_is_taken(self, archive):
        made = [encoded(207, 1, False, np.full(SHAPE, 3.0), step=0, member=m, date=20010101) for m in (1, 2, 3)]
        source = open_archive([archive / "f.grib", write(archive / "g.grib", made)], variables=["ws10"])
        assert len(source.layout.init_time) == 1 and (source.read(Part.FORECAST, 0).surface == 3).all()

    def test_a_component_is_missing(self, archive):
        kept = [m + b"7777" for m in (archive / "f.grib").read_bytes().split(b"7777") if m]
        path = write(archive / "g.grib", kept[:-1])
        gaps = find_gaps(open_archive(path, variables=["ws10"]))
        assert [str(gap) for gap in gaps] == ["member 3 at 2001-01-02T00 lacks ws10, lead 0 h"]
        with pytest.raises(UserError, match=r"variables=ws10: .* has none of it; it has t2m, u10"):
            open_archive(write(archive / "h.grib", [message("t2m"), kept[1]]), variables=["ws10"])


class TestPrecipitation:
    """ENS-10 accumulates from the start of the forecast, ERA5 by the hour: both become the forecast's intervals."""

    AMOUNTS = np.random.default_rng(5).gamma(0.3, 1e-3, (48, *SHAPE))  # m in each hour; much of it next to nothing

    @pytest.fixture
    def pair(self, tmp_path):
        self.AMOUNTS[24:, 2] = 0  # a row that stays dry on the second day
        forecast = [
            message("tp", self.AMOUNTS[:hours].sum(0), step=hours, member=member)
            for member in (1, 2)
            for hours in (24, 48)
        ]
        forecast += [message("tp", np.zeros(SHAPE), step=0, member=member) for member in (1, 2)]
        hourly = []
        for hour in range(48):  # as ERA5 has them: forecasts from 06 and 18 UTC, of steps 1 to 12
            valid = hour + 1
            base = (valid - 7) // 12 * 12 + 6  # hours since the start; the forecast before the hour ends
            day, time = divmod(base, 24)
            first, last = valid - 1 - base, valid - base
            date = 20010101 + day if day >= 0 else 20001231
            hourly.append(
                message("tp", self.AMOUNTS[hour], date=date, time=time * 100, step=f"{first}-{last}", member=None)
            )
        return open_pair(write(tmp_path / "f.grib", forecast), write(tmp_path / "t.grib", hourly))

    def test_both_sides_have_the_forecasts_intervals(self, pair):
        assert pair.lead_bounds == {"tp": [[0, 24], [24, 48]]}  # nothing has fallen at the start: no lead 0
        for part in (Part.FORECAST, Part.TRUTH):
            found = pair.read(part, 0).surface[0, :, 0]
            for lead, hours in enumerate((slice(0, 24), slice(24, 48))):
                np.testing.assert_allclose(found[lead], self.AMOUNTS[hours].sum(0), atol=2e-6)

    def test_a_dry_interval_is_dry(self, pair):
        found = pair.read(Part.FORECAST, 0).surface[:, 1, 0]
        assert (found >= 0).all() and found[:, 2].max() <= 1e-6
        assert (pair.read(Part.TRUTH, 0).surface[0, 1, 0, 2] == 0).all()

    def test_sums_of_the_truth_are_exact(self, pair):
        """Added in double precision and rounded once."""
        total = np.zeros(SHAPE)
        for keys, values in decoded(pair.truth.catalogue.files[0]):
            after = keys["dataDate"] * 24 + keys["dataTime"] // 100 + keys["endStep"] - 20010101 * 24
            if keys["dataDate"] == 20001231:
                after = keys["dataTime"] // 100 + keys["endStep"] - 24
            if 0 < after <= 24:
                total += values.astype(np.float64)
        np.testing.assert_array_equal(pair.read(Part.TRUTH, 0).surface[0, 0, 0], total.astype(np.float32))


def test_an_archive_without_fields_has_no_variable_at_all():
    with pytest.raises(UserError, match=r"variables=t2m: a\.grib has none of it; it has none at all$"):
        chosen(np.zeros(0, RECORD), "a.grib", ["t2m"], None, None)
