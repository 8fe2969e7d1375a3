"""Sections of the benchmark that race our code against others."""

from __future__ import annotations

import importlib.util
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import process
from benchmarks.common.results import LOST, Claim, Figure
from benchmarks.prepare.decoding import of_edition_2
from benchmarks.prepare.reduction import DASK
from benchmarks.prepare.workspace import Section, Workspace

_PEAK_GB = 1.5
_SHOWN = {
    "ours": "ours",
    "copy": "bytes through the compressor",
    "eccodes": "ecCodes + zarr-python",
    "cfgrib": "cfgrib + xarray + to_zarr",
}
_DERIVED = ", mean and spread too"


def conversion(work: Workspace) -> Section:
    """Race conversions from archive to store, also against a plain copy through the compressor.

    Args:
        work: data and scratch space.
    """
    source, found = str(work.archive.forecast), Section()
    peers: dict[str, dict[str, Any]] = {  # whole chunks suit them better than small ones in shards
        "eccodes": {"shape": asdict(work.shape), "way": "processes", "chunks": "whole"},
        "cfgrib": {"way": "threads", "chunks": "whole"},
    }
    entrants: dict[str, tuple[str, dict[str, Any]]] = {_SHOWN[name]: (name, {}) for name in ("copy", "ours")}
    for end, more in (("", {}), (_DERIVED, {"derive": True})):
        entrants |= {_SHOWN[name] + end: (name, settings | more) for name, settings in peers.items()}
    megabytes = work.archive.forecast.stat().st_size / 1e6
    speeds: dict[str, list[float]] = {name: [] for name in entrants}
    for count in range(work.repeats + 1):
        for label, (name, settings) in entrants.items():
            if count == 0 and name not in ("copy", "ours"):
                continue  # the first round brings file and memory into the machine
            seconds = _convert(work, name, source, settings)
            if count:
                speeds[label].append(megabytes / seconds)
    for label, values in speeds.items():
        found.figures[f"archive to store, {label}"] = Figure.of(values, "MB/s")
    words = "archive -> store at {} the throughput of {}"
    for name, target in (("cfgrib", 8), ("eccodes", 3)):
        for end in ("", _DERIVED):
            label = _SHOWN[name] + end
            found.least(words.format(f"{target} times", label), speeds[_SHOWN["ours"]], speeds[label], target, "times")
    words = "archive -> store at 50 % of the speed of copying the file's bytes through the same compressor"
    found.least(words, speeds[_SHOWN["ours"]], speeds[_SHOWN["copy"]], 50, "%")
    found.notes.append(
        f"Archive to store: {megabytes:.0f} MB of 16-bit GRIB, speeds in MB of it a second, two cores, the file in the"
        f" page cache, no index beforehand, all written to {_file_system(work.folder)}. Ours writes integers,"
        " checksums, mean, spread and statistics, and waits until the disk has them (fsync); the others do not wait,"
        f" and write decoded float32 members alone, or those marked {_DERIVED[2:]!r} these as well, in chunks of a"
        " member, lead and variable, which suit them better than ours. ecCodes runs in two processes, cfgrib under"
        " Dask's threads: their faster ways. The copy writes the members' bytes and nothing else."
    )
    return found


