"""Short names of public archives. A name stands for a Zarr store, or for the GRIB files of an ensemble.

`wb2:ifs_ens/64x32` is a Zarr store (`NAMES`). `gefs:reforecast/2000-01-05` stands for many GRIB files, whose URLs
follow a rule (`RULES`): the files of all init times in a period (YYYY[-MM[-DD[THH]]], or start/end). Only files
with leads, variables and levels that the settings of `prepare` ask for are read. The rules were collected from public
code in 2026. Each archive has the licence of the centre that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.source import select_dates

_WB2 = "gs://weatherbench2/datasets"
_DYNAMICAL = "https://data.dynamical.org"
NAMES = {
    "wb2:ifs_ens/64x32": f"{_WB2}/ifs_ens/2018-2022-64x32_equiangular_conservative.zarr",
    "wb2:ifs_ens/240x121": f"{_WB2}/ifs_ens/2018-2022-240x121_equiangular_with_poles_conservative.zarr",
    "wb2:ifs_ens/1440x721": f"{_WB2}/ifs_ens/2018-2022-1440x721.zarr",
    "wb2:neuralgcm_ens/240x121": f"{_WB2}/neuralgcm_ens/2020-240x121_equiangular_with_poles_conservative.zarr",
    "wb2:era5/64x32": f"{_WB2}/era5/1959-2023_01_10-6h-64x32_equiangular_conservative.zarr",
    "arco:era5": "gs://gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3",
    "dynamical:ifs_ens": f"{_DYNAMICAL}/ecmwf/ifs-ens/forecast-15-day-0-25-degree/latest.zarr",
    "dynamical:gefs": f"{_DYNAMICAL}/noaa/gefs/forecast-35-day/latest.zarr",
}


@dataclass(frozen=True)
class Rule:
    """The patterns of the URLs of an ensemble's files, with fields for init times, members and leads.

    Attributes:
        root: address of the archive.
        files: patterns of the files below `root`, with {date}, {year}, {hour}, {member}, {lead}, {days} and {stem}.
        first: first init time.
        last: last init time; empty if the archive still grows.
        hours: hours of the day of the init times, UTC.
        leads: (last lead, spacing) in hours of each stretch of leads, in order; empty if a file holds all leads.
        short: last lead, in hours, of forecasts from 06 and 18 UTC; 0 if it is the same as at 00 and 12 UTC.
        members: names of members.
        sums_of_steps: whether an accumulated field, such as precipitation, may begin after the init time. The sum from
            the init time on then needs the files of all earlier leads.
        since: (init time, pattern) of further files that exist from this init time on.
    """

    root: str
    files: tuple[str, ...]
    first: str
    last: str = ""
    hours: tuple[int, ...] = (0, 6, 12, 18)
    leads: tuple[tuple[int, int], ...] = ()
    short: int = 0
    members: tuple[str, ...] = ("",)
    sums_of_steps: bool = False
    since: tuple[tuple[str, str], ...] = ()


def _perturbed(last: int) -> tuple[str, ...]:
    """Return NOAA's names of the control and of the perturbed members 1 to `last`."""
    return ("c00", *(f"p{number:02d}" for number in range(1, last + 1)))


RULES = {
    "gefs:reforecast": Rule(
        "s3://noaa-gefs-retrospective/GEFSv12/reforecast",
        ("{year}/{date}00/{member}/{days}/{stem}_{date}00_{member}.grib2",),
        "2000-01-01", "2019-12-31", hours=(0,), members=_perturbed(4), sums_of_steps=True,
    ),
    "gefs:operational": Rule(
        "s3://noaa-gefs-pds", ("gefs.{date}/{hour}/atmos/pgrb2ap5/ge{member}.t{hour}z.pgrb2a.0p50.f{lead:03d}",),
        "2020-09-24", leads=((240, 3), (384, 6)), members=_perturbed(30), sums_of_steps=True,
    ),
    "opendata:ifs": Rule(
        "gs://ecmwf-open-data", ("{date}/{hour}z/ifs/0p25/enfo/{date}{hour}0000-{lead}h-enfo-ef.grib2",),
        "2024-02-29", leads=((144, 3), (360, 6)), short=144,
        # From cycle 50r1 on, the control is the deterministic run.
        since=(("2026-05-12T06", "{date}/{hour}z/ifs/0p25/oper/{date}{hour}0000-{lead}h-oper-fc.grib2"),),
    ),
    "opendata:aifs": Rule(
        "gs://ecmwf-open-data",
        tuple(f"{{date}}/{{hour}}z/aifs-ens/0p25/enfo/{{date}}{{hour}}0000-{{lead}}h-enfo-{kind}.grib2"
              for kind in ("cf", "pf")),
        "2025-07-02", leads=((360, 6),),
    ),
}  # fmt: skip
_SPLIT = 700  # hPa; levels of lower pressure have files of their own in GEFSv12's reforecast, on a coarser grid
_UPPER = {"t": "tmp", "z": "hgt", "u": "ugrd", "v": "vgrd", "q": "spfh"}
_SURFACE = {
    "t2m": "tmp_2m", "msl": "pres_msl", "tp": "apcp_sfc",
    "u10": "ugrd_hgt", "v10": "vgrd_hgt", "u100m": "ugrd_hgt", "v100m": "vgrd_hgt",
}  # fmt: skip
_FIRST_PART = 240  # hours; longer leads of the reforecast lie in another folder


