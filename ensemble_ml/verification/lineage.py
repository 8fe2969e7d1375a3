"""Record in lineage.json what the scores were made from: archive, store, checkpoint and forecasts.

- `format`: 1.
- `scores`: {path, sha256} of scores.json, which holds the settings of the evaluation.
- `ensemble`, and `truth` if it is read from another place: {path, fingerprint} of what forecasts were scored against.
  A store also has its `provenance`: paths, settings and fingerprint of the archive that it was built from.
- `forecasts`: {label, path, files}. `files` holds, by file name, the attributes of each forecast that state its origin:
  `source` (version, checkpoint and input), `checkpoint_step`, `checkpoint_sha256` (the checkpoint's checkpoint.json has
  settings and data of the training), `training_data_fingerprint`, `data_fingerprint` (of the input's init time) and
  `settings_digest` (of `predict`). A file of another program may have none of these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ensemble_ml.store.source import Source
from ensemble_ml.strict_json import strict
from ensemble_ml.verification.forecasts import ForecastSet

FILE = "lineage.json"


def lineage(source: Source, forecasts: Sequence[ForecastSet]) -> dict[str, Any]:
    """Return the content of lineage.json but for the scores.

    Args:
        source: The full ensemble, and the truth where there is one.
        forecasts: The forecasts, including those that count as baselines.
    """
    truth = getattr(source, "truth", None)
    parts = {"ensemble": getattr(source, "forecast", source), "truth": getattr(truth, "store", truth)}
    return {name: _described(part) for name, part in parts.items() if part is not None} | {
        "forecasts": [{"label": f.label, "path": str(Path(f.path).absolute()), "files": f.origins} for f in forecasts],
    }


def _described(source: Any) -> dict[str, Any]:
    """Return path and fingerprint of a store or an archive, and the provenance of a store."""
    facts = {"path": source.path, "fingerprint": source.fingerprint()}
    return facts | ({"provenance": source.provenance} if hasattr(source, "provenance") else {})


def to_json(content: dict[str, Any], scores: Path, text: str) -> str:
    """Return the text of lineage.json.

    Args:
        content: The result of `lineage`.
        scores: Path of scores.json.
        text: Text of scores.json.
    """
    of_scores = {"path": str(scores.absolute()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(strict({"format": 1, "scores": of_scores} | content), indent=1, allow_nan=False)
