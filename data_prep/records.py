"""The table of all fields of an archive: one row for each two-dimensional field, whatever the file format.

An archive of any format is read in two steps. First, a `Reader` for each file lists its fields as rows of `RECORD`.
Later it reads the values of chosen rows as `RawField`s. All decisions in between need only the table: which fields are
present, which are missing, and which field of the truth verifies which field of the forecast.

The codes for kinds of data (`MEMBER_TYPES`, `OF_STEP_TYPE`) are those of ECMWF's MARS, as ecCodes spells them.
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
from ensemble_ml.wording import date_text

if TYPE_CHECKING:
    from data_prep.file_index import FileIndex
    from data_prep.grib_io import Stamp

MEMBER, CONTROL = 0, 1
SINGLE = 2  # ECMWF's deterministic run, until a catalogue decides whether it is a member or the control
IF_ABSENT = (
    "if it is absent, prepare with gaps=mask or gaps=skip, which look for such fields beforehand (with restart=true,"
    " where init times are built already); where an archive or a static file is read in place, leave the field out"
)
NO_MESSAGE = "that are no GRIB message"  # in `Reader.skipped`: marks bytes between messages, where one may be damaged
OTHER_UNITS = "units "  # in `Reader.skipped`: marks a variable that is left out for its units
MEMBER_TYPES = ("an", "fc", "cf", "pf")  # MARS types of a field of one run; other types combine several runs
OF_STEP_TYPE = {"avg": "mean", "max": "maximum", "min": "minimum"}  # ecCodes' stepType -> CF's cell method
_SUMS = ("accum", "diff")  # stepTypes of sums over a range of steps
GEOPOTENTIAL_UNITS = ("m2 s-2", "m**2 s**-2", "m^2 s^-2", "m2/s2")

RECORD = np.dtype(
    [
        ("file", np.int32),  # position of the reader in the archive
        ("origin", np.int16),  # position in the origins of the file; in a catalogue, in those of the whole archive
        ("field", np.int16),  # position in FIELDS
        ("level", np.int32),  # hPa; 0 at the surface
        ("kind", np.uint8),  # MEMBER or CONTROL; SINGLE before a catalogue has decided
        ("member", np.int32),
        ("numbered", bool),  # whether the file states the member; if not, `member` is 0
        ("init", "datetime64[s]"),
        ("lead_start", np.int32),  # hours; less than `lead` if the field covers a range of steps (sums, maxima)
        ("lead", np.int32),  # hours; the end of the range
        ("bounded", bool),  # whether the file states lead_start
        ("offset", np.int64),  # GRIB: offset of the message in the file; else the flat index over the leading axes
        ("length", np.int64),
        ("place", np.int16),  # GRIB: position in the file's list of scanned grids
        ("data", np.int32),  # offset of the packed integers in the message
        ("bitmap", np.int32),  # offset of the bitmap in the message, 0 if it has none
        ("stated", np.int32),  # number of packed values, as stated or computed from their size; -1 if unknown
        ("spare", np.uint8),  # most unused bits after the last value, which may make `stated` too large
        ("masked", bool),  # whether there may be points without a value
        ("bits", np.uint8),
        ("simple", bool),  # packed integers can be taken as they are: value = ((X * scale) + reference) * decimal
        ("reference", np.float64),  # if not simple: value = decoded * decimal + reference
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
    """The producer of a field, by the codes that files state; a part that a file does not state is empty.

    Fields of different origins must not be mixed into one ensemble, so the catalogue compares them.
    """

    centre: str = ""
    subcentre: str = ""  # a number that the centre assigns; NCEP's ensemble products have one of their own
    label: str = ""  # MARS's class: operational, research, a reanalysis
    experiment: str = ""
    institution: str = ""  # an attribute of NetCDF, in words
    ensemble: str = ""  # one of the centre's ensembles: MARS's stream, a seasonal system, the model of a hindcast

    def differs(self, other: Origin, *, one_start: bool = False) -> bool:
        """Return whether any part that both origins state has different values, ignoring case.

        `ensemble` counts only if the fields have the same init time (`one_start`), because other init times of an
        archive may be of other ensembles.
        """
        pairs = list(zip(self, other, strict=True))
        pairs = pairs if one_start else pairs[:-1]
        return any(mine and theirs and mine.casefold() != theirs.casefold() for mine, theirs in pairs)

    def __str__(self) -> str:
        """Return the stated parts as messages show them, e.g. `centre ecmf, class od`."""
        named = zip(("centre", "subcentre", "class", "experiment", "institution", "ensemble"), self, strict=True)
        return ", ".join(f"{name} {code}" for name, code in named if code) or "no centre that is stated"


def identities(records: np.ndarray) -> np.ndarray:
    """Return (N,) IDENTITY: the columns that identify a field, without those that say how to read it.

    An archive has millions of rows, and these columns take a third of the memory of `RECORD`.
    """
    out = np.empty(len(records), IDENTITY)
    for name in out.dtype.names or ():
        out[name] = records[name]
    return out


@dataclass(frozen=True, eq=False)
class RawField:
    """A field as the file holds it, with rows and columns in the program's order (north to south, west to east).

    It carries packed integers from a file to the store without decoding them, so that nothing is rounded twice.

    `values` (Y, X) are either packed integers or float32 values in the registry's units. Packed integers are uint16, in
    the byte order of this machine or of the file. They are decoded in double precision:

        value = ((X * scale) + reference) * decimal

        X          packed integer
        scale      2^E, E being GRIB's binary scale factor
        reference  reference value R of the message
        decimal    10^-D times the factor of a change of units, D being GRIB's decimal scale factor

    `mask` (Y, X) bool is True at points without a value, where the integer is 0 or the float is NaN. It is None if
    every point has a value. `step` is the packing step of the message from which floats were decoded, or 0 if there was
    no packing or the step is not known.
    """

    values: np.ndarray
    reference: float = 0.0
    scale: float = 1.0
    decimal: float = 1.0
    mask: np.ndarray | None = None
    step: float = 0.0

    @property
    def rounding(self) -> float:
        """Return the largest error that packing may have caused, in the registry's units: half a step."""
        return abs(self.scale * self.decimal if self.packed else self.step) / 2

    @property
    def packed(self) -> bool:
        """Return whether `values` are packed integers."""
        return self.values.dtype.kind == "u"

    @property
    def nothing(self) -> bool:
        """Return whether no point has a value."""
        return self.mask is not None and bool(self.mask.all())

    def decode(self) -> np.ndarray:
        """Return the values (Y, X) as float32, with NaN at points without a value.

        For simple packing without a change of units, they equal ecCodes' values bit for bit.
        """
        if not self.packed:
            return self.values
        factors = self.reference, self.scale, self.decimal
        exact, out = _exact_in_float32(*factors), np.empty(self.values.shape, np.float32)
        # The compiled decoder does not take every case; NumPy then decodes with the same arithmetic.
        if not native.decode_field(self.values, factors, exact, out):
            dequantise(self.values, [np.array(part, np.float32 if exact else np.float64) for part in factors], out)
        if self.mask is not None:
            out[self.mask] = np.nan
        return out


