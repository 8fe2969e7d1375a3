"""The fit of the surroundings' network: what no line can say is found, noise is left alone, chance has one seed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_input, make_spec

from ensemble_ml.config import ModelConfig
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import EnsembleModel, ModelSpec
from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import Surroundings, surroundings_shapes
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import Linear, mean_state
from ensemble_ml.training.surroundings_fit import Correction, _choices, _Points, fit_surroundings

TRAIN, VALIDATION = np.arange(16), np.arange(16, 20)
SIZES = [1, 2, 3, 5]


@pytest.fixture(scope="module")
def dates(store):
    grid, lead = store.layout.grid, store.layout.lead_hours[-1]
    kind = (store.layout.variables[:1], store.layout.levels[:1], store.layout.surface[:1])
    config = ModelConfig(hidden=8, depth=1, surroundings=32)
    return Dates(Reader(store, ModelSpec(config, *kind, (lead,), (lead,), grid.latitude, grid.longitude)), 3)


def nothing(dates):
    """A correction that adds nothing yet."""
    spec = dates.spec
    anchor = mean_state(dates, TRAIN)
    module = LinearCorrection(spec, np.zeros(correction_shape(spec)))
    linear = Linear(module, anchor, torch.full_like(anchor, 0.7), torch.full(anchor.shape[:2], 2.0))
    network = Surroundings(spec, *(np.zeros(shape) for shape in surroundings_shapes(spec)))
    return Correction(linear, network, position_planes(spec, np.zeros((0, *spec.grid.shape), np.float32)))


def crooked(correction):
    """Errors that go with the size of a departure, which is at right angles to all lines."""

    def errors(_date, sample, members):
        linear = correction.linear
        apart = ((sample.mean - linear.anchor) / linear.typical).abs()
        apart = apart - apart.mean()
        return apart, 0.5 * apart * linear.typical

    return errors


def left(errors, dates, correction, date):
    sample = Dates(dates.reader, 3).sample(date)
    pairs = zip(errors(date, sample, 3), correction(sample, 3), strict=True)
    return [float(((a - b).nan_to_num() ** 2).sum() / (a.nan_to_num() ** 2).sum()) for a, b in pairs]


def test_what_no_line_can_say_is_found_on_dates_not_seen(dates):
    correction = nothing(dates)
    errors = crooked(correction)
    fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, errors)
    assert max(left(errors, dates, correction, 18)) < 0.35


def test_noise_is_left_alone(dates):
    def errors(date, sample, members):
        noise = torch.Generator().manual_seed(1000 * int(date) + members)
        return tuple(torch.randn(sample.mean.shape, generator=noise) for _ in range(2))

    correction = nothing(dates)
    fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, errors)
    assert max(left(errors, dates, correction, 18)) < 1.02


def test_the_fit_is_the_same_each_time_and_leaves_the_random_state_alone(dates):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        correction = nothing(dates)
        fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, crooked(correction))
        assert torch.equal(torch.random.get_rng_state(), before)
        found.append(torch.cat([correction.surroundings.first.flatten(), correction.surroundings.second.flatten()]))
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


def test_what_is_missing_of_a_target_is_not_learned_from(dates):
    correction = nothing(dates)
    errors = crooked(correction)

    def gaps(date, sample, members):
        mean, spread = (v.clone() for v in errors(date, sample, members))
        if date < 8:
            mean[:, 0] = torch.nan
        return mean, spread

    fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, gaps)
    sample = Dates(dates.reader, 3).sample(18)
    wanted, got = errors(18, sample, 3)[0][:, 0], correction(sample, 3)[0][:, 0]
    assert float(((wanted - got) ** 2).sum() / (wanted**2).sum()) < 0.2  # half of each would leave a quarter


def test_without_validation_dates_some_of_the_training_dates_stand_in(dates):
    correction = nothing(dates)
    errors = crooked(correction)
    fit_surroundings(correction, dates, np.arange(20), np.zeros(0, int), SIZES, errors)
    assert max(left(errors, dates, correction, 19)) < 0.4


def test_too_little_memory_gives_none_and_says_so(dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.surroundings_fit.memory_limit", lambda: 1 << 20)
    correction = nothing(dates)
    with caplog.at_level(logging.INFO):
        fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, crooked(correction))
    assert "memory holds fewer than 20000 points, so nothing is added" in caplog.text
    assert not correction.surroundings.second.any()


def test_few_dates_give_none_and_say_so(dates, caplog):
    correction = nothing(dates)
    with caplog.at_level(logging.INFO):
        fit_surroundings(correction, dates, TRAIN[:6], VALIDATION[:2], SIZES, crooked(correction))
    assert "8 dates are too few, so nothing is added" in caplog.text
    assert not correction.surroundings.second.any()


def test_ranks_that_wait_hear_of_it_while_it_fits(dates, monkeypatch):
    beats = []
    monkeypatch.setattr(dates.reader.source, "beat", lambda: beats.append(1), raising=False)
    correction = nothing(dates)
    fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, crooked(correction))
    assert len(beats) >= 10


def test_what_linear_terms_leave_at_points_is_what_they_leave_of_the_field(dates):
    correction = nothing(dates)
    weight = correction.linear.module.weight
    weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    errors = crooked(correction)
    sample = dates.sample(3)
    at = torch.tensor([0, 5, 40, 143])
    _, found = _Points(correction, dates, errors).at(3, sample, 3, at)
    linear = correction.linear
    left = [a - b for a, b in zip(errors(3, sample, 3), linear(sample.mean, sample.spread, 3), strict=True)]
    torch.testing.assert_close(found, linear.ordered(torch.stack(left) / linear.typical).flatten(1)[:, at])


def test_one_size_in_training_is_enough(dates):
    alone = Dates(dates.reader, dates.reader.full_size)
    correction = nothing(alone)
    errors = crooked(correction)
    fit_surroundings(correction, alone, TRAIN, VALIDATION, [dates.reader.full_size], errors)
    assert max(left(errors, dates, replace(correction), 18)) < 0.6


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
    network = Surroundings(spec, climate.surroundings_first, climate.surroundings_second)
    linear = Linear(module, of("anchor"), of("spread"), of("spread_shrink"))
    correction = Correction(linear, network, position_planes(spec, climate.static))
    leads = spec.lead_positions
    mean, spread = (joined(getattr(x, f"{n}_p")[0, leads], getattr(x, f"{n}_s")[0, leads]) for n in ("mean", "spread"))
    shift, more = correction(Sample(mean, spread, mean, float(x.day_of_year[0])), 3)
    with torch.no_grad():
        found = model._corrections(x)
    both = [joined(found["p"][0, kind], found["s"][0, kind]) * linear.typical for kind in (0, 1)]
    assert float(shift.abs().min()) > 0
    torch.testing.assert_close(shift, both[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(more, both[1], rtol=1e-4, atol=1e-5)


def test_where_memory_allows_one_choice_a_date_the_sizes_still_differ(dates):
    draw = np.random.default_rng(0)
    once = [len(chosen) for _, chosen in _choices(dates, np.arange(8), [1, 2, 3], 1, draw)]
    assert once[::2] == [dates.members] * 4 and len(set(once[1::2])) > 1
    twice = [len(chosen) for _, chosen in _choices(dates, np.arange(8), [1, 2, 3], 2, draw)]
    assert twice[::2] == [dates.members] * 8
