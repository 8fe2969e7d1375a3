"""Runs one entrant of the loading race: its ranks as processes over emulated storage, and what they say afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from ensemble_ml.benchmarks.loaders.entrant import Spec
from ensemble_ml.benchmarks.loaders.storage import Storage
from ensemble_ml.errors import UserError


@dataclass(frozen=True)
class Outcome:
    """One run: how long, what was read from slow storage, whether every sample was used once an epoch and was right."""

    seconds: float
    read: int
    covered: bool
    wrong: int
    waited: float  # seconds of the slowest rank after the first epoch, less its compute; a share of a step
    planned: int | None = None
    bound: int | None = None

    @property
    def valid(self) -> bool:
        """Whether it used every sample once an epoch, with its values."""
        return self.covered and not self.wrong


def race(spec: Spec, storage: Storage, probes: np.ndarray, *, timeout: float = 300) -> Outcome:
    """Run `spec` on all its ranks at once.

    Raises:
        UserError: a rank fails; its last line says why.
    """
    work = Path(spec.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    np.save(work / "probes.npy", probes)
    storage.reset()
    ranks = [_start(spec, storage, rank) for rank in range(spec.ranks)]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in ranks]
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{spec.entrant}: gave nothing within {timeout:.0f} s") from error
    finally:
        for process in ranks:
            process.kill()
    for process, said in zip(ranks, errors, strict=True):
        if process.returncode:
            raise UserError(f"{spec.entrant}: {(said.strip().splitlines() or ['failed'])[-1]}")
    return _outcome(spec, storage)


def _start(spec: Spec, storage: Storage, rank: int) -> subprocess.Popen:
    environment = os.environ | storage.environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.ranks)}
    environment |= {"LOCAL_WORLD_SIZE": str(spec.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "29611"}
    command = [sys.executable, "-m", "ensemble_ml.benchmarks.loaders.entrant", spec.to_json(), str(rank)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _outcome(spec: Spec, storage: Storage) -> Outcome:
    work, every = Path(spec.work), list(range(spec.shape.samples))
    results = [json.loads((work / f"result{rank}.json").read_text()) for rank in range(spec.ranks)]
    used = [sorted(chain.from_iterable(r["used"][epoch] for r in results)) for epoch in range(spec.epochs)]
    facts = work / "facts0.json"
    told = json.loads(facts.read_text()) if facts.exists() else {}
    return Outcome(
        seconds=max(r["seconds"] for r in results),
        read=storage.bytes_read(),
        covered=all(samples == every for samples in used),
        wrong=sum(r["wrong"] for r in results),
        waited=max(_warm_wait(spec, r) for r in results),
        planned=told.get("planned"),
        bound=told.get("bound"),
    )


def _warm_wait(spec: Spec, result: dict) -> float:
    """Share of the time after the first epoch that was not compute; NaN for a single epoch."""
    ends = result["epoch_ends"]
    samples = sum(len(used) for used in result["used"][1:])
    total = ends[-1] - ends[0]
    return 1 - samples * spec.compute_ms / 1e3 / total if len(ends) > 1 and total > 0 else float("nan")
