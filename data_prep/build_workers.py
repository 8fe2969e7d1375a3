"""Who builds the start dates: threads, processes, a Dask cluster by its address, or SLURM jobs.

All are executors of `concurrent.futures` (Dask's by `Client.get_executor`), one task a start date, so that one loop
serves them. A worker in another process opens the archives itself, once; all that it is sent is the configuration.
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

_DATES_AT_ONCE = 2  # of a process: one reads and writes while the other is compressed
_opening = Lock()


@dataclass(frozen=True)
class Workers:
    """`submit` takes a start date, `ahead()` of them at a time; `stop` asks those under way to give up.

    There may be more workers than before each time that `ahead` is asked.
    """

    submit: Callable[[int], Future[bool]]
    ahead: Callable[[], int]
    stop: Callable[[], None]


@contextmanager
def workers_of(config: PrepareConfig, job: Job, build: Build) -> Iterator[Workers]:
    """The workers that `config.executor` names; they are let go on leaving.

    Raises:
        UserError: the scheduler cannot be reached, or a package is not installed.
    """
    with ExitStack() as stack:
        if config.executor is Executor.threads:
            yield _threads(stack, config, job, build)
            return
        pool: Pool
        if config.executor is Executor.processes:
            count = config.workers or cores()
            pool = stack.enter_context(ProcessPoolExecutor(count, get_context("spawn")))
        else:
            client = stack.enter_context(_cluster(stack, config))
            count = config.workers
            if config.scheduler and not client.nthreads():
                log.warning("scheduler=%s: has no worker yet; start dates wait for one", config.scheduler)
            pool = stack.enter_context(client.get_executor(pure=False))
        threads = max(1, cores() // count) if config.executor is Executor.processes else 0
        if isinstance(pool, ProcessPoolExecutor):
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def ahead() -> int:
            return 2 * (max(1, sum(client.nthreads().values())) if config.scheduler else count)

        same = job.plan.digest, job.files
        yield Workers(lambda date: pool.submit(build_date, config, threads, date, *same), ahead, lambda: None)


def _threads(stack: ExitStack, config: PrepareConfig, job: Job, build: Build) -> Workers:
    count = config.workers or cores()
    keep_freed_memory(arenas=1)
    packers = stack.enter_context(ThreadPoolExecutor(count, "pack"))
    dates = stack.enter_context(ThreadPoolExecutor(min(_DATES_AT_ONCE, count), "date"))
    stop = Event()
    stack.callback(stop.set)
    return Workers(lambda date: dates.submit(job.run, build, date, packers, stop.is_set), lambda: 2 * count, stop.set)


def build_date(config: PrepareConfig, threads: int, date: int, plan: str, files: str) -> bool:
    """Build one start date in a worker process; `threads` compress (0: as many as the process may use).

    `plan` and `files` are the digests of whoever sends the start dates. Archives that were opened for other `files` are
    opened anew: workers of a cluster outlive a run, and what they know of a file that was copied again is of before.

    Raises:
        UserError: what this process finds makes another plan than `plan`.
    """
    with _opening:
        job, build, pool = _opened(f"{config!r} {files}", threads, plan, _Held(config))
    return job.run(build, date, pool, lambda: False)


class _Held:
    """A configuration that caches do not look at: its text stands for it."""

    def __init__(self, config: PrepareConfig):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=1)
def _opened(_: str, threads: int, plan: str, held: _Held) -> tuple[Job, Build, ThreadPoolExecutor]:
    keep_freed_memory(arenas=1)
    job = Job(held.config)
    if job.plan.digest != plan:  # before anything is made in the output; and such archives are not kept
        raise UserError(
            f"output={held.config.output}: a worker on {socket.gethostname()} finds other archives than are seen here;"
            " give paths that mean the same everywhere, and leave the archives alone while they are read"
        )
    build = Build(held.config.output, job.plan, overwrite=held.config.overwrite)
    return job, build, ThreadPoolExecutor(threads or cores(), "pack")


def _cluster(stack: ExitStack, config: PrepareConfig) -> Any:
    """A client of the cluster that `config` names."""
    from distributed import Client

    if config.executor is Executor.distributed:
        try:
            return Client(config.scheduler, timeout="20s", set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise UserError(
                f"scheduler={config.scheduler}: cannot be reached ({error}); start it, or mend the address"
            ) from error
    from dask_jobqueue import SLURMCluster  # its settings come from ~/.config/dask/jobqueue.yaml, as its users know it

    try:
        cluster = stack.enter_context(SLURMCluster())
        cluster.scale(jobs=config.workers)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"executor=slurm: {error}; see jobqueue.slurm in ~/.config/dask/jobqueue.yaml") from error
    return Client(cluster, set_as_default=False)
