"""Entrants that decode the messages of one member to float32 on one core, from the page cache.

Their indexes exist beforehand. Each returns the seconds of its fastest pass over the file, and a checksum of the
values. The checksum is equal for equal bits in the same order of messages: lead, variable, level, of one member.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.prepare.conversion import decode_message


def _timed(fields: Callable[[], Iterator[np.ndarray]], passes: int) -> dict[str, Any]:
    """Decode everything `passes` times with the clock running, and once more for the checksum."""
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        for _values in fields():
            pass
        seconds.append(time.perf_counter() - start)
    digest, size = hashlib.sha256(), 0
    for values in fields():
        assert values.dtype == np.float32
        digest.update(values.tobytes())
        size += values.nbytes
    return {"seconds": min(seconds), "bytes": size, "checksum": digest.hexdigest()}


def ours(source: str, passes: int) -> dict[str, Any]:
    """Decode with the reader that `prepare` uses.

    Args:
        source: the file.
        passes: number of passes.
    """
    from data_prep.grib import GribFile

    file = GribFile(source)
    records = file.records[np.argsort(file.records["offset"])]
    return _timed(lambda: (raw.decode() for raw in file.fields(records)), passes)


def eccodes(source: str, passes: int) -> dict[str, Any]:
    """Decode with ecCodes, which opens each message by its offset.

    Args:
        source: the file.
        passes: number of passes.
    """
    descriptor, spans = os.open(source, os.O_RDONLY), _spans(source)
    return _timed(lambda: (decode_message(os.pread(descriptor, size, at)) for at, size in spans), passes)


def gribberish(source: str, passes: int) -> dict[str, Any]:
    """Decode with gribberish, a reader of edition 2 in Rust, which takes messages as bytes.

    Args:
        source: the file.
        passes: number of passes.
    """
    from gribberish import parse_grib_array

    descriptor, spans = os.open(source, os.O_RDONLY), _spans(source)
    return _timed(
        lambda: (parse_grib_array(os.pread(descriptor, size, at), 0).astype(np.float32) for at, size in spans), passes
    )


def of_edition_2(source: str, target: str, packing: str) -> None:
    """Write the messages of a file again, in edition 2.

    Args:
        source: the file.
        target: the new file.
        packing: ecCodes' name of the packing.
    """
    import eccodes as ec

    with open(source, "rb") as file, open(target, "wb") as out:
        while (handle := ec.codes_grib_new_from_file(file)) is not None:
            ec.codes_set(handle, "edition", 2)
            ec.codes_set(handle, "packingType", packing)
            out.write(ec.codes_get_message(handle))
            ec.codes_release(handle)


def _spans(source: str) -> list[tuple[int, int]]:
    """Return where the messages of a file begin, and their lengths."""
    import eccodes as ec

    spans = []
    with open(source, "rb") as file:
        while (handle := ec.codes_grib_new_from_file(file, headers_only=True)) is not None:
            spans.append((ec.codes_get_long(handle, "offset"), ec.codes_get_long(handle, "totalLength")))
            ec.codes_release(handle)
    return spans


def cfgrib(source: str, passes: int) -> dict[str, Any]:
    """Decode with cfgrib through xarray, all levels of a lead at a time, one variable after the other.

    Args:
        source: the file.
        passes: number of passes.
    """
    import xarray as xr

    options = {"indexpath": ""}
    data = xr.open_dataset(source, engine="cfgrib", backend_kwargs=options, decode_timedelta=True, cache=False)
    names = _in_order_of_file(source)

    def fields() -> Iterator[np.ndarray]:
        for step in range(data.sizes["step"]):
            for name in names:
                values = data[name].isel(step=step)
                yield values.values[::-1]  # cfgrib has the lowest level first, the file the highest

    return _timed(fields, passes)


def _in_order_of_file(source: str) -> list[str]:
    """Return the names of the variables in the order of the file."""
    import eccodes as ec

    names: dict[str, None] = {}
    with open(source, "rb") as file:
        while (handle := ec.codes_grib_new_from_file(file, headers_only=True)) is not None:
            names.setdefault(ec.codes_get_string(handle, "shortName"))
            ec.codes_release(handle)
    return list(names)
