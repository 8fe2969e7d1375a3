"""Entrants that read a part of a random date: a band of latitudes, five members, two variables, all leads and levels.

Each returns, for every draw, the seconds and the bytes that it requested from the system. Draws are the same for both.
In a round of draws every variable occurs equally often, so that differences in compressibility average out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common.process import bytes_read


def draws(dates: int, members: int, variables: int, count: int) -> list[tuple[int, list[int], list[int]]]:
    """Return date, half of the members and two variables of each draw, as positions.

    Args:
        dates: number of dates.
        members: number of members.
        variables: number of variables.
        count: number of draws.
    """
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        first = number % variables
        chosen = sorted(rng.choice(members, members // 2, replace=False).tolist())
        found.append((int(rng.integers(dates)), chosen, sorted({first, (first + 1) % variables})))
    return found


def band(rows: int) -> tuple[int, int]:
    """Return the second of four bands of rows, in whole blocks of 16, as in a partition over latitude.

    Args:
        rows: number of rows.
    """
    blocks = -(-rows // 16)
    size = max(1, round(blocks / 4)) * 16
    return (size, min(2 * size, rows)) if rows > size else (0, rows)


def ours(store: str, count: int) -> dict[str, Any]:
    """Read from our store, which is opened once.

    Args:
        store: the store.
        count: number of draws.
    """
    from ensemble_ml.store import Part, Selection, open_store

    source = open_store(store)
    lay = source.layout

    def read(date: int, members: list[int], variables: list[int]) -> np.ndarray:
        numbers, names = tuple(lay.realization[m] for m in members), tuple(lay.variables[v] for v in variables)
        chosen = Selection(numbers, None, names, None, None, band(lay.grid.shape[0]))
        return source.read(Part.FORECAST, date, chosen).pressure

    shape = len(lay.init_time), len(lay.realization), len(lay.variables)
    return _timed(read, draws(*shape, count))


def zarr(store: str, count: int) -> dict[str, Any]:
    """Read from a zarr in which each variable of a date, with all members and leads, is one compressed chunk.

    Args:
        store: the zarr.
        count: number of draws.
    """
    import zarr as library

    group = library.open_group(store, mode="r")
    arrays: list[Any] = [group[f"v{number}"] for number in range(len(list(group.array_keys())))]

    def read(date: int, members: list[int], variables: list[int]) -> np.ndarray:
        first, last = band(arrays[0].shape[-2])
        parts = [arrays[v].oindex[date, members, :, :, first:last] for v in variables]
        return np.stack(parts, axis=2)

    return _timed(read, draws(arrays[0].shape[0], arrays[0].shape[1], len(arrays), count))


def _timed(read: Callable[..., np.ndarray], wanted: list) -> dict[str, Any]:
    read(*wanted[0])  # loads everything that is loaded only once
    seconds, sizes, total = [], [], 0.0
    for draw in wanted:
        before, start = bytes_read(), time.perf_counter()
        values = read(*draw)
        seconds.append(time.perf_counter() - start)
        sizes.append(bytes_read() - before)
        total += float(values.sum(dtype=np.float64))
    return {"seconds": seconds, "bytes": sizes, "total": total}


def write_zarr(store: str, output: str) -> dict[str, Any]:
    """Write the forecast of the store as float32 into chunks of whole samples, with the same compressor.

    Args:
        store: the store.
        output: the zarr to make.
    """
    import zarr as library
    from numcodecs import blosc
    from zarr.codecs import BloscCodec

    from ensemble_ml.store import Part, Selection, open_store

    blosc.use_threads = True
    source = open_store(store)
    lay = source.layout
    extent = (len(lay.realization), len(lay.lead_hours), len(lay.levels), *lay.grid.shape)
    codec = BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="bitshuffle")
    group = library.open_group(output, mode="w", zarr_format=3)
    for number, name in enumerate(lay.variables):
        shape, chunk = (len(lay.init_time), *extent), (1, *extent)
        array = group.create_array(f"v{number}", shape=shape, chunks=chunk, dtype="float32", compressors=[codec])
        for date in range(len(lay.init_time)):
            fields = source.read(Part.FORECAST, date, Selection(None, None, (name,), None, None))
            array[date] = fields.pressure[:, :, 0]
    return {}


def forecast_bytes(store: str) -> dict[str, Any]:
    """Return the bytes of the store's forecast members on disk.

    Args:
        store: the store.
    """
    from pathlib import Path

    return {"bytes": sum(p.stat().st_size for p in Path(store).glob("forecast_pressure/c.*"))}
