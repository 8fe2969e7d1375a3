"""Archives and tensor stores as lazy Datasets, and the way back from a Dataset to what it was opened from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from data_prep import Overrides, open_archive, open_source
from data_prep.pairs import pair
from ensemble_ml.api.inputs import Reopened, holds_dataset, index_in_place, is_store_path
from ensemble_ml.config import Control, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, TensorStore
from ensemble_ml.store.xarray_engine import source_dataset

_ORIGIN = "ensemble_ml"  # key of a variable's encoding, which no file format writes
_CHUNKS = {"init_time": 1, "lead_time": 1}


@dataclass
class _Opening:
    """What `open` was asked for."""

    paths: Any
    static: str | None
    control: Control
    names: Mapping[str, str]
    units: Mapping[str, str]

    def settings(self) -> dict[str, Any]:
        """Return the settings of a task that reads the same."""
        return {"static": self.static, "control": self.control, "names": self.names, "units": self.units}


@dataclass(frozen=True, eq=False)
class _Origin:
    """Where a variable of a Dataset comes from, and what it was when it was opened."""

    opening: _Opening
    source: Reopened
    names: frozenset[str]  # of all variables that were opened together
    array: str  # name of the Dask array, which says what is computed
    attributes: str

    def __deepcopy__(self, _: Any) -> _Origin:
        return self


def open(  # the package's name for it
    paths: Any,
    *,
    static: str | None = None,
    control: str | Control = "apart",
    names: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
) -> xr.Dataset:
    """Open an archive or a tensor store as a lazy Dataset of CF-named variables.

    Nothing but headers is read; values are read when Dask computes them. The Dataset remembers where it comes from:
    `prepare`, `Model.predict`, `calibrate` and `verify` read an unchanged one as the commands read its paths.

    Args:
        paths: an archive (GRIB, NetCDF, Zarr) as a file, a folder, a glob or a list of them, or a tensor store; or a
            Dataset in names of others, which is brought to ours.
        static: a file with orography and land mask, or None.
        control: "apart" or "include": whether an unperturbed member of an archive counts as a member.
        names: how the archive calls variables, by our names, e.g. {"t2m": "temperature_2m"}.
        units: units of variables that NetCDF or Zarr does not state, by our names, e.g. {"tp": "mm"}.

    Returns:
        A Dataset with the dimensions init_time, realization, lead_time (timedelta64), level (hPa), latitude (degrees,
        from north to south) and longitude (degrees east, 0 to 360): float32 in SI units under short names (t, z, t2m
        ...), NaN where a field is absent. A control stands under `t_control`; of tensor stores the truth and the
        members' mean and spread under `t_truth`, `t_mean` and `t_spread`; static fields under `orog` and `lsm`.

    Raises:
        UserError: a file is missing or damaged, or holds nothing that is known.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble = eml.open("archive/ensemble")
        >>> ensemble["t2m"].dims
        ('init_time', 'realization', 'lead_time', 'latitude', 'longitude')
        >>> ensemble["t2m"].attrs["units"]
        'K'
    """
    stated = Overrides(names or {}, units or {})
    choice = control if isinstance(control, Control) else _control(control)
    opening = _Opening(_whole(paths), static, choice, stated.names, stated.units)
    source = Reopened(_open, opening)
    return _remembered(_lazy(source), opening, source)


def _control(word: str) -> Control:
    try:
        return Control(word)
    except ValueError:
        raise UserError(f"control={word}: {', '.join(one.value for one in Control)} are allowed") from None


def _whole(paths: Any) -> Any:
    """Return paths that mean the same in another folder and process; globs and Datasets as they are."""
    given = [path if is_dataset(path) else os.fspath(path) for path in as_list(paths)]
    whole = [os.path.abspath(path) if not is_dataset(path) and os.path.exists(path) else path for path in given]
    return whole[0] if len(whole) == 1 else whole


def _open(opening: _Opening) -> Any:
    """Open a source with what its files have; derived variables (wind speed) are made where a model takes them."""
    index = index_in_place(look=not holds_dataset(opening.paths))
    how: dict[str, Any] = {"index": index, "overrides": Overrides(opening.names, opening.units)}
    opener = open_source if is_store_path(opening.paths) else open_archive
    return pair(opener(opening.paths, control=opening.control, **how), None, opening.static, **how)


def _lazy(source: Reopened) -> xr.Dataset:
    """Return all that is stored of a source, in chunks of a start date and a lead."""
    stored = isinstance(source.source.forecast, TensorStore)
    parts = [part for part in Part if source.has(part) and (stored or part in (Part.FORECAST, Part.CONTROL))]
    data = source_dataset(source, parts)  # type: ignore[arg-type]
    return data.chunk({dim: size for dim, size in _CHUNKS.items() if dim in data.dims})


def _remembered(data: xr.Dataset, opening: _Opening, source: Reopened) -> xr.Dataset:
    names = frozenset(map(str, data.data_vars))
    for array in data.variables.values():
        if array.chunks is not None:
            about = repr(array.attrs)
            array.encoding[_ORIGIN] = _Origin(opening, source, names, array.data.name, about)
    return data


def resolve(data: Any) -> tuple[Any, dict[str, Any]]:
    """Return the paths that a Dataset of `open` was opened from, and the settings that it was opened with.

    A Dataset that was changed in any way, or comes from elsewhere, stays what it is, less what `open` shows beside the
    forecast; and so do paths.
    """
    if isinstance(data, list | tuple):
        return [resolve(one)[0] for one in data], {}
    if not is_dataset(data):
        return data, {}
    beside = [name for name in data.data_vars if _base(str(name)) in data.data_vars]
    changed = data.drop_vars(beside) if beside else data
    origins = [_origin(array) for array in data.data_vars.values() if array.ndim > 2]  # static fields are no Dask
    first = origins[0] if origins else None
    if first is None or any(one is None or one.opening is not first.opening for one in origins):
        return changed, {}
    if frozenset(map(str, data.data_vars)) != first.names or not _same_axes(data, first.source):
        return changed, {}
    return first.opening.paths, first.opening.settings()


def resolve_pair(ensemble: Any, truth: Any) -> tuple[tuple[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Return what `resolve` gives of an ensemble and its truth. Where no truth is given, a changed Dataset of a tensor
    store brings its own; an unchanged one needs not, for its store does."""
    paths, settings = resolve(ensemble)
    if truth is None and is_dataset(paths):
        own = {name: str(name).removesuffix("_truth") for name in ensemble.data_vars if _base(str(name), "truth")}
        if own:
            return (paths, settings), (ensemble[list(own)].rename(own), {})
    return (paths, settings), resolve(truth)


def _base(name: str, *parts: str) -> str:
    """Return the variable of whose truth, control, mean or spread `open` speaks by such a name; empty where of none."""
    base, _, last = name.rpartition("_")
    return base if last in (parts or [part.value for part in Part if part is not Part.FORECAST]) else ""


def _origin(array: xr.DataArray) -> _Origin | None:
    """Return the origin of an unchanged variable. The name of a Dask array says what it computes."""
    found: _Origin | None = array.variable.encoding.get(_ORIGIN)
    if found is None or array.chunks is None:
        return None
    return found if (array.data.name, repr(array.attrs)) == (found.array, found.attributes) else None


def _same_axes(data: xr.Dataset, source: Reopened) -> bool:
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
