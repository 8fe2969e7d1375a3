"""Arguments of the command line whose texts Hydra would read as something else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import ensemble_ml.config as schema
from ensemble_ml.errors import UserError

_ELEMENT = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^\[\],'"\\])+"""
)  # an element of a list or a sweep, quoted or bare
_OPENING = ("[", "{", "'", '"')  # first characters of lists, tables and quoted texts
_PATTERN = re.compile(r"(\[[^\[\]]*\]|\{[^{}]*\}).+")  # a path or glob that begins like a list or table, but goes on


def as_text(task: str, argument: str, readable: Callable[[str], bool]) -> str:
    """Return an argument of the command line, in quotes if Hydra would change its text or could not read it.

    Hydra takes some texts for numbers and truth values and rewrites them: 20240101_00 becomes 2024010100, and 1.10
    becomes 1.1. Other texts are not in its grammar, such as a path or glob with brackets. Arguments for settings that
    hold no texts are returned as they are, and so are texts with `(` or `{` that Hydra can read.

    Args:
        task: word of the command line.
        argument: key=value.
        readable: returns whether an argument is in Hydra's grammar.

    Raises:
        UserError: the value has braces that a shell would have expanded, and no file of this name exists.
    """
    key, equals, value = argument.partition("=")
    if not equals or key.lstrip("+") not in schema.text_settings(schema.SCHEMAS[task]):
        return argument
    if not readable(argument):
        if value.startswith(_OPENING) and not _PATTERN.fullmatch(value):
            return argument
        _refuse_braces(key, value)
        return f"{key}={in_quotes(value)}"
    if set("({") & set(value):
        return argument

    def element(found: re.Match[str]) -> str:
        """Return an element of a list in quotes if Hydra would take it for a number or truth value."""
        text = found[0].strip()
        if text.lower() in ("true", "false"):
            return in_quotes(text)
        try:
            float(text)
        except ValueError:
            return found[0]
        return in_quotes(text)

    return f"{key}={_ELEMENT.sub(element, value)}"


def _refuse_braces(key: str, value: str) -> None:
    """Refuse a path with braces that a shell would have expanded if they had not been quoted."""
    braces = re.fullmatch(r"(.*)\{([^{}]*,[^{}]*)\}(.*)", value)
    if braces and not os.path.exists(value):  # Path.exists() would raise for a text that is too long for a path
        paths = ",".join(f"{braces[1]}{part}{braces[3]}" for part in braces[2].split(","))
        raise UserError(f"{key}={value}: braces are not expanded here; write a list, '{key}=[{paths}]'")


def in_quotes(path: str) -> str:
    """Return a text in quotes, so that Hydra reads it unchanged."""
    # Backslashes count as such unless a quote follows.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), path) + "'"
