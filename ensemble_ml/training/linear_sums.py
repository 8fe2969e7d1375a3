"""Computes the sums from which the linear correction is solved (`training.linear_fit`).

They are products of predictors with themselves and with the targets, summed over points of all training dates, for each
of up to three ensemble sizes.

Axes: O output, P point, K predictor (a channel at one of nine offsets), N latitude basis function, T lead, F field,
C channel, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.heads import Heads
from ensemble_ml.models.linear import stretch
from ensemble_ml.models.model import Start
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.training.climate_data import Dates, Sample

SIZES = 3  # most ensemble sizes that are fitted at once
_MOST_OPERATIONS = 2e13  # bound on the operations of the sums: on large grids they take random points of each date
_MANY_OPERATIONS = 1e11  # above this, predictors are rounded to bfloat16 if the CPU has it, which is faster
_BLOCKS = 6  # blocks of rows of a symmetric product, each computed without the columns right of its diagonal block
_CHOICES = 4  # most choices of a date's members: the first members, then random ones
_LEAST_RATIO, _LARGEST_RATIO = 0.2, 5.0  # bounds of spread / s_clim, so that no point outweighs all others
_TINY = 1e-12

Targets = Callable[[int, Sample, int], tuple[Tensor, Tensor]]


class Rows:
    """A source of predictors and targets of single dates, mirrored south of the equator (`models.linear`).

    The errors to predict are those of `targets` (see `linear_fit.fit_linear`).
    """

    def __init__(self, start: Start, dates: Dates, targets: Targets, train: np.ndarray):
        assert start.linear is not None
        self.start, self.linear, self.dates, self.targets = start, start.linear, dates, targets
        grid = dates.spec.grid
        # Roots of the areas: predictors and targets are both multiplied by them, so their products get the areas.
        self.weights = torch.from_numpy(grid.area_weights()).float().sqrt().flatten()
        self.columns = grid.shape[1]
        self.bands = self.linear.bands[..., 0]  # (N, Y)
        predictors = 9 * self.linear.weight.shape[3]
        self.choices, self.points, operations = looked_at(len(self.weights), predictors, len(train))
        self.rounded = operations > _MANY_OPERATIONS and has_bfloat16(torch.device("cpu"))

    def __call__(
        self, date: int, members: int, chosen: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return predictors and targets of a date from M of its members: those at `chosen`, by default the first ones.

        Both are multiplied by the root of the weight of their point.

        Returns:
            Predictors (K, P) and targets (O, P) in typical spreads, which targets exist (O, P), and the roots of the
            weights (P,).
        """
        sample = self.dates.of(members).sample(int(date), chosen)
        at = self._at(int(date))
        heads, rows = self.start.heads, at // self.columns
        near = neighbourhoods(self.start.anomalies(*sample.batch(members)[:3])[0], at)
        near = self.linear.neighbours_in_mirror(near, rows)
        errors = torch.stack(self.targets(int(date), sample, members)) / heads.typical[..., None, None]
        wanted = self.linear.in_mirror(errors.flatten(3).flatten(0, 2).index_select(1, at), rows)
        # Generalised least squares: an error counts relative to how large the spread is on this date at this point.
        weights = (self.weights / relative_spread(heads, sample, members).flatten())[at]
        there = torch.isfinite(wanted)
        return near * weights, torch.where(there, wanted, 0.0) * weights, there, weights

    def drawn(self, date: int, size: int, draw: np.random.Generator) -> list[np.ndarray | None]:
        """Return the choices of `size` members of a date with which it enters the sums.

        These are None for the first members, then positions of random ones.
        """
        choices = self.choices if size < self.dates.reader.full_size else 1  # all members are a single choice
        return [None, *(self.dates.drawn(date, size, draw) for _ in range(choices - 1))]

    def shares(self, date: int, groups: Sequence[Sequence[int]]) -> list[tuple[Tensor | slice, Tensor]]:
        """Return for each group of basis functions its points on a date, and the root of the sum of its functions."""
        rows = self._at(int(date)) // self.columns
        found: list[tuple[Tensor | slice, Tensor]] = []
        for group in groups:
            root = self.bands[group].sum(0).sqrt()[rows]
            points = stretch((root > 0).nonzero()[:, 0])
            found.append((points, root[points]))
        return found

    def _at(self, date: int) -> Tensor:
        """Return which points of a date the sums take, row by row, so that those of a basis function are contiguous."""
        if self.points == len(self.weights):
            return torch.arange(self.points)
        # The date is the seed of the points, so that all ensemble sizes see the same points of a date.
        draw = torch.Generator().manual_seed(date)
        return torch.randperm(len(self.weights), generator=draw)[: self.points].sort().values


