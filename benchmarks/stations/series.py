"""Ensemble forecasts of one station, with the observations that verify them.

Axes: D date, M member, K seasonal term.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr


@dataclass(frozen=True, eq=False)
class Series:
    """The forecasts and observations of a station. Dates that lack a value are left out.

    Attributes:
        members: (D, M) forecasts.
        observed: (D,) observations.
        times: (D,) valid times.
        left_out: number of dates that were left out.
    """

    members: np.ndarray
    observed: np.ndarray
    times: np.ndarray
    left_out: int

    def select(self, first_year: int, last_year: int) -> Series:
        """Return the dates of some years, both ends included.

        Args:
            first_year: the first year.
            last_year: the last year.
        """
        year = self.times.astype("datetime64[Y]").astype(int) + 1970
        kept = (year >= first_year) & (year <= last_year)
        return Series(self.members[kept], self.observed[kept], self.times[kept], self.left_out)

    def moments(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (ddof = 1) of the first `count` members, (D,) each.

        Args:
            count: number of members.
        """
        given = self.members[:, :count]
        return given.mean(1), given.var(1, ddof=1)

    def season(self, harmonics: int = 1) -> np.ndarray:
        """Return sine and cosine of the day of the year and of its multiples, (D, 2 harmonics).

        Args:
            harmonics: number of multiples.
        """
        start = self.times.astype("datetime64[Y]")
        share = (self.times - start) / np.timedelta64(1, "D") / 365.25
        angles = 2 * np.pi * share[:, None] * np.arange(1, harmonics + 1)
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def read_series(path: Path) -> Series:
    """Read a station's NetCDF file, in degrees Celsius.

    Args:
        path: the file.
    """
    with xr.open_dataset(path) as data:
        members = data["t2m"].transpose("init_time", "realization").values.astype(np.float64)
        observed = data["observation"].values.astype(np.float64)
        times = data["valid_time"].values.astype("datetime64[ns]")
    whole = np.isfinite(members).all(1) & np.isfinite(observed)
    order = np.argsort(times[whole], kind="stable")
    return Series(members[whole][order], observed[whole][order], times[whole][order], int((~whole).sum()))
