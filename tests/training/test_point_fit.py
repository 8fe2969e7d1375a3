"""The fit of the point network: what no line can say of the spread, what to expect of errors and how they grow is found
on dates not seen, noise is left alone, chance has one seed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_input, make_spec
from stores import make_store
from training.fitting import SIZES, TRAIN, VALIDATION, added, know, missing_often, said, start_of, typical_of

from ensemble_ml import distributions
from ensemble_ml.config import ModelConfig
from ensemble_ml.fields import Family
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import EnsembleModel, ModelSpec
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import AT_ZERO, FOLLOWED, bounded, informed, wetter
from ensemble_ml.models.inputs import plane_count
from ensemble_ml.models.model import Start
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.point_fit import _Dropout, choices_of
from ensemble_ml.training.point_targets import Points, _Score, fit_points
from ensemble_ml.training.smoothing import Scales
from ensemble_ml.training.spread_fit import Spread
from ensemble_ml.training.truth_fit import Truth

pytestmark = pytest.mark.usefixtures("whole_fits")

NO_SHRINK = 1e-6


def size_of(start, sample, by=1.0):
    """What errors grow with: the size of the departure of the mean."""
    apart = ((sample.mean - start.heads.anchor) / typical_of(start)).abs()
    return torch.exp(by * (apart - apart.mean()) / apart.std()) * typical_of(start)


def growing(start, by=1.0):
    """Errors of such sizes."""

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * size_of(start, sample, by), torch.zeros_like(sample.mean)

    return errors


def fitted(point_dates, start, errors, **changes):
    know(start, shrink=NO_SHRINK)
    given = {"train": TRAIN, "validation": VALIDATION, "sizes": SIZES} | changes
    return fit_points(start, point_dates, *given.values(), errors, lambda sample, _members: sample.full_spread)


def costs(point_dates, start, errors, date):
    """CRPS with what the network says, without it, and with what is true, each with the best constant."""
    sample = Dates(point_dates.reader, 3).sample(date)
    error = errors(date, sample, 3)[0]
    wide = bounded(said(start, sample, 3)[2])
    factors = torch.linspace(-2, 2, 81).exp()

    def crps(scale):
        return min(float(distributions.crps(Family.NORMAL, torch.zeros(()), f * scale, error).mean()) for f in factors)

    scales = sample.full_spread * wide.exp(), sample.full_spread, size_of(start, sample)
    return np.array([crps(scale) for scale in scales])


def test_how_errors_grow_is_found_on_dates_not_seen(point_dates):
    start = start_of(point_dates)
    errors = growing(start)
    assert fitted(point_dates, start, errors)
    found, before, best = sum(costs(point_dates, start, errors, date) for date in VALIDATION)
    assert before - found > 0.3 * (before - best) > 0


@pytest.mark.slow
def test_errors_that_go_with_the_spread_are_left_alone(point_dates):
    start = start_of(point_dates)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * sample.full_spread, torch.zeros_like(sample.mean)

    assert fitted(point_dates, start, errors)
    found, before, _ = sum(costs(point_dates, start, errors, date) for date in VALIDATION)
    assert found < 1.02 * before
    _, v, w = said(start, point_dates.sample(18), 3)
    assert float(w.mean()) == pytest.approx(0, abs=0.1)
    assert float(v.square().mean().sqrt()) < 0.3  # of the errors' own size


@pytest.mark.slow
def test_it_learns_what_sigma_lacks_of_each_number_of_members(point_dates):
    """Errors with one member are three times as large: 1/M and log M are all that tells."""
    start = start_of(point_dates)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * sample.full_spread * (3.0 if members == 1 else 1.0), torch.zeros_like(sample.mean)

    assert fitted(point_dates, start, errors)
    wide = [float(said(start, Dates(point_dates.reader, m).sample(18), m)[2].mean()) for m in (1, 3)]
    assert wide[0] - wide[1] == pytest.approx(np.log(3), abs=0.25)


@pytest.mark.slow
def test_what_to_expect_of_errors_is_found_on_dates_not_seen(point_dates):
    """In sigmas, on one side of the anchor alone, under noise of the size of the spread."""
    start = start_of(point_dates)

    def expected(sample):
        return 1.5 * (sample.mean > start.heads.anchor)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (expected(sample) + noise) * sample.full_spread, torch.zeros_like(sample.mean)

    assert fitted(point_dates, start, errors)
    for date in VALIDATION:
        sample = Dates(point_dates.reader, 3).sample(date)
        wanted, found = expected(sample), bounded(said(start, sample, 3)[1])
        assert float(((wanted - found) ** 2).sum() / (wanted**2).sum()) < 0.4


@pytest.mark.slow
def test_what_is_missing_is_not_learned_from(point_dates):
    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (1 + 0.3 * noise) * sample.full_spread, torch.zeros_like(sample.mean)

    found = []
    for given in (errors, missing_often(errors, 0)):
        start = start_of(point_dates)
        assert fitted(point_dates, start, given)
        found.append(said(start, Dates(point_dates.reader, 3).sample(18), 3)[1:, :, 0].mean((1, 2, 3)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.1)  # zeros on half of the dates would draw it to them


def test_few_dates_give_none_and_say_so(point_dates, caplog):
    start = start_of(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, start, growing(start), train=TRAIN[:6])
    assert "point network: 6 dates are too few, so nothing is added" in caplog.text
    assert not start.points.second.any()


def test_too_little_memory_gives_none_and_says_so(point_dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.point_fit.memory_limit", lambda: 1 << 20)
    start = start_of(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, start, growing(start))
    assert "the bounds on memory and operations allow fewer than 20000 points" in caplog.text


def test_sigma_without_it_is_that_of_the_model_at_all_sizes(store):
    """Several leads, levels and variables: order of fields, shrinkage, inflation, corrected spread of single points."""
    layout = store.layout
    leads = tuple(layout.lead_hours[-2:])
    names = layout.variables[:2], tuple(layout.levels[:2]), layout.surface[:2]
    grid = layout.grid.latitude, layout.grid.longitude
    spec = ModelSpec(ModelConfig(hidden=8, depth=1, points=8), *names, leads, leads, *grid)
    dates = Dates(Reader(store, spec), 3)
    draw = torch.Generator().manual_seed(1)
    start = start_of(dates)
    for weights in (start.points.first, start.points.second, start.linear.weight):
        weights.copy_(0.02 * torch.randn(weights.shape, generator=draw))
    shape = start.heads.anchor.shape
    shrink = 1 + torch.rand(shape[:2], generator=draw)
    inflation = 0.3 * torch.randn(shape, generator=draw)
    climatology = 0.5 + torch.rand(shape, generator=draw)
    know(start, shrink=shrink, spread_shrink=2.0, inflation=inflation, climatology=climatology)
    spread = Spread(start.heads.climatology, shrink, 3, shrink, shrink, torch.ones(shape[:2]), start)

    for members in (1, 3):
        one = replace(spread, members=members)

        def s1(sample, count, one=one):
            return replace(one, members=count).s1(sample.spread)

        def errors(_date, sample, count, s1=s1):
            return sample.full_spread - sample.mean, sample.full_spread - s1(sample, count)

        sample = Dates(dates.reader, members).sample(5)
        at = torch.randperm(shape[-2] * shape[-1], generator=draw)[:40]
        points = Points(start, dates, errors, s1)
        assert points.arrays == [1, 2]
        inputs, ((apart,), (error, scale)) = points.take(5, sample, members, at)
        shift, more = one.correction(sample)
        sigma = one.s0(one.followed(sample, more)) * inflation.exp()
        wrong = errors(5, sample, members)
        wanted = torch.stack([sigma, wrong[0] - shift, wrong[1] - more]) / typical_of(start)
        sigmas, left, spreads = wanted.flatten(3).flatten(0, 2)[:, at].chunk(3)
        torch.testing.assert_close(apart, spreads, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scale, sigmas, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(error, left, rtol=1e-4, atol=1e-4)
        assert len(inputs) == start.points.first.shape[1] - 1


def test_single_points_are_scored_by_the_law_of_their_variable(tmp_path):
    """No bound, one and two, at two leads: the CRPS of the law that the model would forecast there."""
    names = {"variables": ("t", "q"), "levels": (500, 850), "surface": ("t2m", "tp", "tcc")}
    store = make_store(tmp_path / "a.zarr", dates=16, shape=(9, 16), **names)
    leads, grid = tuple(store.layout.lead_hours[-2:]), store.layout.grid
    config = ModelConfig(hidden=8, depth=1, points=8)
    spec = ModelSpec(config, *names.values(), leads, leads, grid.latitude, grid.longitude)
    dates, draw = Dates(Reader(store, spec), 3), torch.Generator().manual_seed(1)
    start, sample, truth = start_of(dates), dates.sample(2), dates.target(Part.TRUTH, 2)
    heads, shape = start.heads, start.heads.anchor.shape
    shrink, inflation = torch.full(shape[:2], 2.0), 0.3 * torch.randn(shape, generator=draw)

    def errors(_date, sample, _members):
        return truth - sample.mean, torch.zeros_like(sample.mean)

    at = torch.randperm(9 * 16, generator=draw)
    dry = torch.rand(2, *shape[:2], generator=draw)
    terms = {"shrink": shrink, "inflation": inflation, "dry_share": dry[0], "dry_mean": dry[1]}
    know(start, climatology=sample.full_spread.mean((-2, -1), keepdim=True).expand(shape), **terms)
    points = Points(start, dates, errors, lambda sample, _members: sample.full_spread)
    given = [values.T for values in points.take(2, sample, 3, at)[1][1]]
    found = torch.randn(len(at), 2 * shape[0] * shape[1], generator=draw)
    score = _Score(start)
    costs = score(found, given)

    said = torch.empty(2, shape[0] * shape[1], len(at))
    said[:, :, at] = found.T.unflatten(0, (2, -1))
    said = said.unflatten(-1, shape[2:]).unflatten(1, shape[:2])
    followed = torch.tensor([float(FOLLOWED)])
    s0 = shrunk_spread(sample.full_spread[None], followed, heads.climatology, shrink[..., None, None])[0]
    mean, wide = informed(sample.mean, s0, inflation, said)
    scale, wanted = s0 * wide.exp(), torch.empty(shape)
    for field, law in enumerate(spec.families):
        centre, sigma = mean[:, field], scale[:, field]
        if law in AT_ZERO:
            centre, sigma = wetter(centre, sigma, *(values[:, field, None, None] for values in dry))
        if law is not Family.NORMAL:  # a little off the bounds
            lower, upper = law.bounds
            centre = torch.minimum(torch.maximum(centre, lower + 0.01 * sigma), upper - 0.01 * sigma)
        location = distributions.location_of_mean(law, centre, sigma)
        wanted[:, field] = distributions.crps(law, location, sigma, truth[:, field])
    wanted = (wanted / typical_of(start)).flatten(2).flatten(0, 1)[:, at].T
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
    config = ModelConfig(hidden=8, depth=1, points=32)
    spec = ModelSpec(config, (), (), (name,), lead, lead, grid.latitude, grid.longitude)
    dates = Dates(Reader(store, spec), 3)
    start = start_of(dates)
    draw, east = torch.Generator().manual_seed(0), (torch.arange(16) < 8).expand(9, 16)
    truths = [torch.where(east, torch.rand(1, 1, 9, 16, generator=draw), 0.0) * 0.5 for _ in range(20)]
    dates.target = lambda _part, date: truths[date] if date % 2 else torch.full_like(truths[date], torch.nan)

    def errors(date, sample, _members):
        return dates.target(None, date), torch.zeros_like(sample.mean)  # all forecasts are nothing

    def s1(sample, _members):
        return torch.full_like(sample.mean, 0.1)

    know(start, shrink=NO_SHRINK)
    assert fit_points(start, dates, np.arange(20), VALIDATION, SIZES, errors, s1)
    assert torch.isfinite(start.points.second).all()
    v, w = bounded(said(start, dates.sample(19), 3)[1:])
    shift, sigma = 0.1 * v, 0.1 * w.exp()
    assert float(shift[..., east].mean()) > 0.15 > 0.06 > float(shift[..., ~east].mean())
    law = spec.families[0]

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
    config = ModelConfig(hidden=8, depth=1, points=8)
    spec = ModelSpec(config, ("t",), tuple(layout.levels[:1]), ("t2m",), leads, leads, *grid)
    dates = Dates(Reader(store, spec), 3)
    start = start_of(dates)
    start.points.second.fill_(1.0)
    draw = torch.Generator().manual_seed(0)
    v, w, noise, other, error = torch.randn(5, 2, 2, 20_000, generator=draw)  # (T, F, P)
    right = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [0, 1]]], dtype=torch.bool)[..., None]  # of v and of w, (T, F)
    truth = torch.where(right[0], v, 0.0) + torch.where(right[1], 0.6 * w, 0.0).exp() * error
    said = torch.stack([torch.where(right[0], v, noise), torch.where(right[1], 0.6 * w, 0.6 * other)])
    given = torch.stack([truth, torch.zeros_like(truth), torch.ones_like(truth)])
    made = object.__new__(Truth)
    made.dates, made.scales, made.dry = dates, Scales(spec.grid), (torch.ones(2, 2), torch.zeros(2, 2))
    made.spread = Spread(start.heads.climatology, torch.ones(2, 2), 3, *torch.ones(3, 2, 2), start)
    monkeypatch.setattr("ensemble_ml.training.truth_fit.fit_points", lambda *_: True)
    monkeypatch.setattr(
        "ensemble_ml.training.truth_fit.telling", lambda _dates, _targets, validation, kinds: validation
    )
    monkeypatch.setattr(Truth, "_points", lambda *_: (given, said, torch.ones(truth.shape[-1])))
    assert made.learn_points(torch.zeros(2, 2, *spec.grid.shape), TRAIN, VALIDATION, SIZES)
    # (v, w) by lead: t, then t2m
    spread, *shares = start.points.second[:, 0].reshape(3, 2, 2)
    assert (spread == 1).all() and "point network: CRPS on the validation dates" in caplog.text
    torch.testing.assert_close(torch.stack(shares), right[..., 0].float(), rtol=0, atol=0)


def crooked(start):
    """Errors that go with the size of a departure, which is at right angles to all lines."""

    def errors(_date, sample, members):
        apart = ((sample.mean - start.heads.anchor) / typical_of(start)).abs()
        apart = apart - apart.mean()
        return apart, 0.5 * apart * typical_of(start)

    return errors


def fit_spread(start, dates, errors, **changes):
    """Fit the network to the errors of the spread alone."""
    given = {"train": TRAIN, "validation": VALIDATION, "sizes": SIZES} | changes
    return fit_points(start, dates, *given.values(), errors, None)


def spread_of(start, sample):
    """What is added to the spread of three members, linearly and by the network."""
    return added(start, sample, 3)[1] + said(start, sample, 3)[0] * typical_of(start)


def left(errors, point_dates, start, date):
    sample = Dates(point_dates.reader, 3).sample(date)
    wanted, found = errors(date, sample, 3)[1], spread_of(start, sample)
    return float(((wanted - found).nan_to_num() ** 2).sum() / (wanted.nan_to_num() ** 2).sum())


def test_what_no_line_can_say_is_found_on_dates_not_seen(point_dates):
    start = start_of(point_dates)
    errors = crooked(start)
    fit_spread(start, point_dates, errors)
    assert left(errors, point_dates, start, 18) < 0.35


def test_noise_is_left_alone(point_dates):
    def errors(date, sample, members):
        noise = torch.Generator().manual_seed(1000 * int(date) + members)
        return tuple(torch.randn(sample.mean.shape, generator=noise) for _ in range(2))

    start = start_of(point_dates)
    fit_spread(start, point_dates, errors)
    assert left(errors, point_dates, start, 18) < 1.02


def test_the_fit_is_the_same_each_time_and_leaves_the_random_state_alone(point_dates):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        start = start_of(point_dates)
        fit_spread(start, point_dates, crooked(start))
        assert torch.equal(torch.random.get_rng_state(), before)
        found.append(torch.cat([start.points.first.flatten(), start.points.second.flatten()]))
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


def test_dropout_keeps_the_mean_and_draws_anew():
    drop, ones = _Dropout(0.3, 0), torch.ones(200, 1000)
    once, again = drop(ones), drop(ones)
    assert float((once == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(once.mean()) == pytest.approx(1, abs=0.01)
    assert not torch.equal(once, again) and torch.equal(drop.eval()(ones), ones)


def test_what_is_missing_of_a_target_is_not_learned_from(point_dates):
    start = start_of(point_dates)
    errors = crooked(start)
    fit_spread(start, point_dates, missing_often(errors, 1))
    sample = Dates(point_dates.reader, 3).sample(18)
    wanted, got = errors(18, sample, 3)[1][:, 0], spread_of(start, sample)[:, 0]
    assert float(((wanted - got) ** 2).sum() / (wanted**2).sum()) < 0.2  # half of each would leave a quarter


def test_without_validation_dates_some_of_the_training_dates_stand_in(point_dates, caplog):
    caplog.set_level(logging.INFO)
    start = start_of(point_dates)
    errors = crooked(start)
    fit_spread(start, point_dates, errors, train=np.arange(20), validation=np.zeros(0, int))
    assert left(errors, point_dates, start, 19) < 0.4
    assert "RMSE of the spread on training dates held out" in caplog.text


def test_one_size_in_training_is_enough(point_dates):
    alone = Dates(point_dates.reader, point_dates.reader.full_size)
    start = start_of(alone)
    errors = crooked(start)
    fit_spread(start, alone, errors, sizes=[point_dates.reader.full_size])
    assert left(errors, point_dates, start, 18) < 0.6


def test_the_fit_sees_what_the_model_adds():
    """Several leads, levels and variables, and a static field: the order of all channels, outputs and planes."""
    spec = make_spec(leads_in=(0, 24, 48), leads_out=(24, 48), static=("orog",))
    climate = make_climate(spec).checked(spec)
    model, x = EnsembleModel(spec, climate), make_input(spec)

    start = Start(spec, climate)
    leads = spec.lead_positions
    mean, spread = x.mean[0, leads], x.spread[0, leads]
    sample = Sample(mean, spread, mean, float(x.day_of_year[0]))
    shift, more = added(start, sample, 3)
    with torch.no_grad():
        found, points = model.corrections(*model._predicted(x), x.count, x.day_of_year)
    assert float(shift.abs().min()) > 0 and float(points.abs().min()) > 0
    for ours, theirs in zip((shift, more), found[0], strict=True):
        torch.testing.assert_close(ours, theirs * typical_of(start), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(said(start, sample, 3), points[0], rtol=1e-4, atol=1e-5)


def test_where_memory_allows_one_choice_a_date_the_sizes_still_differ(point_dates):
    draw = np.random.default_rng(0)
    once = [len(chosen) for _, chosen in choices_of(point_dates, np.arange(8), [1, 2, 3], 1, draw)]
    assert once[::2] == [point_dates.members] * 4 and len(set(once[1::2])) > 1
    twice = [len(chosen) for _, chosen in choices_of(point_dates, np.arange(8), [1, 2, 3], 2, draw)]
    assert twice[::2] == [point_dates.members] * 8


def test_what_never_varied_in_training_says_nothing_later(point_dates):
    """One size in training: with others, 1/M and log M must not set off weights that nothing has taught."""
    start = start_of(point_dates)
    fit_spread(start, point_dates, crooked(start), sizes=[3])
    first = start.points.first
    count = plane_count(point_dates.spec)
    sizes = first[:, -1 - count :][:, count - 4 : count - 2]  # 1/M and log M
    assert first.any() and not sizes.any()
