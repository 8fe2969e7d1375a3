"""Find the interval of each sum, mean or maximum over a range of steps, and combine fields into those that are wanted.

Sums that run from the start of the forecast become sums from one of the archive's lead times to the next: those up to
24 and 48 h become the sums over 0-24 and 24-48 h. The same is done for sums that begin anew every few hours: from 0-3,
0-6, 6-9 and 6-12 h, the sums over 3-6 and 9-12 h are made. Sums from the start are left out at lead 0. The intervals of
a truth are laid end to end to cover those of a forecast (`Tiles`).

Wind speed is computed from its components, member by member. Such a variable is added to the table of records only
(`with_derived`); its values are computed when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from itertools import pairwise

import numpy as np

from data_prep.records import FIELD_INDEX, IS_ACCUMULATED, KEYS, MEMBER, RawField
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, GUST, field

NO_INTERVAL = (
    "sums at lead 0 alone that state no interval; counted from the start of the forecast they would be zero; "
    "give their intervals (time bounds in NetCDF, or intervals={tp: HOURS}; a step range in GRIB)"
)
_FALL = 0.05  # fraction of its maximum by which a sum may fall from one lead to the next
_FALLING = 0.01  # fraction of the points that may fall by more
_ROUNDING = 0.004  # one packing step of 8 bits, as a fraction of the maximum
DERIVED = tuple(one.name for one in FIELDS if one.components)  # variables that are computed from two components
NONE = -1  # in place of the row of a second component, where the record is not derived


@dataclass(frozen=True)
class Interval:
    """The interval that a field covers, in hours after the init time.

    Attributes:
        start: first hour.
        end: last hour, which is the lead of the field.
        origin: hour from which the archive's field runs.
        previous: lead of the sum that runs from the same origin and is subtracted; None if nothing is subtracted.
    """

    start: int
    end: int
    origin: int
    previous: int | None = None


def not_at_lead_zero(records: np.ndarray) -> np.ndarray:
    """Return which records to keep, (N,) bool: all but sums from the start of the forecast at lead 0.

    Those are zero by definition. A sum over hours before the init time has a negative `lead_start`, and is kept.
    """
    return ~(IS_ACCUMULATED[records["field"]] & (records["lead"] == 0) & (records["lead_start"] >= 0))


def at_lead_zero_alone(records: np.ndarray) -> tuple[str, ...]:
    """Return the variables of which `not_at_lead_zero` leaves nothing, in the registry's order."""
    left = records["field"][not_at_lead_zero(records)]
    return tuple(FIELDS[index].name for index in np.setdiff1d(records["field"], left).tolist())


def from_start(records: np.ndarray) -> np.ndarray:
    """Return a copy of the records in which sums without a stated range run from the start of the forecast."""
    records = records.copy()
    records["lead_start"] = starts(records)
    return records


def uncut(records: np.ndarray, cuts: Mapping[str, Collection[int]]) -> np.ndarray:
    """Return which records are sums that end at none of the hours of `cuts`, (N,) bool.

    `cuts` holds, for a variable, the hours after the init time at which the intervals of its sums have to end. Other
    variables are not looked at.
    """
    out = np.zeros(len(records), bool)
    for name, hours in cuts.items():
        mine = records["field"] == FIELD_INDEX.get(name, -1)
        out |= mine & (records["lead_start"] < records["lead"]) & ~np.isin(records["lead"], list(hours))
    return out & IS_ACCUMULATED[records["field"]]


def starts(records: np.ndarray) -> np.ndarray:
    """Return the hour after the init time at which the range of each record begins, (N,) int32.

    A sum whose file states no range begins at the start of the forecast.
    """
    begin = records["lead_start"]
    open_sums = IS_ACCUMULATED[records["field"]] & ~records["bounded"]
    return np.where(open_sums, begin.dtype.type(0), begin)


def intervals(records: np.ndarray) -> dict[int, dict[int, Interval]]:
    """Return the interval of every field that has one: position in FIELDS -> lead in hours -> Interval.

    Members decide on the intervals; the control decides only for fields that no member has. A control with finer steps
    would otherwise define intervals that no member can fill.

    The sums among the `records` need a `lead_start` (see `from_start`).

    Raises:
        UserError: a variable has ranges of several lengths at one lead, or intervals at some leads and instantaneous
            values at others (except lead 0).
    """
    members = records["kind"] == MEMBER
    records = records[members | ~np.isin(records["field"], np.unique(records["field"][members]))]
    ranged = records[records["lead_start"] < records["lead"]]
    found: dict[int, dict[int, Interval]] = {}
    for index in np.unique(ranged["field"]).tolist():
        mine = ranged[ranged["field"] == index]
        pairs = np.unique(np.stack([mine["lead"], mine["lead_start"]], 1), axis=0).tolist()
        at_once = records["lead"][(records["field"] == index) & (records["lead_start"] == records["lead"])]
        both = np.intersect1d(mine["lead"], at_once)
        if len(both):
            raise UserError(
                f"{FIELDS[index].name}: at {both[0]} h the archive has instantaneous values and values of an interval;"
                " keep one kind"
            )
        # A maximum or mean at lead 0 covers no hours. Later, instantaneous values are another quantity.
        if (at_once > 0).any():
            raise UserError(
                f"{FIELDS[index].name}: at {at_once[at_once > 0].min()} h the archive has instantaneous values, at"
                f" {mine['lead'].min()} h values of an interval; keep one kind"
            )
        found[index] = _of_field(index, pairs)
    return found


