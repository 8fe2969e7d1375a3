"""What every source of ensembles offers, be it a tensor store or an archive read in place.

Axes: D start date, M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid


class Part(Enum):
    """The kinds of field that stand under a start date."""

    FORECAST = "forecast"  # perturbed members
    CONTROL = "control"  # the unperturbed member, where it is kept apart
    TRUTH = "truth"  # verifying fields at init_time + lead_time
    MEAN = "mean"  # mean of all members
    SPREAD = "spread"  # standard deviation of all members, ddof = 1


@dataclass(frozen=True, eq=False)
class Layout:
    """Coordinates of a source.

    `init_time` (D,) datetime64[ns] ascending; `realization` member numbers ascending; `lead_hours` ascending;
    `levels` hPa ascending (top of the atmosphere first).
    """

    init_time: np.ndarray
    realization: tuple[int, ...]
    lead_hours: tuple[int, ...]
    variables: tuple[str, ...]
    levels: tuple[int, ...]
    surface: tuple[str, ...]
    grid: Grid

    @property
    def names(self) -> tuple[str, ...]:
        """All variables, those on pressure levels first."""
        return self.variables + self.surface


@dataclass(frozen=True, eq=False)
class Fields:
    """Decoded float32 values of one start date and part.

    NaN where a field is absent (`Source.present` says which), and at points of a present field that have no value (a
    bitmap: sea surface temperature over land); `Source.masked` names the variables with such points.

    `pressure` (M, T, V, Z, Y, X) and `surface` (M, T, S, Y, X); M is 1 for parts other than the forecast.
    """

    pressure: np.ndarray
    surface: np.ndarray

    def one(self) -> np.ndarray:
        """What `Selection.one` has read: (M, Z, Y, X), with one level at the surface."""
        return self.pressure[:, 0, 0] if self.pressure.shape[2] else self.surface[:, 0, 0][:, None]


@dataclass(frozen=True)
class Selection:
    """What to read, by coordinate value; None takes all. `rows` are row indices start, stop."""

    realization: tuple[int, ...] | None = None
    lead_hours: tuple[int, ...] | None = None
    variables: tuple[str, ...] | None = None
    levels: tuple[int, ...] | None = None
    surface: tuple[str, ...] | None = None
    rows: tuple[int, int] | None = None

    @classmethod
    def one(cls, lead: int, name: str, *, surface: bool, levels: tuple[int, ...] | None = None) -> Selection:
        """One variable at one lead, all members; `levels` of a variable on pressure levels."""
        return cls(None, (lead,), () if surface else (name,), None if surface else levels, (name,) if surface else ())


class Source(Protocol):
    """A tensor store, or an archive behind the same face."""

    path: str
    layout: Layout

    @property
    def masked(self) -> tuple[str, ...]:
        """Variables that have points without a value, in any field of any part."""

    def has(self, part: Part) -> bool:
        """Whether any field of `part` is there."""

    def read(self, part: Part, date: int, selection: Selection = Selection()) -> Fields:
        """Read one start date (index into `layout.init_time`)."""

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Which fields are there: bool (M, T, V, Z) and (M, T, S)."""

    def static(self) -> dict[str, np.ndarray]:
        """Static fields by name, (Y, X) float32; empty where none came with the data."""

    def fingerprint(self) -> str:
        """A short hash of what the source holds, kept in checkpoints and forecasts."""


def bounds_at(source: Source, names: Sequence[str], leads: Sequence[int]) -> dict[str, list[list[int] | None]]:
    """[first, last] hour of variables over intervals at each of `leads`, None where a lead has none.

    Sources that do not know them give nothing.
    """
    known, hours = getattr(source, "lead_bounds", {}), source.layout.lead_hours
    found = {name: [known[name][hours.index(lead)] for lead in leads] for name in names if name in known}
    return {name: pairs for name, pairs in found.items() if any(pair is not None for pair in pairs)}


def fingerprint_at(source: Source, date: int) -> str:
    """A short hash of what the forecast of one start date is read from; of all that a source holds, where it cannot
    tell: a tensor store, which does not grow."""
    known = getattr(source, "date_fingerprint", None)
    return source.fingerprint() if known is None else str(known(date))


def zero_by_nature(name: str, lead_hours: int) -> bool:
    """Whether a field is zero without being stored: at the start of a forecast, nothing has been accumulated yet."""
    return lead_hours == 0 and field(name).accumulated


def hour_of_day(time: np.datetime64 | np.ndarray) -> np.ndarray:
    """Hour (UTC) of a start date, or of an array of them, int64."""
    return time.astype("datetime64[h]").astype(np.int64) % 24


def select_dates(init_time: np.ndarray, periods: Sequence[str], key: str = "dates") -> np.ndarray:
    """Return the indices of the start dates within any of `periods` (YYYY[-MM[-DD[THH]]] or start/end, both inclusive);
    the setting `key` gave these.

    Raises:
        UserError: a period is no date, or matches no start date.
    """
    chosen = np.zeros(len(init_time), bool)
    for period in periods:
        first, _, last = str(period).partition("/")
        try:
            start, end_period = np.datetime64(first).astype("datetime64[s]"), np.datetime64(last or first)
        except ValueError as error:
            raise UserError(f"{key} {period}: is no date ({error}); give YYYY[-MM[-DD[THH]]] or start/end") from error
        end = (end_period + 1).astype("datetime64[s]")  # the whole of the last year, month, day or hour
        if end <= start:
            raise UserError(f"{key} {period}: ends before it begins")
        seconds = init_time.astype("datetime64[s]")  # nanoseconds end in 2262
        inside = (seconds >= start) & (seconds < end)
        if not inside.any():
            raise UserError(f"{key} {period}: no start date lies there; the data span {_span(init_time)}")
        chosen |= inside
    return np.flatnonzero(chosen)


def _span(init_time: np.ndarray) -> str:
    if not len(init_time):
        return "no date"
    first, last = init_time[[0, -1]].astype("datetime64[h]")
    return f"{first} to {last} ({len(init_time)} dates)"
