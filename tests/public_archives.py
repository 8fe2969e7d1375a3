"""Small archives with the names, axes, attributes and packing of public ones, and smooth weather in them.

Zarr stores and NetCDF files, such as WeatherBench 2's IFS ENS and what cfgrib makes of ECMWF's GRIB, with the analyses
that belong to them. `public_grib` has those that are GRIB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from public_weather import LEVELS, days, filled, globe, hours

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
    folder: Path, *, degrees: float, dates: int, members: int, leads: Sequence[int] = (24, 48), whole: bool = False
) -> tuple[Path, Path]:
    """Write IFS ENS and ERA5 as WeatherBench 2 has them, and return both paths.

    Latitudes ascend. What WeatherBench 2 derived (wind speeds, sums over six hours, humidity) has no attributes. If it
    is `whole`, rain is there three times, over six hours, a day and from the start, and the truth has divergence.
    """
    grid = globe(degrees, northwards=True)
    starts, numbers = days(dates), np.arange(1, members + 1)
    axes = {"time": starts, "number": numbers, "prediction_timedelta": hours(*leads), "level": list(LEVELS)}
    ensemble = _wb2(axes, grid, lambda name, levels: filled(name, levels, starts, grid, numbers, leads))
    every = days(dates + max(leads) // 24)
    truth = _wb2({"time": every, "level": list(LEVELS)}, grid, lambda name, levels: filled(name, levels, every, grid))
    if whole:
        day = ensemble["total_precipitation_6hr"] * 4
        about = {"long_name": "Total precipitation", "standard_name": "unknown", "units": "m"}
        ensemble["total_precipitation"] = day.cumsum("prediction_timedelta").assign_attrs(about)
        ensemble["total_precipitation_24hr"] = day
        truth["total_precipitation_24hr"] = truth["total_precipitation_6hr"] * 4
        truth["divergence"] = truth["temperature"] / 1e8
        truth["divergence"].attrs.clear()
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
    data["relative_humidity"] = (data["temperature"] - 200) / 100
    data["wind_speed"] = np.hypot(data["u_component_of_wind"], data["v_component_of_wind"])
    data["10m_wind_speed"] = np.hypot(data["10m_u_component_of_wind"], data["10m_v_component_of_wind"])
    for name in ("wind_speed", "10m_wind_speed", "relative_humidity"):
        data[name].attrs.clear()
    return data


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
        values = {name: filled(name, levels, starts, grid, numbers, leads) for name in names}
        _cfgrib(values, axes, level, height, grid).to_netcdf(folder / "ensemble" / f"{stem}.nc")
        if names != ("tp",):
            values = {name: filled(name, levels, every, grid) for name in names}
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


# --- WeatherBench 2's NeuralGCM ---------------------------------------------------------------------------------------


def neuralgcm(folder: Path, *, degrees: float = 30) -> Path:
    """Write NeuralGCM's ensemble as WeatherBench 2 has it: longitude before latitude, and no units at all."""
    grid, starts, numbers, leads = globe(degrees, northwards=True), days(2), np.arange(2), (12, 24)
    axes = {"realization": numbers, "time": starts, "prediction_timedelta": hours(*leads), "level": list(LEVELS)}
    data = xr.Dataset(coords=axes | {"longitude": grid[1], "latitude": grid[0]})
    for name in ("t", "z", "u", "v", "q"):
        called = "specific_humidity" if name == "q" else WB2_UPPER[name][0]
        values = filled(name, LEVELS, starts, grid, numbers.tolist(), leads)
        data[called] = (*axes, "longitude", "latitude"), values.transpose(1, 0, 2, 3, 5, 4)
    data["specific_cloud_ice_water_content"] = data["specific_humidity"] / 1000
    path = folder / "neuralgcm_ens.zarr"
    data.to_zarr(path, zarr_format=2)
    return path


# --- dynamical.org ----------------------------------------------------------------------------------------------------

