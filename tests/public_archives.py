"""Small archives with the names, axes, attributes and packing of public ones, and smooth weather in them.

WeatherBench 2's IFS ENS as Zarr, NOAA's GEFS as GRIB edition 2, and what cfgrib makes of ECMWF's as NetCDF, each with
the analyses that belong to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eccodes
import numpy as np
import xarray as xr
from gribfiles import write

LEVELS = (500, 850)
# Value at the poles, what is added at the equator, and deviation of the day's weather, in the units of the archives.
WEATHER = {
    ("t", 500): (238.0, 30.0, 4.0),
    ("t", 850): (262.0, 28.0, 4.0),
    ("z", 500): (5.05e4, 6.5e3, 500.0),
    ("z", 850): (1.33e4, 1.5e3, 300.0),
    ("u", 500): (8.0, 4.0, 6.0),
    ("u", 850): (4.0, 1.0, 4.0),
    ("v", 500): (0.0, 0.0, 5.0),
    ("v", 850): (0.0, 0.0, 4.0),
    ("q", 500): (4e-4, 2e-3, 1e-4),
    ("q", 850): (2e-3, 8e-3, 5e-4),
    ("t2m", 0): (256.0, 42.0, 3.0),
    ("msl", 0): (1.01e5, 300.0, 700.0),
    ("u10", 0): (2.0, -1.0, 3.0),
    ("v10", 0): (0.0, 0.0, 3.0),
}
RAIN = 0.004  # m in a day where it rains much


def globe(degrees: float, *, northwards: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return latitudes, both poles included, and longitudes of a global grid."""
    latitude = np.linspace(90, -90, round(180 / degrees) + 1)
    return latitude[:: -1 if northwards else 1], np.arange(0, 360, degrees)


def days(count: int, first: str = "2020-01-01") -> np.ndarray:
    """Return the midnights of so many days that follow each other."""
    return np.datetime64(first, "ns") + np.arange(count) * np.timedelta64(24, "h")


def hours(*values: int) -> np.ndarray:
    """Return leads as xarray has them."""
    return np.array(values, "timedelta64[h]").astype("timedelta64[ns]")


def waves(grid: tuple[np.ndarray, np.ndarray], *key: Any) -> np.ndarray:
    """Return a smooth field (Y, X) of mean zero and deviation of about one, always the same for the same `key`."""
    rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
    lat, lon = np.deg2rad(grid[0])[:, None], np.deg2rad(grid[1])[:, None]
    number = np.arange(1, 6)  # waves around the globe, of which nothing is left at the poles: each is one point
    tilt, phase, size = rng.uniform(-2, 2, 5), rng.uniform(0, 2 * np.pi, 5), rng.normal(size=5)
    around = (size * np.cos(lat) ** number * np.exp(1j * (tilt * lat + phase))) @ np.exp(1j * number * lon).T
    return (rng.normal() * np.sin(lat) + around.real) / np.sqrt(2)


def weather(
    name: str, level: int, valid: np.datetime64, grid: tuple[np.ndarray, np.ndarray], member: int = -1, lead: int = 0
) -> np.ndarray:
    """Return a field (Y, X): the truth at a time, or what a member has of it, whose error grows with its lead.

    Rain is the sum over the day that ends at `valid`, in metres.
    """
    of_day = waves(grid, name, level, str(valid))
    if member >= 0:
        of_day = of_day + (0.2 + lead / 120) * waves(grid, name, level, str(valid), member, lead)
    if name == "tp":
        return RAIN * np.clip(of_day - 0.3, 0, None)
    pole, equator, deviation = WEATHER[name, level]
    return pole + equator * np.cos(np.deg2rad(grid[0]))[:, None] ** 2 + deviation * of_day


