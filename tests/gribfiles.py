"""Small archives for tests: GRIB written with ecCodes, whose own values are the oracle, and data sets for xarray."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import eccodes
import numpy as np
import xarray as xr

from data_prep import open_archive
from data_prep.limits import standard_height

PARAM_ID = {
    "t": 130, "z": 129, "q": 133, "t2m": 167, "msl": 151, "tp": 228, "fg10": 228028, "tcc": 164, "sst": 34,
    "orog": 228002, "lsm": 172,
}  # fmt: skip
UPPER = ("t", "z", "q")
TYPICAL = {  # mean and deviation of what `message` makes of a variable that is unlike a temperature
    "q": (5e-3, 1e-3), "msl": (1e5, 1e3), "tp": (5e-3, 1e-3), "fg10": (15.0, 3.0), "tcc": (0.5, 0.1), "lsm": (0.5, 0.1),
}  # fmt: skip
GLOBE = np.linspace(90, -90, 7), np.arange(0.0, 360.0, 30.0)
REGION = np.linspace(66, 60, 4), np.linspace(-12, 6, 7)


def noise(
    grid: tuple[np.ndarray, np.ndarray] = GLOBE, seed: int = 0, mean: float = 280.0, std: float = 10.0
) -> np.ndarray:
    """Random values (Y, X)."""
    return np.random.default_rng(seed).normal(mean, std, (len(grid[0]), len(grid[1])))


def message(
    name: str,
    values: np.ndarray | None = None,
    *,
    grid: tuple[np.ndarray, np.ndarray] = GLOBE,
    date: int = 20010101,
    time: int = 0,
    step: int | str = 0,
    member: int | None = 1,
    kind: str = "pf",
    level: int = 500,
    edition: int = 1,
    bits: int = 16,
    decimal: int | None = None,
    packing: str = "grid_simple",
    seed: int = 0,
    **keys: Any,
) -> bytes:
    """Encode one message; a `step` such as "0-24" is a sum or a maximum over the range."""
    settings = (
        _product(name, edition, member, kind, step, level) | _grid_keys(*grid) | {"dataDate": date, "dataTime": time}
    )
    settings |= {"stepRange": str(step)} | ({} if member is None else {"number": member})
    settings |= {"packingType": packing, "bitsPerValue": bits} | keys
    if values is None:
        values = noise(
            grid, seed, *((9.80665 * standard_height(level), 500.0) if name == "z" else TYPICAL.get(name, ()))
        )
    handle = eccodes.codes_grib_new_from_samples(f"regular_ll_{'pl' if name in UPPER else 'sfc'}_grib{edition}")
    for key, value in settings.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_values(handle, np.asarray(values, float).ravel())
    if decimal is not None:
        eccodes.codes_set(handle, "changeDecimalPrecision", decimal)
    return finished(handle)


def finished(handle: int) -> bytes:
    """Return the message of a handle, and release it."""
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def _product(name: str, edition: int, member: int | None, kind: str, step: int | str, level: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"centre": "ecmf"}
    if edition == 1:
        keys |= {"setLocalDefinition": 1, "localDefinitionNumber": 1}
        keys |= {"stream": "oper" if member is None else "enfo", "dataType": "an" if member is None else kind}
    elif member is not None:
        keys |= {"productDefinitionTemplateNumber": 11 if isinstance(step, str) else 1, "dataType": kind}
    keys |= {"paramId": PARAM_ID.get(name, name)} | ({"level": level} if name in UPPER else {})
    if edition == 1 and isinstance(step, str):
        keys |= {"timeRangeIndicator": 4 if name == "tp" else 2}
    return keys


def _grid_keys(lat: np.ndarray, lon: np.ndarray) -> dict[str, Any]:
    keys: dict[str, Any] = {"Ni": len(lon), "Nj": len(lat), "jScansPositively": int(lat[0] < lat[-1])}
    for axis, ticks in (("latitude", lat), ("longitude", lon)):
        keys |= {
            f"{axis}OfFirstGridPointInDegrees": float(ticks[0]),
            f"{axis}OfLastGridPointInDegrees": float(ticks[-1]),
        }
    return keys | {
        "iDirectionIncrementInDegrees": float(lon[1] - lon[0]),
        "jDirectionIncrementInDegrees": abs(float(lat[1] - lat[0])),
    }


def write(path: Path, messages: Iterable[bytes]) -> Path:
    """Write messages one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(messages))
    return path


def ensemble(
    path: Path,
    *,
    members: Iterable[int] = (1, 2, 3),
    dates: Iterable[int] = (20010101, 20010102),
    steps: Iterable[int | str] = (0, 24),
    names: Iterable[str] = ("t",),
    levels: Iterable[int] = (500, 850),
    leave_out: Iterable[tuple] = (),
    **keys: Any,
) -> Path:
    """Write an ensemble; `leave_out` holds (date, member, step, name, level) that are missing."""
    gone = set(leave_out)
    made = []
    for date in dates:
        for member in members:
            for step in steps:
                for name in names:
                    for level in levels if name in UPPER else (0,):
                        if (date, member, step, name, level) not in gone:
                            seed = zlib.crc32(repr((date, member, step, name, level)).encode())
                            made.append(
                                message(name, date=date, member=member, step=step, level=level, seed=seed, **keys)
                            )
    return write(path, made)


def decoded(path: Path | str) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Keys and values (Y, X) float32 of each message, as ecCodes gives them, rows and columns as they are scanned."""
    keys = ("paramId", "level", "dataType", "number", "dataDate", "dataTime", "endStep", "typeOfLevel")
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            shape = eccodes.codes_get(handle, "Nj"), eccodes.codes_get(handle, "Ni")
            values = eccodes.codes_get_array(handle, "values").astype(np.float32).reshape(shape)
            yield {key: eccodes.codes_get(handle, key) for key in keys if eccodes.codes_is_defined(handle, key)}, values
            eccodes.codes_release(handle)


def dataset(**changes) -> xr.Dataset:
    """An ensemble under the names that cfgrib gives: time, number, step, isobaricInhPa."""
    axes = {
        "time": np.array(["2001-01-01", "2001-01-03"], "datetime64[ns]"),
        "number": [1, 2, 3],
        "step": np.array([0, 24], "timedelta64[h]").astype("timedelta64[ns]"),
        "isobaricInhPa": [850.0, 500.0],
        "latitude": GLOBE[0],
        "longitude": GLOBE[1],
    }
    shape = [len(ticks) for ticks in axes.values()]
    values = np.random.default_rng(0).normal(270, 9, shape).astype(np.float32)
    data = xr.Dataset({"t": (tuple(axes), values, {"units": "K"})}, axes)
    return data.rename({old: new for old, new in changes.items() if old in data.variables})


def surface(name="t2m", **attributes):
    """A variable without levels, and skin temperature that is in order beside it."""
    data = dataset(t=name).isel(isobaricInhPa=0, drop=True)
    data["skt"] = data[name].copy().assign_attrs(units="K")
    data[name].attrs |= {"units": "K"} | attributes
    return data


def archive_of(data, folder, **settings):
    """Write a data set as a file, and open it as an archive."""
    data.to_netcdf(folder / "a.nc")
    return open_archive(folder / "a.nc", **settings)


def opened(data, folder, **settings):
    """Return the archive of a file, and the reasons for which variables of it are left out."""
    source = archive_of(data, folder, **settings)
    return source, list(source.catalogue.readers[0].skipped)
