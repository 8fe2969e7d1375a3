"""Open archives and tensor stores as lazy Datasets, and find out what such a Dataset was opened from.

`prepare`, `predict` and `verify` read an archive best by its paths: packed integers of GRIB are kept, and each process
opens the files for itself. A Dataset of `open` therefore remembers its paths in the encoding of its variables.
`resolve` returns these paths if no coordinate and no variable was changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from data_prep import Overrides, open_archive, open_source, whole_path
from data_prep.pairs import pair
from ensemble_ml.api.inputs import Reopened, check_inputs, choice_of, holds_dataset, index_in_place, is_store_path
from ensemble_ml.config import Control, as_list, check_overrides, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, TensorStore
from ensemble_ml.store.xarray_engine import source_dataset

_ORIGIN = "ensemble_ml"  # key of a variable's encoding; no file format writes it
_CHUNKS = {"init_time": 1, "lead_time": 1}


@dataclass
class _Opening:
    """The arguments of a call of `open`."""

    paths: Any
    static: str | None
    control: Control
    names: Mapping[str, str]
    units: Mapping[str, str]
    intervals: Mapping[str, int | str]

    def __post_init__(self) -> None:
        check_overrides(self)

    def settings(self) -> dict[str, Any]:
        """Return the settings with which a task reads the same data."""
        return {name: value for name, value in vars(self).items() if name != "paths"}


@dataclass(frozen=True, eq=False)
class _Origin:
    """The origin of a variable of a Dataset, and its state when it was opened.

    A comparison with the present state shows whether the variable was changed.
    """

    opening: _Opening
    source: Reopened
    names: frozenset[str]  # names of all variables that were opened together
    place: tuple[Any, ...]  # the variable's own name and its dimensions
    array: str  # name of the Dask array, which changes with what it computes
    attributes: str

    def __deepcopy__(self, _: Any) -> _Origin:
        return self


def open(  # hides the builtin, since users call it as `ensemble_ml.open`
    paths: Any,
    *,
    static: str | None = None,
    control: str | Control = "apart",
    names: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    intervals: Mapping[str, int | str] | None = None,
) -> xr.Dataset:
    """Open an archive or a tensor store as a lazy Dataset of CF-named variables.

    Dask reads the values when it computes them. This function reads only headers, and from an archive what it needs to
    find fields that are all NaN: at least one row of each field of NetCDF and Zarr. It keeps the result for later
    calls. The Dataset remembers where it comes from, and `prepare`, `Model.predict`, `calibrate` and `verify` read an
    unchanged Dataset exactly as the commands read its paths.

    Args:
        paths: an archive (GRIB, NetCDF, Zarr) as a file, a folder, a glob or a list of them, or a tensor store. It may
            also be a Dataset with other names, which are converted to the names used here.
        static: a file with orography and land mask, or None.
        control: "apart" or "include": whether an unperturbed member of an archive counts as a member.
        names: the names of variables in the archive, by the names used here, e.g. {"t2m": "temperature_2m"}.
        units: units of variables that NetCDF or Zarr does not state, by the names used here, e.g. {"tp": "mm"}.
        intervals: the hours that sums cover, where NetCDF or Zarr does not state them, e.g. {"tp": 6}; "start" stands
            for sums from the start of the forecast.

    Returns:
        A Dataset with the dimensions init_time, realization, lead_time (timedelta64), level (hPa), latitude (degrees,
        from north to south) and longitude (degrees east, ascending; 0 to 360, but from below zero if a regional grid
        crosses Greenwich). Values are float32 in SI units under short names (t, z, t2m ...), NaN where a field is
        absent. A control is named `t_control`. The truth and the members' mean and spread of a tensor store are named
        `t_truth`, `t_mean` and `t_spread`; static fields are named `orog` and `lsm`.

    Raises:
        UserError: a file is missing or damaged, or holds no known variable; or an argument has a value that is not
            allowed.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble = eml.open("archive/ensemble")
        >>> ensemble["t2m"].dims
        ('init_time', 'realization', 'lead_time', 'latitude', 'longitude')
        >>> ensemble["t2m"].attrs["units"]
        'K'
    """
    check_inputs("paths", paths)
    check_inputs("static", static)
    choice = choice_of(Control, "control", control)
    opening = _Opening(whole(paths), static and whole(static), choice, names or {}, units or {}, intervals or {})
    source = Reopened(_open, opening)
    return _remembered(_lazy(source), opening, source)


def whole(paths: Any) -> Any:
    """Make paths and globs absolute, so that they mean the same in another folder and process.

    A list of one is returned as its only element.
    """
    found = [whole_path(path) for path in as_list(paths)]
    return found[0] if len(found) == 1 else found


def _open(opening: _Opening) -> Any:
    """Open a source with the variables that its files hold. A model derives others (wind speed) where it needs them."""
    index = index_in_place(look=not holds_dataset(opening.paths))
    how: dict[str, Any] = {"index": index, "overrides": Overrides.of(opening)}
    opener = open_source if is_store_path(opening.paths) else open_archive
    return pair(opener(opening.paths, control=opening.control, **how), None, opening.static, **how)


def _lazy(source: Reopened) -> xr.Dataset:
    """Return everything that a source stores, in chunks of one init time and one lead."""
    stored = isinstance(source.source.forecast, TensorStore)
    parts = [part for part in Part if source.has(part) and (stored or part in (Part.FORECAST, Part.CONTROL))]
    data = source_dataset(source, parts)  # type: ignore[arg-type]
    return data.chunk({dim: size for dim, size in _CHUNKS.items() if dim in data.dims})


def _remembered(data: xr.Dataset, opening: _Opening, source: Reopened) -> xr.Dataset:
    """Store the origin of each lazy variable in its encoding, and return the Dataset."""
    names = frozenset(map(str, data.data_vars))
    for name, array in data.variables.items():
        if array.chunks is not None:
            about, place = repr(array.attrs), (name, *array.dims)
            array.encoding[_ORIGIN] = _Origin(opening, source, names, place, array.data.name, about)
    return data


def resolve(data: Any) -> tuple[Any, dict[str, Any]]:
    """Return the paths that a Dataset of `open` was opened from, and the settings that it was opened with.

    A Dataset that was changed, or that comes from elsewhere, is returned itself, without the variables that `open`
    shows beside the forecast (truth, control, mean, spread). Paths are returned as they are.

    Args:
        data: a Dataset, a path, or a list of either.

    Returns:
        The paths or the Dataset, and the settings by their names (empty if they are not known).

    Raises:
        UserError: an input is neither a path nor a Dataset, or the elements of a list were opened with different
            settings. Paths and changed Datasets count as
            opened with the defaults.
    """
    check_inputs("an input", data)
    if isinstance(data, list | tuple):
        found = [resolve(one) for one in data]
        given = [{key: value for key, value in one.items() if value and value is not Control.apart} for _, one in found]
        # One archive is read with one set of settings.
        if any(one != given[0] for one in given):
            raise UserError("a list of Datasets: they were opened with different settings; give eml.open the list")
        return [path for paths, _ in found for path in as_list(paths)], given[0] if given else {}
    if not is_dataset(data):
        return data, {}
    beside = [name for name in data.data_vars if _base(str(name)) in data.data_vars]
    changed = data.drop_vars(beside) if beside else data
    origins = [_origin(array) for array in data.data_vars.values()]
    first = origins[0] if origins else None
    if first is None or any(one is None or one.opening is not first.opening for one in origins):
        return changed, {}
    # With fewer variables or other coordinates the Dataset is a selection, and its paths would give all of it.
    if frozenset(map(str, data.data_vars)) != first.names or not _same_axes(data, first.source):
        return changed, {}
    return first.opening.paths, first.opening.settings()


def resolve_pair(ensemble: Any, truth: Any) -> tuple[tuple[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Return the results of `resolve` for an ensemble and for its truth.

    If no truth is given, a changed Dataset of a tensor store brings its own, in the variables that end in `_truth`. For
    an unchanged Dataset the store itself is read, which holds the truth.
    """
    paths, settings = resolve(ensemble)
    if truth is None and is_dataset(paths):
        own = {name: str(name).removesuffix("_truth") for name in ensemble.data_vars if _base(str(name), "truth")}
        if own:
            return (paths, settings), (ensemble[list(own)].rename(own), {})
    return (paths, settings), resolve(truth)


