"""What an archive has beside what is asked for, or lacks everywhere: it is told, and nothing takes its place."""

import logging

import netCDF4
import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, archive_of, dataset, ensemble, message, noise, write

from data_prep import prepare
from ensemble_ml.config import InspectConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.inspect import inspect

CELLS = {
    "latitude": ("latitude", GLOBE[0], {"units": "degrees_north"}),
    "longitude": ("longitude", GLOBE[1], {"units": "degrees_east"}),
}
SHAPE = len(GLOBE[0]), len(GLOBE[1])


def prepared(tmp_path, **settings):
    given = {key: str(value) if key in ("input", "truth", "static") else value for key, value in settings.items()}
    return open_store(prepare(PrepareConfig(output=str(tmp_path / "store.zarr"), **given)))


def test_soil_is_not_the_surface(tmp_path):
    """ecCodes' CF name of both is surface_temperature, and old services wrote no GRIB parameter beside it."""
    data = dataset(t="skt").isel(isobaricInhPa=0, drop=True)
    soil = {"units": "K", "standard_name": "surface_temperature"}
    data["stl1"] = data.skt.copy(data=data.skt.values + 5, deep=True).assign_attrs(soil)
    data["deep"] = data.stl1.assign_attrs(soil | {"long_name": "Soil temperature level 1"})
    source = archive_of(data, tmp_path)
    assert source.layout.surface == ("skt",)
    np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[0, 0, 0], data.skt.values[0, 0, 0])


def test_leads_and_levels_that_no_truth_verifies_are_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    days = (20010101, 20010102, 20010103)
    path = ensemble(tmp_path / "a.grib", steps=(6, 12, 24), dates=days, names=("t", "t2m"))
    valid = (20010102, 20010103, 20010104)
    truth = [message("t", member=None, date=day, level=500) for day in valid]
    truth += [message("t2m", member=None, date=day, time=hour) for day in (*valid, days[0]) for hour in (0, 600, 1200)]
    write(tmp_path / "t.grib", truth)
    store = prepared(tmp_path, input=path, truth=tmp_path / "t.grib")
    assert store.present(Part.TRUTH, 0)[0][0, :, 0].tolist() == [[False, False], [False, False], [True, False]]
    told = [line for line in caplog.messages if "without truth" in line]
    assert len(told) == 1
    assert told[0].endswith("t stays without truth at these leads: 6 h, 12 h, 24 h (850 hPa)"), told


@pytest.mark.parametrize(
    ("units", "kind"),
    [("days since 1-1-1 00:00:0.0", "f8"), ("days since 2001-01-01", "f4"), ("hours since 1900-01-01", "f8")],
)
def test_days_as_floating_numbers_are_whole_hours(tmp_path, units, kind):
    """They fall short of the hour by up to a second or two."""
    path = ensemble(tmp_path / "a.grib", steps=(1, 2, 3, 6), names=("t2m",), dates=(20011001, 20011002))
    hours = np.datetime64("2001-10-01T00", "h") + np.arange(40)
    with netCDF4.Dataset(tmp_path / "t.nc", "w") as file:
        for name, ticks, said in (
            ("time", netCDF4.date2num(hours.tolist(), units, "standard"), units),
            ("latitude", GLOBE[0], "degrees_north"),
            ("longitude", GLOBE[1], "degrees_east"),
        ):
            file.createDimension(name, len(ticks))
            axis = file.createVariable(name, kind if name == "time" else "f8", (name,))
            axis.units, axis[:] = said, ticks
        values = file.createVariable("t2m", "f4", ("time", "latitude", "longitude"))
        values.units, values[:] = "K", np.stack([noise(seed=seed) for seed in range(40)])
    assert prepared(tmp_path, input=path, truth=tmp_path / "t.nc").present(Part.TRUTH, 0)[1].all()


