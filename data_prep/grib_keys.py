"""What ecCodes says of a GRIB message: variable, level, member, lead, packing and grid.

Asked once for each kind of message (see `data_prep.grib_sections`), which keeps the index of an archive fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.grib_sections import Header
from data_prep.records import CONTROL, FIELD_INDEX, GRAVITY, MEMBER
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, by_param_id, unit_conversion
from ensemble_ml.grid import Grid, canonical

_HOURS = {"": 1.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600, "D": 24.0}
_stderr_lock = threading.Lock()

Get = Callable[..., Any]  # key, default, type -> value of a key of one message


@dataclass(frozen=True)
class Kind:
    """What all messages with the same header key have in common.

    `row` holds the columns of RECORD that do not change; it is None where the registry does not know the variable,
    whose `name` is then for the log. value * factor + shift is in the registry's units.
    """

    row: dict[str, Any] | None
    name: str
    decimal_scale: int = 0
    factor: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, eq=False)
class Place:
    """A grid as one kind of message scans it."""

    grid: Grid
    rows: np.ndarray
    columns: np.ndarray
    plain: bool  # already in the program's order

    def ordered(self, values: np.ndarray) -> np.ndarray:
        values = values.reshape(self.grid.shape)
        return values if self.plain else values[self.rows[:, None], self.columns]


places: list[Place] = []  # all that this process has met
_numbers: dict[str, int] = {}  # MD5 of a grid section -> position in `places`


def eccodes_module() -> Any:
    """The ecCodes package, loaded when the first GRIB file is met.

    Raises:
        UserError: it is not installed.
    """
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # the wheel raises RuntimeError where its C library is not found
        raise UserError(f"GRIB: ecCodes cannot be loaded ({error}); pip install 'ensemble-ml[grib]'") from error
    return eccodes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the C library's own complaints off the terminal: what matters in them is in the exception."""
    with _stderr_lock:
        sys.stderr.flush()
        saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            os.close(sink)


@contextlib.contextmanager
def opened(message: bytes, where: str = "") -> Iterator[int]:
    """A handle of ecCodes on one message; its errors become UserErrors that begin with `where`."""
    codes = eccodes_module()
    prefix = f"{where}: " if where else ""
    with _quiet():
        try:
            handle = codes.codes_new_from_message(message)
        except codes.CodesInternalError as error:
            raise UserError(f"{prefix}ecCodes cannot read it ({error}); the file is damaged, fetch it again") from error
        try:
            yield handle
        except codes.CodesInternalError as error:
            raise UserError(f"{prefix}ecCodes cannot decode it ({error})") from error
        finally:
            codes.codes_release(handle)


