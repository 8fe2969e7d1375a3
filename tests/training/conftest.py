"""A small store with a biased, under-dispersive ensemble, and settings that train on it in a second."""

import pytest
import torch
from stores import make_store

from ensemble_ml.config import (
    DataConfig,
    LoadingConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import ModelSpec
from ensemble_ml.training.climate_data import Dates

TRAIN, VALIDATION = ["2001-01"], ["2001-02"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Threads cost more than they give on grids this small, and much more where tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """20 dates: 16 in January, 4 in February."""
    folder = tmp_path_factory.mktemp("training")
    return make_store(folder / "a.zarr", dates=20, members=6, shape=(9, 16), bias=0.6, dispersion=0.6)


@pytest.fixture
def config_of(store, tmp_path):
    """Make a TrainConfig of a fast run; keys of the groups may be given as data__train=[...]."""

    def make(**changes):
        groups = {"data": {}, "model": {}, "optim": {}, "loading": {}, "tracking": {}}
        for key in [k for k in changes if "__" in k]:
            group, name = key.split("__")
            groups[group][name] = changes.pop(key)
        data = {"store": store.path, "train": TRAIN, "validation": VALIDATION, "members": [1, 2, 4, 6]} | groups["data"]
        model = {
            "hidden": 8,
            "max_hidden": 8,
            "points": 16,
            "depth": 1,
            "precision": Precision.float32,
        } | groups["model"]
        settings = dict(
            run="a", output=str(tmp_path / "runs"), steps=12, validate_every=6, checkpoint_every=4, threads=1,
            data=DataConfig(**{"validation_members": 3} | data),
            model=ModelConfig(**model),
            optim=OptimConfig(**{"warmup": 2} | groups["optim"]),
            loading=LoadingConfig(**groups["loading"]),
            tracking=TrackingConfig(**{"tensorboard": False, "log_every": 1} | groups["tracking"]),
        )  # fmt: skip
        return TrainConfig(**settings | changes)

    return make


@pytest.fixture(scope="session")
def point_dates(store):
    """Dates of one level, one surface variable and one lead, seen by three members."""
    grid, lead = store.layout.grid, store.layout.lead_hours[-1]
    kind = (store.layout.variables[:1], store.layout.levels[:1], store.layout.surface[:1])
    config = ModelConfig(hidden=8, depth=1, points=32)
    return Dates(Reader(store, ModelSpec(config, *kind, (lead,), (lead,), grid.latitude, grid.longitude)), 3)
