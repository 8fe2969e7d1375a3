"""Where on the map a difference is significant, with the rate of false discoveries controlled.

At each point the difference of two scores is averaged over blocks of start dates, which are taken as independent; a
t-test asks whether their mean is zero, and the procedure of Benjamini & Hochberg decides over all points together.
Wilks (2016), doi:10.1175/BAMS-D-15-00267.1, advises a rate of twice the wanted level where points are alike.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS

RATE = 0.1
_MOST_BLOCKS = 20  # bounds the memory of maps; longer blocks only make the test more careful


def merged(blocks: np.ndarray) -> np.ndarray:
    """Numbers of blocks (D,), neighbours joined so that there are 20 at most."""
    count = int(blocks.max()) + 1
    return blocks if count <= _MOST_BLOCKS else blocks * _MOST_BLOCKS // count


def p_values(differences: np.ndarray) -> np.ndarray:
    """Two-sided p of the mean of (block, ...) being zero; NaN with fewer than five blocks."""
    count = np.isfinite(differences).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(differences, 0) / count
        variance = np.nansum((differences - mean) ** 2, 0) / (count - 1)
        t = mean / np.sqrt(variance / count)
        found = 2 * stats.t.sf(np.abs(t), np.maximum(count - 1, 1))
    return np.where((count >= FEWEST_BLOCKS) & (variance > 0), found, np.nan)


def significant(p: np.ndarray) -> np.ndarray:
    """Which points are discoveries at `RATE` of false ones; NaN never is. Benjamini & Hochberg (1995)."""
    known = np.isfinite(p)
    ordered = np.sort(p[known])
    if not ordered.size:
        return np.zeros(p.shape, bool)
    passed = np.flatnonzero(ordered <= RATE * np.arange(1, ordered.size + 1) / ordered.size)
    return known & (p <= (ordered[passed[-1]] if passed.size else -1.0))
