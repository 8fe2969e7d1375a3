"""Smooth weather on any grid, for small archives that look like public ones (`public_archives`, `public_grib`)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

LEVELS = (500, 850)
# Value at the poles, what is added at the equator, and deviation of the day's weather, in the units of the archives.
WEATHER = {
    ("t", 500): (238.0, 30.0, 4.0),
    ("t", 850): (262.0, 28.0, 4.0),
    ("z", 500): (5.05e4, 6.5e3, 500.0),
    ("z", 850): (1.33e4, 1.5e3, 300.0),
    ("u", 500): (8.0, 4.0, 6.0),
    ("u", 850): (4.0, 1.0, 4.0),
    ("v", 500): (0.0, 0.0, 5.0),
    ("v", 850): (0.0, 0.0, 4.0),
    ("q", 500): (4e-4, 2e-3, 1e-4),
    ("q", 850): (2e-3, 8e-3, 5e-4),
    ("t2m", 0): (256.0, 42.0, 3.0),
    ("msl", 0): (1.01e5, 300.0, 700.0),
    ("u10", 0): (2.0, -1.0, 3.0),
    ("v10", 0): (0.0, 0.0, 3.0),
}
RAIN = 0.004  # m in a day where it rains much


def globe(degrees: float, *, northwards: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return latitudes, both poles included, and longitudes of a global grid."""
    latitude = np.linspace(90, -90, round(180 / degrees) + 1)
    return latitude[:: -1 if northwards else 1], np.arange(0, 360, degrees)


def days(count: int, first: str = "2020-01-01") -> np.ndarray:
    """Return the midnights of so many days that follow each other."""
    return np.datetime64(first, "ns") + np.arange(count) * np.timedelta64(24, "h")


def hours(*values: int) -> np.ndarray:
    """Return leads as xarray has them."""
    return np.array(values, "timedelta64[h]").astype("timedelta64[ns]")


def waves(grid: tuple[np.ndarray, np.ndarray], *key: Any) -> np.ndarray:
    """Return a smooth field (Y, X) of mean zero and deviation of about one, always the same for the same `key`."""
    rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
    lat, lon = np.deg2rad(grid[0])[:, None], np.deg2rad(grid[1])[:, None]
    number = np.arange(1, 6)  # waves around the globe, of which nothing is left at the poles: each is one point
    tilt, phase, size = rng.uniform(-2, 2, 5), rng.uniform(0, 2 * np.pi, 5), rng.normal(size=5)
    around = (size * np.cos(lat) ** number * np.exp(1j * (tilt * lat + phase))) @ np.exp(1j * number * lon).T
    return (rng.normal() * np.sin(lat) + around.real) / np.sqrt(2)


def weather(
    name: str, level: int, valid: np.datetime64, grid: tuple[np.ndarray, np.ndarray], member: int = -1, lead: int = 0
) -> np.ndarray:
    """Return a field (Y, X): the truth at a time, or what a member has of it, whose error grows with its lead.

    Rain is the sum over the day that ends at `valid`, in metres.
    """
    of_day = waves(grid, name, level, str(valid))
    if member >= 0:
        of_day = of_day + (0.2 + lead / 120) * waves(grid, name, level, str(valid), member, lead)
    if name == "tp":
        return RAIN * np.clip(of_day - 0.3, 0, None)
    pole, equator, deviation = WEATHER[name, level]
    return pole + equator * np.cos(np.deg2rad(grid[0]))[:, None] ** 2 + deviation * of_day


def filled(
    name: str,
    levels: Sequence[int],
    times: np.ndarray,
    grid: Any,
    members: Sequence[int] = (),
    leads: Sequence[int] = (),
) -> np.ndarray:
    """Return (D, M, T, Z, Y, X) float32 of forecasts, (D, Z, Y, X) of a truth, which has no members."""
    if not len(members):
        return np.stack([[weather(name, z, time, grid) for z in levels] for time in times]).astype(np.float32)
    shape = len(times), len(members), len(leads), len(levels), len(grid[0]), len(grid[1])
    values = np.empty(shape, np.float32)
    for at in np.ndindex(shape[:4]):
        date, member, lead, level = at
        valid = times[date] + np.timedelta64(leads[lead], "h")
        values[at] = weather(name, levels[level], valid, grid, members[member], leads[lead])
    return values
