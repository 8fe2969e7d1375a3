"""Short names of public archives. A name stands for one Zarr store, for several, or for the files of an ensemble.

`wb2:ifs_ens/64x32` is a Zarr store (`NAMES`), and `euppbench:forecasts` are several (`STORES`).
`gefs:reforecast/2000-01-05` stands for many files, whose URLs follow a rule (`RULES`): the files of all init times in a
period (YYYY[-MM[-DD[THH]]], or start/end). Only the files with the leads, variables and levels that the settings of
`prepare` ask for are read. The rules were collected from public code in 2026. Each archive has the licence of the
centre that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
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
_ECMWF = "https://object-store.os-api.cci1.ecmwf.int"
_EUPPBENCH = f"{_ECMWF}/eumetnet-postprocessing-benchmark-1st-phase-training-dataset/data/gridded_data"
STORES = {
    f"euppbench:{kind}": tuple(
        f"{_EUPPBENCH}/gridded_ensemble_{kind}_{part}.zarr"
        for part in ("surface", "surface_postprocessed", "pressure_500", "pressure_700", "pressure_850")
    )
    for kind in ("forecasts", "reforecasts")
}


@dataclass(frozen=True)
class Rule:
    """The patterns of the URLs of an ensemble's files, with fields for init times, members and leads.

    Attributes:
        root: address of the archive.
        files: patterns of the files below `root`, with {date}, {year}, {month}, {day}, {hour}, {member}, {lead},
            {valid} (date and hour of the valid time), {days} and {stem}.
        first: day of the first init times.
        last: day of the last init times; empty if the archive still grows.
        hours: hours of the day of the init times, UTC.
        leads: (last lead, spacing) in hours of each stretch of leads, in order; empty if a file holds all leads.
        short: last lead, in hours, of forecasts from 06 and 18 UTC; 0 if it is the same as at 00 and 12 UTC.
        members: names of members.
        sums_of_steps: whether an accumulated field, such as precipitation, may begin after the init time. The sum from
            the init time on then needs the files of all earlier leads.
        since: (init time, pattern) of further files that exist from this init time on.
        stems: by variable, what {stem} stands for; empty if a file holds all variables.
        split: hPa; on levels of lower pressure, the variables of `_UPPER` have files of their own. 0 if they do not.
        weekdays: days of the week with init times, from 0 for Monday.
        hindcasts: whether a file holds the same day of many years. The period then names the days of the files, and
            `dates` does not choose among them.
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
    stems: Mapping[str, str] = field(default_factory=dict)
    split: int = 0
    weekdays: tuple[int, ...] = tuple(range(7))
    hindcasts: bool = False


def _perturbed(last: int) -> tuple[str, ...]:
    """Return NOAA's names of the control and of the perturbed members 1 to `last`."""
    return ("c00", *(f"p{number:02d}" for number in range(1, last + 1)))


