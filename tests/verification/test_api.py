"""Public functions on xarray: the convention of `scores`, equal figures, laziness, and no silent skipping."""

import dask.array
import numpy as np
import pytest
import xarray as xr
from scores.continuous import rmse
from scores.probability import brier_score, crps_for_ensemble, rank_histogram

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.grid import Grid
from ensemble_ml.verification import api, families
from ensemble_ml.verification.extremes import efi

GRID = Grid(np.linspace(90, -90, 13), np.arange(0, 360, 30.0))
COORDS = {"latitude": GRID.latitude, "longitude": GRID.longitude}


def ensemble(members=5, dates=4, seed=0):
    rng = np.random.default_rng(seed)
    dims = ("init_time", "latitude", "longitude")
    x = xr.DataArray(rng.normal(size=(members, dates, *GRID.shape)), dims=("realization", *dims), coords=COORDS)
    return x, xr.DataArray(rng.normal(size=(dates, *GRID.shape)), dims=dims, coords=COORDS)


def test_crps_equals_scores_in_every_reduction():
    x, y = ensemble()
    weights = api.area_weights(y)
    for method, fair in (("fair", True), ("ecdf", False)):
        for reduction in ({}, {"reduce_dims": ["latitude", "longitude"]}, {"preserve_dims": "init_time"}):
            ours = api.crps_ensemble(x, y, fair=fair, weights=weights, **reduction)
            peer = crps_for_ensemble(x, y, "realization", method=method, weights=weights, **reduction)
            xr.testing.assert_allclose(ours, peer)
        at_points = api.crps_ensemble(x, y, fair=fair, preserve_dims="all")
        peer = crps_for_ensemble(x, y, "realization", method=method, preserve_dims="all")
        xr.testing.assert_allclose(at_points, peer.transpose(*at_points.dims))


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("dates", [7, 12])
def test_one_ensemble_for_many_observations_and_the_reverse(fair, dates):
    """As a climatology is scored: a dimension that one side alone has is as long as the ensemble, or not."""
    rng = np.random.default_rng(0)
    x = xr.DataArray(rng.normal(size=7), dims="realization")
    y = xr.DataArray(rng.normal(size=(3, dates)), dims=["station", "time"])
    for members, truth in (
        (x, y),
        (x, y[0]),
        (x.expand_dims(time=dates), y.T),
        (y.rename(station="realization"), x[0]),
    ):
        found = api.crps_ensemble(members, truth, fair=fair, preserve_dims="all")
        expected = crps_for_ensemble(
            members, truth, "realization", method="fair" if fair else "ecdf", preserve_dims="all"
        )
        xr.testing.assert_allclose(found, expected.transpose(*found.dims))


def test_vectors_that_have_dimensions_of_their_own():
    rng = np.random.default_rng(0)
    x = xr.DataArray(rng.normal(size=(2, 5, 3, 4)), dims=["lead_time", "realization", "variable", "latitude"])
    y = xr.DataArray(rng.normal(size=(6, 3, 4)), dims=["time", "variable", "latitude"])
    for score in (api.energy_score, api.variogram_score):
        found = score(x, y, variable_dim="variable", preserve_dims="all")
        for lead, time in np.ndindex(2, 6):
            one = score(x[lead], y[time], variable_dim="variable", preserve_dims="all")
            np.testing.assert_allclose(found.isel(lead_time=lead, time=time), one)
        assert score(x, y[0], variable_dim="variable", preserve_dims="all").sizes == {"lead_time": 2, "latitude": 4}


def test_data_that_is_on_no_grid_says_what_it_has():
    """One row that was selected, a mean over rows, and a curvilinear grid."""
    _, y = ensemble(dates=2)
    plane = np.zeros(GRID.shape)
    curved = xr.DataArray(plane, dims=["y", "x"], coords=dict.fromkeys(("latitude", "longitude"), (("y", "x"), plane)))
    for data, has in ((y.isel(latitude=0), "init_time, longitude"), (y.mean("latitude"), "init_time, longitude"),
                      (curved, "y, x")):  # fmt: skip
        for function in (api.area_weights, lambda data: api.at_places_of(data, y)):
            with pytest.raises(ValueError, match=f"dimension latitude: not in the data, which has {has}"):
                function(data)


