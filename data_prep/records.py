"""A catalogue of two-dimensional fields: one row a field, whatever kind of file it lies in.

An archive of any format is read in two steps: a `Reader` for each file lists its fields as rows of `RECORD`, and later
hands out the values of chosen rows as `RawField`s. Everything in between (which fields are there, which are missing,
which verify which) is arithmetic on the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ensemble_ml.fields import FIELDS, Field
from ensemble_ml.grid import Grid
from ensemble_ml.store import native
from ensemble_ml.store.packing import dequantise
from ensemble_ml.wording import hour_text

if TYPE_CHECKING:
    from data_prep.file_index import FileIndex
    from data_prep.grib_io import Stamp

MEMBER, CONTROL = 0, 1
IF_ABSENT = (
    "if it is absent, prepare with gaps=mask or gaps=skip, which look for such fields beforehand (with restart=true,"
    " where start dates are built already); where an archive or a static file is read in place, leave the field out"
)
NO_MESSAGE = "that are no GRIB message"  # of bytes of a file: a message may be damaged there
OTHER_UNITS = "units "  # after a variable's name, why it is left out
MEMBER_TYPES = ("an", "fc", "cf", "pf")  # MARS types of a field of one run; all others are made of several, or no field
OF_STEP_TYPE = {"avg": "mean", "max": "maximum", "min": "minimum"}  # ecCodes' stepType -> CF's cell method
_SUMS = ("accum", "diff")  # over a range of steps
GEOPOTENTIAL_UNITS = ("m2 s-2", "m**2 s**-2", "m^2 s^-2", "m2/s2")

RECORD = np.dtype(
    [
        ("file", np.int32),  # position of the reader in the archive
        ("origin", np.int16),  # position in the origins of its file, in a catalogue in those of the archive
        ("field", np.int16),  # position in FIELDS
        ("level", np.int32),  # hPa; 0 at the surface
        ("kind", np.uint8),  # MEMBER or CONTROL
        ("member", np.int32),
        ("numbered", bool),  # whether the file states it; the member of a deterministic run is 0
        ("init", "datetime64[s]"),
        ("lead_start", np.int32),  # hours; below `lead` where the field is a sum or maximum over a range of steps
        ("lead", np.int32),  # hours; the end of the range
        ("bounded", bool),  # whether the file states lead_start
        ("offset", np.int64),  # GRIB: of the message in the file; else the flat index over the leading axes
        ("length", np.int64),
        ("place", np.int16),  # GRIB: position in the file's list of grids as they are scanned
        ("data", np.int32),  # offset of the packed integers in the message
        ("bitmap", np.int32),  # offset of the bitmap in the message, 0 where it has none
        ("stated", np.int32),  # number of values that the message states or has room for, -1 where it does neither
        ("spare", np.uint8),  # bits by which the values may fall short of it
        ("masked", bool),  # whether there may be points without a value
        ("bits", np.uint8),
        ("simple", bool),  # packed integers can be taken as they are: value = ((X * scale) + reference) * decimal
        ("reference", np.float64),  # where not simple: value = decoded * decimal + reference
        ("scale", np.float64),
        ("decimal", np.float64),
    ]
)
KEYS = ["field", "level", "kind", "member", "init", "lead_start", "lead"]
IDENTITY = np.dtype([(name, RECORD[name]) for name in (*KEYS, "bounded", "masked")])

FIELD_INDEX = {field.name: index for index, field in enumerate(FIELDS)}
IS_STATIC = np.array([field.static for field in FIELDS])
IS_SURFACE = np.array([field.surface for field in FIELDS])
IS_ACCUMULATED = np.array([field.accumulated for field in FIELDS])


class Origin(NamedTuple):
    """Who made a field, by the codes that files state; empty where they do not."""

    centre: str = ""
    label: str = ""  # MARS's class: operational, research, a reanalysis
    experiment: str = ""
    institution: str = ""  # of NetCDF, in words
    ensemble: str = ""  # which of a centre's ensembles: MARS's stream, the system of a seasonal forecast

    def differs(self, other: Origin, *, one_start: bool = False) -> bool:
        """Return whether both state something that is not the same.

        Args:
            one_start: whether fields of one start date are compared: those of different ensembles never go together
                then, while an archive's start dates may come from one ensemble after the other.
        """
        pairs = list(zip(self, other, strict=True))
        pairs = pairs if one_start else pairs[:-1]
        return any(mine and theirs and mine.casefold() != theirs.casefold() for mine, theirs in pairs)

    def __str__(self) -> str:
        named = zip(("centre", "class", "experiment", "institution", "ensemble"), self, strict=True)
        return ", ".join(f"{name} {code}" for name, code in named if code) or "no centre that is stated"


def identities(records: np.ndarray) -> np.ndarray:
    """What tells fields apart, without where they lie: (N,) IDENTITY, a third of RECORD. An archive has millions."""
    out = np.empty(len(records), IDENTITY)
    for name in out.dtype.names or ():
        out[name] = records[name]
    return out


@dataclass(frozen=True, eq=False)
class RawField:
    """One field in the program's order of rows and columns, as the file holds it.

    `values` (Y, X) are either packed integers (uint16, of this machine's order of bytes or of the file's), with value =
    ((X * scale) + reference) * decimal in double precision, or float32 values in the registry's units. `mask` (Y, X)
    bool is True where a point has no value (the integer is 0 there, the float NaN); None where every point has one.
    `step` is that of the packing which floats were decoded from, 0 where there was none or nobody knows it.
    """

    values: np.ndarray
    reference: float = 0.0
    scale: float = 1.0
    decimal: float = 1.0
    mask: np.ndarray | None = None
    step: float = 0.0

    @property
    def rounding(self) -> float:
        """By how much packing may have moved a value."""
        return abs(self.scale * self.decimal if self.packed else self.step) / 2

    @property
    def packed(self) -> bool:
        """Whether `values` are integers."""
        return self.values.dtype.kind == "u"

    @property
    def nothing(self) -> bool:
        """Whether no point has a value."""
        return self.mask is not None and bool(self.mask.all())

    def decode(self) -> np.ndarray:
        """Values (Y, X) float32, bit for bit those of ecCodes for simple packing; NaN where a point has none."""
        if not self.packed:
            return self.values
        factors = self.reference, self.scale, self.decimal
        exact, out = _exact_in_float32(*factors), np.empty(self.values.shape, np.float32)
        if not native.decode_field(self.values, factors, exact, out):
            dequantise(self.values, [np.array(part, np.float32 if exact else np.float64) for part in factors], out)
        if self.mask is not None:
            out[self.mask] = np.nan
        return out


def _exact_in_float32(reference: float, scale: float, decimal: float) -> bool:
    """`ensemble_ml.store.packing.exact_in_float32` of one field, without the cost of arrays."""
    if decimal != 1:
        return False
    mantissa, exponent = math.frexp(scale)
    normal = scale == 0 or (mantissa == 0.5 and -125 < exponent < 110)
    return normal and abs(reference) < 3e38 and float(np.float32(reference)) == reference


def other_step_type(kind: str, field: Field) -> str:
    """Why values of ecCodes' stepType `kind` are not those of a variable whose name they bear; empty where they may be.

    A deviation, range or trend over time is another quantity, and so are means over many analyses or forecasts.
    """
    if kind in OF_STEP_TYPE:
        return f"the {OF_STEP_TYPE[kind]} over time and not the sum" if field.accumulated else ""
    if kind in ("", "instant") or (field.accumulated and kind in _SUMS):
        return ""
    return f"of stepType {kind}"


class Reader(Protocol):
    """One file of an archive.

    `records` are RECORD rows in the file's own order, and `grid` is theirs (None where there are none); `skipped`
    counts the fields of variables that the registry does not know. `keyed` says whether other values make other records
    (by their packing constants), and `methods` which variables are a mean, maximum or minimum over time. `origins` are
    those that its records number. `stamp` is of before the file was indexed: what is read belongs to it.
    """

    keyed: bool
    methods: dict[str, str]
    origins: tuple[Origin, ...]
    path: str
    records: np.ndarray
    grid: Grid | None
    skipped: dict[str, int]
    stamp: Stamp

    def fields(
        self, records: np.ndarray, rows: slice | None = None, into: Sequence[np.ndarray] | None = None
    ) -> Iterator[RawField]:
        """Yield the values of `records`, in their order; threads may do so at the same time.

        `rows` (start, stop) is a band of latitudes, None takes all. Fields of packed integers are written to the arrays
        of `into` (rows, X) uint16, one a record, where they are given.
        """

    def empty(self, records: np.ndarray, index: FileIndex) -> np.ndarray:
        """Which of `records` hold no value though the file has a place for them, (N,) bool.

        It may take reading all of them; what was found is kept in `index`.
        """


def covers(rows: slice | None, grid: Grid | None) -> bool:
    """Whether a band of latitudes is all of them."""
    return rows is None or (grid is not None and (rows.start, rows.stop) == (0, grid.shape[0]))


def field_of(record: np.void) -> Field:
    """The registry's entry of a record."""
    return FIELDS[int(record["field"])]


def variable_text(field: Field, level: int) -> str:
    """A variable as messages show it, e.g. `t at 500 hPa`."""
    return field.name if field.surface or field.static else f"{field.name} at {level} hPa"


def describe(record: np.void) -> str:
    """A record as messages show it, e.g. `t at 500 hPa, member 7, 2001-01-03T00, lead 48 h`."""
    member = "control" if record["kind"] == CONTROL else f"member {record['member']}"
    where = f"{member}, {hour_text(record['init'])}, lead {record['lead']} h"
    return f"{variable_text(field_of(record), int(record['level']))}, {where}"
