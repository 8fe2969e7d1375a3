"""The data variables, coordinates and attributes of a forecast under CF-1.11, for files and for xarray Datasets.

Axes: T lead (after the axis of init times, which has length one in a file), Z level, Y latitude, X longitude, P point,
M member, K quantile or threshold.

Coordinates are encoded for both as in a file: times are seconds since 1970, leads are hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ensemble_ml.fields import FIELDS, GAMMA_SHIFT, Family
from ensemble_ml.fields import field as registered
from ensemble_ml.inference.select import Places
from ensemble_ml.wording import SHORT_TEXT, dates_of, dates_text

# Heights in metres above ground. The standard names do not state them; long names begin with them.
HEIGHTS = {one.name: int(one.long_name.split()[0]) for one in FIELDS if one.long_name.split()[1:2] == ["metre"]}

TIME_AXES = ("forecast_reference_time", "forecast_period")  # the init time (length one in a file) and the leads

_MAXIMUM = "fg10"  # the only variable that is a maximum over an interval
_CLOCK = {"units": "seconds since 1970-01-01 00:00:00", "calendar": "proleptic_gregorian"}


class Kind(Enum):
    """The kind of a data variable. Its value is the ending of the variable's name, as in `t_mean`."""

    MEAN = "mean"
    STDDEV = "stddev"
    LOCATION = "location"
    SCALE = "scale"
    SPREAD = "ensemble_spread"
    QUANTILE = "quantile"
    PROBABILITY = "prob_above"
    MEMBER = "member"


_LONG_NAMES = {
    Kind.MEAN: "{}, mean of the predicted distribution",
    Kind.STDDEV: "{}, standard deviation of the predicted distribution",
    Kind.LOCATION: "{}, location parameter of the predicted distribution",
    Kind.SCALE: "{}, scale parameter of the predicted distribution",
    Kind.SPREAD: "{}, predicted standard deviation of the full ensemble",
    Kind.QUANTILE: "{}, quantiles of the predicted distribution",
    Kind.PROBABILITY: "probability that {} exceeds the threshold",
    Kind.MEMBER: "{}, ensemble members remapped to the predicted distribution",
}
_DEVIATION = "realization: standard_deviation"
_METHODS = {Kind.MEAN: "realization: mean", Kind.STDDEV: _DEVIATION, Kind.SPREAD: _DEVIATION}
_RATIO = "log(1 + exp(2 x)) / 2"
_PARAMETRISED = {
    Family.LOGNORMAL: f"mean = scale * {_RATIO} with x = location / scale; standard deviation = scale",
    Family.CENSORED_SHIFTED_GAMMA: (
        f"max(0, G - {GAMMA_SHIFT} scale), G a gamma distribution with mean scale * {_RATIO}, "
        f"x = location / scale + {GAMMA_SHIFT}, and standard deviation scale"
    ),
    Family.DOUBLY_CENSORED_NORMAL: (
        "min(1, max(0, N)), N a normal distribution with mean location and standard deviation scale"
    ),
}
_PARAMETERS = (Kind.LOCATION, Kind.SCALE)
# Parameters and probabilities belong to the distribution of a sum, but are no sums themselves. With `time: sum` in
# cell_methods, software that follows CF would take them for values summed over time.
_OF_DISTRIBUTION = (*_PARAMETERS, Kind.PROBABILITY)
_DIFFERENCES = (Kind.STDDEV, Kind.SCALE, Kind.SPREAD)


@dataclass(frozen=True, eq=False)
class Output:
    """A data variable of a forecast.

    Attributes:
        name: short name of the field, such as t2m.
        kind: the kind of values, which may add an axis K or M in front.
        values: ([K | M,] T, [Z,] Y, X) or ([K | M,] T, [Z,] P), in the registry's units; a probability is a fraction.
    """

    name: str
    kind: Kind
    values: np.ndarray


class Dates:
    """Init times used in training, sorted, and a short text of them for an attribute.

    The text is empty if there are no dates, or if they are too irregular for a short text.

    Args:
        dates: ISO dates, in any order.

    Attributes:
        values: datetime64[ns], ascending.
        text: the short text, or empty.
    """

    def __init__(self, dates: Iterable[str]):
        text = dates_text(dates)
        self.values = dates_of(text)
        self.text = text if len(text) <= SHORT_TEXT else ""


