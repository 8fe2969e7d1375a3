"""Score xarray objects, in the convention of the package `scores`: data by position, everything else by keyword.

All scores except `efi` take the keyword arguments of `weighted_mean`: `reduce_dims`, `preserve_dims`, `weights` and
`mask`. Weights of exact cell areas come from `area_weights`.

No value is skipped silently. A missing value that is not masked makes the mean NaN. A ValueError is raised if a
dimension is missing, coordinates differ, or units differ where both sides state them. Invalid values raise a
`UserError`, which is a ValueError: probabilities outside of 0 to 1, events other than 0 and 1, negative scales and
weights, levels outside of (0, 1). This holds at masked points as well, so set these to NaN.

All scores are computed in float64, whatever the type of the data. Dask arrays stay lazy, and their values are checked
when they are computed. Chunks change no score, but the member, variable and quantile dimensions must lie in one chunk.
Scores in the units of the variable carry them as the attribute `units`; other scores have no such attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.grid import TOLERANCE, canonical
from ensemble_ml.verification import extremes, families, members, probability
from ensemble_ml.verification.checks import check_all, check_between, check_count, check_no_per_cent, check_weights
from ensemble_ml.verification.pointwise import (
    aligned,
    axis_of,
    bare,
    check_dim,
    check_units,
    core_first,
    in_units_of,
    pointwise,
    vectors,
)

Dims = str | Iterable[Hashable] | None
Data = TypeVar("Data", xr.DataArray, xr.Dataset)

__all__ = [
    "area_weights", "at_places_of", "brier_score", "crps_distribution", "crps_ensemble", "eecrps", "efi",
    "energy_score", "log_score", "pit_histogram", "quantile_score", "rank_histogram", "spread_skill",
    "variogram_score", "weighted_mean",
]  # fmt: skip


def area_weights(
    data: xr.DataArray | xr.Dataset, *, latitude: str = "latitude", longitude: str = "longitude"
) -> xr.DataArray:
    """Return the exact area of each grid cell, from the sines of its latitude bounds, divided by the mean area.

    Args:
        data: Data on a latitude-longitude grid, in degrees.
        latitude: Name of the latitude coordinate.
        longitude: Name of the longitude coordinate.

    Returns:
        (latitude, longitude) weights, one on average; zero for a meridian that repeats another (360 and 0 degrees).

    Raises:
        ValueError: The data has no such dimension.
        UserError: Latitudes lie beyond the poles, or the axes have no coordinates or not those of a regular grid.
    """
    lat, lon = (axis_of(data, name) for name in (latitude, longitude))
    check_all(latitude, lat.values, np.abs(lat.values) > 90 + TOLERANCE, "latitudes lie between -90 and 90 degrees")
    # `canonical` sorts the axes, so the areas are written back to the order that the data has.
    grid, rows, columns = canonical(lat.values, lon.values)
    areas = np.zeros((len(lat), len(lon)))  # a meridian that occurs twice (0 and 360 degrees) counts once
    areas[rows[:, None], columns] = grid.area_weights()
    return xr.DataArray(areas, dims=(latitude, longitude), coords={latitude: lat, longitude: lon})


def at_places_of(
    data: Data, forecast: xr.DataArray | xr.Dataset, *, latitude: str = "latitude", longitude: str = "longitude"
) -> Data:
    """Return `data` at the grid points of a forecast, with the forecast's latitudes and longitudes.

    A forecast of a region across Greenwich has longitudes below zero, an archive has 0 to 360. xarray compares the
    numbers and would drop all points west of Greenwich. Here, longitudes that differ by 360 degrees are equal.

    Args:
        data: Data on a grid that contains all points of the forecast.
        forecast: Forecast on a grid, global or of a region.
        latitude: Name of the latitude coordinate.
        longitude: Name of the longitude coordinate.

    Raises:
        ValueError: The forecast is at points and not on a grid, `data` lacks one of its dimensions or grid points, or
            a dimension has no coordinate.
    """
    if not {latitude, longitude} <= set(forecast.dims):
        held = ", ".join(map(str, forecast.dims))
        raise ValueError(f"forecast at points (its dimensions: {held}), not on a grid; give one made without points=")
    # As variables: a coordinate brings others with it, such as the level and the start of the forecast.
    chosen, wanted = {}, {name: axis_of(forecast, name).variable for name in (latitude, longitude)}
    for name, axis in wanted.items():
        # Points match within the rounding of coordinates. Differences of longitude are taken modulo 360 degrees.
        apart = axis.values[:, None] - axis_of(data, name).values.astype(np.float64)
        apart = np.abs((apart + 180) % 360 - 180 if name == longitude else apart)
        if (lacking := apart.min(1) > TOLERANCE).any():
            raise ValueError(f"{name} {axis.values[lacking][0]:g} of the forecast: the data has no such grid point")
        chosen[name] = apart.argmin(1)
    return data.isel(chosen).assign_coords(wanted)


def weighted_mean(
    values: xr.DataArray,
    *,
    reduce_dims: Dims = None,
    preserve_dims: Dims = None,
    weights: xr.DataArray | None = None,
    mask: xr.DataArray | None = None,
) -> xr.DataArray:
    """Return the sum of weighted values divided by the sum of weights.

    Weights may cover more points than the values. If the weights or the mask have dimensions that the values lack, the
    values are repeated along them.

    Args:
        values: Values at points.
        reduce_dims: Dimensions to average over; None averages over all.
        preserve_dims: Dimensions to keep; "all" keeps every point.
        weights: Weights, 0 or more; None weights all points equally.
        mask: True (or 1) at points that count, False (or 0) elsewhere; None counts all.

    Returns:
        The mean, NaN where no point is left. If every point is kept, the values as they are, NaN outside of the mask.

    Raises:
        ValueError: Both `reduce_dims` and `preserve_dims` are given, a dimension is missing, weights are negative, or
            a value of the mask is neither 0 nor 1.
    """
    if weights is not None:
        weights = _checked(check_weights, weights, abs(weights).max())
    mask = _checked(_check_mask, mask)
    for other in (weights, mask):
        more = [] if other is None else [dim for dim in other.dims if dim not in values.dims]
        if more:
            assert other is not None
            values = values.expand_dims({dim: other.indexes.get(dim, other.sizes[dim]) for dim in more})
    over = _reduced(values.dims, reduce_dims, preserve_dims)
    if not over:
        return values if mask is None else values.where(mask, np.nan)
    w = xr.ones_like(values, dtype=np.float64)
    if weights is not None:
        # Weights are aligned to the values and never the reverse: an inner join would silently drop points.
        w = xr.align(values, weights, join="left", copy=False)[1].astype(np.float64).broadcast_like(values)
    if mask is not None:
        # Values are set to zero as well, because NaN times a weight of zero is NaN.
        values, w = values.where(mask, 0.0), w.where(mask, 0.0)
    total, weight = (values * w).sum(over, skipna=False), w.sum(over, skipna=False)
    mean = (total / weight.where(weight > 0)).rename(values.name)
    mean.attrs = dict(values.attrs)
    return mean


def crps_ensemble(
    forecast: xr.DataArray,
    observed: xr.DataArray,
    *,
    member_dim: str = "realization",
    fair: bool = True,
    lower: float = -np.inf,
    upper: float = np.inf,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the CRPS of an ensemble, fair or ordinary.

    With limits it is threshold-weighted: only values between `lower` and `upper` count.

    Sources: Ferro (2014), doi:10.1002/qj.2270; Allen et al. (2023), doi:10.1137/22M1532184.

    Args:
        forecast: Members along `member_dim`.
        observed: Truth in the same units.
        member_dim: Name of the member dimension.
        fair: Estimate the CRPS of an infinite ensemble of such members; False scores the members as they are.
        lower: Lower limit in the units of the variable.
        upper: Upper limit in the units of the variable.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean CRPS in the units of the variable.

    Raises:
        ValueError: There is no member, or only one and `fair` is set, or `lower` is not below `upper`.
    """
    check_dim(forecast, member_dim)
    score = lambda x, y: members.crps_members_weighted(x, y, fair=fair, lower=lower, upper=upper)  # noqa: E731
    return weighted_mean(in_units_of(observed, pointwise(score, forecast, observed, core=member_dim)), **reduction)


