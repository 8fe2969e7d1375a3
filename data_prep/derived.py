"""Variables that are computed from two others, member by member: wind speed from its components.

They are added to the table of records only. The values are computed when they are read (see `data_prep.combine`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from data_prep.records import FIELD_INDEX, KEYS
from ensemble_ml.fields import FIELDS, field

DERIVED = tuple(one.name for one in FIELDS if one.components)
NONE = -1  # in place of the row of a second component, where the record is not derived


def with_derived(records: np.ndarray, names: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add a record for every field of the variables `names` whose two components are present.

    A variable of which the archive has any field itself stays as it is: it is more exact than one computed from packed
    components. Its missing fields are not computed either.

    Args:
        records: (N,) RECORD or IDENTITY, sorted by `data_prep.records.KEYS`.
        names: variables that are wanted; those without components are ignored.

    Returns:
        Three arrays (N + K,), in which the K derived fields come last: the records; the row of `records` to which each
        belongs (for a derived field, that of its first component); and the row of its second component, or NONE.

    Raises:
        UserError: the registry has no variable of one of the names.
    """
    tables, rows = [records], [np.arange(len(records))]
    partners = [np.full(len(records), NONE)]
    for name in dict.fromkeys(names):
        if not field(name).components or (records["field"] == FIELD_INDEX[name]).any():
            continue
        first, second = (
            np.flatnonzero(records["field"] == FIELD_INDEX[component]) for component in field(name).components
        )
        first, second = _matched(records, first, second)
        made = records[first].copy()
        made["field"] = FIELD_INDEX[name]
        made["masked"] |= records["masked"][second]
        tables.append(made)
        rows.append(first)
        partners.append(second)
    return np.concatenate(tables), np.concatenate(rows), np.concatenate(partners)


def _matched(records: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of both components that agree in all keys but the variable."""
    keys = KEYS[1:]
    one, other = records[keys][first], records[keys][second]
    # In a complete archive both components come in the same order, because the table is sorted by its keys. Then the
    # costly search for common keys is not needed.
    if len(one) == len(other) and all((one[key] == other[key]).all() for key in keys):
        return first, second
    _, here, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return first[here], second[there]
