"""The part of an archive that a build needs. Of a very large NetCDF file or Zarr store, only this part is listed.

WeatherBench 2's IFS ENS has 350 million fields. A table with a row for each would need 40 GB, and a build of two leads
of six variables needs one field in 150. Variables of fewer than a million fields are listed whole, so that messages can
name all that an archive has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Field, field
from ensemble_ml.store.source import select_dates

MANY = 1_000_000  # a variable with so many fields or more is listed in part only
_MOST = 60_000_000  # most fields of a variable that are listed: 7 GB
_AROUND = np.timedelta64(48, "h")  # a truth's sums and means need times before and after those of the forecast


@dataclass(frozen=True)
class Wanted:
    """The variables, levels, leads and times that a build needs; None stands for all.

    Attributes:
        variables: short names, with those of components.
        levels: pressure levels, hPa.
        leads: leads, hours. They do not restrict values over an interval (sums, gusts), which may need the lead before.
        dates: init times, as `select_dates` takes them.
        period: first and last init time of a truth's fields.
    """

    variables: frozenset[str] | None = None
    levels: tuple[int, ...] | None = None
    leads: tuple[int, ...] | None = None
    dates: tuple[str, ...] | None = None
    period: tuple[np.datetime64, np.datetime64] | None = None

    @classmethod
    def of(
        cls,
        variables: Iterable[str] | None,
        levels: Sequence[int] | None,
        leads: Sequence[int] | None,
        dates: Sequence[str] | None,
        derive: Iterable[str] = (),
    ) -> Wanted:
        """Return what the settings of a build ask for.

        Args:
            variables: short names, or None.
            levels: pressure levels (hPa), or None.
            leads: leads (hours), or None.
            dates: init times, or None.
            derive: short names of variables that are derived from others.

        Raises:
            UserError: a name is not in the registry.
        """
        names = None if variables is None else with_components((*variables, *derive))
        return cls(
            names,
            None if levels is None else tuple(levels),
            None if leads is None else tuple(leads),
            None if dates is None else tuple(dates),
        )

    @classmethod
    def of_truth(cls, names: Iterable[str], levels: Sequence[int], init_time: np.ndarray, last_lead: int) -> Wanted:
        """Return what the truth of a forecast needs.

        Args:
            names: the forecast's variables.
            levels: its pressure levels, hPa.
            init_time: (D,) its init times, datetime64.
            last_lead: its last lead, hours.
        """
        period = init_time.min() - _AROUND, init_time.max() + np.timedelta64(last_lead, "h") + _AROUND
        return cls(with_components(names), tuple(levels) or None, period=period)

    def lists(self, of: Field, count: int) -> bool:
        """Return whether a variable with `count` fields is listed at all."""
        return of.static or self.variables is None or of.name in self.variables or count < MANY

    def places(self, of: Field, ticks: Mapping[str, np.ndarray], name: str, *, over_time: bool) -> np.ndarray:
        """Return the positions of the N fields that are listed along the four leading axes of a variable, (4, N).

        Args:
            of: the variable.
            ticks: coordinate values of "init", "member", "lead" and "level", in this order.
            name: its name in the file, for the message.
            over_time: whether its values are those of an interval.

        Raises:
            UserError: more than 60 million fields would be listed.
        """
        shape = [len(values) for values in ticks.values()]
        if math.prod(shape) < MANY:
            return np.indices(shape).reshape(len(shape), -1)
        keep = {role: np.ones(len(values), bool) for role, values in ticks.items()}
        if self.levels is not None and not of.surface:
            keep["level"] = np.isin(ticks["level"], self.levels)
        if self.leads is not None and not over_time:
            keep["lead"] = np.isin(ticks["lead"], self.leads)
        init = ticks["init"]
        if self.dates is not None:
            keep["init"] = _of_dates(init, self.dates)
        if self.period is not None:
            keep["init"] &= (init >= self.period[0]) & (init <= self.period[1])
        kept = [np.flatnonzero(one) for one in keep.values()]
        count = math.prod(map(len, kept))
        if count > _MOST:
            raise UserError(
                f"{name}: {count} fields are more than can be listed; prepare takes a part, by variables=, levels=,"
                " leads= and dates="
            )
        return np.stack([axis.ravel() for axis in np.meshgrid(*kept, indexing="ij")])


ALL = Wanted()


def with_components(names: Iterable[str]) -> frozenset[str]:
    """Return variables together with those from which they can be derived.

    Args:
        names: short names.

    Raises:
        UserError: a name is not in the registry.
    """
    return frozenset(one for name in names for one in (field(name).name, *(field(name).components or ())))


def _of_dates(init: np.ndarray, dates: Sequence[str]) -> np.ndarray:
    """Return which init times lie in `dates`, (D,) bool; True for all if a period of `dates` matches none of them."""
    keep = np.zeros(len(init), bool)
    try:
        keep[select_dates(init, dates)] = True
    except UserError:
        keep[:] = True
    return keep
