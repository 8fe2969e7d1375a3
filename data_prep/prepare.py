"""Run `ensemble-ml prepare`: build a tensor store from an archive, one init time after the other."""

from __future__ import annotations

import glob
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.build_job import Job
from data_prep.build_run import run
from data_prep.gaps import listed
from ensemble_ml.config import MISSING, Executor, Gaps, Packing, PrepareConfig, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store import is_store, open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.metadata import plan_digest
from ensemble_ml.store.remote import is_remote, url_of
from ensemble_ml.wording import date_text, dates_of, shortened

log = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> Path:
    """Build a tensor store from an archive.

    All checks that need no values (missing fields, different grids) come first. The store appears under its name only
    when it is complete. To continue a run that was interrupted, call it again with the same settings.

    Returns:
        The path of the store; with `parts`, the folder of the unfinished store if other shares are still missing.

    Raises:
        UserError: a setting is wrong; a file is missing, damaged or changes meanwhile; with `gaps=error`, a field is
            missing for some init times or members, or in the truth; a value is NaN or not plausible; the output exists,
            or an unfinished build of it has other settings; a worker died.
        KeyboardInterrupt: the build was stopped; init times that are built are kept.
    """
    _check_settings(config)
    config = _with_whole_paths(config)
    job = Job(config)
    path = Path(config.output)
    if _may_be_done(config) and plan_digest(path) == job.plan.digest and not Build.unfinished(path):
        log.info("%s: is complete already", path)  # by the process of another share
        return path
    _log_gaps(job)
    build = Build(path, job.plan, overwrite=config.overwrite, restart=config.restart)
    if not build.complete:
        _log_plan(job)
        # False means that other shares of the init times are still missing.
        if not run(config, job, build):
            return build.work
    _log_errors(path)
    log.info("%s: written", path)
    return path


def _with_whole_paths(config: PrepareConfig) -> PrepareConfig:
    """Make all paths absolute, because workers and later runs of the same build may start in other folders."""
    given, truth = ([whole_path(path) for path in as_list(paths)] for paths in (config.input, config.truth))
    static = whole_path(config.static) if as_list(config.static) else None
    index = str(Path(config.index).absolute()) if config.index else config.index
    regrid = whole_path(config.regrid) if isinstance(config.regrid, str) else config.regrid
    output = str(Path(config.output).absolute())
    return replace(config, input=given, truth=truth or None, static=static, index=index, regrid=regrid, output=output)


def whole_path(path: Any) -> Any:
    """Return an absolute path or glob, or a URL. An open Dataset stays as it is.

    The name of the current folder may contain special characters of globs, so it is escaped.
    """
    if is_dataset(path):
        return path
    if is_remote(path):
        return url_of(path)
    pattern = glob.has_magic(path) and not os.path.exists(path) and not os.path.isabs(path)
    return os.path.join(glob.escape(os.getcwd()), path) if pattern else str(Path(path).absolute())


def _may_be_done(config: PrepareConfig) -> bool:
    """Return whether another process may have completed the store, so that its existence is no error."""
    return config.parts is not None or config.finalise


def _check_settings(config: PrepareConfig) -> None:
    """Raise a UserError for settings that can be refused before any file is opened."""
    for key in ("input", "output"):
        if not is_dataset(getattr(config, key)) and getattr(config, key) in (MISSING, None, "", []):
            raise UserError(f"{key}: is not given; give {key}=PATH")
    for key in ("truth", "static"):
        if any(not is_dataset(path) and not path for path in as_list(getattr(config, key))):
            raise UserError(f"{key}: holds an empty path; give one, or set {key}=null")
    for key in ("input", "truth"):
        for path in as_list(getattr(config, key)):
            if not is_dataset(path) and is_store(Path(path)):
                raise UserError(f"{key}={path}: is a tensor store already; prepare reads archives (GRIB, NetCDF, Zarr)")
    # An open Dataset cannot be sent to other processes, so only threads can build from it.
    held = [path for key in ("input", "truth") for path in as_list(getattr(config, key)) if is_dataset(path)]
    if held and config.executor is not Executor.threads:
        remedy = "an open Dataset is computed by Dask: choose its scheduler, and leave executor=threads"
        raise UserError(f"executor={config.executor.value}: {remedy}")
    output = Path(config.output).absolute()
    for key in ("input", "truth", "static") if config.overwrite else ():
        for path in (one for one in as_list(getattr(config, key)) if not is_dataset(one) and not is_remote(one)):
            if output.resolve() in Path(path).resolve().parents:
                raise UserError(f"{key}={path}: lies in the output, which overwrite=true removes; move it elsewhere")
    known = Build.unfinished(output) or (_may_be_done(config) and is_store(output))
    # The build checks this again, but only after all files have been indexed, which may take hours.
    if output.exists() and not config.overwrite and not known:
        raise UserError(f"output={config.output}: exists already; choose another folder, or add overwrite=true")


def _log_gaps(job: Job) -> None:
    """Log the init times that are missing, and fields that are absent or have no truth."""
    if job.truth is not None:
        for note in job.truth.unverified().values():
            log.warning("%s", note)
    if job.gaps:
        done = "these init times are left out" if job.config.gaps is Gaps.skip else "these fields are absent"
        log.warning("%s: %s; %s (gaps=%s)", job.source.path, listed(job.gaps), done, job.config.gaps.value)
    missing = dates_of(job.plan.provenance.get("gaps", {}).get("starts", ""))
    if len(missing):
        shown = shortened([date_text(start) for start in missing])
        log.warning("%s: %d init times of a regular series are missing: %s", job.source.path, len(missing), shown)


def _log_plan(job: Job) -> None:
    """Log what the archive holds and what is stored of it."""
    source, lay, geometry = job.source, job.both.layout, job.source.catalogue.geometry
    log.info(
        "%s: %d init times, %d members, leads %s h, %s; levels %s hPa; grid %s",
        source.path,
        len(lay.init_time),
        len(lay.realization),
        ", ".join(map(str, lay.lead_hours)),
        ", ".join(lay.names),
        ", ".join(map(str, lay.levels)) or "none",
        lay.grid.describe(),
    )
    for name, spans in source.cut.items():
        log.info("%s: %s; the intervals between them are left out with their leads", name, spans)
    if not geometry.same:
        how = "cut out of" if geometry.crop else "interpolated from" if geometry.reduced else "conservative means of"
        log.info("grid: %s %s", how, geometry.source.describe())
    if not job.both.static():
        log.info("no static fields: the store has no orography and land mask; give them with static=FILE")


def _log_errors(path: Path) -> None:
    """Log the largest error of each variable that was packed into 16 bits."""
    store = open_store(path)
    worst = {name: bound for name, bound in store.quantisation_error.items() if bound > 0}
    for name, bound in sorted(worst.items()):
        log.info("%s: packed into 16 bits, error at most %.3g %s", name, bound, field(name).units)
    if not worst and store.packing is Packing.uint16:
        log.info("all fields are stored as the archive has them: exact")
