"""Compaction: from a trained run to a smaller one, with a clock that counts weights in the place of time."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from stores import make_store
from training.running import assert_equal_runs, stop_at, weights

from ensemble_ml.config import CompactConfig, CompactData, ExportConfig, Objective
from ensemble_ml.errors import UserError
from ensemble_ml.inference import export
from ensemble_ml.models import Climate, build_model
from ensemble_ml.training import importance, load_model, train
from ensemble_ml.training.compact import Clock, compact
from ensemble_ml.training.importance import refitted


@pytest.fixture
def counting(monkeypatch):
    """Let every weight of the model take a millisecond."""
    monkeypatch.setattr(Clock, "passes", lambda self, model: float(sum(p.numel() for p in model.parameters())))
    monkeypatch.setattr(Clock, "_block", lambda self, level, stream, inner: 2.0 * 27 * stream * inner)
    monkeypatch.setattr(Clock, "_stem", lambda self, stream: 100.0 * stream)
    monkeypatch.setattr(Clock, "_network", lambda self, units: 100.0 * units)


@pytest.fixture
def teacher(config_of):
    return train(config_of(run="whole", steps=8, average=0.9, model__hidden=16, model__max_hidden=32, model__points=64))


def settings(teacher, config_of, **changes):
    given = {"run": "fast", "output": str(teacher.parent), "speedup": 3.0, "steps": 4, "threads": 1}
    given |= {"data": CompactData(config_of().data.store)} | changes
    return CompactConfig(checkpoint=str(teacher / "checkpoints" / "last"), **given)


def test_a_compacted_run_is_an_ordinary_smaller_one(teacher, config_of, counting, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    run = compact(settings(teacher, config_of, limit=0.0))
    whole, small = weights(teacher), weights(run)
    config = small.spec.config
    assert config.widths[0] in (8, 16) and sum(config.widths) < 48 and config.points <= 64
    facts = small.meta["compacted"]
    assert facts["from"] == whole.sha256 and facts["ms"][0] >= 3 * facts["ms"][1] and facts["widths"] == [16, 32]
    assert facts["crps_ratio"] == pytest.approx(whole.meta["scores"]["crps_ratio"], abs=1e-6)
    assert small.meta["step"] == 4 and small.meta["config"]["teacher"] == str(whole.path)
    build_model(small.spec, Climate.default(small.spec)).load_state_dict(small.state_dict)
    load_model(run / "checkpoints" / "best")
    assert "compact: a forward pass takes" in caplog.text and "without the U-Net: " in caplog.text
    assert '"distill"' in (run / "log.jsonl").read_text()
    assert ("limit=0: crps_ratio rose by" in caplog.text) == (
        weights(run, "best").meta["scores"]["crps_ratio"] > facts["crps_ratio"]
    )
    card = (export(ExportConfig(str(run), str(tmp_path / "model"))) / "MODEL_CARD.md").read_text()
    assert f"cut out of the checkpoint with sha256 `{whole.sha256}`: channels [16, 32]" in card


@pytest.mark.slow
def test_steps_that_were_stopped_go_on_bit_for_bit(teacher, config_of, counting, monkeypatch):
    straight = compact(settings(teacher, config_of))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 2)
        compact(settings(teacher, config_of, run="stopped"))
    assert_equal_runs(compact(settings(teacher, config_of, run="stopped", resume=True)), straight)


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(teacher, config_of, counting, caplog):
    straight = compact(settings(teacher, config_of))
    (teacher.parent / "killed").mkdir()
    (teacher.parent / "killed" / "log.jsonl").touch()
    killed = compact(settings(teacher, config_of, run="killed", resume=True))
    assert_equal_runs(killed, straight)
    assert "not used" not in caplog.text
    compact(settings(teacher, config_of, run="killed", resume=True, steps=6))
    assert "resume: steps=6 is not used; the run began with steps=4 and keeps it" in caplog.text
    assert weights(killed).meta["step"] == 4


def test_no_step_leaves_the_model_as_it_was_cut(teacher, config_of, counting, caplog):
    caplog.set_level(logging.INFO)
    run = compact(settings(teacher, config_of, steps=0, distill=0.0))
    assert weights(run).meta["step"] == 0 and weights(run).meta["config"]["teacher"] is None
    assert "the model as it was cut without any step" in caplog.text


def test_a_copy_without_links_goes_on_with_its_own_cut(teacher, config_of, counting, monkeypatch):
    run = compact(settings(teacher, config_of, steps=1))
    meta = weights(run).meta
    for link in ("last", "best"):
        (run / "checkpoints" / link).unlink()
    monkeypatch.setattr("ensemble_ml.training.compact.shrink", lambda *_: pytest.fail("cut again"))
    compact(settings(teacher, config_of, steps=1, resume=True))
    assert weights(run).meta == meta


def test_a_model_of_members_is_compacted_without_a_truth(config_of, counting, tmp_path):
    store = make_store(tmp_path / "a.zarr", truth=False, dates=20, members=6, shape=(9, 16))
    members = {"objective": Objective.members, "data__members": [1, 2, 4, 5], "data__store": store.path}
    whole = train(config_of(steps=2, model__hidden=16, model__max_hidden=32, model__points=64, **members))
    run = compact(settings(whole, config_of, steps=1, data=CompactData(str(store.path))))
    facts = weights(run).meta["compacted"]
    assert facts["crps_ratio"] == pytest.approx(weights(whole).meta["scores"]["crps_ratio"], abs=1e-6)


def test_what_cannot_be_compacted(teacher, config_of, counting, monkeypatch):
    with pytest.raises(UserError, match=r"speedup=1000: \d.* times is the most \(of .* ms the point network takes"):
        compact(settings(teacher, config_of, speedup=1000.0))
    assert not (teacher.parent / "fast").exists()
    with pytest.raises(UserError, match="exists; go on with resume=true"):
        compact(settings(teacher, config_of, run="whole"))
    with pytest.raises(UserError, match="is of a run of train; resume it with train"):
        compact(settings(teacher, config_of, run="whole", resume=True))
    start = train(config_of(run="start", steps=0))
    with pytest.raises(UserError, match=r"is of step 0, where no channel"):
        compact(settings(start, config_of, run="b"))
    rival = train(config_of(run="drn", steps=1, model__name="drn", model__spread=False))
    with pytest.raises(UserError, match=r"is of model.name=drn; compact needs model.name=unet3d"):
        compact(settings(rival, config_of, run="b"))
    shared = train(config_of(run="shared", steps=1, model__bank=0.5))
    with pytest.raises(UserError, match="its kernels share a bank"):
        compact(settings(shared, config_of, run="b"))
    with pytest.raises(UserError, match="speedup=1: must be above 1"):
        settings(teacher, config_of, speedup=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="runs in one process"):
        compact(settings(teacher, config_of))


@pytest.mark.slow
def test_a_checkpoint_that_has_moved_teaches_on(teacher, config_of, counting, monkeypatch):
    """A run that goes on removes its earlier checkpoints, and a copy of the teacher does as well."""
    straight = compact(settings(teacher, config_of))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 2)
        compact(settings(teacher, config_of, run="stopped"))
    moved = teacher.rename(teacher.parent / "moved")
    assert_equal_runs(compact(settings(moved, config_of, run="stopped", resume=True)), straight)


@pytest.mark.slow
def test_a_run_goes_on_with_its_teacher_alone(teacher, config_of, monkeypatch):
    """Wherever it lies now, but not with what has become the best checkpoint of the teacher's run."""
    config = config_of(steps=3, teacher=str(teacher), model__hidden=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 1)
        train(config)
    kept = (teacher / "checkpoints" / "best").resolve()
    kept = kept.rename(teacher.parent / "kept")
    train(config_of(run="whole", steps=1, resume=False, output=str(teacher.parent / "other")))
    (teacher / "checkpoints" / "best").unlink()
    (teacher / "checkpoints" / "best").symlink_to(teacher.parent / "other" / "whole" / "checkpoints" / "last")
    with pytest.raises(UserError, match=r"teacher=.*: has the sha256 .* the run has learned from .* give that checkp"):
        train(replace(config, resume=True))
    train(replace(config, resume=True, teacher=str(kept)))


