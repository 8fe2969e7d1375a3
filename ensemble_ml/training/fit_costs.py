"""Predicts how long the fits before the first step take, from measured times to read a date and to multiply matrices.

    T = [n t + (f + p) / r16 + g / r32 + h / r64] / ranks

    n                samples that are read (a date with M members)
    t                seconds to read a sample
    f                operations of the linear correction's products of predictors
    p                operations to train the point network
    g                operations to correct whole fields
    h                operations to solve for the linear correction
    r16, r32, r64    operations a second of matrix products here, in bfloat16 (where the CPU has it), float32, float64
    ranks            ranks that share all of it

The counts follow from the settings (`work_of`). Measuring the speeds takes some seconds (`predicted_seconds`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from ensemble_ml.loading import Reader
from ensemble_ml.models.linear import TERMS, correction_shape, nested_bands
from ensemble_ml.models.points import point_shapes
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.training import climate_fit, linear_fit, linear_sums, point_fit, point_targets, truth_fit
from ensemble_ml.training.climate_data import Dates, most_dates, spaced
from ensemble_ml.wording import duration

_BACK_AND_FORTH = 3  # matrix products a layer in training: one forward, two backward
_TRIED = 2  # dates that are timed
_TRIANGLE = 0.6  # fraction of a symmetric product that `linear_sums` computes


@dataclass(frozen=True)
class Work:
    """The amount of work of the fits.

    Attributes:
        samples: n, samples that are read.
        sums: f, operations of the products of predictors.
        points: p, operations to train the point network.
        fields: g, operations to correct whole fields.
        solved: h, operations to solve for the linear correction.
    """

    samples: int
    sums: float
    points: float
    fields: float
    solved: float


def work_of(reader: Reader, train: np.ndarray, validation: np.ndarray, sizes: list[int]) -> Work:
    """Count the work of the fits of a run whose training samples have `sizes` members."""
    spec, cells = reader.spec, reader.spec.grid.shape[0] * reader.spec.grid.shape[1]
    fields = len(spec.leads_out) * spec.fields
    dates = len(spaced(train, most_dates(spec)))
    held_out = len(validation) or dates // 5
    sample, unseen = min(climate_fit.SAMPLE_DATES, dates), min(climate_fit.SAMPLE_DATES, held_out)
    samples, sums, points, solved = sample * (1 + len(sizes)) + unseen, 0.0, 0.0, 0.0
    fields_done = 0.0
    whole = 0.0  # operations of all corrections before the U-Net on the whole fields of one date
    if spec.linear:
        _, _, outputs, channels, _, _ = correction_shape(spec)
        predictors, levels = 9 * channels, nested_bands(spec.grid.latitude)
        shown = min(linear_sums.SIZES, len(sizes))
        choices, looked_at, _ = linear_sums.looked_at(cells, predictors, dates)
        tried = min(linear_fit.VALIDATION_DATES, held_out)
        samples += dates * shown * choices + tried * len(levels)
        seen = 2.0 * dates * shown * choices * looked_at  # each point lies under two latitude basis functions
        sums = seen * 2 * _TRIANGLE * predictors**2
        candidates = sum(1 + len(linear_fit.penalties_of(groups)) for groups in levels)
        fields_done = (2 * seen + 4.0 * tried * candidates * looked_at) * predictors * outputs
        solutions = sum(len(groups) * len(linear_fit.penalties_of(groups)) for groups in levels)
        solved = solutions * ((TERMS * predictors) ** 3 / 3 + 4.0 * (TERMS * predictors) ** 2 * outputs)
        whole = 4.0 * cells * predictors * outputs
    # The point network reads its own points, and is then tried on validation dates. With a truth, its loss needs an
    # error and a sigma as well.
    first, second = point_shapes(spec).values()
    if first[0]:
        weights = first[0] * first[1] + second[0] * second[1]
        arrays = [1, 2] if spec.config.postprocess else [1]
        choices, each = point_fit.pool_size(cells, first, fields, arrays, dates)
        batch, a_pass, passes = point_fit.steps_of(each * dates * choices)
        samples += dates * choices + min(point_targets.VALIDATION_DATES, held_out)
        samples += min(truth_fit.VALIDATION_DATES, held_out) * spec.config.postprocess
        points = 2.0 * _BACK_AND_FORTH * weights * batch * a_pass * passes
        whole += 2.0 * cells * weights
    again = sample * len(sizes)  # dates whose whole fields are corrected
    if spec.config.postprocess:
        widths = unseen * (2 if first[0] else 1)
        samples += sample + dates + widths
        again += sample + dates + widths
    return Work(samples, sums, points, fields_done + again * whole, solved)


def predicted_seconds(reader: Reader, work: Work, ranks: int, members: int) -> float:
    """Predict how many seconds the fits take if all ranks are as fast as this process. Measuring takes some seconds."""
    dates = Dates(reader, members)
    tried = min(_TRIED, len(reader.source.layout.init_time))
    began = time.perf_counter()
    for date in range(tried):
        dates.sample(date)
    read = (time.perf_counter() - began) / tried
    single, double = _operations_a_second(torch.float32), _operations_a_second(torch.float64)
    # Without bfloat16 on the CPU, the sums and the network run in float32.
    half = _operations_a_second(torch.bfloat16) if has_bfloat16(torch.device("cpu")) else single
    seconds = work.samples * read + (work.sums + work.points) / half + work.fields / single + work.solved / double
    return seconds / ranks


def _operations_a_second(dtype: torch.dtype) -> float:
    """Measure the operations a second of a product of matrices about as large as those of the fits."""
    a, b = torch.rand(1024, 2048).to(dtype), torch.rand(2048, 1024).to(dtype)
    a @ b  # the first call also allocates memory and chooses a kernel
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - began)
    return 2.0 * 1024 * 2048 * 1024 / sorted(taken)[2]


def describe_fits(reader: Reader, work: Work, ranks: int, members: int) -> str:
    """Describe how long the fits will take."""
    seconds = predicted_seconds(reader, work, ranks, members)
    share = f" on {ranks} ranks as fast as this process, each with its part of the dates" if ranks > 1 else ""
    return f"Fits before the first step: about {duration(seconds)}{share}; kept for other runs in OUTPUT/.fits"
