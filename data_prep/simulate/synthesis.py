"""Turn spectral states of the model into fields on any regular grid, poles included, and on pressure levels.

The basis is that of dinosaur: normalised associated Legendre functions times 1/sqrt(2 pi), cos(m lon)/sqrt(pi), sin(m
lon)/sqrt(pi). It is orthonormal on the unit sphere, with the Condon-Shortley phase (-1)^m. Winds are gradients of
stream function and velocity potential. The gradients are computed without a division by cos(latitude), so a pole needs
no special case: only m = 1 is left there, the same vector for all longitudes. Rain and the land mask are no spectral
fields, and are interpolated from the model's own grid (`bilinear`).

Fields are interpolated from sigma layers to pressure levels and to the surface. Between the centres of layers, fields
are linear in the logarithm of pressure, and geopotential is the hydrostatic integral of virtual temperature. Above the
highest centre, fields are extrapolated from the two highest layers. Below the lowest centre, wind and humidity stay as
they are there. Temperature and geopotential are linear in the logarithm of pressure down to the ground. Below ground
the rule is ECMWF's (Trenberth, Berry and Buja 1993, NCAR/TN-396+STR, equations 5 to 20): temperature continues with 6.5
K/km, less under high ground, and geopotential follows from it.

The axes KML of a state are those of `data_prep.simulate.model`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIGMA = (0.025, 0.095, 0.2, 0.34, 0.51, 0.685, 0.835, 0.95)  # centres of SPEEDY's eight sigma layers, top first
_Z = len(SIGMA)
PLANES = {  # where each quantity lies on axis K of a state
    "vorticity": slice(0, _Z),
    "divergence": slice(_Z, 2 * _Z),
    "temperature": slice(2 * _Z, 3 * _Z),
    "humidity": slice(3 * _Z, 4 * _Z),
    "log_pressure": slice(4 * _Z, 4 * _Z + 1),
}
# The plane of temperature at sigma 0.835. Its root mean square over the sphere is the norm of a perturbation.
NORM_PLANE = 2 * _Z + SIGMA.index(0.835)
LAPSE_RATE = 0.0065  # K/m
_PBL_TOP = SIGMA.index(0.835)
_WIND_RATIO = 0.95  # SPEEDY's `fwind0`: the ratio of near-surface wind to wind in the lowest layer
_LOG_SURFACE_LAYER = np.log(0.99)  # SPEEDY's surface layer lies at sigma 0.99
_LOG_SIGMA = np.log(np.array(SIGMA))


@dataclass(frozen=True)
class ModelFacts:
    """The constants of a model in SI units, with which its spectral states are turned into weather fields."""

    truncation: int
    reference_temperature: np.ndarray  # (Z,), kelvin: states hold the difference from it
    orography_ml: np.ndarray  # metres, spectral
    land_yx: np.ndarray  # land fraction on the Gaussian grid
    latitude: np.ndarray  # degrees, of the Gaussian grid, south to north
    longitude: np.ndarray  # degrees
    gas_constant: float
    vapour_constant: float
    gravity: float
    reference_pressure: float
    radius: float


def regular_grid(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return latitudes 90 to -90, poles included, and longitudes 0 to 360, end excluded, in degrees, as in ENS-10."""
    return np.linspace(90.0, -90.0, rows), np.arange(columns) * (360.0 / columns)


def legendre(sin_latitude: np.ndarray, degree: int) -> np.ndarray:
    """Evaluate normalised associated Legendre functions at points (J,), up to the degree and order N.

    Source: Holmes and Featherstone (2002), Journal of Geodesy 76, equations 11 and 12 (stable to far higher degrees).

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

    `p` is the result of `legendre`. The recurrences need one degree more than they give, so the results end at degree
    N - 1. With the unnormalised P_l^m, without the Condon-Shortley phase:

        2 m P_l^m / cos = P_{l+1}^{m+1} + (l-m+1) (l-m+2) P_{l+1}^{m-1}
        2 dP_l^m / dlat = P_l^{m+1} - (l+m) (l-m+1) P_l^{m-1}

    Source: Abramowitz and Stegun, section 8.5, and NIST DLMF 14.10.
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
        """Tabulate the basis up to a truncation T, at latitudes and longitudes in degrees. The radius is in metres.

        The coefficients have the shape (2 T + 1, T + 2).
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
        """Synthesise the wind from coefficients (..., M, L) of vorticity and divergence, 1/s.

        The result is eastward and northward (..., latitude, longitude), m/s.
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
    """Synthesise states NKML to fields on sigma layers at the points of `synthesis`, in SI units.

    Negative humidity, which a truncated series may give, is set to zero, as in the model's own physics.

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


