"""Points without a value and fields that are absent: they weigh nothing, and change nothing elsewhere."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import scoringrules
import torch
from stores import make_store
from synthetic import land

from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batches, Reader, fixed_batches, member_subset
from ensemble_ml.loading.reader import masked_mean_and_spread, mean_and_spread
from ensemble_ml.models import Climate, EnsembleModel
from ensemble_ml.store import Part
from ensemble_ml.training import load_checkpoint, load_model, train
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.setup import build_spec
from ensemble_ml.training.trainer import Trainer
from ensemble_ml.training.validation import validate

SHAPE = 9, 16
LAND = land(SHAPE)
COMMON = dict(dates=20, members=6, shape=SHAPE, bias=0.6, dispersion=0.6, variables=("t",), surface=("t2m", "sst"))
GONE = [(Part.FORECAST, 3, 1, "t"), (Part.TRUTH, 5, 0, "sst"), *((Part.FORECAST, 7, m, "t2m") for m in range(6))]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same ensemble whole, with sea surface temperature masked on land, and with fields left out as well."""
    folder = tmp_path_factory.mktemp("masks")
    masked = {"masked": ("sst",)}
    return {
        "whole": make_store(folder / "whole.zarr", **COMMON),
        "masked": make_store(folder / "masked.zarr", **COMMON, **masked),
        "gaps": make_store(folder / "gaps.zarr", **COMMON, absent=GONE),
        "both": make_store(folder / "both.zarr", **COMMON, **masked, absent=GONE),
    }


@pytest.fixture
def settings(config_of, stores):
    def make(which, **changes):
        return config_of(**{"data__store": stores[which].path} | changes)

    return make


def reader_of(settings, stores, which, **changes):
    return Reader(stores[which], build_spec(settings(which, **changes), stores[which]))


