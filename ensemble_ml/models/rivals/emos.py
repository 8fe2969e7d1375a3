"""EMOS by minimum CRPS (Gneiting et al. 2005, doi:10.1175/MWR2904.1), fitted at all points at once.

    location = r + a + b (m - r) + e_1 x_1 + ... + e_K x_K
    scale^2  = c + d s^2

    m              mean of the members
    s^2            variance of the members
    x_k            seasonal terms
    r              reference: the mean of m over the training dates at each point, or zero
    a, b, c, d     coefficients, with c, d >= 0
    e_k            coefficients of the seasonal terms

Points may share coefficients, or be drawn to shared ones. With a reference of zero, such a fit is worse where climates
differ from point to point, even if the anomalies are the same.

The CRPS of a normal distribution is convex in (location, scale), and its curvature has rank one:

    2 phi(z) / scale [1 z; z z^2]

    z    (truth - location) / scale
    phi  density of the standard normal distribution

So each point takes damped Gauss-Newton steps of its own (Levenberg-Marquardt), in units of its own errors and with the
square roots of c and d as parameters. All points are computed in the same batched operations. For other distributions,
the fit uses the same curvature and the exact gradient of their own CRPS. The fit is deterministic.

Axes: D sample (date), K seasonal term, P parameter. Axes before D are separate problems.

The model (`EmosModel`) has coefficients for each ensemble size, lead, field and grid point. They are fitted to the
training dates before the first step (`training.emos_fit`), and have no gradient. An ensemble of another size takes the
coefficients of the size whose logarithm is nearest. Its axes: B initialisation time, T lead, F field, Y latitude,
X longitude.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ensemble_ml import distributions
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, seasonal_terms
from ensemble_ml.models.rivals.rival import Rival

_TINY = 1e-12
_LEAST_UNIT = 0.02  # least unit of a point, as a fraction of the root mean square of all units
_REACH = 1.5  # largest factor between the prior's scale and a point's own typical error
_LEAST_SIGNAL = 1e-3  # least variance of biases between points, relative to that of errors
_START_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-2, 1e-9, 1e12
SIZES = (1, 2, 3, 5, 10)  # sizes before the fit; their number is that of the rows of every model
COEFFICIENTS = 6  # a, b - 1, sine, cosine, c, d


@dataclass(frozen=True, eq=False)
class Emos:
    """The coefficients of the formula in this module's docstring.

    Attributes:
        a: (...) float64, intercept.
        b: (...) float64, slope.
        c: (...) float64, constant part of the squared scale.
        d: (...) float64, factor of the members' variance.
        season: (..., K) float64, coefficients of the seasonal terms.
        family: the distribution.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    season: Tensor
    family: Family = Family.NORMAL

    def __call__(self, mean: Any, variance: Any, season: Any = None, reference: Any = 0.0) -> tuple[Tensor, Tensor]:
        """Return location and scale, (..., D) each.

        Args:
            mean: (..., D) mean of the members.
            variance: (..., D) variance of the members.
            season: (..., D, K) seasonal terms, or None.
            reference: r, broadcast against `mean`.
        """
        m, s2, r = _tensor(mean), _tensor(variance), _tensor(reference)
        location = r + self.a[..., None] + self.b[..., None] * (m - r)
        if season is not None and self.season.shape[-1]:
            location = location + (_tensor(season) * self.season[..., None, :]).sum(-1)
        return location, torch.sqrt(self.c[..., None] + self.d[..., None] * s2)

    def at(self, points: slice) -> Emos:
        """Return the coefficients at some points of a vector of points."""
        return replace(self, **{name: getattr(self, name)[points] for name in ("a", "b", "c", "d", "season")})

    def crps(self, mean: Any, variance: Any, observation: Any, season: Any = None, reference: Any = 0.0) -> Tensor:
        """Return the CRPS (..., D) of the forecasts of `__call__`, with its arguments, for the truth (..., D)."""
        return distributions.crps(self.family, *self(mean, variance, season, reference), _tensor(observation))


