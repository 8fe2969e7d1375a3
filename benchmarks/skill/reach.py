"""Measure how far around a point the errors of an ensemble's mean can be foretold.

A linear map predicts the error of the mean at a point from the anomalies of all fields at all leads, at that point and
around it. It is fitted in closed form to the training dates, with one map for each of four latitudes, between which it
is interpolated; the southern hemisphere is mirrored. Rings of eight points are added to its inputs one after the other.
The point at distance h stands for the mean over a box of about h points. Inputs that lower the error hold what only a
network that looks so far can use. What no linear map can use, this does not show.

Errors are those of the validation dates. Their blocks form two halves, and the penalty by which each half is scored was
chosen on the other one.

Axes: B band, C channel (lead and field), D date, K input, P point of a ring, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.results import Claim, Figure
from ensemble_ml.fields import field
from ensemble_ml.store import TensorStore
from ensemble_ml.store.source import Part, Selection
from ensemble_ml.verification.bootstrap import blocks_of, draw_dates, interval

log = logging.getLogger(__name__)

DISTANCES = (1, 2, 4, 8, 16)  # grid points
_NODES = (0.0, 30.0, 60.0, 90.0)  # degrees from the equator
_PENALTIES = tuple(10.0**power for power in range(-6, 1))  # in mean variances of an input
_APART = 4  # of each row, every fourth point is used: neighbours say nearly the same


@dataclass(frozen=True, eq=False)
class Anomalies:
    """Anomalies of the mean of the first members, and its errors, in typical spreads.

    Attributes:
        store: the tensor store, without gaps.
        members: how many members make up the mean.
        mean: (C, Y, X) mean over the training dates.
        error: (C, Y, X) mean error of the members' mean on the training dates.
        typical: (C, 1, 1) root mean square of the spread.
    """

    store: TensorStore
    members: int
    mean: Tensor
    error: Tensor
    typical: Tensor

    @classmethod
    def of(cls, store: TensorStore, members: int, train: np.ndarray) -> Anomalies:
        """Compute the statistics of the dates `train`, indices (D,)."""
        sums = [torch.zeros(())] * 3
        for date in train.tolist():
            forecast, truth = _fields(store, members, date)
            mean = forecast.mean(0)
            parts = mean, truth - mean, forecast.var(0)
            sums = [total + part.double() for total, part in zip(sums, parts, strict=True)]
        mean, error, variance = (total / len(train) for total in sums)
        return cls(store, members, mean.float(), error.float(), variance.mean((1, 2), keepdim=True).sqrt().float())

    def at(self, date: int) -> tuple[Tensor, Tensor]:
        """Return anomalies and errors of an init time, (C, Y, X) each."""
        forecast, truth = _fields(self.store, self.members, date)
        mean = forecast.mean(0)
        return (mean - self.mean) / self.typical, (truth - mean - self.error) / self.typical


def measure(
    store: TensorStore, train: np.ndarray, validation: np.ndarray, members: int, bootstrap: int, block_days: int
) -> tuple[dict[str, Figure], list[Claim]]:
    """Return the error of the linearly corrected mean over that of the mean, for inputs up to each distance.

    Args:
        store: the tensor store, without gaps.
        train: (D,) indices of the init times to fit to.
        validation: (D,) indices of those to score.
        members: size of the reduced ensemble.
        bootstrap: draws.
        block_days: length of a block in days.

    Returns:
        Figures, which are geometric means over leads and fields with 95 % intervals over blocks of dates; and the claim
        that points beyond 3 x 3 lower the error.
    """
    anomalies = Anomalies.of(store, members, train)
    shape = _Shape.of(store)
    bands, area = shape.bands(), torch.from_numpy(store.layout.grid.area_weights()).float()[:, :1, None]
    left = right = torch.zeros(1, dtype=torch.float64)
    for number, date in enumerate(train.tolist()):
        inputs, errors = shape.samples(*anomalies.at(date), number % _APART)
        weighted = [((band[:, None, None] * area).sqrt(), band > 0) for band in bands]
        given = [[(values * root)[here].flatten(0, 1) for values in (inputs, errors)] for root, here in weighted]
        left = left + torch.stack([x.T @ x for x, _ in given])
        right = right + torch.stack([x.T @ y for x, y in given])
        if number % 20 == 0:
            log.info("reach: %d of %d training dates", number, len(train))
    channels = len(anomalies.typical)
    inputs_of = {0: channels, **{far: (9 + 8 * n) * channels for n, far in enumerate(DISTANCES)}}
    maps = {far: _fitted(left[:, :count, :count], right[:, :count]) for far, count in inputs_of.items()}
    raw, squares = [], []
    for number, date in enumerate(validation.tolist()):
        inputs, errors = shape.samples(*anomalies.at(date), number % _APART)
        raw.append((area * errors.square()).sum((0, 1)))
        squares.append(torch.stack([_squares_left(inputs, errors, of, bands, area) for of in maps.values()]))
    blocks = blocks_of(store.layout.init_time[validation], block_days)
    rows, columns = store.layout.grid.shape
    where = f"{rows} x {columns} points, {len(train)} training dates"
    return _figures(torch.stack(raw).numpy(), torch.stack(squares).numpy(), blocks, bootstrap, where)


def _figures(
    raw_DC: np.ndarray, squares_DSPC: np.ndarray, blocks: np.ndarray, bootstrap: int, where: str
) -> tuple[dict[str, Figure], list[Claim]]:
    """Return figures and claim from the sums of squares, without a map and by set of inputs (S) and penalty (P)."""
    halves = blocks % 2
    chosen = np.empty((*squares_DSPC.shape[:2], raw_DC.shape[1]))
    for half in (0, 1):
        mine = halves == half
        other = squares_DSPC[~mine].sum(0) if (~mine).any() else squares_DSPC.sum(0)
        best = (other / raw_DC.sum(0)).mean(2).argmin(1)  # one penalty for all fields
        chosen[mine] = squares_DSPC[mine][:, np.arange(len(best)), best]
    counts = np.vstack([np.ones(len(raw_DC)), draw_dates(blocks, bootstrap, 0)])
    ratios = np.sqrt(np.einsum("bd,dsc->bsc", counts, chosen) / np.einsum("bd,dc->bc", counts, raw_DC)[:, None])
    means = np.exp(np.log(ratios).mean(2))
    names = ["the point itself", *(f"points up to {far} away" for far in DISTANCES)]
    found = {}
    for name, values in zip(names, means.T, strict=True):
        one = interval(float(values[0]), values[1:], 0.95, int(blocks.max()) + 1)
        words = f"{where}: RMSE of the mean, linearly corrected by {name}, over that of the mean without its bias"
        found[words] = Figure(one.value, one.low, one.high, "ratio")
    best = int(means[0, 1:].argmin())
    gain = 100 * (1 - means[:, 1 + best] / means[:, 1])
    one = interval(float(gain[0]), gain[1:], 0.95, int(blocks.max()) + 1)
    words = f"{where}: RMSE of a linearly corrected mean with points up to {DISTANCES[best]} away below that with 3 x 3"
    sure = one.low if one.enough else math.nan
    claims = [Claim(words, one.value, "%", 1.0), Claim(f"{words}: lower end of the interval", sure, "%", 1e-9)]
    return found | {words: Figure(one.value, one.low, one.high, "%")}, claims


def _fitted(left_BKK: Tensor, right_BKC: Tensor) -> Tensor:
    """Return the maps for each penalty, (P, B, K, C)."""
    size = left_BKK.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(left_BKK.shape[1], dtype=torch.float64)
    return torch.stack([torch.linalg.solve(left_BKK + p * size, right_BKC) for p in _PENALTIES]).float()


def _squares_left(inputs_YXK: Tensor, errors_YXC: Tensor, maps_PBKC: Tensor, bands_BY: Tensor, area: Tensor) -> Tensor:
    """Return the squares of what the maps of each penalty leave of the errors, summed over points, (P, C)."""
    given = inputs_YXK[..., : maps_PBKC.shape[2]]
    found = []
    for maps in maps_PBKC:
        told = sum((given @ one) * band[:, None, None] for one, band in zip(maps, bands_BY, strict=True))
        found.append((area * (errors_YXC - told).square()).sum((0, 1)))
    return torch.stack(found)


@dataclass(frozen=True, eq=False)
class _Shape:
    """The grid: latitude (Y,), and the sign (C,) of each channel in the mirror at the equator."""

    latitude: Tensor
    sign: Tensor

    @classmethod
    def of(cls, store: TensorStore) -> _Shape:
        layout = store.layout
        names = [name for name in layout.variables for _ in layout.levels] + list(layout.surface)
        sign = torch.tensor([-1.0 if field(name).northward else 1.0 for name in names])
        return cls(torch.from_numpy(np.asarray(layout.grid.latitude, np.float32)), sign.repeat(len(_leads(store))))

    def bands(self) -> Tensor:
        """Return the share of each of `_NODES` in the map of each row, (B, Y); the shares of a row add up to one."""
        nodes = np.eye(len(_NODES))
        return torch.from_numpy(np.stack([np.interp(self.latitude.abs(), _NODES, one) for one in nodes])).float()

    def samples(self, anomalies_CYX: Tensor, errors_CYX: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return inputs (Y, X', K) and errors (Y, X', C) of every `_APART`-th point of a row, from `first` on."""
        rows = torch.arange(len(self.latitude))
        columns = torch.arange(first, anomalies_CYX.shape[2], _APART)
        south = self.latitude < 0
        turn = torch.where(south[:, None, None], self.sign, torch.ones_like(self.sign))
        points = torch.stack(list(_around(anomalies_CYX, rows, columns, south)))  # (P, C, Y, X')
        inputs = points.permute(2, 3, 0, 1) * turn[:, :, None]
        return inputs.flatten(2), errors_CYX[:, :, columns].permute(1, 2, 0) * turn


