"""What a run that goes on says and keeps: of limits, of checkpoints that cannot be read, of runs that hardly began."""

import json
import logging
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stores import make_store
from training.running import assert_equal_runs, spoil, stop_at, weights

from ensemble_ml.config import ExchangeName, MomentumKept, Nonfinite, OptimName, TrackingConfig
from ensemble_ml.config.training import Assign
from ensemble_ml.distributed import solo
from ensemble_ml.errors import UserError
from ensemble_ml.training import load_checkpoint, setup, train
from ensemble_ml.training.agreement import plain_config, refuse_other_settings, refuse_other_teacher
from ensemble_ml.training.assemble import told_of_memory
from ensemble_ml.training.checkpoint import Checkpoint
from ensemble_ml.training.tracking import read_log
from ensemble_ml.training.trainer import Trainer


def test_a_limit_that_comes_too_late_is_told_of(config_of, caplog):
    """The steps are settled when a run begins: a run that goes on takes as long as they take."""
    config = config_of(steps=4, validate_every=4, max_minutes=60.0)
    train(config)
    for minutes, told in ((60.0, False), (0.0, False), (0.001, True)):
        caplog.clear()
        train(replace(config, resume=True, max_minutes=minutes))
        assert (
            "max_minutes=0.001: the steps were settled when the run began: 4, of which 4 are done" in caplog.text
        ) == told


def test_a_teacher_may_lie_elsewhere_but_must_be_the_same(config_of, tmp_path):
    config = config_of(teacher="runs/large")
    meta = {"config": plain_config(config), "teacher": "a" * 64}
    run, other = (Checkpoint(tmp_path, None, {}, {}, {"sha256": digit * 64} | meta) for digit in "ab")
    refuse_other_settings(replace(config, teacher="elsewhere/large"), run)
    with pytest.raises(UserError, match=r"settings differ .*: teacher=None .was runs/large.; give the same"):
        refuse_other_settings(replace(config, teacher=None), run)
    refuse_other_teacher(run, run)
    with pytest.raises(UserError, match=f"teacher={tmp_path}: has the sha256 bbb.*, the run has learned from aaa"):
        refuse_other_teacher(other, run)


def test_a_run_that_fails_keeps_what_it_has_kept(config_of, monkeypatch):
    """A full disk may have been cleared of the last step's folder: the best one is none the worse for it."""
    config = config_of(steps=2, validate_every=2)
    folder = Path(config.output) / config.run

    def fails(self, _):
        link = folder / "checkpoints" / "last"
        link.unlink()
        link.symlink_to("step_00000009")
        raise OSError("disk full")

    monkeypatch.setattr(Trainer, "_say_end", fails)
    for resume in (False, True):
        with pytest.raises(OSError, match="disk full"):
            train(replace(config, resume=resume))
        assert load_checkpoint(folder / "checkpoints" / "best") and (folder / "log.jsonl").exists()


def test_the_log_of_a_resumed_run_has_the_means_of_an_uninterrupted_one(config_of, monkeypatch):
    plan = {"steps": 4, "validate_every": 4, "model__linear": False, "tracking__log_every": 4}
    whole, config = train(config_of(run="whole", **plan)), config_of(run="parts", **plan)
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    runs = whole, train(replace(config, resume=True))
    one, other = ([line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line] for run in runs)
    assert one == other and len(one) == 1


def test_other_libraries_are_told_of(config_of, monkeypatch, caplog):
    was = setup.versions()
    setup.tell_of_other_versions({})  # a checkpoint that does not say
    setup.tell_of_other_versions(was | {"python": "3.0"})
    assert "now" not in caplog.text
    config = config_of(steps=1)
    train(config)
    monkeypatch.setattr(setup, "versions", lambda: was | {"torch": "9.9"})
    train(replace(config, resume=True))
    assert f"torch: 9.9 now, {was['torch']} before: results will not be equal bit for bit" in caplog.text


@pytest.mark.parametrize("how", ["format", "damaged"])
def test_steps_that_cannot_be_read_are_not_begun_anew_over(config_of, how):
    """A copy without links, of another version or damaged: months of work may lie there."""
    config = config_of(steps=4, validate_every=4)
    folder = train(config) / "checkpoints"
    for link in ("last", "best"):
        (folder / link).unlink()
    for step in folder.glob("step_*"):
        if how == "damaged":
            with (step / "model.safetensors").open("ab") as file:
                file.write(b"x")
        else:
            meta = json.loads((step / "checkpoint.json").read_text())
            (step / "checkpoint.json").write_text(json.dumps(meta | {"format": 1}))
    before, count = sorted(path.name for path in folder.rglob("*")), len(list(folder.glob("step_*")))
    why = "format 1; this version reads" if how == "format" else "not as they were written"
    with pytest.raises(
        UserError, match=rf"holds {count} steps?, and none that can be gone on from .*{why}.*move it away"
    ):
        train(replace(config, resume=True))
    assert sorted(path.name for path in folder.rglob("*")) == before
    shutil.rmtree(folder)
    train(replace(config, resume=True))


