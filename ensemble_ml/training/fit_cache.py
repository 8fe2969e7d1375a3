"""Keep the results of `climate_fit` on disk, so that the runs of one output folder make the same fit only once.

    OUTPUT/.fits/KEY.fit      sha256 of all that follows; then a safetensors file with the arrays and the logged lines

KEY is a hash of everything that a fit depends on: the fingerprint of the store, the spec without the settings that no
fit reads, the dates, the numbers of members, the seed of withheld members, the code, and the seed if a point network is
fitted. The memory, threads and instructions of the machine and the versions of torch and NumPy count as well: they
decide how many points are fitted to, and the last bits of the results. The number of ranks does not count, although it
may change the last bits, too.

A file is whole or absent. One that cannot be read is replaced by a new fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ensemble_ml.distributed import Session
from ensemble_ml.folders import hash_of_code, write_whole
from ensemble_ml.loading.reader import Reader
from ensemble_ml.machine import memory_limit
from ensemble_ml.models import Climate
from ensemble_ml.models.points import point_shapes
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.training.climate_fit import Fit, fit_climate
from ensemble_ml.training.progress import Progress, Team
from ensemble_ml.training.progress import log as progress_log

log = logging.getLogger(__name__)

FOLDER = ".fits"
_PACKAGE = __name__.partition(".")[0]
_SUFFIX, _DIGEST = ".fit", 32  # a sha256 has 32 bytes
_KEPT = 8  # number of files that are kept; those whose last use is longest ago are removed
_DAY = 86400  # seconds
_CODE = hash_of_code("training", "models", "loading", "store", "distributions", "optim", "distributed")
_OF_THE_NETWORK = (
    "hidden", "max_hidden", "widths", "inner", "depth", "blocks", "vertical", "local_terms", "min_members", "precision",
    "recompute", "bank", "bank_templates",
)  # fmt: skip


def kept_fit(
    output: str | Path, reader: Reader, train: np.ndarray, validation: np.ndarray, members: int, sizes: Sequence[int],
    seed: int, progress: Progress | None, session: Session,
) -> Fit:  # fmt: skip
    """Return the fit from `output`/.fits if it is there, and log again what it logged; otherwise make it and keep it.

    The first rank looks for the file and writes it. A new fit is made by all ranks together, and all return the first
    rank's. A fit that was cut short for lack of time is not kept, because the next run may have more time. Arguments
    are those of `fit_climate`.

    Raises:
        UserError: the fit is impossible (see `fit_climate`).
    """
    path = Path(output) / FOLDER / f"{_key(reader, train, validation, members, sizes, seed)}{_SUFFIX}"
    found = session.once(lambda: _read(path))
    if found is not None:
        return found
    # The lines that the fits log are kept with the result. A run that takes it has to log them too, because they say
    # what the fits lacked.
    handler, package = _LineKeeper(), logging.getLogger(_PACKAGE)
    package.addHandler(handler)
    try:
        team = Team(session.mesh.world, session.world.local_size)
        fit = fit_climate(reader, train, validation, members, sizes, seed, progress, team)
    finally:
        package.removeHandler(handler)
    if session.first and (progress is None or not progress.cut):
        _write(path, fit, handler.lines)
    return session.once(lambda: fit)


class _LineKeeper(logging.Handler):
    """A log handler that keeps lines as (level, text)."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, unless it reports the progress of a fit, which does not concern the next run."""
        if record.name != progress_log.name:
            self.lines.append((record.levelno, record.getMessage()))


def _key(
    reader: Reader, train: np.ndarray, validation: np.ndarray, members: int, sizes: Sequence[int], seed: int
) -> str:
    """Return the hash of everything that a fit depends on."""
    spec = reader.spec.to_json()
    # No fit reads these settings, so trials that differ only in them share a file.
    spec["config"] = {k: v for k, v in spec["config"].items() if k not in _OF_THE_NETWORK}
    given: dict[str, Any] = {
        "store": reader.source.fingerprint(),
        "spec": spec,
        "dates": [np.asarray(dates).tolist() for dates in (train, validation)],
        "members": [members, *sorted(set(sizes))],
        "withhold": reader.withhold,
        "seed": seed if point_shapes(reader.spec)["points_first"][0] else 0,
        "code": _CODE,
        # The memory decides how many points are fitted to. Threads, versions and instructions change the last bits.
        "machine": [
            memory_limit(),
            torch.get_num_threads(),
            torch.__version__,
            np.__version__,
            has_bfloat16(torch.device("cpu")),
            torch.backends.cpu.get_cpu_capability(),
        ],
    }
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Fit | None:
    """Return the fit of a file, and log what it logged; None if there is no file, or if it cannot be read."""
    try:
        whole = path.read_bytes()
        digest, data = whole[:_DIGEST], whole[_DIGEST:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("it is not as it was written")
        arrays = load(data)
        climate = Climate(**{k.name: arrays[k.name] for k in fields(Climate) if k.name in arrays})
        found = Fit(climate, arrays["spread_error"], arrays["input_range"], arrays["seconds"].item())
        told = [(int(level), str(text)) for level, text in json.loads(arrays["told"].tobytes())]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        log.warning("climate: %s cannot be read (%s), so it is fitted anew", path, error)
        return None
    with contextlib.suppress(OSError):  # the file may belong to another user
        # The latest use decides which files are kept.
        os.utime(path)
    log.info("climate: as fitted before, in %.0f s (%s)", found.seconds, path)
    for level, text in told:
        log.log(level, "%s", text)
    return found


def _write(path: Path, fit: Fit, told: Sequence[tuple[int, str]]) -> None:
    """Write a fit, and remove the files that were used longest ago, and drafts of killed runs that are a day old.

    If the folder cannot be written, a warning is logged.
    """
    climate = {k: v for k, v in vars(fit.climate).items() if v is not None}
    arrays = climate | {"spread_error": fit.spread_error, "input_range": fit.input_range}
    arrays["seconds"] = np.array(fit.seconds)
    # safetensors holds arrays only, so the lines are stored as bytes.
    arrays["told"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    data = save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(data).digest() + data, sync=True)
    except OSError as error:
        log.warning("climate: the fit is not kept for other runs (%s)", error)
    with contextlib.suppress(OSError):  # another run may remove the same file
        for old in sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime)[:-_KEPT]:
            old.unlink()
        for draft in path.parent.glob(f".*{_SUFFIX}.*"):  # half-written files of killed runs
            if time.time() - draft.stat().st_mtime > _DAY:
                draft.unlink(missing_ok=True)
