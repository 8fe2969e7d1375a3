"""Plan the forecasts of all init times and the files that hold them, and make the header of each.

Files that an interrupted run has made already are recognised by what they were made with (`identity`) and from
(`of_start`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml import __version__
from ensemble_ml.config import PredictConfig, is_dataset, shown_input
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable
from ensemble_ml.inference.contents import TIME_AXES, Dates, Header
from ensemble_ml.inference.inputs import Start, check_source, plan_starts
from ensemble_ml.inference.netcdf import file_name, read_attributes
from ensemble_ml.inference.outputs import Wanted, tell_of_far_thresholds, wanted_outputs
from ensemble_ml.inference.select import Places, select
from ensemble_ml.models import ModelSpec
from ensemble_ml.store.source import Source, bounds_at, fingerprint_at

log = logging.getLogger(__name__)

_NAMED = 10  # longest list of a setting that a forecast's history shows in full


@dataclass(frozen=True, eq=False)
class Job:
    """A job of forecasts: everything that all init times have in common.

    Attributes:
        config: the settings of `ensemble-ml predict`.
        source: the reduced ensemble.
        meta: the content of checkpoint.json.
        spec: the inputs and outputs of the model.
        wanted: the quantiles, thresholds and members to write.
        places: the grid points to write.
        same: attributes by which a later run recognises files of the same job (`identity`).
    """

    config: PredictConfig
    source: Source
    meta: Mapping[str, Any]
    spec: ModelSpec
    wanted: Wanted
    places: Places
    same: Mapping[str, str]

    @cached_property
    def dates(self) -> dict[str, Dates]:
        """Return the init times that had a part in training, by the names of the attributes of a file."""
        earlier = chain.from_iterable(self.meta.get("earlier_dates", {}).values())
        own = {name: self.meta.get(name, ()) for name in ("training_dates", "validation_dates")}
        return {name: Dates(dates) for name, dates in {**own, "earlier_dates": earlier}.items()}


def plan_job(
    config: PredictConfig, source: Source, spec: ModelSpec, meta: Mapping[str, Any], *, warn: bool = True
) -> tuple[Job, list[Start]]:
    """Check everything that can be checked before anything is computed, and choose the init times and their members.

    `config.input` is only quoted; `source`, on the model's grid, is what is read. One rank logs warnings for all
    (`warn`).

    Raises:
        UserError: the source does not fit the model, or something that the settings name is not there.
    """
    check_source(source, spec, meta.get("lead_bounds"), warn=warn)
    places, wanted = select(spec.grid, config.region, config.points), wanted_outputs(config, spec)
    job = Job(config, source, meta, spec, wanted, places, identity(config, wanted, meta, source))
    trained = (*meta.get("training_dates", ()), *meta.get("earlier_dates", {}).get("training", ()))
    starts = plan_starts(source, spec, config, trained, warn=warn)
    if warn:
        if config.static is not None and not spec.static:
            log.warning("static=%s: the checkpoint takes no static fields, so these have no effect", config.static)
        _tell_of_few(starts, meta)
        if "input_range" in meta:
            tell_of_far_thresholds(wanted, meta["input_range"])
    return job, starts


def _tell_of_few(starts: Sequence[Start], meta: Mapping[str, Any]) -> None:
    """Warn if a forecast has fewer members than the smallest reduced ensemble that corrections were fitted to."""
    sizes = meta["config"].get("data", {}).get("members", [])
    fewest = min((len(start.positions) for start in starts), default=0)
    if starts and sizes and fewest < min(sizes):
        log.warning(
            "members_in: %d, and the checkpoint was trained on %s: its corrections are extrapolated to so few; train"
            " with data.members=[%d, ...]", fewest, ", ".join(map(str, sizes)), fewest,
        )  # fmt: skip


def header(job: Job, start: Start, remarks: Sequence[str] = ()) -> Header:
    """Return the coordinates and attributes of the forecast of one init time.

    `remarks` are sentences about the inputs, for the attribute `comment`.
    """
    spec = job.spec
    numbers = tuple(job.source.layout.realization[position] for position in start.positions)
    return Header(
        init_time=start.init_time,
        leads=spec.leads_out,
        levels=spec.levels if spec.variables else (),
        places=job.places,
        quantiles=job.wanted.quantiles,
        thresholds=job.wanted.thresholds,
        members=numbers if job.wanted.members else (),
        lead_bounds=bounds_at(job.source, (*spec.variables, *spec.surface), spec.leads_out),
        families={name: spec.family(name) for name in (*spec.variables, *spec.surface)},
        attributes=_attributes(job, start, remarks),
        dates=job.dates,
    )


def header_of_all(job: Job, starts: Sequence[Start]) -> Header:
    """Return the coordinates and attributes of several init times together, all made from the same members.

    `starts` are in ascending order.
    """
    first = header(job, starts[0])
    about = {"title": f"{_what(job)}s", **_origin(job), **job.same, "data_fingerprint": job.source.fingerprint()}
    about |= {name: first.attributes[name] for name in ("training_data_fingerprint", "ensemble_ml_version")}
    times = np.array([start.init_time for start in starts])
    return replace(first, init_time=times, attributes=about)


def _attributes(job: Job, start: Start, remarks: Sequence[str]) -> dict[str, str]:
    """Return the global attributes of the forecast of one init time."""
    time = start.init_time.astype("datetime64[m]").item()
    hour = f"{time:%H:%M}" if time.minute else f"{time:%H}"
    return {
        "title": f"{_what(job)} from {time:%Y-%m-%d} {hour} UTC",
        **_origin(job),
        "comment": "; ".join(filter(None, (start.missing, start.unlike, *remarks))),
        **of_start(job.same, start, job.source),
        "training_data_fingerprint": str(job.meta.get("data_fingerprint", "")),
        "ensemble_ml_version": __version__,
    }


def _what(job: Job) -> str:
    """Return what a forecast is, for its title."""
    return "Post-processed ensemble forecast" if job.spec.config.postprocess else "Predicted ensemble spread"


def _origin(job: Job) -> dict[str, str]:
    """Return the attributes that say what the forecast was made from, and by which command."""
    config, now = job.config, datetime.now(UTC)
    model, step = job.spec.config.name, str(job.meta["step"])
    stepwise = model != "emos"  # EMOS is fitted in one go, so its step says nothing
    made = f"{model}, step {step}" if stepwise else model
    return {
        "source": f"ensemble_ml {__version__}, {config.checkpoint} ({made}), from {job.source.path}",
        **({"checkpoint_step": step} if stepwise else {}),
        "history": f"{now:%Y-%m-%dT%H:%M:%SZ}: ensemble-ml predict {_asked(config)}",
    }


def _asked(config: PredictConfig) -> str:
    """Return, as text, the settings that decide what is in the files and differ from the defaults."""
    usual, elsewhere = PredictConfig(), ("output", "overwrite", "resume", "threads", "parallel")
    names = (part.name for part in fields(config) if part.name not in elsewhere)
    every = {name: getattr(config, name) for name in names}
    # Two Datasets compare point by point, so a Dataset is kept without a comparison.
    given = {k: v for k, v in every.items() if is_dataset(v) or v != getattr(usual, k)}
    return " ".join(f"{name}={_shown(value)}" for name, value in given.items())


def _shown(value: Any) -> Any:
    """Return a setting as a file's history shows it. A long list becomes its first and last value, and their number."""
    if isinstance(value, list):
        value = [shown_input(one) if is_dataset(one) else one for one in value]
    if isinstance(value, list) and len(value) > _NAMED:
        return f"[{value[0]}, ..., {value[-1]}] ({len(value)} in all)"
    return value.value if isinstance(value, Enum) else shown_input(value) if is_dataset(value) else value


