"""A store that is being built can be looked at; what is done is what the finished store will say of those dates."""

import gribfiles
import pytest

from data_prep import prepare
from ensemble_ml.config import InspectConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store.inspect import inspect


@pytest.fixture
def settings(tmp_path):
    dates = (20010101, 20010102, 20020101)
    gribfiles.ensemble(tmp_path / "ens.grib", names=("t", "t2m"), dates=dates)

    def make(**changes):
        return PrepareConfig(input=str(tmp_path / "ens.grib"), output=str(tmp_path / "a.zarr"), coarsen=2, **changes)

    return make


def look(tmp_path, **changes):
    return inspect(InspectConfig(store=str(tmp_path / "a.zarr"), speed=False, **changes))


def test_half_built_and_built(settings, tmp_path, capsys):
    prepare(settings(parts="1/3"))
    assert not (tmp_path / "a.zarr").exists()
    half = look(tmp_path, verify=True)
    assert not half["complete"] and half["dates"]["done"] == 1 and half["dates"]["count"] == 3
    assert "half-built: 1 of 3 init times are done" in capsys.readouterr().out
    assert half["sizes"]["parts"]["forecast"]["bytes"] > 0 and half["fingerprint"] is None and not half["gaps"]
    with pytest.raises(UserError, match=r"2 of 3 init times are not built: 2001-01-02T00, 2002-01-01T00; run prepare"):
        look(tmp_path, complete=True)
    prepare(settings(parts="2/3"))
    prepare(settings(parts="3/3"))
    whole = look(tmp_path, verify=True, complete=True)
    assert whole["complete"] and whole["provenance"]["coarsen"] == 2
    same = ("members", "lead_hours", "variables", "levels", "surface", "grid", "parts", "packing", "static", "masked")
    assert all(half[key] == whole[key] for key in same)
    assert half["statistics"]["t"]["500"]["std"] == pytest.approx(whole["statistics"]["t"]["500"]["std"], rel=0.3)
    assert whole["quantisation_error"]["t"] >= half["quantisation_error"]["t"] > 0


def test_names_of_a_half_built_store_are_in_its_own_order(settings, tmp_path):
    prepare(settings(parts="1/3", variables=["t2m", "t"], levels=[850, 500]))
    half = look(tmp_path)
    assert half["levels"] == [500, 850]
    assert 200 < half["statistics"]["t"]["500"]["mean"] < 300


def test_a_damaged_shard_of_a_half_built_store(settings, tmp_path):
    prepare(settings(parts="1/3"))
    shard = next(p for p in (tmp_path / "a.zarr.building" / "store").rglob("c.*") if p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"sha256|checksum|damaged"):
        look(tmp_path, verify=True)


def test_intervals_of_sums_are_shown_and_told_where_leads_cut_them(tmp_path, capsys, caplog):
    steps = [f"{step - 6}-{step}" for step in (6, 12, 18, 24)]
    gribfiles.ensemble(tmp_path / "ens.grib", names=("tp",), dates=(20010101, 20010102), steps=steps)
    settings = {"input": str(tmp_path / "ens.grib"), "output": str(tmp_path / "a.zarr"), "leads": [12, 24]}
    bounds = {"tp": [[6, 12], [18, 24]]}
    with caplog.at_level("INFO"):
        prepare(PrepareConfig(**settings, parts="1/2"))
    assert "tp: sums over 6-12, 18-24 h; the intervals between them are left out with their leads" in caplog.messages
    assert look(tmp_path)["lead_bounds"] == bounds
    prepare(PrepareConfig(**settings, parts="2/2"))
    assert look(tmp_path)["lead_bounds"] == bounds
    assert all(
        "intervals        tp 6-12, 18-24 h" in text for text in capsys.readouterr().out.split("tensor store")[1:]
    )
