"""The command line: `ensemble-ml TASK key=value ...`.

`compose` turns the arguments into the settings of the task, and the task runs. A user's mistake ends in one line and
status 2. `-m` runs a sweep by Hydra's own launcher. Options that show something (`--cfg`, `--info`, shell completion)
are Hydra's own, too.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ensemble_ml.config as schema
from ensemble_ml import __version__
from ensemble_ml.compose import build_config, compose_config, groups_of, in_quotes, one_line, readable, register_schemas
from ensemble_ml.errors import STATUS_REQUEUE, Stopped, UserError
from ensemble_ml.folders import conf_folder
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
_EXAMPLES = {"--package": "model", "--config-dir": "FOLDER"}
_LONG = {
    "-c": "--cfg",
    "-i": "--info",
    "-p": "--package",
    "-cd": "--config-dir",
    "-sc": "--shell-completion",
    "-m": "--multirun",
}
_EXTRAS = {  # the extra of ensemble-ml that installs a module
    "eccodes": "grib",
    "cfgrib": "grib",
    "gribapi": "grib",
    "jcm": "simulate",
    "jax": "simulate",
    "dinosaur": "simulate",
    "distributed": "cluster",
    "dask_jobqueue": "cluster",
}


def run_task(task: str, composed: DictConfig) -> int:
    """Run a task on its composed configuration and return the exit status.

    Raises:
        UserError: a setting is not allowed, a package that the task needs is not installed, or the operating system
            refused an operation.
    """
    config = build_config(task, composed, TASKS[task].example)
    try:
        TASKS[task].run(config)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise UserError(f"{error.name}: not installed; pip install 'ensemble-ml[{extra}]'") from error
    except BrokenPipeError:  # `main` then ends without a message
        raise
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise UserError(f"{error.filename or task}: {error.strerror or error}") from error
    return 0


def _sweep(task: str, options: dict[str, str], arguments: list[str]) -> int:
    """Hand a multi-run to Hydra, which calls `job` once for each combination.

    If a run fails or is stopped and the sweep does not continue (see `_goes_on`), SystemExit ends the process.
    """
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
        raise UserError(f"{len(failed)} of the sweep's runs failed; the last: {failed[-1]}")
    return 0


def _by_hydra(
    task: str, options: dict[str, str], arguments: list[str], job: Callable[[DictConfig], int | None]
) -> None:
    """Run Hydra's own command line with the configuration of a task; `job` runs it on one composed configuration.

    `options` are Hydra's under their long names, with their values. A mistake in the settings becomes a UserError.
    """
    import hydra

    register_schemas()
    GlobalHydra.instance().clear()
    flags = [word for name, value in options.items() for word in (name, value) if word]
    # Hydra does not accept flags between settings, so they come first.
    name = "ensemble-ml" if "--shell-completion" in options else f"ensemble-ml {task}"
    sys.argv = [name, *flags, *readable(task, arguments)]
    # Without this Hydra would print errors in settings itself, in many lines and with another status.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=task)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(task, error)) from error


def _goes_on() -> bool:
    """Return whether a sweep continues in this process if a run fails.

    A process that runs a single combination must end with a status instead: Hydra turns exceptions into results, and
    SLURM would call the job completed. So must one of several ranks, because its failure has ended the other ranks.
    """
    from hydra.core.hydra_config import HydraConfig

    from ensemble_ml.distributed.meeting import met

    return str(HydraConfig.get().launcher._target_).endswith(".BasicLauncher") and not met()


def help_page(task: str) -> str:
    """Return the page that `ensemble-ml TASK --help` prints."""
    entry, config = TASKS[task], schema.SCHEMAS[task]
    lines = [
        f"ensemble-ml {task}: {(config.__doc__ or '').strip()}",
        "",
        f"  ensemble-ml {task} {entry.example}",
        "",
        f"Leaves: {entry.leaves}",
        "",
        "Settings (key=value; ??? must be given):",
    ]
    composed = OmegaConf.to_container(compose_config(task, []), throw_on_missing=False)
    # The page shows the defaults in force: those of the files in conf/ take precedence over the schema.
    rows = schema.setting_lines(config, composed)
    width = min(34, max(len(f"{key}={default}") for key, default, _ in rows))
    lines += [f"  {f'{key}={default}':<{width}}  {doc}" for key, default, doc in rows]
    shown = [f"  {group}={' | '.join(names)}" for group, names in groups_of(task).items() if names]
    if shown:
        lines += ["", "Groups (files of conf/, chosen by name):", *shown]
    sweep = "; -m runs a Hydra sweep, e.g. seed=0,1,2 run='seed${seed}'" if task == "train" else ""
    lines += ["", f"Also: --cfg prints the composed configuration, --info how it came about{sweep}."]
    return "\n".join(lines)


def overview() -> str:
    """Return the page that `ensemble-ml --help` prints."""
    rows = [f"  {task:<10} {(schema.SCHEMAS[task].__doc__ or '').strip()}" for task in TASKS]
    return "\n".join(
        [
            "ensemble-ml TASK key=value ...",
            "",
            *rows,
            "",
            "ensemble-ml TASK --help explains a task; in a checkout, scripts/quickstart.sh runs simulate to evaluate.",
            'ensemble-ml --version prints the version; eval "$(ensemble-ml -sc install=bash)" completes by Tab.',
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
        raise UserError(f"{size}: is only the name of the chosen size; use simulate={size.partition('=')[2]}")
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
    """Separate Hydra's options, under their long names and with their values, from settings, and check them."""
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
    if folder is not None:
        if not Path(folder).is_dir():
            raise UserError(
                f"--config-dir {folder}: no such folder; give one that holds files like conf/experiment/NAME.yaml"
            )
        _refuse_names_of_conf(Path(folder))
    return options, settings


