"""What goes into JSON, which has no NaN and no infinity: null stands for them."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np


def strict(value: Any) -> Any:
    """The same in JSON's own types: NumPy's scalars as Python's, members of an Enum as their values, null for numbers
    that are not finite."""
    if isinstance(value, dict):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
