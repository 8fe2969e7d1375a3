"""Prepare a slice of WeatherBench 2's layout from a server that is far away, and from one that answers wrongly.

    ensemble-ml benchmark benchmark=remote [size=full] [repeats=3] [only=[speed,faults]]

In `speed`, two hosts (scripts/links.sh; needs root) are joined by 100 Mbit, and the server lets every answer wait for
50 ms. The slice is t and z at 500 and 850 hPa, t2m and msl, two leads, 50 members on 64 x 32 points, in chunks of one
date, lead and variable with three levels. Against `prepare` run xarray's own loading and xarray with Dask over fsspec's
HTTP (aiohttp), which copy the slice date by date to Zarr. In `faults`, some requests are answered wrongly: by a reset,
a truncated answer, another ETag, 403, 404, 429 or 500.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from benchmarks.common.hosts import Hosts, available, linked, python
from benchmarks.common.results import LOST, Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.remote.entrants import LEADS, VARIABLES
from benchmarks.remote.faults import meet_faults
from benchmarks.remote.worker import ROWS
from ensemble_ml.config import BenchmarkSize

# At full size the link carries data for over a minute, so that the two seconds in which Python's modules are imported
# before the first request hardly count.
_DATES = {BenchmarkSize.full: 192, BenchmarkSize.small: 12, BenchmarkSize.tiny: 2}
_FAULTS = {BenchmarkSize.full: 200, BenchmarkSize.small: 50, BenchmarkSize.tiny: 3}
_RATE, _BITS, _SECONDS = "100mbit", 100e6, 0.05
_STORED_LEVELS = (500, 700, 850)
_STORED_LEADS = (12, 24, 48)
_LIKE = {  # mean (one for each level) and deviation of random values, and units
    "t": ((252.0, 270.0, 279.0), 5.0, "K"), "z": ((5.5e4, 3e4, 1.45e4), 300.0, "m**2 s**-2"),
    "t2m": ((285.0,), 5.0, "K"), "msl": ((1.01e5,), 500.0, "Pa"),
}  # fmt: skip
_PEERS = {"xarray_load": "xarray over fsspec", "xarray_dask": "xarray and Dask over fsspec"}


def archive(path: Path, dates: int, *, members: int = 50, shape: tuple[int, int] = (32, 64)) -> Path:
    """Write an ensemble with the layout of WeatherBench 2's IFS ENS at 64 x 32, of random numbers.

    Args:
        path: where the Zarr store is written.
        dates: number of init times.
        members: number of members.
        shape: rows and columns.
    """
    rng = np.random.default_rng(0)
    leads = np.array(_STORED_LEADS, "timedelta64[h]").astype("timedelta64[ns]")
    step = 180 / shape[0]
    axes = {
        "time": np.datetime64("2018-01-01", "ns") + np.arange(dates) * np.timedelta64(12, "h"),
        "number": np.arange(1, members + 1), "prediction_timedelta": leads, "level": list(_STORED_LEVELS),
        "latitude": np.arange(-90 + step / 2, 90, step), "longitude": np.arange(shape[1]) * 360 / shape[1],
    }  # fmt: skip
    data = xr.Dataset(coords=axes)
    coding = {}
    for name, called in VARIABLES.items():
        dims = tuple(dim for dim in axes if dim != "level" or name in ("t", "z"))
        mean, deviation, units = _LIKE[name]
        departures = rng.normal(0, deviation, [data.sizes[dim] for dim in dims])
        means = np.array(mean)[:, None, None]
        data[called] = dims, (departures + (means if len(mean) > 1 else means[0])).astype(np.float32), {"units": units}
        coding[called] = {"chunks": [1 if dim in ("time", "prediction_timedelta") else data.sizes[dim] for dim in dims]}
    data.to_zarr(path, zarr_format=2, encoding=coding, consolidated=True)
    return path


def wanted_bytes(path: Path) -> int:
    """Return the bytes of the chunks that hold the slice.

    Args:
        path: the archive.
    """
    leads = [str(_STORED_LEADS.index(lead)) for lead in LEADS]
    files = (file for called in VARIABLES.values() for file in (path / called).iterdir())
    return sum(file.stat().st_size for file in files if file.name.split(".")[2:3] and file.name.split(".")[2] in leads)


def _speed(bench: Bench) -> None:
    """Time `prepare` and its peers over a link."""
    why = available()
    peers = list(_PEERS) if importlib.util.find_spec("aiohttp") else []
    if not peers:
        bench.notes.append("xarray over fsspec's HTTP needs aiohttp, which is not installed: `prepare` ran alone.")
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        job: dict[str, Any] = {
            "archive": str(archive(Path(scratch) / "ens.zarr", _DATES[bench.config.size])), "output": scratch,
            "seconds": _SECONDS, "repeats": bench.config.repeats, "entrants": ["ours", *peers],
        }  # fmt: skip
        if why:
            bench.notes.append(f"Loopback instead of a link ({why}): times say nothing of networks.")
            rows = _rows(Hosts(2), job, Path(scratch))
        else:
            with linked(2, _RATE) as hosts:
                rows = _rows(hosts, job, Path(scratch))
        asked = wanted_bytes(Path(job["archive"]))
    seconds = {name: [row["seconds"] for row in rows if row["name"] == name] for name in job["entrants"]}
    ours = [row for row in rows if row["name"] == "ours"]
    share = [100 * 8 * row["bytes"] / row["seconds"] / _BITS for row in ours]
    bench.figures["prepare"] = Figure.of(seconds["ours"], "s")
    bench.figures["prepare: requests"] = Figure.of([row["requests"] for row in ours], "requests")
    bench.figures["prepare: bytes over those of the chunks asked"] = Figure.of(
        [r["bytes"] / asked for r in ours], "times"
    )
    bench.figures["prepare: share of the link"] = Figure.of(share, "%")
    words = "bytes that prepare reads over those of the chunks asked"
    bench.claim(words, max(row["bytes"] / asked for row in ours), "times", 1.05, at_most=True)
    if not why:
        bench.claim("prepare of a WB2-like slice over 100 Mbit and 50 ms: share of the link", _median(share), "%", 90.0)
    for name in peers:
        bench.figures[_PEERS[name]] = Figure.of(seconds[name], "s")
        bench.race(f"{_PEERS[name]}: time over that of prepare", seconds[name], seconds["ours"], 3.0)
        if _median(seconds[name]) < _median(seconds["ours"]):
            bench.notes.append(f"{LOST}{_PEERS[name]} took less time than prepare.")
    bench.tables["runs"] = rows


def _rows(hosts: Hosts, job: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Run the job on two hosts, and return the rows of the entrants."""
    hosts.run(python("-m", "benchmarks.remote.worker", json.dumps(job), str(scratch)), seconds=7200)
    return json.loads((scratch / ROWS).read_text())


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else math.nan


def _faults(bench: Bench) -> None:
    """Let the server answer wrongly, at random."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        source = archive(Path(scratch) / "ens.zarr", 2, members=2, shape=(6, 12))
        found = meet_faults(source, Path(scratch), _FAULTS[bench.config.size])
    for name, count in found.items():
        bench.figures[f"faults: {name}"] = Figure.of([count], "runs")
    words = "faults after which the store was the same bits, or one line said why and it stayed"
    bench.claim(words, sum(found.values()), "runs", _FAULTS[BenchmarkSize.full])


run = benchmark("Archives by URL", {"speed": _speed, "faults": _faults})
