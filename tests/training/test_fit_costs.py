"""What the fits will have to do is foretold as it then is done."""

import pytest
import torch
from synthetic import make_store
from test_team import TRAIN, VALIDATION, spec_of

from ensemble_ml.loading import Reader
from ensemble_ml.training import fit_costs, linear_sums
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.fit_costs import Work, describe_fits, predicted_seconds, work_of

SIZES = [1, 3, 5]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "store.zarr"
    return make_store(path, dates=30, members=6, shape=(9, 16), surface=("t2m", "tp"), bias=0.5)


@pytest.mark.parametrize("config", [pytest.param({}, marks=pytest.mark.slow), {"points": 0}, {"linear": False}])
def test_samples_and_operations_are_counted(store, config, monkeypatch):
    reader = Reader(store, spec_of(store, **config))
    done = dict.fromkeys(("samples", "sums", "points"), 0.0)

    def counted(owner, name, key, cost):
        real = getattr(owner, name)

        def call(*given, **named):
            done[key] += cost(*given)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, call)

    counted(Dates, "sample", "samples", lambda *_: 1)
    counted(linear_sums, "_add_product", "sums", lambda total, values: 0.6 * 2 * values.shape[1] * len(values) ** 2)
    counted(torch.nn.Linear, "forward", "points", lambda layer, x: 3 * 2.0 * len(x) * layer.weight.numel())
    fit_climate(reader, TRAIN, VALIDATION, 3, SIZES)
    work = work_of(reader, TRAIN, VALIDATION, SIZES)
    assert work.samples == pytest.approx(done["samples"], rel=0.25)
    assert work.points == pytest.approx(done["points"], rel=0.15)
    assert work.sums == pytest.approx(done["sums"], rel=0.35)


def test_ranks_share_the_time(store, monkeypatch):
    reader = Reader(store, spec_of(store))
    monkeypatch.setattr(fit_costs, "_operations_a_second", lambda kind: {torch.float64: 1e9}.get(kind, 2e9))
    work = Work(samples=0, sums=4e9, points=2e9, fields=2e9, solved=3e9)
    assert predicted_seconds(reader, work, 1, 3) == pytest.approx(7.0, abs=0.5)
    assert predicted_seconds(reader, work, 7, 3) == pytest.approx(1.0, abs=0.1)
    more = Work(samples=10**9, sums=0, points=0, fields=0, solved=0)
    assert predicted_seconds(reader, more, 1, 3) > 1e4
    assert "on 8 ranks" in describe_fits(reader, work, 8, 3) and "ranks" not in describe_fits(reader, work, 1, 3)


def test_nothing_is_fitted_of_what_is_not_there(store):
    work = work_of(Reader(store, spec_of(store, linear=False)), TRAIN, VALIDATION, SIZES)
    assert work.sums == work.points == work.solved == work.fields == 0 < work.samples
