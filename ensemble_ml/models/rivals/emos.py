"""EMOS by minimum CRPS (Gneiting et al. 2005, doi:10.1175/MWR2904.1), fitted at all points at once.

    location = r + a + b (m - r) + e_1 x_1 + ... + e_K x_K        scale^2 = c + d s^2        c, d >= 0

m and s^2 are mean and variance of the members, x_k seasonal terms, r a reference that is given: the mean of m over the
training dates at each point, or zero. With zero, points that share coefficients, or are drawn to shared ones, pay for
the differences of their climates: two fields with the same anomalies would have other scores.

The CRPS of a normal law is convex in (location, scale), with the rank-one curvature 2 phi(z) / scale [1 z; z z^2]. So
each point takes damped Gauss-Newton steps of its own (Levenberg-Marquardt), in units of its own errors and with c and d
as squares; all points move in the same batched operations. Other families take the same curvature and the exact
gradient of their own CRPS. Deterministic.

Axes: D sample (date), K seasonal term, P parameter; whatever stands before D is a problem of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models import distributions

_TINY = 1e-12
_LEAST_UNIT = 0.02
_REACH = 1.5  # of a point's own typical error
_LEAST_SIGNAL = 1e-3  # variance of biases between points, over that of errors
_START_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-2, 1e-9, 1e12


@dataclass(frozen=True, eq=False)
class Emos:
    """Coefficients of the form at the head of the file; `a`, `b`, `c`, `d` (...), `season` (..., K), float64."""

    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    season: Tensor
    family: Family = Family.NORMAL

    def __call__(
        self, mean: Any, variance: Any, season: Any = None, reference: Any = 0.0
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return location and scale (..., D) for the members' mean and variance (..., D), seasonal terms (..., D, K)
        and the reference r, broadcast against the mean."""
        m, s2, r = _tensor(mean), _tensor(variance), _tensor(reference)
        location = r + self.a[..., None] + self.b[..., None] * (m - r)
        if season is not None and self.season.shape[-1]:
            location = location + (_tensor(season) * self.season[..., None, :]).sum(-1)
        return location, torch.sqrt(self.c[..., None] + self.d[..., None] * s2)

    def at(self, points: slice) -> Emos:
        """The coefficients of some points of a vector of them."""
        return replace(self, **{name: getattr(self, name)[points] for name in ("a", "b", "c", "d", "season")})

    def crps(self, mean: Any, variance: Any, observation: Any, season: Any = None, reference: Any = 0.0) -> Tensor:
        """Return the CRPS (..., D) of these forecasts against `observation` (..., D)."""
        return distributions.crps(self.family, *self(mean, variance, season, reference), _tensor(observation))


def merged(parts: Sequence[Emos], slices: Sequence[slice]) -> Emos:
    """What `Emos.at` took apart, from all parts of a vector of points."""
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
    """Fit the coefficients at which the mean CRPS is smallest, at each point.

    Args:
        mean, variance: (..., D) of the members (variance with ddof = 1; zeros where there is one member, then d = 0).
        observation: (..., D), the truth in the same units; NaN is left out.
        season: (..., D, K) seasonal terms; None for none.
        reference: r, broadcast against `mean`; coefficients belong to it.
        family: law of the forecast.
        weights: (..., D) of the samples.
        prior: coefficients to draw towards, broadcast against (...); `strength` says how many samples it
            counts for; for `a` that follows from how far biases differ from point to point.
        start: coefficients to begin with, or the prior's where those are better; None for simple estimates.
        iterations, tolerance: steps at most, and the step (in units of a typical error) at which a point has arrived.

    Raises:
        UserError: shapes differ, or a point has fewer observations than coefficients (one without any keeps the start).
    """
    m, s2, y = _tensor(mean), _tensor(variance), _tensor(observation)
    shapes = [tuple(v.shape) for v in (m, s2, y)]
    if len(set(shapes)) > 1:
        raise UserError(f"EMOS: mean, variance and observation have shapes {shapes}; they must be equal")
    problem = _Problem(m, s2, y, _terms(season, y), _weights(weights, y), family, _tensor(reference))
    problem.check()
    return problem.solve(prior, strength, start, iterations, tolerance)


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values).double()


def _terms(season: Any, y: Tensor) -> Tensor:
    return y.new_zeros(*y.shape, 0) if season is None else _tensor(season).expand(*y.shape, -1)


