"""Variables that an archive does not hold but that follow, member by member, from two that it does: wind speed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from data_prep.records import FIELD_INDEX, KEYS
from ensemble_ml.fields import FIELDS, field

DERIVED = tuple(one.name for one in FIELDS if one.components)
NONE = -1


def with_derived(records: np.ndarray, names: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add a record for every field of `names` whose two components are there; a variable that is there stays as it is.

    Returns the records, the row of `records` that each stands for, and that of the second component (NONE elsewhere).
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
    """Those rows of both that agree in all keys but the variable."""
    keys = KEYS[1:]
    one, other = records[keys][first], records[keys][second]
    if len(one) == len(other) and all((one[key] == other[key]).all() for key in keys):  # a table is sorted by its keys
        return first, second
    _, here, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return first[here], second[there]
