"""Write and read the small arrays and attributes of a store through zarr-python.

These are coordinates, static fields, statistics, and the attributes of the root group. The module also creates the
arrays of fields, but not their shards. `factors.py` handles the packing factors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid
from ensemble_ml.store.manifest import Entry, check_file
from ensemble_ml.store.schema import FORMAT, FORMAT_KEY, PLAN_KEY, STATISTICS, ArraySpec, Kind
from ensemble_ml.store.shard import LEVEL, damaged
from ensemble_ml.store.source import Layout, Part
from ensemble_ml.store.statistics import NAMES, Moments

_FORMULA = "((X * {0}_scale) + {0}_reference) * {0}_decimal in float64, where {0}_present"
_COORDINATES = (
    "init_time", "realization", "lead_time", "level", "latitude", "longitude", "variable", "surface_variable",
)  # fmt: skip
_VARIABLE = {Kind.PRESSURE: "variable", Kind.SURFACE: "surface_variable"}


def create_arrays(root: Path, specs: Sequence[ArraySpec]) -> None:
    """Create empty arrays of fields, and the root group if there is none."""
    group = zarr.open_group(root, mode="a", zarr_format=3)
    for spec in specs:
        codec = BloscCodec(typesize=spec.dtype.itemsize, cname="lz4", clevel=LEVEL, shuffle="bitshuffle")
        group.create_array(
            spec.name,
            shape=spec.on_disk,
            shards=spec.shard_on_disk,
            chunks=spec.chunk_on_disk,
            dtype=spec.dtype,
            compressors=[codec, Crc32cCodec()],
            fill_value=spec.fill,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=spec.dimensions,
            attributes=_long_name(spec),
        )


def _long_name(spec: ArraySpec) -> dict[str, Any]:
    """Return the attributes of an array of fields."""
    if spec.dtype == np.uint8:
        return {"long_name": "1 where a point has no value", "flag_values": [0, 1], "flag_meanings": "valid missing"}
    if spec.packed:
        return {"long_name": f"packed fields: {_FORMULA.format(spec.name)}"}
    return {"long_name": f"{spec.part.value}, float32"}


def write_metadata(
    root: Path,
    layout: Layout,
    attributes: dict[str, Any],
    static: dict[str, np.ndarray],
    statistics: tuple[np.ndarray, dict[tuple[Part, Kind], Moments]],
) -> None:
    """Write coordinates, static fields (Y, X), statistics and root attributes. Call this once, with all fields known.

    `statistics` are the years (N,), and the moments of each year by part and kind.
    """
    group = zarr.open_group(root, mode="r+")
    for name, (values, dims, attrs) in coordinates(layout).items():
        _put(group, name, values, dims, attrs)
    for name, values in static.items():
        attrs = cf_attributes(name)
        _put(group, name, np.asarray(values, np.float32), ("latitude", "longitude"), attrs)
    _write_statistics(group.create_group(STATISTICS), *statistics)
    group.attrs.update({FORMAT_KEY: FORMAT, **attributes, "static": list(static)})
    consolidate(group)


def consolidate(group: zarr.Group) -> None:
    """Consolidate all metadata of the store in the root group, replacing what was consolidated before."""
    # zarr warns that Zarr v3 has not standardised this yet. Readers without support for it still open the store.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(group.store)


def _put(group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...], attrs: dict[str, Any]) -> None:
    """Create one small array with its values, dimensions and attributes."""
    if values.dtype.kind == "U":  # strings of variable length: Zarr v3 has no stable type for fixed ones
        array = group.create_array(name, shape=values.shape, dtype=str, dimension_names=dims, attributes=attrs)
        array[...] = values.astype(object)
    else:
        group.create_array(name, data=values, dimension_names=dims, attributes=attrs)


def _write_statistics(group: zarr.Group, years: np.ndarray, yearly: dict[tuple[Part, Kind], Moments]) -> None:
    """Write the moments of each year into the group of statistics."""
    _put(group, "year", years, ("year",), {"long_name": "calendar year of the init times"})
    for (part, kind), moments in yearly.items():
        dims = ("year", "lead_time", _VARIABLE[kind], *(("level",) if kind is Kind.PRESSURE else ()))
        for name, values in moments.arrays().items():
            values = values if kind is Kind.PRESSURE else values[..., 0]
            _put(group, f"{_prefix(part)}{kind.value}_{name}", values, dims, {})


def _prefix(part: Part) -> str:
    """Return the prefix of the names of statistics; it is empty for those of the members' values."""
    return "" if part is Part.FORECAST else f"{part.value}_"


def read_statistics(root: Path, part: Part) -> tuple[np.ndarray, dict[Kind, Moments]]:
    """Read the moments of each year: years (N,), and by kind (N, T, V, Z) on pressure levels, (N, T, S) at the surface.

    A kind without statistics is left out. The part is FORECAST for the members' values, MEAN or SPREAD for the
    ensemble's mean or spread as a field.
    """
    before = _prefix(part)
    group = zarr.open_group(root / STATISTICS, mode="r", use_consolidated=False)
    kinds = [kind for kind in Kind if f"{before}{kind.value}_count" in group]
    return _get(group, "year"), {
        kind: Moments(*(_get(group, f"{before}{kind.value}_{name}") for name in NAMES)) for kind in kinds
    }


