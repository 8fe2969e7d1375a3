"""Bring what a store holds, finished or half-built, to one form for `inspect`.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid
from ensemble_ml.store.date import DateEntry
from ensemble_ml.store.folder import building_folder
from ensemble_ml.store.manifest import Entry, SourceTable, check_contents, read_sources
from ensemble_ml.store.metadata import is_store
from ensemble_ml.store.plan import read_facts
from ensemble_ml.store.read import TensorStore, open_store
from ensemble_ml.store.schema import ArraySpec, Kind, array_specs, shard_chunks
from ensemble_ml.store.source import Layout, Part
from ensemble_ml.store.statistics import Moments, merge_all

Presence = tuple[np.ndarray, np.ndarray]  # bool (M, T, V, Z) and (M, T, S)


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a store as `inspect` sees them.

    Attributes:
        path: Folder of the store.
        layout: Coordinates.
        parts: Parts that the store has or will have.
        packing: How forecast, control and truth are kept.
        done: Indices of the init times that are built.
        specs: Arrays of fields.
        files: Files by name.
        moments: Moments of the forecast by kind, (T, V, Z) or (T, S, 1).
        errors: Largest error of quantising by variable, in its units.
        masked: Variables with points that have no value.
        static: Names of the static fields.
        provenance: Where the data came from.
        present: Function of part and index of an init time in `done` that returns which fields are there.
        verify: Function that reads all files and raises a UserError if one has changed; of a half-built store, the
            shards that are finished.
        source: Store to read from; None for a half-built one.
        sources: Contents of `sources.json`.
        climate_days: Half-width in days of the model climate's window; 0 if the store has none.
        lead_bounds: [first, last] hour for each lead of a variable over intervals; None for a lead without an interval.
    """

    path: str
    layout: Layout
    parts: tuple[Part, ...]
    packing: Packing
    done: list[int]
    specs: tuple[ArraySpec, ...]
    files: dict[str, Entry]
    moments: dict[Kind, Moments]
    errors: dict[str, float]
    masked: tuple[str, ...]
    static: tuple[str, ...]
    provenance: dict[str, Any]
    present: Callable[[Part, int], Presence]
    verify: Callable[[], None]
    source: TensorStore | None = None
    sources: dict[str, Any] | None = None
    climate_days: int = 0
    lead_bounds: dict[str, list[list[int] | None]] = dataclass_field(default_factory=dict)


def contents_of(path: str) -> Contents:
    """Return the contents of the store at `path`, finished or being built, or of the work folder of a build.

    Raises:
        UserError: There is neither, or it is damaged.
    """
    if is_store(Path(path)):
        return _of_store(open_store(path))
    work = _half_built(path)
    if work is not None:
        return _of_build(path, work)
    if Path(path).exists():
        raise UserError(f"store={path}: is no tensor store, nor one that is being built; give a folder made by prepare")
    raise UserError(f"store={path}: no such folder; give a folder made by prepare")


def has_contents(path: str) -> bool:
    """Return whether a store stands at `path`, or is being built there."""
    return is_store(Path(path)) or _half_built(path) is not None


def _half_built(path: str) -> Path | None:
    """Return the work folder of the store at `path`, or `path` if it is a work folder; None if there is none."""
    for work in (building_folder(Path(path)), Path(path)):
        if (work / "plan.json").is_file() and (work / "entries").is_dir():  # training writes a plan.json, too
            return work
    return None


def _of_store(store: TensorStore) -> Contents:
    """Return the contents of a finished store."""
    found = store.statistics(store.years)
    surface = {name: values[..., None] for name, values in found.surface.arrays().items()}
    return Contents(
        store.path,
        store.layout,
        store.parts,
        store.packing,
        list(range(len(store.layout.init_time))),
        store.specs,
        store.files,
        {Kind.PRESSURE: found.pressure, Kind.SURFACE: Moments(**surface)},
        store.quantisation_error,
        store.masked,
        tuple(store.static()),
        store.provenance,
        store.present,
        store.verify,
        store,
        read_sources(Path(store.path)),
        store.climate_days,
        store.lead_bounds,
    )


def _of_build(path: str, work: Path) -> Contents:
    """Return the contents of a half-built store, as far as its entries show them."""
    facts = read_facts(work / "plan.json")
    layout, packing = _layout(facts), Packing(facts["packing"])
    parts = tuple(Part(name) for name in facts["parts"])
    specs = {(spec.part, spec.kind): spec for part in parts for spec in array_specs(layout, part, packing)}
    entries = {int(file.stem): DateEntry.load(file) for file in sorted((work / "entries").glob("*.npz"))}
    # A half-built store has no attributes yet, so they are made from the entries that exist.
    total, table = DateEntry(), SourceTable()
    for date, entry in entries.items():
        total.add(entry)
        table.add(str(layout.init_time[date].astype("datetime64[m]")), entry.sources)
    moments = {}
    for kind in Kind:
        spec = specs.get((Part.FORECAST, kind))
        if spec is not None:
            of_kind = [entry.moments[kind] for entry in entries.values() if kind in entry.moments]
            moments[kind] = merge_all(of_kind, spec.fields[1:])

    def present(part: Part, date: int) -> Presence:
        """Return which fields are there, from the entry of a date."""
        both = []
        for kind in Kind:
            spec = specs.get((part, kind))
            found = entries[date].factors.get(spec.name) if spec else None
            shape = spec.fields if spec else (1, len(layout.lead_hours), 0, 1)
            both.append(np.zeros(shape, bool) if found is None else found["present"])
        return both[0], both[1][..., 0]

    return Contents(
        path,
        layout,
        parts,
        packing,
        sorted(entries),
        tuple(specs.values()),
        total.files,
        moments,
        total.errors,
        tuple(name for name in layout.names if name in total.masked),
        tuple(facts.get("static fields", {})),
        {key: value for key, value in facts.items() if key not in _PLANNED},
        present,
        lambda: check_contents(work / "store", total.files, shard_chunks(specs.values())),
        sources=table.as_dict() if table.numbers else None,
        climate_days=int(facts.get("climate days", 0)),
        lead_bounds=facts.get("lead bounds", {}),
    )


_PLANNED = (
    "start dates", "members", "leads", "variables", "levels", "latitudes", "longitudes", "format", "parts", "packing",
    "static fields", "lead bounds", "climate days",
)  # fmt: skip


def _layout(facts: dict[str, Any]) -> Layout:
    """Return the coordinates that a plan wrote down."""
    names = facts["variables"]
    return Layout(
        np.array(facts["start dates"], "datetime64[ns]"),
        tuple(facts["members"]),
        tuple(facts["leads"]),
        tuple(name for name in names if not field(name).surface),
        tuple(facts["levels"]),
        tuple(name for name in names if field(name).surface),
        Grid(np.array(facts["latitudes"]), np.array(facts["longitudes"])),
    )