def ask(message: bytes, head: Header) -> tuple[Kind, Header]:
    """Let ecCodes describe a message; also return the header as it sees it."""
    codes = eccodes_module()
    with opened(message) as handle:

        def get(key: str, default: Any = None, kind: type | None = None) -> Any:
            try:
                return codes.codes_get(handle, key, kind)
            except codes.KeyValueNotFoundError:
                return default

        date, time = get("dataDate"), get("dataTime")
        init = np.datetime64(f"{date // 10000:04d}-{date // 100 % 100:02d}-{date % 100:02d}", "s")
        said = replace(head, init=init + np.timedelta64(time // 100 * 60 + time % 100, "m"))
        if get("packingType") == "grid_simple":
            constants = get("referenceValue"), get("binaryScaleFactor"), get("offsetBeforeData")
            said = replace(said, reference=constants[0], binary_scale=constants[1], data=constants[2])
        return _kind(get), said


def _kind(get: Get) -> Kind:
    name, level_type = f"{get('paramId')} ({get('shortName')}, {get('typeOfLevel')})", get("typeOfLevel")
    placed = _field_and_level(get("paramId"), level_type, get("level"))
    if placed is None:
        return Kind(None, name)
    index, level = placed
    if (get("gridType"), get("iScansNegatively"), get("jPointsAreConsecutive"), get("alternativeRowScanning", 0)) != (
        "regular_ll", 0, 0, 0,
    ):  # fmt: skip
        raise UserError(_grid_refusal(get))
    factor, shift = _conversion(index, get("units"), get("paramId"))
    start, end, bounded = _steps(str(get("stepRange", kind=str)))
    number = _place_number(get)
    bits = get("bitsPerValue")
    points = places[number].grid.shape[0] * places[number].grid.shape[1]
    simple = get("packingType") == "grid_simple" and not get("bitmapPresent") and bits <= 16
    row = {
        "field": index,
        "level": level,
        "kind": CONTROL if get("dataType") == "cf" else MEMBER,
        "member": get("number", get("perturbationNumber", 0)),
        "lead_start": start,
        "lead": end,
        "bounded": bounded,
        "place": number,
        "bits": bits,
        "simple": simple and get("numberOfValues") == points and get("unitsFactor", 1.0) == 1.0,
    }
    return Kind(row, name, get("decimalScaleFactor", 0), factor, shift)


def _grid_refusal(get: Get) -> str:
    if get("gridType") != "regular_ll":
        return (
            f"{get('shortName')}: grid type {get('gridType')}; only regular latitude-longitude grids (regular_ll) "
            "are read: interpolate first, e.g. in MARS with grid=0.5/0.5 or with cdo remapbil"
        )
    return f"{get('shortName')}: scanned westwards, by columns or in turns; only eastward rows are read"


def _field_and_level(number: int, level_type: str, level: int) -> tuple[int, int] | None:
    """Position in FIELDS and level in hPa of a parameter, or None where the registry does not know it there."""
    field = by_param_id(number)
    if field is None:
        return None
    if field.name == "z" and level_type in ("surface", "ground"):
        return FIELD_INDEX["orog"], 0
    pressure = level_type in ("isobaricInhPa", "isobaricInPa")
    if field.static or (field.surface and not pressure):
        return FIELD_INDEX[field.name], 0
    if field.surface or not pressure or (level_type == "isobaricInPa" and level % 100):
        return None
    return FIELD_INDEX[field.name], level if level_type == "isobaricInhPa" else level // 100


def _conversion(index: int, units: str, number: int) -> tuple[float, float]:
    field = FIELDS[index]
    if field.name == "orog" and number == 129:
        return 1 / GRAVITY, 0.0
    try:
        return unit_conversion(units, field.units)
    except UserError as error:
        raise UserError(f"{field.name}: {error}") from error


def _steps(text: str) -> tuple[int, int, bool]:
    """First and last hour of a step range such as `48`, `69-72` or `0m-90m`, and whether it is a range."""
    hours = []
    for part in text.split("-"):
        match = re.fullmatch(r"(\d+)([a-zA-Z]?)", part)
        if match is None or match[2] not in _HOURS:
            raise UserError(f"step {text}: not understood; hours, or a range of hours, are read")
        hours.append(round(int(match[1]) * _HOURS[match[2]], 6))
    if any(hour % 1 for hour in hours):
        raise UserError(f"step {text}: only whole hours are read")
    return int(hours[0]), int(hours[-1]), len(hours) == 2


def _place_number(get: Get) -> int:
    digest = get("md5GridSection")
    if digest not in _numbers:
        places.append(_place(get))
        _numbers[digest] = len(places) - 1
    return _numbers[digest]


def _place(get: Get) -> Place:
    first, last = (get(f"latitudeOf{which}GridPointInDegrees") for which in ("First", "Last"))
    west, east = (get(f"longitudeOf{which}GridPointInDegrees") for which in ("First", "Last"))
    latitude = np.round(np.linspace(first, last, get("Nj")), 9)
    longitude = np.round(np.linspace(west, east + (360 if east < west else 0), get("Ni")), 9)
    grid, rows, columns = canonical(latitude, longitude)
    plain = all(np.array_equal(index, np.arange(len(index))) for index in (rows, columns))
    return Place(grid, rows, columns, plain)