DYNAMICAL = {  # name -> the weather in it and its level, long name, short name, standard name, units, kind of step
    "temperature_2m": ("t2m", 0, "2 metre temperature", "t2m", "air_temperature", "degree_Celsius", "instant"),
    "temperature_850hpa": ("t", 850, "Temperature", "t", "air_temperature", "degree_Celsius", "instant"),
    "geopotential_height_500hpa": ("z", 500, "Geopotential height", "gh", "geopotential_height", "gpm", "instant"),
    "wind_u_10m": ("u10", 0, "10 metre U wind component", "u10", "eastward_wind", "m s-1", "instant"),
    "wind_v_10m": ("v10", 0, "10 metre V wind component", "v10", "northward_wind", "m s-1", "instant"),
    "wind_u_100m": ("u10", 0, "100 metre U wind component", "u100", "eastward_wind", "m s-1", "instant"),
    "wind_v_100m": ("v10", 0, "100 metre V wind component", "v100", "northward_wind", "m s-1", "instant"),
    "pressure_reduced_to_mean_sea_level": (
        "msl", 0, "Pressure reduced to MSL", "prmsl", "air_pressure_at_mean_sea_level", "Pa", "instant",
    ),
    "precipitation_surface": (
        "tp", 0, "Precipitation rate", "prate", "precipitation_flux", "kg m-2 s-1", "avg",
    ),
}  # fmt: skip
DYNAMICAL_RATE = "Average precipitation rate since the previous forecast step. Units equivalent to mm/s."
DYNAMICAL_STEPS = {  # as the attribute forecast_resolution states them
    "ifs": "Forecast step 0-144 hours: 3 hourly, 144-360 hours: 6 hourly",
    "gefs": "Forecast step 0-240 hours: 3 hourly, 246-840 hours: 6 hourly",
}
_DYNAMICAL_ORDER = {
    "ifs": ("init_time", "lead_time", "ensemble_member", "latitude", "longitude"),
    "gefs": ("init_time", "ensemble_member", "lead_time", "latitude", "longitude"),
}
_SPHERE = (
    'GEOGCS["unknown",DATUM["unknown",SPHEROID["unknown",6371229,0]],PRIMEM["Greenwich",0],'
    'UNIT["degree",0.0174532925199433],AXIS["Longitude",EAST],AXIS["Latitude",NORTH]]'
)


def dynamical(folder: Path, model: str, *, degrees: float = 30, leads: Sequence[int] = (0, 3, 144, 150)) -> Path:
    """Write IFS ENS or GEFS as dynamical.org has them: Zarr of version 3 with shards, a member 0 that is the control.

    Rain is the mean rate since the model's previous step, whatever leads are kept; at lead 0 there is none. GEFS'
    clouds are means over six or three hours by the comment alone.
    """
    lat, east = globe(degrees)
    lon = east - 180
    starts, numbers = days(2, "2026-01-01"), np.arange(3)
    valid = ("init_time", "lead_time"), starts[:, None] + hours(*leads)
    data = xr.Dataset(
        coords={
            "init_time": ("init_time", starts, {"standard_name": "forecast_reference_time"}),
            "lead_time": ("lead_time", hours(*leads), {"standard_name": "forecast_period"}),
            "ensemble_member": (
                "ensemble_member", numbers.astype(np.int16), {"standard_name": "realization", "units": "1"},
            ),
            "latitude": ("latitude", lat, {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}),
            "longitude": ("longitude", lon, {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}),
            "valid_time": (*valid, {"standard_name": "time", "long_name": "Valid time"}),
            "expected_forecast_length": ("init_time", np.full(len(starts), hours(360)[0])),
            "ingested_forecast_length": ("init_time", np.full(len(starts), hours(360)[0])),
            "spatial_ref": ((), 0, {"crs_wkt": _SPHERE, "grid_mapping_name": "latitude_longitude"}),
        },
        attrs={"dataset_id": f"{model}-forecast", "forecast_resolution": DYNAMICAL_STEPS[model]},
    )  # fmt: skip
    order = _DYNAMICAL_ORDER[model]
    usual = ("init_time", "ensemble_member", "lead_time", "latitude", "longitude")
    for name, (of, level, *words) in DYNAMICAL.items():
        values = filled(of, (level,), starts, (lat, lon), numbers.tolist(), leads).squeeze(3)
        if words[3] == "degree_Celsius":
            values = values - np.float32(273.15)
        elif of == "z":
            values = values / np.float32(9.80665)
        elif of == "tp":
            values = values * np.float32(1000 / 86400)  # kg m-2 s-1
            values[:, :, [lead == 0 for lead in leads]] = np.nan
        about = dict(zip(("long_name", "short_name", "standard_name", "units", "step_type"), words, strict=True))
        about |= {"comment": DYNAMICAL_RATE} if of == "tp" else {}
        data[name] = xr.DataArray(values, dims=usual, attrs=about).transpose(*order)
    clouds = {"long_name": "Total Cloud Cover", "short_name": "tcc", "standard_name": "cloud_area_fraction"}
    clouds |= {"units": "percent", "step_type": "instant"}
    if model == "gefs":
        clouds |= {"step_type": "avg", "comment": "Average value in the last 6 hour period (00, 06, 12, 18 UTC) or"}
        clouds["comment"] += " 3 hour period (03, 09, 15, 21 UTC)."
    data["total_cloud_cover_atmosphere"] = xr.full_like(data["temperature_2m"], 50.0).assign_attrs(clouds)
    data["categorical_precipitation_type_surface"] = xr.zeros_like(data["temperature_2m"]).assign_attrs(
        long_name="Categorical precipitation type at surface", short_name="ptype", standard_name="unknown", units="1"
    )
    sizes = {"init_time": 1, "latitude": 4, "longitude": 4}
    coding: dict[str, Any] = {}
    for called, array in data.data_vars.items():
        chunks = tuple(sizes.get(str(dim), array.sizes[dim]) for dim in array.dims)
        shards = tuple(2 * size if dim in ("latitude", "longitude") else size
                       for dim, size in zip(array.dims, chunks, strict=True))  # fmt: skip
        coding[str(called)] = {"chunks": chunks, "shards": shards}
    path = folder / f"dynamical_{model}.zarr"
    data.to_zarr(path, zarr_format=3, encoding=coding, consolidated=True)
    return path


