"""How the fits before the first step are shown and bounded, and a run that max_minutes ends."""

import io
import logging
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from running import weights

from ensemble_ml import pulse
from ensemble_ml.pulse import Pulse
from ensemble_ml.training import judge, point_fit, progress, train, trainer
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.progress import Pace, Progress

pytestmark = pytest.mark.usefixtures("whole_fits")


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def strides_of(clock, total, until, seconds):
    """Take steps of `seconds` each until the pace says that there are no more."""
    pace, done, strides = Pace(total, until), 0, []
    while stride := pace.stride(done):
        clock.now += seconds[min(len(strides), len(seconds) - 1)]
        strides.append(stride)
        done += stride
    assert pace.steps == len(strides)
    return strides


@pytest.mark.parametrize("until", [None, 1101.0])
def test_a_fit_that_has_time_takes_each_step_of_its_schedule(clock, until):
    assert strides_of(clock, 100, until, [1.0]) == [1] * 100


@pytest.mark.parametrize("seconds", [[1.0], [0.5] * 20 + [2.0], [4.0] * 12 + [0.5], [0.1, 1.3]])
def test_a_fit_that_lacks_time_runs_through_its_schedule_by_the_deadline(clock, seconds):
    strides = strides_of(clock, 200, clock.now + 60, seconds)
    assert 0.85 * 60 <= clock.now - 1000 <= 60 + max(seconds)
    assert sum(strides) == 200 or clock.now >= 1060  # the whole schedule, unless steps grew longer at the last moment
    assert strides[-1] <= 40


def test_nothing_is_stepped_after_the_deadline(clock):
    assert strides_of(clock, 100, clock.now - 1, [1.0]) == []


def test_a_stage_says_which_it_is_and_how_much_is_left(clock):
    told = Progress()
    told.begin(["bias", "inflation", "point network"])
    for _ in told.over("inflation", [1, 2, 3, 4]):
        if clock.now > 1000:
            break
        clock.now += 30
    assert told.text() == "fit 2 of 3, inflation: 25% done, about 90 s left"
    told.doing("steps")
    assert told.text() == "steps"


def test_on_a_terminal_a_stage_is_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    told = Progress()
    told.begin(["bias", "inflation"])
    assert list(told.over("inflation", [1, 2, 3, 4])) == [1, 2, 3, 4]
    assert "fit 2 of 2, inflation" in terminal.getvalue() and "4" in terminal.getvalue()
    with Pulse(told.text):
        assert "pulse" not in {thread.name for thread in threading.enumerate()}  # no lines between bars


def test_only_a_bound_makes_a_fit_late(clock):
    assert not Progress().is_late()
    bounded = Progress(100.0)
    clock.now += 87
    assert not bounded.is_late()
    clock.now += 2
    assert bounded.is_late()


class Waits:
    """The event that ends a pulse, by a clock that a test sets: time passes while it is waited for, and others log."""

    def __init__(self, clock, seconds, lines=()):
        self.clock, self.end, self.lines, self.count = clock, clock.now + seconds, list(lines), 0

    def wait(self, seconds):
        self.count += 1
        until = min(self.clock.now + seconds, self.end)
        while self.lines and self.lines[0] <= until:
            self.clock.now = self.lines.pop(0)
            logging.getLogger("ensemble_ml.other").info("a line")
            self.count = 0
        self.clock.now = until
        return until == self.end or self.count > 100

    def set(self):
        """Do nothing: the end comes by the clock."""


@pytest.fixture
def pulsing(monkeypatch):
    """Run a pulse of 20 s by a clock for so many seconds, in which others log at `lines`; return how often it woke."""

    def run(text, seconds, lines=()):
        clock = Clock()
        waits = Waits(clock, seconds, (clock.now + at for at in lines))
        monkeypatch.setattr(pulse, "time", clock)
        monkeypatch.setattr(pulse, "threading", SimpleNamespace(Event=lambda: waits, Thread=threading.Thread))
        with Pulse(text):
            pass
        assert "pulse" not in {thread.name for thread in threading.enumerate()}
        return waits.count

    return run


def test_silence_ends_with_a_line(caplog, pulsing):
    caplog.set_level(logging.INFO)
    pulsing(lambda: "fit 3 of 9", 150, lines=range(1, 61))
    assert [record.message for record in caplog.records] == ["a line"] * 60 + ["fit 3 of 9"] * 4  # at 80, 100, 120, 140


def test_where_lines_are_not_shown_nothing_spins(caplog, pulsing):
    asked = []
    caplog.set_level(logging.WARNING)  # as in a Python program that has set up no log
    assert pulsing(lambda: str(asked.append(None)), 110) == 6
    assert len(asked) == 5