def _exact_in_float32(reference: float, scale: float, decimal: float) -> bool:
    """Return whether one field decodes exactly in float32, as `store.packing.exact_in_float32` does for arrays.

    It runs once for each field, so it avoids the cost of arrays.
    """
    if decimal != 1:
        return False
    mantissa, exponent = math.frexp(scale)
    normal = scale == 0 or (mantissa == 0.5 and -125 < exponent < 110)
    return normal and abs(reference) < 3e38 and float(np.float32(reference)) == reference


def other_step_type(kind: str, field: Field) -> str:
    """Return why values of ecCodes' stepType `kind` are not the variable `field`; empty if they may be.

    A deviation, range or trend over time is another quantity. So is a mean over many analyses or forecasts.
    """
    if kind in OF_STEP_TYPE:
        return f"the {OF_STEP_TYPE[kind]} over time and not the sum" if field.accumulated else ""
    if kind in ("", "instant") or (field.accumulated and kind in _SUMS):
        return ""
    return f"of stepType {kind}"


class Reader(Protocol):
    """The interface to one file of an archive, whatever its format.

    `records` are RECORD rows in the file's own order. `grid` is their common grid, or None without records. `skipped`
    counts the fields that are not read, by their descriptions. `keyed` is true if the records hold packing constants.
    These change with the values, so a hash of the records notices changed values. `methods` gives mean, maximum or
    minimum for each variable that is such a statistic over time. The records' column `origin` is an index into
    `origins`. `stamp` was taken before the file was indexed; values are only read while the file still has it.
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
        """Yield the values of `records`, in their order. Several threads may call this at the same time.

        Args:
            records: (N,) RECORD rows of this file.
            rows: slice of latitudes; None for all.
            into: arrays (rows, X) uint16, one for each record, to which packed integers are written; None to allocate.

        Raises:
            UserError: the file cannot be read, or has changed since it was indexed; or a field cannot be decoded.
        """

    def empty(self, records: np.ndarray, index: FileIndex) -> np.ndarray:
        """Return which of `records` have no value at any point, (N,) bool.

        NetCDF and Zarr files have to be read for this, so the answer is kept in `index`.
        """


def covers(rows: slice | None, grid: Grid | None) -> bool:
    """Return whether a band of latitudes covers the whole grid."""
    return rows is None or (grid is not None and (rows.start, rows.stop) == (0, grid.shape[0]))


def field_of(record: np.void) -> Field:
    """Return the registry's entry for a record."""
    return FIELDS[int(record["field"])]


def variable_text(field: Field, level: int) -> str:
    """Return a variable as messages show it, e.g. `t at 500 hPa`."""
    return field.name if field.surface or field.static else f"{field.name} at {level} hPa"


def describe(record: np.void) -> str:
    """Return a record as messages show it, e.g. `t at 500 hPa, member 7, 2001-01-03T00, lead 48 h`."""
    member = "control" if record["kind"] == CONTROL else f"member {record['member']}"
    where = f"{member}, {date_text(record['init'])}, lead {record['lead']} h"
    return f"{variable_text(field_of(record), int(record['level']))}, {where}"