DYNAMICAL_46_DAYS = {  # group -> the same as in DYNAMICAL, with a comment at the end; levels are an axis of the group
    "/": {
        "pressure_reduced_to_mean_sea_level": DYNAMICAL["pressure_reduced_to_mean_sea_level"] + ("",),
        "wind_u_10m": DYNAMICAL["wind_u_10m"] + ("",),
        "precipitation_surface": DYNAMICAL["precipitation_surface"] + (
            "Average precipitation rate over the previous 24 hours. Units equivalent to mm/s.",
        ),
        "average_temperature_2m": (
            "t2m", 0, "Mean temperature at 2 metres in the last 24 hours", "mean2t24", "air_temperature",
            "degree_Celsius", "avg", "Mean temperature at 2 metres over the previous 24 hours.",
        ),
    },
    "/pressure_level": {
        "temperature": ("t", LEVELS, "Temperature", "t", "air_temperature", "degree_Celsius", "instant", ""),
        "geopotential_height": (
            "z", LEVELS, "Geopotential height", "gh", "geopotential_height", "gpm", "instant", "",
        ),
        "wind_u": ("u", LEVELS, "U component of wind", "u", "eastward_wind", "m s-1", "instant", ""),
        "specific_humidity": ("q", LEVELS, "Specific humidity", "q", "specific_humidity", "1", "instant", ""),
    },
}  # fmt: skip


def dynamical_46_days(folder: Path, *, degrees: float = 30, version: int = 3, shared: bool = False) -> Path:
    """Write the 46 days of IFS ENS as dynamical.org has them: pressure levels in a group of the store.

    Args:
        folder: where the store is written.
        degrees: spacing of the grid.
        version: version of Zarr; the original is of version 3, with shards.
        shared: whether the group has no coordinates of its own but those of the root. The original repeats them.
    """
    (lat, east), starts, numbers, leads = globe(degrees), days(2, "2026-01-01"), np.arange(3), (0, 24, 48)
    grid, usual = (lat, east - 180), ("init_time", "ensemble_member", "lead_time", "pressure_level")
    axes = {
        "init_time": ("init_time", starts, {"standard_name": "forecast_reference_time"}),
        "lead_time": ("lead_time", hours(*leads), {"standard_name": "forecast_period"}),
        "ensemble_member": ("ensemble_member", numbers, {"standard_name": "realization", "units": "1"}),
        "latitude": ("latitude", lat, {"standard_name": "latitude", "units": "degrees_north"}),
        "longitude": ("longitude", grid[1], {"standard_name": "longitude", "units": "degrees_east"}),
    }
    upright = {"standard_name": "air_pressure", "units": "hPa", "axis": "Z", "positive": "down"}
    groups: dict[str, xr.Dataset] = {}
    for group, variables in DYNAMICAL_46_DAYS.items():
        upper = {"pressure_level": ("pressure_level", np.array(LEVELS), upright)} if group != "/" else {}
        data = groups[group] = xr.Dataset(coords=axes | upper, attrs={"forecast_resolution": "Forecast step 24 hourly"})
        for name, (of, level, *words) in variables.items():
            values = filled(of, level or (0,), starts, grid, numbers.tolist(), leads)
            if words[3] == "degree_Celsius":
                values = values - np.float32(273.15)
            values = values * np.float32({"z": 1 / 9.80665, "tp": 1000 / 86400}.get(of, 1.0))
            values[:, :, [lead == 0 for lead in leads]] *= np.float32("nan") if words[4] == "avg" else 1
            keys = ("long_name", "short_name", "standard_name", "units", "step_type", "comment")
            about = {key: word for key, word in zip(keys, words, strict=True) if word}
            array = xr.DataArray(values, dims=(*usual, "latitude", "longitude"), attrs=about)
            array = array if upper else array.squeeze("pressure_level")
            data[name] = array.transpose("init_time", "lead_time", "ensemble_member", ...)
    sizes = {"init_time": 1, "pressure_level": 1, "latitude": 4, "longitude": 4}
    coding: dict[str, Any] = {}
    for group, data in groups.items() if version == 3 else ():
        for name, array in data.data_vars.items():
            chunks = tuple(sizes.get(str(dim), array.sizes[dim]) for dim in array.dims)
            shards = (*chunks[:-2], *(2 * size for size in chunks[-2:]))
            coding.setdefault(group, {})[str(name)] = {"chunks": chunks, "shards": shards}
    path = folder / "dynamical_46_days.zarr"
    tree = xr.DataTree.from_dict(groups)
    tree.to_zarr(path, zarr_format=version, encoding=coding, consolidated=True, write_inherited_coords=not shared)
    return path


