"""Read the members of init times, reduce them to the inputs of the model, and compare them with the training range.

Axes: B date in a batch, M member, T lead, F field (variables and levels, then surface variables), Y latitude,
X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.inference.starts import Start
from ensemble_ml.loading.batches import filled
from ensemble_ml.loading.reader import Reader, Span, day_of_year
from ensemble_ml.models import AnyModel, Climate, EnsembleInput, ModelSpec
from ensemble_ml.models.features import Features
from ensemble_ml.models.inputs import valid_shares
from ensemble_ml.store.source import Fields, Source

log = logging.getLogger(__name__)

_MARGIN = 0.1  # of the width of the training range: values closer to the range give no warning


@dataclass(frozen=True, eq=False)
class Sample:
    """The data of one init time.

    Attributes:
        start: the init time and its members.
        members: raw members, (M, T_in, ...), as the source has them. They take most of the memory of a date, so M is 0
            if nothing needs them.
        mean: (T_in, F, Y, X) mean of the members.
        spread: (T_in, F, Y, X) standard deviation of the members.
        remarks: sentences for the file, about values beyond the training range.
        extremes: smallest and largest value of each field, (F,) each; None if no training range is known.
    """

    start: Start
    members: Fields
    mean: np.ndarray
    spread: np.ndarray
    remarks: tuple[str, ...] = ()
    extremes: tuple[np.ndarray, np.ndarray] | None = None


class Samples:
    """A reader of samples, which warns once for each variable with values beyond the training range.

    Args:
        source: the reduced ensemble.
        spec: the inputs and outputs of the model.
        meta: the content of checkpoint.json, which may state the training range of the inputs.
        window: the rows and columns of the grid to read, as in `Reader`; None reads the whole grid.
        members: whether the output needs the members. The model may need them, too.
    """

    def __init__(
        self,
        source: Source,
        spec: ModelSpec,
        meta: Mapping[str, Any],
        window: tuple[Span, Span] | None = None,
        members: bool = True,
    ):
        self.reader, self.spec = Reader(source, spec, window=window), spec
        self._limits = _limits(spec, meta["input_range"]) if "input_range" in meta else None
        self._warned: set[str] = set()
        # Members are also needed for masks, and by models that look at single members.
        self._keep = members or bool(spec.masked) or spec.config.one_member or spec.takes_members

    def read(self, start: Start) -> Sample:
        """Read one init time.

        Args:
            start: the init time and its members.

        Raises:
            UserError: a field is missing, or a value is infinite, or NaN where its variable has no mask. The message
                names the variable, level, lead, date and member.
        """
        members = self.reader.forecast(start.date, start.positions)
        mean, spread = self.reader.reduced(members)
        extremes = None
        if self._limits is not None:
            extremes = _by_field(members, np.fmin.reduce), _by_field(members, np.fmax.reduce)
        # Members are dropped here, after the mean and spread were made of them: M = 0 keeps all other axes.
        if not self._keep:
            members = Fields(*(np.empty((0, *v.shape[1:]), v.dtype) for v in (members.pressure, members.surface)))
        return Sample(start, members, mean, spread, extremes=extremes)

    def check_together(self, sample: Sample, spatial: Communicator) -> None:
        """Refuse a masked field that has no value on any rank of the group.

        One rank alone cannot decide this, because its part of the grid may be all land, where sea surface temperature
        has no value.

        Args:
            sample: this rank's part of an init time.
            spatial: the ranks that share the date.

        Raises:
            UserError: there is such a field. All ranks raise it.
        """
        start, members = sample.start, sample.members
        for values, names in ((members.pressure, self.spec.variables), (members.surface, self.spec.surface)):
            if values.size:
                known = torch.from_numpy(np.isfinite(values).any((-2, -1)).astype(np.float32))
                # The maximum over the ranks is 1 if any of them has a value.
                spatial.all_reduce(known, op="max")
                self.reader.refuse(known.numpy() > 0, names, start.date, np.array(start.positions))

    def judged(self, sample: Sample) -> Sample:
        """Return the sample with remarks on values beyond the training range. Log each variable only once."""
        beyond = {} if sample.extremes is None else self._beyond(*sample.extremes)
        for name, text in beyond.items():
            if name not in self._warned:
                log.warning("input %s: %s", self.reader.source.path, text)
        self._warned |= beyond.keys()
        return replace(sample, remarks=tuple(beyond.values()))

    def _beyond(self, low: np.ndarray, high: np.ndarray) -> dict[str, str]:
        """Describe, for each variable beyond the training range at any level, the level where it is farthest beyond."""
        assert self._limits is not None
        limits = self._limits
        # The excess is measured in widths of the training range. A field that was constant in training gets a tiny
        # width.
        width = np.maximum(limits[:, 1] - limits[:, 0], np.finfo(np.float32).tiny)
        excess = np.maximum(limits[:, 0] - low, high - limits[:, 1]) / width
        found: dict[str, tuple[float, str]] = {}
        for index, (name, level) in enumerate(self.spec.names):
            if excess[index] > _MARGIN and excess[index] > found.get(name, (0.0, ""))[0]:
                above = high[index] - limits[index, 1] >= limits[index, 0] - low[index]
                value = high[index] if above else low[index]
                found[name] = excess[index], _describe(name, level, value, limits[index])
        return {name: text for name, (_, text) in found.items()}


def collate(samples: Sequence[Sample], spec: ModelSpec) -> EnsembleInput:
    """Collect samples into one batch. Their numbers of members may differ.

    Args:
        samples: the init times of the batch.
        spec: the inputs and outputs of the model.

    Returns:
        The inputs of the model, with the axis B in front. Members are included only if the model takes them, and filled
        up with zeros to the largest number.
    """

    def stack(arrays: Iterable[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(list(arrays)))

    single, every = spec.config.one_member, spec.takes_members
    most = max(len(s.start.positions) for s in samples)
    given = [s.members for s in samples]
    return EnsembleInput(
        stack(s.mean for s in samples),
        stack(s.spread for s in samples),
        torch.tensor([float(len(s.start.positions)) for s in samples]),
        torch.tensor([float(day_of_year(s.start.init_time)) for s in samples]),
        stack(Fields(one.pressure[0], one.surface[0]).joined() for one in given) if single else None,
        stack(filled(one.joined(), most) for one in given) if every else None,
        stack(valid_shares(spec, one.pressure, one.surface) for one in given) if spec.masked else None,
    )


def replace_static(model: AnyModel, source: Source) -> None:
    """Replace the static fields of the checkpoint in `model` by those of `source`.

    Args:
        model: the loaded model, which is changed.
        source: a source with static fields (orography, land mask).

    Raises:
        UserError: the source lacks a static field that the model takes.
    """
    spec, there = model.spec, source.static()
    absent = [name for name in spec.static if name not in there]
    if absent:
        held = ", ".join(there) or "none"
        raise UserError(f"static: {', '.join(absent)} missing, which the checkpoint takes; it holds {held}")
    climate = Climate.default(spec)
    climate.static = np.stack([there[name] for name in spec.static]) if spec.static else climate.static
    # Only the buffer `position`, which holds the static fields, is replaced. All other buffers stay those of the
    # training.
    model.features.load_state_dict({"position": Features(spec, climate.checked(spec)).position}, strict=False)


def _limits(spec: ModelSpec, ranges: Mapping[str, Any]) -> np.ndarray:
    """Return the training range of each field, (F, 2).

    The checkpoint has it as {"t": {"500": [smallest, largest], ...}, "t2m": [smallest, largest]}.
    """
    pairs = [ranges[name] if level is None else ranges[name][str(level)] for name, level in spec.names]
    return np.asarray(pairs, np.float64)


def _by_field(members: Fields, reduce: Any) -> np.ndarray:
    """Reduce members, leads and grid points to one number for each field, (F,). NaN is ignored."""
    upper = reduce(members.pressure, axis=(0, 1, 4, 5)) if members.pressure.size else np.zeros(0)
    flat = reduce(members.surface, axis=(0, 1, 3, 4)) if members.surface.size else np.zeros(0)
    return np.concatenate([upper.ravel(), flat.ravel()]).astype(np.float64)


def _describe(name: str, level: int | None, value: float, limits: np.ndarray) -> str:
    """Return in words how far a value lies beyond the training range."""
    units, where = field(name).units, "" if level is None else f" at {level} hPa"
    above = value > limits[1]
    distance, side = (value - limits[1], "above") if above else (limits[0] - value, "below")
    return (
        f"{name}{where} reaches {value:.6g} {units}, {distance:.3g} {side} the training range"
        f" ({limits[0]:.6g} to {limits[1]:.6g})"
    )