def _filled(
    name: str,
    levels: Sequence[int],
    times: np.ndarray,
    grid: Any,
    members: Sequence[int] = (),
    leads: Sequence[int] = (),
) -> np.ndarray:
    """Return (D, M, T, Z, Y, X) float32 of forecasts, (D, Z, Y, X) of a truth, which has no members."""
    if not len(members):
        return np.stack([[weather(name, z, time, grid) for z in levels] for time in times]).astype(np.float32)
    shape = len(times), len(members), len(leads), len(levels), len(grid[0]), len(grid[1])
    values = np.empty(shape, np.float32)
    for at in np.ndindex(shape[:4]):
        date, member, lead, level = at
        valid = times[date] + np.timedelta64(leads[lead], "h")
        values[at] = weather(name, levels[level], valid, grid, members[member], leads[lead])
    return values


# --- WeatherBench 2 ---------------------------------------------------------------------------------------------------

WB2_UPPER = {  # name, long name, standard name, units
    "z": ("geopotential", "Geopotential", "geopotential", "m**2 s**-2"),
    "t": ("temperature", "Temperature", "air_temperature", "K"),
    "u": ("u_component_of_wind", "U component of wind", "eastward_wind", "m s**-1"),
    "v": ("v_component_of_wind", "V component of wind", "northward_wind", "m s**-1"),
}
WB2_SURFACE = {
    "t2m": ("2m_temperature", "2 metre temperature", "unknown", "K"),
    "u10": ("10m_u_component_of_wind", "10 metre U wind component", "unknown", "m s**-1"),
    "v10": ("10m_v_component_of_wind", "10 metre V wind component", "unknown", "m s**-1"),
    "msl": ("mean_sea_level_pressure", "Mean sea level pressure", "air_pressure_at_mean_sea_level", "Pa"),
}
_WB2_ATTRIBUTES = "long_name", "standard_name", "units"
_WB2_ORDER = ("time", "number", "prediction_timedelta", "level", "latitude", "longitude")


