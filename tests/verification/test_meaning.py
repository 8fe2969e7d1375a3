"""What means nothing has no score: each public function refuses it in one line, and lazy data stays lazy until then."""

import dask.array
import numpy as np
import pytest
import scores.probability
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.verification import api, bootstrap, extremes, families, members, probability, score_members
from ensemble_ml.verification.statistics import c4

RNG = np.random.default_rng(0)
X = xr.DataArray(RNG.normal(size=(5, 3, 4)), dims=("realization", "variable", "point"))
Y = xr.DataArray(RNG.normal(size=(3, 4)), dims=("variable", "point"))
ONE = xr.ones_like(Y)
LEVELS = np.linspace(0, 1, 11)
CLIMATE = xr.DataArray(
    np.sort(RNG.normal(size=(11, 4)), axis=0), dims=("quantile", "point"), coords={"quantile": LEVELS}
)


def points(*values, **attrs):
    return xr.DataArray(np.array(values), dims="point", attrs=attrs)


def holding(data, value):
    """The data with one value that means nothing."""
    changed = data.copy()
    changed[{dim: 1 for dim in data.dims}] = value
    return changed


PROBABILITY = "^forecast: holds {}; a probability lies between 0 and 1; divide by 100 what is in per cent$"
EVENT = "^event: holds {}; an event is 0 or 1; make it by comparing, as in truth > threshold$"
PER_CENT = "^{}: its units are '{}'; give a share from 0 to 1, with units 1: divide per cent by 100$"
SCALE = "^scale: holds -1; must be 0 or more"

