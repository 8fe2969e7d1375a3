"""Draw the pictures of docs/concepts.md: `python scripts/concept_pictures.py [FOLDER]`.

All curves are closed forms for normal distributions. docs/concepts.md has the formulas.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

BIAS, DISPERSION = 0.5, 0.7  # of the members, in standard deviations of the truth around its predictable part
MEMBERS = np.arange(2, 51)


def spread_of(members: np.ndarray) -> dict[str, np.ndarray]:
    """Return 5 % and 95 % quantiles and mean of s / sigma, the spread of M members over that of infinitely many.

    (M - 1) s^2 / sigma^2 is chi-squared with M - 1 degrees of freedom, and the mean of s / sigma is c4(M).
    """
    chi = stats.chi(members - 1)
    root = np.sqrt(members - 1)
    return {"low": chi.ppf(0.05) / root, "mean": chi.mean() / root, "high": chi.ppf(0.95) / root}


def mean_distance(mean: float, variance: np.ndarray | float) -> np.ndarray:
    """Return E|x| of x ~ N(mean, variance), which is the mean of the folded normal distribution."""
    sd = np.sqrt(variance)
    z = mean / sd
    return sd * (2 * stats.norm.pdf(z) + z * (2 * stats.norm.cdf(z) - 1))


def raw_crps(members: np.ndarray, bias: float, dispersion: float) -> np.ndarray:
    """Return the expected CRPS of M members taken as they are, where the truth is N(0, 1).

    Members are N(bias, dispersion^2). The CRPS is E|x - y| - (M - 1) / (2 M) E|x - x'|.
    """
    apart = mean_distance(0.0, 2 * dispersion**2)
    return mean_distance(bias, 1 + dispersion**2) - (members - 1) / (2 * members) * apart


def calibrated_crps(members: np.ndarray, dispersion: float) -> np.ndarray:
    """Return the expected CRPS of the best normal forecast from the mean of M members.

    It is sqrt((1 + dispersion^2 / M) / pi), where the truth is N(0, 1).
    """
    return np.sqrt((1 + dispersion**2 / members) / np.pi)


def _axes(ylabel: str) -> tuple[Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.set(xlabel="members", ylabel=ylabel, xlim=(0, 50))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def spread_picture() -> Figure:
    """Draw how far the spread of a few members lies from that of infinitely many."""
    figure, axes = _axes("their spread over\nthat of endlessly many")
    ratios = spread_of(MEMBERS)
    axes.fill_between(MEMBERS, ratios["low"], ratios["high"], alpha=0.25, label="90 % of cases")
    axes.plot(MEMBERS, ratios["mean"], label="mean, c4(M)")
    axes.axhline(1, color="grey", lw=0.8)
    axes.legend(frameon=False)
    return figure


def crps_picture() -> Figure:
    """Draw the CRPS of few members as they are, and after calibration."""
    figure, axes = _axes("CRPS")
    axes.plot(MEMBERS, raw_crps(MEMBERS, 0, 1), color="grey", label="perfect members, as they are")
    axes.plot(MEMBERS, raw_crps(MEMBERS, BIAS, DISPERSION), label="biased and too close members, as they are")
    axes.plot(MEMBERS, calibrated_crps(MEMBERS, DISPERSION), label="the same members, calibrated")
    axes.plot([5], calibrated_crps(np.array([5]), DISPERSION), "o", color="C1")
    axes.plot([10], raw_crps(np.array([10]), BIAS, DISPERSION), "o", color="C0")
    axes.legend(frameon=False, fontsize="small")
    return figure


def main(folder: Path) -> None:
    """Write the pictures as PNG into an existing folder."""
    for name, picture in (("spread_of_few", spread_picture), ("five_and_ten", crps_picture)):
        picture().savefig(folder / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "docs" / "pictures")
