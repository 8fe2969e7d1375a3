"""The data, the storage and the entrants of a loading race, and what they have run."""

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

from ensemble_ml.benchmarks.loaders.data import make, probes
from ensemble_ml.benchmarks.loaders.lap import Size, Spec
from ensemble_ml.benchmarks.loaders.race import Crew, Outcome, race
from ensemble_ml.benchmarks.loaders.rivals import insitubatch_python, streaming_packages, write_shards, write_zarr
from ensemble_ml.benchmarks.loaders.storage import Storage
from ensemble_ml.benchmarks.results import Figure
from ensemble_ml.errors import UserError
from ensemble_ml.loading.items import Items
from ensemble_ml.loading.store_items import StoreItems
from ensemble_ml.machine import cores
from ensemble_ml.store import Part, open_store

log = logging.getLogger(__name__)

BATCH = 8


@dataclass
class Track:
    """One set of data on one storage; `outcomes` by the name of a run."""

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
        """Bytes of the dataset as float32."""
        return self.size.samples * self.size.bytes

    def spec(self, entrant: str, ram: float = 0, **options: Any) -> Spec:
        """A run of an entrant with `ram` bytes of cache over all ranks; `ranks`, `epochs`, `compute_ms` may be set."""
        size = {"samples": self.size.samples, "members": self.size.members, "grid": list(self.size.grid)}
        ranks = options.pop("ranks", self.ranks)
        epochs, compute = options.pop("epochs", self.epochs), options.pop("compute_ms", self.compute_ms)
        work = str(self.folder / "work")
        return Spec(
            entrant, str(self.folder / "data"), work, size, ranks, epochs, BATCH, compute, int(ram / ranks), 0, options
        )

    def run(self, name: str, spec: Spec, repeats: int | None = None) -> list[Outcome]:
        """Run `spec` until `name` has its outcomes."""
        found = self.outcomes.setdefault(name, [])
        while len(found) < (repeats or self.repeats):
            one = race(spec, self.crew, self.probes)
            check(name, one, self.least(spec))
            found.append(one)
            log.info("%s: %.2f s, %.3f datasets read", name, one.seconds, one.read / self.raw)
        return found

    def least(self, spec: Spec) -> int:
        """Bytes below which an honest entrant cannot stay: those of its plan, of every epoch, or of one."""
        if spec.entrant.startswith("dataloader"):
            return spec.epochs * (self.raw if spec.entrant.endswith("raw") else self.packed)
        if spec.entrant.startswith("ours"):
            return 0  # it tells its plan, which `check` takes
        folder = Path(spec.data) / (spec.options.get("shards") or spec.options["zarr"])
        return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix != ".json")

    @property
    def packed(self) -> int:
        """Bytes of the dataset as the store holds them."""
        return int(self.items().sizes.sum())

    def items(self) -> StoreItems:
        """The samples as our loader takes them from the store."""
        return StoreItems(open_store(self.folder / "data" / "store.zarr"), parts=[Part.FORECAST])

    def tuned(self, name: str, settings: Sequence[dict[str, Any]], spec: dict[str, Any]) -> dict[str, Any]:
        """Of several settings of an entrant that with which two epochs are fastest; told in the notes."""
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
        """Median and range of a run's length."""
        return Figure.of([one.seconds for one in self.outcomes[name]], "s")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Of all runs: length, datasets read, wait after the first epoch; memory where one process has all of it."""
        for name, outcomes in self.outcomes.items():
            if not outcomes:
                continue
            yield name, self.seconds(name)
            yield f"{name}: read", Figure.of([one.read / self.raw for one in outcomes], "datasets of raw bytes")
            if name.endswith((": ours", ": insitubatch")):  # what others have in workers or on local disk is not seen
                yield f"{name}: peak memory of a rank", Figure.of([one.peak / 1e6 for one in outcomes], "MB")
            waits = [100 * one.waited for one in outcomes]
            if not any(map(math.isnan, waits)):
                yield f"{name}: wait after the first epoch", Figure.of(waits, "% of a step")

    def decode_seconds(self, *, opened: bool = False) -> float:
        """Seconds in which a thread decodes a sample of the store while all cores do: they share memory's bandwidth."""
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
    """Disqualify an entrant that gave wrong values, left samples out, or read past the emulated storage.

    Raises:
        UserError: it did.
    """
    if not one.valid:
        raise UserError(f"{name}: covered={one.covered}, {one.wrong} wrong samples; it is disqualified")
    least = max(least, one.traffic.storage if one.traffic else 0)
    if one.read < least:
        raise UserError(f"{name}: {one.read} bytes counted, at least {least} must be read: it reads past the emulator")


@contextmanager
def track(folder: Path, size: Size, **settings: Any) -> Iterator[Track]:
    """A track on data in `folder`, which are made where they are not there; its processes end with it.

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
    """A rival on one track: its name in figures, how it is entered, and the settings it is tried with."""

    name: str
    entrant: str
    options: dict[str, Any]
    settings: tuple[dict[str, Any], ...]
    cached: bool  # whether it keeps what it has read

    def spec(self, one: Track, cache: float) -> dict[str, Any]:
        """What `Track.spec` takes, with room for `cache` datasets."""
        more = {"cache_limit": int(cache * one.raw)} if self.entrant == "streaming" else {}
        return {"entrant": self.entrant, "ram": cache * one.raw} | self.options | more


def rivals(one: Track, names: Sequence[str], workers: Sequence[int], tools: Path, *, same_bytes: bool) -> list[Rival]:
    """Those of `names` that can be entered here, on the raw bytes or in their own formats; the others are told."""
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
