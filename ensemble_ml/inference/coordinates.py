"""Make the coordinates and global attributes of a forecast under CF-1.11, for files and for Datasets in memory.

Values are encoded as in a file: times are seconds since 1970, leads are hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.inference.contents import HEIGHTS, TIME_AXES, Header, height_name
from ensemble_ml.inference.select import Places

_CLOCK = {"units": "seconds since 1970-01-01 00:00:00", "calendar": "proleptic_gregorian"}


@dataclass(frozen=True, eq=False)
class Coordinate:
    """A coordinate variable. Its `values` have one axis for each of `dims`."""

    name: str
    dims: tuple[str, ...]
    values: Any
    attributes: Mapping[str, Any]


def global_attributes(header: Header) -> dict[str, str]:
    """Return the global attributes of a forecast that are not empty.

    Training dates are among them if they make a short text.
    """
    short = {name: dates.text for name, dates in header.dates.items()}
    about = {"Conventions": "CF-1.11", **header.attributes, **short}
    return {key: value for key, value in about.items() if value}


def coordinates(header: Header) -> Iterator[Coordinate]:
    """Yield the coordinates of a forecast in the order of a file.

    Args:
        header: the header of the file.
    """
    for name, dates in header.dates.items():
        if len(dates.values) and not dates.text:
            # Training dates without a short text become a coordinate of their own. A data variable would be repeated
            # for each init time when files are concatenated.
            seconds = dates.values.astype("datetime64[s]").astype(np.int64)
            yield Coordinate(name, (name,), seconds, {"long_name": name.replace("_", " "), **_CLOCK})
    yield from _times(header)
    yield from _space(header.places)
    if len(header.levels):
        level = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa", "positive": "down"}
        yield Coordinate("level", ("level",), np.asarray(header.levels, np.int32), {**level, "axis": "Z"})
    if len(header.quantiles):
        about = {"long_name": "probability that the value is not exceeded", "units": "1"}
        yield Coordinate("quantile", ("quantile",), np.asarray(header.quantiles, np.float64), about)
    for name, values in header.thresholds.items():
        known = registered(name)
        about = {
            "standard_name": known.standard_name,
            "long_name": f"{known.long_name}, threshold",
            "units": known.units,
        }
        temperature = {"units_metadata": "temperature: on_scale"} if known.temperature else {}
        axis = f"threshold_{name}"
        yield Coordinate(axis, (axis,), np.asarray(values, np.float64), about | temperature)
    if len(header.members):
        # No axis attribute: CF keeps it for the axes of space and time.
        about = {"standard_name": "realization", "long_name": "member number", "units": "1"}
        yield Coordinate("realization", ("realization",), np.asarray(header.members, np.int32), about)


def height_of(name: str) -> Coordinate | None:
    """Return the scalar coordinate that holds the height of a near-surface variable, or None for other variables."""
    if name not in HEIGHTS:
        return None
    about = {"standard_name": "height", "long_name": "height above ground", "units": "m", "positive": "up"}
    return Coordinate(height_name(name), (), np.float64(HEIGHTS[name]), {**about, "axis": "Z"})


def _times(header: Header) -> Iterator[Coordinate]:
    """Yield the init, lead and valid times, and bounds of the valid times if all variables over intervals share them.

    A file has one init time, and files of several init times concatenate along this axis. Valid times have both axes,
    init time and lead. As an axis of their own they would overlap between files, and many files opened as one would
    have the union of all valid times as their axis, with most values missing.
    """
    starts = np.atleast_1d(np.asarray(header.init_time)).astype("datetime64[s]").astype(np.int64)
    leads = np.asarray(header.leads, np.int64)
    reference = {"standard_name": "forecast_reference_time", "long_name": "start of the forecast", **_CLOCK}
    yield Coordinate(TIME_AXES[0], TIME_AXES[:1], starts, {**reference, "axis": "T"})
    # Without the attribute `dtype`, xarray reads the hours as plain integers.
    period = {"standard_name": "forecast_period", "long_name": "lead time", "units": "hours"}
    yield Coordinate(TIME_AXES[1], TIME_AXES[1:], leads, {**period, "dtype": "timedelta64[ns]"})
    time = {"standard_name": "time", "long_name": "valid time", **_CLOCK}
    bounds = header.shared_bounds
    if bounds:
        time["bounds"] = "time_bnds"
    yield Coordinate("time", TIME_AXES, starts[:, None] + 3600 * leads, time)
    if bounds:
        ends = starts[:, None, None] + 3600 * np.asarray(bounds, np.int64)
        yield Coordinate("time_bnds", (*TIME_AXES, "bnds"), ends, {})


def _space(places: Places) -> Iterator[Coordinate]:
    """Yield latitudes and longitudes: those of the grid, or those of points and of the places that users requested."""
    latitude = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north"}
    longitude = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east"}
    if places.asked is None:
        yield Coordinate("latitude", ("latitude",), places.latitude, {**latitude, "axis": "Y"})
        yield Coordinate("longitude", ("longitude",), places.longitude, {**longitude, "axis": "X"})
        return
    yield Coordinate("latitude", ("point",), places.latitude, latitude)
    yield Coordinate("longitude", ("point",), places.longitude, longitude)
    for position, name in enumerate(("latitude", "longitude")):
        # The units are plain degrees, because software would take a second variable in degrees_north for a second
        # latitude.
        about = {"long_name": f"{name} that was asked for", "units": "degrees"}
        yield Coordinate(f"requested_{name}", ("point",), places.asked[:, position], about)
