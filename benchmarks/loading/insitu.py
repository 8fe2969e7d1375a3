"""insitubatch as an entrant, in its own environment (it needs Python 3.12). Batches are numpy arrays, without torch."""

from __future__ import annotations

from pathlib import Path

from insitubatch import (  # type: ignore[import-not-found]
    InSituDataset,
    SplitManifest,
    obstore_store,
    open_geometries,
)

from benchmarks.loading.lap import Batches, Spec, main


def batches(spec: Spec, rank: int) -> Batches:
    """Yield batches from each rank's own share of the samples, because the library divides nothing between processes.

    Its pool serves as read-ahead and cache, and gets the memory that the race gives to a cache.

    Args:
        spec: the run.
        rank: this rank.

    Raises:
        MemoryError: the memory is less than the library needs for such blocks.
    """
    store = obstore_store((Path(spec.data) / spec.options["zarr"]).resolve().as_uri())
    geometries = open_geometries(store, variables=["values"])
    mine = list(range(rank, spec.shape.samples, spec.ranks))
    manifest = SplitManifest(spec.shape.samples, 1, spec.shape.samples, {"train": mine, "val": [], "test": []}, 0)
    settings = {"geometries": geometries, "batch_size": spec.batch // spec.ranks}
    settings |= {"block_chunks": spec.options.get("block_chunks", spec.batch // spec.ranks)}
    least = InSituDataset(store, manifest, **settings).cache_budget_bytes
    if least > 1.01 * spec.ram:
        raise MemoryError(f"blocks of {settings['block_chunks']} chunks need {least} bytes, the cache has {spec.ram}")
    data = InSituDataset(store, manifest, cache_budget_bytes=max(least, spec.ram), **settings)
    for epoch in range(spec.epochs):
        data.set_epoch(epoch)
        for batch in data.train:
            yield epoch, batch.sample_indices.tolist(), batch.arrays["values"]


if __name__ == "__main__":
    main(batches)
