"""The run of a build: hand out the init times that are not built, log the progress, and complete the store."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import contextmanager, suppress

from tqdm import tqdm

from data_prep.build_job import Job, Stopped
from data_prep.build_workers import Workers, workers_of
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store.build import Build
from ensemble_ml.wording import hour_text

log = logging.getLogger(__name__)

_LINE_EVERY = 30.0  # seconds between lines of progress without a terminal
_SEEN_WITHIN = 60.0  # seconds until a worker's files must be visible here; NFS caches attributes for some time
_LOOK_AGAIN = 0.5  # seconds between checks of the init times that another builder has under way


def run(config: PrepareConfig, job: Job, build: Build) -> bool:
    """Build this run's share of the init times, and complete the store if all are built.

    Args:
        config: the settings of the run.
        job: builds one init time.
        build: the store under construction.

    Returns:
        Whether the store is complete.

    Raises:
        UserError: a field cannot be decoded, or a value is NaN or not plausible; a file of the archive changed
            meanwhile; the disk refuses a write; a worker died, or writes to a folder that is not seen here; or init
            times are left to build although `finalise` is set.
        KeyboardInterrupt: the build was stopped; init times that are built are kept.
    """
    number, count = config.share
    mine = range(build.dates * number // count, build.dates * (number + 1) // count)
    todo = [] if config.finalise else build.missing(mine)
    for path, dates in build.outdated.items():
        first = hour_text(job.plan.layout.init_time[min(dates)])
        counts = f"{len(dates)} init times (first {first})"
        log.warning("%s: changed since %s were built from it; they are built again", path, counts)
    _warn_superseded(job, build)
    if len(todo) < len(mine) and not config.finalise:
        log.info("%s: %d of %d init times are built already", build.path, len(mine) - len(todo), len(mine))
    try:
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
        log.info(
            "%s: parts=%s is done; %d of %d init times are left to others",
            build.path,
            config.parts,
            len(left),
            build.dates,
        )
        return False
    build.finalise()
    return True


def _warn_superseded(job: Job, build: Build) -> None:
    """Warn of init times that were built from other fields than the archive has now."""
    if build.superseded:
        first = hour_text(job.plan.layout.init_time[min(build.superseded)])
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

    A queue of all of them would hold every result and could not be stopped soon.

    Args:
        workers: the workers.
        job: names init times in error messages.
        todo: the init times to build.
        tick: the progress bar.
        built: receives, for each init time, the `time.monotonic()` at which a worker first reported it as built.
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
    times = ", ".join(hour_text(job.plan.layout.init_time[date]) for date in sorted(dates)[:4])
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
