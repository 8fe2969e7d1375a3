"""What tests of workflows share."""

import pytest

from benchmarks.workflows import engines

FILES = engines.ROOT / "scripts" / "workflows"


def engine(name: str) -> str:
    """Return the path of an engine's program, or skip the test."""
    found = engines.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install -r scripts/workflows/requirements.txt, or .ci/run, does so")
    return found
