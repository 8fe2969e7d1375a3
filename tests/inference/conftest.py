"""One source and one checkpoint for the tests of prediction."""

from __future__ import annotations

import pytest
import torch
from forecasting import make_checkpoint, make_source, make_spec

from ensemble_ml.config import PredictConfig


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Fields this small are slower with more, most of all where tests share the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def source():
    return make_source()


@pytest.fixture(scope="session")
def checkpoint(source, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints", make_spec(source))


@pytest.fixture
def config(checkpoint, tmp_path):
    def make(**settings):
        given = {"checkpoint": str(checkpoint), "input": "memory", "output": str(tmp_path / "out")} | settings
        return PredictConfig(**given)

    return make