def identity(config: PredictConfig, wanted: Wanted, meta: Mapping[str, Any], source: Source) -> dict[str, str]:
    """Return attributes that are equal for forecasts by the same model with the same settings.

    `of_start` adds the attributes of the input. Of `source`, only static fields count here.
    """
    # The digest covers every setting that changes the content of a file, but for those of the input, which `of_start`
    # covers. A resumed run keeps only files with the same attributes. What the user states of an archive's variables
    # changes the values that are read from the same fields; without such statements, the digest stays as it was.
    stated = {name: getattr(config, name) for name in ("names", "units", "intervals")}
    settings = {
        "quantiles": wanted.quantiles,
        "thresholds": dict(sorted(wanted.thresholds.items())),
        "members_out": wanted.members,
        "region": config.region,
        "points": None if config.points is None else np.asarray(config.points, np.float64).tolist(),
        "precision": config.precision.value,
        "static": None if config.static is None else _digest(source.static()),
        "regrid": config.regrid,
        # Files of earlier versions had other time axes, and do not open as one Dataset with these.
        "axes": TIME_AXES,
        **{name: dict(sorted(given.items())) for name, given in stated.items() if given},
    }
    return {
        "checkpoint_sha256": meta["sha256"],
        "settings_digest": hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16],
    }