def read_array(root: Path, name: str) -> np.ndarray:
    """Read one whole array.

    Raises:
        UserError: It is damaged or cannot be read.
    """
    try:
        return np.asarray(zarr.open_array(root / name, mode="r")[...])
    except (OSError, ValueError, RuntimeError) as error:
        raise damaged(root / name, str(error)) from error


def _get(group: zarr.Group, name: str) -> np.ndarray:
    """Read one whole array of a group."""
    return np.asarray(group[name][...])  # type: ignore[index]


def coordinates(layout: Layout) -> dict[str, tuple[np.ndarray, tuple[str, ...], dict[str, Any]]]:
    """Return the values on disk, dimensions and CF attributes of each coordinate; empty ones are left out."""
    seconds = layout.init_time.astype("datetime64[s]").astype(np.int64)
    since = {"units": "seconds since 1970-01-01T00:00:00", "calendar": "proleptic_gregorian"}
    start = {"standard_name": "forecast_reference_time", "long_name": "start of the forecast", **since}
    lead = {"standard_name": "forecast_period", "long_name": "lead time", "units": "hours", "dtype": "timedelta64[ns]"}
    level = {"standard_name": "air_pressure", "units": "hPa", "positive": "down", "axis": "Z"}
    grid = layout.grid
    arrays: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        "init_time": (seconds, start),
        "realization": (np.asarray(layout.realization, np.int32), {"standard_name": "realization", "units": "1"}),
        "lead_time": (np.asarray(layout.lead_hours, np.int64), lead),
        "level": (np.asarray(layout.levels, np.int32), level),
        "latitude": (grid.latitude, {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}),
        "longitude": (grid.longitude, {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}),
        "variable": (np.asarray(layout.variables, np.str_), {"long_name": "variable on pressure levels"}),
        "surface_variable": (np.asarray(layout.surface, np.str_), {"long_name": "variable at the surface"}),
    }
    return {name: (values, (name,), attrs) for name, (values, attrs) in arrays.items() if len(values)}


def cf_attributes(name: str) -> dict[str, Any]:
    """Return the CF attributes of a variable of the registry."""
    known = field(name)
    return {"standard_name": known.standard_name, "long_name": known.long_name, "units": known.units}


def is_store(path: Path) -> bool:
    """Return whether there is a tensor store at `path`, of any format number."""
    return FORMAT_KEY in _attributes(path)


def plan_digest(path: Path) -> str | None:
    """Return the digest of the plan by which the store at `path` was built; None if there is no store."""
    return _attributes(path).get(PLAN_KEY)


def _attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of the root group at `path`; none if there is no group, or if it cannot be read."""
    try:
        return dict(json.loads((path / "zarr.json").read_text())["attributes"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_root(root: Path) -> None:
    """Check that there is a store of this format at `root`.

    Raises:
        UserError: There is none, or one of another format number.
    """
    if not root.is_dir():
        raise UserError(f"store {root}: no such folder; make it with `ensemble-ml prepare output={root}`")
    attributes = _attributes(root)
    if FORMAT_KEY not in attributes:
        raise UserError(f"store {root}: is no tensor store; make one with `ensemble-ml prepare`")
    number = attributes[FORMAT_KEY]
    if number != FORMAT:
        raise UserError(f"store {root}: has format {number}, this version reads {FORMAT}; prepare it again")


def read_metadata(root: Path, files: Mapping[str, Entry]) -> tuple[Layout, dict[str, Any]]:
    """Read coordinates and attributes of the root group of a store that has passed `check_root`.

    The files of both are checked against `files`, the manifest.

    Raises:
        UserError: One of these files is missing, unreadable or has changed.
    """
    # Small arrays carry no checksums of their own, so their files are checked before they are used.
    own = ("zarr.json", *(f"{name}/" for name in _COORDINATES))
    small = [name for name in files if name.startswith(own)]
    with ThreadPoolExecutor(len(_COORDINATES)) as pool:  # small reads mostly wait for the storage
        list(pool.map(lambda name: check_file(root / name, files[name]), small))
    group = zarr.open_group(root, mode="r", use_consolidated=False)
    return _read_layout(group), dict(group.attrs)


def _read_layout(group: zarr.Group) -> Layout:
    """Read the coordinates."""

    def read(name: str) -> list[Any]:
        """Return the values of a coordinate; an empty list where the store has none."""
        return _get(group, name).tolist() if name in group else []

    with ThreadPoolExecutor(len(_COORDINATES)) as pool:  # threads overlap the waits for the storage
        found = dict(zip(_COORDINATES, pool.map(read, _COORDINATES), strict=True))
    return Layout(
        np.asarray(found["init_time"], "datetime64[s]").astype("datetime64[ns]"),
        tuple(found["realization"]),
        tuple(found["lead_time"]),
        tuple(str(name) for name in found["variable"]),
        tuple(found["level"]),
        tuple(str(name) for name in found["surface_variable"]),
        Grid(np.asarray(found["latitude"]), np.asarray(found["longitude"])),
    )
