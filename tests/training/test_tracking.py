"""The log of a run: lines, what a killed run leaves, and what a terminal shows."""

import json
import math
import sys

import pytest

from ensemble_ml.training import tracking
from ensemble_ml.training.tracking import Tracker, memory_mb, read_log


def tracker_of(run, **changes):
    settings = dict(steps=20, start_step=0, resumed=False, every=5, tensorboard=False) | changes
    return Tracker(run, **settings)


def step(tracker, number, loss):
    tracker.step(number, samples=2, waited=0.0, lr=0.1, loss={"loss": loss})


def test_lines_hold_means_since_the_line_before(tmp_path):
    with tracker_of(tmp_path, steps=7) as tracker:
        for number in range(1, 8):
            step(tracker, number, float(number))
    lines = read_log(tmp_path / "log.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(5, 3.0), (7, 6.5)]
    assert lines[0]["samples_per_s"] > 0 and lines[0]["memory_mb"] > 50 and 0 <= lines[0]["wait"] <= 1


def test_steps_that_were_left_out_are_counted_and_in_no_mean(tmp_path, caplog):
    caplog.set_level("INFO")
    with tracker_of(tmp_path, steps=15, tensorboard=True) as tracker:
        for number in range(1, 16):
            bad = number in (2, 6, 7, 8, 9, 10)
            loss = {"loss": math.nan if bad else float(number)}
            tracker.step(number, samples=2, waited=0.0, lr=0.1, loss=loss, sent=3_000_000, skipped=bad)
        tracker.validation(15, {"score": math.inf}, best=False)
    *lines, scores = [json.loads(text, parse_constant=_refuse) for text in (tmp_path / "log.jsonl").open()]
    assert [(line["loss"], line.get("skipped")) for line in lines] == [(3.25, 1), (None, 5), (13.0, None)]
    assert all(line["sent_mb"] == 3 for line in lines) and scores["validation"] == {"score": None}
    assert "step 5/15: loss 3.2500 (1 of 5 steps left out), " in caplog.text
    assert "step 10/15: no loss (5 of 5 steps left out), " in caplog.text
    with tracker_of(tmp_path, start_step=10, resumed=True):
        pass
    assert [line["loss"] for line in read_log(tmp_path / "log.jsonl")] == [3.25, None]


def _refuse(name):
    raise ValueError(f"{name} is not JSON")


def test_a_resumed_run_takes_back_later_lines(tmp_path):
    lines = [{"step": s, "loss": 1.0} for s in (5, 10, 15)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 16, "lo')
    with tracker_of(tmp_path, start_step=10, resumed=True) as tracker:
        tracker.validation(15, {"score": 0.5}, best=True)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [5, 10, 15]
    with tracker_of(tmp_path):
        pass
    assert read_log(tmp_path / "log.jsonl") == []


def test_the_first_line_of_a_resumed_run_holds_the_steps_since_the_line_before(tmp_path):
    with tracker_of(tmp_path) as tracker:
        for number in range(1, 9):
            bad = number == 7
            tracker.step(number, samples=2, waited=0.0, lr=0.1, loss={"loss": number}, sent=1_000_000, skipped=bad)
        kept = json.loads(json.dumps(tracker.unwritten))
        tracker.step(9, samples=2, waited=0.0, lr=0.1, loss={"loss": math.inf})
        assert tracker.unwritten == {}  # JSON has no such number
    with tracker_of(tmp_path, start_step=8, resumed=True, unwritten=kept) as tracker:
        for number in (9, 10):
            tracker.step(number, samples=2, waited=0.0, lr=0.1, loss={"loss": number}, sent=1_000_000)
        assert tracker.unwritten == {}
    line = read_log(tmp_path / "log.jsonl")[-1]
    assert (line["step"], line["loss"], line["skipped"], line["sent_mb"]) == (10, (6 + 8 + 9 + 10) / 4, 1, 1)


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with tracker_of(tmp_path, steps=10) as tracker:
        for number in range(1, 11):
            step(tracker, number, 0.5)
        tracker.say("done")
    shown = capsys.readouterr().err
    assert "10/10" in shown and "samples/s" in shown and "done" in shown


def test_tensorboard_is_optional(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with tracker_of(tmp_path, tensorboard=True) as tracker:
        step(tracker, 5, 1.0)
    assert "ensemble-ml[tracking]" in caplog.text


def test_memory_without_proc(monkeypatch):
    monkeypatch.setattr(tracking.Path, "read_text", lambda self: (_ for _ in ()).throw(OSError))
    assert memory_mb() > 10


@pytest.mark.parametrize("value", [1 / 3, 1e-9, 12345.678])
def test_digits_are_enough_to_compare(value):
    assert tracking._digits(value) == pytest.approx(value, rel=1e-8)