def test_a_run_that_was_stopped_before_its_first_checkpoint_can_be_begun_again(config_of, monkeypatch):
    """In a folder that held something else before, which stays, as does a copy that somebody keeps of a step."""
    tracking = TrackingConfig(mllog=True, org="a", platform="b")
    config = config_of(steps=2, validate_every=2, tracking=tracking)
    folder = train(replace(config, run="other")).parent / config.run
    folder.mkdir()
    (folder / "plan.json").write_text("{}")

    def stopped(self, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    checkpoints = train(config) / "checkpoints"
    (checkpoints / "last").resolve().rename(checkpoints / "step_00000002_good")
    for link in ("last", "best"):
        (checkpoints / link).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(replace(config, resume=True))
    assert (checkpoints / "step_00000002_good" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    "error", [dist.DistBackendError("NCCL error"), RecursionError("deep"), NotImplementedError("op")]
)
def test_other_errors_than_of_memory_are_left_as_they_are(config_of, error):
    with pytest.raises(type(error)), told_of_memory(config_of(), solo()):
        raise error
    for lack in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")):
        lines = "step 0: rank 0 has not enough memory"
        with pytest.raises(UserError, match=lines), told_of_memory(config_of(), solo()):
            raise lack


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"average": 0.9, "optim__name": OptimName.adamw, "optim__clip": 0.5}],
)
def test_resumed_equals_uninterrupted(config_of, monkeypatch, changes, caplog):
    caplog.set_level(logging.INFO)
    whole = train(config_of(run="whole", **changes))
    config = config_of(run="parts", checkpoint_every=100, validate_every=100, **changes)
    for step, number in ((5, signal.SIGTERM), (9, signal.SIGINT)):
        with monkeypatch.context() as patch:
            stop_at(patch, step, number)
            with pytest.raises(KeyboardInterrupt):
                train(config)
        assert weights(whole.parent / "parts").meta["step"] == step
        config = replace(config, resume=True)
    assert "SIGTERM: stopped after step 5; go on with resume=true" in caplog.text
    parts = train(config)
    assert_equal_runs(whole, parts)
    one, other = ([line for line in read_log(r / "log.jsonl") if "loss" in line] for r in (whole, parts))
    assert [(a["step"], a["loss"]) for a in one] == [(b["step"], b["loss"]) for b in other]
    train(config)  # a run that is done stays as it is
    assert_equal_runs(whole, parts)


def test_resume_needs_the_same_data(config_of, tmp_path, caplog):
    train(config_of(steps=1))
    with pytest.raises(UserError, match="the run began with"):
        other = make_store(tmp_path / "b.zarr", dates=20, members=6, shape=(9, 16), seed=9)
        train(config_of(steps=1, data__store=other.path, resume=True))
    caplog.set_level(logging.INFO)
    train(config_of(steps=1, threads=2, resume=True))
    torch.set_num_threads(1)
    assert "threads: 2 now, 1 before" in caplog.text


def test_resume_without_a_checkpoint_begins(config_of, caplog):
    caplog.set_level(logging.INFO)
    run = train(config_of(steps=1, resume=True))
    assert "starts anew" in caplog.text and weights(run).meta["step"] == 1


@pytest.mark.parametrize(
    ("told", "goes_on"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": ""}, False),  # as containers pass on what is not set
        ({"SLURM_RESTART_COUNT": "0"}, False),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, False),  # torchrun begins again whatever failed, the name of the run, too
    ],
)
def test_a_job_that_was_begun_again_goes_on_by_itself(config_of, monkeypatch, told, goes_on):
    train(config_of(steps=1))
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, count in told.items():
        monkeypatch.setenv(name, count)
    if goes_on:
        train(config_of(steps=1, resume="auto"))
    else:
        with pytest.raises(UserError, match="exists; go on with resume=true"):
            train(config_of(steps=1, resume="auto"))


def test_a_damaged_last_is_refused(config_of):
    run = train(config_of(steps=1))
    file = run / "checkpoints" / "last" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="damaged"):
        train(config_of(steps=1, resume=True))


