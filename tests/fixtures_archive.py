"""The `tiny` simulated archive, made once a machine: cached by configuration and by the source that makes it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from ensemble_ml.config import SimulateConfig

ROOT = Path(__file__).parents[1]


def tiny_config(output: Path, **changes) -> SimulateConfig:
    """Configuration of conf/simulate/tiny.yaml."""
    settings = yaml.safe_load((ROOT / "conf" / "simulate" / "tiny.yaml").read_text())
    return SimulateConfig(**(settings | {"output": str(output)} | changes))


def cache_folder() -> Path:
    """Where tests keep what is dear to make."""
    given = os.environ.get("ENSEMBLE_ML_TEST_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "ensemble_ml" / "tests"


def fingerprint(config: SimulateConfig) -> str:
    """Hash of a configuration and of the simulator's source."""
    digest = hashlib.sha256(json.dumps(asdict(config) | {"output": ""}, sort_keys=True).encode())
    for file in sorted((ROOT / "data_prep" / "simulate").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# Compiling costs more than running a tiny archive: later processes of a test run take over what the first compiled,
# and hundreds of small functions are together as dear as the large ones.
# Has to be set before jax is imported anywhere, so it stands here and not in a fixture.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="session")
def tiny_archive() -> Path:
    """Folder of the `tiny` archive; read it, never write to it."""
    from data_prep.simulate import simulate

    folder = cache_folder() / f"tiny-{fingerprint(tiny_config(Path('x')))}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may want it at once: the second waits for the first
        if not (folder / "archive.json").exists():
            draft = folder.with_name(f".{folder.name}")
            shutil.rmtree(draft, ignore_errors=True)
            simulate(tiny_config(draft, workers=1))  # two would take no less time, on both cores
            draft.rename(folder)
    return folder
