"""Ask ecCodes about one GRIB message (its variable, level, member, lead, packing and grid), and unpack its integers.

ecCodes is asked once for each kind of message (see `data_prep.grib_sections`), which keeps indexing an archive fast.

The integers and bitmaps of messages in simple packing are unpacked with NumPy. Integers of n bits follow each other
without gaps, most significant bit first (data template 7.0). Integers of 8 and 16 bits are read as a view, those of 24
are copied. Of other widths, 8 / gcd(n, 8) neighbouring integers form a group of whole octets. The k-th integers of all
groups need the same shift, so they are unpacked together, by a few NumPy operations on whole arrays.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from data_prep.geometry import gaussian_latitudes, reduced_grid, spread_rows
from data_prep.grib_fields import (
    GUST_HOURS,
    UNSTATED_SUBCENTRES,
    Get,
    is_control,
    is_single_run,
    method_of,
    on_its_level,
    why_left_out,
)
from data_prep.grib_sections import Header
from data_prep.records import CONTROL, FIELD_INDEX, MEMBER, SINGLE, Origin
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, Field, by_param_id
from ensemble_ml.grid import TOLERANCE, Grid, canonical
from ensemble_ml.units import GRAVITY, unit_conversion

MOST_BITS = 24  # most bits of an integer that `unpack` reads
_MOST_POINTS = 1 << 17  # along one axis
_HOURS = {"": 1.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600, "D": 24.0}  # of each unit of a step
_UNSTATED = Origin()
_GRIDS = ("regular_ll", "reduced_gg", "regular_gg")  # the grid types that are read
_ROW_LENGTHS = "pl"  # key of the number of points of each row of a reduced grid
_ONE_RUN = ("oper", "scda", "dcda", "lwda", "wave", "scwv")  # MARS streams of deterministic runs
# MARS splits one ensemble into several streams: its waves, the overlapping part of its last days, older hindcasts.
_SAME_ENSEMBLE = {"waef": "enfo", "efov": "enfo", "enwh": "enfh", "efhc": "enfh"}
_sinks: list[Any] = []  # files for the messages of the C library, which writes to the last one


@dataclass(frozen=True)
class Kind:
    """The properties that all messages with the same header key have in common.

    `row` holds columns of RECORD; level, member and leads are replaced where a message's header states them. It is None
    if the message is not read; `name` then goes to the log. Decoded values are brought to the registry's units by value
    * factor + shift. `decimal_scale` is GRIB's D. `method` is the mean, maximum or minimum over time that the field is,
    empty for an instantaneous value or a sum. `origin` states the producer. `hours` is the length of the interval that
    the parameter implies, where a message states none; 0 if it implies none.
    """

    row: dict[str, Any] | None
    scan: Scan | None
    name: str
    decimal_scale: int = 0
    factor: float = 1.0
    shift: float = 0.0
    method: str = ""
    origin: Origin = _UNSTATED
    hours: int = 0


@dataclass(frozen=True)
class Scan:
    """The order in which a message stores the points of its grid.

    `latitude` and `longitude` are (first, last, number of points) in degrees, in the message's order. `counts` is the
    number of points of each row of a Gaussian grid, and empty for other grids.
    """

    latitude: tuple[float, float, int]
    longitude: tuple[float, float, int]
    westwards: bool = False
    by_columns: bool = False
    counts: tuple[int, ...] = ()

    @property
    def points(self) -> int:
        """Return the number of points."""
        return sum(self.counts) or self.latitude[2] * self.longitude[2]


@dataclass(frozen=True, eq=False)
class Place:
    """A grid, with the mapping from a message's order of points to the program's.

    Only Gaussian grids need index arrays. `shift` is the number of columns that come before the program's first column
    if a row of the message is read from west to east.
    """

    scan: Scan
    grid: Grid
    southwards: bool
    shift: int

    @property
    def by_rows(self) -> bool:
        """Return whether a band of rows can be read alone: on Gaussian grids and by columns it cannot."""
        return not (self.scan.by_columns or self.scan.counts)

    @property
    def straight(self) -> bool:
        """Return whether the message's order of points is the program's."""
        return self.southwards and not (self.shift or self.scan.westwards) and self.by_rows

    def stretch(self, rows: slice) -> tuple[int, int]:
        """Return the first and last row (exclusive) of a band, counted in the message's order."""
        height = self.grid.shape[0]
        return (rows.start, rows.stop) if self.southwards else (height - rows.stop, height - rows.start)

    def put(self, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write rows of a message into `out`, with a single copy, or two on Gaussian grids. Return `out`.

        `values` are points in the message's order, `out` (rows, X) is in the program's. If `by_rows` is false, the rows
        have to be those of the whole grid.
        """
        if self.scan.counts:
            rows = spread_rows(values, np.array(self.scan.counts), np.empty(self.grid.shape, values.dtype))
            out[...] = rows if self.southwards else rows[::-1]
            return out
        columns = self.grid.shape[1]
        lines = values.reshape(columns, -1).T if self.scan.by_columns else values.reshape(-1, columns)
        lines = lines[:: 1 if self.southwards else -1, :: -1 if self.scan.westwards else 1]
        if self.shift:
            out[:, : columns - self.shift], out[:, columns - self.shift :] = (
                lines[:, self.shift :], lines[:, : self.shift],
            )  # fmt: skip
        else:
            out[...] = lines
        return out


@lru_cache(64)
def place_of(scan: Scan) -> Place:
    """Return the grid and the point order that a scan describes.

    Raises:
        UserError: the grid cannot be read.
    """
    if scan.counts:
        south = scan.latitude[1] < scan.latitude[0]
        ends = gaussian_latitudes(len(scan.counts))[[0, -1] if south else [-1, 0]]
        whole = len(scan.counts) == scan.latitude[2] and min(scan.counts) > 0 and abs(scan.longitude[0]) < TOLERANCE
        if not whole or np.abs(ends - scan.latitude[:2]).max() > TOLERANCE or scan.westwards or scan.by_columns:
            raise UserError("a part of a Gaussian grid, or one that is turned; only whole ones are read")
        return Place(scan, reduced_grid(scan.counts[:: 1 if south else -1]), south, 0)
    south, west = scan.latitude[1] < scan.latitude[0] or scan.latitude[2] == 1, scan.westwards
    first, last = (scan.longitude[1], scan.longitude[0]) if west else scan.longitude[:2]
    latitude = np.round(np.linspace(*scan.latitude), 9)
    longitude = np.round(np.linspace(first, last + (360 if last < first else 0), scan.longitude[2]), 9)
    grid, _, columns = canonical(latitude, longitude)
    if len(columns) != len(longitude):
        raise UserError("the first and the last column are one meridian; leave one of them out (cdo sellonlatbox)")
    shift = int(columns[0])
    assert np.array_equal(columns, np.roll(np.arange(len(columns)), -shift))
    return Place(scan, grid, south, shift)


def eccodes_module() -> Any:
    """Return the ecCodes package, which is loaded when the first GRIB file is met.

    Raises:
        UserError: it is not installed.
    """
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # the wheel raises RuntimeError if its C library is missing
        raise UserError(f"GRIB: ecCodes cannot be loaded ({error}); pip install 'ensemble-ml[grib]'") from error
    if not _sinks:
        _keep_quiet()
    return eccodes


def _keep_quiet() -> None:
    """Keep the messages of the C library off the terminal; the exceptions contain what matters in them."""
    from gribapi import gribapi

    sink = open(os.devnull, "w")  # noqa: SIM115 - the library keeps it
    gribapi.lib.grib_context_set_logging_file(gribapi.lib.grib_context_get_default(), sink)
    _sinks.append(sink)


@contextlib.contextmanager
def opened(message: bytes, where: str = "") -> Iterator[int]:
    """Open a message with ecCodes for the duration of a `with` block; error messages begin with `where`.

    Raises:
        UserError: ecCodes cannot read or decode the message.
    """
    codes = eccodes_module()
    prefix = f"{where}: " if where else ""
    try:
        handle = codes.codes_new_from_message(message)
    except codes.CodesInternalError as error:
        raise UserError(f"{prefix}ecCodes cannot read it ({error}); the file is damaged, fetch it again") from error
    try:
        yield handle
    except codes.CodesInternalError as error:
        raise UserError(f"{prefix}ecCodes cannot decode it ({error}); the file is damaged, fetch it again") from error
    finally:
        codes.codes_release(handle)


def ask(message: bytes, head: Header) -> tuple[Kind, Header]:
    """Return ecCodes' description of a message, and its header with the values that ecCodes reads.

    The caller compares the two headers. If they differ, the program's own parser does not understand messages of this
    kind.

    Raises:
        UserError: the message is damaged, or of a kind that is refused.
    """
    codes = eccodes_module()
    with opened(message) as handle, _understood():

        def get(key: str, default: Any = None, kind: type | None = None) -> Any:
            try:
                if key == _ROW_LENGTHS:
                    return tuple(codes.codes_get_array(handle, key).tolist())
                return codes.codes_get(handle, key, kind)
            except codes.KeyValueNotFoundError:
                return default

        said = replace(head, init=_init(get("dataDate"), get("dataTime")))
        if get("packingType") == "grid_simple":
            constants = get("referenceValue"), get("binaryScaleFactor"), get("offsetBeforeData")
            said = replace(said, reference=float(constants[0]), binary_scale=int(constants[1]), data=int(constants[2]))
        kind = _kind(get)
        if kind.row is not None:
            row = kind.row
            said = replace(
                said,
                level=None if head.level is None else row["level"],
                member=None if head.member is None else row["member"],
                steps=None if head.steps is None else (row["lead_start"], row["lead"]),
            )
        return kind, said


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Turn errors from missing keys, or keys of an unexpected type, into a UserError: the header makes no sense."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise UserError(f"its header makes no sense ({error}); the file is damaged, fetch it again") from error


def _init(date: int, time: int) -> np.datetime64:
    """Return the init time from ecCodes' dataDate (YYYYMMDD) and dataTime (HHMM)."""
    try:
        day = np.datetime64(f"{date // 10000:04d}-{date // 100 % 100:02d}-{date % 100:02d}", "s")
    except ValueError as error:
        raise UserError(f"date {date}: is none; the file is damaged, fetch it again") from error
    if date < 10000:  # year 0: the message holds a climate, of no year
        raise UserError(f"date {date}: is none; give forecasts, which start on a date")
    return day + np.timedelta64(time // 100 * 60 + time % 100, "m")


def _kind(get: Get) -> Kind:
    """Return the kind of a message: its columns of RECORD, or the reason why it is not read."""
    name, known = f"{get('paramId')} ({get('shortName')}, {get('typeOfLevel')})", by_param_id(get("paramId"))
    if known is None:
        return Kind(None, None, name)
    if reason := why_left_out(get, known):
        return Kind(None, None, f"{name}, {reason}")
    placed = _field_and_level(known, str(get("typeOfLevel")), get("level", 0))
    if placed is None:
        return Kind(None, None, f"{name}, at level {get('level')} of that kind")
    index, level = placed
    if get("gridType") not in _GRIDS:
        raise UserError(
            f"{get('shortName')}: grid type {get('gridType')}; only regular latitude-longitude grids (regular_ll) and "
            "Gaussian ones are read: interpolate first, e.g. in MARS with grid=0.5/0.5 or with cdo remapbil"
        )
    factor, shift = _conversion(index, get("units"), get("paramId"))
    start, end, bounded = _steps(str(get("stepRange", kind=str)))
    if other := _other_end(get, end):
        return Kind(None, None, f"{name}, {other}")
    scan, bits, packing = _scan(get), get("bitsPerValue"), get("packingType")
    points = scan.points
    bitmap = bool(get("bitmapPresent"))
    whole = get("numberOfDataPoints") == points and (bitmap or get("numberOfValues") == points)
    # ecCodes counts the points of a Gaussian grid of edition 1 by its values, which are cut off here. Their number is
    # checked with the size of each message.
    if not whole and not (scan.counts and get("edition") == 1):
        raise UserError(f"{get('shortName')}: its grid and its number of values do not agree; fetch the file again")
    member = get("number", get("perturbationNumber"))
    row = {
        "field": index,
        "level": level,
        "kind": CONTROL if is_control(get) else SINGLE if is_single_run(get) else MEMBER,
        "member": 0 if member is None else member,
        "numbered": _numbered(get, member),
        "lead_start": start,
        "lead": end,
        "bounded": bounded,
        "bits": bits,
        "masked": get("missingValueManagementUsed", 0) in (1, 2),  # complex packing itself marks points without a value
        "simple": packing == "grid_simple" and bits <= MOST_BITS and get("unitsFactor", 1.0) == 1.0,
    }
    absent = [key for key, value in row.items() if not isinstance(value, int)]
    if absent:
        raise UserError(
            f"{get('shortName')}: its header lacks {', '.join(absent)}; the file is damaged, fetch it again"
        )
    hours = GUST_HOURS.get(get("paramId"), 0)
    said = method_of(get) or ("maximum" if hours else "")
    return Kind(row, scan, name, get("decimalScaleFactor", 0), factor, shift, said, _origin(get), hours)


def _other_end(get: Get, end: int) -> str:
    """Return how the stated end of an interval contradicts its start and length; empty if it agrees or is not stated.

    Edition 2 states the end of an interval as a date, too.
    """
    if get("yearOfEndOfOverallTimeInterval", 0) in (0, 0xFFFF):
        return ""
    wanted = _init(get("dataDate"), get("dataTime")) + np.timedelta64(end, "h")
    stated = _init(get("validityDate"), get("validityTime"))
    return "" if stated == wanted else f"over an interval that ends at {stated} by its date, at {wanted} by its length"


def _origin(get: Get) -> Origin:
    """Return the producer of a message as its keys state it.

    The streams of deterministic runs name no ensemble, because a control may be a run of its own.
    """
    centre, label, experiment = (str(get(key) or "") for key in ("centre", "class", "expver"))
    subcentre = str(get("subCentre", ""))
    subcentre = "" if subcentre in UNSTATED_SUBCENTRES else subcentre
    stream, system = str(get("stream") or ""), get("systemNumber") or get("system")
    if stream in _ONE_RUN:
        ensemble = ""
    else:
        # Hindcasts of one date are made anew with each version of the model. ECMWF states its date as `referenceDate`.
        model = get("modelVersionDate") or get("referenceDate")
        named = (("", _SAME_ENSEMBLE.get(stream, stream)), ("system ", system), ("model ", model))
        ensemble = " ".join(f"{what}{code}" for what, code in named if code)
    return Origin(centre, subcentre, label, experiment, ensemble=ensemble)


def _numbered(get: Get, member: int | None) -> bool:
    """Return whether a message states that it is a member.

    In edition 1, ECMWF's section 1 has an octet for the member in any stream. In those of single runs, 0 says nothing.
    """
    stated = member is not None and (get("edition") != 1 or get("stream", None) not in _ONE_RUN)
    return get("dataType") in ("cf", "pf") or bool(member) or stated


def _field_and_level(field: Field, level_type: str, level: int) -> tuple[int, int] | None:
    """Return the position in FIELDS and the level in hPa of a variable, or None if the registry has none there."""
    # ECMWF encodes the orography as geopotential of the surface.
    if field.name == "z" and on_its_level(FIELDS[FIELD_INDEX["orog"]], level_type, level):
        return FIELD_INDEX["orog"], 0
    if not on_its_level(field, level_type, level):
        return None
    if field.static or field.surface:
        return FIELD_INDEX[field.name], 0
    if level_type == "isobaricInPa" and level % 100:
        return None
    return FIELD_INDEX[field.name], level if level_type == "isobaricInhPa" else level // 100


def _conversion(index: int, units: str, number: int) -> tuple[float, float]:
    """Return factor and shift from the units of a message to those of the registry."""
    field = FIELDS[index]
    if field.name == "orog" and number == 129:
        return 1 / GRAVITY, 0.0
    try:
        return unit_conversion(units, field.units)
    except UserError as error:
        raise UserError(f"{field.name}: {error}") from error


def _steps(text: str) -> tuple[int, int, bool]:
    """Return the first and last hour of a step range such as `48`, `69-72` or `0m-60m`, and whether it is a range."""
    hours = []
    for part in text.split("-"):
        match = re.fullmatch(r"(\d+)([a-zA-Z]?)", part)
        if match is None or match[2] not in _HOURS:
            raise UserError(f"step {text}: not understood; hours, or a range of hours, are read")
        hours.append(round(int(match[1]) * _HOURS[match[2]], 6))
    if any(hour % 1 for hour in hours):
        raise UserError(f"step {text}: only whole hours are read")
    return int(hours[0]), int(hours[-1]), len(hours) == 2


def _scan(get: Get) -> Scan:
    """Return how a message scans its grid."""
    latitude = [get(f"latitudeOf{which}GridPointInDegrees") for which in ("First", "Last")]
    longitude = [get(f"longitudeOf{which}GridPointInDegrees") for which in ("First", "Last")]
    if get("alternativeRowScanning", 0):  # ecCodes states no coordinates of points for these
        remedy = "rewrite it with grib_set -s swapScanningAlternativeRows=1"
        raise UserError(f"{get('shortName')}: each second row is scanned the other way, which is not read; {remedy}")
    westwards, by_columns = (bool(get(name, 0)) for name in ("iScansNegatively", "jPointsAreConsecutive"))
    counts = get(_ROW_LENGTHS, ()) if get("gridType") == "reduced_gg" else ()
    size = get("Nj"), max(counts, default=get("Ni"))
    if not all(isinstance(count, int) and 0 < count <= _MOST_POINTS for count in size):
        raise UserError(f"{get('shortName')}: a grid of {size[0]} x {size[1]} points; the file is damaged")
    if get("gridType") == "regular_gg":
        counts = (size[1],) * size[0]
    scan = Scan((*latitude, size[0]), (*longitude, size[1]), westwards, by_columns, counts)
    place_of(scan)  # refuses a grid that cannot be read
    return scan


def packed_size(points: int, bits: int) -> int:
    """Return the number of octets that `points` integers of `bits` bits take."""
    return (points * bits + 7) // 8


def unpack(octets: np.ndarray, bits: int, points: int) -> np.ndarray:
    """Unpack unsigned integers of 1 to 24 bits from the `packed_size(points, bits)` octets that hold them.

    Returns:
        (points,). 16 bits are a big-endian view of `octets`, 8 bits are `octets` themselves; other widths below 16 are
        uint16, and above 16 uint32 (big-endian for 24).
    """
    if bits == 16:
        return octets[: 2 * points].view(">u2")
    if bits == 8:
        return octets[:points]
    if bits == 24:
        wide = np.zeros((points, 4), np.uint8)
        wide[:, 1:] = octets[: 3 * points].reshape(-1, 3)
        return wide.reshape(-1).view(">u4")
    members = 8 // math.gcd(bits, 8)  # integers of a group
    width = members * bits // 8  # octets of a group
    groups = -(-points // members)
    padded = np.zeros(groups * width, np.uint8)  # the last group may be incomplete
    padded[: len(octets)] = octets
    out = np.empty((groups, members), np.uint16 if bits <= 16 else np.uint32)
    for place in range(members):
        first, shift = divmod(place * bits, 8)
        value = np.zeros(groups, np.uint32)
        used = (shift + bits + 7) // 8  # at most four octets
        for octet in range(used):
            value <<= 8
            value |= padded[first + octet :: width]
        value >>= used * 8 - bits - shift
        value &= (1 << bits) - 1
        out[:, place] = value
    return out.reshape(-1)[:points]


def bitmap(octets: np.ndarray, points: int) -> np.ndarray:
    """Return which points have a value, (points,) bool, by the bits of a bitmap, most significant bit first."""
    return np.unpackbits(octets, count=points).view(bool)
