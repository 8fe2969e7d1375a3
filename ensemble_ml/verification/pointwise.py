"""Scores of NumPy arrays applied to xarray objects whose coordinates and units agree; lazily where these are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

from ensemble_ml.fields import same_units


def check_dim(data: xr.DataArray, name: str, argument: str = "member_dim") -> int:
    """Length of a dimension, of members where no other `argument` names it; a ValueError where it is not there."""
    if name not in data.dims:
        raise ValueError(
            f"dimension {name}: not in the data, which has {', '.join(map(str, data.dims))}; give {argument}"
        )
    return int(data.sizes[name])


def check_units(first: xr.DataArray, *others: xr.DataArray, widths: tuple[int, ...] = ()) -> None:
    """Raise a ValueError where two state units that differ; at the places `widths`, of a scale, zero is no matter."""
    told = {place: str(array.attrs["units"]) for place, array in enumerate((first, *others)) if "units" in array.attrs}
    truth = max(told, default=0)
    for place, units in told.items():
        if not same_units(units, told[truth], differences=not {place, truth}.isdisjoint(widths)):
            raise ValueError(f"units {units!r} and {told[truth]!r} differ; bring the data to one of them")


def aligned(first: xr.DataArray, second: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Both in float64, refused where coordinates differ."""
    one, other = xr.align(first, second, join="exact", copy=False)
    return one.astype(np.float64), other.astype(np.float64)


def bare(score: xr.DataArray) -> xr.DataArray:
    """Without units, standard name and family of the variable: xarray may hand them on, and a score has others."""
    return score.drop_attrs(deep=False)


def in_units_of(data: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """`score` with the units of `data`, where it has any."""
    units = data.attrs.get("units")
    return score if units is None else score.assign_attrs(units=units)


def pointwise(
    function: Callable[..., np.ndarray], *arrays: xr.DataArray, core: str | None = None, widths: tuple[int, ...] = ()
) -> xr.DataArray:
    """Apply to arrays point by point; the first has members along `core`, which the function gets first. `widths`: the
    places of scales among them.

    Raises:
        ValueError: units differ.
    """
    check_units(*arrays, widths=widths)
    core_dims = [[core] if core and i == 0 else [] for i in range(len(arrays))]

    def inner(first: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        if core:
            first = core_first(first, max(first.ndim - 1, *(array.ndim for array in rest)))
            shape = np.broadcast_shapes(first.shape[1:], *(array.shape for array in rest))
            rest = tuple(np.broadcast_to(array, shape) for array in rest)
        return function(first, *rest)

    return xr.apply_ufunc(
        inner, *arrays, input_core_dims=core_dims, dask="parallelized", output_dtypes=[np.float64], keep_attrs=False
    )


def core_first(values: np.ndarray, others: int, core: int = 1) -> np.ndarray:
    """The last `core` axes first, before `others` axes: a dimension that another alone has leads those of this."""
    padded = values.reshape((1,) * (others + core - values.ndim) + values.shape)
    return np.moveaxis(padded, range(-core, 0), range(core))


def vectors(
    function: Callable[..., np.ndarray], forecast: xr.DataArray, observed: xr.DataArray, member: str, variable: str
) -> xr.DataArray:
    """Apply to members (M, V, ...) and truth (V, ...) of the vectors along `variable`, point by point.

    Raises:
        ValueError: a dimension is not there, or units differ.
    """
    check_dim(forecast, member)
    for side in (forecast, observed):
        check_dim(side, variable, "variable_dim")
    check_units(forecast, observed)

    def inner(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        others = max(x.ndim - 2, y.ndim - 1)
        return function(core_first(x, others, 2), core_first(y, others))

    return xr.apply_ufunc(
        inner, forecast, observed, input_core_dims=[[member, variable], [variable]], dask="parallelized",
        output_dtypes=[np.float64], keep_attrs=False,
    )  # fmt: skip
