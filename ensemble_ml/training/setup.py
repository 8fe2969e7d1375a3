"""Before the first step: dates, the model's spec, the run folder."""

from __future__ import annotations

import logging
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ensemble_ml.config import DataConfig, LoaderName, TrainConfig
from ensemble_ml.distributed import Session
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.folders import check_writable
from ensemble_ml.machine import cores, keep_freed_memory
from ensemble_ml.models import ModelSpec, refuse_masks
from ensemble_ml.models.padding import geometries
from ensemble_ml.signals import restarts
from ensemble_ml.store.las import check_window
from ensemble_ml.store.locks import NoLocks, claimed_once
from ensemble_ml.store.source import Part, Source, hour_of_day, select_dates
from ensemble_ml.training.agreement import refuse_other_settings
from ensemble_ml.training.checkpoint import Checkpoint, clean, load_checkpoint, mend_links, point, refuse_unread

log = logging.getLogger(__name__)

C = TypeVar("C", bound=TrainConfig)

_TRACES = "config.yaml", "log.jsonl", "checkpoints"  # what a run leaves first
_PATIENCE = 15.0  # seconds that a run which goes on waits for the job before it to end
STATIC = ("orog", "lsm")


def split_dates(config: DataConfig, init_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation dates.

    Raises:
        UserError: no training date, a period without dates, hours at which none starts, or a date in both.
    """
    if not config.train:
        raise UserError("data.train: empty; name start dates to train on, e.g. data.train=[2001] or [2001-01/2001-03]")
    train = select_dates(init_time, [str(p) for p in config.train], "data.train")
    validation = select_dates(init_time, [str(p) for p in config.validation], "data.validation")
    train, validation = (_at_hours(config, init_time, dates) for dates in (train, validation))
    both = np.intersect1d(train, validation)
    if len(both):
        first = np.datetime64(init_time[both[0]], "h")
        raise UserError(
            f"data.validation={config.validation}: shares {len(both)} start dates with data.train, first {first};"
            " choose dates apart, or the best checkpoint is chosen on what it was trained on"
        )
    return train, validation


def _at_hours(config: DataConfig, init_time: np.ndarray, dates: np.ndarray) -> np.ndarray:
    """Those of `dates` that start at `data.hours`.

    Raises:
        UserError: there are some, and none does.
    """
    if config.hours is None or not len(dates):
        return dates
    hours = hour_of_day(init_time[dates])
    kept = dates[np.isin(hours, config.hours)]
    if not len(kept):
        there = ", ".join(f"{hour:02d}" for hour in np.unique(hours).tolist())
        raise UserError(f"data.hours={config.hours}: no start date that was chosen starts then; there are {there} UTC")
    return kept


def build_spec(config: TrainConfig, source: Source) -> ModelSpec:
    """What the model takes and gives, from the settings and what the store holds.

    Raises:
        UserError: the store lacks something that is asked for, or there is nothing to learn from.
    """
    layout, data, model = source.layout, config.data, config.model
    leads = tuple(sorted(_chosen("data.leads_in", data.leads_in, layout.lead_hours)))
    default = [lead for lead in leads if lead > 0] or list(leads)
    static = tuple(name for name in STATIC if name in source.static())
    if not static:
        log.info("static fields: the store holds none, so the model sees no orography or land mask")
    if model.postprocess and not source.has(Part.TRUTH):
        if not model.spread or model.name == "emos":
            alone = ", or set model.spread=true" if model.name != "emos" else ""  # which has no spread without it
            raise UserError(f"store {source.path}: holds no truth; prepare it with truth=...{alone}")
        log.info("truth: the store holds none, so the spread alone is learned")
        model = replace(model, postprocess=False)
    if not model.postprocess and not config.spread_weight:
        raise UserError("spread_weight=0: the spread alone is learned, so nothing would be; give a weight above 0")
    if len(layout.realization) < 2:
        raise UserError(f"store {source.path}: holds one member; two or more are needed to train")
    upper = _chosen("data.variables", data.variables, layout.variables)
    flat = _chosen("data.surface", data.surface, layout.surface)
    if model.postprocess:
        by_default = (*(upper if data.variables is None else ()), *(flat if data.surface is None else ()))
        upper, flat = _verified(source, by_default, upper, flat)
    if absent := [name for name in model.families or () if name not in (*upper, *flat)]:
        has = ", ".join((*upper, *flat)) or "none"
        raise UserError(f"model.families={absent}: no variable of this run, which has {has}; leave it out")
    zero = [name for name in (*upper, *flat) if leads == (0,) and field(name).accumulated]
    if zero:
        raise UserError(
            f"data.leads_in=[0]: {', '.join(zero)} at +0 h is zero by nature; leave it out of data.surface, or give a"
            " later lead too"
        )
    spec = ModelSpec(
        model,
        upper,
        tuple(sorted(_chosen("data.levels", data.levels, layout.levels))) if upper else (),
        flat,
        leads,
        tuple(sorted(_chosen("data.leads_out", data.leads_out, default))),
        tuple(layout.grid.latitude),
        tuple(layout.grid.longitude),
        static,
        tuple(name for name in source.masked if name in (*upper, *flat)),
    )
    # What can be judged at once is refused before the long fits.
    refuse_masks(spec)
    if spec.local:
        check_window(spec.grid)
    if model.pools:
        geometries(spec.grid, model.pole, spec.config.depth)  # refuses a depth that the grid cannot have
        if model.depth == "auto":
            rows, columns = spec.grid.shape
            text = "model.depth=auto: %d poolings on %d x %d points%s"
            fewer = spec.config.depth < model.usual_depth
            why = f", the most that the longitudes allow (usually {model.usual_depth})" if fewer else ""
            log.info(text, spec.config.depth, rows, columns, why)
    return spec


def with_depth(config: C, spec: ModelSpec) -> C:
    """Return `config` with the depth of `spec`, where it said auto."""
    return replace(config, model=replace(config.model, depth=spec.config.depth))


def _chosen(key: str, wanted: list[Any] | None, there: Any) -> tuple[Any, ...]:
    if wanted is None:
        return tuple(there)
    missing = [item for item in wanted if item not in there]
    if missing:
        raise UserError(f"{key}={missing}: not available; there are {', '.join(map(str, there)) or 'none'}")
    return tuple(dict.fromkeys(wanted))


def _verified(
    source: Source, by_default: Sequence[str], upper: Sequence[str], flat: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return variables without those that have no truth on any start date, and warn of these.

    Analyses have no rain, so a store of one often has such a variable. One that the user has asked for by name stays,
    and is refused when its truth is read.

    Args:
        source: what the model learns from.
        by_default: the variables that may be left out.
        upper: all variables on pressure levels.
        flat: all surface variables.
    """
    unverified = list(by_default)
    for date in range(len(source.layout.init_time)):
        if not unverified:
            break
        pressure, surface = source.present(Part.TRUTH, date)  # (M, T, V, Z) and (M, T, S)
        of_date = np.concatenate([pressure.any((0, 1, 3)), surface.any((0, 1))])
        there = dict(zip(source.layout.names, of_date, strict=True))
        unverified = [name for name in unverified if not there[name]]
    if unverified:
        text = "store %s: holds no truth of %s, so the model leaves it out; prepare the store with a truth that has it"
        log.warning(text, source.path, ", ".join(unverified))
    kept = [tuple(name for name in names if name not in unverified) for names in (upper, flat)]
    return kept[0], kept[1]


@contextmanager
def claimed_run(config: TrainConfig, session: Session) -> Iterator[None]:
    """Let nobody else train in the run folder, from before the fits to the end; the first rank holds the claim.

    Raises:
        UserError: on all ranks, where another process trains there.
    """
    with ExitStack() as stack:
        refused = session.once(lambda: _claim(config, stack))
        if refused:
            raise UserError(refused)
        yield


def _claim(config: TrainConfig, stack: ExitStack) -> str | None:
    """Claim the run by a file beside its folder, until `stack` is closed; returns why it cannot be."""
    run = (Path(config.output) / config.run).resolve()
    lock = run.with_name(f".{run.name}.lock")
    until = time.monotonic() + (_PATIENCE if _goes_on(config) else 0.0)  # a requeued job may come a little early
    told = False
    while True:
        with ExitStack() as attempt:
            attempt.callback(_remove_empty, _made(lock.parent))
            try:
                held = attempt.enter_context(claimed_once(lock))
            except FileNotFoundError:  # a run that ended has taken the folder away that was made for it
                continue
            except (NoLocks, PermissionError) as error:
                if isinstance(error, PermissionError) and not run.exists():
                    raise  # nor could the run be made
                why = getattr(error.__cause__ or error, "strerror", error)
                log.warning("run %s: no lock keeps other processes from training there (%s)", run, why)
                held = True
            if held:
                stack.enter_context(attempt.pop_all())
                return None
        if time.monotonic() < until:
            if not told:
                log.info("run %s: another process trains there; waiting %g s for its end", run, _PATIENCE)
            told = True
            time.sleep(0.2)
        else:
            return (
                f"run={config.run}: another process trains in {run} (host and process: {_holder(lock)}); wait until it"
                " ends, or choose another run=NAME"
            )


def _holder(lock: Path) -> str:
    try:
        return lock.read_text() or "unknown"
    except OSError:
        return "unknown"


def _made(folder: Path) -> list[Path]:
    """Make a folder; returns those that were not there, the innermost first."""
    absent = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return absent


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # a run lies there
        for folder in folders:
            folder.rmdir()


def open_run(config: TrainConfig, *, tidy: bool = True) -> tuple[Path, Checkpoint | None]:
    """Return the run folder and the checkpoint to go on from, None for a new run.

    `tidy`: mend and clear what a killed run or a copy without links left; for one rank of a job.

    Raises:
        UserError: the folder exists and `resume` is off, or `resume` meets other settings; or the cache on disk, which
            is made after the fits, may not be written.
    """
    if config.loading.disk_bytes and config.loading.folder:
        check_writable(config.loading.folder, "loading.folder")
    planned = config.loading.name is LoaderName.clairvoyant
    if planned and config.loading.timeline not in (None, "run"):  # written when the run ends
        check_writable(Path(config.loading.timeline).parent, "loading.timeline")
    run = Path(config.output) / config.run
    check_writable(run, "run")
    if not _goes_on(config):
        if any((run / name).exists() for name in _TRACES):  # other files may lie there: a plan
            raise UserError(f"run {run}: exists; go on with resume=true, choose another run=NAME, or remove it")
        return run, None
    checkpoints = run / "checkpoints"
    if tidy:
        mend_links(checkpoints)
    if not (checkpoints / "last").exists():
        refuse_unread(checkpoints)
        log.info("resume: %s holds no checkpoint, so the run starts anew", run)
        return run, None
    checkpoint = load_checkpoint(checkpoints / "last", training=True)
    refuse_other_settings(config, checkpoint)
    best = checkpoint.meta["best"]
    if best is not None and not (checkpoints / (kept := f"step_{best['step']:08d}")).exists():
        checkpoint.meta["best"] = best = None
        if tidy:
            log.warning("resume: %s is not there, so the next validation begins to look for the best again", kept)
    if not tidy:
        return run, checkpoint
    if best is not None:  # the run may have died between the exchange of the two links
        point(checkpoints, "best", kept)
    clean(checkpoints)
    return run, checkpoint


def refuse_trainers(count: int) -> None:
    """Raise a UserError where a job is to train several models."""
    if count > 1:
        raise UserError(f"parallel.trainer={count}: one job trains one model; start a job for each")


def forget(folder: Path, *, there: bool) -> None:
    """Remove what a run without a checkpoint has left, so that it can be begun again: of a folder that was `there`
    before it, its own files alone."""
    for path in [folder / name for name in _TRACES] if there else [folder]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _goes_on(config: TrainConfig) -> bool:
    if config.resume == "auto":
        return restarts() > 0
    return bool(config.resume)


def use_threads(config: TrainConfig, was: int | None = None, ranks: int = 1) -> int:
    """Settle this process for training: set torch's threads and return how many, and keep freed memory.

    Warns where a resumed run had another number, `was`.

    `ranks`: processes that share this one's cores.
    """
    threads = config.threads or max(1, cores() // ranks)
    torch.set_num_threads(threads)
    keep_freed_memory()
    if was not in (None, threads):
        log.warning("threads: %d now, %d before: results will not be equal bit for bit", threads, was)
    return threads


def tell_of_other_versions(was: Mapping[str, str]) -> None:
    """Warn of libraries that compute, where a resumed run had another version of one."""
    now = versions()
    for name in ("torch", "numpy"):
        if was.get(name) not in (None, now[name]):
            text = "%s: %s now, %s before: results will not be equal bit for bit"
            log.warning(text, name, now[name], was[name])


def versions() -> dict[str, str]:
    """Versions that a checkpoint records."""
    found = {"python": platform.python_version()}
    for name in ("ensemble-ml", "torch", "numpy", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
