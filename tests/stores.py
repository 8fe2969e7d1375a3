"""Synthetic stores that are made once a test run: a second of the same arguments is a copy of the first.

A store takes half a second to write, however small it is, and most of a test's stores differ from no other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import synthetic

from ensemble_ml.store import TensorStore, open_store

_kept: Path | None = None  # the folder of this test run, one of all workers


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder that all workers of a test run see."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True, scope="session")
def stores_made_once(tmp_path_factory):
    """Keep the stores of this test run in the folder that all workers see."""
    global _kept
    _kept = shared_folder(tmp_path_factory) / "stores"
    yield
    _kept = None


def make_store(path: str | Path, **arguments) -> TensorStore:
    """Make a store as `synthetic.make_store` does, for a test that may do with it what it likes."""
    said = repr((sorted(arguments.items()), synthetic.SCALES))
    made = _kept / hashlib.sha256(said.encode()).hexdigest()[:16]
    if not made.exists():
        _kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_kept) as draft:
            synthetic.make_store(Path(draft) / "store", **arguments)
            try:
                (Path(draft) / "store").rename(made)
            except OSError:  # another worker was first
                if not made.exists():
                    raise
    shutil.copytree(made, path)
    return open_store(path)
