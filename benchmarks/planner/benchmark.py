"""Compare the planner's predictions with measured steps of every partition, over links of several rates.

    ensemble-ml benchmark benchmark=planner [planner.rates=[none,1gbit,100mbit]] [planner.ranks=4] [repeats=5]

Hosts are network namespaces joined by links of a rate (scripts/links.sh; `none` is unshaped; needs root), with one
thread a rank. If the machine has fewer cores than hosts, a control group gives each host its share of them. Time that a
host does not use while it waits for a message is then lost, as on separate hosts, and not lent to another one.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import Hosts, available, fair_share, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, chosen
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize

log = logging.getLogger(__name__)

_SHAPES = {BenchmarkSize.full: [4, 24, 48], BenchmarkSize.small: [4, 16, 32], BenchmarkSize.tiny: [2, 16, 16]}
_WIDTHS = {BenchmarkSize.full: (16, 32), BenchmarkSize.small: (8, 16), BenchmarkSize.tiny: (4,)}
_BATCHES = {BenchmarkSize.full: (2, 4), BenchmarkSize.small: (2, 4), BenchmarkSize.tiny: (2,)}


class Comparison(Bench):
    """The rows of all rates, with the figures and claims that follow from them."""

    def add(self, where: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of one rate: figures, a table and two claims.

        Args:
            where: the hosts and links, in words.
            rows: one row for each case and partition, with predicted and measured seconds.
        """
        for row in rows:
            name = f"{where}, {row['case']}, data={row['data']} lat={row['lat']} lon={row['lon']}"
            self.figures[f"{name}: measured"] = Figure.of([1e3 * s for s in row["measured"]], "ms")
            self.figures[f"{name}: predicted"] = Figure.of([1e3 * row["predicted"]], "ms")
        self.tables[where] = [_row(row) for row in rows]
        worst = max(abs(row["predicted"] / statistics.median(row["measured"]) - 1) for row in rows)
        behind = max(100 * _behind([r for r in rows if r["case"] == case]) for case in {r["case"] for r in rows})
        words = f"predicted step times from measured, all partitions, {where}: the worst"
        self.claim(words, 100 * worst, "%", 25.0, at_most=True)
        words = f"the planner's pick behind the best measured partition, {where}: the worst case"
        self.claim(words, behind, "%", 10.0, at_most=True)


def _behind(rows: Sequence[dict[str, Any]]) -> float:
    """Return by which fraction the step of the picked partition is longer than the shortest step."""
    times = [statistics.median(row["measured"]) for row in rows]
    picked = next(i for i, row in enumerate(rows) if row["picked"])
    return times[picked] / min(times) - 1


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the published table."""
    seconds = statistics.median(row["measured"])
    shown = {key: row[key] for key in ("case", "data", "lat", "lon")}
    shown |= {f"{key}, ms": round(1e3 * row[key], 2) for key in ("compute", "halo", "norm", "exposed", "predicted")}
    shown["measured, ms"] = round(1e3 * seconds, 2)
    shown["difference, %"] = round(100 * (row["predicted"] / seconds - 1), 1)
    return shown | {"sent, kB": round(row["sent"] / 1e3, 1), "picked": "yes" if row["picked"] else ""}


def run(config: BenchmarkConfig) -> Path:
    """Compare predictions and measurements at each rate, and write results.json and report.html.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: a rank failed.
    """
    chosen(config.only, {})
    comparison = Comparison(config, Path(config.output) / "planner")
    with tempfile.TemporaryDirectory(dir=comparison.folder) as scratch:
        for hosts, note in _hosts(config):
            comparison.notes += [note] if note else []
            log.info("planner: %s", _where(hosts))
            comparison.add(_where(hosts), _rows(config, hosts, Path(scratch)))
    return comparison.publish("Predicted and measured partitions")


def _hosts(config: BenchmarkConfig) -> Iterator[tuple[Hosts, str]]:
    """Yield hosts joined by links of each rate, each with a note; or hosts on the loopback if there can be no links."""
    ranks = config.planner.ranks
    why = available() if config.planner.rates else "planner.rates=[]"
    if why:
        yield Hosts(ranks), f"Loopback instead of links ({why}): times say nothing of networks."
        return
    for rate in config.planner.rates:
        with linked(ranks, rate, fair_share(ranks)) as hosts:
            told = f"Each host has {hosts.cores:g} of a core to itself." if hosts.cores else ""
            yield hosts, told if rate == config.planner.rates[0] else ""


def _where(hosts: Hosts) -> str:
    """Return hosts and links in words."""
    return f"{hosts.count} hosts, {hosts.where}" if hosts.rate else hosts.where


def _rows(config: BenchmarkConfig, hosts: Hosts, scratch: Path) -> list[dict[str, Any]]:
    """Run all cases on the hosts, and return their rows."""
    job = {
        "cases": cases(config), "repeats": config.repeats, "seconds": config.planner.seconds,
        # The machine is measured anew at each rate, because its speed changes.
        "cache": str(scratch / (hosts.rate or "loopback")),
        "followed": str(scratch),
    }  # fmt: skip
    return hand_out(hosts, "benchmarks.planner.worker", job, scratch, seconds=900)


def cases(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Return the cases: two model sizes and two batch sizes, or those that the settings name.

    Args:
        config: the settings of the benchmark.
    """
    depth = 1 if config.size is BenchmarkSize.tiny else 2
    common = {"shape": _SHAPES[config.size], "exchange": "allreduce"}
    return [
        common
        | {
            "name": f"hidden {width}, batch {batch}",
            "model": {"hidden": width, "max_hidden": 4 * width, "depth": depth},
            "batch": batch,
        }
        for width in config.planner.hidden or _WIDTHS[config.size]
        for batch in config.planner.batches or _BATCHES[config.size]
    ]