def _digest(fields: Mapping[str, np.ndarray]) -> str:
    """Return a hash of the names, shapes and values of static fields."""
    found = hashlib.sha256()
    for name in sorted(fields):
        found.update(f"{name} {fields[name].shape}".encode() + np.ascontiguousarray(fields[name]).tobytes())
    return found.hexdigest()


def of_start(same: Mapping[str, str], start: Start, source: Source) -> dict[str, str]:
    """Return `same`, the result of `identity`, with the attributes of the input of one init time.

    They are stated for each date, so that they stay the same if the archive grows later.
    """
    return {
        **same,
        "data_fingerprint": fingerprint_at(source, start.date),
        "members_in": member_numbers(start, source),
    }


def member_numbers(start: Start, source: Source) -> str:
    """Return the numbers of the members of a forecast, separated by blanks, for its attribute `members_in`."""
    return " ".join(str(source.layout.realization[position]) for position in start.positions)


def targets(config: PredictConfig, starts: Sequence[Start]) -> list[Path]:
    """Return the file of each init time, and check that they may be written.

    Raises:
        UserError: a file exists and neither `overwrite` nor `resume` is on; the folder cannot be written; two init
            times lie in one minute.
    """
    folder = Path(config.output)
    check_writable(folder)
    paths = [folder / file_name(start.init_time) for start in starts]
    # Files are named by the minute, so two starts in one minute would write the same file.
    if len(set(paths)) < len(paths):
        raise UserError(
            "dates: two init times lie in one minute, and files are named by the minute; predict them separately"
        )
    existing = [path for path in paths if path.exists()]
    if existing and not (config.overwrite or config.resume):
        count = f"{len(existing)} of {len(paths)} forecasts"
        raise UserError(
            f"output {existing[0]}: exists, with {count}; resume=true keeps those made in the same way and makes the"
            " rest; overwrite=true replaces all; both together replace only those made in another way; or choose"
            " another output"
        )
    return paths


def made_already(
    starts: Sequence[Start], paths: Sequence[Path], same: Mapping[str, str], source: Source, replace: bool
) -> set[Path]:
    """Return the paths whose files exist and equal what would be made now.

    With `replace`, files that were made in another way may exist, because they will be replaced.

    Raises:
        UserError: `replace` is off, and a file is no forecast, or was made by another checkpoint, from another input or
            with other settings.
    """
    made = set()
    for start, path in zip(starts, paths, strict=True):
        if path.exists():
            others = _others(path, of_start(same, start, source))
            if not others:
                made.add(path)
            elif not replace:
                raise UserError(
                    f"output {path}: was made with other {', '.join(others)}, so resume=true cannot keep it; give"
                    " overwrite=true as well to replace such forecasts, or choose another output"
                )
    if made:
        log.info("%s: %d of %d forecasts exist already", paths[0].parent, len(made), len(paths))
    return made


def _others(path: Path, wanted: Mapping[str, str]) -> list[str]:
    """Return, in words, the attributes of a file that differ from what is wanted."""
    found = read_attributes(path)
    words = {"checkpoint_sha256": "checkpoint", "data_fingerprint": "input", "settings_digest": "settings"}
    # The checkpoint is named first, then the input and the settings.
    names = sorted(wanted, key=[*words, *wanted].index)
    return [words.get(name, name) for name in names if str(found.get(name)) != wanted[name]]
