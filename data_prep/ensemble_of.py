"""The records of an archive that are of its ensemble, and those beside them that are of something else.

A deterministic run, extremes over hours beside values of the moment, and statistics of all members bear the names and
times of the members' fields. They would otherwise stand twice, or as a member of which all else is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from data_prep.files import FORECAST
from data_prep.records import CONTROL, IS_ACCUMULATED, MEMBER, SINGLE, Origin, Reader
from data_prep.xarray_files import XarrayFile
from ensemble_ml.fields import FIELDS, GUST

log = logging.getLogger(__name__)

_CYCLE_50R1 = np.datetime64("2026-05-12T06", "s")  # first start of ECMWF's IFS cycle 50r1


def decide_single_runs(path: str, table: np.ndarray, origins: Sequence[Origin], role: str) -> None:
    """Make ECMWF's deterministic run the control of an ensemble that has none; elsewhere it is a run without members.

    Before IFS cycle 50r1 the ensemble had a control of its own. Since then, ECMWF gives it out as the deterministic run
    alone, which is the same forecast (ECMWF, "Find out how to access ECMWF real-time open data", May 2026).

    Args:
        path: the archive, for messages.
        table: (N,) RECORD, whose kinds are changed.
        origins: the origins that the table points to.
        role: what the archive is.
    """
    single = table["kind"] == SINGLE
    if not single.any():
        return
    table["kind"][single] = MEMBER
    of_ensemble = [number for number, one in enumerate(origins) if (one.centre, one.ensemble) == ("ecmf", "enfo")]
    enfo = np.isin(table["origin"], of_ensemble) & table["numbered"]
    with_control = table["init"][table["kind"] == CONTROL]
    control = single & (table["init"] >= _CYCLE_50R1) & np.isin(table["init"], table["init"][enfo])
    control &= ~np.isin(table["init"], with_control)
    if role == FORECAST and control.any():
        table["kind"][control] = CONTROL
        table["numbered"][control] = True
        log.info("%s: the deterministic run is the control of the ensemble, as ECMWF has it since cycle 50r1", path)


def of_one_kind(path: str, readers: list[Reader], table: np.ndarray, skipped: dict[str, int]) -> np.ndarray:
    """Return `table` without extremes and means over time beside values of the moment of the same variable.

    NetCDF gives both the same name: the Met Office has files of the temperature at each hour, and of its maximum in the
    hour before. They are different quantities, and the variable of the registry is that of the moment, but for gusts
    the largest. Those that are left out are counted in `skipped`.
    """
    named = np.array([isinstance(reader, XarrayFile) for reader in readers], bool)  # GRIB has a key for each
    if not named.any():
        return table
    by_name = named[table["file"]]
    over = by_name & ~IS_ACCUMULATED[table["field"]] & (table["lead_start"] < table["lead"])
    gone = np.zeros(len(table), bool)
    for index in np.unique(table["field"][over]).tolist():
        mine = by_name & (table["field"] == index)
        at_once = mine & ~over
        if np.intersect1d(table["lead"][at_once], table["lead"][mine & over]).size:
            gone |= at_once if FIELDS[index].standard_name == GUST else mine & over
    if not gone.any():
        return table
    for index in np.unique(table["field"][gone]).tolist():
        gust = FIELDS[index].standard_name == GUST
        reason = "of the moment, beside the largest of hours" if gust else "over hours, beside values of the moment"
        skipped[f"{FIELDS[index].name} ({reason})"] = int((table["field"][gone] == index).sum())
    names = ", ".join(sorted({FIELDS[index].name for index in np.unique(table["field"][gone]).tolist()}))
    text = "%s: %d fields of %s are left out: the archive has values of the moment and over hours"
    log.info(text, path, gone.sum(), names)
    return table[~gone]


def of_members(path: str, files: list[str], table: np.ndarray, skipped: dict[str, int]) -> np.ndarray:
    """Return `table` without the records that state no member, if other records do. They are counted in `skipped`.

    A deterministic run beside its ensemble, a statistic of all members, or an analysis would otherwise count as member
    0, of which all other fields are missing.

    If the only other member has the number 0, they stay, because some files give a deterministic run this number.
    """
    others = table["numbered"] & ((table["member"] != 0) | (table["kind"] != MEMBER))
    gone = ~table["numbered"] & others.any()
    if not gone.any():
        return table
    indices, counts = np.unique(table["field"][gone], return_counts=True)
    names = ", ".join(FIELDS[index].name for index in indices.tolist())
    for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
        skipped[f"{FIELDS[index].name} (of no member, beside members)"] = count
    first = files[int(table["file"][gone.argmax()])]
    text = "%s: %d fields of no member, beside members, are left out: %s (%s)"
    log.warning(text, path, gone.sum(), names, first)
    return table[~gone]
