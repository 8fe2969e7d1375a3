"""The fit of the residuals: what to expect of errors and how they grow is found on dates not seen, noise left alone."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from stores import make_store
from training.fitting import SIZES, TRAIN, VALIDATION, missing_often, nothing

from ensemble_ml import distributions
from ensemble_ml.config import ModelConfig
from ensemble_ml.fields import Family
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.dry import AT_ZERO, wetter
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import FOLLOWED, bounded, informed
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, families
from ensemble_ml.training.point_fit import Points
from ensemble_ml.training.residual_fit import _Before, _Score, fit_residuals
from ensemble_ml.training.smoothing import Scales
from ensemble_ml.training.spread_fit import Spread
from ensemble_ml.training.truth_fit import Truth

pytestmark = pytest.mark.usefixtures("whole_fits")

NO_SHRINK, FLAT = 1e-6, 0.0


def size_of(correction, sample, by=1.0):
    """What errors grow with: the size of the departure of the mean."""
    linear = correction.linear
    apart = ((sample.mean - linear.anchor) / linear.typical).abs()
    return torch.exp(by * (apart - apart.mean()) / apart.std()) * linear.typical


def as_it_is(shape):
    """a and b of `models.dry` that change nothing."""
    return torch.ones(shape[:2]), torch.zeros(shape[:2])


def growing(correction, by=1.0):
    """Errors of such sizes."""

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * size_of(correction, sample, by), torch.zeros_like(sample.mean)

    return errors


def fitted(point_dates, correction, errors, **changes):
    shape = correction.linear.anchor.shape
    shrink, inflation = torch.full(shape[:2], NO_SHRINK), torch.full(shape, FLAT)
    given = {"train": TRAIN, "sizes": SIZES} | changes

    def s1(sample, _members):
        return sample.full_spread

    dates = given["train"], given["sizes"]
    return fit_residuals(correction, point_dates, *dates, errors, s1, shrink, inflation, as_it_is(shape))


def costs(point_dates, correction, errors, date):
    """CRPS with what the network says, without it, and with what is true, each with the best constant."""
    sample = Dates(point_dates.reader, 3).sample(date)
    error = errors(date, sample, 3)[0]
    wide = bounded(correction.expected_errors(sample, 3)[1])
    factors = torch.linspace(-2, 2, 81).exp()

    def crps(scale):
        return min(float(distributions.crps(Family.NORMAL, torch.zeros(()), f * scale, error).mean()) for f in factors)

    scales = sample.full_spread * wide.exp(), sample.full_spread, size_of(correction, sample)
    return np.array([crps(scale) for scale in scales])


def test_how_errors_grow_is_found_on_dates_not_seen(point_dates):
    correction = nothing(point_dates)
    errors = growing(correction)
    assert fitted(point_dates, correction, errors)
    found, before, best = sum(costs(point_dates, correction, errors, date) for date in VALIDATION)
    assert before - found > 0.3 * (before - best) > 0


@pytest.mark.slow
def test_errors_that_go_with_the_spread_are_left_alone(point_dates):
    correction = nothing(point_dates)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * sample.full_spread, torch.zeros_like(sample.mean)

    assert fitted(point_dates, correction, errors)
    found, before, _ = sum(costs(point_dates, correction, errors, date) for date in VALIDATION)
    assert found < 1.02 * before
    v, w = correction.expected_errors(point_dates.sample(18), 3)
    assert float(w.mean()) == pytest.approx(0, abs=0.1)
    assert float(v.square().mean().sqrt()) < 0.3  # of the errors' own size


@pytest.mark.slow
def test_it_learns_what_sigma_lacks_of_each_number_of_members(point_dates):
    """Errors with one member are three times as large: 1/M and log M are all that tells."""
    correction = nothing(point_dates)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * sample.full_spread * (3.0 if members == 1 else 1.0), torch.zeros_like(sample.mean)

    assert fitted(point_dates, correction, errors)
    wide = [float(correction.expected_errors(Dates(point_dates.reader, m).sample(18), m)[1].mean()) for m in (1, 3)]
    assert wide[0] - wide[1] == pytest.approx(np.log(3), abs=0.25)


@pytest.mark.slow
def test_what_to_expect_of_errors_is_found_on_dates_not_seen(point_dates):
    """In sigmas, on one side of the anchor alone, under noise of the size of the spread."""
    correction = nothing(point_dates)

    def expected(sample):
        return 1.5 * (sample.mean > correction.linear.anchor)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (expected(sample) + noise) * sample.full_spread, torch.zeros_like(sample.mean)

    assert fitted(point_dates, correction, errors)
    for date in VALIDATION:
        sample = Dates(point_dates.reader, 3).sample(date)
        wanted, found = expected(sample), bounded(correction.expected_errors(sample, 3)[0])
        assert float(((wanted - found) ** 2).sum() / (wanted**2).sum()) < 0.4


@pytest.mark.slow
def test_what_is_missing_is_not_learned_from(point_dates):
    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (1 + 0.3 * noise) * sample.full_spread, torch.zeros_like(sample.mean)

    found = []
    for given in (errors, missing_often(errors, 0)):
        correction = nothing(point_dates)
        assert fitted(point_dates, correction, given)
        found.append(correction.expected_errors(Dates(point_dates.reader, 3).sample(18), 3)[:, :, 0].mean((1, 2, 3)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.1)  # zeros on half of the dates would draw it to them


def test_few_dates_give_none_and_say_so(point_dates, caplog):
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, correction, growing(correction), train=TRAIN[:6])
    assert "error MLP: 6 dates are too few, so nothing is added" in caplog.text
    assert not correction.residuals.second.any()


def test_too_little_memory_gives_none_and_says_so(point_dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.point_fit.memory_limit", lambda: 1 << 20)
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, correction, growing(correction))
    assert "memory holds fewer than 20000 points" in caplog.text


def test_sigma_without_it_is_that_of_the_model_at_all_sizes(store):
    """Several leads, levels and variables: order of fields, shrinkage, inflation, corrected spread of single points."""
    layout = store.layout
    leads = tuple(layout.lead_hours[-2:])
    names = layout.variables[:2], tuple(layout.levels[:2]), layout.surface[:2]
    grid = layout.grid.latitude, layout.grid.longitude
    spec = ModelSpec(ModelConfig(hidden=8, depth=1, surroundings=8, residuals=8), *names, leads, leads, *grid)
    dates = Dates(Reader(store, spec), 3)
    draw = torch.Generator().manual_seed(1)
    correction = nothing(dates)
    networks = correction.surroundings.first, correction.surroundings.second, correction.linear.module.weight
    for weights in networks:
        weights.copy_(0.02 * torch.randn(weights.shape, generator=draw))
    shape = correction.linear.anchor.shape
    shrink = 1 + torch.rand(shape[:2], generator=draw)
    inflation = 0.3 * torch.randn(shape, generator=draw)
    correction.linear.climatology.copy_(0.5 + torch.rand(shape, generator=draw))
    correction.linear.__post_init__()
    spread = Spread(correction.linear.climatology, shrink, 3, shrink, shrink, torch.ones(shape[:2]), correction)

    for members in (1, 3):
        one = replace(spread, members=members)

        def s1(sample, count, one=one):
            return replace(one, members=count).s1(sample.spread)

        def errors(_date, sample, count, s1=s1):
            return sample.full_spread - sample.mean, sample.full_spread - s1(sample, count)

        sample = Dates(dates.reader, members).sample(5)
        at = torch.randperm(shape[-2] * shape[-1], generator=draw)[:40]
        points = Points(correction, dates, errors)
        before = _Before(points, s1, shrink, inflation, truth=False)
        inputs, (error, scale) = before.take(5, sample, members, at)
        shift, more = one.correction(sample)
        sigma = one.s0(one.followed(sample, more)) * inflation.exp()
        linear = correction.linear
        wanted = torch.stack([sigma, errors(5, sample, members)[0] - shift]) / linear.typical
        sigmas, left = linear.ordered(wanted).flatten(1)[:, at].chunk(2)
        torch.testing.assert_close(scale, sigmas, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(error, left, rtol=1e-4, atol=1e-4)
        assert len(inputs) == correction.surroundings.first.shape[1] - 1


def test_single_points_are_scored_by_the_law_of_their_variable(tmp_path):
    """No bound, one and two, at two leads: the CRPS of the law that the model would forecast there."""
    names = {"variables": ("t", "q"), "levels": (500, 850), "surface": ("t2m", "tp", "tcc")}
    store = make_store(tmp_path / "a.zarr", dates=16, shape=(9, 16), **names)
    leads, grid = tuple(store.layout.lead_hours[-2:]), store.layout.grid
    config = ModelConfig(hidden=8, depth=1, surroundings=8, residuals=8)
    spec = ModelSpec(config, *names.values(), leads, leads, grid.latitude, grid.longitude)
    dates, draw = Dates(Reader(store, spec), 3), torch.Generator().manual_seed(1)
    correction, sample, truth = nothing(dates), dates.sample(2), dates.target(Part.TRUTH, 2)
    linear, shape = correction.linear, correction.linear.anchor.shape
    linear.climatology.copy_(sample.full_spread.mean((-2, -1), keepdim=True).expand(shape))
    linear.__post_init__()
    shrink, inflation = torch.full(shape[:2], 2.0), 0.3 * torch.randn(shape, generator=draw)

    def errors(_date, sample, _members):
        return truth - sample.mean, torch.zeros_like(sample.mean)

    at = torch.randperm(9 * 16, generator=draw)
    points = Points(correction, dates, errors)
    before = _Before(points, lambda sample, _members: sample.full_spread, shrink, inflation, truth=True)
    given = [values.T for values in before.take(2, sample, 3, at)[1]]
    found = torch.randn(len(at), 2 * shape[0] * shape[1], generator=draw)
    dry = torch.rand(2, *shape[:2], generator=draw)
    score = _Score(correction, dates, tuple(dry))
    costs = score(found, given)

    said = torch.empty(2, shape[0] * shape[1], len(at))
    said[:, :, at] = found.T.unflatten(0, (2, -1))
    said = linear.unordered(said.unflatten(-1, shape[2:]))
    followed = torch.tensor([float(FOLLOWED)])
    s0 = shrunk_spread(sample.full_spread[None], followed, linear.climatology, shrink[..., None, None])[0]
    mean, wide = informed(sample.mean, s0, inflation, said)
    scale, wanted = s0 * wide.exp(), torch.empty(shape)
    for field, law in enumerate(families(spec)):
        centre, sigma = mean[:, field], scale[:, field]
        if law in AT_ZERO:
            centre, sigma = wetter(centre, sigma, *(values[:, field, None, None] for values in dry))
        if law is not Family.NORMAL:  # a little off the bounds
            lower, upper = law.bounds
            centre = torch.minimum(torch.maximum(centre, lower + 0.01 * sigma), upper - 0.01 * sigma)
        location = distributions.location_of_mean(law, centre, sigma)
        wanted[:, field] = distributions.crps(law, location, sigma, truth[:, field])
    wanted = linear.ordered((wanted / linear.typical)[None]).flatten(1)[:, at].T
    assert {len(at) for at in (score.normal, *score.bounded.values())} == {6, 4, 2}
    torch.testing.assert_close(costs, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", "tcc"])
def test_what_is_fitted_to_a_variable_with_bounds_is_better_for_it(tmp_path, name):
    """Sure of its bounds on half of the globe, where the truth is not at them: v learns so, however dry it began. Dates
    without a truth teach nothing and harm nothing."""
    store = make_store(
        tmp_path / "a.zarr", dates=20, members=6, shape=(9, 16), variables=(), levels=(), surface=(name,)
    )
    lead, grid = store.layout.lead_hours[-1:], store.layout.grid
    config = ModelConfig(hidden=8, depth=1, surroundings=32, residuals=32)
    spec = ModelSpec(config, (), (), (name,), lead, lead, grid.latitude, grid.longitude)
    dates = Dates(Reader(store, spec), 3)
    correction = nothing(dates)
    draw, east = torch.Generator().manual_seed(0), (torch.arange(16) < 8).expand(9, 16)
    truths = [torch.where(east, torch.rand(1, 1, 9, 16, generator=draw), 0.0) * 0.5 for _ in range(20)]
    dates.target = lambda _part, date: truths[date] if date % 2 else torch.full_like(truths[date], torch.nan)

    def errors(date, sample, _members):
        return dates.target(None, date), torch.zeros_like(sample.mean)  # all forecasts are nothing

    def s1(sample, _members):
        return torch.full_like(sample.mean, 0.1)

    flat = torch.full((1, 1), NO_SHRINK), torch.zeros(1, 1, 9, 16)
    assert fit_residuals(correction, dates, np.arange(20), SIZES, errors, s1, *flat, as_it_is((1, 1)))
    assert torch.isfinite(correction.residuals.second).all()
    v, w = bounded(correction.expected_errors(dates.sample(19), 3))
    shift, sigma = 0.1 * v, 0.1 * w.exp()
    assert float(shift[..., east].mean()) > 0.15 > 0.06 > float(shift[..., ~east].mean())
    law = spec.families[1][0]

    def cost(mean, scale):
        location = distributions.location_of_mean(law, mean.clamp(min=0.01 * scale), scale)
        return float(distributions.crps(law, location, scale, truths[19]).mean())

    assert cost(shift, sigma) < 0.75 * cost(torch.zeros_like(shift), torch.full_like(sigma, 0.1))


def test_each_field_takes_its_own_shares_of_v_and_w(store, monkeypatch, caplog):
    """What is right of a field is taken whole, noise is not: four fields in the order of the network's outputs."""
    caplog.set_level(logging.INFO)
    layout = store.layout
    leads = tuple(layout.lead_hours[-2:])
    grid = layout.grid.latitude, layout.grid.longitude
    config = ModelConfig(hidden=8, depth=1, surroundings=8, residuals=8)
    spec = ModelSpec(config, ("t",), tuple(layout.levels[:1]), ("t2m",), leads, leads, *grid)
    dates = Dates(Reader(store, spec), 3)
    correction = nothing(dates)
    correction.residuals.second.fill_(1.0)
    draw = torch.Generator().manual_seed(0)
    v, w, noise, other, error = torch.randn(5, 2, 2, 20_000, generator=draw)  # (T, F, P)
    right = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [0, 1]]], dtype=torch.bool)[..., None]  # of v and of w, (T, F)
    truth = torch.where(right[0], v, 0.0) + torch.where(right[1], 0.6 * w, 0.0).exp() * error
    said = torch.stack([torch.where(right[0], v, noise), torch.where(right[1], 0.6 * w, 0.6 * other)])
    given = torch.stack([truth, torch.zeros_like(truth), torch.ones_like(truth)])
    made = object.__new__(Truth)
    made.dates, made.scales, made.dry = dates, Scales(spec.grid), as_it_is((2, 2))
    made.spread = Spread(correction.linear.climatology, torch.ones(2, 2), 3, *torch.ones(3, 2, 2), correction)
    monkeypatch.setattr("ensemble_ml.training.truth_fit.fit_residuals", lambda *_: True)
    monkeypatch.setattr(
        "ensemble_ml.training.truth_fit.telling", lambda _dates, _targets, validation, kinds: validation
    )
    monkeypatch.setattr(Truth, "_points", lambda *_: (given, said, torch.ones(truth.shape[-1])))
    assert made.learn_residuals(torch.zeros(2, 2, *spec.grid.shape), TRAIN, VALIDATION, SIZES)
    # (v, w) by field: t at both leads, then t2m at both leads
    shares = correction.residuals.second[:, 0].reshape(2, 2, 2)
    assert "error MLP: CRPS on the validation dates" in caplog.text
    torch.testing.assert_close(shares, right[..., 0].transpose(1, 2).float(), rtol=0, atol=0)
