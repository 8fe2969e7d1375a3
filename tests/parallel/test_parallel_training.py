"""Training over several ranks against one process: losses, scores and weights, float64; and what a rank reads."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from parallel.ranks import run_ranks
from stores import make_store

from ensemble_ml.config import (
    DataConfig,
    LoaderName,
    LoadingConfig,
    ModelConfig,
    OptimConfig,
    OptimName,
    ParallelConfig,
    Precision,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.distributed.exchange import GradientAverage
from ensemble_ml.errors import Stopped, UserError
from ensemble_ml.models import EnsembleModel
from ensemble_ml.store.read import TensorStore
from ensemble_ml.training import assemble, load_checkpoint, train, trainer, validation
from ensemble_ml.training.tracking import read_log


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """17 x 16 points: over two ranks 12 and 5 rows."""
    folder = tmp_path_factory.mktemp("parallel")
    return make_store(folder / "a.zarr", dates=12, members=5, shape=(17, 16), bias=0.6, dispersion=0.6).path


def config_of(store, output, **changes):
    optim = OptimConfig(name=changes.pop("optimizer", OptimName.adamw), warmup=2, lr=1e-3, clip=1.0)
    model = ModelConfig(
        hidden=8,
        max_hidden=8,
        points=16,
        depth=2,
        precision=changes.pop("precision", Precision.float64),
    )
    settings = dict(
        run="a", output=str(output), steps=10, batch_size=3, validate_every=5, checkpoint_every=5, threads=1,
        data=DataConfig(store=store, train=["2001-01-01/2001-01-16"], validation=["2001-01-17/2001-01-31"],
                        members=[1, 2, 5], validation_members=3),
        model=model, optim=optim, tracking=TrackingConfig(tensorboard=False, log_every=1), average=0.5,
    )  # fmt: skip
    return TrainConfig(**settings | changes)


def read_rows(config):
    """Train, and tell which rows were read: for the climate, for training and for validation."""
    rows, read = set(), TensorStore.read

    def told(self, part, date, selection=None):
        rows.add(selection.rows)
        return read(self, part, date, selection)

    TensorStore.read = told
    try:
        train(config)
    finally:
        TensorStore.read = read
    return rows


def joined(session, config):
    """Train within a session that is there already."""
    trainer.start = lambda _: nullcontext(session)
    return read_rows(config)


def logged(run):
    lines = read_log(run / "log.jsonl")
    return [x for x in lines if "loss" in x], [x["validation"] for x in lines if "validation" in x]


def assert_same(one, other, *, weights=1e-9):
    (steps, scores), (steps2, scores2) = logged(one), logged(other)
    assert [s["step"] for s in steps] == [s["step"] for s in steps2]
    for name in ("loss", "crps", "spread"):
        assert [s[name] for s in steps2] == pytest.approx([s[name] for s in steps], rel=1e-8)  # nine digits are logged
    for a, b in zip(scores, scores2, strict=True):
        assert b == pytest.approx(a, rel=1e-9)
    a, b = (load_checkpoint(run / "checkpoints" / "last", training=True) for run in (one, other))
    for first, second in ((a.state_dict, b.state_dict), (a.training, b.training)):
        assert first.keys() == second.keys()
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=weights, atol=weights, msg=key)


@pytest.fixture(scope="module")
def serial(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("serial")
    assert read_rows(config_of(store, output)) == {None}
    return output / "a"


LONG = [pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 1, 2), (2, 2, 1), (1, 1, 4))]


@pytest.mark.parametrize(("lat", "lon", "data"), [(2, 1, 1), (1, 1, 2), *LONG])
def test_equal_to_one_process(store, serial, tmp_path, lat, lon, data):
    config = config_of(store, tmp_path, parallel=ParallelConfig(lat=lat, lon=lon, data=data))
    found = run_ranks(joined, lat * lon * data, config, lat=lat, lon=lon, data=data)
    bands = [{(0, 12)}, {(12, 17)}] if lat == 2 else [{None}]
    for rank, rows in enumerate(found):
        assert rows == bands[rank // lon % lat]
    assert_same(serial, tmp_path / "a")
    samples = [s["samples_per_s"] for s in logged(tmp_path / "a")[0]]
    assert np.all(np.array(samples) > 0)


def left_alone(session, config):
    """How many parameters the exchanges of a run leave to the ranks whose cells they are."""
    counts, told = [], GradientAverage._set_apart

    def noted(self):
        told(self)
        counts.append(len(self.apart))

    GradientAverage._set_apart = noted
    joined(session, config)
    return max(counts)


@pytest.mark.parametrize(("lat", "data", "count"), [(2, 1, 3), (1, 2, 0)])
def test_terms_of_one_cell_are_not_exchanged_where_ranks_share_a_sample(store, tmp_path, lat, data, count):
    """Location, scale and spread, of pressure levels and of the surface."""
    parallel = ParallelConfig(lat=lat, data=data)
    config = config_of(store, tmp_path, steps=2, validate_every=2, parallel=parallel)
    assert run_ranks(left_alone, 2, config, lat=lat, data=data) == [count] * 2


def stopped_at(session, config, steps):
    """Train until a rank that is not the first is told to stop after `steps`."""
    told = trainer.Trainer._step

    def step(self, batch, stop=None):
        if session.topology.rank == 1 and self.state.step == steps - 1 and stop is not None:
            stop.requested = "SIGUSR1"
        return told(self, batch, stop)

    trainer.Trainer._step = step
    trainer.start = lambda _: nullcontext(session)
    try:
        train(config)
    except Stopped as stopped:
        return stopped.requeue
    return False


@pytest.mark.slow
def test_a_checkpoint_of_four_parts_goes_on_as_one_and_as_four_bands(tmp_path):
    """Ten steps more than the four before, on 2x2, then on 1x1 and on 4x1; 20 rows are bands of 8, 4, 4 and 4."""
    store = make_store(tmp_path / "a.zarr", dates=12, members=5, shape=(20, 16), bias=0.6, dispersion=0.6).path
    config = config_of(store, tmp_path / "parts", steps=14)
    train(config_of(store, tmp_path / "serial", steps=14))
    assert run_ranks(stopped_at, 4, config, 4, lat=2, lon=2) == [True] * 4
    shutil.copytree(tmp_path / "parts", tmp_path / "bands", symlinks=True)
    train(dataclasses.replace(config, resume=True))
    run_ranks(joined, 4, dataclasses.replace(config, output=str(tmp_path / "bands"), resume=True), lat=4)
    for name in ("parts", "bands"):
        assert_same(tmp_path / "serial" / "a", tmp_path / name / "a")
        assert len(logged(tmp_path / name / "a")[0]) == 14


def _late_forward(session, config, seconds):
    forward = EnsembleModel.forward

    def slow(self, inputs):
        if session.topology.rank == 1 and self.training:
            time.sleep(seconds)
        return forward(self, inputs)

    EnsembleModel.forward = slow
    return joined(session, config)


@pytest.mark.parametrize("degrees", [{"data": 2}, pytest.param({"lat": 2}, marks=pytest.mark.slow)], ids=str)
def test_waiting_for_a_late_rank_is_told(store, tmp_path, degrees):
    """At the weights of the loss, or at the first halo; the numbers are what they were."""
    found = {}
    for name, seconds in (("together", 0.0), ("late", 0.5)):
        config = config_of(
            store, tmp_path / name, precision=Precision.float32, batch_size=4, steps=3, validate_every=3,
            checkpoint_every=3, parallel=ParallelConfig(**degrees),
        )  # fmt: skip
        config.model.depth = 1
        run_ranks(_late_forward, 2, config, seconds, **degrees)
        found[name] = logged(tmp_path / name / "a")[0]
    together, late = ([step["exchange_wait"] for step in found[name]] for name in ("together", "late"))
    assert min(late[1:]) > 0.5 > min(together) and max(together + late) <= 1
    assert [step["loss"] for step in found["late"]] == [step["loss"] for step in found["together"]]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_training_under_a_launcher_equals_one_process(store, tmp_path, launcher):
    if launcher == "mpiexec":
        pytest.importorskip("mpi4py")
    started = {
        "alone": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "mpiexec": [os.path.join(os.path.dirname(sys.executable), "mpiexec"), "-n", "2", sys.executable],
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for name, more in (("alone", []), (launcher, ["parallel.lat=2"])):
        settings = [
            "run=a", f"output={tmp_path / name}", f"data.store={store}", "data.train=[2001]", "data.members=[2]",
            "model.hidden=4", "model.linear=false", "model.max_hidden=4", "model.depth=1", "model.precision=float64",
            "steps=4", "threads=1",
            "tracking.tensorboard=false", "tracking.log_every=1", "validate_every=4",
        ]  # fmt: skip
        command = [*started[name], "-m", "ensemble_ml", "train", *settings, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
        assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "alone" / "a", tmp_path / launcher / "a")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec", "slurm"])
def test_a_sweep_meets_anew_for_each_run(store, tmp_path, launcher):
    if launcher == "mpiexec":
        pytest.importorskip("mpi4py")
    settings = [
        "run=s${seed}", "seed=0,1", f"output={tmp_path}", f"data.store={store}", "data.train=[2001]",
        "data.members=[2]", "model.hidden=4", "model.linear=false", "model.max_hidden=4",
        "model.depth=1", "model.precision=float32", "steps=2", "threads=1", "tracking.tensorboard=false",
        "parallel.lat=2", f"hydra.sweep.dir={tmp_path}/sweep",
    ]  # fmt: skip
    command = [sys.executable, "-m", "ensemble_ml", "train", "-m", *settings]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if launcher == "slurm":  # the port follows from the job's number
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
        tasks = [{**env, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=task) for task in tasks]
    else:
        starts = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            "mpiexec": [os.path.join(os.path.dirname(sys.executable), "mpiexec"), "-n", "2", sys.executable],
        }
        command = [*starts[launcher], *command[1:]]
        started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)]
    texts = [process.communicate(timeout=300)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(texts)
    for seed in range(2):
        assert max(line["step"] for line in read_log(tmp_path / f"s{seed}" / "log.jsonl")) == 2


def elsewhere(session, config, folders):
    """Train in a working directory of each rank's own."""
    os.chdir(folders[session.topology.rank])
    joined(session, config)


