"""Values of NetCDF files that are none, though no attribute says so: never written, or not in their range."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Mapping
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from data_prep.axes import check_there

log = logging.getLogger(__name__)

_PACKED = "scale_factor", "add_offset"
_ROUNDING = 1e-6  # of a limit: values may be kept with fewer digits than it


def open_netcdf(path: str) -> xr.Dataset:
    """Open a NetCDF file lazily; packed integers that were never written are NaN in it.

    They hold the library's fill value of their type, which is not said where there is no `_FillValue`. Integers of one
    byte have none (NetCDF Users Guide, "Attribute Conventions").

    Raises:
        UserError: a coordinate was not written to its end.
    """
    raw = xr.open_dataset(path, decode_cf=False)
    for axis in raw.coords.values():
        _check_written(axis)
    return _decoded(raw)


def open_zarr(path: str) -> xr.Dataset:
    """Open a Zarr store of NetCDF's conventions lazily.

    Zeros are values. A fill value of zero is what Zarr's own libraries say of an array that nobody gave one, and what
    xarray takes, in version 2, for the mark of a missing value where no attribute has one: the equator, the first
    member, no rain. (What was never written is told by other means: see `zarr_chunks`.)
    """
    raw = xr.open_dataset(path, engine="zarr", decode_cf=False)
    for name, array in raw.variables.items():
        fill = np.ravel(array.attrs.get("_FillValue", ()))
        packed = any(key in array.attrs for key in _PACKED)
        if not packed and fill.size == 1 and fill.dtype.kind in "iuf" and fill[0] == 0 and not _said(path, name):
            del array.attrs["_FillValue"]
            if name in raw.data_vars:
                log.info("%s: %s: zeros are values, though its fill value is zero", path, name)
    return _decoded(raw, written=True)


def _said(path: str, name: Hashable) -> bool:
    """Whether an attribute of a variable of a Zarr store says what stands for missing values."""
    import zarr

    return "_FillValue" in zarr.open_array(os.path.join(path, str(name)), mode="r").attrs


def _decoded(raw: xr.Dataset, *, written: bool = False) -> xr.Dataset:
    """Scales and missing values applied; `written`: what was never written is told by other means."""
    for array in raw.data_vars.values():
        _as_values(array)
        packed = array.dtype.kind in "iu" and any(name in array.attrs for name in _PACKED)
        unsaid = not {"_FillValue", "missing_value"} & array.attrs.keys()
        # Of integers to be taken as unsigned the library's fill value is one in the middle of the range.
        unsaid &= not unsigned(array.attrs)
        if packed and unsaid and array.dtype.itemsize > 1 and not written:
            fill = netCDF4.default_fillvals[f"{array.dtype.kind}{array.dtype.itemsize}"]
            array.attrs["_FillValue"] = array.dtype.newbyteorder("=").type(fill)
    return xr.decode_cf(raw, decode_timedelta=False)


def _check_written(axis: xr.DataArray) -> None:
    """Raise a UserError where a dimension is longer than what was written of its coordinate: the library's fill values,
    or xarray's for dates, would be leads and members like others."""
    fill = netCDF4.default_fillvals.get(f"{axis.dtype.kind}{axis.dtype.itemsize}")
    if fill is None or axis.dtype.itemsize == 1 or axis.dtype.kind not in "iuf":
        return
    values = axis.values
    absent = values == np.array(fill).astype(values.dtype)
    if values.dtype.kind == "i":
        absent |= values == np.iinfo(np.int64).min
    check_there(axis, absent, "never written")


def unsigned(about: Mapping[str, Any]) -> bool:
    """Whether integers are to be taken as unsigned, which classic files have none of, by the attributes or the encoding
    of their variable."""
    return str(about.get("_Unsigned", "")).lower() == "true"


def _as_values(array: xr.DataArray) -> None:
    """Let missing values have the type of the values: 1e20 of float64, or as text, equals no float32, and -1 is no
    unsigned integer (whose `_FillValue` xarray sees to)."""
    whole = array.dtype.kind == "i" and unsigned(array.attrs)
    if array.dtype.kind != "f" and not whole:
        return
    for name in ({"missing_value"} if whole else {"_FillValue", "missing_value"}) & array.attrs.keys():
        said = np.ravel(array.attrs[name])
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                if whole:
                    values = said.astype(np.int64).astype(f"u{array.dtype.itemsize}")
                else:
                    values = said.astype(np.float64).astype(array.dtype.newbyteorder("="))
        except ValueError:  # a text that is no number
            del array.attrs[name]
            continue
        array.attrs[name] = values[0] if values.size == 1 else values


def valid_limits(array: xr.DataArray) -> tuple[float, float]:
    """Smallest and largest valid value in the units of `array`, by CF's valid_range, valid_min and valid_max; infinite
    where nothing is said. Integers say it of packed values, other numbers of unpacked ones."""
    both = np.ravel(array.attrs.get("valid_range", ()))
    low, high = both if len(both) == 2 else (None, None)
    ends = [array.attrs.get("valid_min", low), array.attrs.get("valid_max", high)]
    given = [np.asarray(end) for end in ends if end is not None]
    if not all(end.dtype.kind in "iuf" and end.size == 1 for end in given):
        return -np.inf, np.inf
    about = array.encoding
    if unsigned(about):
        given = [end.astype(f"u{end.dtype.itemsize}") for end in given]
    numbers = iter(given)
    least, most = (
        none if end is None else float(next(numbers)) for end, none in zip(ends, (-np.inf, np.inf), strict=True)
    )
    if any(name in about for name in _PACKED) and all(end.dtype.kind in "iu" for end in given):
        scale, offset = (float(about.get(name, other)) for name, other in zip(_PACKED, (1.0, 0.0), strict=True))
        least, most = sorted(((least - 0.5) * scale + offset, (most + 0.5) * scale + offset))
        return least, most
    return least - _ROUNDING * abs(least), most + _ROUNDING * abs(most)
