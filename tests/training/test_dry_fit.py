"""How often and how much it rains where the corrected forecast says that it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stores import make_store

from ensemble_ml import distributions
from ensemble_ml.config import ModelConfig
from ensemble_ml.fields import Family
from ensemble_ml.loading import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.heads import law_near_zero
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.smoothing import Scales
from ensemble_ml.training.truth_fit import Truth

pytestmark = pytest.mark.usefixtures("whole_fits")

SHAPE = (16, 32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("dry") / "a.zarr"
    names = ("t2m", "tp")
    return make_store(path, dates=12, members=4, shape=SHAPE, variables=(), levels=(), surface=names)


def truth_of(store, law="csgamma", **config):
    leads, grid = tuple(store.layout.lead_hours[-2:]), store.layout.grid
    config = ModelConfig(hidden=8, depth=1, points=0, families={"tp": law}, **config)
    spec = ModelSpec(config, (), (), ("t2m", "tp"), leads, leads, grid.latitude, grid.longitude)
    made = object.__new__(Truth)
    made.dates, made.scales = Dates(Reader(store, spec), 3), Scales(spec.grid)
    made.dry = torch.ones(made.dates.shape), torch.zeros(made.dates.shape)
    return made


def drizzle(draw, dry=0.5):
    """Truth, corrected mean, s0 and v, w (T, F, Y, X): a share of the points is forecast dry, and a third of these is
    not; a tenth of all points have no truth."""
    centre = torch.rand(2, 2, *SHAPE, generator=draw) - dry
    rain = torch.where(torch.rand(centre.shape, generator=draw) < 1 / 3, 0.12, 0.0)
    truth = torch.where(centre <= 0, rain, centre)
    truth = torch.where(torch.rand(centre.shape, generator=draw) < 0.1, torch.nan, truth)
    return truth, centre, torch.full_like(centre, 0.5), torch.zeros(2, 2, 2, *SHAPE)


def given(made, monkeypatch, **how):
    """Let all that `made` asks of a date be such."""
    draw = torch.Generator().manual_seed(0)
    dates = [drizzle(draw, **how) for _ in range(12)]
    monkeypatch.setattr(Truth, "_uninformed", lambda _self, date: (None, *dates[date][1:]))
    monkeypatch.setattr(made.dates, "target", lambda _part, date: dates[date][0])


@pytest.mark.parametrize("law", ["csgamma", "censored_normal"])
def test_the_law_of_a_dry_forecast_rains_as_the_truth_does(store, law, monkeypatch):
    truth = truth_of(store, law)
    given(truth, monkeypatch)
    inflation = torch.full((2, 2, *SHAPE), 0.4)
    truth.learn_dry(inflation, np.arange(12))
    share, least = (values[:, 1] for values in truth.dry)
    sigma, family = 0.5 * inflation[:, 1, 0, 0].exp(), Family(law)
    location, scale = law_near_zero(family, torch.zeros(2), sigma, share, least)
    chance = 1 - distributions.cdf(family, location, scale, torch.zeros(2))
    torch.testing.assert_close(chance, torch.full((2,), 1 / 3), rtol=0.08, atol=0)
    torch.testing.assert_close(
        distributions.moments(family, location, scale)[0], torch.full((2,), 0.04), rtol=0.08, atol=0
    )
    assert (truth.dry[0][:, 0] == 1).all() and (truth.dry[1][:, 0] == 0).all()  # a normal law has no mass anywhere


def test_few_dry_points_say_nothing(store, monkeypatch):
    truth = truth_of(store)
    given(truth, monkeypatch, dry=0.15)
    for count in (5, 12):  # some 70 dry points a date
        truth.learn_dry(torch.zeros(2, 2, *SHAPE), np.arange(count))
        assert bool((truth.dry[1][:, 1] > 0).all()) is (count == 12) is bool((truth.dry[0][:, 1] < 1).all())


@pytest.mark.parametrize("law, told", [("truncated_normal", True), ("lognormal", True), ("csgamma", False)])
def test_a_law_that_knows_no_zero_is_told_of_where_the_truth_is_often_zero(store, law, told, monkeypatch, caplog):
    truth = truth_of(store, law)
    values = torch.ones(2, 2, *SHAPE)
    values[:, :, :2] = torch.nan
    values[:, 1, 2:, ::4] = 0
    monkeypatch.setattr(truth.dates, "target", lambda *_: values)
    truth.tell_of_zeros(np.arange(3))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([f"tp: the truth is zero at 25 % of the points, but the {law} distribution has no mass there;"
                      " 'model.families={tp: censored_normal}' gives one that has"] if told else [])  # fmt: skip


def test_a_climate_holds_what_its_validation_dates_said(store, monkeypatch):
    spec = truth_of(store, linear=False).dates.spec
    reader = Reader(store, spec)
    seen = []
    real = Truth.learn_dry

    def watched(self, inflation, chosen):
        real(self, inflation, chosen)
        seen.append((self, chosen))
        self.dry[0][:, 1], self.dry[1][:, 1] = 0.3, 0.25

    monkeypatch.setattr(Truth, "learn_dry", watched)
    fit = fit_climate(reader, np.arange(9), np.arange(9, 12), 3, (3,))
    assert [chosen.tolist() for _, chosen in seen] == [[9, 10, 11]]  # without a network there is nothing to fit again
    np.testing.assert_allclose(fit.climate.dry_share, [[1, 0.3]] * 2)
    np.testing.assert_allclose(fit.climate.dry_mean, [[0, 0.25]] * 2)
