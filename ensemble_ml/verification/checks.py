"""Refuse values for which no score is defined, such as probabilities above one or negative scales.

Each function raises a `UserError` of one line. It names the argument, the first wrong value, the allowed values, and
usually the remedy. NaN in an array is a missing value and passes. A single number must not be NaN.

Arrays are checked where scores are computed, on the values at hand. Dask arrays thus stay lazy and are not computed
twice.
"""

from __future__ import annotations

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.units import same_units

ROUNDING = 1e-4  # tolerance for shares that were packed into 16 bits; sums in float32 are more accurate
# Tolerance as a share of the largest weight. In float32 the cosine of a pole's latitude is -4e-8.
WEIGHT_ROUNDING = 1e-6


def check_all(name: str, values: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
    """Raise an error with the first of `values` where `wrong`, a bool array of the same shape, is true.

    `allowed` tells in the message what is allowed, here and in `check_between`.
    """
    if np.any(wrong):
        first = np.asarray(values)[wrong].reshape(-1)[0]
        raise UserError(f"{name}: holds {first:g}; {allowed}")


def check_between(name: str, values: np.ndarray, least: float, most: float, allowed: str) -> None:
    """Refuse values that lie outside of [least, most] by more than `ROUNDING`.

    The tolerance is absolute, so values have to be of the order of one.
    """
    values = np.asarray(values)
    check_all(name, values, (values < least - ROUNDING) | (values > most + ROUNDING), allowed)


def check_probability(name: str, values: np.ndarray) -> None:
    """Refuse values that lie outside of [0, 1] by more than `ROUNDING`, such as percentages."""
    check_between(name, values, 0, 1, "a probability lies between 0 and 1; divide by 100 what is in per cent")


def check_event(name: str, values: np.ndarray) -> None:
    """Refuse outcomes that are neither 0 nor 1, False nor True."""
    values = np.asarray(values)
    if values.dtype != bool:
        # `values == values` is false only for NaN. np.isnan refuses arrays of objects, and outcomes with missing
        # values may be such an array.
        wrong = (values != 0) & (values != 1) & (values == values)
        check_all(name, values, wrong, "an event is 0 or 1; make it by comparing, as in truth > threshold")


def check_scale(name: str, values: np.ndarray, *, zero: bool = True) -> None:
    """Refuse negative scales, and scales of zero unless `zero` is set."""
    values = np.asarray(values)
    if zero:
        check_all(name, values, values < 0, "must be 0 or more; a scale is a standard deviation or alike")
    else:
        check_all(name, values, values <= 0, "must be above 0: a sure forecast has no density; leave such points out")


def check_uniform(values: np.ndarray | None) -> None:
    """Refuse random numbers outside of [0, 1); None passes."""
    if values is not None:
        values = np.asarray(values)
        check_all("uniform", values, (values < 0) | (values >= 1), "random numbers in [0, 1) are needed")


def check_weights(values: np.ndarray, whole: np.ndarray | None = None) -> None:
    """Refuse weights that are negative by more than rounding.

    If `values` are only a part of the weights, `whole` holds all of them: the largest of all sets the tolerance, which
    then does not depend on the part.
    """
    values = np.asarray(values)
    largest = np.fmax.reduce(np.abs(values if whole is None else whole), axis=None, initial=0)
    wrong = values < -WEIGHT_ROUNDING * largest
    check_all("weights", values, wrong, "must be 0 or more; use mask, or 0, to leave points out")


def check_level(level: float) -> None:
    """Refuse a quantile level outside of (0, 1)."""
    if not 0 < level < 1:
        raise UserError(f"level={level}: must lie between 0 and 1, both excluded; 0.9 is the ninth decile")


def check_ascending_bounds(lower: float, upper: float) -> None:
    """Refuse an empty interval."""
    if not lower < upper:
        raise UserError(f"lower={lower}, upper={upper}: lower must be below upper")


def check_count(name: str, count: int, least: int, why: str) -> None:
    """Refuse a number that is below `least` or not whole. `why` is the reason that the message gives."""
    if not isinstance(count, int | np.integer) or count < least:
        raise UserError(f"{name}={count}: {why}; {least} or more are needed")


def check_no_per_cent(name: str, units: str | None) -> None:
    """Refuse a share whose units are per cent, whatever its values are. None passes."""
    if units is not None and (same_units(units, "%") or units == "per cent"):
        raise UserError(
            f"{name}: its units are {units!r}; give a share from 0 to 1, with units 1: divide per cent by 100"
        )
