"""Make of a checkpoint a folder to hand on: weights, description, model card; nothing that only training needs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ensemble_ml.config import ExportConfig, require
from ensemble_ml.errors import UserError
from ensemble_ml.inference.card import model_card
from ensemble_ml.training.checkpoint import META, MODEL, load_checkpoint, sync

CARD = "MODEL_CARD.md"


def export(config: ExportConfig) -> Path:
    """Write `config.output`/{model.safetensors, checkpoint.json, MODEL_CARD.md}; the folder appears when it is whole.

    Raises:
        UserError: the checkpoint is absent or damaged, the output exists, or the scores cannot be read.
    """
    output = Path(config.output)
    require("output", output, config.overwrite or not output.exists(), "exists; set overwrite=true or choose another")
    checkpoint = load_checkpoint(config.checkpoint)
    card = model_card(checkpoint.spec, checkpoint.meta, _scores(config.scores))
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name in (MODEL, META):
            shutil.copyfile(checkpoint.path / name, partial / name)
        (partial / CARD).write_text(card, encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        if output.exists():
            shutil.rmtree(output)
        os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _scores(path: str | None) -> dict | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = [key for key in ("headline", "claims", "dates", "notes") if key not in found]
    except (OSError, ValueError) as error:
        raise UserError(f"scores={path}: cannot be read ({error}); give the scores.json that evaluate wrote") from error
    if missing:
        raise UserError(f"scores={path}: lacks {missing[0]}; give the scores.json that evaluate wrote")
    return found
