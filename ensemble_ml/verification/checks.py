"""Refuse values that no score is defined for: shares outside of 0 to 1, events that are no yes or no, negative scales.

Each function raises a `UserError` of one line that names the argument, its first value that is wrong, what is allowed
and mostly the remedy. NaN is a missing value, and passes. Checks of arrays run where the scores are computed, on the
values at hand, so Dask arrays stay lazy and are not computed twice.
"""

from __future__ import annotations

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import same_units

ROUNDING = 1e-4  # of one: what a share may be off by that was packed into 16 bits; sums in float32 are nearer
WEIGHT_ROUNDING = 1e-6  # of the largest weight: in float32 the cosine of a pole's latitude is -4e-8


def check_all(name: str, values: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
    """Raise a UserError with the first of `values` where `wrong`, of the same shape, is true."""
    if np.any(wrong):
        first = np.asarray(values)[wrong].reshape(-1)[0]
        raise UserError(f"{name}: holds {first:g}; {allowed}")


def check_between(name: str, values: np.ndarray, least: float, most: float, allowed: str) -> None:
    """Refuse values outside of [least, most], of the order of one; rounding is let pass."""
    values = np.asarray(values)
    check_all(name, values, (values < least - ROUNDING) | (values > most + ROUNDING), allowed)


def check_probability(name: str, values: np.ndarray) -> None:
    """Refuse what is no probability, as one in per cent."""
    check_between(name, values, 0, 1, "a probability lies between 0 and 1; divide by 100 what is in per cent")


def check_event(name: str, values: np.ndarray) -> None:
    """Refuse what is neither 0 nor 1, False nor True."""
    values = np.asarray(values)
    if values.dtype != bool:
        # Only NaN differs from itself; np.isnan takes no objects, which truth values become where some are missing.
        wrong = (values != 0) & (values != 1) & (values == values)
        check_all(name, values, wrong, "an event is 0 or 1; make it by comparing, as in truth > threshold")


def check_scale(name: str, values: np.ndarray, *, zero: bool = True) -> None:
    """Refuse negative scales, and `zero` ones unless they are allowed."""
    values = np.asarray(values)
    if zero:
        check_all(name, values, values < 0, "must be 0 or more; a scale is a standard deviation or alike")
    else:
        check_all(name, values, values <= 0, "must be above 0: a sure forecast has no density; leave such points out")


def check_uniform(values: np.ndarray | None) -> None:
    """Refuse random numbers that are not from [0, 1); None is none."""
    if values is not None:
        values = np.asarray(values)
        check_all("uniform", values, (values < 0) | (values >= 1), "random numbers in [0, 1) are needed")


def check_weights(values: np.ndarray, whole: np.ndarray | None = None) -> None:
    """Refuse negative weights; rounding is let pass, by the largest of the `whole` that the values are a part of."""
    values = np.asarray(values)
    largest = np.fmax.reduce(np.abs(values if whole is None else whole), axis=None, initial=0)
    wrong = values < -WEIGHT_ROUNDING * largest
    check_all("weights", values, wrong, "must be 0 or more; use mask, or 0, to leave points out")


def check_level(level: float) -> None:
    """Refuse the level of a quantile that is not within (0, 1)."""
    if not 0 < level < 1:
        raise UserError(f"level={level}: must lie between 0 and 1, without these; 0.9 is the ninth decile")


def check_ascending_bounds(lower: float, upper: float) -> None:
    """Refuse an interval that holds nothing."""
    if not lower < upper:
        raise UserError(f"lower={lower}, upper={upper}: lower must be below upper")


def check_count(name: str, count: int, least: int, why: str) -> None:
    """Refuse fewer than `least`, or what is no whole number."""
    if not isinstance(count, int | np.integer) or count < least:
        raise UserError(f"{name}={count}: {why}; {least} or more are needed")


def check_no_per_cent(name: str, units: str | None) -> None:
    """Refuse units of a share that state per cent, whatever its values are."""
    if units is not None and (same_units(units, "%") or units == "per cent"):
        raise UserError(
            f"{name}: its units are {units!r}; give a share from 0 to 1, with units 1: divide per cent by 100"
        )
