"""Scores of xarray objects, in the convention of `scores`: data by position, everything else by keyword.

Every score but `efi` takes `reduce_dims` (dimensions to average over; None averages over all) or `preserve_dims`
(dimensions to keep, "all" for the values at each point), `weights` (broadcast; `area_weights` makes exact cell areas)
and `mask` (bool, points that count). A missing value that no mask leaves out makes the mean NaN, and coordinates that
differ are refused, as are units, where both sides state them: nothing is skipped in silence. What has no meaning has no
score: probabilities outside of 0 to 1, events other than 0 and 1, negative scales and weights, levels outside of (0, 1)
and the like raise a `UserError`, which is a ValueError, at points that a mask leaves out as well (make these NaN). All
is computed in float64, whatever the type of the data. Dask arrays stay lazy: their values are checked as they are
computed. Chunks change no score; member, variable and quantile dimensions must lie in one chunk. Scores in the
variable's units have these as their attribute `units`, the others none.
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
    """Exact area of each cell over the mean area, from the sines of the cells' bounds: (latitude, longitude).

    Raises:
        UserError: latitudes beyond the poles, or axes of no regular grid.
    """
    lat, lon = data[latitude], data[longitude]
    check_all(latitude, lat.values, np.abs(lat.values) > 90 + TOLERANCE, "latitudes lie between -90 and 90 degrees")
    grid, rows, columns = canonical(lat.values, lon.values)
    areas = np.zeros((len(lat), len(lon)))  # a meridian that stands there twice counts once
    areas[rows[:, None], columns] = grid.area_weights()
    return xr.DataArray(areas, dims=(latitude, longitude), coords={latitude: lat, longitude: lon})


def at_places_of(
    data: Data, forecast: xr.DataArray | xr.Dataset, *, latitude: str = "latitude", longitude: str = "longitude"
) -> Data:
    """`data` at the grid points of a forecast, of a region or all, and with the forecast's coordinates.

    Forecasts of a region that crosses Greenwich count longitudes from below zero, archives from 0 to 360: xarray, which
    compares the numbers, would drop what lies west of it. Here longitudes that differ by 360 degrees are the same.

    Raises:
        ValueError: the forecast is at points, or where `data` has no grid point.
    """
    if not {latitude, longitude} <= set(forecast.dims):
        held = ", ".join(map(str, forecast.dims))
        raise ValueError(f"forecast at points (its dimensions: {held}), not on a grid; give one made without points=")
    chosen, wanted = {}, {name: forecast[name] for name in (latitude, longitude)}
    for name, axis in wanted.items():
        apart = axis.values[:, None] - data[name].values.astype(np.float64)
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
    """Sum of weighted values over sum of weights, of the points that `mask` keeps; NaN where none is left.

    Weights may cover more than the values do; along dimensions that they or the mask have beside, values are repeated.

    Raises:
        ValueError: both `reduce_dims` and `preserve_dims` are given, or a dimension that is not there; weights are
            negative, or the mask holds anything but True and False (or 1 and 0).
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
    if not over and mask is None:
        return values
    w = xr.ones_like(values, dtype=np.float64)
    if weights is not None:
        w = xr.align(values, weights, join="left", copy=False)[1].astype(np.float64).broadcast_like(values)
    if mask is not None:
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
    """CRPS of an ensemble, fair or ordinary; threshold-weighted to what lies between `lower` and `upper`.

    Ferro (2014), doi:10.1002/qj.2270; Allen et al. (2023), doi:10.1137/22M1532184.

    Raises:
        ValueError: a fair score of one member, or `lower` not below `upper`.
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
    """CRPS of a parametric forecast; `family` as the attribute `distribution_family` names it.

    In closed form, or threshold-weighted to what lies above `lower` (`families.crps_above`: Gneiting & Ranjan 2011,
    doi:10.1198/jbes.2010.08110).

    Raises:
        ValueError: a family that is not known, or a negative scale; a scale of zero is a point forecast.
    """
    law = _law(family)
    score = lambda mu, sigma, y: families.crps_above(law, mu, sigma, y, lower)  # noqa: E731
    found = pointwise(score, location, scale, observed, widths=(1,))
    return weighted_mean(in_units_of(observed, found), **reduction)


def log_score(
    location: xr.DataArray, scale: xr.DataArray, observed: xr.DataArray, *, family: Family | str, **reduction: Any
) -> xr.DataArray:
    """Minus the log of the predicted density, or of the mass at a bound of a censored law; nats.

    Good (1952); Gneiting & Raftery (2007), doi:10.1198/016214506000001437, equation 9.

    Raises:
        ValueError: a family that is not known, or a scale that is not above zero: a point forecast has no density.
    """
    law = _law(family)
    score = lambda *a: families.log_score(law, *a)  # noqa: E731
    return weighted_mean(pointwise(score, location, scale, observed, widths=(1,)), **reduction)


def spread_skill(
    forecast: xr.DataArray, observed: xr.DataArray, *, member_dim: str = "realization", **reduction: Any
) -> xr.DataArray:
    """Root of (M + 1) / M times the mean variance, over the RMSE of the ensemble mean: one for a perfect ensemble.

    Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1.

    Raises:
        ValueError: one member alone, which has no spread.
    """
    m = check_dim(forecast, member_dim)
    check_count(member_dim, m, 2, "a spread is of several members")
    check_units(forecast, observed)
    forecast, observed = aligned(forecast, observed)
    variance = forecast.var(member_dim, ddof=1, skipna=False) * (1 + 1 / m)
    error = (forecast.mean(member_dim, skipna=False) - observed) ** 2
    variance = variance.broadcast_like(error)
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
    """Share of points at each rank of the truth (0..M) along `rank`; ties are broken at random (Talagrand)."""
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
    """Share of points in each of `bins` equal bins of the probability integral transform, along `pit`.

    At a mass of a censored law the value is drawn at random within the jump.

    Raises:
        ValueError: a family that is not known, a negative scale, or no bins.
    """
    law = _law(family)
    check_count("bins", bins, 1, "values are counted in equal bins")

    def where(mu: np.ndarray, sigma: np.ndarray, y: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        value = probability.pit(law, mu, sigma, y, uniform)
        return np.where(np.isnan(value), np.nan, probability.bin_of(value, bins))

    uniform = _uniform(seed, location, scale, observed)
    found = pointwise(where, location, scale, observed, uniform, widths=(1,))
    return _histogram(found, bins, "pit", **reduction)


def brier_score(forecast: xr.DataArray, event: xr.DataArray, **reduction: Any) -> xr.DataArray:
    """Mean squared difference of a probability and what happened (0 or 1). Brier (1950).

    Raises:
        ValueError: probabilities outside of 0 to 1 or in units of per cent, or events that are neither 0 nor 1 (False
            nor True).
    """
    check_no_per_cent("forecast", forecast.attrs.get("units"))
    score = pointwise(probability.brier_score, bare(forecast), bare(event))  # an event may keep its variable's units
    return weighted_mean(score, **reduction)


def quantile_score(forecast: xr.DataArray, observed: xr.DataArray, *, level: float, **reduction: Any) -> xr.DataArray:
    """Pinball loss of a predicted quantile.

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
    """Energy score of members over the vector along `variable_dim`. Gneiting & Raftery (2007), equation 22.

    Raises:
        ValueError: a fair score of one member.
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
    """Variogram score of members over the vector along `variable_dim`. Scheuerer & Hamill (2015).

    Raises:
        ValueError: `order` is not above zero, or there is one variable alone.
    """
    score = lambda x, y: members.variogram_score(x, y, order)  # noqa: E731
    return weighted_mean(vectors(score, forecast, observed, member_dim, variable_dim), **reduction)


def efi(
    forecast: xr.DataArray, climate: xr.DataArray, *, member_dim: str = "realization", quantile_dim: str = "quantile"
) -> xr.DataArray:
    """Extreme forecast index of an ensemble; `climate` holds quantiles of the model climate, from 0 to 1.

    Raises:
        ValueError: the levels do not ascend from 0 to 1, or the quantiles do not ascend with them.
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
    """Extreme event CRPS: mean of |EFI| CRPS, from both at each point.

    Grönquist et al. (2021), doi:10.1098/rsta.2020.0092.

    Raises:
        ValueError: an index outside of -1 to 1, or in units of per cent.
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
    """Return `data`, which is checked now, or as it is computed where it is lazy; `scalars` go to each check."""
    if data is None or data.dtype == bool:
        return data

    def passed(values: np.ndarray, *more: np.ndarray) -> np.ndarray:
        check(values, *more)
        return values

    return xr.apply_ufunc(passed, data, *scalars, dask="parallelized", output_dtypes=[data.dtype], keep_attrs=True)


def _check_mask(values: np.ndarray) -> None:
    wrong = (values != 0) & (values != 1)  # NaN, too: whether such a point counts is not said
    check_all("mask", values, wrong, "a mask is True where a point counts, and False elsewhere")


def _reduced(dims: tuple[Hashable, ...], reduce_dims: Dims, preserve_dims: Dims) -> list[Hashable]:
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
    """A number in [0, 1) for each point of the arrays together, by the seed and its place: chunks do not change it.

    The finaliser of splitmix64 (Steele, Lea and Flood 2014), over the counted points.
    """
    sizes = {dim: size for array in arrays for dim, size in array.sizes.items()}
    chunks = {dim: parts for array in arrays for dim, parts in array.chunksizes.items()}
    begun = np.array(seed * 0x9E3779B97F4A7C15 % 2**64, np.uint64)
    place = xr.DataArray(np.zeros(1, np.uint64), dims=["_one"])  # arrays wrap in silence, single numbers warn
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
    rank = members.rank_of_truth(x, np.broadcast_to(y, shape), np.broadcast_to(uniform, shape))
    return np.where(np.isnan(x).any(0) | np.isnan(y), np.nan, rank)


def _histogram(where: xr.DataArray, bins: int, name: str, **reduction: Any) -> xr.DataArray:
    """Shares of the bins; NaN points make them NaN, as everywhere."""
    parts = [weighted_mean(xr.where(np.isnan(where), np.nan, where == k), **reduction) for k in range(bins)]
    return xr.concat(parts, xr.DataArray(np.arange(bins), dims=name, name=name))