def beside(records: np.ndarray, found: dict[int, dict[int, Interval]]) -> np.ndarray:
    """Return which records of a control are at leads where their variable has no interval, (N,) bool.

    Instantaneous values beside those of members, as maxima have at lead 0, are not among them.
    """
    out = np.zeros(len(records), bool)
    of_members = records["kind"] == MEMBER
    for index, by_lead in found.items():
        mine = records["field"] == index
        with_members = np.isin(records["lead"], records["lead"][mine & of_members])
        alike = with_members & (records["lead_start"] == records["lead"])
        out |= mine & ~of_members & ~alike & ~np.isin(records["lead"], list(by_lead))
    return out


def _of_field(index: int, pairs: list[list[int]]) -> dict[int, Interval]:
    """Return the interval at each lead of one field, by the ascending pairs (lead, start) of its ranges."""
    name = FIELDS[index].name
    leads = [lead for lead, _ in pairs]
    for lead in leads:
        if leads.count(lead) > 1:
            starts = [start for of, start in pairs if of == lead]
            raise UserError(
                f"{name}: steps {' and '.join(f'{start}-{lead}' for start in starts)} end at the same lead; "
                "keep one kind of range in the archive"
            )
    result: dict[int, Interval] = {}
    latest: dict[int, int] = {}  # start of a sum -> latest lead; some models begin new sums every few hours
    for lead, start in pairs:  # in ascending order of leads
        # Only sums can be subtracted from each other. A maximum over 0-48 h does not yield that over 24-48 h.
        previous = latest.get(start) if FIELDS[index].accumulated else None
        result[lead] = Interval(start if previous is None else previous, lead, start, previous)
        latest[start] = lead
    return result


def lead_bounds(
    names: tuple[str, ...], leads: tuple[int, ...], found: dict[int, dict[int, Interval]]
) -> dict[str, list[list[int] | None]]:
    """Return [first, last] hour for each lead of every variable over intervals, with None at leads that have none."""
    bounds: dict[str, list[list[int] | None]] = {}
    for index, by_lead in sorted(found.items()):
        if FIELDS[index].name in names:
            known = [by_lead.get(lead) for lead in leads]
            bounds[FIELDS[index].name] = [[one.start, one.end] if one else None for one in known]
    return bounds


def cut(leads: tuple[int, ...], found: dict[int, dict[int, Interval]]) -> dict[str, str]:
    """Describe variables over intervals for which `leads` skips intervals of the archive, before or between its leads.

    Sums are not put together over the skipped intervals, so the values at `leads` do not add up to the whole.

    Returns:
        The intervals at these leads by variable, e.g. "sums over 18-24, 42-48 h".
    """
    said = {}
    for index, by_lead in sorted(found.items()):
        kept = [(before, by_lead[lead]) for before, lead in pairwise((-1, *leads)) if lead in by_lead]
        if any(before < other <= one.start for before, one in kept for other in by_lead):
            spans = ", ".join(f"{one.start}-{one.end}" for _, one in kept)
            gusts = FIELDS[index].standard_name == GUST
            kind = "sums" if FIELDS[index].accumulated else "maxima" if gusts else "values"
            said[FIELDS[index].name] = f"{kind} over {spans} h"
    return said