def test_numbers_of_points_are_no_degrees():
    """An array without coordinates had the areas of a grid at 0, 1, 2 ... degrees north."""
    _, y = ensemble()
    for axis in ("latitude", "longitude"):
        bare = y.drop_vars(axis)
        calls = (
            lambda data: api.area_weights(data),
            lambda data: api.at_places_of(data, y),
            lambda data: api.at_places_of(y, data),
        )
        for call in calls:
            with pytest.raises(UserError, match=f"dimension {axis}: has no coordinate; give its degrees"):
                call(bare)


def test_efi_of_one_forecast_against_many_climates():
    levels, rng = np.linspace(0, 1, 11), np.random.default_rng(0)
    x = xr.DataArray(rng.normal(size=(5, 4)), dims=["x", "realization"])
    climate = xr.DataArray(
        np.sort(rng.normal(size=(3, 5, 11))), dims=["time", "x", "quantile"], coords={"quantile": levels}
    )
    found = api.efi(x, climate)
    for time in range(3):
        np.testing.assert_allclose(found.sel(time=time), api.efi(x, climate.isel(time=time)))
    one = api.efi(x.isel(x=0), climate)
    np.testing.assert_allclose(one.isel(x=2, time=1), api.efi(x.isel(x=0), climate.isel(x=2, time=1)))


def test_area_weights_follow_the_order_of_the_data():
    _, y = ensemble()
    np.testing.assert_allclose(api.area_weights(y), GRID.area_weights())
    turned = y.isel(latitude=slice(None, None, -1))
    np.testing.assert_allclose(api.area_weights(turned), GRID.area_weights()[::-1])


def test_spread_skill_against_its_definition():
    x, y = ensemble()
    weights = api.area_weights(y)
    error = rmse(x.mean("realization"), y, weights=weights)
    spread = np.sqrt((1.2 * x.var("realization", ddof=1)).weighted(weights).mean())
    assert float(api.spread_skill(x, y, weights=weights)) == pytest.approx(float(spread / error))
    with pytest.raises(ValueError, match="dimension realization: is that of the members, and the truth has it, too"):
        api.spread_skill(x, x)


def test_rank_histogram_equals_scores_without_ties():
    x, y = ensemble()
    peer = rank_histogram(x, y, "realization")
    np.testing.assert_allclose(api.rank_histogram(x, y), peer.values, atol=1e-12)
    assert api.rank_histogram(x, y, preserve_dims="init_time").dims == ("rank", "init_time")


def test_brier_score_equals_scores():
    p = xr.DataArray(np.random.default_rng(1).random(50), dims="point")
    event = (p > 0.4).astype(float)
    xr.testing.assert_allclose(api.brier_score(p, event), brier_score(p, event))


def test_dask_stays_lazy_and_gives_the_same():
    x, y = ensemble()
    lazy_x, lazy_y = x.chunk(init_time=1), y.chunk(init_time=2)
    location, scale = x.mean("realization"), x.std("realization")
    pairs = [
        (api.crps_ensemble(lazy_x, lazy_y), api.crps_ensemble(x, y)),
        (api.spread_skill(lazy_x, lazy_y), api.spread_skill(x, y)),
        (
            api.crps_distribution(location.chunk(), scale.chunk(), lazy_y, family="normal", preserve_dims="init_time"),
            api.crps_distribution(location, scale, y, family="normal", preserve_dims="init_time"),
        ),
        (api.rank_histogram(lazy_x, lazy_y), api.rank_histogram(x, y)),
    ]
    for lazy, eager in pairs:
        assert isinstance(lazy.data, dask.array.Array)
        xr.testing.assert_allclose(lazy.compute(), eager)


