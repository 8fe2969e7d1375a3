"""The run of a build: hand out the init times that are not built, log the progress, and complete the store.

Workers that build the init times are threads, processes, a Dask cluster by its address, or SLURM jobs. All of them are
executors of `concurrent.futures` (Dask's by `Client.get_executor`) with one task for each init time, so one loop serves
them all. A worker in another process opens the archives itself, once; it is sent the configuration and digests, and no
data.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures import Executor as Pool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from threading import Event, Lock
from typing import Any

from tqdm import tqdm

from data_prep.build_job import Job, Stopped
from ensemble_ml.config import Executor, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.machine import cores, keep_freed_memory
from ensemble_ml.store.build import Build
from ensemble_ml.wording import date_text

log = logging.getLogger(__name__)

_LINE_EVERY = 30.0  # seconds between lines of progress without a terminal
_SEEN_WITHIN = 60.0  # seconds until a worker's files must be visible here; NFS caches attributes for some time
_LOOK_AGAIN = 0.5  # seconds between checks of the init times that another builder has under way
_DATES_AT_ONCE = 2  # in one process: one init time is read and written while another is compressed
_opening = Lock()  # held while a worker process opens the archives


def run(config: PrepareConfig, job: Job, build: Build) -> bool:
    """Build this run's share of the init times, and complete the store if all are built; return whether it is.

    Raises:
        UserError: a field cannot be decoded, or a value is NaN or not plausible; a file of the archive changed
            meanwhile; the disk refuses a write; a worker died, or writes to a folder that is not seen here; or init
            times are left to build although `finalise` is set.
        KeyboardInterrupt: the build was stopped; init times that are built are kept.
    """
    number, count = config.share
    mine = range(build.dates * number // count, build.dates * (number + 1) // count)
    try:
        # Another run that fails, or that is to start anew, leaves the folder alone meanwhile.
        with build.at_work():
            todo = [] if config.finalise else build.missing(mine)
            if not config.finalise:
                _log_built(job, build, len(mine), len(todo))
            if todo:
                _all(config, job, build, todo)
    except BaseException as error:
        with suppress(UserError):  # the archive may have changed for another builder, too
            _log_kept(build, error)
        raise
    left = build.missing()
    if todo or config.finalise:
        _warn_superseded(job, build)
    if left and (config.parts is None or config.finalise):
        _check_still(build, () if config.finalise else left)
        build.discard()  # removes the folder if nothing is built in it
        counts = f"{len(left)} of {build.dates}"
        raise UserError(f"output={build.path}: {counts} init times are not built yet; run without finalise=true")
    if left:
        text = "%s: parts=%s is done; %d of %d init times are left to others"
        log.info(text, build.path, config.parts, len(left), build.dates)
        return False
    build.finalise()
    return True


def _log_built(job: Job, build: Build, count: int, left: int) -> None:
    """Log how many of `count` init times are built already, and which of the `left` ones are built again."""
    for path, dates in build.outdated.items():
        first = date_text(job.plan.layout.init_time[min(dates)])
        counts = f"{len(dates)} init times (first {first})"
        log.warning("%s: changed since %s were built from it; they are built again", path, counts)
    _warn_superseded(job, build)
    if left < count:
        log.info("%s: %d of %d init times are built already", build.path, count - left, count)


def _warn_superseded(job: Job, build: Build) -> None:
    """Warn of init times that were built from other fields than the archive has now."""
    if build.superseded:
        first = date_text(job.plan.layout.init_time[min(build.superseded)])
        text = "%s: %d init times (first %s) were built from other fields than the archive has now; build them again"
        log.warning(text, build.path, len(build.superseded), first)


def _all(config: PrepareConfig, job: Job, build: Build, todo: list[int]) -> None:
    """Build the init times `todo`. Those that another builder has are checked again until they are done or given up."""
    with workers_of(config, job, build) as workers, _progress(len(todo)) as tick:
        waiting, built = False, dict[int, float]()
        while todo:
            _each(workers, job, todo, tick, built)
            todo = build.missing(todo)
            _check_still(build, built)
            # If an init time that a worker has built does not appear here, the two do not share the folder.
            _check_seen(build, [date for date in todo if time.monotonic() - built.get(date, math.inf) > _SEEN_WITHIN])
            if todo and not waiting:
                log.info("waiting for %d init times that another builder has under way", len(todo))
                waiting = True
            if todo:
                time.sleep(_LOOK_AGAIN)


def _check_still(build: Build, built: Iterable[int]) -> None:
    """Refuse files that changed while init times were built from them."""
    for path, dates in build.outdated.items():
        if dates & set(built):
            raise UserError(f"{path}: changed while it was read; leave it alone until the build is done, and run again")


def _check_seen(build: Build, lost: list[int]) -> None:
    """Refuse an output folder in which the init times that workers have built do not appear."""
    if lost:
        raise UserError(
            f"output={build.path}: workers have built {len(lost)} init times that are not seen here; give a folder"
            " that this process and all workers share"
        )


def _each(workers: Workers, job: Job, todo: Iterable[int], tick: tqdm, built: dict[int, float]) -> None:
    """Hand out the init times `todo`, a limited number at a time.

    A queue of all of them would hold every result and could not be stopped soon. `built` receives, for each init time,
    the `time.monotonic()` at which a worker first reported it as built.
    """
    queue, running = iter(todo), dict[Future[bool], int]()
    try:
        while True:
            for date in queue:
                running[workers.submit(date)] = date
                if len(running) >= workers.ahead():
                    break
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                date = running.pop(future)
                done = bool(_result(future, job, [date, *running.values()]))
                if done:
                    built.setdefault(date, time.monotonic())
                tick.update(done)
    except BaseException:
        workers.stop()
        for future in running:
            future.cancel()
        raise


def _result(future: Future[bool], job: Job, dates: list[int]) -> bool:
    """Return a worker's result, and turn the death of a worker into a UserError."""
    try:
        return future.result()
    except (UserError, Stopped):
        raise
    except (BrokenExecutor, CancelledError) as error:
        raise _died(job, dates, error) from error
    except Exception as error:
        if type(error).__name__ in ("KilledWorker", "FutureCancelledError", "CommClosedError"):  # dask.distributed's
            raise _died(job, dates[:1], error) from error
        raise


