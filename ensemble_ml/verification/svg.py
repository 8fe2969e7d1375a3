"""Draw charts and maps as SVG within the report's page. Nothing is fetched and no script is needed.

A map is an image with one pixel a point, in the colours of a palette. Over it lie the coasts and the veil of a region,
which all maps of a page share (`Atlas.shared`). Style and colour bars stand in `style`. Curves have the colours of
Okabe & Ito, which colour-blind readers can tell apart. Blue is better and orange is worse; in maps of gain, red is
worse.

Axes: Y latitude, X longitude; y and x are those of the maps' coarse grid.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.grid import Grid
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.pictures import together

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#6b6b6b"
COLOURS = (BLUE, "#D55E00", "#009E73", "#CC79A7", ORANGE, "#56B4E9", "#000000")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 400, 230, 58, 8, 34  # of a chart and its margins, in pixels
_LEVELS = 64  # colours of a palette
_DOTTED = 120  # most rows or columns of a map in which each point may have a dot of its own
_MISSING = (187, 187, 187)
_DASHES = ("none", "7 3", "2 3", "7 3 2 3")  # with the seven colours, the first 28 curves all look different
# In gains red is worse and blue is better. Colour-blind readers can tell the colours of all palettes apart.
PALETTES = ("RdBu", "viridis", "magma", "PuOr", "RdBu_r")


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        x: Place of each point.
        y: Value of each point with its interval; NaN ends draw no interval.
        share: Share of the data in each point, which sets its size; None draws all alike.
    """

    x: Sequence[float]
    y: Sequence[Interval]
    share: Sequence[float] | None = None

    @classmethod
    def of(cls, x: Iterable[float], y: Iterable[float], share: Iterable[float] | None = None) -> Curve:
        """Return a curve of values without intervals."""
        values = [Interval(float(value), np.nan, np.nan) for value in y]
        return cls(list(x), values, None if share is None else list(share))


