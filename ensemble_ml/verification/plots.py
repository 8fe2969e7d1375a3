"""Draw maps and reliability diagrams with matplotlib, for `ensemble_ml.plot`. `svg` draws those of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from ensemble_ml.grid import Grid
from ensemble_ml.verification.probability import Reliability
from ensemble_ml.verification.svg import COLOURS, GREY, natural_coasts

_FONT: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def in_legend(name: str) -> str:
    """Return a name with a blank before an initial underscore, because matplotlib's legends leave such names out."""
    return f" {name}" if name.startswith("_") else name


def look_of(number: int) -> dict[str, Any]:
    """Return the colour and the line style of a curve, from 0. No two of the first 28 curves look alike."""
    lines = ("-", "--", ":", "-.")
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": lines[number // len(COLOURS) % len(lines)]}


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, heights: Sequence[float] | None = None
) -> tuple[Figure, np.ndarray]:
    """Return a figure of `width` by `height` inches, and its axes (rows, columns). `heights` are relative."""
    with mpl.rc_context(_FONT):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, height_ratios=heights)


def draw_map(axis: Axes, values: np.ndarray, grid: Grid, land: np.ndarray | None, title: str, **colours: Any) -> Any:
    """Draw a field with coasts on given axes. A global map has Greenwich in its middle; missing values show as grey.

    Args:
        axis: Axes to draw on.
        values: (Y, X) field.
        grid: Grid of the field.
        land: (Y, X) land fraction for coasts; None draws those of Natural Earth. A fraction with one row or column
            draws none.
        title: Title of the map.
        **colours: Arguments of matplotlib's pcolormesh.

    Returns:
        The mesh, for a colour bar.
    """
    longitude, columns = grid.longitude, np.arange(len(grid.longitude))
    if grid.wraps:  # a map from 0 to 360 degrees would cut Europe and Africa in two
        longitude = np.mod(longitude + 180, 360) - 180
        columns = np.argsort(longitude)
    across = longitude[columns]
    mesh = axis.pcolormesh(across, grid.latitude, values[:, columns], shading="nearest", rasterized=True, **colours)
    if land is None:
        draw_coasts(axis)
    elif min(land.shape) > 1:
        axis.contour(across, grid.latitude, land[:, columns], levels=[0.5], colors="black", linewidths=0.6)
    axis.xaxis.set_major_formatter(_longitude)
    axis.yaxis.set_major_formatter(_latitude)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_facecolor("#bbbbbb")  # points without a value show this grey
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(True)
    return mesh


def _longitude(degrees: float, _: float) -> str:
    """Return a longitude, which may be off by 360 degrees, as a label such as 30°W."""
    east = (degrees + 180) % 360 - 180
    return f"{abs(east):g}°{'' if east % 180 == 0 else 'E' if east > 0 else 'W'}"


def _latitude(degrees: float, _: float) -> str:
    """Return a latitude as a label, such as 45°N."""
    return f"{abs(degrees):g}°{'N' if degrees > 0 else 'S' if degrees < 0 else ''}"


def draw_coasts(axis: Axes) -> None:
    """Draw the coasts of Natural Earth within the limits of a map, whose longitudes may be from -540 to 540 degrees."""
    left, right, low, high = *axis.get_xlim(), *axis.get_ylim()
    for line in natural_coasts():
        for turn in (-360, 0, 360):
            axis.plot(line[:, 0] + turn, line[:, 1], color="black", lw=0.6)
    axis.set(xlim=(left, right), ylim=(low, high))


def reliability(panels: Mapping[str, Mapping[str, Reliability]]) -> Figure:
    """Draw the observed frequency against the forecast probability, and above it the number of points.

    Each panel has a title, and a reliability table for each curve by its name.
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
        # Counts are written as plain numbers. By default, matplotlib writes powers of ten.
        top.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        top.yaxis.set_minor_formatter(NullFormatter())
        top.set_ylabel("points")
        top.set_xlim(axis.get_xlim())
        top.set_title(title, fontsize=9.5, loc="left")
    return figure
