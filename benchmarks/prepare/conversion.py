"""Entrants that convert a GRIB file to a store. Each runs in its own process and returns the seconds that it took.

All have the same cores, the same compressor (bitshuffle, lz4 at level 5) and the same chunks (one member, lead and
variable, all levels, 16 rows). They are timed from the first byte read to the last one written, including the index,
with the file in the page cache.

Ours writes packed integers, checksums, and the members' mean, spread and statistics. The others write only decoded
float32 values, or with `derive` also the mean and spread of the decoded members.

Axes: M member, T lead, V variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prepare.data import Shape
from ensemble_ml.machine import keep_freed_memory

_ROWS = 16
_LEVEL = 5
_COPY = 256 * 1024  # bytes that are compressed at a time in a plain copy: a chunk of the store at full size


def _fresh(output: str) -> str:
    path = Path(output)
    # The index of an earlier run would make the next one faster.
    for old in (path, path.with_name(f".{path.name}.index")):
        shutil.rmtree(old, ignore_errors=True)
    return output


def ours(source: str, output: str, truth: str | None = None, **settings: Any) -> dict[str, float]:
    """Run `ensemble-ml prepare`.

    Args:
        source: the archive.
        output: the store to make.
        truth: the truth, or None.
        **settings: other settings of its configuration.
    """
    from data_prep import prepare
    from ensemble_ml.config import PrepareConfig

    config = PrepareConfig(input=source, truth=truth, output=_fresh(output), **settings)
    start = time.perf_counter()
    prepare(config)
    return {"seconds": time.perf_counter() - start}


def copy(source: str, output: str) -> dict[str, float]:
    """Send the bytes of the file through the same compressor, with one thread for each core.

    Args:
        source: the archive.
        output: the folder to write to.
    """
    from numcodecs import blosc

    blosc.use_threads = False
    keep_freed_memory(arenas=1)  # as ours does
    target = Path(_fresh(output))
    target.mkdir(parents=True)
    start = time.perf_counter()
    size = os.path.getsize(source)
    handle = os.open(source, os.O_RDONLY)

    def compress(offset: int) -> bytes:
        return blosc.compress(os.pread(handle, _COPY, offset), b"lz4", _LEVEL, blosc.BITSHUFFLE, typesize=2)

    with open(target / "copy", "wb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for data in pool.map(compress, range(0, size, _COPY)):
            file.write(data)
    os.close(handle)
    return {"seconds": time.perf_counter() - start, "bytes": (target / "copy").stat().st_size}


def cfgrib(
    source: str, output: str, chunks: str = "ours", way: str = "threads", derive: bool = False
) -> dict[str, float]:
    """Convert with cfgrib, xarray and `to_zarr`, on Dask's threads or processes, in one graph.

    Args:
        source: the archive.
        output: the store to make.
        chunks: "ours" or "whole".
        way: Dask's scheduler, "threads" or "processes".
        derive: whether mean and spread are written, too.
    """
    import dask
    import xarray as xr
    import zarr

    zarr.config.set({"threading.max_workers": 2})
    _fresh(output)
    start = time.perf_counter()
    options = {"indexpath": ""}
    with dask.config.set(scheduler=way, num_workers=2):
        data = xr.open_dataset(
            source, engine="cfgrib", backend_kwargs=options, chunks={"number": 1, "step": 1}, decode_timedelta=True
        )
        written = {"members": data}
        if derive:
            written |= {"mean": data.mean("number"), "spread": data.std("number", ddof=1)}
        lazy = []
        for group, part in written.items():
            encoding: dict[str, Any] = {}
            for name, values in part.data_vars.items():
                block = (1,) * (values.ndim - 3) + values.shape[-3:]
                encoding[str(name)] = {"compressors": [_codec(4)], **_layout(block, chunks)}
            lazy.append(
                part.to_zarr(
                    output, group=group, zarr_format=3, encoding=encoding, consolidated=False, compute=False, mode="a"
                )
            )
        dask.compute(*lazy)
    return {"seconds": time.perf_counter() - start}


def _codec(size: int) -> Any:
    from zarr.codecs import BloscCodec

    return BloscCodec(typesize=size, cname="lz4", clevel=_LEVEL, shuffle="bitshuffle")


def _layout(block: tuple[int, ...], chunks: str) -> dict[str, Any]:
    """Return the chunks of a zarr array that is written block by block.

    They are whole blocks, or our chunks inside a shard for each block.
    """
    if chunks == "whole":
        return {"chunks": block}
    rows = min(_ROWS, block[-2])
    inner = (*block[:-2], rows, block[-1])
    return {"chunks": inner, "shards": (*block[:-2], -(-block[-2] // rows) * rows, block[-1])}


def eccodes(
    source: str, output: str, shape: dict, chunks: str = "ours", way: str = "threads", derive: bool = False
) -> dict[str, float]:
    """Convert with ecCodes, decoding to float32, and zarr-python.

    A first pass reads the keys. Then one worker for each core takes one member, lead and variable after the other, or
    all members of a lead and variable if mean and spread are wanted.

    Args:
        source: the archive.
        output: the store to make.
        shape: the fields of a `Shape`.
        chunks: "ours" or "whole".
        way: "threads" or "processes".
        derive: whether mean and spread are written, too.
    """
    import zarr

    extent = Shape(**shape)
    zarr.config.set({"threading.max_workers": 2})
    _fresh(output)
    start = time.perf_counter()
    group = zarr.open_group(output, mode="w", zarr_format=3)
    whole = (extent.members, len(extent.leads), len(extent.levels), extent.rows, extent.columns)
    for name in extent.variables:
        layout = _layout((1, 1, *whole[2:]), chunks)
        group.create_array(name, shape=whole, dtype="float32", compressors=[_codec(4)], **layout)
        for part in ("mean", "spread") if derive else ():
            layout = _layout((1, *whole[2:]), chunks)
            group.create_array(f"{part}/{name}", shape=whole[1:], dtype="float32", compressors=[_codec(4)], **layout)
    places = _index(source)
    everyone = range(extent.members)
    jobs = []
    for members in [everyone] if derive else [[m] for m in everyone]:
        for t, lead in enumerate(extent.leads):
            for name in extent.variables:
                spans = {m: [places[name, m + 1, lead, level] for level in extent.levels] for m in members}
                jobs.append((source, output, name, t, spans, whole[2:], derive))
    if way == "threads":
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_block, jobs))
    else:
        with get_context("fork").Pool(2) as processes:
            processes.map(_block, jobs)
    return {"seconds": time.perf_counter() - start}


def _index(source: str) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    """Return (name, member, lead, level) -> (offset, length), which ecCodes reads from the headers alone."""
    import eccodes as ec

    places = {}
    with open(source, "rb") as file:
        while (handle := ec.codes_grib_new_from_file(file, headers_only=True)) is not None:
            name = ec.codes_get_string(handle, "shortName")
            key = tuple(ec.codes_get_long(handle, k) for k in ("number", "step", "level"))
            span = ec.codes_get_long(handle, "offset"), ec.codes_get_long(handle, "totalLength")
            places[name, *key] = span
            ec.codes_release(handle)
    return places  # type: ignore[return-value]


def _block(job: tuple) -> None:
    import zarr

    source, output, name, t, spans, shape, derive = job
    values = np.empty((len(spans), *shape), np.float32)
    handle = os.open(source, os.O_RDONLY)
    members = zarr.open_array(f"{output}/{name}", mode="r+")
    for out, (m, offsets) in zip(values, spans.items(), strict=True):
        for z, (offset, length) in enumerate(offsets):
            out[z] = decode_message(os.pread(handle, length, offset)).reshape(shape[1:])
        members[m, t] = out
    os.close(handle)
    if derive:
        zarr.open_array(f"{output}/mean/{name}", mode="r+")[t] = values.mean(0)
        zarr.open_array(f"{output}/spread/{name}", mode="r+")[t] = values.std(0, ddof=1)


def decode_message(message: bytes) -> np.ndarray:
    """Return the values of a GRIB message, decoded to float32 by ecCodes.

    Args:
        message: the bytes of the message.
    """
    import eccodes as ec

    handle = ec.codes_new_from_message(message)
    values = ec.codes_get_array(handle, "values", np.float32)
    ec.codes_release(handle)
    return values
