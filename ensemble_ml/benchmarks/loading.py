"""Clairvoyant loading against other loaders, over emulated slow storage that counts every byte.

Two ranks share storage of 300 MB/s with 0.5 ms a request and train ten epochs with 10 ms of compute a sample. In the
class of the same bytes all read raw float32 files; in the class of own formats each reads what suits it best. An
entrant whose counted bytes are below its plan reads past the emulator, and is disqualified; every value is checked by a
probe, and every sample must be used once an epoch.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.benchmarks.loaders.data import Size, make, probes
from ensemble_ml.benchmarks.loaders.entrant import Spec
from ensemble_ml.benchmarks.loaders.race import Outcome, race
from ensemble_ml.benchmarks.loaders.rivals import streaming_packages, write_shards
from ensemble_ml.benchmarks.loaders.storage import Storage
from ensemble_ml.benchmarks.results import Claim, Figure, summary, write_results
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize
from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_SIZES = {
    BenchmarkSize.full: (Size(32, 10, (181, 360)), 10),
    BenchmarkSize.small: (Size(32, 5, (91, 180)), 6),
    BenchmarkSize.tiny: (Size(8, 2, (19, 36)), 3),
}
_CACHES = (0.1, 0.25, 0.5, 1.0, 2.0)
_TUNED = (0, 1, 2, 4)  # workers that a DataLoader is tried with
_BATCH = 8


@dataclass
class Track:
    """The data, the storage, and what has been run on them."""

    size: Size
    epochs: int
    folder: Path
    storage: Storage
    probes: np.ndarray
    compute_ms: float
    repeats: int
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    @property
    def raw(self) -> int:
        """Bytes of the dataset as float32."""
        return self.size.samples * self.size.bytes

    def spec(self, entrant: str, ram: int = 0, *, ranks: int = 2, epochs: int | None = None, **options: Any) -> Spec:
        """A run of an entrant with `ram` bytes of cache over all ranks."""
        size = {"samples": self.size.samples, "members": self.size.members, "grid": list(self.size.grid)}
        work = str(self.folder.parent / "work")
        epochs = epochs or self.epochs
        return Spec(
            entrant, str(self.folder), work, size, ranks, epochs, _BATCH, self.compute_ms, ram // ranks, 0, options
        )

    def run(self, name: str, spec: Spec, repeats: int | None = None) -> list[Outcome]:
        """Run `spec` several times, and keep the outcomes under `name`."""
        for _ in range(repeats or self.repeats):
            outcome = race(spec, self.storage, self.probes)
            if not outcome.valid:
                raise UserError(f"{name}: covered={outcome.covered}, {outcome.wrong} wrong values; it is disqualified")
            if outcome.planned is not None and outcome.read < outcome.planned:
                raise UserError(
                    f"{name}: {outcome.read} bytes counted, {outcome.planned} planned: reads past the emulator"
                )
            self.outcomes.setdefault(name, []).append(outcome)
            log.info("%s: %.2f s, %.3f datasets read", name, outcome.seconds, outcome.read / self.raw)
        return self.outcomes[name]

    def seconds(self, name: str) -> Figure:
        """Median and range of a run's length."""
        return Figure.of([outcome.seconds for outcome in self.outcomes[name]], "s")


def run(config: BenchmarkConfig) -> Path:
    """Race all entrants; write results.json and report.html.

    Returns:
        The path of results.json.

    Raises:
        UserError: an entrant fails, gives wrong values, or reads past the emulator; or there is no C compiler.
    """
    size, epochs = _SIZES[config.size]
    with tempfile.TemporaryDirectory(dir=config.workspace, prefix="loading-") as folder:
        track = _track(Path(folder), size, epochs, config)
        notes = _run_all(track)
        figures, claims = dict(_figures(track)), list(_claims(track))
    log.info("%s", summary(figures, claims))
    where = Path(config.output) / "loading"
    title = "Loading: every byte leaves slow storage once"
    return write_results(where, title=title, runs=config.repeats, figures=figures, claims=claims, notes=notes)


def _track(folder: Path, size: Size, epochs: int, config: BenchmarkConfig) -> Track:
    data = folder / "data"
    make(data, size)
    storage = Storage(data, folder / "storage")
    storage.build()
    compute = 10.0 if config.size is not BenchmarkSize.tiny else 1.0
    return Track(size, epochs, data, storage, probes(data, size), compute, config.repeats)


