"""Test where on a map a difference of two scores is significant, at a controlled rate of false discoveries.

At each point the difference is averaged within blocks of dates, which are taken as independent. A t-test asks whether
the mean of the blocks is zero. The procedure of Benjamini & Hochberg then decides over all points together, because a
test at 5 % at each of thousands of points would find differences everywhere.

Wilks (2016), doi:10.1175/BAMS-D-15-00267.1, advises a rate of twice the wanted level where neighbouring points are
alike. `RATE` is therefore 0.1.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS

RATE = 0.1
_MOST_BLOCKS = 20  # bounds the memory of maps; joining blocks only makes the test more conservative


def merged(blocks: np.ndarray) -> np.ndarray:
    """Join neighbouring blocks so that 20 remain at most.

    Args:
        blocks: (D,) number of the block of each date, ascending from 0.

    Returns:
        (D,) numbers of the joined blocks.
    """
    count = int(blocks.max()) + 1
    return blocks if count <= _MOST_BLOCKS else blocks * _MOST_BLOCKS // count


def p_values(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p-value of the hypothesis that the mean over blocks is zero.

    Args:
        differences: (block, ...) mean difference of two scores within each block; NaN where a block has none.

    Returns:
        (...) p-values; NaN with fewer than five blocks, or where the differences do not vary.
    """
    count = np.isfinite(differences).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(differences, 0) / count
        variance = np.nansum((differences - mean) ** 2, 0) / (count - 1)
        t = mean / np.sqrt(variance / count)
        found = 2 * stats.t.sf(np.abs(t), np.maximum(count - 1, 1))
    return np.where((count >= FEWEST_BLOCKS) & (variance > 0), found, np.nan)


def significant(p: np.ndarray) -> np.ndarray:
    """Return which points are discoveries, of which a fraction `RATE` may be false: bool, in the shape of `p`.

    The procedure is that of Benjamini & Hochberg (1995), doi:10.1111/j.2517-6161.1995.tb02031.x: sort the p-values and
    accept all up to the largest one that is at most its rank times `RATE` over the number of p-values.

    Args:
        p: p-values of any shape. NaN is never a discovery.
    """
    known = np.isfinite(p)
    ordered = np.sort(p[known])
    if not ordered.size:
        return np.zeros(p.shape, bool)
    passed = np.flatnonzero(ordered <= RATE * np.arange(1, ordered.size + 1) / ordered.size)
    return known & (p <= (ordered[passed[-1]] if passed.size else -1.0))
