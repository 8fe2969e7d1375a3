"""Compose the settings of a task from the files of `conf/`, what a user gives, and the schema in `config`.

The command line and `eml.train` both come through here, so the same words give the same settings. Hydra composes the
files over the schema, `OmegaConf.to_object` turns the result into dataclasses, and a user's mistake becomes one line.
Texts that Hydra would read as something else are quoted first.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ensemble_ml.config as schema
from ensemble_ml.errors import UserError
from ensemble_ml.folders import conf_folder

# An element of a list or a sweep, quoted or bare.
_ELEMENT = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^\[\],'"\\])+""")
_OPENING = ("[", "{", "'", '"')  # first characters of lists, tables and quoted texts
_PATTERN = re.compile(r"(\[[^\[\]]*\]|\{[^{}]*\}).+")  # a path or glob that begins like a list or table, but goes on


def register_schemas() -> None:
    """Register the dataclasses with Hydra under the names of the `*_schema` entries in the YAML files."""
    store = ConfigStore.instance()
    for task, config in schema.SCHEMAS.items():
        store.store(name=f"{task}_schema", node=config)


def compose_config(task: str, overrides: list[str], more: str | None = None) -> DictConfig:
    """Compose the configuration of a task from `conf/` and a user's settings, as the command line gives them.

    `more` is another folder of configuration files, which is searched after `conf/`.

    Raises:
        UserError: a key, a group or a value does not exist or does not fit.
    """
    register_schemas()
    path = [] if more is None else [f"hydra.searchpath=[{in_quotes(str(Path(more).absolute()))}]"]
    # A program that calls `eml.train` may itself use Hydra, so Hydra's state is restored afterwards.
    state = GlobalHydra.instance()
    callers, state.hydra = state.hydra, None
    try:
        with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
            return compose(config_name=task, overrides=[*path, *readable(task, overrides)])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(task, error)) from error
    finally:
        GlobalHydra.instance().hydra = callers


def set_values(task: str, composed: DictConfig, values: Mapping[str, Any]) -> None:
    """Set settings of a composed configuration to Python values; a tuple is taken for a list.

    On the command line, overrides do this with texts.

    Raises:
        UserError: there is no such setting, or a value is of another type.
    """
    known = _keys(task)
    for name, value in values.items():
        if name not in known:
            raise UserError(no_such_setting(task, name))
        try:
            OmegaConf.update(composed, name, list(value) if isinstance(value, tuple) else value)
        except OmegaConfBaseException as error:
            raise UserError(f"{name}={value}: {str(error).splitlines()[0]}") from error


def build_config(task: str, composed: DictConfig, example: str = "") -> Any:
    """Turn a composed configuration into the task's dataclass, validated.

    `example` are settings that suffice, for the message if some are missing.

    Raises:
        UserError: a mandatory key is missing or empty, a key is no setting, or a value is not allowed.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            hint = f", e.g. ensemble-ml {task} {example}" if example else ""
            raise UserError(f"{', '.join(missing)}: must be given{hint}")
        added = next(_added(task, composed), None)
        if added is not None:
            raise UserError(no_such_setting(task, added))
        lines = schema.setting_lines(schema.SCHEMAS[task])
        empty = [k for k, default, _ in lines if default == schema.MISSING and OmegaConf.select(composed, k) == ""]
        if empty:  # most likely from a shell variable that is not set
            raise UserError(f"{empty[0]}: is not given; give {empty[0]}=...")
        schema.check_finite(OmegaConf.to_container(composed))
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(_shortened(task, str(error))) from error


def _added(task: str, composed: DictConfig) -> Iterator[str]:
    """Yield keys that are no settings. Hydra accepts any key after a +, but no task would read it."""
    known = _keys(task)

    def leaves(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict) and path not in known:  # names inside a known setting are free
            for name, value in node.items():
                yield from leaves(value, f"{path}.{name}" if path else str(name))
        elif path not in known:
            yield path

    return leaves(OmegaConf.to_container(composed, resolve=False), "")


def _keys(task: str) -> list[str]:
    """Return the names of all settings of a task."""
    return [key for key, _, _ in schema.setting_lines(schema.SCHEMAS[task])]


def groups_of(task: str) -> dict[str, list[str]]:
    """Return the groups of `conf/` that a task takes, each with the names of its files."""
    taken = {key.partition(".")[0] for key in _keys(task)} | ({"experiment"} if task in ("train", "plan") else {task})
    folders = sorted(path for path in conf_folder().iterdir() if path.is_dir() and path.name in taken)
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def no_such_setting(task: str, key: str) -> str:
    """Return the message for a key that is no setting, with the nearest settings and groups."""
    known = [*_keys(task), *(group for group in groups_of(task) if group != key)]
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"ensemble-ml {task} --help lists all"
    return f"{key}: no such setting of {task}; {hint}"


def one_line(task: str, error: Exception) -> str:
    """Return one of Hydra's errors as a line for the user."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
    return _shortened(task, f"{error}{cause}")


