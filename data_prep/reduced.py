"""Reduced Gaussian grids, on which the IFS computes, and interpolation from them to regular grids.

The sines of the rows' latitudes are the zeros of a Legendre polynomial. Each row has points of its own, evenly spaced
from Greenwich eastwards (ECMWF's N grids, and the octahedral O grids of Malardel et al. 2016, ECMWF Newsletter 146). A
field is kept in an array of all rows (Y, X) with as many columns as the longest row has points. A shorter row is filled
up with its last value; these columns are never used.

A new value at latitude p and longitude l is linear between the two rows around it, and in each row linear between the
two points around it:

    v(p, l) = ((p - p_s) v_n(l) + (p_n - p) v_s(l)) / (p_n - p_s)
    v_r(l)  = (1 - f) v_r,i + f v_r,i+1,   i + f = l / (360 / K_r)

    n, s  row north and row south of it
    K_r   number of points of row r, on which i counts modulo K_r

Beyond the outermost rows, less than a row from the pole, the value is that of the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from scipy.sparse import csr_matrix
from scipy.special import roots_legendre

from ensemble_ml.grid import Grid

READ_WITH = "is read with regrid=DEGREES alone, which interpolates it to a regular grid"


@dataclass(frozen=True, eq=False)
class ReducedGrid(Grid):
    """A global Gaussian grid, whose rows may have different numbers of points.

    `longitude` holds the points of the longest row, and `counts` (Y,) the number of points of each row.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    def latitude_bounds(self) -> np.ndarray:
        """Return the edges of the rows, (Y + 1,) degrees north: midway between rows, and the poles."""
        return np.concatenate([[90.0], (self.latitude[:-1] + self.latitude[1:]) / 2, [-90.0]])

    def same_as(self, other: Grid) -> bool:
        """Return whether both grids have the same points."""
        return (
            isinstance(other, ReducedGrid) and np.array_equal(self.counts, other.counts) and Grid.same_as(self, other)
        )

    def describe(self) -> str:
        """Return the size of the grid as messages show it."""
        least, most = int(self.counts.min()), int(self.counts.max())
        points = f"{least} to {most}" if least < most else f"{most}"
        kind = "reduced Gaussian" if least < most else "Gaussian"
        return f"a {kind} grid of {len(self.counts)} rows with {points} points"


@lru_cache(16)
def gaussian_latitudes(rows: int) -> np.ndarray:
    """Return the latitudes of a Gaussian grid, (rows,) degrees north, descending.

    Args:
        rows: the number of rows, which is the degree of the Legendre polynomial.
    """
    return np.rad2deg(np.arcsin(roots_legendre(rows)[0]))[::-1]


def reduced_grid(counts: tuple[int, ...]) -> ReducedGrid:
    """Return the Gaussian grid whose rows have the given numbers of points, from north to south.

    Args:
        counts: (Y,) number of points of each row.
    """
    longest = max(counts)
    return ReducedGrid(gaussian_latitudes(len(counts)), np.arange(longest) * 360 / longest, np.array(counts))


def spread_rows(values: np.ndarray, counts: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write values that are stored one row after the other into an array of rows, and return it.

    Args:
        values: (N,) the values at all points.
        counts: (Y,) number of points of each row, in the same order.
        out: (Y, X) array to fill.
    """
    ends = np.cumsum(counts)
    columns = np.minimum(np.arange(out.shape[1]), counts[:, None] - 1)
    out[...] = values[(ends - counts)[:, None] + columns]
    return out


def bilinear(grid: ReducedGrid, target: Grid) -> csr_matrix:
    """Return the sparse matrix that interpolates fields to a regular grid, (Y' X', Y X).

    Args:
        grid: the Gaussian grid.
        target: the regular grid.
    """
    south = np.clip(np.searchsorted(-grid.latitude, -target.latitude), 1, len(grid.latitude) - 1)
    pair = np.stack([south - 1, south])  # the rows around each row of the target
    gap = grid.latitude[pair[0]] - grid.latitude[pair[1]]
    share = np.clip((grid.latitude[pair[0]] - target.latitude) / gap, 0, 1)
    places, weights = [], []
    for rows, of_row in zip(pair, (1 - share, share), strict=True):
        counts = grid.counts[rows][:, None]
        position = np.mod(target.longitude, 360) / (360 / counts)  # (Y', X')
        first = np.floor(position).astype(int)
        for column, of_point in ((first, 1 - (position - first)), (first + 1, position - first)):
            places.append(rows[:, None] * grid.shape[1] + column % counts)
            weights.append(of_row[:, None] * of_point)
    points = target.shape[0] * target.shape[1]
    index = np.tile(np.arange(points), len(places))
    shape = points, grid.shape[0] * grid.shape[1]
    return csr_matrix((np.ravel(weights), (index, np.ravel(places))), shape=shape)