def merged(parts: Sequence[Emos], slices: Sequence[slice]) -> Emos:
    """Join coefficients that were fitted to slices of the points to one vector of points."""
    if len(parts) == 1:
        return parts[0]
    count = sum(len(part.a) for part in parts)
    whole = {name: getattr(parts[0], name) for name in ("a", "b", "c", "d", "season")}
    whole = {name: values.new_empty(count, *values.shape[1:]) for name, values in whole.items()}
    for part, points in zip(parts, slices, strict=True):
        for name, values in whole.items():
            values[points] = getattr(part, name)
    return replace(parts[0], **whole)


def fit_emos(
    mean: Any,
    variance: Any,
    observation: Any,
    *,
    season: Any = None,
    reference: Any = 0.0,
    family: Family = Family.NORMAL,
    weights: Any = None,
    prior: Emos | None = None,
    strength: float = 0.0,
    start: Emos | None = None,
    iterations: int = 200,
    tolerance: float = 1e-9,
) -> Emos:
    """Fit the coefficients with the smallest mean CRPS at each point.

    Points without any observation get placeholders, which the caller must replace.

    Args:
        mean: (..., D) mean of the members.
        variance: (..., D) variance of the members (ddof = 1). It is zero for a single member, and d becomes zero then.
        observation: (..., D) the truth in the same units; values that are not finite are left out.
        season: (..., D, K) seasonal terms, or None.
        reference: r, broadcast against `mean`. The coefficients are valid only with this reference.
        family: the distribution of the forecast.
        weights: (..., D) weights of the samples; None weights them equally.
        prior: coefficients to draw towards, broadcast against (...).
        strength: number of samples that the prior counts for. For `a`, it follows from how much biases differ between
            points.
        start: coefficients to begin with; None for simple estimates. The prior is taken at points where it fits better.
        iterations: largest number of steps.
        tolerance: a point has converged if its step is smaller than this, in units of a typical error.

    Raises:
        UserError: shapes differ, no point has an observation, or a point has some, but fewer than coefficients.
    """
    m, s2, y = _tensor(mean), _tensor(variance), _tensor(observation)
    shapes = [tuple(v.shape) for v in (m, s2, y)]
    if len(set(shapes)) > 1:
        raise UserError(f"EMOS: mean, variance and observation have shapes {shapes}; they must be equal")
    problem = _Problem(m, s2, y, _terms(season, y), _weights(weights, y), family, _tensor(reference))
    problem.check()
    return problem.solve(prior, strength, start, iterations, tolerance)


class EmosModel(Rival):
    """The EMOS baseline.

        location = m + a + (b - 1) m + season
        scale^2  = c + d s^2

    Before the fit, a = 0, b = c = d = 1 and there is no season. The docstring of this module explains the symbols. The
    parameter `coefficients`, (ensemble size, coefficient, T, F, Y, X), holds b - 1 in place of b.

    Raises:
        UserError: `model.postprocess` is off, so there is no truth to fit to; or `climate` does not fit `spec`.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        if not spec.config.postprocess:
            raise UserError(
                "model.name=emos: needs the truth; prepare the store with truth=..., model.postprocess=true"
            )
        start = torch.zeros(len(SIZES), COEFFICIENTS, len(spec.leads_out), self.spec.fields, *spec.grid.shape)
        start[:, 4:] = 1.0
        self.coefficients = nn.Parameter(start, requires_grad=False)
        self.sizes: Tensor
        self.register_buffer("sizes", torch.tensor(SIZES))  # ensemble size of each row of `coefficients`

    def put(self, size: int, lead: int, field: int, fitted: Emos, reference: Tensor | float = 0.0) -> None:
        """Store the coefficients that were fitted for one ensemble size, lead and field.

        Each coefficient is one number for all points, or one for each point. So is the reference r, (Y * X,), which
        becomes a part of the intercept, because r + a + b (m - r) = m + [a - (b - 1) r] + (b - 1) m. `size` is the row
        of the ensemble size.
        """
        shape = self.spec.grid.shape
        season = fitted.season if fitted.season.shape[-1] else fitted.season.new_zeros(*fitted.a.shape, 2)
        slope = fitted.b - 1
        values = [fitted.a - slope * reference, slope, season[..., 0], season[..., 1], fitted.c, fitted.d]
        maps = [v.reshape(shape) if v.numel() > 1 else v.reshape(1, 1).expand(shape) for v in values]
        self.coefficients.data[size, :, lead, field] = torch.stack(maps).to(self.coefficients)

    def row(self, count: float) -> int:
        """Return the row of the coefficients that an ensemble of `count` members takes."""
        sizes = self.sizes.tolist()
        return min(range(len(sizes)), key=lambda i: abs(math.log(count / sizes[i])))

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict the distribution of the truth and, if `model.spread` is on, the spread of the full ensemble.

        All are (B, T, F, Y, X) in physical units. The scale is at least 0.001 of the field's typical spread. The
        spread, which EMOS does not predict, is that expected from the members (`Reduced.s1`).

        Raises:
            UserError: the shapes of `x` are not those of the spec.
        """
        rows = [self.row(float(count)) for count in x.count]
        fields, season = self.reduced(x), seasonal_terms(x.day_of_year)[..., None, None, None, None]
        a, slope, sine, cosine, c, d = self.coefficients[rows].unbind(1)
        shift = a + slope * fields.mean + sine * season[:, 0] + cosine * season[:, 1]
        # The scale has to stay above zero, because scores divide by it.
        scale = torch.sqrt(torch.maximum(c + d * fields.spread**2, (1e-3 * fields.typical) ** 2))
        return Prediction(fields.mean + shift, scale, fields.s1 if self.spec.config.spread else None)


