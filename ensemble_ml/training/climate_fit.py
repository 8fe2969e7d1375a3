"""Fit what the training dates say before any network is trained: scales, climatological spread, bias and inflation.

    s_clim^2   = mean over dates of S^2                     (smoothed if there are few dates)
    s0^2       = ((M - 1) s^2 + k s_clim^2) / (M - 1 + k)
    k          = the value with the largest likelihood of y given s0
    bias       = s_clim shrunk_mean((y - m_N) / s_clim)     (`smoothing`)
    inflation  = log(c sqrt(shrunk_mean((y - m - bias' - linear)^2 / s0^2)))

    m, s        mean and spread of the first M members
    m_N, S      mean and spread of all members
    y           truth
    s0          prior spread, of which sigma is a multiple; with a linear correction it follows s1 + linear
                (`models.heads`). Without a truth, k is the value with the smallest RMSE of s1 against S.
    s1          full spread expected from M members (`features.unbiased_spread`); its k has the smallest RMSE on the
                validation dates; it is 2 without such dates, for M = 1, and for a field that all of them lack
    bias'       bias without the date itself
    linear      ridge regression of y - m - bias and S - s1 on all fields around the point (`linear_fit`)
    c           factor of each field with the smallest CRPS of its own distribution

Two more fits follow. a and b of `models.heads` say how much and how often the truth is above zero where the corrected
mean is not. The point network (`point_targets`) predicts what is left of S, the error of the mean, and its size.

c is chosen on dates to which neither linear correction nor point network is fitted: the validation dates, or a fifth of
the training dates if there are none. It thereby allows for heavy tails and for zeros. The CRPS that remains is the
scale of the loss. The inflation is fitted to residuals without their own date in the bias. Otherwise the bias would fit
some of the noise, and sigma would be too small.

Dates are read one at a time: at most `most_dates` of them, evenly spaced. Several ranks share them (`progress.Team`).

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.loading.reader import Reader
from ensemble_ml.machine import free_memory
from ensemble_ml.models import Climate, ModelSpec
from ensemble_ml.models.model import Start
from ensemble_ml.models.points import point_shapes
from ensemble_ml.store import TensorStore
from ensemble_ml.store.las import local_statistics
from ensemble_ml.store.source import Fields
from ensemble_ml.store.statistics import Moments
from ensemble_ml.training.climate_data import FEWEST_TO_WIDEN, Dates, field_names, kept_apart, most_dates, spaced
from ensemble_ml.training.linear_fit import fit_linear, mean_state, refuse_unfittable, telling
from ensemble_ml.training.point_targets import fit_points
from ensemble_ml.training.progress import NETWORK, Progress, Team
from ensemble_ml.training.smoothing import Scales
from ensemble_ml.training.spread_fit import Spread, fit_climatology, fit_spread, spread_errors
from ensemble_ml.training.truth_fit import Left, Truth

log = logging.getLogger(__name__)

SAMPLE_DATES = 24  # this suffices for a fit of one number a field
_KEPT_SHARE = 0.25  # of free memory; sums and points of the fits need the rest
_DRY_DATES = 10  # this suffices for how often and how much it rains, because each date has many dry points
_WIDTH, _WIDTH_AGAIN = "calibration factors of sigma", "calibration factors with the network"  # names of stages


@dataclass(eq=False)
class Fit:
    """The result of the fits: the model's climate, and numbers that only the training needs.

    Attributes:
        climate: all arrays that the model is built with.
        spread_error: (N + 1, T_out, F), row M holds the mean squared error of the full spread as the untrained model
            predicts it from M members. It is the scale of the spread loss. Rows of sizes that were not asked for
            repeat that of `members`.
        input_range: (F, 2), smallest and largest value of the inputs.
        seconds: time that the fit took.
    """

    climate: Climate
    spread_error: np.ndarray
    input_range: np.ndarray
    seconds: float


def fit_climate(
    reader: Reader,
    train: Sequence[int] | np.ndarray,
    validation: Sequence[int] | np.ndarray,
    members: int,
    sizes: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
    team: Team | None = None,
) -> Fit:
    """Fit everything that `Climate` holds on the dates `train`.

    The validation dates choose k of s1, the penalties of the ridge regression, the fractions of the point network, the
    width of sigma, and a and b of `models.heads`. Without validation dates, held-out training dates choose all of these
    but k (`kept_apart`).

    Args:
        reader: reads the store.
        train: indices of the training dates.
        validation: indices of the validation dates.
        members: M, the number of members of a date whose mean and spread are corrected.
        sizes: numbers of members that the training will draw.
        seed: seed of the point network and of the points that it is fitted to.
        progress: shows how far the fits are, and limits their time.
        team: the ranks that call this together, with the same arguments. All get the same result, except for the last
            bits if their processors differ.

    Raises:
        UserError: a field is missing on all training dates, no date has `members` complete members, or the sums of the
            linear correction would not fit in memory.
    """
    team = team or Team()
    # A fit that does not fit into memory is refused before anything is read.
    refuse_unfittable(reader.spec, team.on_host)
    began = time.monotonic()
    reader = _from_memory(reader, team)
    dates, scales = Dates(reader, members, seed, progress, team), Scales(reader.spec.grid)
    dates.progress.begin(_stages(reader.spec))
    all_train, chosen = np.asarray(train), spaced(np.asarray(train), most_dates(reader.spec))
    if not any(len(reader.shown(int(date))) >= dates.members for date in chosen):
        raise UserError(
            f"data.validation_members={members}: no training date of {reader.source.path} has so many whole members;"
            " give fewer, or other dates"
        )
    sample = spaced(all_train, SAMPLE_DATES)
    moments = dates.input_moments(all_train)
    _tell_of_constants(reader.spec, moments)
    climatology = fit_climatology(dates, chosen, scales, moments.std)
    some = dates.of(max(1, min(dates.members, reader.full_size - 1)))  # all members would leave no spread to predict
    spread = fit_spread(some, sample, spaced(np.asarray(validation, int), SAMPLE_DATES), climatology, scales)
    # The terms were fitted with at most all but one of the members. From here on, M is the usual number again.
    spread = replace(spread, members=dates.members)
    truth = Truth(dates, spread, scales, chosen) if reader.spec.config.postprocess else None
    anchor = mean_state(dates, chosen) if _has_anchor(reader.spec) else torch.zeros_like(climatology)
    static = _static(reader)
    fitted_on = chosen, np.asarray(validation, int), sizes
    start = _start(dates, *fitted_on, spread, truth, anchor, static) if reader.spec.linear else None
    arrays: dict[str, Tensor | np.ndarray] = {
        **_truth_terms(dates, truth, sample, *fitted_on),
        "anchor": anchor, "spread": climatology, "mean": moments.mean, "std": moments.std,
        "shrink": spread.shrink, "spread_shrink": spread.full_shrink, "spread_gain": spread.gain,
        "spread_level": spread.level, "level_spread": dates.level_spread(sample),
    }  # fmt: skip
    found = {name: np.asarray(values, np.float32) for name, values in arrays.items()}
    if reader.spec.local:
        found |= _maps(reader, chosen)
    log.info("climate: fitted on %d of %d training dates, %d members", len(chosen), len(all_train), dates.members)
    climate = replace(Climate.default(reader.spec), static=static, **found, **_weights(start))
    extremes = np.stack([moments.minimum, moments.maximum], -1)
    errors = spread_errors(dates, sample, spread, scales, sizes).numpy()
    return Fit(climate, errors, extremes, time.monotonic() - began)


def _tell_of_constants(spec: ModelSpec, moments: Moments) -> None:
    """Warn of fields that have one value in all members, training dates and points."""
    extremes = zip(field_names(spec), moments.minimum, moments.maximum, strict=True)
    if found := [f"{name} ({low:g})" for name, low, high in extremes if low == high]:
        log.warning("%s: the same in all members, training dates and points; is the archive whole?", ", ".join(found))


def _from_memory(reader: Reader, team: Team) -> Reader:
    """Return a reader whose tensor store keeps the bytes that it reads, up to a share of the free memory."""
    source = reader.source
    if not isinstance(source, TensorStore):
        return reader
    return reader.over(source.keeping(int(_KEPT_SHARE * free_memory()) // team.on_host))


def _has_anchor(spec: ModelSpec) -> bool:
    """Return whether the model takes departures from the training mean at the point."""
    return spec.linear or spec.config.departures


def _stages(spec: ModelSpec) -> list[str]:
    """Return the names of the stages of the fits, in order, for the display of the progress."""
    stages = ["moments of the inputs", "climatological spread", "terms of the spread"]
    truth, network = spec.config.postprocess, point_shapes(spec)["points_first"][0] > 0
    stages += ["bias"] * truth + ["mean state"] * _has_anchor(spec)
    if spec.linear:
        stages += ["linear correction: sums", "linear correction: penalties"]
    if truth:
        stages += ["shrinkage of the spread", "inflation", _WIDTH]
    if network:
        stages += [f"{NETWORK}{part}" for part in (": points", "", ": shares")]
        stages += [f"{NETWORK}: shares of errors", _WIDTH_AGAIN] * truth
    return [*stages, "errors of the spread"]


def _start(
    dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int], spread: Spread,
    truth: Truth | None, anchor: Tensor, static: np.ndarray,
) -> Start:  # fmt: skip
    """Fit what is added to mean and spread before the U-Net, and let `spread` use it."""
    spec = dates.spec
    climate = replace(
        Climate.default(spec), static=static, spread=spread.climatology.numpy(), shrink=spread.shrink.numpy(),
        spread_shrink=spread.full_shrink.numpy(), anchor=anchor.numpy(),
    )  # fmt: skip
    start, targets = Start(spec, climate), Left(truth, spread)
    fit_linear(start, dates, train, validation, sizes, targets)
    # With a truth the point network comes later: the loss of errors needs the width of the distribution.
    if start.points is not None and truth is None:
        fit_points(start, dates, train, validation, sizes, targets, None)
    spread.start = start
    return start


def _weights(start: Start | None) -> dict[str, np.ndarray]:
    """Return the weights of linear correction and point network by their names in `Climate`, where there are any."""
    if start is None or start.linear is None:
        return {}
    found = {"correction": start.linear.weight.numpy()}
    if start.points is not None:
        found |= {f"points_{name}": getattr(start.points, name).numpy() for name in ("first", "second")}
    return found


def _maps(reader: Reader, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return mean and deviation of each point, for local area-wise standardisation (LAS)."""
    spec = reader.spec
    maps = local_statistics(
        reader.source, chosen, leads=spec.leads_in, variables=spec.variables, levels=spec.levels, surface=spec.surface
    )
    pairs = {"mean": Fields(maps.mean_p, maps.mean_s), "std": Fields(maps.std_p, maps.std_s)}
    return {name: fields.joined().astype(np.float32) for name, fields in pairs.items()}


