"""Estimate confidence intervals by a block bootstrap over initialisation times, and test differences on maps.

Forecasts on consecutive dates are correlated, so whole blocks of dates are drawn (Künsch 1989,
doi:10.1214/aos/1176347265). All scores, forecasts and differences use the same draws, which makes the differences
paired.

Plain percentiles of the draws are too narrow where blocks are few: of 90 % intervals made from five blocks, only 79 %
contain the truth (tests/verification/test_aggregation.py). The percentiles are therefore moved outwards, as far as
Student's t reaches beyond the normal distribution. This is the "expanded percentile interval" of Hesterberg (2015),
doi:10.1080/00031305.2015.1089789.

`significant` tests where on a map a difference of two scores is significant, at a controlled rate of false discoveries.
At each point the difference is averaged within blocks of dates, which are taken as independent. A t-test asks whether
the mean of the blocks is zero. The procedure of Benjamini & Hochberg then decides over all points together, because a
test at 5 % at each of thousands of points would find differences everywhere.

Wilks (2016), doi:10.1175/BAMS-D-15-00267.1, advises a rate of twice the wanted level where neighbouring points are
alike. `RATE` is therefore 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_count

FEWEST_BLOCKS = 5  # with fewer blocks an interval says little: nothing counts as sure, and the report says so
RATE = 0.1  # of false discoveries
_MOST_BLOCKS = 20  # bounds the memory of maps; joining blocks only makes the test more conservative


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval.

    With two blocks the interval spans the extremes of the draws. Half of such intervals exclude zero where there is no
    difference at all. Below FEWEST_BLOCKS nothing therefore counts as sure.

    Attributes:
        value: The estimate.
        low: Lower end; NaN where it is unknown, as with only one block.
        high: Upper end; NaN where it is unknown, as with only one block.
        blocks: Number of blocks that the interval rests on.
        barred: Side of a neutral value (-1 below, 1 above, 0 none) on which nothing counts as sure. So a forecast that
            had more input than its competitor is never surely better.
    """

    value: float
    low: float
    high: float
    blocks: int = FEWEST_BLOCKS
    barred: int = 0

    @property
    def enough(self) -> bool:
        """Return whether the interval rests on enough blocks to support a conclusion."""
        return self.blocks >= FEWEST_BLOCKS

    def excludes(self, neutral: float) -> bool:
        """Return whether the whole interval surely lies on one side of `neutral`: 0 for a difference, 1 for a ratio."""
        return self.below(neutral) or self.above(neutral)

    def below(self, neutral: float) -> bool:
        """Return whether the whole interval surely lies below `neutral`."""
        return self.enough and self.barred >= 0 and bool(self.high < neutral)

    def above(self, neutral: float) -> bool:
        """Return whether the whole interval surely lies above `neutral`."""
        return self.enough and self.barred <= 0 and bool(self.low > neutral)

    def map(self, function: Callable[[float], float]) -> Interval:
        """Return the interval of a decreasing function of the value, which swaps the two ends and the barred side."""
        return Interval(function(self.value), function(self.high), function(self.low), self.blocks, -self.barred)


def blocks_of(init_time: np.ndarray, block_days: float) -> np.ndarray:
    """Return the number of the block that each initialisation time belongs to, (D,) ascending from 0.

    Blocks last `block_days` or more. A new block starts after every gap that is longer than `block_days`. A remainder
    at the end of a run of dates joins the block before it if it is too short. A run shorter than `block_days` is a
    block of its own.

    Args:
        init_time: (D,) datetime64, ascending.
        block_days: Least length of a block in days, above 0.

    Raises:
        UserError: The dates do not ascend or one occurs twice, or `block_days` is not above 0.
    """
    if not block_days > 0:
        raise UserError(f"block_days={block_days}: must be above 0")
    if not (np.diff(init_time) > np.timedelta64(0, "s")).all():
        raise UserError("init_time: init times must ascend, each once; sort them")
    days = init_time.astype("datetime64[s]").astype(np.int64) / 86400
    starts = np.zeros(len(days), int)
    for run in np.split(np.arange(len(days)), np.flatnonzero(np.diff(days) > block_days) + 1):
        starts[run[_starts_of_blocks(days[run], block_days)]] = 1
    return starts.cumsum() - 1


def _starts_of_blocks(days: np.ndarray, block_days: float) -> list[int]:
    """Return the positions at which blocks start, of the dates of a run without gaps.

    A block lasts until the next one starts. The last block has no successor, so it is taken to last until one median
    distance after its last date.
    """
    starts: list[int] = []
    for date, day in enumerate(days):
        if not starts or day - days[starts[-1]] >= block_days:
            starts.append(date)
    # A short rest joins the block before it. As a block of its own it would be drawn as often as the others, and its
    # few dates would weigh too much.
    if len(starts) > 1 and days[-1] - days[starts[-1]] + np.median(np.diff(days)) < block_days:
        starts.pop()
    return starts


