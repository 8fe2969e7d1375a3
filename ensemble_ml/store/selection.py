"""Find the positions in the arrays of a store that a `Selection` of coordinate values asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.schema import Kind
from ensemble_ml.store.source import Layout, Part, Selection


@dataclass(frozen=True, eq=False)
class Wanted:
    """A part of one array: positions along member, lead, variable and level, and rows from start to stop (excluded)."""

    fields: tuple[np.ndarray, ...]
    rows: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of positions along each axis."""
        return tuple(len(axis) for axis in self.fields)

    def distinct(self) -> tuple[Wanted, tuple[np.ndarray, ...]]:
        """Return a copy with each position once, ascending, and the indices that restore the original positions.

        The indices are an open mesh (`np.ix_`) over the four axes.
        """
        pairs = [np.unique(axis, return_inverse=True) for axis in self.fields]
        return Wanted(tuple(once for once, _ in pairs), self.rows), np.ix_(*(inverse for _, inverse in pairs))


def resolve(path: str, layout: Layout, part: Part, kind: Kind, selection: Selection) -> Wanted:
    """Find the positions that `selection` asks for in the array of one kind of variable.

    Args:
        path: Name of the store in messages.
        layout: Coordinates of the store.
        part: Part of the store.
        kind: Kind of the variable.
        selection: Coordinate values.

    Raises:
        UserError: A selected value is not in the layout, or the rows are empty or outside the grid.
    """

    def positions(what: str, values: Sequence[Any] | None, stored: Sequence[Any]) -> np.ndarray:
        """Return the positions of values along one axis; None stands for all."""
        if values is None:
            return np.arange(len(stored))
        return np.asarray([position(what, value, stored, path) for value in values], np.intp)

    member = positions("member", selection.realization, layout.realization)
    lead = positions("lead (h)", selection.lead_hours, layout.lead_hours)
    level = positions("level (hPa)", selection.levels, layout.levels)
    if kind is Kind.PRESSURE:
        variable = positions("variable", selection.variables, layout.variables)
    else:
        variable = positions("surface variable", selection.surface, layout.surface)
    there = layout.grid.shape[0]
    rows = selection.rows or (0, there)
    if not 0 <= rows[0] < rows[1] <= there:
        raise UserError(f"store {path}: has no rows {rows[0]} to {rows[1]}; it has rows 0 to {there}")
    only = np.zeros(1, np.intp)  # the single position of an axis that a part or kind does not have
    fields = (member if part is Part.FORECAST else only, lead, variable, level if kind is Kind.PRESSURE else only)
    return Wanted(fields, rows)


def position(what: str, value: Any, stored: Sequence[Any], path: str) -> int:
    """Return the index of `value` in `stored`.

    Args:
        what: Name of the coordinate in messages.
        value: Value to find.
        stored: Values of the coordinate.
        path: Name of the store in messages.

    Raises:
        UserError: The value is not there. The message lists the stored values.
    """
    try:
        return list(stored).index(value)
    except ValueError:
        there = ", ".join(map(str, stored)) or "none"
        raise UserError(f"store {path}: has no {what} {value}; it holds {there}") from None
