"""Bring 2 m temperature and surface pressure from the ground of the forecast's model to that of the truth.

    T' = T - G (h_t - h_f)
    p' = p (T' / T)^(g / (R G))

    T    the member's own temperature at 2 m
    p    the member's surface pressure
    h_f  orography of the forecast's model
    h_t  orography of the truth
    G    lapse rate of the standard atmosphere, 6.5 K/km
    g    acceleration of gravity
    R    gas constant of dry air

The second line is the hypsometric equation of dry air whose temperature falls by G: equation 33a of the U.S. Standard
Atmosphere (1976).

Forecast centres make this correction before they verify forecasts near the ground. Without it, a model that learns the
constant difference between the two grounds would gain skill from it. But the correction can make forecasts worse: the
air of a model at 2 m may follow its sea and soil rather than its height. A variable is therefore corrected only if this
does not raise the RMSE of its mean on the fit dates (`samples.settled`). Mean sea-level pressure does not depend on the
height of the ground and stays as it is.

Axes: M member, Z level (one), Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.units import GRAVITY

LAPSE_RATE = 0.0065  # K/m
GAS_CONSTANT = 287.0528  # J kg-1 K-1, of dry air in the ICAO standard atmosphere
STANDARD = 288.15  # K, temperature of the ICAO standard atmosphere at sea level
OF_THE_GROUND = ("sp", "t2m")
WORDS = {"sp": "surface pressure", "t2m": "2 m temperature"}


@dataclass(frozen=True, eq=False)
class Heights:
    """A pair of orographies, that of the forecast's model and that of the truth.

    Attributes:
        forecast: (Y, X) height of the model's ground, m above sea level.
        truth: (Y, X) height of the truth's ground, m above sea level.
        variables: Variables that are corrected.
        ratios: RMSE of the mean with correction over that without, on the fit dates, by variable (`samples.settled`).
    """

    forecast: np.ndarray
    truth: np.ndarray
    variables: tuple[str, ...] = OF_THE_GROUND
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def rise(self) -> np.ndarray:
        """Return how far the truth's ground lies above the forecast's, (Y, X) in m."""
        return np.asarray(self.truth, np.float64) - np.asarray(self.forecast, np.float64)

    def check(self, grid: Grid) -> None:
        """Raise a UserError if an orography has another shape than the grid, or a value that is not finite."""
        for key, values in (("orography", self.forecast), ("truth_orography", self.truth)):
            if values.shape != grid.shape:
                raise UserError(f"{key}: {values.shape} points; the ensemble has {grid.shape}")
            if not np.isfinite(values).all():
                raise UserError(f"{key}: holds values that are not finite; give the height of every point")

    def temperature(self, members: np.ndarray) -> np.ndarray:
        """Return the 2 m temperature at the truth's ground from that at the forecast's, (M, Z, Y, X) in K."""
        return members - LAPSE_RATE * self.rise

    def pressure(self, members: np.ndarray, temperature: np.ndarray | None) -> np.ndarray:
        """Return the surface pressure at the truth's ground from that at the forecast's, (M, Z, Y, X) in Pa.

        Args:
            members: Surface pressure at the forecast's ground.
            temperature: (M, Z, Y, X) 2 m temperature of the same members at the forecast's ground, K. Where it is NaN,
                that of the standard atmosphere is taken there; so it is everywhere if None is given.
        """
        below = STANDARD - LAPSE_RATE * np.asarray(self.forecast, np.float64)
        if temperature is not None:
            below = np.where(np.isfinite(temperature), temperature, below)
        return members * (1 - LAPSE_RATE * self.rise / below) ** (GRAVITY / (GAS_CONSTANT * LAPSE_RATE))


def as_dict(heights: Heights | None, variables: set[str]) -> dict:
    """Return the `heights` of scores.json; `variables` are those that are scored, and heights may be unknown."""
    if heights is None:
        return {"corrected": []}
    away, names = np.abs(heights.rise), [name for name in heights.variables if name in variables]
    sizes = {"largest_m": float(away.max()), "mean_m": float(away.mean()), "lapse_rate_K_per_m": LAPSE_RATE}
    return {"corrected": names, "rmse_ratio_on_fit_dates": dict(heights.ratios), **sizes}


def note(heights: Heights | None, variables: set[str]) -> str | None:
    """Return sentences that say whether raw fields were brought to the truth's ground.

    The result is None if none of the scored variables depends on the height of the ground.
    """
    names = [name for name in OF_THE_GROUND if name in variables]
    if not names:
        return None
    if heights is None:
        return (
            f"Raw {_words(names)}: not corrected for height. Where model and truth have different orographies, part of"
            f" any gain in {'them' if names[1:] else 'it'} is that difference alone: give orography= and"
            " truth_orography=."
        )
    away, sentences = np.abs(heights.rise), []
    if done := [name for name in names if name in heights.variables]:
        sentences.append(
            f"Raw {_words(done)}, and what is made of {'them' if done[1:] else 'it'}: corrected for the height of the"
            f" truth's ground above the model's (up to {away.max():.0f} m, {away.mean():.0f} m in the mean; 6.5 K/km,"
            " hypsometric)."
        )
    for name in (name for name in names if name not in heights.variables):
        more = 100 * (heights.ratios[name] - 1)
        sentences.append(
            f"Raw {WORDS[name]}: not corrected for height, which would raise its RMSE on the fit dates by {more:.1f} %."
        )
    return " ".join(sentences)


def _words(names: list[str]) -> str:
    return " and ".join(WORDS[name] for name in names)
