"""A linear correction of the mean and the spread of every field by all fields at the 3 x 3 points around each point.

The correction is a convolution over latitude and longitude, with weights that vary with latitude:

    d   = ((m - m_clim) / u, (s - s_clim) (M-1) / (M-1+k) / u)
    d'  = sum over b of h_b (W0_b + W1_b / M) * d

    m        mean of the M members
    s        spread of the M members
    m_clim   climatological mean of m at the cell, over training dates (`anchor` in the code)
    s_clim   climatological spread at the cell
    u        typical spread of the field: one number for each lead, variable and level
    k        weight of the climatology, as a number of members (`shrink` in the code)
    d        anomalies of all fields at all predicted leads
    d'       correction of the ensemble mean and of s1, in units of u
    h_b      latitude basis function b; all of them add up to one at each latitude
    W0, W1   kernels of 3 x 3 points; their product with d is a convolution

Each basis function is 1 at one of the latitudes `NODES` and falls linearly to 0 at the next nodes. They are needed
because errors are related to anomalies differently in the tropics than in the extratropics, and differently in the land
hemisphere than in the ocean hemisphere.

South of the equator, d and d' are mirrored at the equator: rows run the other way, and northward components change
their sign. Cyclones then rotate as in the north, and wind is related to pressure as in the north, because the equations
of motion on a sphere are the same in the mirror. So one set of weights can be fitted to both hemispheres.

The correction pulls the mean towards climatology, more or less by field and scale. It shifts patterns whose position
changes between lead times, and it uses the other variables. With one member, the pattern of the mean tells which spread
to expect. The weights W are fitted in closed form (`training.linear_fit`) and stay fixed in training.

At each latitude at most two basis functions are above zero, and each convolution runs over the rows of its own function
alone. So all of them together cost at most as much as two convolutions over the globe.

Axes: B initialisation time, C channel, O output, P point, N basis function, Y latitude, X longitude.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec, hemisphere
from ensemble_ml.models.padding import Padder, geometries

NODES = tuple(range(-80, 81, 20))  # degrees north; poleward of the outermost nodes, their function stays 1
TERMS = 2  # W0 and W1
KINDS = 2  # mean and spread: both are channels, and both are outputs


def bands_of(latitude: np.ndarray) -> np.ndarray:
    """Return the latitude basis functions h_b that are above zero at one of the latitudes (Y,), (N, Y)."""
    triangles = _triangles(latitude)
    return triangles[triangles.any(1)]


def nested_bands(latitude: np.ndarray) -> list[list[list[int]]]:
    """Return groups of the basis functions at the latitudes (Y,), level by level, from coarse to fine.

    The first level has one group of all functions. The second has one group for each distance from the equator. The
    last has one group for each function. A level that equals the one before it is left out. The groups hold indices
    into `bands_of(latitude)`.
    """
    nodes = np.array(NODES)[_triangles(latitude).any(1)]
    every = range(len(nodes))
    # Nodes at the same distance from the equator coincide when the south is mirrored.
    alike = [np.flatnonzero(np.abs(nodes) == distance).tolist() for distance in np.unique(np.abs(nodes))]
    levels = [[list(every)], alike, [[band] for band in every]]
    # Levels are compared without regard to order: on a grid in the south, the second level has the groups of the third
    # in reverse order.
    return levels[:1] + [level for before, level in pairwise(levels) if sorted(level) != sorted(before)]


def _triangles(latitude: np.ndarray) -> np.ndarray:
    """Return the basis functions of all `NODES` at each latitude, (nodes, Y)."""
    return np.stack([np.interp(latitude, NODES, unit) for unit in np.eye(len(NODES))])


def correction_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of W, (N, TERMS, O, C, 3, 3); O and C are zero if the model has no linear correction."""
    count = KINDS * len(spec.leads_out) * spec.fields if spec.linear else 0
    return len(bands_of(spec.grid.latitude)), TERMS, count, count, 3, 3


def of_channels(sign: Tensor) -> Tensor:
    """Return the signs of all channels, (C,): those of the means, (T F,), then 1 for each spread."""
    return torch.cat([sign, torch.ones_like(sign)])


def departure_padder(spec: ModelSpec) -> Padder:
    """Return the layer that pads anomalies d, (B, C, Y, X, 1), by a row and a column on each side."""
    sign = of_channels(spec.vector_sign(len(spec.leads_out)))[:, None]
    return Padder(geometries(spec.grid, spec.config.pole, 0)[0], sign)


class Piece(NamedTuple):
    """The rows of one basis function in one hemisphere, `first` to `last` - 1; `band` is the number of the function."""

    band: int
    south: bool
    first: int
    last: int


