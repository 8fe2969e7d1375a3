"""Real ensembles of ECMWF, where they are at hand: every message reaches the store bit for bit as ecCodes has it."""

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from gribfiles import decoded

from data_prep import find_gaps, open_archive, prepare
from ensemble_ml.config import Control, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import by_param_id
from ensemble_ml.store import Part, open_store

FOLDER = Path(os.environ.get("ENSEMBLE_ML_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
FILES = ("era5-levels-members.grib", "ens_storm.grib", "wgust_ens.grib", "z500_ens.grib")


def real(name):
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; set ENSEMBLE_ML_REAL_DATA to the folder of real files")
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    made = {}

    def get(name):
        if name not in made:
            made[name] = open_store(prepare(PrepareConfig(input=str(real(name)), output=str(folder / f"{name}.zarr"))))
        return made[name]

    return get


def place_of(layout, keys):
    """Where a message belongs: part, date, and the index into its block."""
    field = by_param_id(keys["paramId"])
    control = keys["dataType"] == "cf"
    day, time = keys["dataDate"], keys["dataTime"]
    start = np.datetime64(f"{day // 10000}-{day // 100 % 100:02d}-{day % 100:02d}T{time // 100:02d}")
    place = [0 if control else layout.realization.index(keys["number"]), layout.lead_hours.index(keys["endStep"])]
    if field.surface:
        place.append(layout.surface.index(field.name))
    else:
        place += [layout.variables.index(field.name), layout.levels.index(keys["level"])]
    part = Part.CONTROL if control else Part.FORECAST
    return part, layout.init_time.tolist().index(start.astype("datetime64[ns]").item()), field.surface, tuple(place)


@pytest.mark.parametrize("name", FILES)
def test_every_message_is_bit_equal_to_eccodes(stores, name):
    store, blocks, seen = stores(name), {}, 0
    for keys, values in decoded(real(name)):
        part, date, surface, place = place_of(store.layout, keys)
        if (part, date) not in blocks:
            blocks[part, date] = store.read(part, date)
        block = blocks[part, date].surface if surface else blocks[part, date].pressure
        np.testing.assert_array_equal(block[place].view(np.uint32), values.view(np.uint32))
        seen += 1
    there = [
        store.present(part, d) for part in (Part.FORECAST, Part.CONTROL) for d in range(len(store.layout.init_time))
    ]
    assert sum(int(one.sum()) for both in there for one in both) == seen  # all messages, and nothing else
    assert store.quantisation_error == {}


@pytest.mark.parametrize("name", FILES)
def test_the_archive_reads_as_the_store(stores, name):
    store, archive = stores(name), open_archive(real(name))
    assert find_gaps(archive) == [] and find_gaps(archive, Part.CONTROL) == []
    for part in store.parts:
        for date in range(len(store.layout.init_time)):
            found, expected = archive.read(part, date), store.read(part, date)
            np.testing.assert_array_equal(found.pressure, expected.pressure)
            np.testing.assert_array_equal(found.surface, expected.surface)


def test_analyses_of_ten_members_as_a_forecast(stores):
    store = stores("era5-levels-members.grib")
    lay = store.layout
    assert (lay.realization, lay.lead_hours, lay.levels) == (tuple(range(10)), (0,), (500, 850))
    assert (lay.variables, len(lay.init_time), lay.grid.shape) == (("t", "z"), 4, (61, 120))
    assert lay.grid.wraps and not store.has(Part.CONTROL) and not store.has(Part.TRUTH)


def test_storm(stores):
    store = stores("ens_storm.grib")
    lay = store.layout
    assert (lay.variables, lay.levels, lay.surface, lay.lead_hours) == (("z",), (850,), ("fg10",), (72, 78, 84))
    assert len(lay.realization) == 50 and 0 not in lay.realization and store.has(Part.CONTROL)
    assert store.lead_bounds == {"fg10": [[69, 72], [75, 78], [81, 84]]}
    for part in (Part.FORECAST, Part.CONTROL):
        pressure, surface = store.present(part, 0)
        assert surface.all() and pressure[:, 1].all() and not pressure[:, [0, 2]].any()
        assert np.isnan(store.read(part, 0).pressure[:, 0]).all()
    assert not lay.grid.wraps and lay.grid.longitude[[0, -1]].tolist() == [-19.5, 15.75]


def test_gusts_of_12_bits(stores):
    store = stores("wgust_ens.grib")
    assert store.layout.surface == ("fg10",) and store.layout.variables == ()
    assert store.lead_bounds == {"fg10": [[54, 60], [60, 66], [66, 72]]}
    assert not store.layout.grid.wraps and str(store.layout.init_time[0])[:13] == "2018-11-20T12"


def test_control_counted_as_a_member(tmp_path):
    config = PrepareConfig(input=str(real("z500_ens.grib")), output=str(tmp_path / "s.zarr"), control=Control.include)
    store = open_store(prepare(config))
    assert store.layout.realization == tuple(range(51)) and not store.has(Part.CONTROL)
    assert not store.layout.grid.wraps


def test_values_agree_with_cfgrib(stores):
    cfgrib = pytest.importorskip("cfgrib")
    data = cfgrib.open_dataset(str(real("era5-levels-members.grib")), indexpath="", decode_timedelta=False)
    found = stores("era5-levels-members.grib").read(Part.FORECAST, 2).pressure
    wanted = data.isel(time=2).sortby("isobaricInhPa").transpose("number", "isobaricInhPa", "latitude", "longitude")
    for v, name in enumerate(("t", "z")):
        np.testing.assert_array_equal(found[:, 0, v], wanted[name].values.astype(np.float32))


def test_the_store_opens_in_xarray(stores):
    store = stores("ens_storm.grib")
    data = xr.open_dataset(store.path, engine="ensemble_ml")
    np.testing.assert_array_equal(data["fg10"][0].values, store.read(Part.FORECAST, 0).surface[:, :, 0])


def test_a_station_is_no_grid():
    with pytest.raises(UserError, match=r"gefs.*: t2m: has no latitude and longitude axes"):
        open_archive(real("gefs_innsbruck_temperature.nc"))
