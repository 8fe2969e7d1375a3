"""A linear correction of every field from all fields around: what errors have in common with departures nearby.

Axes: B date, C channel, O output, Y latitude, X longitude.

    d  = (m - anchor, (s_M - s_clim) (M-1) / (M-1+k)) / typical spread      of all fields and predicted leads
    d' = sum over bands of h_b (W0_b + W1_b / M) * d                       3 x 3 convolutions over (Y, X)

South of the equator d and d' are seen in a mirror that lies on it: rows run the other way and northward components
change their sign, in W as well. There cyclones turn as in the north, wind and pressure go together as they do there,
and what the hemispheres have in common is learned from both (laws of motion on a sphere are the same in the mirror).
h_b are hat functions of latitude between `NODES`, which add up to one: what moves with the wind differs between tropics
and extratropics, and between hemispheres of land and of sea.
anchor is the train dates' mean of m at the point. d' is added to the ensemble mean and to s1, in typical spreads. So a
mean is drawn to climate as far as its field and scale ask for (noise of small scales most), moved along where lead
times differ, and helped by other variables; at M = 1 the mean's own pattern says what spread to expect. W is fitted in
closed form (`training.linear_fit`), and stays as it is in training. Rows of one band, or of two, are all that a band's
convolution sees: the bands cost as much as two convolutions over the globe.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.place import hemisphere

NODES = tuple(range(-80, 81, 20))  # degrees north; beyond the last ones there is one band
TERMS = 2  # W0 and W1
KINDS = 2  # channels of means and of spreads; outputs for the mean and for the spread


def bands_of(latitude: np.ndarray) -> np.ndarray:
    """h_b, (N, Y): those hats between `NODES` that some row lies under."""
    hats = _hats(latitude)
    return hats[hats.any(1)]


def nested_bands(latitude: np.ndarray) -> list[list[list[int]]]:
    """Groups of those bands, finer and finer: all, those that the mirror shows in the same place, each."""
    nodes = np.array(NODES)[_hats(latitude).any(1)]
    every = range(len(nodes))
    alike = [np.flatnonzero(np.abs(nodes) == distance).tolist() for distance in np.unique(np.abs(nodes))]
    levels = [[list(every)], alike, [[band] for band in every]]
    # where all lie in the south the same groups come in the other order
    return levels[:1] + [level for before, level in pairwise(levels) if sorted(level) != sorted(before)]


def _hats(latitude: np.ndarray) -> np.ndarray:
    return np.stack([np.interp(latitude, NODES, unit) for unit in np.eye(len(NODES))])


def correction_shape(spec: ModelSpec) -> tuple[int, ...]:
    """(N, TERMS, O, C, 3, 3); without outputs and channels where there is no linear correction."""
    count = KINDS * len(spec.leads_out) * spec.fields if spec.linear else 0
    return len(bands_of(spec.grid.latitude)), TERMS, count, count, 3, 3


def of_channels(sign: Tensor) -> Tensor:
    """Of means `sign`, of spreads one: (C,)."""
    return torch.cat([sign, torch.ones_like(sign)])


class Piece(NamedTuple):
    """The rows of a band in one hemisphere: `first` to `last` - 1."""

    band: int
    south: bool
    first: int
    last: int


class LinearCorrection(nn.Module):
    """The convolutions; channels and outputs are (kind, field), fields first by lead, variable, level, then surface."""

    weight: Tensor
    bands: Tensor
    turn: Tensor  # (C,) what channels, which are outputs too, are multiplied by in the mirror
    south: Tensor  # (Y,) whether rows are seen in it
    pieces: list[Piece]

    def __init__(self, spec: ModelSpec, weight: np.ndarray):
        super().__init__()
        self.spec = spec
        finest = geometries(spec.grid, spec.config.pole, 0)[0]
        self.pad = Padder(finest, of_channels(spec.vector_sign(len(spec.leads_out)))[:, None])
        self.register_buffer("turn", of_channels(spec.mirror_sign(len(spec.leads_out))), persistent=False)
        self.register_buffer("weight", torch.from_numpy(np.asarray(weight, np.float32).copy()))
        bands = bands_of(spec.grid.latitude)
        self.register_buffer("bands", torch.from_numpy(bands)[..., None].float(), persistent=False)
        south = hemisphere(spec)[:, 0] < 0
        self.register_buffer("south", torch.from_numpy(south), persistent=False)
        self.pieces = []
        for (band, share), mirrored in product(enumerate(bands), (False, True)):
            rows = np.flatnonzero((share > 0) & (south == mirrored))
            if len(rows):
                self.pieces.append(Piece(band, mirrored, int(rows[0]), int(rows[-1]) + 1))

    def padded(self, departures_BCYX: Tensor) -> Tensor:
        """With a row and a column more on each side, (B, C, Y + 2, X + 2)."""
        return self.pad(departures_BCYX[..., None])[..., 0]

    def forward(self, padded: Tensor, count: Tensor) -> Tensor:
        """What `padded` gives, and M (B,) -> (B, O, Y, X)."""
        rows, columns = padded.shape[2] - 2, padded.shape[3] - 2
        found = padded.new_zeros(len(padded), self.weight.shape[2], rows, columns)
        for band, south, first, last in self.pieces:
            weight, share = self.weight[band].to(padded.dtype), self.bands[band]
            if south:
                weight = weight.flip(-2) * self.turn[:, None, None, None] * self.turn[:, None, None]
            for sample, members in enumerate(count):  # each has a kernel of its own
                departures = padded[sample : sample + 1, :, first : last + 2]
                added = F.conv2d(departures, weight[0] + weight[1] / members)[0]
                found[sample, :, first:last] += share[first:last] * added
        return found

    def at_points(self, near: Tensor, rows: Tensor, members: int) -> Tensor:
        """The same at single points, from their 3 x 3 neighbours (9 C, P) and the rows they lie in: (O, P). Points in
        the order of their rows take a third of the time of others."""
        near = self.neighbours_in_mirror(near, rows)
        found = near.new_zeros(self.weight.shape[2], near.shape[1])
        for weight, share in zip(self.weight, self.bands[:, rows, 0], strict=True):
            here = stretch((share > 0).nonzero()[:, 0])
            kernel = (weight[0] + weight[1] / members).flatten(1)
            found[:, here] += share[here] * (kernel @ near[:, here])
        return self.in_mirror(found, rows)

    def in_mirror(self, values: Tensor, rows: Tensor) -> Tensor:
        """Channels or outputs (C, P) of points in `rows` (P,), turned where these lie south of the equator."""
        return torch.where(self.south[rows], values * self.turn[:, None], values)

    def neighbours_in_mirror(self, near: Tensor, rows: Tensor) -> Tensor:
        """3 x 3 neighbours (9 C, P) of points in `rows` (P,), in the mirror where these lie south of the equator."""
        turned = near.unflatten(0, (-1, 3, 3)).flip(1) * self.turn[:, None, None, None]
        return torch.where(self.south[rows], turned.flatten(0, 2), near)


def stretch(points: Tensor) -> Tensor | slice:
    """Ascending indices (P,), as a slice where none is left out: what it takes is a view, and not a copy."""
    first, last = (int(points[0]), int(points[-1]) + 1) if len(points) else (0, 0)
    return slice(first, last) if last - first == len(points) else points


def departures(
    mean: Tensor, spread: Tensor, count: Tensor, anchor: Tensor, climatology: Tensor, shrink: Tensor, typical: Tensor
) -> Tensor:
    """d, (B, KINDS, ...); zero where there is no value.

    Args:
        mean, spread: (B, ...) of the members; `count` (B,) M.
        anchor, climatology: as one of the batch; `shrink` (k) and `typical` broadcast against them.
    """
    freedom = (count - 1).reshape(-1, *[1] * (mean.ndim - 1))
    apart = (mean - anchor) / typical
    more = freedom / (freedom + shrink) * (spread - climatology) / typical
    found = torch.stack([apart, more.expand_as(apart)], 1)
    return torch.where(torch.isnan(found), 0.0, found)
