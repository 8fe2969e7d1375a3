"""One rank of one entrant of the loading race: `python -m ensemble_ml.benchmarks.loaders.entrant SPEC RANK`.

Every entrant hands out (sample numbers, values) batch by batch; the rank checks a probe of each sample's values, sleeps
for the compute, and writes what it used and how long it took.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ensemble_ml.benchmarks.loaders.data import Size, probe
from ensemble_ml.config import Assign
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.order import epoch_order
from ensemble_ml.loading.store_items import StoreItems
from ensemble_ml.store import Part, open_store

Batches = Iterator[tuple[int, list[int], Any]]  # epoch, samples, values (b, M, V, Z, Y, X)


@dataclass(frozen=True)
class Spec:
    """What an entrant is told; `ram` and `disk` are bytes of cache a rank."""

    entrant: str
    data: str
    work: str
    size: dict[str, Any]
    ranks: int
    epochs: int
    batch: int
    compute_ms: float
    ram: int = 0
    disk: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Size:
        """Axes of the samples."""
        return Size(self.size["samples"], self.size["members"], tuple(self.size["grid"]))

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class RawFiles(Dataset):
    """Raw float32 files, one a sample."""

    def __init__(self, spec: Spec):
        self.folder, self.size = Path(spec.data) / "raw", spec.shape

    def __len__(self) -> int:
        return self.size.samples

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.fromfile(self.folder / f"{sample:05d}.f32", np.float32).reshape(self.size.shape)


class PackedFiles(Dataset):
    """The tensor store, read sample by sample."""

    def __init__(self, spec: Spec):
        self.store = open_store(Path(spec.data) / "store.zarr")

    def __len__(self) -> int:
        return len(self.store.layout.init_time)

    def __getitem__(self, sample: int) -> np.ndarray:
        return self.store.read(Part.FORECAST, sample).pressure[:, 0]


class Numbered(Dataset):
    """A dataset that says which sample it gives."""

    def __init__(self, inner: Dataset):
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, sample: int) -> tuple[int, np.ndarray]:
        return sample, self.inner[sample]


def dataloader(spec: Spec, rank: int, data: Dataset) -> Batches:
    """torch's DataLoader over this rank's share of each epoch."""
    options = {"num_workers": 0, **spec.options}
    if options["num_workers"]:
        options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
    order: list[int] = []

    class Share(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(order)

        def __len__(self) -> int:
            return len(data) // spec.ranks  # type: ignore[arg-type]

    loader = DataLoader(Numbered(data), batch_size=spec.batch // spec.ranks, sampler=Share(), **options)
    for epoch in range(spec.epochs):
        order[:] = epoch_order(0, epoch, len(data))[rank :: spec.ranks].tolist()  # type: ignore[arg-type]
        for samples, values in loader:
            yield epoch, samples.tolist(), values


def ours(spec: Spec, rank: int, source: Any, name: str, pick: Callable[[Any], Any]) -> Batches:
    """The clairvoyant loader, its ranks joined through files beside the data."""
    meeting = Meeting(Path(spec.work), rank, spec.ranks)
    options = {"assign": Assign(spec.options.get("assign", "locality")), "threads": spec.options.get("threads", 4)}
    with ClairvoyantLoader(
        source, spec.batch, spec.epochs, 0, rank=rank, ranks=spec.ranks, gather=meeting.gather, ram=spec.ram,
        disk=spec.disk, folder=Path(spec.work) / f"disk{rank}", host="localhost", **options,
    ) as loader:  # fmt: skip
        told = loader.plan.explain()
        for batch in loader:
            yield batch.step // loader.plan.order.steps_per_epoch, batch.samples.tolist(), pick(batch[name])
        facts = {"planned": told.storage, "bound": told.bound} | loader.tiers.counters.snapshot()
        (Path(spec.work) / f"facts{rank}.json").write_text(json.dumps(facts))


def streaming(spec: Spec, rank: int) -> Batches:
    """MosaicML Streaming, reading shards from slow storage into a bounded local cache."""
    sys.path.insert(0, spec.options["packages"])
    stand_in_for_unused_modules()
    from streaming import StreamingDataset  # type: ignore[import-not-found]

    data = StreamingDataset(
        remote=str(Path(spec.data) / "mds"), local=str(Path(spec.work) / "mds-cache"), shuffle=True,
        batch_size=spec.batch // spec.ranks, cache_limit=spec.options.get("cache_limit"), shuffle_seed=0,
    )  # fmt: skip
    workers = {k: v for k, v in spec.options.items() if k in ("num_workers", "prefetch_factor")}
    loader = DataLoader(data, batch_size=spec.batch // spec.ranks, **workers, persistent_workers=True)
    for epoch in range(spec.epochs):
        for batch in loader:
            values = np.stack([np.frombuffer(one, np.float32).reshape(spec.shape.shape) for one in batch["values"]])
            yield epoch, [int(sample) for sample in batch["sample"]], values


def stand_in_for_unused_modules() -> None:
    """Let Streaming import without torchvision and transformers, which its text and image datasets want."""

    class StandIn(types.ModuleType):
        def __init__(self, name: str):
            super().__init__(name)
            self.__path__: list[str] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    unused = ("streaming.text", "streaming.vision", "streaming.multimodal", "torchvision", "transformers")
    for name in (*unused, "transformers.feature_extraction_utils", "transformers.tokenization_utils_base"):
        sys.modules.setdefault(name, StandIn(name))


class Meeting:
    """Ranks that meet through files: an all-gather of bytes, and so a barrier."""

    def __init__(self, folder: Path, rank: int, ranks: int, name: str = "meeting"):
        self.folder, self.rank, self.ranks, self.name, self.count = folder, rank, ranks, name, 0

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        paths = [self.folder / f"{self.name}-{self.count}-{rank}" for rank in range(self.ranks)]
        partial = paths[self.rank].with_suffix(".partial")
        partial.write_bytes(value)
        partial.rename(paths[self.rank])
        self.count += 1
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]


def batches(spec: Spec, rank: int) -> Batches:
    """The entrant named in `spec`."""
    if spec.entrant == "dataloader raw":
        return dataloader(spec, rank, RawFiles(spec))
    if spec.entrant == "dataloader packed":
        return dataloader(spec, rank, PackedFiles(spec))
    if spec.entrant == "streaming":
        return streaming(spec, rank)
    if spec.entrant == "ours raw":
        return ours(spec, rank, RawFiles(spec), "0", lambda values: values)
    if spec.entrant == "ours packed":
        items = StoreItems(open_store(Path(spec.data) / "store.zarr"), parts=[Part.FORECAST])
        return ours(spec, rank, items, "forecast_pressure", lambda values: values[:, :, 0])
    raise ValueError(spec.entrant)


def run(spec: Spec, rank: int) -> None:
    """Race, and write `work`/result{rank}.json."""
    expected = np.load(Path(spec.work) / "probes.npy")
    meeting = Meeting(Path(spec.work), rank, spec.ranks, "start")
    meeting.gather(b"")
    began = last = time.perf_counter()
    used: list[list[int]] = [[] for _ in range(spec.epochs)]
    ends: list[float] = []
    wrong = 0
    for epoch, samples, values in batches(spec, rank):
        if epoch != len(ends):
            ends.append(last - began)
        used[epoch] += samples
        for sample, one in zip(samples, values, strict=True):
            wrong += not np.array_equal(probe(np.asarray(one)), expected[sample])
        time.sleep(spec.compute_ms / 1e3 * len(samples))
        last = time.perf_counter()
    meeting.gather(b"")
    result = {"seconds": time.perf_counter() - began, "used": used, "wrong": wrong, "epoch_ends": [*ends, last - began]}
    (Path(spec.work) / f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Spec(**json.loads(sys.argv[1])), int(sys.argv[2]))
