"""Entrants of the loading race that use torch: `python -m benchmarks.loading.entrant [SPEC]`."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loading.lap import Batches, Meeting, Spec, main
from ensemble_ml.config import Assign
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.order import epoch_order
from ensemble_ml.loading.store_items import StoreItems
from ensemble_ml.store import Part, Selection, open_store


class RawFiles(Dataset):
    """A dataset of raw float32 files, one for each sample."""

    def __init__(self, spec: Spec):
        self.folder, self.size = Path(spec.data) / "raw", spec.shape

    def __len__(self) -> int:
        return self.size.samples

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.fromfile(self.folder / f"{sample:05d}.f32", np.float32).reshape(self.size.shape)


class PackedFiles(Dataset):
    """A dataset that reads the tensor store sample by sample."""

    def __init__(self, spec: Spec):
        self.store = open_store(Path(spec.data) / "store.zarr")

    def __len__(self) -> int:
        return len(self.store.layout.init_time)

    def __getitem__(self, sample: int) -> np.ndarray:
        return self.store.read(Part.FORECAST, sample).pressure[:, 0]


class Numbered(Dataset):
    """A dataset that returns the number of each sample with its values."""

    def __init__(self, inner: Dataset):
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, sample: int) -> tuple[int, np.ndarray]:
        return sample, self.inner[sample]


def dataloader(spec: Spec, rank: int, make: Callable[[Spec], Dataset]) -> Batches:
    """Yield batches of torch's DataLoader, over this rank's share of each epoch.

    Args:
        spec: the run.
        rank: this rank.
        make: makes the dataset.
    """
    options = {"num_workers": 0, **spec.options}
    if options["num_workers"]:
        options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
    order: list[int] = []
    data = make(spec)

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


def ours(spec: Spec, rank: int, packed: bool) -> Batches:
    """Yield batches of the clairvoyant loader, whose ranks communicate through files beside the data.

    Args:
        spec: the run.
        rank: this rank.
        packed: whether the packed store is read, or raw files.
    """
    meeting, options = Meeting(Path(spec.work), rank, spec.ranks), spec.options
    source: Any = RawFiles(spec)
    if packed:
        selection = Selection(rows=tuple(options["rows"])) if "rows" in options else None
        store = open_store(Path(spec.data) / "store.zarr")
        source = StoreItems(store, parts=[Part.FORECAST], selection=selection)
    with ClairvoyantLoader(
        source, spec.batch, spec.epochs, 0, rank=rank, ranks=spec.ranks, gather=meeting.gather, ram=spec.ram,
        disk=spec.disk, folder=Path(spec.work) / f"disk{rank}", assign=Assign(options.get("assign", "locality")),
        threads=options.get("threads", 4), host=options["hosts"][rank] if "hosts" in options else "localhost",
    ) as loader:  # fmt: skip
        for batch in loader:
            values = batch["forecast_pressure"][:, :, 0] if packed else batch["0"]
            yield batch.step // loader.plan.order.steps_per_epoch, batch.samples.tolist(), values
        told = loader.plan.explain()
        facts = {"traffic": asdict(told), "opened": loader.plan.stored is not None} | loader.tiers.counters.snapshot()
        (Path(spec.work) / f"facts{rank}.json").write_text(json.dumps(facts))


def streaming(spec: Spec, rank: int) -> Batches:
    """Yield batches of MosaicML Streaming, which reads shards from slow storage into a bounded local cache.

    Args:
        spec: the run.
        rank: this rank.
    """
    from streaming import StreamingDataset  # type: ignore[import-not-found]

    options = spec.options
    data = StreamingDataset(
        remote=str(Path(spec.data) / options["shards"]), local=str(Path(spec.work) / "mds-cache"), shuffle=True,
        batch_size=spec.batch // spec.ranks, cache_limit=options.get("cache_limit"), shuffle_seed=0,
    )  # fmt: skip
    workers = {k: v for k, v in options.items() if k in ("num_workers", "prefetch_factor")}
    persistent = bool(workers.get("num_workers"))
    loader = DataLoader(data, batch_size=spec.batch // spec.ranks, persistent_workers=persistent, **workers)
    for epoch in range(spec.epochs):
        for batch in loader:
            values = np.stack([np.frombuffer(one, np.float32).reshape(spec.shape.shape) for one in batch["values"]])
            yield epoch, [int(sample) for sample in batch["sample"]], values


def import_streaming(packages: str) -> None:
    """Import Streaming before the clock runs, and remove what a killed run of it has left in shared memory.

    Args:
        packages: the folder in which it is installed.
    """
    sys.path.insert(0, packages)
    stand_in_for_unused_modules()
    from streaming.base.util import clean_stale_shared_memory  # type: ignore[import-not-found]

    clean_stale_shared_memory()  # all ranks do this together


def stand_in_for_unused_modules() -> None:
    """Let Streaming be imported without torchvision and transformers, which its text and image datasets need."""

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


def batches(spec: Spec, rank: int) -> Batches:
    """Return the batches of the entrant named in `spec`.

    Its files are opened during the iteration, while the clock runs.

    Args:
        spec: the run.
        rank: this rank.
    """
    if spec.entrant == "streaming":
        import_streaming(spec.options["packages"])
        return streaming(spec, rank)
    if spec.entrant in ("ours raw", "ours packed"):
        return ours(spec, rank, spec.entrant == "ours packed")
    return dataloader(spec, rank, {"dataloader raw": RawFiles, "dataloader packed": PackedFiles}[spec.entrant])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(batches)
