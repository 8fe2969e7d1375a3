"""Builders that share a store, one after the other or at once: nothing is built twice, nothing mixed."""

import errno
import json
import os
import resource
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import building
import numpy as np
import pytest
from building import DATES, begin, config
from gribfiles import ensemble

import data_prep.build_run as building_run
import data_prep.build_run as workers
from data_prep import prepare
from data_prep.build_job import Job
from ensemble_ml.config import Executor, Gaps, Packing, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.date import DateEntry
from ensemble_ml.store.folder import building_folder, exclusive, give_name, make_folders


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"levels": [500]}, r"levels \[500, 850\], now \[500\]"),
        ({"packing": "float32"}, r"packing uint16, now float32"),
        ({"dates": ["2001-01-01/2001-01-03"]}, r"start dates \[.* \(12\), now \["),
    ],
)
def test_an_unfinished_build_is_not_mixed_with_another(archive, tmp_path, changes, text):
    target = tmp_path / "s.zarr"
    begin(config(archive, target), [0])
    changes = {key: Packing(value) if key == "packing" else value for key, value in changes.items()}
    message = rf"an unfinished build has other settings \({text}.*\); give the same to go on, or add restart=true"
    with pytest.raises(UserError, match=message):
        prepare(config(archive, target, **changes))
    assert not target.exists()
    made = open_store(prepare(config(archive, target, restart=True, **changes)))
    assert building.names(tmp_path) == ["s.zarr"] and made.has(Part.FORECAST)


def test_an_entry_of_another_plan_is_not_taken(archive, whole, tmp_path):
    """As a worker that outlived its archive would leave it."""
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, range(DATES))
    assert not build.missing()
    entry = DateEntry.load(build.entry_file(3))
    entry.plan = "0" * 16
    entry.save(build.entry_file(3))
    build.entry_file(5).write_bytes(build.entry_file(4).read_bytes())  # of another start date
    assert build.missing() == [3, 5]
    assert building.contents(prepare(settings)) == whole


def test_a_worker_that_finds_another_archive_says_so(archive, tmp_path):
    settings = config(archive, tmp_path / "s.zarr")
    with pytest.raises(UserError, match="finds other archives than are seen here"):
        workers.build_date(settings, 1, 0, "0" * 16, Job(settings).files)
    assert not building_folder(tmp_path / "s.zarr").exists()


def test_a_worker_that_outlives_a_run_opens_a_file_anew_that_was_copied_again(archive, tmp_path):
    copied = shutil.copy(archive, tmp_path / "a.grib")
    settings, plans = config(copied, tmp_path / "s.zarr"), set()
    for date in range(2):
        os.utime(copied, ns=(0, 10**18 + date))
        job = Job(settings)
        plans.add(job.plan.digest)
        assert workers.build_date(settings, 1, date, job.plan.digest, job.files)
        held = workers._opened.cache_info().misses
        assert workers.build_date(settings, 1, date + 2, job.plan.digest, job.files)
        assert workers._opened.cache_info().misses == held
    assert len(plans) == 1


def test_dates_that_workers_build_elsewhere_are_missed(archive, tmp_path, monkeypatch):
    settings = config(archive, tmp_path / "s.zarr", workers=1)
    monkeypatch.setattr(building_run, "_SEEN_WITHIN", 0.2)
    monkeypatch.setattr(Job, "run", lambda *_: True)  # as one does whose folder is another machine's
    with pytest.raises(UserError, match=f"workers have built {DATES} init times that are not seen here"):
        prepare(settings)


def test_a_worker_that_loses_the_output_says_so(archive, tmp_path):
    """It would answer for ever that others have the dates."""
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, [0])
    shutil.rmtree(build.work)
    with pytest.raises(UserError, match=r"s.zarr.building is not there on .*; give a folder that all workers"):
        build.claim(1).__enter__()


@pytest.mark.parametrize("joined", [False, True])
def test_a_build_that_has_begun_is_not_removed_by_one_that_fails(archive, whole, tmp_path, monkeypatch, joined):
    """Both have the plan, and neither has built an init time, when the other gives up."""
    settings = config(archive, tmp_path / "s.zarr")
    job, each = Job(settings), building_run._each
    build, other = (Build(settings.output, job.plan) for _ in range(2))

    def later(*given):
        other.discard()
        each(*given)

    if joined:
        monkeypatch.setattr(building_run, "_each", later)
    else:
        other.discard()
    assert building_run.run(settings, job, build)
    assert building.contents(tmp_path / "s.zarr") == whole


