"""Analysis error and perturbations of the members, bred: the 48 h forecasts of one start are the next one's source.

Deviations of the trajectories from their mean are what grew in the last two days: the errors of the day (Toth and
Kalnay 1997, Monthly Weather Review 125). They are mixed by a random rotation, which keeps their covariance and undoes
the collapse of bred vectors onto one another, and each mixture is scaled to a given norm. One is the error of the
analysis, the others are the members' perturbations around it: truth and members are then draws from one distribution.
So spread and error agree at the start and follow the flow of the day; what the forecast model gets wrong comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.simulate.layout import NORM_PLANE


@dataclass(frozen=True)
class Amplitude:
    """`norm`: root mean square of the analysis error, K at sigma 0.835. `inflation`: members' perturbations over it."""

    norm: float
    inflation: float = 1.0


def norm(x_nkml: np.ndarray) -> np.ndarray:
    """Return the root mean square over the sphere of temperature at sigma 0.835, K, of each state."""
    return np.sqrt((x_nkml[:, NORM_PLANE].astype(np.float64) ** 2).sum((-2, -1)) / (4 * np.pi))


def deviations(x_nkml: np.ndarray) -> np.ndarray:
    """Return what sets N trajectories apart: their difference from the mean."""
    return x_nkml - x_nkml.mean(0)


def rotation(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw an orthogonal matrix uniformly (Haar measure; Mezzadri 2007, Notices of the AMS 54)."""
    q, r = np.linalg.qr(rng.standard_normal((count, count)))
    return q * np.sign(np.diag(r))


def mix(dev_nkml: np.ndarray, count: int, target: float, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` perturbations from the span of N deviations, each scaled to the norm `target`.

    Raises:
        ValueError: the deviations are all zero, so there is nothing to scale.
    """
    n = len(dev_nkml)
    weights = rotation(max(count, n), rng)[:count, :n]
    mixed = np.tensordot(weights, dev_nkml.astype(np.float64), axes=1)
    length = norm(mixed)
    if not length.all():
        raise ValueError("perturbations of length zero cannot be scaled")
    return mixed * (target / length)[:, None, None, None]


def initial_states(
    truth_kml: np.ndarray, dev_nkml: np.ndarray, count: int, amplitude: Amplitude, rng: np.random.Generator
) -> np.ndarray:
    """Return `count` states that start a forecast: truth - error + perturbation.

    Args:
        truth_kml: state of the nature run, at the forecast model's truncation.
        dev_nkml: deviations of the last cycle.
        count: trajectories wanted, members first.
        amplitude: size of error and perturbations.
        rng: source of randomness; the same one gives the same states.
    """
    drawn = mix(dev_nkml, count + 1, amplitude.norm, rng)
    analysis = truth_kml - drawn[0]
    return (analysis + amplitude.inflation * drawn[1:]).astype(np.float32)