def test_what_a_control_alone_has_makes_no_place_in_the_store(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made = [message("t2m", member=m, step=step, seed=m + step) for m in (1, 2, 3) for step in (12, 24)]
    made += [message("t2m", member=0, kind="cf", step=step, seed=step) for step in (6, 12, 18, 24)]
    made += [message("msl", member=0, kind="cf", step=12), message("t", member=0, kind="cf", step=12)]
    store = prepared(tmp_path, input=write(tmp_path / "a.grib", made))
    assert store.layout.lead_hours == (12, 24) and store.layout.names == ("t2m",)
    assert store.present(Part.FORECAST, 0)[1].all() and store.present(Part.CONTROL, 0)[1].all()
    told = [line for line in caplog.messages if "and no member: left out" in line]
    assert [line.partition("the control has ")[2].partition(",  and")[0] for line in told] == [
        "variables t, msl, and no member: left out",
        "leads 6, 18, and no member: left out",
    ]


@pytest.mark.parametrize("form", [2, 3])
def test_sea_in_a_land_mask_of_integers(tmp_path, form):
    """Zarr writes no chunk that is zero everywhere."""
    path, mask = ensemble(tmp_path / "a.grib", steps=(24,), names=("t2m",)), np.zeros(SHAPE, "i1")
    mask[:4, :6] = 1
    data = xr.Dataset({"lsm": (("latitude", "longitude"), mask, {"units": "1"})}, CELLS)
    chunks = {"lsm": {"chunks": (4, 6)}}
    data.to_zarr(tmp_path / "s.zarr", zarr_format=form, consolidated=False, encoding=chunks)
    store = prepared(tmp_path, input=path, static=tmp_path / "s.zarr")
    np.testing.assert_array_equal(store.static()["lsm"], mask)


def test_two_gusts_are_refused_only_where_gusts_are_read(tmp_path):
    path = ensemble(tmp_path / "a.grib", steps=(6,), names=("t2m", "fg10"))
    times = np.datetime64("2001-01-01T00", "ns") + np.arange(48) * np.timedelta64(1, "h")
    data = xr.Dataset(coords=CELLS | {"valid_time": ("valid_time", times, {"standard_name": "time"}), "number": 0})
    for name, number, units, kind in (
        ("t2m", 167, "K", "instant"),
        ("fg10", 49, "m s**-1", "max"),
        ("i10fg", 228029, "m s**-1", "instant"),
    ):
        values = np.abs(np.stack([noise(seed=number + hour) for hour in range(48)])).astype(np.float32)
        about = {"GRIB_paramId": number, "units": units, "GRIB_stepType": kind}
        data[name] = ("valid_time", "latitude", "longitude"), values, about
    data.to_netcdf(tmp_path / "t.nc")
    store = prepared(tmp_path, input=path, truth=tmp_path / "t.nc", variables=["t2m"])
    assert store.present(Part.TRUTH, 0)[1].all()
    with pytest.raises(UserError, match=r"fg10, member 0, 2001-01-01T06, lead 0 h: stands twice in .*t.nc"):
        prepared(tmp_path, input=path, truth=tmp_path / "t.nc", overwrite=True)


def test_an_embedded_archive_holds_static_fields_and_a_grid(tmp_path):
    folder = tmp_path / "arch"
    ensemble(folder / "ensemble" / "a.grib", steps=(24,), names=("t2m",))
    (folder / "archive.json").write_text("{}")
    write(folder / "static.grib", [message("orog", member=None)])
    store = prepared(tmp_path, input=folder, static=folder, regrid=str(folder))
    assert list(store.static()) == ["orog"] and store.layout.grid.shape == SHAPE
    (folder / "static.grib").unlink()
    with pytest.raises(UserError, match=r"archive.json stands there but no static.grib; simulate it anew"):
        prepared(tmp_path, input=folder, static=folder, overwrite=True)


@pytest.mark.parametrize("key", ["truth", "static"])
def test_an_empty_path_is_not_the_folder_one_stands_in(tmp_path, key):
    with pytest.raises(UserError, match=f"{key}: holds an empty path; give one, or set {key}=null"):
        prepared(tmp_path, input=ensemble(tmp_path / "a.grib"), **{key: ""})


def test_fields_that_nobody_has_have_no_mean(tmp_path, capsys):
    made = [message("t", member=m, level=level, seed=m + level) for m in (1, 2, 3) for level in (500, 850)]
    made += [message("z", member=m, level=500, seed=m) for m in (1, 2, 3)]
    store = prepared(tmp_path, input=write(tmp_path / "a.grib", made))
    inspect(InspectConfig(store=str(store.path), speed=False))
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["z850"] == ["none"] * 4 + ["m2", "s-2", "none"]
    assert lines["z500"][-1] == "exact" and "none" not in lines["z500"]
