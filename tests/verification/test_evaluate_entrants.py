"""Who stands in an evaluation as what: several forecasts, baselines that are forecasts, and baselines of both laws."""

import json
import re
import shutil
from types import SimpleNamespace

import netCDF4
import numpy as np
import pytest
from fakes import FEW, TEST, TRAIN, corrected, entry, scores_of, settings, write_forecasts

from ensemble_ml.config import EvaluateConfig
from ensemble_ml.inference import Kind
from ensemble_ml.store import Fields, Part
from ensemble_ml.verification import evaluate, open_forecasts
from ensemble_ml.verification.plan import _member_notes
from ensemble_ml.verification.summary import short_name


@pytest.mark.slow
def test_a_forecast_by_statistics_stands_among_the_baselines(store, few_forecasts, tmp_path, plain):
    """A perfect one is the best baseline, is what claims are made against, and makes none itself."""

    def certain(name, truth):
        mean = truth[0]
        scale = np.full_like(mean, 1e-3 * mean.std())
        return {Kind.MEAN: mean, Kind.STDDEV: scale, Kind.LOCATION: mean, Kind.SCALE: scale}

    clairvoyant = SimpleNamespace(layout=store.layout, read=lambda _, date: store.read(Part.TRUTH, date))
    perfect = write_forecasts(tmp_path / "emos", clairvoyant, FEW, certain, train=TRAIN)
    content = scores_of(few_forecasts, store, tmp_path / "r", baselines=str(perfect))
    assert {row["reference"] for row in content["summary"] if row["best_baseline"]} == {"emos"}
    assert {claim["forecast"] for claim in content["claims"]} == {"forecast"}
    against = [claim for claim in content["claims"] if claim["reference"] == "emos"]
    assert len(against) == 1 and not against[0]["holds"]
    assert [one["baseline"] for one in content["forecasts"]] == [False, True]


@pytest.mark.slow
def test_a_folder_named_like_a_baseline_goes_by_its_path(store, tmp_path, plain):
    folder = write_forecasts(tmp_path / "climatology", store, FEW, corrected(), train=TRAIN)
    content = scores_of(folder, store, tmp_path / "r")
    ours, climate = (entry(content, name, "t", 500)["crps"]["value"] for name in (str(folder), "climatology"))
    assert ours < 0.9 * climate


@pytest.mark.parametrize("entrant", ["raw_10", "size_corrected_5", "spread_regression_5", "blend_5"])
def test_a_folder_named_as_figures_name_a_baseline_goes_by_its_path(store, tmp_path, entrant):
    """The curve of the baseline took the place of the forecast's."""
    folder = write_forecasts(tmp_path / short_name(entrant), store, TEST[:1], corrected(), names=("tp",))
    (found,) = open_forecasts([str(folder)])
    assert found.label == str(folder)


def test_two_forecasts_share_dates_leads_and_draws(store, few_forecasts, tmp_path, plain):
    other = write_forecasts(
        tmp_path / "one", store, FEW[:-1], corrected(members=3), leads=(48,), names=("t",), members_in="1 2 3"
    )
    content = scores_of([str(few_forecasts), str(other)], store, tmp_path / "r")
    assert len(content["dates"]["test"]) == len(FEW) - 1
    reasons = sorted(d["reason"] for d in content["dates"]["dropped"])
    assert reasons == ["missing from one"] * 3
    assert {(row["variable"], row["lead_hours"]) for row in content["scores"]} == {("t", 48)}
    assert any("one was made from members 1 2 3, not from 1 2 3 4 5" in note for note in content["notes"])
    assert any("8 fields are not in all forecasts" in note for note in content["notes"])
    assert {claim["forecast"] for claim in content["claims"]} == {"forecast", "one"}
    assert content["claims"][0]["claim"].startswith("forecast: from 5 of 10 members at 48 h")
    # The first question is which of the two is better: in a sentence, as numbers with intervals, and by region.
    assert re.match(r"one, 48 h: CRPS \d+\.\d % (higher|lower) than forecast", content["headline"][0])
    assert content["headline"][1].startswith("one, 48 h: CRPS against forecast: too few blocks")
    (claim,) = [one for one in content["claims"] if one["reference"] == "forecast"]
    rows = [row for row in content["comparisons"] if row["reference"] == "forecast" and row["metric"] == "crps"]
    gains = [1 - row["gain_percent"]["value"] / 100 for row in rows]
    assert len(rows) == 2 and claim["value"] == pytest.approx(100 * (1 - np.exp(np.mean(np.log(gains)))))
    assert {row["reference"] for row in content["strata"] if row["forecast"] == "one"} >= {"forecast"}


