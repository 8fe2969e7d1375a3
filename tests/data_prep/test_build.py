"""A build may be killed, taken up again and spread over workers: the store is the same, file for file."""

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import building
import numpy as np
import pytest
from building import DATES, begin, config

import data_prep.build_run as workers
import ensemble_ml.store.build as finish
from data_prep import prepare
from data_prep.build_job import Job
from data_prep.build_run import run
from ensemble_ml.config import Executor, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.date import DateEntry, refused


@pytest.mark.parametrize(
    ("executor", "workers"), [(Executor.threads, 2), (Executor.threads, 4), (Executor.processes, 2)]
)
def test_any_workers_make_the_same_store(archive, whole, tmp_path, executor, workers):
    made = prepare(config(archive, tmp_path / "s.zarr", executor=executor, workers=workers))
    assert building.contents(made) == whole
    assert building.names(tmp_path) == ["s.zarr"]
    open_store(made).verify()


@pytest.mark.slow
def test_a_cluster_of_dask_makes_the_same_store(archive, whole, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        settings = config(
            archive, tmp_path / "s.zarr", executor=Executor.distributed, scheduler=cluster.scheduler_address
        )
        assert building.contents(prepare(settings)) == whole


def test_slurm_jobs_are_described_and_a_scheduler_that_is_not_there_is_named(archive, tmp_path):
    pytest.importorskip("dask_jobqueue")
    with pytest.raises(UserError, match=r"executor=slurm: .*jobqueue\.yaml"):  # no settings of a queue here
        prepare(config(archive, tmp_path / "s.zarr", executor=Executor.slurm, workers=2))
    with pytest.raises(UserError, match="workers=0: give the number of SLURM jobs"):
        PrepareConfig(executor=Executor.slurm)
    with pytest.raises(UserError, match="scheduler=None: belongs to executor=distributed"):
        PrepareConfig(executor=Executor.distributed)


def test_dates_in_any_order_make_the_same_store(archive, whole, tmp_path):
    settings = config(archive, tmp_path / "s.zarr")
    begin(settings, np.random.default_rng(0).permutation(DATES).tolist()).finalise()
    assert building.contents(tmp_path / "s.zarr") == whole


def kill_until_done(archive, whole, folder, kills):
    """Kill so many builds, at moments spread over the length of one; nothing is built twice."""
    rng, log, target = np.random.default_rng(kills), folder / "log", folder / "s.zarr"
    finished = 0
    for number in range(1000):
        process = building.start(log, input=archive, output=target, workers=2)
        if number < kills:
            wait_for_work(process, target, log, float(rng.uniform(0, 0.12)))
            process.kill()
            process.communicate()
            finished += target.exists()
            if target.exists():  # the whole of it was done before the signal came: begin anew
                assert building.contents(target) == whole
                subprocess.run(["rm", "-r", str(target), f"{target}.building", str(log)], check=False, stderr=-3)
        else:
            assert process.wait(120) == 0, process.communicate()[1]
            break
    assert building.contents(target) == whole
    assert building.names(folder) == ["log", "s.zarr"]
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)) <= DATES  # a builder may die between its entry and its line
    assert finished < kills  # some were stopped in the middle


def wait_for_work(process, target, log, seconds):
    """Wait until a build has done one date more, and then some."""
    before, deadline = log.stat().st_size if log.exists() else 0, time.monotonic() + 60
    while process.poll() is None and (not log.exists() or log.stat().st_size == before):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(seconds)


def test_killed_builds_are_taken_up_again(archive, whole, tmp_path):
    kill_until_done(archive, whole, tmp_path, 3)


@pytest.mark.slow
def test_eight_kills(archive, whole, tmp_path):
    kill_until_done(archive, whole, tmp_path, 8)


