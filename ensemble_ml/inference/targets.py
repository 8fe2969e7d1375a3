"""Decide which files a run of forecasts writes, and which an interrupted run has made already."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.config import PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable
from ensemble_ml.inference.contents import TIME_AXES
from ensemble_ml.inference.netcdf import file_name, read_attributes
from ensemble_ml.inference.outputs import Wanted
from ensemble_ml.inference.starts import Start
from ensemble_ml.store.source import Source, fingerprint_at

log = logging.getLogger(__name__)


def identity(config: PredictConfig, wanted: Wanted, meta: Mapping[str, Any], source: Source) -> dict[str, str]:
    """Return attributes that are equal for forecasts by the same model with the same settings.

    `of_start` adds the attributes of the input.

    Args:
        config: the settings of `ensemble-ml predict`.
        wanted: the optional contents of a forecast.
        meta: the content of checkpoint.json.
        source: the reduced ensemble, whose static fields may be used.
    """
    # The digest covers every setting that changes the content of a file, but for those of the input, which `of_start`
    # covers. A resumed run keeps only files with the same attributes.
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
    }
    return {
        "checkpoint_sha256": meta["sha256"],
        "settings_digest": hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16],
    }


def of_start(same: Mapping[str, str], start: Start, source: Source) -> dict[str, str]:
    """Return `same` with the attributes of the input of one init time.

    They are stated for each date, so that they stay the same if the archive grows later.

    Args:
        same: the result of `identity`.
        start: the init time and its members.
        source: the reduced ensemble.
    """
    return {
        **same,
        "data_fingerprint": fingerprint_at(source, start.date),
        "members_in": member_numbers(start, source),
    }


def _digest(fields: Mapping[str, np.ndarray]) -> str:
    """Return a hash of the names, shapes and values of static fields."""
    found = hashlib.sha256()
    for name in sorted(fields):
        found.update(f"{name} {fields[name].shape}".encode() + np.ascontiguousarray(fields[name]).tobytes())
    return found.hexdigest()


def targets(config: PredictConfig, starts: Sequence[Start]) -> list[Path]:
    """Return the files to write, and check that they may be written.

    Args:
        config: the settings of `ensemble-ml predict`, with `output`, `overwrite` and `resume`.
        starts: the init times.

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

    Args:
        starts: the init times.
        paths: the file of each init time.
        same: the result of `identity`.
        source: the reduced ensemble.
        replace: whether files that were made in another way may exist, because they will be replaced.

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


def member_numbers(start: Start, source: Source) -> str:
    """Return the numbers of the members of a forecast, as its attribute holds them.

    Args:
        start: the init time and its members.
        source: the reduced ensemble.
    """
    return " ".join(str(source.layout.realization[position]) for position in start.positions)


def _others(path: Path, wanted: Mapping[str, str]) -> list[str]:
    """Return, in words, the attributes of a file that differ from what is wanted."""
    found = read_attributes(path)
    words = {"checkpoint_sha256": "checkpoint", "data_fingerprint": "input", "settings_digest": "settings"}
    # The checkpoint is named first, then the input and the settings.
    names = sorted(wanted, key=[*words, *wanted].index)
    return [words.get(name, name) for name in names if str(found.get(name)) != wanted[name]]