@pytest.mark.slow
def test_a_run_says_where_its_fits_are(config_of, own_fits, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Pulse.__init__, "__defaults__", (0.05,))
    train(config_of(steps=1, data__members=[3]))
    stages = {record.message.split(":")[0] for record in caplog.records if record.message.startswith("fit ")}
    assert "fit 12 of 16, point network" in stages
    assert re.search(r"fit 12 of 16, point network: \d+% done, about \d+ s left", caplog.text)
    assert re.search(r"at work: [01] of 1 steps are done", caplog.text)


def slowed(monkeypatch, clock, seconds_a_step=0.3):
    """Let the clock go on by what is done: a step of a small network, a date that is read, a validation, a step."""

    def slow(owner, name, seconds):
        real = getattr(owner, name)

        def later(self, *given, **named):
            clock.now += seconds
            return real(self, *given, **named)

        monkeypatch.setattr(owner, name, later)

    monkeypatch.setattr(trainer, "time", clock)
    slow(point_fit._Dropout, "forward", 0.1)
    slow(Dates, "sample", 0.001)
    slow(judge.Judge, "scores", 0.5)
    slow(trainer.Trainer, "_step", seconds_a_step)


@pytest.mark.slow
def test_fits_are_cut_to_the_time_and_are_not_kept(config_of, own_fits, monkeypatch, clock, caplog):
    """A network of 500 steps takes 50 s by this clock; a run of half a minute gives it some of that, and keeps to its
    time. What was cut is not taken by a run that has time."""
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        slowed(patch, clock)
        cut = weights(train(config_of(run="cut", steps=500, max_minutes=0.5)))
    assert 0.8 * 30 <= clock.now - 1000 <= 1.1 * 30
    assert cut.meta["fits_cut"] and 1 <= cut.meta["step"] == cut.meta["steps"] < 100
    steps, total = re.search(r"point network: max_minutes left time for (\d+) of (\d+)", caplog.text).groups()
    assert 40 <= int(steps) < int(total)
    caplog.clear()
    whole = weights(train(config_of(run="whole", steps=1)))
    assert "as fitted before" not in caplog.text and "fits_cut" not in whole.meta
    kept = weights(train(config_of(run="kept", steps=1, max_minutes=9)))
    assert "as fitted before" in caplog.text and "fits_cut" not in kept.meta
    assert not torch.equal(cut.state_dict["points.first"], whole.state_dict["points.first"])
    assert torch.equal(kept.state_dict["points.first"], whole.state_dict["points.first"])


def test_fits_without_any_time_leave_one_step(config_of, own_fits, monkeypatch, clock, caplog):
    slowed(monkeypatch, clock)
    found = weights(train(config_of(steps=500, max_minutes=1e-3)))
    assert found.meta["step"] == found.meta["steps"] == 1
    assert "point network: max_minutes left time for none of its steps" in caplog.text
    assert not found.state_dict["points.second"].any()
    assert found.state_dict["linear.weight"].any()  # which takes no long time, and is whole


@pytest.mark.parametrize(("left", "steps"), [(100.0, 3), (50.0, 1)])
def test_a_minute_is_enough_to_measure_in_whatever_share_it_is(config_of, monkeypatch, caplog, left, steps):
    plan, measured = trainer.Trainer.plan_steps, []
    monkeypatch.setattr(trainer.Trainer, "plan_steps", lambda self, seconds: plan(self, left))
    monkeypatch.setattr(trainer.Trainer, "_seconds_a_step", lambda self: measured.append(self) or 0.01)
    found = weights(train(config_of(steps=3, max_minutes=60.0, model__linear=False))).meta
    assert found["step"] == found["steps"] == steps and len(measured) == (steps == 3)
    assert ("took nearly all of it" in caplog.text) == (steps == 1)


@pytest.mark.slow
def test_steps_that_grow_slower_than_planned_end_with_the_time(config_of, monkeypatch, clock, caplog):
    caplog.set_level(logging.INFO)
    slowed(monkeypatch, clock, seconds_a_step=0.5)
    monkeypatch.setattr(trainer.Trainer, "_seconds_a_step", lambda self: 0.01)
    run = train(config_of(max_minutes=0.5, steps=5000, validate_every=5000, model__linear=False, data__members=[3]))
    assert 0.9 * 30 <= clock.now - 1000 <= 1.1 * 30
    last = weights(run).meta
    assert 40 <= last["step"] == last["steps"] < 70 and last["validated_step"] == last["step"]
    assert f"steps took longer than was planned, so step {last['step']} of" in caplog.text


def test_a_start_that_no_step_bettered_is_called_the_start(config_of, caplog):
    caplog.set_level(logging.INFO)
    run = train(config_of(steps=2, validate_every=2, optim__lr=10.0, model__linear=False))
    assert weights(run, "best").meta["step"] == 0
    assert "so the best model is the start, the fits to the training dates without any step" in caplog.text
    assert f"{run}/checkpoints/best" in caplog.text and "best at step" not in caplog.text
