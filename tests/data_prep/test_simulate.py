"""Whole archives of the embedded ensemble, and the chain of tasks that makes one."""

from __future__ import annotations

import json
import os
import pkgutil
import queue
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import eccodes
import numpy as np
import pytest
from fixtures_archive import tiny_archive, tiny_config  # noqa: F401
from simulating import small_facts

from data_prep.simulate import run, simulate
from data_prep.simulate.archive import assemble, model_years, realism
from data_prep.simulate.run import _follow, _Progress, describe
from data_prep.simulate.synthesis import PLANES, ModelFacts, Synthesis, regular_grid
from ensemble_ml.errors import UserError

# A worker that compiles one function. XLA cannot write where it is told to, and logs that as an error, as it logs slow
# compilations.
NOISY_WORKER = """
import os, queue
from data_prep.simulate import run

def compile_one(*_):
    import jax
    jax.jit(lambda x: x + 1)(1)

run._run_tasks = compile_one
events = queue.SimpleQueue()
run._work(None, sorted(os.sched_getaffinity(0)), None, events, os.getppid(), run._Compilation("", ()))
print(events.get())
"""


@pytest.mark.slow
def test_what_xla_logs_of_compiling_does_not_reach_the_user():
    about = {"XLA_FLAGS": "--xla_dump_to=/proc/nowhere"}
    plain = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    ran = subprocess.run([sys.executable, "-c", NOISY_WORKER], env=plain | about, capture_output=True, text=True)
    assert "done" in ran.stdout and ran.stderr == ""
    told = plain | about | {"TF_CPP_MIN_LOG_LEVEL": "0"}  # whoever asks for it has it
    ran = subprocess.run([sys.executable, "-c", NOISY_WORKER], env=told, capture_output=True, text=True)
    assert "done" in ran.stdout and "Could not create directory" in ran.stderr


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return small_facts()


def messages(folder: Path, pattern: str):
    for path in sorted(folder.glob(pattern)):
        with open(path, "rb") as file:
            while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
                yield path, handle
                eccodes.codes_release(handle)


