"""The fit of the surroundings' network: what no line can say is found, noise is left alone, chance has one seed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_input, make_spec
from training.fitting import SIZES, TRAIN, VALIDATION, missing_often, nothing

from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.linear import LinearCorrection
from ensemble_ml.models.place import plane_count, position_planes
from ensemble_ml.models.surroundings import make_network
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import Linear
from ensemble_ml.training.point_fit import Correction, Points, _Dropout, choices_of
from ensemble_ml.training.surroundings_fit import fit_surroundings

pytestmark = pytest.mark.usefixtures("whole_fits")


def crooked(correction):
    """Errors that go with the size of a departure, which is at right angles to all lines."""

    def errors(_date, sample, members):
        linear = correction.linear
        apart = ((sample.mean - linear.anchor) / linear.typical).abs()
        apart = apart - apart.mean()
        return apart, 0.5 * apart * linear.typical

    return errors


def left(errors, point_dates, correction, date):
    sample = Dates(point_dates.reader, 3).sample(date)
    wanted, found = errors(date, sample, 3)[1], correction(sample, 3)[1]
    return float(((wanted - found).nan_to_num() ** 2).sum() / (wanted.nan_to_num() ** 2).sum())


def test_what_no_line_can_say_is_found_on_dates_not_seen(point_dates):
    correction = nothing(point_dates)
    errors = crooked(correction)
    fit_surroundings(correction, point_dates, TRAIN, VALIDATION, SIZES, errors)
    assert left(errors, point_dates, correction, 18) < 0.35


def test_noise_is_left_alone(point_dates):
    def errors(date, sample, members):
        noise = torch.Generator().manual_seed(1000 * int(date) + members)
        return tuple(torch.randn(sample.mean.shape, generator=noise) for _ in range(2))

    correction = nothing(point_dates)
    fit_surroundings(correction, point_dates, TRAIN, VALIDATION, SIZES, errors)
    assert left(errors, point_dates, correction, 18) < 1.02


def test_the_fit_is_the_same_each_time_and_leaves_the_random_state_alone(point_dates):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        correction = nothing(point_dates)
        fit_surroundings(correction, point_dates, TRAIN, VALIDATION, SIZES, crooked(correction))
        assert torch.equal(torch.random.get_rng_state(), before)
        found.append(torch.cat([correction.surroundings.first.flatten(), correction.surroundings.second.flatten()]))
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


def test_dropout_keeps_the_mean_and_draws_anew():
    drop, ones = _Dropout(0.3, 0), torch.ones(200, 1000)
    once, again = drop(ones), drop(ones)
    assert float((once == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(once.mean()) == pytest.approx(1, abs=0.01)
    assert not torch.equal(once, again) and torch.equal(drop.eval()(ones), ones)


def test_what_is_missing_of_a_target_is_not_learned_from(point_dates):
    correction = nothing(point_dates)
    errors = crooked(correction)
    fit_surroundings(correction, point_dates, TRAIN, VALIDATION, SIZES, missing_often(errors, 1))
    sample = Dates(point_dates.reader, 3).sample(18)
    wanted, got = errors(18, sample, 3)[1][:, 0], correction(sample, 3)[1][:, 0]
    assert float(((wanted - got) ** 2).sum() / (wanted**2).sum()) < 0.2  # half of each would leave a quarter


def test_without_validation_dates_some_of_the_training_dates_stand_in(point_dates, caplog):
    caplog.set_level(logging.INFO)
    correction = nothing(point_dates)
    errors = crooked(correction)
    fit_surroundings(correction, point_dates, np.arange(20), np.zeros(0, int), SIZES, errors)
    assert left(errors, point_dates, correction, 19) < 0.4
    assert "RMSE of the spread on training dates held out" in caplog.text


def test_too_little_memory_gives_none_and_says_so(point_dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.point_fit.memory_limit", lambda: 1 << 20)
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        fit_surroundings(correction, point_dates, TRAIN, VALIDATION, SIZES, crooked(correction))
    assert "memory holds fewer than 20000 points, so nothing is added" in caplog.text
    assert not correction.surroundings.second.any()


def test_few_dates_give_none_and_say_so(point_dates, caplog):
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        fit_surroundings(correction, point_dates, TRAIN[:6], VALIDATION[:2], SIZES, crooked(correction))
    assert "8 dates are too few, so nothing is added" in caplog.text
    assert not correction.surroundings.second.any()


def test_what_linear_terms_leave_at_points_is_what_they_leave_of_the_field(point_dates):
    correction = nothing(point_dates)
    weight = correction.linear.module.weight
    weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    errors = crooked(correction)
    sample = point_dates.sample(3)
    at = torch.tensor([0, 5, 40, 143])
    _, wanted, done = Points(correction, point_dates, errors).at(3, sample, 3, at)
    linear = correction.linear
    left = [a - b for a, b in zip(errors(3, sample, 3), linear(sample.mean, sample.spread, 3), strict=True)]
    torch.testing.assert_close(wanted - done, linear.ordered(torch.stack(left) / linear.typical).flatten(1)[:, at])


def test_one_size_in_training_is_enough(point_dates):
    alone = Dates(point_dates.reader, point_dates.reader.full_size)
    correction = nothing(alone)
    errors = crooked(correction)
    fit_surroundings(correction, alone, TRAIN, VALIDATION, [point_dates.reader.full_size], errors)
    assert left(errors, point_dates, replace(correction), 18) < 0.6


def test_the_fit_sees_what_the_model_adds():
    """Several leads, levels and variables, and a static field: the order of all channels, outputs and planes."""
    spec = make_spec(leads_in=(0, 24, 48), leads_out=(24, 48), static=("orog",))
    climate = make_climate(spec).checked(spec)
    model, x = EnsembleModel(spec, climate), make_input(spec)

    def joined(pressure, surface):
        pressure, surface = torch.as_tensor(pressure), torch.as_tensor(surface)
        return torch.cat([pressure.flatten(1, 2), surface], 1)

    def of(name):
        return joined(getattr(climate, f"{name}_p"), getattr(climate, f"{name}_s"))

    module = LinearCorrection(spec, climate.correction)
    networks = (make_network(spec, vars(climate), name) for name in ("surroundings", "residuals"))
    linear = Linear(module, of("anchor"), of("spread"), of("spread_shrink"))
    correction = Correction(linear, *networks, position_planes(spec, climate.static))
    leads = spec.lead_positions
    mean, spread = (joined(getattr(x, f"{n}_p")[0, leads], getattr(x, f"{n}_s")[0, leads]) for n in ("mean", "spread"))
    sample = Sample(mean, spread, mean, float(x.day_of_year[0]))
    shift, more = correction(sample, 3)
    with torch.no_grad():
        found, residuals = model._corrections(x)
    both = [joined(found["p"][0, kind], found["s"][0, kind]) * linear.typical for kind in (0, 1)]
    assert float(shift.abs().min()) > 0
    torch.testing.assert_close(shift, both[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(more, both[1], rtol=1e-4, atol=1e-5)
    assert float(residuals["p"].abs().min()) > 0
    both = torch.stack([joined(residuals["p"][0, i], residuals["s"][0, i]) for i in (0, 1)])
    torch.testing.assert_close(correction.expected_errors(sample, 3), both, rtol=1e-4, atol=1e-5)


def test_where_memory_allows_one_choice_a_date_the_sizes_still_differ(point_dates):
    draw = np.random.default_rng(0)
    once = [len(chosen) for _, chosen in choices_of(point_dates, np.arange(8), [1, 2, 3], 1, draw)]
    assert once[::2] == [point_dates.members] * 4 and len(set(once[1::2])) > 1
    twice = [len(chosen) for _, chosen in choices_of(point_dates, np.arange(8), [1, 2, 3], 2, draw)]
    assert twice[::2] == [point_dates.members] * 8


def test_what_never_varied_in_training_says_nothing_later(point_dates):
    """One size in training: with others, 1/M and log M must not set off weights that nothing has taught."""
    correction = nothing(point_dates)
    fit_surroundings(correction, point_dates, TRAIN, VALIDATION, [3], crooked(correction))
    first = correction.surroundings.first
    count = plane_count(point_dates.spec)
    sizes = first[:, -1 - count :][:, count - 4 : count - 2]  # 1/M and log M
    assert first.any() and not sizes.any()
