"""Describe a trained model for `ensemble-ml inspect`: its model card and its scores on the validation dates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ensemble_ml.inference.card import model_card
from ensemble_ml.inference.export import CARD
from ensemble_ml.training.checkpoint import META, find_checkpoint, load_meta, load_spec

_COPIED = ("step", "steps", "full_members", "lead_bounds", "data_fingerprint", "sha256", "versions", "input_range")


def describe_checkpoint(path: str) -> dict[str, Any]:
    """Return the description of a checkpoint as plain values that JSON can hold.

    The key `card` holds the text of the model card. If the folder is an export, its card is taken as it stands, because
    it may hold scores.

    Args:
        path: a checkpoint, a run, or the folder of a run's checkpoints.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    folder = find_checkpoint(path)
    meta = load_meta(folder)
    spec = load_spec(folder)
    exported = folder / CARD
    card = exported.read_text(encoding="utf-8") if exported.is_file() else model_card(spec, meta, None)
    return {
        "checkpoint": str(folder),
        **{name: meta[name] for name in _COPIED if name in meta},
        "model": spec.config.name,
        "lead_hours_in": list(spec.leads_in),
        "lead_hours": list(spec.leads_out),
        "variables": list(spec.variables),
        "levels": list(spec.levels),
        "surface": list(spec.surface),
        "static": list(spec.static),
        "grid": spec.grid.describe(),
        "members": sorted(meta["config"].get("data", {}).get("members") or ()),
        "training_dates": _span(meta["training_dates"]),
        "validation_dates": _span(meta["validation_dates"]),
        "validation": meta.get("scores") or {},
        "card": card,
    }


def _span(dates: list[str]) -> dict[str, Any]:
    """Return the number of dates, the first and the last one (None without dates)."""
    return {"count": len(dates), "first": min(dates, default=None), "last": max(dates, default=None)}


def checkpoint_text(found: dict[str, Any]) -> str:
    """Return the description as text: path, step and validation scores in a line, then the model card.

    Args:
        found: the result of `describe_checkpoint`.
    """
    scores = ", ".join(f"{name} {value:.4g}" for name, value in found["validation"].items() if value is not None)
    dates = found["validation_dates"]
    validation = f"on {dates['count']} validation dates: {scores}" if scores else "no validation dates were scored"
    return f"{found['checkpoint']}: checkpoint of step {found['step']}; {validation}\n\n{found['card'].rstrip()}"


def holds_checkpoint(path: str) -> bool:
    """Return whether `path` is a checkpoint, a run, or the folder of a run's checkpoints."""
    places = (Path(path), Path(path, "last"), Path(path, "best"))
    return Path(path, "checkpoints").is_dir() or any((place / META).is_file() for place in places)
