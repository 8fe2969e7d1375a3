"""Write the forecast of one init time as a CF-1.11 NetCDF file.

The file is written under a temporary name, and gets its own name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK

from ensemble_ml.errors import UserError
from ensemble_ml.folders import draft_of, give_name
from ensemble_ml.inference.contents import (
    TIME_AXES,
    Coordinate,
    Header,
    Output,
    attributes,
    coordinates,
    dimensions,
    global_attributes,
    height_of,
)
from ensemble_ml.training.checkpoint import sync

# HDF5 serves only one thread at a time, and another thread may be reading an archive through xarray. So this module
# uses xarray's own lock.
_LOCK = NETCDF4_PYTHON_LOCK
_CHUNK = 1 << 20  # bytes of a chunk, unless its last two axes take more; a small grid leaves room for levels and leads


def file_name(init_time: np.datetime64) -> str:
    """Return forecast_YYYYMMDDHH.nc for an init time, with minutes appended if they are not zero."""
    start = init_time.astype("datetime64[m]").item()
    return f"forecast_{start:%Y%m%d%H}{f'{start:%M}' if start.minute else ''}.nc"


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the global attributes of a file. The dict is empty if the file is no NetCDF, or cannot be read."""
    with _LOCK:
        try:
            with netCDF4.Dataset(path) as data:
                return {name: data.getncattr(name) for name in data.ncattrs()}
        except (OSError, RuntimeError):
            return {}


def write_forecast(path: Path, header: Header, outputs: Iterable[Output], *, replace: bool = True) -> Path:
    """Write the fields of one init time to `path`, and return it. The file appears there in one step, at the end.

    Args:
        path: the file to write.
        header: coordinates and global attributes.
        outputs: the data variables. They are taken one by one, so only one has to be in memory.
        replace: whether an existing file is replaced; if not, it is left as it is.

    Raises:
        UserError: the file cannot be written, or it exists already and `replace` is off.
    """
    with _access(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = draft_of(path)
    data: netCDF4.Dataset | None = None
    try:
        with _access(path):
            data = netCDF4.Dataset(partial, "w", format="NETCDF4")
            data.setncatts(global_attributes(header))
            for one in coordinates(header):
                _create(data, one)
        # The lock is free while the next output is computed, so that the thread that reads ahead can go on.
        for output in outputs:
            with _access(path):
                _data_variable(data, header, output)
        with _access(path):
            data.close()
            # File and folder reach the disk before the renaming, so that a power cut cannot leave an empty file under
            # the name.
            for each in (partial, path.parent):
                sync(each)
            give_name(partial, path, replace=replace)
            sync(path.parent)
    finally:
        # If the disk is full, closing the file fails as well. The first error is the one to report.
        with _LOCK, suppress(OSError, RuntimeError):
            if data is not None and data.isopen():
                data.close()
        partial.unlink(missing_ok=True)
    return path


@contextmanager
def _access(path: Path) -> Iterator[None]:
    """Hold the lock, and turn errors of the file into UserErrors.

    netCDF4 raises RuntimeError if the disk is full, and UnicodeError for a path that is no UTF-8.
    """
    with _LOCK:
        try:
            yield
        except (OSError, RuntimeError, UnicodeError) as error:
            raise UserError(
                f"output {path}: cannot be written ({error}); correct this or choose another output"
            ) from error


def _create(data: netCDF4.Dataset, one: Coordinate) -> None:
    """Write a coordinate, and make those of its dimensions that do not exist yet.

    The axis of init times is unlimited, because `ncrcat` concatenates files only along an unlimited axis.
    """
    for dim, length in zip(one.dims, np.shape(one.values), strict=True):
        if dim not in data.dimensions:
            data.createDimension(dim, None if dim == TIME_AXES[0] else length)
    # Along an unlimited axis the library's own chunks would take kilobytes for a single number.
    chunks = np.shape(one.values) or None
    made = data.createVariable(one.name, np.asarray(one.values).dtype, one.dims, chunksizes=chunks)
    made.setncatts(dict(one.attributes))
    made[...] = one.values


def _data_variable(data: netCDF4.Dataset, header: Header, output: Output) -> None:
    """Write a data variable, and its height if it is a near-surface one."""
    dims = dimensions(header, output)
    values = np.ascontiguousarray(np.expand_dims(output.values, dims.index(TIME_AXES[0])), np.float32)
    made = data.createVariable(
        f"{output.name}_{output.kind.value}", "f4", dims, zlib=True, complevel=1, shuffle=True,
        chunksizes=_chunks(values.shape), fill_value=np.float32(np.nan),
    )  # fmt: skip
    made.setncatts(attributes(header, output))
    made[...] = values
    height = height_of(output.name)
    if height is not None and height.name not in data.variables:
        _create(data, height)


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a chunk: the last two axes, and further whole axes as long as the chunk fits `_CHUNK`."""
    chunks, size = [1] * len(shape), 4
    for axis in reversed(range(len(shape))):
        if axis < len(shape) - 2 and size * shape[axis] > _CHUNK:
            break
        chunks[axis], size = shape[axis], size * shape[axis]
    return tuple(chunks)
