"""Pack fields into 16-bit integers with a reference and a scale for each field, exactly as GRIB simple packing does.

    value = (X * scale + reference) * decimal

    X          packed integer, 0 to 65535
    reference  R, the value at X = 0 before the decimal factor
    scale      2^E, a power of two
    decimal    10^-D

R, E and D are the reference value, binary scale factor and decimal scale factor of GRIB. Decoding gives ecCodes' values
bit for bit (`decode`).

Axes: ... any leading axes (member, lead, variable, level), Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store import native

Where = Callable[[tuple[int, ...]], str]  # leading index of a field -> the phrase that names it in a message

_LARGEST = 65535  # largest packed integer
_GREATEST = float(np.finfo(np.float32).max)
_SLAB = 1 << 18  # values worked on at a time, so that the float64 intermediate stays in cache


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """A block of fields as they lie in a store.

    The value of a field at a point is ((X * scale) + reference) * decimal. The three factors are not used where
    `values` are float32.

    Attributes:
        values: (..., Y, X) uint16, or float32 values as they are.
        reference: (...) float64.
        scale: (...) float64.
        decimal: (...) float64.
        present: (...) bool, whether each field is there.
        mask: (..., Y, X) bool, True where a point has no value (a bitmap, such as sea surface temperature over land).
            None where every point of every present field has one.

    Raises:
        ValueError: Shapes or types do not belong together.
    """

    values: np.ndarray
    reference: np.ndarray
    scale: np.ndarray
    decimal: np.ndarray
    present: np.ndarray
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.uint16, np.float32):
            raise ValueError(f"values are {self.values.dtype}; uint16 or float32 is needed")
        for name in ("reference", "scale", "decimal", "present"):
            wanted = bool if name == "present" else np.float64
            array = np.asarray(getattr(self, name), wanted)
            if array.shape != self.values.shape[:-2]:
                raise ValueError(f"{name} has shape {array.shape}; {self.values.shape[:-2]} is needed")
            object.__setattr__(self, name, array)
        if self.mask is not None and (self.mask.shape != self.values.shape or self.mask.dtype != bool):
            raise ValueError(
                f"mask is {self.mask.dtype} of shape {self.mask.shape}; bool {self.values.shape} is needed"
            )

    @classmethod
    def plain(
        cls, values: np.ndarray, present: np.ndarray | None = None, mask: np.ndarray | None = None
    ) -> PackedBlock:
        """Wrap float32 values (..., Y, X) as they are. Every field is present unless `present` (...) is given."""
        shape = values.shape[:-2]
        there = np.ones(shape, bool) if present is None else present
        return cls(np.asarray(values, np.float32), np.zeros(shape), np.ones(shape), np.ones(shape), there, mask)

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> PackedBlock:
        """Make a packed block of `shape` (..., Y, X) with every field absent, to be filled field by field."""
        return cls.unfilled(np.zeros(shape, np.uint16))

    @classmethod
    def unfilled(cls, values: np.ndarray) -> PackedBlock:
        """Make a block with every field absent in an existing array, whatever that holds."""
        lead = values.shape[:-2]
        return cls(values, np.zeros(lead), np.zeros(lead), np.ones(lead), np.zeros(lead, bool))

    @property
    def packed(self) -> bool:
        """Return whether the values are packed integers."""
        return self.values.dtype == np.uint16

    def __getitem__(self, key: tuple[int | slice | np.ndarray | None, ...]) -> PackedBlock:
        """Select by the leading axes."""
        factors = [np.asarray(part[key]) for part in (self.reference, self.scale, self.decimal, self.present)]
        reference, scale, decimal, present = factors
        mask = None if self.mask is None else self.mask[key]
        return PackedBlock(self.values[key], reference, scale, decimal, present, mask)


def grib_factors(bits: int, binary_scale: int, decimal_scale: int) -> tuple[float, float]:
    """Return (scale, decimal) of a GRIB message in simple packing, as ecCodes computes them.

    WMO Manual on Codes 306, regulation 92.9.4, defines the packing:

        Y * 10^D = R + X * 2^E

        Y  value
        X  packed integer
        R  reference value
        E  binary scale factor
        D  decimal scale factor

    ecCodes multiplies by a power of ten that it builds by repeated division (codes_power). That is not always the
    double nearest to 10^-D. A message of zero bits holds its value in R, whatever D is.

    Args:
        bits: Bits per value.
        binary_scale: E.
        decimal_scale: D.
    """
    if bits == 0:
        return 0.0, 1.0
    decimal = 1.0
    for _ in range(abs(decimal_scale)):
        decimal = decimal / 10 if decimal_scale > 0 else decimal * 10
    return float(np.ldexp(1.0, binary_scale)), decimal


def exact_in_float32(reference: np.ndarray, scale: np.ndarray, decimal: np.ndarray) -> bool:
    """Return whether `exact_fields` holds for every field."""
    return bool(np.all(exact_fields(reference, scale, decimal)))


def exact_fields(reference: np.ndarray, scale: np.ndarray, decimal: np.ndarray) -> np.ndarray:
    """Return whether float32 arithmetic decodes each field to the same bits as float64 rounded to float32, (...) bool.

    The factors are (...) float64.

    It does where `decimal` is one, `reference` is a float32 number, and `scale` is zero or a power of two from 2^-125
    to 2^108. X * scale is then exact in float32, so both computations round the sum of the same two float32 numbers.
    Rounding that sum to 53 bits first changes nothing, because 53 >= 2 * 24 + 2 (Figueroa 1995, "When is double
    rounding innocuous?", doi:10.1145/221332.221334).
    """
    mantissa, exponent = np.frexp(scale)
    normal = (mantissa == 0.5) & (exponent > -125) & (exponent < 110)
    with np.errstate(over="ignore"):
        same = reference == reference.astype(np.float32)
    return (decimal == 1) & same & (normal | (scale == 0))


def dequantise(codes: np.ndarray, factors: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Decode packed integers into an array.

    Args:
        codes: (..., Y, X) uint16.
        factors: Reference, scale and decimal, (..., 1, 1) each. Float32 factors state that `exact_in_float32` holds;
            the caller has to check this.
        out: (..., Y, X) float32, which is filled.
    """
    reference, scale, decimal = factors
    if native.decode(codes, factors, scale.dtype == np.float32, out):
        return
    if scale.dtype == np.float32:
        np.copyto(out, codes)  # a separate cast is faster than one inside the product
        out *= scale
        out += reference
        return
    wide = np.multiply(codes, scale)
    wide += reference
    wide *= decimal
    out[...] = wide


def decode(block: PackedBlock) -> np.ndarray:
    """Decode the values of a block.

    The result is bit-equal to ecCodes' float64 values rounded to float32. ecCodes' own float32 values
    (`codes_get_float_array`) are the same, except for GRIB 2 with a decimal scale: ecCodes computes these in float32
    and may miss the last bit.

    Returns:
        (..., Y, X) float32, NaN where a field is absent or a point is masked.
    """
    points = block.values.shape[-2:]
    out = np.empty(block.values.shape, np.float32)
    codes, flat = block.values.reshape(-1, *points), out.reshape(-1, *points)
    factors = [part.reshape(-1, 1, 1) for part in (block.reference, block.scale, block.decimal)]
    # Float32 factors make `dequantise` use float32 arithmetic, which is faster and gives the same bits here.
    if exact_in_float32(*factors):
        factors = [part.astype(np.float32) for part in factors]
    for part in parts_of(len(codes), points[0] * points[1]):
        if block.packed:
            dequantise(codes[part], [factor[part] for factor in factors], flat[part])
        else:
            flat[part] = codes[part]
    flat[~block.present.reshape(-1)] = np.nan
    if block.mask is not None:
        out[block.mask] = np.nan
    return out


def quantise(values: np.ndarray, *, mask: np.ndarray | None = None) -> PackedBlock:
    """Pack float32 values into 16-bit integers, each field with its own reference and scale.

    As in GRIB simple packing without a decimal scale, the reference is the minimum of the field, and the scale is the
    smallest power of two with which 65535 steps span the field, but at least 2^-120. It is 0 for a constant field.

    Args:
        values: (..., Y, X) float32.
        mask: (..., Y, X) bool, True at points that do not count and become the integer 0; None for none.

    Returns:
        A packed block with every field present.

    Raises:
        UserError: A value that is not masked is NaN or infinite.
    """
    values = np.asarray(values, np.float32)
    check_finite(values, mask=mask)
    if mask is not None:
        values = _fill_with_minimum(values, mask)
    low = values.min((-2, -1)).astype(np.float64)
    span = values.max((-2, -1)) - low
    scale = _power_of_two(span)
    codes = np.empty(values.shape, np.uint16)
    fields, ends = values.reshape(-1, *values.shape[-2:]), (low.reshape(-1, 1, 1), scale.reshape(-1, 1, 1))
    # A few fields at a time, so that the float64 intermediate stays small, but not one by one: the calls
    # for fields of 64 x 32 points would take longer than their packing. All integers of a constant field are 0.
    for part in parts_of(len(fields), fields[:1].size):
        steps = np.where(ends[1][part] > 0, ends[1][part], 1.0)
        wide = fields[part] - ends[0][part]
        wide /= steps
        np.rint(wide, out=wide)
        # A step less where the nearest one lies beyond all float32 numbers, and would decode to infinity.
        codes.reshape(fields.shape)[part] = np.minimum(wide, (_GREATEST - ends[0][part]) // steps, out=wide)
    return PackedBlock(codes, low, scale, np.ones(low.shape), np.ones(low.shape, bool), mask)


def parts_of(count: int, points: int) -> Iterator[slice]:
    """Yield slices of `count` fields of so many points, to work on at once: at most `_SLAB` points, or one field."""
    step = max(1, _SLAB // max(points, 1))
    return (slice(first, first + step) for first in range(0, count, step))


def _fill_with_minimum(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Replace masked points by the minimum of the other points of their field, which does not change its range."""
    low = np.where(mask, np.inf, values).min((-2, -1), keepdims=True)
    return np.where(mask, np.where(np.isfinite(low), low, 0), values).astype(np.float32)


def _power_of_two(span: np.ndarray) -> np.ndarray:
    """Return the scale of each field: the smallest power of two with which its span takes at most 65535 steps.

    It is never below 2^-120, and it is 0 for a constant field.
    """
    exponent = np.frexp(span / _LARGEST)[1]  # 2^(exponent-1) <= span / 65535 < 2^exponent
    exponent = np.where(np.rint(np.ldexp(span, 1 - exponent)) <= _LARGEST, exponent - 1, exponent)
    return np.where(span > 0, np.ldexp(1.0, np.maximum(exponent, -120)), 0.0)


def error_bound(block: PackedBlock) -> np.ndarray:
    """Return the largest error that quantising can have made in each field, in the units of the field, (...) float64.

    It is half a step of the integers plus half a unit in the last place of the decoded float32. Where 65535 steps end
    beyond all float32 numbers, it may be up to a whole step. It is 0 for a constant or absent field, and for values
    kept in float32.
    """
    step = np.abs(block.scale * block.decimal)
    top = np.maximum(np.abs(block.reference), np.abs(block.reference + _LARGEST * block.scale)) * np.abs(block.decimal)
    last = np.where(top > _GREATEST, (_GREATEST - block.reference) % np.where(step > 0, step, 1.0), 0.0)
    top = np.minimum(top, 2.0**127)  # the spacing is the same up to the largest float32 number
    bound = np.maximum(step / 2, last) + np.spacing(top.astype(np.float32)) / 2
    return np.where(block.present & (step > 0) & block.packed, bound, 0.0)


def check_finite(
    values: np.ndarray,
    present: np.ndarray | None = None,
    *,
    mask: np.ndarray | None = None,
    where: Where | None = None,
) -> None:
    """Refuse NaN and infinity in present fields, except at masked points.

    Args:
        values: (..., Y, X).
        present: (...) bool; None where every field is present.
        mask: (..., Y, X) bool or None.
        where: Function that names a field by its leading index, for the message; None gives the index itself.

    Raises:
        UserError: There is such a value. The message names the first such field, and counts its NaN and infinities.
    """
    if values.size <= _SLAB:  # checks few values in one call, whatever the number of fields
        good = np.isfinite(values)
        good |= False if mask is None else mask
        good |= False if present is None else ~present[..., None, None]
        if good.all():
            return
    for index in np.ndindex(*values.shape[:-2]):
        if present is not None and not present[index]:
            continue
        finite = np.isfinite(values[index])
        if mask is not None:
            finite |= mask[index]
        if not finite.all():
            phrase = where(index) if where else f"field {index}"
            bad, first = int((~finite).sum()), values[index][~finite][0]
            raise UserError(
                f"{phrase}: {bad} of {finite.size} values are not numbers (the first is {first}); "
                "only finite values can be kept: mend the source, mark the points as missing, or leave the field out"
            )
