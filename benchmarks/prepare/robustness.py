"""Sections of the benchmark that are not races: kills, workers of every kind, real files."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import ensemble_ml
from benchmarks.common.results import Claim, Figure
from benchmarks.prepare.data import Shape, archive
from benchmarks.prepare.workspace import Section, Workspace
from ensemble_ml.config import BenchmarkSize
from ensemble_ml.store.date import DateEntry

Stamp = tuple[int, int]  # inode and modification time of a file
_KILLS = 20
_SHAPES = {  # enough init times for kills to meet a build at every stage
    BenchmarkSize.full: Shape(121, 240, (300, 500, 850), 10, (0, 24, 48), 24, ("t", "z", "q")),
    BenchmarkSize.small: Shape(61, 120, (500, 850), 5, (0, 24), 12, ("t", "z")),
    BenchmarkSize.tiny: Shape(17, 32, (500,), 2, (0,), 4, ("t",)),
}
_REAL = "era5-levels-members.grib", "ens_storm.grib", "wgust_ens.grib", "z500_ens.grib"


def kills(work: Workspace) -> Section:
    """Kill a build with `kill -9` at random moments, and run the same command again each time.

    Args:
        work: data and scratch space.
    """
    files = archive(work.folder / f"{work.size.value}_kills", _SHAPES[work.size])
    settings = [f"input={files.years}", f"truth={files.truth_years}"]
    whole, seconds = Path(work.scratch("whole.zarr")), 0.0
    start = time.perf_counter()
    _finish(_prepare(whole, settings))
    seconds = time.perf_counter() - start
    store, wanted = Path(work.scratch("killed.zarr")), _KILLS if work.size is not BenchmarkSize.tiny else 3
    chance, done, again, counted, builds = random.Random(0), dict[str, Stamp](), 0, 0, 0
    while counted < wanted:
        if store.exists():  # it was complete before the kill, so a new build begins
            shutil.rmtree(store)
            done, builds = {}, builds + 1
        process = _prepare(store, settings)
        try:
            process.wait(chance.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            counted += 1
        else:
            _finish(process)
        again += made_again(store, done)
        done = finished(store)
    _finish(_prepare(store, settings))
    again += made_again(store, done)
    found = Section()
    found.figures["kills of a build"] = Figure.of([float(counted)], "kills")
    found.figures["an uninterrupted build of those dates, start of Python included"] = Figure.of([seconds], "s")
    same = float(digests(whole) == digests(store))
    words = f"`kill -9` at {wanted} random moments of a build, re-run each time"
    found.claims += [
        Claim(f"{words}: the final store equals an uninterrupted one, file for file", same, "true", 1),
        Claim(f"{words}: files of finished start dates made twice", float(again), "files", 0, at_most=True),
    ]
    found.notes.append(
        f"Kills: {_SHAPES[work.size].years} start dates with truth; moments drawn from the whole run of the command,"
        f" its start included; {builds} builds were complete before their kill and begun anew. A file counts as made"
        " twice where a start date was finished before a run and its shard is another file after it."
    )
    return found


def _building(store: Path) -> str:
    return f"{store.name}.building"


def finished(store: Path) -> dict[str, Stamp]:
    """Return the files of init times that an unfinished build has completed, each with its stamp.

    Args:
        store: the store under construction.
    """
    building = store.with_name(_building(store))
    names = {name for path in (building / "entries").glob("[0-9]*.npz") for name in DateEntry.files_of(path)[0]}
    return {name: _stamp(building / "store" / name) for name in names}


def made_again(store: Path, done: Mapping[str, Stamp]) -> int:
    """Return how many of the files that were complete before a run are other files after it.

    Args:
        store: the store, complete or under construction.
        done: the result of `finished` before the run.
    """
    root = store if store.exists() else store.with_name(_building(store)) / "store"
    return sum(_stamp(root / name) != stamp for name, stamp in done.items())


def _stamp(path: Path) -> Stamp:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns


def _prepare(store: Path, settings: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ensemble_ml", "prepare", f"output={store}", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"prepare failed: {said.strip().splitlines()[-1:]}")


def digests(store: Path) -> dict[str, str]:
    """Return the sha256 of every file of a store.

    Args:
        store: the store.
    """
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def workers(work: Workspace) -> Section:
    """Run the same build with every kind of worker, and compare the stores.

    Args:
        work: data and scratch space.
    """
    files = archive(work.folder / f"{work.size.value}_kills", _SHAPES[work.size])
    settings = [f"input={files.years}", f"truth={files.truth_years}"]
    kinds = {
        "1 thread": ["executor=threads", "workers=1"],
        "4 threads": ["executor=threads", "workers=4"],
        "2 processes": ["executor=processes", "workers=2"],
    }
    found, stores = Section(), {}
    with _cluster(work) as address:
        kinds["a dask.distributed LocalCluster"] = ["executor=distributed", f"scheduler={address}"]
        for name, given in kinds.items():
            store = Path(work.scratch("workers.zarr"))
            start = time.perf_counter()
            _finish(_prepare(store, [*settings, *given]))
            found.figures[f"build by {name}"] = Figure.of([time.perf_counter() - start], "s")
            stores[name] = digests(store)
    same = len({tuple(store.items()) for store in stores.values()})
    words = "the build on 1 thread, 4 threads, 2 processes and a dask.distributed LocalCluster gives identical stores"
    found.claims.append(Claim(f"{words}: different stores", float(same), "stores", 1, at_most=True))
    return found


@contextmanager
def _cluster(work: Workspace) -> Iterator[str]:
    """Provide the address of a cluster of two workers, one process each."""
    from distributed import LocalCluster

    folder = work.scratch("dask")
    options = {"dashboard_address": ":0", "local_directory": folder, "silence_logs": logging.ERROR}
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **options) as cluster:
        yield cluster.scheduler_address


def real(work: Workspace) -> Section:
    """Prepare real files and, if it exists, the simulated archive, and compare values with those of ecCodes.

    Args:
        work: data and scratch space.
    """
    found = Section()
    folder = os.environ.get("ENSEMBLE_ML_REAL_DATA")
    there = [path for name in _REAL if folder and (path := Path(folder) / name).is_file()]
    fields = different = 0
    for path in there:
        store = Path(work.scratch("real.zarr"))
        _finish(_prepare(store, [f"input={path}"]))
        both = compared(path, store)
        fields, different = fields + both[0], different + both[1]
    if there:
        words = f"{len(there)} real files pass through the same code: fields that differ from ecCodes' values"
        found.figures["fields of real files compared"] = Figure.of([float(fields)], "fields")
        found.claims.append(Claim(words, float(different), "fields", 0, at_most=True))
    else:
        where = f"none in {folder}" if folder else "no folder is named"
        found.notes.append(f"Real files: {where} (ENSEMBLE_ML_REAL_DATA), so nothing was checked.")
    found.notes += _embedded(work, found)
    readers = other_readers(Path(ensemble_ml.__file__).parent)
    words = "no second reader of archives in the tree: modules outside data_prep that decode GRIB"
    found.claims.append(Claim(words, float(len(readers)), "modules", 0, at_most=True))
    return found


def _embedded(work: Workspace, found: Section) -> list[str]:
    places = [Path("runs/quickstart-data/archive"), Path("runs/archive"), work.folder / "embedded"]
    place = next((path for path in places if (path / "archive.json").is_file()), None)
    if place is None:
        return ["The embedded archive was not there (runs/quickstart-data/archive): simulate it first to check it too."]
    store = Path(work.scratch("embedded.zarr"))
    _finish(_prepare(store, [f"input={place}/ensemble", f"truth={place}/truth"]))
    from ensemble_ml.store import open_store

    dates = len(open_store(store).layout.init_time)
    found.figures["start dates of the embedded archive, prepared by the same code"] = Figure.of([float(dates)], "dates")
    return []


def compared(path: Path, store: Path) -> tuple[int, int]:
    """Return how many members' fields of a GRIB file the store holds, and how many differ from ecCodes in any bit.

    Args:
        path: the GRIB file.
        store: the store that was prepared from it.
    """
    import eccodes as ec

    from ensemble_ml.grid import canonical
    from ensemble_ml.store import Part, open_store

    source, fields, different = open_store(store), 0, 0
    lay, cache = source.layout, {}
    with open(path, "rb") as file:
        while (handle := ec.codes_grib_new_from_file(file)) is not None:
            place = _place(ec, handle, lay)
            if place is not None:
                date, m, t, name, level = place
                if date not in cache:
                    cache = {date: source.read(Part.FORECAST, date)}
                shape = ec.codes_get(handle, "Nj"), ec.codes_get(handle, "Ni")
                values = ec.codes_get_array(handle, "values").astype(np.float32).reshape(shape)
                axes = (ec.codes_get_array(handle, key) for key in ("distinctLatitudes", "distinctLongitudes"))
                _, rows, columns = canonical(*_scanned(ec, handle, *axes))
                both = cache[date]
                at_level = name in lay.variables
                ours = (
                    both.pressure[m, t, lay.variables.index(name), lay.levels.index(level)]
                    if at_level
                    else both.surface[m, t, lay.surface.index(name)]
                )
                fields += 1
                different += not np.array_equal(ours, values[rows[:, None], columns])
            ec.codes_release(handle)
    return fields, different


def _scanned(ec, handle, latitude: np.ndarray, longitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the axes in the order in which the file scans them."""
    down = not ec.codes_get(handle, "jScansPositively")
    first = ec.codes_get(handle, "longitudeOfFirstGridPointInDegrees")
    step = ec.codes_get(handle, "iDirectionIncrementInDegrees")
    return np.sort(latitude)[:: -1 if down else 1], first + step * np.arange(len(longitude))


def _place(ec, handle, lay) -> tuple[int, int, int, str, int] | None:
    from ensemble_ml.fields import by_param_id

    known = by_param_id(ec.codes_get(handle, "paramId"))
    number = ec.codes_get(handle, "number") if ec.codes_is_defined(handle, "number") else 0
    if known is None or number not in lay.realization or ec.codes_get_string(handle, "dataType") == "cf":
        return None
    text = f"{ec.codes_get(handle, 'dataDate'):08d}{ec.codes_get(handle, 'dataTime'):04d}"
    init = np.datetime64(f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[8:10]}:{text[10:]}")
    lead, level = ec.codes_get(handle, "endStep"), ec.codes_get(handle, "level")
    dates = np.flatnonzero(lay.init_time == init)
    if not len(dates) or lead not in lay.lead_hours:
        return None
    return int(dates[0]), lay.realization.index(number), lay.lead_hours.index(lead), known.name, level


def other_readers(package: Path) -> list[str]:
    """Return the modules of a package that import a GRIB decoder.

    Args:
        package: the folder of the package.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        if re.search(r"^\s*(import|from) (eccodes|cfgrib|gribapi)\b", path.read_text(), re.M):
            found.append(path.name)
    return found
