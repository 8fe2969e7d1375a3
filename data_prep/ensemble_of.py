"""Separate the records of an ensemble from other records in the same archive.

A deterministic run, extremes over some hours and statistics of all members have the same names and times as the
members' fields. Without this step an archive would be refused, because a field exists twice or is both instantaneous
and over an interval; or such records would count as one more member with few fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.files import FORECAST
from data_prep.notices import notice_log
from data_prep.records import CONTROL, IS_ACCUMULATED, MEMBER, SINGLE, Origin, Reader
from data_prep.xarray_files import XarrayFile
from ensemble_ml.fields import FIELDS, GUST

log = notice_log(__name__)

_CYCLE_50R1 = np.datetime64("2026-05-12T06", "s")  # first init time of ECMWF's IFS cycle 50r1


def decide_single_runs(path: str, table: np.ndarray, origins: Sequence[Origin], role: str) -> None:
    """Make ECMWF's deterministic run the control of an ensemble without one.

    This is done at init times from IFS cycle 50r1 on that have numbered members of ECMWF's ensemble and no control.
    Before this cycle, the ensemble had a control of its own. Since then the control and the deterministic run are the
    same forecast, and ECMWF distributes only the latter (ECMWF, "Find out how to access ECMWF real-time open data", May
    2026). Any other deterministic run stays as its file states it, as a rule without a member number; then `of_members`
    leaves it out if other records state one.

    `kind` and `numbered` of `table`, (N,) RECORD, are changed. Only in the role `FORECAST` is the run made the control.
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
        log.info("%s: the deterministic run is the control of the ensemble, as at ECMWF since cycle 50r1", path)


def of_one_kind(path: str, readers: list[Reader], table: np.ndarray, skipped: dict[str, int]) -> np.ndarray:
    """Return `table`, (N,) RECORD, with only one kind of values of each variable that has two kinds at a lead.

    Values are instantaneous or over an interval. NetCDF and Zarr give both the same name: the Met Office has files of
    the temperature at each hour, and of its maximum in the hour before. They are different quantities. If any lead of a
    variable has both kinds, the values over an interval are left out at all leads; of gusts, the instantaneous ones
    are. Accumulated variables and GRIB records are not changed. Records that are left out are counted in `skipped`.
    """
    named = np.array([isinstance(reader, XarrayFile) for reader in readers], bool)  # in GRIB the parameters differ
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
        reason = "instantaneous; the largest of some hours is kept" if gust else "over hours; the instantaneous is kept"
        skipped[f"{FIELDS[index].name} ({reason})"] = int((table["field"][gone] == index).sum())
    names = ", ".join(sorted({FIELDS[index].name for index in np.unique(table["field"][gone]).tolist()}))
    text = "%s: %d fields of %s are left out, because the archive has instantaneous values and values over hours"
    log.info(text, path, gone.sum(), names)
    return table[~gone]


def of_members(path: str, files: list[str], table: np.ndarray, skipped: dict[str, int]) -> np.ndarray:
    """Return `table`, (N,) RECORD, without records that state no member number, if others state one.

    A deterministic run, a statistic of all members, or an analysis would otherwise count as a member 0 that lacks
    most fields. Records that are left out are counted in `skipped`. If 0 is the only number that is stated, and no
    control states it, all records stay, because some files give this number to a deterministic run.
    """
    others = table["numbered"] & ((table["member"] != 0) | (table["kind"] != MEMBER))
    gone = ~table["numbered"] & others.any()
    if not gone.any():
        return table
    indices, counts = np.unique(table["field"][gone], return_counts=True)
    names = ", ".join(FIELDS[index].name for index in indices.tolist())
    for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
        skipped[f"{FIELDS[index].name} (without a member number)"] = count
    first = files[int(table["file"][gone.argmax()])]
    text = "%s: %d fields without a member number are left out, because others have one: %s (%s)"
    log.warning(text, path, gone.sum(), names, first)
    return table[~gone]