def truncate(x_kml: np.ndarray, truncation: int) -> np.ndarray:
    """Cut spectral states down to a lower truncation T. If T is not lower than their own, they stay as they are.

    The last total wavenumber of a cut state, T + 1, is zero. Surface pressure ends at T - 1, as the orography in
    dinosaur does: with mountains in it that the coarse model lacks, the model's heights would be off by 60 m.

    Returns:
        A copy, (..., K, 2 T + 1, T + 2) if T is at most their own truncation.
    """
    cut = np.array(x_kml[..., : 2 * truncation + 1, : truncation + 2])
    if cut.shape == x_kml.shape:
        return cut
    cut[..., truncation + 1 :] = 0
    cut[..., PLANES["log_pressure"], :, truncation:] = 0
    return cut


def geopotential(fields: dict[str, np.ndarray], facts: ModelFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return geopotential and virtual temperature on sigma layers, as the dynamical core discretises them.

    The fields are those of `sigma_fields`. Source: Durran (2010), Numerical Methods for Fluid Dynamics, section 8.6.5.

    Returns:
        Geopotential in m2 s-2 and virtual temperature in K, each (N, Z, Y, X).
    """
    virtual = fields["t"] * (1 + (facts.vapour_constant / facts.gas_constant - 1) * fields["q"])
    rise = np.empty_like(virtual)
    rise[:, -1] = -_LOG_SIGMA[-1] * virtual[:, -1]
    for k in range(len(SIGMA) - 2, -1, -1):
        rise[:, k] = rise[:, k + 1] + 0.5 * (_LOG_SIGMA[k + 1] - _LOG_SIGMA[k]) * (virtual[:, k] + virtual[:, k + 1])
    return facts.gas_constant * rise + fields["phis"], virtual


def ground_temperature(fields: dict[str, np.ndarray], facts: ModelFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return the temperature at the ground, and the exponent R gamma / g of the temperature profile below it.

    The fields are those of `sigma_fields`. Below ground, temperature varies as pressure to the power of the exponent.
    gamma is the lapse rate, which is reduced under ground higher than 2000 m.

    Returns:
        Temperature in K and the exponent, each (N, Y, X).
    """
    exponent = facts.gas_constant * LAPSE_RATE / facts.gravity
    ground = fields["t"][:, -1] * (1 + exponent * (1 / SIGMA[-1] - 1))
    height = np.maximum(fields["phis"] / facts.gravity, 1e-6)
    sea = ground + LAPSE_RATE * height
    capped = np.minimum(sea, 298.0)
    share = np.clip((height - 2000.0) / 500.0, 0.0, 1.0)  # the cap sets in between 2000 and 2500 m
    limited = (
        np.maximum((1 - share) * sea + share * capped - ground, 0.0) * facts.gas_constant / (facts.gravity * height)
    )
    return ground, np.where(height > 2000.0, limited, exponent)


def to_pressure(fields: dict[str, np.ndarray], levels: list[int], facts: ModelFacts) -> dict[str, np.ndarray]:
    """Interpolate fields of `sigma_fields` to pressure levels in hPa.

    Returns:
        t, z, u, v and q, each as (N, level, Y, X); z is geopotential in m2 s-2.
    """
    phi, virtual = geopotential(fields, facts)
    ground = ground_temperature(fields, facts)
    out: dict[str, list[np.ndarray]] = {name: [] for name in ("t", "z", "u", "v", "q")}
    for level in levels:
        depth = np.log(level * 100.0 / fields["ps"])  # log of sigma
        values = _at_level(fields, phi, virtual, ground, depth, facts)
        for name, parts in out.items():
            parts.append(values[name])
    return {name: np.stack(parts, axis=1) for name, parts in out.items()}


def _at_level(fields, phi, virtual, ground, depth, facts) -> dict[str, np.ndarray]:
    """Interpolate all fields to one level, given by `depth`, the logarithm of its sigma at each point (N, Y, X)."""
    above = np.clip(np.searchsorted(_LOG_SIGMA, depth) - 1, 0, len(SIGMA) - 2)
    gap = _LOG_SIGMA[above + 1] - _LOG_SIGMA[above]
    weight = np.minimum((depth - _LOG_SIGMA[above]) / gap, 1.0)  # weight of the layer below; 1 under the lowest
    take = lambda x, k: np.take_along_axis(x, k[:, None], axis=1)[:, 0]  # noqa: E731
    values = {
        name: take(fields[name], above) * (1 - weight) + take(fields[name], above + 1) * weight for name in "tuvq"
    }
    lower = take(virtual, above + 1)
    mean = 0.5 * ((take(virtual, above) - lower) * (1 - weight)) + lower
    values["z"] = take(phi, above + 1) + facts.gas_constant * mean * gap * (1 - weight)
    return _near_ground(values, fields, phi, ground, depth, facts)


def _near_ground(values, fields, phi, ground, depth, facts) -> dict[str, np.ndarray]:
    """Replace t and z at points where the level lies below the centre of the lowest layer, or below ground."""
    temperature, exponent = ground
    y = exponent * depth
    buried_t = temperature * (1 + y + y**2 / 2 + y**3 / 6)
    buried_z = fields["phis"] - facts.gas_constant * temperature * depth * (1 + y / 2 + y**2 / 6)
    share = np.clip(1 - depth / _LOG_SIGMA[-1], 0.0, 1.0)  # 0 at the lowest layer, 1 at the ground
    low_t = fields["t"][:, -1] * (1 - share) + temperature * share
    low_z = phi[:, -1] * (1 - share) + fields["phis"] * share
    low, buried = depth > _LOG_SIGMA[-1], depth > 0
    values["t"] = np.where(buried, buried_t, np.where(low, low_t, values["t"]))
    values["z"] = np.where(buried, buried_z, np.where(low, low_z, values["z"]))
    return values


def surface_fields(fields: dict[str, np.ndarray], land_yx: np.ndarray, facts: ModelFacts) -> dict[str, np.ndarray]:
    """Return sp and msl (Pa), t2m (K), u10 and v10 (m/s), each (N, Y, X).

    The fields are those of `sigma_fields`, and `land_yx` is the land fraction (Y, X) at their points. Near-surface air
    is computed as for SPEEDY's surface fluxes (`_extrapolate_to_surface` in jcm). Where temperature falls with height
    from sigma 0.95 to 0.835, it is continued to the surface with the same lapse rate, and over sea further to sea
    level. Elsewhere it is that of the lowest layer. Wind is 0.95 times the wind in the lowest layer. Mean sea level
    pressure follows Trenberth et al. (1993), equation 11.
    """
    ground, exponent = ground_temperature(fields, facts)
    low, high = fields["t"][:, -1], fields["t"][:, _PBL_TOP]
    step = (_LOG_SURFACE_LAYER - _LOG_SIGMA[-1]) / (_LOG_SIGMA[-1] - _LOG_SIGMA[_PBL_TOP]) * (low - high)
    to_sea = -fields["phis"] * step / (facts.gas_constant * 288.0 * _LOG_SIGMA[-1])
    over = low + step + (1 - land_yx) * to_sea
    x = exponent * fields["phis"] / (facts.gas_constant * ground)
    msl = fields["ps"] * np.exp(fields["phis"] / (facts.gas_constant * ground) * (1 - x / 2 + x**2 / 3))
    return {
        "sp": fields["ps"],
        "msl": msl,
        "t2m": np.where(low > high, over, low),
        "u10": _WIND_RATIO * fields["u"][:, -1],
        "v10": _WIND_RATIO * fields["v"][:, -1],
    }
