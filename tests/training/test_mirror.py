"""A mirror at the equator: what is mirrored is corrected alike, and both hemispheres teach one set of weights."""

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_spec
from stores import make_store
from training.fitting import SIZES, TRAIN, VALIDATION, alike, linear_of, nothing

from ensemble_ml.config import ModelConfig
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import make_network
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import Linear, fit_linear
from ensemble_ml.training.point_fit import Correction, Points
from ensemble_ml.training.residual_fit import fit_residuals

pytestmark = pytest.mark.usefixtures("whole_fits")

_HALF_A_YEAR = 365.2425 / 2
_SINE_OF_LATITUDE = -1 - 8  # its weight: before those of seven other common planes and of the constant
SOUTH = slice(5, None)  # of nine rows


@pytest.fixture(scope="module")
def dates(tmp_path_factory):
    """Of northward wind and the temperature of the air at the ground."""
    path = tmp_path_factory.mktemp("mirror") / "a.zarr"
    store = make_store(path, dates=20, members=6, variables=("v",), shape=(9, 16), bias=0.6, dispersion=0.6)
    grid, lead = store.layout.grid, store.layout.lead_hours[-1]
    config = ModelConfig(hidden=8, depth=1, surroundings=32, residuals=32)
    spec = ModelSpec(config, ("v",), (500,), ("t2m",), (lead,), (lead,), grid.latitude, grid.longitude)
    return Dates(Reader(store, spec), 3)


def mirrored(values):
    """Fields (..., 3, Y, X) of v, u, v10 as the mirror shows them."""
    return values.flip(-2) * torch.tensor([-1.0, 1.0, -1.0])[:, None, None]


def test_the_mirrored_ensemble_in_the_other_season_gets_the_mirrored_correction():
    spec = make_spec(8, variables=("v", "u"), levels=(500,), surface=("v10",), leads_out=(24,))  # no row on the equator
    rng = np.random.default_rng(0)
    climate = make_climate(spec)
    weight = rng.normal(0, 0.1, correction_shape(spec))
    for name in ("surroundings_first", "residuals_first"):
        getattr(climate, name)[:] *= 5
        getattr(climate, name)[:, _SINE_OF_LATITUDE] = 0
    module = LinearCorrection(spec, weight + weight[::-1])
    networks = (make_network(spec, vars(climate), name) for name in ("surroundings", "residuals"))
    level = torch.full((1, 3, 8, 16), 1.5)
    linear = Linear(module, 0 * level, level, torch.full((1, 3), 2.0))
    correction = Correction(linear, *networks, position_planes(spec, np.zeros((0, 8, 16), np.float32)))

    mean = torch.from_numpy(rng.normal(0, 1, level.shape)).float()
    spread = torch.from_numpy(rng.uniform(1, 2, level.shape)).float()
    here = Sample(mean, spread, spread, 40.0)
    there = Sample(mirrored(mean), spread.flip(-2), spread.flip(-2), 40.0 + _HALF_A_YEAR)
    shift, more = correction(here, 3)
    shift_there, more_there = correction(there, 3)
    v, w = correction.expected_errors(here, 3)
    v_there, w_there = correction.expected_errors(there, 3)
    assert min(float(values.abs().max()) for values in (shift, more, v, w)) > 0.1
    for found, wanted in ((shift_there, mirrored(shift)), (v_there, mirrored(v))):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for found, wanted in ((more_there, more.flip(-2)), (w_there, w.flip(-2))):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_single_points_are_seen_as_the_field_shows_them(dates):
    correction = nothing(dates)
    module, network = correction.linear.module, correction.surroundings
    draw = torch.Generator().manual_seed(1)
    for weight in (module.weight, network.first, network.second):
        weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    sample = dates.sample(3)
    inputs, _, done = Points(correction, dates, lambda *_: (sample.mean, sample.mean)).at(
        3, sample, 3, torch.arange(144)
    )
    padded = correction.linear.padded(sample.mean, sample.spread, 3)
    torch.testing.assert_close(done, module(padded, torch.tensor([3.0]))[0].flatten(1))
    of_field = correction.of(network, padded, sample, 3)[0].flatten(1)
    torch.testing.assert_close(network.at_points(inputs), of_field, rtol=1e-4, atol=1e-5)


def test_one_set_of_weights_is_found_from_both_hemispheres(dates):
    true, found = linear_of(dates, alike(dates)), linear_of(dates)

    def errors(_date, sample, members):
        return true(sample.mean, sample.spread, members)

    fit_linear(found, dates, TRAIN, VALIDATION, SIZES, errors)
    found.module.weight[:] = found.module.weight.mean(0)  # nothing that a band has for itself
    sample = dates.sample(18)
    for wanted, got in zip(errors(18, sample, 3), found(sample.mean, sample.spread, 3), strict=True):
        assert float(((wanted - got) ** 2).sum() / (wanted**2).sum()) < 0.02


def test_a_hemisphere_without_truth_is_corrected_as_the_other_one_is(dates):
    true, found = linear_of(dates, alike(dates)), linear_of(dates)

    def errors(_date, sample, members):
        mean, spread = true(sample.mean, sample.spread, members)
        mean[..., SOUTH, :] = torch.nan
        return mean, spread

    fit_linear(found, dates, TRAIN, VALIDATION, SIZES, errors)
    sample = dates.sample(18)
    wanted, got = true(sample.mean, sample.spread, 3)[0][..., SOUTH, :], found(sample.mean, sample.spread, 3)[0]
    assert float(((wanted - got[..., SOUTH, :]) ** 2).sum() / (wanted**2).sum()) < 0.1


def test_errors_of_northward_wind_are_expected_with_their_sign_on_both_sides(dates):
    correction = nothing(dates)
    linear = correction.linear

    def expected(sample):
        """In sigmas; of northward wind turned south of the equator."""
        apart = 1.5 * (((sample.mean - linear.anchor) / linear.typical).abs() > 0.7)
        apart[:, 0, SOUTH] *= -1
        return apart

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (0.5 * noise + expected(sample)) * sample.full_spread, torch.zeros_like(sample.mean)

    flat = torch.zeros(linear.anchor.shape)
    by_field = flat[..., 0, 0]
    dry = by_field + 1, by_field
    assert fit_residuals(
        correction, dates, TRAIN, SIZES, errors, lambda s, _: s.full_spread, by_field + 1e-6, flat, dry
    )
    sample = dates.sample(18)
    wanted, found = expected(sample)[:, 0], correction.expected_errors(sample, 3)[0][:, 0]
    for rows in (slice(0, 5), SOUTH):
        slope = float((wanted * found)[:, rows].sum() / (wanted[:, rows] ** 2).sum())
        assert slope > 0.4
