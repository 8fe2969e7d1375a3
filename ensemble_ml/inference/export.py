"""Export a checkpoint as a folder to hand on, and describe checkpoints for `ensemble-ml inspect`.

The folder holds the weights, checkpoint.json and a model card. It leaves out everything that only training needs, such
as the state of the optimizer.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ensemble_ml.config import ExportConfig, require
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable, draft_of
from ensemble_ml.inference.card import model_card
from ensemble_ml.store.folder import exchange
from ensemble_ml.training.checkpoint import META, MODEL, find_checkpoint, load_checkpoint, load_meta, load_spec, sync

CARD = "MODEL_CARD.md"

log = logging.getLogger(__name__)
# keys of checkpoint.json that a description repeats
_COPIED = ("step", "steps", "full_members", "lead_bounds", "data_fingerprint", "sha256", "versions", "input_range")


def export(config: ExportConfig) -> Path:
    """Write model.safetensors, checkpoint.json and MODEL_CARD.md to the folder `config.output`, and return its path.

    The folder appears under its name only when it is complete.

    Args:
        config: the checkpoint, the output and, if the model was evaluated, the scores.

    Raises:
        UserError: the checkpoint is absent or damaged; the output exists and `overwrite` is off, is a file or a link,
            cannot be made in its folder, or holds files that no export writes; the scores cannot be read, or have no
            forecast of this checkpoint other than baselines.
    """
    output = Path(config.output).absolute()
    require("output", output, config.overwrite or not output.exists(), "exists; set overwrite=true or choose another")
    folder = output.is_dir() and not output.is_symlink()
    require("output", output, folder or not os.path.lexists(output), "is a file or a link; give a folder")
    # An export replaces the whole folder. So a folder with other files is refused, because they would be lost.
    others = sorted({path.name for path in output.iterdir()} - {MODEL, META, CARD}) if folder else []
    if others:
        raise UserError(
            f"output={output}: holds {others[0]}, which no export writes, so it is not replaced; choose another output"
        )
    check_writable(output.parent)
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint))
    scores = _scores(config.scores)
    if scores is not None:
        made = [one for one in scores["forecasts"] if checkpoint.sha256 in one.get("checkpoints", ())]
        who = f"scores={config.scores}: "
        if not made:
            raise UserError(f"{who}no forecast there was made by {config.checkpoint}; evaluate one that was")
        if all(one.get("baseline") for one in made):
            raise UserError(f"{who}{config.checkpoint} made only baselines there; evaluate its forecasts as forecast=")
    card = model_card(checkpoint.spec, checkpoint.meta, scores)
    partial = draft_of(output)
    partial.mkdir(parents=True)
    try:
        for name in (MODEL, META):
            shutil.copyfile(checkpoint.path / name, partial / name)
        (partial / CARD).write_text(card, encoding="utf-8")
        # Files and folder reach the disk before the renaming, so that a power cut cannot leave an export without
        # content.
        for path in (*partial.iterdir(), partial):
            sync(path)
        if output.exists():
            # The two folders swap their names. The old export then has the name of the draft, and `finally` removes it.
            exchange(partial, output)
        else:
            os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("%s: %s, %s and %s written", output, MODEL, META, CARD)
    return output


def _scores(path: str | None) -> dict | None:
    """Read scores.json and check that it has all keys that the model card reads. Without a path, return None."""
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"scores={path}: cannot be read ({error}); give the scores.json that evaluate wrote") from error
    held = found if isinstance(found, dict) else {}
    lists = {"headline": str, "claims": dict, "notes": str, "forecasts": dict}  # with the type of their entries
    missing = [
        key for key, kind in lists.items()
        if not isinstance(held.get(key), list) or not all(isinstance(entry, kind) for entry in held[key])
    ]  # fmt: skip
    missing += [] if isinstance(held.get("dates"), dict) else ["dates"]
    missing += [] if missing or all("label" in entry for entry in held["forecasts"]) else ["forecasts"]
    if missing:
        raise UserError(f"scores={path}: lacks {missing[0]}; give the scores.json that evaluate wrote")
    return found


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
        **{name: list(getattr(spec, name)) for name in ("variables", "levels", "surface", "static")},
        "grid": spec.grid.describe(),
        "members": sorted(meta["config"].get("data", {}).get("members") or ()),
        "training_dates": _span_of_dates(meta["training_dates"]),
        "validation_dates": _span_of_dates(meta["validation_dates"]),
        "validation": meta.get("scores") or {},
        "card": card,
    }


def _span_of_dates(dates: list[str]) -> dict[str, Any]:
    """Return the number of dates, the first and the last one (None without dates)."""
    return {"count": len(dates), "first": min(dates, default=None), "last": max(dates, default=None)}


def checkpoint_text(found: dict[str, Any]) -> str:
    """Return the result of `describe_checkpoint` as text: path, step and scores in a line, then the model card."""
    scores = ", ".join(f"{name} {value:.4g}" for name, value in found["validation"].items() if value is not None)
    dates = found["validation_dates"]
    validation = f"on {dates['count']} validation dates: {scores}" if scores else "no validation dates were scored"
    return f"{found['checkpoint']}: checkpoint of step {found['step']}; {validation}\n\n{found['card'].rstrip()}"


def holds_checkpoint(path: str) -> bool:
    """Return whether `path` is a checkpoint, a run, or the folder of a run's checkpoints."""
    places = (Path(path), Path(path, "last"), Path(path, "best"))
    return Path(path, "checkpoints").is_dir() or any((place / META).is_file() for place in places)
