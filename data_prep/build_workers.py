"""Workers that build the init times: threads, processes, a Dask cluster by its address, or SLURM jobs.

All of them are executors of `concurrent.futures` (Dask's by `Client.get_executor`) with one task for each init time, so
one loop serves them all. A worker in another process opens the archives itself, once; it is sent the configuration
and digests, and no data.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from threading import Event, Lock
from typing import Any

from data_prep.build_job import Job
from ensemble_ml.config import Executor, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.machine import cores, keep_freed_memory
from ensemble_ml.store.build import Build

log = logging.getLogger(__name__)

_DATES_AT_ONCE = 2  # in one process: one init time is read and written while another is compressed
_opening = Lock()


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

    Yields:
        The workers.

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
            pool = stack.enter_context(ProcessPoolExecutor(count, get_context("spawn")))
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


def build_date(config: PrepareConfig, threads: int, date: int, plan: str, files: str) -> bool:
    """Build one init time in a worker process.

    Workers of a cluster outlive a run, and a file may have changed since they read its table. So archives that were
    opened for other `files` are opened anew.

    Args:
        config: the settings of the run.
        threads: number of threads for compression; 0 for as many as the process may use.
        date: position of the init time.
        plan: digest of the plan of the process that sends the init times.
        files: digest of the files that it has seen.

    Returns:
        Whether this worker built it.

    Raises:
        UserError: this process finds archives that make another plan, or `Job`, `Build` or `Job.run` raises it.
    """
    # Several tasks of one process may begin at once, but only one of them has to open the archives.
    with _opening:
        job, build, pool = _opened(f"{config!r} {files}", threads, plan, _Held(config))
    return job.run(build, date, pool, lambda: False)


class _Held:
    """A configuration that caches ignore, because its text is the key.

    A configuration cannot be hashed, and `lru_cache` hashes all arguments.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=1)
def _opened(_: str, threads: int, plan: str, held: _Held) -> tuple[Job, Build, ThreadPoolExecutor]:
    """Return the opened archives, the store under construction and the threads of this process, kept between calls.

    Args:
        _: the text by which the cache knows the archives.
        threads: number of threads for compression; 0 for as many as the process may use.
        plan: digest of the plan to compare with.
        held: the settings of the run.
    """
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
    """Return a client of the cluster that `config` names.

    Raises:
        UserError: the scheduler cannot be reached, or SLURM jobs cannot be submitted.
    """
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
