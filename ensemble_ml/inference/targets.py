"""The files that forecasts go to: which may be written, and which a run that was killed has made already."""

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
    """Attributes that are equal where forecasts of the same input are (`of_start`)."""
    settings = {
        "quantiles": wanted.quantiles,
        "thresholds": dict(sorted(wanted.thresholds.items())),
        "members_out": wanted.members,
        "region": config.region,
        "points": None if config.points is None else np.asarray(config.points, np.float64).tolist(),
        "precision": config.precision.value,
        "static": None if config.static is None else _digest(source.static()),
        "regrid": config.regrid,
        "axes": TIME_AXES,  # files on other axes, as they once were, do not open as one with these
    }
    return {
        "checkpoint_sha256": meta["sha256"],
        "settings_digest": hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16],
    }


def of_start(same: Mapping[str, str], start: Start, source: Source) -> dict[str, str]:
    """`same`, as `identity` gives it, and what one start date is made from: a later one may add to an archive."""
    return {
        **same,
        "data_fingerprint": fingerprint_at(source, start.date),
        "members_in": member_numbers(start, source),
    }


def _digest(fields: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(fields):
        found.update(f"{name} {fields[name].shape}".encode() + np.ascontiguousarray(fields[name]).tobytes())
    return found.hexdigest()


def targets(config: PredictConfig, starts: Sequence[Start]) -> list[Path]:
    """The files to write; none may exist without `overwrite` or `resume`.

    Raises:
        UserError: one exists, the folder cannot be written, or two start dates lie in one minute.
    """
    folder = Path(config.output)
    check_writable(folder)
    paths = [folder / file_name(start.init_time) for start in starts]
    if len(set(paths)) < len(paths):
        raise UserError("dates: two start dates lie in one minute, and forecasts are named by it; predict them apart")
    there = [path for path in paths if path.exists()]
    if there and not (config.overwrite or config.resume):
        count = f"{len(there)} of {len(paths)} forecasts"
        raise UserError(
            f"output {there[0]}: exists, with {count}; resume=true makes the rest, where these are of the same"
            " settings and input, overwrite=true replaces them, both together those of others; or choose another output"
        )
    return paths


def made_already(
    starts: Sequence[Start], paths: Sequence[Path], same: Mapping[str, str], source: Source, replace: bool
) -> set[Path]:
    """Those of `paths` that are there and what would be made now; with `replace` others may be there.

    Raises:
        UserError: a file is no forecast, or one of another checkpoint, input or other settings, and not `replace`.
    """
    made = set()
    for start, path in zip(starts, paths, strict=True):
        if path.exists():
            others = _others(path, of_start(same, start, source))
            if not others:
                made.add(path)
            elif not replace:
                raise UserError(
                    f"output {path}: was made with other {', '.join(others)}, and resume=true goes on with the same"
                    " alone; overwrite=true beside it makes such forecasts anew, or choose another output"
                )
    if made:
        log.info("%s: %d of %d forecasts are there already", paths[0].parent, len(made), len(paths))
    return made


def member_numbers(start: Start, source: Source) -> str:
    """The numbers of the members that a forecast is made from, as its attribute holds them."""
    return " ".join(str(source.layout.realization[position]) for position in start.positions)


def _others(path: Path, wanted: Mapping[str, str]) -> list[str]:
    """In words, the attributes of a file that are not what is wanted."""
    found = read_attributes(path)
    words = {"checkpoint_sha256": "checkpoint", "data_fingerprint": "input", "settings_digest": "settings"}
    names = sorted(wanted, key=[*words, *wanted].index)
    return [words.get(name, name) for name in names if str(found.get(name)) != wanted[name]]