def crps_distribution(
    location: xr.DataArray,
    scale: xr.DataArray,
    observed: xr.DataArray,
    *,
    family: Family | str,
    lower: float = -np.inf,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the CRPS of a parametric forecast.

    Without `lower` it is in closed form. With `lower` it is threshold-weighted: only values above `lower` count
    (`families.crps_above`: Gneiting & Ranjan 2011, doi:10.1198/jbes.2010.08110).

    Args:
        location: Location of the distribution.
        scale: Scale of the distribution, 0 or more; a scale of zero is a point forecast.
        observed: Truth in the same units.
        family: Family as the attribute `distribution_family` of forecasts names it.
        lower: Lower limit in the units of the variable.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean CRPS in the units of the variable.

    Raises:
        ValueError: The family is not known, a scale is negative, or `lower` is NaN or inf.
    """
    law = _law(family)
    score = lambda mu, sigma, y: families.crps_above(law, mu, sigma, y, lower)  # noqa: E731
    found = pointwise(score, location, scale, observed, widths=(1,))
    return weighted_mean(in_units_of(observed, found), **reduction)


def log_score(
    location: xr.DataArray, scale: xr.DataArray, observed: xr.DataArray, *, family: Family | str, **reduction: Any
) -> xr.DataArray:
    """Compute minus the logarithm of the predicted density, in nats.

    At a bound of a censored distribution the point mass takes the place of the density.

    Sources: Good (1952); Gneiting & Raftery (2007), doi:10.1198/016214506000001437, equation 9.

    Args:
        location: Location of the distribution.
        scale: Scale of the distribution, above zero.
        observed: Truth in the same units.
        family: Family as the attribute `distribution_family` of forecasts names it.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean log score.

    Raises:
        ValueError: The family is not known, or a scale is not above zero (a point forecast has no density).
    """
    law = _law(family)
    score = lambda *a: families.log_score(law, *a)  # noqa: E731
    return weighted_mean(pointwise(score, location, scale, observed, widths=(1,)), **reduction)


def spread_skill(
    forecast: xr.DataArray, observed: xr.DataArray, *, member_dim: str = "realization", **reduction: Any
) -> xr.DataArray:
    """Compute the ratio of the ensemble's spread to the RMSE of its mean.

        ratio = sqrt((M + 1) / M mean variance) / RMSE

    It is one for a perfectly calibrated ensemble. Source: Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1.

    Args:
        forecast: Two or more members along `member_dim`.
        observed: Truth in the same units.
        member_dim: Name of the member dimension.
        **reduction: Arguments of `weighted_mean`, for variance and squared error.

    Returns:
        The ratio, without units.

    Raises:
        ValueError: There are fewer than two members, or the truth has the dimension of the members, too.
    """
    m = check_dim(forecast, member_dim)
    check_count(member_dim, m, 2, "a spread is of several members")
    check_units(forecast, observed)
    forecast, observed = aligned(forecast, observed, member_dim)
    variance = forecast.var(member_dim, ddof=1, skipna=False) * (1 + 1 / m)
    error = (forecast.mean(member_dim, skipna=False) - observed) ** 2
    # The truth may have dimensions that the forecast lacks. Variance and error are then averaged over the same points.
    variance = variance.broadcast_like(error)
    # The root is taken after the means: the mean of roots would be another quantity (Fortin et al. 2014).
    ratio = (weighted_mean(variance, **reduction) / weighted_mean(error, **reduction)) ** 0.5
    return bare(ratio)


def rank_histogram(
    forecast: xr.DataArray,
    observed: xr.DataArray,
    *,
    member_dim: str = "realization",
    seed: int = 0,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the share of points at each rank of the truth among the members (Talagrand diagram).

    Args:
        forecast: Members along `member_dim`.
        observed: Truth in the same units.
        member_dim: Name of the member dimension.
        seed: Seed of the random numbers that break ties between truth and members.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        Shares along the new dimension `rank`, 0 (below all members) to M.

    Raises:
        ValueError: There are no members.
    """
    m = check_dim(forecast, member_dim)
    check_count(member_dim, m, 1, "an ensemble has members")
    uniform = _uniform(seed, forecast.isel({member_dim: 0}, drop=True), observed)
    rank = pointwise(_ranks, forecast, observed, uniform, core=member_dim)
    return _histogram(rank, m + 1, "rank", **reduction)


def pit_histogram(
    location: xr.DataArray,
    scale: xr.DataArray,
    observed: xr.DataArray,
    *,
    family: Family | str,
    bins: int = 10,
    seed: int = 0,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the share of points in equal bins of the probability integral transform.

    Where the distribution function jumps (at a point mass, or at scale zero), the value is drawn within the jump.

    Args:
        location: Location of the distribution.
        scale: Scale of the distribution, 0 or more.
        observed: Truth in the same units.
        family: Family as the attribute `distribution_family` of forecasts names it.
        bins: Number of bins.
        seed: Seed of the random numbers.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        Shares along the new dimension `pit`, 0 to `bins` - 1.

    Raises:
        ValueError: The family is not known, a scale is negative, or `bins` is below 1.
    """
    law = _law(family)
    check_count("bins", bins, 1, "values are counted in equal bins")

    def where(mu: np.ndarray, sigma: np.ndarray, y: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        value = probability.pit(law, mu, sigma, y, uniform)
        # `bin_of` puts NaN into the first bin. The NaN is restored, so that a missing value is not counted there.
        return np.where(np.isnan(value), np.nan, probability.bin_of(value, bins))

    uniform = _uniform(seed, location, scale, observed)
    found = pointwise(where, location, scale, observed, uniform, widths=(1,))
    return _histogram(found, bins, "pit", **reduction)


def brier_score(forecast: xr.DataArray, event: xr.DataArray, **reduction: Any) -> xr.DataArray:
    """Compute the mean squared difference of a probability and the outcome (Brier 1950).

    Args:
        forecast: Probability, 0 to 1.
        event: Outcome, 0 or 1 (or False and True).
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean score, without units.

    Raises:
        ValueError: A probability is outside of 0 to 1 or in per cent, or an event is neither 0 nor 1.
    """
    check_no_per_cent("forecast", forecast.attrs.get("units"))
    # An event that was made by comparing a variable may keep its units, which do not apply to a probability.
    score = pointwise(probability.brier_score, bare(forecast), bare(event))
    return weighted_mean(score, **reduction)


def quantile_score(forecast: xr.DataArray, observed: xr.DataArray, *, level: float, **reduction: Any) -> xr.DataArray:
    """Compute the pinball loss of a predicted quantile.

    Args:
        forecast: Predicted quantile.
        observed: Truth in the same units.
        level: Probability of the quantile, within (0, 1).
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean loss in the units of the variable.

    Raises:
        ValueError: `level` is not within (0, 1).
    """
    score = lambda q, y: probability.quantile_score(q, y, level)  # noqa: E731
    return weighted_mean(in_units_of(observed, pointwise(score, forecast, observed)), **reduction)


def energy_score(
    forecast: xr.DataArray,
    observed: xr.DataArray,
    *,
    variable_dim: str,
    member_dim: str = "realization",
    fair: bool = False,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the energy score of members that are vectors along `variable_dim`.

    Bring the variables to one scale first. Source: equation 22 of Gneiting & Raftery (2007),
    doi:10.1198/016214506000001437.

    Args:
        forecast: Members along `member_dim`, each a vector along `variable_dim`.
        observed: Truth, a vector along `variable_dim`.
        variable_dim: Name of the dimension of the vectors.
        member_dim: Name of the member dimension.
        fair: Estimate the score of an infinite ensemble of such members.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean score in the units of the data.

    Raises:
        ValueError: There is no member, or only one and `fair` is set.
    """
    score = lambda x, y: members.energy_score(x, y, fair=fair)  # noqa: E731
    found = vectors(score, forecast, observed, member_dim, variable_dim)
    return weighted_mean(in_units_of(observed, found), **reduction)


def variogram_score(
    forecast: xr.DataArray,
    observed: xr.DataArray,
    *,
    variable_dim: str,
    member_dim: str = "realization",
    order: float = 0.5,
    **reduction: Any,
) -> xr.DataArray:
    """Compute the variogram score of members that are vectors along `variable_dim`.

    Bring the variables to one scale first. Source: Scheuerer & Hamill (2015), doi:10.1175/MWR-D-14-00269.1.

    Args:
        forecast: Members along `member_dim`, each a vector along `variable_dim`.
        observed: Truth, a vector along `variable_dim`.
        variable_dim: Name of the dimension of the vectors.
        member_dim: Name of the member dimension.
        order: Power p of the differences, above zero.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean score, in the units of the variables to the power of 2 p.

    Raises:
        ValueError: `order` is not above zero and finite, there is only one variable, or there is no member.
    """
    score = lambda x, y: members.variogram_score(x, y, order)  # noqa: E731
    return weighted_mean(vectors(score, forecast, observed, member_dim, variable_dim), **reduction)


def efi(
    forecast: xr.DataArray, climate: xr.DataArray, *, member_dim: str = "realization", quantile_dim: str = "quantile"
) -> xr.DataArray:
    """Compute the extreme forecast index of an ensemble at each point (see `extremes.efi` for the formula).

    Args:
        forecast: Members along `member_dim`.
        climate: Quantiles of the model climate along `quantile_dim`, whose coordinate holds their probabilities from 0
            to 1.
        member_dim: Name of the member dimension.
        quantile_dim: Name of the quantile dimension.

    Returns:
        Index from -1 (all members below the climate) to 1 (all above).

    Raises:
        ValueError: The probabilities do not ascend from 0 to 1, or the quantiles do not ascend with them.
    """
    check_dim(forecast, member_dim)
    check_dim(climate, quantile_dim, "quantile_dim")
    levels = climate[quantile_dim].values
    check_units(forecast, climate)

    def index(x: np.ndarray, q: np.ndarray) -> np.ndarray:
        others = max(x.ndim, q.ndim) - 1
        return extremes.efi(core_first(x, others), core_first(q, others), levels)

    return xr.apply_ufunc(
        index, forecast, climate, input_core_dims=[[member_dim], [quantile_dim]], dask="parallelized",
        output_dtypes=[np.float64], keep_attrs=False,
    )  # fmt: skip


def eecrps(index: xr.DataArray, crps: xr.DataArray, **reduction: Any) -> xr.DataArray:
    """Compute the extreme event CRPS: the mean of |EFI| times CRPS.

    Source: Grönquist et al. (2021), doi:10.1098/rsta.2020.0092.

    Args:
        index: Extreme forecast index at each point, -1 to 1.
        crps: CRPS at each point.
        **reduction: Arguments of `weighted_mean`.

    Returns:
        The mean in the units of the CRPS.

    Raises:
        ValueError: An index is outside of -1 to 1, or in per cent.
    """
    check_no_per_cent("index", index.attrs.get("units"))

    def weighted(place: np.ndarray, score: np.ndarray) -> np.ndarray:
        check_between("index", place, -1, 1, "an extreme forecast index lies between -1 and 1; divide per cent by 100")
        return np.abs(np.asarray(place, np.float64)) * np.asarray(score, np.float64)

    return weighted_mean(in_units_of(crps, pointwise(weighted, bare(index), bare(crps))), **reduction)


def _law(family: Family | str) -> Family:
    try:
        return Family(family)
    except ValueError:
        raise UserError(f"family={family}: {', '.join(one.value for one in Family)} are allowed") from None


def _checked(check: Callable[..., None], data: xr.DataArray | None, *scalars: xr.DataArray) -> xr.DataArray | None:
    """Return `data`, whose values are checked at once, or when they are computed if the array is lazy.

    `scalars` are properties of the whole array. Each call of the check takes them, because it sees only one chunk.
    """
    if data is None or data.dtype == bool:
        return data

    def passed(values: np.ndarray, *more: np.ndarray) -> np.ndarray:
        check(values, *more)
        return values

    return xr.apply_ufunc(passed, data, *scalars, dask="parallelized", output_dtypes=[data.dtype], keep_attrs=True)


def _check_mask(values: np.ndarray) -> None:
    wrong = (values != 0) & (values != 1)  # NaN is wrong, too, as it does not say whether the point counts
    check_all("mask", values, wrong, "a mask is True where a point counts, and False elsewhere")


def _reduced(dims: tuple[Hashable, ...], reduce_dims: Dims, preserve_dims: Dims) -> list[Hashable]:
    """Return the dimensions to average over."""
    if reduce_dims is not None and preserve_dims is not None:
        raise ValueError("reduce_dims and preserve_dims exclude each other; give one")
    given = reduce_dims if reduce_dims is not None else preserve_dims
    named: list[Hashable] = list(dims) if given == "all" else [given] if isinstance(given, str) else list(given or ())
    missing = [name for name in named if name not in dims]
    if missing:
        raise ValueError(f"dimension {missing[0]}: not in the data, which has {', '.join(map(str, dims))}")
    if reduce_dims is None:
        return [name for name in dims if name not in named]
    return named


def _uniform(seed: int, *arrays: xr.DataArray) -> xr.DataArray:
    """Return a number in [0, 1) for each point of the arrays, determined by the seed and the position of the point.

    Numbers drawn chunk by chunk would depend on the chunks. Here, the finaliser of splitmix64 (Steele, Lea and Flood
    2014, doi:10.1145/2660193.2660195) mixes the position of a point in the whole array.
    """
    # Positions count over all dimensions together, and are as lazy and chunked as the arrays.
    sizes = {dim: size for array in arrays for dim, size in array.sizes.items()}
    chunks = {dim: parts for array in arrays for dim, parts in array.chunksizes.items()}
    begun = np.array(seed * 0x9E3779B97F4A7C15 % 2**64, np.uint64)
    place = xr.DataArray(np.zeros(1, np.uint64), dims=["_one"])  # NumPy warns of overflow in scalars, but not in arrays
    for dim, size in sizes.items():
        ticks = xr.DataArray(np.arange(size, dtype=np.uint64), dims=[dim])
        place = place * np.uint64(size) + (ticks.chunk({dim: chunks[dim]}) if dim in chunks else ticks)

    def mixed(word: np.ndarray) -> np.ndarray:
        word = word + begun
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((word ^ (word >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    return xr.apply_ufunc(mixed, place, dask="parallelized", output_dtypes=[np.float64]).isel(_one=0)


def _ranks(x: np.ndarray, y: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    shape = np.broadcast_shapes(x.shape[1:], y.shape)
    # A comparison with NaN is false, so a missing member would count as above the truth. Such points become NaN.
    rank = members.rank_of_truth(x, np.broadcast_to(y, shape), np.broadcast_to(uniform, shape))
    return np.where(np.isnan(x).any(0) | np.isnan(y), np.nan, rank)


def _histogram(where: xr.DataArray, bins: int, name: str, **reduction: Any) -> xr.DataArray:
    """Return the share of points in each bin along a new dimension. NaN at an unmasked point makes the shares NaN."""
    parts = [weighted_mean(xr.where(np.isnan(where), np.nan, where == k), **reduction) for k in range(bins)]
    return xr.concat(parts, xr.DataArray(np.arange(bins), dims=name, name=name))
