"""The fit of the surroundings' network: what no line can say is found, noise is left alone, chance has one seed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from ensemble_ml.config import ModelConfig
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import Surroundings, surroundings_shapes
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.linear_fit import Linear, mean_state
from ensemble_ml.training.surroundings_fit import Correction, fit_surroundings

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
    assert max(left(errors, dates, correction, 18)) < 0.45


def test_without_validation_dates_some_of_the_training_dates_stand_in(dates):
    correction = nothing(dates)
    errors = crooked(correction)
    fit_surroundings(correction, dates, np.arange(20), np.zeros(0, int), SIZES, errors)
    assert max(left(errors, dates, correction, 19)) < 0.4


def test_too_few_points_give_none_and_say_so(dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.surroundings_fit.free_memory", lambda: 0)
    correction = nothing(dates)
    with caplog.at_level(logging.INFO):
        fit_surroundings(correction, dates, TRAIN, VALIDATION, SIZES, crooked(correction))
    assert "16 training dates hold too few points, so nothing is added" in caplog.text
    assert not correction.surroundings.second.any()


def test_one_size_in_training_is_enough(dates):
    alone = Dates(dates.reader, dates.reader.full_size)
    correction = nothing(alone)
    errors = crooked(correction)
    fit_surroundings(correction, alone, TRAIN, VALIDATION, [dates.reader.full_size], errors)
    assert max(left(errors, dates, replace(correction), 18)) < 0.6