def _file_system(folder: Path) -> str:
    """Return the kind of the file system of a folder, as in /proc/mounts."""
    kinds = {parts[1]: parts[2] for parts in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    here = folder.resolve()
    return next((kinds[str(place)] for place in (here, *here.parents) if str(place) in kinds), "an unknown file system")


def _convert(work: Workspace, name: str, source: str, settings: Mapping[str, Any]) -> float:
    output = work.scratch(name)
    seconds = process.run("prepare.conversion", name, source=source, output=output, **settings)["seconds"]
    shutil.rmtree(output, ignore_errors=True)
    return float(seconds)


def memory(work: Workspace) -> Section:
    """Measure the peak memory of `prepare` with a truth, for one date and for several.

    Args:
        work: data and scratch space.
    """
    found, files = Section(), work.archive
    for words, source, truth in (
        ("one date", files.forecast, files.truth),
        (f"{work.shape.years} dates", files.years, files.truth_years),
    ):
        peaks, speeds = [], []
        for _ in range(work.repeats if words == "one date" else 1):
            output = work.scratch("memory")
            outcome = process.run("prepare.conversion", "ours", source=str(source), truth=str(truth), output=output)
            peaks.append(outcome["peak_bytes"] / 1e9)
            speeds.append((source.stat().st_size + truth.stat().st_size) / 1e6 / outcome["seconds"])
        shutil.rmtree(output, ignore_errors=True)
        found.figures[f"peak memory of prepare, {words}"] = Figure.of(peaks, "GB")
        found.figures[f"archive and truth to store, {words}"] = Figure.of(speeds, "MB/s")
        claim = f"peak memory of a build under 1.5 GB: {words}"
        found.claims.append(Claim(claim, max(peaks), "GB", _PEAK_GB, at_most=True))
    return found


def decoding(work: Workspace) -> Section:
    """Race the decoding of GRIB to float32 on one core.

    Args:
        work: data and scratch space.
    """
    found, source = Section(), str(work.archive.member)
    passes = 3  # of each; in the first one, caches and memory are cold
    shown = {"ours": "ours", "eccodes": "ecCodes", "cfgrib": "cfgrib"}
    speeds: dict[str, list[float]] = {name: [] for name in shown}
    checksums = set()
    for _ in range(work.repeats):
        for name in shown:
            outcome = process.run("prepare.decoding", name, cores=1, source=source, passes=passes)
            speeds[name].append(outcome["bytes"] / 1e6 / outcome["seconds"])
            checksums.add(outcome["checksum"])
    for name, values in speeds.items():
        found.figures[f"GRIB decode on one core, {shown[name]}"] = Figure.of(values, "MB/s")
    for name, target in (("cfgrib", 30), ("eccodes", 4)):
        words = f"GRIB decode at {target} times {shown[name]} per core, from the page cache"
        found.least(words, speeds["ours"], speeds[name], target, "times")
    same = Claim("GRIB decode bit-identical to ecCodes and cfgrib", float(len(checksums) == 1), "true", 1)
    found.claims.append(same)
    found.notes.append(
        "GRIB decode: one member's messages, a tenth of the file; MB of decoded float32 a second; the fastest of"
        f" {passes} passes of each run, the same for all; indexes made before."
    )
    for packing in ("grid_simple", "grid_ccsds"):
        _second_edition(work, found, packing, passes)
    return found


def _second_edition(work: Workspace, found: Section, packing: str, passes: int) -> None:
    """Race the decoding of edition 2, which gribberish reads too; of edition 1 it reads nothing."""
    source = f"{work.scratch(packing)}.grib2"
    of_edition_2(str(work.archive.member), source, packing)
    names = ["ours", "eccodes", "gribberish"]
    if importlib.util.find_spec("gribberish") is None:
        names.remove("gribberish")
        found.notes.append(f"gribberish is not installed, and does not decode {packing} here.")
    rows = [{name: process.run("prepare.decoding", name, cores=1, source=source, passes=passes) for name in names}
            for _ in range(work.repeats)]  # fmt: skip
    for name in names:
        values = [row[name]["bytes"] / 1e6 / row[name]["seconds"] for row in rows]
        found.figures[f"GRIB decode of edition 2, {packing}, on one core, {name}"] = Figure.of(values, "MB/s")
    for name in names[1:]:
        speed = found.figures[f"GRIB decode of edition 2, {packing}, on one core, {name}"].median
        if speed > found.figures[f"GRIB decode of edition 2, {packing}, on one core, ours"].median:
            found.notes.append(f"{LOST}{name} decodes {packing} of edition 2 faster than ours.")
    same = len({row[name]["checksum"] for row in rows for name in names}) == 1
    words = f"GRIB decode of edition 2, {packing}, bit-identical to {' and '.join(names[1:])}"
    found.claims.append(Claim(words, float(same), "true", 1))


def reduction(work: Workspace) -> Section:
    """Race mean and spread over members.

    Args:
        work: data and scratch space.
    """
    found, shape = Section(), work.shape
    fields = 2 * len(shape.levels)
    extent = {"members": shape.members, "fields": fields, "rows": shape.rows, "columns": shape.columns}
    outcome = process.run("prepare.reduction", "race", passes=work.repeats, **extent)
    speeds = {
        name: found.speed(f"mean and spread over members, {name}", outcome["bytes"] / 1e6, outcome[name])
        for name in ("ours", *DASK)
    }
    best = max(DASK, key=lambda name: statistics.median(speeds[name]))
    words = "mean + spread over members fused: 3 times Dask's two reductions, in the chunks that suit them best"
    found.least(words, speeds["ours"], speeds[best], 3, "times")
    found.notes.append(
        f"Mean and spread: {shape.members} members of {fields} fields in memory, float32, two threads; Dask's both"
        f" reductions in one graph; {best} is its fastest; results differ by at most"
        f" {outcome['difference']:.2g} at a mean of 280."
    )
    return found


def reading(work: Workspace) -> Section:
    """Race the reading of a quarter of the latitudes, half of the members and two variables of a random date.

    Args:
        work: data and scratch space.
    """
    from benchmarks.prepare.reading import band

    found, shape = Section(), work.shape
    store, whole = work.scratch("store"), work.scratch("whole.zarr")
    process.run("prepare.conversion", "ours", source=str(work.archive.years), output=store)
    process.run("prepare.reading", "write_zarr", store=store, output=whole)
    round_, ours, theirs, sizes = len(shape.variables), [], [], []
    for _ in range(work.repeats):
        mine = process.run("prepare.reading", "ours", store=store, count=round_)
        other = process.run("prepare.reading", "zarr", store=whole, count=round_)
        if not np.isclose(mine["total"], other["total"], rtol=1e-6):
            raise AssertionError("both competitors should have read the same values")
        ours.append(1e3 * float(np.median(mine["seconds"])))
        theirs.append(1e3 * float(np.median(other["seconds"])))
        sizes.append(float(np.mean(mine["bytes"])))
    first, last = band(shape.rows)
    share = (last - first) / shape.rows * 0.5 * 2 / len(shape.variables)
    held = process.run("prepare.reading", "forecast_bytes", store=store)["bytes"] / shape.years
    found.figures["a part of a random date, ours"] = Figure.of(ours, "ms")
    found.figures["a part of a random date, zarr of whole-sample chunks"] = Figure.of(theirs, "ms")
    over = [100 * (size / (share * held) - 1) for size in sizes]
    found.figures["bytes read beyond the part's share"] = Figure.of(over, "%")
    words = "a quarter of the latitudes, five of ten members, two of seven variables of a random date"
    claim = f"{words}: 3 times faster than from a zarr of whole-sample compressed chunks"
    found.least(claim, theirs, ours, 3, "times")
    away = max(abs(one) for one in over)
    found.claims.append(Claim(f"{words}: bytes read within 5 % of that share", away, "%", 5, at_most=True))
    found.notes.append(
        f"Reading a part: rows {first} to {last} of {shape.rows}, five members, two variables, all levels and leads;"
        f" {round_} draws a run, in which each variable comes up twice; from the page cache, bytes counted by the"
        " system (/proc/self/io); the zarr holds one variable of a date in a chunk, in float32, for a whole date"
        " is more than its compressor takes."
    )
    return found
