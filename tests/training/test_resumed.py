"""What a run that goes on says and keeps: of limits, of checkpoints that cannot be read, of runs that hardly began."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ensemble_ml.distributed import solo
from ensemble_ml.errors import UserError
from ensemble_ml.training import train
from ensemble_ml.training.room import told_of_memory
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
    before = sorted(path.name for path in folder.rglob("*"))
    why = "format 1; this version reads" if how == "format" else "not as they were written"
    with pytest.raises(UserError, match=f"holds 2 steps, and none that can be gone on from .*{why}.*move it away"):
        train(replace(config, resume=True))
    assert sorted(path.name for path in folder.rglob("*")) == before
    shutil.rmtree(folder)
    train(replace(config, resume=True))


def test_a_run_that_was_stopped_before_its_first_checkpoint_can_be_begun_again(config_of, monkeypatch):
    """In a folder that held something else before, which stays."""
    config = config_of(steps=2, validate_every=2)
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
    train(config)


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