_UPPER = {"t": "tmp_pres", "z": "hgt_pres", "u": "ugrd_pres", "v": "vgrd_pres", "q": "spfh_pres"}
RULES = {
    "gefs:reforecast": Rule(
        "s3://noaa-gefs-retrospective/GEFSv12/reforecast",
        ("{year}/{date}00/{member}/{days}/{stem}_{date}00_{member}.grib2",),
        "2000-01-01", "2019-12-31", hours=(0,), members=_perturbed(4), sums_of_steps=True,
        stems=_UPPER | {
            "t2m": "tmp_2m", "msl": "pres_msl", "tp": "apcp_sfc",
            "u10": "ugrd_hgt", "v10": "vgrd_hgt", "u100m": "ugrd_hgt", "v100m": "vgrd_hgt",
        },
        split=700,  # their grid is coarser, too
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
    # The bucket keeps 30 days. Geopotential height has this name since January 2026.
    "mogreps:global": Rule(
        "https://met-office-global-ensemble-model-data.s3.eu-west-2.amazonaws.com/global-ensemble",
        ("{year}/{month}/{day}/T{hour}00Z/{valid}00Z-PT{lead:04d}H00M-{stem}.nc",),
        "2026-02-01", leads=((132, 1), (246, 3)),
        stems={
            "t": "temperature_on_pressure_levels", "z": "geopotential_height_on_pressure_levels",
            "r": "relative_humidity_on_pressure_levels", "ws": "wind_speed_on_pressure_levels",
            "t2m": "temperature_at_screen_level", "r2m": "relative_humidity_at_screen_level",
            "msl": "pressure_at_mean_sea_level", "ws10": "wind_speed_at_10m",
        },
    ),
    # Files are named by the Mondays and Thursdays of 2018, and hold these days of 1998 to 2017.
    "ens10:hindcasts": Rule(
        f"{_ECMWF}/maelstrom-ap4", ("output.{stem}.{date}",), "2018-01-01", "2018-12-31", hours=(0,),
        weekdays=(0, 3), hindcasts=True,
        stems=dict.fromkeys(("t", "z", "u", "v", "q", "w", "d"), "pl")
        | dict.fromkeys(("t2m", "msl", "u10", "v10", "tp", "cp", "tcc", "tcw", "tcwv", "sst", "skt"), "sfc"),
    ),
}  # fmt: skip
_FIRST_PART = 240  # hours; longer leads of the reforecast lie in another folder


def names_several(path: str) -> bool:
    """Return whether a path is a short name of several files or stores, such as `gefs:reforecast/2000-01-05`."""
    return path in STORES or path.partition("/")[0] in RULES


def urls_of_name(
    path: str,
    *,
    variables: Collection[str] | None = None,
    levels: Sequence[int] | None = None,
    leads: Sequence[int] | None = None,
    dates: Sequence[str] | None = None,
) -> list[str]:
    """Return the URLs of the files or stores that a name stands for.

    Args:
        path: the name, with a period if a rule belongs to it.
        variables: short names of the variables to read; None for all whose files are known.
        levels: pressure levels to read, hPa; None for all.
        leads: leads to read, hours; None for all, except that GEFSv12's reforecast is then read up to ten days only.
        dates: further periods in one of which an init time has to lie, or None; not used for hindcasts.

    Raises:
        UserError: the name has no period, the period is not a date, or the archive has none of the init times, leads or
            variables.
    """
    if path in STORES:
        return list(STORES[path])
    name, _, period = path.partition("/")
    rule = RULES[name]
    starts = _starts(rule)
    if not period:
        raise UserError(f"{path}: names no period; give one, as in {name}/{str(starts[-1])[:13]}")
    for periods in ([period], None if rule.hindcasts else dates):
        starts = starts if periods is None else starts[select_dates(starts, periods, path)]
    stems = _stems(path, rule, variables, levels) if rule.stems else [""]
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
    """Return all init times of an archive, (D,) datetime64[s], up to today if it still grows."""
    last = np.datetime64(rule.last, "D") if rule.last else np.datetime64("today", "D")
    days = np.arange(np.datetime64(rule.first, "D"), last + 1)
    days = days[np.isin((days.astype(np.int64) + 3) % 7, rule.weekdays)]  # 1970-01-01 was a Thursday
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
    fixed = {"year": text[:4], "month": text[5:7], "day": text[8:10], "hour": text[11:13]}
    fixed["date"] = text[:10].replace("-", "")
    for member, lead, stem, part in product(rule.members, leads, stems, days):
        valid = str(start + np.timedelta64(lead, "h"))[:13].replace("-", "")
        yield fixed | {"member": member, "lead": lead, "valid": valid, "stem": stem, "days": part}


def _stems(path: str, rule: Rule, variables: Collection[str] | None, levels: Sequence[int] | None) -> list[str]:
    """Return the values of {stem} in the names of the files that hold some variables on some levels."""
    found = []
    for name in [one for one in rule.stems if variables is None or one in variables]:
        stem, upper = rule.stems[name], rule.split and name in _UPPER
        if not upper or levels is None or any(level >= rule.split for level in levels):
            found.append(stem)
        if upper and (levels is None or any(level < rule.split for level in levels)):
            found.append(f"{stem}_abv{rule.split}mb")
    if not found:
        raise UserError(f"{path}: file names are known for {', '.join(rule.stems)}; give URLs for others")
    return list(dict.fromkeys(found))
