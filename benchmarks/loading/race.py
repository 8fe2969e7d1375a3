"""Run one entrant of the loading race: its ranks are processes over emulated storage, whose results are collected."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading.lap import Spec
from benchmarks.loading.storage import Storage
from ensemble_ml.distributed.world import free_port
from ensemble_ml.errors import UserError
from ensemble_ml.loading.plan import Traffic

_PACKAGE = Path(__file__).resolve().parents[2]  # the interpreter of a competitor finds this package here


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        seconds: its length.
        read: bytes read from slow storage.
        covered: whether every sample was used once an epoch.
        wrong: number of samples with wrong values.
        waited: the slowest rank's wait for batches after the first epoch, as a share of a step; NaN for one epoch.
        peak: bytes by which the largest rank grew, without its workers and local disk.
        facts: for each of our ranks, what was planned and what its loader counted.
    """

    seconds: float
    read: int
    covered: bool
    wrong: int
    waited: float  # of the slowest rank after the first epoch: its wait for batches, as a share of a step; NaN for one
    peak: int  # bytes by which the largest rank grew, its workers and local disk aside
    facts: tuple[dict[str, Any], ...] = ()  # of each of our ranks: what was planned, and what its loader counted

    @property
    def valid(self) -> bool:
        """Return whether the run used every sample once an epoch, with the right values."""
        return self.covered and not self.wrong

    @property
    def traffic(self) -> Traffic | None:
        """Return the traffic that our plan predicts, or None for other entrants."""
        return Traffic(**self.facts[0]["traffic"]) if self.facts else None

    @property
    def opened(self) -> bool:
        """Return whether our loader kept samples decompressed."""
        return bool(self.facts) and bool(self.facts[0]["opened"])

    def counted(self, name: str) -> float:
        """Return a counter of our loaders, summed over all ranks.

        Args:
            name: name of the counter.
        """
        return sum(fact[name] for fact in self.facts)


@dataclass
class Crew:
    """Processes that have imported what an entrant needs and wait for a start, one for each rank."""

    storage: Storage
    processes: dict[tuple[str, int], subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, python: str, module: str, rank: int) -> subprocess.Popen[str]:
        """Return the process of a rank, which is started if it does not run yet.

        Args:
            python: the interpreter.
            module: the module to run.
            rank: the rank.
        """
        key = f"{python} {module}", rank
        if key not in self.processes or self.processes[key].poll() is not None:
            environment = os.environ | self.storage.environment()
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(_PACKAGE)}
            self.processes[key] = subprocess.Popen(
                [python, "-m", module], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
        return self.processes[key]

    def close(self) -> None:
        """End all processes, and those that they have forked."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.processes.clear()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def race(spec: Spec, crew: Crew, probes: np.ndarray, *, timeout: float = 300) -> Outcome:
    """Run an entrant on all its ranks at once.

    Args:
        spec: the run.
        crew: the processes.
        probes: the probe of every sample.
        timeout: seconds without an answer after which the run has failed.

    Raises:
        UserError: a rank fails; the message holds its last line.
    """
    work = Path(spec.work)
    prepare(spec, crew.storage, probes)
    python, module = sys.executable, "benchmarks.loading.entrant"
    if "python" in spec.options:
        python, module = spec.options["python"], "benchmarks.loading.insitu"
    ranks = [crew.start(python, module, rank) for rank in range(spec.ranks)]
    port = str(free_port())
    for rank, process in enumerate(ranks):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.ranks)}
        environment |= {"LOCAL_WORLD_SIZE": str(spec.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        told = {"spec": json.loads(spec.to_json()), "rank": rank, "environment": environment}
        told["fork"] = spec.entrant != "streaming"
        assert process.stdin is not None
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
    failed = _answers(ranks, timeout)
    if spec.entrant == "streaming" and not failed:
        for process in ranks:
            process.wait()
    if failed:
        crew.close()
        errors = [work / f"error{rank}" for rank in range(spec.ranks)]
        said = [path.read_text().strip().splitlines()[-1] for path in errors if path.exists()]
        raise UserError(f"{spec.entrant}: {said[0] if said else failed}")
    return outcome(spec, crew.storage)


def prepare(spec: Spec, storage: Storage, probes: np.ndarray) -> None:
    """Make the folder of a run, and set the counters to zero.

    Args:
        spec: the run.
        storage: the emulated storage.
        probes: the probe of every sample.
    """
    shutil.rmtree(spec.work, ignore_errors=True)
    Path(spec.work).mkdir(parents=True)
    np.save(Path(spec.work) / "probes.npy", probes)
    storage.reset()


def _answers(ranks: Sequence[subprocess.Popen[str]], timeout: float) -> str:
    """Wait for all ranks. Return an empty text if all are done, or the reason of the first failure."""
    waiting = selectors.DefaultSelector()
    for process in ranks:
        assert process.stdout is not None
        waiting.register(process.stdout, selectors.EVENT_READ)
    with waiting:
        while waiting.get_map():
            ready = waiting.select(timeout)
            if not ready:
                return f"gave nothing within {timeout:.0f} s"
            for key, _ in ready:
                answer = key.fileobj.readline().strip()  # type: ignore[union-attr]
                if answer != "done":
                    return answer or "its process died"
                waiting.unregister(key.fileobj)
    return ""


def outcome(spec: Spec, storage: Storage) -> Outcome:
    """Return the result of a finished run.

    Args:
        spec: the run.
        storage: the emulated storage.
    """
    work, every = Path(spec.work), list(range(spec.shape.samples))
    results = [json.loads((work / f"result{rank}.json").read_text()) for rank in range(spec.ranks)]
    used = [sorted(chain.from_iterable(r["used"][epoch] for r in results)) for epoch in range(spec.epochs)]
    facts = [work / f"facts{rank}.json" for rank in range(spec.ranks)]
    return Outcome(
        seconds=max(r["seconds"] for r in results),
        read=storage.bytes_read(),
        covered=all(samples == every for samples in used),
        wrong=sum(r["wrong"] for r in results),
        waited=max(_warm_wait(r) for r in results),
        peak=max(r["peak"] for r in results),
        facts=tuple(json.loads(path.read_text()) for path in facts if path.exists()),
    )


def _warm_wait(result: dict[str, Any]) -> float:
    """Return the share of the time after the first epoch that was spent waiting for a batch; NaN for a single epoch."""
    total = result["ends"][-1] - result["ends"][0]
    return sum(result["waits"][1:]) / total if len(result["ends"]) > 1 and total > 0 else float("nan")
