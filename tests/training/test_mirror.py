"""A mirror at the equator: what is mirrored is corrected alike, and both hemispheres teach one set of weights."""

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_spec
from stores import make_store
from training.fitting import SIZES, TRAIN, VALIDATION, added, alike, know, said, start_of, typical_of

from ensemble_ml.config import ModelConfig
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.linear import correction_shape
from ensemble_ml.models.model import Start
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import fit_linear
from ensemble_ml.training.point_targets import Points, fit_points

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
    config = ModelConfig(hidden=8, depth=1, points=32)
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
    climate.points_first[:] *= 5
    climate.points_second[:] *= 3
    climate.points_first[:, _SINE_OF_LATITUDE] = 0
    climate.correction = weight + weight[::-1]
    start = Start(spec, climate)
    know(start, anchor=0.0, climatology=1.5, shrink=2.0, spread_shrink=2.0)

    mean = torch.from_numpy(rng.normal(0, 1, (1, 3, 8, 16))).float()
    spread = torch.from_numpy(rng.uniform(1, 2, (1, 3, 8, 16))).float()
    here = Sample(mean, spread, spread, 40.0)
    there = Sample(mirrored(mean), spread.flip(-2), spread.flip(-2), 40.0 + _HALF_A_YEAR)
    shift, more = added(start, here, 3)
    shift_there, more_there = added(start, there, 3)
    wider, v, w = said(start, here, 3)
    wider_there, v_there, w_there = said(start, there, 3)
    assert min(float(values.abs().max()) for values in (shift, more, wider, v, w)) > 0.1
    for found, wanted in ((shift_there, mirrored(shift)), (v_there, mirrored(v))):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for found, wanted in ((more_there, more.flip(-2)), (wider_there, wider.flip(-2)), (w_there, w.flip(-2))):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_single_points_are_seen_as_the_field_shows_them(dates):
    start = start_of(dates)
    module, network = start.linear, start.points
    draw = torch.Generator().manual_seed(1)
    for weight in (module.weight, network.first, network.second):
        weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    sample = dates.sample(3)
    points = Points(start, dates, lambda *_: (sample.mean, sample.mean), None)
    inputs, ((left,),) = points.take(3, sample, 3, torch.arange(144))
    wanted = sample.mean - added(start, sample, 3)[1]
    torch.testing.assert_close(left, (wanted / typical_of(start)).flatten(2).flatten(0, 1), rtol=1e-4, atol=1e-5)
    wanted = said(start, sample, 3).flatten(3).flatten(1, 2).clone()
    wanted[1] = module.in_mirror(torch.cat([wanted[1], wanted[2]]), torch.arange(144) // 16).chunk(2)[0]
    at_points = network(inputs[None, ..., None])[0, ..., 0]
    torch.testing.assert_close(at_points, wanted.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_one_set_of_weights_is_found_from_both_hemispheres(dates):
    true, found = start_of(dates, alike(dates)), start_of(dates)

    def errors(_date, sample, members):
        return added(true, sample, members)

    fit_linear(found, dates, TRAIN, VALIDATION, SIZES, errors)
    found.linear.weight[:] = found.linear.weight.mean(0)  # nothing that a band has for itself
    sample = dates.sample(18)
    for wanted, got in zip(errors(18, sample, 3), added(found, sample, 3), strict=True):
        assert float(((wanted - got) ** 2).sum() / (wanted**2).sum()) < 0.02


def test_a_hemisphere_without_truth_is_corrected_as_the_other_one_is(dates):
    true, found = start_of(dates, alike(dates)), start_of(dates)

    def errors(_date, sample, members):
        mean, spread = added(true, sample, members)
        mean[..., SOUTH, :] = torch.nan
        return mean, spread

    fit_linear(found, dates, TRAIN, VALIDATION, SIZES, errors)
    sample = dates.sample(18)
    wanted, got = added(true, sample, 3)[0][..., SOUTH, :], added(found, sample, 3)[0]
    assert float(((wanted - got[..., SOUTH, :]) ** 2).sum() / (wanted**2).sum()) < 0.1


def test_errors_of_northward_wind_are_expected_with_their_sign_on_both_sides(dates):
    start = start_of(dates)

    def expected(sample):
        """In sigmas; of northward wind turned south of the equator."""
        apart = 1.5 * (((sample.mean - start.heads.anchor) / typical_of(start)).abs() > 0.7)
        apart[:, 0, SOUTH] *= -1
        return apart

    def errors(date, sample, members):
        noise = torch.randn(sample.mean.shape, generator=torch.Generator().manual_seed(1000 * int(date) + members))
        return (0.5 * noise + expected(sample)) * sample.full_spread, torch.zeros_like(sample.mean)

    know(start, shrink=1e-6)
    assert fit_points(start, dates, TRAIN, VALIDATION, SIZES, errors, lambda s, _: s.full_spread)
    sample = dates.sample(18)
    wanted, found = expected(sample)[:, 0], said(start, sample, 3)[1][:, 0]
    for rows in (slice(0, 5), SOUTH):
        slope = float((wanted * found)[:, rows].sum() / (wanted[:, rows] ** 2).sum())
        assert slope > 0.4
