"""Confidence intervals from a block bootstrap over start dates.

Dates that follow each other are alike, so whole blocks are drawn. All scores, forecasts and differences use the same
draws, which makes differences paired. Künsch (1989), doi:10.1214/aos/1176347265.

Percentiles of the draws alone are too narrow where blocks are few (of 90 % intervals of five blocks 79 % hold the
truth): they are taken further out, as far as Student's t lies beyond the normal law. Hesterberg (2015), "expanded
percentile interval", doi:10.1080/00031305.2015.1089789.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from ensemble_ml.errors import UserError
from ensemble_ml.verification.checks import check_count

FEWEST_BLOCKS = 5  # with fewer, an interval says little: nothing is sure by it, and the report says so


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval; the ends are NaN where there is only one block.

    `blocks` is how many it rests on. Of two, the draws' extremes are the interval, which half of the time excludes no
    difference where there is none: below FEWEST_BLOCKS nothing counts as sure. `barred` is the side of a neutral value,
    -1 below or 1 above, that never does: who has more to go by than who it is compared with is not sure to be better.
    """

    value: float
    low: float
    high: float
    blocks: int = FEWEST_BLOCKS
    barred: int = 0

    @property
    def enough(self) -> bool:
        """Whether it rests on enough blocks to say anything."""
        return self.blocks >= FEWEST_BLOCKS

    def excludes(self, neutral: float) -> bool:
        """Whether the whole interval surely lies on one side of `neutral`."""
        return self.below(neutral) or self.above(neutral)

    def below(self, neutral: float) -> bool:
        """Whether the whole interval surely lies below `neutral`."""
        return self.enough and self.barred >= 0 and bool(self.high < neutral)

    def above(self, neutral: float) -> bool:
        """Whether the whole interval surely lies above `neutral`."""
        return self.enough and self.barred <= 0 and bool(self.low > neutral)

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of a monotonic function of the figure."""
        first, last = function(self.low), function(self.high)
        low, high = sorted((first, last))
        return Interval(function(self.value), low, high, self.blocks, -self.barred if last < first else self.barred)


def blocks_of(init_time: np.ndarray, block_days: float) -> np.ndarray:
    """Number the block of each start date.

    Blocks last `block_days` or more. A new one starts after every gap longer than `block_days`; what is left at the end
    of a run of dates joins the block before it if it is too short. A run that is shorter is a block of its own.

    Args:
        init_time: (D,) datetime64, ascending.
        block_days: days, above 0.

    Returns:
        (D,) int, ascending from 0.

    Raises:
        UserError: dates that do not ascend, or blocks without length.
    """
    if not block_days > 0:
        raise UserError(f"block_days={block_days}: must be above 0")
    if not (np.diff(init_time) > np.timedelta64(0, "s")).all():
        raise UserError("init_time: start dates must ascend, each once; sort them")
    days = init_time.astype("datetime64[s]").astype(np.int64) / 86400
    breaks = np.flatnonzero(np.diff(days) > block_days) + 1
    blocks: list[list[int]] = []
    for run in np.split(np.arange(len(days)), breaks):
        found = _blocks_of_run(days[run], block_days)
        blocks += [[int(run[0]) + date for date in block] for block in found]
    numbers = np.zeros(len(days), int)
    for number, block in enumerate(blocks):
        numbers[block] = number
    return numbers


def _blocks_of_run(days: np.ndarray, block_days: float) -> list[list[int]]:
    """Positions in each block of dates without a break; a block lasts until the next one starts."""
    blocks: list[list[int]] = []
    for date, day in enumerate(days):
        if not blocks or day - days[blocks[-1][0]] >= block_days:
            blocks.append([])
        blocks[-1].append(date)
    if len(blocks) > 1:
        first, last = blocks[-1][0], blocks[-1][-1]
        if days[last] - days[first] + np.median(np.diff(days)) < block_days:
            rest = blocks.pop()
            blocks[-1] += rest
    return blocks


def draw_dates(blocks: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Draw as many blocks as there are, with replacement, and count how often each date comes: (B, D) float."""
    check_count("draws", draws, 1, "an interval is made of draws")
    n = int(blocks.max()) + 1
    chosen = np.random.default_rng(seed).integers(0, n, size=(draws, n))
    counts = np.stack([(chosen == block).sum(1) for block in range(n)], axis=1)
    return counts[:, blocks].astype(np.float64)


def fewest_blocks(block: np.ndarray, known: np.ndarray, default: int) -> int:
    """The fewest blocks that a column of `known` (D, C) bool lies in: no interval of what depends on all columns is
    narrower than so many allow. `block` (D,) is that of each date; columns without a date do not count.
    """
    return min((len(np.unique(block[dates])) for dates in known.T if dates.any()), default=default)


def interval(value: float, draws: np.ndarray, confidence: float, blocks: int) -> Interval:
    """Expanded percentile interval of the draws (B,) of a figure; NaN ends where one block leaves nothing to draw."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence}: must lie between 0 and 1; 0.95 is usual")
    finite = draws[np.isfinite(draws)]
    if blocks < 2 or not len(finite) or not np.isfinite(value):
        return Interval(float(value), np.nan, np.nan, blocks)
    deviations = student.isf((1 - confidence) / 2, blocks - 1) * np.sqrt(blocks / (blocks - 1))
    tail = 100 * norm.sf(deviations)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(float(value), float(low), float(high), blocks)
