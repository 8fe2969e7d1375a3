"""Prepare a run before its fits: choose training and validation dates, the model's spec, and the run folder."""

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

from ensemble_ml.config import DataConfig, LoaderName, ModelConfig, Objective, TournamentData, TrainConfig
from ensemble_ml.distributed import Session
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.folders import check_writable
from ensemble_ml.loading.order import Stream, words
from ensemble_ml.loading.reader import Reader
from ensemble_ml.machine import cores, keep_freed_memory
from ensemble_ml.models import ModelSpec, refuse_masks
from ensemble_ml.models.padding import geometries
from ensemble_ml.signals import restarts
from ensemble_ml.store.folder import NoLocks, claimed_once
from ensemble_ml.store.las import check_window
from ensemble_ml.store.source import Part, Source, hour_of_day, select_dates
from ensemble_ml.training.agreement import refuse_other_settings
from ensemble_ml.training.checkpoint import (
    META,
    PARTIAL,
    TRAINER,
    Checkpoint,
    clean,
    load_checkpoint,
    load_meta,
    mend_links,
    newest_step,
    point,
    refuse_unread,
    step_name,
)
from ensemble_ml.training.exchanges import VOTES
from ensemble_ml.training.mllog import FILE
from ensemble_ml.wording import date_text

log = logging.getLogger(__name__)

C = TypeVar("C", bound=TrainConfig)

_TRACES = "config.yaml", "log.jsonl", "checkpoints"  # a folder that has one of these holds a run
_LOGS = FILE, VOTES, "tensorboard"
_PATIENCE = 15.0  # seconds that a resumed run waits for the previous job to end
STATIC = ("orog", "lsm")


