"""Run `ensemble-ml simulate`: run all model years, assemble the archive and measure its realism.

Finished parts stay in `.parts` until the archive is complete. archive.json is written last, to mark a finished archive.

Years are independent, so each core runs some of them in a process of its own. On two cores this was a third faster than
one process with two threads. Each model is compiled by one process, and the others load the result from a cache.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from data_prep.simulate.archive import MODEL_ERROR, STATIC, STEPS, ModelYear, assemble, model_years, realism, report
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.folders import strict, write_whole

FORMAT = 1  # of archive.json
STATEMENT = (
    "Simulated data: jcm (SPEEDY physics on the dinosaur spectral core) forecasting a nature run of its own. Laid out "
    "like ENS-10, never ENS-10: figures compare only with baselines on this same archive."
)
_SILENCE = 30.0  # seconds without output, after which a line is printed
_GO_ON = "finished parts are kept; run the same command again to go on"


def simulate(config: SimulateConfig) -> Path:
    """Make the simulated archive, or continue one that was interrupted.

    With `parts=i/n` only a share of the model years is run. Several machines may run their shares in one folder at the
    same time. A machine that finds all years complete assembles the archive.

    Returns:
        The archive's folder: ensemble/{pl,sfc}_MMDD.grib, truth/{pl,sfc}_MMDD.grib, static.grib (of the truth's model),
        forecast_static.grib, archive.json. While other shares are incomplete, it holds only `.parts`.

    Raises:
        UserError: `output` holds something else, archive.json or a file in .parts cannot be read, jcm is not installed,
            or a worker failed or was killed.
    """
    output = Path(config.output)
    if _nothing_to_do(config, output):
        return output
    _claim(config, output)
    began = time.perf_counter()
    years = model_years(config)
    number, shares = config.share
    mine = years[number::shares]
    missing = [year for year in mine if not year.complete(output)]
    # More shares than model years leave some shares without a year. Those that have one write the static files.
    if missing or (mine and not all((output / ".parts" / name).exists() for name in STATIC)):
        if find_spec("jcm") is None:
            raise UserError("simulate: the package jcm is not installed; run `pip install 'ensemble-ml[simulate]'`")
        run_years(config, missing, mine)
    left = [year.year for year in years if not year.complete(output)]
    # Another machine that finished at the same time may have assembled the archive and removed the parts.
    if _nothing_to_do(config, output):
        return output
    if left:
        text = f"parts={config.parts}: done; years of other shares are not complete yet: {', '.join(map(str, left))}"
        print(text, flush=True)
        return output
    try:
        assemble(output, years)
        figures = realism(output, years, config)
    except OSError:
        if _nothing_to_do(config, output):
            return output
        raise
    for line in report(figures):
        print(line, flush=True)
    # This file is written last, because it marks the archive as complete.
    write_whole(output / "archive.json", json.dumps(strict(describe(config, years, figures)), indent=1))
    shutil.rmtree(output / ".parts", ignore_errors=True)
    dates = sum(len(year.written) for year in years)
    print(f"simulated {dates} init times in {time.perf_counter() - began:.0f} s: {output}", flush=True)
    return output


def _identity(config: SimulateConfig) -> dict:
    """Return the format, the settings and the model error, which determine the content of the files."""
    settings = {key: value for key, value in asdict(config).items() if key not in ("output", "workers", "parts")}
    return {"format": FORMAT, "config": settings, "model_error": MODEL_ERROR}


def _nothing_to_do(config: SimulateConfig, output: Path) -> bool:
    """Return whether the archive is complete. If it is, print that, and remove the parts that are left."""
    if not _finished(config, output):
        return False
    print(f"{output} is already finished with this configuration; nothing to do", flush=True)
    shutil.rmtree(output / ".parts", ignore_errors=True)
    return True


def _finished(config: SimulateConfig, output: Path) -> bool:
    """Return whether the archive is complete, or raise a UserError if it was made with other settings."""
    record = output / "archive.json"
    if not record.exists():
        return False
    content = _read_json(record)
    if {key: content.get(key) for key in _identity(config)} != _identity(config):
        raise UserError(f"output={output}: holds a finished archive of another configuration; choose another folder")
    return True


def _claim(config: SimulateConfig, output: Path) -> None:
    """Mark the folder with this configuration, or raise a UserError if it holds something else."""
    mark = output / ".parts" / "config.json"
    if mark.exists():
        if _read_json(mark) != _identity(config):
            raise UserError(f"output={output}: holds an unfinished archive of another configuration; remove the folder")
        return
    # Another share makes .parts just before its mark, and may have been killed in between.
    if output.exists() and any(path.name != ".parts" for path in output.iterdir()):
        raise UserError(f"output={output}: exists and is not an archive in the making; choose a new folder")
    mark.parent.mkdir(parents=True, exist_ok=True)
    write_whole(mark, json.dumps(_identity(config), indent=1))


def _read_json(path: Path) -> dict:
    """Read a JSON object, or raise a UserError if the file cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another folder, or remove this one") from error
    return found if isinstance(found, dict) else {}


def describe(config: SimulateConfig, years: list[ModelYear], figures: dict) -> dict:
    """Return the content of archive.json: what the archive is, what it holds, and its realism by `archive.realism`."""
    splits: dict[str, list[str]] = defaultdict(list)
    for year in years:
        splits[year.split] += [f"{cycle.start:%Y-%m-%dT%H}" for cycle in year.written]
    return _identity(config) | {
        "statement": STATEMENT,
        "versions": {name: version(name) for name in ("jcm", "dinosaur", "jax", "numpy", "eccodes")},
        "years": {split: sorted({year.year for year in years if year.split == split}) for split in splits},
        "start_dates": dict(splits),
        "members": config.members,
        "steps_hours": list(STEPS),
        "levels_hPa": config.levels,
        "accumulation": {
            "ensemble": {"tp": "from the start of the forecast"},
            "truth": {"tp": "the 24 h that end at the valid time"},
        },
        "realism": {name: figure.as_dict() for name, figure in figures.items()},
    }