class TestArchive:
    def test_layout(self, tiny_archive):  # noqa: F811
        record = json.loads((tiny_archive / "archive.json").read_text())
        assert record["years"] == {"train": [2001], "validation": [2002], "test": [2003]}
        assert [len(dates) for dates in record["start_dates"].values()] == [4, 1, 2]
        assert "never ENS-10" in record["statement"] and set(record["realism"]) == {"z500", "t850"}
        assert not (tiny_archive / ".parts").exists()
        found = Counter()
        for path, handle in messages(tiny_archive, "ensemble/*.grib"):
            date = str(eccodes.codes_get(handle, "dataDate"))
            assert path.stem.endswith(date[4:])
            found[date, eccodes.codes_get(handle, "number"), eccodes.codes_get(handle, "endStep")] += 1
            assert eccodes.codes_get(handle, "dataType") == "pf" and eccodes.codes_get(handle, "edition") == 1
        dates = [date[:10].replace("-", "") for split in record["start_dates"].values() for date in split]
        assert set(found) == {(d, m, s) for d in dates for m in (1, 2, 3) for s in (0, 24, 48)}
        assert set(found.values()) == {5 * 4 + 6}

    def test_truth_covers_every_valid_time_once(self, tiny_archive):  # noqa: F811
        seen = Counter()
        for path, handle in messages(tiny_archive, "truth/*.grib"):
            date = str(eccodes.codes_get(handle, "validityDate"))
            assert path.stem.endswith(date[4:]) and eccodes.codes_get(handle, "dataType") == "an"
            seen[date, eccodes.codes_get(handle, "shortName"), eccodes.codes_get(handle, "level")] += 1
        assert set(seen.values()) == {1}
        assert len({date for date, _, _ in seen}) == 9 + 3 + 5

    def test_analysis_is_near_the_truth_and_members_differ(self, tiny_archive):  # noqa: F811
        fields = {}
        for pattern in ("ensemble/pl_0107.grib", "truth/pl_0107.grib"):
            for _, handle in messages(tiny_archive, pattern):
                keys = [eccodes.codes_get(handle, k) for k in ("shortName", "level", "dataDate", "endStep")]
                member = eccodes.codes_get(handle, "number") if pattern.startswith("ens") else 0
                if keys[:2] == ["t", 850] and keys[3] == 0 and str(keys[2]).startswith("2001"):
                    fields[member] = eccodes.codes_get_values(handle)
        assert sorted(fields) == [0, 1, 2, 3]
        assert 0 < np.abs(fields[1] - fields[2]).mean() < 2
        assert 0 < np.abs(fields[1] - fields[0]).mean() < 2

    def test_static(self, tiny_archive):  # noqa: F811
        grounds = []
        for name in ("static.grib", "forecast_static.grib"):
            found = {
                eccodes.codes_get(h, "shortName"): eccodes.codes_get_values(h) for _, h in messages(tiny_archive, name)
            }
            assert set(found) == {"orog", "lsm"}
            assert found["orog"].max() > 2000 and found["lsm"].min() >= 0 and found["lsm"].max() <= 1
            grounds.append(found["orog"])
        np.testing.assert_array_equal(*grounds)  # both models have one truncation here

    def test_finished_archive_is_left_alone_or_refused(self, tiny_archive, capsys):  # noqa: F811
        before = (tiny_archive / "archive.json").stat().st_mtime_ns
        assert simulate(tiny_config(tiny_archive)) == tiny_archive
        assert "already finished" in capsys.readouterr().out
        assert (tiny_archive / "archive.json").stat().st_mtime_ns == before
        with pytest.raises(UserError, match="another configuration"):
            simulate(tiny_config(tiny_archive, seed=1))

    @pytest.mark.parametrize("mark", ["archive.json", ".parts/config.json"])
    def test_damaged_marks_are_refused(self, tmp_path, mark):
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).write_text('{"a')
        with pytest.raises(UserError, match=f"{mark}: cannot be read .* choose another folder"):
            simulate(tiny_config(tmp_path))

    def test_foreign_folders_are_refused(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(UserError, match="choose a new folder"):
            simulate(tiny_config(tmp_path))
        other = tmp_path / "other" / ".parts"
        other.mkdir(parents=True)
        (other / "config.json").write_text("{}")
        with pytest.raises(UserError, match="unfinished archive of another"):
            simulate(tiny_config(tmp_path / "other"))


def test_a_folder_that_another_share_is_about_to_mark_is_claimed(tmp_path):
    (tmp_path / ".parts").mkdir()
    assert simulate(tiny_config(tmp_path, parts="20/20")) == tmp_path  # a share without a model year
    assert (tmp_path / ".parts" / "config.json").exists()


def test_processes_of_one_number_save_drafts_of_their_own(tmp_path, monkeypatch):
    """As in containers that share the output: each is process 1 of its own."""
    from data_prep.simulate.chain import save

    real = np.savez

    def saved(file, **arrays):
        real(file, **arrays)
        if arrays["x"] == 1:
            save(tmp_path / "a.npz", {"x": np.array(2)})

    monkeypatch.setattr(np, "savez", saved)
    save(tmp_path / "a.npz", {"x": np.array(1)})
    assert np.load(tmp_path / "a.npz")["x"] == 1 and len(list(tmp_path.iterdir())) == 1


class FakeModel:
    """Stands for an `Atmosphere`: any deterministic map of states will do to test the bookkeeping around it."""

    def rest(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((33, 43, 23)).astype(np.float32) * 1e-3

    def advance(self, x: np.ndarray, day: int) -> tuple[np.ndarray, np.ndarray]:
        turned = np.float32(0.99) * np.roll(x, 1, axis=-1) + np.float32(1e-4 * (day % 7))
        return turned, np.abs(x[:, 0, :8, :16]).astype(np.float64)


def fake_chain(output: Path, facts: ModelFacts, which: int = 0):
    from data_prep.simulate.chain import Chain, Weather

    config = tiny_config(output, rows=9, columns=16)
    weather = Weather.__new__(Weather)
    weather.model, weather.levels, weather.grid = FakeModel(), config.levels, regular_grid(9, 16)
    weather.facts = replace(facts, truncation=21, orography_ml=np.zeros((43, 23)))
    weather._synthesis = Synthesis(21, *weather.grid, facts.radius)
    weather._land = np.ones(weather.grid[0].shape + weather.grid[1].shape)
    return Chain(config, model_years(config)[which], weather, weather), config


def killed_at(stop: int, chain) -> None:
    """Kill the process once the chain has finished that many start dates and one more."""
    calls = iter(range(100))

    def kill(text: str, finished: bool) -> None:
        if finished and next(calls) == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    chain.run(kill)


class TestChain:
    def test_a_year_killed_twice_goes_on_to_the_same_bytes(self, tmp_path, facts):
        whole, config = fake_chain(tmp_path / "whole", facts)
        whole.run(lambda text, finished: None)
        for stop in (0, 1):
            child = os.fork()
            if not child:  # no model runs in it
                try:
                    killed_at(stop, fake_chain(tmp_path / "stopped", facts)[0])
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        fake_chain(tmp_path / "stopped", facts)[0].run(lambda text, finished: None)
        year = model_years(config)[0]
        for cycle in year.written:
            with (
                np.load(year.part(tmp_path / "whole", cycle)) as a,
                np.load(year.part(tmp_path / "stopped", cycle)) as b,
            ):
                assert set(a) == set(b) and all((a[key] == b[key]).all() for key in a)

    @pytest.mark.slow
    def test_a_part_that_was_damaged_is_made_again(self, tmp_path, facts):
        chain, config = fake_chain(tmp_path, facts)
        chain.run(lambda text, finished: None)
        write_static_of(chain, tmp_path)
        year = model_years(config)[0]
        part = year.part(tmp_path, year.written[1])
        whole = dict(np.load(part))
        for spoiled in (b"", part.read_bytes()[:-300]):
            part.write_bytes(spoiled)
            with pytest.raises(UserError, match=rf"{part.name}: is damaged \(.*; remove it, and run the same command"):
                assemble(tmp_path, [year])
        part.unlink()
        told = []
        fake_chain(tmp_path, facts)[0].run(lambda text, finished: told.append(finished))
        assert year.complete(tmp_path) and sum(told) == 1
        again = np.load(part)
        assert whole.keys() == set(again) and all((whole[key] == again[key]).all() for key in whole)

    def test_parts_become_files_by_calendar_date(self, tmp_path, facts):
        chain, config = fake_chain(tmp_path, facts)
        chain.run(lambda text, finished: None)
        write_static_of(chain, tmp_path)
        year = model_years(config)[0]
        assemble(tmp_path, [year])
        dates = [f"{cycle.start:%m%d}" for cycle in year.written]
        assert sorted(p.name for p in (tmp_path / "ensemble").iterdir()) == [
            f"{k}_{d}.grib" for k in ("pl", "sfc") for d in dates
        ]
        assert len(list((tmp_path / "truth").iterdir())) == 2 * 9
        figures = realism(tmp_path, [year], config)
        assert set(figures) == {"z500", "t850"} and figures["z500"].dates == 4
        assert describe(config, [year], figures)["start_dates"]["train"][0] == "2001-01-07T00"


def test_a_share_without_a_model_year_runs_none(tmp_path, capsys):
    """The first year belongs to the first share, which may be at work on it."""
    simulate(tiny_config(tmp_path, rows=9, columns=16, parts="4/4"))
    assert "parts=4/4: done; years of other shares are not complete yet: 2001, 2002, 2003" in capsys.readouterr().out
    assert not list((tmp_path / ".parts").glob("*/*.npz"))


def test_shares_of_the_years_and_the_last_one_assembles(tmp_path, facts, monkeypatch, capsys):
    ran = []

    def run_years(config, missing, years):
        ran.append([year.year for year in missing])
        run_fake_years(tmp_path, facts, missing)

    monkeypatch.setattr("data_prep.simulate.run.run_years", run_years)
    for parts in ("3/3", "1/3"):
        simulate(tiny_config(tmp_path, rows=9, columns=16, parts=parts))
        assert not (tmp_path / "archive.json").exists()
    told = capsys.readouterr().out
    assert "parts=3/3: done; years of other shares are not complete yet: 2001, 2002" in told
    assert "parts=1/3: done; years of other shares are not complete yet: 2002" in told
    simulate(tiny_config(tmp_path, rows=9, columns=16, parts="2/3"))
    assert ran == [[2003], [2001], [2002]]
    record = json.loads((tmp_path / "archive.json").read_text())
    assert [len(dates) for dates in record["start_dates"].values()] == [4, 1, 2]
    assert len(list((tmp_path / "ensemble").iterdir())) == 2 * 4 and not (tmp_path / ".parts").exists()
    # The share that a process ran is no property of the archive.
    assert simulate(tiny_config(tmp_path, rows=9, columns=16)) == tmp_path


@pytest.mark.parametrize("moment", ["run.run_years", "archive._join", "run.assemble", "run.realism", "run.describe"])
def test_two_machines_that_finish_at_once_both_end_well(tmp_path, facts, monkeypatch, capsys, moment):
    """The other machine assembles the whole archive when the function `moment` of this one has ended."""
    config = tiny_config(tmp_path, rows=9, columns=16, parts="1/2")
    monkeypatch.setattr(
        "data_prep.simulate.run.run_years", lambda _, missing, __: run_fake_years(tmp_path, facts, missing)
    )
    simulate(replace(config, parts="2/2"))
    function = pkgutil.resolve_name(f"data_prep.simulate.{moment}")
    archives = []

    def content():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupted(*args):
        found = function(*args)
        if not archives:
            archives.append({})
            simulate(replace(config, parts="2/2"))
            archives.append(content())
        return found

    monkeypatch.setattr(f"data_prep.simulate.{moment}", interrupted)
    capsys.readouterr()
    assert simulate(config) == tmp_path
    assert archives[1] == content() and tmp_path / "archive.json" in archives[1]
    assert not (tmp_path / ".parts").exists() and "not complete" not in capsys.readouterr().out


def run_fake_years(output: Path, facts: ModelFacts, years) -> None:
    for year in years:
        chain, _ = fake_chain(output, facts, year.year - tiny_config(output).first_year)
        chain.run(lambda text, finished: None)
        write_static_of(chain, output)


def write_static_of(chain, output: Path) -> None:
    from data_prep.simulate.chain import write_static

    for name, weather in (("static.grib", chain.nature), ("forecast_static.grib", chain.forecast)):
        write_static(weather, output / ".parts" / name)


class TestWorkers:
    def test_progress_in_plain_lines(self, capsys):
        progress = _Progress(40, 0)
        for k in range(40):
            progress.update(f"date {k}", True)
        progress.update("spin-up", False)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 21 and lines[0].startswith("simulate: 2/40 date 1")

    def test_silence_ends_with_a_line(self, capsys, monkeypatch):
        progress = _Progress(1000, 0)
        progress.update("date 1", True)
        progress.wait()
        assert not capsys.readouterr().out
        monkeypatch.setattr(run, "_SILENCE", 0.0)
        progress.wait()
        assert capsys.readouterr().out.startswith("simulate: 1/1000 date 1 is done, the next is under way")

    def test_a_failed_worker_is_an_error(self, tmp_path):
        events = queue.Queue()
        events.put(("cycle", "train 2001-01-07", True))
        events.put(("failed", "FloatingPointError: the T21 model blew up", False))
        with pytest.raises(UserError, match="blew up; finished parts are kept"):
            _follow([SimpleNamespace(exitcode=None)], events, model_years(tiny_config(tmp_path)), tmp_path)

    def test_a_killed_worker_is_an_error(self, tmp_path):
        with pytest.raises(UserError, match="ended with status -9"):
            _follow([SimpleNamespace(exitcode=-9)], queue.Queue(), model_years(tiny_config(tmp_path)), tmp_path)


@pytest.mark.slow
def test_model_steps_members_apart_from_one_another():
    from data_prep.simulate.model import Atmosphere, Recipe

    model = Atmosphere(Recipe(21, 60, wrong=True))
    a, b, c = (model.rest(seed) for seed in (1, 2, 3))
    day = 11_323
    (x, _), rain = model.advance(np.stack([a, b]), day)
    (y, _), _ = model.advance(np.stack([a, c]), day)
    np.testing.assert_array_equal(x, y)
    assert x.shape == (33, 43, 23) and rain.shape == (2, 32, 64) and rain.min() >= 0
    pressure = x[PLANES["log_pressure"]][0]
    assert pressure[0, 0] == pytest.approx(a[PLANES["log_pressure"]][0, 0, 0], abs=1e-3)
    with pytest.raises(FloatingPointError, match="blew up"):
        model.advance(np.full_like(a, np.nan)[None].repeat(2, 0), day)


SCRIPT = """
import sys
from pathlib import Path
from fixtures_archive import tiny_config
from data_prep.simulate import simulate
if __name__ == "__main__":
    simulate(tiny_config(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_files(tiny_archive, tmp_path):  # noqa: F811
    root = Path(__file__).parents[2]
    script, output = tmp_path / "run.py", tmp_path / "archive"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(output)]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(output.glob(".parts/*/2*.npz"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wanted = sorted(path.relative_to(tiny_archive) for path in tiny_archive.rglob("*.grib"))
    assert wanted == sorted(path.relative_to(output) for path in output.rglob("*.grib"))
    for path in wanted:
        assert (tiny_archive / path).read_bytes() == (output / path).read_bytes(), path
