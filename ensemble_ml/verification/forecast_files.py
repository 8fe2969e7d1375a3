"""Read one file of forecasts, from any program: its axes, times, levels, members, units and values.

Axes are recognised by CF standard names or by common names. Problems of a file raise a `UserError` that begins with the
file's path.

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import AXIS_NAMES, FIELDS, LOWEST_PASCAL, Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid, canonical
from ensemble_ml.units import HECTOPASCAL, PASCAL, unit_conversion
from ensemble_ml.wording import dates_of

PARTS = ("location", "scale", "mean", "stddev", "ensemble_spread")
READ = tuple(f"_{part}" for part in (*PARTS, "member"))  # suffixes of the variables that are read
_KNOWN = frozenset(f"{known.name}{part}" for known in FIELDS for part in READ)  # all such names
# Parts that are differences: a conversion of units does not shift them, and they are never negative.
_DIFFERENCES = ("scale", "stddev", "ensemble_spread")
_ROUNDING = 1e-6  # tolerance, as a share of a field's largest value
_STANDARD = {"level": "air_pressure"}  # CF standard names of axes that differ from our names
_AT_THE_SURFACE = frozenset(known.name for known in FIELDS if known.surface)
# The form that `inference.contents` writes.
_SPANS = re.compile(r"\(comment: over lead times (\d+-\d+ h(?:, \d+-\d+ h)*)\)")
_ORIGIN = (
    "source", "checkpoint_step", "checkpoint_sha256", "training_data_fingerprint", "data_fingerprint", "settings_digest"
)  # fmt: skip
_OTHERS = "give it start and valid times as docs/forecasts.md describes under Other people's forecasts"
_OVER_TIME = re.compile(r"time: (sum|maximum)")


@dataclass(frozen=True, eq=False)
class ForecastFile:
    """An open forecast file whose axes have our names. Only headers stay in memory.

    Attributes:
        path: The file.
        data: The lazy data set.
    """

    path: Path
    data: xr.Dataset

    def __enter__(self) -> ForecastFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.data.close()

    @cached_property
    def start(self) -> np.datetime64:
        """Return the initialisation time.

        Raises:
            UserError: The file states none, several, or one that is missing or no date of the standard calendar from
                1678 to 2261.
        """
        if "forecast_reference_time" not in self.data.variables:
            raise self._error(f"no forecast_reference_time; {_OTHERS}")
        starts = np.unique(self._times("forecast_reference_time"))
        if len(starts) != 1:
            many = f"forecast_reference_time holds {len(starts)} init times"
            raise self._error(f"{many}; give a file for each init time")
        return starts[0]

    @cached_property
    def lead_hours(self) -> list[int]:
        """Return the lead times in whole hours.

        Raises:
            UserError: The file has no times, or times that are missing, no dates of the standard calendar from 1678 to
                2261, or not a whole number of hours after the start, or two times at one lead. Or the file has no
                single `start`.
        """
        if "time" not in self.data.variables:
            raise self._error(f"no time; {_OTHERS}")
        hours = self._hours(np.atleast_1d(self._times("time")))
        if twice := [hour for hour in hours if hours.count(hour) > 1]:
            raise self._error(f"time holds the lead of {twice[0]} h {len(twice)} times; keep one of them")
        return hours

    def _times(self, name: str) -> np.ndarray:
        """Return the values of a time coordinate as datetime64[ns]."""
        values = self.data[name].values
        if values.dtype.kind != "M":
            other = "no dates (its units name none)"
            # xarray gives years that datetime64[ns] cannot hold as objects, as it does with other calendars.
            if values.dtype.kind == "O":
                other = f"dates of the calendar {self.data[name].encoding.get('calendar')}"
            raise self._error(f"{name} holds {other}; give dates of the standard calendar from 1678 to 2261")
        if np.isnat(values).any():
            raise self._error(f"{name} holds a missing date; make the file again")
        return values.astype("datetime64[ns]")

    def _hours(self, times: np.ndarray) -> list[Any]:
        """Return whole hours since the start, nested as `times` is.

        Times that are stored as floating-point days are off by seconds, so hours are rounded. More than one minute off
        is an error.
        """
        hours = (times - self.start) / np.timedelta64(1, "h")
        if (np.abs(hours - np.rint(hours)) > 1 / 60).any():
            raise self._error("time: only whole hours of lead time are read")
        return np.rint(hours).astype(int).tolist()

    @cached_property
    def levels(self) -> list[int]:
        """Return the pressure levels in hPa, rounded to whole numbers; none if there is no such axis.

        Levels without units are taken as Pa if the largest is above `LOWEST_PASCAL`, and otherwise as hPa.

        Raises:
            UserError: The units are not those of a pressure, or a level is NaN or no number.
        """
        if "level" not in self.data.variables:
            return []
        level = self.data["level"]
        try:
            values = np.atleast_1d(np.asarray(level.values.tolist(), np.float64))
            units = level.attrs.get("units") or ("Pa" if values.max() > LOWEST_PASCAL else "hPa")
            factor, _ = unit_conversion(str(units), "Pa")
            return [round(value) for value in (values * (factor / 100)).tolist()]
        except (ValueError, OverflowError) as error:
            raise self._error(f"level: {error}") from error

    @cached_property
    def grid(self) -> tuple[Grid, np.ndarray, np.ndarray]:
        """Return the grid in canonical order, and the rows and columns of the file in that order.

        Raises:
            UserError: The file is not on a regular latitude-longitude grid.
        """
        missing = [name for name in ("latitude", "longitude") if name not in self.data.dims]
        if missing:
            has = ", ".join(map(str, self.data.dims))
            raise self._error(
                f"not on a grid (no dimension {missing[0]}; it has {has}); evaluate needs forecasts without points="
            )
        try:
            return canonical(self.data["latitude"].values, self.data["longitude"].values)
        except UserError as error:
            raise self._error(str(error)) from error

    @property
    def axes(self) -> dict[str, np.ndarray]:
        """Return the values of the axes in space by name, as the file has them."""
        found = {name: self.data[name].values for name in ("latitude", "longitude") if name in self.data.dims}
        return found | ({"level": np.atleast_1d(self.data["level"].values)} if "level" in self.data.coords else {})

    @property
    def names(self) -> set[str]:
        """Return the full names of the variables that are read, such as t2m_mean."""
        return {str(name) for name in self.data.data_vars if name in _KNOWN}

    @property
    def fields(self) -> dict[str, tuple[int | None, ...]]:
        """Return the levels in hPa of every variable that can be scored, by short name; (None,) at the surface."""
        found: dict[str, tuple[int | None, ...]] = {}
        for full_name, array in self.data.data_vars.items():
            for part in ("location", "mean", "ensemble_spread"):
                name = str(full_name).removesuffix(f"_{part}")
                if full_name in _KNOWN and name != full_name and "latitude" in array.dims:
                    one = "level" in array.coords and name not in _AT_THE_SURFACE  # a single level was selected
                    found[name] = tuple(self.levels) if "level" in array.dims or one else (None,)
        return found

    @property
    def thresholds(self) -> dict[str, list[float]]:
        """Return the thresholds of which the file holds probabilities, in the registry's units, by short name.

        Thresholds in units that cannot be converted are left out.
        """
        found = {}
        for known in FIELDS:
            axis, name = f"threshold_{known.name}", f"{known.name}_prob_above"
            if name in self.data and axis in self.data[name].coords:
                try:
                    factor, shift = unit_conversion(self.data[axis].attrs.get("units", known.units), known.units)
                except UserError:  # thresholds only add diagrams to the report, so unknown units are no error
                    continue
                found[known.name] = (np.atleast_1d(self.data[axis].values) * factor + shift).tolist()
        return found

    @property
    def members_in(self) -> tuple[str, ...]:
        """Return the members that the file says it was made from.

        The numbers are written as the ensemble has them, so 06 becomes 6.

        Raises:
            UserError: The attribute holds anything but numbers.
        """
        stated = self.data.attrs.get("members_in", "")
        if isinstance(stated, str):
            words = stated.replace(",", " ").split()
        else:  # NetCDF attributes may be lists of numbers, which many programs write as doubles (6.0)
            words = [str(number).removesuffix(".0") for number in np.ravel(stated).tolist()]
        if other := [word for word in words if not word.isdecimal()]:
            raise self._error(f"members_in: {other[0]!r} is no number of a member; give numbers, as in 1 2 3")
        return tuple(str(int(word)) for word in words)

    @property
    def checkpoint(self) -> str | None:
        """Return the sha256 of the checkpoint; None if the file does not state it."""
        return self.data.attrs.get("checkpoint_sha256")

    @property
    def origin(self) -> dict[str, str]:
        """Return the attributes of `_ORIGIN` that the file has. They say what it was made from."""
        return {name: str(self.data.attrs[name]) for name in _ORIGIN if name in self.data.attrs}

    def dates(self, name: str) -> np.ndarray:
        """Return the datetime64 dates in an attribute, or in a variable if they are too many for an attribute.

        There are none if the file has neither.

        Raises:
            UserError: The attribute or the variable holds something other than dates.
        """
        if name in self.data.variables:
            return self._times(name)
        try:
            return dates_of(str(self.data.attrs.get(name, "")))
        except ValueError as error:
            raise self._error(
                f"{name} is no list of ISO dates or of series of them ({error}); correct or remove this attribute"
            ) from error

    def family(self, name: str, usual: Family) -> Family:
        """Return the distribution family that a variable of this full name states, or `usual` if it states none.

        Raises:
            UserError: The family is not known.
        """
        stated = self.data[name].attrs.get("distribution_family", usual.value)
        if stated not in {family.value for family in Family}:
            known = ", ".join(family.value for family in Family)
            raise self._error(f"{name}: distribution_family {stated!r} is not known; known are {known}")
        return Family(stated)

    def intervals(self, variable: str) -> dict[int, tuple[int, int]]:
        """Return the first and the last hour of a sum or maximum, by lead in hours; empty if the file has none.

        Raises:
            UserError: A bound of an interval is not a whole number of hours after the start.
        """
        for name in (f"{variable}_{part}" for part in PARTS):
            if name not in self.data:
                continue
            methods = str(self.data[name].attrs.get("cell_methods", ""))
            # Our own files list the intervals of all leads in a comment. Each interval ends at its lead.
            if spans := _SPANS.search(methods):
                every = (span.removesuffix(" h").split("-") for span in spans[1].split(", "))
                return {int(last): (int(first), int(last)) for first, last in every}
            if _OVER_TIME.search(methods) and (bounds := self.data["time"].attrs.get("bounds")) in self.data:
                stated = self._hours(np.atleast_2d(self._times(str(bounds))))
                return {last: (first, last) for first, last in stated}
        return {}

    def values(
        self, variable: str, part: str, lead: int, levels: tuple[int | None, ...], leading: str = ""
    ) -> np.ndarray:
        """Read one part of a variable, such as its scale, at one lead.

        Args:
            variable: Short name of the variable.
            part: Suffix of the name in the file, such as "location" or "member".
            lead: Lead time in hours.
            levels: Levels in hPa; (None,) at the surface.
            leading: Name of an axis to put before the others, such as "realization"; of length one if the variable
                lacks it.

        Returns:
            ([leading,] Z, Y, X) float64 on `grid` in the registry's units.

        Raises:
            UserError: The lead or the variable is missing, the variable has another dimension or a level several times,
                units are not known, missing, or not those of a distribution with bounds, values cannot be read, or a
                scale, standard deviation or spread is negative.
        """
        if lead not in self.lead_hours:
            hours = ", ".join(map(str, self.lead_hours))
            raise self._error(f"no lead of {lead} h; it has {hours}. Make the forecast again")
        name = f"{variable}_{part}"
        if name not in self.data:
            raise self._error(f"lacks {name}, which other files hold; make it again")
        found = self.data[name].variable
        time = str(self.data["time"].dims[0]) if self.data["time"].dims else "time"
        found = found.isel({time: self.lead_hours.index(lead)}) if time in found.dims else found
        if "level" in found.dims:
            if twice := [level for level in self.levels if level in levels and self.levels.count(level) > 1]:
                raise self._error(f"level holds {twice[0]} hPa several times, in whole hPa; keep one of them")
            found = found.isel(level=[self.levels.index(level) for level in levels if level is not None])
        elif leading:
            found = found.set_dims(("level", *found.dims))
        if leading and leading not in found.dims:  # a file of a single member may have dropped its axis
            found = found.set_dims((leading, *found.dims))
        order = [axis for axis in (leading, "level", "latitude", "longitude") if axis in found.dims]
        if more := [str(axis) for axis in found.dims if axis not in order]:
            raise self._error(f"{name}: has a dimension {more[0]}; take one value of it")
        try:
            values = np.asarray(found.transpose(*order).values, np.float64)
        except (OSError, RuntimeError) as error:
            raise self._error(f"{name} cannot be read ({error}); make it again") from error
        factor, shift = self._conversion(name, variable)
        if (factor, shift) != (1.0, 0.0):
            # A difference of two temperatures in Celsius is the same in kelvin, so a scale or spread must not be
            # shifted.
            values = factor * values + (0.0 if part in _DIFFERENCES else shift)
        if part in _DIFFERENCES:
            values = self._not_negative(values, name, factor)
        _, rows, columns = self.grid
        return np.atleast_3d(values.T).T[..., rows[:, None], columns]

    def _not_negative(self, values: np.ndarray, name: str, factor: float) -> np.ndarray:
        """Set values to zero that packing or rounding may have moved away from zero; refuse others below zero."""
        # A zero that was packed into integers may come back as any value within half a packing step.
        packing = abs(factor * self.data[name].encoding.get("scale_factor", 0.0)) / 2
        near = packing + _ROUNDING * np.max(values, initial=0.0, where=np.isfinite(values))
        if below := int((values < -near).sum()):
            raise self._error(f"{name} is below zero at {below} of its points")
        return np.where(values <= (near if packing else 0.0), 0.0, values)

    def _conversion(self, name: str, variable: str) -> tuple[float, float]:
        """Return the (factor, shift) that convert a variable to the registry's units.

        Raise a UserError if the units are missing (unless they would be 1), no conversion is known, or the variable is
        a parameter of a distribution other than the normal and not in the registry's units.
        """
        known, attributes = registered(variable), self.data[name].attrs
        if "units" not in attributes and known.units != "1":
            raise self._error(f"{name}: has no units; set its attribute units (here they would be {known.units})")
        units = str(attributes.get("units", known.units)).strip()
        try:
            found = unit_conversion(units, known.units)
        except UserError as error:
            raise self._error(f"{name}: {error}") from error
        family = attributes.get("distribution_family", Family.NORMAL.value)
        # The other families have bounds in the registry's units, so their parameters are not converted.
        if found != (1.0, 0.0) and family != Family.NORMAL.value:
            raise self._error(f"{name}: parameters of a {family} distribution in {units}; give them in {known.units}")
        return found

    def _error(self, what: str) -> UserError:
        """Return the error to raise, whose text begins with the path of the file."""
        return UserError(f"{self.path}: {what}")


def open_file(path: Path) -> ForecastFile:
    """Open a NetCDF file, which the caller closes, and read its headers only.

    Raises:
        UserError: The file is not readable.
    """
    try:
        return ForecastFile(path, _with_our_axes(xr.open_dataset(path, decode_timedelta=False, cache=False)))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable NetCDF file ({error}); make the forecast again") from error


def _with_our_axes(data: xr.Dataset) -> xr.Dataset:
    """Rename the axes to our names, and remove an axis of a single initialisation time.

    A level axis without units takes the values of a coordinate along it that is in Pa or hPa.
    """
    made, along = data, {}
    if made.sizes.get("forecast_reference_time") == 1:
        made = made.isel(forecast_reference_time=0)
    for name, usual in AXIS_NAMES.items():
        if name in made.dims and name in made.coords:
            continue
        lines = [axis for axis, values in made.coords.items() if values.ndim < 2]
        named = [axis for axis in lines if made[axis].attrs.get("standard_name") == _STANDARD.get(name, name)]
        for axis in [*named, *(axis for axis in usual if axis in lines or axis in made.dims)][:1]:
            made = made if axis == name else made.rename({axis: name})
            if name in made.coords and made[name].ndim:
                along[name] = made[name].dims[0]
    lengths = list(along.values())  # in a list of points, latitude and longitude share one dimension
    made = made.swap_dims({dim: name for name, dim in along.items() if dim != name and lengths.count(dim) == 1})
    # A level axis without units may only number the levels. A coordinate on it in Pa or hPa then holds the pressures.
    if "level" in made.coords and "units" not in made["level"].attrs:
        along_levels = [c for c in made.coords.values() if c.dims == made["level"].dims]
        beside = [c for c in along_levels if c.attrs.get("units") in (*PASCAL, *HECTOPASCAL)]
        made = made.assign_coords(level=beside[0].variable) if beside and beside[0].ndim else made
    if made is not data:
        made.set_close(data.close)
    return made
