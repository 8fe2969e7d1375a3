"""Fit statistical corrections of an ensemble, which are the baselines that every forecast is compared with.

They are fitted on the dates that forecasts were trained on, from sums over dates at each cell. Sums over different
dates can be added.

Bias and variance ratio are fitted in three ways: at each cell (`local`), over all cells (`global`), or at each cell and
shrunk towards the global values (`shrunk`, empirical Bayes). Shrinkage keeps the part of a cell's departure on which
the two halves of the dates agree. The predicted variance is proportional to that of the ensemble, constant, or a
mixture of both (`blend`). A blend is EMOS fitted by moments, but with a slope of one on the ensemble mean.

Axes: H half of the fit dates (odd and even blocks of days, so that both see all seasons), M member, Z level, Y
latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import quantile
from ensemble_ml.verification.statistics import c4, ensemble_moments

FEWEST_DATES = 5  # fewest dates to fit a bias and a variance
FEWEST_SPREADS = 2  # fewest dates to fit a spread, because each is predicted from the mean of the others
_LEAST_OF_THE_REST = 0.25  # least variance of the held-out members, as a fraction of that predicted for all members
_ROUNDING = 1e-12  # most that rounding leaves of the variance of equal values, relative to their squared mean

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
    """A set of sums over initialisation times at each cell, separately for the two halves of the dates.

    Attributes:
        count: (H, Z, Y, X) number of dates.
        sums: (H, Z, Y, X) sums by name.
    """

    count: np.ndarray
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def zeros(cls, shape: tuple[int, int, int]) -> CellSums:
        """Return empty sums for the lengths of Z, Y and X."""
        return cls(np.zeros((2, *shape)))

    def record(self, half: int, values: dict[str, np.ndarray], mask: np.ndarray) -> None:
        """Add the fields (Z, Y, X) of one date where `mask` holds. `half` is that of the date, 0 or 1."""
        self.count[half] += mask
        for name, value in values.items():
            target = self.sums.setdefault(name, np.zeros_like(self.count))
            target[half] += np.where(mask, value, 0.0)

    def __add__(self, other: CellSums) -> CellSums:
        """Return the sums over the dates of both."""
        names = {**self.sums, **other.sums}
        zero = np.zeros_like(self.count)
        both = {name: self.sums.get(name, zero) + other.sums.get(name, zero) for name in names}
        return CellSums(self.count + other.count, both)

    def total(self, name: str) -> np.ndarray:
        """Return the sum over both halves, (Z, Y, X)."""
        return self.sums[name].sum(0)


def error_terms(mean: np.ndarray, variance: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the fields of one date whose sums `fit_corrections` needs, (Z, Y, X) by name.

    Mean and variance are those of the ensemble. A variance that is NaN, that of a single member, counts as zero.
    """
    error, s2 = truth - mean, np.nan_to_num(variance)
    return {"e": error, "ee": error**2, "v": s2, "vv": s2**2, "ev": error * s2, "eev": error**2 * s2}