def test_a_missing_value_shows_unless_a_mask_leaves_it_out():
    x, y = ensemble()
    hole = x.copy()
    hole[2, 1, 3, 4] = np.nan
    mask = np.isfinite(hole).all("realization")
    for score in (api.crps_ensemble, api.spread_skill):
        assert np.isnan(score(hole, y))
        assert np.isfinite(score(hole, y, mask=mask))
    kept = api.crps_ensemble(x, y, preserve_dims="all").where(mask).mean()
    assert float(api.crps_ensemble(hole, y, mask=mask)) == pytest.approx(float(kept))
    assert np.isnan(api.rank_histogram(hole, y)).all()
    assert float(api.rank_histogram(hole, y, mask=mask).sum()) == pytest.approx(1)
    assert np.isnan(api.crps_ensemble(x, y, mask=xr.zeros_like(mask)))


def test_distributions_pit_and_log_score():
    _, y = ensemble(dates=60)
    location, scale = xr.zeros_like(y), xr.ones_like(y)
    found = api.pit_histogram(location, scale, y, family="normal")
    np.testing.assert_allclose(found, 0.1, atol=0.02)
    assert float(found.sum()) == pytest.approx(1)
    entropy = 0.5 * np.log(2 * np.pi * np.e)
    assert float(api.log_score(location, scale, y, family="normal")) == pytest.approx(entropy, abs=0.03)
    assert float(api.quantile_score(location, y, level=0.5)) == pytest.approx(float(abs(y).mean() / 2))
    assert float(api.crps_distribution(location, scale, y, family="normal")) == pytest.approx(0.564, abs=0.02)


def test_vectors_and_extremes():
    x, y = ensemble()
    vector_x, vector_y = xr.concat([x, 2 * x], "variable"), xr.concat([y, 2 * y], "variable")
    energy = api.energy_score(vector_x, vector_y, variable_dim="variable")
    assert float(energy) == pytest.approx(np.sqrt(5) * float(api.crps_ensemble(x, y, fair=False)))
    assert api.variogram_score(vector_x, vector_y, variable_dim="variable", preserve_dims="init_time").dims == (
        "init_time",
    )
    climate = y.quantile(np.linspace(0, 1, 11), "init_time")
    index = api.efi(x, climate)
    expected = efi(x.values, climate.values[:, None], np.linspace(0, 1, 11))
    np.testing.assert_allclose(index.transpose(*y.dims), expected)
    score = api.crps_ensemble(x, y, preserve_dims="all")
    assert float(api.eecrps(index, score)) == pytest.approx(float((abs(index) * score).mean()))


def test_dimensions_that_make_no_sense():
    x, y = ensemble()
    with pytest.raises(ValueError, match="exclude each other"):
        api.crps_ensemble(x, y, reduce_dims="latitude", preserve_dims="longitude")
    with pytest.raises(ValueError, match="dimension level: not in the data, which has init_time"):
        api.crps_ensemble(x, y, reduce_dims=["level"])


def test_weights_may_cover_more_than_the_values():
    x, y = ensemble()
    part = {"latitude": slice(60, 30)}
    expected = api.crps_ensemble(x.sel(part), y.sel(part), weights=api.area_weights(y).sel(part))
    xr.testing.assert_allclose(api.crps_ensemble(x.sel(part), y.sel(part), weights=api.area_weights(y)), expected)
    mask = y.sel(part) < 1
    masked = api.crps_ensemble(x.sel(part), y.sel(part), weights=api.area_weights(y), mask=mask)
    assert 0 < float(masked) < 2
    assert np.isnan(api.crps_ensemble(x, y, weights=api.area_weights(y).sel(part)))  # some values have no weight


def test_coordinates_that_differ_are_refused():
    x, y = ensemble()
    x, y = (one.assign_coords(init_time=np.arange(4)) for one in (x, y))
    fewer, chance = y.isel(init_time=slice(0, 3)), xr.full_like(y, 0.5)
    for score in (
        lambda: api.crps_ensemble(x, fewer),
        lambda: api.spread_skill(x, fewer),
        lambda: api.brier_score(chance, fewer),
        lambda: api.eecrps(chance, fewer),
        lambda: api.rank_histogram(x, fewer),
    ):
        with pytest.raises(ValueError, match=r"exact|align"):
            score()


