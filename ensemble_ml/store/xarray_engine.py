"""Open a tensor store with `xarray.open_dataset(STORE, engine="ensemble_ml")`.

Fields are decoded to float32, have CF attributes, and are read when they are used. The forecast of a variable has its
short name (t, z, t2m ...). Its truth is named `t_truth`, and likewise `t_control`, `t_mean` and `t_spread`. Static
fields have their own names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing

from ensemble_ml.errors import UserError
from ensemble_ml.fields import GUST, field
from ensemble_ml.store.metadata import cf_attributes, coordinates, is_store
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.source import Part, Selection, Source

_CELL_METHODS = {Part.MEAN: "realization: mean", Part.SPREAD: "realization: standard_deviation"}
_DECODERS = "mask_and_scale", "decode_times", "concat_characters", "decode_coords", "decode_timedelta"


class EnsembleBackend(BackendEntrypoint):
    """The backend that xarray finds under the name `ensemble_ml`."""

    description = "Tensor stores of ensemble_ml: decoded, lazy, CF-named variables"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", *_DECODERS, "use_cftime")

    def open_dataset(  # type: ignore[override]
        self,
        filename_or_obj: str | os.PathLike,
        *,
        drop_variables: str | Iterable[str] | None = None,
        use_cftime: bool | None = None,
        **decoders: Any,
    ) -> xr.Dataset:
        """Open the store at `filename_or_obj`.

        Values and times are always decoded, because this engine cannot return packed values.

        Args:
            filename_or_obj: the folder of the store.
            drop_variables: names of variables to leave out.
            use_cftime: must not be true.
            **decoders: xarray's options such as `decode_times`. `concat_characters` and `decode_coords` have no effect.

        Raises:
            UserError: there is no store, or it is damaged; `mask_and_scale`, `decode_times` or `decode_timedelta` is
                false, or `use_cftime` is true.
            TypeError: an option is not known.
        """
        if unknown := decoders.keys() - set(_DECODERS):
            raise TypeError(f"open_dataset: unknown settings {', '.join(sorted(unknown))}")
        off = [name for name in ("mask_and_scale", "decode_times", "decode_timedelta") if decoders.get(name) is False]
        if off:
            raise UserError(f"{off[0]}=False: this engine decodes; xr.open_zarr(STORE) shows what is stored")
        if use_cftime:
            raise UserError("use_cftime=True: init times are of the standard calendar, as numpy.datetime64")
        store = TensorStore(Path(filename_or_obj))
        dropped = {drop_variables} if isinstance(drop_variables, str) else set(drop_variables or ())
        data = source_dataset(store, tuple(dict.fromkeys(spec.part for spec in store.specs)))
        return data.drop_vars([name for name in dropped if name in data.variables])

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether there is a tensor store at `filename_or_obj`."""
        return isinstance(filename_or_obj, str | os.PathLike) and is_store(Path(filename_or_obj))


def _coordinate(values: np.ndarray, dims: tuple[str, ...], attrs: dict[str, Any]) -> xr.Variable:
    """Return a coordinate of the Dataset: init times as datetime64[ns], leads as timedelta64[ns], others as stored."""
    encoding = {key: attrs[key] for key in ("units", "calendar", "dtype") if key in attrs}
    if dims == ("init_time",):
        times = values.astype("datetime64[s]").astype("datetime64[ns]")
        return xr.Variable(dims, times, _without(attrs, "units", "calendar"), {**encoding, "dtype": "int64"})
    if dims == ("lead_time",):
        leads = values.astype("timedelta64[h]").astype("timedelta64[ns]")
        return xr.Variable(dims, leads, _without(attrs, "units", "dtype"), {"units": "hours", "dtype": "int64"})
    return xr.Variable(dims, values, attrs)