def _died(job: Job, dates: list[int], error: BaseException) -> UserError:
    """Return the error for a dead worker, which names the init times under way."""
    times = ", ".join(date_text(job.plan.layout.init_time[date]) for date in sorted(dates)[:4])
    more = f" and {len(dates) - 4} more" if len(dates) > 4 else ""
    return UserError(
        f"a worker died while it built init time {times}{more} ({type(error).__name__}: killed, or out of memory); "
        "run the same again to go on, with fewer workers if memory is short"
    )


def _log_kept(build: Build, error: BaseException) -> None:
    """Log how many init times are built and therefore kept.

    If there are none, remove the folder of the build, unless another builder is at work on it.
    """
    kept = 0 if build.over else build.dates - len(build.missing())
    if kept:
        how = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        log.warning(
            "prepare: %s; %d of %d init times are kept in %s: run the same again to go on",
            how, kept, build.dates, build.work,
        )  # fmt: skip
    else:
        build.discard()


@contextmanager
def _progress(count: int) -> Iterator[tqdm]:
    """Yield a progress bar on a terminal; elsewhere, an object that logs lines.

    It logs a line at most every 30 seconds, and one when all init times are done.
    """
    if sys.stderr.isatty():
        with tqdm(total=count, desc="prepare", unit="date") as bar:
            yield bar
        return
    yield _Lines(count)  # type: ignore[misc]


class _Lines:
    """A replacement for tqdm that logs lines, for batch jobs whose output is a file."""

    def __init__(self, count: int):
        self.count, self.done = count, 0
        self.said = self.start = time.monotonic()

    def update(self, number: int = 1) -> None:
        """Count finished init times, and log the total if the last line is old enough or everything is done."""
        self.done += number
        now = time.monotonic()
        if number and (now - self.said > _LINE_EVERY or self.done == self.count):
            self.said = now
            log.info("prepare: %d of %d init times in %.0f s", self.done, self.count, now - self.start)


@dataclass(frozen=True)
class Workers:
    """The functions by which a build uses its workers.

    `submit` takes an init time. `ahead()` returns how many may be submitted at a time; it is called anew each time,
    because workers may join a cluster during the build. `stop` asks threads to give up the init times under way;
    other workers finish theirs.
    """

    submit: Callable[[int], Future[bool]]
    ahead: Callable[[], int]
    stop: Callable[[], None]


