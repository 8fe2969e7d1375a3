"""Measure time to solution as MLPerf HPC does: from the first read of training data to a score on validation dates.

    ensemble-ml benchmark benchmark=mlperf mlperf.store=STORE [mlperf.until=0.75] [only=[time,loading]]

Staging copies the store once, and is timed apart. Every run is a process of its own, in a folder of its own; before it,
the copy is dropped from the page cache. Nothing of an earlier run, no fit either, is in reach. Times are
read from the logs of the runs (`tracking.mllog`), which the checker of the package mlperf_logging reads, too, with the
rules of scripts/mlperf/ensemble_ml.yaml. The result is the olympic mean: the best and the worst run are left out.

The other sections hold the same run against a rival that goes to the same score: torch's loader, on slow storage (a
preloaded library, see benchmarks/loading/storage.py); all-reduce, between hosts (scripts/links.sh; needs root); and
DRN.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.hosts import LINKS, Hosts, available, linked, python
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, run_sections
from benchmarks.loading.storage import Storage
from ensemble_ml.config import BenchmarkConfig, require
from ensemble_ml.training.mllog import FILE, staged

RULES = LINKS.parent / "mlperf" / "ensemble_ml.yaml"
_PREFIX = ":::MLLOG "
_LIMIT = 6 * 3600.0  # seconds of a run
_NETWORK = ("model=small", "model.hidden=8", "model.max_hidden=8", "model.depth=1", "model.points=0",
            "model.linear=false")  # fmt: skip
_OURS = (*_NETWORK, "optim=lion", "optim.lr=2e-3", "optim.warmup=10")


@dataclass(frozen=True)
class Outcome:
    """What the log of a run says.

    Attributes:
        seconds: from run_start to run_stop.
        reached: whether the run ended at the target.
        scores: validation crps_ratio at each validation, the first before the first step.
        epochs: number of epochs that were begun.
        text: the log, with the time of staging.
    """

    seconds: float
    reached: bool
    scores: tuple[float, ...]
    epochs: int
    text: str


Trial = Callable[[], Outcome]


def run(config: BenchmarkConfig) -> Path:
    """Run all sections, or those of `only`, and write results.json and report.html.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: no store is given, `only` names an unknown section, or a run failed.
    """
    given = config.mlperf.store or ""
    require("mlperf.store", "null", bool(given), "give a tensor store with init times in 2001 and 2002")
    folder = Path(config.output).resolve() / "mlperf"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        began = time.time()
        store = Path(shutil.copytree(given, Path(work) / "store.zarr"))
        os.sync()  # what is not on disk would stay in the page cache
        bench = Staged(config, folder, store=store, began=began, ended=time.time())
        load = f"Load of the machine when the runs began: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
        bench.notes.append(load)
        return run_sections(bench, SECTIONS).publish("Time to solution")


@dataclass
class Staged(Bench):
    """A benchmark with a copy of the store.

    Attributes:
        store: the copy.
        began: when it was begun, seconds since 1970.
        ended: when it was on disk.
    """

    store: Path = Path()
    began: float = 0.0
    ended: float = 0.0


def olympic(values: Sequence[float]) -> float:
    """Return the mean without the least and the greatest value; of fewer than three values, the plain mean.

    Args:
        values: the values.
    """
    ordered = sorted(values)
    return statistics.fmean(ordered[1:-1] if len(ordered) > 2 else ordered)


def outcome(text: str) -> Outcome:
    """Read the log of a run.

    Args:
        text: the log.
    """
    lines = [json.loads(line.removeprefix(_PREFIX)) for line in text.splitlines()]
    at = {line["key"]: line for line in lines if line["key"] in ("run_start", "run_stop")}
    scores = tuple(line["value"] for line in lines if line["key"] == "eval_error")
    return Outcome(
        seconds=(at["run_stop"]["time_ms"] - at["run_start"]["time_ms"]) / 1e3,
        reached=at["run_stop"]["metadata"]["status"] == "success",
        scores=scores,
        epochs=sum(line["key"] == "epoch_start" for line in lines),
        text=text,
    )


def passes(text: str, folder: Path) -> bool | None:
    """Return whether the package's own checker passes a log by our rules; None where it is not installed.

    Args:
        text: the log.
        folder: a folder for it.
    """
    try:
        from mlperf_logging.compliance_checker import mlp_compliance
    except ImportError:
        return None
    path = folder / "checked.txt"
    path.write_text(text)
    return mlp_compliance.ComplianceChecker("hpc", "3.0.0", True, False).check_file(str(path), str(RULES))


def forget(folder: Path) -> None:
    """Drop all files of a folder, which are on disk, from the page cache.

    Args:
        folder: the folder.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _train(bench: Staged, settings: Sequence[str], seed: int, hosts: Hosts, slow: Mapping[str, str] = {}) -> Outcome:
    """Train until the target is reached, on files that no cache holds."""
    given = bench.config.mlperf
    forget(bench.store)
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        words = [
            "experiment=quickstart", *settings, f"data.store={bench.store}", f"output={folder}",
            "run=a", f"seed={seed}", f"steps={given.steps}", f"validate_every={given.validate_every}", "average=0",
            f"until={given.until}", "max_minutes=0", f"checkpoint_every={given.steps}", "threads=1",
            "model.precision=float32", "tracking.tensorboard=false", "tracking.mllog=true", "tracking.cache_clear=true",
            "tracking.org=ensemble_ml", f"tracking.platform={os.uname().machine}", *given.train,
        ]  # fmt: skip
        environment = {"PYTHONPATH": str(LINKS.parents[1]), **slow}
        hosts.run(python("-m", "ensemble_ml", "train", *words), seconds=_LIMIT, environment=environment)
        return outcome(staged((Path(folder) / "a" / FILE).read_text(), bench.began, bench.ended))