@pytest.mark.slow
def test_chunks_do_not_change_how_ties_are_broken():
    dry = xr.DataArray(np.zeros((4, 300, 6)), dims=("realization", "init_time", "point"))
    truth, scale = dry.isel(realization=0, drop=True), xr.ones_like(dry.isel(realization=0, drop=True))
    whole = api.rank_histogram(dry, truth)
    np.testing.assert_allclose(whole, 0.2, atol=0.04)
    overcast = api.pit_histogram(truth + 1, scale, truth + 1, family="doubly_censored_normal", bins=4)
    np.testing.assert_allclose(overcast, [0, 0, 0.5, 0.5], atol=0.04)  # half of the mass lies at one
    pit = api.pit_histogram(truth, scale, truth, family="censored_normal", bins=4)
    np.testing.assert_allclose(pit, [0.5, 0.5, 0, 0], atol=0.04)  # half of the mass lies at zero
    for parts in ({"init_time": 1}, {"init_time": 7, "point": 2}):
        lazy, lazy_truth = dry.chunk(parts), truth.chunk(parts)
        xr.testing.assert_equal(api.rank_histogram(lazy, lazy_truth).compute(), whole)
        again = api.pit_histogram(lazy_truth, scale.chunk(parts), lazy_truth, family="censored_normal", bins=4)
        assert isinstance(again.data, dask.array.Array)
        xr.testing.assert_equal(again.compute(), pit)


def quantiles(y):
    return y.astype(np.float64).quantile([0, 0.5, 1], "time").round()


def yes_or_no(x):
    """Ones and zeros in the type of the data, as probabilities, events and indices may be."""
    return (x > float(x.astype(np.float64).mean())).astype(x.dtype)