# --- Met Office -------------------------------------------------------------------------------------------------------

MOGREPS = {  # name of the file -> name of the variable, weather in it, level, units, height, hours, CF's method
    "temperature_at_screen_level": ("air_temperature", "t2m", 0, "K", 1.5, 0, ""),
    "temperature_at_screen_level_max-PT01H": ("air_temperature", "t2m", 0, "K", 1.5, 1, "maximum"),
    "pressure_at_mean_sea_level": ("air_pressure_at_sea_level", "msl", 0, "Pa", None, 0, ""),
    "wind_speed_at_10m": ("wind_speed", "t2m", 0, "m s-1", 10.0, 0, ""),
    "wind_direction_at_10m": ("wind_from_direction", "t2m", 0, "degrees", 10.0, 0, ""),
    "wind_gust_at_10m": ("wind_speed_of_gust", "t2m", 0, "m s-1", 10.0, 0, ""),
    "wind_gust_at_10m_max-PT01H": ("wind_speed_of_gust", "t2m", 0, "m s-1", 10.0, 1, "maximum"),
    "precipitation_rate": ("lwe_precipitation_rate", "tp", 0, "m s-1", None, 0, ""),
    "precipitation_accumulation-PT01H": ("lwe_thickness_of_precipitation_amount", "tp", 0, "m", None, 1, "sum"),
    "temperature_on_pressure_levels": ("air_temperature", "t", LEVELS, "K", None, 0, ""),
    "geopotential_height_on_pressure_levels": ("geopotential_height", "z", LEVELS, "m", None, 0, ""),
}  # fmt: skip


def mogreps(folder: Path, *, degrees: float = 30, names: Sequence[str] = tuple(MOGREPS)) -> Path:
    """Write MOGREPS-G as the Met Office has it: a NetCDF file for each diagnostic and lead, all of its members.

    What is left out in any case, rates and directions, is written for the first lead alone, to keep the archive small.
    """
    step = degrees / 2
    grid = np.arange(-90 + step, 90, degrees), np.arange(-180 + step, 180, degrees)
    start, numbers = days(1, "2026-09-16")[0], np.arange(3, dtype=np.int32)
    for lead in (3, 6):
        for stem in names:
            if lead > 3 and stem in ("precipitation_rate", "wind_direction_at_10m"):
                continue
            valid = str(start + hours(lead)[0])[:13].replace("-", "")
            path = folder / "T0000Z" / f"{valid}00Z-PT{lead:04d}H00M-{stem}.nc"
            path.parent.mkdir(parents=True, exist_ok=True)
            _mogreps(MOGREPS[stem], start, lead, grid, numbers).to_netcdf(path)
    return folder


