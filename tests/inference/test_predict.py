"""Forecasts hold what the model says, whatever the number of members and the part of the grid."""

import importlib
import shutil

import numpy as np
import pytest
import torch
import xarray as xr
from forecasting import make_checkpoint, make_grid, make_source, make_spec, opened
from scipy.stats import chisquare, gamma, norm, truncnorm

from ensemble_ml.config import ParallelConfig, Precision
from ensemble_ml.errors import UserError
from ensemble_ml.fields import GAMMA_SHIFT
from ensemble_ml.inference import predict
from ensemble_ml.inference.contents import TIME_AXES
from ensemble_ml.inference.job import plan_job
from ensemble_ml.inference.lazy import forecast_dataset
from ensemble_ml.inference.outputs import order_of_equals
from ensemble_ml.inference.predict import put_on_device
from ensemble_ml.models import Speed, ensemble_input
from ensemble_ml.training.checkpoint import load_checkpoint, load_model
from ensemble_ml.training.keeper import Snapshot, save_checkpoint


def model_output(checkpoint, source, date, members):
    """What the model says, from members reduced in double precision by torch."""
    model, _ = load_model(checkpoint)
    lay = source.layout
    given = [torch.from_numpy(x[date : date + 1, :members]).double() for x in (source.pressure, source.surface)]
    given = torch.cat([given[0].flatten(3, 4), given[1].nan_to_num(0)], 3)  # rain at lead 0 is NaN
    day = lay.init_time[date].astype("datetime64[D]").item().timetuple().tm_yday
    with torch.inference_mode():
        return model(ensemble_input(given, torch.tensor([float(day)]).double()).to(torch.float32))


@pytest.mark.parametrize("members", [1, 3, 5, None])
def test_round_trip_equals_the_model(config, source, checkpoint, members):
    paths = predict(config(members_in=members), source)
    assert [p.name for p in paths] == [f"forecast_20010{d}12.nc" for d in (130, 131, 201)]
    for date, path in enumerate(paths):
        data, said = opened(path), model_output(checkpoint, source, date, members or 6)
        for name, at in (("t", slice(0, 2)), ("z", slice(2, 4))):  # at two levels each
            for kind in ("location", "scale"):
                values = getattr(said, kind)[0, :, at].numpy()
                np.testing.assert_allclose(data[f"{name}_{kind}"], values, rtol=2e-6)
            np.testing.assert_allclose(data[f"{name}_ensemble_spread"], said.spread[0, :, at], rtol=2e-5)
        np.testing.assert_allclose(data.tp_location, said.location[0, :, 5], rtol=2e-5, atol=1e-9)
        assert data.attrs["members_in"] == " ".join(str(i + 1) for i in range(members or 6))