@pytest.mark.slow
def test_worker_processes_leave_ctrl_c_to_their_parent(archive, tmp_path, monkeypatch):
    """One that was interrupted while it started its first thread never ended, nor did its parent."""
    settings = config(archive, tmp_path / "s.zarr", executor=Executor.processes, workers=1)
    job = Job(settings)
    monkeypatch.setattr(building_run, "build_date", building.ignores_interrupts)
    with building_run.workers_of(settings, job, Build(settings.output, job.plan)) as workers:
        assert workers.submit(0).result(60)


def test_a_build_that_is_at_work_is_not_thrown_away(archive, tmp_path):
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, [0])
    with build.claim(1), pytest.raises(UserError, match="another builder is at work"):
        prepare(config(archive, tmp_path / "s.zarr", restart=True))
    assert not build.missing([0])
    with pytest.raises(UserError, match=r"with parts= each share would throw"):
        config(archive, tmp_path / "s.zarr", restart=True, parts="1/2")


def test_what_is_to_be_completed_is_not_thrown_away(archive, tmp_path):
    with pytest.raises(UserError, match=r"restart=True: with finalise=true it would throw away the init times"):
        config(archive, tmp_path / "s.zarr", restart=True, finalise=True)


@pytest.mark.slow
def test_two_builders_share_the_work(archive, whole, tmp_path):
    settings = {"input": archive, "output": tmp_path / "s.zarr", "workers": 1}
    both = [building.start(tmp_path / f"log{number}", **settings) for number in range(2)]
    codes = [(process.communicate()[1], process.returncode) for process in both]
    # the later may come when the store is complete already, and then says so
    assert sum(code == 0 for _, code in codes) >= 1, codes
    assert all(code == 0 or "exists already" in text for text, code in codes), codes
    assert building.contents(tmp_path / "s.zarr") == whole
    lines = [line for log in tmp_path.glob("log*") for line in log.read_text().splitlines()]
    assert sorted(lines) == [f"init time 2001-01-{day:02}T00: built" for day in range(1, DATES + 1)]
    assert not list(tmp_path.glob("*.building"))


def test_a_builder_waits_for_the_dates_of_another(archive, whole, tmp_path, caplog):
    settings = config(archive, tmp_path / "s.zarr", workers=1)
    build = begin(settings, range(1, DATES))
    said, held = threading.Event(), threading.Event()

    def another():
        with build.claim(0) as ours:
            assert ours
            held.set()
            said.wait(30)

    other = threading.Thread(target=another)
    other.start()
    held.wait(30)
    threading.Timer(1.0, said.set).start()
    with caplog.at_level("INFO", "data_prep"):
        prepare(settings)
    other.join()
    assert any("waiting for 1 init times that another builder" in r.getMessage() for r in caplog.records)
    assert building.contents(tmp_path / "s.zarr") == whole


@pytest.mark.parametrize("died", [False, True])
def test_a_builder_that_comes_while_another_tidies_up_finds_the_store_done(archive, whole, tmp_path, monkeypatch, died):
    settings = config(archive, tmp_path / "s.zarr", workers=1)
    build = begin(settings, range(DATES))
    late, remove, found = begin(settings, ()), Build.remove, []

    def tidied(self):
        monkeypatch.setattr(Build, "remove", remove)
        found.append(late.missing())
        with late.claim(0) as ours:
            found.append(ours)
        if not died:
            remove(self)

    monkeypatch.setattr(Build, "remove", tidied)
    build.finalise()
    assert found == [[], False]
    assert late.finalise() == tmp_path / "s.zarr" and late.complete
    assert building.contents(tmp_path / "s.zarr") == whole and not list(tmp_path.glob("*.building"))


def test_shares_of_a_batch_queue(archive, whole, tmp_path):
    target = tmp_path / "s.zarr"
    with pytest.raises(UserError, match=r"12 of 12 init times are not built yet; run without finalise=true"):
        prepare(config(archive, target, finalise=True))
    assert not building_folder(target).exists()
    for number in (2, 3, 1):
        assert not target.exists()
        prepare(config(archive, target, parts=f"{number}/3"))
    assert building.contents(target) == whole
    assert prepare(config(archive, target, parts="2/3")) == target  # a job that comes late, or again
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(UserError, match=f"parts={wrong}: write i/n"):
            PrepareConfig(parts=wrong)


