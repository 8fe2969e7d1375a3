"""Bred analysis errors and member perturbations: the 48 h forecasts of one cycle are the source for the next.

The deviations of the trajectories from their mean have grown in the last two days, so they are errors that fit the
flow of the day (Toth and Kalnay 1997, doi:10.1175/1520-0493(1997)125<3297:EFANAT>2.0.CO;2). A random rotation mixes
them. It keeps their covariance, and makes bred vectors that have become alike differ again. Each mixture is scaled to a
given norm. One mixture is the error of the analysis, and the others are the perturbations of the members around the
analysis. So with an inflation of 1, truth and members are draws from one distribution: spread and error agree at the
start. The error of the forecast model comes in addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.simulate.layout import NORM_PLANE


@dataclass(frozen=True)
class Amplitude:
    """The size of initial perturbations.

    `norm` is the root mean square of the analysis error, in K at sigma 0.835. `inflation` is the size of the members'
    perturbations divided by `norm`.
    """

    norm: float
    inflation: float = 1.0


def norm(x_nkml: np.ndarray) -> np.ndarray:
    """Return the root mean square over the sphere of temperature at sigma 0.835, in K, for each state (N,).

    The basis is orthonormal on the unit sphere, so the sum of squared coefficients over 4 pi is the mean square.
    """
    return np.sqrt((x_nkml[:, NORM_PLANE].astype(np.float64) ** 2).sum((-2, -1)) / (4 * np.pi))


def deviations(x_nkml: np.ndarray) -> np.ndarray:
    """Return the deviations of N trajectories from their mean, NKML."""
    return x_nkml - x_nkml.mean(0)


def rotation(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw an orthogonal matrix uniformly (Haar measure; Mezzadri 2007, Notices of the AMS 54, 592-604).

    Args:
        count: rows and columns of the matrix.
        rng: source of randomness.
    """
    q, r = np.linalg.qr(rng.standard_normal((count, count)))
    # The signs make the QR factorisation unique; without them the distribution would not be uniform.
    return q * np.sign(np.diag(r))


def mix(dev_nkml: np.ndarray, count: int, target: float, rng: np.random.Generator) -> np.ndarray:
    """Draw perturbations from the span of N deviations, each scaled to a norm.

    Args:
        dev_nkml: deviations of the trajectories.
        count: number of perturbations wanted.
        target: norm of each perturbation, K.
        rng: source of randomness.

    Returns:
        The perturbations, float64, NKML with N = `count`.

    Raises:
        ValueError: a mixture is zero, so it cannot be scaled.
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
    """Return states that start a forecast: truth - analysis error + perturbation.

    Args:
        truth_kml: state of the nature run, at the forecast model's truncation.
        dev_nkml: deviations of the last cycle.
        count: number of trajectories wanted.
        amplitude: size of error and perturbations.
        rng: source of randomness; the same one gives the same states.

    Returns:
        The states, float32, NKML.

    Raises:
        ValueError: the deviations are all zero.
    """
    drawn = mix(dev_nkml, count + 1, amplitude.norm, rng)
    analysis = truth_kml - drawn[0]
    return (analysis + amplitude.inflation * drawn[1:]).astype(np.float32)
