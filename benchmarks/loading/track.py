"""The data, the storage and the entrants of a loading race, and the results of their runs."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np

from benchmarks.common.results import Figure
from benchmarks.loading.data import make, probes
from benchmarks.loading.lap import Size, Spec
from benchmarks.loading.race import Crew, Outcome, race
from benchmarks.loading.rivals import insitubatch_python, streaming_packages, write_shards, write_zarr
from benchmarks.loading.storage import Storage
from ensemble_ml.errors import UserError
from ensemble_ml.loading.items import Items
from ensemble_ml.loading.store_items import StoreItems
from ensemble_ml.machine import cores
from ensemble_ml.store import Part, open_store

log = logging.getLogger(__name__)

BATCH = 8


@dataclass
class Track:
    """A data set on one storage, with the results of the runs on it.

    Attributes:
        size: number and shape of the samples.
        epochs: epochs of a run.
        compute_ms: milliseconds of computation for each sample.
        repeats: number of runs.
        ranks: number of ranks.
        folder: folder of the data.
        crew: the processes of the entrants.
        probes: the probe of every sample.
        outcomes: results by the name of the run.
        notes: sentences for the report.
    """

    size: Size
    epochs: int
    compute_ms: float
    repeats: int
    ranks: int
    folder: Path
    crew: Crew
    probes: np.ndarray
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def raw(self) -> int:
        """Return the bytes of the dataset as float32."""
        return self.size.samples * self.size.bytes

    def spec(self, entrant: str, ram: float = 0, **options: Any) -> Spec:
        """Return the description of a run.

        Args:
            entrant: name of the entrant.
            ram: bytes of cache of all ranks together.
            **options: options of the entrant; also `ranks`, `epochs` and `compute_ms`.
        """
        size = {"samples": self.size.samples, "members": self.size.members, "grid": list(self.size.grid)}
        ranks = options.pop("ranks", self.ranks)
        epochs, compute = options.pop("epochs", self.epochs), options.pop("compute_ms", self.compute_ms)
        work = str(self.folder / "work")
        return Spec(
            entrant, str(self.folder / "data"), work, size, ranks, epochs, BATCH, compute, int(ram / ranks), 0, options
        )

    def run(self, name: str, spec: Spec, repeats: int | None = None) -> list[Outcome]:
        """Run an entrant until it has as many results as repeats.

        Args:
            name: name of the run.
            spec: the run.
            repeats: number of runs; None takes the usual one.
        """
        found = self.outcomes.setdefault(name, [])
        while len(found) < (repeats or self.repeats):
            one = race(spec, self.crew, self.probes)
            check(name, one, self.least(spec))
            found.append(one)
            log.info("%s: %.2f s, %.3f datasets read", name, one.seconds, one.read / self.raw)
        return found

    def least(self, spec: Spec) -> int:
        """Return the bytes that an honest entrant has to read at least: of every epoch, or of one.

        Args:
            spec: the run.
        """
        if spec.entrant.startswith("dataloader"):
            return spec.epochs * (self.raw if spec.entrant.endswith("raw") else self.packed)
        if spec.entrant.startswith("ours"):
            return 0  # `check` takes the bytes of its plan
        folder = Path(spec.data) / (spec.options.get("shards") or spec.options["zarr"])
        return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix != ".json")

    @property
    def packed(self) -> int:
        """Return the bytes of the dataset as the store holds it."""
        return int(self.items().sizes.sum())

    def items(self) -> StoreItems:
        """Return the samples as our loader reads them from the store."""
        return StoreItems(open_store(self.folder / "data" / "store.zarr"), parts=[Part.FORECAST])

    def tuned(self, name: str, settings: Sequence[dict[str, Any]], spec: dict[str, Any]) -> dict[str, Any]:
        """Return the setting of an entrant with which two epochs are fastest, and add a note.

        Args:
            name: name in the note.
            settings: the settings to try.
            spec: the run.

        Raises:
            UserError: the entrant ran with none of the settings.
        """
        times: list[tuple[float, int]] = []
        for place, options in enumerate(settings):
            try:
                one = race(self.spec(**spec, epochs=min(2, self.epochs), **options), self.crew, self.probes, timeout=60)
            except UserError as error:
                self.notes.append(f"{name}: {options} failed while it was tuned ({error}).")
                continue
            times.append((one.seconds, place))
        if not times:
            raise UserError(f"{name}: ran with none of {len(settings)} settings")
        best = settings[min(times)[1]]
        told = ", ".join(f"{k}={v}" for k, v in best.items()) or "its defaults"
        self.notes.append(f"{name}: fastest with {told}, of {len(settings)} settings tried over two epochs.")
        return best

    def seconds(self, name: str) -> Figure:
        """Return median and range of a run's length.

        Args:
            name: name of the run.
        """
        return Figure.of([one.seconds for one in self.outcomes[name]], "s")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield the figures of all runs: length, datasets read, and wait after the first epoch.

        Peak memory is among them for entrants whose memory is all in one process.
        """
        for name, outcomes in self.outcomes.items():
            if not outcomes:
                continue
            yield name, self.seconds(name)
            yield f"{name}: read", Figure.of([one.read / self.raw for one in outcomes], "datasets of raw bytes")
            if name.endswith((": ours", ": insitubatch")):  # the memory of workers and local disk is not seen
                yield f"{name}: peak memory of a rank", Figure.of([one.peak / 1e6 for one in outcomes], "MB")
            waits = [100 * one.waited for one in outcomes]
            if not any(map(math.isnan, waits)):
                yield f"{name}: wait after the first epoch", Figure.of(waits, "% of a step")

    def decode_seconds(self, *, opened: bool = False) -> float:
        """Return the seconds in which a thread decodes a sample of the store while all cores do so.

        All cores share the bandwidth of memory, so a single thread alone would be faster.

        Args:
            opened: whether samples are kept decompressed.
        """
        turns = 3
        items: Items = self.items().opened() if opened else self.items()
        together = Barrier(cores(), timeout=60)

        def work() -> float:
            out = {name: np.empty(one.shape, one.dtype) for name, one in items.arrays.items()}
            packed = memoryview(bytearray(int(items.sizes[0])))
            items.read(0, packed)
            items.decode(0, packed, out)
            together.wait()
            began = time.perf_counter()
            for _ in range(turns):
                items.decode(0, packed, out)
            return (time.perf_counter() - began) / turns

        with ThreadPoolExecutor(cores()) as pool:
            return statistics.median(job.result() for job in [pool.submit(work) for _ in range(cores())])