def _without(attrs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return attributes without some names."""
    return {key: value for key, value in attrs.items() if key not in names}


def source_dataset(source: Source, parts: Sequence[Part]) -> xr.Dataset:
    """Return a source as a Dataset of decoded variables with CF attributes, which are read when they are used.

    Names of variables of other parts than the forecast end with the name of the part.
    """
    coords = {name: _coordinate(*about) for name, about in coordinates(source.layout).items()}
    coords = {name: value for name, value in coords.items() if name not in ("variable", "surface_variable")}
    found = {}
    for part in parts:
        for name in source.layout.names:
            array = SourceArray(source, part, name)
            # A store has one shard for each init time, so Dask should read whole init times.
            chunks = dict(zip(array.dims, array.shape, strict=True)) | {"init_time": 1}
            label = name if part is Part.FORECAST else f"{name}_{part.value}"
            lazy, about = indexing.LazilyIndexedArray(array), _attributes(source, part, name)
            found[label] = xr.Variable(array.dims, lazy, about, {"preferred_chunks": chunks})
    for name, values in source.static().items():
        found[name] = xr.Variable(("latitude", "longitude"), values, cf_attributes(name))
    attrs = {"Conventions": "CF-1.11", "source": source.path, "fingerprint": source.fingerprint()}
    return xr.Dataset(found, coords, attrs)


def _attributes(source: Source, part: Part, name: str) -> dict[str, Any]:
    """Return the CF attributes of a variable of one part."""
    known, attrs = field(name), cf_attributes(name)
    attrs["long_name"] = attrs["long_name"] if part is Part.FORECAST else f"{attrs['long_name']}, {part.value}"
    methods = [_CELL_METHODS[part]] if part in _CELL_METHODS else []
    if known.temperature:
        attrs["units_metadata"] = f"temperature: {'difference' if part is Part.SPREAD else 'on_scale'}"
    bounds = getattr(source, "lead_bounds", {}).get(name)
    if bounds:
        # For other variables, the store does not record whether they are means or extremes over their intervals.
        over = "lead_time: sum" if known.accumulated else "lead_time: maximum" if known.standard_name == GUST else ""
        methods[:0] = [over] if over else []
        attrs["lead_bounds_hours"] = " ".join("none" if pair is None else f"{pair[0]}-{pair[1]}" for pair in bounds)
    return attrs | ({"cell_methods": " ".join(methods)} if methods else {})


class SourceArray(BackendArray):
    """A variable of one part, which is read and decoded when it is indexed.

    The shape is (D[, M], T[, Z], Y, X), float32.
    """

    def __init__(self, source: Source, part: Part, name: str):
        self.source, self.part, self.name = source, part, name
        lay = source.layout
        sizes = {
            "init_time": len(lay.init_time),
            "realization": len(lay.realization),
            "lead_time": len(lay.lead_hours),
            "level": len(lay.levels),
            "latitude": lay.grid.shape[0],
            "longitude": lay.grid.shape[1],
        }
        absent = {"realization"} if part is not Part.FORECAST else set()
        absent |= {"level"} if name in lay.surface else set()
        self.dims = tuple(dim for dim in sizes if dim not in absent)
        self.shape = tuple(sizes[dim] for dim in self.dims)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        """Return the values at an xarray indexer."""
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return the values at an index for each axis. An integer drops its axis; a slice or an array keeps it."""
        index = {
            dim: np.arange(length)[part if isinstance(part, slice) else np.atleast_1d(part)]
            for dim, part, length in zip(self.dims, key, self.shape, strict=True)
        }
        shape = tuple(len(positions) for positions in index.values())
        out = np.empty(shape, np.float32)
        if out.size:
            selection, rows, columns = self._selection(index)
            for place, date in enumerate(index["init_time"].tolist()):
                values = self._date(date, selection).reshape(*shape[1:-2], -1, self.shape[-1])
                out[place] = values[..., rows, :][..., columns]
        # Axes that were indexed by an integer were read with length one. They are dropped here.
        scalar = tuple(0 if isinstance(part, int | np.integer) else slice(None) for part in key)
        return out[scalar]

    def _selection(self, index: dict[str, np.ndarray]) -> tuple[Selection, np.ndarray, np.ndarray]:
        """Return the selection to read, and the rows and columns to take from the values read.

        A source reads all columns of adjacent rows, so the rows and columns wanted are taken afterwards.
        """
        lay, rows = self.source.layout, index["latitude"]
        on_levels = self.name in lay.variables
        first, last = int(rows.min()), int(rows.max()) + 1
        selection = Selection(
            realization=_pick(lay.realization, index.get("realization")),
            lead_hours=_pick(lay.lead_hours, index["lead_time"]),
            levels=_pick(lay.levels, index.get("level")),
            variables=(self.name,) if on_levels else (),
            surface=() if on_levels else (self.name,),
            rows=(first, last),
        )
        return selection, rows - first, index["longitude"]

    def _date(self, date: int, selection: Selection) -> np.ndarray:
        """Read a selection of one init time: (M, T, 1, Z, rows, X), or (M, T, 1, rows, X) at the surface."""
        fields = self.source.read(self.part, date, selection)
        return fields.pressure if self.name in self.source.layout.variables else fields.surface


def _pick(values: tuple[int, ...], positions: np.ndarray | None) -> tuple[int, ...] | None:
    """Return the values at some positions, or None for all."""
    return None if positions is None else tuple(values[position] for position in positions.tolist())