def test_batches_do_not_change_what_a_date_gets(config, source, tmp_path):
    together = predict(config(), source)
    alone = predict(config(output=str(tmp_path / "alone"), dates=["2001-01-31"]), source)
    one, other = opened(alone[0]), opened(together[1])
    for name in one.data_vars:
        np.testing.assert_allclose(one[name].astype("f8"), other[name].astype("f8"), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_members_are_let_go_where_nothing_asks_for_them(config, source, tmp_path, monkeypatch):
    """And change nothing else; where a batch is one date, one is read ahead."""
    module, alive, ahead = importlib.import_module("ensemble_ml.inference.predict"), [], []
    forward, read_ahead = module.forward, module.read_ahead
    monkeypatch.setattr(module, "forward", lambda *given: alive.append(given[1][0].members) or forward(*given))
    monkeypatch.setattr(module, "read_ahead", lambda items, depth: ahead.append(depth) or read_ahead(items, depth))
    single = str(make_checkpoint(tmp_path / "c", make_spec(source, one_member=True)))
    asked = [{}, {"members_out": True}, {"checkpoint": single}]
    made = [opened(predict(config(**one, output=str(tmp_path / str(n))), source)[0]) for n, one in enumerate(asked)]
    assert [len(fields.pressure) for fields in alive] == [len(fields.surface) for fields in alive] == [0, 6, 6]
    assert made[0].drop_attrs().identical(made[1][list(made[0].variables)].drop_attrs())
    monkeypatch.setattr(module, "_LARGEST_BATCH", 1)
    predict(config(), source)
    assert ahead == [2, 2, 2, 1]


def test_a_run_predicts_by_its_best_checkpoint(config, source, tmp_path):
    best = tmp_path / "run" / "checkpoints" / "best"
    best.symlink_to(make_checkpoint(best.parent, make_spec(source)).resolve().name)
    (path,) = predict(config(checkpoint=str(tmp_path / "run"), dates=["2001-01-30"]), source)
    data = opened(path)
    assert f", {best} (unet3d, step " in data.attrs["source"]
    assert data.attrs["checkpoint_sha256"] == load_checkpoint(best).sha256


def test_order_of_members_does_not_matter(config, source, tmp_path):
    first = opened(predict(config(members_in=[2, 5, 3]), source)[0])
    second = opened(predict(config(members_in=[5, 3, 2], output=str(tmp_path / "two")), source)[0])
    assert first.attrs["members_in"] == second.attrs["members_in"] == "2 3 5"
    assert first.drop_attrs().identical(second.drop_attrs())


def test_coordinates(config, source):
    with xr.open_dataset(predict(config(members_in=2), source)[0], decode_timedelta=True) as opened_file:
        data = opened_file.load()
    hour = np.timedelta64(1, "h")
    start = source.layout.init_time[0]
    assert data.forecast_reference_time.values == [start]
    assert data.forecast_period.values.tolist() == (np.array([24, 48]) * hour).astype("m8[ns]").tolist()
    assert np.array_equal(data.time, start + np.array([[24, 48]]) * hour)
    assert np.array_equal(data.time_bnds, start + np.array([[[0, 24], [0, 48]]]) * hour)
    assert data.time.dims == TIME_AXES and data.time_bnds.dims == (*TIME_AXES, "bnds")
    assert data.t_mean.dims == (*TIME_AXES, "level", "latitude", "longitude")
    assert data.t2m_quantile.dims == ("quantile", *TIME_AXES, "latitude", "longitude")
    assert data.level.values.tolist() == [500, 850] and data.level.attrs["positive"] == "down"
    assert np.array_equal(data.latitude, source.layout.grid.latitude)
    assert np.array_equal(data.longitude, source.layout.grid.longitude)


def test_moments_quantiles_and_probabilities_agree_with_scipy(config, source):
    thresholds = {"tp": [0.004, 0.0], "t": [255.0], "z": [4.9e4]}
    data = opened(predict(config(members_in=3, thresholds=thresholds, quantiles=[0.9, 0.1]), source)[0])
    data = data.astype("f8")
    assert data["quantile"].values.tolist() == [0.1, 0.9] and data.threshold_tp.values.tolist() == [0, 0.004]
    law = norm(data.t_location, data.t_scale)
    np.testing.assert_allclose(data.t_mean, data.t_location)
    np.testing.assert_allclose(data.t_stddev, data.t_scale)
    np.testing.assert_allclose(data.t_quantile[1], law.ppf(0.9), rtol=1e-6)
    np.testing.assert_allclose(data.t_prob_above[0], law.sf(255), rtol=1e-4)
    # Precipitation: max(0, G - shift), where G has mean scale * r and standard deviation scale.
    r = np.log1p(np.exp(2 * (data.tp_location / data.tp_scale + GAMMA_SHIFT))) / 2
    shift = GAMMA_SHIFT * data.tp_scale
    rain = gamma(r**2, loc=-shift, scale=data.tp_scale / r)
    np.testing.assert_allclose(data.tp_prob_above, [rain.sf(0), rain.sf(0.004)], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(data.tp_quantile[0], np.maximum(rain.ppf(0.1), 0), rtol=1e-4, atol=1e-9)
    # E max(0, G - c) = E[G; G > c] - c P(G > c), and G times its density is a gamma density of one shape more
    longer = gamma(r**2 + 1, loc=-shift, scale=data.tp_scale / r)
    mean = r * data.tp_scale * longer.sf(0) - shift * rain.sf(0)
    np.testing.assert_allclose(data.tp_mean, mean, rtol=1e-4, atol=1e-9)


def test_members_out_keep_places_and_take_the_predicted_moments(config, source):
    data = opened(predict(config(members_in=[1, 3, 4, 6], members_out=True), source)[0])
    assert data.realization.values.tolist() == [1, 3, 4, 6]
    assert data.t_member.dims == ("realization", "forecast_period", "level", "latitude", "longitude")
    np.testing.assert_allclose(data.t_member.mean("realization"), data.t_mean, rtol=1e-6)
    np.testing.assert_allclose(data.t_member.std("realization", ddof=1), data.t_stddev, rtol=1e-3)
    raw = source.pressure[0][[0, 2, 3, 5]][:, 1:, 0]
    assert np.array_equal(np.argsort(raw, axis=0), data.t_member.argsort(0))
    assert float(data.tp_member.min()) >= 0


def test_equal_members_of_one_start_get_the_predicted_spread(config):
    source = make_source(dates=1, members=4)
    source.pressure[:, 1:, :, 0, :, 2:5] = source.pressure[:, :1, :, 0, :, 2:5]
    data = opened(predict(config(members_out=True), source)[0]).astype("f8")
    np.testing.assert_allclose(data.t_member.mean("realization"), data.t_mean, rtol=1e-6)
    np.testing.assert_allclose(data.t_member.std("realization", ddof=1), data.t_stddev, rtol=1e-3)
    order = order_of_equals(source.layout.init_time[0], 4)
    assert (data.t_member.values[order][..., 2:5, :].argsort(0) == np.arange(4)[:, None, None, None, None]).all()


@pytest.mark.parametrize("members", [3, 4, pytest.param(10, marks=pytest.mark.slow)])
def test_no_member_is_wetter_for_good(config, tmp_path, members):
    """Without rain in any raw member, the wettest member is each of them about equally often."""
    source = make_source(dates=12 * members, members=members, grid=make_grid((3, 4)), variables=(), levels=(),
                         surface=("tp",), leads=(24,))  # fmt: skip
    source.surface[:] = 0
    given = make_checkpoint(tmp_path / "c", make_spec(source, leads_out=(24,), depth=0), ranges=(-60, 60))
    paths = predict(config(checkpoint=str(given), members_out=True, quantiles=[]), source)
    found = np.stack([opened(path).tp_member.values[:, 0] for path in paths])
    wettest = found.argmax(1)
    assert (wettest == wettest[:, :1, :1]).all()  # one order at all points of a forecast
    counts = np.bincount(wettest[:, 0, 0], minlength=members)
    assert chisquare(counts).pvalue > 1e-3, counts


@pytest.mark.parametrize("hours", [6, 12, 24, 24 * 7])
@pytest.mark.parametrize("members", [2, 3, 4, 5, 6, 8, 10, 12, 50])
def test_equal_members_are_ranked_in_all_orders(hours, members):
    starts = np.datetime64("1969-06-01", "ns") + np.arange(40 * members) * np.timedelta64(hours, "h")
    orders = np.stack([order_of_equals(start, members) for start in starts])
    assert np.array_equal(np.sort(orders, 1), np.tile(np.arange(members), (len(starts), 1)))
    for place in (0, members - 1):
        assert chisquare(np.bincount(orders[:, place], minlength=members)).pvalue > 1e-3


def test_cloud_cover_lies_between_clear_and_overcast(config, tmp_path):
    source = make_source(surface=("t2m", "tcc"))
    given = make_checkpoint(tmp_path / "checkpoints", make_spec(source))
    asked = {"thresholds": {"tcc": [0.0, 0.5]}, "quantiles": [0.001, 0.5, 0.999], "members_out": True}
    data = opened(predict(config(checkpoint=str(given), members_in=4, **asked), source)[0]).astype("f8")
    law = norm(data.tcc_location, data.tcc_scale)
    assert law.cdf(0).max() > 0.1 and law.sf(1).max() > 0.1
    for kind in ("mean", "quantile", "member"):
        found = data[f"tcc_{kind}"]
        assert float(found.min()) >= 0 and float(found.max()) <= 1
    np.testing.assert_allclose(data.tcc_quantile, np.clip([law.ppf(p) for p in (0.001, 0.5, 0.999)], 0, 1), atol=1e-6)
    np.testing.assert_allclose(data.tcc_prob_above, [law.sf(0), law.sf(0.5)], atol=1e-6)
    np.testing.assert_allclose(data.tcc_member.mean("realization"), data.tcc_mean, atol=1e-6)
    raw = source.surface[0][:4, 1:, 1]
    ranked = np.take_along_axis(data.tcc_member.values, np.argsort(raw, 0), 0)
    assert (np.diff(ranked, axis=0)[np.diff(np.sort(raw, 0), axis=0) > 0] >= 0).all()
    assert data.tcc_location.attrs["distribution_family"] == "doubly_censored_normal"
    assert data.tcc_scale.attrs["comment"].startswith("min(1, max(0, N)), N a normal distribution")


@pytest.mark.parametrize("where", [{"region": [60, -50, -30, 50]}, {"points": [[47.3, 11.4], [-33.9, -70.6]]}])
def test_a_part_equals_the_whole_bit_for_bit(config, source, tmp_path, where):
    settings = {"members_in": 4, "members_out": True, "thresholds": {"tp": [0.001]}}
    whole = opened(predict(config(**settings), source)[0])
    part = opened(predict(config(**settings, **where, output=str(tmp_path / "part")), source)[0])
    longitude = part.longitude % 360
    expected = whole.sel(latitude=part.latitude, longitude=longitude)
    assert {"t_mean", "tp_prob_above", "z_member"} <= set(part.data_vars) == set(whole.data_vars)
    for name in part.data_vars:
        assert part[name].size and np.array_equal(part[name].values, expected[name].values), name
    if "points" in where:
        assert part.requested_latitude.values.tolist() == [47.3, -33.9]
        assert part.t_mean.dims == ("forecast_period", "level", "point")
    else:
        assert part.longitude.values.tolist() == [-45, -22.5, 0, 22.5, 45]


def test_the_same_model_reads_a_larger_source_in_another_order(config, source, tmp_path):
    larger = make_source(leads=(0, 12, 24, 48), variables=("z", "t"), levels=(300, 500, 850), surface=("tp", "t2m"))
    for target, values in ((larger.pressure, source.pressure), (larger.surface, source.surface)):
        leads = [0, 2, 3]
        for new, old in ((0, 1), (1, 0)):
            if values is source.pressure:
                target[:, :, leads, new, 1:] = values[:, :, :, old]
            else:
                target[:, :, leads, new] = values[:, :, :, old]
    first = opened(predict(config(), source)[0])
    second = opened(predict(config(output=str(tmp_path / "two")), larger)[0])
    assert first.drop_attrs().identical(second.drop_attrs())


def test_spread_alone(config, source, tmp_path):
    given = str(make_checkpoint(tmp_path / "checkpoints", make_spec(source, postprocess=False)))
    data = opened(predict(config(checkpoint=given), source)[0])
    assert {n for n in data.data_vars if n != "time_bnds"} == {f"{n}_ensemble_spread" for n in ("t", "z", "t2m", "tp")}
    for settings in ({"members_out": True}, {"thresholds": {"t": [250.0]}}):
        with pytest.raises(UserError, match="no postprocess head"):
            predict(config(checkpoint=given, overwrite=True, **settings), source)


def test_distribution_alone(config, source, tmp_path):
    given = str(make_checkpoint(tmp_path / "checkpoints", make_spec(source, spread=False, one_member=True)))
    data = opened(predict(config(checkpoint=given, members_in=1), source)[0])
    assert "t_mean" in data and "t_ensemble_spread" not in data


def test_truncated_normal_variables(config, tmp_path):
    source = make_source(variables=(), levels=(), surface=("fg10",))
    given = str(make_checkpoint(tmp_path / "checkpoints", make_spec(source)))
    data = opened(predict(config(checkpoint=given, members_in=2, members_out=True), source)[0])
    assert "level" not in data.dims and data.fg10_location.attrs["distribution_family"] == "truncated_normal"
    law = truncnorm(-data.fg10_location / data.fg10_scale, np.inf, data.fg10_location, data.fg10_scale)
    np.testing.assert_allclose(data.fg10_mean, law.mean(), rtol=1e-3)
    np.testing.assert_allclose(data.fg10_quantile[0], law.ppf(0.1), rtol=1e-3)
    assert float(data.fg10_member.min()) >= 0


def test_static_fields_given_replace_those_of_the_checkpoint(config, source, tmp_path):
    grid = source.layout.grid
    given = str(make_checkpoint(tmp_path / "checkpoints", make_spec(source, static=("orog",))))
    other = make_source()
    with pytest.raises(UserError, match="static: orog missing, which the checkpoint takes; it holds none"):
        predict(config(checkpoint=given, static="f.nc"), other)
    other.fields = {"orog": np.random.default_rng(5).random(grid.shape).astype(np.float32)}
    kept = opened(predict(config(checkpoint=given), other)[0])
    replaced = opened(predict(config(checkpoint=given, static="f.nc", overwrite=True), other)[0])
    assert not np.array_equal(kept.t_mean, replaced.t_mean)


def test_a_lazy_forecast_is_of_the_checkpoint_that_it_names(config, source, tmp_path):
    """An export may be replaced between `predict` and `compute`, which loads the weights."""
    given = tmp_path / "model"
    shutil.copytree(make_checkpoint(tmp_path / "one", make_spec(source)), given)
    meta = load_checkpoint(given).meta
    job, starts = plan_job(config(checkpoint=str(given)), source, load_checkpoint(given).spec, meta)
    forecast = forecast_dataset(job, starts, "cpu")
    assert forecast.attrs["checkpoint_sha256"] == meta["sha256"]
    assert np.isfinite(forecast["t_mean"].values).all()
    forecast = forecast_dataset(job, starts, "cpu")
    shutil.rmtree(given)
    shutil.copytree(make_checkpoint(tmp_path / "other", make_spec(source), seed=2), given)
    with pytest.raises(UserError, match=f"^checkpoint {given}: was replaced since the forecast was asked for; load"):
        forecast["t_mean"].values  # noqa: B018


def test_static_fields_that_the_checkpoint_does_not_take_are_told(config, source, caplog):
    other = make_source()
    other.fields = {"orog": np.zeros(source.layout.grid.shape, np.float32)}
    predict(config(static="f.nc", members_in=3), other)
    assert "static=f.nc: the checkpoint takes no static fields, so these have no effect" in caplog.text


def test_precision_and_threads(config, source, tmp_path, monkeypatch):
    module, seen = importlib.import_module("ensemble_ml.inference.predict"), []
    forward = module.forward

    def noted(model, group, device):
        seen.append((next(model.parameters()).dtype, torch.get_num_threads()))
        return forward(model, group, device)

    monkeypatch.setattr(module, "forward", noted)
    before = torch.get_num_threads()
    double = predict(config(precision=Precision.float64, threads=before + 1), source)
    single = predict(config(output=str(tmp_path / "single"), precision=Precision.float32), source)
    assert torch.get_num_threads() == before
    assert set(seen) == {(torch.float64, before + 1), (torch.float32, before)}
    one, other = opened(double[0]), opened(single[0])
    for name in ("t_mean", "tp_scale"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4)


def test_weights_in_double_precision_keep_their_last_bits(source, tmp_path):
    path = make_checkpoint(tmp_path / "a", make_spec(source), precision=Speed(Precision.float64).to_json())
    known = load_checkpoint(path)
    fine = {k: v.double() * (1 + 1e-12) if v.is_floating_point() else v for k, v in known.state_dict.items()}
    model, _ = load_model(save_checkpoint(tmp_path / "b", Snapshot(7, fine, {}, known.meta)))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, fine[name], rtol=0, atol=0)
    speeds = []
    for precision in (Precision.auto, Precision.float32):
        given = load_model(tmp_path / "b" / "last")
        put_on_device(*given, precision, torch.device("cpu"))
        speeds.append({parameter.dtype for parameter in given[0].parameters()})
    assert speeds == [{torch.float64}, {torch.float32}]


def test_attributes(config, source, checkpoint):
    attrs = opened(predict(config(members_in=5), source)[0]).attrs
    _, meta = load_model(checkpoint)
    assert attrs["Conventions"] == "CF-1.11" and attrs["checkpoint_sha256"] == meta["sha256"]
    assert attrs["training_dates"] == "2000-01-01T12 2000-01-02T12"
    assert attrs["data_fingerprint"] == source.fingerprint()
    assert attrs["training_data_fingerprint"] == "feedfeedfeedfeed"
    assert attrs["title"] == "Post-processed ensemble forecast from 2001-01-30 12 UTC"
    assert "ensemble-ml predict" in attrs["history"] and "(unet3d, step 7), from memory" in attrs["source"]
    assert "members_in=5" in attrs["history"] and "quantiles" not in attrs["history"]


def test_the_history_has_all_settings_that_are_not_the_usual_ones(config, source):
    found = opened(predict(config(members_in=[1, 3], region=[60.0, 0.0, 10.0, 180.0], quantiles=[0.5]), source)[0])
    assert "members_in=[1, 3] quantiles=[0.5] region=[60.0, 0.0, 10.0, 180.0]" in found.attrs["history"]


def test_the_history_shortens_long_lists(config, source):
    dates = ["2001-01-30", *["2001-01"] * 98, "2001-02"]
    found = opened(predict(config(dates=dates), source)[0])
    assert "dates=[2001-01-30, ..., 2001-02] (100 in all)" in found.attrs["history"]


def test_dates_that_weights_had_seen_before_are_attributes(config, source, tmp_path):
    earlier = {"training": ["1999-01-02T12:00", "1999-01-04T12:00"], "validation": ["1999-01-03T12:00"]}
    given = make_checkpoint(tmp_path / "checkpoints", make_spec(source), earlier_dates=earlier)
    attrs = opened(predict(config(checkpoint=str(given)), source)[0]).attrs
    assert attrs["earlier_dates"] == "R3/1999-01-02T12/PT24H" and "validation_dates" not in attrs


def test_fewer_members_than_any_that_were_trained_with_are_told(config, source, tmp_path, caplog):
    given = make_checkpoint(tmp_path / "checkpoints", make_spec(source), config={"data": {"members": [3, 5]}})
    predict(config(checkpoint=str(given), members_in=3), source)
    assert "extrapolated" not in caplog.text
    predict(config(checkpoint=str(given), members_in=1, overwrite=True), source)
    assert "members_in: 1, and the checkpoint was trained on 3, 5: its corrections are extrapolated" in caplog.text


def test_seasons_that_earlier_runs_knew_are_no_news(config, source, tmp_path, caplog):
    spec, winter = make_spec(source), {"training": ["1999-01-28T12:00"], "validation": []}
    summer = ["2000-07-01T12:00"]
    for number, more in enumerate(({}, {"earlier_dates": winter})):
        given = make_checkpoint(tmp_path / str(number), spec, training_dates=summer, **more)
        caplog.clear()
        predict(config(checkpoint=str(given), overwrite=True), source)
        assert ("in a season that training lacked" in caplog.text) is (number == 0)


@pytest.mark.parametrize("degrees", [{"lat": "auto", "lon": 2}, {"lat": 2, "lon": "auto"}])
def test_no_partition_is_planned_for_a_forecast(config, source, degrees):
    with pytest.raises(UserError, match=r"^parallel.lat=.* parallel.lon=.*: no partition is planned for a forecast"):
        predict(config(parallel=ParallelConfig(**degrees)), source)
    with pytest.raises(UserError, match=r"^parallel.shard=auto: a forecast needs all weights on each rank"):
        predict(config(parallel=ParallelConfig(shard="auto")), source)
    assert predict(config(parallel=ParallelConfig(lat="auto", lon="auto")), source)