def is_rule(path: str) -> bool:
    """Return whether a path is a short name with a rule, such as `gefs:reforecast/2000-01-05`."""
    return path.partition("/")[0] in RULES


def urls_of_rule(
    path: str,
    *,
    variables: Collection[str] | None = None,
    levels: Sequence[int] | None = None,
    leads: Sequence[int] | None = None,
    dates: Sequence[str] | None = None,
) -> list[str]:
    """Return the URLs of the files that a name stands for.

    Args:
        path: the name with a period.
        variables: short names of the variables to read; None for all whose files are known.
        levels: pressure levels to read, hPa; None for all.
        leads: leads to read, hours; None for all, except that GEFSv12's reforecast is then read up to ten days only.
        dates: further periods in one of which an init time has to lie, or None.

    Raises:
        UserError: the name has no period, the period is not a date, or the archive has none of the init times, leads or
            variables.
    """
    name, _, period = path.partition("/")
    rule = RULES[name]
    starts = _starts(rule)
    if not period:
        raise UserError(f"{path}: names no period; give one, as in {name}/{str(starts[-1])[:13]}")
    for periods in ([period], dates):
        starts = starts if periods is None else starts[select_dates(starts, periods, path)]
    stems = _stems(path, variables, levels) if any("{stem}" in one for one in rule.files) else [""]
    last = max(leads) if leads else 0
    # The sum up to a lead may have to be computed from the sums of all earlier steps, so these files are read, too. If
    # no variables are named, all are read, and precipitation is among them.
    summed = rule.sums_of_steps and (variables is None or "tp" in variables)
    read = range(last + 1) if summed and leads else leads
    days = {"Days:1-10" if lead <= _FIRST_PART else "Days:10-16" for lead in read or (0,)}
    found: dict[str, None] = {}
    for start in starts:
        hours = [lead for lead in _leads(rule, start) if not rule.leads or read is None or lead in read]
        if not hours:
            raise UserError(f"{path}: has none of the leads {', '.join(map(str, leads or ()))} h at {str(start)[:13]}")
        for values in _values(rule, start, hours, stems, sorted(days)):
            for file in (*rule.files, *(file for since, file in rule.since if start >= np.datetime64(since))):
                found.setdefault(f"{rule.root}/{file.format_map(values)}")
    return list(found)


def _starts(rule: Rule) -> np.ndarray:
    """Return all init times of an archive up to today, (D,) datetime64[s]."""
    last = np.datetime64(rule.last, "D") if rule.last else np.datetime64("today", "D")
    days = np.arange(np.datetime64(rule.first, "D"), last + 1)
    return (days[:, None] + np.array(rule.hours, "timedelta64[h]")).astype("datetime64[s]").ravel()


def _leads(rule: Rule, start: np.datetime64) -> list[int]:
    """Return the leads of an init time in hours; 0 alone if each file holds all leads."""
    found, first = [0], 0
    for last, step in rule.leads:
        found += range(first + step, last + 1, step)
        first = last
    early = rule.short and int(str(start)[11:13]) % 12
    return [lead for lead in found if not early or lead <= rule.short]


def _values(
    rule: Rule, start: np.datetime64, leads: Sequence[int], stems: Sequence[str], days: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the values to fill into the patterns, once for each file."""
    text = str(start)
    fixed = {"year": text[:4], "date": text[:10].replace("-", ""), "hour": text[11:13]}
    for member in rule.members:
        for lead in leads:
            for stem in stems:
                for part in days:
                    yield fixed | {"member": member, "lead": lead, "stem": stem, "days": part}


def _stems(path: str, variables: Collection[str] | None, levels: Sequence[int] | None) -> list[str]:
    """Return the first parts of the names of GEFSv12's files, for some variables and levels."""
    found = []
    for name in (*_UPPER, *_SURFACE) if variables is None else sorted(variables):
        if name in _UPPER:
            low = levels is None or any(level >= _SPLIT for level in levels)
            high = levels is None or any(level < _SPLIT for level in levels)
            found += [f"{_UPPER[name]}_pres"] * low + [f"{_UPPER[name]}_pres_abv700mb"] * high
        elif name in _SURFACE:
            found.append(_SURFACE[name])
    if not found:
        raise UserError(f"{path}: file names are known for {', '.join((*_UPPER, *_SURFACE))}; give URLs for others")
    return list(dict.fromkeys(found))
