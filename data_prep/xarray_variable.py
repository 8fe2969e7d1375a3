"""A data variable of a NetCDF file or Zarr store: its leading axes, and the conversion of its values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

from data_prep.axes import OfSomethingElse, check_valid_times, find_axis, lead_of_valid_time, untangle
from data_prep.limits import plausible, wrong_values
from data_prep.records import IF_ABSENT, RawField, describe, field_of
from data_prep.zarr_chunks import Written
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, Field

LEADING = ("init", "member", "lead", "level")
_UNWRITTEN = 9.9e36  # just below NetCDF's default fill value, which no attribute has to state


def leading_axes(array: xr.DataArray, field: Field, level: int) -> dict[str, xr.DataArray | None]:
    """Return the leading axes by role, None for those that `array` lacks; `level` (hPa, 0 for none) is in its name.

    Raises:
        UserError: init, lead and valid times contradict each other, one is absent, or leads are not in whole hours.
        OfSomethingElse: it has no init time, and is not static.
    """
    axes = {role: find_axis(array, role) for role in LEADING}
    if field.surface or field.static:
        axes["level"] = None  # a scalar level belongs to other variables of the file
    elif level:
        axes["level"] = xr.DataArray(float(level), name=array.name, attrs={"units": "hPa"})
    lead_of_valid_time(array, axes)
    untangle(array, axes)
    if axes["init"] is None and not field.static:
        lacks = f"{array.name}: has no init time; give it a coordinate forecast_reference_time"
        raise OfSomethingElse(lacks, "no init time")
    check_valid_times(array, axes)
    return axes


@dataclass(frozen=True, eq=False)
class Variable:
    """A data variable whose leading axes are converted to (init, member, lead, level).

    Any of these axes may have length one. Values in the registry's units are `factor` times the file's, plus `shift`.
    """

    name: Hashable
    base: int  # number of its first field among all fields of the file
    dims: dict[str, Hashable]  # role -> dimension, for roles that are dimensions of the variable
    shape: tuple[int, ...]  # of the leading axes
    rows: np.ndarray  # (Y,) positions of our rows in the file
    columns: np.ndarray  # (X,) positions of our columns in the file
    factor: float
    shift: float
    step: float  # step of packed integers in the registry's units; 0 for floats
    limits: tuple[float, float]  # valid values, in the file's units
    written: Written | None  # chunks of a Zarr variable; None if the values show which fields were never written
    fixed: Mapping[Hashable, int]  # positions along further dimensions
    levels: np.ndarray  # (level,), hPa

    def decoded(self, values: np.ndarray, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return a block of one init time in the registry's units, (member, lead, level, Y, X) float32.

        Points that were never written, or whose values lie outside `limits`, are NaN.

        Args:
            values: the block as read, with those axes it has in the order (init, member, lead, level, Y, X).
            rows: (Y,) positions of our rows in the block.
            first: (4,) position of the block's first field along the leading axes.
            last: (4,) positions one after its last field.

        Raises:
            UserError: the index of a Zarr shard cannot be read.
        """
        if np.issubdtype(values.dtype, np.floating) and (values > _UNWRITTEN).any():
            values = np.where((values > _UNWRITTEN) & np.isfinite(values), np.nan, values)
        low, high = self.limits
        if (low, high) != (-np.inf, np.inf):
            values = np.where((values < low) | (values > high), np.nan, values)
        shape = (last - first)[1:].tolist()
        values = values.reshape(*shape, *values.shape[-2:])[..., rows[:, None], self.columns]
        if self.written is not None:
            values = self.written.mark(values, [self.dims.get(role) for role in LEADING], first.tolist())
        if (self.factor, self.shift) != (1.0, 0.0):
            values = values.astype(np.float64) * self.factor + self.shift
        return values.astype(np.float32, copy=False)

    def checked(self, path: str, record: np.void, values: np.ndarray, step: float) -> RawField:
        """Check a field's values (Y, X), in the registry's units, for missing and implausible ones, and return it.

        `step` is that of packed integers in the registry's units, and 0 for floats.

        Raises:
            UserError: a value is implausible, or missing in a variable that may not lack points.
        """
        units = field_of(record).units
        low, high = plausible(field_of(record), step, int(record["level"]))
        bad = ~((values > low) & (values < high))
        if not bad.any():
            return RawField(values, step=step)
        hidden = np.isnan(values)
        if not record["masked"] or (bad & ~hidden).any():
            count = wrong_values(values, bad, low, high, units)
            if self.limits != (-np.inf, np.inf):
                count += ", or outside of the variable's valid range"
            if bad.all():
                count += f"; {IF_ABSENT}"
            elif bad.sum() == hidden.sum():
                some = " and ".join(field.name for field in FIELDS if field.maskable)
                count += f"; only {some} may lack points in NetCDF and Zarr: leave the level or variable out, or give"
                count += " GRIB"
            raise UserError(f"{path}: {describe(record)}: {count}")
        return RawField(values, mask=hidden, step=step)
