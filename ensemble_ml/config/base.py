"""What every configuration class is made of: documented settings, checks, and the list that `--help` prints."""

from __future__ import annotations

import math
import re
from dataclasses import field, fields
from enum import Enum
from typing import Any

from ensemble_ml.errors import UserError

MISSING = "???"  # OmegaConf's mark of a mandatory value


def opt(default: Any, doc: str, *, paths: bool = False) -> Any:
    """A dataclass field with a default (or a factory of one) and the line that `--help` prints for it; `paths` says that
    it holds a path or a list of them, where its type does not."""
    metadata = {"doc": doc, "paths": paths}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def part(cls: type, doc: str) -> Any:
    """A nested group of settings."""
    return field(default_factory=cls, metadata={"doc": doc})


def is_dataset(value: Any) -> bool:
    """Return whether an archive is given as an open xarray Dataset, and not as a path; xarray is not imported for it."""
    return hasattr(value, "data_vars")


def as_list(value: Any) -> list[Any]:
    """Return paths as a list: one string stays one path. Open Datasets may stand among them."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [v if is_dataset(v) else str(v) for v in values]


def shown_input(value: Any) -> str:
    """Return an element of `as_list` as messages and provenance show it."""
    return "an open Dataset" if is_dataset(value) else str(value)


def require(key: str, value: Any, good: bool, allowed: str) -> None:
    """Raise a UserError in the one form that all settings use: `key=value: what is allowed`."""
    if not good:
        raise UserError(f"{key}={value}: {allowed}")


def at_least(config: Any, least: float, *keys: str, group: str = "") -> None:
    """Raise a UserError where a setting of `config`, or an entry of a list, is below `least`; None is not."""
    for key in keys:
        value = getattr(config, key)
        for one in value if isinstance(value, list) else [value]:
            require(f"{group}{key}", one, one is None or one >= least, f"must be {least} or more")


def check_finite(node: Any, path: str = "") -> None:
    """Raise a UserError where a setting, or a value in it, is infinite or no number."""
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            check_finite(value, f"{path}.{name}" if path else str(name))
    elif isinstance(node, float):
        require(path, node, math.isfinite(node), "must be a finite number")


_PERIOD = re.compile(r"\d{4}(-\d{2}(-\d{2}(T\d{2}(:\d{2})?)?)?)?")


def check_period(key: str, spec: str) -> None:
    """Refuse a period that is not YYYY[-MM[-DD[THH]]] or two of these joined by `/`."""
    ends = spec.split("/")
    good = 1 <= len(ends) <= 2 and all(_PERIOD.fullmatch(end) for end in ends)
    require(key, spec, good, "write a year (2001), a date (2001-01-31, 2001-01-31T12) or a range (2001/2004)")


def check_periods(key: str, specs: list[str] | None) -> None:
    """The same for a list of them; None is none."""
    for spec in specs or ():
        check_period(key, str(spec))


def check_region(region: list[float] | None) -> None:
    """Refuse a region that is not [north, west, south, east] on the sphere."""
    if region is not None:
        good = len(region) == 4 and 90 >= region[0] > region[2] >= -90
        require("region", region, good, "give [north, west, south, east], degrees")


def setting_lines(cls: type, values: Any = None, prefix: str = "") -> list[tuple[str, str, str]]:
    """List (key, default, doc) of a configuration class and its groups, for `--help`.

    Args:
        values: the defaults that `conf/` lays over those of the class, nested like it.
    """
    lines = []
    for item in fields(cls):
        nested = item.default_factory if isinstance(item.default_factory, type) else None
        if nested is not None and hasattr(nested, "__dataclass_fields__"):
            lines += setting_lines(nested, values and values[item.name], f"{prefix}{item.name}.")
            continue
        own = item.default_factory() if callable(item.default_factory) else item.default
        default = values[item.name] if values else own
        lines.append((f"{prefix}{item.name}", _as_yaml(default), item.metadata.get("doc", "")))
    return lines


def text_settings(cls: type, prefix: str = "") -> set[str]:
    """Keys of the settings of a configuration class and its groups that are texts or paths, or lists of these."""
    found = set()
    for item in fields(cls):
        key, nested = f"{prefix}{item.name}", item.default_factory
        if hasattr(nested, "__dataclass_fields__"):
            found |= text_settings(nested, f"{key}.")  # type: ignore[arg-type]
        elif item.metadata.get("paths") or str(item.type).removesuffix(" | None") in ("str", "list[str]"):
            found.add(key)
    return found


def _as_yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)
