"""An exported checkpoint predicts the same, and its card says what it was trained on, scored, and cannot do."""

import ctypes
import json
import os

import numpy as np
import pytest
import xarray as xr
from stores import make_store

from ensemble_ml import cli
from ensemble_ml.config import DataConfig, ExportConfig, ModelConfig, PredictConfig, TrackingConfig, TrainConfig
from ensemble_ml.errors import UserError
from ensemble_ml.inference import export, predict
from ensemble_ml.inference.card import model_card
from ensemble_ml.training import load_checkpoint, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    store = make_store(folder / "store.zarr", dates=12, levels=(850,), variables=("t",), surface=("tp",), shape=(9, 16))
    config = TrainConfig(
        run="tiny", output=str(folder), steps=2, batch_size=2,
        data=DataConfig(store=store.path, train=["2001-01-01/2001-01-10"], validation=["2001-01-17/2001-01-31"],
            members=[3]),
        model=ModelConfig(hidden=8, max_hidden=8, points=16, depth=1),
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip
    train(config)
    return folder / "tiny" / "checkpoints" / "last", store


@pytest.mark.slow
def test_inspect_shows_the_card_of_a_run(trained, capsys):
    checkpoint, store = trained
    best = checkpoint.parent / "best"
    assert cli.main(["inspect", str(checkpoint.parent.parent)]) == 0
    text, loaded = capsys.readouterr().out, load_checkpoint(best)
    step, scores = loaded.meta["step"], loaded.meta["scores"]
    assert text.startswith(
        f"{best}: checkpoint of step {step}; on 4 validation dates: crps_ratio {scores['crps_ratio']:.4g}"
    )
    assert text.rstrip().endswith(model_card(loaded.spec, loaded.meta, None).rstrip())
    assert cli.main(["inspect", str(best), "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"] == loaded.sha256 and found["validation"] == scores and found["members"] == [3]
    assert found["variables"] == ["t"] and found["levels"] == [850] and found["surface"] == ["tp"]
    assert found["lead_hours"] == list(loaded.spec.leads_out) and found["grid"] == store.layout.grid.describe()
    dates = loaded.meta["training_dates"]
    assert found["training_dates"] == {"count": len(dates), "first": dates[0], "last": dates[-1]}


def test_what_killed_exports_left_is_removed_by_name_and_not_by_pattern(trained, tmp_path):
    own, other = (tmp_path / f".{name}.partial-0" for name in ("model[1]", "model1"))
    for draft in (own, other):
        draft.mkdir()
        os.utime(draft, (0, 0))
    export(ExportConfig(str(trained[0]), str(tmp_path / "model[1]")))
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "model[1]"]


def test_inspect_shows_the_card_that_an_export_has(trained, tmp_path, capsys):
    folder = export(ExportConfig(str(trained[0].parent.parent), str(tmp_path / "model")))
    (folder / "MODEL_CARD.md").write_text("# With scores\n")
    assert cli.main(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("\n\n# With scores\n")


SCORES = {
    "headline": ["At 48 h: CRPS 3 % lower."],
    "notes": ["Only one year."],
    "dates": {"test": ["2001-01-12T00", "2001-01-15T00"]},
    "claims": [
        {"claim": "CRPS lower", "value": 3.0, "unit": "%", "low": 1.0, "high": None, "holds": False,
         "certain": False, "enough_blocks": False, "forecast": "forecast"},
        {"claim": "Spread better", "value": 0.8, "unit": "ratio", "low": 0.7, "high": 0.9, "holds": True,
         "certain": True, "enough_blocks": True, "forecast": "forecast"},
    ],
    "strata": [
        {"kind": "region", "stratum": "tropics", "lead_hours": 48, "metric": "crps", "reference": "raw_10",
         "ratio": 1.1, "low": 1.05, "worse": True, "forecast": "forecast"},
        {"kind": "season", "stratum": "winter", "lead_hours": 24, "metric": "crps", "reference": "raw_10",
         "ratio": 1.2, "low": 1.15, "worse": True, "forecast": "forecast"},
        {"kind": "season", "stratum": "summer", "lead_hours": 24, "metric": "crps", "reference": "raw_10",
         "ratio": 1.2, "low": 0.9, "worse": False, "forecast": "forecast"},
    ],
}  # fmt: skip


def test_an_exported_checkpoint_predicts_the_same(trained, tmp_path):
    checkpoint, store = trained
    made_by = json.loads((checkpoint / "checkpoint.json").read_text())["sha256"]
    content = SCORES | {"forecasts": [{"label": "forecast", "checkpoints": [made_by], "members_in": ["1", "2", "3"]}]}
    (tmp_path / "scores.json").write_text(json.dumps(content))
    given = ExportConfig(str(checkpoint), str(tmp_path / "model"), scores=str(tmp_path / "scores.json"))
    folder = export(given)
    assert sorted(path.name for path in folder.iterdir()) == ["MODEL_CARD.md", "checkpoint.json", "model.safetensors"]
    made = []
    for name, path in (("a", checkpoint), ("b", folder)):
        config = PredictConfig(str(path), store.path, output=str(tmp_path / name), members_in=3, dates=["2001-01-15"])
        predict(config, store)
        made.append(xr.load_dataset(next((tmp_path / name).glob("*.nc"))))
    np.testing.assert_array_equal(made[0].t_mean, made[1].t_mean)
    card = (folder / "MODEL_CARD.md").read_text()
    best = json.loads((checkpoint / "checkpoint.json").read_text())["best"]["step"] == 2
    for words in (
        f"{'The validation dates' if best else 'No date'} chose the checkpoint", "It is calibrated on average",
        "# Model card: tiny", "| hours of init times | 00 UTC |",
        "| `tp` | total precipitation | m | surface |  | censored shifted gamma |",
        "| calibration | the scale of each lead, variable and level is multiplied by ", "| test | 2 | 2001-01-12 |",
        "- At 48 h: CRPS 3 % lower.", "| claim | measured | interval | better | certain |",
        "| CRPS lower | 3 % | none | yes | no, few blocks |",
        "| Spread better | 0.8 ratio | 0.7 to 0.9 | yes | yes |", "- Only one year.",
        "test dates had no part in training",
        "- From 3 members, tropics, 48 h: worse than raw_10, CRPS x 1.100.\n",
        "- From 3 members, winter, 24 h: worse than raw_10, CRPS x 1.200.\n", "Range of the inputs in training",
    ):  # fmt: skip
        assert words in card, words
    assert "summer" not in card


def test_a_card_tells_its_forecasts_apart(trained, tmp_path):
    checkpoint, _ = trained
    mine = json.loads((checkpoint / "checkpoint.json").read_text())["sha256"]
    given = {"a": ["1"], "b": ["1", "2", "3"], "c": ["4", "5", "6"], "d": []}
    made = [{"label": label, "checkpoints": [mine], "members_in": members} for label, members in given.items()]
    content = SCORES | {"forecasts": made, "strata": [SCORES["strata"][0] | {"forecast": label} for label in given]}
    content["claims"] = [SCORES["claims"][0] | {"enough_blocks": True, "advantage": "made from 3 members, not from 2"}]
    content["claims"][0]["forecast"] = "b"
    (tmp_path / "scores.json").write_text(json.dumps(content))
    export(ExportConfig(str(checkpoint), str(tmp_path / "model"), scores=str(tmp_path / "scores.json")))
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    for who in ("From 1 member", "b", "c", "d"):
        assert f"- {who}, tropics, 48 h: worse than raw_10, CRPS x 1.100.\n" in card
    assert "| yes | no, made from 3 members, not from 2 |" in card


def test_a_card_claims_no_calibration_that_was_not_made(trained):
    checkpoint = load_checkpoint(trained[0])
    assert all(width != 1 for row in checkpoint.meta["widths"] for width in row)
    card = model_card(checkpoint.spec, checkpoint.meta | {"widths": [[1.0, 1.0], [1.0, 1.0]]}, None)
    assert "| calibration | none: too few validation dates had a truth |" in card
    assert "calibrated on average" not in card
    card = model_card(checkpoint.spec, checkpoint.meta | {"widths": [[1.0, 0.9], [1.25, 1.0]]}, None)
    assert (
        "| calibration | the scale of 2 of 4 fields is multiplied by 0.900 to 1.250, from validation with at most"
        in card
    )


def test_a_card_says_whose_weights_were_calibrated(trained):
    checkpoint = load_checkpoint(trained[0])
    card = model_card(checkpoint.spec, checkpoint.meta | {"step": 9, "validated_step": 4}, None)
    assert "(of the weights of step 4; these are of step 9) |" in card
    card = model_card(checkpoint.spec, checkpoint.meta | {"step": 9, "validated_step": 9}, None)
    assert "of the weights of step" not in card
    card = model_card(checkpoint.spec, checkpoint.meta | {"step": 9, "validated_step": None}, None)
    assert "members (of the run that this one began from) |" in card


def test_a_card_says_from_how_many_members_whose_spread_and_over_what_hours(trained):
    checkpoint = load_checkpoint(trained[0])
    card = model_card(checkpoint.spec, checkpoint.meta | {"lead_bounds": {"tp": [None, [0, 24], [24, 48]]}}, None)
    assert "the full ensemble's spread, of 6 members" in card
    assert "| from | a reduced ensemble of 1 or more members; trained with 3 |" in card and "members_in=3 " in card
    assert "| `tp` | total precipitation | m | surface | 0 to 24 h, 24 to 48 h | censored shifted gamma |" in card


def test_a_card_counts_test_dates_that_earlier_runs_have_seen(trained):
    checkpoint = load_checkpoint(trained[0])
    scores = SCORES | {"forecasts": [{"label": "forecast", "checkpoints": [checkpoint.sha256], "members_in": ["1"]}]}
    earlier = {"training": ["2001-01-12T00:00"], "validation": []}
    card = model_card(checkpoint.spec, checkpoint.meta | {"earlier_dates": earlier}, scores)
    assert "| training of earlier runs | 1 | 2001-01-12 | 2001-01-12 |\n| validation of earlier runs | 0 |" in card
    assert "1 test dates had a part in training" in card
    earlier = {"training": ["2001-01-12T00:30"], "validation": []}  # another init time than that of the test
    card = model_card(checkpoint.spec, checkpoint.meta | {"earlier_dates": earlier}, scores)
    assert "test dates had no part in training" in card


def test_a_card_without_scores_says_so(trained, tmp_path):
    folder = export(ExportConfig(str(trained[0]), str(tmp_path / "model")))
    assert "Not evaluated" in (folder / "MODEL_CARD.md").read_text()
    with pytest.raises(UserError, match="exists; set overwrite=true"):
        export(ExportConfig(str(trained[0]), str(tmp_path / "model")))
    export(ExportConfig(str(trained[0]), str(tmp_path / "model"), overwrite=True))


def test_an_export_is_replaced_where_names_cannot_be_swapped(trained, tmp_path, monkeypatch):
    """As on NFS, beside a folder of any name."""
    config = ExportConfig(str(trained[0]), str(tmp_path / "model"), overwrite=True)
    export(config)
    (tmp_path / "replaced").mkdir()
    (tmp_path / "replaced" / "notes").touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    export(config)
    assert sorted(os.listdir(tmp_path)) == ["model", "replaced"] and os.listdir(tmp_path / "replaced") == ["notes"]


def test_what_is_no_export_is_left_alone(trained, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "weights").write_text("a week of work")
    for output in (str(run), "."):
        monkeypatch.chdir(run)
        with pytest.raises(UserError, match="holds checkpoints, which no export writes, so it is not replaced"):
            export(ExportConfig(str(trained[0]), output, overwrite=True))
    assert (run / "checkpoints" / "weights").read_text() == "a week of work"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_below_a_file_is_refused_in_one_line(trained, tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(UserError, match="notes is a file; give a folder"):
        export(ExportConfig(str(trained[0]), str(tmp_path / "notes" / "model")))


def test_scores_that_are_none_of_ours(trained, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "five.json").write_text("5")
    (tmp_path / "none.json").write_text(json.dumps(SCORES | {"forecasts": None}))
    (tmp_path / "words.json").write_text(json.dumps(SCORES | {"forecasts": ["forecast"]}))
    (tmp_path / "numbers.json").write_text(json.dumps(SCORES | {"claims": [1.5]}))
    (tmp_path / "unnamed.json").write_text(json.dumps(SCORES | {"forecasts": [{"checkpoints": []}]}))
    for name, match in (
        ("other.json", "lacks headline"),
        ("absent.json", "cannot be read"),
        ("five.json", "lacks headline"),
        ("none.json", "lacks forecasts"),
        ("words.json", "lacks forecasts"),
        ("numbers.json", "lacks claims"),
        ("unnamed.json", "lacks forecasts"),
    ):
        with pytest.raises(UserError, match=match):
            export(ExportConfig(str(trained[0]), str(tmp_path / "model"), scores=str(tmp_path / name)))
    content = SCORES | {"forecasts": [{"label": "forecast", "checkpoints": ["of another"]}]}
    (tmp_path / "another.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no forecast there was made by"):
        export(ExportConfig(str(trained[0]), str(tmp_path / "model"), scores=str(tmp_path / "another.json")))
    assert not (tmp_path / "model").exists()


def test_a_card_has_its_own_scores_alone(trained, tmp_path):
    checkpoint, _ = trained
    mine = json.loads((checkpoint / "checkpoint.json").read_text())["sha256"]
    claims = [SCORES["claims"][0] | {"claim": f"{label}: CRPS lower", "forecast": label} for label in ("a", "b")]
    strata = [SCORES["strata"][0] | {"stratum": place, "forecast": label} for label, place in (("a", "x"), ("b", "y"))]
    lines = ["a, 48 h: 3 % lower.", "b, 48 h: 4 % lower.", "18 test dates in 3 independent blocks."]
    notes = ["b: members or checkpoints differ between its dates.", "b was made from members 1 2.", "One year."]
    made = [{"label": "a", "checkpoints": [mine], "baseline": False}, {"label": "b", "checkpoints": ["other"]}]
    content = SCORES | {"claims": claims, "strata": strata, "headline": lines, "forecasts": made, "notes": notes}
    (tmp_path / "scores.json").write_text(json.dumps(content))
    export(ExportConfig(str(checkpoint), str(tmp_path / "model"), scores=str(tmp_path / "scores.json")))
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "a: CRPS lower" in card and "- a, 48 h" in card and "a, x, 48 h" in card and "18 test dates in 3" in card
    assert "b: CRPS lower" not in card and "- b, 48 h" not in card and "y, 48 h" not in card
    assert "- One year." in card and "- b: members" not in card and "b was made" not in card
    made[0]["baseline"] = True
    (tmp_path / "scores.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="made only baselines there"):
        export(ExportConfig(str(checkpoint), str(tmp_path / "other"), scores=str(tmp_path / "scores.json")))
