"""The log of a run: lines, what a killed run leaves, and what a terminal shows."""

import json
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


def test_a_resumed_run_takes_back_later_lines(tmp_path):
    lines = [{"step": s, "loss": 1.0} for s in (5, 10, 15)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 16, "lo')
    with tracker_of(tmp_path, start_step=10, resumed=True) as tracker:
        tracker.validation(15, {"score": 0.5}, best=True)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [5, 10, 15]
    with tracker_of(tmp_path):
        pass
    assert read_log(tmp_path / "log.jsonl") == []


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