def _around(values_CYX: Tensor, rows: Tensor, columns: Tensor, south: Tensor) -> Iterator[Tensor]:
    """Yield the values at the points themselves, then those of each ring, (C, Y, X') each; the south is mirrored."""
    yield values_CYX[:, :, columns]
    height, width = values_CYX.shape[1:]
    for far in DISTANCES:
        half = far // 2
        # Beyond the poles, the last row is repeated: few points lie there.
        padded = F.pad(F.pad(values_CYX, (half, half), mode="circular")[None], (0, 0, half, half), mode="replicate")
        boxes = F.avg_pool2d(padded, 2 * half + 1, 1)[0]
        for down in (-far, 0, far):
            for right in (-far, 0, far):
                if down or right:
                    there = (rows + torch.where(south, -down, down)).clamp(0, height - 1)
                    yield boxes[:, there][:, :, (columns + right) % width]


def _fields(store: TensorStore, members: int, date: int) -> tuple[Tensor, Tensor]:
    """Return forecasts (M, C, Y, X) and the truth (C, Y, X) of an init time."""
    leads = _leads(store)
    first = store.layout.realization[:members]
    forecast = store.read(Part.FORECAST, date, Selection(realization=first, lead_hours=leads))
    truth = store.read(Part.TRUTH, date, Selection(lead_hours=leads))
    both = []
    for one in (forecast, truth):
        upper, surface = torch.from_numpy(one.pressure).flatten(2, 3), torch.from_numpy(one.surface)
        both.append(torch.cat([upper, surface], 2).flatten(1, 2))
    return both[0], both[1][0]


def _leads(store: TensorStore) -> tuple[int, ...]:
    return tuple(hour for hour in store.layout.lead_hours if hour > 0) or store.layout.lead_hours
