"""Small GRIB files with the names, packing and indexes of public ones: NOAA's GEFS, ECMWF's open data, ENS-10."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eccodes
import numpy as np
from gribfiles import finished, message, write
from public_weather import days, globe, weather

_GEFS = {  # keys of ecCodes, and what the index beside a file calls it
    ("z", 500): ({"shortName": "gh", "typeOfLevel": "isobaricInhPa", "level": 500}, "HGT:500 mb"),
    ("z", 850): ({"shortName": "gh", "typeOfLevel": "isobaricInhPa", "level": 850}, "HGT:850 mb"),
    ("t", 500): ({"shortName": "t", "typeOfLevel": "isobaricInhPa", "level": 500}, "TMP:500 mb"),
    ("t", 850): ({"shortName": "t", "typeOfLevel": "isobaricInhPa", "level": 850}, "TMP:850 mb"),
    ("t2m", 0): ({"shortName": "2t"}, "TMP:2 m above ground"),
    ("u10", 0): ({"shortName": "10u"}, "UGRD:10 m above ground"),
    ("v10", 0): ({"shortName": "10v"}, "VGRD:10 m above ground"),
    ("msl", 0): ({"shortName": "prmsl", "typeOfLevel": "meanSea"}, "PRMSL:mean sea level"),
}
_PERTURBED, _MEAN, _DEVIATION = {"typeOfEnsembleForecast": 3}, {"derivedForecast": 0}, {"derivedForecast": 4}
_CONTROL = {"typeOfEnsembleForecast": 1}
CONTROL_TYPE, PERTURBED_TYPE = 3, 4  # code table 1.4


def gefs(
    folder: Path, *, degrees: float, dates: int, members: int, leads: Sequence[int] = (24, 48)
) -> tuple[Path, Path]:
    """Write GEFS and analyses as NOAA has them, one file a member and lead with its index; return both folders.

    Beside the members lie the control and the ensemble's mean and spread. Heights are in geopotential metres, rain is
    the sum over the last six hours.
    """
    grid = globe(degrees)
    for start in days(dates):
        ensemble = folder / "ensemble" / f"gefs.{_compact(start)}" / "00" / "atmos" / "pgrb2ap5"
        for lead in leads:
            fields = {
                key: np.stack([_gefs_field(key, start, grid, m, lead) for m in range(members + 1)])
                for key in (*_GEFS, ("tp", 0))
            }
            made = {
                f"ge{'p' if m else 'c'}{m:02d}": (
                    _PERTURBED if m else _CONTROL, {key: values[m] for key, values in fields.items()}, m
                )
                for m in range(members + 1)
            }  # fmt: skip
            made["geavg"] = _MEAN, {key: values.mean(0) for key, values in fields.items()}, None
            made["gespr"] = _DEVIATION, {key: values.std(0) for key, values in fields.items()}, None
            for name, (keys, values, member) in made.items():
                path = ensemble / f"{name}.t00z.pgrb2a.0p50.f{lead:03d}"
                _write_with_index(path, start, lead, grid, keys, values, member)
    truth = folder / "truth"
    for time in days(dates + max(leads) // 24):
        path = truth / f"gfs.{_compact(time)}" / "00" / "atmos" / "gfs.t00z.pgrb2.0p50.anl"
        _write_with_index(path, time, 0, grid, None, {key: _gefs_field(key, time, grid) for key in _GEFS}, None)
    return folder / "ensemble", truth


def _compact(time: np.datetime64) -> str:
    return str(time.astype("datetime64[D]")).replace("-", "")


def _gefs_field(key: tuple[str, int], start: np.datetime64, grid: Any, member: int = -1, lead: int = 0) -> np.ndarray:
    values = weather(*key, start + np.timedelta64(lead, "h"), grid, member, lead)
    scale = {"z": 1 / 9.80665, "tp": 1000 / 4}  # gpm; kg m-2 in a quarter of the day
    return values * scale.get(key[0], 1.0)


def _write_inventory(path: Path, messages: Sequence[bytes], about: Sequence[str]) -> None:
    """Write the index of a file as wgrib2 does."""
    begin = np.cumsum([0, *map(len, messages)]).tolist()
    lines = (f"{number}:{at}:{text}" for number, (at, text) in enumerate(zip(begin, about, strict=False), 1))
    path.with_name(f"{path.name}.idx").write_text("\n".join(lines) + "\n")


def _write_with_index(
    path: Path, start: np.datetime64, lead: int, grid: Any, product: dict[str, int] | None,
    fields: dict[tuple[str, int], np.ndarray], member: int | None,
) -> None:  # fmt: skip
    messages, lines = [], []
    for key, values in fields.items():
        about, called = _GEFS.get(key, ({"shortName": "tp"}, "APCP:surface"))
        over = (lead - 6, lead) if key[0] == "tp" else None
        messages.append(_noaa(values, grid, start, lead, about, product, member, over))
        until = f"{over[0]}-{over[1]} hour acc fcst" if over else f"{lead} hour fcst" if lead else "anl"
        lines.append(f"d={_compact(start)}00:{called}:{until}:ENS={member}")
    write(path, messages)
    _write_inventory(path, messages, lines)


def _noaa(
    values: np.ndarray, grid: Any, start: np.datetime64, lead: int, about: dict[str, Any],
    product: dict[str, int] | None, member: int | None, over: tuple[int, int] | None,
) -> bytes:  # fmt: skip
    """Encode one message of NOAA's: complex packing with spatial differencing; `product` is None of an analysis."""
    derived = product is not None and member is None
    template = 0 if product is None else (12 if derived else 11) if over else (2 if derived else 1)
    keys: dict[str, Any] = {"centre": "kwbc", "tablesVersion": 2, "productDefinitionTemplateNumber": template}
    keys |= {
        "significanceOfReferenceTime": 1,
        "typeOfGeneratingProcess": 4,
        "dataDate": int(_compact(start)),
        "dataTime": 0,
    }
    if product is None:
        keys |= {"typeOfProcessedData": 0, "significanceOfReferenceTime": 0, "typeOfGeneratingProcess": 0}
    elif not derived:
        keys["typeOfProcessedData"] = PERTURBED_TYPE if member else CONTROL_TYPE
    keys |= {**about, **(product or {}), "stepRange": f"{over[0]}-{over[1]}" if over else str(lead)}
    if product is not None:
        keys["numberOfForecastsInEnsemble"] = 30
        if not derived:
            keys["perturbationNumber"] = member
    keys |= {"typeOfStatisticalProcessing": 1} if over else {}
    return _encoded(keys, values, grid, "grid_complex_spatial_differencing")