@pytest.mark.slow
def test_claims_name_the_members_that_were_given(store, tmp_path, plain):
    """Nor is a forecast scored against members that it was made from as if they were held out."""
    few = write_forecasts(tmp_path / "few", store, FEW, corrected(), train=TRAIN)
    more = write_forecasts(tmp_path / "more", store, FEW, corrected(members=7), train=TRAIN, members_in="1 2 3 4 5 6 7")
    content = scores_of([str(few), str(more)], store, tmp_path / "r")
    told = {claim["forecast"]: claim["claim"] for claim in content["claims"]}
    assert "from 5 of 10" in told["few"] and "from 7 of 10" in told["more"]
    assert "held_out_rmse" in entry(content, "few", "t", 500)
    assert "held_out_rmse" not in entry(content, "more", "t", 500)


def knowing(folder, store, members_in):
    """Forecasts that know the truth and the full ensemble's spread, whatever they say of members: the best of all."""

    def read(_, date):
        both = store.read(Part.TRUTH, date), store.read(Part.FORECAST, date)
        return Fields(
            *(np.concatenate([part(one) for one in both]) for part in (lambda f: f.pressure, lambda f: f.surface))
        )

    def rule(name, values):
        truth, spread = values[0], values[1:].std(0, ddof=1)
        scale = np.full_like(truth, 1e-3 * truth.std())
        return {Kind.MEAN: truth, Kind.STDDEV: scale, Kind.LOCATION: truth, Kind.SCALE: scale, Kind.SPREAD: spread}

    source = SimpleNamespace(layout=store.layout, read=read)
    return write_forecasts(folder, source, TEST, rule, names=("t",), train=TRAIN, members_in=members_in)


@pytest.mark.slow
def test_a_forecast_of_more_members_is_not_certain_to_gain_on_fewer(store, tmp_path):
    few, all_ten = " ".join("12345"), " ".join(str(n + 1) for n in range(10))
    found = {}
    for name, members in (("few", few), ("more", few + " 6 7"), ("all", all_ten)):
        made = knowing(tmp_path / name, store, members)
        evaluate(settings(made, store, tmp_path / f"r_{name}", members_in=5, block_days=6), store)
        found[name] = json.loads((tmp_path / f"r_{name}" / "scores.json").read_text())
    sure = {name: {c["reference"]: c["certain"] for c in content["claims"]} for name, content in found.items()}
    assert set(sure["few"].values()) == {True} and len(sure["few"]) == 5
    for name in ("more", "all"):
        content, html = found[name], (tmp_path / f"r_{name}" / "report.html").read_text()
        assert sure[name].pop("raw_10") and len(sure[name]) == 4 and not any(sure[name].values())
        assert all(claim["holds"] for claim in content["claims"])
        assert not any(row["better"] for row in content["comparisons"] if row["reference"] != "raw_10")
        assert not any(row["better"] for row in content["strata"] if row["reference"] != "raw_10")
        mine = [row for row in content["summary"] if row["entrant"] == name and row["reference"] != "raw_10"]
        assert mine and not any(row["better"] for row in mine)
        size = {"more": 7, "all": 10}[name]
        assert f"From {size} of 10 members, beside a raw ensemble of 5." in html
        told = [line for line in content["headline"] if f"not sure, made from {size} members, compared with 5" in line]
        assert len(told) == (4 if name == "more" else 1)
        assert any("it has more input, so no gain over it is sure" in note for note in content["notes"])
        assert f"no, made from {size} members, compared with 5" in html
    assert (
        sum("not sure, all 10 members, whose spread it is scored against" in x for x in found["all"]["headline"]) == 3
    )
    assert any("all 10 members: their spread is its input and target" in note for note in found["all"]["notes"])
    assert any(row["better"] for row in found["few"]["strata"] if row["reference"] != "raw_10")


@pytest.mark.slow
def test_a_bad_forecast_of_more_members_is_still_worse(store, tmp_path, plain):
    bad = write_forecasts(
        tmp_path / "f", store, TEST, corrected(shift=50.0, members=10), names=("t",), train=TRAIN,
        members_in=" ".join(str(n + 1) for n in range(10)),
    )  # fmt: skip
    content = scores_of(bad, store, tmp_path / "r", members_in=5, block_days=6)
    assert all(row["worse"] for row in content["strata"] if row["metric"] == "crps")
    assert any(line.endswith(": worse.") for line in content["headline"])


