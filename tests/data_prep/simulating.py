"""Spectral coefficients and a small model's facts, for tests of the embedded archive."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import sph_harm_y

from data_prep.simulate.synthesis import ModelFacts, regular_grid

TRUNCATION = 7
SHAPE = (2 * TRUNCATION + 1, TRUNCATION + 2)
GRID = regular_grid(17, 32)


def coefficient(m: int, l: int) -> np.ndarray:
    x = np.zeros(SHAPE)
    x[2 * abs(m) - (m > 0), l] = 1.0
    return x


def real_harmonic(m: int, l: int) -> np.ndarray:
    """Orthonormal real spherical harmonic from SciPy's complex one (which has the Condon-Shortley phase too)."""
    latitude, longitude = np.meshgrid(*map(np.deg2rad, GRID), indexing="ij")
    y = sph_harm_y(l, abs(m), np.pi / 2 - latitude, longitude)
    return y.real if m == 0 else math.sqrt(2) * (y.real if m > 0 else y.imag)


def small_facts() -> ModelFacts:
    return ModelFacts(
        truncation=TRUNCATION,
        reference_temperature=np.full(8, 280.0),
        orography_ml=coefficient(0, 0) * 100.0,
        land_yx=np.ones((8, 16)),
        latitude=np.linspace(-80, 80, 8),
        longitude=np.arange(16) * 22.5,
        gas_constant=287.0,
        vapour_constant=461.0,
        gravity=9.81,
        reference_pressure=1e5,
        radius=6.371e6,
    )
