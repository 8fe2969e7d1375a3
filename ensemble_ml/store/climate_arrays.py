"""Write the model climate into a store: its quantiles for every init time, so that they need not be computed again.

Two arrays stand beside the fields: `climate_pressure` (D, T, V, Q, Z, Y, X) and `climate_surface` (D, T, S, Q, Y, X).
They are float32, NaN where other years have too few values. A chunk holds one init time, lead and variable, and some
or all rows. The arrays are made when all init times are there. The store's fingerprint does not cover them, because
they follow from its fields.

Axes: D init time, T lead, V pressure variable, S surface variable, Q quantile, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from ensemble_ml.store.climate import MEMORY, PROBABILITIES, ModelClimate
from ensemble_ml.store.manifest import CLIMATE, make_manifest, read_manifest, write_manifest
from ensemble_ml.store.metadata import consolidate
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import DAYS_KEY
from ensemble_ml.store.source import Selection

_PROBABILITY = f"{CLIMATE}probability"
_CHUNK = 1 << 26  # bytes of a chunk at most, before compression
_THREADS = 4  # they share the memory that a model climate may take


def write_climate(root: Path, days: int) -> None:
    """Add the model climate to the complete store at `root`.

    After an interruption, call `finish_store` again first, because the manifest may not fit the files.

    Args:
        root: Folder of the store.
        days: An init time of another year is used if its calendar date is at most so many days away.

    Raises:
        UserError: The store has init times of one year only, or is damaged.
        OSError: A file cannot be written.
    """
    store = TensorStore(root)
    known = {name: entry for name, entry in read_manifest(root).items() if not name.startswith(CLIMATE)}
    group = zarr.open_group(root, mode="r+", use_consolidated=False)
    arrays = _create(group, store)
    lay, threads = store.layout, min(_THREADS, os.cpu_count() or 1)
    # Neighbouring days of the year share members, which `ModelClimate` keeps in memory.
    order = np.argsort([str(time)[5:16] for time in lay.init_time], kind="stable").tolist()
    jobs = [(t, number, name) for t in range(len(lay.lead_hours)) for number, name in enumerate(lay.names)]

    seasons: dict[int, np.ndarray] = {}

    def run(job: tuple[int, int, str]) -> None:
        """Compute and write the climate of one lead and variable, for all init times."""
        t, number, name = job
        surface = number >= len(lay.variables)
        chosen = Selection.one(lay.lead_hours[t], name, surface=surface)
        climate = ModelClimate(store, days=days, memory=MEMORY // threads, seasons=seasons)
        rows, step = lay.grid.shape[0], arrays[surface].chunks[-2]
        for date in order:
            for first in range(0, rows, step) if climate.enough(date) else ():
                band = first, min(first + step, rows)
                found = climate.quantiles(date, replace(chosen, rows=band))
                values = found.surface[:, 0, 0] if surface else found.pressure[:, 0, 0]
                arrays[surface][date, t, number - surface * len(lay.variables), ..., slice(*band), :] = values

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, jobs))
    group.attrs[DAYS_KEY] = days
    consolidate(group)
    known.pop("zarr.json")  # its contents have changed, so it is hashed again
    write_manifest(root, make_manifest(root, known))


def _rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows of a chunk: as many as fit in 64 MiB, at least one.

    Each thread holds a chunk in memory, and compressors limit the size of their input.
    """
    each = 4 * math.prod(shape[3:-2]) * shape[-1]
    return min(shape[-2], max(1, _CHUNK // each))


def _create(group: zarr.Group, store: TensorStore) -> dict[bool, zarr.Array]:
    """Create the arrays of the quantiles and of their probabilities.

    Returns:
        The arrays of quantiles: True for surface variables, False for those on pressure levels, if there are any.
    """
    lay = store.layout
    quantiles, points = len(PROBABILITIES), lay.grid.shape
    start, area = (len(lay.init_time), len(lay.lead_hours)), ("latitude", "longitude")
    upper = (
        (*start, len(lay.variables), quantiles, len(lay.levels), *points),
        ("variable", _PROBABILITY, "level", *area),
    )
    ground = (*start, len(lay.surface), quantiles, *points), ("surface_variable", _PROBABILITY, *area)
    shapes: dict[bool, tuple[tuple[int, ...], tuple[str, ...]]] = {False: upper, True: ground}
    names = {False: f"{CLIMATE}pressure", True: f"{CLIMATE}surface"}
    found: dict[bool, Any] = {}
    for surface, (shape, axes) in shapes.items():
        if shape[2]:
            found[surface] = group.create_array(
                names[surface],
                shape=shape,
                chunks=(1, 1, 1, *shape[3:-2], _rows(shape), shape[-1]),
                dtype=np.float32,
                compressors=[BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec()],
                fill_value=np.nan,
                chunk_key_encoding={"name": "default", "separator": "."},
                dimension_names=("init_time", "lead_time", *axes),
                attributes={"long_name": "quantiles of the members of other years at this time of the year"},
                overwrite=True,
            )
    levels = np.asarray(PROBABILITIES, np.float64)
    group.create_array(
        _PROBABILITY, data=levels, dimension_names=(_PROBABILITY,), overwrite=True,
        attributes={"long_name": "probability of a quantile of the model climate", "units": "1"},
    )  # fmt: skip
    return found