def _run_all(track: Track) -> list[str]:
    notes = []
    tuned = {}
    for kind in ("raw", "packed"):
        name = f"dataloader {kind}"
        tuned[kind] = _tune(track, name)
        track.run(name, track.spec(name, **tuned[kind]))
        notes.append(f"{name}: fastest with {tuned[kind]} of workers {_TUNED}, tried over two epochs each.")
    packages = streaming_packages(track.folder.parent / "rivals")
    if packages is None:
        notes.append("MosaicML Streaming could not be installed here, so it did not run.")
    else:
        write_shards(packages, track.folder, track.size)
    for cache in _CACHES:
        for kind in ("raw", "packed"):
            # Equal room for all: the same share of the raw dataset in bytes, whatever lies in it.
            room = int(cache * track.raw)
            track.run(f"ours {kind}, cache {cache:g}", track.spec(f"ours {kind}", room))
        if packages is not None and cache >= 0.25:
            options = {"packages": str(packages), "num_workers": 1, "cache_limit": int(cache * track.raw)}
            _try_streaming(track, cache, options, notes)
    return notes


def _tune(track: Track, name: str) -> dict[str, int]:
    """Workers and read-ahead with which a DataLoader is fastest over two epochs."""
    times: dict[tuple[tuple[str, int], ...], float] = {}
    for workers in _TUNED:
        for ahead in (2, 4) if workers else (None,):
            options = {"num_workers": workers} | ({"prefetch_factor": ahead} if ahead else {})
            outcome = race(track.spec(name, epochs=2, **options), track.storage, track.probes)
            times[tuple(options.items())] = outcome.seconds
    return dict(min(times.items(), key=lambda item: item[1])[0])


def _try_streaming(track: Track, cache: float, options: dict[str, Any], notes: list[str]) -> None:
    name = f"streaming, cache {cache:g}"
    try:
        track.run(name, track.spec("streaming", **options))
    except UserError as error:
        notes.append(f"{name}: did not finish ({error}).")
        track.outcomes.pop(name, None)


def _figures(track: Track) -> Iterator[tuple[str, Figure]]:
    for name, outcomes in track.outcomes.items():
        yield name, track.seconds(name)
        yield f"{name}: read", Figure.of([outcome.read / track.raw for outcome in outcomes], "datasets of raw bytes")
        if outcomes[0].planned:  # a store is opened besides: its indexes and factors
            beyond = [100 * (outcome.read / (outcome.planned or 1) - 1) for outcome in outcomes]
            yield f"{name}: beyond the plan", Figure.of(beyond, "%")


def _claims(track: Track) -> Iterator[Claim]:
    ours = {name: outcomes for name, outcomes in track.outcomes.items() if name.startswith("ours")}
    above = max(o.read / o.bound - 1 for outcomes in ours.values() for o in outcomes if o.bound)
    yield Claim("bytes read from slow storage above the bound F + (E-1)(F-K)", 100 * above, "%", 1.0, at_most=True)
    same = [o for name, outcomes in ours.items() if name.startswith("ours raw") for o in outcomes]
    differ = max(abs(o.read - o.planned) for o in same if o.planned is not None)
    yield Claim("bytes by which counters differ from the plan, same bytes", float(differ), "bytes", 0.0, at_most=True)
    raw, packed = track.seconds("dataloader raw").median, track.seconds("dataloader packed").median
    for claim, rival, own, target in (
        ("cache 1.0: throughput over the DataLoader's, same bytes", raw, "ours raw, cache 1", 5.4),
        ("cache 0.25: ours in our format over the DataLoader on raw files", raw, "ours packed, cache 0.25", 4.0),
        ("cache 0.5: ours in our format over the DataLoader on raw files", raw, "ours packed, cache 0.5", 4.0),
        ("cache 0.25: over the DataLoader given our packed files", packed, "ours packed, cache 0.25", 1.8),
        ("cache 0.5: over the DataLoader given our packed files", packed, "ours packed, cache 0.5", 1.8),
    ):
        yield Claim(claim, rival / track.seconds(own).median, "times", target)
    for cache in (c for c in _CACHES if c >= 0.25 and f"streaming, cache {c:g}" in track.outcomes):
        rival = track.seconds(f"streaming, cache {cache:g}").median
        value = rival / track.seconds(f"ours raw, cache {cache:g}").median
        yield Claim(f"cache {cache:g}: throughput over MosaicML Streaming's", value, "times", 1.0)
    waits = [outcome.waited for outcome in track.outcomes["ours packed, cache 1"]]
    yield Claim(
        "warm-epoch wait, own format, cache 1.0", 100 * float(np.median(waits)), "% of a step", 1.0, at_most=True
    )
