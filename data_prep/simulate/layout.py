"""The planes of a spectral state and the constants of a model, which the modules of `data_prep.simulate` share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIGMA = (0.025, 0.095, 0.2, 0.34, 0.51, 0.685, 0.835, 0.95)
"""Centres of SPEEDY's eight sigma layers, top first."""

_Z = len(SIGMA)
PLANES = {
    "vorticity": slice(0, _Z),
    "divergence": slice(_Z, 2 * _Z),
    "temperature": slice(2 * _Z, 3 * _Z),
    "humidity": slice(3 * _Z, 4 * _Z),
    "log_pressure": slice(4 * _Z, 4 * _Z + 1),
}
"""Where each quantity lies on axis K of a state."""

NORM_PLANE = 2 * _Z + SIGMA.index(0.835)
"""The plane of temperature at sigma 0.835; its root mean square over the sphere is the norm of a perturbation."""


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


def truncate(x_kml: np.ndarray, truncation: int) -> np.ndarray:
    """Cut spectral states down to a lower truncation T. If T is not lower than their own, they stay as they are.

    The last total wavenumber of a cut state, T + 1, is zero. Surface pressure ends at T - 1, as the orography in
    dinosaur does: with mountains in it that the coarse model lacks, the model's heights would be off by 60 m.

    Args:
        x_kml: spectral states (..., K, M, L).
        truncation: largest total wavenumber T to keep.

    Returns:
        A copy, (..., K, 2 T + 1, T + 2) if T is at most their own truncation.
    """
    cut = np.array(x_kml[..., : 2 * truncation + 1, : truncation + 2])
    if cut.shape == x_kml.shape:
        return cut
    cut[..., truncation + 1 :] = 0
    cut[..., PLANES["log_pressure"], :, truncation:] = 0
    return cut
