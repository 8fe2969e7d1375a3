"""What a forecast file holds, and how CF-1.11 names it.

Axes: T lead (behind an axis of the one start date in the file), Z level, Y latitude, X longitude, P point, M member,
K quantile or threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ensemble_ml.fields import GAMMA_SHIFT, Family
from ensemble_ml.fields import field as registered
from ensemble_ml.inference.select import Places
from ensemble_ml.wording import SHORT_TEXT, dates_of, dates_text

# Metres above ground, which the standard names do not tell
HEIGHTS = {"t2m": 2, "u10": 10, "v10": 10, "ws10": 10, "fg10": 10}

TIME_AXES = ("forecast_reference_time", "forecast_period")  # the start, of length one, and the leads

_MAXIMUM = "fg10"


class Kind(Enum):
    """What a data variable tells about a field; its value ends the variable's name: `t_mean`."""

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
# Of a sum's law, but no sums themselves: CF cell_methods would have them summed over time.
_OF_THE_LAW = (*_PARAMETERS, Kind.PROBABILITY)
_DIFFERENCES = (Kind.STDDEV, Kind.SCALE, Kind.SPREAD)


@dataclass(frozen=True, eq=False)
class Output:
    """One data variable: `values` (T, [Z,] Y, X) or (T, [Z,] P), behind K or M where its kind has such an axis."""

    name: str
    kind: Kind
    values: np.ndarray


class Dates:
    """Start dates with a part in training (datetime64[ns], sorted), and their short text for an attribute.

    The text is empty where the dates are too irregular for a short one, or where there are none.
    """

    def __init__(self, dates: Iterable[str]):
        text = dates_text(dates)
        self.values = dates_of(text)
        self.text = text if len(text) <= SHORT_TEXT else ""


@dataclass(frozen=True, eq=False)
class Header:
    """Coordinates and global attributes of a file.

    `init_time`: the start, or those of several forecasts that stand together; `leads` hours; `levels` hPa; `members`
    numbers of the members written (empty for none); `thresholds` in the units of their variable; `lead_bounds` of a
    variable over intervals: first and last hour for each of `leads`, or None; `families` of variables that differ from
    the registry's; `dates`: start dates with a part in training, by name.
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
        """(first, last) hour of each lead, where all variables over intervals share theirs; one time axis has one."""
        found = {self._bounds(name) for name in self.lead_bounds}
        return found.pop() if len(found) == 1 else None

    def interval(self, name: str) -> tuple[str, str]:
        """How a value of `name` stands over time: "sum", "maximum" or "point"; and the leads, unless time_bnds tell.

        Empty words where nothing is known, and at moments where time has no bounds.
        """
        methods = {"sum": registered(name).accumulated, "maximum": name == _MAXIMUM}
        method = next((word for word, fits in methods.items() if fits), "")
        if name not in self.lead_bounds:  # a sum or maximum is then over we do not know what
            return "point" if self.shared_bounds and not method else "", ""
        if not method or self.shared_bounds:  # without: a mean or an extreme, nobody knows
            return method, ""
        return method, ", ".join(f"{first}-{last} h" for first, last in self._bounds(name))

    def _bounds(self, name: str) -> tuple[tuple[int, int], ...]:
        pairs = zip(self.leads, self.lead_bounds[name], strict=True)
        return tuple((lead, lead) if pair is None else (int(pair[0]), int(pair[1])) for lead, pair in pairs)


def attributes(header: Header, output: Output) -> dict[str, str]:
    """CF attributes of a data variable, its auxiliary coordinates among them."""
    known, kind = registered(output.name), output.kind
    found = {"long_name": _LONG_NAMES[kind].format(known.long_name), "units": known.units}
    if kind is Kind.PROBABILITY:
        found["units"] = "1"
    elif kind not in _PARAMETERS:
        # A parameter is no physical quantity: the location of a censored law may lie below zero.
        found["standard_name"] = known.standard_name
    if known.temperature and kind is not Kind.PROBABILITY:
        found["units_metadata"] = f"temperature: {'difference' if kind in _DIFFERENCES else 'on_scale'}"
    if kind in _PARAMETERS:
        family = header.families.get(output.name, known.family)
        found["distribution_family"] = family.value
        if family in _PARAMETRISED:
            found["comment"] = _PARAMETRISED[family]
    method, spans = header.interval(output.name)
    if kind in _OF_THE_LAW and method in ("sum", "maximum"):
        over = f"lead times {spans}" if spans else "the interval of time_bnds"
        found["comment"] = "; ".join(filter(None, (found.get("comment"), f"of the {method} over {over}")))
        method = ""
    within = f" (comment: over lead times {spans})" if spans else ""
    methods = [f"time: {method}{within}" if method else "", _METHODS.get(kind, "")]
    if any(methods):
        found["cell_methods"] = " ".join(filter(None, methods))
    coordinates = ["time"]
    if header.places.asked is not None:
        coordinates += ["latitude", "longitude", "requested_latitude", "requested_longitude"]
    if output.name in HEIGHTS:
        coordinates.append(height_name(output.name))
    found["coordinates"] = " ".join(coordinates)
    return found


def dimensions(header: Header, output: Output) -> tuple[str, ...]:
    """Return the names of the axes of a data variable: what CF has no letter for stands to the left of the times."""
    extra = {
        Kind.QUANTILE: ("quantile",),
        Kind.PROBABILITY: (f"threshold_{output.name}",),
        Kind.MEMBER: ("realization",),
    }.get(output.kind, ())
    level = () if registered(output.name).surface else ("level",)
    return (*extra, *TIME_AXES, *level, *header.places.dims)


def height_name(name: str) -> str:
    """The scalar coordinate that tells the height of a near-surface variable."""
    return f"height_{HEIGHTS[name]}m"