def test_members_without_a_value_at_a_point_are_left_out_there():
    rng = np.random.default_rng(0)
    values = 280 + rng.normal(size=(5, 2, 6, 7)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = np.nan
    values[:, 0, 0, 0] = np.nan
    mean, spread = masked_mean_and_spread(values)
    for index in np.ndindex(values.shape[1:]):
        there = values[:, *index][np.isfinite(values[:, *index])].astype(np.float64)
        if not len(there):
            assert np.isnan(mean[index]) and np.isnan(spread[index])
            continue
        assert mean[index] == pytest.approx(there.mean(), rel=1e-6)
        assert spread[index] == pytest.approx(there.std(ddof=1) if len(there) > 1 else 0, rel=1e-5, abs=1e-9)
    whole = np.nan_to_num(values, nan=281)
    assert all(np.array_equal(a, b) for a, b in zip(masked_mean_and_spread(whole), mean_and_spread(whole), strict=True))


@pytest.mark.slow
def test_only_masked_variables_add_channels(settings, stores):
    plain, masked = (build_spec(settings(which), stores[which]) for which in ("whole", "masked"))
    assert plain.masked == () and masked.masked == ("sst",)
    assert "masked" not in plain.to_json() and type(masked).from_json(masked.to_json()).masked == ("sst",)
    models = [EnsembleModel(spec, Climate.default(spec)) for spec in (plain, masked)]
    shapes = [{k: tuple(v.shape) for k, v in model.state_dict().items()} for model in models]
    differ = [k for k in shapes[0] if shapes[0][k] != shapes[1][k]]
    assert shapes[0].keys() == shapes[1].keys() and all("surface.stem" in name for name in differ) and differ
    one, other = (model.surface.stem.conv.weight.shape for model in models)
    assert other[1] - one[1] == len(masked.leads_in)


def test_variables_that_no_date_has_a_truth_of_are_left_out_unless_they_are_named(config_of, tmp_path, caplog):
    """Analyses have no rain. A truth that some dates have is enough; of what is asked for by name nothing is said."""
    lacking = [(Part.TRUTH, date, 0, name) for date in range(4) for name in ("z", "tp")]
    more = {"dates": 4, "members": 3, "shape": SHAPE, "variables": ("t", "z"), "surface": ("t2m", "tp")}
    store = make_store(tmp_path / "s.zarr", absent=[*lacking, (Part.TRUTH, 0, 0, "t2m")], **more)
    spec = build_spec(config_of(data__store=store.path), store)
    assert (spec.variables, spec.surface) == (("t",), ("t2m",))
    assert f"store {store.path}: holds no truth of z, tp, so the model leaves it out" in caplog.text
    caplog.clear()
    spec = build_spec(config_of(data__store=store.path, data__variables=["t"], data__surface=["tp"]), store)
    assert (spec.variables, spec.surface) == (("t",), ("tp",)) and "leaves it out" not in caplog.text
    spec = build_spec(config_of(data__store=store.path, model__postprocess=False), store)
    assert (spec.variables, spec.surface) == (("t", "z"), ("t2m", "tp"))


def test_masked_points_weigh_nothing_in_the_loss(settings, stores):
    """Against sums over the sea by hand; the loss of what is on land cannot be seen from it."""
    reader = reader_of(settings, stores, "masked")
    spec = reader.spec
    batch = next(fixed_batches(reader, [2, 4], [0, 1, 2], batch_size=2))
    assert torch.isnan(batch.truth[:, :, -1, LAND]).all() and not torch.isnan(batch.truth[:, :, -1, ~LAND]).any()
    model = EnsembleModel(spec, fit_climate(reader, range(16), [16, 17], 3).climate)
    area = torch.from_numpy(spec.grid.area_weights()).float()
    ones = torch.ones(len(spec.leads_out), spec.fields)
    loss = Loss(spec, ones, ones.expand(7, -1, -1), area)
    prediction = model(batch.inputs)
    found = loss(prediction, batch)
    spread, target = (v.detach().double().numpy() for v in (prediction.spread, batch.target_spread))
    known = np.isfinite(target)
    w = np.broadcast_to(spec.grid.area_weights(), known.shape)[known]
    assert found["spread"].item() == pytest.approx((w * (spread - target)[known] ** 2).sum() / w.sum(), rel=1e-5)
    found["loss"].backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    sea = prediction.location[:, :, -1].grad_fn is not None
    assert sea and torch.isfinite(prediction.location).all()
    mu, sigma, truth = (v.detach().double().numpy() for v in (prediction.location, prediction.scale, batch.truth))
    known = np.isfinite(truth)
    w = np.broadcast_to(spec.grid.area_weights(), known.shape)[known]
    total = (w * scoringrules.crps_normal(truth[known], mu[known], sigma[known])).sum()
    assert found["crps"].item() == pytest.approx(total / w.sum(), rel=1e-4)
    changed = replace(prediction, location=torch.where(torch.isnan(batch.truth), 1e3, prediction.location))
    assert loss(changed, batch)["loss"].item() == found["loss"].item()  # what is said of land counts for nothing


def test_a_mask_in_the_input_hides_the_target_there(settings, stores):
    reader = reader_of(settings, stores, "masked")
    read = reader.source.read

    def truth_everywhere(part, date, selection):
        fields = read(part, date, selection)
        return replace(fields, surface=np.nan_to_num(fields.surface, nan=270.0)) if part is Part.TRUTH else fields

    reader.source = type("Source", (), {**vars(reader.source), "read": staticmethod(truth_everywhere)})()
    reader.source.present = stores["masked"].present
    batch = next(fixed_batches(reader, [2], [0, 1]))
    assert torch.isnan(batch.truth[0, :, -1, LAND]).all() and not torch.isnan(batch.truth[0, :, :-1]).any()


@pytest.mark.slow
def test_the_climate_at_sea_is_that_of_the_whole_field(settings, stores):
    fits = {which: fit_climate(reader_of(settings, stores, which), range(16), [], 3) for which in ("whole", "masked")}
    sea, whole = fits["masked"].climate, fits["whole"].climate
    np.testing.assert_array_equal(sea.spread[:, :-2], whole.spread[:, :-2])
    np.testing.assert_allclose(sea.spread[:, -1][:, ~LAND], whole.spread[:, -1][:, ~LAND], rtol=2e-4)
    # Shrinkage looks at all cells, so what is drawn towards the mean differs a little at sea.
    error = np.abs(sea.bias[:, -1] - whole.bias[:, -1])[:, ~LAND]
    assert error.mean() < 0.25 * np.abs(whole.bias[:, -1]).mean()
    assert np.abs(sea.inflation[:, -1] - whole.inflation[:, -1])[:, ~LAND].max() < 0.35
    assert all(np.isfinite(value).all() for value in vars(sea).values())
    assert sea.error[0, -1] == pytest.approx(whole.error[0, -1], rel=0.15)


@pytest.mark.slow
def test_training_with_masks_learns_and_tells_what_is_masked(settings, stores):
    run = train(settings("masked", steps=30, validate_every=30, optim__lr=2e-3))
    checkpoint = load_checkpoint(run / "checkpoints" / "best")
    assert checkpoint.spec.masked == ("sst",) and checkpoint.meta["spec"]["masked"] == ["sst"]
    model, _ = load_model(run / "checkpoints" / "best")
    reader = Reader(stores["masked"], model.spec)
    area = torch.from_numpy(model.spec.grid.area_weights())
    found = validate(model, fixed_batches(reader, range(16, 20), range(3)), full_size=6, area=area).scores
    assert found["score"] < 0.95


def test_draws_pass_over_members_that_are_not_there():
    for epoch in range(200):
        whole = member_subset(1, epoch, 4, 6, [1, 2, 4])
        assert np.array_equal(member_subset(1, epoch, 4, 6, [1, 2, 4], np.arange(6)), whole)
        some = member_subset(1, epoch, 4, 6, [1, 2, 4], np.array([0, 2, 3, 5]))
        assert set(some) <= {0, 2, 3, 5} and len(some) == len(whole)
    with pytest.raises(UserError, match="at most 2 members"):
        member_subset(0, 0, 0, 6, [4], np.array([1, 2]))


def test_batches_of_a_store_with_gaps(settings, stores, caplog):
    whole, gaps = (reader_of(settings, stores, which) for which in ("whole", "gaps"))
    assert gaps.available(3).tolist() == [0, 2, 3, 4, 5] and not len(gaps.available(7))
    with caplog.at_level(logging.INFO):
        dates = gaps.usable(range(16), 1, "training")
    assert 7 not in dates and len(dates) == 15
    assert (
        "1 of 16 training dates are left out" in caplog.text and "t2m of 2001-01-15T00:00 +0 h, member 1" in caplog.text
    )
    given = dict(batch_size=1, seed=3, sizes=[1, 2, 4, 6], steps=150)
    ours, theirs = (Batches(reader, dates, **given) for reader in (gaps, whole))
    for step in range(0, 150):
        epoch, (sample,) = ours.order.step(step)
        drawn = ours.draw(epoch, int(sample)).members
        if dates[sample] == 3:
            assert 1 not in drawn and len(drawn) in (1, 2, 4)  # five are there, so six are no size
        else:
            assert np.array_equal(drawn, theirs.draw(epoch, int(sample)).members)
    batch = next(fixed_batches(gaps, [3], range(3)))
    members = stores["gaps"].read(Part.FORECAST, 3).joined()[[0, 2, 3]]
    assert np.array_equal(batch.inputs.mean[0], mean_and_spread(members)[0])


def test_a_target_that_is_absent_contributes_nothing(settings, stores):
    """The loss of two dates, one without truth for one variable, is that of the sums by hand."""
    reader = reader_of(settings, stores, "gaps", model__spread=False)
    spec = reader.spec
    batch = next(fixed_batches(reader, [4, 5], [0, 1, 2], batch_size=2))
    assert torch.isnan(batch.truth[1, :, -1]).all() and torch.isfinite(batch.truth[0]).all()
    model = EnsembleModel(spec, fit_climate(reader, range(16), [], 3).climate)
    area = torch.from_numpy(spec.grid.area_weights()).float()
    ones = torch.ones(len(spec.leads_out), spec.fields)
    loss = Loss(spec, ones, ones.expand(7, -1, -1), area)
    both = loss(model(batch.inputs), batch)["crps"]
    sums = []
    for date in (4, 5):
        one = next(fixed_batches(reader, [date], [0, 1, 2]))
        fields = 2 * len(spec.levels) + (4 if date == 4 else 2)  # two leads; sst is absent on the second date
        sums.append((loss(model(one.inputs), one)["crps"].item() * fields, fields))
    assert both.item() == pytest.approx(sum(a for a, _ in sums) / sum(b for _, b in sums), rel=1e-5)


def test_no_date_left_names_the_gap(settings, stores):
    reader = reader_of(settings, stores, "gaps")
    with pytest.raises(UserError, match=r"t2m of 2001-01-15T00:00 \+0 h, member 1 is missing; no training date"):
        reader.usable([7], 1, "training")


@pytest.mark.slow
def test_training_goes_over_gaps_and_resumes_bit_for_bit(settings, stores, caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        run = train(settings("both", run="once", steps=8, checkpoint_every=4, validate_every=8))
    assert "1 of 16 training dates are left out" in caplog.text
    meta = load_checkpoint(run / "checkpoints" / "last").meta
    assert len(meta["training_dates"]) == 15 and "2001-01-15T00:00" not in meta["training_dates"]
    step = Trainer._step

    def killed(self, *args):
        if self.state.step == 5:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(settings("both", run="again", steps=8, checkpoint_every=4, validate_every=8))
    monkeypatch.setattr(Trainer, "_step", step)
    again = train(settings("both", run="again", steps=8, checkpoint_every=4, validate_every=8, resume=True))
    first, second = (load_checkpoint(path / "checkpoints" / "last").state_dict for path in (run, again))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_model_without_masks_refuses_data_with_them(settings, stores):
    spec = replace(build_spec(settings("whole"), stores["whole"]), config=ModelConfig(hidden=8, depth=1))
    with pytest.raises(UserError, match=r"sst of .* holds NaN"):
        Reader(stores["masked"], spec).forecast(0, [0])


@pytest.mark.parametrize("name", ["emos", "drn", "ens10_unet", "poet"])
def test_rivals_refuse_masked_variables_before_the_long_fits(settings, stores, name, monkeypatch):
    monkeypatch.setattr("ensemble_ml.training.assemble.kept_fit", lambda *_: pytest.fail("the fits began"))
    with pytest.raises(
        UserError, match=rf"model.name={name}: takes no variable that has points without a value \(sst\)"
    ):
        train(settings("masked", model__name=name))


def test_a_window_of_land_alone_is_read(settings, stores):
    """A rank's part of the grid may hold no point of the sea."""
    spec = reader_of(settings, stores, "masked").spec
    part = Reader(stores["masked"], spec, window=((7, 9), (0, 16)))
    fields = part.forecast(0, [0, 1])
    assert np.isnan(fields.surface[:, :, spec.surface.index("sst")]).all()


def test_emos_is_fitted_without_dates_that_lack_members(settings, stores):
    run = train(settings("gaps", model__name="emos", model__spread=False, data__members=[1, 2, 5, 6]))
    model = load_checkpoint(run / "checkpoints" / "best")
    assert all(torch.isfinite(value).all() for value in model.state_dict.values())


@pytest.mark.slow
def test_emos_leaves_out_sizes_that_training_dates_lack(settings, tmp_path):
    gone = [(Part.FORECAST, date, member, "t2m") for date in range(16) for member in (4, 5)]
    kept = make_store(tmp_path / "few.zarr", **COMMON, absent=gone)
    given = settings("whole", data__store=kept.path, model__name="emos", model__spread=False, data__members=[1, 3, 5])
    model = load_checkpoint(train(given) / "checkpoints" / "best").state_dict["coefficients"]
    assert torch.equal(model[3], model[2]) and not torch.equal(model[2], model[0])  # five members as three


@pytest.mark.slow
def test_a_field_that_no_member_changes_is_learned_all_the_same(settings, tmp_path):
    """A sea surface that was given to all members: errors of it need a unit, and no other field may suffer."""
    kept = make_store(tmp_path / "alike.zarr", **COMMON, alike=("sst",))
    run = train(settings("whole", data__store=kept.path, steps=4))
    checkpoint = load_checkpoint(run / "checkpoints" / "last")
    buffers = dict(load_model(checkpoint.path)[0].named_buffers())
    assert all(torch.isfinite(values).all() for values in buffers.values())
    at = checkpoint.spec.of("sst")
    assert (buffers["heads.climatology"][:, at] > 1e-3).all()
