"""Apply scores of NumPy arrays to xarray objects whose coordinates and units agree. Dask arrays stay lazy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.units import same_units


def check_dim(data: xr.DataArray | xr.Dataset, name: str, argument: str = "member_dim") -> int:
    """Return the length of a dimension. `argument` names the argument that gives it, for the message.

    Raises:
        ValueError: The data has no such dimension.
    """
    if name not in data.dims:
        raise ValueError(
            f"dimension {name}: not in the data, which has {', '.join(map(str, data.dims))}; give {argument}"
        )
    return int(data.sizes[name])


def axis_of(data: xr.DataArray | xr.Dataset, name: str) -> xr.DataArray:
    """Return the coordinate of an axis of the grid.

    Raises:
        ValueError: The data has no such dimension.
        UserError: The dimension has no coordinate.
    """
    check_dim(data, name, "the names of both axes")
    if name not in data.coords:  # xarray would give the numbers of the points, which would pass for degrees
        raise UserError(f"dimension {name}: has no coordinate; give its degrees, as with assign_coords")
    return data[name]


def check_units(first: xr.DataArray, *others: xr.DataArray, widths: tuple[int, ...] = ()) -> None:
    """Refuse arrays whose units differ. Arrays without units pass.

    `widths` are the positions of arrays that are scales of a distribution, from 0 for `first`. A scale is a difference,
    so it may be in kelvin where another array is in degrees Celsius.

    Raises:
        ValueError: Two arrays state different units.
    """
    stated = {place: str(one.attrs["units"]) for place, one in enumerate((first, *others)) if "units" in one.attrs}
    last = max(stated, default=0)
    for place, units in stated.items():
        if not same_units(units, stated[last], differences=not {place, last}.isdisjoint(widths)):
            raise ValueError(f"units {units!r} and {stated[last]!r} differ; bring the data to one of them")


def aligned(first: xr.DataArray, second: xr.DataArray, core: str) -> tuple[xr.DataArray, xr.DataArray]:
    """Return two arrays in float64, and refuse coordinates that differ.

    Raises:
        ValueError: Their coordinates differ, or the second array has the dimension of the members, `core`, too.
    """
    if core in second.dims:
        raise ValueError(f"dimension {core}: is that of the members, and the truth has it, too; choose one of it")
    one, other = xr.align(first, second, join="exact", copy=False)
    return one.astype(np.float64), other.astype(np.float64)


def bare(score: xr.DataArray) -> xr.DataArray:
    """Remove all attributes, such as units and standard name, but those of coordinates.

    xarray may pass attributes on, but those of a score differ from those of its variable.
    """
    return score.drop_attrs(deep=False)


def in_units_of(data: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """Return `score` with the units of `data`, if it has any."""
    units = data.attrs.get("units")
    return score if units is None else score.assign_attrs(units=units)


def pointwise(
    function: Callable[..., np.ndarray], *arrays: xr.DataArray, core: str | None = None, widths: tuple[int, ...] = ()
) -> xr.DataArray:
    """Apply a function to arrays point by point.

    Args:
        function: A function of NumPy arrays that returns float64.
        *arrays: Its arguments. Their coordinates must agree.
        core: Dimension of the members, which only the first array has and which the function receives as first axis;
            None if there are no members.
        widths: Positions of arrays that are scales (see `check_units`).

    Returns:
        The function's values at each point, without attributes.

    Raises:
        ValueError: Units or coordinates differ, or the first array has no dimension `core` or has several Dask chunks
            along it.
    """
    check_units(*arrays, widths=widths)
    core_dims = [[core] if core and i == 0 else [] for i in range(len(arrays))]

    def inner(first: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        if core:
            # apply_ufunc puts the core dimension last and may omit leading dimensions that only other arrays have.
            # Scores take the members first and need all arrays at full rank.
            first = core_first(first, max(first.ndim - 1, *(array.ndim for array in rest)))
            shape = np.broadcast_shapes(first.shape[1:], *(array.shape for array in rest))
            rest = tuple(np.broadcast_to(array, shape) for array in rest)
        return function(first, *rest)

    return xr.apply_ufunc(
        inner, *arrays, input_core_dims=core_dims, dask="parallelized", output_dtypes=[np.float64], keep_attrs=False
    )


def core_first(values: np.ndarray, others: int, core: int = 1) -> np.ndarray:
    """Move the last `core` axes to the front, and pad the others to `others` axes with axes of length one.

    NumPy broadcasts from the right, so an axis that only another array has must come before the axes of this one.
    """
    padded = values.reshape((1,) * (others + core - values.ndim) + values.shape)
    return np.moveaxis(padded, range(-core, 0), range(core))


def vectors(
    function: Callable[..., np.ndarray], forecast: xr.DataArray, observed: xr.DataArray, member: str, variable: str
) -> xr.DataArray:
    """Apply a function to members (M, V, ...) and truth (V, ...) of vectors, point by point.

    `member` and `variable` are the names of the dimensions M and V. The result has no attributes.

    Raises:
        ValueError: A dimension is missing, an array has several Dask chunks along `member` or `variable`, or units or
            coordinates differ.
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
