"""Statistical corrections of an ensemble, fitted on the training dates and members of the forecasts they stand beside.

Everything is fitted from sums over dates at each cell, which add up like any other aggregation. Bias and variance ratio
are those of the cell (`local`), of all cells (`global`), or the cell's drawn towards the global ones as far as they do
not come back in the other half of the dates (`shrunk`, empirical Bayes). The variance goes with the ensemble's own, is
constant, or lies between the two (`blend`): EMOS fitted by moments, but for its slope on the mean, which is one here.

Axes: H half of the fit dates (odd and even blocks of days, so that both see all seasons), Z level, Y latitude,
X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import quantile
from ensemble_ml.verification.statistics import c4, ensemble_moments

FEWEST_DATES = 5  # a bias and a variance of fewer dates are noise
FEWEST_SPREADS = 2  # dates to fit a spread on: each is predicted by the mean of the others
_LEAST_OF_THE_REST = 0.25  # of the squared spread that is expected of all members
_ROUNDING = 1e-12  # of the squared mean: the variance of values that are all the same, as sums have it

CORRECTIONS = {
    "global": "bias and inflation, one each a lead, variable and level: N(m + b, c^2 s^2)",
    "local": "bias and inflation per grid point: N(m + b, c^2 s^2)",
    "local_constant": "bias and standard deviation per grid point: N(m + b, c^2 mean s^2)",
    "shrunk": "bias and inflation per grid point, shrunk to the global ones: N(m + b, c^2 s^2)",
    "local_blend": "as local, with c^2 ((1 - r) mean s^2 + r s^2), r fitted per lead, variable and level",
    "blend": "as shrunk, with c^2 ((1 - r) mean s^2 + r s^2), r fitted per lead, variable and level",
}


@dataclass(eq=False)
class CellSums:
    """Sums over start dates at each cell: `count` and each of `sums` (H, Z, Y, X)."""

    count: np.ndarray
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def zeros(cls, shape: tuple[int, int, int]) -> CellSums:
        """Nothing summed yet, for fields (Z, Y, X)."""
        return cls(np.zeros((2, *shape)))

    def record(self, half: int, values: dict[str, np.ndarray], mask: np.ndarray) -> None:
        """Add the fields (Z, Y, X) of one date where `mask` holds."""
        self.count[half] += mask
        for name, value in values.items():
            target = self.sums.setdefault(name, np.zeros_like(self.count))
            target[half] += np.where(mask, value, 0.0)

    def __add__(self, other: CellSums) -> CellSums:
        names = {**self.sums, **other.sums}
        zero = np.zeros_like(self.count)
        both = {name: self.sums.get(name, zero) + other.sums.get(name, zero) for name in names}
        return CellSums(self.count + other.count, both)

    def total(self, name: str) -> np.ndarray:
        """Sum over both halves (Z, Y, X)."""
        return self.sums[name].sum(0)


def error_terms(mean: np.ndarray, variance: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """What `fit_corrections` needs of one date. The variance of a single member (NaN) counts as zero."""
    error, s2 = truth - mean, np.nan_to_num(variance)
    return {"e": error, "ee": error**2, "v": s2, "vv": s2**2, "ev": error * s2, "eev": error**2 * s2}


@dataclass(frozen=True, eq=False)
class Correction:
    """N(m + bias, constant + slope s^2) at each cell; all (Z, Y, X)."""

    bias: np.ndarray
    constant: np.ndarray
    slope: np.ndarray

    def __call__(self, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Location and scale for an ensemble's mean and variance (Z, Y, X)."""
        return mean + self.bias, np.sqrt(self.constant + self.slope * np.nan_to_num(variance))


