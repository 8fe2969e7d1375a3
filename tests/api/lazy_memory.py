"""Predict a Dask-backed Dataset into a Zarr store, and print how much memory that took.

    python tests/api/lazy_memory.py ROWS COLUMNS DATES LEVELS FOLDER

Prints as JSON, in MB: `before` (resident, when all is imported and nothing read), `peak`, and the sizes of all inputs
and of all that is written, which a program that is not lazy would hold. 361 720 20 8 is half a degree.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))

import dask.array as da
import xarray as xr
from forecasting import CENTRES, SCALES, make_checkpoint, make_grid, make_source, make_spec

import ensemble_ml as eml
from ensemble_ml.machine import taken_memory

MEMBERS, LEADS, VARIABLES, SURFACE = 5, (0, 24, 48), ("t",), ("t2m", "tcc")
LEVELS = (200, 300, 400, 500, 600, 700, 850, 1000)


def ensemble(rows: int, columns: int, dates: int, levels: tuple[int, ...]) -> xr.Dataset:
    """Return a lazy ensemble, each lead of a start date a chunk that is drawn when it is asked for."""
    grid = make_grid((rows, columns))
    found = {}
    for name in (*VARIABLES, *SURFACE):
        depth = (len(levels),) if name in VARIABLES else ()
        shape = (dates, MEMBERS, len(LEADS), *depth, rows, columns)
        drawn = da.random.default_rng(0).random(shape, chunks=(1, MEMBERS, 1, *shape[3:]), dtype=np.float32)
        values = CENTRES[name] + SCALES[name] * (drawn - np.float32(0.5))
        dims = ("init_time", "realization", "lead_time", *(("level",) * len(depth)), "latitude", "longitude")
        units = {"t": "K", "t2m": "K", "tcc": "1"}[name]
        found[name] = (dims, values, {"units": units})
    coords = {
        "init_time": np.datetime64("2001-01-30T12", "ns") + np.arange(dates) * np.timedelta64(1, "D"),
        "realization": np.arange(1, MEMBERS + 1),
        "lead_time": np.array(LEADS, "timedelta64[h]").astype("timedelta64[ns]"),
        "level": ("level", list(levels), {"units": "hPa"}),
        "latitude": grid.latitude,
        "longitude": grid.longitude,
    }
    return xr.Dataset(found, coords)


def main(rows: int, columns: int, dates: int, count: int, folder: Path) -> None:
    """Predict, write, and print."""
    levels = LEVELS[:count]
    small = make_source(dates=1, members=2, leads=LEADS, variables=VARIABLES, levels=levels, surface=SURFACE,
                        grid=make_grid((rows, columns)))  # fmt: skip
    checkpoint = make_checkpoint(folder / "checkpoints", make_spec(small, points=16))
    del small
    model, data = eml.load(checkpoint), ensemble(rows, columns, dates, levels)
    before = taken_memory() or 0
    forecast = model.predict(data, members=MEMBERS)
    forecast.to_zarr(folder / "forecast.zarr", zarr_format=3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = {"before": before, "peak": peak, "read": data.nbytes, "written": forecast.nbytes}
    print(json.dumps({name: round(size / 1e6) for name, size in sizes.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), Path(sys.argv[5]))
