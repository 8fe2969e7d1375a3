"""Draw the figures of the report as PNG in a data URI. Nothing is fetched and nothing runs in the browser.

Colours are those of Okabe & Ito, which colour-blind readers can tell apart. Blue is better and orange is worse
throughout, except that maps of gain use red for worse.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from ensemble_ml.grid import Grid
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.pictures import Bins

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#6b6b6b"
COLOURS = (BLUE, "#D55E00", "#009E73", "#CC79A7", ORANGE, "#56B4E9", "#000000")
_GAIN_MAP = "RdBu"  # red is worse, blue is better; safe for colour-blind readers
_FONT: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def data_uri(figure: Figure) -> str:
    """Return a figure as `data:image/png;base64,...`.

    Args:
        figure: The figure.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a folder's name may contain $, which starts a formula
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def in_legend(name: str) -> str:
    """Return a name in the form that a legend shows. Matplotlib leaves out names that begin with an underscore.

    Args:
        name: Name of a curve.
    """
    return f" {name}" if name.startswith("_") else name


def look_of(number: int) -> dict[str, Any]:
    """Return the colour and the line style of a curve. No two of the first 28 curves look alike.

    Args:
        number: Number of the curve, from 0.
    """
    lines = ("-", "--", ":", "-.")
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": lines[number // len(COLOURS) % len(lines)]}


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, heights: Sequence[float] | None = None
) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes (rows, columns).

    Args:
        width: Width in inches.
        height: Height in inches.
        rows: Number of rows of axes.
        columns: Number of columns of axes.
        heights: Relative heights of the rows; None makes them equal.
    """
    import matplotlib as mpl

    with mpl.rc_context(_FONT):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, np.atleast_2d(figure.subplots(rows, columns, squeeze=False, height_ratios=heights))


def gains(entries: Sequence[tuple[str, Interval]], unit: str = "%") -> Figure:
    """Draw gains with their intervals, one line each. A marker is filled if the interval surely excludes zero.

    Args:
        entries: Name and gain of each line.
        unit: Unit of the gains.

    Returns:
        The figure.
    """
    figure, axes = new_figure(7.2, 0.5 + 0.32 * len(entries))
    axis: Axes = axes[0, 0]
    for y, (_, gain) in enumerate(reversed(entries)):
        sure = gain.excludes(0)
        colour = (BLUE if gain.value > 0 else ORANGE) if sure else GREY
        if np.isfinite(gain.low):
            axis.plot([gain.low, gain.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axis.plot(gain.value, y, "o", color=colour, mfc=colour if sure else "white", ms=6, zorder=3)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(entries)), [name for name, _ in reversed(entries)])
    axis.set_ylim(-0.6, len(entries) - 0.4)
    axis.set_xlabel(f"gain in {unit} (right of zero: better)")
    axis.grid(axis="x", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    return figure


def by_lead(panels: Mapping[str, Mapping[str, Sequence[tuple[int, Interval]]]]) -> Figure:
    """Draw curves over lead time, with intervals as bars. The first curve of a panel is the thickest.

    Args:
        panels: Lead in hours and value of each point, by curve, by title of the panel.

    Returns:
        The figure.
    """
    figure, axes = new_figure(4.9 * len(panels), 3.3, columns=len(panels))
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            hours = np.array([lead for lead, _ in points], float)
            values = np.array([point.value for _, point in points])
            ends = np.array([[point.value - point.low, point.high - point.value] for _, point in points]).T
            # Points of one lead are drawn side by side, so that their intervals can be told apart.
            shift = (number - (len(curves) - 1) / 2) * 0.012 * max(np.ptp(hours), 24)
            axis.errorbar(
                hours + shift, values, yerr=np.nan_to_num(np.maximum(ends, 0)), label=in_legend(name), marker="o", ms=4,
                lw=2.4 if number == 0 else 1.2, elinewidth=1, capsize=2, **look_of(number),
            )  # fmt: skip
        axis.set_xticks(sorted({lead for points in curves.values() for lead, _ in points}))
        axis.set_xlabel("lead time, h")
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.grid(color="#e4e4e4", lw=0.6)
        axis.margins(y=0.25)  # room for the legend
        axis.legend(frameon=False, fontsize=7.5)
    return figure


def gain_maps(maps: Sequence[tuple[str, np.ndarray, np.ndarray]], grid: Grid, land: np.ndarray | None) -> Figure:
    """Draw maps of gain in percent on one scale, with dots where a mask is true.

    The scale ends at the 98th percentile of the sizes, between 1 and 30 %.

    Args:
        maps: Title, gain (Y, X) and mask (Y, X) of each map.
        grid: Grid of the maps.
        land: (Y, X) land fraction for coasts; None draws those of Natural Earth.

    Returns:
        The figure.
    """
    sizes = np.concatenate([np.abs(values[np.isfinite(values)]) for _, values, _ in maps])
    limit = float(np.clip(np.percentile(sizes, 98) if sizes.size else 1.0, 1.0, 30.0))
    figure, axes = _map_axes(len(maps), grid)
    for axis, (title, values, dotted) in zip(axes, maps, strict=True):
        shown = np.where(np.isneginf(values), -limit, values)  # the reference is perfect there and ours is not
        mesh = draw_map(axis, shown, grid, land, title, cmap=_GAIN_MAP, vmin=-limit, vmax=limit)
        step = max(1, round(max(dotted.shape) / 120))  # all points of a coarse grid are dotted, fewer of a fine one
        rows, columns = np.nonzero(dotted[::step, ::step])
        axis.scatter(
            grid.longitude[::step][columns], grid.latitude[::step][rows], s=0.9, color="black", lw=0, alpha=0.8
        )
    figure.colorbar(mesh, ax=list(axes), shrink=0.75, extend="both", label="gain, %")
    return figure


def spread_maps(maps: Sequence[tuple[str, np.ndarray]], grid: Grid, land: np.ndarray | None, units: str) -> Figure:
    """Draw maps of spread on one scale.

    Args:
        maps: Title and spread (Y, X) of each map.
        grid: Grid of the maps.
        land: (Y, X) land fraction for coasts; None draws those of Natural Earth.
        units: Units of the spread.

    Returns:
        The figure.
    """
    top = float(np.nanpercentile(np.concatenate([values.ravel() for _, values in maps]), 99.5)) or 1.0
    figure, axes = _map_axes(len(maps), grid)
    for axis, (title, values) in zip(axes, maps, strict=True):
        mesh = draw_map(axis, values, grid, land, title, cmap="viridis", vmin=0, vmax=top)
    figure.colorbar(mesh, ax=list(axes), shrink=0.75, extend="max", label=f"spread, {units}")
    return figure


def _map_axes(count: int, grid: Grid) -> tuple[Figure, np.ndarray]:
    """Return a figure and axes for a number of maps, shaped like the grid."""
    columns = count if count <= 3 else 2
    rows = -(-count // columns)
    high, wide = np.ptp(grid.latitude), max(np.ptp(grid.longitude), 1e-6)
    height = float(np.clip(4.4 * high / wide, 1.6, 4.4)) + 0.45
    wide_each = 4.6 if columns < 3 else 3.9
    figure, axes = new_figure(wide_each * columns + 0.9, height * rows, rows, columns)
    for axis in axes.ravel()[count:]:
        axis.set_visible(False)
    return figure, axes.ravel()[:count]


def draw_map(axis: Axes, values: np.ndarray, grid: Grid, land: np.ndarray | None, title: str, **colours: Any) -> Any:
    """Draw a field with coasts on given axes. Missing values show as grey.

    Args:
        axis: Axes to draw on.
        values: (Y, X) field.
        grid: Grid of the field.
        land: (Y, X) land fraction for coasts; None draws those of Natural Earth.
        title: Title of the map.
        **colours: Arguments of matplotlib's pcolormesh.

    Returns:
        The mesh, for a colour bar.
    """
    mesh = axis.pcolormesh(grid.longitude, grid.latitude, values, shading="nearest", rasterized=True, **colours)
    if land is None:
        draw_coasts(axis)
    elif min(land.shape) > 1:
        axis.contour(grid.longitude, grid.latitude, land, levels=[0.5], colors="black", linewidths=0.6)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_facecolor("#bbbbbb")  # points without a value show this grey
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(True)
    return mesh


def draw_coasts(axis: Axes) -> None:
    """Draw the coasts of Natural Earth (1:110 million, `scripts/coasts.py`) within the limits of a map.

    Args:
        axis: Axes of longitude and latitude in degrees. Longitudes may begin anywhere between -360 and 0.
    """
    left, right, low, high = *axis.get_xlim(), *axis.get_ylim()
    stored = np.load(Path(__file__).with_name("coasts.npz"))["points"]
    points = np.where(stored == np.iinfo(stored.dtype).max, np.nan, stored / 10)  # NaN parts one line from the next
    for turn in (-360, 0, 360):
        axis.plot(points[:, 0] + turn, points[:, 1], color="black", lw=0.6)
    axis.set(xlim=(left, right), ylim=(low, high))


def binned(panels: Mapping[str, Mapping[str, Bins]], units: Sequence[str], y_label: str) -> Figure:
    """Draw the outcome against the prediction in bins of the prediction. Calibrated forecasts lie on the diagonal.

    Args:
        panels: Bins by entrant, by title of the panel.
        units: Units of each panel.
        y_label: What the outcome is.

    Returns:
        The figure.
    """
    figure, axes = new_figure(3.7 * len(panels), 3.5, columns=len(panels))
    for axis, unit, (title, curves) in zip(axes[0], units, panels.items(), strict=True):
        top = 0.0
        for number, (name, bins) in enumerate(curves.items()):
            predicted, actual, share = bins.curve()
            look = look_of(number)
            axis.plot(predicted, actual, lw=1.6, label=in_legend(name), **look)
            axis.scatter(predicted, actual, s=8 + 160 * share, color=look["color"], alpha=0.75, lw=0)
            top = max([top, *predicted, *actual])
        axis.plot([0, top], [0, top], color=GREY, lw=0.8, ls="--")
        axis.set_xlabel(f"predicted standard deviation, {unit}")
        axis.set_ylabel(f"{y_label}, {unit}")
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.legend(frameon=False, fontsize=7.5)
    return figure
