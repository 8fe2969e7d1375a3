"""The fit of the sharpness: how errors grow is found on dates not seen, noise is left alone, sizes differ."""

import logging

import numpy as np
import pytest
import torch
from training.test_surroundings_fit import SIZES, TRAIN, VALIDATION, nothing  # noqa: F401: a fixture

from ensemble_ml.fields import Family
from ensemble_ml.models import distributions
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.sharpness_fit import fit_sharpness

NO_SHRINK, FLAT = 1e-6, 0.0


def growing(correction, by=1.0):
    """Errors whose size goes with that of the departure of the mean."""

    def errors(date, sample, members):
        linear = correction.linear
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        apart = ((sample.mean - linear.anchor) / linear.typical).abs()
        sigma = torch.exp(by * (apart - apart.mean()) / apart.std())
        return noise * sigma * linear.typical, torch.zeros_like(sample.mean)

    return errors


def fitted(point_dates, correction, errors, **changes):
    shape = correction.linear.anchor.shape
    shrink, inflation = torch.full(shape[:2], NO_SHRINK), torch.full(shape, FLAT)
    given = {"train": TRAIN, "sizes": SIZES} | changes
    return fit_sharpness(correction, point_dates, given["train"], given["sizes"], errors, shrink, inflation)


def costs(point_dates, correction, errors, date):
    """CRPS with what the network says over that with the best constant."""
    sample = Dates(point_dates.reader, 3).sample(date)
    error = errors(date, sample, 3)[0]
    wide = correction.sharper(sample, 3)
    factors = torch.linspace(-2, 2, 81).exp()

    def crps(scale):
        return min(float(distributions.crps(Family.NORMAL, torch.zeros(()), f * scale, error).mean()) for f in factors)

    return crps(sample.full_spread * wide.exp()), crps(sample.full_spread)


def test_how_errors_grow_is_found_on_dates_not_seen(point_dates):
    correction = nothing(point_dates)
    errors = growing(correction)
    assert fitted(point_dates, correction, errors)
    both = [costs(point_dates, correction, errors, date) for date in VALIDATION]
    assert sum(a for a, _ in both) < 0.93 * sum(b for _, b in both)


def test_errors_of_one_size_are_left_alone(point_dates):
    correction = nothing(point_dates)
    errors = growing(correction, by=0.0)
    assert fitted(point_dates, correction, errors)
    both = [costs(point_dates, correction, errors, date) for date in VALIDATION]
    assert sum(a for a, _ in both) < 1.02 * sum(b for _, b in both)


def test_it_learns_what_sigma_lacks_of_each_number_of_members(point_dates):
    """Errors with one member are three times as large: 1/M and log M are all that tells."""
    correction = nothing(point_dates)

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return noise * sample.full_spread * (3.0 if members == 1 else 1.0), torch.zeros_like(sample.mean)

    assert fitted(point_dates, correction, errors)
    wide = [float(correction.sharper(Dates(point_dates.reader, m).sample(18), m).mean()) for m in (1, 3)]
    assert wide[0] - wide[1] == pytest.approx(np.log(3), abs=0.25)


def test_what_is_missing_is_not_learned_from(point_dates):
    correction = nothing(point_dates)
    errors = growing(correction)

    def gaps(date, sample, members):
        error, more = (values.clone() for values in errors(date, sample, members))
        if date < 8:
            error[:, 0] = torch.nan
        return error, more

    assert fitted(point_dates, correction, gaps)
    assert torch.isfinite(correction.sharpness.second).all()
    both = [costs(point_dates, correction, errors, date) for date in VALIDATION]
    assert sum(a for a, _ in both) < 0.97 * sum(b for _, b in both)


def test_few_dates_give_none_and_say_so(point_dates, caplog):
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, correction, growing(correction), train=TRAIN[:6])
    assert "sharpness: 6 dates are too few, so nothing is added" in caplog.text
    assert not correction.sharpness.second.any()


def test_too_little_memory_gives_none_and_says_so(point_dates, monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.training.point_fit.memory_limit", lambda: 1 << 20)
    correction = nothing(point_dates)
    with caplog.at_level(logging.INFO):
        assert not fitted(point_dates, correction, growing(correction))
    assert "memory holds fewer than 20000 points" in caplog.text