def settings_of_both(of_ensemble: Mapping[str, Any], of_truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task from those with which its ensemble and its truth were opened (`resolve`).

    Names and units of a task are for both inputs. Where the two were opened with different ones, those of the ensemble
    count.
    """
    of_task = {"names": "names", "units": "units", "intervals": "truth_intervals"}
    found = {name: of_truth[key] for key, name in of_task.items() if of_truth.get(key)}
    return found | {name: value for name, value in of_ensemble.items() if value}


def notices_of(*inputs: Any) -> set[str]:
    """Return the texts of the notices that were logged when Datasets were opened; paths have none.

    A function that opens their paths again does not log these a second time (`data_prep.notices.once`).
    """
    found: set[str] = set()
    for data in inputs:
        if isinstance(data, list | tuple):
            found |= notices_of(*data)
        elif is_dataset(data):
            origins = [array.encoding.get(_ORIGIN) for array in data.variables.values()]
            found |= {text for origin in origins if origin is not None for text in origin.source.logged()}
    return found


def _base(name: str, *parts: str) -> str:
    """Return the variable that a name such as `t_truth` belongs to, or an empty text if it has no such ending.

    Endings are `parts`; without any, those of truth, control, mean and spread.
    """
    base, _, last = name.rpartition("_")
    return base if last in (parts or [part.value for part in Part if part is not Part.FORECAST]) else ""


def _origin(array: xr.DataArray) -> _Origin | None:
    """Return the origin of a variable, or None if it was changed.

    The name of a Dask array identifies its computation, so an equal name means equal values. A renaming of variables or
    dimensions leaves that name as it is, so these are compared, too.
    """
    found: _Origin | None = array.variable.encoding.get(_ORIGIN)
    if found is None or array.chunks is None:
        return None
    now = (array.name, *array.dims), array.data.name, repr(array.attrs)
    return found if now == (found.place, found.array, found.attributes) else None


def _same_axes(data: xr.Dataset, source: Reopened) -> bool:
    """Return whether the coordinates of a Dataset are still those of its source."""
    lay = source.layout
    axes = {
        "init_time": lay.init_time,
        "realization": lay.realization,
        "lead_time": np.asarray(lay.lead_hours).astype("timedelta64[h]").astype("timedelta64[ns]"),
        "level": lay.levels,
        "latitude": lay.grid.latitude,
        "longitude": lay.grid.longitude,
    }
    return all(np.array_equal(data[name].values, values) for name, values in axes.items() if name in data.dims)