def _unreadable(argument: str) -> str:
    """Return the message for an argument that is not in Hydra's grammar."""
    key, equals, value = argument.partition("=")
    text = f"{argument}: cannot be read; write key=value, with no blank around ="
    if not equals:
        return text
    if "{" not in value and "[" not in value:  # most likely a path
        return f"{text}, and a value that holds ( ) = , or the like in two pairs of quotes: '{key}=\"{value}\"'"
    if re.fullmatch(r"\[.*[][{}()].*\]", value):
        return f"{text}, and each part of a list that holds brackets in quotes of its own: \"{key}=['first','second']\""
    example = "{name: ...}" if "{" in value else "[first, second]"
    return f"{text}, and quote what holds blanks, braces or brackets, or the shell takes it apart: '{key}={example}'"


def _shortened(task: str, text: str) -> str:
    """Shorten one of Hydra's messages to what the user needs: the key, what is wrong, and the nearest choices."""
    unknown = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", text)
    if unknown:
        full = re.search(r"full_key: (\S+)", text)
        return no_such_setting(task, unknown.group(1) or (full.group(1) if full else unknown.group(2)))
    if "Could not load 'hydra/launcher/submitit" in text:
        return "hydra/launcher=cluster: not installed; pip install 'ensemble-ml[cluster]'"
    choice = re.search(r"Could not find '(.+)'\s+Available options in '([^']+)':\n((?:\t\S+\n?)*)", text)
    if choice:
        options = ", ".join(choice.group(3).split())
        return f"{choice.group(2)}={choice.group(1).rpartition('/')[2]}: no such file in conf; there are {options}"
    several = re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'\n", text)
    if several:  # Hydra also suggests quotes around the whole value, but the shell would remove them
        key, value = several[2].lstrip("+"), several[3]
        return f"{several[1]}: is several values; write a list, '{key}=[{value}]', or sweep over them with -m"
    lines = [line.strip() for line in text.splitlines() if line.strip() and "object_type" not in line]
    where = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    dull = ("full_key", "reference_type", "Error merging override", "See https")
    body = "; ".join(line for line in lines if not line.startswith(dull))
    if where and "is not a ListConfig, list or tuple" in body:
        body = f"a list is wanted: {where}=[...]"
    return f"{where}: {body}" if where else body


def readable(task: str, arguments: list[str]) -> list[str]:
    """Return arguments of the command line, in quotes where Hydra would change or could not read them."""
    return [as_text(task, argument) for argument in arguments]


def as_text(task: str, argument: str) -> str:
    """Return an argument of the command line (key=value), in quotes if Hydra would change or could not read it.

    Hydra takes some texts for numbers and truth values and rewrites them: 20240101_00 becomes 2024010100, and 1.10
    becomes 1.1. Other texts are not in its grammar, such as a path or glob with brackets. Arguments for settings that
    hold no texts are returned as they are, and so are texts with `(` or `{` that Hydra can read. The name of a file of
    a group (experiment=2024) is a text, too, and so is null there.

    Raises:
        UserError: the value has braces that a shell would have expanded, and no file of this name exists.
    """
    key, equals, value = argument.partition("=")
    grouped = bool(equals) and key.lstrip("+") in groups_of(task)
    if not equals or not (grouped or key.lstrip("+") in schema.text_settings(schema.SCHEMAS[task])):
        return argument
    if not _readable(argument):
        if value.startswith(_OPENING) and not _PATTERN.fullmatch(value):
            return argument
        _refuse_braces(key, value)
        return f"{key}={in_quotes(value)}"
    if set("({") & set(value):
        return argument

    def element(found: re.Match[str]) -> str:
        """Return an element of a list in quotes if Hydra would take it for a number or truth value."""
        text = found[0].strip()
        if text.lower() in ("true", "false") or (grouped and text.lower() == "null"):
            return in_quotes(text)
        try:
            float(text)
        except ValueError:
            return found[0]
        return in_quotes(text)

    return f"{key}={_ELEMENT.sub(element, value)}"


def _readable(argument: str) -> bool:
    """Return whether an argument is in Hydra's grammar."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


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
