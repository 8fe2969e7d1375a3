"""Compare clairvoyant loading with other loaders, over emulated slow storage that counts every byte.

    ensemble-ml benchmark benchmark=loading [only=[bytes,same,own,losses,fast,bands,hosts,simulation,memory]]
        [size=small] [repeats=3] [workspace=DIR] [race.caches=[0.25,1.0]]

Two ranks share storage of 300 MB/s with 0.5 ms for each request, and train ten epochs with 10 ms of computation a
sample. In the class of the same bytes all loaders read raw float32. In the class of own formats each loader reads the
format that suits it best.

An entrant whose counted bytes are fewer than it has to read must have bypassed the emulator, and is disqualified. A
probe checks every value, and every sample has to be used once an epoch. `size=full` is 665 MB, `size=small` is half of
it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, run_sections
from benchmarks.loading import memory, places, racing, simulation
from benchmarks.loading.lap import Size
from benchmarks.loading.track import Track, track
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, require

_SIZES = {
    BenchmarkSize.full: Size(32, 10, (181, 360)),
    BenchmarkSize.small: Size(16, 10, (181, 360)),
    BenchmarkSize.tiny: Size(16, 2, (19, 36)),
}
_MANY = {  # many small samples, so that the remainder at the end of a cache has little weight
    BenchmarkSize.full: Size(2400, 1, (9, 18)),
    BenchmarkSize.small: Size(320, 1, (19, 36)),
    BenchmarkSize.tiny: Size(80, 1, (9, 18)),
}


class LoadingBench(Bench):
    """The results of all sections, and the tracks on which loaders are raced."""

    @property
    def tools(self) -> Path:
        """Return the folder in which the competitors are installed."""
        return self.folder / "rivals"

    @contextmanager
    def track(self, name: str, size: Size, **settings: Any) -> Iterator[Track]:
        """Provide a track, and collect its figures and notes.

        Args:
            name: name of its folder.
            size: number and shape of the samples.
            **settings: settings of the track that differ from the usual ones.
        """
        race, tiny = self.config.race, self.tiny
        common = {
            "epochs": race.epochs or (3 if tiny else 10), "compute_ms": 1.0 if tiny else 10.0,
            "repeats": self.config.repeats, "ranks": race.ranks,
        }  # fmt: skip
        with track(self.folder / name, size, **(common | settings)) as one:
            yield one
            # The DataLoader runs again beside each class of competitors, so its figures get a name of their own.
            for name, figure in one.figures():
                self.figures[f"{name}, run again" if name in self.figures else name] = figure
            self.notes += one.notes


def run(config: BenchmarkConfig) -> Path:
    """Run all sections, or those of `only`, and write results.json and report.html.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: `only` names an unknown section, our loader fails or gives wrong values, an entrant reads past the
            emulator, or there is no C compiler.
    """
    with tempfile.TemporaryDirectory(prefix="loading-") as temporary:
        workspace = Path(config.workspace or temporary).resolve()
        whole = not set(" :") & set(str(workspace))  # these separate libraries in LD_PRELOAD
        require("workspace", config.workspace, whole, "must have no blank and no colon")
        bench = run_sections(LoadingBench(config, workspace), SECTIONS)
    return bench.publish("Loading: every byte leaves slow storage once", Path(config.output) / "loading")


def _bytes(bench: LoadingBench) -> None:
    """Count the bytes that our loader reads from slow storage, for several sizes of the cache."""
    size = _MANY[bench.config.size]
    with bench.track("many", size, mb_s=1e5, latency_us=0.0, repeats=1) as one:
        bench.claims += racing.bytes_table(one, bench.config.race)


def _same(bench: LoadingBench) -> None:
    """Race all loaders on the same raw float32 bytes."""
    with bench.track("race", _SIZES[bench.config.size]) as one:
        bench.claims += racing.same_bytes(one, bench.config.race, bench.tools)


def _own(bench: LoadingBench) -> None:
    """Race all loaders on their own formats."""
    with bench.track("race", _SIZES[bench.config.size]) as one:
        bench.claims += racing.own_formats(one, bench.config.race, bench.tools)


def _losses(bench: LoadingBench) -> None:
    """Race the loaders over one epoch, and over all epochs without a cache, where knowing the future helps least."""
    with bench.track("race", _SIZES[bench.config.size]) as one:
        racing.losses(one, bench.config.race, bench.tools)
        one.notes += racing.lost(one)


def _fast(bench: LoadingBench) -> None:
    """Race all loaders on storage that is fast."""
    with bench.track("race", _SIZES[bench.config.size], mb_s=2e4, latency_us=0.0) as one:
        racing.fast_storage(one, bench.config.race, bench.tools)
        one.notes += racing.lost(one)


def _bands(bench: LoadingBench) -> None:
    """Measure the reading of latitude bands, as the ranks of a spatial partition read them."""
    with bench.track("bands", Size(2, 1, (64, 720)) if bench.tiny else Size(6, 2, (361, 720)), mb_s=1e5) as one:
        claims, table = places.latitude_bands(one)
    bench.claims += claims
    bench.tables["Latitude bands"] = table


def _hosts(bench: LoadingBench) -> None:
    """Measure loading with several hosts."""
    with bench.track("race", _SIZES[bench.config.size]) as one:
        bench.figures |= places.hosts(one, bench.config.race)


def _simulation(bench: LoadingBench) -> None:
    """Simulate many ranks, and compare the reads of our plan with those of the rule of NoPFS."""
    full = bench.config.size is BenchmarkSize.full
    ranks = (2, 8) if bench.tiny else (2, 8, 64, 256, 1024)
    rows = simulation.table(512 if bench.tiny else 32768, 10, ranks, (0.25, 0.5, 1.0, 2.0))
    bench.tables["Simulated ranks: our plan beside NoPFS's rule, ten epochs"] = rows
    worst = min(row["NoPFS: datasets read"] / row["ours: datasets read"] for row in rows)
    words = f"simulation of {', '.join(map(str, ranks))} ranks: reads of NoPFS's rule over ours, the least of all rows"
    bench.claim(words, worst, "times", 1.0)
    samples, epochs = (20_000, 4) if bench.tiny else (2_000_000, 100 if full else 10)
    seconds, memory = simulation.planning(samples, epochs, 1024)
    words = f"planning {samples} samples x {epochs} epochs x 1024 ranks, one rank"
    bench.claim(words, seconds, "s", 60.0, at_most=True)
    bench.figures["planning: peak memory of the process"] = Figure.of([memory], "GB")


def _memory(bench: LoadingBench) -> None:
    """Measure the memory of the loader over many epochs."""
    ram = int(bench.config.race.budget_mb * 1e6)
    epochs = 3 if bench.tiny else 50
    taken, budget = memory.measure(ram, epochs)
    bench.figures["memory beyond the process's own, by epoch"] = Figure.of([t / 1e6 for t in taken], "MB")
    bench.notes.append(
        f"Memory: ram={ram / 1e6:.0f} MB, {budget / 1e6:.0f} MB with look-ahead; at most {max(taken) / 1e6:.0f} taken."
    )
    words = f"RSS + shared memory over {epochs} epochs, beyond the budget (ram, and the look-ahead that was set)"
    bench.claim(words, 100 * (max(taken) / budget - 1), "%", 10.0, at_most=True)


SECTIONS: dict[str, Callable[[LoadingBench], None]] = {
    "bytes": _bytes,
    "same": _same,
    "own": _own,
    "losses": _losses,
    "fast": _fast,
    "bands": _bands,
    "hosts": _hosts,
    "simulation": _simulation,
    "memory": _memory,
}