class LinearCorrection(nn.Module):
    """The convolutions of the correction.

    Channels and outputs are ordered by (kind, lead, field), with `KINDS` kinds. `weight` is W.
    """

    weight: Tensor
    bands: Tensor
    turn: Tensor  # (C,) factor of each channel, and of the output of the same number, in the mirror
    south: Tensor  # (Y,) True for rows that are mirrored
    pieces: list[Piece]

    def __init__(self, spec: ModelSpec, weight: np.ndarray):
        super().__init__()
        self.spec = spec
        self.pad = departure_padder(spec)
        self.register_buffer("turn", of_channels(spec.mirror_sign(len(spec.leads_out))), persistent=False)
        self.register_buffer("weight", torch.from_numpy(np.asarray(weight, np.float32).copy()))
        bands = bands_of(spec.grid.latitude)
        self.register_buffer("bands", torch.from_numpy(bands)[..., None].float(), persistent=False)
        south = hemisphere(spec)[:, 0] < 0
        self.register_buffer("south", torch.from_numpy(south), persistent=False)
        self.pieces = []
        # A basis function that spans the equator is split there, because its rows in the south use mirrored weights.
        for (band, share), mirrored in product(enumerate(bands), (False, True)):
            rows = np.flatnonzero((share > 0) & (south == mirrored))
            if len(rows):
                self.pieces.append(Piece(band, mirrored, int(rows[0]), int(rows[-1]) + 1))

    def padded(self, departures_BCYX: Tensor) -> Tensor:
        """Pad anomalies d, (B, C, Y, X), by a row and a column on each side, (B, C, Y + 2, X + 2)."""
        return self.pad(departures_BCYX[..., None])[..., 0]

    def forward(self, padded: Tensor, count: Tensor) -> Tensor:
        """Compute the correction d' of fields, in typical spreads, (B, O, Y, X), from the result of `padded`."""
        rows, columns = padded.shape[2] - 2, padded.shape[3] - 2
        found = padded.new_zeros(len(padded), self.weight.shape[2], rows, columns)
        for band, south, first, last in self.pieces:
            weight, share = self.weight[band].to(padded.dtype), self.bands[band]
            if south:
                # Mirroring the kernel equals mirroring the rows, and needs no copy of the field.
                weight = weight.flip(-2) * self.turn[:, None, None, None] * self.turn[:, None, None]
            for sample, members in enumerate(count):  # the kernel depends on M, which differs between samples
                departures = padded[sample : sample + 1, :, first : last + 2]
                added = F.conv2d(departures, weight[0] + weight[1] / members)[0]
                found[sample, :, first:last] += share[first:last] * added
        return found

    def at_points(self, near: Tensor, rows: Tensor, members: int) -> Tensor:
        """Compute the correction d' at single points, in typical spreads, (O, P).

        With points in the order of their rows it takes a third of the time, because `stretch` then gives views.

        Args:
            near: (9 C, P) anomalies at the 3 x 3 points around each point.
            rows: (P,) the row of each point.
            members: M.
        """
        near = self.neighbours_in_mirror(near, rows)
        found = near.new_zeros(self.weight.shape[2], near.shape[1])
        for weight, share in zip(self.weight, self.bands[:, rows, 0], strict=True):
            here = stretch((share > 0).nonzero()[:, 0])
            kernel = (weight[0] + weight[1] / members).flatten(1)
            found[:, here] += share[here] * (kernel @ near[:, here])
        return self.in_mirror(found, rows)

    def in_mirror(self, values: Tensor, rows: Tensor) -> Tensor:
        """Multiply channels or outputs (C, P) by their sign in the mirror at points south of the equator.

        `rows` (P,) are the rows of the points.
        """
        return torch.where(self.south[rows], values * self.turn[:, None], values)

    def neighbours_in_mirror(self, near: Tensor, rows: Tensor) -> Tensor:
        """Mirror the 3 x 3 neighbours (9 C, P) of those points, in the rows (P,), that lie south of the equator."""
        # Here the rows of the neighbourhood are flipped instead of those of the kernel, so that points of both
        # hemispheres share one matrix product.
        turned = near.unflatten(0, (-1, 3, 3)).flip(1) * self.turn[:, None, None, None]
        return torch.where(self.south[rows], turned.flatten(0, 2), near)


def stretch(points: Tensor) -> Tensor | slice:
    """Return ascending indices (P,) as a slice if they are consecutive, else unchanged.

    Indexing with a slice gives a view; indexing with a tensor copies.
    """
    first, last = (int(points[0]), int(points[-1]) + 1) if len(points) else (0, 0)
    return slice(first, last) if last - first == len(points) else points


def departures(
    mean: Tensor, spread: Tensor, count: Tensor, anchor: Tensor, climatology: Tensor, shrink: Tensor, typical: Tensor
) -> Tensor:
    """Return the anomalies d that the linear correction reads.

    Args:
        mean: (B, ...) mean of the members.
        spread: (B, ...) spread of the members.
        count: (B,) M.
        anchor: (...) climatological mean.
        climatology: (...) s_clim.
        shrink: k, broadcast against `climatology`.
        typical: typical spread u, broadcast against `climatology`.

    Returns:
        d, (B, KINDS, ...), in typical spreads; zero where there is no value.
    """
    freedom = (count - 1).reshape(-1, *[1] * (mean.ndim - 1))
    apart = (mean - anchor) / typical
    # The anomaly of the spread is shrunk by the same factor as in s0 and s1. With one member it is zero.
    more = freedom / (freedom + shrink) * (spread - climatology) / typical
    found = torch.stack([apart, more.expand_as(apart)], 1)
    # A missing value counts as a climatological one, so its neighbours still get a correction.
    return torch.where(torch.isnan(found), 0.0, found)
