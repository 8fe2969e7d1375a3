"""Compare mean and spread over members in one pass with Dask's two reductions, on the same float32 members in memory.

Axes: M member, F field, Y latitude, X longitude.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

_FIELDS, _ROWS = 11, 16  # of a block: levels and rows of a chunk at full size
DASK = {  # chunks of its array: as files arrive, and as suits the reduction
    "Dask, a member at a time": (1, -1, -1, -1),
    "Dask, a field of all members": (-1, 1, -1, -1),
    "Dask, our blocks": (-1, _FIELDS, _ROWS, -1),
}


def race(members: int, fields: int, rows: int, columns: int, passes: int) -> dict[str, Any]:
    """Return the seconds of each pass of the entrants, which take turns, and the largest difference from our result.

    Args:
        members: number of members.
        fields: number of fields.
        rows: latitudes.
        columns: longitudes.
        passes: number of passes.
    """
    import dask

    rng = np.random.default_rng(0)
    values = rng.normal(280, 10, (members, fields, rows, columns)).astype(np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *DASK)}
    with ThreadPoolExecutor(2) as pool, dask.config.set(scheduler="threads", num_workers=2):
        for count in range(passes + 1):
            found = {}
            for name in seconds:
                start = time.perf_counter()
                found[name] = _fused(values, pool) if name == "ours" else _two_reductions(values, DASK[name])
                if count:
                    seconds[name].append(time.perf_counter() - start)
            pairs = [pair for name in DASK for pair in zip(found["ours"], found[name], strict=True)]
            apart = [float(np.abs(a - b).max()) for a, b in pairs]
    return {**seconds, "bytes": values.nbytes, "difference": max(apart)}


def _fused(values: np.ndarray, pool: ThreadPoolExecutor) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and spread as `prepare` does, in blocks of a few rows and fields, with further statistics."""
    from ensemble_ml.store.fuse import Members, fuse

    members, fields, rows, _ = values.shape
    mean, spread = np.empty(values.shape[1:], np.float32), np.empty(values.shape[1:], np.float32)
    there = np.ones((members, _FIELDS), bool)

    def one(place: tuple[int, int]) -> None:
        part = slice(place[0], place[0] + _FIELDS), slice(place[1], place[1] + _ROWS)
        block = values[:, *part]
        found = fuse(Members.plain(block, there[:, : block.shape[1]]))
        mean[part], spread[part] = found.mean, found.spread

    list(pool.map(one, product(range(0, fields, _FIELDS), range(0, rows, _ROWS))))
    return mean, spread


def _two_reductions(values: np.ndarray, chunks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and spread with Dask, both in one graph, so that they share the loading."""
    import dask
    import dask.array as da

    lazy = da.from_array(values, chunks=chunks, name=False)  # without name=False, Dask hashes all values for a name
    return dask.compute(lazy.mean(0), lazy.std(0, ddof=1))
