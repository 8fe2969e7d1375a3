"""Define the interface that tensor stores and archives share.

Axes: D init time, M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
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
    """The parts of the data of an init time."""

    FORECAST = "forecast"  # members; among them the control, unless it is kept apart
    CONTROL = "control"  # the unperturbed member, if it is kept apart
    TRUTH = "truth"  # verifying fields at init_time + lead_time
    MEAN = "mean"  # mean of all members
    SPREAD = "spread"  # standard deviation of all members, ddof = 1


@dataclass(frozen=True, eq=False)
class Layout:
    """The coordinates of a source.

    Attributes:
        init_time: (D,) datetime64[ns], ascending.
        realization: Member numbers, ascending.
        lead_hours: Lead times in hours, ascending.
        variables: Short names of the variables on pressure levels.
        levels: Pressure levels in hPa, ascending (top of the atmosphere first).
        surface: Short names of the surface variables.
        grid: Latitudes and longitudes.
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
        """Return the names of all variables, those on pressure levels first."""
        return self.variables + self.surface


@dataclass(frozen=True, eq=False)
class Fields:
    """The decoded float32 values of one init time and part.

    Values are NaN where a field is absent (see `Source.present`). They are also NaN at points of a present field that
    have no value, such as sea surface temperature over land; `Source.masked` names the variables with such points.

    Attributes:
        pressure: (M, T, V, Z, Y, X); M is 1 for parts other than the forecast.
        surface: (M, T, S, Y, X).
    """

    pressure: np.ndarray
    surface: np.ndarray

    def joined(self) -> np.ndarray:
        """Return a copy with an axis F of fields, (..., T, F, Y, X): each variable level by level, then the surface."""
        shape = self.pressure.shape
        return np.concatenate([self.pressure.reshape(*shape[:-4], -1, *shape[-2:]), self.surface], axis=-3)

    def one(self) -> np.ndarray:
        """Return the variable and lead that `Selection.one` selects, (M, Z, Y, X); Z is 1 at the surface."""
        return self.pressure[:, 0, 0] if self.pressure.shape[2] else self.surface[:, 0, 0][:, None]


@dataclass(frozen=True)
class Selection:
    """A selection of values of coordinates, and of the row indices from start to stop (exclusive). None takes all."""

    realization: tuple[int, ...] | None = None
    lead_hours: tuple[int, ...] | None = None
    variables: tuple[str, ...] | None = None
    levels: tuple[int, ...] | None = None
    surface: tuple[str, ...] | None = None
    rows: tuple[int, int] | None = None

    @classmethod
    def one(cls, lead: int, name: str, *, surface: bool, levels: tuple[int, ...] | None = None) -> Selection:
        """Select one variable at one lead, with all members.

        Args:
            lead: Lead time in hours.
            name: Short name of the variable.
            surface: Whether it is a surface variable.
            levels: Levels in hPa of a variable on pressure levels; None takes all.
        """
        return cls(None, (lead,), () if surface else (name,), None if surface else levels, (name,) if surface else ())


class Source(Protocol):
    """The interface of a tensor store, and of an archive."""

    path: str  # names the source in messages
    layout: Layout

    @property
    def masked(self) -> tuple[str, ...]:
        """Return the variables of which at least one field, of any part, has points without a value."""

    def has(self, part: Part) -> bool:
        """Return whether `part` has at least one field."""

    def read(self, part: Part, date: int, selection: Selection = Selection()) -> Fields:
        """Read one init time.

        Args:
            part: Which fields.
            date: Index into `layout.init_time`.
            selection: The fields and rows to read.

        Returns:
            Fields (M, T, V, Z, Y, X) and (M, T, S, Y, X) float32 in the registry's units, NaN where a field is absent.

        Raises:
            UserError: The source does not have the part, the init time or a selected value, or a field cannot be
                decoded.
        """

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields are there: bool (M, T, V, Z) and (M, T, S)."""

    def static(self) -> dict[str, np.ndarray]:
        """Return static fields by name, (Y, X) float32; empty where none came with the data."""

    def fingerprint(self) -> str:
        """Return a short hash of the contents, which checkpoints and forecasts record."""


def bounds_at(source: Source, names: Sequence[str], leads: Sequence[int]) -> dict[str, list[list[int] | None]]:
    """Return the first and last hour of the intervals of variables (sums, means, extremes) at each of `leads` (hours).

    Returns:
        For each variable with an interval at one of the leads, [first, last] hour for each lead; None for a lead
        without an interval. The result is empty for a source that has no `lead_bounds`.
    """
    known, hours = getattr(source, "lead_bounds", {}), source.layout.lead_hours
    found = {name: [known[name][hours.index(lead)] for lead in leads] for name in names if name in known}
    return {name: pairs for name, pairs in found.items() if any(pair is not None for pair in pairs)}


def fingerprint_at(source: Source, date: int) -> str:
    """Return a short hash of the data from which the forecast of one init time is read.

    A source without `date_fingerprint` gives the hash of all its contents. A tensor store is such a source, because it
    does not grow.
    """
    known = getattr(source, "date_fingerprint", None)
    return source.fingerprint() if known is None else str(known(date))


def zero_by_nature(name: str, lead_hours: int) -> bool:
    """Return whether a field is zero by definition and need not be stored: an accumulated variable at lead zero."""
    return lead_hours == 0 and field(name).accumulated


def hour_of_day(time: np.datetime64 | np.ndarray) -> np.ndarray:
    """Return the hour of the day (UTC) of one or more init times, int64."""
    return time.astype("datetime64[h]").astype(np.int64) % 24


def select_dates(init_time: np.ndarray, periods: Sequence[str], key: str = "dates") -> np.ndarray:
    """Return the indices of the init times within any of `periods`, ascending.

    Args:
        init_time: (D,) datetime64 init times.
        periods: YYYY[-MM[-DD[THH[:MM]]]], or start/end with both ends included.
        key: Name of the setting that gave the periods, for messages.

    Raises:
        UserError: A period is not a date, ends before it begins, or matches no init time.
    """
    chosen = np.zeros(len(init_time), bool)
    for period in periods:
        first, _, last = str(period).partition("/")
        try:
            start, end_period = np.datetime64(first).astype("datetime64[s]"), np.datetime64(last or first)
        except ValueError as error:
            raise UserError(f"{key} {period}: is no date ({error}); give YYYY[-MM[-DD[THH]]] or start/end") from error
        end = (end_period + 1).astype("datetime64[s]")  # includes the whole last year, month, day, hour or minute
        if end <= start:
            raise UserError(f"{key} {period}: ends before it begins")
        seconds = init_time.astype("datetime64[s]")  # datetime64[ns] ends in 2262, and a period may not
        inside = (seconds >= start) & (seconds < end)
        if not inside.any():
            raise UserError(f"{key} {period}: no init time lies there; the data span {_span(init_time)}")
        chosen |= inside
    return np.flatnonzero(chosen)


def _span(init_time: np.ndarray) -> str:
    """Describe the range of the init times, for a message."""
    if not len(init_time):
        return "no date"
    first, last = init_time[[0, -1]].astype("datetime64[h]")
    return f"{first} to {last} ({len(init_time)} dates)"
