"""The geometry of a regular latitude-longitude grid: order of points, wrap, poles, and exact cell areas.

In the program latitude runs from north to south, and longitude eastwards. A grid that closes the circle starts at its
first longitude in [0, 360). A regional grid stays in one piece, so it starts below zero if it crosses Greenwich or ends
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from ensemble_ml.errors import UserError

TOLERANCE = 1e-3  # degrees; GRIB edition 1 stores coordinates in millidegrees


class Edge(Enum):
    """The kinds of edge of a grid: what lies beyond its first or last row."""

    POLE_ROW = "pole_row"  # the row lies on the pole itself
    POLE_BETWEEN = "pole_between"  # the pole lies half a spacing beyond the row
    OPEN = "open"  # any other edge, such as that of a regional grid: nothing is known beyond


@dataclass(frozen=True, eq=False)
class Grid:
    """A regular grid of `latitude` (Y,) degrees north, descending, and `longitude` (X,) degrees east, ascending.

    Raises:
        UserError: an axis is empty, has NaN, is not monotonic or not evenly spaced, or a latitude is outside -90..90.
    """

    latitude: np.ndarray
    longitude: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "latitude", np.asarray(self.latitude, np.float64))
        object.__setattr__(self, "longitude", np.asarray(self.longitude, np.float64))
        _check_axis("latitude", -self.latitude)
        _check_axis("longitude", self.longitude)
        if np.abs(self.latitude).max() > 90 + TOLERANCE:
            raise UserError(f"latitude {self.latitude[np.abs(self.latitude).argmax()]:g}: outside -90..90")

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns (Y, X)."""
        return len(self.latitude), len(self.longitude)

    @property
    def wraps(self) -> bool:
        """Return whether the last longitude is one spacing west of the first, so that the axis is periodic."""
        columns = len(self.longitude)
        if columns < 2:
            return False
        step = (self.longitude[-1] - self.longitude[0]) / (columns - 1)
        return bool(abs(self.longitude[-1] + step - self.longitude[0] - 360) < max(TOLERANCE, step * 0.01))

    @property
    def north(self) -> Edge:
        """Return what lies north of the first row."""
        return self._edge(90 - self.latitude[0])

    @property
    def south(self) -> Edge:
        """Return what lies south of the last row."""
        return self._edge(90 + self.latitude[-1])

    def _edge(self, distance: float) -> Edge:
        """Return the kind of edge, given the distance of the outermost row from the pole in degrees."""
        rows = len(self.latitude)
        if not self.wraps or rows < 2:
            return Edge.OPEN
        step = (self.latitude[0] - self.latitude[-1]) / (rows - 1)
        if distance < 0.01 * step:
            return Edge.POLE_ROW
        return Edge.POLE_BETWEEN if abs(distance - step / 2) < 0.01 * step else Edge.OPEN

    @property
    def gaussian(self) -> bool:
        """Return whether the rows of a global grid are those of a Gaussian grid, the zeros of a Legendre polynomial.

        Such rows are nearly evenly spaced. They differ from regular rows in the distance of the first row from the pole
        (Abramowitz and Stegun 1964, 22.16.6), here in radians:

            distance = j / (Y + 1/2) = (j / pi) spacing

            j  first zero of Bessel's J_0, 2.405
            Y  number of rows
        """
        rows = len(self.latitude)
        if not self.wraps or rows < 4:
            return False
        step = (self.latitude[0] - self.latitude[-1]) / (rows - 1)
        return all(abs((90 - abs(self.latitude[end])) / step - 2.4048 / np.pi) < 0.01 for end in (0, -1))

    def latitude_bounds(self) -> np.ndarray:
        """Return the edges of the rows, (Y + 1,) degrees north, descending: midway between rows.

        The outer edges lie half a spacing beyond the outermost rows, but not beyond the poles. A single row is 1 degree
        wide.
        """
        middle = (self.latitude[:-1] + self.latitude[1:]) / 2
        first, last = _outer_bounds(self.latitude)
        return np.concatenate([[min(first, 90.0)], middle, [max(last, -90.0)]])

    def longitude_bounds(self) -> np.ndarray:
        """Return the edges of the columns, (X + 1,) degrees east, ascending: midway between columns.

        The outer edges lie half a spacing beyond the outermost columns. If the grid wraps, they are 360 degrees apart.
        A single column is 1 degree wide.
        """
        if self.wraps:
            around = np.concatenate([[self.longitude[-1] - 360], self.longitude, [self.longitude[0] + 360]])
            return (around[:-1] + around[1:]) / 2
        last, first = _outer_bounds(self.longitude[::-1])
        return np.concatenate([[first], (self.longitude[:-1] + self.longitude[1:]) / 2, [last]])

    def area_weights(self) -> np.ndarray:
        """Return the area of each cell divided by the mean area: (Y, X) float64, with mean one.

        The area between two latitudes is proportional to the difference of their sines. Bounds lie midway between rows
        and stop at the poles, so a row on a pole keeps the small cap that belongs to it.
        """
        heights = -np.diff(np.sin(np.deg2rad(self.latitude_bounds())))
        return np.broadcast_to((heights / heights.mean())[:, None], self.shape).copy()

    def same_as(self, other: Grid) -> bool:
        """Return whether both grids have the same points, to the precision of GRIB edition 1."""
        return self.shape == other.shape and all(
            np.allclose(a, b, rtol=0, atol=TOLERANCE)
            for a, b in ((self.latitude, other.latitude), (self.longitude, other.longitude))
        )

    def describe(self) -> str:
        """Return the size and extent of the grid as messages show them."""
        rows, columns = self.shape
        lat, lon = self.latitude, self.longitude
        return f"{rows} x {columns} points, {lat[0]:g} to {lat[-1]:g} N, {lon[0]:g} to {lon[-1]:g} E"


