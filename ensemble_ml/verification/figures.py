"""Draw figures of calibration, ensemble size and the extreme case. Style and maps are those of `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from ensemble_ml.grid import Grid
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.case import Case
from ensemble_ml.verification.plots import BLUE, GREY, draw_map, in_legend, look_of, new_figure
from ensemble_ml.verification.probability import Reliability
from ensemble_ml.verification.summary import short_name


def histograms(panels: Sequence[tuple[str, Sequence[Interval]]]) -> Figure:
    """Draw the shares of the bins with their intervals, times the number of bins, so that one is flat.

    Args:
        panels: Title and share of each bin, for each histogram.

    Returns:
        The figure.
    """
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(2.6 * columns, 2.1 * rows, rows, columns)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, bins) in zip(axes.ravel(), panels, strict=False):
        value = np.array([b.value for b in bins]) * len(bins)
        ends = np.array([[b.low, b.high] for b in bins]).T * len(bins)
        axis.bar(np.arange(len(bins)), value, color=BLUE, width=0.9)
        if np.isfinite(ends).all():
            axis.vlines(np.arange(len(bins)), *ends, color="black", lw=1)
        axis.axhline(1, color=GREY, lw=0.8, ls="--")
        axis.set_title(title, fontsize=8.5, loc="left")
        axis.set_xticks([])
    return figure


def reliability(panels: Mapping[str, Mapping[str, Reliability]]) -> Figure:
    """Draw the observed frequency against the forecast probability.

    A panel above shows how often each probability is forecast.

    Args:
        panels: Reliability tables by entrant, by title of the panel.

    Returns:
        The figure.
    """
    figure, axes = new_figure(3.9 * len(panels), 4.6, 2, len(panels), heights=(1, 2.6))
    for (top, axis), (title, curves) in zip(axes.T, panels.items(), strict=True):
        for number, (name, table) in enumerate(curves.items()):
            forecast, event, count = table.curve()
            look = look_of(number)
            axis.plot(forecast, event, marker="o", ms=4, lw=1.4, label=in_legend(name), **look)
            top.plot(forecast, count, marker="o", ms=3, lw=1.2, **look)
        axis.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
        axis.set_xlabel("forecast probability")
        axis.set_ylabel("observed frequency")
        axis.legend(frameon=False, fontsize=7.5)
        top.set_yscale("log")
        # Matplotlib writes 10^3 in TeX, which `plots.data_uri` does not parse, so plain numbers are used.
        top.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        top.yaxis.set_minor_formatter(NullFormatter())
        top.set_ylabel("points")
        top.set_xlim(axis.get_xlim())
        top.set_title(title, fontsize=9.5, loc="left")
    return figure


def by_members(panels: Mapping[str, Sequence[tuple[int, Interval]]]) -> Figure:
    """Draw the ratio of scores against the number of members that a forecast was made from.

    Args:
        panels: Number of members and ratio of each forecast, by title of the panel.

    Returns:
        The figure.
    """
    figure, axes = new_figure(4.4 * len(panels), 3.2, 1, len(panels))
    for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
        sizes = [size for size, _ in points]
        values = [ratio.value for _, ratio in points]
        axis.plot(sizes, values, "o-", color=BLUE)
        for size, ratio in points:
            if np.isfinite(ratio.low):
                axis.vlines(size, ratio.low, ratio.high, color=BLUE, lw=1.4)
        axis.axhline(1, color=GREY, lw=0.8)
        axis.set_xticks(sorted(set(sizes)))
        axis.set_xlabel("members in")
        axis.set_title(title, fontsize=9.5, loc="left")
    return figure


def extreme_case(case: Case, grid: Grid, land: np.ndarray | None, units: str) -> Figure:
    """Draw the extreme case.

    The columns are raw ensembles and forecasts; the last one holds the truth and the EFI. The rows are mean, standard
    deviation, and error in standard deviations.

    Args:
        case: The case.
        grid: Grid of the maps.
        land: (Y, X) land fraction for coasts, or None.
        units: Units of the variable.

    Returns:
        The figure.
    """
    names, truth = list(case.laws), case.truth
    rows, columns = 2 + (truth is not None), len(names) + 1
    figure, axes = new_figure(3.1 * columns, 1.9 * rows + 0.3, rows, columns)
    means = [case.laws[name][0] for name in names] + ([truth] if truth is not None else [])
    # All maps of a row share one colour scale, or they could not be compared by eye.
    low, high = np.nanpercentile(np.stack(means), [1, 99])
    top = float(np.nanpercentile(np.stack([case.laws[name][1] for name in names]), 99)) or 1.0
    place = case.place

    def show(row: int, column: int, values: np.ndarray, title: str, **colours: Any) -> Any:
        axis = axes[row, column]
        mesh = draw_map(axis, values, grid, land, title, **colours)
        axis.plot(place[1], place[0], "x", color="black", ms=7, mew=1.6)
        return mesh

    for column, name in enumerate(names):
        mean, deviation = case.laws[name]
        mesh = show(0, column, mean, f"{short_name(name)}: mean", cmap="viridis", vmin=low, vmax=high)
        spread = show(1, column, deviation, "standard deviation", cmap="magma", vmin=0, vmax=top)
        if truth is not None:
            z = (truth - mean) / np.where(deviation > 0, deviation, np.nan)
            error = show(2, column, z, "(truth - mean) / standard deviation", cmap="PuOr", vmin=-4, vmax=4)
    if truth is not None:
        show(0, columns - 1, truth, "truth", cmap="viridis", vmin=low, vmax=high)
        figure.colorbar(error, ax=list(axes[2]), shrink=0.8)
        axes[2, columns - 1].set_visible(False)
    else:
        axes[0, columns - 1].set_visible(False)
    index = show(1, columns - 1, case.index, "EFI of the raw full ensemble", cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(mesh, ax=list(axes[0]), shrink=0.8, label=units)
    figure.colorbar(spread, ax=list(axes[1, :-1]), shrink=0.8, label=units)
    figure.colorbar(index, ax=axes[1, -1], shrink=0.8)
    return figure