def fit_corrections(
    sums: CellSums, weights: np.ndarray, clim_variance: np.ndarray | None = None
) -> dict[str, Correction]:
    """Fit all corrections of `CORRECTIONS`.

    With n dates at a cell, b = mean error, v = sum (e - b)^2 / (n - 1) and S = mean s^2, the predictive variance is
    v (1 + 1/n), because b is itself estimated; c^2 = v (1 + 1/n) / S.

    Args:
        sums: of `error_terms` over the fit dates.
        weights: (Y, X) cell areas.
        clim_variance: (Z, Y, X) stands for S where the ensemble has no spread of its own (one member).
    """
    n = np.maximum(sums.count.sum(0), 1.0)
    valid = sums.count.sum(0) >= 2
    w = np.where(valid, weights, 0.0)
    single = clim_variance is not None
    s_mean = clim_variance if clim_variance is not None else sums.total("v") / n
    s_mean = np.where(valid, s_mean, _mean(s_mean, w))  # cells that no fit date knows go by the others
    unsure = np.where(valid, 1 / n, 0.0)
    bias = sums.total("e") / n
    residual = np.maximum(sums.total("ee") - n * bias**2, 0.0) / np.maximum(n - 1, 1)

    bias_global = np.broadcast_to(_mean(bias, w), bias.shape)
    squares = (sums.total("ee") - 2 * bias_global * sums.total("e") + n * bias_global**2) / n
    ratio_global = np.broadcast_to(_quotient(_mean(squares, w), _mean(s_mean, w)), bias.shape)
    bias_local = np.where(valid, bias, bias_global)
    kept = _kept_of_bias(sums, bias, residual / n, w)
    bias_shrunk = bias_global + kept * (bias_local - bias_global)

    known = valid & (s_mean > 0) & (residual > 0)
    ratio = np.where(known, _quotient(residual, s_mean), _quotient(_mean(residual, w), _mean(s_mean, w)))
    w_known = np.where(known, weights, 0.0)
    ratio_shrunk = _shrink_ratio(sums, ratio, s_mean, w_known, single)
    share = np.zeros_like(bias) if single else _share_of_flow(sums, bias, residual, s_mean, w_known)
    # Where members never differ (rain in a desert), inflation has nothing to act on: the variance stays as it was.
    fallback = np.where(s_mean > 0, 0.0, residual)
    one = np.zeros_like(bias) if single else np.ones_like(bias)
    plans = {
        "global": (bias_global, ratio_global, one),
        "local": (bias_local, ratio * (1 + unsure), one),
        "local_constant": (bias_local, ratio * (1 + unsure), np.zeros_like(one)),
        "shrunk": (bias_shrunk, ratio_shrunk * (1 + kept * unsure), one),
        "local_blend": (bias_local, ratio * (1 + unsure), share),
        "blend": (bias_shrunk, ratio_shrunk * (1 + kept * unsure), share),
    }
    return {name: Correction(b, r * (1 - q) * s_mean + fallback, r * q) for name, (b, r, q) in plans.items()}


