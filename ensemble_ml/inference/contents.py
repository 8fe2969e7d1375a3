"""The data variables and dimensions of a forecast, and their attributes under CF-1.11.

Axes: T lead (after the axis of init times, which has length one in a file), Z level, Y latitude, X longitude, P point,
M member, K quantile or threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ensemble_ml.fields import FIELDS, GAMMA_SHIFT, Family
from ensemble_ml.fields import field as registered
from ensemble_ml.inference.select import Places
from ensemble_ml.wording import SHORT_TEXT, dates_of, dates_text

# Heights in metres above ground. The standard names do not state them; long names begin with them.
HEIGHTS = {one.name: int(one.long_name.split()[0]) for one in FIELDS if one.long_name.split()[1:2] == ["metre"]}

TIME_AXES = ("forecast_reference_time", "forecast_period")  # the init time (length one in a file) and the leads

_MAXIMUM = "fg10"


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
        """Return how values of `name` relate to time, and over which intervals.

        Args:
            name: short name of a variable.

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
    """Return the CF attributes of a data variable, with the names of its auxiliary coordinates.

    Args:
        header: the header of the file.
        output: the data variable.
    """
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
    if output.name in HEIGHTS:
        coordinates.append(height_name(output.name))
    found["coordinates"] = " ".join(coordinates)
    return found


def dimensions(header: Header, output: Output) -> tuple[str, ...]:
    """Return the names of the axes of a data variable.

    CF recommends the order T, Z, Y, X, and that all other axes (quantile, threshold, member) stand to the left of
    these.

    Args:
        header: the header of the file.
        output: the data variable.
    """
    extra = {
        Kind.QUANTILE: ("quantile",),
        Kind.PROBABILITY: (f"threshold_{output.name}",),
        Kind.MEMBER: ("realization",),
    }.get(output.kind, ())
    level = () if registered(output.name).surface else ("level",)
    return (*extra, *TIME_AXES, *level, *header.places.dims)


def height_name(name: str) -> str:
    """Return the name of the scalar coordinate that holds the height of a near-surface variable."""
    return f"height_{HEIGHTS[name]}m"
