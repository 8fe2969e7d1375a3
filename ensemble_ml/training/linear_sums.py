"""Sums that the linear correction of `models.linear` is solved from (`linear_fit`): products of predictors with
themselves and with the targets, over points of all training dates as several ensemble sizes see them.

Axes: O output, P point, K predictor (a channel at one of nine offsets), N band of latitude, T lead, F field,
Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.linear import stretch
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.training.climate_data import Dates, Sample

if TYPE_CHECKING:
    from ensemble_ml.training.linear_fit import Linear

SIZES = 3  # of ensembles, at most
_MOST_OPERATIONS = 2e13  # of the sums: on large grids a random part of the points
_MANY_OPERATIONS = 1e11  # from which on the processor's bfloat16 is worth its rounding of predictors
_BLOCKS = 6  # a product with itself is symmetric: of so many blocks of rows, those columns that are not known yet
_CHOICES = 4  # of members a date, at most: the first, then random ones
_TINY = 1e-12

Targets = Callable[[int, Sample, int], tuple[Tensor, Tensor]]


class Rows:
    """Predictors (K, P), targets (O, P) of a date seen by M members, in the mirror south of the equator, each times the
    root of what its point counts for; which targets are there, (O, P); these roots, (P,)."""

    def __init__(self, linear: Linear, dates: Dates, targets: Targets, train: np.ndarray):
        self.linear, self.dates, self.targets = linear, dates, targets
        grid = dates.spec.grid
        self.weights = torch.from_numpy(grid.area_weights()).float().sqrt().flatten()
        self.columns = grid.shape[1]
        self.bands = linear.module.bands[..., 0]  # (N, Y)
        predictors = 9 * linear.module.weight.shape[3]
        self.choices, self.points, operations = looked_at(len(self.weights), predictors, len(train))
        self.rounded = operations > _MANY_OPERATIONS and has_bfloat16(torch.device("cpu"))

    def __call__(
        self, date: int, members: int, chosen: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sample = self.dates.of(members).sample(int(date), chosen)
        at = self._at(int(date))
        module, rows = self.linear.module, at // self.columns
        near = neighbourhoods(self.linear.padded(sample.mean, sample.spread, members)[0], at)
        near = module.neighbours_in_mirror(near, rows)
        errors = torch.stack(self.targets(int(date), sample, members)) / self.linear.typical
        wanted = module.in_mirror(self.linear.ordered(errors).flatten(1).index_select(1, at), rows)
        weights = (self.weights / self.linear.relative(sample.spread, members).flatten())[at]
        there = torch.isfinite(wanted)
        return near * weights, torch.where(there, wanted, 0.0) * weights, there, weights

    def drawn(self, date: int, size: int, draw: np.random.Generator) -> list[np.ndarray | None]:
        """Return the choices of `size` members of a date that are looked at: the first members (None), then random
        ones."""
        choices = self.choices if size < self.dates.reader.full_size else 1  # there is but one choice of all
        return [None, *(self.dates.drawn(date, size, draw) for _ in range(choices - 1))]

    def shares(self, date: int, groups: Sequence[Sequence[int]]) -> list[tuple[Tensor | slice, Tensor]]:
        """For each group of bands, which of a date's points lie in it, and the root of its share of them."""
        rows = self._at(int(date)) // self.columns
        found: list[tuple[Tensor | slice, Tensor]] = []
        for group in groups:
            root = self.bands[group].sum(0).sqrt()[rows]
            points = stretch((root > 0).nonzero()[:, 0])
            found.append((points, root[points]))
        return found

    def _at(self, date: int) -> Tensor:
        """Which points of a date are looked at, from row to row: those of a band lie side by side."""
        if self.points == len(self.weights):
            return torch.arange(self.points)
        draw = torch.Generator().manual_seed(date)
        return torch.randperm(len(self.weights), generator=draw)[: self.points].sort().values