def test_a_teacher_of_other_fields_is_refused(teacher, config_of):
    with pytest.raises(UserError, match=r"teacher=.*: has other leads_out; give a model of the same fields"):
        train(config_of(run="b", data__leads_out=[24], teacher=str(teacher)))


def test_a_teacher_that_predicts_nothing_of_this_model_is_refused(teacher, config_of):
    spread = train(config_of(run="spread", steps=1, model__postprocess=False))
    with pytest.raises(UserError, match=r"teacher=.*: predicts nothing that this model does; set model.spread=true"):
        train(config_of(run="b", steps=1, model__spread=False, teacher=str(spread)))
    spread = train(config_of(run="no_spread", steps=1, model__spread=False))
    with pytest.raises(UserError, match=r"teacher=.*: predicts nothing .* set model.postprocess=true"):
        train(config_of(run="b", steps=1, model__postprocess=False, teacher=str(spread)))


def test_a_refit_makes_up_for_units_that_others_can_say(monkeypatch):
    """The third unit is the sum of the first two, and the fourth is always the same, as the constant is."""
    generator = torch.Generator().manual_seed(0)
    two = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    hidden = torch.stack([two[0], two[1], two.sum(0), torch.full((500,), 0.7), torch.ones(500)])
    second = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    monkeypatch.setattr(importance, "_RIDGE", 1e-12)
    layer, left = refitted(second, hidden @ hidden.T, [0, 1])
    torch.testing.assert_close(layer @ hidden[[0, 1, 4]], second @ hidden, rtol=1e-6, atol=1e-6)
    assert left < 1e-10
    _, lost = refitted(second, hidden @ hidden.T, [1])
    assert 1e-3 < lost < 1