def _mogreps(about: tuple[Any, ...], start: np.datetime64, lead: int, grid: Any, numbers: np.ndarray) -> xr.Dataset:
    called, of, levels, units, height, over, how = about
    upper = isinstance(levels, tuple)
    values = filled(of, levels if upper else (0,), np.array([start]), grid, numbers.tolist(), (lead,))[0, :, 0]
    values = values / np.float32(9.80665) if of == "z" else np.abs(values) / 30 if units == "m s-1" else values
    axes: dict[str, Any] = {"realization": ("realization", numbers, {"standard_name": "realization", "units": "1"})}
    if upper:
        pressure = np.float32(levels) * 100
        axes["pressure"] = "pressure", pressure, {"units": "Pa", "positive": "down", "standard_name": "air_pressure"}
    dims = (*axes, "latitude", "longitude")
    for name, ticks, way in (("latitude", grid[0], "north"), ("longitude", grid[1], "east")):
        axes[name] = name, ticks.astype(np.float32), {"units": f"degrees_{way}", "standard_name": name}
    seconds = {"units": "seconds", "standard_name": "forecast_period"}
    bounds = {"bounds": "forecast_period_bnds"} if over else {}
    axes["forecast_period"] = (), np.int32(lead * 3600), seconds | bounds
    axes["forecast_reference_time"] = (), start, {"standard_name": "forecast_reference_time"}
    axes["time"] = (), start + hours(lead)[0], {"standard_name": "time"} | ({"bounds": "time_bnds"} if over else {})
    if height is not None:
        axes["height"] = (), np.float32(height), {"units": "m", "standard_name": "height", "positive": "up"}
    data = xr.Dataset(coords=axes)
    data["latitude_longitude"] = (), 0, {"grid_mapping_name": "latitude_longitude", "earth_radius": 6371229.0}
    attributes = {"standard_name": called, "units": units, "grid_mapping": "latitude_longitude"}
    attributes |= {"cell_methods": f"time: {how}"} if how else {}
    data[called] = dims, values if upper else values[:, 0], attributes
    if over:
        data["forecast_period_bnds"] = "bnds", np.int32([(lead - over) * 3600, lead * 3600])
        data["time_bnds"] = "bnds", start + hours(lead - over, lead)
        data["time_bnds"].encoding = {"units": "seconds since 1970-01-01", "dtype": "int64"}
    for name in ("time", "forecast_reference_time"):
        data[name].encoding = {"units": "seconds since 1970-01-01", "dtype": "int64"}
    data.attrs = {"Conventions": "CF-1.7, UKMO-1.0", "institution": "Met Office", "source": "Met Office Unified Model"}
    return data


# --- EUPPBench --------------------------------------------------------------------------------------------------------


def euppbench(folder: Path, *, years: int = 0) -> Path:
    """Write EUPPBench's gridded stores: of the surface, of sums and maxima over six hours, and of the level 500 hPa.

    Args:
        folder: where the three stores are written.
        years: years of reforecasts, which are an axis `year` with start dates that only `valid_time` tells; 0 for
            forecasts.
    """
    grid = np.arange(53.75, 45.4, -0.25)[::8], np.arange(2.5, 10.6, 0.25)[::8]
    starts, numbers, leads = days(2, "2017-01-02"), np.arange(3), (6, 12)
    kind = "reforecasts" if years else "forecasts"
    parts = {
        "surface": {"t2m": ("t2m", "K", 167, "instant"), "u10": ("u10", "m s**-1", 165, "instant"),
                    "u100": ("u10", "m s**-1", 228246, "instant")},
        "surface_postprocessed": {"tp6": ("tp", "m", 228, "accum"), "mn2t6": ("t2m", "K", 122, "min"),
                                  "p10fg6": ("t2m", "m s**-1", 123, "max")},
        "pressure_500": {"z": ("z", "m**2 s**-2", 129, "instant")},
    }  # fmt: skip
    for part, variables in parts.items():
        level = "isobaricInhPa" if part.startswith("pressure") else "surface"
        axes: dict[str, Any] = {"time": starts, "number": numbers, "step": hours(*leads)}
        axes |= {level: [500.0 if level == "isobaricInhPa" else 0.0], "latitude": grid[0], "longitude": grid[1]}
        data = xr.Dataset(coords=axes)
        data["step"].attrs = {"standard_name": "forecast_period", "long_name": "time since forecast_reference_time"}
        data["time"].attrs = {"standard_name": "forecast_reference_time", "long_name": "initial time of forecast"}
        data["number"].attrs = {"standard_name": "realization", "long_name": "ensemble member numerical id"}
        data["number"].attrs["units"] = "1"
        for name, (of, units, number, step) in variables.items():
            made = filled(of, (500 if of == "z" else 0,), starts, grid, numbers.tolist(), leads)
            made = np.abs(made) / 30 if name == "p10fg6" else made
            about = {
                "GRIB_paramId": number,
                "GRIB_stepType": step,
                "GRIB_dataType": "pf",
                "GRIB_gridType": "regular_ll",
            }
            about |= {"GRIB_shortName": name.rstrip("6"), "GRIB_units": units, "units": units, "GRIB_stepUnits": 1}
            data[name] = tuple(axes), made, about
        valid = ("time", "step"), starts[:, None] + hours(*leads)
        if years:
            data = data.expand_dims(year=np.arange(1, years + 1)).copy(deep=True)
            data = data.transpose("time", "number", "year", ...)
            back = np.array([_years_before(start, year) for start in starts for year in range(1, years + 1)])
            times = back.reshape(len(starts), years)[..., None] + hours(*leads)
            valid = ("time", "year", "step"), times
        data = data.assign_coords(valid_time=(*valid, {"standard_name": "time", "long_name": "time"}))
        data.attrs = {"GRIB_centre": "ecmf", "GRIB_edition": 1, "Conventions": "CF-1.7"}
        data.to_zarr(folder / f"gridded_ensemble_{kind}_{part}.zarr", zarr_format=2)
    return folder