def weatherbench(
    folder: Path, *, degrees: float, dates: int, members: int, leads: Sequence[int] = (24, 48)
) -> tuple[Path, Path]:
    """Write IFS ENS and ERA5 as WeatherBench 2 has them, and return both paths.

    Latitudes ascend. What WeatherBench 2 derived (wind speeds, sums over six hours, humidity) has no attributes.
    """
    grid = globe(degrees, northwards=True)
    starts, numbers = days(dates), np.arange(1, members + 1)
    axes = {"time": starts, "number": numbers, "prediction_timedelta": hours(*leads), "level": list(LEVELS)}
    ensemble = _wb2(axes, grid, lambda name, levels: _filled(name, levels, starts, grid, numbers, leads))
    every = days(dates + max(leads) // 24)
    truth = _wb2({"time": every, "level": list(LEVELS)}, grid, lambda name, levels: _filled(name, levels, every, grid))
    paths = folder / "ifs_ens.zarr", folder / "era5.zarr"
    for data, path in zip((ensemble, truth), paths, strict=True):
        chunks = {"time": 1, "prediction_timedelta": 1}
        coding = {n: {"chunks": [chunks.get(str(d), data.sizes[d]) for d in v.dims]} for n, v in data.data_vars.items()}
        data.to_zarr(path, zarr_format=2, encoding=coding)
    return paths


def _wb2(axes: dict[str, Any], grid: Any, fill: Any) -> xr.Dataset:
    dims = tuple(name for name in _WB2_ORDER if name in {*axes, "latitude", "longitude"})
    flat = tuple(name for name in dims if name != "level")
    level_at = dims.index("level")
    data = xr.Dataset(coords=axes | {"latitude": grid[0], "longitude": grid[1]})
    data["level"].attrs["units"] = "hPa"
    data["latitude"].attrs["units"], data["longitude"].attrs["units"] = "degrees_north", "degrees_east"
    for name, (called, *words) in WB2_UPPER.items():
        data[called] = dims, fill(name, LEVELS), dict(zip(_WB2_ATTRIBUTES, words, strict=True))
    for name, (called, *words) in WB2_SURFACE.items():
        values = fill(name, (0,)).squeeze(level_at)
        data[called] = flat, values, dict(zip(_WB2_ATTRIBUTES, words, strict=True))
    day = fill("tp", (0,)).squeeze(level_at)
    data["total_precipitation_6hr"] = flat, day / 4
    data["relative_humidity"] = xr.full_like(data["temperature"], 0.7)
    data["wind_speed"] = np.hypot(data["u_component_of_wind"], data["v_component_of_wind"])
    data["10m_wind_speed"] = np.hypot(data["10m_u_component_of_wind"], data["10m_v_component_of_wind"])
    for name in ("wind_speed", "10m_wind_speed", "relative_humidity"):
        data[name].attrs.clear()
    return data


# --- GEFS -------------------------------------------------------------------------------------------------------------

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


def _write_with_index(
    path: Path, start: np.datetime64, lead: int, grid: Any, product: dict[str, int] | None,
    fields: dict[tuple[str, int], np.ndarray], member: int | None,
) -> None:  # fmt: skip
    messages, lines, offset = [], [], 0
    for number, (key, values) in enumerate(fields.items(), 1):
        about, called = _GEFS.get(key, ({"shortName": "tp"}, "APCP:surface"))
        over = (lead - 6, lead) if key[0] == "tp" else None
        messages.append(_noaa(values, grid, start, lead, about, product, member, over))
        until = f"{over[0]}-{over[1]} hour acc fcst" if over else f"{lead} hour fcst" if lead else "anl"
        lines.append(f"{number}:{offset}:d={_compact(start)}00:{called}:{until}:ENS={member}")
        offset += len(messages[-1])
    write(path, messages)
    path.with_name(f"{path.name}.idx").write_text("\n".join(lines) + "\n")


def _noaa(
    values: np.ndarray, grid: Any, start: np.datetime64, lead: int, about: dict[str, Any],
    product: dict[str, int] | None, member: int | None, over: tuple[int, int] | None,
) -> bytes:  # fmt: skip
    """Encode one message of NOAA's: complex packing with spatial differencing; `product` is None of an analysis."""
    handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
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
    lat, lon = grid
    keys |= {"Ni": len(lon), "Nj": len(lat), "jScansPositively": 0}
    keys |= {"latitudeOfFirstGridPointInDegrees": lat[0], "latitudeOfLastGridPointInDegrees": lat[-1]}
    keys |= {"longitudeOfFirstGridPointInDegrees": lon[0], "longitudeOfLastGridPointInDegrees": lon[-1]}
    keys |= {"iDirectionIncrementInDegrees": lon[1], "jDirectionIncrementInDegrees": lat[0] - lat[1]}
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    if over:
        eccodes.codes_set(handle, "typeOfStatisticalProcessing", 1)
    eccodes.codes_set(handle, "bitsPerValue", 16)
    eccodes.codes_set_values(handle, values.astype(float).ravel())
    eccodes.codes_set(handle, "packingType", "grid_complex_spatial_differencing")
    result = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return result


# --- cfgrib -----------------------------------------------------------------------------------------------------------

CFGRIB = {  # paramId, name, units, standard name as ecCodes has them
    "t": (130, "Temperature", "K", "air_temperature"),
    "z": (129, "Geopotential", "m**2 s**-2", "geopotential"),
    "q": (133, "Specific humidity", "kg kg**-1", "specific_humidity"),
    "t2m": (167, "2 metre temperature", "K", "air_temperature"),
    "u10": (165, "10 metre U wind component", "m s**-1", "eastward_wind"),
    "v10": (166, "10 metre V wind component", "m s**-1", "northward_wind"),
    "msl": (151, "Mean sea level pressure", "Pa", "air_pressure_at_mean_sea_level"),
    "tp": (228, "Total precipitation", "m", "unknown"),
}
_FILES = {  # what cfgrib opens together, and the coordinate of its level
    "pl": (("t", "z", "q"), "isobaricInhPa", None),
    "2m": (("t2m",), "heightAboveGround", 2.0),
    "10m": (("u10", "v10"), "heightAboveGround", 10.0),
    "msl": (("msl",), "meanSea", 0.0),
    "sfc": (("tp",), "surface", 0.0),
}


def cfgrib(
    folder: Path, *, degrees: float, dates: int, members: int, leads: Sequence[int] = (24, 48)
) -> tuple[Path, Path]:
    """Write an ensemble and its analyses as `cfgrib.open_datasets` has them, each data set a NetCDF file.

    Start dates, members and steps are axes; of the analyses time alone is. Rain is the sum from the start, and
    analyses have none.
    """
    grid, starts, numbers = globe(degrees), days(dates), np.arange(1, members + 1)
    every = days(dates + max(leads) // 24)
    for part in ("ensemble", "truth"):
        (folder / part).mkdir(parents=True)
    for stem, (names, level, height) in _FILES.items():
        levels = LEVELS if height is None else (0,)
        axes = {"time": starts, "number": numbers, "step": hours(*leads)}
        values = {name: _filled(name, levels, starts, grid, numbers, leads) for name in names}
        _cfgrib(values, axes, level, height, grid).to_netcdf(folder / "ensemble" / f"{stem}.nc")
        if names != ("tp",):
            values = {name: _filled(name, levels, every, grid) for name in names}
            _cfgrib(values, {"time": every}, level, height, grid).to_netcdf(folder / "truth" / f"{stem}.nc")
    return folder / "ensemble", folder / "truth"


def _cfgrib(
    values: dict[str, np.ndarray], axes: dict[str, Any], level: str, height: float | None, grid: Any
) -> xr.Dataset:
    coords = axes | ({level: [float(z) for z in LEVELS]} if height is None else {})
    data = xr.Dataset(coords=coords | {"latitude": grid[0], "longitude": grid[1]})
    dims = (*coords, "latitude", "longitude")
    forecast = "step" in axes
    if height is not None:
        data = data.assign_coords({level: height})
    if forecast:
        data = data.assign_coords(valid_time=(("time", "step"), axes["time"][:, None] + axes["step"]))
        data["step"].attrs = {"long_name": "time since forecast_reference_time", "standard_name": "forecast_period"}
        data["number"].attrs = {
            "long_name": "ensemble member numerical id",
            "units": "1",
            "standard_name": "realization",
        }
    else:
        scalars = {"number": 0, "step": np.timedelta64(0, "ns"), "valid_time": ("time", axes["time"])}
        data = data.assign_coords(scalars)
    data["valid_time"].attrs = {"standard_name": "time", "long_name": "time"}
    data["time"].attrs = {"long_name": "initial time of forecast", "standard_name": "forecast_reference_time"}
    for name, array in values.items():
        number, long_name, units, standard_name = CFGRIB[name]
        shape = array if height is None else array.squeeze(-3)
        if name == "tp":
            shape = np.cumsum(shape, 2)  # of a day each, from the start on
        about = {"paramId": number, "dataType": "pf" if forecast else "an", "numberOfPoints": shape[..., 0, 0].size}
        about |= {"typeOfLevel": level, "stepUnits": 1, "stepType": "accum" if name == "tp" else "instant"}
        about |= {"gridType": "regular_ll", "shortName": name, "name": long_name, "units": units}
        attributes = {f"GRIB_{key}": value for key, value in about.items()}
        attributes |= {"long_name": long_name, "units": units, "standard_name": standard_name}
        data[name] = dims, shape, attributes
    data.attrs = {"GRIB_edition": 1, "GRIB_centre": "ecmf", "GRIB_subCentre": 0, "Conventions": "CF-1.7"}
    return data