def relative_spread(heads: Heads, sample: Sample, members: int) -> Tensor:
    """Return the ratio of the prior spread to s_clim, as a geometric mean over leads and fields, (Y, X).

    The ratio of each field is first bounded by `_LEAST_RATIO` and `_LARGEST_RATIO`. A field without a value counts as
    if it had the climatological spread.
    """
    # The prior spread is used, because one member has no spread of its own, and that of two members is mostly noise.
    s0 = heads.base_spread(*sample.batch(members)[1:3])[0]
    ratio = (s0 / heads.climatology.clamp(min=_TINY)).clamp(_LEAST_RATIO, _LARGEST_RATIO)
    return ratio.log().nan_to_num(0.0).mean((0, 1)).exp()


def looked_at(cells: int, predictors: int, dates: int) -> tuple[int, int, float]:
    """Return how many choices of members, and how many of the `cells` points of each date, the sums take.

    Returns:
        Choices of a date's members, points of each choice, and operations of the sums over all dates.
    """
    budget = _MOST_OPERATIONS / (2 * predictors**2 * SIZES * dates)  # points a date; two functions overlap at each
    choices = int(min(_CHOICES, max(1, budget // cells)))  # more points help more than more choices
    points = int(min(cells, max(1, budget / choices)))
    return choices, points, _MOST_OPERATIONS / budget * points * choices


def neighbourhoods(padded: Tensor, at: Tensor) -> Tensor:
    """Return the values at the 3 x 3 points around the points with indices `at` (P,) into Y X, (9 C, P).

    The fields (C, Y + 2, X + 2) are padded by one on each side.
    """
    columns, wide = padded.shape[2] - 2, padded.shape[2]
    corner = at // columns * wide + at % columns
    offsets = torch.tensor([row * wide + column for row in range(3) for column in range(3)])
    near = padded.flatten(1).index_select(1, (offsets[:, None] + corner).flatten())  # six times as fast as indexing
    return near.view(len(offsets) * len(padded), -1)


@dataclass(eq=False)
class Sums:
    """The sums for each ensemble size and latitude basis function.

    If a target exists at some points only, its sums are scaled up to all points. If it exists nowhere, they are zero.

    Attributes:
        terms: (size, TERMS): 1, and 1/M - centre.
        gram: (size, N, K, K) products of predictors with themselves.
        right: (size, N, K, O) products of predictors with targets.
        weight: (size, N) sums of the weights of the points.
    """

    terms: Tensor
    gram: Tensor
    right: Tensor
    weight: Tensor

    def of(self, group: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the sums of a group of basis functions, once for all outputs that have targets at the same sizes.

        Yields:
            For predictors times each of the terms: their products with themselves (TERMS K, TERMS K) and with the
            targets (TERMS K, O); and which of all outputs have targets at these sizes, (O,).
        """
        weight, cross = self.weight[:, group], self.right[:, group]
        # If some basis functions of the group have no target, the sums of the others are scaled up to the whole group.
        share = (weight[..., None] * cross.any(2)).sum(1) / weight.sum(1)[:, None]  # (size, O)
        cross = cross.sum(1) / share.clamp(min=_TINY)[:, None]
        for sizes in (share > 0).unique(dim=1).T:
            if not sizes.any():
                continue
            gram, right = torch.zeros(()), torch.zeros(())
            for size in sizes.nonzero()[:, 0]:
                terms = self.terms[size]
                own = reduce(torch.add, (self.gram[size][band] for band in group))
                # The predictors of the two terms are the same anomalies times 1 and times 1/M - centre. So their
                # products are Kronecker products of a 2 x 2 matrix with the products of the anomalies, which are summed
                # only once.
                gram = gram + torch.kron(torch.outer(terms, terms), own)
                right = right + torch.kron(terms[:, None], cross[size])
            yield gram, right, ((share > 0) == sizes[:, None]).all(0)


def sums_of(rows: Rows, train: np.ndarray, sizes: list[int], centre: float) -> Sums:
    """Compute the sums over the training dates of all ranks.

    Each date enters them once for each of the ensemble `sizes`; `centre` is the mean of 1/M over these.
    """
    outputs, channels = rows.linear.weight.shape[2:4]
    count, predictors = len(rows.bands), 9 * channels
    draw, shown = np.random.default_rng(0), list(enumerate(sizes))
    sums = Sums(
        torch.tensor([[1.0, 1 / size - centre] for size in sizes], dtype=torch.float64),
        torch.zeros(len(sizes), count, predictors, predictors, dtype=torch.float64),
        torch.zeros(len(sizes), count, predictors, outputs, dtype=torch.float64),
        torch.zeros(len(sizes), count, dtype=torch.float64),
    )
    # Where a variable has no value, its predictors are zero and its target is absent. Products of a predictor with a
    # target are scaled up from the points at which both exist to all points of the predictor. Products of two
    # predictors need no scaling. This is not exact if a target is absent where a masked predictor is correlated with
    # another one.
    masked = bool(rows.dates.spec.masked)
    apart = predictors if masked else 1
    absent = torch.zeros(len(sizes), count, apart, outputs, dtype=torch.float64)
    seen = torch.zeros(len(sizes), count, apart, dtype=torch.float64)
    # Choices are drawn before the dates are divided among ranks, so they do not depend on the number of ranks.
    asked = [(int(date), place, rows.drawn(int(date), size, draw)) for date, (place, size) in product(train, shown)]
    for date, place, drawn in rows.dates.progress.over("linear correction: sums", rows.dates.team.mine(asked)):
        for chosen in drawn:
            near, wanted, there, weights = rows(date, sizes[place], chosen)
            whole = bool(there.all())
            for band, (points, root) in enumerate(rows.shares(date, [[band] for band in range(count)])):
                here, aim = near[:, points] * root, wanted[:, points] * root
                with _rounded(rows.rounded):
                    _add_product(sums.gram[place, band], here)
                sums.right[place, band] += here @ aim.T
                counts = (weights[points] * root).double() ** 2
                sums.weight[place, band] += counts.sum()
                if masked:  # then `seen` needs every date, even one with complete targets
                    some = (near[:, points] != 0).double() * counts
                    seen[place, band] += some.sum(1)
                    absent[place, band] += some @ (~there[:, points]).double().T
                elif not whole:
                    absent[place, band] += ((~there[:, points]).double() @ counts)[None]
    rows.dates.team.add_up(sums.gram, sums.right, sums.weight, absent, seen)
    # Only the lower triangle was summed in full.
    for gram in sums.gram.flatten(0, 1):
        gram.copy_(gram.tril() + gram.tril(-1).T)
    seen = seen if masked else sums.weight[..., None]
    sums.right /= (1 - absent / seen[..., None].clamp(min=_TINY)).clamp(min=_TINY)
    return sums


@contextmanager
def _rounded(wanted: bool) -> Iterator[None]:
    """If `wanted`, let float32 products round their factors to bfloat16 and sum in float32.

    The sums stay positive semidefinite, because both factors are the same rounded predictors.
    """
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _add_product(total: Tensor, values: Tensor) -> None:
    """Add values (K, P) times their transpose to `total` (K, K): the lower triangle, and parts of the upper one."""
    ends = [len(values) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    for first, last in pairwise(ends):
        total[first:last, :last] += values[first:last] @ values[:last].T