SCORES = {
    "crps_ensemble": lambda x, y, **kw: api.crps_ensemble(x, y, **kw),
    "crps between": lambda x, y, **kw: api.crps_ensemble(x, y, lower=50, upper=100.5, **kw),
    "spread_skill": lambda x, y, **kw: api.spread_skill(x, y, **kw),
    "rank_histogram": lambda x, y, **kw: api.rank_histogram(x, y, **kw),
    "energy_score": lambda x, y, **kw: api.energy_score(x, y, variable_dim="point", **kw),
    "variogram_score": lambda x, y, **kw: api.variogram_score(x, y, variable_dim="point", **kw),
    "brier_score": lambda x, y, **kw: api.brier_score(yes_or_no(x[0]), yes_or_no(y), **kw),
    "quantile_score": lambda x, y, **kw: api.quantile_score(x[0], y, level=0.3, **kw),
    "eecrps": lambda x, y, **kw: api.eecrps(yes_or_no(x[0]), y, **kw),
    "efi": lambda x, y, **kw: api.efi(x, quantiles(y).astype(y.dtype)),
    "crps_distribution": lambda x, y, **kw: api.crps_distribution(x[0], x[1], y, family="csgamma", **kw),
    "log_score": lambda x, y, **kw: api.log_score(
        x[0], np.maximum(x[1], x.dtype.type(1)), y, family="truncated_normal", **kw
    ),
    "pit_histogram": lambda x, y, **kw: api.pit_histogram(x[0], x[1], y, family="censored_normal", **kw),
    "weighted_mean": lambda x, y, **kw: api.weighted_mean(x, **kw),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", list(SCORES))
def test_scores_have_their_own_units(name, kept):
    """Neither standard name nor family of the variable, whatever xarray hands on; an index or a share has no units."""
    rng = np.random.default_rng(0)
    about = {"units": "mm", "standard_name": "precipitation_amount", "distribution_family": "csgamma"}
    x = xr.DataArray(rng.uniform(1, 200, (20, 90, 6)), dims=("realization", "time", "point"), attrs=about)
    y = xr.DataArray(rng.uniform(1, 200, (90, 6)), dims=("time", "point"), attrs=about)
    with xr.set_options(keep_attrs=kept):
        found = SCORES[name](x, y).attrs
    of_variable = name.startswith(("crps", "energy", "quantile", "eecrps"))
    assert found == (about if name == "weighted_mean" else {"units": "mm"} if of_variable else {})


@pytest.mark.parametrize("score", SCORES.values(), ids=list(SCORES))
@pytest.mark.parametrize("dtype", ["float16", "uint8", "int16", "bool"])
def test_the_type_of_the_data_changes_no_score(score, dtype):
    """Half precision has no room for sums and squares, unsigned integers none below zero."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: 110 + 40 * rng.normal(size=shape)  # noqa: E731
    x = xr.DataArray(draw(20, 90, 6).clip(1, 250).round(), dims=("realization", "time", "point"))
    y = xr.DataArray(draw(90, 6).clip(1, 250).round(), dims=("time", "point"))
    x, y = (one > 100 if dtype == "bool" else one.astype(dtype) for one in (x, y))
    weights = xr.DataArray(np.full(90, 900, np.float16), dims="time")
    for given in ({}, {"weights": weights}):
        exact = {name: one.astype(np.float64) for name, one in given.items()}
        with np.errstate(invalid="ignore", divide="ignore"):  # no scale where all is false
            found, expected = score(x, y, **given), score(x.astype(np.float64), y.astype(np.float64), **exact)
        xr.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("rows", [slice(2, 6), slice(0, 3), slice(12, None)])
def test_an_archive_is_taken_where_a_forecast_of_a_region_lies(rows, single):
    """Longitudes below zero are those of the archive less 360; areas are those of the cells on the whole globe."""
    _, y = ensemble()
    coordinates = {"latitude": GRID.latitude[rows], "longitude": np.array([-60.0, -30.0, 0.0, 30.0])}
    if single:
        coordinates = {name: axis.astype(np.float32) + np.float32(3e-5) for name, axis in coordinates.items()}
    forecast = xr.DataArray(np.zeros([len(axis) for axis in coordinates.values()]), coordinates)
    found = api.at_places_of(y, forecast)
    np.testing.assert_array_equal(found, y.values[:, rows][..., [10, 11, 0, 1]])
    xr.testing.assert_identical(found.to_dataset(name="y").longitude, forecast.longitude)
    everywhere = api.at_places_of(api.area_weights(y), forecast)
    np.testing.assert_allclose(api.area_weights(found), everywhere / everywhere.mean(), rtol=1e-4)


def test_an_archive_keeps_its_own_level_and_start_at_the_places_of_a_forecast():
    """It took those of the forecast, so that the truth of another level or date passed for what was forecast."""
    _, y = ensemble(dates=2)
    archive = y.expand_dims(level=[500, 850])
    forecast = archive.isel(init_time=0, level=0, longitude=slice(0, 3))
    for data in (archive, archive.isel(init_time=1, level=1)):
        xr.testing.assert_identical(api.at_places_of(data, forecast), data.isel(longitude=slice(0, 3)))


def test_an_archive_without_the_places_of_a_forecast_is_refused():
    _, y = ensemble()
    elsewhere = xr.DataArray(np.zeros((1, 2)), {"latitude": [15.0], "longitude": [-30.0, -25.0]})
    with pytest.raises(ValueError, match=r"^longitude -25 of the forecast: the data has no such grid point$"):
        api.at_places_of(y, elsewhere)
    with pytest.raises(ValueError, match=r"^latitude 15 of .*no such grid point"):
        api.at_places_of(y.isel(latitude=slice(2)), elsewhere)
    points = xr.Dataset({"t_mean": (("time", "point"), np.zeros((1, 2)))})
    with pytest.raises(ValueError, match=r"^forecast at points \(its dimensions: time, point\).*without points="):
        api.at_places_of(y, points)


def test_members_along_another_dimension_are_asked_for():
    forecast, observed = xr.DataArray(np.zeros((3, 2)), dims=["number", "x"]), xr.DataArray(np.zeros(2), dims="x")
    for score in (api.crps_ensemble, api.spread_skill, api.rank_histogram):
        with pytest.raises(
            ValueError, match="dimension realization: not in the data, which has number, x; give member_dim"
        ):
            score(forecast, observed)


def test_units_that_differ_are_refused():
    """A forecast in K of a truth in degrees Celsius had a CRPS of 272 degC."""
    x, y = ensemble(members=3, dates=2)
    x, y, mean = (one.assign_attrs(units="K") for one in (x, y, x.mean("realization")))
    scale = xr.ones_like(mean)  # a width of 1 K is one of 1 degC
    other, spelt = y.assign_attrs(units="degC"), y.assign_attrs(units="kelvin")
    climate = xr.DataArray([0.0, 1.0], dims="quantile", coords={"quantile": [0.0, 1.0]}, attrs={"units": "degC"})
    along = {"variable_dim": "latitude"}
    every = [
        lambda truth: api.crps_ensemble(x, truth),
        lambda truth: api.rank_histogram(x, truth),
        lambda truth: api.spread_skill(x, truth),
        lambda truth: api.quantile_score(mean, truth, level=0.5),
        lambda truth: api.log_score(mean, scale, truth, family="normal"),
        lambda truth: api.energy_score(x, truth, **along),
        lambda truth: api.variogram_score(x, truth, **along),
    ]
    for score in every:
        score(spelt)
        with pytest.raises(ValueError, match="units 'K' and 'degC' differ; bring the data to one of them"):
            score(other)
    with pytest.raises(ValueError, match="units 'K' and 'degC' differ"):
        api.efi(x, climate)
    assert api.crps_distribution(mean.assign_attrs(units="degC"), scale, other, family="normal").units == "degC"
    assert api.eecrps(mean.clip(-1, 1).assign_attrs(units="1"), y).units == "K"  # an index and a score


def test_a_ratio_has_no_units():
    forecast = xr.DataArray(np.arange(6.0).reshape(3, 2), dims=["realization", "x"], attrs={"units": "K"})
    with xr.set_options(keep_attrs=True):
        found = api.spread_skill(forecast, xr.DataArray(np.zeros(2), dims="x", attrs={"units": "K"}))
    assert not found.attrs


@pytest.mark.parametrize("lazy", [False, True])
def test_dimensions_of_masks_and_weights_alone_are_averaged_over_too(lazy):
    rng = np.random.default_rng(0)
    axes = {"t": np.arange(4), "y": np.arange(5), "x": np.arange(6)}
    values = xr.DataArray(rng.random((5, 6)), {"y": axes["y"], "x": axes["x"]}, ["y", "x"])
    weights = xr.DataArray(rng.random((4, 5, 6)), axes, ["t", "y", "x"])
    mask = weights > 0.5
    given = values.chunk(y=2) if lazy else values
    expected = np.average(np.broadcast_to(values, weights.shape), weights=weights)
    assert float(api.weighted_mean(given, weights=weights)) == pytest.approx(expected, rel=1e-12)
    expected = np.broadcast_to(values, mask.shape)[mask.values].mean()
    assert float(api.weighted_mean(given, mask=mask)) == pytest.approx(expected, rel=1e-12)
    assert api.weighted_mean(given, mask=mask, preserve_dims=["t"]).dims == ("t",)
    for more in ({}, {"mask": xr.ones_like(given, dtype=bool)}):  # which says the same
        kept = api.weighted_mean(given, weights=xr.zeros_like(given), preserve_dims="all", **more)
        np.testing.assert_array_equal(kept, given)


@pytest.mark.parametrize("family", ["normal", "csgamma"])
def test_crps_of_a_law_above_a_threshold_counts_what_lies_there(family):
    """Against the members' score weighted so, of many members; without a threshold it is the whole."""
    levels = (np.arange(4000) + 0.5) / 4000
    location, scale, y = (xr.DataArray(np.array(v), dims="x") for v in ([0.3, 1.0], [1.0, 0.5], [2.0, 0.1]))
    members = families.quantile(Family(family), location.values, scale.values, levels[:, None])
    drawn = xr.DataArray(members, dims=("realization", "x"))
    for lower in (-np.inf, 0.8):
        law = api.crps_distribution(location, scale, y, family=family, lower=lower, preserve_dims="all")
        many = api.crps_ensemble(drawn, y, fair=False, lower=lower, preserve_dims="all")
        np.testing.assert_allclose(law, many, atol=2e-3)
