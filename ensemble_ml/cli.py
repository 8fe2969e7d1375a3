"""The command line: `ensemble-ml TASK key=value ...`.

Hydra composes the files of `conf/` and the overrides over the schema in `config`. `OmegaConf.to_object` turns the
result into dataclasses, and the task runs. This is the only file that imports Hydra. A user's mistake ends in one line
and status 2. `-m` hands a sweep to Hydra's own launcher. Options that show something (`--cfg`, `--info`, shell
completion) are Hydra's own, too.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
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
from ensemble_ml import __version__
from ensemble_ml.arguments import as_text, in_quotes
from ensemble_ml.errors import STATUS_REQUEUE, Stopped, UserError
from ensemble_ml.machine import let_waiting_threads_sleep
from ensemble_ml.signals import ignored, note
from ensemble_ml.tasks import TASKS

log = logging.getLogger(__name__)

STATUS_USER = 2
STATUS_INTERRUPTED = 130
_SHOWS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")
_WITH_A_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd")
_OPTIONS = (*_SHOWS, *_WITH_A_VALUE, "--multirun", "-m", "--resolve", "--run", "-r")
_CHOICES = {  # the values of an option; the first one is the default
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
_LONG = {
    "-c": "--cfg",
    "-i": "--info",
    "-p": "--package",
    "-cd": "--config-dir",
    "-sc": "--shell-completion",
    "-m": "--multirun",
}
_EXTRAS = {
    "eccodes": "grib",
    "cfgrib": "grib",
    "gribapi": "grib",
    "jcm": "simulate",
    "jax": "simulate",
    "dinosaur": "simulate",
    "distributed": "cluster",
    "dask_jobqueue": "cluster",
}


def conf_folder() -> Path:
    """Return the folder of the YAML files: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def register_schemas() -> None:
    """Register the dataclasses with Hydra under the names of the `*_schema` entries in the YAML files."""
    store = ConfigStore.instance()
    for name, task in TASKS.items():
        store.store(name=f"{name}_schema", node=task.config)


def compose_config(task: str, overrides: list[str], more: str | None = None) -> DictConfig:
    """Compose the configuration of a task from `conf/` and the command line.

    Args:
        task: word of the command line.
        overrides: settings as the command line gives them.
        more: another folder of configuration files, which is searched after `conf/`.

    Raises:
        UserError: a key, a group or a value does not exist or does not fit.
    """
    register_schemas()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
            path = [] if more is None else [f"hydra.searchpath=[{in_quotes(str(Path(more).absolute()))}]"]
            return compose(config_name=task, overrides=[*path, *(as_text(task, item, _readable) for item in overrides)])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_hydras(task, error)) from error


def _readable(argument: str) -> bool:
    """Return whether an argument has a form in Hydra's grammar."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def _hydras(task: str, error: Exception) -> str:
    """Return one of Hydra's errors as a line for the user."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
    return _one_line(task, f"{error}{cause}")


def build_config(task: str, composed: DictConfig) -> Any:
    """Turn a composed configuration into the task's dataclass, validated.

    Args:
        task: word of the command line.
        composed: the configuration.

    Raises:
        UserError: a mandatory key is missing, or a value is not allowed.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise UserError(f"{', '.join(missing)}: must be given, e.g. ensemble-ml {task} {TASKS[task].example}")
        added = next(_added(task, composed), None)
        if added is not None:
            raise UserError(_no_such(task, added))
        lines = schema.setting_lines(TASKS[task].config)
        empty = [k for k, default, _ in lines if default == schema.MISSING and OmegaConf.select(composed, k) == ""]
        if empty:  # most likely from a shell variable that is not set
            raise UserError(f"{empty[0]}: is not given; give {empty[0]}=...")
        schema.check_finite(OmegaConf.to_container(composed))
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(_one_line(task, str(error))) from error


def _added(task: str, composed: DictConfig) -> Iterator[str]:
    """Yield keys that are no settings. Hydra accepts any key with a + before it, but no task would read it."""
    known = [line[0] for line in schema.setting_lines(TASKS[task].config)]

    def leaves(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict) and path not in known:  # the names below a known key are the user's own
            for name, value in node.items():
                yield from leaves(value, f"{path}.{name}" if path else str(name))
        elif path not in known:
            yield path

    return leaves(OmegaConf.to_container(composed, resolve=False), "")


def _unreadable(argument: str) -> str:
    """Return advice for an argument that has no form in Hydra's grammar."""
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


