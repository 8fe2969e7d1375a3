"""The fits leave out what is missing: start dates without a field, and points without a value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from stores import make_store

from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.features import unbiased_spread
from ensemble_ml.store import PackedBlock, Part, StoreWriter, open_store
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.linear_fit import mean_state, telling
from ensemble_ml.training.smoothing import Scales
from ensemble_ml.training.truth_fit import Truth

pytestmark = pytest.mark.usefixtures("whole_fits")

GONE = (1, 4, 5, 10, 11, 17)  # start dates without msl, 15 of 20 for training
TRAIN, TEST = np.arange(16), np.arange(16, 20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gaps") / "whole.zarr"
    names = ("t2m", "msl")
    return make_store(
        path, dates=20, members=8, leads=(24, 48), variables=("t",), levels=(500,), surface=names, bias=0.4
    )


def land(shape):
    """True in a third of the columns, more of them in the north."""
    rows, columns = np.indices(shape)
    return columns < shape[1] // 3 + (shape[0] - rows) // 2


def copy(store, path, *, gone=(), mask=None, constant=()):
    """The store without msl on the dates `gone`, without values of msl where `mask`, one value on dates `constant`."""
    parts = [Part.FORECAST, Part.TRUTH]
    with StoreWriter(path, store.layout, parts=parts) as writer:
        for date in range(len(store.layout.init_time)):
            for part in parts:
                fields = store.read(part, date)
                if date in constant:
                    fields.surface[:, :, 1] = 101325.0
                there = np.ones(fields.surface.shape[:-2], bool)
                there[:, :, 1] = date not in gone
                points = np.zeros(fields.surface.shape, bool)
                if mask is not None:
                    points[:, :, 1] = mask
                surface = PackedBlock.plain(np.where(points, np.nan, fields.surface), there, points)
                writer.write(part, date, PackedBlock.plain(fields.pressure), surface)
    return open_store(path)


def reader_of(store, **more):
    lay = store.layout
    grid = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    model = ModelConfig(hidden=8, max_hidden=8, depth=0, linear=False)
    spec = ModelSpec(model, lay.variables, lay.levels, lay.surface, lay.lead_hours, (24, 48), *grid, **more)
    return Reader(store, spec)


@pytest.mark.slow
def test_spreads_of_the_members_that_are_given_are_no_target(tmp_path):
    """Half of the dates have no more members than are looked at: they say nothing of what the others would add."""
    few = range(0, 16, 2)
    made = dict(dates=20, members=8, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m",))
    gone = [(Part.FORECAST, date, member, name) for date in few for member in range(3, 8) for name in ("t", "t2m")]
    stores = make_store(tmp_path / "whole.zarr", **made), make_store(tmp_path / "few.zarr", **made, absent=gone)
    readers = [reader_of(store) for store in stores]
    assert torch.isnan(Dates(readers[1], 3).sample(0).full_spread).all()
    assert torch.isfinite(Dates(readers[1], 2).sample(0).full_spread).all()
    assert torch.isnan(Dates(readers[0], 8).sample(0).full_spread).all()  # it is the input
    assert torch.isfinite(Dates(readers[0], 7).sample(0).full_spread).all()
    others = np.array([date for date in TRAIN if date not in few])
    wanted, found = (
        fit_climate(reader, dates, TEST, 3, [2, 3]) for reader, dates in ((readers[0], others), (readers[1], TRAIN))
    )
    for name, fields in (("spread_gain", slice(None)), ("spread_shrink", slice(0, 1))):
        ours, theirs = (getattr(one.climate, name)[:, fields] for one in (found, wanted))
        np.testing.assert_allclose(ours, theirs, rtol=0.03)
    np.testing.assert_allclose(found.spread_error[3], wanted.spread_error[3], rtol=0.1)


def test_members_that_never_differ_leave_sigma_to_the_climate(tmp_path):
    """A sea surface that all members were given: its errors are far larger than its spread, whatever k."""
    made = dict(dates=20, members=6, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m", "sst"))
    store = make_store(tmp_path / "alike.zarr", **made, bias=0.6, dispersion=0.6, alike=("sst",))
    found = fit_climate(reader_of(store), TRAIN, TEST, 3, [2, 3, 5]).climate
    assert (found.shrink[:, 2] == 64).all() and (found.shrink[:, 1] < 64).all()


def test_inflation_has_no_bound_of_its_own_where_members_never_differ(tmp_path, monkeypatch):
    """Their s0 is far too small everywhere, so that all squared errors are many times its square."""
    made = dict(dates=20, members=6, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m", "sst"))
    store = make_store(tmp_path / "alike.zarr", **made, bias=0.6, dispersion=0.6, alike=("sst",))
    seen, inflation = [], Truth.inflation
    monkeypatch.setattr(Truth, "inflation", lambda self: seen.append((self, inflation(self))) or seen[-1][1])
    fit_climate(reader_of(store), TRAIN, TEST, 3, [2, 3, 5])
    truth, found = seen[0]
    assert (found[:, 2] > 0.5 * np.log(25)).all() and (found[:, 0] < 0.5 * np.log(25)).all()
    squares = []
    for date in TRAIN:
        actual, centre, followed = truth._unseen(truth.dates.sample(date), date)
        squares.append(((actual - centre) / (truth.spread.s0(followed) * found.exp())) ** 2)
    np.testing.assert_allclose(torch.stack(squares).mean((0, -1, -2)), 1, rtol=0.15)


def test_a_choice_of_residuals_needs_errors_of_the_mean_alone(tmp_path):
    """Dates to choose by that have no more members than are shown: spreads of others are not known on them."""
    made = dict(dates=20, members=6, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m",))
    gone = [(Part.FORECAST, date, member, name) for date in TEST for member in (3, 4, 5) for name in ("t", "t2m")]
    dates = Dates(reader_of(make_store(tmp_path / "few.zarr", **made, absent=gone)), 3)

    def targets(date, sample, _members):
        return dates.target(Part.TRUTH, date) - sample.mean, sample.full_spread

    assert telling(dates, targets, TEST).tolist() == []
    assert telling(dates, targets, TEST, kinds=(0,)).tolist() == TEST.tolist()
    # Of the full ensemble no date can tell of the spread: those of the user's choice are kept for the mean.
    whole = np.asarray(TRAIN)[:2]
    assert telling(dates.of(6), targets, whole).tolist() == whole.tolist()


@pytest.mark.slow
def test_dates_to_choose_by_in_which_nothing_happens_choose_nothing(whole, tmp_path):
    """msl is the same for members and truth on all of them: how wide it should be is for training dates to say."""
    still = copy(whole, tmp_path / "still.zarr", constant=TEST)
    wanted, found = (fit_climate(reader_of(store), TRAIN, TEST, 4, [4]).climate for store in (whole, still))
    apart = found.inflation[:, 2] - wanted.inflation[:, 2]
    assert np.abs(apart).mean() < 0.25
    np.testing.assert_allclose(found.inflation[:, 1], wanted.inflation[:, 1], atol=1e-3)


@pytest.mark.slow
def test_corrections_are_kept_where_dates_to_choose_by_lack_a_target(tmp_path, caplog):
    """They have three of six members whole: the spread of all is that of the three, and no target."""
    made = dict(dates=20, members=6, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m",))
    gone = [(Part.FORECAST, date, member, name) for date in TEST for member in (3, 4, 5) for name in ("t", "t2m")]
    store = make_store(tmp_path / "few.zarr", **made, bias=0.6, dispersion=0.6, absent=gone)
    reader = reader_of(store)
    config = replace(reader.spec.config, linear=True, points=8)
    with caplog.at_level("INFO"):
        found = fit_climate(Reader(store, replace(reader.spec, config=config)), TRAIN, TEST, 3, [2, 3]).climate
    assert (found.spread_shrink == 2).all()
    means, spreads = np.split(np.abs(found.correction).max((0, 1, 3, 4, 5)), 2)
    assert (means > 0).any() and (spreads > 0).any()
    assert "100.0 %" not in caplog.text


@pytest.mark.slow
def test_a_network_learns_nothing_of_a_spread_without_any_target(tmp_path, caplog):
    """Three of four members are whole on all dates, and training shows no fewer: of spreads nothing can be learned."""
    made = dict(dates=20, members=4, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m",))
    gone = [(Part.FORECAST, date, 3, name) for date in range(20) for name in ("t", "t2m")]
    store = make_store(tmp_path / "three.zarr", **made, bias=0.6, dispersion=0.6, absent=gone)
    reader = reader_of(store)
    config = replace(reader.spec.config, linear=True, points=8)
    with caplog.at_level("INFO"):
        found = fit_climate(Reader(store, replace(reader.spec, config=config)), TRAIN, TEST, 3, [3]).climate
    assert "point network: fitted to" in caplog.text
    spreads, *errors = np.split(found.points_second, 3)
    assert not spreads.any() and all(np.isfinite(some).all() and some.any() for some in errors)


def only(dates):
    return [date for date in dates.tolist() if date not in GONE]


@pytest.mark.slow
def test_a_date_without_a_field_counts_for_nothing(whole, tmp_path):
    gappy = copy(whole, tmp_path / "gappy.zarr", gone=GONE)
    found = fit_climate(reader_of(gappy), TRAIN, TEST, 5, sizes=[1, 5])
    fewer = fit_climate(reader_of(whole), only(TRAIN), only(TEST), 5, sizes=[1, 5])
    every = fit_climate(reader_of(whole), TRAIN, TEST, 5, sizes=[1, 5])
    for name in ("spread_shrink", "spread_gain", "spread_level", "shrink"):
        ours, subset, full = (getattr(fit.climate, name)[:, 1:] for fit in (found, fewer, every))
        np.testing.assert_allclose(ours[:, 1], subset[:, 1], rtol=2e-3, err_msg=name)
        np.testing.assert_allclose(ours[:, 0], full[:, 0], rtol=2e-3, err_msg=name)
    # packing anew moves a value by half a step; a date counted as zero would move these by a third
    np.testing.assert_allclose(found.climate.spread[:, 2], fewer.climate.spread[:, 2], rtol=2e-3)
    np.testing.assert_allclose(found.spread_error[5, :, 2], fewer.spread_error[5, :, 2], rtol=5e-3)
    np.testing.assert_allclose(found.climate.std[2], fewer.climate.std[2], rtol=1e-3)
    assert all(np.isfinite(values).all() for values in vars(found.climate).values())


def test_points_without_a_value_count_for_nothing(whole, tmp_path):
    mask = land(whole.layout.grid.shape)
    masked = copy(whole, tmp_path / "masked.zarr", mask=mask)
    assert masked.masked == ("msl",)
    climate = fit_climate(reader_of(masked), TRAIN, [], 5).climate.checked(reader_of(masked).spec)
    spreads = np.stack([masked.read(Part.SPREAD, int(d)).surface[0, :, 1] for d in TRAIN]).astype(float)
    area = np.where(mask, 0, whole.layout.grid.area_weights())
    level = np.nansum(spreads * area, (-2, -1)).sum(0) / area.sum()
    variance = np.where(mask, np.nan, (np.where(mask, 0, spreads) ** 2).mean(0))
    clim = np.sqrt(variance)
    expected = level / (len(TRAIN) * np.nansum(clim * area, (-2, -1)) / area.sum())
    # few dates: s_clim is smoothed by a cell, so it is no exact oracle here
    np.testing.assert_allclose(climate.spread_level[:, 2], expected, rtol=0.01)
    few = sum(_expected_spread(masked, int(d), area) for d in TRAIN)
    np.testing.assert_allclose(climate.spread_gain[:, 2], level / few, rtol=1e-4)
    assert climate.mean[2] == pytest.approx(_mean_of_values(masked), rel=1e-6)


def _expected_spread(store, date, area):
    """Mean over the points with values of s / c4(5), (T,)."""
    spread = store.read(Part.FORECAST, date).surface[:5, :, 1].astype(float).std(0, ddof=1)
    one = torch.ones(1)
    args = torch.from_numpy(spread)[None], torch.tensor([5.0]), torch.ones(1), torch.tensor(1e-30), one, one
    values = unbiased_spread(*args)[0].numpy()
    return np.where(area > 0, values * area, 0).sum((-2, -1)) / area.sum()


def _mean_of_values(store):
    return np.nanmean(np.stack([store.read(Part.FORECAST, int(d)).surface[:, :, 1].astype(float) for d in TRAIN]))


def test_the_spread_of_all_members_of_which_one_is_incomplete_is_no_target(tmp_path):
    made = dict(dates=2, members=8, leads=(24, 48), variables=("t",), levels=(500,), surface=("t2m",))
    dates = Dates(reader_of(make_store(tmp_path / "a.zarr", **made, absent=[(Part.FORECAST, 0, 2, "t2m")])), 8)
    sample = dates.sample(0)
    assert torch.isfinite(sample.spread[:, 0]).all() and torch.isnan(sample.full_spread).all()
    assert torch.isfinite(dates.of(6).sample(0).full_spread).all()


def test_means_over_points_that_are_there(whole):
    scales = Scales(whole.layout.grid)
    z = torch.randn(2, *whole.layout.grid.shape, generator=torch.Generator().manual_seed(0))
    z[1, :, :5] = torch.nan
    there = torch.isfinite(z)
    area = torch.from_numpy(whole.layout.grid.area_weights())[:, 5:]
    assert scales.mean(z, there)[1] == pytest.approx(float((z[1, :, 5:] * area).sum() / area.sum()), rel=1e-5)
    filled = scales.filled(z)
    assert torch.equal(filled[0], z[0]) and torch.isfinite(filled).all()
    assert scales.mean(filled)[1] == pytest.approx(float(scales.mean(z, there)[1]), rel=1e-4)
    assert torch.isnan(scales.mean(z, torch.zeros_like(there))).all()


def test_a_sample_of_a_missing_field_is_not_a_number(whole, tmp_path):
    gappy = copy(whole, tmp_path / "gappy.zarr", gone=GONE)
    sample = Dates(reader_of(gappy), 5).sample(1)
    assert torch.isnan(sample.spread[:, 2]).all() and torch.isfinite(sample.spread[:, :2]).all()


def test_an_absent_member_is_not_one_of_masked_points(tmp_path):
    lacking = [(Part.FORECAST, 1, member, "t") for member in range(2, 8)]
    made = make_store(
        tmp_path / "s.zarr", dates=3, members=8, leads=(24, 48), variables=("t",), levels=(500,),
        surface=("msl",), masked=("msl",), absent=lacking,
    )  # fmt: skip
    dates = Dates(reader_of(made, masked=("msl",)), 5)
    whole, fewer = dates.sample(0), dates.sample(1)
    assert torch.isfinite(whole.mean[:, 0]).all() and torch.isfinite(whole.mean[:, 1]).any()
    assert torch.isnan(fewer.mean[:, 0]).all() and torch.isnan(fewer.spread[:, 0]).all()
    assert torch.equal(torch.isnan(fewer.mean[:, 1]), torch.isnan(whole.mean[:, 1]))  # msl has all members


def test_an_incomplete_member_in_place_of_the_withheld_one_is_not_hidden_by_masks(tmp_path):
    made = make_store(
        tmp_path / "s.zarr", dates=2, members=8, leads=(24, 48), variables=("t",), levels=(500,), surface=("msl",),
        masked=("msl",), absent=[(Part.FORECAST, 1, member, "t") for member in range(5, 8)],
    )  # fmt: skip
    reader = Reader(made, reader_of(made, masked=("msl",)).spec, withhold=0)
    sample = Dates(reader, 5).sample(1)  # four complete members are left, so a fifth is incomplete
    assert torch.isnan(sample.mean[:, 0]).all() and torch.isnan(sample.spread[:, 0]).all()
    assert torch.isfinite(Dates(reader, 4).sample(1).mean[:, 0]).all()


def test_too_few_whole_members_are_refused(tmp_path):
    lacking = [(Part.FORECAST, date, member, "t") for date in range(6) for member in range(4, 8)]
    made = make_store(
        tmp_path / "s.zarr", dates=8, members=8, leads=(24, 48), variables=("t",), levels=(500,), surface=(),
        absent=lacking,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"data.validation_members=5: no training date of .* has so many whole members"):
        fit_climate(reader_of(made), range(6), [6, 7], 5)
    fit_climate(reader_of(made), range(6), [6, 7], 4)


@pytest.mark.parametrize("constant", [range(20), range(16, 20)])
def test_fields_that_do_not_vary_do_not_rule_the_loss(whole, tmp_path, constant, caplog):
    """On all dates, or on those that say how large the loss is, as rain in a dry season. The former is told of."""
    dull = copy(whole, tmp_path / "dull.zarr", constant=constant)
    climate = fit_climate(reader_of(dull), TRAIN, TEST, 5).climate
    told = "the same in all members, training dates and points; is the archive whole?" in caplog.text
    assert told == (constant == range(20))
    typical = (climate.spread[:, 2] * whole.layout.grid.area_weights()).mean((-2, -1))
    assert (climate.error[:, 2] > 0.019 * typical).all() and (climate.error[:, 2] < typical).all()
    assert (np.abs(climate.inflation[:, 2]) < 3).all()


def test_the_anchor_of_points_without_a_mean_is_that_of_the_field(whole, tmp_path):
    mask = land(whole.layout.grid.shape)
    dates = Dates(reader_of(copy(whole, tmp_path / "masked.zarr", mask=mask)), 5)
    anchor = mean_state(dates, TRAIN)[:, 2].numpy()
    there = np.where(mask, np.nan, anchor)
    assert np.nanmin(there) < anchor[:, mask].min() and anchor[:, mask].max() < np.nanmax(there)
