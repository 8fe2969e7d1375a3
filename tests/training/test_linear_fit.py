"""The linear correction: found again where errors are linear, absent where they are noise, and by hand at a point."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_input, make_spec
from training.fitting import TRAIN, VALIDATION, added, alike, know, start_of

from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import EnsembleModel, ModelSpec
from ensemble_ml.models.linear import NODES, bands_of, nested_bands
from ensemble_ml.training import linear_sums
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.linear_fit import fit_linear, refuse_unfittable
from ensemble_ml.training.linear_sums import relative_spread, sums_of
from ensemble_ml.training.progress import Progress, Team

pytestmark = pytest.mark.usefixtures("whole_fits")


@pytest.fixture(scope="module")
def dates(store):
    grid, lead = store.layout.grid, store.layout.lead_hours[-1]
    kind = (store.layout.variables[:1], store.layout.levels[:1], store.layout.surface[:1])
    spec = ModelSpec(ModelConfig(hidden=8, depth=1), *kind, (lead,), (lead,), grid.latitude, grid.longitude)
    return Dates(Reader(store, spec), 3)


def left(errors, dates, start, date, members):
    """Share of the squared error that the correction leaves of mean and spread."""
    sample = Dates(dates.reader, members).sample(date)
    shares = []
    for wanted, got in zip(errors(date, sample, members), added(start, sample, members), strict=True):
        shares.append(float(((wanted - got) ** 2).sum() / (wanted**2).sum()))
    return shares


@pytest.mark.slow
def test_linear_errors_are_found_again_for_any_number_of_members(dates):
    true = start_of(dates, alike(dates))

    def errors(_date, sample, members):
        return added(true, sample, members)

    found = start_of(dates)
    fit_linear(found, dates, TRAIN, VALIDATION, [1, 2, 3, 5], errors)
    for members in (2, 3, 6):  # 6 were not shown
        assert max(left(errors, dates, found, 18, members)) < 0.02
    assert left(errors, dates, found, 18, 1)[0] < 0.02  # one member has no spread to depart


def test_a_number_of_members_whose_target_is_never_known_is_taken_to_be_like_the_others(dates):
    """As the spread of all is, on dates that have no more members than are shown."""
    weight = alike(dates).copy()
    weight[:, 1] = 0
    true, found = start_of(dates, weight), start_of(dates)

    def errors(_date, sample, members):
        shift, more = added(true, sample, members)
        return shift, more if members < 5 else torch.full_like(more, torch.nan)

    fit_linear(found, dates, TRAIN, VALIDATION, [3, 4, 5], errors)
    assert max(left(errors, dates, found, 18, 3)) < 0.02


def test_points_count_by_how_large_the_spread_is(dates):
    start = start_of(dates)
    know(start, shrink=1e-6)
    twice = 2 * start.heads.climatology

    def relative(spread, members):
        return relative_spread(start.heads, Sample(spread, spread, spread, 0.0), members)

    torch.testing.assert_close(relative(twice, 3), torch.full_like(twice[0, 0], 2.0))
    torch.testing.assert_close(relative(twice, 1), torch.ones_like(twice[0, 0]))  # one member has no spread
    torch.testing.assert_close(relative(torch.full_like(twice, torch.nan), 3), torch.ones_like(twice[0, 0]))


def test_errors_that_grow_with_the_spread_blur_less_than_their_squares_would(dates, monkeypatch):
    true = start_of(dates, alike(dates))

    def errors(date, sample, members):
        draw = torch.Generator().manual_seed(1000 * int(date) + members)
        noise = relative_spread(true.heads, sample, members) ** 3
        return tuple(v + noise * torch.randn(v.shape, generator=draw) for v in added(true, sample, members))

    def known(_date, sample, members):
        return added(true, sample, members)

    shares = []
    for weighted in (True, False):
        found = start_of(dates)
        with monkeypatch.context() as patch:
            if not weighted:
                patch.setattr(
                    linear_sums, "relative_spread", lambda _, sample, __: torch.ones_like(sample.spread[0, 0])
                )
            fit_linear(found, dates, TRAIN, VALIDATION, [3, 5], errors)
        shares.append(sum(left(known, dates, found, 18, 3)))
    assert shares[0] < 0.9 * shares[1]


def test_what_changes_with_latitude_is_found_but_for_what_bands_blur(dates):
    """Weights that change their sign from hemisphere to hemisphere: one for all finds none of them."""
    weight = alike(dates) * np.sin(np.deg2rad(NODES))[:, None, None, None, None, None]
    true, found = start_of(dates, weight), start_of(dates)

    def errors(_date, sample, members):
        return added(true, sample, members)

    fit_linear(found, dates, TRAIN, VALIDATION, [2, 3, 5], errors)
    assert max(left(errors, dates, found, 18, 3)) < 0.15
    found.linear.weight[:] = found.linear.weight.mean(0)
    assert min(left(errors, dates, found, 18, 3)) > 0.8


def test_bands_of_a_region_are_those_that_it_lies_in():
    assert bands_of(np.array([60.0, 50.0, 40.0])).tolist() == [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]]
    globe = bands_of(np.linspace(90, -90, 49))
    assert len(globe) == len(NODES)
    np.testing.assert_allclose(globe.sum(0), 1)


def test_bands_are_refined_by_pairs_that_the_mirror_shows_in_the_same_place():
    every = [[band] for band in range(9)]
    pairs = [[4], [3, 5], [2, 6], [1, 7], [0, 8]]
    assert nested_bands(np.linspace(90, -90, 49)) == [[list(range(9))], pairs, every]
    assert nested_bands(np.array([60.0, 50.0, 40.0])) == [[[0, 1]], [[0], [1]]]  # 40 and 60: each its own pair
    assert nested_bands(np.array([10.0, 0.0, -10.0])) == [[[0, 1, 2]], [[1], [0, 2]], [[0], [1], [2]]]
    assert nested_bands(np.array([-60.0, -50.0, -40.0])) == [[[0, 1]], [[1], [0]]]  # each once in the south, too
    assert nested_bands(np.array([89.0, 85.0])) == [[[0]]]


def test_noise_is_left_alone(dates):
    def errors(date, sample, _members):
        noise = torch.Generator().manual_seed(int(date))
        return tuple(torch.randn(sample.mean.shape, generator=noise) for _ in range(2))

    found = start_of(dates)
    fit_linear(found, dates, TRAIN, VALIDATION, [1, 3], errors)
    assert max(left(errors, dates, found, 18, 3)) < 1.02


def test_which_dates_chose_is_told(dates, caplog):
    caplog.set_level("INFO")
    for validation, told in ((VALIDATION, "on the validation dates"), (VALIDATION[:0], "on training dates held out")):
        caplog.clear()
        fit_linear(start_of(dates), dates, TRAIN, validation, [3], lambda _d, sample, _m: (sample.mean, sample.mean))
        assert f"linear correction: weighted RMSE {told} " in caplog.text


def test_few_dates_give_no_correction(dates):
    found = start_of(dates)
    fit_linear(found, dates, TRAIN[:6], VALIDATION[:0], [3], lambda _d, sample, _m: (sample.mean, sample.mean))
    assert not found.linear.weight.any()


def test_the_model_adds_what_a_sum_by_hand_gives():
    """At points inside, south of the equator in its mirror, and at the poles, where the rows beyond lie on the other
    side and wind changes its sign."""
    one = {"variables": ("v",), "surface": ("t2m",), "levels": (500,), "leads_in": (24,), "leads_out": (24,)}
    spec = make_spec(**one, local_terms=False, points=0)
    climate = make_climate(spec).checked(spec)
    x = make_input(spec)
    with_, without = (EnsembleModel(spec, climate) for _ in range(2))
    without.linear.weight.zero_()
    added = (with_(x).location - without(x).location)[0, 0, 0]
    typical = np.sqrt(np.mean(climate.spread[0].astype(float) ** 2, (-2, -1))).tolist()
    kinds = []
    for field, unit in enumerate(typical):
        given = x.mean[0, 0, field], x.spread[0, 0, field], climate.anchor[0, field], climate.spread[0, field]
        mean, spread, anchor, clim = (np.asarray(v, float) for v in given)
        k = float(climate.spread_shrink[0, field])
        kinds.append(((mean - anchor) / unit, 2 / (2 + k) * (spread - clim) / unit))
    channels = [kinds[0][0], kinds[1][0], kinds[0][1], kinds[1][1]]
    bands = bands_of(spec.grid.latitude)
    for row, column in ((4, 7), (3, 2), (5, 9), (0, 3), (8, 15)):
        side = -1 if row > 4 else 1
        total, near = 0.0, np.tensordot(bands[:, row], climate.correction, 1)
        weight = near[0] + near[1] / 3
        for c, field in enumerate(channels):
            for i in (-1, 0, 1):
                for j in (-1, 0, 1):
                    y, across, sign = row + i, column + j, 1.0
                    if not 0 <= y <= 8:
                        y, across, sign = (1, across + 8, -1.0) if y < 0 else (7, across + 8, -1.0)
                    sign = sign if c == 0 else side  # of v, which is turned and turned back, and of the others for v
                    total += weight[0, c, 1 + side * i, j + 1] * sign * field[y, across % 16]
        assert float(added[row, column].detach()) == pytest.approx(total * typical[0], rel=1e-3, abs=1e-5)


def test_a_target_that_is_missing_on_some_dates_keeps_its_slopes(dates):
    true = start_of(dates, alike(dates))

    def errors(date, sample, members):
        mean, spread = added(true, sample, members)
        if date < 8:
            mean = mean.clone()
            mean[:, 0] = torch.nan
        return mean, spread

    found = start_of(dates)
    fit_linear(found, dates, TRAIN, VALIDATION, [2, 3, 5], errors)
    sample = Dates(dates.reader, 3).sample(18)
    wanted, got = added(true, sample, 3)[0], added(found, sample, 3)[0]
    assert float(((wanted - got)[:, 0] ** 2).sum() / (wanted[:, 0] ** 2).sum()) < 0.1


def test_sums_that_no_memory_holds_are_refused_before_anything_is_read(dates, monkeypatch):
    refuse_unfittable(dates.spec)
    monkeypatch.setattr("ensemble_ml.training.linear_fit.memory_limit", lambda: 10_000)
    with pytest.raises(UserError, match=r"model.linear=true: its fit to 1 leads of 2 fields takes .* GB"):
        fit_climate(dates.reader, TRAIN, VALIDATION, 3)


class Masked:
    """Rows of a band where the second of two variables has no value at half of the points: as predictor it is zero
    there, as target absent. Each target is two times its own predictor and three times the other's."""

    rounded, bands = False, torch.ones(1, 1)

    def __init__(self, masked):
        predictors, outputs = 9, 2  # one channel a predictor; the first two are the variables
        self.linear = SimpleNamespace(weight=torch.zeros(1, 1, outputs, predictors // 9, 3, 3))
        spec, reader = SimpleNamespace(masked=masked), SimpleNamespace(full_size=9)
        self.dates = SimpleNamespace(spec=spec, reader=reader, progress=Progress(), team=Team())

    def drawn(self, date, size, draw):
        return [None]

    def __call__(self, date, members, chosen):
        draw = torch.Generator().manual_seed(int(date))
        near = torch.randn(9, 40_000, generator=draw)
        sea = torch.arange(40_000) % 2 == 0
        wanted = torch.stack([2 * near[0] + 3 * near[1] * sea, 2 * near[1] + 3 * near[0]])
        there = torch.stack([torch.ones_like(sea), sea])
        return torch.where(torch.arange(9)[:, None] == 1, near * sea, near), wanted * there, there, torch.ones(40_000)

    def shares(self, date, groups):
        return [(slice(None), torch.ones(40_000)) for _ in groups]


def test_a_masked_variable_keeps_its_own_slope():
    sums = sums_of(Masked(("sst",)), np.arange(3), [3], 1 / 3)
    [(gram, right, outputs)] = list(sums.of([0]))
    first = torch.linalg.solve(gram[:9, :9], right[:9])
    assert outputs.all()
    np.testing.assert_allclose(first[:2], [[2.0, 3.0], [3.0, 2.0]], atol=0.1)