def _mean(values: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Weighted mean over cells, (Z, 1, 1)."""
    return _quotient((w * values).sum((-2, -1), keepdims=True), w.sum((-2, -1), keepdims=True))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b))), where=np.asarray(b) > 0)


def _covariance(a: np.ndarray, b: np.ndarray, w: np.ndarray) -> np.ndarray:
    return _mean((a - _mean(a, w)) * (b - _mean(b, w)), w)


def _kept_of_bias(sums: CellSums, bias: np.ndarray, noise: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Share of a cell's departure from the mean bias to keep: signal / (signal + noise).

    The signal is what the two halves of the dates agree on (their covariance over cells), so that errors that last for
    days, which make v / n too small, count as noise; the noise is shared out in proportion to v / n.
    """
    halves = sums.sums["e"] / np.maximum(sums.count, 1.0)
    both = np.where((sums.count > 0).all(0), w, 0.0)
    signal = np.maximum(_covariance(halves[0], halves[1], both), 0.0)
    excess = np.maximum(_covariance(bias, bias, w) - signal, 0.0)
    return _quotient(signal, signal + excess * _quotient(noise, _mean(noise, w)))


def _shrink_ratio(sums: CellSums, ratio: np.ndarray, s_mean: np.ndarray, w: np.ndarray, single: bool) -> np.ndarray:
    """Draw log(v / S) towards its mean, and restore the mean of v over cells."""
    n = np.maximum(sums.count, 1.0)
    b = sums.sums["e"] / n
    variance = np.maximum(sums.sums["ee"] / n - b**2, 0.0) * n / np.maximum(n - 1, 1)
    spread = np.stack([s_mean, s_mean]) if single else sums.sums["v"] / n
    good = (variance > 0).all(0) & (spread > 0).all(0) & (sums.count >= 2).all(0)
    both = np.where(good, w, 0.0)
    first, second = np.log(np.where(good & (w > 0), _quotient(variance, spread), 1.0))
    log_ratio = np.log(np.where(w > 0, ratio, 1.0))
    signal = np.maximum(_covariance(first, second, both), 0.0)
    kept = np.minimum(_quotient(signal, _covariance(log_ratio, log_ratio, w)), 1.0)
    centre = _mean(log_ratio, w)
    shrunk = np.exp(centre + kept * np.where(w > 0, log_ratio - centre, 0.0))
    return shrunk * _quotient(_mean(ratio * s_mean, w), _mean(shrunk * s_mean, w))


def _share_of_flow(
    sums: CellSums, bias: np.ndarray, residual: np.ndarray, s_mean: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Slope r of (e - b)^2 / v on s^2 / S, least squares over dates and cells, within 0..1: (Z, Y, X)."""
    n = sums.count.sum(0)
    cross = sums.total("eev") - 2 * bias * sums.total("ev") + bias**2 * sums.total("v")
    covariance = _quotient(cross, residual * s_mean) - (n - 1)  # sum of (e - b)^2 / v, whose n - 1 are in `residual`
    variance = _quotient(sums.total("vv"), s_mean**2) - n
    share = _quotient((w * covariance).sum((-2, -1), keepdims=True), (w * variance).sum((-2, -1), keepdims=True))
    return np.broadcast_to(np.clip(share, 0.0, 1.0), bias.shape)


def couple(members: np.ndarray, location: np.ndarray, scale: np.ndarray, family: Family = Family.NORMAL) -> np.ndarray:
    """Ensemble copula coupling: quantiles at (i - 1/2) / M of a law, put where raw members of the same rank stand.

    Schefzik et al. (2013), doi:10.1214/13-STS443, ECC-Q, at the levels where the ordinary CRPS of M members is least:
    Broecker (2012), doi:10.1002/qj.1891. Those at i / (M + 1) are too narrow, and lose rain.

    Args:
        members: (M, ...) raw members, two or more; equal ones keep their order.
        location, scale: (...) of the law.

    Returns:
        (M, ...) in the units of `location`.

    Raises:
        ValueError: there is only one member.
    """
    if len(members) < 2:
        raise ValueError(f"ensemble copula coupling of {len(members)} member: two or more are needed")
    levels = (np.arange(len(members)) + 0.5) / len(members)
    drawn = np.stack([quantile(family, location, scale, level) for level in levels])
    ranks = members.argsort(0, kind="stable").argsort(0, kind="stable")
    return np.take_along_axis(drawn, ranks, 0)


def spread_terms(reduced: np.ndarray, full: np.ndarray, held_out: np.ndarray | None) -> dict[str, np.ndarray]:
    """What `fit_spread` needs of one date: spreads (Z, Y, X); that of a single member (NaN) counts as zero."""
    s = np.nan_to_num(reduced)
    terms = {"s": s, "ss": s**2, "f": full, "ff": full**2, "fs": full * s}
    return terms if held_out is None else terms | {"h": held_out, "hs": held_out * s, "hf": held_out * full}


@dataclass(frozen=True, eq=False)
class SpreadFit:
    """a + b s_M + c s_clim; `coefficients` (Z, 3), `climate` = s_clim (Z, Y, X); both NaN at a level without a fit."""

    coefficients: np.ndarray
    climate: np.ndarray

    def __call__(self, spread: np.ndarray) -> np.ndarray:
        """Predicted spread (Z, Y, X), never below zero."""
        a, b, c = self.coefficients.T[..., None, None]
        return np.maximum(a + b * np.nan_to_num(spread) + c * self.climate, 0.0)


def fit_spread(sums: CellSums, weights: np.ndarray, target: str = "f") -> SpreadFit:
    """Regress the spread of the full ensemble on a + b s_M + c s_clim: area-weighted least squares, per level.

    s_clim is the mean of the full ensemble's spread over the fit dates at the cell: of all constants, the one with the
    least squared error. A date of the regression has that of the other dates: its own would hold what is to be
    predicted, the more so the fewer dates there are, and s_clim would weigh more than dates outside of it bear out.

    Cells that fewer than `FEWEST_SPREADS` dates know are no part of the fit, and have the others' mean s_clim. A level
    without any other cell is NaN throughout: it has no regression.

    Args:
        sums: of `spread_terms` over the fit dates.
        weights: (Y, X) cell areas.
        target: "f" for all members, "h" for those held out.
    """
    n = sums.count.sum(0)
    known = n >= FEWEST_SPREADS
    w = np.where(known, weights, 0.0)
    lacking = np.where(known.any((-2, -1), keepdims=True), 0.0, np.nan)  # (Z, 1, 1)
    climate = _quotient(sums.total("f"), n)
    climate = np.where(known, climate, _mean(climate, w)) + lacking
    s, f, y = sums.total("s"), sums.total("f"), sums.total(target)
    # Sums over dates d of what has s_clim without d in it, (f - f_d) / (n - 1), f being the sum over all.
    others = np.maximum(n - 1, 1)
    squares = ((n - 2) * f**2 + sums.total("ff")) / others**2
    with_s = (f * s - sums.total("fs")) / others
    with_y = (f * y - sums.total(f"{target}f")) / others
    area = lambda x: (w * x).sum((-2, -1))  # noqa: E731
    matrix = np.empty((len(n), 3, 3))
    products = {(0, 0): n, (0, 1): s, (0, 2): f, (1, 1): sums.total("ss"), (1, 2): with_s, (2, 2): squares}
    for (row, column), value in products.items():
        matrix[:, row, column] = matrix[:, column, row] = area(value)
    right = np.stack([area(y), area(sums.total(f"{target}s")), area(with_y)], axis=1)
    # In units of each predictor; the pseudo-inverse leaves out one that is constant (no spread, a uniform climate).
    scale = np.sqrt(np.maximum(np.einsum("zii->zi", matrix), 1e-300))
    scaled = matrix / (scale[:, :, None] * scale[:, None, :])
    solved = (np.linalg.pinv(scaled, rcond=1e-10, hermitian=True) @ (right / scale)[..., None])[..., 0]
    return SpreadFit(solved / scale + lacking[..., 0], climate)


def size_corrected(spread: np.ndarray, members: int, full: int) -> np.ndarray:
    """Spread of `members` draws as `full` draws would have it on average: s_M c4(N) / c4(M)."""
    return spread * (c4(full) / c4(members))


def spread_of_the_rest(spread: np.ndarray, given: np.ndarray, full: int) -> np.ndarray:
    """What a forecast of the full ensemble's spread says of the members that it was not made from.

    With m, s of the M members given, m_H, s_H of the H = N - M others and S of all, squares add up:

        (N - 1) S^2 = (M - 1) s^2 + (H - 1) s_H^2 + (M H / N) (m - m_H)^2

    For draws of one law with variance sigma^2 whose mean only these members tell, the last two are H sigma^2 on
    average, given the first; so ((N - 1) S^2 - (M - 1) s^2) / H stands to S^2 as sigma^2 to the square of a full
    ensemble's spread: its root is comparable to `samples.held_out_spread`, to first order in what is unknown of sigma.
    It is kept from below half of S.

    Args:
        spread: S as it was predicted from the members, (...).
        given: these members, (M, ...).
        full: N, above M.
    """
    members = len(given)
    known = (members - 1) * np.nan_to_num(ensemble_moments(given)[1])
    left = ((full - 1) * spread**2 - known) / (full - members)
    return np.sqrt(np.maximum(left, _LEAST_OF_THE_REST * spread**2))


def fit_climatology(sums: CellSums) -> tuple[np.ndarray, np.ndarray]:
    """Mean and predictive standard deviation of the truth at each cell over the fit dates, from sums of y and y^2.

    Both are NaN where fewer than two fit dates know a cell, see `everywhere`; the deviation is zero where the truth
    never varies (no rain in a desert).
    """
    count = sums.count.sum(0)
    n = np.maximum(count, 1.0)
    mean = sums.total("y") / n
    variance = np.maximum(sums.total("yy") - n * mean**2, 0.0) / np.maximum(n - 1, 1)
    variance = np.where(variance > _ROUNDING * mean**2, variance, 0.0)
    known = count >= 2
    return np.where(known, mean, np.nan), np.where(known, np.sqrt(variance * (1 + 1 / n)), np.nan)


def everywhere(mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A climatology (Z, Y, X) as a forecast: cells of which nothing is known (NaN) may be like any of the others, and
    stay NaN where no other of their level is known."""
    known = np.isfinite(deviation)
    centre, variance = np.where(known, mean, 0.0), np.where(known, deviation, 0.0) ** 2
    mean_all = _mean(centre, known.astype(float))
    variance_all = _mean(variance + (centre - mean_all) ** 2, known.astype(float))
    none = ~known.any((-2, -1), keepdims=True)
    mean_all, variance_all = (np.where(none, np.nan, values) for values in (mean_all, variance_all))
    return np.where(known, mean, mean_all), np.where(known, deviation, np.sqrt(variance_all))
