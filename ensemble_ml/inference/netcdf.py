"""Writes one start date's forecast as a CF-1.11 NetCDF file that appears under its name only when it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK

from ensemble_ml.errors import UserError
from ensemble_ml.fields import field as registered
from ensemble_ml.folders import draft_of, give_name
from ensemble_ml.inference.contents import (
    HEIGHTS,
    TIME_AXES,
    Header,
    Output,
    attributes,
    dimensions,
    height_name,
)
from ensemble_ml.inference.select import Places
from ensemble_ml.training.checkpoint import sync

# HDF5 serves one thread at a time, and a thread may be reading an archive through xarray: xarray's own lock keeps
# the two apart.
_LOCK = NETCDF4_PYTHON_LOCK
_CHUNK = 1 << 20  # bytes: small grids go whole into a chunk, large ones field by field
_CLOCK = {
    "units": "seconds since 1970-01-01 00:00:00",
    "calendar": "proleptic_gregorian",
}


def file_name(init_time: np.datetime64) -> str:
    """forecast_YYYYMMDDHH.nc, with minutes where there are any."""
    start = init_time.astype("datetime64[m]").item()
    return f"forecast_{start:%Y%m%d%H}{f'{start:%M}' if start.minute else ''}.nc"


def read_attributes(path: Path) -> dict[str, Any]:
    """Global attributes of a file; none where it is no NetCDF."""
    with _LOCK:
        try:
            with netCDF4.Dataset(path) as data:
                return {name: data.getncattr(name) for name in data.ncattrs()}
        except (OSError, RuntimeError):
            return {}


def write_forecast(path: Path, header: Header, outputs: Iterable[Output], *, replace: bool = True) -> Path:
    """Write `outputs`, taken one by one, to `path`, where the file appears in one step at the end; what stands there is
    replaced, or left where `replace` is off.

    Raises:
        UserError: the file cannot be written, or another process has made it meanwhile.
    """
    with _access(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = draft_of(path)
    data: netCDF4.Dataset | None = None
    try:
        with _access(path):
            data = netCDF4.Dataset(partial, "w", format="NETCDF4")
            _coordinates(data, header)
        for output in outputs:  # computed while the lock is free
            with _access(path):
                _data_variable(data, header, output)
        with _access(path):
            data.close()
            for each in (partial, path.parent):
                sync(each)
            give_name(partial, path, replace=replace)
            sync(path.parent)
    finally:
        with _LOCK, suppress(OSError, RuntimeError):  # a full disk refuses the close, too
            if data is not None and data.isopen():
                data.close()
        partial.unlink(missing_ok=True)
    return path


@contextmanager
def _access(path: Path) -> Iterator[None]:
    """Hold the lock, and tell the user of what goes wrong with the file; netCDF4 raises RuntimeError on a full disk."""
    with _LOCK:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"output {path}: cannot be written ({error}); mend that or choose another output"
            ) from error


def _coordinates(data: netCDF4.Dataset, header: Header) -> None:
    short = {name: dates.text for name, dates in header.dates.items()}
    about = {"Conventions": "CF-1.11", **header.attributes, **short}
    data.setncatts({key: value for key, value in about.items() if value})
    for name, dates in header.dates.items():
        if len(dates.values) and not dates.text:
            # A coordinate of its own: a data variable would be repeated for each start where files are concatenated.
            seconds = dates.values.astype("datetime64[s]").astype(np.int64)
            _axis(data, name, seconds, {"long_name": name.replace("_", " "), **_CLOCK})
    _times(data, header)
    _space(data, header.places)
    if len(header.levels):
        level = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa", "positive": "down"}
        _axis(data, "level", np.asarray(header.levels, np.int32), {**level, "axis": "Z"})
    if len(header.quantiles):
        about = {"long_name": "probability that the value is not exceeded", "units": "1"}
        _axis(data, "quantile", np.asarray(header.quantiles, np.float64), about)
    for name, values in header.thresholds.items():
        known = registered(name)
        about = {
            "standard_name": known.standard_name,
            "long_name": f"{known.long_name}, threshold",
            "units": known.units,
        }
        temperature = {"units_metadata": "temperature: on_scale"} if known.temperature else {}
        _axis(data, f"threshold_{name}", np.asarray(values, np.float64), about | temperature)
    if len(header.members):
        # No axis attribute: CF keeps it for the axes of space and time.
        about = {"standard_name": "realization", "long_name": "member number", "units": "1"}
        _axis(data, "realization", np.asarray(header.members, np.int32), about)


def _times(data: netCDF4.Dataset, header: Header) -> None:
    """Write the start as an axis of length one, and the lead times.

    Files of several starts concatenate along the start, which is unlimited, as `ncrcat` wants it. Valid times belong to
    both axes: as an axis of their own they would overlap between files, and whoever opens many files as one would get
    the union of all valid times, most of it empty.
    """
    start = int(header.init_time.astype("datetime64[s]").astype(np.int64))
    leads = np.asarray(header.leads, np.int64)
    reference = {"standard_name": "forecast_reference_time", "long_name": "start of the forecast", **_CLOCK}
    data.createDimension("forecast_reference_time", None)
    _variable(data, "forecast_reference_time", TIME_AXES[:1], np.array([start]), {**reference, "axis": "T"})
    # Without the attribute `dtype` xarray takes the hours for plain integers.
    period = {"standard_name": "forecast_period", "long_name": "lead time", "units": "hours"}
    _axis(data, "forecast_period", leads, {**period, "dtype": "timedelta64[ns]"})
    time = {"standard_name": "time", "long_name": "valid time", **_CLOCK}
    bounds = header.shared_bounds
    if bounds:
        time["bounds"] = "time_bnds"
    _variable(data, "time", TIME_AXES, start + 3600 * leads[None], time)
    if bounds:
        data.createDimension("bnds", 2)
        ends = start + 3600 * np.asarray(bounds, np.int64)
        _variable(data, "time_bnds", (*TIME_AXES, "bnds"), ends[None], {})


def _space(data: netCDF4.Dataset, places: Places) -> None:
    latitude = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north"}
    longitude = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east"}
    if places.asked is None:
        _axis(data, "latitude", places.latitude, {**latitude, "axis": "Y"})
        _axis(data, "longitude", places.longitude, {**longitude, "axis": "X"})
        return
    data.createDimension("point", len(places.rows))
    _variable(data, "latitude", ("point",), places.latitude, latitude)
    _variable(data, "longitude", ("point",), places.longitude, longitude)
    for position, name in enumerate(("latitude", "longitude")):
        # Plain degrees: a second variable in degrees_north would be taken for a second latitude.
        about = {"long_name": f"{name} that was asked for", "units": "degrees"}
        _variable(data, f"requested_{name}", ("point",), places.asked[:, position], about)


def _data_variable(data: netCDF4.Dataset, header: Header, output: Output) -> None:
    dims = dimensions(header, output)
    values = np.ascontiguousarray(np.expand_dims(output.values, dims.index(TIME_AXES[0])), np.float32)
    made = data.createVariable(
        f"{output.name}_{output.kind.value}",
        "f4",
        dims,
        zlib=True,
        complevel=1,
        shuffle=True,
        chunksizes=_chunks(values.shape),
        fill_value=np.float32(np.nan),
    )
    made.setncatts(attributes(header, output))
    made[...] = values
    if output.name in HEIGHTS and height_name(output.name) not in data.variables:
        about = {"standard_name": "height", "long_name": "height above ground", "units": "m", "positive": "up"}
        _variable(data, height_name(output.name), (), np.float64(HEIGHTS[output.name]), {**about, "axis": "Z"})


def _axis(data: netCDF4.Dataset, name: str, values: np.ndarray, attributes: Mapping[str, Any]) -> None:
    data.createDimension(name, len(values))
    _variable(data, name, (name,), values, attributes)


def _variable(
    data: netCDF4.Dataset, name: str, dims: tuple[str, ...], values: Any, attributes: Mapping[str, Any]
) -> None:
    chunks = np.shape(values) or None  # the library's own along an unlimited axis are kilobytes for a number
    made = data.createVariable(name, np.asarray(values).dtype, dims, chunksizes=chunks)
    made.setncatts(dict(attributes))
    made[...] = values


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Whole trailing axes while a chunk stays small, at least one horizontal field."""
    chunks, size = [1] * len(shape), 4
    for axis in reversed(range(len(shape))):
        if axis < len(shape) - 2 and size * shape[axis] > _CHUNK:
            break
        chunks[axis], size = shape[axis], size * shape[axis]
    return tuple(chunks)