def rows_for(members: int, sizes: Collection[int]) -> list[int]:
    """Return the ensemble sizes to fit for, ascending. `members` is always kept.

    There are at most as many as the model has rows. If `sizes` has more, those whose neighbours are nearest to each
    other are left out, because the neighbours can stand for them.
    """
    chosen = sorted({members, *sizes})
    while len(chosen) > len(SIZES):
        # The smallest size, the largest one and `members` always stay.
        inner = [at for at in range(1, len(chosen) - 1) if chosen[at] != members]
        chosen.pop(min(inner, key=lambda at: chosen[at + 1] / chosen[at - 1]))
    return chosen


def _tensor(values: Any) -> Tensor:
    """Return values as a float64 tensor."""
    return torch.as_tensor(values).double()


def _terms(season: Any, y: Tensor) -> Tensor:
    """Return the seasonal terms for each sample, without any if `season` is None."""
    return y.new_zeros(*y.shape, 0) if season is None else _tensor(season).expand(*y.shape, -1)


def _weights(weights: Any, y: Tensor) -> Tensor:
    """Return the weights of the samples, zero where the observation is not finite."""
    given = torch.ones_like(y) if weights is None else _tensor(weights).expand_as(y)
    return torch.where(torch.isfinite(y), given, 0.0)


