"""Find values of NetCDF files and Zarr stores that are missing without a `_FillValue`: unwritten, or out of range.

The rules are those of the NetCDF Users Guide ("Attribute Conventions") and of the CF conventions, section 2.5.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from data_prep.axes import check_there
from data_prep.notices import notice_log
from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import group_in, is_file, is_remote, open_remote, open_zarr_array

log = notice_log(__name__)

_PACKED = "scale_factor", "add_offset"
_ROUNDING = 1e-6  # tolerance as a fraction of a limit: values may have fewer digits than the limit


def open_netcdf(path: str) -> xr.Dataset:
    """Open a NetCDF file lazily, with NaN for packed integers that were never written.

    Such integers have the library's default fill value of their type, even if the file has no `_FillValue`. Integers of
    one byte have no default (NetCDF Users Guide, "Attribute Conventions").

    Raises:
        UserError: a value of the coordinate of a dimension was never written.
    """
    raw = xr.open_dataset(path, decode_cf=False)
    for axis in raw.coords.values():
        _check_written(axis)
    return _decoded(raw)


def is_zarr_store(path: str) -> bool:
    """Return whether a path is that of a Zarr store: a folder, or a URL that is not of a GRIB or NetCDF file."""
    return os.path.isdir(path) or (is_remote(path) and not is_file(path))


def open_zarr(path: str) -> xr.Dataset:
    """Open a Zarr store lazily. In variables that are not packed, zero is a value unless an attribute says otherwise.

    Zarr's own libraries state a fill value of zero for any array that was given none. In Zarr version 2, xarray takes
    this zero for the mark of missing values if no attribute states one. That would hide the equator, the first member,
    and points without rain. Values that were never written are found by other means (see `data_prep.zarr_chunks`).

    Raises:
        UserError: a remote store cannot be read, or lacks a chunk of a coordinate.
    """
    if is_remote(path):
        where: Any = open_remote(path)
        raw = xr.open_dataset(where, engine="zarr", group=group_in(path) or None, decode_cf=False)
    else:
        raw = xr.open_dataset(path, engine="zarr", decode_cf=False)
    if is_remote(path):
        _check_there(path, where.absent, raw)
    for name, array in raw.variables.items():
        fill = np.ravel(array.attrs.get("_FillValue", ()))
        packed = any(key in array.attrs for key in _PACKED)
        if not packed and fill.size == 1 and fill.dtype.kind in "iuf" and fill[0] == 0 and not _said(path, name):
            del array.attrs["_FillValue"]
            if name in raw.data_vars:
                log.info("%s: %s: zeros are values, though its fill value is zero", path, name)
    return _decoded(raw, written=True)


def _check_there(path: str, absent: Collection[str], raw: xr.Dataset) -> None:
    """Refuse a remote store that lacks a chunk of a coordinate: the chunk would read as the fill value.

    A chunk whose values all equal the fill value may be absent. The values of a coordinate differ, so this is accepted
    only for a coordinate of a single value.

    Args:
        path: the store.
        absent: keys that were requested and are not in the store.
        raw: the opened store.
    """
    for name, axis in raw.coords.items():
        missing = [key for key in absent if key.startswith(f"{group_in(path)}/{name}/".lstrip("/"))]
        if missing and axis.size > 1:
            raise UserError(f"{path}: {missing[0]} is not there (404), but {name} has {axis.size} values; try again")


def _said(path: str, name: Hashable) -> bool:
    """Return whether an attribute of a Zarr variable states the value that stands for missing ones."""
    return "_FillValue" in open_zarr_array(path, str(name)).attrs


def _decoded(raw: xr.Dataset, *, written: bool = False) -> xr.Dataset:
    """Return the file with scales, missing values and times decoded.

    Args:
        raw: the file without decoding.
        written: whether values that were never written are found by other means.
    """
    for array in raw.data_vars.values():
        _as_values(array)
        packed = array.dtype.kind in "iu" and any(name in array.attrs for name in _PACKED)
        unsaid = not {"_FillValue", "missing_value"} & array.attrs.keys()
        # For integers that are to be read as unsigned, the library's fill value lies in the middle of the range.
        unsaid &= not unsigned(array.attrs)
        # xarray turns only values that an attribute names into NaN, so the library's default is named here.
        if packed and unsaid and array.dtype.itemsize > 1 and not written:
            fill = netCDF4.default_fillvals[f"{array.dtype.kind}{array.dtype.itemsize}"]
            array.attrs["_FillValue"] = array.dtype.newbyteorder("=").type(fill)
    return xr.decode_cf(raw, decode_timedelta=False)


def _check_written(axis: xr.DataArray) -> None:
    """Refuse a coordinate with values that were never written.

    The library's fill values, or xarray's for dates, would otherwise become leads and members.
    """
    fill = netCDF4.default_fillvals.get(f"{axis.dtype.kind}{axis.dtype.itemsize}")
    if fill is None or axis.dtype.itemsize == 1 or axis.dtype.kind not in "iuf":
        return
    values = axis.values
    absent = values == np.array(fill).astype(values.dtype)
    if values.dtype.kind == "i":
        absent |= values == np.iinfo(np.int64).min
    check_there(axis, absent, "never written")


def unsigned(about: Mapping[str, Any]) -> bool:
    """Return whether integers are to be read as unsigned, by the attributes or encoding of their variable.

    Classic NetCDF files have no unsigned types and use the attribute `_Unsigned`.
    """
    return str(about.get("_Unsigned", "")).lower() == "true"


def _as_values(array: xr.DataArray) -> None:
    """Convert the attributes that mark missing values to the type of the values.

    1e20 as float64 or as text equals no float32 value, and -1 equals no unsigned integer. xarray converts the
    `_FillValue` of unsigned integers itself.
    """
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
    """Return the smallest and largest valid value by CF's valid_range, valid_min and valid_max.

    Integer limits apply to packed values, other limits to unpacked ones.

    Returns:
        Both limits in the units of `array`, widened for rounding. They are infinite where none is stated, and both are
        if one is not a single number.
    """
    both = np.ravel(array.attrs.get("valid_range", ()))
    low, high = both if len(both) == 2 else (None, None)
    ends = [array.attrs.get("valid_min", low), array.attrs.get("valid_max", high)]
    given = [np.asarray(end) for end in ends if end is not None]
    if not all(end.dtype.kind in "iuf" and end.size == 1 for end in given):
        return -np.inf, np.inf
    about = array.encoding
    whole = all(end.dtype.kind in "iu" for end in given)
    # The limits are stored as signed integers, like the values, and must be reinterpreted like them.
    if whole and unsigned(about):
        given = [end.astype(f"u{end.dtype.itemsize}") for end in given]
    numbers = iter(given)
    least, most = (
        none if end is None else float(next(numbers)) for end, none in zip(ends, (-np.inf, np.inf), strict=True)
    )
    if whole and any(name in about for name in _PACKED):
        # The limits are widened by half a packing step, because they are compared with unpacked values.
        scale, offset = (float(about.get(name, other)) for name, other in zip(_PACKED, (1.0, 0.0), strict=True))
        least, most = sorted(((least - 0.5) * scale + offset, (most + 0.5) * scale + offset))
        return least, most
    return least - _ROUNDING * abs(least), most + _ROUNDING * abs(most)