def test_a_build_of_many_dates_is_thrown_away(archive, tmp_path):
    """More claims than a process may have open files."""
    build = begin(config(archive, tmp_path / "s.zarr"), [0])
    for date in range(300):
        (build.work / "claims" / f"{date:06d}").touch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        prepare(config(archive, tmp_path / "s.zarr", restart=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_system_without_locks_is_named(archive, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match=r"its file system has no locks .*mount Lustre with -o flock"):
        prepare(config(archive, tmp_path / "s.zarr", index=None))


def test_builders_of_one_process_number_write_under_names_of_their_own(tmp_path, monkeypatch):
    """As in containers that share the output: each is process 1 of its own."""
    names, real = [], Path.touch

    def touched(path, *args, **keys):
        names.append(path)
        real(path, *args, **keys)
        if len(names) == 1:
            make_folders(tmp_path / "work", tmp_path / "s.zarr")

    monkeypatch.setattr(Path, "touch", touched)
    make_folders(tmp_path / "work", tmp_path / "s.zarr")
    assert len(set(names)) == 2 and not any(path.exists() for path in names)


def test_a_link_to_a_store_stays_one(archive, whole, tmp_path):
    prepare(config(archive, tmp_path / "disk" / "s.zarr", levels=[500]))
    (tmp_path / "s.zarr").symlink_to(tmp_path / "disk" / "s.zarr")
    prepare(config(archive, tmp_path / "s.zarr", overwrite=True))
    assert (tmp_path / "s.zarr").is_symlink() and building.contents(tmp_path / "disk" / "s.zarr") == whole


def test_a_builder_that_waited_to_join_finds_the_store_done(archive, whole, tmp_path):
    """The lock that it gets is on a file that has been removed."""
    settings = config(archive, tmp_path / "s.zarr")
    build, found = begin(settings, range(DATES)), []
    with exclusive(build.work / "lock"):
        waiting = threading.Thread(target=lambda: found.append(Build(settings.output, build.plan)))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        build._finish()
        give_name(build.work, build.path, False)
        build.remove()
    waiting.join(30)
    assert [one.complete for one in found] == [True]
    assert building.names(tmp_path) == ["s.zarr"] and building.contents(tmp_path / "s.zarr") == whole


def test_a_builder_of_an_older_archive_does_not_finish_for_another(archive, tmp_path):
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, range(DATES))
    plan = build.work / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"fingerprint": "0" * 16}))
    with pytest.raises(UserError, match="the archive has changed since this run began, and another builder uses"):
        build.finalise()
    assert not (tmp_path / "s.zarr").exists()


def test_gaps_that_are_filled_meanwhile_cost_their_own_dates(tmp_path, caplog):
    """What was built of complete dates stays, and the others are built anew."""
    days = [20010101, 20010102, 20010103]
    gone = [(20010103, 2, 24, "t", level) for level in (500, 850)]
    path, late = tmp_path / "in" / "a.grib", {"members": (2,), "dates": (20010103,), "steps": (24,)}
    ensemble(path, dates=days, leave_out=gone)
    settings = config(path.parent, tmp_path / "s.zarr", gaps=Gaps.mask)
    begin(settings, range(3))
    ensemble(tmp_path / "in" / "b.grib", **late)
    caplog.set_level("DEBUG")
    store = open_store(prepare(settings))
    assert store.present(Part.FORECAST, 2)[0].all()
    assert "2 of 3 init times are built already" in caplog.text
    ensemble(tmp_path / "whole" / "a.grib", dates=days)
    other = open_store(prepare(config(tmp_path / "whole", tmp_path / "w.zarr", gaps=Gaps.mask)))
    for date in range(3):
        assert np.array_equal(store.read(Part.FORECAST, date).pressure, other.read(Part.FORECAST, date).pressure)


def test_a_store_of_the_archive_as_it_was_is_not_taken_for_its_replacement(archive, whole, tmp_path, monkeypatch):
    """A builder was killed while it tidied up, after which the archive changed."""
    settings = config(archive, tmp_path / "s.zarr", overwrite=True)
    build = begin(settings, range(DATES))
    monkeypatch.setattr(build, "remove", lambda: None)
    build.finalise()
    grown = replace(build.plan, provenance=build.plan.provenance | {"fingerprint": "0" * 16})
    assert not Build(settings.output, grown, overwrite=True).complete


def test_an_old_store_is_not_taken_for_a_build_that_somebody_removed(archive, tmp_path, monkeypatch):
    prepare(config(archive, tmp_path / "s.zarr", levels=[500]))
    build = begin(config(archive, tmp_path / "s.zarr", overwrite=True), range(DATES))
    monkeypatch.setattr("ensemble_ml.store.build._SEEN_WITHIN", 0.0)
    shutil.rmtree(build.work)
    with pytest.raises(UserError, match=r"s.zarr: somebody removed its unfinished build; start anew"):
        build.finalise()


def test_the_error_that_ends_a_run_is_not_replaced_by_another(archive, tmp_path, monkeypatch):
    """Another builder uses a newer state of the archive, so what is kept cannot be counted."""

    def fail(*_):
        monkeypatch.setattr(Build, "missing", refuse)
        raise UserError("the disk is full")

    def refuse(*_):
        raise UserError("the archive has changed")

    monkeypatch.setattr(building_run, "_each", fail)
    with pytest.raises(UserError, match="the disk is full"):
        prepare(config(archive, tmp_path / "s.zarr", workers=1))