def style() -> str:
    """Return the rules of CSS for charts, maps and colour bars."""
    lines = []
    for number in range(len(COLOURS) * len(_DASHES)):
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS)]
        lines.append(f".c{number}{{stroke:{colour};color:{colour}}}.l.c{number}{{stroke-dasharray:{dash}}}")
    for name in PALETTES:
        stops = ",".join(f"rgb({r},{g},{b})" for r, g, b in _colours(name)[:: _LEVELS // 8])
        lines.append(f".{name}{{background:linear-gradient(90deg,{stops})}}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Frame:
    """The ranges of both axes of a chart, which turn values into pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> str:
        """Return a place as two numbers of a path. Whole pixels save bytes: a page may have a million places."""
        across, down = (x - self.x[0]) / (self.x[1] - self.x[0]), (self.y[1] - y) / (self.y[1] - self.y[0])
        return f"{_LEFT + across * (_WIDTH - _LEFT - 8):.0f},{_TOP + down * (_HEIGHT - _TOP - _BOTTOM):.0f}"

    def axes(self, ticks: Sequence[float] | None, label: str) -> str:
        """Return grid lines, the numbers at both axes, and the name of x."""
        parts = []
        for value in _ticks(self.y):
            y = self.at(0, value).split(",")[1]
            parts.append(
                f'<path class="g" d="M{_LEFT},{y}H{_WIDTH - 8}"/><text class="y" x="53" y="{y}">{value:.6g}</text>'
            )
        for value in _ticks(self.x) if ticks is None else ticks:
            parts.append(f'<text x="{self.at(value, 0).split(",")[0]}" y="{_HEIGHT - 20}">{value:.4g}</text>')
        return "".join(parts) + f'<text x="{(_WIDTH + _LEFT) // 2}" y="{_HEIGHT - 4}">{escape(label)}</text>'

    def curve(self, curve: Curve, look: str, shift: float) -> str:
        """Return a curve: its line, its intervals and its points."""
        points = [(x + shift, p) for x, p in zip(curve.x, curve.y, strict=True) if np.isfinite(p.value)]
        places = [self.at(x, p.value) for x, p in points]
        bars = [f"M{self.at(x, p.low)}L{self.at(x, p.high)}" for x, p in points if np.isfinite(p.low)]
        found = f'<path class="l {look}" d="M{"L".join(places)}"/>' * bool(places)
        found += f'<path class="e {look}" d="{"".join(bars)}"/>' * bool(bars)
        if curve.share is None:
            return found + f'<path class="p {look}" d="{"".join(f"M{place}h0" for place in places)}"/>'
        sizes = [share for share, p in zip(curve.share, curve.y, strict=True) if np.isfinite(p.value)]
        dots = ""
        for place, share in zip(places, sizes, strict=True):
            x, y = place.split(",")
            dots += f'<circle cx="{x}" cy="{y}" r="{2 + 9 * share**0.5:.0f}"/>'
        return f'{found}<g class="{look}">{dots}</g>'


def chart(
    curves: Mapping[str, Curve],
    title: str,
    label: str,
    *,
    ticks: Sequence[float] | None = None,
    level: float | None = None,
    diagonal: bool = False,
) -> str:
    """Return a figure of curves with their intervals, and a legend, as HTML; empty without a finite value.

    Args:
        curves: Curves by name.
        title: Title, which says what the values are, with units.
        label: Name of x, with units.
        ticks: The only values of x, such as leads; curves then stand side by side there. None chooses ticks.
        level: A value of y to mark by a dashed line.
        diagonal: Whether to mark where x and y are equal. Both axes then include zero.
    """
    x = np.concatenate([np.asarray(curve.x, float) for curve in curves.values()] or [np.empty(0)])
    y = np.array([(p.value, p.low, p.high) for curve in curves.values() for p in curve.y]).ravel()
    y = y[np.isfinite(y)]
    if not y.size:
        return ""
    ends = [] if level is None else [level]
    frame = _Frame(_range([*x, *([0.0] if diagonal else [])]), _range([*y, *ends, *([0.0] if diagonal else [])]))
    # Points of the same x stand side by side, so that their intervals can be told apart.
    apart = 0.0 if ticks is None else 0.012 * (frame.x[1] - frame.x[0])
    parts, names = [frame.axes(ticks, label)], []
    lines = [] if level is None else [((frame.x[0], level), (frame.x[1], level))]
    lines += [((0.0, 0.0), (min(frame.x[1], frame.y[1]),) * 2)] if diagonal else []
    parts += [f'<path class="r" d="M{frame.at(*first)}L{frame.at(*last)}"/>' for first, last in lines]
    for number, (name, curve) in enumerate(curves.items()):
        look = f"c{number % (len(COLOURS) * len(_DASHES))}"
        parts.append(frame.curve(curve, look, (number - (len(curves) - 1) / 2) * apart))
        names.append(f'<span><svg viewBox="0 0 26 8"><path class="l {look}" d="M0,4H26"/></svg>{escape(name)}</span>')
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    legend = f'<p class="legend">{" ".join(names)}</p>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{picture}{legend}</figure>'


def gains(entries: Sequence[tuple[str, Interval]], title: str) -> str:
    """Return a figure of gains in percent with their intervals as HTML, one line for each name and gain.

    A dot is filled if its gain is surely not zero.
    """
    ends = [end for _, one in entries for end in (one.value, one.low, one.high) if np.isfinite(end)]
    frame = _Frame(_range([0.0, *ends]), (0.0, 1.0))
    scale = lambda value: frame.at(value, 0).split(",")[0]  # noqa: E731
    height, parts = 20 * len(entries) + 26, []
    for value in _ticks(frame.x):
        parts.append(f'<path class="g" d="M{scale(value)},0V{height - 24}"/>')
        parts.append(f'<text x="{scale(value)}" y="{height - 12}">{value:.4g}</text>')
    parts.append(f'<path class="r" d="M{scale(0)},0V{height - 24}"/>')
    names = ""
    for number, (name, one) in enumerate(entries):
        y, sure = 20 * number + 10, one.excludes(0)
        look = ("better" if one.value > 0 else "worse") if sure else "unsure"
        if np.isfinite(one.low):
            parts.append(f'<path class="e {look}" d="M{scale(one.low)},{y}H{scale(one.high)}"/>')
        parts.append(f'<circle class="{look}" cx="{scale(one.value)}" cy="{y}" r="4"/>')
        names += f"<span>{escape(name)}</span>"
    picture = f'<svg viewBox="50 0 350 {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="gains"><div>{names}</div>{picture}</div></figure>'
    )


def _ticks(ends: tuple[float, float]) -> list[float]:
    """Return round values within a range."""
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(5).tick_values(*ends) if ends[0] <= value <= ends[1]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range that holds all values, with some room beside them."""
    low, high = float(min(values)), float(max(values))
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room


@dataclass(frozen=True, eq=False)
class Atlas:
    """The grid, the coasts and the regions that all maps of a page share.

    Attributes:
        grid: Grid of the fields.
        size: Rows and columns of the grid in one point of the maps (`pictures.cells_together`).
        land: (Y, X) land fraction for coasts; None draws those of Natural Earth.
        regions: (Y, X) bool masks by name.
        numbers: Numbers for the ids of maps, each used once.
    """

    grid: Grid
    size: int
    land: np.ndarray | None
    regions: Mapping[str, np.ndarray]
    numbers: Iterator[int] = field(default_factory=count)

    def shared(self) -> str:
        """Return what maps refer to: the coasts, and for each region an image that veils the points outside."""
        coasts = "".join("M" + "L".join(f"{x:g},{-y:g}" for x, y in line) for line in self._coasts())
        turns = (-360, 0, 360) if self.land is None else (0,)
        copies = "".join(f'<use href="#coast" x="{turn}"/>' for turn in turns)
        veils = []
        for number, (name, mask) in enumerate(self.regions.items()):
            share = together(mask.astype(float), self.size) / together(np.ones(mask.shape), self.size)
            outside = _png((share < 0.5).astype(np.uint8), [(0, 0, 0, 0), (255, 255, 255, 190)])
            veils.append(f'<g id="region{number}" data-region="{escape(name)}">{self._image(outside)}</g>')
        made = f'<path id="coast" d="{coasts}"/><g id="coasts">{copies}</g>{"".join(veils)}'
        return f'<svg class="shared" aria-hidden="true"><defs>{made}</defs></svg>'

    def map(
        self,
        title: str,
        values: np.ndarray,
        palette: str,
        ends: tuple[float, float],
        units: str,
        place: tuple[float, float] | None = None,
    ) -> str:
        """Return a figure of a field with its colour bar as HTML. Missing values show as grey.

        Args:
            title: Title of the map.
            values: (y, x) field on the coarse grid.
            palette: Name in `PALETTES`.
            ends: Values of the first and the last colour.
            units: Units of the values.
            place: Latitude and longitude of a cross in degrees; None draws none.
        """
        cross = "" if place is None else f'<path class="x" d="M{place[1] - 1:g},{-place[0] - 1:g}l2,2m0-2l-2,2"/>'
        return self._figure(title, _level(values, ends), palette, ends, units, cross)

    def gain_map(self, title: str, gain: np.ndarray, sure: np.ndarray | None, limit: float) -> str:
        """Return a figure of gain (y, x) in percent as HTML, with dots where it is significant.

        `sure` (y, x) is None if that was not tested. `limit` is the end of the scale of colours in percent.
        """
        # Where the gain is minus infinity, the reference is perfect and the forecast is not.
        level = _level(np.where(np.isneginf(gain), -limit, gain), (-limit, limit))
        if sure is not None:
            # On a small map, each significant point has a dot of a ninth of its area. On large or coarse maps, only one
            # point in nine may be a dot, as a whole: a dot in each point would double the bytes of a map.
            own = self.size == 1 and max(sure.shape) <= _DOTTED
            parts = np.ones((3, 3) if own else (1, 1), np.uint8)
            level, dotted = np.kron(level, parts), np.kron(sure, parts).astype(bool)
            level[1::3, 1::3][dotted[1::3, 1::3]] = _LEVELS + 1
        return self._figure(title, level, "RdBu", (-limit, limit), "%")

    def _figure(
        self, title: str, level: np.ndarray, palette: str, ends: tuple[float, float], units: str, cross: str = ""
    ) -> str:
        """Return the figure of a map from numbers of colours: the palette's, then missing, then black."""
        west, east = self.grid.longitude_bounds()[[0, -1]]
        north, south = self.grid.latitude_bounds()[[0, -1]]
        name = escape(title)
        drawn = (
            f"{self._image(_png(level, [*_colours(palette), _MISSING, (0, 0, 0)]))}"
            f'<use class="veil"/><use href="#coasts"/>{cross}'
        )
        if self.grid.wraps:
            # A map from 0 to 360 degrees would cut Europe and Africa in two. So it is drawn a second time, one turn
            # further west, and the middle of both is shown. The second map lies below, because its last column may
            # reach into the first map.
            west, east, number = west - 180, east - 180, next(self.numbers)
            drawn = f'<use href="#map{number}" x="-360"/><g id="map{number}">{drawn}</g>'
        box = f"{west:g} {-north:g} {east - west:g} {north - south:g}"
        picture = f'<svg viewBox="{box}" role="img" aria-label="{name}">{drawn}</svg>'
        legend = f'<p class="legend">{ends[0]:.3g} <i class="{palette}"></i> {ends[1]:.3g} {escape(units)}</p>'
        return f'<figure class="map"><figcaption>{name}</figcaption>{picture}{legend}</figure>'

    def _image(self, uri: str) -> str:
        """Return an image with one pixel a point of the maps. Its last row and column may reach beyond the grid."""
        (lat, lon), (rows, columns) = (self.grid.latitude, self.grid.longitude), self.grid.shape
        high, wide = np.ptp(lat) / max(rows - 1, 1), np.ptp(lon) / max(columns - 1, 1)
        y, x = -(-rows // self.size) * self.size, -(-columns // self.size) * self.size
        place = f'x="{lon[0] - wide / 2:g}" y="{-lat[0] - high / 2:g}" width="{x * wide:g}" height="{y * high:g}"'
        return f'<image {place} preserveAspectRatio="none" href="{uri}"/>'

    def _coasts(self) -> list[np.ndarray]:
        """Return the coasts as lines of longitude and latitude in degrees."""
        if self.land is None:
            return natural_coasts()
        from contourpy import contour_generator

        step = slice(self.size // 2, None, self.size)
        land, lat, lon = self.land[step, step], self.grid.latitude[step], self.grid.longitude[step]
        lines: Any = contour_generator(lon, lat, land).lines(0.5) if min(land.shape) > 1 else []
        return list(lines)


def natural_coasts() -> list[np.ndarray]:
    """Return the coasts of Natural Earth (1:110 million, `scripts/coasts.py`) as lines.

    A line (N, 2) holds longitude and latitude of its points, in degrees.
    """
    stored = np.load(Path(__file__).with_name("coasts.npz"))["points"]
    marker = np.iinfo(stored.dtype).max  # separates the lines
    ends = np.flatnonzero(stored[:, 0] == marker)
    return [line[line[:, 0] != marker] / 10 for line in np.split(stored, ends) if len(line) > 1]


def _colours(palette: str) -> list[tuple[int, int, int]]:
    """Return the colours of a palette as red, green and blue from 0 to 255."""
    from matplotlib import colormaps

    table = colormaps[palette](np.linspace(0, 1, _LEVELS), bytes=True)
    return [(int(r), int(g), int(b)) for r, g, b, _ in table]


def _level(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Return the number of the colour of each value, from 0 to `_LEVELS` - 1; `_LEVELS` for a missing value."""
    there = np.isfinite(values)
    share = (np.where(there, values, ends[0]) - ends[0]) / (ends[1] - ends[0])
    return np.where(there, np.clip(share * _LEVELS, 0, _LEVELS - 1), _LEVELS).astype(np.uint8)


def _png(indices: np.ndarray, colours: Sequence[tuple[int, ...]]) -> str:
    """Return an image with a palette as a data URI."""
    from PIL import Image

    image, out = Image.fromarray(np.ascontiguousarray(indices, np.uint8), "P"), io.BytesIO()
    image.putpalette([c for colour in colours for c in colour], "RGBA" if len(colours[0]) == 4 else "RGB")
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