def test_ranks_that_do_not_see_one_output_folder_are_told(store, serial, tmp_path):
    folders = tmp_path / "shared", tmp_path / "other"
    shutil.copytree(serial, folders[0] / "runs" / "a", symlinks=True)
    (folders[1] / "runs").mkdir(parents=True)
    config = config_of(store, "runs", resume=True, steps=10, parallel=ParallelConfig(data=2))
    ends = run_ranks(elsewhere, 2, config, folders, statuses=True, data=2, timeout=20)
    assert all(code for code, *_ in ends)
    told = r"rank 1: checkpoint to go on from=none, on rank 0 checkpoint to go on from=\w{16}; let output=runs be one"
    assert all(re.search(told, text) for *_, text in ends)


def another_processor(session, config):
    """Train; the logarithms of the second rank turn every comparison of scores around."""
    if session.topology.rank:
        own = validation._Sums.ratio
        validation._Sums.ratio = lambda *given: (found := own(*given)) and 1 / found
    joined(session, config)


def test_ranks_whose_scores_differ_make_the_same_choices(store, tmp_path):
    """The best model is measured by all ranks: one that thought it worse would leave the others waiting."""
    config = config_of(store, tmp_path, parallel=ParallelConfig(data=2), steps=2, validate_every=1, patience=1)
    run_ranks(another_processor, 2, config, data=2, timeout=10)