def _years_before(time: np.datetime64, years: int) -> np.datetime64:
    """Return the same day and hour of an earlier year."""
    day = str(time.astype("datetime64[D]"))
    return np.datetime64(f"{int(day[:4]) - years}{day[4:]}", "ns")


# --- earth2studio -----------------------------------------------------------------------------------------------------


def earth2studio(folder: Path, *, degrees: float = 30) -> Path:
    """Write what `earth2studio.run.ensemble` makes with its Zarr back end: names of its lexicon, no units at all."""
    grid, starts, leads = globe(degrees), days(2), (6, 12)
    axes = {"ensemble": np.arange(2), "time": starts, "lead_time": hours(*leads), "lat": grid[0], "lon": grid[1]}
    data = xr.Dataset(coords=axes)
    names = {"t2m": ("t2m", 0), "z500": ("z", 500), "t850": ("t", 850), "u500": ("u", 500), "u10m": ("u10", 0)}
    for called, (of, level) in (names | {"msl": ("msl", 0)}).items():
        values = filled(of, (level,), starts, grid, range(2), leads).squeeze(3)
        data[called] = tuple(axes), values.swapaxes(0, 1)
    data["tcwv"] = xr.full_like(data["t2m"], 25.0)
    path = folder / "earth2studio.zarr"
    data.to_zarr(path, zarr_format=3)
    return path


# --- ARCO-ERA5 --------------------------------------------------------------------------------------------------------


def arco_era5(folder: Path, *, degrees: float = 30) -> Path:
    """Write a day of ARCO-ERA5: analyses on levels and at the surface, sums of an hour, and much that is no weather."""
    grid, times = globe(degrees), days(1)[0] + np.arange(3) * hours(1)[0]
    axes = {"time": times, "level": np.array(LEVELS, np.int64), "latitude": grid[0], "longitude": grid[1]}
    data = xr.Dataset(coords=axes)
    data["latitude"].attrs = {"units": "degrees_north", "long_name": "latitude"}
    data["longitude"].attrs = {"units": "degrees_east", "long_name": "longitude"}
    data["level"].attrs = {"units": "millibars", "long_name": "pressure_level"}
    for name, (called, long_name, standard_name, units) in (WB2_UPPER | WB2_SURFACE).items():
        upper = name in WB2_UPPER
        values = filled(name, LEVELS if upper else (0,), times, grid)
        about = {"long_name": long_name, "short_name": name, "standard_name": standard_name, "units": units}
        data[called] = (tuple(axes), values, about) if upper else (("time", *tuple(axes)[2:]), values[:, 0], about)
    flat = ("time", "latitude", "longitude")
    rain = {"long_name": "Total precipitation", "short_name": "tp", "units": "m"}
    data["total_precipitation"] = flat, filled("tp", (0,), times, grid)[:, 0] / 24, rain
    data["soil_temperature_level_1"] = data["2m_temperature"].assign_attrs(
        long_name="Soil temperature level 1", short_name="stl1", standard_name="surface_temperature"
    )
    data["type_of_low_vegetation"] = flat, np.ones(data["2m_temperature"].shape, np.float32), {"units": "~"}
    path = folder / "full_37-1h-0p25deg-chunk-1.zarr-v3"
    data.chunk({"time": 1}).to_zarr(path, zarr_format=3)
    return path