def _refuse_names_of_conf(folder: Path) -> None:
    """Refuse a folder with a file of the same name as one in `conf/` but other content: it would not be used."""
    for shipped in sorted(conf_folder().rglob("*.yaml")):
        name = shipped.relative_to(conf_folder())
        if (folder / name).is_file() and (folder / name).read_bytes() != shipped.read_bytes():
            raise UserError(f"--config-dir {folder}: {name} has the name of a file in conf, which wins; rename yours")


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
    """Warn about settings that are given twice with different values, as from braces that the shell expands."""
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
    """Raise KeyboardInterrupt, so that every writer removes its unfinished files while the stack unwinds."""
    raise KeyboardInterrupt


def _on_sigusr1(*_: object) -> None:
    """Raise Stopped: a batch system asks for a restart."""
    raise Stopped(requeue=True, why="stopped by SIGUSR1; the same command goes on")


def _stopped(error: KeyboardInterrupt) -> int:
    """Print why the command was stopped, and return the exit status for it."""
    print(f"ensemble-ml: {str(error) or 'interrupted'}", file=sys.stderr)
    if isinstance(error, Stopped) and error.requeue:
        return STATUS_REQUEUE if error.first else 0  # a launcher ends all ranks at the first status that is not 0
    return STATUS_INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """Run the command line of some words, or of the process if they are None, and return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = sys.argv[1:] if arguments is None else arguments
    let_waiting_threads_sleep()  # before a task loads torch
    signal.signal(signal.SIGTERM, _on_sigterm)
    if not ignored(signal.SIGHUP):
        signal.signal(signal.SIGHUP, _on_sigterm)
    # Without a handler, SIGUSR1 would end the process at once. All commands but `train` may stop anywhere, because they
    # go on when they are run again (docs/workflows.md). A training acts on the signal only after it has loaded its
    # checkpoint (see `ensemble_ml.signals`).
    signal.signal(signal.SIGUSR1, note if arguments[:1] == ["train"] else _on_sigusr1)
    try:
        status = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # Python's own flush at exit would report a full disk in many lines, with status 120
        return status
    except UserError as error:
        print(f"ensemble-ml: {error}", file=sys.stderr)
        return STATUS_USER
    except KeyboardInterrupt as error:
        return _stopped(error)
    except BrokenPipeError:  # the reader of a pipe (head, less) has closed it
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        told = f"output cannot be written: {error.strerror}; free space, or choose another disk"
        print(f"ensemble-ml: {told}", file=sys.stderr)
        _drop_output()
        return STATUS_USER


def _drop_output() -> None:
    """Redirect standard output to the null device, so that what is left of it raises no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