def test_what_is_done_is_not_done_again(archive, whole, tmp_path, caplog):
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, [7, 2])
    drafts = (".c.5.0.0.0.0.0.0", "zarr.0123456789abcdef.partial")  # of builders that were killed
    for folder, draft in product(("forecast_pressure", "spread_pressure"), drafts):
        (build.store / folder / draft).write_bytes(b"half a file")
    stamps = {path: path.stat().st_mtime_ns for path in build.store.rglob("c.*")}
    assert len(stamps) == 2 * 3  # forecast, mean, spread
    with caplog.at_level("DEBUG", "data_prep"):
        prepare(settings)
    assert sum("built" in r.getMessage() and "init time 20" in r.getMessage() for r in caplog.records) == DATES - 2
    assert any("2 of 12 init times are built already" in r.getMessage() for r in caplog.records)
    target = tmp_path / "s.zarr"
    assert all((target / path.relative_to(build.store)).stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert building.contents(target) == whole


def test_a_shard_that_was_lost_or_cut_is_built_again(archive, whole, tmp_path):
    settings = config(archive, tmp_path / "s.zarr")
    build = begin(settings, [0, 1, 2])
    (build.store / "mean_pressure" / "c.0.0.0.0.0.0").unlink()
    shard = build.store / "forecast_pressure" / "c.2.0.0.0.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-1])
    whole_entry = build.entry_file(1).read_bytes()
    for spoiled in (b"no entry", whole_entry[:-30]):
        build.entry_file(1).write_bytes(spoiled)
        assert build.missing() == list(range(DATES))
    assert building.contents(prepare(settings)) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_build_says_what_it_keeps(archive, whole, tmp_path, number):
    command = [
        "ensemble-ml",
        "prepare",
        f"input={archive}",
        f"output={tmp_path}/s.zarr",
        "executor=threads",
        "workers=1",
    ]
    script = "import sys, time, data_prep.build_job as job\n"
    script += "real = job.Job.run\n"
    script += "job.Job.run = lambda *a: (time.sleep(0.3), real(*a))[1]\n"
    script += "from ensemble_ml.cli import main\nsys.exit(main(sys.argv[1:]))"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen([sys.executable, "-c", script, *command[1:]], stderr=-1, text=True, env=env)
    entries = Path(f"{tmp_path}/s.zarr.building/entries")
    while len(list(entries.glob("*.npz"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "init times are kept in" in said and "run the same again to go on" in said and "Traceback" not in said
    assert not (tmp_path / "s.zarr").exists()
    assert building.contents(prepare(config(archive, tmp_path / "s.zarr"))) == whole


def test_a_store_that_is_replaced_stays_until_the_new_one_is_there(archive, whole, tmp_path, monkeypatch):
    target = tmp_path / "s.zarr"
    prepare(config(archive, target, dates=["2001-01-05"]))
    before = building.contents(target)
    settings = config(archive, target, overwrite=True)
    build = begin(settings, [0, 1])
    assert building.contents(target) == before
    with monkeypatch.context() as patch:  # dies when the names are swapped
        patch.setattr(Build, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings)
    assert building.contents(target) == whole and build.work.exists()
    stamp = (target / "manifest.json").stat().st_mtime_ns
    prepare(settings)  # only tidies up
    assert (target / "manifest.json").stat().st_mtime_ns == stamp and building.names(tmp_path) == ["s.zarr"]


def test_an_interruption_of_the_last_step_is_mended(archive, whole, tmp_path, monkeypatch):
    settings = config(archive, tmp_path / "s.zarr")

    def die(*_):
        raise KeyboardInterrupt

    for step in ("write_manifest", "write_metadata"):
        with monkeypatch.context() as patch:
            patch.setattr(finish, step, die)
            with pytest.raises(KeyboardInterrupt):
                prepare(settings)
        assert not (tmp_path / "s.zarr").exists()
    assert building.contents(prepare(settings)) == whole


def test_bad_input_leaves_the_old_store_and_says_the_field(archive, tmp_path):
    target = tmp_path / "s.zarr"
    prepare(config(archive, target, dates=["2001-01-05"]))
    before = building.contents(target)
    damaged = tmp_path / "b.grib"
    damaged.write_bytes(archive.read_bytes())
    settings = config(damaged, target, overwrite=True, workers=1)
    begin(settings, [0])
    job = Job(settings)
    with open(damaged, "r+b") as file:  # cut short after it was indexed
        file.truncate(damaged.stat().st_size // 2)
    with pytest.raises(UserError, match=r"b\.grib") as error:
        run(settings, job, Build(target, job.plan, overwrite=True))
    assert "\n" not in str(error.value)
    assert building.contents(target) == before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], stderr=-3).returncode
    ):
        pytest.skip("a small file system needs root and mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(archive, whole, small_disk, tmp_path):
    target = small_disk / "s.zarr"
    prepare(config(archive, target, dates=["2001-01-05"], index=None))
    before = building.contents(target)
    free = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - 60_000)))
    settings = config(archive, target, overwrite=True, index=None)
    with pytest.raises(
        UserError, match=r"cannot write .*No space left on device; free space or choose another"
    ) as error:
        prepare(settings)
    assert "\n" not in str(error.value)
    assert building.contents(target) == before
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    assert building.contents(prepare(settings)) == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system that may not be written")
def test_a_folder_that_may_not_be_written(archive, tmp_path):
    folder = tmp_path / "readonly"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder], stderr=-3).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with pytest.raises(UserError, match=r"output=.*s\.zarr: cannot be written \(Read-only file system\); choose"):
            prepare(config(archive, folder / "s.zarr"))
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_worker_that_dies_is_reported_by_its_dates(archive, whole, tmp_path, monkeypatch):
    settings = config(archive, tmp_path / "s.zarr", executor=Executor.processes, workers=1)
    begin(settings, [0])
    monkeypatch.setattr(workers, "build_date", building.die)
    with pytest.raises(UserError, match=r"a worker died while it built init time 2001-01-02T00, .* run the same again"):
        prepare(settings)
    monkeypatch.undo()
    assert building.contents(prepare(settings)) == whole


def test_one_line_comes_through_from_a_worker_process(archive, tmp_path):
    damaged = tmp_path / "b.grib"
    damaged.write_bytes(archive.read_bytes())
    settings = config(damaged, tmp_path / "s.zarr", executor=Executor.processes, workers=1)
    job = Job(settings)
    with open(damaged, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"b\.grib") as error:
        run(settings, job, Build(settings.output, job.plan))
    assert "\n" not in str(error.value)
    assert building.names(tmp_path) == ["b.grib"]


def test_memory_does_not_grow_with_the_dates(archive, tmp_path):
    """Entries on disk, not in memory: a build holds no factor of a date that is finished."""
    begin(config(archive, tmp_path / "s.zarr"), range(DATES)).finalise()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, DateEntry)]


def test_disk_errors_name_the_remedy():
    full, other = (str(refused(Path("s"), "x", OSError(n, os.strerror(n)))) for n in (errno.ENOSPC, errno.EIO))
    assert "free space" in full and "check the output folder" in other
