"""Turn spectral states of the model into fields on any regular latitude-longitude grid, poles included.

The basis is that of dinosaur: normalised associated Legendre functions times 1/sqrt(2 pi), cos(m lon)/sqrt(pi), sin(m
lon)/sqrt(pi). It is orthonormal on the unit sphere, with the Condon-Shortley phase (-1)^m. Winds are gradients of
stream function and velocity potential. The gradients are computed without a division by cos(latitude), so a pole needs
no special case: only m = 1 is left there, the same vector for all longitudes.
"""

from __future__ import annotations

import numpy as np

from data_prep.simulate.layout import PLANES, ModelFacts


def regular_grid(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return latitudes 90 to -90, poles included, and longitudes 0 to 360, end excluded, in degrees, as in ENS-10.

    Args:
        rows: number of latitudes.
        columns: number of longitudes.
    """
    return np.linspace(90.0, -90.0, rows), np.arange(columns) * (360.0 / columns)


def legendre(sin_latitude: np.ndarray, degree: int) -> np.ndarray:
    """Evaluate normalised associated Legendre functions.

    Source: Holmes and Featherstone (2002), Journal of Geodesy 76, equations 11 and 12 (stable to far higher degrees).

    Args:
        sin_latitude: points, shape (J,).
        degree: largest degree and order N.

    Returns:
        P[m, l, j] with unit L2 norm over [-1, 1] and no phase; zero for m > l. Shape (N + 1, N + 1, J), float64.
    """
    x = np.asarray(sin_latitude, np.float64)
    cosine = np.sqrt(np.maximum(0.0, 1.0 - x * x))
    p = np.zeros((degree + 1, degree + 1, x.size))
    p[0, 0] = np.sqrt(0.5)
    for m in range(1, degree + 1):
        p[m, m] = np.sqrt((2 * m + 1) / (2 * m)) * cosine * p[m - 1, m - 1]
    for m in range(degree):
        p[m, m + 1] = np.sqrt(2 * m + 3) * x * p[m, m]
        for l in range(m + 2, degree + 1):
            a = np.sqrt((4 * l * l - 1) / (l * l - m * m))
            b = np.sqrt(((l - 1) ** 2 - m * m) / (4 * (l - 1) ** 2 - 1))
            p[m, l] = a * (x * p[m, l - 1] - b * p[m, l - 2])
    return p


def legendre_gradients(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return m P / cos(latitude) and dP / d(latitude) without dividing by the cosine, each (N, N, J).

    The recurrences need one degree more than they give, so the results end at degree N - 1. With the unnormalised
    P_l^m, without the Condon-Shortley phase:

        2 m P_l^m / cos = P_{l+1}^{m+1} + (l-m+1) (l-m+2) P_{l+1}^{m-1}
        2 dP_l^m / dlat = P_l^{m+1} - (l+m) (l-m+1) P_l^{m-1}

    Source: Abramowitz and Stegun, section 8.5, and NIST DLMF 14.10.

    Args:
        p: P[m, l, j] of `legendre`, (N + 1, N + 1, J).
    """
    n = p.shape[0] - 1
    over_cosine, slope = np.zeros((n, n, p.shape[2])), np.zeros((n, n, p.shape[2]))
    for m in range(n):
        for l in range(m, n):
            above = p[m + 1, l] * np.sqrt((l - m) * (l + m + 1.0))
            if m == 0:  # normalised, P_l^{-1} is -P_l^1, so both halves are the same
                slope[m, l] = above
                continue
            scale = np.sqrt((2 * l + 1) / (2 * l + 3))
            up = p[m + 1, l + 1] * np.sqrt((l + m + 1.0) * (l + m + 2.0))
            down = p[m - 1, l + 1] * np.sqrt((l - m + 1.0) * (l - m + 2.0))
            over_cosine[m, l] = 0.5 * scale * (up + down)
            slope[m, l] = 0.5 * (above - p[m - 1, l] * np.sqrt((l + m) * (l - m + 1.0)))
    return over_cosine, slope


class Synthesis:
    """A table of basis functions that turns spectral coefficients into fields at given latitudes and longitudes."""

    def __init__(self, truncation: int, latitude: np.ndarray, longitude: np.ndarray, radius: float):
        """Tabulate the basis.

        Args:
            truncation: truncation T of the coefficients, whose shape is (2 T + 1, T + 2).
            latitude: degrees.
            longitude: degrees.
            radius: radius of the sphere in metres.
        """
        self._orders, self._degrees = truncation + 1, truncation + 2
        # The gradients need one degree more than the coefficients have.
        p = legendre(np.sin(np.deg2rad(latitude)), truncation + 2)
        over_cosine, slope = legendre_gradients(p)
        wanted = (slice(self._orders), slice(self._degrees))
        # The functions of `legendre` have no phase, but the basis of dinosaur has.
        phase = (-1.0) ** np.arange(self._orders)[:, None, None]
        self._p, self._east, self._north = (self._pair(phase * t[wanted]) for t in (p, over_cosine, slope))
        angle = np.outer(np.arange(self._orders), np.deg2rad(longitude))
        self._fourier = self._pair(np.stack([np.cos(angle), np.sin(angle)])[:, :, None], paired=True)[:, 0] / np.sqrt(
            np.pi
        )
        # Order 0 has the factor 1/sqrt(2 pi) and not 1/sqrt(pi).
        self._fourier[0] /= np.sqrt(2.0)
        degree = np.arange(self._degrees, dtype=np.float64)
        degree[0] = np.inf  # the mean of vorticity and divergence has no wind
        self._inverse_laplacian = -(radius**2) / (degree * (degree + 1))
        self._radius = radius

    @staticmethod
    def _pair(table: np.ndarray, paired: bool = False) -> np.ndarray:
        """Return the rows of a table by orders 0, 1, -1, 2, -2, ...: those above 0 twice, for cosine and sine.

        If the table is `paired`, its first axis already holds the two kinds of rows.
        """
        both = table if paired else np.stack([table, table])
        return np.moveaxis(both, 0, 1).reshape(-1, *both.shape[2:])[[0, *range(2, 2 * both.shape[1])]]

    def scalar(self, x_ml: np.ndarray) -> np.ndarray:
        """Synthesise coefficients (..., M, L) to fields (..., latitude, longitude)."""
        return self._fields(x_ml, self._p)

    def wind(self, vorticity_ml: np.ndarray, divergence_ml: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Synthesise the wind from vorticity and divergence: eastward and northward (..., latitude, longitude), m/s.

        Args:
            vorticity_ml: coefficients (..., M, L), 1/s.
            divergence_ml: coefficients (..., M, L), 1/s.
        """
        stream, potential = vorticity_ml * self._inverse_laplacian, divergence_ml * self._inverse_laplacian
        east = self._fields(self._turn(potential), self._east) - self._fields(stream, self._north)
        north = self._fields(self._turn(stream), self._east) + self._fields(potential, self._north)
        return east / self._radius, north / self._radius

    @staticmethod
    def _turn(x_ml: np.ndarray) -> np.ndarray:
        """Return the derivative by longitude without its factor m, which the table `_east` contains.

        Sine coefficients take the place of cosine coefficients. Cosine coefficients, with the opposite sign, take that
        of sine coefficients.
        """
        turned = np.zeros_like(x_ml)
        turned[..., 1::2, :] = x_ml[..., 2::2, :]
        turned[..., 2::2, :] = -x_ml[..., 1::2, :]
        return turned

    def _fields(self, x_ml: np.ndarray, table_mlj: np.ndarray) -> np.ndarray:
        """Sum over the basis: first over total wavenumbers at each latitude, then over zonal wavenumbers."""
        lead = x_ml.shape[:-2]
        x_mbl = np.moveaxis(x_ml.reshape(-1, *x_ml.shape[-2:]), 1, 0).astype(np.float64)
        rows_mbj = np.matmul(x_mbl, table_mlj)
        fields = np.tensordot(rows_mbj, self._fourier, axes=([0], [0]))
        return fields.reshape(*lead, *fields.shape[1:])


def bilinear(
    field_yx: np.ndarray, source: tuple[np.ndarray, np.ndarray], target: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Interpolate fields (..., Y, X) linearly between global grids. Values stay within the range of the source's.

    At a pole, the value is the mean of the outermost row. This is for fields that exist on the model's own grid only
    and must not become negative, as a spectral series would: precipitation and the land mask.

    Args:
        field_yx: fields on `source`.
        source: latitudes (ascending, without the poles) and equidistant longitudes from 0, degrees.
        target: latitudes and longitudes wanted, degrees.

    Returns:
        The fields, (..., target latitude, target longitude).
    """
    latitude, longitude = source
    caps = [np.broadcast_to(field_yx[..., k, :].mean(-1, keepdims=True), field_yx[..., 0, :].shape) for k in (0, -1)]
    field = np.concatenate([caps[0][..., None, :], field_yx, caps[1][..., None, :]], axis=-2)
    latitude = np.concatenate([[-90.0], latitude, [90.0]])
    below = np.clip(np.searchsorted(latitude, target[0], side="right") - 1, 0, len(latitude) - 2)
    weight = ((target[0] - latitude[below]) / (latitude[below + 1] - latitude[below]))[:, None]
    rows = field[..., below, :] * (1 - weight) + field[..., below + 1, :] * weight
    place = np.asarray(target[1]) / (longitude[1] - longitude[0])
    west = np.floor(place).astype(int)
    share = place - west
    columns = len(longitude)
    return rows[..., west % columns] * (1 - share) + rows[..., (west + 1) % columns] * share


def sigma_fields(x_nkml: np.ndarray, synthesis: Synthesis, facts: ModelFacts) -> dict[str, np.ndarray]:
    """Synthesise states to fields on sigma layers, in SI units.

    Negative humidity, which a truncated series may give, is set to zero, as in the model's own physics.

    Args:
        x_nkml: states, NKML.
        synthesis: the basis at the wanted points.
        facts: constants of the model.

    Returns:
        t, u, v, q (N, Z, Y, X), ps (N, Y, X) and phis (Y, X).
    """
    east, north = synthesis.wind(x_nkml[:, PLANES["vorticity"]], x_nkml[:, PLANES["divergence"]])
    temperature = synthesis.scalar(x_nkml[:, PLANES["temperature"]]) + facts.reference_temperature[:, None, None]
    return {
        "t": temperature,
        "u": east,
        "v": north,
        "q": np.maximum(synthesis.scalar(x_nkml[:, PLANES["humidity"]]), 0.0),
        "ps": np.exp(synthesis.scalar(x_nkml[:, PLANES["log_pressure"]])[:, 0]) * facts.reference_pressure,
        "phis": synthesis.scalar(facts.orography_ml) * facts.gravity,
    }