@pytest.mark.slow
def test_as_many_members_are_compared_as_the_first_forecast_was_made_from(store, tmp_path, plain):
    """Where members were missing on some dates: as many as were asked for; five where it does not say."""
    made = write_forecasts(tmp_path / "f", store, FEW, corrected(members=7), train=TRAIN, members_in="1 2 3 5 6 7")
    with netCDF4.Dataset(sorted(made.glob("*.nc"))[3], "a") as data:
        data.members_in = "1 2 3 4 5 6 7"
    silent = write_forecasts(tmp_path / "silent", store, FEW, corrected(), train=TRAIN, members_in="")
    for folders, size in (([made, silent], 7), ([silent, made], 5)):
        evaluate(settings([str(folder) for folder in folders], store, tmp_path / f"r{size}"), store)
        content = json.loads((tmp_path / f"r{size}" / "scores.json").read_text())
        assert content["ensemble"]["reduced"] == list(range(1, size + 1)) and f"raw_{size}" in content["entrants"]
        told = {claim["forecast"]: claim["claim"] for claim in content["claims"]}
        assert "from members that it does not state" in told["silent"] and "from 7 of 10" in told["f"]
        assert next(f for f in content["forecasts"] if f["label"] == "f")["members_in"] == list("1234567")


def test_a_forecast_from_a_member_that_the_ensemble_lacks_is_told_how_its_held_out_spread_is_scored():
    """The control is 0, and apart where a store was prepared without: the score was another, and no word was said."""

    def notes(said, names=("t_ensemble_spread",)):
        numbers = tuple(said.split())
        one = SimpleNamespace(
            label="f", mixed=False, silent=not numbers, seen=frozenset(numbers), members_in=numbers, names=names
        )
        layout = SimpleNamespace(realization=range(1, 7))
        return _member_notes(EvaluateConfig("f"), 3, SimpleNamespace(layout=layout), [one])

    told = "f names members that the ensemble does not have (0, 77)"
    assert any(note.startswith(told) and "without a conversion" in note for note in notes("77 0 1 2 3"))
    # made from all that there are, from one held out (no such score), silent, or without a spread
    for given in (("1 2 3",), ("0 1 2 4",), ("",), ("0 1 2 3", ("t_mean",))):
        assert not any("does not have" in note for note in notes(*given))


@pytest.mark.slow
def test_more_members_than_the_ensemble_has_are_all_of_it(store, tmp_path, plain):
    made = write_forecasts(
        tmp_path / "f", store, FEW, corrected(members=10), train=TRAIN, members_in=" ".join(map(str, range(1, 52)))
    )
    evaluate(settings(made, store, tmp_path / "r"), store)
    assert len(json.loads((tmp_path / "r" / "scores.json").read_text())["ensemble"]["reduced"]) == 10


def test_a_baseline_of_rain_keeps_the_mean_that_was_fitted(store, few_forecasts, tmp_path, plain):
    """A law that stops at zero has more mean than location; scored by location, its rain would be biased upwards."""
    evaluate(settings(few_forecasts, store, tmp_path), store)
    content = json.loads((tmp_path / "scores.json").read_text())
    rain = entry(content, "blend_5", "tp", None)
    assert rain["crps_family"]["value"] < rain["crps_normal"]["value"]
    assert content["families"]["blend_5"]["tp 48 h"] == "csgamma"
    assert rain["crps"]["value"] == rain["crps_family"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raw_10", "climatology"])
def test_a_relative_path_that_is_a_baselines_name_replaces_none(
    store, few_forecasts, tmp_path, plain, monkeypatch, name
):
    write_forecasts(tmp_path / name, store, FEW, corrected(shift=3.0, inflate=3.0), train=TRAIN)
    monkeypatch.chdir(tmp_path)
    alone, beside = (
        scores_of(given, store, tmp_path / out)
        for out, given in (("a", [str(few_forecasts)]), ("b", [str(few_forecasts), name]))
    )
    assert [one["label"] for one in beside["forecasts"]] == ["forecast", str(tmp_path / name)]
    assert entry(alone, name, "t", 500)["crps"] == entry(beside, name, "t", 500)["crps"]


@pytest.mark.slow
def test_baselines_of_few_members_do_not_use_all(store, few_forecasts, tmp_path):
    """Whatever their folders are called."""
    other = write_forecasts(tmp_path / "emos_10", store, FEW, corrected(inflate=1.2), train=TRAIN)
    evaluate(settings(few_forecasts, store, tmp_path / "r", baselines=str(other)), store)
    page = (tmp_path / "r" / "report.html").read_text()
    assert "raw 10 (uses all 10)" in page and "emos_10" in page and "emos_10 (uses" not in page


@pytest.mark.slow
def test_a_name_is_drawn_as_it_is(store, few_forecasts, tmp_path):
    """In legends and in the heads of its columns."""
    odd = shutil.copytree(few_forecasts, tmp_path / "_x$b_$")
    evaluate(settings([str(few_forecasts), str(odd)], store, tmp_path / "r"), store)
    page = (tmp_path / "r" / "report.html").read_text()
    assert "</svg>_x$b_$</span>" in page and 'scope="colgroup">_x$b_$</th>' in page