def looked_at(cells: int, predictors: int, dates: int) -> tuple[int, int, float]:
    """Return how many choices of a date's members the sums see, how many of the `cells` points of each, and the
    operations that this takes."""
    budget = _MOST_OPERATIONS / (2 * predictors**2 * SIZES * dates)  # points a date, each under two hats
    choices = int(min(_CHOICES, max(1, budget // cells)))  # points not seen yet say more
    points = int(min(cells, max(1, budget / choices)))
    return choices, points, _MOST_OPERATIONS / budget * points * choices


def neighbourhoods(padded: Tensor, at: Tensor) -> Tensor:
    """Values (C, Y + 2, X + 2) at 3 x 3 points around each point of `at`, indices into Y X: (9 C, P)."""
    columns, wide = padded.shape[2] - 2, padded.shape[2]
    corner = at // columns * wide + at % columns
    offsets = torch.tensor([row * wide + column for row in range(3) for column in range(3)])
    near = padded.flatten(1).index_select(1, (offsets[:, None] + corner).flatten())  # a sixth of the time of [:, ...]
    return near.view(len(offsets) * len(padded), -1)


@dataclass(eq=False)
class Sums:
    """For each ensemble size and band, products of predictors with themselves, and with the targets: as if all were
    there where some are, zero where none is; and what its points count for."""

    terms: Tensor  # (size, TERMS): 1 and 1/M - centre
    gram: Tensor  # (size, N, K, K)
    right: Tensor  # (size, N, K, O)
    weight: Tensor  # (size, N)

    def of(self, group: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Those of a group of bands: for outputs (bool (O,)) whose targets the same sizes know, of these sizes and of
        predictors times each of the terms, (TERMS K, TERMS K) and (TERMS K, O)."""
        weight, cross = self.weight[:, group], self.right[:, group]
        share = (weight[..., None] * cross.any(2)).sum(1) / weight.sum(1)[:, None]  # (size, O)
        cross = cross.sum(1) / share.clamp(min=_TINY)[:, None]
        for sizes in (share > 0).unique(dim=1).T:
            if not sizes.any():
                continue
            gram, right = torch.zeros(()), torch.zeros(())
            for size in sizes.nonzero()[:, 0]:
                terms = self.terms[size]
                own = reduce(torch.add, (self.gram[size][band] for band in group))
                gram = gram + torch.kron(torch.outer(terms, terms), own)
                right = right + torch.kron(terms[:, None], cross[size])
            yield gram, right, ((share > 0) == sizes[:, None]).all(0)


def sums_of(rows: Rows, train: np.ndarray, sizes: list[int], centre: float) -> Sums:
    """The sums over the dates `train`, each seen by every one of `sizes`; `centre` is the mean of 1/M over these."""
    outputs, channels = rows.linear.module.weight.shape[2:4]
    count, predictors = len(rows.bands), 9 * channels
    draw, shown = np.random.default_rng(0), list(enumerate(sizes))
    sums = Sums(
        torch.tensor([[1.0, 1 / size - centre] for size in sizes], dtype=torch.float64),
        torch.zeros(len(sizes), count, predictors, predictors, dtype=torch.float64),
        torch.zeros(len(sizes), count, predictors, outputs, dtype=torch.float64),
        torch.zeros(len(sizes), count, dtype=torch.float64),
    )
    # Where a variable has no value, its predictors are zero and its target is absent: a product is taken for one of all
    # points of the predictor by their share for which there is a target. (That of two predictors with each other is of
    # the points of both: not exact for an absent target where a masked predictor and another hang together.)
    masked = bool(rows.dates.spec.masked)
    apart = predictors if masked else 1
    absent = torch.zeros(len(sizes), count, apart, outputs, dtype=torch.float64)
    seen = torch.zeros(len(sizes), count, apart, dtype=torch.float64)
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
                if masked:  # which all dates have to count
                    some = (near[:, points] != 0).double() * counts
                    seen[place, band] += some.sum(1)
                    absent[place, band] += some @ (~there[:, points]).double().T
                elif not whole:
                    absent[place, band] += ((~there[:, points]).double() @ counts)[None]
    rows.dates.team.add_up(sums.gram, sums.right, sums.weight, absent, seen)
    for gram in sums.gram.flatten(0, 1):
        gram.copy_(gram.tril() + gram.tril(-1).T)
    seen = seen if masked else sums.weight[..., None]
    sums.right /= (1 - absent / seen[..., None].clamp(min=_TINY)).clamp(min=_TINY)
    return sums


@contextmanager
def _rounded(wanted: bool) -> Iterator[None]:
    """Where `wanted`, products of float32 take their factors as bfloat16 and add up in float32. A product of rounded
    predictors with themselves is still one of some predictors, so what is solved stays positive definite."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _add_product(total: Tensor, values: Tensor) -> None:
    """Add values (K, P) times their transpose to the lower triangle of `total` (K, K); above it, some of it."""
    ends = [len(values) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    for first, last in pairwise(ends):
        total[first:last, :last] += values[first:last] @ values[:last].T
