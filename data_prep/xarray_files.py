"""Read NetCDF files and Zarr stores through xarray.

Names of axes and variables that other programs use are converted to those of the registry. Values are read as float32
(xarray decodes the packed integers of NetCDF). Member, lead and level may each be a scalar coordinate or missing; they
then count as an axis of length one. The same holds for the init time, but only static fields may lack it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import xarray as xr
from dask.base import tokenize

from data_prep.axes import (
    BETWEEN,
    READ,
    OfSomethingElse,
    by_hindcast_year,
    check_degrees,
    dimensions,
    find_axis,
    understood,
    with_start,
)
from data_prep.cell_bounds import hours_of_gust, hours_of_sum, is_mean_rate, method, over_intervals, widths
from data_prep.file_index import EMPTY, FILLED, UNKNOWN, FileIndex
from data_prep.grib_io import Stamp
from data_prep.identity import (
    NO_OVERRIDES,
    Identity,
    NoUnits,
    Overrides,
    conversion,
    grib_type,
    identify,
    is_of_no_member,
    numbered,
    origin_of,
    other_sums,
    units_of,
    variables_with_members,
    with_units,
)
from data_prep.limits import agree, has_convention, on_bounds, plausible
from data_prep.no_field import check_mapping
from data_prep.records import CONTROL, FIELD_INDEX, MEMBER, RECORD, Origin, RawField, field_of
from data_prep.selecting import ALL, Wanted
from data_prep.spelling import spell
from data_prep.xarray_variable import LEADING, Variable, leading_axes
from data_prep.zarr_chunks import Written, is_zarr_store, open_netcdf, open_zarr, valid_limits, with_shared_coordinates
from ensemble_ml.config import FROM_START
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Field
from ensemble_ml.grid import Grid, canonical
from ensemble_ml.store.manifest import MEMORY
from ensemble_ml.store.remote import fetch, is_remote, reason

_netcdf_lock = threading.RLock()  # one lock for all files, because the HDF5 library is not safe for threads


class XarrayFile:
    """A NetCDF file, a Zarr store or an open Dataset (implements `data_prep.records.Reader`).

    Args:
        path: path of the file or store.
        overrides: what the user states about variables.
        data: an open Dataset, which is read in place of a file (`of_dataset`).
        wanted: the fields to list if the file has very many.
        stamp: the file's stamp, if it is known; for a group in a remote store, it is that of the store.

    Attributes:
        overrides: the user's statements.
        names: names of the variables in the file.
        found: short names of the variables that are read.
        skipped, methods, origins, grid, records, stamp: see `data_prep.records.Reader`.
        assumed: units that the file does not state but that the convention of a name fixes, by short name.
        without_units: short names of variables that are left out because they have no units, by their names in the
            file.
        elsewhere: labels in `skipped` of variables that are left out only because of a coordinate.

    Raises:
        UserError: the file cannot be opened, or changes meanwhile; it is a forecast of `predict`; its grids differ or
            are Gaussian; axes or intervals make no sense; a Dataset holds packed integers; or variables of the registry
            are there, but none can be read (the message explains the first).
    """

    keyed = False

    def __init__(
        self,
        path: str,
        overrides: Overrides = NO_OVERRIDES,
        data: xr.Dataset | None = None,
        wanted: Wanted = ALL,
        stamp: Stamp | None = None,
    ):
        self.path = path
        self.names: frozenset[str] = frozenset()
        self.assumed: dict[str, str] = {}
        self.without_units: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        self.found: set[str] = set()
        self.overrides, self._wanted = overrides, wanted
        self.skipped: dict[str, int] = {}
        self.methods: dict[str, str] = {}
        self.origins: tuple[Origin, ...] = ()
        self.grid: Grid | None = None
        self._given = None if data is None else with_start(data)
        self._data: xr.Dataset | None = self._given
        self._lock = self._own_lock()
        self._listed = 0  # number of fields listed so far
        self._variables: list[Variable] = []  # in the order of their first fields
        self.stamp = stamp or Stamp.of_archive(path)
        try:
            with self._lock:
                self.records = self._index(self._dataset())
        except UserError as error:
            if path in str(error):
                raise
            raise UserError(f"{path}: {error}") from error
        # A file that is being written looks damaged. If it has changed, the error says so.
        finally:
            self._check_unchanged()
        self._fields = hashlib.sha256(self.records.tobytes()).hexdigest()  # digest of the list of fields

    @classmethod
    def of_dataset(cls, data: xr.Dataset, overrides: Overrides = NO_OVERRIDES, wanted: Wanted = ALL) -> XarrayFile:
        """Read an open Dataset with any kind of arrays.

        Lazy arrays are computed block by block, each within one init time, with the Dask scheduler that is active then.
        A digest stands for the path: it covers the names of lazy arrays, and the values of others.
        """
        return cls(f"{MEMORY}{tokenize(data)[:16]})", overrides, data, wanted)

    def _own_lock(self) -> Any:
        """Return the lock that is held while values are read.

        A Dataset needs none, because its arrays lock what they use. A remote Zarr store has none, so that many of its
        chunks are read at a time.
        """
        if self._given is not None or (is_remote(self.path) and is_zarr_store(self.path)):
            return contextlib.nullcontext()
        return threading.RLock() if is_zarr_store(self.path) else _netcdf_lock

    def _check_unchanged(self) -> None:
        """Raise a UserError if the file has changed.

        A Zarr store may consist of millions of files, so it is not checked at each read; a build checks it at its end.
        A URL is not checked here either: each request notices a change.
        """
        if not is_zarr_store(self.path) and not is_remote(self.path):
            self.stamp.check(self.path, Stamp.of_archive(self.path))

    def _dataset(self) -> xr.Dataset:
        """Return the opened file."""
        if self._data is None:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*consolidated", category=RuntimeWarning)
                    if is_zarr_store(self.path):
                        opened = with_shared_coordinates(open_zarr(self.path), self.path)
                    else:
                        opened = open_netcdf(fetch(self.path) if is_remote(self.path) else self.path)
                    self._data = with_start(opened)
            except UserError:
                raise
            except Exception as error:  # each back end has its own errors, which mean the same to the user
                raise UserError(f"{self.path}: cannot be opened as NetCDF or Zarr ({reason(error)})") from error
        return self._data

    def _index(self, data: xr.Dataset) -> np.ndarray:
        """Return the records of all variables that are fields of the registry."""
        tables: list[np.ndarray] = []
        strange: list[OfSomethingElse] = []
        self.names = frozenset(map(str, data.data_vars))
        # Nothing was written yet along an axis of length 0.
        empty = [name for name, array in data.data_vars.items() if not array.size]
        for variable in empty:
            self._skip(f"{variable} (an axis of length 0)")
        data = with_units(data.drop_vars(empty), self.overrides)
        others = other_sums(data, self.overrides)
        for name, kept in others.items():
            self._skip(f"{name} (beside {kept}, over other hours)")
        data = data.drop_vars(others)
        with_members = variables_with_members(data, self.overrides)
        for name in sorted(map(str, data.data_vars)):  # the order of variables in a file has no meaning
            array = data[name]
            number = array.dtype.kind in "iufb"  # a land mask may be boolean
            if array.ndim < 1 or not number or name.endswith(("_bnds", "_bounds")):
                continue
            try:
                with understood(name):
                    tables += self._tables(data, array, with_members)
            except OfSomethingElse as error:
                self._skip(f"{name} ({error.why})")
                if isinstance(error, NoUnits):
                    self.without_units[error.name] = error.field.name
                else:
                    strange.append(error)
        if not tables and {"members_in", "ensemble_ml_version"} <= set(data.attrs):
            raise UserError(f"{self.path}: a forecast that predict made, no archive; use evaluate forecast={self.path}")
        if strange and not tables and not self.without_units:
            raise strange[0]
        return np.concatenate(tables) if tables else np.zeros(0, RECORD)

    def _tables(self, data: xr.Dataset, array: xr.DataArray, with_members: dict[str, Hashable]) -> list[np.ndarray]:
        """Return the records of a data variable, or none if it is left out."""
        identity = identify(data, array, self.overrides)
        field = identity.field
        if field is None:
            self._skip(f"{array.name}{identity.reason}")
            if identity.elsewhere:
                self.elsewhere.add(f"{array.name}{identity.reason}")
            return []
        if field.name in with_members and is_of_no_member(array):
            self._skip(f"{array.name} (without members; {with_members[field.name]} has them)")
            return []
        if array.dtype.kind in "iu" and {"scale_factor", "add_offset"} & array.attrs.keys():
            raise UserError(f"{array.name}: its integers are packed; pass xarray.decode_cf(data), or open it decoded")
        grid, rows, columns = self._locate(array)
        if not self._wanted.lists(field, array.size // math.prod(grid.shape)):
            return []
        check_mapping(data, array)
        units = units_of(array, field, self.overrides)
        if not units and not field.static and not has_convention(spell(array.name)):
            raise NoUnits(array, field)
        tables = [
            self._table(data, part, identity, units, rows, columns, fixed) for fixed, part in by_hindcast_year(array)
        ]
        if not units and not field.static:
            if not self._agrees(self._variables[-1], field, grid):
                raise NoUnits(array, field)
            self.assumed[field.name] = field.units
        self.grid = self.grid or grid
        said = method(array)
        if said and not is_mean_rate(array, field):  # the mean of a rate is read as a sum
            self.methods[field.name] = said
        self.found.add(field.name)
        return tables

    def _agrees(self, variable: Variable, field: Field, grid: Grid) -> bool:
        """Return whether the values of a variable that states no units agree with the registry's units.

        Only the first init time and member are read, with all levels, up to the first lead that has a value (for a sum,
        a value above zero). If no lead of a remote file has such a value, raise a UserError.
        """
        levels = variable.levels
        for lead in range(variable.shape[2]):
            block = self._read(variable, np.array([0, 0, lead, 0]), np.array([1, 1, lead + 1, variable.shape[3]]), None)
            values = block[0, 0]
            if np.isfinite(values).any() and (not field.accumulated or np.nanmax(values) > 0):
                return len(levels) == len(values) and agree(field, values, levels, grid)
        if is_remote(self.path):  # an error of the server must not silently leave the variable out
            text = f"{variable.name}: states no units, and its first init time has no value that would show them"
            raise UserError(
                f"{self.path}: {text}; try again, or state them, as in 'units={{{field.name}: {field.units}}}'"
            )
        return False

    def _skip(self, label: str, count: int = 1) -> None:
        """Count a field, or several, that are left out."""
        self.skipped[label] = self.skipped.get(label, 0) + count

    def _locate(self, array: xr.DataArray) -> tuple[Grid, np.ndarray, np.ndarray]:
        """Return the grid of a variable, and where the file has the grid's rows and columns: (Y,) and (X,)."""
        axes = [find_axis(array, role) for role in ("latitude", "longitude")]
        if any(axis is None or axis.ndim != 1 or axis.dims[0] not in array.dims for axis in axes):
            text = f"{array.name}: has no latitude and longitude axes; only fields on a regular grid are read"
            raise OfSomethingElse(text, "no latitude and longitude axes")
        for axis in axes:
            standard = str(axis.attrs.get("standard_name", ""))  # type: ignore[union-attr]
            if standard.startswith(("grid_", "projection_")):
                text = f"{array.name}: {axis.name} is {standard}; only geographic grids are read"  # type: ignore[union-attr]
                raise OfSomethingElse(text, f"on {standard}")
        check_degrees(array, *axes)  # type: ignore[arg-type]
        grid, rows, columns = canonical(axes[0].values, axes[1].values)  # type: ignore[union-attr]
        # Cell bounds are computed as on a regular grid. On a Gaussian grid the outermost would miss the poles.
        if grid.gaussian:
            raise UserError(
                f"{array.name}: a Gaussian grid; only regular ones are read: regrid it, e.g. by cdo remapcon"
            )
        if self.grid is not None and not grid.same_as(self.grid):
            first = self.grid.describe()
            raise UserError(f"{array.name}: grid {grid.describe()} differs from the file's first, {first}")
        return grid, rows, columns

    def _table(
        self,
        data: xr.Dataset,
        array: xr.DataArray,
        identity: Identity,
        units: str,
        rows: np.ndarray,
        columns: np.ndarray,
        fixed: dict[Hashable, int],
    ) -> np.ndarray:
        """Return the records of a data variable that is a field of the registry.

        `fixed` holds the positions of `array` along further dimensions of the file's variable; it is usually empty.
        """
        field = identity.field
        assert field is not None
        axes = leading_axes(array, field, identity.level)
        values = {role: np.atleast_1d(READ[role](axis)) for role, axis in axes.items()}
        dims = dimensions(array, axes)
        variable = self._variable(
            data, array, field, units, base=self._listed, dims=dims, rows=rows, columns=columns, fixed=fixed,
            shape=tuple(len(ticks) for ticks in values.values()), levels=values["level"],
        )  # fmt: skip
        self._variables.append(variable)
        over_time = field.accumulated or over_intervals(array, field)
        where = self._wanted.places(field, values, str(array.name), over_time=over_time)
        records = np.zeros(where.shape[1], RECORD)
        origin = origin_of(data, array)
        if origin not in self.origins:
            self.origins += (origin,)
        records["origin"] = self.origins.index(origin)
        records["field"], records["decimal"] = FIELD_INDEX[field.name], 1.0
        records["kind"] = CONTROL if grib_type(array) == "cf" else MEMBER
        records["numbered"] = numbered(array, axes["member"])
        records["masked"] = field.maskable and np.issubdtype(array.dtype, np.floating)
        records["offset"] = variable.base + np.ravel_multi_index(tuple(where), variable.shape)
        self._listed += math.prod(variable.shape)
        for (role, ticks), position in zip(values.items(), where, strict=True):
            records[role] = ticks[position]
        # If the control is joined with its members as number 0, the joined array has the type of the control.
        if array.attrs.get("GRIB_dataType") == "cf":
            records["kind"][records["member"] == 0] = CONTROL
        records["lead_start"] = records["lead"]
        places = {dims[role]: where[number] for number, role in enumerate(LEADING) if role in dims}
        self._set_intervals(records, data, array, field, places, of_leads=axes["lead"] is not None)
        by_hours = field.accumulated and (hours_of_sum(array) > 0 or field.name in self.overrides.intervals)
        of_hours = by_hours and axes["lead"] is not None
        sums = records["bounded"] & field.accumulated
        strange = {
            "at levels of no whole hPa": records["level"] == BETWEEN,
            # Hours in a name, or stated by the user, apply to every lead, but no sum begins before the forecast.
            "of hours before the start": (records["lead_start"] < 0) & of_hours,
            "sums over 0 h": sums & (records["lead"] > 0) & (records["lead_start"] == records["lead"]),
            "of a negative member": records["member"] < 0,
            "of leads before the start": records["lead"] < 0,
        }
        for why, those in strange.items():
            if those.any():
                self._skip(f"{array.name} ({why})", int(those.sum()))
        return records[~np.any(list(strange.values()), axis=0)]

    def _variable(
        self, data: xr.Dataset, array: xr.DataArray, field: Field, units: str, fixed: dict[Hashable, int], **place: Any
    ) -> Variable:
        """Return the `Variable` by which values are read; `place` holds the rest of its fields."""
        factor, shift = conversion(array, field, units)
        step = abs(factor * array.encoding.get("scale_factor", 0.0))
        written = Written(self.path, data[array.name], field, fixed) if is_zarr_store(self.path) else None
        return Variable(
            array.name, factor=factor, shift=shift, step=step, limits=valid_limits(array), fixed=fixed,
            written=written if written is not None and written.doubtful else None, **place,
        )  # fmt: skip

    def _set_intervals(
        self, records: np.ndarray, data: xr.Dataset, array: xr.DataArray, field: Field,
        places: Mapping[Hashable, np.ndarray], *, of_leads: bool,
    ) -> None:  # fmt: skip
        """Set the start of the interval that each value covers in `records`. Instantaneous values stay as they are.

        Raises:
            UserError: the interval is unknown, or contradicts what the user states.
        """
        said = field.name in self.overrides.intervals
        if not over_intervals(array, field) and not said:
            return
        rate = is_mean_rate(array, field)
        try:
            stated = self._widths(data, array, field, places, rate=rate)
        except OfSomethingElse:
            if not said:
                raise
            stated = None
        if said:
            stated = self._of_user(array, field, records["lead"], stated, of_leads=of_leads)
        if stated is None:
            return
        records["lead_start"] -= stated
        records["bounded"] = True
        if rate:
            records["decimal"] = 3600.0 * stated
        # The hours in a gust's name apply to every lead, but no interval begins before the forecast. A truth has no
        # leads, so its intervals are not cut.
        if hours_of_gust(array) and of_leads:
            inside = np.maximum(records["lead_start"], 0)
            records["lead_start"] = np.where(records["lead"] > 0, inside, records["lead"])

    def _widths(
        self, data: xr.Dataset, array: xr.DataArray, field: Field, places: Mapping[Hashable, np.ndarray], *, rate: bool
    ) -> np.ndarray | None:
        """Return the result of `cell_bounds.widths`; raise `OfSomethingElse` for a mean rate over unknown intervals."""
        if not rate:
            return widths(data, array, field, places)
        units, stated = array.attrs["units"], None
        text = f"{array.name}: a mean rate in {units}, and nothing states the hours that it is a mean over"
        try:
            stated = widths(data, array, field, places)
        except OfSomethingElse:
            raise
        except UserError as error:
            text = f"{text} ({error})"
        if stated is None:
            raise OfSomethingElse(text, f"a mean rate in {units} over unknown hours")
        return stated

    def _of_user(
        self, array: xr.DataArray, field: Field, leads: np.ndarray, stated: np.ndarray | None, *, of_leads: bool
    ) -> np.ndarray:
        """Return the hours that the user states for each field of a sum, (N,) int32.

        `leads` (N,) and `stated` (N,) are in hours: the leads of the fields, and the interval that the file states.

        Raises:
            UserError: the file states other intervals or instantaneous values; or the user states sums from the start,
                and the file has no leads.
        """
        words = self.overrides.intervals[field.name]
        key = "intervals" if self.overrides.forecast else "truth_intervals"
        here = f"{key}={{{field.name}: {words}}}: {array.name}"
        if words == FROM_START and not of_leads:
            raise UserError(f"{here} has no lead times, so its sums have no known start; give their hours")
        if not over_intervals(array, field):
            raise UserError(
                f"{here} states instantaneous values (cell_methods); leave it out of {key}=, or correct the file"
            )
        hours = leads.astype(np.int32) if words == FROM_START else np.full(len(leads), words, np.int32)
        # At the start of a forecast, an interval of 0 h is correct for any sum.
        others = [] if stated is None else np.unique(stated[(stated != hours) & (stated > 0)]).tolist()
        if others:
            raise UserError(f"{here} states sums over {others[0]} h; leave it out of {key}=, or correct the file")
        return hours

    def empty(self, records: np.ndarray, index: FileIndex) -> np.ndarray:
        """Return which of `records` hold nothing but NaN, (N,) bool (see `data_prep.records.Reader`)."""
        found = index.load_looks(self.path, self.stamp, self._fields, self._listed)
        unknown = records[found[records["offset"]] == UNKNOWN]
        places = [(offset, *at) for offset, at in zip(unknown["offset"].tolist(), self._places(unknown), strict=True)]

        def together(place: tuple[int, Variable, tuple[int, ...]]) -> tuple[int, ...]:  # what a build reads at once
            _, variable, (date, _, lead, _) = place
            return variable.base, date, lead

        assert self.grid is not None
        middle = slice(self.grid.shape[0] // 2, self.grid.shape[0] // 2 + 1)
        for _, group in groupby(sorted(places, key=together), key=together):
            offsets, (variable, *_), where = zip(*group, strict=True)
            wanted = np.array(where)
            first, last = wanted.min(0), wanted.max(0) + 1
            inside = tuple((wanted - first)[:, 1:].T)
            # The middle row shows a value in most fields. Whole fields are read only if a row is all NaN.
            empty = np.isnan(self._read(variable, first, last, middle)).all((-2, -1))[inside]
            if empty.any():
                empty = np.isnan(self._read(variable, first, last, None)).all((-2, -1))[inside]
            found[list(offsets)] = np.where(empty, EMPTY, FILLED)
        self.stamp.check(self.path, Stamp.of_archive(self.path))
        if places:
            index.save_looks(self.path, self.stamp, self._fields, found)
        return found[records["offset"]] == EMPTY

    def fields(
        self, records: np.ndarray, rows: slice | None = None, into: Sequence[np.ndarray] | None = None
    ) -> Iterator[RawField]:
        """Yield float32 values (see `data_prep.records.Reader`); `into` is not used, because values are floats.

        Successive records of one variable and init time are read together. NaN marks points without a value, if the
        registry allows such points for the variable.

        Raises:
            UserError: another value is NaN, infinite or implausible, or the file cannot be read or has changed since it
                was indexed.
        """
        places = self._places(records)
        for _, group in groupby(range(len(records)), key=lambda number: (places[number][0].base, places[number][1][0])):
            numbers = list(group)
            variable, wanted = places[numbers[0]][0], np.array([places[number][1] for number in numbers])
            first, last = wanted.min(0), wanted.max(0) + 1
            block = self._read(variable, first, last, rows)
            # A field with NaN has NaN as least and most, which fail the comparisons below.
            least, most = block.min((-2, -1)), block.max((-2, -1))
            for number, place in zip(numbers, (wanted - first)[:, 1:].tolist(), strict=True):
                values, seconds = block[tuple(place)], float(records[number]["decimal"])
                if seconds == 1.0 and not variable.step:
                    low, high = plausible(field_of(records[number]), 0.0, int(records[number]["level"]))
                    if low < least[tuple(place)] and most[tuple(place)] < high:
                        yield RawField(values)
                        continue
                if seconds != 1.0:  # a mean rate becomes the sum over its interval
                    values = (values * seconds).astype(np.float32)
                step, bounds = seconds * variable.step, field_of(records[number]).family.bounds
                yield variable.checked(self.path, records[number], on_bounds(values, step, bounds), step)

    def _places(self, records: np.ndarray) -> list[tuple[Variable, tuple[int, ...]]]:
        """Return the variable of each record, and the position of its field in it."""
        offsets = records["offset"]
        numbers = np.searchsorted([one.base for one in self._variables], offsets, "right") - 1
        places: list[Any] = [None] * len(records)
        for number in np.unique(numbers).tolist():
            variable, mine = self._variables[number], np.flatnonzero(numbers == number)
            found = np.stack(np.unravel_index(offsets[mine] - variable.base, variable.shape), axis=1).tolist()
            for at, place in zip(mine.tolist(), found, strict=True):
                places[at] = variable, tuple(place)
        return places

    def _read(self, variable: Variable, first: np.ndarray, last: np.ndarray, rows: slice | None) -> np.ndarray:
        """Read a block of one init time, (member, lead, level, Y, X) float32 in the program's order and units."""
        chosen = variable.rows[rows or slice(None)]
        dims, north = variable.dims, int(chosen.min())
        with self._lock:
            array = self._dataset()[variable.name]
            where = {dims[r]: slice(a, b) for r, a, b in zip(LEADING, first, last, strict=True) if r in dims}
            band = {dims["latitude"]: slice(north, int(chosen.max()) + 1)}
            array = array.isel(where | band | dict(variable.fixed))
            order = [dims[role] for role in (*LEADING, "latitude", "longitude") if role in dims]
            array = array.squeeze([dim for dim in array.dims if dim not in order], drop=True)
            # Axes are put in order after reading: with a lazy transpose, a Zarr store would be read point by point.
            try:
                values = array.values.transpose([array.dims.index(dim) for dim in order])
            except UserError as error:
                raise UserError(f"{error} ({variable.name})") from error
            except Exception as error:
                raise UserError(f"{self.path}: {variable.name} cannot be read ({reason(error)})") from error
            finally:
                self._check_unchanged()
        return variable.decoded(values, chosen - north, first, last)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs. That process opens the file for itself."""
        return self.__dict__ | {"_data": self._given, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = self._own_lock()