@dataclass(frozen=True, eq=False)
class Header:
    """The coordinates and global attributes of a file.

    Attributes:
        init_time: the init time, or those of several forecasts in one Dataset.
        leads: lead times in hours.
        levels: pressure levels in hPa; empty if only surface variables are predicted.
        places: the grid points that the forecast holds.
        quantiles: levels of the quantiles, between 0 and 1.
        thresholds: thresholds of each variable, in its units.
        members: numbers of the members written; empty if none are.
        lead_bounds: for each variable over intervals, the first and last hour for each lead, or None where it has none.
        families: distribution of each variable, if it is not that of the registry.
        attributes: global attributes of the file.
        dates: init times used in training, by the name of the attribute.
    """

    init_time: np.datetime64 | np.ndarray
    leads: Sequence[int]
    levels: Sequence[int]
    places: Places
    quantiles: Sequence[float] = ()
    thresholds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    members: Sequence[int] = ()
    lead_bounds: Mapping[str, Sequence[Sequence[int] | None]] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    dates: Mapping[str, Dates] = field(default_factory=dict)

    @property
    def shared_bounds(self) -> tuple[tuple[int, int], ...] | None:
        """Return the (first, last) hour of each lead; None if variables over intervals differ, or there are none.

        The file has one time axis, and this axis can have only one set of bounds.
        """
        found = {self._bounds(name) for name in self.lead_bounds}
        return found.pop() if len(found) == 1 else None

    def interval(self, name: str) -> tuple[str, str]:
        """Return how values of a variable relate to time, and over which intervals.

        Returns:
            Two texts. The first is the method: "sum", "maximum", "point", or empty if no method is stated. The second
            lists the intervals in words. It is empty without intervals or method, or if time_bnds states the intervals.
        """
        methods = {"sum": registered(name).accumulated, "maximum": name == _MAXIMUM}
        method = next((word for word, fits in methods.items() if fits), "")
        # A sum or maximum without bounds is over an unknown interval, so no method is stated. Any other variable
        # without bounds is instantaneous, which has to be stated only if the time axis has bounds.
        if name not in self.lead_bounds:
            return "point" if self.shared_bounds and not method else "", ""
        # A variable with bounds but no method is a mean or an extreme; the header does not state which.
        if not method or self.shared_bounds:
            return method, ""
        return method, ", ".join(f"{first}-{last} h" for first, last in self._bounds(name))

    def _bounds(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the (first, last) hour of a variable for each lead. Without an interval, both are the lead."""
        pairs = zip(self.leads, self.lead_bounds[name], strict=True)
        return tuple((lead, lead) if pair is None else (int(pair[0]), int(pair[1])) for lead, pair in pairs)


def attributes(header: Header, output: Output) -> dict[str, str]:
    """Return the CF attributes of a data variable, with the names of its auxiliary coordinates."""
    known, kind = registered(output.name), output.kind
    found = {"long_name": _LONG_NAMES[kind].format(known.long_name), "units": known.units}
    if kind is Kind.PROBABILITY:
        found["units"] = "1"
    elif kind not in _PARAMETERS:
        # A parameter is no physical quantity and gets no standard name: the location of a censored distribution may lie
        # below zero.
        found["standard_name"] = known.standard_name
    # A conversion to degrees Celsius shifts temperatures, but not differences of temperatures.
    if known.temperature and kind is not Kind.PROBABILITY:
        found["units_metadata"] = f"temperature: {'difference' if kind in _DIFFERENCES else 'on_scale'}"
    if kind in _PARAMETERS:
        family = header.families.get(output.name, known.family)
        found["distribution_family"] = family.value
        if family in _PARAMETRISED:
            found["comment"] = _PARAMETRISED[family]
    method, spans = header.interval(output.name)
    if kind in _OF_DISTRIBUTION and method in ("sum", "maximum"):
        over = f"lead times {spans}" if spans else "the interval of time_bnds"
        found["comment"] = "; ".join(filter(None, (found.get("comment"), f"of the {method} over {over}")))
        method = ""
    # Intervals that the variables do not share cannot stand in time_bnds. They are written as a comment of the cell
    # method.
    within = f" (comment: over lead times {spans})" if spans else ""
    methods = [f"time: {method}{within}" if method else "", _METHODS.get(kind, "")]
    if any(methods):
        found["cell_methods"] = " ".join(filter(None, methods))
    # CF and xarray find auxiliary coordinates by their names in this attribute.
    coordinates = ["time"]
    if header.places.asked is not None:
        coordinates += ["latitude", "longitude", "requested_latitude", "requested_longitude"]
    height = height_of(output.name)
    if height is not None:
        coordinates.append(height.name)
    found["coordinates"] = " ".join(coordinates)
    return found


def dimensions(header: Header, output: Output) -> tuple[str, ...]:
    """Return the names of the axes of a data variable.

    CF recommends the order T, Z, Y, X, and that all other axes (quantile, threshold, member) stand to the left of
    these.
    """
    extra = {
        Kind.QUANTILE: ("quantile",),
        Kind.PROBABILITY: (f"threshold_{output.name}",),
        Kind.MEMBER: ("realization",),
    }.get(output.kind, ())
    level = () if registered(output.name).surface else ("level",)
    return (*extra, *TIME_AXES, *level, *header.places.dims)


@dataclass(frozen=True, eq=False)
class Coordinate:
    """A coordinate variable. Its `values` have one axis for each of `dims`."""

    name: str
    dims: tuple[str, ...]
    values: Any
    attributes: Mapping[str, Any]


def global_attributes(header: Header) -> dict[str, str]:
    """Return the global attributes of a forecast that are not empty, with training dates if they make a short text."""
    short = {name: dates.text for name, dates in header.dates.items()}
    about = {"Conventions": "CF-1.11", **header.attributes, **short}
    # A path may hold bytes that are no UTF-8, which neither NetCDF nor Zarr can store.
    return {key: value.encode("utf-8", "backslashreplace").decode() for key, value in about.items() if value}


def coordinates(header: Header) -> Iterator[Coordinate]:
    """Yield the coordinates of a forecast in the order of a file, but for the heights of variables (`height_of`)."""
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
    return Coordinate(f"height_{HEIGHTS[name]}m", (), np.float64(HEIGHTS[name]), {**about, "axis": "Z"})


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
