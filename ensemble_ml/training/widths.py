"""Measures calibration factors of sigma for other numbers of members than `data.validation_members`.

The factors of the latest validation are for that number alone. Their ratios for other numbers are measured with each
model that is the best so far, because a network itself learns a part of this dependence.

Axes: B initialisation time, T lead, F field (variables and levels, then surface variables).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.config import DataConfig
from ensemble_ml.loading import Batch, Reader
from ensemble_ml.training.climate_data import FEWEST_TO_WIDEN, spaced
from ensemble_ml.training.validation import Validation

log = logging.getLogger(__name__)

_DATES_A_SIZE = 12  # validation dates that are scored for each number of members


def widths_by_size(
    data: DataConfig,
    reader: Reader,
    dates: np.ndarray,
    batches: Callable[[np.ndarray, Sequence[int]], Iterable[tuple[int, Batch]]],
    scores: Callable[[Iterable[tuple[int, Batch]], Sequence[int]], Mapping[int, Validation]],
) -> dict[str, list[list[float]]]:
    """Measure the calibration factors for several numbers of members, relative to those of the validation.

    Args:
        data: `data` of the settings.
        reader: the reader of the run.
        dates: indices of the validation dates.
        batches: returns from dates and numbers M the batches of the dates' first M members, as (M, batch).
        scores: returns from these batches and numbers M the scores for each M.

    Returns:
        Ratios (T, F) by number of members, for the numbers that enough validation dates have; empty if there is only
        one such number, if the model does not predict the truth, or if these dates give no factors.
    """
    full = reader.most
    usual = min(data.validation_members, full)
    # All numbers of members are compared on the same dates, so a date needs as many members as the largest number.
    there = np.array([len(reader.shown(int(date))) for date in dates])
    asked = sorted({usual, *(size for size in data.members if size <= full)})
    sizes = [size for size in asked if (there >= max(size, usual)).sum() >= FEWEST_TO_WIDEN]
    if len(sizes) < 2 or not reader.spec.config.postprocess:
        return {}
    if sizes != asked:
        few = "calibration: fewer than %d validation dates have more than %d members, so these share factors"
        log.info(few, FEWEST_TO_WIDEN, sizes[-1])
    chosen = spaced(np.asarray(dates)[there >= max(sizes[-1], usual)], _DATES_A_SIZE)
    measured = scores(batches(chosen, sizes), sizes)
    found = {size: one.widths for size, one in measured.items() if one.widths is not None}
    return beside_usual(found, usual) if usual in found else {}


def beside_usual(widths: Mapping[int, list[list[float]]], usual: int) -> dict[str, list[list[float]]]:
    """Divide the factors (T, F) of each number of members by those of `usual`; one where either is unknown."""
    here = torch.tensor(widths[usual], dtype=torch.float64)
    found = {}
    for members, values in widths.items():
        there = torch.tensor(values, dtype=torch.float64)
        # A factor of exactly one stands for "unknown" (`validation._Sums.roots`).
        found[str(members)] = torch.where((here == 1) | (there == 1), 1.0, there / here).tolist()
    return found


def widths_for(count: Tensor, by_size: Mapping[str, list[list[float]]]) -> Tensor:
    """Interpolate the ratios of `beside_usual` to other numbers of members `count`, (B,).

    Their logarithm is linear in 1/M between known numbers, and constant beyond them.

    Returns:
        (B, T, F) ratios, by which the calibration factors of the validation are multiplied.
    """
    sizes = sorted(map(int, by_size), reverse=True)
    logs = torch.tensor([by_size[str(size)] for size in sizes], device=count.device).log()
    if len(sizes) == 1:
        return logs.exp().expand(len(count), -1, -1)
    # Sizes are sorted from large to small, so that 1/M ascends, which `searchsorted` needs.
    known, at = 1 / torch.tensor(sizes, device=count.device), 1 / count.float()
    right = torch.searchsorted(known, at.contiguous()).clamp(1, len(known) - 1)
    share = ((at - known[right - 1]) / (known[right] - known[right - 1])).clamp(0, 1)
    return torch.lerp(logs[right - 1], logs[right], share[:, None, None]).exp()


def filled(widths: list[list[float]] | None, before: list[list[float]] | None) -> list[list[float]] | None:
    """Return the calibration factors `widths`, (T, F), with those of `before` where they are one.

    A factor of exactly one means that too few validation dates have the field.
    """
    if widths is None or before is None:
        return widths
    return [[b if a == 1 else a for a, b in zip(*rows, strict=True)] for rows in zip(widths, before, strict=True)]
