"""The parts that every configuration class uses: documented settings, checks, and the list that `--help` prints."""

from __future__ import annotations

import math
import re
from dataclasses import field, fields
from enum import Enum
from typing import Any

from ensemble_ml.errors import UserError

MISSING = "???"  # OmegaConf's mark of a mandatory value
_PERIOD = re.compile(r"\d{4}(-\d{2}(-\d{2}(T\d{2}(:\d{2})?)?)?)?")  # an end of a period


def opt(default: Any, doc: str, *, paths: bool = False) -> Any:
    """Make a dataclass field with a default and a line of documentation.

    `default` may be a function that makes it. `paths` marks a field of type `Any` that holds a path or a list of paths.
    """
    metadata = {"doc": doc, "paths": paths}
    # A mutable default needs a function, so that each instance has its own.
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def part(cls: type, doc: str) -> Any:
    """Make a field that holds a nested group of settings, an instance of a configuration class."""
    return field(default_factory=cls, metadata={"doc": doc})


def is_dataset(value: Any) -> bool:
    """Return whether an input is an open xarray Dataset and not a path, without an import of xarray."""
    return hasattr(value, "data_vars")


def as_list(value: Any) -> list[Any]:
    """Return a value, a list or a tuple as a list: empty for None. All but Datasets become texts."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [v if is_dataset(v) else str(v) for v in values]


def shown_input(value: Any) -> str:
    """Return an element of `as_list` as text, for messages and provenance."""
    return "an open Dataset" if is_dataset(value) else str(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a number. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(key: str, value: Any, good: bool, allowed: str) -> None:
    """Raise a UserError of the form `key=value: what is allowed`, as for all settings, if a value is not allowed."""
    if not good:
        raise UserError(f"{key}={value}: {allowed}")


def at_least(config: Any, least: float, *keys: str, group: str = "") -> None:
    """Raise a UserError if a setting of `config`, or an entry of a list, is below `least`. None is allowed.

    `group` is the prefix of the names in the message, such as "optim.".
    """
    for key in keys:
        value = getattr(config, key)
        for one in value if isinstance(value, list) else [value]:
            require(f"{group}{key}", one, one is None or one >= least, f"must be {least} or more")


def check_finite(node: Any, path: str = "") -> None:
    """Raise a UserError if `node`, whose dotted name is `path`, or a value inside it is infinite or NaN."""
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            check_finite(value, f"{path}.{name}" if path else str(name))
    elif isinstance(node, float):
        require(path, node, math.isfinite(node), "must be a finite number")


def check_periods(key: str, specs: list[str] | None) -> None:
    """Raise a UserError if a period is not YYYY[-MM[-DD[THH[:MM]]]], or two of these joined by `/`."""
    for spec in map(str, specs or ()):
        ends = spec.split("/")
        good = len(ends) <= 2 and all(_PERIOD.fullmatch(end) for end in ends)
        require(key, spec, good, "write a year (2001), a date (2001-01-31, 2001-01-31T12) or a range (2001/2004)")


def check_region(region: list[float] | None) -> None:
    """Raise a UserError if a region is neither None nor [north, west, south, east] in degrees, north above south."""
    if region is not None:
        good = len(region) == 4 and 90 >= region[0] > region[2] >= -90
        require("region", region, good, "give [north, west, south, east], degrees")


def setting_lines(cls: type, values: Any = None, prefix: str = "") -> list[tuple[str, str, str]]:
    """List (key, default, doc) of the settings of a configuration class and its groups, for `--help`.

    `values` are the defaults of the files in `conf/`, nested like the class, which replace its own; None lists its own.
    `prefix` is that of the keys, such as "optim.".
    """
    lines = []
    for item in fields(cls):
        # A field whose default is made by a configuration class is a group of settings.
        nested = item.default_factory if isinstance(item.default_factory, type) else None
        if nested is not None and hasattr(nested, "__dataclass_fields__"):
            lines += setting_lines(nested, values and values[item.name], f"{prefix}{item.name}.")
            continue
        own = item.default_factory() if callable(item.default_factory) else item.default
        default = values[item.name] if values else own
        lines.append((f"{prefix}{item.name}", _as_yaml(default), item.metadata.get("doc", "")))
    return lines


def text_settings(cls: type, prefix: str = "") -> set[str]:
    """Return the keys of all settings of a configuration class that hold texts or paths, or lists of these."""
    found = set()
    for item in fields(cls):
        key, nested = f"{prefix}{item.name}", item.default_factory
        if hasattr(nested, "__dataclass_fields__"):
            found |= text_settings(nested, f"{key}.")  # type: ignore[arg-type]
        elif item.metadata.get("paths") or str(item.type).removesuffix(" | None") in ("str", "list[str]"):
            found.add(key)
    return found


def _as_yaml(value: Any) -> str:
    """Return a value as YAML writes it, for `--help`."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