def canonical(latitude: np.ndarray, longitude: np.ndarray) -> tuple[Grid, np.ndarray, np.ndarray]:
    """Bring an archive's axes into the program's order.

    Args:
        latitude: (Y,) degrees north, in either order.
        longitude: (X,) degrees east, ascending in the archive's order of points; any multiple of 360 may be added. A
            region across Greenwich may consist of two pieces, the eastern one first, as a cut out of 0 to 360 leaves
            it.

    Returns:
        The grid, and the index arrays (Y,), (X,) that take a field of the archive to it: `values[rows[:, None],
        columns]`. A meridian that appears at both ends is taken once.

    Raises:
        UserError: an axis has no points, longitude runs westwards, or the axes make no regular grid.
    """
    latitude, longitude = np.asarray(latitude, np.float64), np.asarray(longitude, np.float64)
    rows = np.argsort(-latitude, kind="stable")
    pieces = np.roll(np.arange(len(longitude)), -_second_piece(longitude))
    if pieces[:1].any():  # where the two pieces meet, one meridian may appear twice
        pieces = pieces[~(_eastwards(np.diff(longitude[pieces], prepend=np.nan)) < TOLERANCE)]
    longitude = longitude[pieces]
    unwrapped = np.unwrap(longitude, period=360) if len(longitude) > 1 else longitude
    if len(longitude) > 1 and unwrapped[-1] < unwrapped[0]:
        raise UserError("longitude: runs westwards; only grids scanned eastwards are read")
    unwrapped = np.round(unwrapped, 9)
    if len(unwrapped) > 2 and abs(unwrapped[-1] - unwrapped[0] - 360) < TOLERANCE:
        unwrapped = unwrapped[:-1]  # the last meridian is the first one again
    trial = Grid(latitude[rows], unwrapped)
    if trial.wraps:
        modulo = np.mod(unwrapped, 360)
        modulo[np.isclose(modulo, 360, atol=TOLERANCE)] = 0
        columns = np.argsort(modulo, kind="stable")
        return Grid(latitude[rows], modulo[columns]), rows, pieces[columns]
    first = np.mod(unwrapped[0], 360)
    shifted = unwrapped - unwrapped[0] + first
    if shifted[-1] > 360 - TOLERANCE:  # the region crosses Greenwich, or ends there
        shifted = shifted - 360
    return Grid(latitude[rows], shifted), rows, pieces[: len(unwrapped)]


def _second_piece(longitude: np.ndarray) -> int:
    """Return the index where a region across Greenwich jumps back to its western piece; 0 if there is no such jump."""
    if len(longitude) < 3 or not np.isfinite(longitude).all():
        return 0
    steps = _eastwards(np.diff(longitude, append=longitude[0]))  # the last one closes the circle
    gap, usual = int(steps.argmax()), float(np.median(steps))
    once_around = abs(steps.sum() - 360) < TOLERANCE
    return gap + 1 if once_around and gap < len(steps) - 1 and steps[gap] > 1.5 * usual else 0


def _eastwards(steps: np.ndarray) -> np.ndarray:
    """Return steps of longitude as degrees eastwards below 360; a meridian that appears again is about zero away."""
    return np.mod(steps + TOLERANCE, 360) - TOLERANCE


def _check_axis(name: str, ascending: np.ndarray) -> None:
    """Raise a UserError if an axis is not a vector, is empty, has NaN, or is not evenly spaced."""
    if ascending.ndim != 1:
        raise UserError(f"{name}: expected one axis, got shape {ascending.shape}")
    if not len(ascending):
        raise UserError(f"{name}: has no points; an axis needs at least one")
    if not np.isfinite(ascending).all():
        raise UserError(f"{name}: {int((~np.isfinite(ascending)).sum())} of {ascending.size} values are absent (NaN)")
    steps = np.diff(ascending)
    if len(steps) and (steps.min() <= 0 or np.ptp(steps) > max(0.02 * steps.mean(), 2 * TOLERANCE)):
        raise UserError(f"{name}: not evenly spaced in one direction; only regular latitude-longitude grids are read")


def _outer_bounds(latitude: np.ndarray) -> tuple[float, float]:
    """Return the northern edge of the first row and the southern edge of the last. A single row is 1 degree wide."""
    if len(latitude) == 1:
        return latitude[0] + 0.5, latitude[0] - 0.5
    half = (latitude[0] - latitude[-1]) / (len(latitude) - 1) / 2
    return latitude[0] + half, latitude[-1] - half
