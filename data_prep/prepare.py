"""`ensemble-ml prepare`: an archive becomes a tensor store, start date by start date."""

from __future__ import annotations

import glob
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.archive import ArchiveSource
from data_prep.build_job import Job
from data_prep.build_run import run
from data_prep.gaps import listed
from data_prep.pairs import Pair
from ensemble_ml.config import MISSING, Executor, Gaps, Packing, PrepareConfig, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store import is_store, open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.metadata import plan_digest
from ensemble_ml.wording import dates_of, hour_text, shortened

log = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> Path:
    """Turn an archive into a tensor store and return its path.

    All checks that need no values (what is missing, which grids differ) come first; the store appears under its name
    only when it is complete. A run that was interrupted is taken up again by the same settings.

    Raises:
        UserError: a file is missing or damaged; fields are missing for some dates or members; the truth lacks what
            the forecast has; a value is NaN; the output exists, or an unfinished build of it has other settings.
    """
    _check_settings(config)
    config = _with_whole_paths(config)
    job = Job(config)
    path = Path(config.output)
    if _may_be_done(config) and plan_digest(path) == job.plan.digest and not Build.unfinished(path):
        log.info("%s: is complete already", path)  # by another part
        return path
    _log_gaps(job)
    build = Build(path, job.plan, overwrite=config.overwrite, restart=config.restart)
    if not build.complete:
        _log_plan(job.source, job.both)
        if not run(config, job, build):
            return build.work
    _log_errors(path)
    log.info("%s: written", path)
    return path


def _with_whole_paths(config: PrepareConfig) -> PrepareConfig:
    """Paths that mean the same in whatever folder a worker stands, and whoever goes on."""
    given, truth = ([_whole(path) for path in as_list(paths)] for paths in (config.input, config.truth))
    static, index = (str(Path(path).absolute()) if path else path for path in (config.static, config.index))
    regrid = str(Path(config.regrid).absolute()) if isinstance(config.regrid, str) else config.regrid
    output = str(Path(config.output).absolute())
    return replace(config, input=given, truth=truth or None, static=static, index=index, regrid=regrid, output=output)


def _whole(path: Any) -> Any:
    """An absolute path, or pattern: the folder where we stand may have letters that mean something in patterns. An open
    Dataset stays what it is."""
    if is_dataset(path):
        return path
    pattern = glob.has_magic(path) and not os.path.exists(path) and not os.path.isabs(path)
    return os.path.join(glob.escape(os.getcwd()), path) if pattern else str(Path(path).absolute())


def _may_be_done(config: PrepareConfig) -> bool:
    """Whether others may have completed the store, which then is no mistake."""
    return config.parts is not None or config.finalise


def _check_settings(config: PrepareConfig) -> None:
    for key in ("input", "output"):
        if not is_dataset(getattr(config, key)) and getattr(config, key) in (MISSING, None, "", []):
            raise UserError(f"{key}: is not given; say {key}=PATH")
    for key in ("truth", "static"):
        if any(not is_dataset(path) and not path for path in as_list(getattr(config, key))):
            raise UserError(f"{key}: holds an empty path; give one, or say {key}=null")
    for key in ("input", "truth"):
        for path in as_list(getattr(config, key)):
            if not is_dataset(path) and is_store(Path(path)):
                raise UserError(f"{key}={path}: is a tensor store already; prepare reads archives (GRIB, NetCDF, Zarr)")
    held = [path for key in ("input", "truth") for path in as_list(getattr(config, key)) if is_dataset(path)]
    if held and config.executor is not Executor.threads:
        remedy = "an open Dataset is computed by Dask: choose its scheduler, and leave executor=threads"
        raise UserError(f"executor={config.executor.value}: {remedy}")
    output = Path(config.output).absolute()
    known = Build.unfinished(output) or (_may_be_done(config) and is_store(output))
    if output.exists() and not config.overwrite and not known:  # the build checks too, but hours of indexing later
        raise UserError(f"output={config.output}: exists already; choose another folder, or add overwrite=true")


def _log_gaps(job: Job) -> None:
    if job.truth is not None:
        for note in job.truth.unverified().values():
            log.warning("%s", note)
    if job.gaps:
        done = "these start dates are left out" if job.config.gaps is Gaps.skip else "these fields are absent"
        log.warning("%s: %s; %s (gaps=%s)", job.source.path, listed(job.gaps), done, job.config.gaps.value)
    missing = dates_of(job.plan.provenance.get("gaps", {}).get("starts", ""))
    if len(missing):
        shown = shortened([hour_text(start) for start in missing])
        log.warning("%s: a regular series but for %d start dates: %s", job.source.path, len(missing), shown)


def _log_plan(source: ArchiveSource, both: Pair) -> None:
    lay, geometry = both.layout, source.catalogue.geometry
    log.info(
        "%s: %d start dates, %d members, leads %s h, %s; levels %s hPa; grid %s",
        both.path,
        len(lay.init_time),
        len(lay.realization),
        ", ".join(map(str, lay.lead_hours)),
        ", ".join(lay.names),
        ", ".join(map(str, lay.levels)) or "none",
        lay.grid.describe(),
    )
    for name, spans in source.cut.items():
        log.info("%s: %s; the intervals between are at leads that are left out", name, spans)
    if not geometry.same:
        how = "cut out of" if geometry.crop else "conservative means of"
        log.info("grid: %s %s", how, geometry.source.describe())
    if not both.static():
        log.info("no static fields: orography and land mask stay off; give them with static=FILE")


def _log_errors(path: Path) -> None:
    store = open_store(path)
    worst = {name: bound for name, bound in store.quantisation_error.items() if bound > 0}
    for name, bound in sorted(worst.items()):
        log.info("%s: packed into 16 bits, error at most %.3g %s", name, bound, field(name).units)
    if not worst and store.packing is Packing.uint16:
        log.info("all fields are stored as the archive has them: exact")
