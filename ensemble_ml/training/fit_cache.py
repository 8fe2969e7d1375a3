"""Keeps what `climate_fit` found, so that the seeds and trials of one output folder fit it once.

    OUTPUT/.fits/KEY.safetensors

KEY is a hash of all that a fit depends on: the store's fingerprint, the spec, the dates, the numbers of members, and
the code of this package. A file is whole or not there; one that cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import ensemble_ml
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import Climate
from ensemble_ml.training.climate_fit import Fit, fit_climate

log = logging.getLogger(__name__)

FOLDER = ".fits"
_KEPT = 8  # files, the latest


def kept_fit(
    output: str | Path, reader: Reader, train: np.ndarray, validation: np.ndarray, members: int, sizes: Sequence[int]
) -> Fit:
    """What `fit_climate` finds, from `output`/.fits where it has been found before.

    Args:
        output: folder of the runs; other arguments as of `fit_climate`.

    Raises:
        UserError: as `fit_climate`.
    """
    path = Path(output) / FOLDER / f"{_key(reader, train, validation, members, sizes)}.safetensors"
    found = _read(path)
    if found is not None:
        return found
    fit = fit_climate(reader, train, validation, members, sizes)
    _write(path, fit)
    return fit


def _key(reader: Reader, train: np.ndarray, validation: np.ndarray, members: int, sizes: Sequence[int]) -> str:
    given: dict[str, Any] = {
        "store": reader.source.fingerprint(),
        "spec": reader.spec.to_json(),
        "dates": [np.asarray(dates).tolist() for dates in (train, validation)],
        "members": [members, *sorted(sizes)],
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """Hash of the package's modules."""
    found = hashlib.sha256()
    root = Path(ensemble_ml.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _read(path: Path) -> Fit | None:
    try:
        with safe_open(path, "numpy") as file:
            names = file.keys()
            arrays = {name: file.get_tensor(name) for name in names}
            seconds = float(file.metadata()["seconds"])
        climate = Climate(**{k.name: arrays[k.name] for k in fields(Climate) if k.name in arrays})
        found = Fit(climate, arrays["spread_error"], arrays["input_range"], seconds)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        log.warning("climate: %s cannot be read (%s), so it is fitted anew", path, error)
        return None
    os.utime(path)
    log.info("climate: as fitted before, in %.0f s (%s)", seconds, path)
    return found


def _write(path: Path, fit: Fit) -> None:
    """A run goes on without it where the folder takes no more."""
    climate = {k: v for k, v in vars(fit.climate).items() if v is not None}
    arrays = climate | {"spread_error": fit.spread_error, "input_range": fit.input_range}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, draft, {"seconds": f"{fit.seconds:.1f}"})
        os.replace(draft, path)
        for old in sorted(path.parent.glob("*.safetensors"), key=lambda p: p.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("climate: the fit is not kept for other runs (%s)", error)
        draft.unlink(missing_ok=True)
