"""Mean and spread over members: fused, and as Dask's two reductions; the same float32 members in memory for both.

Axes: M member, F field, Y latitude, X longitude.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def race(members: int, fields: int, rows: int, columns: int, passes: int) -> dict[str, Any]:
    """Seconds of each pass of both entrants, in turn, and the largest difference between their results."""
    import dask

    rng = np.random.default_rng(0)
    values = rng.normal(280, 10, (members, fields, rows, columns)).astype(np.float32)
    seconds: dict[str, list[float]] = {"ours": [], "dask": []}
    with ThreadPoolExecutor(2) as pool, dask.config.set(scheduler="threads", num_workers=2):
        for count in range(passes + 1):
            found = {}
            for name in seconds:
                start = time.perf_counter()
                found[name] = _fused(values, pool) if name == "ours" else _two_reductions(values)
                if count:
                    seconds[name].append(time.perf_counter() - start)
            apart = [float(np.abs(a - b).max()) for a, b in zip(found["ours"], found["dask"], strict=True)]
    return {**seconds, "bytes": values.nbytes, "difference": max(apart)}


def _fused(values: np.ndarray, pool: ThreadPoolExecutor) -> tuple[np.ndarray, np.ndarray]:
    """What `prepare` does with the members of a field, field by field."""
    from ensemble_ml.store.statistics import ensemble_moments

    mean, spread = np.empty(values.shape[1:], np.float32), np.empty(values.shape[1:], np.float32)

    def one(field: int) -> None:
        mean[field], spread[field], _ = ensemble_moments(values[:, field].astype(np.float64))

    list(pool.map(one, range(values.shape[1])))
    return mean, spread


def _two_reductions(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An array chunked as files come, a member at a time; both reductions in one graph, so that loading is shared."""
    import dask
    import dask.array as da

    lazy = da.from_array(values, chunks=(1, -1, *values.shape[2:]))
    return dask.compute(lazy.mean(0), lazy.std(0, ddof=1))