REFUSED = {
    "brier, per cent": (lambda: api.brier_score(points(50.0, 20.0), points(1.0, 0.0)), PROBABILITY.format(50)),
    "brier, units": (
        lambda: api.brier_score(points(0.5, 0.2, units="%"), points(1, 0, units="1")),
        PER_CENT.format("forecast", "%"),
    ),
    "brier, units spelt": (
        lambda: api.brier_score(points(50.0, 20.0, units="percent"), points(1, 0)),
        PER_CENT.format("forecast", "percent"),
    ),
    "brier, above one": (lambda: api.brier_score(points(1.2, 0.2), points(1, 0)), PROBABILITY.format(1.2)),
    "brier, below zero": (lambda: api.brier_score(points(-0.1, 0.2), points(1, 0)), PROBABILITY.format(-0.1)),
    "brier, event of 2": (lambda: api.brier_score(points(0.2, 0.2), points(2.0, 0.0)), EVENT.format(2)),
    "brier, event of a half": (lambda: api.brier_score(points(0.2, 0.2), points(0.5, 0.0)), EVENT.format(0.5)),
    "brier, event of -1": (lambda: api.brier_score(points(0.2, 0.2), points(-1, 0)), EVENT.format(-1)),
    "brier of arrays": (lambda: probability.brier_score(np.array([3.0]), np.array([True])), PROBABILITY.format(3)),
    "quantile, 90": (lambda: api.quantile_score(Y, Y, level=90), "^level=90: must lie between 0 and 1"),
    "quantile, 0": (lambda: api.quantile_score(Y, Y, level=0), "^level=0: must lie"),
    "quantile, 1": (lambda: probability.quantile_score(Y.values, Y.values, 1.0), "^level=1.0: must lie"),
    "quantile, NaN": (lambda: api.quantile_score(Y, Y, level=np.nan), "^level=nan: must lie"),
    "interval, swapped": (
        lambda: api.crps_ensemble(X, Y, lower=2, upper=1),
        "^lower=2, upper=1: lower must be below upper$",
    ),
    "interval, empty": (lambda: api.crps_ensemble(X, Y, lower=1, upper=1), "^lower=1, upper=1: lower must"),
    "interval, NaN": (lambda: api.crps_ensemble(X, Y, lower=np.nan), "^lower=nan, upper=inf: lower must"),
    "crps above NaN": (
        lambda: api.crps_distribution(Y, ONE, Y, family="normal", lower=np.nan),
        "^threshold=nan: must be a number, or -inf for all values$",
    ),
    "crps above infinity": (
        lambda: api.crps_distribution(Y, ONE, Y, family="csgamma", lower=np.inf),
        "^threshold=inf: must be a number",
    ),
    "ranks among no members": (
        lambda: api.rank_histogram(X[:0], Y),
        "^realization=0: an ensemble has members; 1 or more are needed$",
    ),
    "family": (
        lambda: api.crps_distribution(Y, ONE, Y, family="gauss"),
        "^family=gauss: normal, truncated_normal, .* are allowed$",
    ),
    "fair of one member": (lambda: api.crps_ensemble(X[:1], Y), "^members=1: a fair score .*; 2 or more are needed$"),
    "crps of no member": (lambda: api.crps_ensemble(X[:0], Y, fair=False), "^members=0: .*; 1 or more are needed$"),
    "spread of one member": (
        lambda: api.spread_skill(X[:1], Y),
        "^realization=1: a spread is of several members; 2 or more are needed$",
    ),
    "fair energy of one member": (
        lambda: api.energy_score(X[:1], Y, variable_dim="variable", fair=True),
        "^members=1: a fair score",
    ),
    "energy of another dimension": (
        lambda: api.energy_score(X, Y, variable_dim="level"),
        "^dimension level: not in the data, which has realization, variable, point; give variable_dim$",
    ),
    "variogram of order 0": (
        lambda: api.variogram_score(X, Y, variable_dim="variable", order=0),
        "^order=0: must be above 0, and finite; 0.5 is usual$",
    ),
    "variogram of order -1": (
        lambda: api.variogram_score(X, Y, variable_dim="variable", order=-1),
        "^order=-1: must be above 0",
    ),
    "variogram of one variable": (
        lambda: api.variogram_score(X[:, :1], Y[:1], variable_dim="variable"),
        "^variables=1: a variogram is of pairs of variables; 2 or more are needed$",
    ),
    "log score of a point": (
        lambda: api.log_score(Y, holding(ONE, 0.0), Y, family="normal"),
        "^scale: holds 0; must be above 0: a sure forecast has no density; leave such points out$",
    ),
    "log score": (lambda: api.log_score(Y, holding(ONE, -1.0), Y, family="csgamma"), "^scale: holds -1; must be above"),
    "pit": (lambda: api.pit_histogram(Y, holding(ONE, -1.0), Y, family="normal"), SCALE),
    "pit without bins": (
        lambda: api.pit_histogram(Y, ONE, Y, family="normal", bins=0),
        "^bins=0: values are counted in equal bins; 1 or more are needed$",
    ),
    "pit with parts of bins": (lambda: api.pit_histogram(Y, ONE, Y, family="normal", bins=2.5), "^bins=2.5: "),
    "efi, per cent of levels": (
        lambda: api.efi(X, CLIMATE.assign_coords(quantile=100 * LEVELS)),
        "^levels .*: must ascend from 0 to 1$",
    ),
    "efi, levels swapped": (
        lambda: api.efi(X, CLIMATE.assign_coords(quantile=LEVELS[::-1])),
        "^levels .*: must ascend from 0 to 1$",
    ),
    "efi, quantiles swapped": (
        lambda: api.efi(X, CLIMATE.copy(data=CLIMATE.values[::-1])),
        "^climate: its quantiles fall along the levels; they must ascend with them$",
    ),
    "efi, no such dimension": (
        lambda: api.efi(X, CLIMATE.rename(quantile="level")),
        "^dimension quantile: not in the data, which has level, point; give quantile_dim$",
    ),
    "eecrps, per cent": (lambda: api.eecrps(100 * ONE, ONE), "^index: holds 100; an extreme forecast index lies"),
    "eecrps, units": (lambda: api.eecrps(ONE.assign_attrs(units="%"), ONE), PER_CENT.format("index", "%")),
    "negative weights": (
        lambda: api.weighted_mean(Y, weights=holding(ONE, -2.0)),
        "^weights: holds -2; must be 0 or more; use mask, or 0, to leave points out$",
    ),
    "mask of shares": (
        lambda: api.weighted_mean(Y, mask=holding(ONE, 0.3)),
        "^mask: holds 0.3; a mask is True where a point counts, and False elsewhere$",
    ),
    "mask of NaN": (lambda: api.weighted_mean(Y, mask=holding(ONE, np.nan)), "^mask: holds nan; a mask is True"),
    "areas beyond the poles": (
        lambda: api.area_weights(xr.Dataset(coords={"latitude": [100.0, 0, -100], "longitude": [0.0, 180]})),
        "^latitude: holds 100; latitudes lie between -90 and 90 degrees$",
    ),
    "level of a quantile": (
        lambda: families.quantile(Family.NORMAL, Y.values, ONE.values, 95),
        "^level: holds 95; a level is a probability, 0.9 and not 90$",
    ),
    "probabilities in bins": (lambda: probability.bin_of(np.array([20.0]), 10), "^probability: holds 20; "),
    "no bins": (lambda: probability.bin_of(np.array([0.2]), 0), "^bins=0: "),
    "reliability without bins": (lambda: probability.Reliability.zeros(0), "^bins=0: "),
    "shares of negative counts": (lambda: probability.shares(np.array([1.0, -2.0])), "^counts: holds -2; "),
    "flatness of negative counts": (lambda: probability.flatness(np.array([1.0, -2.0])), "^counts: holds -2; "),
    "pit with random numbers beyond one": (
        lambda: probability.pit(Family.NORMAL, Y.values, ONE.values, Y.values, np.full(Y.shape, 1.5)),
        r"^uniform: holds 1.5; random numbers in \[0, 1\) are needed$",
    ),
    "ranks with random numbers beyond one": (
        lambda: members.rank_of_truth(X.values, Y.values, ONE.values),
        r"^uniform: holds 1; random numbers in \[0, 1\)",
    ),
    "efi of no member": (lambda: extremes.efi(X.values[:0, 0], CLIMATE.values, LEVELS), "^members=0: "),
    "c4 of one": (lambda: c4(1), "^n=1: a sample standard deviation needs two members$"),
    "streamed, negative weights": (
        lambda: score_members(X.values, Y.values, -ONE.values),
        "^weights: holds -1; must be 0 or more",
    ),
    "streamed, no members": (lambda: score_members(X.values[:0], Y.values), "^members=0: "),
    "blocks without length": (
        lambda: bootstrap.blocks_of(np.array(["2001-01-01", "2001-01-02"], "datetime64[s]"), 0),
        "^block_days=0: must be above 0$",
    ),
    "blocks of unordered dates": (
        lambda: bootstrap.blocks_of(np.array(["2001-01-02", "2001-01-01"], "datetime64[s]"), 5),
        "^init_time: init times must ascend, each once; sort them$",
    ),
    "no draws": (lambda: bootstrap.draw_dates(np.arange(3), 0, 0), "^draws=0: "),
    "confidence in per cent": (
        lambda: bootstrap.interval(1.0, np.arange(9.0), 95, 5),
        "^confidence=95: must lie between 0 and 1; 0.95 is usual$",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_means_nothing_has_no_score(name):
    call, message = REFUSED[name]
    with pytest.raises(UserError if not name.startswith(("efi, no such", "energy of another")) else ValueError) as told:
        call()
    assert "\n" not in str(told.value)
    told.match(message)


LAWS = {
    "crps": families.crps,
    "crps_above": lambda *law: families.crps_above(*law, 0.3),
    "cdf": families.cdf,
    "quantile": lambda family, location, scale, y: families.quantile(family, location, scale, 0.5),
    "moments": lambda family, location, scale, y: families.moments(family, location, scale),
    "location_of_mean": lambda family, location, scale, y: families.location_of_mean(family, location, scale),
    "log_score": families.log_score,
    "pit": probability.pit,
    "api.crps_distribution": lambda family, *law: api.crps_distribution(
        *(xr.DataArray(part, dims="point") for part in law), family=family
    ),
}


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("name", list(LAWS))
def test_no_law_has_a_negative_scale(name, family):
    location, y = np.array([1.0, 1.0, 0.5]), np.array([0.2, 0.4, 0.6])
    LAWS[name](family, location, np.array([1.0, np.nan, 2.0]), y)  # a missing value is none
    with pytest.raises(UserError, match=r"^scale: holds -0.1; must be (0 or more|above 0)"):
        LAWS[name](family, location, np.array([1.0, np.nan, -0.1]), y)


@pytest.mark.parametrize("family", list(Family))
def test_the_crps_above_minus_infinity_is_that_of_the_whole_law(family):
    law = np.array([1.0, 0.5]), np.array([1.0, 2.0]), np.array([0.2, 0.7])
    np.testing.assert_array_equal(families.crps_above(family, *law, -np.inf), families.crps(family, *law))


def test_a_reliability_table_takes_probabilities_and_events_alone():
    table = probability.Reliability.zeros()
    p, event, weights, mask = np.array([0.2, 0.9]), np.array([0.0, 1.0]), np.ones(2), np.ones(2, bool)
    for change, message in (
        ((100 * p, event, weights, mask), "^probability: holds 20; "),
        ((p, 3 * event, weights, mask), "^event: holds 3; "),
        ((p, event, -weights, mask), "^weights: holds -1; "),
    ):
        with pytest.raises(UserError, match=message):
            table.record(*change)
    assert table.weight.sum() == 0
    table.record(np.array([0.2, 77.0]), event, weights, np.array([True, False]))  # what the mask leaves out is not read
    assert table.parts().score == pytest.approx(0.04)


def test_rounding_of_single_precision_is_let_pass():
    """A share summed in float32 may be 1 + 1e-7, and one less it -1e-8."""
    p = np.array([np.nextafter(np.float32(1), np.float32(2)), -1e-8], np.float32)
    found = api.brier_score(points(*p), points(1, 0), preserve_dims="all")
    np.testing.assert_allclose(found, (p.astype(np.float64) - [1, 0]) ** 2)
    assert float(api.eecrps(points(np.float32(-1.0000001)), points(2.0))) == pytest.approx(2)


def test_probabilities_packed_into_16_bits_are_let_pass():
    """With a scale that is not a divisor of one, what was 1 decodes to 1.00001."""
    scale = 1.00001 / 32767
    p = np.round(np.array([1.0, 0.0]) / scale).astype(np.int16) * scale
    assert p[0] > 1 + 5e-6
    np.testing.assert_allclose(api.brier_score(points(*p), points(1, 1), preserve_dims="all"), [1e-10, 1], atol=1e-12)
    assert probability.bin_of(p, 10).tolist() == [9, 0]
    assert families.quantile(Family.NORMAL, np.zeros(1), np.ones(1), p[:1]) == np.inf


@pytest.mark.parametrize("chunks", [None, {"point": 1}, {"point": 3}], ids=str)
def test_cosines_of_the_poles_are_weights(chunks):
    """In float32 those of the poles are -4e-8; a chunk may hold no other."""
    weights = points(*np.cos(np.deg2rad(np.array([90, 30, -30, -90], np.float32))))
    assert weights[0] < 0 and weights[3] < 0
    values = points(5.0, 1.0, 3.0, 7.0)
    if chunks:
        weights, values = weights.chunk(chunks), values.chunk(chunks)
    assert float(api.weighted_mean(values, weights=weights)) == pytest.approx(2, abs=1e-6)
    table = probability.Reliability.zeros()
    p, first = np.array([0.5, 0.5, 0.5, 0.5]), np.array([True, False, False, False])
    table.record(p, np.ones(4), weights.values, first)
    assert table.count.sum() == 1
    with pytest.raises(UserError, match=r"^weights: holds -0\.001; "):
        api.weighted_mean(values, weights=weights.where(weights > 0, -1e-3)).compute()


def test_events_that_were_shifted_are_events_and_missing_ones():
    """Truth values become objects where some are missing."""
    truth = xr.DataArray([1.0, -1.0, 2.0], dims="time")
    event, p = (truth > 0).shift(time=1), xr.DataArray([0.5, 0.8, 0.3], dims="time")
    assert event.dtype == object
    np.testing.assert_allclose(api.brier_score(p, event, preserve_dims="all"), [np.nan, 0.04, 0.09], rtol=1e-12)
    assert float(api.brier_score(p, event, mask=event.notnull())) == pytest.approx(0.065)
    with pytest.raises(UserError, match=EVENT.format(2)):
        api.brier_score(p, event.where(event.isnull(), 2))


@pytest.mark.parametrize("kind", [bool, np.int8, np.float32])
def test_events_of_any_type_have_the_score_of_scores(kind):
    p, event = points(0.2, 0.9, 0.5, 1.0), points(0, 1, 1, 0).astype(kind)
    assert float(api.brier_score(p, event)) == float(scores.probability.brier_score(p, event.astype(float)))


def test_missing_probabilities_and_events_stay_missing():
    p, event = points(0.2, np.nan, 0.5), points(1.0, 1.0, np.nan)
    found = api.brier_score(p, event, preserve_dims="all")
    np.testing.assert_allclose(found, [0.64, np.nan, np.nan])
    assert np.isnan(api.brier_score(p, event))
    assert float(api.brier_score(p, event, mask=found.notnull())) == pytest.approx(0.64)


def test_an_event_may_keep_the_units_of_its_variable():
    """Comparing keeps attributes: the event that t exceeds 280 K has its units, and is a yes or no all the same."""
    event = points(True, False, units="K")
    assert float(api.brier_score(points(0.5, 0.2, units="1"), event)) == pytest.approx((0.25 + 0.04) / 2)


def test_a_point_forecast_has_a_crps_and_a_place_in_the_histogram():
    """A scale of zero is a sure forecast: its CRPS is the distance, its PIT is drawn within the step."""
    location, scale, y = points(1.0, 2.0), points(0.0, 0.0), points(1.5, 2.0)
    found = api.crps_distribution(location, scale, y, family="normal", preserve_dims="all")
    np.testing.assert_allclose(found, [0.5, 0.0])
    assert float(api.pit_histogram(location, scale, y, family="normal", bins=4).sum()) == pytest.approx(1)


def test_a_mask_of_ones_and_zeros_is_one_of_true_and_false():
    mask = points(1, 0, 1)
    assert float(api.weighted_mean(points(1.0, 5.0, 3.0), mask=mask)) == 2
    assert float(api.weighted_mean(points(1.0, 5.0, 3.0), mask=mask.astype(bool))) == 2


def test_quantiles_of_a_climate_may_be_packed():
    """Packing makes equal quantiles fall by a little."""
    climate = CLIMATE.copy()
    climate[5] = climate[4] - 1e-4 * float(climate.max() - climate.min())
    equal = CLIMATE.copy()
    equal[5] = equal[4]
    assert float(abs(api.efi(X, climate) - api.efi(X, equal)).max()) < 0.2  # as much as equal quantiles may


@pytest.mark.parametrize("chunk", [1, 4])
def test_whether_quantiles_fall_is_of_each_point(chunk):
    """One point of a large range beside others takes nothing from them."""
    climate, x = CLIMATE.copy(), X.isel(variable=0)
    climate[:, 3] *= 1e4
    span = float(climate[-1, 0] - climate[0, 0])
    for fall, refused in ((1e-3 * span, False), (0.05 * span, True)):
        climate[5, 0] = climate[4, 0] - fall
        lazy = api.efi(x.chunk(point=chunk), climate.chunk(point=chunk))
        if refused:
            with pytest.raises(UserError, match="quantiles fall along"):
                lazy.compute()
        else:
            assert lazy.compute().notnull().all()


def test_many_quantiles_that_fall_by_little_fall():
    levels = np.linspace(0, 1, 1001)
    with pytest.raises(UserError, match="quantiles fall along"):
        extremes.efi(np.zeros((2, 1)), 1 - levels[:, None], levels)


def test_an_empty_selection_has_an_empty_index():
    assert api.efi(X.isel(point=[]), CLIMATE.isel(point=[])).shape == (3, 0)


LAZY = {
    "brier, forecast": (lambda: api.brier_score(points(0.5, 20.0).chunk(), points(1, 0)), "probability"),
    "brier, event": (lambda: api.brier_score(points(0.5, 0.2), points(1, 3).chunk()), "event is 0 or 1"),
    "crps": (
        lambda: api.crps_distribution(Y.chunk(), holding(ONE, -1.0).chunk(), Y, family="normal"),
        "scale: holds -1",
    ),
    "log score": (lambda: api.log_score(Y, holding(ONE, 0.0).chunk(), Y, family="normal"), "scale: holds 0"),
    "pit": (lambda: api.pit_histogram(Y, holding(ONE, -1.0).chunk(), Y, family="normal"), "scale: holds -1"),
    "efi": (
        lambda: api.efi(X.chunk(), CLIMATE.copy(data=CLIMATE.values[::-1]).chunk(quantile=-1)),
        "quantiles fall along",
    ),
    "eecrps": (lambda: api.eecrps((100 * ONE).chunk(), ONE), "index: holds 100"),
    "weights": (lambda: api.weighted_mean(Y, weights=(-ONE).chunk()), "weights: holds -1"),
    "mask": (lambda: api.weighted_mean(Y, mask=(0.5 * ONE).chunk()), "mask: holds 0.5"),
}


@pytest.mark.parametrize("name", list(LAZY))
def test_lazy_data_stays_lazy_and_is_refused_when_it_is_computed(name):
    call, message = LAZY[name]
    found = call()
    assert isinstance(found.data, dask.array.Array)
    with pytest.raises(UserError, match=message):
        found.compute(scheduler="synchronous")


def test_lazy_data_is_computed_once():
    computed = []

    def counted(block):
        computed.append(block.size)
        return block

    p = xr.DataArray(dask.array.full(6, 0.5, chunks=2).map_blocks(counted, meta=np.empty(0)), dims="point")
    assert float(api.brier_score(p, xr.DataArray(np.ones(6), dims="point"))) == 0.25
    assert sum(computed) == 6
