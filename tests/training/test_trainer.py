"""The training run: what it leaves, what it refuses, and that a resumed run is an uninterrupted one."""

import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from stores import make_store
from training.running import assert_equal_runs, stop_at, weights

from ensemble_ml.config import LoaderName, LoadingConfig, Precision, PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.inference import predict
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.models import Climate, EnsembleModel
from ensemble_ml.training import judge, load_model, train, trainer
from ensemble_ml.training.assemble import _tell_of_short_batches
from ensemble_ml.training.checkpoint import load_weights
from ensemble_ml.training.feed import beside
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.state import Average
from ensemble_ml.training.tracking import Tracker, read_log
from ensemble_ml.training.validation import validate

GOLDEN = Path(__file__).with_name("golden.json")


def test_what_a_run_leaves(config_of, caplog):
    caplog.set_level(logging.INFO)
    config = config_of(tracking__tensorboard=True)
    run = train(config)
    assert {p.name for p in run.iterdir()} == {"config.yaml", "log.jsonl", "checkpoints", "tensorboard"}
    assert list((run / "tensorboard").iterdir())
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["data"]["train"] == ["2001-01"] and settings["model"]["precision"] == "float32"
    lines = read_log(run / "log.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert {"loss", "crps", "spread", "lr", "samples_per_s", "memory_mb", "wait"} <= steps[0].keys()
    assert [line["step"] for line in lines if "validation" in line] == [0, 6, 12]
    assert "step 12/12: loss" in caplog.text and "samples/s" in caplog.text and "best at step" in caplog.text


def test_what_a_checkpoint_tells(config_of, store):
    meta = weights(train(config_of())).meta
    assert meta["training_dates"][0] == "2001-01-01T00:00" and len(meta["training_dates"]) == 16
    assert len(meta["validation_dates"]) == 4 and meta["data_fingerprint"] == store.fingerprint()
    assert meta["precision"] == {"precision": "float32", "channels_last": True}
    assert meta["config"]["parallel"]["data"] == 1  # what auto became, for the planner of a run that goes on
    assert meta["threads"] == 1 and meta["seeds"] == {"seed": 0} and meta["versions"]["torch"] == torch.__version__
    low, high = meta["input_range"]["t"]["500"]
    assert 180 < low < high < 330 and len(meta["input_range"]["t2m"]) == 2
    assert set(meta["scores"]) == {"crps_ratio", "spread_ratio", "score"} == set(meta["best"]) - {"step"}


@pytest.mark.slow
def test_it_learns(config_of):
    run = train(config_of(steps=60, validate_every=30, optim__lr=2e-3, model__linear=False))
    scores = [line["validation"]["score"] for line in read_log(run / "log.jsonl") if "validation" in line]
    assert scores[0] < 0.95  # bias and inflation alone
    assert min(scores) < 0.98 * scores[0]
    best = weights(run, "best").meta
    assert best["best"]["score"] == min(scores) == best["scores"]["score"]
    model, _ = load_model(run / "checkpoints" / "best")
    assert not model.training


@pytest.mark.slow
def test_a_loaded_model_is_calibrated_on_the_validation_dates(config_of, store):
    """Widths are those of `best`, and what is loaded needs none any more (of normal variables: to rounding)."""
    run = train(config_of(steps=20, validate_every=10, average=0.9))
    model, meta = load_model(run / "checkpoints" / "best")
    plain = EnsembleModel(model.spec, Climate.default(model.spec)).eval()
    load_weights(plain, weights(run, "best"))
    reader, area = Reader(store, model.spec), torch.from_numpy(model.spec.grid.area_weights()).float()

    def widths(model):
        batches = fixed_batches(reader, range(16, 20), range(3))
        return torch.tensor(validate(model, batches, full_size=6, area=area).widths)

    torch.testing.assert_close(widths(plain), torch.tensor(meta["widths"]), rtol=1e-5, atol=0)
    assert (torch.tensor(meta["widths"]) - 1).abs().max() > 0.01
    names = [n for n in model.spec.variables for _ in model.spec.levels] + list(model.spec.surface)
    normal = [at for at, name in enumerate(names) if model.spec.family(name) is Family.NORMAL]
    left = widths(model)[:, normal]
    torch.testing.assert_close(left, torch.ones_like(left), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "lr"), [(1, 1e-30), (20, 1e-2)])
