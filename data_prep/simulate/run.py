"""Run `ensemble-ml simulate`: run all model years, assemble the archive and measure its realism.

Finished parts stay in `.parts` until the archive is complete. archive.json is written last, to mark a finished archive.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from data_prep.simulate.assemble import STATIC, assemble, realism
from data_prep.simulate.model_error import MODEL_ERROR
from data_prep.simulate.realism import report
from data_prep.simulate.schedule import STEPS, ModelYear, model_years
from data_prep.simulate.workers import run_years
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.strict_json import strict

FORMAT = 1
STATEMENT = (
    "Simulated data: jcm (SPEEDY physics on the dinosaur spectral core) forecasting a nature run of its own. Laid out "
    "like ENS-10, never ENS-10: figures compare only with baselines on this same archive."
)


def simulate(config: SimulateConfig) -> Path:
    """Make the simulated archive, or continue one that was interrupted.

    With `parts=i/n` only a share of the model years is run. Several machines may run their shares in one folder at the
    same time. A machine that finds all years complete assembles the archive.

    Args:
        config: size, output folder, seed and the settings of conf/simulate.

    Returns:
        The archive's folder: ensemble/{pl,sfc}_MMDD.grib, truth/{pl,sfc}_MMDD.grib, static.grib (of the truth's model),
        forecast_static.grib, archive.json. While other shares are incomplete, it holds only `.parts`.

    Raises:
        UserError: `output` holds something else, archive.json or .parts/config.json cannot be read, jcm is not
            installed, or a worker failed or was killed.
    """
    output = Path(config.output)
    if _nothing_to_do(config, output):
        return output
    _claim(config, output)
    began = time.perf_counter()
    years = model_years(config)
    number, shares = config.share
    mine = years[number::shares]
    missing = [year for year in mine if not year.complete(output)]
    # More shares than model years leave some shares without a year. Those that have one write the static files.
    if missing or (mine and not all((output / ".parts" / name).exists() for name in STATIC)):
        if find_spec("jcm") is None:
            raise UserError("simulate: the package jcm is not installed; run `pip install 'ensemble-ml[simulate]'`")
        run_years(config, missing, mine)
    left = [year.year for year in years if not year.complete(output)]
    # Another machine that finished at the same time may have assembled the archive and removed the parts.
    if _nothing_to_do(config, output):
        return output
    if left:
        text = f"parts={config.parts}: done; years of other shares are not complete yet: {', '.join(map(str, left))}"
        print(text, flush=True)
        return output
    try:
        assemble(output, years)
        figures = realism(output, years, config)
    except OSError:
        if _nothing_to_do(config, output):
            return output
        raise
    for line in report(figures):
        print(line, flush=True)
    # This file is written last, because it marks the archive as complete.
    write_whole(output / "archive.json", json.dumps(strict(describe(config, years, figures)), indent=1))
    shutil.rmtree(output / ".parts", ignore_errors=True)
    dates = sum(len(year.written) for year in years)
    print(f"simulated {dates} init times in {time.perf_counter() - began:.0f} s: {output}", flush=True)
    return output


def _identity(config: SimulateConfig) -> dict:
    """Return the format, the settings and the model error, which determine the content of the files."""
    settings = {key: value for key, value in asdict(config).items() if key not in ("output", "workers", "parts")}
    return {"format": FORMAT, "config": settings, "model_error": MODEL_ERROR}


def _nothing_to_do(config: SimulateConfig, output: Path) -> bool:
    """Return whether the archive is complete. If it is, print that, and remove the parts that are left."""
    if not _finished(config, output):
        return False
    print(f"{output} is already finished with this configuration; nothing to do", flush=True)
    shutil.rmtree(output / ".parts", ignore_errors=True)
    return True


def _finished(config: SimulateConfig, output: Path) -> bool:
    """Return whether the archive is complete, or raise a UserError if it was made with other settings."""
    record = output / "archive.json"
    if not record.exists():
        return False
    content = _read_json(record)
    if {key: content.get(key) for key in _identity(config)} != _identity(config):
        raise UserError(f"output={output}: holds a finished archive of another configuration; choose another folder")
    return True


def _claim(config: SimulateConfig, output: Path) -> None:
    """Mark the folder with this configuration, or raise a UserError if it holds something else."""
    mark = output / ".parts" / "config.json"
    if mark.exists():
        if _read_json(mark) != _identity(config):
            raise UserError(f"output={output}: holds an unfinished archive of another configuration; remove the folder")
        return
    # Another share makes .parts just before its mark, and may have been killed in between.
    if output.exists() and any(path.name != ".parts" for path in output.iterdir()):
        raise UserError(f"output={output}: exists and is not an archive in the making; choose a new folder")
    mark.parent.mkdir(parents=True, exist_ok=True)
    write_whole(mark, json.dumps(_identity(config), indent=1))


def _read_json(path: Path) -> dict:
    """Read a JSON object, or raise a UserError if the file cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another folder, or remove this one") from error
    return found if isinstance(found, dict) else {}


def describe(config: SimulateConfig, years: list[ModelYear], figures: dict) -> dict:
    """Return the content of archive.json: what the archive is, what it holds, and how realistic it is.

    Args:
        config: the settings of the simulation.
        years: all model years.
        figures: the result of `assemble.realism`.
    """
    splits: dict[str, list[str]] = defaultdict(list)
    for year in years:
        splits[year.split] += [f"{cycle.start:%Y-%m-%dT%H}" for cycle in year.written]
    return _identity(config) | {
        "statement": STATEMENT,
        "versions": {name: version(name) for name in ("jcm", "dinosaur", "jax", "numpy", "eccodes")},
        "years": {split: sorted({year.year for year in years if year.split == split}) for split in splits},
        "start_dates": dict(splits),
        "members": config.members,
        "steps_hours": list(STEPS),
        "levels_hPa": config.levels,
        "accumulation": {
            "ensemble": {"tp": "from the start of the forecast"},
            "truth": {"tp": "the 24 h that end at the valid time"},
        },
        "realism": {name: figure.as_dict() for name, figure in figures.items()},
    }
