"""The benchmark on real ensembles runs where the files are, and says so where they are not."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.stations.benchmark import ERA5, STATION, run
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize
from ensemble_ml.errors import UserError

REAL = Path(os.environ.get("ENSEMBLE_ML_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def ran(tmp_path, *sections, data=REAL):
    config = BenchmarkConfig("stations", str(tmp_path), size=BenchmarkSize.tiny, only=sections, files=str(data))
    found = json.loads(run(config).read_text())
    assert found["size"] == "tiny"  # so that nothing of it can be published
    return found


def test_absent_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=f"^files={tmp_path}: holds none of {STATION}, {ERA5}$"):
        ran(tmp_path, "innsbruck", "era5", data=tmp_path)


def test_a_folder_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("ENSEMBLE_ML_REAL_DATA", raising=False)
    config = BenchmarkConfig("stations", str(tmp_path), size=BenchmarkSize.tiny)
    with pytest.raises(UserError, match=r"^files: name the folder with"):
        run(config)
    monkeypatch.setenv("ENSEMBLE_ML_REAL_DATA", str(tmp_path))
    with pytest.raises(UserError, match=f"^files={tmp_path}: holds none of"):
        run(config)


@pytest.mark.skipif(not (REAL / STATION).is_file(), reason=f"{STATION} is not there; set ENSEMBLE_ML_REAL_DATA")
def test_innsbruck(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / STATION).symlink_to(REAL / STATION)
    found = ran(tmp_path, "innsbruck", "era5", data=tmp_path / "data")
    assert any(f"skipped, {tmp_path / 'data' / ERA5} is not there" in note for note in found["notes"])
    score = {name.partition(": ")[2]: figure["median"] for name, figure in found["figures"].items() if "CRPS: " in name}
    assert found["claims"][0]["holds"]  # the coefficients of EMOS
    assert score["seasonal EMOS 11"] < score["EMOS 11"] < score["raw 11, N(m, (1+1/M) s^2)"]
    assert score["EMOS 11"] < score["debiased raw 11"] and score["network 11"] < score["debiased raw 11"]
    assert score["raw 11, fair CRPS of members"] != score["raw 11, N(m, (1+1/M) s^2)"]
    figure = found["figures"]["Innsbruck 2011-2015, CRPS: EMOS 5"]
    assert figure["min"] < figure["median"] < figure["max"]


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / ERA5).is_file(), reason=f"{ERA5} is not there; set ENSEMBLE_ML_REAL_DATA")
def test_era5(tmp_path):
    found = ran(tmp_path, "era5")
    assert [claim["unit"] for claim in found["claims"]] == ["ratio"] * 3
    assert all(0 < claim["value"] < 3 for claim in found["claims"])