@pytest.mark.slow
def test_a_run_that_a_step_has_ended_goes_on_without_it(config_of, monkeypatch):
    """From the step before, whenever the last checkpoint was due; as if it had been left out at once."""
    spoil(monkeypatch, 9)
    plan = {"steps": 14, "validate_every": 10, "checkpoint_every": 10, "average": 0.9}
    config = config_of(**plan)
    with pytest.raises(UserError, match=r"last is the state before: go on .* by resume=true optim.nonfinite=skip"):
        train(config)
    assert weights(Path(config.output) / "a").meta["step"] == 8
    with pytest.raises(UserError, match="step 9"):
        train(replace(config, resume=True))
    run = train(config_of(**plan, resume=True, optim__nonfinite=Nonfinite.skip))
    whole = train(config_of(**plan, run="whole", optim__nonfinite=Nonfinite.skip))
    assert weights(run).meta["step"] == 14
    assert_equal_runs(run, whole)
    lines = [line for line in read_log(run / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [(line["step"], line["skipped"]) for line in lines if line["loss"] is None] == [(9, 1)]


def test_a_link_that_was_not_exchanged_is_mended(config_of):
    run = train(config_of(steps=6, validate_every=3, checkpoint_every=3, optim__lr=2e-3))
    folder = run / "checkpoints"
    best = os.readlink(folder / "best")
    (folder / "best").unlink()
    (folder / ".partial-step_00000099").mkdir()
    train(config_of(steps=6, optim__lr=2e-3, resume=True))
    assert os.readlink(folder / "best") == best and not list(folder.glob(".partial*"))


@pytest.mark.slow
@pytest.mark.parametrize("validation", [["2001-02"], []])
@pytest.mark.parametrize("lost", ["links", "last"])
def test_a_copy_without_links_goes_on(config_of, monkeypatch, caplog, validation, lost):
    """As scp -r makes it, or a store that knows no links."""
    plan = {"data__validation": validation, "validate_every": 3, "checkpoint_every": 3}
    whole = train(config_of(run="whole", **plan))
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(run="parts", **plan))
    copy = whole.with_name("a")
    shutil.copytree(whole.with_name("parts"), copy, symlinks=False)
    if lost == "last":
        for link in {"last", "best"} & {p.name for p in (copy / "checkpoints").iterdir()}:
            shutil.rmtree(copy / "checkpoints" / link)
    caplog.set_level(logging.INFO)
    assert train(config_of(**plan, resume=True)) == copy
    assert "resumed after step 5 of 12" in caplog.text
    assert_equal_runs(whole, copy)
    assert all(p.is_symlink() or p.name.startswith("step_") for p in (copy / "checkpoints").iterdir())


def test_where_momenta_are_averaged_is_not_free_when_a_run_goes_on(config_of):
    """Averaging happens at checkpoints, and changes what follows."""
    votes = {"optim__exchange": ExchangeName.vote, "optim__momentum_kept": MomentumKept.mean}
    run = train(config_of(steps=4, **votes))
    checkpoint = load_checkpoint(run / "checkpoints" / "last")
    other = config_of(steps=4, checkpoint_every=2, **votes)
    with pytest.raises(UserError, match="checkpoint_every=2"):
        refuse_other_settings(other, checkpoint)
    checkpoint.meta["config"]["optim"]["exchange"] = "allreduce"  # as older runs could have, where nothing is averaged
    refuse_other_settings(config_of(steps=4, checkpoint_every=2), checkpoint)


def test_who_computes_a_sample_is_not_free_when_a_run_goes_on(config_of):
    """What a rank votes comes of its samples."""
    checkpoint = load_checkpoint(train(config_of(steps=1)) / "checkpoints" / "last")
    refuse_other_settings(config_of(steps=1, loading__ahead=1, loading__threads=1), checkpoint)
    with pytest.raises(UserError, match=r"loading.assign=locality \(was fixed\)"):
        refuse_other_settings(config_of(steps=1, loading__assign=Assign.locality), checkpoint)


def test_a_copy_of_the_last_checkpoint_alone_looks_for_the_best_again(config_of, monkeypatch, caplog):
    """Its folder says which step was the best; a link to nothing would be made."""
    plan = {"steps": 8, "validate_every": 4, "checkpoint_every": 4, "optim__lr": 2e-3}
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(**plan))
    checkpoints = Path(config_of().output) / config_of().run / "checkpoints"
    last = (checkpoints / "last").resolve()
    meta = load_checkpoint(last).meta
    assert meta["best"]["step"] != meta["step"]
    for path in checkpoints.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path != last:
            shutil.rmtree(path)
    run = train(config_of(**plan, resume=True))
    assert "is not there, so the search for the best checkpoint begins again at the next validation" in caplog.text
    assert load_checkpoint(run / "checkpoints" / "best").meta["step"] == 8


def test_a_depth_that_was_chosen_is_recorded_and_stays(config_of, caplog):
    """On 9 x 16 points: 16 longitudes that cross the poles allow three poolings."""
    caplog.set_level(logging.INFO)
    config = config_of(steps=2, validate_every=2, model__depth="auto", model__linear=False)
    run = train(config)
    assert "model.depth=auto: 3 poolings on 9 x 16 points" in caplog.text
    meta = load_checkpoint(run / "checkpoints" / "last").meta
    assert meta["spec"]["config"]["depth"] == meta["config"]["model"]["depth"] == 3
    assert "depth: 3" in (run / "config.yaml").read_text()
    for depth in ("auto", 3):
        train(replace(config, resume=True, model=replace(config.model, depth=depth)))
    with pytest.raises(UserError, match=r"model.depth=2 \(was 3\)"):
        train(replace(config, resume=True, model=replace(config.model, depth=2)))