def split_dates(config: DataConfig, init_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices into `init_time` of the training and of the validation dates.

    Raises:
        UserError: there is no training date, a period has no dates, no date starts at `data.hours`, or a date is both a
            training date and a validation date.
    """
    if not config.train:
        raise UserError("data.train: empty; name init times to train on, e.g. data.train=[2001] or [2001-01/2001-03]")
    train = select_dates(init_time, [str(p) for p in config.train], "data.train")
    validation = select_dates(init_time, [str(p) for p in config.validation], "data.validation")
    train, validation = (_at_hours(config, init_time, dates) for dates in (train, validation))
    both = np.intersect1d(train, validation)
    if len(both):
        first = date_text(init_time[both[0]])
        raise UserError(
            f"data.validation={config.validation}: shares {len(both)} init times with data.train, first {first};"
            " choose different dates; the best checkpoint would otherwise be chosen by dates that it was trained on"
        )
    return train, validation


def _at_hours(config: DataConfig, init_time: np.ndarray, dates: np.ndarray) -> np.ndarray:
    """Return those of `dates` that start at `data.hours`; refuse dates of which none does."""
    if config.hours is None or not len(dates):
        return dates
    hours = hour_of_day(init_time[dates])
    kept = dates[np.isin(hours, config.hours)]
    if not len(kept):
        there = ", ".join(f"{hour:02d}" for hour in np.unique(hours).tolist())
        raise UserError(f"data.hours={config.hours}: no chosen init time is at these hours; they are at {there} UTC")
    return kept


def build_spec(config: TrainConfig, source: Source) -> ModelSpec:
    """Build the model's spec from the settings and the contents of the store.

    Raises:
        UserError: the store lacks something that the settings name, there is nothing to learn, or the settings do not
            fit each other or the grid.
    """
    layout, data = source.layout, config.data
    leads = tuple(sorted(_chosen("data.leads_in", data.leads_in, layout.lead_hours)))
    # By default, lead zero is predicted only if there is no other lead.
    default = [lead for lead in leads if lead > 0] or list(leads)
    static = tuple(name for name in STATIC if name in source.static())
    if not static:
        log.info("static fields: the store holds none, so the model sees no orography or land mask")
    model = _of_store(config, source)
    upper = _chosen("data.variables", data.variables, layout.variables)
    flat = _chosen("data.surface", data.surface, layout.surface)
    if config.objective is Objective.truth and model.postprocess:
        # Variables that the user did not name may be left out if they have no truth.
        by_default = (*(upper if data.variables is None else ()), *(flat if data.surface is None else ()))
        upper, flat = _verified(source, by_default, upper, flat)
    # A misspelt name would otherwise be ignored, and the variable would keep the distribution of the registry.
    if absent := [name for name in model.families or () if name not in (*upper, *flat)]:
        has = ", ".join((*upper, *flat)) or "none"
        raise UserError(f"model.families={absent}: not among the variables of this run ({has}); leave it out")
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
    _check_spec(spec, model)
    return spec


def _of_store(config: TrainConfig, source: Source) -> ModelConfig:
    """Return the model's settings, without postprocessing if the store has no truth; refuse if nothing is to learn."""
    model = config.model
    # Without a truth, the spread of the full ensemble can still be learned.
    if config.objective is Objective.truth and model.postprocess and not source.has(Part.TRUTH):
        if not model.spread or model.name == "emos":
            alone = ", or set model.spread=true" if model.name != "emos" else ""  # EMOS needs the truth in any case
            more = f"{alone}, or objective=members"
            raise UserError(f"store {source.path}: holds no truth; prepare it with truth=...{more}")
        log.info("truth: the store holds none, so the spread alone is learned")
        model = replace(model, postprocess=False)
    if not model.postprocess and not config.spread_weight:
        raise UserError("spread_weight=0: only the spread is learned here, and it needs a weight; give one above 0")
    # One member has no spread, and nothing would be left to predict.
    if len(source.layout.realization) < 2:
        raise UserError(f"store {source.path}: holds one member; two or more are needed to train")
    return model


def _check_spec(spec: ModelSpec, model: ModelConfig) -> None:
    """Check a spec before the fits, which may take an hour, and log the depth that `auto` chose."""
    refuse_masks(spec)
    if spec.local:
        check_window(spec.grid)
    if model.pools:
        geometries(spec.grid, model.pole, spec.config.depth)  # raises a UserError for a depth that the grid cannot have
        if model.depth == "auto":
            rows, columns = spec.grid.shape
            text = "model.depth=auto: %d poolings on %d x %d points%s"
            fewer = spec.config.depth < model.usual_depth
            why = f", the most that the longitudes allow (usually {model.usual_depth})" if fewer else ""
            log.info(text, spec.config.depth, rows, columns, why)


def refuse_unreachable(config: TrainConfig, spec: ModelSpec) -> None:
    """Raise a UserError if training is to end at a score that the model does not have."""
    if config.until and not spec.config.postprocess:
        raise UserError(
            f"until={config.until:g}: is a value of crps_ratio, which a model of the spread alone does not have; leave"
            " it out, or train on a store with a truth and model.postprocess=true"
        )


def open_reader(config: TrainConfig, source: Source, spec: ModelSpec) -> Reader:
    """Return the reader of a run. Its truth is a withheld member of each date if `objective` is `members`."""
    return Reader(source, spec, withhold=config.seed if config.objective is Objective.members else None)


def with_depth(config: C, spec: ModelSpec) -> C:
    """Return the settings of a run with the depth of the spec in place of "auto"."""
    return replace(config, model=replace(config.model, depth=spec.config.depth))


def _chosen(key: str, wanted: list[Any] | None, there: Any) -> tuple[Any, ...]:
    """Return the `wanted` items without repetition, all of which `there` must have; all of `there` for None."""
    if wanted is None:
        return tuple(there)
    missing = [item for item in wanted if item not in there]
    if missing:
        raise UserError(f"{key}={missing}: not available; there are {', '.join(map(str, there)) or 'none'}")
    return tuple(dict.fromkeys(wanted))


def _verified(
    source: Source, by_default: Sequence[str], upper: Sequence[str], flat: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `upper` and `flat` without those `by_default` that have no truth on any date, and warn of these.

    Analyses have no rain, so a store whose truth is an analysis often has a variable without a truth. A variable that
    the user named is kept here. It is refused later, when its truth is read.
    """
    unverified = list(by_default)
    for date in range(len(source.layout.init_time)):
        # Once each variable has had a truth, the other dates need not be looked at.
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


def open_on_all(config: TrainConfig, session: Session) -> tuple[Path, Checkpoint | None]:
    """Open the run on all ranks of a job (`open_run`).

    Returns:
        The folder of this rank's trainer, and the checkpoint to resume from, or None for a new run.

    Raises:
        UserError: the run cannot be opened, or the ranks find different checkpoints.
    """
    # The first rank of each model opens the run before the others do, because it repairs what a killed run left behind.
    trainer = session.topology.place.trainer
    if session.first_of_model:
        folder, checkpoint = open_run(config, trainer=trainer)
    # The others wait without a time limit here: reading a large checkpoint takes a while.
    session.meet()
    if not session.first_of_model:
        folder, checkpoint = open_run(config, tidy=False, trainer=trainer)
    # Each rank looks for the checkpoint itself. A rank that sees another folder would start anew while the others
    # resume. The ranks therefore check that all of them have found the same checkpoint.
    found = {"checkpoint to go on from": checkpoint.meta["sha256"][:16] if checkpoint else "none"}
    session.agree(found, f"let output={config.output} be one folder for all ranks", model=True)
    session.agree({"a checkpoint to go on from": checkpoint is not None})
    return folder, checkpoint


@contextmanager
def claimed_run(config: TrainConfig, session: Session) -> Iterator[None]:
    """Keep other processes from training in the run folder while the context is open. The first rank holds the claim.

    Raises:
        UserError: another process trains there. All ranks raise the error.
        OSError: the folder of the claim cannot be made.
    """
    with ExitStack() as stack:
        refused = session.once(lambda: _claim(config, stack))
        if refused:
            raise UserError(refused)
        yield


def _claim(config: TrainConfig, stack: ExitStack) -> str | None:
    """Claim the run by a lock file beside its folder until `stack` is closed. Return None, or why this cannot be."""
    run = (Path(config.output) / config.run).resolve()
    lock = run.with_name(f".{run.name}.lock")
    # A requeued job may start a little before the previous one has ended.
    limit = time.monotonic() + _PATIENCE
    until = limit if _goes_on(config) else 0.0
    told = False
    while True:
        with ExitStack() as attempt:
            # If the claim fails, folders that were made only for the lock file are removed again.
            attempt.callback(_remove_empty, _made(lock.parent))
            try:
                held = attempt.enter_context(claimed_once(lock))
            except FileNotFoundError as error:
                if time.monotonic() < limit:  # a run that just ended has removed the folder again
                    time.sleep(0.2)
                    continue
                return f"run={config.run}: its lock file {lock} cannot be made ({error.strerror}); remove it"
            except (NoLocks, PermissionError) as error:
                if isinstance(error, PermissionError) and not run.exists():
                    raise  # the run folder could not be made either
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
    """Return the host and process that hold the lock, as the lock file names them."""
    try:
        return lock.read_text() or "unknown"
    except OSError:
        return "unknown"


def _made(folder: Path) -> list[Path]:
    """Make a folder and its parents, and return those that did not exist before, the innermost first."""
    absent = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return absent


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, until one is not empty."""
    with suppress(OSError):  # a folder that is not empty holds a run
        for folder in folders:
            folder.rmdir()


def open_run(config: TrainConfig, *, tidy: bool = True, trainer: int = 0) -> tuple[Path, Checkpoint | None]:
    """Return the folder of a run, or of one of its trainers, and the checkpoint to resume from or None for a new run.

    Args:
        config: settings of the run.
        tidy: whether to repair links that a copy has lost, and to remove what a killed run has left. Only one rank of a
            model may do so.
        trainer: number of the trainer, if there are several.

    Raises:
        UserError: the folder holds a run and `resume` is off. The run to resume has other settings or another number of
            trainers, or its checkpoint is damaged. A folder may not be written; this includes folders that are needed
            only later, such as that of the cache on disk.
    """
    if config.loading.disk_bytes and config.loading.folder:
        check_writable(config.loading.folder, "loading.folder")
    planned = config.loading.name is LoaderName.clairvoyant
    if planned and config.loading.timeline not in (None, "run"):  # written only when the run ends
        check_writable(Path(config.loading.timeline).parent, "loading.timeline")
    run = Path(config.output) / config.run
    check_writable(run, "run")
    several = config.parallel.trainer > 1
    folder = trainer_folder(run, trainer) if several else run
    if not _goes_on(config):
        if any((run / name).exists() for name in _TRACES):  # other files alone, such as a plan, make no run
            raise UserError(f"run {run}: exists; go on with resume=true, choose another run=NAME, or remove it")
        return folder, None
    checkpoints = folder / "checkpoints"
    # A copy of a run may lack its links. They are repaired before anything is read through them.
    if tidy:
        mend_links(checkpoints)
    # If all checkpoints are of step 0, this trainer starts anew with the others.
    if several and not _refuse_mixed(config, run) and tidy:
        for link in ("last", "best"):
            (checkpoints / link).unlink(missing_ok=True)
        clean(checkpoints)
    # A run that was killed before its first checkpoint starts anew.
    if not (checkpoints / "last").exists():
        refuse_unread(checkpoints)
        log.info("resume: %s holds no checkpoint, so the run starts anew", folder)
        return folder, None
    checkpoint = load_checkpoint(checkpoints / "last", training=True)
    refuse_other_settings(config, checkpoint)
    # The best checkpoint may have been deleted by the user or lost in a copy.
    best = checkpoint.meta["best"]
    if best is not None and not (checkpoints / (kept := step_name(best["step"]))).exists():
        checkpoint.meta["best"] = best = None
        if tidy:
            text = "resume: %s is not there, so the search for the best checkpoint begins again at the next validation"
            log.warning(text, kept)
    if tidy:
        # A run that was killed after it moved `last` and before it moved `best` left an old `best`.
        if best is not None:
            point(checkpoints, "best", kept)
        clean(checkpoints)
    return folder, checkpoint


def _refuse_mixed(config: TrainConfig, run: Path) -> bool:
    """Return whether all trainers of a run have a checkpoint; refuse to resume with another number of trainers.

    No trainer takes a step before every trainer has a first checkpoint. If only some trainers have a checkpoint, and
    all of these are of step 0, the run was killed at its beginning.
    """
    trainers, top = config.parallel.trainer, run / "checkpoints" / "last"
    folders = [trainer_folder(run, trainer) / "checkpoints" for trainer in range(trainers)]
    if (top / META).is_file() and (was := load_meta(top)["config"]["parallel"].get("trainer", 1)) != trainers:
        raise UserError(f"resume: parallel.trainer={trainers} (was {was} in {run}); give the same, or use init_from")
    steps = [newest_step(folder) for folder in folders]
    if None in steps and any(steps):
        lost = folders[steps.index(None)] / "last"
        raise UserError(f"resume: {lost} is not there, while other trainers have theirs; put it back")
    return None not in steps


def trainer_folder(run: Path, trainer: int) -> Path:
    """Return the folder of one of several trainers of a run."""
    return run / f"{TRAINER}{trainer:02d}"


def own_settings(config: TrainConfig, trainer: int, varied: int) -> TrainConfig:
    """Return the settings of one of several trainers: its own seed, and its values of `tournament.vary`.

    The seed gives each trainer its own order of init times and members. The first trainer keeps the seed of the run.
    The values are those of the trainer with the number `varied`. Settings of a run with a single trainer are returned
    unchanged.
    """
    if config.parallel.trainer == 1:
        return config
    seed = int(words(config.seed, Stream.TRAINERS, 0, trainer, 1)[0]) >> 1 if trainer else config.seed
    values = {key: numbers[varied] for key, numbers in (config.tournament.vary or {}).items()}
    optim = {key.removeprefix("optim."): value for key, value in values.items() if key.startswith("optim.")}
    own = {key: value for key, value in values.items() if "." not in key}
    return replace(config, seed=seed, optim=replace(config.optim, **optim), **own)


def own_dates(config: TrainConfig, dates: np.ndarray, trainer: int) -> np.ndarray:
    """Return those of the training dates (indices) that a trainer takes its samples from.

    Raises:
        UserError: the dates are too few to give each trainer a batch of its own.
    """
    trainers = config.parallel.trainer
    if trainers == 1 or config.tournament.data is TournamentData.shared:
        return dates
    if len(dates) < trainers * config.batch_size:
        raise UserError(
            f"tournament.data=parted: {len(dates)} training dates do not give {trainers} trainers a batch of"
            f" {config.batch_size} each; give tournament.data=shared, or a smaller batch_size"
        )
    # The dates are dealt out in turn, so that each trainer gets dates of all seasons and years.
    return dates[trainer::trainers]


def refuse_shards(shards: int, ranks: int, session: Session | None = None) -> None:
    """Refuse a number of shards of the weights that the ranks cannot have.

    Args:
        shards: the setting `parallel.shard`; 1 is always possible.
        ranks: number of ranks that train one set of weights.
        session: the ranks of the job; None if a job is only planned.

    Raises:
        UserError: there is only one rank, `shards` does not divide the number of ranks, or several ranks use one GPU.
    """
    if shards == 1:
        return
    if ranks == 1:
        raise UserError(f"parallel.shard={shards}: one rank has nobody to share weights with; start {shards} ranks")
    if ranks % shards:
        raise UserError(f"parallel.shard={shards}: does not divide {ranks} ranks; give a factor of {ranks}, or auto")
    if session is not None and session.device.type == "cuda" and not session.apart:
        raise UserError(f"parallel.shard={shards}: ranks that share a GPU cannot share weights; start one rank a GPU")


def forget(folder: Path, *, there: bool) -> None:
    """Remove the files of a run that has no checkpoint, so that it can be started again.

    If the folder existed before the run (`there`), only the settings, the logs, the checkpoints and the folders of
    trainers are removed.
    """
    # Nothing is removed where somebody keeps the copy of a later checkpoint.
    entries = (path.parent for path in folder.glob(f"**/checkpoints/*/{META}"))
    if {path.resolve().name for path in entries if not path.name.startswith(PARTIAL)} - {step_name(0)}:
        return
    traces = [*(folder / name for name in (*_TRACES, *_LOGS)), *folder.glob(f"{TRAINER}*")]
    for path in traces if there else [folder]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _goes_on(config: TrainConfig) -> bool:
    """Return True if the run resumes from its last checkpoint, False if it is new."""
    if config.resume == "auto":
        return restarts() > 0
    return bool(config.resume)


def use_threads(config: TrainConfig, was: int | None = None, ranks: int = 1) -> int:
    """Set and return torch's number of threads, and let this process keep memory that it frees.

    A warning is logged if a resumed run had another number of threads, because that changes the last bits of results.

    Args:
        config: settings of the run.
        was: number of threads before the run was resumed; None for a new run, or to leave the warning to another rank.
        ranks: number of processes that share the cores, with this one.
    """
    threads = config.threads or max(1, cores() // ranks)
    torch.set_num_threads(threads)
    # Memory that is given back to the system after a step would have to be requested again in the next one.
    keep_freed_memory()
    if was not in (None, threads):
        log.warning("threads: %d now, %d before: results will not be equal bit for bit", threads, was)
    return threads


def tell_of_other_versions(was: Mapping[str, str]) -> None:
    """Warn if a resumed run was computed with other versions of torch or NumPy, as its checkpoint recorded them."""
    now = versions()
    for name in ("torch", "numpy"):
        if was.get(name) not in (None, now[name]):
            text = "%s: %s now, %s before: results will not be equal bit for bit"
            log.warning(text, name, now[name], was[name])


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint records, by package."""
    found = {"python": platform.python_version()}
    for name in ("ensemble-ml", "torch", "numpy", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
