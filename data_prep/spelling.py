"""Parse names of data variables that state more than the quantity: a pressure level, a height, or the hours of a sum.

`geopotential_height_500hpa` and `z500` state a pressure level, `temperature_2m` a height, and `tp6` and
`total_precipitation_24hr` the hours of a sum. No standard covers these names; the patterns are those of public
archives.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Field, resolve

_HOURS = re.compile(r"(.+?)_?0*([1-9]\d{0,2})_?(?:h|hrs?|hours?)?")
_PRESSURE = re.compile(r"(.+?)_?(\d{1,4})_?(?:hpa|mb|mbar|millibars?)", re.IGNORECASE)
_HEIGHT_BEHIND = re.compile(r"(.+?)_?(\d{1,3}(?:\.\d+)?)_?m")
_HEIGHT_BEFORE = re.compile(r"(\d{1,3}(?:\.\d+)?)_?m_(.+)")
_NUMBER = re.compile(r"([A-Za-z_]+?)_?(\d{2,4})")
# A bare number after a name is taken for a level only if models commonly have that level: u80 is wind at 80 m.
_LEVELS = {50, 70, 100, 125, 150, 175, *range(200, 451, 50), *range(500, 751, 50), *range(775, 1001, 25)}
_MASTS = 300  # up to here a bare number may also be the height of a mast in m
_CERTAIN = 600  # from here on a bare number is certainly a pressure in hPa: no mast is that high
_WORDS = {  # patterns of longer numbers come before those that are their ends
    r"twenty[\s-]four": 24, r"thirty[\s-]six": 36, r"forty[\s-]eight": 48, r"seventy[\s-]two": 72, "one": 1, "two": 2,
    "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "eighteen": 18,
}  # fmt: skip
_SUM = r"(?:\w+\s+)?(?:sums?|totals?|accum\w*|precip\w*|rain\w*)\b"
_AGO = r"\b(?:last|previous|past|preceding)\s+"
# Descriptions also mention days for other reasons, such as the range of a forecast. This pattern only matches days of a
# sum, and the next one hours of a sum.
_DAYS = re.compile(rf"(?:(\d{{1,2}})[\s-]*days?|\b(?:daily))[\s-]+{_SUM}|{_AGO}(?:(\d{{1,2}})\s+)?days?\b", re.I)
_OF_SUM = re.compile(
    rf"(\d{{1,3}})[\s-]*(?:hours?|hourly|hrs?|h)[\s-]+{_SUM}|{_AGO}(\d{{1,3}})[\s-]*(?:hours?|hrs?|h)\b", re.I
)
_IN_TEXT = re.compile(r"(\d{1,3})[\s-]*(?:hours?|hourly|hrs?|h)\b|\b(hourly|last hour|previous hour|past hour)\b", re.I)


@dataclass(frozen=True)
class Spelling:
    """The parts of a variable's name, used to find its quantity, level and interval.

    `field` is the registry's entry for the `stem`, or None if the registry does not know it. `level` is in hPa and
    `hours` is the length of a sum; both are 0 if the name does not state them. `height` is in m, or None if the name
    does not state it. `bare` marks a level that was written as a number without units.
    """

    stem: str
    field: Field | None
    level: int = 0
    height: float | None = None
    hours: int = 0
    bare: bool = False


def _known(name: str) -> Field | None:
    """Return the registry's entry for a name, or None if there is none."""
    try:
        return resolve(name)
    except UserError:
        return None


def spell(name: Hashable) -> Spelling:
    """Parse the name of a data variable. A name that the registry has is not divided, so `u10` has no level.

    The stem is the whole name if no pattern fits.
    """
    whole = str(name)
    if (field := _known(whole)) is not None:
        return Spelling(whole, field)
    if (parts := _HOURS.fullmatch(whole)) and (field := _known(parts[1])) is not None and field.accumulated:
        return Spelling(parts[1], field, hours=int(parts[2]))
    if parts := _PRESSURE.fullmatch(whole):
        return Spelling(parts[1], _known(parts[1]), level=int(parts[2]))
    if parts := _HEIGHT_BEHIND.fullmatch(whole):
        return Spelling(parts[1], _known(parts[1]), height=float(parts[2]))
    if parts := _HEIGHT_BEFORE.fullmatch(whole):
        return Spelling(parts[2], _known(parts[2]), height=float(parts[1]))
    if (parts := _NUMBER.fullmatch(whole)) and int(parts[2]) in _LEVELS:
        field = _known(parts[1])
        if field is not None and not field.surface and not field.static:
            return Spelling(parts[1], field, level=int(parts[2]), bare=True)
    return Spelling(whole, None)


def may_be_height(spelling: Spelling, names: Iterable[Hashable]) -> bool:
    """Return whether the bare number in a name may be a height: ECMWF's u100 is wind at 100 m, others' at 100 hPa.

    Geopotential is not given at heights. So if the file names geopotential with such a number, or levels that no mast
    reaches, its bare numbers are pressure levels. `names` are those of all variables of the file.
    """
    if not spelling.bare or spelling.level > _MASTS or _is_geopotential(spelling):
        return False
    others = [spell(name) for name in names]
    return not any(one.bare and (one.level >= _CERTAIN or _is_geopotential(one)) for one in others)


def _is_geopotential(spelling: Spelling) -> bool:
    """Return whether the name is that of geopotential."""
    return spelling.field is not None and spelling.field.name == "z"


def hours_in_text(text: str, *, remark: bool = False) -> set[int]:
    """Return the hours that a description of a sum names, e.g. "in the last six hours", "daily total".

    If the text may mention hours for other reasons (`remark`), only those count that clearly belong to a sum.
    """
    for word, number in _WORDS.items():
        text = re.sub(rf"\b{word}(?=[\s-]*(?:hour|day))", str(number), text, flags=re.I)
    hours = set()
    # At most one group of a match holds a number. If none does ("hourly", "last hour", "daily"), the number is 1.
    for numbers in (_OF_SUM if remark else _IN_TEXT).findall(text):
        hours.add(int(next(filter(str.isdigit, numbers), 1)))
    for numbers in _DAYS.findall(text):
        hours.add(24 * int(next(filter(str.isdigit, numbers), 1)))
    return hours - {0}
