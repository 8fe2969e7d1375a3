"""Turn the parameters that a model predicts into the fields that a forecast holds.

Axes: B date in a batch, M member, K quantile or threshold, T lead, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.config import PredictConfig
from ensemble_ml.distributions import cdf, moments, quantile, remap_members
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.inference.contents import Kind, Output
from ensemble_ml.inference.inputs import Sample
from ensemble_ml.inference.select import Places
from ensemble_ml.models import ModelSpec, Prediction

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Wanted:
    """The optional contents of a forecast.

    Attributes:
        quantiles: levels between 0 and 1, ascending.
        thresholds: thresholds of each variable in its units, ascending.
        members: whether remapped members are written.
    """

    quantiles: tuple[float, ...] = ()
    thresholds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    members: bool = False


def wanted_outputs(config: PredictConfig, spec: ModelSpec) -> Wanted:
    """Check the outputs that the configuration asks for against those that the model predicts.

    Returns:
        The optional contents of each forecast; none if the model predicts spread alone.

    Raises:
        UserError: a threshold is for a variable that is not predicted, is not finite, or lies outside the bounds of its
            variable; the list of a variable is empty; or the settings ask for thresholds or members and the model
            predicts spread alone.
    """
    thresholds = {str(name): tuple(sorted(set(map(float, values)))) for name, values in config.thresholds.items()}
    names = (*spec.variables, *spec.surface)
    for name, values in thresholds.items():
        if name not in names:
            raise UserError(f"thresholds: {name} is not predicted; the checkpoint predicts {', '.join(names)}")
        if not values or not np.isfinite(values).all():
            raise UserError(f"thresholds.{name}={list(values)}: give one finite number or more, in SI units")
        _check_within_bounds(name, values)
    if not spec.config.postprocess:
        if thresholds or config.members_out:
            asked = "thresholds" if thresholds else "members_out"
            raise UserError(f"{asked}: the checkpoint has no postprocess head and predicts spread alone; leave it out")
        # Quantiles have a default, so their presence does not mean that the user asked for them.
        return Wanted()
    return Wanted(tuple(sorted(set(config.quantiles))), thresholds, config.members_out)


def _check_within_bounds(name: str, values: Sequence[float]) -> None:
    """Raise a UserError if every value of a variable exceeds a threshold, or none can.

    A common mistake is a cloud cover of 50 in place of 0.5.
    """
    known = registered(name)
    lower, upper = known.family.bounds
    for value in values:
        # No value exceeds the upper bound itself.
        if not lower <= value < upper:
            most = "" if upper == np.inf else f" to {upper:g}"
            raise UserError(
                f"thresholds.{name}={value:g}: {known.long_name} goes from {lower:g}{most}, in units of {known.units};"
                " give a threshold in that range"
            )


def tell_of_far_thresholds(wanted: Wanted, ranges: Mapping[str, Any]) -> None:
    """Warn once about thresholds beyond all values in training. They may have been given in wrong units.

    `ranges` are those in training, {"t": {"500": [smallest, largest], ...}, "t2m": [smallest, largest]}, in SI units.
    """
    texts = []
    for name, values in wanted.thresholds.items():
        of_levels = ranges[name].values() if isinstance(ranges[name], Mapping) else [ranges[name]]
        low, high = min(pair[0] for pair in of_levels), max(pair[1] for pair in of_levels)
        far = [f"{value:g}" for value in values if not low <= value <= high]
        units = registered(name).units
        if far:
            texts.append(f"{name} {', '.join(far)} {units} (it was {low:.6g} to {high:.6g} {units} in training)")
    if texts:
        text = "probabilities are extrapolated there, near 0 far above that range and near 1 far below it"
        log.warning("thresholds: %s: %s; are these the units meant?", "; ".join(texts), text)


def kinds_of(spec: ModelSpec, name: str, wanted: Wanted) -> list[Kind]:
    """Return the kinds of fields that `outputs` makes of a variable, in the same order."""
    kinds = []
    if spec.config.postprocess:
        kinds = [Kind.MEAN, Kind.STDDEV, Kind.LOCATION, Kind.SCALE]
        kinds += [Kind.QUANTILE] * bool(wanted.quantiles) + [Kind.PROBABILITY] * bool(wanted.thresholds.get(name))
        kinds += [Kind.MEMBER] * wanted.members
    return kinds + [Kind.SPREAD] * spec.config.spread


def outputs(
    spec: ModelSpec,
    prediction: Prediction,
    at: int,
    sample: Sample,
    wanted: Wanted,
    places: Places,
    only: str | None = None,
) -> Iterator[Output]:
    """Yield the data variables of one date of a batch, one at a time, cut to `places`.

    Everything is computed on the whole grid and cut afterwards. A vectorised function may round the last few elements
    of an array differently, and a region has to equal the same part of the whole field bit for bit.

    Args:
        spec: the inputs and outputs of the model.
        prediction: the predicted parameters of the batch, on the CPU.
        at: position of the date in the batch.
        sample: the members of the date, with their mean and spread.
        wanted: the optional contents.
        places: the grid points to write.
        only: name of the one variable to make, or None for all.

    Raises:
        UserError: a prediction is not finite, or a field made from it is infinite.
    """
    for name in (*spec.variables, *spec.surface):
        if only in (None, name):
            for kind, values in _Variable(spec, prediction, name, at, sample).masked_fields(wanted):
                yield Output(name, kind, places.cut(values.float().numpy()))


def order_of_equals(init_time: np.datetime64, count: int) -> np.ndarray:
    """Return the order in which equal members of an init time are ranked.

    The order is pseudo-random, and depends only on the init time (to the minute). A rule that moves on by one member
    each hour would favour the same member every day if M divides 24.

    Returns:
        A permutation of the positions of M = `count` members, (M,) int64.
    """
    minute = int(init_time.astype("datetime64[m]").astype(np.int64))
    # NumPy promises the same raw random words in all versions, but not the same permutations. So raw words are sorted.
    return np.argsort(np.random.Philox(key=minute % 2**64).random_raw(count), kind="stable")


class _Variable:
    """A variable of one date: its parameters (T, [Z,] Y, X) and raw members (M, T, [Z,] Y, X)."""

    def __init__(self, spec: ModelSpec, prediction: Prediction, name: str, at: int, sample: Sample):
        self.location, self.scale, self.spread = (
            None if values is None else self._own(values[at], spec, name)
            for values in (prediction.location, prediction.scale, prediction.spread)
        )
        self.family: Family = spec.family(name)
        self._spec, self._name, self._sample = spec, name, sample

    @staticmethod
    def _own(values: Tensor, spec: ModelSpec, name: str) -> Tensor:
        """Return the fields of a variable, (T, F, Y, X) -> (T, [Z,] Y, X)."""
        own = values[:, spec.of(name)]
        return own[:, 0] if name in spec.surface else own

    def _raw(self, values: np.ndarray) -> Tensor:
        """Return this variable of the members' mean or spread (T_in, F, Y, X) at the predicted leads."""
        return self._own(torch.from_numpy(values[self._spec.lead_positions]), self._spec, self._name)

    def _members(self) -> Tensor:
        """Return the members of this variable at the predicted leads, (M, T, [Z,] Y, X)."""
        spec, members, name = self._spec, self._sample.members, self._name
        if name in spec.surface:
            own = members.surface[:, :, spec.surface.index(name)]
        else:
            own = members.pressure[:, :, spec.variables.index(name)]
        return torch.from_numpy(own.take(spec.lead_positions, 1))

    def masked_fields(self, wanted: Wanted) -> Iterator[tuple[Kind, Tensor]]:
        """Yield the results of `fields`, with NaN where none of the members has a value.

        Raises:
            UserError: the model predicts something that is not finite elsewhere.
        """
        name, masked = self._name, bool(self._spec.masked)
        # The mean of the members is NaN exactly where none of them has a value.
        hidden = torch.isnan(self._raw(self._sample.mean)) if masked else torch.zeros((), dtype=torch.bool)
        for values in (self.location, self.scale, self.spread):
            if values is not None and not (torch.isfinite(values) | hidden).all():
                raise UserError(f"{name}: the prediction is not finite; the checkpoint is of no use for this input")
        for kind, values in self.fields(wanted):
            # A remapped member is NaN where the member is absent, so NaN is not refused here.
            if (torch.isinf(values) & ~hidden).any():
                raise UserError(f"{name}: {kind.value} is not finite; the checkpoint is of no use for this input")
            yield kind, torch.where(hidden, torch.nan, values) if hidden.any() else values

    def fields(self, wanted: Wanted) -> Iterator[tuple[Kind, Tensor]]:
        """Yield the fields of this variable that the forecast holds, in the order of the file."""
        if self.location is not None and self.scale is not None:
            thresholds = wanted.thresholds.get(self._name, ())
            yield from self._distribution(self.location, self.scale, wanted.quantiles, thresholds)
            if wanted.members:
                sample = self._sample
                members, mean, spread = self._members(), self._raw(sample.mean), self._raw(sample.spread)
                order = torch.from_numpy(order_of_equals(sample.start.init_time, len(members)))
                distribution = self.location, self.scale, self.family
                yield Kind.MEMBER, remap_members(members, mean, spread, *distribution, order)
        if self.spread is not None:
            yield Kind.SPREAD, self.spread

    def _distribution(
        self, location: Tensor, scale: Tensor, quantiles: Sequence[float], thresholds: Sequence[float]
    ) -> Iterator[tuple[Kind, Tensor]]:
        """Yield moments, parameters, quantiles and probabilities of the predicted distribution."""
        mean, deviation = moments(self.family, location, scale)
        yield Kind.MEAN, mean
        yield Kind.STDDEV, deviation
        yield Kind.LOCATION, location
        yield Kind.SCALE, scale
        if quantiles:
            yield Kind.QUANTILE, torch.stack([quantile(self.family, location, scale, level) for level in quantiles])
        if thresholds:
            # In single precision, 1 - P would lose small probabilities.
            wide = location.double(), scale.double()
            below = [cdf(self.family, *wide, torch.tensor(value, dtype=torch.float64)) for value in thresholds]
            yield Kind.PROBABILITY, 1 - torch.stack(below)
