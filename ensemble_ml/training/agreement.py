"""Check that settings and data agree: among ranks, with a resumed run, and with the checkpoint of `init_from`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from ensemble_ml.config import MomentumKept, TournamentConfig, TrainConfig
from ensemble_ml.config.training import OF_VOTES, ExchangeName
from ensemble_ml.errors import UserError
from ensemble_ml.folders import strict
from ensemble_ml.loading.reader import iso
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.points import point_shapes
from ensemble_ml.store.source import Source
from ensemble_ml.training.checkpoint import Checkpoint

# These settings may differ when a run is resumed, because the weights so far do not depend on them. The same store may
# have another path (see `check_same_data`).
_FREE = (
    "run",
    "output",
    "resume",
    "threads",
    "max_minutes",
    "validate_every",
    "patience",
    "until",
    "checkpoint_every",
    "checkpoint_minutes",
    "data.store",
    "model.recompute",
    "optim.nonfinite",
    "optim.replay",
)
# These settings may differ between ranks, because each host has its own.
_OWN = ("threads", "data.store", *(f"loading.{key}" for key in ("ram", "disk", "folder", "threads", "host", "node")))
_FREE_GROUPS = ("loading.", "tracking.", "parallel.")
# These settings of the groups must not differ: votes and the order of sums depend on which rank computes a sample, and
# each trainer has a state of its own.
_FIXED = ("loading.assign", "parallel.trainer")


def common_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that have to be equal on all ranks, by dotted key."""
    return {k: v for k, v in flat(plain_config(config)).items() if k not in _OWN}


def as_yaml(config: TrainConfig) -> str:
    """Return the settings as text in the form of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(plain_config(config)))


def deciding_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings on which the weights depend. Under a quorum, they also depend on the ranks in each vote."""
    ours = flat(plain_config(config))
    # All ranks vote in a step that a validation or a checkpoint follows, so these two intervals count here.
    return {k: v for k, v in ours.items() if k in ("validate_every", "checkpoint_every") or not _is_free(k)}


def _is_free(key: str) -> bool:
    """Return whether a setting may differ when a run is resumed."""
    return key in _FREE or (key.startswith(_FREE_GROUPS) and key not in _FIXED)


def refuse_other_settings(config: TrainConfig, checkpoint: Checkpoint, *, also: Sequence[str] = ()) -> None:
    """Raise a UserError if a run was begun with other settings, except for those that may differ when it is resumed."""
    ours = flat(plain_config(config))
    # Older runs do not have these settings.
    later: dict[str, Any] = {
        "model.departures": False,
        "model.bank": 0.0,
        "model.bank_templates": 2,
        "optim.quorum": "all",
        "optim.bound": 10,
        "parallel.trainer": 1,
        "objective": "truth",
        "distill": 1.0,
    }
    theirs = later | flat(plain_config(TournamentConfig()), "tournament.") | flat(checkpoint.meta["config"])
    # The run has replaced `auto` by a number.
    if ours["model.depth"] == "auto":
        ours["model.depth"] = theirs["model.depth"]
    # Momenta are averaged whenever a checkpoint is written, so later weights depend on the steps of checkpoints.
    if config.optim.votes and theirs.get("optim.momentum_kept") == MomentumKept.mean.value:
        also = (*also, "checkpoint_every", "validate_every")
    fixed = [k for k in {**ours, **theirs} if k in also or not _is_free(k)]
    fixed = [k for k in fixed if k != "init_from"]  # cannot be given with resume; its weights are in the checkpoint
    if config.teacher and checkpoint.meta.get("teacher"):  # it may have moved; `refuse_other_teacher` knows its weights
        fixed.remove("teacher")
    # Older runs accepted settings of votes even if they had no effect.
    if not config.optim.votes:
        fixed = [k for k in fixed if k not in OF_VOTES]
    if config.optim.exchange is ExchangeName.distributed_lion:  # here these two have no effect either
        fixed = [k for k in fixed if k not in ("optim.bits", "optim.scale")]
    differ = [k for k in fixed if ours.get(k) != theirs.get(k)]
    if differ:
        listed = "; ".join(f"{k}={ours.get(k)} (was {theirs.get(k)})" for k in differ)
        raise UserError(f"resume: settings differ from {checkpoint.path}: {listed}; give the same, or use init_from")


def check_same_data(source: Source, checkpoint: Checkpoint) -> None:
    """Raise a UserError if the store is not the one with which the run began."""
    was, now = checkpoint.meta["data_fingerprint"], source.fingerprint()
    if was != now:
        raise UserError(
            f"data.store={source.path}: fingerprint {now}, the run began with {was}; give that store, or use init_from"
        )


def refuse_other_teacher(teacher: Checkpoint, checkpoint: Checkpoint | None) -> None:
    """Raise a UserError if a resumed run has learned from another teacher so far. Older checkpoints do not tell."""
    was = checkpoint.meta.get("teacher") if checkpoint is not None else None
    if was not in (None, teacher.sha256):
        raise UserError(
            f"teacher={teacher.path}: has the sha256 {teacher.sha256[:16]}, the run has learned from {was[:16]} so far;"
            " give that checkpoint (the best of a run may have changed since), or use init_from"
        )


def refuse_other_layout(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise a UserError that names the differences if the checkpoint that `init_from` names has another spec."""
    ours, theirs = flat(spec.to_json()), flat(checkpoint.spec.to_json())
    harmless = ["config.precision", "config.min_members", "config.recompute"]
    # If the shapes are equal, `points` made no difference: both models have the same point network, or none.
    if point_shapes(spec) == point_shapes(checkpoint.spec):
        harmless += ["config.points"]
    every = dict.fromkeys([*ours, *theirs])
    differ = [k for k in every if k not in harmless and ours.get(k) != theirs.get(k)]
    if differ:
        listed = "; ".join(f"{k}: {_short(ours.get(k))} here, {_short(theirs.get(k))} there" for k in differ)
        raise UserError(f"init_from={checkpoint.path}: its model differs: {listed}; use the same settings")


def earlier_dates(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the init times on which the weights of a checkpoint depend.

    These are the dates of its own run, and of the runs from which that run was initialised.

    Returns:
        ISO dates by use: those of `training` were trained on, and those of `validation` chose a checkpoint.
    """
    meta, parts = checkpoint.meta, ("training", "validation")
    before = meta.get("earlier_dates", {})
    return {part: sorted({*before.get(part, ()), *meta.get(f"{part}_dates", ())}) for part in parts}


def refuse_taught_validation(config: TrainConfig, init_time: np.ndarray, earlier: Mapping[str, Sequence[str]]) -> None:
    """Raise a UserError if earlier runs were trained on validation dates of this run.

    The best checkpoint would be chosen by its score on data that it was trained on. `earlier` is the result of
    `earlier_dates`.
    """
    taught = sorted({iso(t) for t in init_time} & set(earlier["training"]))
    if taught:
        raise UserError(
            f"data.validation={config.data.validation}: {len(taught)} of its init times, first {taught[0][:13]},"
            f" trained the weights of init_from={config.init_from}; choose different dates; the best checkpoint would"
            " otherwise be chosen by dates that it was trained on"
        )


def plain_config(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of JSON values."""
    return strict(asdict(config))


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict with dotted keys that begin with `prefix`, such as "optim."."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _short(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
