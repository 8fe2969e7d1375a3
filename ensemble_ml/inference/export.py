"""Make of a checkpoint a folder to hand on: weights, description, model card; nothing that only training needs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from ensemble_ml.config import ExportConfig, require
from ensemble_ml.errors import UserError
from ensemble_ml.folders import draft_of
from ensemble_ml.inference.card import model_card
from ensemble_ml.store.folder import exchange
from ensemble_ml.training.checkpoint import META, MODEL, find_checkpoint, load_checkpoint, sync

CARD = "MODEL_CARD.md"

log = logging.getLogger(__name__)


def export(config: ExportConfig) -> Path:
    """Write `config.output`/{model.safetensors, checkpoint.json, MODEL_CARD.md}; the folder appears when it is whole.

    Raises:
        UserError: the checkpoint is absent or damaged, the output exists (with other files than an export's, if it may
            be replaced), or the scores cannot be read or are of other checkpoints.
    """
    output = Path(config.output).absolute()
    require("output", output, config.overwrite or not output.exists(), "exists; set overwrite=true or choose another")
    folder = output.is_dir() and not output.is_symlink()
    require("output", output, folder or not os.path.lexists(output), "is a file or a link; give a folder")
    others = sorted({path.name for path in output.iterdir()} - {MODEL, META, CARD}) if folder else []
    if others:
        raise UserError(f"output={output}: holds {others[0]}, which no export writes; overwrite=true leaves it alone")
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint))
    scores = _scores(config.scores)
    if scores is not None:
        made = [one for one in scores["forecasts"] if checkpoint.sha256 in one.get("checkpoints", ())]
        who = f"scores={config.scores}: "
        if not made:
            raise UserError(f"{who}no forecast there was made by {config.checkpoint}; evaluate forecasts of it")
        if all(one.get("baseline") for one in made):
            raise UserError(f"{who}forecasts by {config.checkpoint} stood there as baselines; give them as forecast=")
    card = model_card(checkpoint.spec, checkpoint.meta, scores)
    partial = draft_of(output)
    partial.mkdir(parents=True)
    try:
        for name in (MODEL, META):
            shutil.copyfile(checkpoint.path / name, partial / name)
        (partial / CARD).write_text(card, encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        if output.exists():
            exchange(partial, output)  # the old one is removed under the new one's name
        else:
            os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("%s: %s, %s and %s written", output, MODEL, META, CARD)
    return output


def _scores(path: str | None) -> dict | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"scores={path}: cannot be read ({error}); give the scores.json that evaluate wrote") from error
    wanted = {"headline": list, "claims": list, "dates": dict, "notes": list, "forecasts": list}
    held = found if isinstance(found, dict) else {}
    missing = [key for key, kind in wanted.items() if not isinstance(held.get(key), kind)]
    if missing:
        raise UserError(f"scores={path}: lacks {missing[0]}; give the scores.json that evaluate wrote")
    return found