def other_best(session, config):
    """Train; the best checkpoint of a run has changed before the second rank reads it."""
    read = assemble.load_checkpoint

    def later(path):
        found = read(path)
        return dataclasses.replace(found, meta=found.meta | {"sha256": str(session.topology.rank) * 64})

    assemble.load_checkpoint = later
    return joined(session, config)


@pytest.mark.parametrize("key", ["init_from", "teacher"])
def test_ranks_that_read_different_checkpoints_of_a_run_are_told(store, serial, tmp_path, key):
    config = config_of(store, tmp_path, parallel=ParallelConfig(data=2), steps=1, **{key: str(serial)})
    ends = run_ranks(other_best, 2, config, data=2, statuses=True)
    assert all(code for code, *_ in ends)
    assert f"rank 1: checkpoint of {key}=step_" in ends[1][2] and f"give {key} the folder of a step" in ends[1][2]


@pytest.mark.slow
def test_goes_on_under_another_partition(store, serial, tmp_path):
    config = config_of(store, tmp_path)
    assert run_ranks(stopped_at, 4, config, 4, lat=2, lon=2) == [True] * 4
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["step"] == 4
    resumed = dataclasses.replace(config, resume=True)
    shutil.copytree(tmp_path / "a", tmp_path / "alone" / "a", symlinks=True)
    run_ranks(joined, 3, resumed, lat=3)
    assert_same(serial, tmp_path / "a")
    train(dataclasses.replace(resumed, output=str(tmp_path / "alone")))
    assert_same(serial, tmp_path / "alone" / "a")


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_loading_by_plan_changes_no_bit(store, tmp_path, data):
    for name in LoaderName:
        config = config_of(store, tmp_path, run=name.value, loading=LoadingConfig(name=name, ram="60MB"))
        if data == 1:
            train(config)
        else:
            run_ranks(joined, data, config, data=data)
    one, other = (tmp_path / name.value for name in LoaderName)
    assert [[x[k] for k in ("loss", "crps", "spread")] for x in logged(one)[0]] == [
        [x[k] for k in ("loss", "crps", "spread")] for x in logged(other)[0]
    ]
    assert logged(one)[1] == logged(other)[1]
    a, b = (load_checkpoint(run / "checkpoints" / "last", training=True) for run in (one, other))
    assert all(torch.equal(v, b.state_dict[k]) for k, v in a.state_dict.items())
    assert all(torch.equal(v, b.training[k]) for k, v in a.training.items())