def test_a_loaded_model_is_calibrated_from_other_numbers_of_members(config_of, store, steps, lr):
    """Sigma follows what a few members would say; widths of three members alone leave it off from one. Of a network
    that has learned something of their number, too."""
    run = train(config_of(steps=steps, optim__lr=lr, data__members=[1, 2, 4], validate_every=20))
    model, meta = load_model(run / "checkpoints" / "best")
    assert sorted(meta["widths_by_size"]) == ["1", "2", "3", "4"]
    reader, area = Reader(store, model.spec), torch.from_numpy(model.spec.grid.area_weights()).float()
    names = [n for n in model.spec.variables for _ in model.spec.levels] + list(model.spec.surface)
    normal = [at for at, name in enumerate(names) if model.spec.family(name) is Family.NORMAL]
    for size in (1, 2, 4):
        batches = fixed_batches(reader, range(16, 20), range(size))
        left = torch.tensor(validate(model, batches, full_size=6, area=area).widths)[:, normal]
        torch.testing.assert_close(left, torch.ones_like(left), rtol=1e-3, atol=0)
        factors = torch.tensor(meta["widths_by_size"][str(size)])[:, normal]
        assert (factors - 1).abs().max() > 0.005


def test_a_setting_without_effect_is_told_once(config_of, caplog):
    train(config_of(steps=0, patience=2, distill=0.5))
    assert caplog.text.count("has no effect") == 1 and "distill=0.5: has no effect here: it weighs" in caplog.text


def test_a_batch_larger_than_all_dates_is_told_of(config_of, caplog):
    train(config_of(steps=0, batch_size=64))
    assert "batch_size=64: there are 16 init times to train on, so a step has no more" in caplog.text


@pytest.mark.parametrize(
    ("batch_size", "ranks", "dates", "told"),
    [
        (8, 8, 16, ""),
        (4, 6, 16, "share the 4 init times of a step, so 2 compute nothing; give batch_size=6 or more"),
        (8, 6, 4, "share the 4 init times of a step, so 2 compute nothing; start fewer ranks, or give more init times"),
    ],
)
def test_ranks_without_a_sample_are_told_of(config_of, caplog, batch_size, ranks, dates, told):
    _tell_of_short_batches(config_of(batch_size=batch_size), ranks, dates)
    assert (told in caplog.text) if told else not caplog.text