def _encoded(keys: dict[str, Any], values: np.ndarray, grid: Any, packing: str) -> bytes:
    """Encode one message of 16 bits a value."""
    handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
    lat, lon = grid
    keys |= {"Ni": len(lon), "Nj": len(lat), "jScansPositively": 0}
    keys |= {"latitudeOfFirstGridPointInDegrees": lat[0], "latitudeOfLastGridPointInDegrees": lat[-1]}
    keys |= {"longitudeOfFirstGridPointInDegrees": lon[0], "longitudeOfLastGridPointInDegrees": lon[-1]}
    keys |= {"iDirectionIncrementInDegrees": lon[1], "jDirectionIncrementInDegrees": lat[0] - lat[1]}
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set(handle, "bitsPerValue", 16)
    eccodes.codes_set_values(handle, values.astype(float).ravel())
    eccodes.codes_set(handle, "packingType", packing)
    return finished(handle)


def gefs_reforecast(folder: Path, *, finest: float = 15) -> Path:
    """Write GEFSv12's reforecast: one variable and member a file, fields above 700 hPa on a coarser grid."""
    start = days(1, "2000-01-05")[0]
    fine, coarse = globe(finest), globe(2 * finest)
    files = {
        "tmp_pres": (fine, [("t", 850)]), "tmp_pres_abv700mb": (coarse, [("t", 500)]),
        "hgt_pres_abv700mb": (coarse, [("z", 500)]), "tmp_2m": (fine, [("t2m", 0)]), "apcp_sfc": (fine, [("tp", 0)]),
    }  # fmt: skip
    for member in range(3):
        name = f"p{member:02d}" if member else "c00"
        for stem, (grid, keys) in files.items():
            made = []
            for lead in (3, 6):
                for key in keys:
                    about = _GEFS.get(key, ({"shortName": "tp"}, ""))[0]
                    over = ((lead - 1) // 6 * 6, lead) if key[0] == "tp" else None
                    product = _PERTURBED if member else _CONTROL
                    values = _gefs_field(key, start, grid, member, lead)
                    if over and lead > over[0] + 3:  # the sum goes on
                        values = values + _gefs_field(key, start, grid, member, lead - 3)
                    made.append(_noaa(values, grid, start, lead, about, product, member, over))
            path = folder / "2000010500" / name / "Days:1-10" / f"{stem}_2000010500_{name}.grib2"
            write(path, made)
            _write_inventory(path, made, [f"d=2000010500:{stem}"] * len(made))
    return folder


def ecmwf_open_data(folder: Path, *, degrees: float = 30, since_50r1: bool = False) -> Path:
    """Write ECMWF's open ensemble with its index: CCSDS packing, heights in gpm.

    From cycle 50r1 on, the control is the deterministic run, in files of its own; it lies beside its members.
    """
    start = days(1, "2026-11-01" if since_50r1 else "2025-11-01")[0]
    for lead in (0, 3, 6):
        perturbed = [("enfo", "pf", member) for member in (1, 2)]
        runs = {"enfo-ef": perturbed if since_50r1 else [("enfo", "cf", 0), *perturbed]}
        if since_50r1:
            runs["oper-fc"] = [("oper", "fc", None)]
        for name, members in runs.items():
            stream = name.partition("-")[0]
            stem = f"{_compact(start)}000000-{lead}h-{name}"
            path = folder / _compact(start) / "00z" / "ifs" / "0p25" / stream / f"{stem}.grib2"
            keys = [(member, key) for member in members for key in _OPEN if lead or key[0] != "tp"]
            made = [_open_data(key, start, lead, globe(degrees), *member) for member, key in keys]
            write(path, made)
            begin = np.cumsum([0, *map(len, made)]).tolist()
            lines = [
                {"type": member[1], "stream": stream, "step": str(lead), "param": key[0], "_offset": at,
                 "_length": len(message)}
                for (member, key), at, message in zip(keys, begin, made, strict=False)
            ]  # fmt: skip
            path.with_suffix(".index").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


_OPEN = {
    ("z", 500): {"shortName": "gh", "typeOfLevel": "isobaricInhPa", "level": 500},
    ("t", 850): {"shortName": "t", "typeOfLevel": "isobaricInhPa", "level": 850},
    ("t2m", 0): {"shortName": "2t"},
    ("msl", 0): {"shortName": "msl"},
    ("tp", 0): {"shortName": "tp"},
}  # fmt: skip


def _open_data(
    key: tuple[str, int], start: np.datetime64, lead: int, grid: Any, stream: str, kind: str, member: int | None
) -> bytes:
    template = (11 if key[0] == "tp" else 1) if member is not None else 8 if key[0] == "tp" else 0
    keys: dict[str, Any] = {"centre": "ecmf", "tablesVersion": 28, "setLocalDefinition": 1, "localDefinitionNumber": 1}
    keys |= {"productDefinitionTemplateNumber": template, "class": "od", "expver": "0001", "stream": stream}
    keys |= {"type": kind, "significanceOfReferenceTime": 1, "dataDate": int(_compact(start)), "dataTime": 0}
    keys |= _OPEN[key] | {"stepRange": f"0-{lead}" if key[0] == "tp" else str(lead)}
    if member is not None:
        keys |= {"numberOfForecastsInEnsemble": 51, "perturbationNumber": member}
    until = range(3, lead + 1, 3) if key[0] == "tp" else (lead,)  # rain is the sum of what fell every three hours
    values = sum(weather(*key, start + np.timedelta64(hour, "h"), grid, member or 0, hour) for hour in until)
    values = values * {"z": 1 / 9.80665, "tp": 1000 * 3 / 24}.get(key[0], 1.0)
    return _encoded(keys, values, grid, "grid_ccsds")


def ens10(folder: Path, *, degrees: float = 30) -> Path:
    """Write two start dates of ENS-10: GRIB edition 1, files without a suffix, hindcast members and two leads."""
    grid = globe(degrees)
    for start in ("19980101", "19980105"):
        made = [
            message(name, weather(name, level, np.datetime64("1998-01-01", "ns"), grid, member, lead), grid=grid,
                    date=int(start), step=lead, member=member, level=level or 500, bits=16, decimal=None)
            for name, level in (("t", 500), ("z", 500), ("t2m", 0), ("msl", 0))
            for member in range(3) for lead in (0, 24)
        ]  # fmt: skip
        write(folder / f"output.{start}", made)
    return folder
