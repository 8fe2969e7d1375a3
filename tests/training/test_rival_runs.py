"""The rivals through the same commands as our network: train, resume, predict, evaluate; ours at several sizes."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import synthetic
import torch
from stores import make_store

from ensemble_ml import distributions
from ensemble_ml.config import EvaluateConfig, Nonfinite, OptimName, PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.inference import predict
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.models import Climate, build_model
from ensemble_ml.store import Part, open_store
from ensemble_ml.training import emos_fit, load_checkpoint, load_model, train
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.progress import Progress
from ensemble_ml.training.setup import build_spec
from ensemble_ml.training.tracking import Tracker, read_log
from ensemble_ml.training.trainer import Trainer
from ensemble_ml.verification import evaluate

LEARNED = ["drn", "ens10_unet", "poet"]
ONE_QUICK = ["drn", *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNED[1:])]


def settings(name, **changes):
    return {"model__name": name, "model__spread": False, "optim__name": OptimName.adamw, "optim__lr": 3e-3} | changes


def scores(run):
    return [line["validation"]["score"] for line in read_log(run / "log.jsonl") if "validation" in line]


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_rival_learns(config_of, name):
    run = train(config_of(**settings(name, steps=40, validate_every=20, average=0.9)))
    found = scores(run)
    assert min(found) < 0.99 * found[0]
    losses = [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_rival_resumes_bit_for_bit(config_of, monkeypatch, name):
    plan = settings(name, average=0.9, steps=6, validate_every=6, checkpoint_every=100)
    whole = train(config_of(run="whole", **plan))
    real = Tracker.step

    def told(self, done, **values):
        real(self, done, **values)
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    config = config_of(run="parts", **plan)
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "step", told)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    parts = train(replace(config, resume=True))
    one, other = (load_checkpoint(r / "checkpoints" / "last", training=True) for r in (whole, parts))
    assert one.meta["step"] == other.meta["step"] == 6
    for a, b in ((one.state_dict, other.state_dict), (one.training, other.training)):
        assert a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def test_a_step_that_is_left_out_leaves_no_trace_in_running_statistics(config_of, monkeypatch):
    real, seen = Trainer._step, []

    def poisoned(self, batch, stop=None):
        before = [b.clone() for name, b in self.state.model.named_buffers() if "running" in name]
        poison = self.state.step == 2
        if poison:
            batch.inputs.mean[:, :, : self.state.model.spec.upper] = torch.nan
        done = real(self, batch, stop)
        after = [b for name, b in self.state.model.named_buffers() if "running" in name]
        seen.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == poison and len(before) > 0)
        return done

    monkeypatch.setattr(Trainer, "_step", poisoned)
    plan = settings("ens10_unet", steps=4, validate_every=4)
    whole = train(config_of(run="whole", **plan, optim__nonfinite=Nonfinite.skip))
    assert seen == [True] * 4
    seen.clear()
    with pytest.raises(UserError, match=r"step 3: .*the state before"):
        train(config_of(**plan))
    run = train(config_of(**plan, resume=True, optim__nonfinite=Nonfinite.skip))
    one, other = (load_checkpoint(r / "checkpoints" / "last").state_dict for r in (whole, run))
    assert all(torch.equal(v, other[k]) for k, v in one.items())


def test_emos_is_fitted_at_once(config_of, caplog):
    caplog.set_level("INFO")
    config = config_of(**settings("emos", max_minutes=1.0))
    run = train(config)
    meta = load_checkpoint(run / "checkpoints" / "best").meta
    assert meta["step"] == 0 and meta["steps"] == 0
    forms = meta["emos"]["validation_crps_ratio"]
    assert {"global", "local"} < set(forms) and meta["emos"]["form"] == min(forms, key=forms.get)
    assert "taken: " + meta["emos"]["form"] in caplog.text
    # what was chosen by is what the trainer's own validation finds
    assert scores(run)[0] == pytest.approx(min(forms.values()), rel=1e-3)
    assert min(forms.values()) < 0.9
    train(replace(config, resume=True))
    again = train(replace(config, run="again"))
    one, other = (load_checkpoint(r / "checkpoints" / "last").state_dict for r in (run, again))
    assert all(torch.equal(v, other[k]) for k, v in one.items())


@pytest.mark.slow
def test_emos_at_a_part_of_the_points_at_a_time(config_of, monkeypatch):
    """Parts that cover the globe differ from all points at once in how far biases are seen to differ, a little."""
    found, real, sizes = [], emos_fit.fit_emos, []

    def fit(mean, *args, **kwargs):
        sizes.append(mean.numel())
        return real(mean, *args, **kwargs)

    monkeypatch.setattr(emos_fit, "fit_emos", fit)
    for most in (emos_fit._AT_ONCE, 16 * 9 * 16 // 2):
        monkeypatch.setattr(emos_fit, "_AT_ONCE", most)
        sizes.clear()
        found.append(train(config_of(run=f"r{most}", **settings("emos", data__validation=[]))))
        shrunk = max(size for size in sizes[1:])
    assert shrunk == 16 * 9 * 16  # of the global fit, at all points and dates
    one, other = (load_checkpoint(r / "checkpoints" / "last").state_dict["coefficients"] for r in found)
    assert torch.equal(one.isfinite(), other.isfinite()) and not torch.equal(one, other)
    assert (one - other).abs().median() < 0.02 * one.abs().median()


@pytest.mark.slow
def test_emos_where_a_field_has_a_truth_on_few_dates(config_of, tmp_path, caplog):
    """The others have their coefficients of each point all the same."""
    gone = [(Part.TRUTH, date, 0, "tp") for date in range(5, 16)]
    given = {"dates": 20, "members": 4, "shape": (9, 16), "surface": ("tp",), "variables": ("t",), "levels": (850,)}
    store = make_store(tmp_path / "few.zarr", **given, absent=gone)
    run = train(config_of(**settings("emos", data__store=store.path, data__members=[2, 3, 4])))
    told = "the truth of too few dates take global coefficients: tp at +24 h (144 of 144), tp at +48 h (144 of 144)"
    assert told in caplog.text
    model, _ = load_model(run / "checkpoints" / "best")
    temperature, rain = model.coefficients[model.row(3)].unbind(2)  # (6, T, Y, X); the first holds each point's mean
    assert temperature[0].std() > 0 and rain[1:].std((-2, -1)).max() == 0 and rain[5].max() not in (0, 1)


@pytest.mark.slow
def test_a_field_that_never_varies_has_no_say_in_the_form_of_emos(config_of, tmp_path, monkeypatch):
    """A dry region: its ratio, of two numbers that are both nothing, would outweigh all others."""
    monkeypatch.setitem(synthetic.SCALES, "tp", (-1.0, 1e-3))
    given = {"dates": 16, "members": 4, "shape": (9, 16), "levels": (850,), "leads": (24,), "bias": 0.6}
    source = make_store(tmp_path / "dry.zarr", **given, surface=("t2m", "tp"))
    found = []
    for surface in (["t2m"], ["t2m", "tp"]):
        spec = build_spec(config_of(**settings("emos", data__surface=surface)), source)
        dates, reader = np.arange(16), Reader(source, spec)
        climate = fit_climate(reader, dates[:12], dates[12:], 3, [3]).climate
        found.append(emos_fit.fit_emos_model(build_model(spec, climate), reader, dates[:12], dates[12:], 3, [3]))
    assert found[0] == found[1]


def test_one_point_with_few_dates_leaves_the_others_their_coefficients(config_of, store):
    """An edge of ice that comes and goes: the point has the global ones, as a point without any truth has."""
    source = open_store(store.path)
    reader = Reader(source, build_spec(config_of(), source))
    area, laws = torch.from_numpy(reader.spec.grid.area_weights()).flatten(), reader.spec.families
    fit = emos_fit._Fit(emos_fit._Samples.read(reader, np.arange(16), 3), area, laws, Progress())
    before = fit.all_points("local", None)[0, 0]
    fit.samples.truth[3:, 0, 0, 7], fit.samples.truth[:, 0, 0, 8] = torch.nan, torch.nan
    found, whole = fit.all_points("local", None)[0, 0], fit._global(0, 0)
    others = torch.tensor([at for at in range(len(found.a)) if at not in (7, 8)])
    known = fit.samples.field(0, 0, slice(None))
    one, other = (emos.crps(*known, fit.samples.season)[others] for emos in (before, found))
    torch.testing.assert_close(one.mean(), other.mean(), rtol=0.005, atol=0)
    assert found.a[others].std() > 0
    for at in (7, 8):
        assert (found.a[at], found.b[at], found.d[at]) == (whole.a, whole.b, whole.d) and not found.season[at].any()


@pytest.mark.slow
def test_emos_of_two_fields_that_differ_in_their_climate_alone(config_of, store):
    """Every form scores the same, and says the same of the anomalies, where another climate is added to both sides."""
    source = open_store(store.path)
    reader = Reader(source, build_spec(config_of(**settings("emos", data__surface=["t2m"])), source))
    area, laws = torch.from_numpy(reader.spec.grid.area_weights()).flatten(), reader.spec.families
    some = [at for at, law in enumerate(laws) if law is Family.NORMAL]
    climate = 50 * torch.randn(len(area), generator=torch.Generator().manual_seed(0))
    found, said = [], []
    for level in (torch.zeros(()), torch.tensor(80.0), climate):
        train_dates, validation = (
            emos_fit._Samples.read(reader, dates, 3) for dates in (np.arange(16), np.arange(16, 20))
        )
        for samples in (train_dates, validation):
            samples.mean[:, :, some] += level
            samples.truth[:, :, some] += level
        train_dates.__post_init__()
        fit = emos_fit._Fit(train_dates, area, laws, Progress())
        found.append(fit.scores(validation, torch.ones(len(reader.spec.leads_out), len(laws))))
        model = build_model(reader.spec, Climate.default(reader.spec))
        model.put(0, 0, some[0], fit.all_points("shrunk 8", None)[0, some[0]], train_dates.reference[0, some[0]])
        a, slope, *_ = model.coefficients[0, :, 0, some[0]].flatten(-2)
        said.append(a + slope * validation.mean[0, 0, some[0]])  # what is added to the mean, but for the season
    assert len(found[0]) == 6
    for scores_, correction in zip(found[1:], said[1:], strict=True):
        assert scores_ == pytest.approx(found[0], rel=1e-4)
        torch.testing.assert_close(correction, said[0], rtol=0, atol=1e-3)


def test_emos_of_a_size_without_a_row_of_old(config_of):
    """Four members, which no default names: their own coefficients, not those of five."""
    run = train(config_of(**settings("emos", data__members=[3, 4, 5], data__validation_members=4)))
    model, _ = load_model(run / "checkpoints" / "best")
    assert model.sizes.tolist() == [3, 4, 5, 5, 5] and model.row(4) == 1
    three, four, five = model.coefficients[:3]
    assert not torch.equal(three, four) and not torch.equal(four, five)


def test_the_global_emos_is_of_all_dates(config_of, store, monkeypatch):
    monkeypatch.setattr(emos_fit, "_MOST_SAMPLES", 100)  # six points of sixteen dates
    source = open_store(store.path)
    reader = Reader(source, build_spec(config_of(), source))
    area, laws = torch.from_numpy(reader.spec.grid.area_weights()).flatten(), reader.spec.families
    fit = emos_fit._Fit(emos_fit._Samples.read(reader, np.arange(16), 3), area, laws, Progress())
    before = fit._global(0, 0)
    for date in range(16):
        fit.samples.truth[date] += 1
        assert fit._global(0, 0).a != before.a
        fit.samples.truth[date] -= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emos", *LEARNED])
def test_a_rival_forecasts_and_is_scored(config_of, tmp_path, store, name):
    dates = {"data__train": ["2001-01-01/2001-01-20"], "data__validation": ["2001-01-21/2001-01-31"]}
    run = train(config_of(**settings(name, steps=4, validate_every=4, **dates)))
    source = open_store(store.path)
    for members in (1, 3, 6):
        folder = tmp_path / f"forecast_{members}"
        config = PredictConfig(
            checkpoint=str(run / "checkpoints" / "best"), input=store.path, output=str(folder), members_in=members,
            dates=["2001-02"], threads=1, members_out=members > 1,
        )  # fmt: skip
        assert len(predict(config, source)) == 4
    out = tmp_path / "scores"
    evaluate(
        EvaluateConfig(
            forecast=str(tmp_path / "forecast_3"), ensemble=store.path, truth=store.path, members_in=3, output=str(out),
            bootstrap=100,
        ),
        source,
    )  # fmt: skip
    content = json.loads((out / "scores.json").read_text())
    assert content["forecasts"][0]["dates"] == 4
    assert any(row["entrant"] == "forecast_3" and "crps" in row for row in content["scores"])


@pytest.mark.slow
def test_scores_do_not_jump_between_ensemble_sizes(config_of, store):
    """One checkpoint of ours from 2 to 6 members, two of which (3 and 5) training never showed."""
    run = train(config_of(steps=60, validate_every=30, optim__lr=2e-3))
    model, _ = load_model(run / "checkpoints" / "best")
    reader = Reader(open_store(store.path), model.spec)
    area = torch.from_numpy(model.spec.grid.area_weights()).float()
    found, raw = {}, {}
    for members in (2, 3, 4, 5, 6):
        crps, reference = 0.0, 0.0
        for batch in fixed_batches(reader, range(16, 20), np.arange(members)):
            prediction, leads = model(batch.inputs), model.spec.lead_positions
            upper = slice(0, model.spec.upper)
            location, scale, truth = (v[:, :, upper] for v in (prediction.location, prediction.scale, batch.truth))
            mean, spread = (v[:, leads, upper] for v in (batch.inputs.mean, batch.inputs.spread))
            ours = distributions.crps(Family.NORMAL, location, scale, truth)
            plain = distributions.crps(Family.NORMAL, mean, spread * (1 + 1 / members) ** 0.5, truth)
            size = truth.std((-2, -1), keepdim=True)
            crps += float((ours / size * area).mean().detach())
            reference += float((plain / size * area).mean())
        found[members], raw[members] = crps, reference
    values = list(found.values())
    falls = [a - b for a, b in pairwise(values)]
    assert all(-0.005 * values[0] < fall for fall in falls), found  # more members never cost more than noise
    assert max(falls) < 0.06 * values[0], found  # and none of the sizes stands out
    assert all(found[m] < raw[m] for m in found)