def test_widths_of_the_weights_of_another_step_are_told_of(config_of, monkeypatch, caplog):
    config = config_of(steps=4, validate_every=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        train(config)
    run = Path(config.output) / "a"
    assert weights(run).meta["step"] == 3 and weights(run).meta["validated_step"] == 2
    load_model(run / "checkpoints" / "last")
    assert (
        "of step 3, but its calibration factors and scores are of the validation after step 2; checkpoints/best"
        in caplog.text
    )
    caplog.clear()
    train(replace(config, resume=True))
    for link in ("last", "best"):
        meta = load_model(run / "checkpoints" / link)[1]
        assert meta["validated_step"] == meta["step"]
    assert "widths" not in caplog.text


@pytest.mark.slow
def test_two_runs_are_equal(config_of, own_fits):
    other = config_of(run="b", loading__name=LoaderName.torch)
    apart = replace(other, output=f"{other.output}-apart")  # where no fit has been kept
    assert_equal_runs(train(config_of(run="a")), train(apart))


def test_golden_run(config_of, golden_fits):
    # without the point network, whose fit is in bfloat16 where the processor has it
    run = train(config_of(steps=20, validate_every=20, checkpoint_every=20, model__points=0))
    losses = [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]
    if os.environ.get("ENSEMBLE_ML_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(losses, indent=0) + "\n")
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-5)


def test_stopped_before_the_first_checkpoint_leaves_nothing(config_of, monkeypatch):
    monkeypatch.setattr(Tracker, "validation", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    config = config_of()
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert not (Path(config.output) / "a").exists()


@pytest.mark.slow
def test_average_is_what_predicts(config_of):
    plain, averaged = train(config_of(run="plain")), weights(train(config_of(run="averaged", average=0.9)))
    raw = {k.removeprefix("raw."): v for k, v in averaged.training.items() if k.startswith("raw.")}
    # Averaging watches the training and does not touch it.
    assert all(torch.equal(v, weights(plain).state_dict[k]) for k, v in raw.items())
    moved = [k for k, v in raw.items() if not torch.equal(v, averaged.state_dict[k])]
    assert len(moved) > len(raw) / 2


def test_the_running_average_has_a_short_memory_at_first():
    model = torch.nn.Linear(1, 1, bias=False)
    values, decays = [1.0, 4.0, -2.0, 3.0], [2 / 11, 3 / 12, 0.3]  # (1 + n) / (10 + n), 0.3 at most
    model.weight.data.fill_(values[0])
    average, expected = Average(model, 0.3), values[0]
    for step, (value, decay) in enumerate(zip(values[1:], decays, strict=True), 1):
        model.weight.data.fill_(value)
        average.update(model, step)
        expected = decay * expected + (1 - decay) * value
    with average.in_place(model):
        assert model.weight.item() == pytest.approx(expected, rel=1e-6)
    assert model.weight.item() == values[-1]


@pytest.mark.parametrize(
    ("loading", "seconds"),
    [
        ({"name": LoaderName.torch}, 5.0),  # read, then stepped with
        ({"name": LoaderName.torch, "workers": 2}, 3.0),
        ({"name": LoaderName.torch, "workers": 1}, 3.0),
        ({"threads": 2}, 3.0),
        ({"threads": 1}, 3.0),
    ],
)
def test_time_is_planned_with_what_reading_takes(loading, seconds):
    assert beside(3.0, 2.0, LoadingConfig(**loading)) == seconds
    assert beside(1.0, 8.0, LoadingConfig(threads=4)) == 2.0


def test_planned_by_time(config_of, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "_seconds_a_step", lambda self: 10.0)
    config = config_of(max_minutes=90 / 60, steps=500, model__linear=False, data__members=[3])
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    monkeypatch.undo()
    run = train(replace(config, resume=True))
    meta = weights(run).meta
    assert 3 <= meta["steps"] <= 8 and meta["step"] == meta["steps"]
    assert [x["lr"] for x in read_log(run / "log.jsonl") if "lr" in x][-1] == pytest.approx(3e-4 * 0.02)


@pytest.mark.slow
def test_patience_ends_a_run_that_improves_no_more(config_of, monkeypatch, caplog):
    """At a rate that ruins the network; stopped in the middle, it ends at the same step."""
    caplog.set_level(logging.INFO)
    plan = {"optim__lr": 0.3, "steps": 40, "validate_every": 2, "checkpoint_every": 100, "patience": 3}
    plan["tracking__log_every"] = 50  # the last line is shorter
    run = train(config_of(**plan))
    meta, best = (weights(run, link).meta for link in ("last", "best"))
    assert meta["step"] == meta["steps"] == best["step"] + 6 < 40
    validated = [line["step"] for line in read_log(run / "log.jsonl") if "validation" in line]
    assert validated == list(range(0, meta["step"] + 1, 2))
    assert [line["step"] for line in read_log(run / "log.jsonl") if "loss" in line][-1] == meta["step"]
    told = f"no validation was better than that of step {best['step']}, so step {meta['step']} of 40 is the last"
    assert told in caplog.text
    assert weights(train(config_of(**plan, resume=True))).meta == meta
    stop_at(monkeypatch, meta["step"] - 1)
    with pytest.raises(KeyboardInterrupt):
        train(config_of(run="parts", **plan))
    monkeypatch.undo()
    assert_equal_runs(run, train(config_of(run="parts", **plan, resume=True)))
    whole = train(config_of(run="whole", **plan | {"patience": 0, "steps": 8}))
    assert weights(whole).meta["step"] == 8


@pytest.mark.slow
def test_measuring_does_not_touch_the_weights(config_of):
    # Enough time for all steps, so both runs have the same schedule.
    assert_equal_runs(train(config_of(run="a", max_minutes=10)), train(config_of(run="b")))


def test_precision_is_measured(config_of, caplog):
    caplog.set_level(logging.INFO)
    meta = weights(train(config_of(steps=1, model__precision=Precision.auto))).meta
    assert meta["precision"]["precision"] in ("float32", "bfloat16") and "; taken: " in caplog.text
    low = weights(train(config_of(run="b", steps=2, model__precision=Precision.float64)))
    assert low.meta["precision"]["precision"] == "float64"
    assert all(v.dtype == torch.float64 for k, v in low.state_dict.items() if v.ndim == 5)


@pytest.mark.slow
def test_scores_that_are_not_finite_are_no_candidate_and_end_no_run(config_of, monkeypatch):
    real, calls = judge.validate, []

    def validate(*given, **named):
        found = real(*given, **named)
        calls.append(found.scores["score"])
        return replace(found, scores=dict.fromkeys(found.scores, float("nan"))) if len(calls) < 3 else found

    monkeypatch.setattr(judge, "validate", validate)
    run = train(config_of(steps=3, validate_every=1, checkpoint_every=1, data__members=[3]))
    lines = [line for line in read_log(run / "log.jsonl") if "validation" in line]
    assert [line["validation"]["score"] is None for line in lines] == [True, True, False, False]
    assert [line["best"] for line in lines][:3] == [False, False, True]
    assert (run / "checkpoints" / "best").exists()


def test_without_truth_the_spread_alone_is_learned(config_of, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    lone = make_store(tmp_path / "lone.zarr", dates=4, members=4, leads=(0,), shape=(9, 16), truth=False, static=False)
    run = train(config_of(data__store=lone.path, data__validation=[], steps=3))
    assert not (run / "checkpoints" / "best").exists()
    meta = weights(run).meta
    assert meta["spec"]["config"]["postprocess"] is False and meta["spec"]["leads_out"] == [0] and meta["best"] is None
    assert "holds none, so the spread alone" in caplog.text and "checkpoints/last is the model" in caplog.text
    assert "no orography" in caplog.text
    with pytest.raises(UserError, match="holds no truth"):
        train(config_of(run="b", data__store=lone.path, data__validation=[], model__spread=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__validation": ["2001-01-31/2001-02-08"]}, "shares 1 init times with data.train, first 2001-01-31T00"),
        ({"data__train": []}, "data.train: empty"),
        ({"data__train": ["1999"]}, "data.train 1999: no init time"),
        ({"data__variables": ["t", "q"]}, r"data.variables=\['q'\]: not available; there are t, z"),
        ({"data__levels": [1000]}, r"data.levels=\[1000\]"),
        ({"data__leads_out": [72]}, r"data.leads_out=\[72\]"),
        ({"data__members": [9]}, r"data.members=\[9\]"),
        ({"model__depth": 4}, r"model.depth=4"),
        (
            {"model__families": {"sst": "lognormal"}},
            r"model.families=\['sst'\]: not among the variables of this run \(t",
        ),
        ({"data__store": "/nowhere"}, "/nowhere"),
        ({"init_from": "/nowhere"}, "checkpoint /nowhere: no such folder"),
    ],
)
def test_mistakes_leave_nothing(config_of, changes, message):
    config = config_of(**changes)
    with pytest.raises(UserError, match=message):
        train(config)
    assert not Path(config.output).exists()


def test_a_run_that_is_a_file_is_refused_before_anything_is_fitted(config_of, caplog):
    caplog.set_level(logging.INFO)
    config = config_of()
    Path(config.output).mkdir()
    (Path(config.output) / config.run).touch()
    with pytest.raises(UserError, match=rf"run={config.output}/{config.run}: .* is a file; give a folder"):
        train(config)
    assert "climate" not in caplog.text


def test_a_plan_in_the_run_folder_is_in_nobodys_way(config_of):
    config = config_of(steps=1)
    plan = Path(config.output) / config.run / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    assert (train(config) / "checkpoints" / "last").exists() and plan.read_text() == "{}"


def test_an_existing_run_is_not_overwritten(config_of):
    run = train(config_of(steps=1))
    with pytest.raises(UserError, match=r"runs/a: exists; go on with resume=true"):
        train(config_of(steps=1))
    with pytest.raises(UserError, match=r"steps=2 \(was 1\).*init_from"):
        train(config_of(steps=2, resume=True))
    with pytest.raises(UserError, match=r"model.hidden=16 \(was 8\)"):
        train(config_of(steps=1, model__hidden=16, resume=True))
    assert weights(run).meta["step"] == 1


@pytest.mark.parametrize(("where", "what"), [("loss", "loss nan"), ("gradient", "norm of the gradient nan")])
def test_what_is_not_finite_stops_the_run(config_of, monkeypatch, where, what):
    real, calls = Loss.__call__, []

    def spoiled(self, prediction, batch):
        losses = real(self, prediction, batch)
        calls.append(1)
        if len(calls) == 6:
            if where == "loss":
                losses["loss"] = losses["loss"] * float("nan")
            else:
                losses["loss"].register_hook(lambda g: g * float("nan"))
        return losses

    monkeypatch.setattr(Loss, "__call__", spoiled)
    config = config_of()
    with pytest.raises(UserError, match=rf"step 6: {what}, on init times 2001-01-\d\dT00:00.*checkpoints/last"):
        train(config)
    last = weights(Path(config.output) / "a")
    assert last.meta["step"] == 5 and all(torch.isfinite(v).all() for v in last.state_dict.values())


def test_weights_that_are_not_finite_replace_no_checkpoint(config_of, monkeypatch):
    real = Tracker.step

    def told(self, step, **values):
        real(self, step, **values)
        if step == 6:
            next(trainers[0].state.model.parameters()).data.fill_(torch.inf)

    trainers, loop = [], trainer.Trainer._loop
    monkeypatch.setattr(trainer.Trainer, "_loop", lambda self, *args: (trainers.append(self), loop(self, *args)))
    monkeypatch.setattr(Tracker, "step", told)
    config = config_of(validate_every=100)
    with pytest.raises(UserError, match=r"step 7: .*weights are not finite before it, so checkpoints/last is older"):
        train(config)
    assert weights(Path(config.output) / "a").meta["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet3d", "drn"])
def test_surface_variables_alone(config_of, tmp_path, name):
    """The store's levels mean nothing then, and an archive without any will do for a forecast."""
    store = make_store(tmp_path / "s.zarr", dates=20, shape=(9, 17 if name == "drn" else 16))
    given = config_of(data__store=store.path, data__variables=[], data__surface=["t2m"], model__name=name)
    run = train(given)
    ground = make_store(tmp_path / "g.zarr", dates=2, variables=(), levels=(), shape=store.layout.grid.shape)
    checkpoint = str(run / "checkpoints" / "last")
    assert predict(PredictConfig(checkpoint=checkpoint, input=ground.path, output=str(tmp_path / "f")), ground)


def test_what_the_machine_cannot_do_is_refused_before_the_long_fits(config_of, monkeypatch):
    monkeypatch.setattr("ensemble_ml.models.speed.has_bfloat16", lambda device: False)
    monkeypatch.setattr("ensemble_ml.training.assemble.kept_fit", lambda *_: pytest.fail("the fits began"))
    with pytest.raises(UserError, match="bfloat16"):
        train(config_of(model__precision=Precision.bfloat16))


def test_a_bank_trains_goes_on_and_predicts_as_an_ordinary_model(config_of, monkeypatch):
    given = {"model__bank": 0.3, "average": 0.9}
    straight = train(config_of(run="bank", **given))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(config_of(run="stopped", **given))
    assert_equal_runs(train(config_of(run="stopped", resume=True, **given)), straight)
    first, last = weights(train(config_of(run="start", steps=0, **given))), weights(straight)
    assert first.spec.config.bank == 0.3 and not torch.equal(
        first.state_dict["unet.bank.values"], last.state_dict["unet.bank.values"]
    )
    model, _ = load_model(straight / "checkpoints" / "best")
    assert model.spec.config.bank == 0 and not any("bank" in name for name in model.state_dict())
