"""Entrants that read a slice of an archive by URL, each in a process of its own: `prepare`, and xarray over fsspec."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

VARIABLES = {
    "t": "temperature", "z": "geopotential", "t2m": "2m_temperature", "msl": "mean_sea_level_pressure",
}  # fmt: skip
LEVELS, LEADS = (500, 850), (24, 48)


def ours(url: str, output: str) -> dict[str, Any]:
    """Write a tensor store of the slice.

    Args:
        url: the archive.
        output: where the store is written.
    """
    from data_prep.prepare import prepare
    from ensemble_ml.config import PrepareConfig

    settings: dict[str, Any] = {
        "variables": list(VARIABLES),
        "levels": list(LEVELS),
        "leads": list(LEADS),
        "workers": 2,
    }
    config = PrepareConfig(input=url, output=output, overwrite=True, **settings)
    return _timed(url, lambda: prepare(config))


def xarray_load(url: str, output: str) -> dict[str, Any]:
    """Load the slice with xarray as it is, and write it as Zarr, date by date.

    Args:
        url: the archive.
        output: where the copy is written.
    """
    return _timed(url, lambda: _copied(url, output, None))


def xarray_dask(url: str, output: str) -> dict[str, Any]:
    """Load the slice with xarray and Dask, a task a chunk, and write it as Zarr, date by date.

    Args:
        url: the archive.
        output: where the copy is written.
    """
    return _timed(url, lambda: _copied(url, output, {}))


def _copied(url: str, output: str, chunks: dict[str, int] | None) -> None:
    """Copy the slice, date by date because a machine may not hold all."""
    import numpy as np
    import xarray as xr
    from zarr.storage import FsspecStore

    data = xr.open_zarr(FsspecStore.from_url(url, read_only=True), chunks=chunks, decode_timedelta=True)
    leads = np.array(LEADS, "timedelta64[h]").astype("timedelta64[ns]")
    wanted = data[list(VARIABLES.values())].sel(level=list(LEVELS), prediction_timedelta=leads)
    for number in range(wanted.sizes["time"]):
        one = wanted.isel(time=[number]).load()
        for array in one.variables.values():
            array.encoding = {}
        how: dict[str, Any] = {"append_dim": "time"} if number else {"mode": "w"}
        one.to_zarr(output, zarr_format=2, consolidated=False, **how)


def _timed(url: str, copy: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a copy, and how many requests and bytes the server counted meanwhile."""
    before, start = _asked(url), time.perf_counter()
    copy()
    seconds, after = time.perf_counter() - start, _asked(url)
    return {"seconds": seconds} | {key: after[key] - before[key] for key in ("requests", "bytes")}


def _asked(url: str) -> dict[str, int]:
    """Return the server's counts."""
    with urllib.request.urlopen(f"{url.rsplit('/', 1)[0]}/asked") as answer:
        return json.loads(answer.read())