class _Problem:
    """A fit of many points at once.

    Its parameters theta (..., P) are, in units of each point: intercept, slope, seasonal terms, root of c, root of d.
    """

    def __init__(
        self, mean: Tensor, variance: Tensor, y: Tensor, season: Tensor, weights: Tensor, family: Family,
        reference: Tensor,
    ):  # fmt: skip
        self.mean, self.variance, self.season, self.weights, self.family = mean, variance, season, weights, family
        self.total = weights.sum(-1).clamp(min=_TINY)
        # Samples without weight get a finite value, because zero times NaN is NaN.
        self.y = torch.where(weights > 0, y, mean)
        error, anomaly = self.y - mean, mean - reference
        self.centre = self._average(anomaly)
        self.width = _positive(self._deviation(anomaly))
        # A point without any error (rain in a desert) still gets a sensible unit: a small fraction of the errors of all
        # points.
        unit = self._deviation(error)
        self.unit = _positive(torch.maximum(unit, _LEAST_UNIT * unit.square().mean().sqrt()))
        self.level = self._average(variance)
        self.single = self.level <= 0
        # Predictors of mean 0 and deviation 1 make the curvature well conditioned.
        normal = (anomaly - self.centre[..., None]) / self.width[..., None]
        # (..., D, 2 + K): the design of the location, which is m + unit * design . theta
        self.design = torch.cat([torch.ones_like(mean)[..., None], normal[..., None], season], -1)
        relative = torch.where(self.single, 1.0, self.level)[..., None]
        self.relative = torch.where(self.single[..., None], 0.0, variance / relative)

    def check(self) -> None:
        """Raise a UserError if a point has fewer observations than coefficients, or if no point has any."""
        counts, needed = (self.weights > 0).sum(-1), self.design.shape[-1] + 2
        few = counts[(counts > 0) & (counts < needed)]
        if few.numel() or not counts.any():
            fewest = int(few.min()) if few.numel() else 0
            raise UserError(f"EMOS: {fewest} observations for {needed} coefficients; fit on more dates")

    def _average(self, values: Tensor) -> Tensor:
        """Return the weighted mean over samples."""
        return (self.weights * values).sum(-1) / self.total

    def _deviation(self, values: Tensor) -> Tensor:
        """Return the standard deviation over samples. If the values are constant, return their mean magnitude."""
        spread = self._average((values - self._average(values)[..., None]) ** 2).sqrt()
        size = self._average(values.abs())
        return torch.where(spread > 1e-9 * size, spread, size)

    def solve(self, prior: Emos | None, strength: float, start: Emos | None, iterations: int, tolerance: float) -> Emos:
        """Take damped Gauss-Newton steps at all points until all have converged, at most `iterations`."""
        goal = self._start() if prior is None else self._inwards(prior)
        pull = torch.full_like(goal, strength if prior is not None else 0.0)
        if prior is not None and strength > 0:
            pull[..., 0] = self._pull_of_bias(goal)
            # The errors of a point may be a tenth of those elsewhere. The prior's scale is therefore brought close to
            # the point's own errors.
            size = goal[..., -2:].norm(dim=-1, keepdim=True).clamp(min=_TINY)
            goal[..., -2:] *= size.clamp(1 / _REACH, _REACH) / size
        theta = self._better(goal, self._start() if start is None else self._inwards(start), goal, pull)
        damping = torch.full_like(self.total, _START_DAMPING)
        value, gradient, curvature = self._expand(theta, goal, pull)
        for _ in range(iterations):
            step = _damped_step(gradient, curvature, damping)
            # Each point takes its step only if its value falls, and adapts its own damping to that.
            trial = self._expand(theta + step, goal, pull)
            better = trial[0] < value
            theta = torch.where(better[..., None], theta + step, theta)
            value = torch.where(better, trial[0], value)
            gradient = torch.where(better[..., None], trial[1], gradient)
            curvature = torch.where(better[..., None, None], trial[2], curvature)
            damping = torch.where(better, damping / 10, damping * 5).clamp(_LEAST_DAMPING, _MOST_DAMPING)
            # If the damping has reached its limit, no step improves the value any more, so the point has converged.
            if bool(((step.abs().amax(-1) < tolerance) | (damping >= _MOST_DAMPING)).all()):
                break
        return self._outwards(theta)

    def _better(self, one: Tensor, other: Tensor, goal: Tensor, pull: Tensor) -> Tensor:
        """Return at each point the start with the lower value: a fit that starts far away would need many steps."""
        values = [self._expand(theta, goal, pull)[0] for theta in (one, other)]
        return torch.where((values[0] < values[1])[..., None], one, other)

    def _pull_of_bias(self, goal: Tensor) -> float:
        """Return the number of samples that the prior's intercept counts for: 1 / (2 V).

        V is the variance of biases between points, in units of the variance of errors: the mean square by which the
        points' biases differ from the prior, minus the part 1 / D that is due to chance.
        """
        away = self._start()[..., 0] - goal[..., 0]
        seen = (self.weights > 0).any(-1)  # a point without observations says nothing about biases
        signal = float((away[seen] ** 2).mean() - (1 / self.total[seen]).mean())
        return 0.5 / max(signal, _LEAST_SIGNAL)

    def _start(self) -> Tensor:
        """Return a simple start: the mean error, slope one, and half of the error variance from each of c and d.

        For a single member, all of it comes from c.
        """
        theta = self.y.new_zeros(*self.total.shape, self.design.shape[-1] + 2)
        theta[..., 0] = self._average(self.y - self.mean) / self.unit
        theta[..., -2] = torch.where(self.single, 1.0, math.sqrt(0.5))
        theta[..., -1] = torch.where(self.single, 0.0, math.sqrt(0.5))
        return theta

    def _expand(self, theta: Tensor, goal: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return value (...), gradient (..., P) and curvature (..., P, P) of the sum of CRPS plus the prior's pull."""
        location = (self.design * theta[..., None, :-2]).sum(-1)
        root_c, root_d = theta[..., -2, None], theta[..., -1, None]
        scale = torch.sqrt(root_c**2 + root_d**2 * self.relative + _TINY)
        score, by_location, by_scale, bend = self._score(location, scale)
        z = ((self.y - self.mean) / self.unit[..., None] - location) / scale
        by_roots = torch.stack([root_c / scale, root_d * self.relative / scale], -1)
        # d CRPS = by_location d location + by_scale d scale, and the curvature is bend (d location + z d scale)^2
        share = self.weights[..., None]
        gradient = torch.cat([by_location[..., None] * self.design, by_scale[..., None] * by_roots], -1)
        weight = (bend.sqrt() * share[..., 0].sqrt())[..., None]
        direction = torch.cat([self.design, z[..., None] * by_roots], -1) * weight
        curvature = direction.mT @ direction
        away = theta - goal
        value = (self.weights * score).sum(-1) + (pull * away**2).sum(-1)
        return value, (gradient * share).sum(-2) + 2 * pull * away, curvature + torch.diag_embed(2 * pull)

    def _score(self, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the CRPS, its derivatives by location and scale, and `bend` of `_expand`, in the point's units."""
        z = ((self.y - self.mean) / self.unit[..., None] - location) / scale
        density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        bend = 2 * density / scale
        if self.family is Family.NORMAL:
            slope = torch.erf(z / math.sqrt(2.0))
            by_scale = 2 * density - 1 / math.sqrt(math.pi)
            return scale * (z * slope + by_scale), -slope, by_scale, bend
        unit = self.unit[..., None]
        # For all other distributions, automatic differentiation gives the gradient of their own CRPS.
        with torch.enable_grad():
            mu, sigma = location.detach().requires_grad_(), scale.detach().requires_grad_()
            score = distributions.crps(self.family, self.mean + unit * mu, unit * sigma, self.y) / unit
            by_location, by_scale = torch.autograd.grad(score.sum(), (mu, sigma))
        return score.detach(), by_location, by_scale, bend

    def _inwards(self, prior: Emos) -> Tensor:
        """Convert coefficients to parameters in the point's units. Another number of seasonal terms gives zeros."""
        shape = self.total.shape
        a, b, c, d = (v.expand(shape) for v in (prior.a, prior.b, prior.c, prior.d))
        season = prior.season.expand(*shape, -1)
        if season.shape[-1] != self.season.shape[-1]:
            season = self.season.new_zeros(*shape, self.season.shape[-1])
        ends = [(a + (b - 1) * self.centre) / self.unit, (b - 1) * self.width / self.unit]
        # The parameters are roots, so c and d cannot become negative.
        roots = [c.sqrt() / self.unit, (d * self.level).sqrt() / self.unit]
        return torch.cat([torch.stack(ends, -1), season / self.unit[..., None], torch.stack(roots, -1)], -1)

    def _outwards(self, theta: Tensor) -> Emos:
        """Convert parameters in the point's units to coefficients."""
        slope = theta[..., 1] * self.unit / self.width
        a = theta[..., 0] * self.unit - slope * self.centre
        c = (theta[..., -2] * self.unit) ** 2
        d = torch.where(self.single, 0.0, (theta[..., -1] * self.unit) ** 2 / torch.where(self.single, 1.0, self.level))
        return Emos(a, 1 + slope, c, d, theta[..., 2:-2] * self.unit[..., None], self.family)


def _positive(values: Tensor) -> Tensor:
    """Replace values that are not positive by one, so that division by them is safe."""
    return torch.where(values > 0, values, 1.0)


def _damped_step(gradient: Tensor, curvature: Tensor, damping: Tensor) -> Tensor:
    """Solve for the Levenberg-Marquardt step of each point."""
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    # The floor keeps the matrix regular if a parameter has no effect, such as the root of d of a single member.
    floor = 1e-9 * diagonal.amax(-1, keepdim=True) + _TINY
    matrix = curvature + torch.diag_embed(damping[..., None] * diagonal + floor)
    return -torch.linalg.solve(matrix, gradient[..., None])[..., 0]