class Tiles:
    """The intervals of a truth archive for one variable and level, which are laid end to end to cover longer ones.

    Args:
        records: (N,) records that differ only in time. Instantaneous ones among them are never taken.
        rows: (N,) their positions in the table of the catalogue.

    Attributes:
        stated: whether any record covers an interval.
    """

    def __init__(self, records: np.ndarray, rows: np.ndarray):
        hour = np.timedelta64(1, "h")
        self._ending: dict[np.datetime64, list[tuple[np.datetime64, int, int]]] = {}  # end -> (start, lead, row)
        for record, row in zip(records, rows.tolist(), strict=True):
            start, end = (record["init"] + int(record[key]) * hour for key in ("lead_start", "lead"))
            self._ending.setdefault(end, []).append((start, int(record["lead"]), row))
        self.stated = bool((records["lead_start"] < records["lead"]).any())

    def cover(self, start: np.datetime64, end: np.datetime64) -> tuple[int, ...]:
        """Return the rows whose intervals fill start to end without gap or overlap, in order of time.

        From the end backwards, the longest interval is taken that leaves a rest which can be filled; of equal
        intervals, the one of the shortest lead. The result is empty if no choice of intervals fills the whole.
        """
        # A search in depth, backwards from the end. An hour from which the start was not reached is not tried again.
        onward: dict[np.datetime64, tuple[int, np.datetime64]] = {}  # hour -> row of the interval from there, its end
        untried = [(end, -1, end)]
        while untried and start not in onward:
            begin, row, until = untried.pop()
            if begin in onward:
                continue
            onward[begin] = row, until
            # The preferred one comes last. Tuples compare by their start first and by their lead second.
            ending = sorted(self._ending.get(begin, []), reverse=True)
            untried += [(earlier, row, begin) for earlier, _, row in ending if start <= earlier < begin]
        rows: list[int] = []
        while start in onward and start < end:
            row, start = onward[start]
            rows.append(row)
        return tuple(rows)


class Combine(Enum):
    """The ways in which fields of the archive make a wanted field."""

    ONE = "one"
    DIFFERENCE = "difference"  # first minus second: an interval of a sum from the start (see `difference`)
    SUM = "sum"
    MAXIMUM = "maximum"
    SPEED = "speed"  # magnitude of a vector, from its two components


COMBINED: dict[Combine, Callable[[Iterable[np.ndarray]], np.ndarray]] = {  # each takes an iterator of fields (Y, X)
    Combine.SUM: partial(reduce, np.add),
    Combine.MAXIMUM: partial(reduce, np.maximum),
    Combine.SPEED: lambda parts: np.hypot(*parts),
}


def difference(later: RawField, earlier: RawField) -> np.ndarray:
    """Return the increase between two leads of a sum that runs from the init time, (Y, X) float64.

    Packing rounds both sums. A decrease, and an increase of at most half a packing step of each, count as zero;
    otherwise a dry interval would have values slightly below and above zero. Points without a value stay NaN.

    Raises:
        UserError: the sum falls noticeably at more than 1 % of the points, so it does not run from the init time.
    """
    first, second = (raw.decode().astype(np.float64) for raw in (later, earlier))
    now, before = np.maximum(first, 0), np.maximum(second, 0)
    falls = now < before - _FALL * _most(before) - _ROUNDING * _most(now)  # false at points without a value
    share = falls.sum() / max(1, np.isfinite(now + before).sum())
    if share > _FALLING:
        raise UserError(
            f"its sum is below that of the lead before at {share:.0%} of the points, so it does not run from the init"
            " time; state the interval of each sum (time bounds in NetCDF, or intervals={tp: HOURS};"
            " a step range in GRIB)"
        )
    more = first - second
    return np.where(more <= later.rounding + earlier.rounding, 0.0, more)


def _most(values: np.ndarray) -> float:
    """Return the largest finite value, at least 0."""
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def with_derived(records: np.ndarray, names: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add a record for every field of the variables `names` whose two components are present.

    A variable of which the archive has any field itself stays as it is: it is more exact than one computed from packed
    components. Its missing fields are not computed either.

    Args:
        records: (N,) RECORD or IDENTITY, sorted by `data_prep.records.KEYS`.
        names: variables that are wanted; those without components are ignored.

    Returns:
        Three arrays (N + K,), in which the K derived fields come last: the records; the row of `records` to which each
        belongs (for a derived field, that of its first component); and the row of its second component, or NONE.

    Raises:
        UserError: the registry has no variable of one of the names.
    """
    tables, rows = [records], [np.arange(len(records))]
    partners = [np.full(len(records), NONE)]
    for name in dict.fromkeys(names):
        if not field(name).components or (records["field"] == FIELD_INDEX[name]).any():
            continue
        first, second = (
            np.flatnonzero(records["field"] == FIELD_INDEX[component]) for component in field(name).components
        )
        first, second = _matched(records, first, second)
        made = records[first].copy()
        made["field"] = FIELD_INDEX[name]
        made["masked"] |= records["masked"][second]
        tables.append(made)
        rows.append(first)
        partners.append(second)
    return np.concatenate(tables), np.concatenate(rows), np.concatenate(partners)


def _matched(records: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of both components that agree in all keys but the variable."""
    keys = KEYS[1:]
    one, other = records[keys][first], records[keys][second]
    # In a complete archive both components come in the same order, because the table is sorted by its keys. Then the
    # costly search for common keys is not needed.
    if len(one) == len(other) and all((one[key] == other[key]).all() for key in keys):
        return first, second
    _, here, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return first[here], second[there]
