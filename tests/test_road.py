"""The whole road by the command line, as a user walks it: archive, store, training, forecast, scores."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from fixtures_archive import tiny_archive  # noqa: F401

from ensemble_ml import cli
from ensemble_ml.inference.contents import TIME_AXES

REAL = Path(os.environ.get("ENSEMBLE_ML_REAL_DATA", Path(__file__).parents[2] / "shared" / "data"))
ERA5 = REAL / "era5-levels-members.grib"
QUICK = [
    "steps=3",
    "threads=1",
    "model.hidden=8",
    "model.points=16",
    "model.max_hidden=16",
    "model.precision=float32",
    "tracking.tensorboard=false",
]


def ensemble_ml(task: str, *arguments: object) -> None:
    assert cli.main([task, *map(str, arguments)]) == 0


@pytest.fixture(scope="module")
def road(tiny_archive, tmp_path_factory):  # noqa: F811
    """Store, run and forecasts from the embedded archive at its smallest."""
    folder = tmp_path_factory.mktemp("road")
    archive, store = tiny_archive, folder / "store.zarr"
    ensemble_ml(
        "prepare",
        f"input={archive}/ensemble",
        f"truth={archive}/truth",
        f"static={archive}/static.grib",
        f"output={store}",
    )
    ensemble_ml(
        "train", "experiment=quickstart", f"data.store={store}", f"output={folder}/runs", *QUICK, "max_minutes=0",
        "data.validation_members=2", "data.members=[1,2,3]",
    )  # fmt: skip
    checkpoint = folder / "runs" / "quickstart" / "checkpoints" / "best"
    for members in (1, 2, 3):
        ensemble_ml(
            "predict", f"checkpoint={checkpoint}", f"input={archive}/ensemble", f"members_in={members}",
            "dates=['2003']",
            f"output={folder}/from{members}",
        )  # fmt: skip
    return folder, archive, store, checkpoint


def test_forecasts_from_any_number_of_members(road):
    folder, *_ = road
    for members in (1, 2, 3):
        files = sorted((folder / f"from{members}").glob("forecast_*.nc"))
        assert len(files) == 2
        with xr.open_dataset(files[0]) as forecast:
            assert forecast.attrs["members_in"].split() == [str(n + 1) for n in range(members)]
            assert forecast["t_mean"].dims == (*TIME_AXES, "level", "latitude", "longitude")
            for name in ("t_mean", "t_stddev", "t_ensemble_spread", "tp_mean", "q_scale"):
                assert np.isfinite(forecast[name].values).all(), name
            assert (forecast["tp_mean"].values >= 0).all() and (forecast["t_stddev"].values > 0).all()


@pytest.mark.slow
def test_scores_from_store_and_from_raw_archive_agree(road):
    folder, archive, store, checkpoint = road
    common = [f"forecast={folder}/from2", "members_in=2", "bootstrap=100"]
    ensemble_ml("evaluate", *common, f"ensemble={store}", f"truth={store}", f"output={folder}/a")
    ensemble_ml("evaluate", *common, f"ensemble={archive}/ensemble", f"truth={archive}/truth", f"output={folder}/b")
    one, other = (json.loads((folder / name / "scores.json").read_text()) for name in "ab")
    assert (folder / "a" / "report.html").stat().st_size > 10_000
    lineage = json.loads((folder / "a" / "lineage.json").read_text())
    scores_json = Path(lineage["scores"]["path"])
    assert scores_json == folder / "a" / "scores.json"
    assert lineage["scores"]["sha256"] == hashlib.sha256(scores_json.read_bytes()).hexdigest()
    assert lineage["ensemble"]["provenance"]["input"] == [f"{archive}/ensemble"]
    (forecast,) = lineage["forecasts"]
    assert set(forecast["files"]) == {path.name for path in (folder / "from2").glob("*.nc")}
    meta = json.loads((checkpoint / "checkpoint.json").read_text())
    for origin in forecast["files"].values():
        assert origin["checkpoint_sha256"] == meta["sha256"] and str(checkpoint) in origin["source"]
        # Trained on the store that these forecasts are scored against.
        assert origin["training_data_fingerprint"] == lineage["ensemble"]["fingerprint"] == meta["data_fingerprint"]
    values = [[entry["ratio"] for entry in scores["summary"]] for scores in (one, other)]
    np.testing.assert_allclose(*values, rtol=1e-3)  # rain is packed anew in the store
    assert {claim["unit"] for claim in one["claims"]} == {"ratio", "%"}


def test_thresholds_members_and_a_region_by_the_command_line(road):
    folder, archive, _, checkpoint = road
    ensemble_ml(
        "predict", f"checkpoint={checkpoint}", f"input={archive}/ensemble", "dates=['2003-01-09']", "members_out=true",
        "thresholds={tp: [0.001, 0.01], t: [273.15]}", "region=[60,-20,30,40]", f"output={folder}/cut",
    )  # fmt: skip
    name = "forecast_2003010900.nc"
    with xr.open_dataset(folder / "cut" / name) as cut, xr.open_dataset(folder / "from3" / name) as whole:
        assert cut["tp_prob_above"].sizes["threshold_tp"] == 2 and cut["t_member"].sizes["realization"] == 3
        longitude = cut["longitude"].values
        assert (np.diff(longitude) > 0).all() and longitude[0] < 0 < longitude[-1]
        same = whole["t_mean"].sel(latitude=cut["latitude"], longitude=longitude % 360)
        np.testing.assert_array_equal(cut["t_mean"].values, same.values)


@pytest.mark.slow
def test_a_sweep_trains_one_run_a_seed(road, own_fits, tmp_path, monkeypatch):
    _, _, store, _ = road
    arguments = [
        "experiment=quickstart",
        f"data.store={store}",
        *QUICK,
        "data.validation_members=2",
        "data.members=[1,2]",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    ensemble_ml("train", "-m", *arguments, "run=seed${seed}", "seed=0,1")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [".fits", "seed0", "seed1"]
    assert len(list((tmp_path / "runs" / ".fits").iterdir())) == 2  # each seed has its own


def test_predict_from_store_equals_predict_from_archive(road):
    folder, _, store, checkpoint = road
    ensemble_ml(
        "predict", f"checkpoint={checkpoint}", f"input={store}", "members_in=3", "dates=['2003']", f"output={folder}/s"
    )
    name = min((folder / "s").iterdir()).name
    with xr.open_dataset(folder / "s" / name) as a, xr.open_dataset(folder / "from3" / name) as b:
        np.testing.assert_array_equal(a["t_mean"], b["t_mean"])
        np.testing.assert_allclose(a["tp_mean"], b["tp_mean"], atol=1e-5)


@pytest.mark.parametrize(
    ("task", "arguments", "text"),
    [
        ("prepare", ["input={folder}/nothing.grib", "output={folder}/x.zarr"], "nothing.grib"),
        ("prepare", ["input={archive}/ensemble", "output={store}"], "exists"),
        ("prepare", ["input={archive}/ensemble", "variables=[t,temprature]", "output={folder}/x.zarr"], "temprature"),
        ("prepare", ["input={folder}/cut.grib", "output={folder}/x.zarr"], "cut.grib"),
        ("train", ["run=x", "data.store={folder}/none.zarr", "output={folder}/runs"], "none.zarr"),
        ("train", ["experiment=quickstart", "data.store={store}", "output={folder}/runs"], "exists"),
        ("train", ["run=x", "data.store={store}", "data.train=['1999']", "output={folder}/runs"], "1999"),
        ("predict", ["checkpoint={folder}/none", "input={store}", "output={folder}/x"], "no such folder"),
        ("predict", ["checkpoint={checkpoint}", "input={store}", "output={folder}/from3", "dates=['2003']"], "exists"),
        ("predict", ["checkpoint={checkpoint}", "input={store}", "output={folder}/x", "members_in=7"], "members_in=7"),
        (
            "evaluate",
            ["members_in=2", "forecast={folder}/none", "ensemble={store}", "truth={store}", "output={folder}/x"],
            "none",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(road, capfd, task, arguments, text):
    folder, archive, store, checkpoint = road
    whole = (archive / "static.grib").read_bytes()
    (folder / "cut.grib").write_bytes(whole[: len(whole) - 10])
    before = contents(folder)
    capfd.readouterr()
    filled = [a.format(folder=folder, archive=archive, store=store, checkpoint=checkpoint) for a in arguments]
    assert cli.main([task, *filled]) == cli.STATUS_USER
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ensemble-ml: ")]
    assert len(lines) == 1 and text in lines[0], lines
    assert contents(folder) == before


def contents(folder):
    """All files but the tables of GRIB files, which are kept: they cost time to make, and no store is made of them."""
    return sorted(path for path in folder.rglob("*") if not any(part.endswith(".index") for part in path.parts))


@pytest.mark.skipif(not ERA5.exists(), reason=f"real data are absent: {ERA5}")
@pytest.mark.slow
def test_real_ensemble_of_analyses(tmp_path):
    """ERA5's ten members, t and z at 500 and 850 hPa: a smoke test on real fields, never a claim."""
    store = tmp_path / "era5.zarr"
    ensemble_ml("prepare", f"input={ERA5}", "truth=null", f"output={store}")
    ensemble_ml("train", "experiment=era5_members", f"data.store={store}", f"output={tmp_path}", "threads=1")
    run = tmp_path / "era5_members"
    assert not (run / "checkpoints" / "best").exists()  # there is no validation date
    ensemble_ml(
        "predict", f"checkpoint={run}/checkpoints/last", f"input={ERA5}", "members_in=5", "dates=['2017-01-02T12']",
        f"output={tmp_path}/forecast",
    )  # fmt: skip
    with xr.open_dataset(tmp_path / "forecast" / "forecast_2017010212.nc") as forecast:
        assert forecast["z_ensemble_spread"].shape == (1, 1, 2, 61, 120)
        assert "z_mean" not in forecast
    ensemble_ml(
        "evaluate", f"forecast={tmp_path}/forecast", f"ensemble={ERA5}", "members_in=5", f"output={tmp_path}/scores",
        "bootstrap=100",
    )  # fmt: skip
    scores = json.loads((tmp_path / "scores" / "scores.json").read_text())
    ours = [e["ratio"] for e in scores["summary"] if e["entrant"] == "forecast" and e["metric"].startswith("spread")]
    assert ours and all(np.isfinite(ours))
