"""Open NetCDF files, Zarr stores and the groups in them, and find missing values that no `_FillValue` declares.

Such values were never written, or are out of the valid range. The rules are those of the NetCDF Users Guide ("Attribute
Conventions") and of the CF conventions, section 2.5.

A missing chunk of Zarr reads as the array's fill value. If that is NaN, or if an attribute declares it as missing, the
values are NaN already. Otherwise they look like real values: 0 K, or `add_offset`. So a field counts as unwritten if
one of its chunks is missing. If the field shares a chunk with an init time that was written, the chunk exists. So a
field also counts as unwritten if all its values equal the fill value.

Chunks of Zarr version 3 may be stored together in a file, a shard, whose index lists the chunks that exist.

Arrays of a store may lie in groups. dynamical.org keeps fields at the surface in the root of a store and those on
pressure levels in a group of it. Each group is read like a store of its own. A dimension without a coordinate takes it
from the groups above, as in xarray's DataTree.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from data_prep.axes import check_there
from data_prep.notices import notice_log
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, Field
from ensemble_ml.store.remote import (
    group_in,
    has_object,
    is_file,
    is_remote,
    open_remote,
    open_zarr_array,
    read_part,
    remote_groups,
    without_group,
)

log = notice_log(__name__)

_MARKS = ("zarr.json", ".zgroup", ".zmetadata")  # a folder of Zarr has one of these files
_PACKED = "scale_factor", "add_offset"
_ROUNDING = 1e-6  # tolerance as a fraction of a limit: values may have fewer digits than the limit


class Written:
    """The existing chunks of a variable in a Zarr store, used to find fields that were never written.

    `doubtful` is True if fields have to be checked, because unwritten values are not NaN. Quantities that may be zero
    over a whole chunk (rain, cloud, humidity, land) are not checked if a missing chunk reads as zero: the writer may
    have left the chunk out on purpose. Other quantities, such as temperature, never have a field of equal values.

    Args:
        path: folder or URL of the Zarr store.
        array: the variable.
        field: the variable of the registry that it is.
        fixed: positions along dimensions other than those of init time, member, lead, level, latitude and longitude.
    """

    def __init__(self, path: str, array: xr.DataArray, field: Field, fixed: Mapping[Hashable, int] | None = None):
        self._fixed = dict(fixed or {})
        self._store, self._name, self._dims, self._shape = path, str(array.name), array.dims, array.shape
        made: Any = open_zarr_array(path, self._name)
        said, fill = array.encoding | array.attrs, made.fill_value
        marks = [np.ravel(said[name]) for name in ("_FillValue", "missing_value") if name in said]
        # `_Unsigned` reinterprets the bits of the values, so the fill value and the marks are reinterpreted alike.
        if made.dtype.kind == "i" and unsigned(said):
            kind = f"u{made.dtype.itemsize}"
            fill, marks = None if fill is None else fill.astype(kind), [mark.astype(kind) for mark in marks]
        declared = fill is not None and any((mark == fill).any() for mark in marks)
        not_finite = fill is not None and not np.isfinite(np.asarray(fill, np.float64))
        factor, offset = (float(said.get(name, usual)) for name, usual in (("scale_factor", 1), ("add_offset", 0)))
        self._unwritten = None if fill is None or not_finite else float(fill) * factor + offset
        may_be_zero = field.static or field.family is not Family.NORMAL or field.accumulated
        zero = offset == 0 if fill is None else self._unwritten == 0
        self.doubtful = not declared and not not_finite and not (may_be_zero and zero)
        self._metadata = made.metadata
        self._chunk: Sequence[int] = made.chunks
        together = made.shards or made.chunks
        self._in_file = tuple(whole // part for whole, part in zip(together, made.chunks, strict=True))
        self._codec: Any = made.metadata.codecs[0] if made.shards else None
        self._there: dict[tuple[int, ...], np.ndarray] = {}  # file -> which of its chunks exist

    def mark(self, values: np.ndarray, leading: Sequence[Hashable | None], first: Sequence[int]) -> np.ndarray:
        """Return `values` with NaN in fields that were never written. Writable floats are changed in place.

        Args:
            values: (member, lead, level, Y, X) of one init time.
            leading: the array's dimensions for init time, member, lead and level; None for each that it lacks.
            first: (4,) positions of the first field along these dimensions.

        Raises:
            UserError: the index of a shard cannot be read.
        """
        for place in np.ndindex(*values.shape[:3]):
            at = {dim: start + step for dim, start, step in zip(leading, first, (0, *place), strict=True)} | self._fixed
            if not self._complete(at) or self._equals_fill(values[place]):
                values = values.astype(np.result_type(values.dtype, np.float32), copy=False)
                values = values if values.flags.writeable else values.copy()
                values[place] = np.nan
        return values

    def _equals_fill(self, values: np.ndarray) -> bool:
        """Return whether all values of a field equal what a missing chunk reads as."""
        first = values.flat[0]
        return self._unwritten is not None and bool(
            np.isclose(first, self._unwritten, rtol=1e-6) and (values == first).all()
        )

    def _complete(self, at: dict[Hashable | None, int]) -> bool:
        """Return whether all chunks exist that hold a part of the field at the given positions."""
        ranges = [
            range(at[dim] // size, at[dim] // size + 1) if dim in at else range(-(-length // size))
            for dim, size, length in zip(self._dims, self._chunk, self._shape, strict=True)
        ]
        return all(self._exists(chunk) for chunk in product(*ranges))

    def _exists(self, chunk: tuple[int, ...]) -> bool:
        """Return whether a chunk exists, by its file or by the index of its shard."""
        file, inside = zip(*map(divmod, chunk, self._in_file), strict=True)
        if file not in self._there:
            key = f"{self._name}/{self._metadata.encode_chunk_key(file)}"
            path = os.path.join(self._store, key)
            there = has_object(self._store, key) if is_remote(self._store) else os.path.exists(path)
            self._there[file] = self._indexed(path, key) if there and self._codec else np.full(self._in_file, there)
        return bool(self._there[file][inside])

    def _indexed(self, path: str, key: str) -> np.ndarray:
        """Return which chunks of a shard exist, in the shape of `_in_file`.

        The index holds offset and size of each chunk as uint64, both with all bits set for a missing chunk (Zarr v3,
        `sharding_indexed` codec). An index that cannot be read is a UserError.
        """
        kinds = [type(codec).__name__ for codec in self._codec.index_codecs]
        size = 16 * math.prod(self._in_file)
        whole = size + 4 * kinds.count("Crc32cCodec")
        at_end = self._codec.index_location.value == "end"
        try:
            if is_remote(self._store):
                content = read_part(self._store, key, -whole if at_end else 0, size)
            else:
                with open(path, "rb") as file:
                    if at_end:
                        file.seek(-whole, os.SEEK_END)
                    content = file.read(size)
            # The byte order does not matter here, because only pairs with all bits set are looked for.
            pairs = np.frombuffer(content, "u8").reshape(*self._in_file, 2)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the index of its chunks cannot be read ({error}); fetch it again") from error
        return (pairs != np.iinfo(np.uint64).max).any(-1)


def is_zarr(path: str | os.PathLike) -> bool:
    """Return whether a folder is a Zarr group of version 2 or 3. An array of version 3 counts, too."""
    return any(os.path.isfile(os.path.join(path, mark)) for mark in _MARKS)


def is_zarr_store(path: str) -> bool:
    """Return whether a path is that of a Zarr store: a folder, or a URL that is not of a GRIB or NetCDF file."""
    return os.path.isdir(path) or (is_remote(path) and not is_file(path))


def groups_of(path: str) -> list[str]:
    """Return the paths of all groups below the root of a Zarr store, sorted.

    Behind a URL, only groups in the consolidated metadata of the root are found.

    Raises:
        UserError: a remote store cannot be read.
    """
    return remote_groups(path) if is_remote(path) else sorted(_groups_in(path))


def _groups_in(folder: str) -> Iterator[str]:
    """Yield all groups below a folder. Folders of arrays are not searched: they may hold millions of chunks."""
    for entry in os.scandir(folder):
        if entry.is_dir() and is_zarr(entry.path) and not _is_array(entry.path):
            yield entry.path
            yield from _groups_in(entry.path)


def _is_array(folder: str) -> bool:
    """Return whether a Zarr folder is an array of version 3, whose metadata file is named like that of a group."""
    try:
        with open(os.path.join(folder, "zarr.json"), encoding="utf-8") as file:
            return json.load(file).get("node_type") == "array"
    except (OSError, ValueError, AttributeError):
        return False


def with_shared_coordinates(data: xr.Dataset, path: str) -> xr.Dataset:
    """Return the Dataset of a group with coordinates of the groups above it for dimensions that have none.

    A coordinate of another length than the dimension is not taken. `path` is the folder or URL of the group.
    """
    above = without_group(path) if is_remote(path) else os.path.dirname(os.path.abspath(path))
    if above == path or not (is_remote(path) or is_zarr(above)) or data.sizes.keys() <= data.coords.keys():
        return data
    shared = with_shared_coordinates(open_zarr(above), above)
    lacking = [dim for dim in data.sizes if dim not in data.variables and dim in shared.coords]
    return data.assign_coords({dim: shared[dim] for dim in lacking if shared.sizes[dim] == data.sizes[dim]})


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


def open_zarr(path: str) -> xr.Dataset:
    """Open a Zarr store lazily. In variables that are not packed, zero is a value unless an attribute says otherwise.

    Zarr's own libraries state a fill value of zero for any array that was given none. In Zarr version 2, xarray takes
    this zero for the mark of missing values if no attribute states one. That would hide the equator, the first member,
    and points without rain. Values that were never written are found by other means (see `Written`).

    Raises:
        UserError: a remote store cannot be read, or lacks a chunk of a coordinate.
    """
    if is_remote(path):
        where: Any = open_remote(path)
        raw = xr.open_dataset(where, engine="zarr", group=group_in(path) or None, decode_cf=False)
        _check_there(path, where.absent, raw)
    else:
        raw = xr.open_dataset(path, engine="zarr", decode_cf=False)
    for name, array in raw.variables.items():
        fill = np.ravel(array.attrs.get("_FillValue", ()))
        zero = fill.size == 1 and fill.dtype.kind in "iuf" and fill[0] == 0
        if any(key in array.attrs for key in _PACKED) or not zero:
            continue
        if "_FillValue" not in open_zarr_array(path, str(name)).attrs:
            del array.attrs["_FillValue"]
            if name in raw.data_vars:
                log.info("%s: %s: zeros are values, though its fill value is zero", path, name)
    return _decoded(raw, written=True)


def _check_there(path: str, absent: Collection[str], raw: xr.Dataset) -> None:
    """Refuse a remote store that lacks a chunk of a coordinate: the chunk would read as the fill value.

    A chunk whose values all equal the fill value may be absent: the first time of a store to which others were appended
    is often 0, alone in its chunk. The values of a coordinate stand in order, so this is accepted only if they do.
    `absent` holds the keys that were requested and are not in the store.
    """
    for name, axis in raw.coords.items():
        missing = [key for key in absent if key.startswith(f"{group_in(path)}/{name}/".lstrip("/"))]
        before, after = axis.values[:-1], axis.values[1:]
        if missing and not ((before < after).all() or (before > after).all()):
            raise UserError(f"{path}: {missing[0]} is not there (404), but {name} has {axis.size} values; try again")


def _decoded(raw: xr.Dataset, *, written: bool = False) -> xr.Dataset:
    """Return the file with scales, missing values and times decoded.

    `written` is true if values that were never written are found by other means.
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

    Integer limits apply to packed values, other limits to unpacked ones. Both are returned in the units of `array`,
    widened for rounding. They are infinite where none is stated, and both are if one is not a single number.
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