def _weights(weights: Any, y: Tensor) -> Tensor:
    given = torch.ones_like(y) if weights is None else _tensor(weights).expand_as(y)
    return torch.where(torch.isfinite(y), given, 0.0)


class _Problem:
    """One fit; parameters theta (..., P) are intercept, slope, seasonal terms, root c, root d in the point's units."""

    def __init__(
        self, mean: Tensor, variance: Tensor, y: Tensor, season: Tensor, weights: Tensor, family: Family,
        reference: Tensor,
    ):  # fmt: skip
        self.mean, self.variance, self.season, self.weights, self.family = mean, variance, season, weights, family
        self.total = weights.sum(-1).clamp(min=_TINY)
        self.y = torch.where(weights > 0, y, mean)
        error, anomaly = self.y - mean, mean - reference
        self.centre = self._average(anomaly)
        self.width = _positive(self._deviation(anomaly))
        # A point that never erred (rain in a desert) still reckons in a sensible share of the others' errors.
        unit = self._deviation(error)
        self.unit = _positive(torch.maximum(unit, _LEAST_UNIT * unit.square().mean().sqrt()))
        self.level = self._average(variance)
        self.single = self.level <= 0
        normal = (anomaly - self.centre[..., None]) / self.width[..., None]
        # (..., D, 2 + K): the design of the location, which is m + unit * design . theta
        self.design = torch.cat([torch.ones_like(mean)[..., None], normal[..., None], season], -1)
        relative = torch.where(self.single, 1.0, self.level)[..., None]
        self.relative = torch.where(self.single[..., None], 0.0, variance / relative)

    def check(self) -> None:
        counts, needed = (self.weights > 0).sum(-1), self.design.shape[-1] + 2
        few = counts[(counts > 0) & (counts < needed)]
        if few.numel() or not counts.any():
            fewest = int(few.min()) if few.numel() else 0
            raise UserError(f"EMOS: {fewest} observations for {needed} coefficients; fit on more dates")

    def _average(self, values: Tensor) -> Tensor:
        return (self.weights * values).sum(-1) / self.total

    def _deviation(self, values: Tensor) -> Tensor:
        spread = self._average((values - self._average(values)[..., None]) ** 2).sqrt()
        size = self._average(values.abs())
        return torch.where(spread > 1e-9 * size, spread, size)

    def solve(self, prior: Emos | None, strength: float, start: Emos | None, iterations: int, tolerance: float) -> Emos:
        goal = self._start() if prior is None else self._inwards(prior)
        pull = torch.full_like(goal, strength if prior is not None else 0.0)
        if prior is not None and strength > 0:
            pull[..., 0] = self._pull_of_bias(goal)
            # A point may err by a tenth of what is usual elsewhere: the prior's scale comes within reach of its own.
            size = goal[..., -2:].norm(dim=-1, keepdim=True).clamp(min=_TINY)
            goal[..., -2:] *= size.clamp(1 / _REACH, _REACH) / size
        theta = self._better(goal, self._start() if start is None else self._inwards(start), goal, pull)
        damping = torch.full_like(self.total, _START_DAMPING)
        value, gradient, curvature = self._expand(theta, goal, pull)
        for _ in range(iterations):
            step = _damped_step(gradient, curvature, damping)
            trial = self._expand(theta + step, goal, pull)
            better = trial[0] < value
            theta = torch.where(better[..., None], theta + step, theta)
            value = torch.where(better, trial[0], value)
            gradient = torch.where(better[..., None], trial[1], gradient)
            curvature = torch.where(better[..., None, None], trial[2], curvature)
            damping = torch.where(better, damping / 10, damping * 5).clamp(_LEAST_DAMPING, _MOST_DAMPING)
            # A step that does not help any more is as good as none.
            if bool(((step.abs().amax(-1) < tolerance) | (damping >= _MOST_DAMPING)).all()):
                break
        return self._outwards(theta)

    def _better(self, one: Tensor, other: Tensor, goal: Tensor, pull: Tensor) -> Tensor:
        """At each point the start with the lower value: from a prior that is far away, steps would be short."""
        values = [self._expand(theta, goal, pull)[0] for theta in (one, other)]
        return torch.where((values[0] < values[1])[..., None], one, other)

    def _pull_of_bias(self, goal: Tensor) -> float:
        """How many dates the prior's intercept counts for: as many as biases differ little from point to point.

        With errors of variance one, biases of variance V (what is left of their spread between points without 1 / D)
        and the curvature of the CRPS near 1 / 2, the Bayesian weight is 1 / (2 V).
        """
        away = self._start()[..., 0] - goal[..., 0]
        seen = (self.weights > 0).any(-1)  # a point without observations tells nothing of biases
        signal = float((away[seen] ** 2).mean() - (1 / self.total[seen]).mean())
        return 0.5 / max(signal, _LEAST_SIGNAL)

    def _start(self) -> Tensor:
        """The mean error, slope one, and half of the error's variance from either term."""
        theta = self.y.new_zeros(*self.total.shape, self.design.shape[-1] + 2)
        theta[..., 0] = self._average(self.y - self.mean) / self.unit
        theta[..., -2] = torch.where(self.single, 1.0, math.sqrt(0.5))
        theta[..., -1] = torch.where(self.single, 0.0, math.sqrt(0.5))
        return theta

    def _expand(self, theta: Tensor, goal: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value (...), gradient (..., P) and curvature (..., P, P) of the sum of CRPS in the point's units."""
        location = (self.design * theta[..., None, :-2]).sum(-1)
        root_c, root_d = theta[..., -2, None], theta[..., -1, None]
        scale = torch.sqrt(root_c**2 + root_d**2 * self.relative + _TINY)
        score, by_location, by_scale, bend = self._score(location, scale)
        z = ((self.y - self.mean) / self.unit[..., None] - location) / scale
        by_roots = torch.stack([root_c / scale, root_d * self.relative / scale], -1)
        # d CRPS = by_location d location + by_scale d scale, and the curvature is bend (d location + z d scale)^2
        share = self.weights[..., None]
        gradient = torch.cat([by_location[..., None] * self.design, by_scale[..., None] * by_roots], -1)
        direction = (
            torch.cat([self.design, z[..., None] * by_roots], -1) * (bend.sqrt() * share[..., 0].sqrt())[..., None]
        )
        curvature = direction.mT @ direction
        away = theta - goal
        value = (self.weights * score).sum(-1) + (pull * away**2).sum(-1)
        return value, (gradient * share).sum(-2) + 2 * pull * away, curvature + torch.diag_embed(2 * pull)

    def _score(self, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """CRPS, its derivatives by location and scale, and a curvature, in the point's units."""
        z = ((self.y - self.mean) / self.unit[..., None] - location) / scale
        density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        bend = 2 * density / scale
        if self.family is Family.NORMAL:
            slope = torch.erf(z / math.sqrt(2.0))
            by_scale = 2 * density - 1 / math.sqrt(math.pi)
            return scale * (z * slope + by_scale), -slope, by_scale, bend
        unit = self.unit[..., None]
        with torch.enable_grad():
            mu, sigma = location.detach().requires_grad_(), scale.detach().requires_grad_()
            score = distributions.crps(self.family, self.mean + unit * mu, unit * sigma, self.y) / unit
            by_location, by_scale = torch.autograd.grad(score.sum(), (mu, sigma))
        return score.detach(), by_location, by_scale, bend

    def _inwards(self, prior: Emos) -> Tensor:
        shape = self.total.shape
        a, b, c, d = (v.expand(shape) for v in (prior.a, prior.b, prior.c, prior.d))
        season = prior.season.expand(*shape, -1)
        if season.shape[-1] != self.season.shape[-1]:
            season = self.season.new_zeros(*shape, self.season.shape[-1])
        ends = [(a + (b - 1) * self.centre) / self.unit, (b - 1) * self.width / self.unit]
        roots = [c.sqrt() / self.unit, (d * self.level).sqrt() / self.unit]
        return torch.cat([torch.stack(ends, -1), season / self.unit[..., None], torch.stack(roots, -1)], -1)

    def _outwards(self, theta: Tensor) -> Emos:
        slope = theta[..., 1] * self.unit / self.width
        a = theta[..., 0] * self.unit - slope * self.centre
        c = (theta[..., -2] * self.unit) ** 2
        d = torch.where(self.single, 0.0, (theta[..., -1] * self.unit) ** 2 / torch.where(self.single, 1.0, self.level))
        return Emos(a, 1 + slope, c, d, theta[..., 2:-2] * self.unit[..., None], self.family)


def _positive(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1.0)


def _damped_step(gradient: Tensor, curvature: Tensor, damping: Tensor) -> Tensor:
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    floor = 1e-9 * diagonal.amax(-1, keepdim=True) + _TINY
    matrix = curvature + torch.diag_embed(damping[..., None] * diagonal + floor)
    return -torch.linalg.solve(matrix, gradient[..., None])[..., 0]