def _no_such(task: str, key: str) -> str:
    """Return the message for a key that is no setting, with the nearest settings."""
    keys = [line[0] for line in schema.setting_lines(TASKS[task].config)]
    keys += [group for group in _groups() if group in _own_groups(task, keys) and group != key]
    near = difflib.get_close_matches(key, keys, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"ensemble-ml {task} --help lists all"
    return f"{key}: no such setting of {task}; {hint}"


def _one_line(task: str, text: str) -> str:
    """Shorten one of Hydra's messages to what the user needs: the key, what is wrong, and the nearest choices."""
    unknown = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", text)
    if unknown:
        full = re.search(r"full_key: (\S+)", text)
        return _no_such(task, unknown.group(1) or (full.group(1) if full else unknown.group(2)))
    if "Could not load 'hydra/launcher/submitit" in text:
        return "hydra/launcher=cluster: not installed; pip install 'ensemble-ml[cluster]'"
    choice = re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':\n((?:\t\S+\n?)*)", text)
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


def _groups() -> list[str]:
    """Return the names of the groups of configuration files."""
    return sorted(p.name for p in conf_folder().iterdir() if p.is_dir())


def run_task(task: str, composed: DictConfig) -> int:
    """Run a task on its composed configuration and return the exit status.

    Raises:
        UserError: a package that the task needs is not installed, or the operating system refused an operation.
    """
    config = build_config(task, composed)
    try:
        TASKS[task].run(config)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise UserError(f"{error.name}: not installed; pip install 'ensemble-ml[{extra}]'") from error
    except BrokenPipeError:  # `main` ends quietly then
        raise
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise UserError(f"{error.filename or task}: {error.strerror or error}") from error
    return 0


def _sweep(task: str, options: dict[str, str], arguments: list[str]) -> int:
    """Hand a multi-run to Hydra, which calls `job` once for each combination."""
    failed: list[str] = []
    begun = False

    def job(composed: DictConfig) -> int | None:
        nonlocal begun
        begun = True
        try:
            return run_task(task, composed)
        except KeyboardInterrupt as error:
            if _goes_on():  # `main` reports it
                raise
            raise SystemExit(_stopped(error)) from None
        except UserError as error:
            print(f"ensemble-ml: {error}", file=sys.stderr)
            if not _goes_on():
                raise SystemExit(STATUS_USER) from error
            failed.append(str(error))
            return None
        except Exception as error:
            if _goes_on():  # a defect ends the sweep, with its traceback
                raise
            traceback.print_exception(error)
            raise SystemExit(1) from error

    try:
        _by_hydra(task, options, arguments, job)
    except OSError as error:
        if begun:
            raise
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UserError(f"the sweep's folder cannot be made ({why}); set hydra.sweep.dir=FOLDER") from error
    if failed:
        raise UserError(f"{len(failed)} of the sweep's runs could not be made; the last: {failed[-1]}")
    return 0


def _by_hydra(
    task: str, options: dict[str, str], arguments: list[str], job: Callable[[DictConfig], int | None]
) -> None:
    """Run Hydra's own command line with the configuration of a task.

    Args:
        task: word of the command line.
        options: Hydra's options under their long names, with their values.
        arguments: settings as the command line gives them.
        job: runs the task on one composed configuration.

    Raises:
        UserError: a setting does not exist or does not fit, or options exclude each other.
    """
    import hydra

    register_schemas()
    GlobalHydra.instance().clear()
    flags = [word for name, value in options.items() for word in (name, value) if word]
    settings = [as_text(task, argument, _readable) for argument in arguments]
    # Hydra does not accept flags between settings, so they come first.
    name = "ensemble-ml" if "--shell-completion" in options else f"ensemble-ml {task}"
    sys.argv = [name, *flags, *settings]
    # Without this Hydra would print errors in settings itself, in many lines and with another status.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=task)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_hydras(task, error)) from error


def _goes_on() -> bool:
    """Return whether a sweep continues in this process if a run fails.

    A process that runs a single combination must end with a status instead: Hydra turns exceptions into results, and
    SLURM would call the job completed. The same holds for one of several ranks, whose failure has ended the others.
    """
    from hydra.core.hydra_config import HydraConfig

    from ensemble_ml.distributed.meeting import met

    return str(HydraConfig.get().launcher._target_).endswith(".BasicLauncher") and not met()


def help_page(task: str) -> str:
    """Return the page that `ensemble-ml TASK --help` prints."""
    entry = TASKS[task]
    lines = [
        f"ensemble-ml {task}: {(entry.config.__doc__ or '').strip()}",
        "",
        f"  ensemble-ml {task} {entry.example}",
        "",
        f"Leaves: {entry.leaves}",
        "",
        "Settings (key=value; ??? must be given):",
    ]
    composed = OmegaConf.to_container(compose_config(task, []), throw_on_missing=False)
    # The page shows the defaults in force: those of the files in conf/ take precedence over the schema.
    rows = schema.setting_lines(entry.config, composed)
    width = min(34, max(len(f"{key}={default}") for key, default, _ in rows))
    lines += [f"  {f'{key}={default}':<{width}}  {doc}" for key, default, doc in rows]
    groups = {g: sorted(p.stem for p in (conf_folder() / g).glob("*.yaml")) for g in _groups()}
    own = _own_groups(task, [key for key, _, _ in rows])
    shown = [f"  {g}={' | '.join(names)}" for g, names in groups.items() if g in own and names]
    if shown:
        lines += ["", "Groups (files of conf/, chosen by name):", *shown]
    sweep = "; -m runs a Hydra sweep, e.g. seed=0,1,2 run='seed${seed}'" if task == "train" else ""
    lines += ["", f"Also: --cfg prints the composed configuration, --info how it came about{sweep}."]
    return "\n".join(lines)


def _own_groups(task: str, keys: list[str]) -> set[str]:
    """Return the groups of `conf/` that a task with these settings takes, if they exist."""
    return {key.partition(".")[0] for key in keys} | ({"experiment"} if task in ("train", "plan") else {task})


def overview() -> str:
    """Return the page that `ensemble-ml --help` prints."""
    rows = [f"  {name:<10} {(task.config.__doc__ or '').strip()}" for name, task in TASKS.items()]
    return "\n".join(
        [
            "ensemble-ml TASK key=value ...",
            "",
            *rows,
            "",
            "ensemble-ml TASK --help explains a task; in a checkout, scripts/quickstart.sh runs simulate to evaluate.",
            'ensemble-ml --version says which one this is; eval "$(ensemble-ml -sc install=bash)" completes by Tab.',
        ]
    )


def _dispatch(arguments: list[str]) -> int:
    """Run what the command line asks for, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"ensemble-ml {__version__}")
        return 0
    if arguments[0] in ("--shell-completion", "-sc"):
        return _complete(arguments[1:])
    task, rest = arguments[0], arguments[1:]
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1)
        raise UserError(
            f"{task}: no such task; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(TASKS)}")
        )
    if "-h" in rest or "--help" in rest:
        print(help_page(task))
        return 0
    options, settings = _parted(rest)
    if task == "inspect":
        settings = _with_store(settings)
    size = next((item for item in settings if re.match(r"[+]*size=", item)), None)
    if task == "simulate" and size is not None:
        raise UserError(f"{size}: names what was chosen, and chooses nothing; use simulate={size.partition('=')[2]}")
    options.pop("--run", options.pop("-r", None))  # running is the default
    shows = sorted(options.keys() & set(_SHOWS))
    if shows and "--multirun" in options:
        raise UserError(f"{shows[0]}: shows one configuration; leave out -m, and give each setting one value")
    if len(shows) > 1:
        raise UserError(f"{shows[0]} and {shows[1]}: each shows something of its own; leave one of them out")
    if shows:
        return _show(task, options, settings)
    alone = next((name for name in ("--resolve", "--package") if name in options), None)
    if alone is not None:
        raise UserError(f"{alone}: belongs to --cfg; use ensemble-ml {task} --cfg job {alone}")
    if "--multirun" in options:
        return _sweep(task, options, settings)
    of_hydra = next((item for item in settings if re.match(r"[+~]*hydra[/.]", item)), None)
    if of_hydra is not None:
        raise UserError(f"{of_hydra}: belongs to a sweep; add -m")
    _warn_twice(settings)
    return run_task(task, compose_config(task, settings, options.get("--config-dir")))


def _parted(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate Hydra's options, under their long names and with their values, from settings.

    Raises:
        UserError: an option does not exist, or its value is missing or not allowed.
    """
    options: dict[str, str] = {}
    settings: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            settings.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in _OPTIONS:
            raise UserError(_no_option(name))
        name = _LONG.get(name, name)
        choices = _CHOICES.get(name, ())
        if choices and not equals:
            follows = bool(waiting) and "=" not in waiting[0] and not waiting[0].startswith("-")
            value = waiting.pop(0) if follows else choices[0]
        elif name in _WITH_A_VALUE and not equals:
            if not waiting:
                raise UserError(f"{name}: needs a value, as in {name} {_EXAMPLES[name]}")
            value = waiting.pop(0)
        if choices and value not in choices:
            raise UserError(f"{name} {value}: {', '.join(choices)} are allowed")
        options[name] = value
    folder = options.get("--config-dir")
    if folder is not None and not Path(folder).is_dir():
        raise UserError(
            f"--config-dir {folder}: no such folder; give one that holds files like conf/experiment/NAME.yaml"
        )
    if folder is not None:
        _refuse_names_of_conf(Path(folder))
    return options, settings


def _refuse_names_of_conf(folder: Path) -> None:
    """Refuse a folder with a file of the same name as one in `conf/` but other content: it would not be used."""
    for shipped in sorted(conf_folder().rglob("*.yaml")):
        name = shipped.relative_to(conf_folder())
        if (folder / name).is_file() and (folder / name).read_bytes() != shipped.read_bytes():
            raise UserError(f"--config-dir {folder}: {name} has the name of a file in conf, which wins; rename yours")


_EXAMPLES = {"--package": "model", "--config-dir": "FOLDER"}


def _no_option(name: str) -> str:
    """Return the message for an option that does not exist."""
    if name in ("--config-name", "-cn", "--config-path", "-cp"):
        more = "the task has its own; give files of yours with --config-dir FOLDER, as in experiment=NAME"
        return f"{name}: cannot be chosen: {more}"
    return f"{name}: no such option; settings are given as key=value, options are --help, --cfg, --info and -m"


def _with_store(settings: list[str]) -> list[str]:
    """Put `store=` before paths that `inspect` is given without it, such as those from a shell's pattern."""
    paths = [item for item in settings if "=" not in item or os.path.exists(item)]
    if not paths:
        return settings
    quoted = [in_quotes(path) for path in paths]
    store = f"store={quoted[0]}" if len(paths) == 1 else f"store=[{','.join(quoted)}]"
    return [store, *(item for item in settings if item not in paths)]


def _show(task: str, options: dict[str, str], settings: list[str]) -> int:
    """Print what one of Hydra's options asks for, without running a task."""
    if "--shell-completion" in options and not re.match(r"((un)?install|query)=(bash|fish|zsh)\b", " ".join(settings)):
        raise UserError('--shell-completion: name the shell: eval "$(ensemble-ml -sc install=bash)", or zsh or fish')
    logging.getLogger().handlers.clear()  # Hydra adds its own handlers, and each line would appear twice
    try:
        _by_hydra(task, options, [] if "--hydra-help" in options else settings, lambda _: None)
    except SystemExit as ended:  # Hydra exits so after its own help page, and for an unknown package
        return int(ended.code or 0)
    return 0


def _warn_twice(settings: list[str]) -> None:
    """Warn of settings that are given twice with different values, as from braces that the shell expands."""
    last: dict[str, str] = {}
    for item in settings:
        key, _, value = item.partition("=")
        if last.setdefault(key, value) != value:
            log.warning("%s: is given more than once, and only the last counts, %s", key, item)
        last[key] = value


def _complete(arguments: list[str]) -> int:
    """Complete the command line for the shell, or print the code that installs completion in the shell."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if not any(item.startswith("query=") for item in arguments):
        return _show(next(iter(TASKS)), {"--shell-completion": ""}, arguments)
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        print(" ".join(name for name in TASKS if name.startswith(words[1] if len(words) > 1 else "")))
    elif words[1] in TASKS:
        os.environ["COMP_LINE"] = re.sub(r"^\s*\S+\s+\S+\s*", "ensemble-ml ", line)
        return _show(words[1], {"--shell-completion": ""}, arguments)
    return 0


def _on_sigterm(*_: object) -> None:
    """Raise KeyboardInterrupt, which unwinds the stack."""
    # Unwinding the stack lets every writer remove its half-made files.
    raise KeyboardInterrupt


def _on_sigusr1(*_: object) -> None:
    """Raise Stopped: a batch system asks for a restart."""
    raise Stopped(requeue=True, why="stopped by SIGUSR1; the same command goes on")


def _stopped(error: KeyboardInterrupt) -> int:
    """Print why the command was stopped, and return the exit status for it."""
    print(f"ensemble-ml: {str(error) or 'interrupted'}", file=sys.stderr)
    if isinstance(error, Stopped) and error.requeue:
        return STATUS_REQUEUE if error.first else 0
    return STATUS_INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: words of the command line; None for those of the process.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = sys.argv[1:] if arguments is None else arguments
    let_waiting_threads_sleep()  # before a task loads torch
    signal.signal(signal.SIGTERM, _on_sigterm)
    if not ignored(signal.SIGHUP):
        signal.signal(signal.SIGHUP, _on_sigterm)
    # SIGUSR1 would end the process at once. Other commands than `train` go on when they are run again
    # (docs/workflows.md), so they may stop anywhere. A training that has not yet loaded its checkpoint handles it once
    # it has (see `ensemble_ml.signals`).
    signal.signal(signal.SIGUSR1, note if arguments[:1] == ["train"] else _on_sigusr1)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"ensemble-ml: {error}", file=sys.stderr)
        return STATUS_USER
    except KeyboardInterrupt as error:
        return _stopped(error)
    except BrokenPipeError:  # the reader of a pipe (head, less) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