def _time(bench: Staged) -> None:
    """Run all seeds, and check their logs."""
    given = bench.config.mlperf
    runs = [_train(bench, _OURS, seed, Hosts(1)) for seed in range(given.seeds)]
    bench.tables["Runs"] = [
        {"seed": seed, "seconds": round(run.seconds, 1), "epochs": run.epochs,
         "start": round(run.scores[0], 4), "end": round(run.scores[-1], 4), "reached": run.reached}
        for seed, run in enumerate(runs)
    ]  # fmt: skip
    bench.figures["time to solution, all runs"] = Figure.of([run.seconds for run in runs], "s")
    mean = olympic([run.seconds for run in runs])
    bench.figures["time to solution, olympic mean"] = Figure.of([mean], "s")
    bench.figures["epochs to the target"] = Figure.of([run.epochs for run in runs], "epochs")
    bench.figures["staging"] = Figure.of([bench.ended - bench.began], "s")
    bench.claim("runs that reach the target", sum(run.reached for run in runs), "runs", given.seeds)
    missed = sum(run.scores[0] > given.until for run in runs)
    bench.claim("runs whose statistical start misses the target", missed, "runs", given.seeds)
    checked = [passes(run.text, bench.folder) for run in runs]
    if None in checked:
        bench.notes.append("The logs were not checked: mlperf_logging is not installed.")
    else:
        bench.claim("logs that pass the checker of mlperf_logging", sum(map(bool, checked)), "logs", given.seeds)


def _rivals(bench: Staged, words: str, target: float, ours: Trial, theirs: Trial) -> None:
    """Let two settings go to the same score by turns, and claim how many times as long the rival takes."""
    pairs = [(ours(), theirs()) for _ in range(bench.config.repeats)]
    if not all(run.reached for pair in pairs for run in pair):
        ends = ", ".join(f"{pair[0].scores[-1]:.4f} and {pair[1].scores[-1]:.4f}" for pair in pairs)
        bench.notes.append(
            f"{words}: not all runs reached {bench.config.mlperf.until:g}; ours and theirs ended at {ends}."
        )
    # A rival that never comes there has taken at least as long as it ran; we have no time if we do not come there.
    times = [[run.seconds for run in runs] for runs in zip(*pairs, strict=True)]
    if all(pair[0].reached for pair in pairs):
        bench.race(words, times[1], times[0], target)
    else:
        bench.claim(words, float("nan"), "times", target)


def _loading(bench: Staged) -> None:
    """Compare our loader with torch's on slow storage."""
    rate = bench.config.mlperf.storage_mb_s

    storage = Storage(bench.store, bench.folder / "throttle", mb_s=rate)
    storage.build()
    storage.reset()

    def one(*settings: str) -> Trial:
        return lambda: _train(bench, (*_OURS, *settings), 0, Hosts(1), storage.environment())

    words = f"storage of {rate:g} MB/s: time to solution with torch's loader over that with ours"
    _rivals(bench, words, 1.5, one("loading=clairvoyant"), one("loading=torch"))


def _exchange(bench: Staged) -> None:
    """Compare votes with all-reduce between hosts."""
    given = bench.config.mlperf
    why = "mlperf.rate=null" if given.rate is None else available()
    with ExitStack() as stack:
        if why or given.rate is None:
            bench.notes.append(f"Loopback instead of hosts ({why}).")
            hosts = Hosts(given.hosts)
        else:
            hosts = stack.enter_context(linked(given.hosts, given.rate))

        def one(*settings: str) -> Trial:
            return lambda: _train(bench, (*_OURS, "parallel.launcher=torchrun", *settings), 0, hosts)

        words = f"{given.hosts} hosts, {hosts.where}: time to solution with all-reduce over that with votes"
        _rivals(bench, words, 2.0, one("optim.exchange=vote"), one("optim.exchange=allreduce"))


def _baseline(bench: Staged) -> None:
    """Compare our network with DRN."""
    words = "time to solution of DRN over that of ours"
    drn = lambda: _train(bench, ("model=drn", "optim.lr=1e-3"), 0, Hosts(1))  # noqa: E731
    _rivals(bench, words, 1.0, lambda: _train(bench, _OURS, 0, Hosts(1)), drn)


SECTIONS: dict[str, Callable[[Staged], None]] = {
    "time": _time,
    "loading": _loading,
    "exchange": _exchange,
    "baseline": _baseline,
}
