"""What has to be the same: on all ranks, in a run that goes on, and in one that begins from another's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

import numpy as np

from ensemble_ml.config import MomentumKept, TrainConfig
from ensemble_ml.config.optim import OF_VOTES, ExchangeName
from ensemble_ml.errors import UserError
from ensemble_ml.loading.reader import iso
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.surroundings import surroundings_shapes
from ensemble_ml.store.source import Source
from ensemble_ml.training.checkpoint import Checkpoint

# Settings that may differ when a run goes on: none of them changes what the steps before did to the weights. The same
# store may lie elsewhere.
_FREE = (
    "run",
    "output",
    "resume",
    "threads",
    "max_minutes",
    "validate_every",
    "patience",
    "checkpoint_every",
    "checkpoint_minutes",
    "data.store",
    "optim.nonfinite",
)
_OWN = ("threads", "data.store", *(f"loading.{key}" for key in ("ram", "disk", "folder", "threads", "host", "node")))
_FREE_GROUPS = ("loading.", "tracking.", "parallel.")
# Of those groups: which rank computes a sample decides what each one votes, and the order of a sum.
_FIXED = ("loading.assign",)


def common_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings that have to be the same on all ranks; what each host has of its own may differ."""
    return {k: v for k, v in flat(plain_config(config)).items() if k not in _OWN}


def refuse_other_settings(config: TrainConfig, checkpoint: Checkpoint, *, also: Sequence[str] = ()) -> None:
    """Raise a UserError where a run was begun with other settings than may differ when it goes on; nor may `also`."""
    ours, theirs = flat(plain_config(config)), flat(checkpoint.meta["config"])
    theirs.setdefault("model.departures", False)  # runs from before there were any
    if ours["model.depth"] == "auto":  # the number was settled when the run began
        ours["model.depth"] = theirs["model.depth"]
    averaged = config.optim.votes and theirs.get("optim.momentum_kept") == MomentumKept.mean.value
    if averaged:  # where checkpoints are
        also = (*also, "checkpoint_every", "validate_every")
    free = {k for k in {**ours, **theirs} if k in _FREE or (k.startswith(_FREE_GROUPS) and k not in _FIXED)}
    fixed = [k for k in {**ours, **theirs} if k in also or k not in free]
    fixed = [k for k in fixed if k != "init_from"]  # cannot be given with resume; its weights are in the checkpoint
    if not config.optim.votes:  # older runs could have settings of votes that nothing took notice of
        fixed = [k for k in fixed if k not in OF_VOTES]
    if config.optim.exchange is ExchangeName.distributed_lion:  # nor of these
        fixed = [k for k in fixed if k not in ("optim.bits", "optim.scale")]
    differ = [k for k in fixed if ours.get(k) != theirs.get(k)]
    if differ:
        told = "; ".join(f"{k}={ours.get(k)} (was {theirs.get(k)})" for k in differ)
        raise UserError(f"resume: settings differ from {checkpoint.path}: {told}; give the same, or use init_from")


def check_same_data(source: Source, checkpoint: Checkpoint) -> None:
    """Raise a UserError where the store is not the one that the run began with."""
    was, now = checkpoint.meta["data_fingerprint"], source.fingerprint()
    if was != now:
        raise UserError(
            f"data.store={source.path}: fingerprint {now}, the run began with {was}; give that store, or use init_from"
        )


def refuse_other_layout(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise a UserError that says in what the spec of a checkpoint to start from differs."""
    ours, theirs = flat(spec.to_json()), flat(checkpoint.spec.to_json())
    harmless = ["config.precision", "config.min_members"]
    if surroundings_shapes(spec) == surroundings_shapes(checkpoint.spec):  # both have these networks, or none
        harmless += ["config.surroundings", "config.residuals"]
    every = dict.fromkeys([*ours, *theirs])
    differ = [k for k in every if k not in harmless and ours.get(k) != theirs.get(k)]
    if differ:
        told = "; ".join(f"{k}: {_short(ours.get(k))} here, {_short(theirs.get(k))} there" for k in differ)
        raise UserError(f"init_from={checkpoint.path}: its layout differs: {told}; use the same settings")


def earlier_dates(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Start dates that a run which begins from `checkpoint` has in its weights: `training` dates taught them, by
    `validation` dates they were chosen, in the checkpoint's run and in those that it began from."""
    meta, parts = checkpoint.meta, ("training", "validation")
    before = meta.get("earlier_dates", {})
    return {part: sorted({*before.get(part, ()), *meta.get(f"{part}_dates", ())}) for part in parts}


def refuse_taught_validation(config: TrainConfig, init_time: np.ndarray, earlier: Mapping[str, Sequence[str]]) -> None:
    """Raise a UserError where start dates `init_time`, of the validation, are `earlier` training dates."""
    taught = sorted({iso(t) for t in init_time} & set(earlier["training"]))
    if taught:
        raise UserError(
            f"data.validation={config.data.validation}: {len(taught)} of its start dates, first {taught[0][:13]},"
            f" trained the weights of init_from={config.init_from}; choose dates apart, or the best checkpoint is"
            " chosen on what it was trained on"
        )


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration as JSON values, nested as its groups."""
    return _plain(asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, Enum) else value


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
