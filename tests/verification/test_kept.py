"""An evaluation that was stopped goes on from the fields that it had scored."""

import hashlib
import json
import re
import sys
import time

import numpy as np
import pytest
from fakes import DATES, TEST, TRAIN, corrected, settings, write_forecasts
from stores import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.folders import hash_of_code
from ensemble_ml.inference import Kind
from ensemble_ml.pulse import Pulse
from ensemble_ml.store import Part
from ensemble_ml.verification import evaluate, kept

MODULE = sys.modules[evaluate.__module__]  # the package's `evaluate` is the function


class Stop(Exception):
    pass


def with_members(name, members_m):
    return corrected(members=3)(name, members_m) | {Kind.MEMBER: members_m[:3] + 1}


def digest(content, scores, tables, *_):
    """Stands for the page: all sums that it is drawn from, and which of them share an array."""
    arrays = []
    said = [kept._packed(kept.part_of(tables, slice(0, len(scores.columns))), arrays)]
    said += [kept._packed(one, arrays) for one in tables.vectors]
    found = hashlib.sha256(json.dumps(said).encode())
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def stopping_at(function, call, monkeypatch):
    """Let a function of the evaluation raise at one of its calls, counted from 1; return the list of calls."""
    calls, real = [], getattr(MODULE, function)

    def counted(*given):
        calls.append(given)
        if len(calls) == call:
            raise Stop
        return real(*given)

    monkeypatch.setattr(MODULE, function, counted)
    return calls


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two levels and the surface at two leads, one field with fewer dates than the others."""
    folder = tmp_path_factory.mktemp("kept")
    gone = [(Part.TRUTH, date, 0, "tp") for date in TEST[:1]]
    grid = {"dates": DATES[:16], "members": 5, "leads": (24, 48), "variables": ("t",), "surface": ("tp",)}
    store = make_store(folder / "s.zarr", levels=(500, 850), absent=gone, **grid)
    return store, write_forecasts(
        folder / "f", store, TEST[:4], with_members, train=TRAIN, members_in="1 2 3", names=("t", "tp")
    )


def results(config, store):
    folder = evaluate(config, store)
    content = json.loads((folder / "scores.json").read_text())
    del content["settings"]["output"]
    return content, (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_stopped_evaluation_goes_on_to_the_same_scores(made, tmp_path, monkeypatch, caplog):
    """Stopped after the first fields, and again between the members of two leads: not a bit is other than in one go."""
    caplog.set_level("INFO")
    store, forecast = made
    monkeypatch.setattr(MODULE, "write_report", digest)
    whole = results(settings(forecast, store, tmp_path / "whole"), store)
    assert "t at 24 h scored in" in caplog.text and "the other 4 fields take about" in caplog.text
    again = settings(forecast, store, tmp_path / "again")
    for function, call in (("score_group", 2), ("score_vectors", 2)):
        with monkeypatch.context() as patch:
            stopping_at(function, call, patch)
            with pytest.raises(Stop):
                evaluate(again, store)
    assert "1 of 4 groups of fields are taken from an evaluation that was stopped" in caplog.text
    for function in ("score_group", "score_vectors"):
        calls = stopping_at(function, 0, monkeypatch)
    found = results(again, store)
    assert "4 of 4 groups of fields are taken" in caplog.text and len(calls) == 1
    assert found == whole and whole[0]["vectors"]
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert files == {"lineage.json", "report.html", "scores.json"}


def test_an_evaluation_that_was_stopped_while_its_report_was_drawn_goes_on(made, tmp_path, monkeypatch):
    """As a job that is queued again after its time was over: it ended because scores.json was there."""
    store, forecast = made
    again = settings(forecast, store, tmp_path)
    with monkeypatch.context() as patch:
        stopping_at("write_report", 1, patch)
        with pytest.raises(Stop):
            evaluate(again, store)
    scores = (tmp_path / "scores.json").read_text()
    with pytest.raises(UserError, match=r"scores\.json exists there; set overwrite=true"):
        evaluate(settings(forecast, store, tmp_path, block_days=6), store)
    monkeypatch.setattr(MODULE, "write_report", lambda *_: "<!doctype html>")
    calls = [stopping_at(function, 0, monkeypatch) for function in ("score_group", "score_vectors")]
    evaluate(again, store)
    assert calls == [[], []] and (tmp_path / "scores.json").read_text() == scores
    assert {path.name for path in tmp_path.iterdir()} == {"lineage.json", "report.html", "scores.json"}
    (tmp_path / "report.html").unlink()  # by a user: nothing is kept any more
    with pytest.raises(UserError, match=r"scores\.json exists there; set overwrite=true"):
        evaluate(again, store)


@pytest.mark.parametrize("change", ["settings", "forecast", "file"])
def test_what_another_evaluation_left_is_not_taken(made, tmp_path, monkeypatch, caplog, change):
    caplog.set_level("INFO")
    store, forecast = made
    changes = [{}, {"block_days": 6} if change == "settings" else {}]
    for call, changed in zip((2, 1), changes, strict=True):
        with monkeypatch.context() as patch:
            calls = stopping_at("score_group", call, patch)
            with pytest.raises(Stop):
                evaluate(settings(forecast, store, tmp_path, **changed), store)
        left = list(tmp_path.glob(".scored-*/*.npz"))
        if call == 2:
            assert [path.name for path in left] == ["t_24.npz"]
            if change == "forecast":
                min(forecast.glob("*.nc")).touch()
            if change == "file":
                left[0].write_bytes(left[0].read_bytes()[:-100])
    assert len(calls) == 1 and "are taken" not in caplog.text
    assert (left == []) == (change != "file") and ("it is scored anew" in caplog.text) == (change == "file")


def test_the_code_that_reads_is_part_of_the_key():
    assert hash_of_code("verification", "store", "../data_prep") == kept._CODE != hash_of_code("verification", "store")


def test_what_is_kept_is_what_was_given(tmp_path):
    given = ({(0, "a"): np.arange(3.0)[::2], 1: {2: 0.1 + 0.2}}, None, (float("inf"), "b", np.int64(3)))
    folder = kept.Kept(tmp_path / "k")
    assert folder.load("one") is None
    folder.save("one", given)
    found = folder.load("one")
    np.testing.assert_array_equal(found[0].pop((0, "a")), given[0].pop((0, "a")))
    assert found == given
    folder.drop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "octet"), [(None, 0), (8, 1), (10, 99)], ids=["empty", "encrypted", "compressed"])
def test_a_damaged_file_is_scored_anew(tmp_path, caplog, place, octet):
    folder, path = kept.Kept(tmp_path), tmp_path / "one.npz"
    folder.save("one", np.arange(3.0))
    data = bytearray(path.read_bytes())
    if place is None:
        data.clear()
    else:
        data[data.index(b"PK\x01\x02") + place] = octet  # flags and method of an entry in the central directory
    path.write_bytes(data)
    assert folder.load("one") is None
    assert "one.npz cannot be read" in caplog.text and "it is scored anew" in caplog.text


def test_a_folder_that_takes_no_more_stops_no_evaluation(tmp_path, caplog):
    (tmp_path / "k").touch()
    kept.Kept(tmp_path / "k").save("one", ())
    assert "one.npz is not kept for a rerun" in caplog.text


def test_an_evaluation_that_is_silent_says_what_it_does(made, tmp_path, monkeypatch, caplog):
    """At any moment of it: while fields are scored, their vectors, and while the report is drawn."""
    caplog.set_level("INFO")
    store, forecast = made
    monkeypatch.setattr(Pulse.__init__, "__defaults__", (0.02,))
    monkeypatch.setattr(MODULE, "write_report", lambda *_: time.sleep(0.1) or "<!doctype html>")
    evaluate(settings(forecast, store, tmp_path / "scores"), store)
    for words in (
        r"[1-5] of 6 fields are scored, about \d+ s left",
        "vectors of several fields",
        "the report is drawn",
    ):
        assert re.search(f"evaluate: {words}", caplog.text), words