@pytest.mark.slow
def test_lion_and_the_fastest_precision(store, tmp_path):
    """A run as users start it: float32 or bfloat16, overlap or not by measurement, one choice for all ranks."""
    measured = ParallelConfig(lat=2, overlap="auto")
    config = config_of(
        store, tmp_path, precision=Precision.auto, optimizer=OptimName.lion, steps=6, max_minutes=1.0, parallel=measured
    )
    run_ranks(joined, 2, config, lat=2)
    steps, scores = logged(tmp_path / "a")
    assert len(steps) == 6 and len(scores) == 3 and all(np.isfinite(s["loss"]) for s in steps)


@pytest.mark.slow
def test_a_run_that_goes_on_overlaps_as_it_did(store, tmp_path, monkeypatch):
    """What is faster is measured once a mesh: it moves last bits, and another measurement may differ."""

    def found_faster(on):
        monkeypatch.setattr(assemble, "_measure_overlap", lambda run, overlap: setattr(overlap, "on", on))

    config = config_of(store, tmp_path, steps=4, parallel=ParallelConfig(lat=2, overlap="auto"))
    last = tmp_path / "a" / "checkpoints" / "last"
    found_faster(True)
    assert run_ranks(stopped_at, 2, config, 2, lat=2) == [True] * 2
    kept = load_checkpoint(last).meta["overlap"]
    assert kept == {"mesh": [1, 1, 2, 1], "on": True}
    found_faster(False)
    run_ranks(joined, 2, dataclasses.replace(config, resume=True), lat=2)
    assert load_checkpoint(last).meta["step"] == 4
    assert load_checkpoint(last).meta["overlap"] == kept


def spoilt(session, config):
    """Train with storage that gives the first rank no fifth read of the fits."""
    reads, real = [], TensorStore.read

    def failing(self, part, date, *given, **named):
        reads.append(date)
        if session.first and len(reads) == 5:
            raise UserError("store a.zarr: damaged file 000007")
        return real(self, part, date, *given, **named)

    TensorStore.read = failing
    joined(session, config)


def test_a_fit_that_cannot_read_ends_all_ranks_and_says_why(store, tmp_path, own_fits):
    found = run_ranks(spoilt, 2, config_of(store, tmp_path), lat=2, statuses=True)
    assert all(status for status, *_ in found) and max(seconds for _, seconds, _ in found) < 60
    assert "UserError: store a.zarr: damaged file 000007" in found[0][2]


def refused(session, config):
    trainer.start = lambda _: nullcontext(session)
    with pytest.raises(UserError, match=config.model.name) as found:
        train(config)
    return str(found.value)


def test_a_model_that_cannot_be_shared_out(store, tmp_path):
    config = config_of(store, tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name="drn", depth=0))
    for text in run_ranks(refused, 2, config, lat=2):
        assert "model.name=drn: trains on one rank; start one process, or use model.name=unet3d" in text
    assert not (tmp_path / "a").exists()
