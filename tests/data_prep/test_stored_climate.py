"""The model climate that `prepare climate_days=9` leaves in a store: the same as made on the spot, shown, and used."""

import logging
import shutil
from dataclasses import replace

import building
import gribfiles
import numpy as np
import pytest
import xarray as xr

from data_prep import open_pair, prepare
from ensemble_ml.config import InspectConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection, open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.climate import PROBABILITIES, ModelClimate
from ensemble_ml.store.inspect import inspect
from ensemble_ml.verification.samples import Setting
from ensemble_ml.verification.scoring import climate_note, model_climate

DATES = (20001229, 20010103, 20011230, 20020104, 20020601, 20030102)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("climate")
    archive = gribfiles.ensemble(folder / "a.grib", names=("t", "t2m"), dates=DATES, members=range(1, 11), steps=(24,))
    for name, days in (("with", 9), ("without", 0)):
        prepare(PrepareConfig(input=str(archive), output=str(folder / f"{name}.zarr"), climate_days=days))
    return folder


@pytest.mark.slow
def test_is_what_other_seasons_say(made):
    store = open_store(made / "with.zarr")
    members = [store.read(Part.FORECAST, date) for date in range(6)]
    for date, others in {0: [2, 3, 5], 1: [2, 3, 5], 2: [0, 1, 5], 3: [0, 1, 5], 5: [0, 1, 2, 3]}.items():
        pooled = np.concatenate([members[other].pressure for other in others]).astype(float)
        ground = np.concatenate([members[other].surface for other in others]).astype(float)
        found = ModelClimate(store).quantiles(date)
        np.testing.assert_allclose(found.pressure, np.quantile(pooled, PROBABILITIES, axis=0), rtol=1e-6)
        np.testing.assert_allclose(found.surface, np.quantile(ground, PROBABILITIES, axis=0), rtol=1e-6)
    assert np.isnan(store.climate(4, 24, "t")).all() and not ModelClimate(store).enough(4)  # no other June


def test_is_taken_from_the_store_and_nothing_is_read(made, monkeypatch):
    store, plain = open_store(made / "with.zarr"), open_store(made / "without.zarr")
    assert store.climate_days == 9 and plain.climate_days == 0 and store.fingerprint() == plain.fingerprint()
    some = Selection(None, (24,), ("t",), (850, 500), ("t2m",), (1, 5))
    expected = ModelClimate(plain).quantiles(1, some)
    with monkeypatch.context() as patch:
        patch.setattr(store, "read", None)
        found = ModelClimate(store).quantiles(1, some)
    np.testing.assert_array_equal(found.pressure, expected.pressure)
    np.testing.assert_array_equal(found.surface, expected.surface)
    assert ModelClimate(store, days=8).stored is None and ModelClimate(store, probabilities=(0, 1)).stored is None
    with pytest.raises(UserError, match="holds no model climate; prepare it with climate_days=9"):
        plain.climate(1, 24, "t")


def test_evaluation_says_which_it_uses(made):
    for name, said in (("with", "as the store holds it."), ("without", "made for this evaluation.")):
        source = open_pair(str(made / f"{name}.zarr"))
        setting = Setting(source, (), 5, np.arange(0), np.arange(0), np.ones((2, 7, 12)), False, climate_days=9)
        assert climate_note(setting).endswith(said)
        assert (model_climate(setting).stored is None) == (name == "without")
    assert "There is no extreme forecast index" in climate_note(replace(setting, climate_days=0))


def test_is_shown(made, capsys):
    found = inspect(InspectConfig(store=str(made / "with.zarr"), speed=False, verify=True))["climate"]
    assert found["days"] == 9 and found["bytes"] > 0
    assert "17 quantiles of other years within 9 days of the date" in capsys.readouterr().out
    assert inspect(InspectConfig(store=str(made / "without.zarr"), speed=False))["climate"] is None
    with xr.open_zarr(made / "with.zarr", consolidated=True) as data:
        axes = ("init_time", "lead_time", "variable", "climate_probability", "level", "latitude", "longitude")
        assert data["climate_pressure"].dims == axes
    with xr.open_dataset(made / "with.zarr", engine="ensemble_ml") as data:
        assert set(data.data_vars) == {"t", "t2m", "t_mean", "t2m_mean", "t_spread", "t2m_spread"}


def test_one_year_is_refused_before_anything_is_built(made, tmp_path):
    settings = PrepareConfig(
        input=str(made / "a.grib"), output=str(tmp_path / "a.zarr"), climate_days=9, dates=["2002"], index=None
    )
    with pytest.raises(UserError, match=r"climate_days=9: a model climate is made of other years; .* of 2002 alone"):
        prepare(settings)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_end_is_taken_up_again(made, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    settings = PrepareConfig(input=str(made / "a.grib"), output=str(tmp_path / "with.zarr"), climate_days=9)
    taken = ModelClimate.quantiles

    def stops(self, date, *rest):
        if date == 3:
            raise KeyboardInterrupt
        return taken(self, date, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModelClimate, "quantiles", stops)
        prepare(settings)
    assert not (tmp_path / "with.zarr").exists() and Build.unfinished(tmp_path / "with.zarr")
    prepare(settings)
    assert "6 of 6 init times are built already" in caplog.text
    assert building.contents(tmp_path / "with.zarr") == building.contents(made / "with.zarr")


def test_a_file_of_it_that_is_gone_is_no_climate_without_values(made, tmp_path):
    """Zarr would read it as NaN, which stands for too few dates here: a purge of scratch while the store is open."""
    shutil.copytree(made / "with.zarr", tmp_path / "s.zarr")
    store = open_store(tmp_path / "s.zarr")
    assert np.isfinite(store.climate(0, 24, "t")).all()
    for wrong in ((99, 24, "t"), (0, 6, "t"), (0, 24, "q")):
        with pytest.raises(UserError, match="it holds"):
            store.climate(*wrong)
    for chunk in (tmp_path / "s.zarr" / "climate_pressure").glob("c.0.*"):
        chunk.unlink()
    with pytest.raises(UserError, match="climate_pressure: damaged file of a tensor store"):
        store.climate(0, 24, "t")
    assert np.isfinite(store.climate(0, 24, "t2m")).all()
