"""Model years spread over processes, and what the user sees of them.

Years are independent, so each core takes years of its own in a process of its own: a third faster on two cores, as
measured, than one process with two threads.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from data_prep.simulate.assemble import STATIC
from data_prep.simulate.schedule import ModelYear
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError

_SILENCE = 30.0  # seconds without a line after which there is one
_GO_ON = "what is finished stays: run the same command to go on"


def run_years(config: SimulateConfig, missing: list[ModelYear], years: list[ModelYear]) -> None:
    """Run the `missing` ones of all `years`, the longest first, one process a core.

    Raises:
        UserError: a worker failed or was killed; its own message is given.
    """
    context = multiprocessing.get_context("spawn")  # jax must not be forked
    tasks, events = context.Queue(), context.Queue()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = min(len(missing), config.workers or len(cores))
    for year in [*sorted(missing, key=lambda year: len(year.cycles), reverse=True), *[None] * count]:
        tasks.put(year)
    shares = [cores[k::count] or cores for k in range(count)]
    arguments = [(config, share, tasks, events, os.getpid()) for share in shares]
    workers = [context.Process(target=_work, args=args, daemon=True) for args in arguments]
    for worker in workers:
        worker.start()
    try:
        _follow(workers, events, years, Path(config.output))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


class _Progress:
    """A bar on a terminal; elsewhere a plain line for every twentieth part of the work, and whenever there was none for
    a while."""

    def __init__(self, total: int, before: int):
        self.total, self.count, self.began = total, before, time.perf_counter()
        self.told, self.latest = self.began, "the start"
        self.bar = tqdm(total=total, initial=before, unit="date", desc="simulate", disable=not sys.stderr.isatty())

    def update(self, text: str, finished: bool) -> None:
        """Show that the step `text` was taken; `finished`: it completes a start date."""
        self.count += finished
        self.latest = text
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
            self.bar.update(int(finished))
        elif not finished or self.count * 20 // self.total > (self.count - 1) * 20 // self.total:
            self._tell(text)
        self.wait()

    def wait(self) -> None:
        """Say that the work goes on where nothing was said for a while."""
        if self.bar.disable and time.perf_counter() - self.told >= _SILENCE:
            self._tell(f"{self.latest} is done, the next is under way")

    def _tell(self, text: str) -> None:
        self.told = time.perf_counter()
        print(f"simulate: {self.count}/{self.total} {text} ({self.told - self.began:.0f} s)", flush=True)


def _follow(workers: list, events, years: list[ModelYear], output: Path) -> None:
    """Show progress until every worker has said that it is done."""
    done = sum(year.part(output, cycle).exists() for year in years for cycle in year.written)
    progress = _Progress(sum(len(year.written) for year in years), done)
    running = len(workers)
    with progress.bar:
        while running:
            try:
                kind, text, finished = events.get(timeout=1.0)
            except queue.Empty:
                progress.wait()
                _check(workers)
                continue
            if kind == "failed":
                raise UserError(f"simulate: {text}; {_GO_ON}")
            if kind == "done":
                running -= 1
            else:
                progress.update(text, finished)


def _check(workers: list) -> None:
    for worker in workers:
        if worker.exitcode not in (None, 0):
            raise UserError(f"simulate: a worker ended with status {worker.exitcode} (out of memory?); {_GO_ON}")


def _work(config: SimulateConfig, cores: list[int], tasks, events, parent: int) -> None:
    """Body of a worker: build the two models once, then run years until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before jax sizes its pool of threads
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # On a busy machine XLA takes minutes to compile a model, and asks in the terminal for a bug report. It has no other
    # switch for that; errors that end a run are raised as exceptions all the same.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    def progress(text: str, finished: bool) -> None:
        if os.getppid() != parent:  # the parent was killed; the state is as the last cycle wrote it
            os._exit(1)
        events.put(("cycle", text, finished))

    try:
        _run_tasks(config, tasks, progress)
        events.put(("done", "", False))
    except Exception as error:  # handed to the parent, which raises it
        traceback.print_exc()
        events.put(("failed", f"{type(error).__name__}: {error}", False))


def _run_tasks(config: SimulateConfig, tasks, progress) -> None:
    from data_prep.simulate.chain import Chain, Weather, write_static
    from data_prep.simulate.model import Recipe

    nature = Weather(Recipe(config.truth_truncation, config.truth_minutes), config)
    forecast = Weather(Recipe(config.forecast_truncation, config.forecast_minutes, wrong=True), config)
    for name, weather in zip(STATIC, (nature, forecast), strict=True):
        write_static(weather, Path(config.output) / ".parts" / name)
    while (year := tasks.get()) is not None:
        Chain(config, year, nature, forecast).run(progress)