def run_years(config: SimulateConfig, missing: list[ModelYear], years: list[ModelYear]) -> None:
    """Run the missing model years, the longest first, in `config.workers` processes; 0 takes one for each core.

    There are no more processes than missing years, but at least one. The static files of both models are written even
    if no year is missing. All `years` count for the progress.

    Raises:
        UserError: a worker failed or was killed; the message gives its error or exit status.
    """
    context = multiprocessing.get_context("spawn")  # jax does not survive a fork
    tasks, events = context.Queue(), context.Queue()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = max(1, min(len(missing), config.workers or len(cores)))
    # The longest come first, so that no core works alone on a long one at the end. Each worker ends at a None.
    for year in [*sorted(missing, key=lambda year: len(year.cycles), reverse=True), *[None] * count]:
        tasks.put(year)
    shares = [cores[k::count] or cores for k in range(count)]
    locks = [context.Lock() for _ in STATIC]  # one for each model
    with TemporaryDirectory(dir=Path(config.output) / ".parts", ignore_cleanup_errors=True) as folder:
        orders = [(k % 2, 1 - k % 2) if missing else () for k in range(count)]
        arguments = [
            (config, share, tasks, events, os.getpid(), _Compilation(folder, locks, order))
            for share, order in zip(shares, orders, strict=True)
        ]
        workers = [context.Process(target=_work, args=args, daemon=True) for args in arguments]
        for worker in workers:
            worker.start()
        try:
            _follow(workers, events, years, Path(config.output))
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


@dataclass(frozen=True)
class _Compilation:
    """The way in which a worker shares the compilation of the two models with the others.

    Attributes:
        folder: folder in which a worker finds what others have compiled.
        locks: one for each model, held while the model is compiled.
        order: the models that the worker compiles, the first one first. Half of the workers begin with the second one,
            so that both are compiled at the same time. Without a year to run, none is compiled.
    """

    folder: str
    locks: Sequence[AbstractContextManager]
    order: tuple[int, ...] = ()


class _Progress:
    """The display of the progress: a bar on a terminal, lines elsewhere.

    A line is printed at each twentieth of the init times, at each step that completes no init time (of a nature run or
    a warm-up), and after half a minute without a line.
    """

    def __init__(self, total: int, before: int):
        self.total, self.count, self.began = total, before, time.perf_counter()
        self.printed, self.latest = self.began, "the start"
        self.bar = tqdm(total=total, initial=before, unit="date", desc="simulate", disable=not sys.stderr.isatty())

    def update(self, text: str, finished: bool) -> None:
        """Show that the step `text` was taken, and whether it completes an init time."""
        self.count += finished
        self.latest = text
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
            self.bar.update(int(finished))
        elif not finished or self.count * 20 // self.total > (self.count - 1) * 20 // self.total:
            self._print(text)
        self.wait()

    def wait(self) -> None:
        """Print that the work goes on, if nothing was printed for a while."""
        if self.bar.disable and time.perf_counter() - self.printed >= _SILENCE:
            self._print(f"{self.latest} is done, the next is under way")

    def _print(self, text: str) -> None:
        """Print one line."""
        self.printed = time.perf_counter()
        print(f"simulate: {self.count}/{self.total} {text} ({self.printed - self.began:.0f} s)", flush=True)


def _follow(workers: list, events, years: list[ModelYear], output: Path) -> None:
    """Show progress until all workers are done. Raise a UserError if one fails or is killed."""
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
    """Raise a UserError if a worker has ended with an error or was killed."""
    for worker in workers:
        if worker.exitcode not in (None, 0):
            raise UserError(f"simulate: a worker ended with status {worker.exitcode} (out of memory?); {_GO_ON}")


def _work(config: SimulateConfig, cores: list[int], tasks, events, parent: int, compilation: _Compilation) -> None:
    """Run as a worker process: build the two models once, then run years until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before jax chooses the size of its thread pool
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compilation.folder)
    # On a busy machine XLA takes minutes to compile a model, and then prints a request for a bug report. Only this
    # variable turns the request off. Errors that end a run are still raised as exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    def progress(text: str, finished: bool) -> None:
        if os.getppid() != parent:  # the parent was killed; the last cycle has saved its state
            os._exit(1)
        events.put(("cycle", text, finished))

    try:
        _run_tasks(config, tasks, progress, compilation)
        events.put(("done", "", False))
    except Exception as error:  # handed to the parent, which raises it
        traceback.print_exc()
        events.put(("failed", f"{type(error).__name__}: {error}", False))


def _run_tasks(config: SimulateConfig, tasks, progress, compilation: _Compilation) -> None:
    """Build both models, compile them, write their static files, and run years from the queue."""
    from data_prep.simulate.chain import Chain, Weather, trajectories, write_static
    from data_prep.simulate.model import Recipe

    nature = Weather(Recipe(config.truth_truncation, config.truth_minutes), config)
    forecast = Weather(Recipe(config.forecast_truncation, config.forecast_minutes, wrong=True), config)
    for name, weather in zip(STATIC, (nature, forecast), strict=True):
        write_static(weather, Path(config.output) / ".parts" / name)
    both = (nature, 1), (forecast, trajectories(config))
    for number in compilation.order:
        weather, count = both[number]
        with compilation.locks[number]:
            weather.model.compiled(count)
    while (year := tasks.get()) is not None:
        Chain(config, year, nature, forecast).run(progress)
