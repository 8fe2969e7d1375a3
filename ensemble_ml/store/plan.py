"""Describe what a build will make.

The plan is kept in the work folder of the build. A later run continues the build only if its plan is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store.packing import check_finite
from ensemble_ml.store.schema import DERIVED, FORMAT, WRITTEN, ArraySpec, Kind, array_specs
from ensemble_ml.store.source import Layout, Part

FINGERPRINT = "fingerprint"  # key of the source's fingerprint in the provenance
_CHANGING = (FINGERPRINT, "gaps")  # facts about source files, which may change while a store is built

Reads = Callable[[int], dict[str, set[tuple[str, int, int]]]]  # date -> part -> path, offset, length of each field


@dataclass(frozen=True, eq=False)
class BuildPlan:
    """A plan of everything that decides what a store contains, except the fields themselves.

    Args:
        layout: Coordinates.
        wanted: Those of forecast, control and truth that will be written, in any order. Other parts are ignored. Mean
            and spread follow from the forecast.
        packing: Number format of forecast, control and truth.
        static: Static fields (Y, X) by name.
        lead_bounds: [first, last] hour for each lead of a variable over intervals; None for a lead without an interval.
        provenance: Origin of the data, as any values that JSON can hold, including the fingerprint of the source.
        climate_days: Half-width in days of the window of the model climate that the store will hold; 0 for none.
        reads: Function that returns the fields of the archive from which an init time is built; None for fields in
            memory.

    Raises:
        UserError: A static field holds NaN or infinity, or `climate_days` is set and the init times are not of two
            years or more.
    """

    layout: Layout
    wanted: tuple[Part, ...]
    packing: Packing = Packing.uint16
    static: dict[str, np.ndarray] = field(default_factory=dict)
    lead_bounds: dict[str, list[list[int] | None]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    climate_days: int = 0
    reads: Reads | None = None

    def __post_init__(self) -> None:
        years = np.unique(self.layout.init_time.astype("datetime64[Y]"))
        if self.climate_days and len(years) < 2:
            raise UserError(
                f"climate_days={self.climate_days}: a model climate is made of other years; the init times are of "
                f"{', '.join(map(str, years)) or 'none'} alone: give more years, or leave it out"
            )
        for name, values in self.static.items():
            check_finite(np.asarray(values), where=lambda _: f"static field {name}")  # noqa: B023 - called at once

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts that the store will have."""
        derived = DERIVED if Part.FORECAST in self.wanted and len(self.layout.realization) > 1 else ()
        return tuple(part for part in (*WRITTEN, *derived) if part in self.wanted or part in derived)

    @cached_property
    def specs(self) -> dict[tuple[Part, Kind], ArraySpec]:
        """Return the arrays that the store will have, except masks, which depend on the fields."""
        every = (spec for part in self.parts for spec in array_specs(self.layout, part, self.packing))
        return {(spec.part, spec.kind): spec for spec in every}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return the settings and the provenance as JSON values. `differs` compares those of two plans."""
        lay = self.layout
        named = {
            "start dates": [str(time) for time in lay.init_time.astype("datetime64[m]")],
            "members": lay.realization,
            "leads": lay.lead_hours,
            "variables": lay.names,
            "levels": lay.levels,
            "latitudes": lay.grid.latitude.tolist(),
            "longitudes": lay.grid.longitude.tolist(),
            "format": FORMAT,
            "parts": [part.value for part in self.parts],
            "packing": self.packing.value,
            "static fields": {name: _static_digest(values) for name, values in sorted(self.static.items())},
            "lead bounds": self.lead_bounds,
            "climate days": self.climate_days,
        }
        # The provenance may repeat a setting as it was requested, such as levels; the layout has the actual values.
        asked = {key: value for key, value in self.provenance.items() if key not in named}
        return json.loads(json.dumps(named | asked))

    @property
    def digest(self) -> str:
        """Return 16 hex digits that identify the plan."""
        return _digest(json.dumps(self.facts, sort_keys=True).encode())

    def of_date(self, date: int) -> str:
        """Return 16 hex digits that identify this plan and one of its init times, whatever the source files hold."""
        return _digest(f"{self._settled} {self.layout.init_time[date]}".encode())

    @cached_property
    def _settled(self) -> str:
        """Return the facts that do not depend on the source files, as text."""
        return json.dumps({key: value for key, value in self.facts.items() if key not in _CHANGING}, sort_keys=True)

    def differs(self, other: dict[str, Any]) -> str | None:
        """Describe the first difference from another plan with the facts `other`; return None if there is none.

        Facts that depend only on the source files do not count. These files may change: init times that were read from
        a changed file, or that gained fields, are built again.
        """
        # A setting that only one of the plans has counts as a difference, unless it is None.
        for key in (*self.facts, *(key for key in other if key not in self.facts)):
            if key not in _CHANGING and self.facts.get(key) != other.get(key):
                return f"{key} {_short(other.get(key))}, now {_short(self.facts.get(key))}"
        return None


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts that a build wrote down in the `plan.json` at `path`.

    Raises:
        UserError: The file cannot be read or understood.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete the folder {path.parent} and start anew") from error


def _static_digest(values: np.ndarray) -> str:
    """Return 16 hex digits that identify the values of a static field."""
    return _digest(np.ascontiguousarray(values, np.float32).tobytes())


def _digest(data: bytes) -> str:
    """Return the first 16 hex digits of a sha256."""
    return hashlib.sha256(data).hexdigest()[:16]


def _short(value: Any) -> str:
    """Return a value as short text for a message."""
    if value is None:
        return "not given"
    if isinstance(value, list) and len(value) > 6:
        return f"[{value[0]} ... {value[-1]}] ({len(value)})"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