@contextmanager
def workers_of(config: PrepareConfig, job: Job, build: Build) -> Iterator[Workers]:
    """Start the workers that `config.executor` names, and release them on leaving the `with` block.

    Raises:
        UserError: the scheduler cannot be reached, or SLURM jobs cannot be submitted.
        ModuleNotFoundError: `distributed` or `dask-jobqueue`, which the executor needs, is not installed.
    """
    with ExitStack() as stack:
        if config.executor is Executor.threads:
            yield _threads(stack, config, job, build)
            return
        pool: Pool
        if config.executor is Executor.processes:
            count = config.workers or cores()
            # A forked process would inherit locks that threads of this process hold at the moment.
            pool = stack.enter_context(ProcessPoolExecutor(count, get_context("spawn"), _leave_interrupts))
        else:
            client = stack.enter_context(_cluster(stack, config))
            count = config.workers
            if config.scheduler and not client.nthreads():
                log.warning("scheduler=%s: has no worker yet; init times wait for one", config.scheduler)
            # Dask could answer a pure call with the result of an earlier one, although the output may have been removed
            # since.
            pool = stack.enter_context(client.get_executor(pure=False))
        threads = max(1, cores() // count) if config.executor is Executor.processes else 0
        if isinstance(pool, ProcessPoolExecutor):
            # This runs before the exit of the pool itself, which would finish all waiting init times first.
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def ahead() -> int:
            """Return the number of init times to submit at a time: two for each worker.

            On a cluster that is given by its address, each thread counts as a worker.
            """
            return 2 * (max(1, sum(client.nthreads().values())) if config.scheduler else count)

        same = job.plan.digest, job.files
        yield Workers(lambda date: pool.submit(build_date, config, threads, date, *same), ahead, lambda: None)


def _threads(stack: ExitStack, config: PrepareConfig, job: Job, build: Build) -> Workers:
    """Return threads of this process: a few for init times, and `config.workers` (all cores if 0) for compression."""
    count = config.workers or cores()
    keep_freed_memory(arenas=1)
    packers = stack.enter_context(ThreadPoolExecutor(count, "pack"))
    # What is read by URL takes long to come, so other init times are asked for meanwhile.
    at_once = job.dates_ahead or min(_DATES_AT_ONCE, count)
    dates = stack.enter_context(ThreadPoolExecutor(at_once, "date"))
    stop = Event()
    stack.callback(stop.set)
    ahead = max(2 * count, at_once)
    return Workers(lambda date: dates.submit(job.run, build, date, packers, stop.is_set), lambda: ahead, stop.set)


def _leave_interrupts() -> None:
    """Ignore Ctrl-C in a worker process: a terminal sends it to all of them, and the parent stops its workers.

    A worker that it interrupts while it starts a thread would wait for that thread for ever at its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def build_date(config: PrepareConfig, threads: int, date: int, plan: str, files: str) -> bool:
    """Build one init time in a worker process; return whether this worker built it.

    Workers of a cluster outlive a run, and a file may have changed since they read its table. So archives that were
    opened for other `files` are opened anew.

    Args:
        config: the settings of the run.
        threads: number of threads for compression; 0 for as many as the process may use.
        date: position of the init time.
        plan: digest of the plan of the process that sends the init times.
        files: digest of the files that it has seen.

    Raises:
        UserError: this process finds archives that make another plan, or `Job`, `Build` or `Job.run` raises it.
    """
    # Several tasks of one process may begin at once, but only one of them has to open the archives.
    with _opening:
        job, build, pool = _opened(_Held(f"{config!r} {files}", config), threads, plan)
    return job.run(build, date, pool, lambda: False)


@dataclass(frozen=True)
class _Held:
    """A key of the cache: settings, which cannot be hashed, are compared by a text of them and of the files."""

    text: str
    config: PrepareConfig = field(compare=False)


@lru_cache(maxsize=1)
def _opened(held: _Held, threads: int, plan: str) -> tuple[Job, Build, ThreadPoolExecutor]:
    """Return the opened archives, the store under construction and the threads of this process, kept between calls."""
    keep_freed_memory(arenas=1)
    job = Job(held.config)
    # This check comes before the output is touched. Since it raises, the cache does not keep these archives.
    if job.plan.digest != plan:
        raise UserError(
            f"output={held.config.output}: a worker on {socket.gethostname()} finds other archives than are seen here;"
            " give paths that mean the same everywhere, and leave the archives alone while they are read"
        )
    build = Build(held.config.output, job.plan, overwrite=held.config.overwrite)
    return job, build, ThreadPoolExecutor(threads or cores(), "pack")


def _cluster(stack: ExitStack, config: PrepareConfig) -> Any:
    """Return a client of the cluster that `config` names."""
    from distributed import Client

    if config.executor is Executor.distributed:
        try:
            return Client(config.scheduler, timeout="20s", set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise UserError(
                f"scheduler={config.scheduler}: cannot be reached ({error}); start it, or mend the address"
            ) from error
    from dask_jobqueue import SLURMCluster  # its settings come from ~/.config/dask/jobqueue.yaml

    try:
        cluster = stack.enter_context(SLURMCluster())
        cluster.scale(jobs=config.workers)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"executor=slurm: {error}; see jobqueue.slurm in ~/.config/dask/jobqueue.yaml") from error
    return Client(cluster, set_as_default=False)
