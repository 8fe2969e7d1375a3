"""Who stands in an evaluation as what: several forecasts, baselines that are forecasts, and baselines of both laws."""

import json
from types import SimpleNamespace

import numpy as np
from fakes import TEST, TRAIN, corrected, entry, settings, write_forecasts

from ensemble_ml.inference import Kind
from ensemble_ml.store import Part
from ensemble_ml.verification import evaluate


def test_a_forecast_by_statistics_stands_among_the_baselines(store, forecast, tmp_path, plain):
    """A perfect one is the best baseline, is what claims are made against, and makes none itself."""

    def certain(name, truth):
        mean = truth[0]
        scale = np.full_like(mean, 1e-3 * mean.std())
        return {Kind.MEAN: mean, Kind.STDDEV: scale, Kind.LOCATION: mean, Kind.SCALE: scale}

    clairvoyant = SimpleNamespace(layout=store.layout, read=lambda _, date: store.read(Part.TRUTH, date))
    perfect = write_forecasts(tmp_path / "emos", clairvoyant, TEST, certain, train=TRAIN)
    evaluate(settings(forecast, store, tmp_path / "r", baselines=str(perfect)), store)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    assert {row["reference"] for row in content["summary"] if row["best_baseline"]} == {"emos"}
    assert {claim["forecast"] for claim in content["claims"]} == {"forecast"}
    against = [claim for claim in content["claims"] if claim["reference"] == "emos"]
    assert len(against) == 1 and not against[0]["holds"]
    assert [one["baseline"] for one in content["forecasts"]] == [False, True]


def test_a_folder_named_like_a_baseline_goes_by_its_path(store, tmp_path, plain):
    folder = write_forecasts(tmp_path / "climatology", store, TEST, corrected(), train=TRAIN)
    evaluate(settings(folder, store, tmp_path / "r"), store)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    ours, climate = (entry(content, name, "t", 500)["crps"]["value"] for name in (str(folder), "climatology"))
    assert ours < 0.9 * climate


def test_two_forecasts_share_dates_leads_and_draws(store, forecast, tmp_path, plain):
    other = write_forecasts(
        tmp_path / "one", store, TEST[:-1], corrected(members=3), leads=(48,), names=("t",), members_in="1 2 3"
    )
    evaluate(settings([str(forecast), str(other)], store, tmp_path / "r"), store)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    assert len(content["dates"]["test"]) == len(TEST) - 1
    reasons = sorted(d["reason"] for d in content["dates"]["dropped"])
    assert reasons == ["missing from one"] * 3
    assert {(row["variable"], row["lead_hours"]) for row in content["scores"]} == {("t", 48)}
    assert any("one was made from members 1 2 3, not from 1 2 3 4 5" in note for note in content["notes"])
    assert any("8 fields are not in all forecasts" in note for note in content["notes"])
    assert {claim["forecast"] for claim in content["claims"]} == {"forecast", "one"}
    assert content["claims"][0]["claim"].startswith("forecast: from 5 of 10 members at 48 h")


def test_claims_name_the_members_that_were_given(store, tmp_path, plain):
    """Nor is a forecast scored against members that it was made from as if they were held out."""
    few = write_forecasts(tmp_path / "few", store, TEST, corrected(), train=TRAIN)
    more = write_forecasts(
        tmp_path / "more", store, TEST, corrected(members=7), train=TRAIN, members_in="1 2 3 4 5 6 7"
    )
    evaluate(settings([str(few), str(more)], store, tmp_path / "r"), store)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    told = {claim["forecast"]: claim["claim"] for claim in content["claims"]}
    assert "from 5 of 10" in told["few"] and "from 7 of 10" in told["more"]
    assert "held_out_rmse" in entry(content, "few", "t", 500)
    assert "held_out_rmse" not in entry(content, "more", "t", 500)


def test_a_baseline_of_rain_keeps_the_mean_that_was_fitted(store, forecast, tmp_path, plain):
    """A law that stops at zero has more mean than location; scored by location, its rain would be biased upwards."""
    evaluate(settings(forecast, store, tmp_path), store)
    content = json.loads((tmp_path / "scores.json").read_text())
    rain = entry(content, "blend_5", "tp", None)
    assert rain["crps_family"]["value"] < rain["crps_normal"]["value"]
    assert content["families"]["blend_5"]["tp 48 h"] == "csgamma"
    assert rain["crps"]["value"] == rain["crps_family"]["value"]