def _static(reader: Reader) -> np.ndarray:
    """Return the static fields, (n_static, Y, X) float32."""
    planes, names = reader.source.static(), reader.spec.static
    return np.stack([planes[n] for n in names]) if names else np.zeros((0, *reader.spec.grid.shape), np.float32)


def _truth_terms(
    dates: Dates, truth: Truth | None, sample: np.ndarray, train: np.ndarray, validation: np.ndarray,
    sizes: Sequence[int],
) -> dict[str, Tensor]:  # fmt: skip
    """Return bias and inflation (T, F, Y, X), the CRPS that remains (T, F), and a and b of `models.heads` (T, F).

    Without a truth, these are zeros, and ones for the CRPS and for a.
    """
    if truth is None:
        nothing = torch.zeros(*dates.shape, *dates.spec.grid.shape)
        one, zero = torch.ones(dates.shape), torch.zeros(dates.shape)
        return {"bias": nothing, "inflation": nothing, "error": one, "dry_share": one, "dry_mean": zero}
    truth.tell_of_zeros(sample)
    spread = truth.spread
    spread.shrink = truth.likeliest_shrink(sample)
    chosen_by = kept_apart(train, telling(dates, Left(truth, spread), validation, kinds=(0,)))[1]
    unseen = spaced(chosen_by, SAMPLE_DATES)
    inflation, error = _widened(truth, truth.inflation(), unseen, sample, _WIDTH)
    some = spaced(unseen, _DRY_DATES)
    truth.learn_dry(inflation, some)
    # With the point network the errors are smaller, so the width of sigma is fitted again.
    if truth.learn_points(inflation, train, validation, sizes):
        inflation, error = _widened(truth, inflation, unseen, sample, _WIDTH_AGAIN)
        truth.learn_dry(inflation, some)  # the network changes which points are dry
    dry_share, dry_mean = truth.dry
    return {
        "bias": truth.whole_bias, "inflation": inflation, "error": error, "dry_share": dry_share, "dry_mean": dry_mean,
    }  # fmt: skip


def _widened(
    truth: Truth, inflation: Tensor, unseen: np.ndarray, sample: np.ndarray, stage: str
) -> tuple[Tensor, Tensor]:
    """Return the inflation at which the CRPS is smallest, and that CRPS (T, F).

    Terms that were fitted to training dates fit these dates too well, so the factor is chosen on `unseen`. Fields that
    have a score on fewer than `FEWEST_TO_WIDEN` dates of `unseen` take it from `sample`.
    """
    factor, error, count = truth.best_factor(unseen, inflation, stage)
    few = count < FEWEST_TO_WIDEN
    if bool(few.any()):
        other, known, _ = truth.best_factor(sample, inflation, stage)
        factor, error = torch.where(few, other, factor), torch.where(few, known, error)
    return inflation + factor[..., None, None], error
