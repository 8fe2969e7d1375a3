"""Conversion of values to strict JSON, which has no NaN and no infinity (RFC 8259): null stands for them."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np


def strict(value: Any) -> Any:
    """Return a value in JSON's own types.

    NumPy scalars become Python's, members of an Enum become their values, and numbers that are not finite become None.

    Args:
        value: a value, or nested dicts, lists and tuples of values.
    """
    if isinstance(value, dict):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
