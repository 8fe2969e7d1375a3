"""Interpolation from sigma layers to pressure levels and to the surface.

Between the centres of layers, fields are linear in the logarithm of pressure, and geopotential is the hydrostatic
integral of virtual temperature. Above the highest centre, fields are extrapolated from the two highest layers. Below
the lowest centre, wind and humidity stay as they are there. Temperature and geopotential are linear in the logarithm of
pressure down to the ground. Below ground the rule is ECMWF's (Trenberth, Berry and Buja 1993, NCAR/TN-396+STR,
equations 5 to 20): temperature continues with 6.5 K/km, less under high ground, and geopotential follows from it.
"""

from __future__ import annotations

import numpy as np

from data_prep.simulate.layout import SIGMA, ModelFacts

LAPSE_RATE = 0.0065  # K/m
_PBL_TOP = SIGMA.index(0.835)
_WIND_RATIO = 0.95  # SPEEDY's `fwind0`: the ratio of near-surface wind to wind in the lowest layer
_LOG_SURFACE_LAYER = np.log(0.99)  # SPEEDY's surface layer lies at sigma 0.99
_LOG_SIGMA = np.log(np.array(SIGMA))


def geopotential(fields: dict[str, np.ndarray], facts: ModelFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return geopotential and virtual temperature on sigma layers, as the dynamical core discretises them.

    Source: Durran (2010), Numerical Methods for Fluid Dynamics, section 8.6.5.

    Args:
        fields: from `synthesis.sigma_fields`; t and q (N, Z, Y, X), phis (Y, X).
        facts: constants of the model.

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

    Below ground, temperature varies as pressure to the power of the exponent. gamma is the lapse rate, which is reduced
    under ground higher than 2000 m.

    Args:
        fields: from `sigma_fields`; t (N, Z, Y, X), phis (Y, X).
        facts: constants of the model.

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
    """Interpolate sigma fields to pressure levels.

    Args:
        fields: from `sigma_fields`; t, u, v, q (N, Z, Y, X), ps (N, Y, X), phis (Y, X).
        levels: hPa.
        facts: constants of the model.

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

    Near-surface air is computed as for SPEEDY's surface fluxes (`_extrapolate_to_surface` in jcm). Where temperature
    falls with height from sigma 0.95 to 0.835, it is continued to the surface with the same lapse rate, and over sea
    further to sea level. Elsewhere it is that of the lowest layer. Wind is 0.95 times the wind in the lowest layer.
    Mean sea level pressure follows Trenberth et al. (1993), equation 11.

    Args:
        fields: from `sigma_fields`; t, u, v (N, Z, Y, X), ps (N, Y, X), phis (Y, X).
        land_yx: land fraction (Y, X).
        facts: constants of the model.
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
