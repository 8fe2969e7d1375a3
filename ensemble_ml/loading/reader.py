"""Read what a model needs of one init time, and reduce members to mean and spread.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import withheld_member
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.store.source import Fields, Part, Selection, Source, zero_by_nature

log = logging.getLogger(__name__)

Span = tuple[int, int]


class Reader:
    """A reader of the fields of `source` in the order of `spec`. Several threads may use it.

    Args:
        source: Tensor store or archive.
        spec: Fields that the model needs.
        window: ((first, last + 1) row, (first, last + 1) column) of the part of the grid that is read; None takes all.
        withhold: Seed by which a member of each date is withheld, to stand for the truth; None reads the truth of the
            source. Only `Reader` and `Batches.draw` know what stands for the truth.

    Attributes:
        full_size: Number of members that the source holds, N.
        zeros: Indices (lead, surface variable) of fields that are zero by definition and need not be stored.
    """

    def __init__(
        self, source: Source, spec: ModelSpec, *, window: tuple[Span, Span] | None = None, withhold: int | None = None
    ):
        self.source, self.spec, self.withhold = source, spec, withhold
        self.window: tuple[Span, Span] = window or ((0, len(spec.latitude)), (0, len(spec.longitude)))
        self.full_size = len(source.layout.realization)
        places = [(t, s) for t in range(len(spec.leads_in)) for s in range(len(spec.surface))]
        self.zeros = [(t, s) for t, s in places if zero_by_nature(spec.surface[s], spec.leads_in[t])]
        self._masked = tuple(
            np.array([name in spec.masked for name in names], bool) for names in (spec.variables, spec.surface)
        )
        self._there: dict[int, np.ndarray] = {}

    def over(self, source: Source) -> Reader:
        """Return the same reader on another source of the same fields."""
        other = copy.copy(self)  # both share the cache of `available`
        other.source = source
        return other

    def within(self, window: tuple[Span, Span]) -> Reader:
        """Return the same reader for a part of the grid, given like `window` of the class."""
        return Reader(self.source, self.spec, window=window, withhold=self.withhold)

    @property
    def spare(self) -> int:
        """Return the number of members of a date that a training sample must leave out, 0 or 1.

        It is 1 if a member stands for the truth. It is also 1 if only the spread is learned: the target is the spread
        of all members, so a sample with all of them would teach nothing.
        """
        return 0 if self.spec.config.postprocess and self.withhold is None else 1

    @property
    def most(self) -> int:
        """Return the largest number of members of a date that validation and fits may use."""
        return self.full_size - (self.withhold is not None)

    def forecast(
        self,
        date: int,
        members: Sequence[int] | np.ndarray,
        *,
        strict: bool = True,
        leads: tuple[int, ...] | None = None,
    ) -> Fields:
        """Read members at the input leads.

        Args:
            date: Index of the init time.
            members: Positions of the members.
            strict: Whether missing fields and values are errors.
            leads: Some of the input leads in hours, only if `strict` is off; None takes all.

        Returns:
            Fields (M, T_in, V, Z, Y, X) and (M, T_in, S, Y, X) float32. They are NaN at points of variables in
            `spec.masked` that have no value and, if `strict` is off, where a field is missing.

        Raises:
            UserError: A field cannot be decoded. In strict mode also: a field is missing, or a value is infinite, or
                NaN where its variable has no mask.
        """
        positions = np.asarray(members)
        fields = self._read(Part.FORECAST, date, positions, leads)
        if strict:
            assert leads is None
            self._check_finite(fields, date, positions)
        return fields

    def available(self, date: int) -> np.ndarray:
        """Return the positions of the members that have all input fields on a date, ascending.

        No field is read for this. The result is cached.
        """
        date = int(date)
        if date not in self._there:
            whole = np.ones(self.full_size, bool)
            for there in self._inputs_present(date):
                whole &= there.reshape(self.full_size, -1).all(1)
            self._there[date] = np.flatnonzero(whole)
        return self._there[date]

    def withheld(self, date: int) -> int | None:
        """Return the position of the member that is the truth of a date in fits and validation; None if none is."""
        whole = self.available(date)
        return withheld_member(self.withhold, 0, date, whole) if self.withhold is not None and len(whole) else None

    def shown(self, date: int) -> np.ndarray:
        """Return the positions of a date's complete members that validation and fits may use: not the withheld one."""
        whole, withheld = self.available(date), self.withheld(date)
        return whole if withheld is None else whole[whole != withheld]

    def usable(self, dates: Iterable[int], least: int, what: str) -> np.ndarray:
        """Return those of `dates` on which at least `least` members have all input fields. Log how many are left out.

        Messages name the dates by `what`.

        Raises:
            UserError: None of the dates has so many members. The message names the first missing field.
        """
        dates = np.asarray(dates, int)
        good = np.array([len(self.available(date)) >= least for date in dates], bool)
        lost = dates[~good]
        if len(lost):
            first = int(lost[0])
            gap = self._first_gap(first)
            if not good.any():
                raise UserError(
                    f"{self.source.path}: {gap}; no {what} date has {least} complete members; leave that variable out"
                )
            text = "%s: %d of %d %s dates are left out, with fewer than %d complete members; the first: %s"
            log.info(text, self.source.path, len(lost), len(dates), what, least, gap)
        return dates[good]

    def _inputs_present(self, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which input fields the source has: bool (M, T_in, V, Z) and (M, T_in, S)."""
        layout, spec = self.source.layout, self.spec
        leads = [layout.lead_hours.index(lead) for lead in spec.leads_in]
        levels = [layout.levels.index(level) for level in spec.levels]
        upper = [layout.variables.index(name) for name in spec.variables]
        ground = [layout.surface.index(name) for name in spec.surface]
        pressure, surface = self.source.present(Part.FORECAST, date)
        surface = surface[:, leads][:, :, ground]
        for lead, variable in self.zeros:
            surface[:, lead, variable] = True
        return pressure[:, leads][:, :, upper][:, :, :, levels], surface

    def _first_gap(self, date: int) -> str:
        """Name the first missing field of a date, for a message."""
        for there, names in zip(self._inputs_present(date), (self.spec.variables, self.spec.surface), strict=True):
            if not there.all():
                return self._field_text(np.argwhere(~there)[0], names, date, np.arange(self.full_size)) + " is missing"
        return f"{iso(self.time(date))} has {len(self.available(date))} members"

    def target(self, part: Part, date: int) -> Fields:
        """Read the truth, or the ensemble's mean or spread, at the predicted leads.

        If a member is withheld to stand for the truth, that member is returned as the truth.

        Returns:
            Fields (T_out, V, Z, Y, X) and (T_out, S, Y, X) float32, NaN where absent.
        """
        if part is Part.TRUTH and (withheld := self.withheld(date)) is not None:
            fields = self.forecast(date, [withheld], strict=False, leads=self.spec.leads_out)
        else:
            fields = self._read(part, date)
        return Fields(fields.pressure[0], fields.surface[0])

    def time(self, date: int) -> np.datetime64:
        """Return the init time of a date, given by its index."""
        return self.source.layout.init_time[date]

    def selection(
        self, part: Part, members: Sequence[int] | np.ndarray | None = None, leads: tuple[int, ...] | None = None
    ) -> Selection:
        """Return what is read of a part of a date: all members and the leads of the model, unless others are given.

        Columns are not included, because they are cut after reading.
        """
        spec, (rows, _) = self.spec, self.window
        numbers = None if members is None else tuple(self.source.layout.realization[p] for p in members)
        leads = leads or (spec.leads_in if part is Part.FORECAST else spec.leads_out)
        return Selection(
            numbers, leads, spec.variables, spec.levels, spec.surface,
            None if rows == (0, len(spec.latitude)) else rows,
        )  # fmt: skip

    def _read(
        self, part: Part, date: int, members: np.ndarray | None = None, leads: tuple[int, ...] | None = None
    ) -> Fields:
        """Read a part of one date within the window."""
        fields = self.source.read(part, int(date), self.selection(part, members, leads))
        columns = self.window[1]
        if columns != (0, len(self.spec.longitude)):
            fields = Fields(*(np.ascontiguousarray(v[..., slice(*columns)]) for v in (fields.pressure, fields.surface)))
        if part is Part.FORECAST:
            hours = leads or self.spec.leads_in
            # Accumulated variables need not be stored at lead zero, where they are zero by definition.
            for lead, variable in self.zeros:
                if self.spec.leads_in[lead] in hours:
                    fields.surface[:, hours.index(self.spec.leads_in[lead]), variable] = 0
        return fields

    def reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and spread over the members (M, ...).

        If the model has masked variables, each point uses the members that have a value there.
        """
        return masked_mean_and_spread(values) if self.spec.masked else mean_and_spread(values)

    def reduced(self, members: Fields) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and spread over the members (M, ...), with all variables and levels on one axis: (T, F, Y, X)."""
        pairs = zip(self.reduce(members.pressure), self.reduce(members.surface), strict=True)
        mean, spread = (Fields(*pair).joined() for pair in pairs)
        return mean, spread

    def _check_finite(self, fields: Fields, date: int, positions: np.ndarray) -> None:
        """Raise a UserError if any member's field holds NaN or infinity that no mask allows."""
        both = (fields.pressure, self.spec.variables), (fields.surface, self.spec.surface)
        # A part of the grid may be all land, so a masked field may have no value there at all.
        part = self.window != ((0, len(self.spec.latitude)), (0, len(self.spec.longitude)))
        for (values, names), masked in zip(both, self._masked, strict=True):
            # The sum of a field is finite exactly if all its values are, because float64 sums of float32 cannot
            # overflow. This needs no array of booleans.
            good = np.isfinite(values.sum(axis=(-2, -1), dtype=np.float64))
            for place in np.argwhere(~good & masked.reshape(-1, *[1] * (values.ndim - 5))).tolist():
                field = values[tuple(place)]
                good[tuple(place)] = (part or np.isfinite(field).any()) and not np.isinf(field).any()
            self.refuse(good, names, date, positions)

    def refuse(self, good: np.ndarray, names: tuple[str, ...], date: int, positions: np.ndarray) -> None:
        """Raise a UserError that names the first field that is not good.

        Args:
            good: bool (M, T, V, Z) or (M, T, S), False for a field that is missing or has a value that is not allowed.
            names: Names of the variables along the third axis.
            date: Index of the init time.
            positions: (M,) positions of the members.
        """
        if good.all():
            return
        what = self._field_text(np.argwhere(~good)[0], names, date, positions)
        raise UserError(
            f"{self.source.path}: {what}, is missing or holds NaN or infinite values;"
            " leave the date or the variable out"
        )

    def _field_text(self, place: np.ndarray, names: tuple[str, ...], date: int, positions: np.ndarray) -> str:
        """Name one field for a message."""
        member, lead, variable, *level = place
        where = f" at {self.spec.levels[level[0]]} hPa" if level else ""
        number = self.source.layout.realization[positions[member]]
        return f"{names[variable]}{where} of {iso(self.time(date))} +{self.spec.leads_in[lead]} h, member {number}"


def iso(time: np.datetime64) -> str:
    """Format an init time as YYYY-MM-DDTHH:MM."""
    return str(time.astype("datetime64[m]"))


def day_of_year(time: np.datetime64) -> int:
    """Return the day of the year of an init time, 1 on the first of January."""
    return int((time.astype("datetime64[D]") - time.astype("datetime64[Y]")).astype(int)) + 1


def mean_and_spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and sample standard deviation of members (M, ...) without missing values, (...) float32.

    The standard deviation has ddof = 1; it is zero for one member. Sums are computed in float64 and in two passes,
    because values may be large compared with their spread: geopotential is 500 times its spread.
    """
    count = len(values)
    mean = values.sum(axis=0, dtype=np.float64)
    mean /= count
    squares = np.zeros_like(mean)
    for member in values if count > 1 else ():
        squares += _square(member - mean)
    squares /= max(1, count - 1)
    return mean.astype(np.float32), np.sqrt(squares, out=squares).astype(np.float32)


def _square(values: np.ndarray) -> np.ndarray:
    """Square an array in place."""
    values *= values
    return values


def masked_mean_and_spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and sample standard deviation of the members (M, ...) that are not NaN at each point, (...) float32.

    A point without any value is NaN; the standard deviation of a single value is zero. Members are added one at a time,
    so no temporary array of all members is made.
    """
    count = np.zeros(values.shape[1:], np.int32)
    for member in values:
        count += np.isfinite(member)
    # Without gaps, which is the common case, the result is bit for bit that of `mean_and_spread`.
    if (count == len(values)).all():
        return mean_and_spread(values)
    mean = np.zeros(values.shape[1:])
    for member in values:
        np.add(mean, member, out=mean, where=np.isfinite(member))
    mean /= np.maximum(count, 1)
    squares = np.zeros_like(mean)
    for member in values:
        np.add(squares, _square(member - mean), out=squares, where=np.isfinite(member))
    squares /= np.maximum(count - 1, 1)
    np.sqrt(squares, out=squares)
    mean[count == 0] = squares[count == 0] = np.nan
    return mean.astype(np.float32), squares.astype(np.float32)