def draw_dates(blocks: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Draw as many blocks as there are, with replacement, and count how often each date occurs, (B, D) float.

    Args:
        blocks: (D,) number of the block of each date.
        draws: Number of draws B.
        seed: Seed of the random generator. Equal seeds give equal draws for all scores, which keeps differences paired.

    Raises:
        UserError: `draws` is below one or no whole number.
    """
    check_count("draws", draws, 1, "an interval is made of draws")
    n = int(blocks.max()) + 1
    chosen = np.random.default_rng(seed).integers(0, n, size=(draws, n))
    # A draw is stored as counts of dates. The mean of a draw is then a product of matrices with the sums by date.
    counts = np.stack([(chosen == block).sum(1) for block in range(n)], axis=1)
    return counts[:, blocks].astype(np.float64)


def fewest_blocks(block: np.ndarray, known: np.ndarray, default: int) -> int:
    """Return the smallest number of blocks that any column of `known` lies in.

    A quantity that depends on all columns is no more certain than its least known column, so this number bounds its
    interval. Columns without a date do not count.

    Args:
        block: (D,) number of the block of each date.
        known: (D, C) bool, true where a column has a value on a date.
        default: The result if no column has a date.
    """
    return min((len(np.unique(block[dates])) for dates in known.T if dates.any()), default=default)


def interval(value: float, draws: np.ndarray, confidence: float, blocks: int) -> Interval:
    """Return the expanded percentile interval of a value from its bootstrap draws.

    Args:
        value: The estimate from all dates.
        draws: (B,) the estimate from each draw.
        confidence: Probability that the interval should contain the truth, between 0 and 1.
        blocks: Number of blocks that the value depends on.

    Returns:
        The interval. Its ends are NaN where there are fewer than two blocks, no finite draw, or no finite value.

    Raises:
        UserError: `confidence` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence}: must lie between 0 and 1; 0.95 is usual")
    finite = draws[np.isfinite(draws)]
    if blocks < 2 or not len(finite) or not np.isfinite(value):
        return Interval(float(value), np.nan, np.nan, blocks)
    tail = _tail(confidence, blocks)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(float(value), float(low), float(high), blocks)


@lru_cache(maxsize=256)  # a report has thousands of intervals of few numbers of blocks
def _tail(confidence: float, blocks: int) -> float:
    """Return the percentile of the draws, from 0 to 50, that is the lower end of an interval.

    A bootstrap of n blocks underestimates the variance by the factor (n - 1) / n, and its draws have the tails of a
    normal distribution instead of Student's t. Percentiles further out correct both (Hesterberg 2015).
    """
    deviations = student.isf((1 - confidence) / 2, blocks - 1) * np.sqrt(blocks / (blocks - 1))
    return float(100 * norm.sf(deviations))


def merged(blocks: np.ndarray) -> np.ndarray:
    """Join neighbouring blocks, given as (D,) numbers ascending from 0, so that 20 remain at most."""
    count = int(blocks.max()) + 1
    return blocks if count <= _MOST_BLOCKS else blocks * _MOST_BLOCKS // count


def p_values(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p-value of the hypothesis that the mean over blocks is zero, (...).

    It is NaN with fewer than five blocks, or where the differences do not vary.

    Args:
        differences: (block, ...) mean difference of two scores within each block; NaN where a block has none.
    """
    count = np.isfinite(differences).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(differences, 0) / count
        variance = np.nansum((differences - mean) ** 2, 0) / (count - 1)
        t = mean / np.sqrt(variance / count)
        found = 2 * student.sf(np.abs(t), np.maximum(count - 1, 1))
    return np.where((count >= FEWEST_BLOCKS) & (variance > 0), found, np.nan)


def significant(p: np.ndarray) -> np.ndarray:
    """Return which of the p-values (...) are discoveries, of which a fraction `RATE` may be false, (...) bool.

    The procedure is that of Benjamini & Hochberg (1995), doi:10.1111/j.2517-6161.1995.tb02031.x: sort the p-values and
    accept all up to the largest one that is at most its rank times `RATE` over the number of p-values. NaN is never a
    discovery.
    """
    known = np.isfinite(p)
    ordered = np.sort(p[known])
    if not ordered.size:
        return np.zeros(p.shape, bool)
    passed = np.flatnonzero(ordered <= RATE * np.arange(1, ordered.size + 1) / ordered.size)
    return known & (p <= (ordered[passed[-1]] if passed.size else -1.0))