def check(name: str, one: Outcome, least: int) -> None:
    """Raise a UserError if an entrant gave wrong values, left samples out, or bypassed the emulated storage.

    Args:
        name: name of the run.
        one: its result.
        least: bytes that it has to read at least.
    """
    if not one.valid:
        raise UserError(f"{name}: covered={one.covered}, {one.wrong} wrong samples; it is disqualified")
    least = max(least, one.traffic.storage if one.traffic else 0)
    if one.read < least:
        raise UserError(f"{name}: {one.read} bytes counted, at least {least} must be read: it reads past the emulator")


@contextmanager
def track(folder: Path, size: Size, **settings: Any) -> Iterator[Track]:
    """Provide a track on data in a folder. The data is made if it does not exist; processes end with the track.

    Args:
        folder: the folder.
        size: number and shape of the samples.
        **settings: settings of `Track`, and `mb_s` and `latency_us` of the storage.

    Raises:
        UserError: there is no C compiler.
    """
    mb_s, latency_us = settings.pop("mb_s", 300.0), settings.pop("latency_us", 500.0)
    make(folder / "data", size)
    storage = Storage(folder / "data", folder / "storage", mb_s, latency_us)
    storage.build()
    with Crew(storage) as crew:
        yield Track(size=size, folder=folder, crew=crew, probes=probes(folder / "data", size), **settings)


@dataclass(frozen=True)
class Rival:
    """A competitor on one track.

    Attributes:
        name: its name in figures.
        entrant: its name as an entrant.
        options: options of its runs.
        settings: settings that are tried.
        cached: whether it keeps what it has read.
    """

    name: str
    entrant: str
    options: dict[str, Any]
    settings: tuple[dict[str, Any], ...]
    cached: bool  # whether it keeps what it has read

    def spec(self, one: Track, cache: float) -> dict[str, Any]:
        """Return the arguments of `Track.spec` for a run with a cache of `cache` datasets.

        Args:
            one: the track.
            cache: size of the cache, as a share of the dataset.
        """
        more = {"cache_limit": int(cache * one.raw)} if self.entrant == "streaming" else {}
        return {"entrant": self.entrant, "ram": cache * one.raw} | self.options | more


def rivals(one: Track, names: Sequence[str], workers: Sequence[int], tools: Path, *, same_bytes: bool) -> list[Rival]:
    """Return the competitors that can run here. The others are noted.

    Args:
        one: the track.
        names: names of competitors.
        workers: numbers of workers to try.
        tools: folder in which competitors are installed.
        same_bytes: whether they read the raw bytes, or their own formats.
    """
    by_workers = tuple(
        {"num_workers": count} | ({"prefetch_factor": ahead} if count else {})
        for count in workers
        for ahead in ((2, 4) if count else (0,))
    )
    found, data = [], one.folder / "data"
    if "dataloader" in names:
        kind = "raw" if same_bytes else "packed"
        found.append(Rival(f"DataLoader, {kind} files", f"dataloader {kind}", {}, by_workers, False))
    if "streaming" in names:
        packages, why = streaming_packages(tools)
        if packages is None:
            one.notes.append(f"MosaicML Streaming did not run: it could not be installed ({why}).")
        else:
            shards = write_shards(packages, data, one.size, None if same_bytes else "zstd:1")
            options = {"packages": str(packages), "shards": shards}
            few = tuple({"num_workers": count} for count in workers)
            found.append(Rival("MosaicML Streaming", "streaming", options, few, True))
    if "insitubatch" in names:
        python, why = insitubatch_python(tools)
        if python is None:
            one.notes.append(f"insitubatch did not run: {why}.")
        else:
            zarr = write_zarr(python, data, one.size, compress=not same_bytes)
            options = {"python": str(python), "zarr": zarr}
            blocks = tuple({"block_chunks": chunks} for chunks in (1, BATCH // one.ranks, 2 * BATCH // one.ranks))
            found.append(Rival("insitubatch", "insitubatch", options, blocks, True))
    return found
