"""Keep the results of each group of fields until the report is written, so that a stopped evaluation can continue.

    OUTPUT/.scored-FINGERPRINT/NAME.npz      arrays, and their structure as JSON

FINGERPRINT is a hash of what the sums depend on (`_fingerprint`). A file is either whole or missing. If it cannot be
read, its results are computed anew. All files together are as large as the sums in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml import __version__
from ensemble_ml.config import EvaluateConfig
from ensemble_ml.folders import hash_of_code, strict, write_whole
from ensemble_ml.verification.baselines import Correction
from ensemble_ml.verification.pictures import Bins, Snapshot
from ensemble_ml.verification.plan import Plan
from ensemble_ml.verification.probability import Reliability
from ensemble_ml.verification.samples import Setting
from ensemble_ml.verification.scoring import Tables
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.vectors import Known, Vectors

log = logging.getLogger(__name__)

_FOLDER = ".scored-"
_CODE = hash_of_code("verification", "store", "../data_prep")
_KINDS = {kind.__name__: kind for kind in (Bins, Correction, Known, Reliability, Snapshot, Vectors)}
_PICTURES = "gains", "means", "error_bins", "spread_bins", "snapshots", "index"


@dataclass(frozen=True)
class Kept:
    """A folder of intermediate results of one evaluation."""

    folder: Path

    @classmethod
    def of(cls, config: EvaluateConfig, setting: Setting, plan: Plan) -> Kept:
        """Return the folder for an evaluation, and remove what was kept for any other one in the same output folder."""
        mine = cls(Path(config.output) / f"{_FOLDER}{_fingerprint(config, setting, plan)}")
        for other in mine.folder.parent.glob(f"{_FOLDER}*"):
            if other != mine.folder:
                shutil.rmtree(other, ignore_errors=True)
        return mine

    def load(self, name: str) -> Any:
        """Return the results that were saved under a name; None if there are none, or none that can be read."""
        path = self.folder / f"{name}.npz"
        try:
            # Without pickle, a file in the output folder cannot run code.
            with np.load(path, allow_pickle=False) as file:
                return _unpacked(json.loads(file["arr_0"].tobytes()), file)
        except FileNotFoundError:
            return None
        # An empty file is an EOFError, a damaged header of an array often a RuntimeError.
        except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s), so it is scored anew", path, error)
            return None

    def save(self, name: str, value: Any) -> None:
        """Save results under a name.

        They may consist of dictionaries, tuples, arrays, numbers, texts, None, `Key`, `Statistic` and the classes of
        `_KINDS`. If the folder cannot be written, a warning is logged and the evaluation goes on without them.
        """
        path, arrays, whole = self.folder / f"{name}.npz", list[np.ndarray](), io.BytesIO()
        text = np.frombuffer(json.dumps(_packed(value, arrays)).encode(), np.uint8)
        np.savez(whole, text, *arrays)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, whole.getbuffer())
        except OSError as error:
            log.warning("%s is not kept for a rerun (%s)", path, error)

    def drop(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def some_kept(output: Path) -> bool:
    """Return whether results of any evaluation are kept in an output folder."""
    return any(output.glob(f"{_FOLDER}*"))


def part_of(tables: Tables, columns: slice) -> dict[str, Any]:
    """Return everything that `tables` hold of some columns."""
    inside = range(columns.start, columns.stop)

    def mine(found: dict) -> dict:
        return {key: one for key, one in found.items() if (key[0] if isinstance(key, tuple) else key) in inside}

    return {
        "state": tables.state.part(columns),
        "histograms": {key: table[:, columns] for key, table in tables.calibration.histograms.items()},
        "reliability": mine(tables.calibration.reliability),
        "pictures": {name: mine(getattr(tables.pictures, name)) for name in _PICTURES},
    }


def put_part(tables: Tables, columns: slice, part: dict[str, Any]) -> None:
    """Store the result of `part_of` in `tables`, which must not yet hold anything of these columns."""
    tables.state.put(columns, part["state"])
    calibration = tables.calibration
    for key, values in part["histograms"].items():
        empty = np.zeros((calibration.dates, calibration.columns, values.shape[-1]))
        calibration.histograms.setdefault(key, empty)[:, columns] = values
    calibration.reliability.update(part["reliability"])
    for name, found in part["pictures"].items():
        getattr(tables.pictures, name).update(found)


def _fingerprint(config: EvaluateConfig, setting: Setting, plan: Plan) -> str:
    """Return a hash of what the sums depend on: code, settings, data and dates.

    Of the code, this package, the store, `data_prep` and the modules at the top level of `ensemble_ml` are hashed. All
    other code counts only by the version.
    """
    source, times = setting.source, setting.source.layout.init_time
    # Where the report goes changes no sum.
    settings = {key: value for key, value in asdict(config).items() if key not in ("output", "overwrite")}
    paths = [(one.label, path) for one in setting.forecasts for path in one.files.values()]
    # Size and time of change stand for the content of forecasts, which would take long to read.
    stamps = [(label, str(path), path.stat().st_size, path.stat().st_mtime_ns) for label, path in paths]
    dates = [times[which].astype("int64").tolist() for which in (plan.test, plan.fit)]
    # Code and the NumPy version are part of the hash, because sums of two versions must not be mixed in one report.
    given: list[Any] = [__version__, np.__version__, _CODE, settings, source.path, source.fingerprint(), stamps, dates]
    given += [[asdict(column) for column in plan.columns], plan.reduced, plan.truth]
    arrays = [setting.weights] + ([] if setting.heights is None else [setting.heights.rise, setting.heights.forecast])
    whole = json.dumps(strict(given)).encode() + b"".join(array.tobytes() for array in arrays)
    return hashlib.sha256(whole).hexdigest()[:16]


def _packed(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert results to JSON, and append their arrays to `arrays`.

    Everything but texts, numbers and None becomes an object of one item, whose key is the type.
    """
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": f"arr_{len(arrays)}"}  # `np.savez` uses these names; arr_0 is the text
    if isinstance(value, dict):
        return {"dict": [[_packed(one, arrays) for one in item] for item in value.items()]}
    if isinstance(value, tuple):
        return {"Key" if isinstance(value, Key) else "tuple": [_packed(one, arrays) for one in value]}
    if isinstance(value, Statistic):
        return {"Statistic": value.value}
    if type(value).__name__ in _KINDS:
        return {type(value).__name__: _packed(vars(value), arrays)}
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(packed: Any, arrays: Any) -> Any:
    """Rebuild results from JSON and arrays."""
    if not isinstance(packed, dict):
        return packed
    [(kind, held)] = packed.items()
    if kind == "array":
        return arrays[held]
    if kind == "dict":
        return {_unpacked(key, arrays): _unpacked(value, arrays) for key, value in held}
    if kind == "Statistic":
        return Statistic(held)
    if kind in ("tuple", "Key"):
        found = tuple(_unpacked(one, arrays) for one in held)
        return Key(*found) if kind == "Key" else found
    return _KINDS[kind](**_unpacked(held, arrays))
