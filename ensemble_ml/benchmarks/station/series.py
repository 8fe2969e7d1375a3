"""One station's ensemble forecasts with their verifying observations. Axes: D date, M member, K seasonal term."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr


@dataclass(frozen=True, eq=False)
class Series:
    """`members` (D, M), `observed` (D,), `times` (D,) of validity; dates without a value are left out: `left_out`."""

    members: np.ndarray
    observed: np.ndarray
    times: np.ndarray
    left_out: int

    def select(self, first_year: int, last_year: int) -> Series:
        """The dates of these years, both included."""
        year = self.times.astype("datetime64[Y]").astype(int) + 1970
        kept = (year >= first_year) & (year <= last_year)
        return Series(self.members[kept], self.observed[kept], self.times[kept], self.left_out)

    def moments(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (ddof = 1) of the first `count` members (D,)."""
        given = self.members[:, :count]
        return given.mean(1), given.var(1, ddof=1)

    def season(self, harmonics: int = 1) -> np.ndarray:
        """sin and cos of the day of the year and of its multiples (D, 2 harmonics)."""
        start = self.times.astype("datetime64[Y]")
        share = (self.times - start) / np.timedelta64(1, "D") / 365.25
        angles = 2 * np.pi * share[:, None] * np.arange(1, harmonics + 1)
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def read_series(path: Path) -> Series:
    """Read a station's NetCDF file (degrees Celsius)."""
    with xr.open_dataset(path) as data:
        members = data["t2m"].transpose("init_time", "realization").values.astype(np.float64)
        observed = data["observation"].values.astype(np.float64)
        times = data["valid_time"].values.astype("datetime64[ns]")
    whole = np.isfinite(members).all(1) & np.isfinite(observed)
    order = np.argsort(times[whole], kind="stable")
    return Series(members[whole][order], observed[whole][order], times[whole][order], int((~whole).sum()))
