"""Record what scores came of: lineage.json, from the archive by way of store and checkpoint to forecasts and scores.

- `scores`: {path, sha256} of scores.json, which holds the settings of the evaluation.
- `ensemble`, and `truth` where it is given apart: {path, fingerprint} of what was scored against, and, of a store, its
  `provenance`: paths, settings and fingerprint of the archive that it was built from.
- `forecasts`: {label, path, files}; `files` holds, by name, what each forecast says of its origin: `source` (version,
  checkpoint and input), `checkpoint_sha256` (its checkpoint.json has settings and data of the training),
  `training_data_fingerprint`, `data_fingerprint` (of the input's init time) and `settings_digest` (of `predict`). A
  file of another program may say none of these.
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
        source: the full ensemble.
        forecasts: the forecasts, baselines included.
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
        content: the result of `lineage`.
        scores: path of scores.json.
        text: its text.
    """
    of_scores = {"path": str(scores.absolute()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(strict({"format": 1, "scores": of_scores} | content), indent=1, allow_nan=False)
