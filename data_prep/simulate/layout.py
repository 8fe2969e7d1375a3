"""The definitions that model, synthesis and breeding share: the planes of a state and the constants of the model."""

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
"""Perturbations are measured by their temperature on this plane (sigma 0.835), root mean square over the sphere."""


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
    """Cut states of axes ...KML down to a truncation; coefficients beyond it, and the spare last one, become zero.

    Surface pressure loses one more wavenumber if anything is cut. The orography in dinosaur ends there. Surface
    pressure that follows mountains which the coarse model does not have would shift its heights by 60 m.

    Args:
        x_kml: spectral states, on any leading axes.
        truncation: largest wavenumber to keep.
    """
    cut = np.array(x_kml[..., : 2 * truncation + 1, : truncation + 2])
    if cut.shape == x_kml.shape:
        return cut
    cut[..., truncation + 1 :] = 0
    cut[..., PLANES["log_pressure"], :, truncation:] = 0
    return cut
