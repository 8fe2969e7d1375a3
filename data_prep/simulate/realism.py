"""Check that the errors of the simulated ensemble are like those of operational ones.

Operational ensembles are mildly under-dispersive and biased. With an ensemble that is far from that, any
post-processing looks good. The figures are for one lead, over all init times of the archive, weighted with exact cell
areas.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ensemble_ml.grid import Grid

SPREAD_SKILL = (0.7, 1.0)  # lowest and highest spread/skill
LARGEST_BIAS = 0.15  # share of the mean squared error that is squared bias
SMALLEST_CORRELATION = 0.2  # of spread and absolute error


@dataclass(frozen=True)
class Realism:
    """The figures of one field (see `measure`), which are compared with the limits."""

    dates: int
    members: int
    rmse: float  # of the ensemble mean, in the field's units
    spread: float  # sqrt(mean((M + 1) / M s^2)), in the field's units
    spread_skill: float
    raw_bias_share: float  # squared bias over the mean squared error
    bias_share: float  # the same without sampling noise
    correlation: float

    @property
    def misses(self) -> list[str]:
        """Return the limits that the ensemble misses, in words; empty if it passes. A NaN misses its limit."""
        asked = {
            f"spread/skill {self.spread_skill:.3f} outside {SPREAD_SKILL[0]}-{SPREAD_SKILL[1]}": SPREAD_SKILL[0]
            <= self.spread_skill
            <= SPREAD_SKILL[1],
            f"bias^2 {self.raw_bias_share:.1%} of the error, above {LARGEST_BIAS:.0%}": self.raw_bias_share
            <= LARGEST_BIAS,
            f"spread-error correlation {self.correlation:.2f} below {SMALLEST_CORRELATION}": self.correlation
            >= SMALLEST_CORRELATION,
        }
        return [text for text, met in asked.items() if not met]

    def as_dict(self) -> dict:
        """Return the figures, and whether they are within the limits, as archive.json stores them."""
        return asdict(self) | {"passes": not self.misses, "misses": self.misses}


def measure(mean_byx: np.ndarray, variance_byx: np.ndarray, truth_byx: np.ndarray, members: int, grid: Grid) -> Realism:
    """Measure the realism of one field.

        spread/skill = sqrt(mean((M + 1) / M s^2)) / RMSE of the ensemble mean

        M  number of members
        s  spread of the members, ddof = 1

    Source: Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1. The bias is each point's mean error. Its square contains
    the sampling noise of a mean over n init times, var / n, if they are independent; `bias_share` leaves it out. The
    correlation is that of spread and absolute error over all points and init times, after each point's means are
    removed.

    Args:
        mean_byx: ensemble mean (B, Y, X).
        variance_byx: variance of the members (B, Y, X), ddof = 1.
        truth_byx: truth at the same valid times (B, Y, X).
        members: ensemble size M.
        grid: the grid of the fields.

    Returns:
        The figures. `bias_share` is NaN for a single init time, and `spread_skill` and both shares of the bias if the
        error is zero. The correlation is 0 if spread or error does not vary from init time to init time.
    """
    weight_yx = grid.area_weights() / np.prod(grid.shape)
    error = mean_byx.astype(np.float64) - truth_byx
    spread = np.sqrt(variance_byx.astype(np.float64))
    n = len(error)
    area = lambda x_yx: float((x_yx * weight_yx).sum())  # noqa: E731
    mse = area((error**2).mean(0))
    bias = area(error.mean(0) ** 2)
    noise = area(error.var(0, ddof=1)) / n if n > 1 else np.nan
    variance = area((spread**2).mean(0)) * (members + 1) / members
    # Each point's means are removed, because the geography of spread and error alone would correlate them.
    a, b = spread - spread.mean(0), np.abs(error) - np.abs(error).mean(0)
    scale = np.sqrt(area((a**2).mean(0)) * area((b**2).mean(0)))
    return Realism(
        dates=n,
        members=members,
        rmse=float(np.sqrt(mse)),
        spread=float(np.sqrt(variance)),
        spread_skill=float(np.sqrt(variance / mse)) if mse else float("nan"),
        raw_bias_share=bias / mse if mse else float("nan"),
        bias_share=max(bias - noise, 0.0) / mse if mse else float("nan"),
        correlation=area((a * b).mean(0)) / scale if scale else 0.0,
    )


def report(figures: dict[str, Realism]) -> list[str]:
    """Return one line for each field, for the terminal."""
    lines = []
    for name, r in figures.items():
        verdict = "passes" if not r.misses else "misses: " + "; ".join(r.misses)
        lines.append(
            f"realism {name} 48 h, {r.dates} dates: spread/skill {r.spread_skill:.2f}, bias^2 {r.raw_bias_share:.1%} "
            f"({r.bias_share:.1%} without sampling noise), spread-error correlation {r.correlation:.2f} - {verdict}"
        )
    return lines