@dataclass(frozen=True, eq=False)
class Correction:
    """A corrected forecast N(m + bias, constant + slope s^2) for an ensemble of mean m and variance s^2.

    Attributes:
        bias: (Z, Y, X) shift of the mean, in the units of the variable.
        constant: (Z, Y, X) constant part of the variance, in squared units.
        slope: (Z, Y, X) factor of the ensemble's variance.
    """

    bias: np.ndarray
    constant: np.ndarray
    slope: np.ndarray

    def __call__(self, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation of the corrected forecast, (Z, Y, X) each.

        Mean and variance of the ensemble are (Z, Y, X). A variance that is NaN counts as zero.
        """
        return mean + self.bias, np.sqrt(self.constant + self.slope * np.nan_to_num(variance))


def fit_corrections(
    sums: CellSums, weights: np.ndarray, clim_variance: np.ndarray | None = None
) -> dict[str, Correction]:
    """Fit all corrections, by their names in `CORRECTIONS`.

        b    mean error
        v    sum (e - b)^2 / (n - 1)
        S    mean s^2
        c^2  v (1 + 1/n) / S

        n    number of dates at the cell
        e    truth minus ensemble mean
        s    spread of the ensemble

    The factor 1 + 1/n is there because b is estimated from n dates. `global` is from all cells and does without it, and
    in `shrunk` and `blend` it is smaller. Cells with fewer than two dates take the bias of `global`, and c^2 and S
    from the other cells. A cell whose v or S is zero takes c^2 from all cells, and where S is zero, v is added to the
    predicted variance.

    Args:
        sums: Sums of `error_terms` over the fit dates.
        weights: (Y, X) cell areas.
        clim_variance: (Z, Y, X) replacement of S for an ensemble without spread (one member); None otherwise.
    """
    n = np.maximum(sums.count.sum(0), 1.0)
    valid = sums.count.sum(0) >= 2
    w = np.where(valid, weights, 0.0)
    single = clim_variance is not None
    s_mean = clim_variance if clim_variance is not None else sums.total("v") / n
    s_mean = np.where(valid, s_mean, _mean(s_mean, w))  # other cells take the mean of these
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
    # Where members never differ (rain in a desert), no factor of their variance helps, so the variance of the errors is
    # predicted.
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
    """Return the weighted mean over cells, (Z, 1, 1)."""
    return _quotient((w * values).sum((-2, -1), keepdims=True), w.sum((-2, -1), keepdims=True))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b, or zero where b is not positive."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b))), where=np.asarray(b) > 0)


def _covariance(a: np.ndarray, b: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the weighted covariance over cells, (Z, 1, 1)."""
    return _mean((a - _mean(a, w)) * (b - _mean(b, w)), w)


def _kept_of_bias(sums: CellSums, bias: np.ndarray, noise: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the fraction of each cell's departure from the mean bias to keep: signal / (signal + noise).

    The signal is the covariance over cells of the biases of the two halves of the dates. The noise is the rest of the
    variance of the biases, distributed over the cells in proportion to v / n. The mean of v / n itself would be too
    small where errors last for days.
    """
    halves = sums.sums["e"] / np.maximum(sums.count, 1.0)
    both = np.where((sums.count > 0).all(0), w, 0.0)
    signal = np.maximum(_covariance(halves[0], halves[1], both), 0.0)
    excess = np.maximum(_covariance(bias, bias, w) - signal, 0.0)
    return _quotient(signal, signal + excess * _quotient(noise, _mean(noise, w)))


def _shrink_ratio(sums: CellSums, ratio: np.ndarray, s_mean: np.ndarray, w: np.ndarray, single: bool) -> np.ndarray:
    """Shrink log(v / S) towards its mean over cells, restore the mean of v over cells, and return v / S, (Z, Y, X)."""
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
    """Return the fraction r of the variance that follows the ensemble's own variance, (Z, Y, X), from 0 to 1.

    It is the slope of (e - b)^2 / v on s^2 / S, by least squares over dates and cells.
    """
    n = sums.count.sum(0)
    cross = sums.total("eev") - 2 * bias * sums.total("ev") + bias**2 * sums.total("v")
    # The mean of (e - b)^2 / v over n dates is (n - 1) / n, because v divides by n - 1. That of s^2 / S is one.
    covariance = _quotient(cross, residual * s_mean) - (n - 1)
    variance = _quotient(sums.total("vv"), s_mean**2) - n
    share = _quotient((w * covariance).sum((-2, -1), keepdims=True), (w * variance).sum((-2, -1), keepdims=True))
    return np.broadcast_to(np.clip(share, 0.0, 1.0), bias.shape)


def couple(members: np.ndarray, location: np.ndarray, scale: np.ndarray, family: Family = Family.NORMAL) -> np.ndarray:
    """Make members from a distribution by ensemble copula coupling.

    The M values are the quantiles of the distribution at the levels (i - 1/2) / M. Each raw member is replaced by the
    quantile of its rank, so members keep the dependence between places and variables; equal members keep their order.
    The method is ECC-Q of Schefzik et al. (2013), doi:10.1214/13-STS443. These levels give M members the least ordinary
    CRPS (Broecker 2012, doi:10.1002/qj.1891). Levels i / (M + 1) would make members too narrow and lose rain.

    Args:
        members: (M, ...) raw members, two or more.
        location: Location of the distribution, (...).
        scale: Its scale, (...).
        family: Its family.

    Raises:
        ValueError: There are fewer than two members.
    """
    if len(members) < 2:
        raise ValueError(f"ensemble copula coupling of {len(members)} member: two or more are needed")
    levels = (np.arange(len(members)) + 0.5) / len(members)
    drawn = np.stack([quantile(family, location, scale, level) for level in levels])
    ranks = members.argsort(0, kind="stable").argsort(0, kind="stable")
    return np.take_along_axis(drawn, ranks, 0)


def spread_terms(reduced: np.ndarray, full: np.ndarray, held_out: np.ndarray | None) -> dict[str, np.ndarray]:
    """Compute the fields of one date whose sums `fit_spread` needs, (Z, Y, X) by name.

    The arguments are the spreads of these ensembles. NaN, the spread of a single member, counts as zero in `reduced`.
    """
    s = np.nan_to_num(reduced)
    terms = {"s": s, "ss": s**2, "f": full, "ff": full**2, "fs": full * s}
    return terms if held_out is None else terms | {"h": held_out, "hs": held_out * s, "hf": held_out * full}


@dataclass(frozen=True, eq=False)
class SpreadFit:
    """A regression a + b s_M + c s_clim of the full ensemble's spread.

    Both attributes are NaN at a level without a fit.

    Attributes:
        coefficients: (Z, 3) values of a, b and c.
        climate: (Z, Y, X) s_clim, the mean spread of the full ensemble over the fit dates.
    """

    coefficients: np.ndarray
    climate: np.ndarray

    def __call__(self, spread: np.ndarray) -> np.ndarray:
        """Return the predicted spread from that of the reduced ensemble, (Z, Y, X) each.

        The result is never below zero. A spread that is NaN counts as zero.
        """
        a, b, c = self.coefficients.T[..., None, None]
        return np.maximum(a + b * np.nan_to_num(spread) + c * self.climate, 0.0)


def fit_spread(sums: CellSums, weights: np.ndarray, target: str = "f") -> SpreadFit:
    """Regress the spread of the full ensemble on a + b s_M + c s_clim, by area-weighted least squares at each level.

    s_clim is the mean of the full ensemble's spread over the fit dates at the cell, the constant with the least squared
    error. During the fit, each date uses the mean over the other dates only. Otherwise s_clim would contain
    part of the target, and c would be too large for new dates, most of all if dates are few.

    Cells with fewer than `FEWEST_SPREADS` dates do not enter the fit, and take the mean s_clim of the other cells. A
    level without other cells is NaN.

    Args:
        sums: Sums of `spread_terms` over the fit dates.
        weights: (Y, X) cell areas.
        target: "f" to predict the spread of all members, "h" for that of the held-out members.
    """
    n = sums.count.sum(0)
    known = n >= FEWEST_SPREADS
    w = np.where(known, weights, 0.0)
    lacking = np.where(known.any((-2, -1), keepdims=True), 0.0, np.nan)  # (Z, 1, 1)
    climate = _quotient(sums.total("f"), n)
    climate = np.where(known, climate, _mean(climate, w)) + lacking
    s, f, y = sums.total("s"), sums.total("f"), sums.total(target)
    # Without date d, s_clim is (f - f_d) / (n - 1), where f is the sum over all dates. These are the sums over d of its
    # products with itself, with s_M and with the target.
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
    # Predictors are scaled to unit size. The pseudo-inverse then drops those without information of their own (no
    # spread at all, or the same climate everywhere), which would make the matrix singular.
    scale = np.sqrt(np.maximum(np.einsum("zii->zi", matrix), 1e-300))
    scaled = matrix / (scale[:, :, None] * scale[:, None, :])
    solved = (np.linalg.pinv(scaled, rcond=1e-10, hermitian=True) @ (right / scale)[..., None])[..., 0]
    return SpreadFit(solved / scale + lacking[..., 0], climate)


def size_corrected(spread: np.ndarray, members: int, full: int) -> np.ndarray:
    """Return the mean spread of `full` members that the spread of `members` members implies: s_M c4(N) / c4(M)."""
    return spread * (c4(full) / c4(members))


def spread_of_the_rest(spread: np.ndarray, given: np.ndarray, full: int) -> np.ndarray:
    """Return the spread of the held-out members that a predicted spread of the full ensemble implies, (...).

    Sums of squares add up:

        (N - 1) S^2 = (M - 1) s^2 + (H - 1) s_H^2 + (M H / N) (m - m_H)^2

        N         members of the full ensemble
        S         their spread
        M, m, s   number, mean and spread of the given members
        H         N - M, the number of held-out members
        m_H, s_H  their mean and spread

    If all members are draws from one distribution of variance sigma^2, and its mean is known from the given members
    alone, the last two terms sum to H sigma^2 on average. The result is the root of ((N - 1) S^2 - (M - 1) s^2) / H,
    but at least half of S. To first order in the uncertainty of sigma, it can be compared with
    `samples.held_out_spread`.

    Args:
        spread: (...) predicted S.
        given: (M, ...) members from which the forecast was made.
        full: N, above M.
    """
    members = len(given)
    known = (members - 1) * np.nan_to_num(ensemble_moments(given)[1])
    left = ((full - 1) * spread**2 - known) / (full - members)
    return np.sqrt(np.maximum(left, _LEAST_OF_THE_REST * spread**2))


def fit_climatology(sums: CellSums) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the predictive standard deviation of the truth at each cell over the fit dates.

    The variance carries the factor 1 + 1/n, because the mean is estimated from n dates.

    Args:
        sums: Sums of y and y^2 over the fit dates, named "y" and "yy".

    Returns:
        Mean and deviation, each (Z, Y, X). Both are NaN at cells with fewer than two fit dates (see `everywhere`). The
        deviation is zero where the truth never varies (no rain in a desert).
    """
    count = sums.count.sum(0)
    n = np.maximum(count, 1.0)
    mean = sums.total("y") / n
    variance = np.maximum(sums.total("yy") - n * mean**2, 0.0) / np.maximum(n - 1, 1)
    variance = np.where(variance > _ROUNDING * mean**2, variance, 0.0)
    known = count >= 2
    return np.where(known, mean, np.nan), np.where(known, np.sqrt(variance * (1 + 1 / n)), np.nan)


def everywhere(mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill the cells of a climatology, (Z, Y, X) each, that are NaN, so that it can serve as a forecast.

    Such a cell takes the mean of the known cells of its level, and a variance that includes the differences between
    them. Levels without a known cell stay NaN.
    """
    known = np.isfinite(deviation)
    centre, variance = np.where(known, mean, 0.0), np.where(known, deviation, 0.0) ** 2
    mean_all = _mean(centre, known.astype(float))
    variance_all = _mean(variance + (centre - mean_all) ** 2, known.astype(float))
    none = ~known.any((-2, -1), keepdims=True)
    mean_all, variance_all = (np.where(none, np.nan, values) for values in (mean_all, variance_all))
    return np.where(known, mean, mean_all), np.where(known, deviation, np.sqrt(variance_all))
