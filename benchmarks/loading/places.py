"""Sections of the loading benchmark about the place of data: latitude bands of a sample, and hosts joined by links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.hosts import Hosts, available, linked, python
from benchmarks.common.results import Claim, Figure
from benchmarks.loading.lap import probe
from benchmarks.loading.race import Outcome, outcome, prepare, race
from benchmarks.loading.track import Track, check
from ensemble_ml.config import RaceConfig
from ensemble_ml.distributed.topology import bands

_BLOCK = 16  # rows that a U-Net of depth 4 keeps together


def latitude_bands(one: Track) -> tuple[list[Claim], list[dict[str, Any]]]:
    """Measure four ranks that share every sample, each reading its own rows of the packed store, for one epoch.

    There is no cache.

    Args:
        one: the track.

    Returns:
        Claims, and a table of the bytes of each rank.
    """
    rows, whole = one.size.grid[0], one.packed
    aligned = bands(rows, 4, _BLOCK)
    claims, table = [], []
    for words, cuts in (
        (f"whole blocks of {_BLOCK} rows", aligned),
        ("the same number of rows each", bands(rows, 4, 1)),
    ):
        read = []
        for first, last in cuts:
            spec = one.spec("ours packed", 0, rows=[first, last], ranks=1, epochs=1, compute_ms=0.0)
            found = race(spec, one.crew, _cropped(one, first, last))
            check(f"rows {first} to {last}", found, 0)
            read.append(found.read)
            table.append(
                {"bands": words, "rows": f"{first}-{last}", "bytes read": found.read,
                 "planned": int(found.counted("storage")),
                 "share of the dataset, %": round(100 * found.read / whole, 2),
                 "share of its rows, %": round(100 * (last - first) / rows, 2)}
            )  # fmt: skip
        value = 100 * (sum(read) / whole - 1)
        if cuts is aligned:
            text = "latitude bands on 4 ranks: bytes read beyond each rank's own rows, indexes included"
            claims.append(Claim(f"{text} ({words})", value, "%", 5.0, at_most=True))
        else:
            one.notes.append(f"Bands of {words}, which cut blocks of the store: {value:.1f} % beyond their own rows.")
    return claims, table


def _cropped(one: Track, first: int, last: int) -> np.ndarray:
    """Return the probes (F, n) of some rows of the raw files."""
    files = sorted((one.folder / "data" / "raw").iterdir())
    values = (np.fromfile(file, np.float32).reshape(one.size.shape)[..., first:last, :] for file in files)
    return np.stack([probe(np.ascontiguousarray(each)) for each in values])


def hosts(one: Track, settings: RaceConfig) -> dict[str, Figure]:
    """Measure two and four hosts joined by links of one rate, each with its share of a cache that holds the dataset.

    Args:
        one: the track.
        settings: the settings of the race.
    """
    why = available()
    if why:
        one.notes.append(f"The hosts section was left out: {why}.")
        return {}
    figures: dict[str, Figure] = {}
    for count in (2, 4):
        with linked(count, settings.rate) as links:
            for kind in ("ours raw", "ours packed"):
                for assign in ("fixed", "locality"):
                    name = f"{count} hosts at {settings.rate}, {kind}, assign={assign}"
                    found = [_on_hosts(one, links, kind, assign) for _ in range(one.repeats)]
                    for each in found:
                        check(name, each, 0)
                    one.outcomes[name] = found
                    figures |= _host_figures(one, name, found)
    return figures


def _on_hosts(one: Track, links: Hosts, kind: str, assign: str) -> Outcome:
    addresses = [f"10.77.0.{rank + 1}" for rank in range(links.count)]
    spec = one.spec(kind, one.raw, ranks=links.count, assign=assign, hosts=addresses)
    storage = one.crew.storage
    prepare(spec, storage, one.probes)
    environment = storage.environment() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = python("-m", "benchmarks.loading.entrant", spec.to_json())
    links.run(command, seconds=300, environment=environment)
    return outcome(spec, storage)


def _host_figures(one: Track, name: str, found: list[Outcome]) -> dict[str, Figure]:
    moved = one.raw * one.epochs / 1e6
    shares = []
    for each in found:
        every = sum(each.counted(tier) for tier in ("storage", "ram", "disk", "peers"))
        shares.append(100 * each.counted("peers") / every)
    return {
        f"{name}: throughput": Figure.of([moved / each.seconds for each in found], "MB/s of float32"),
        f"{name}: from peers": Figure.of(shares, "% of packed bytes"),
    }
