"""Forecasts over several ranks: the same NetCDF as from one process, and each rank reads its rows alone."""

import shutil
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from parallel.ranks import run_ranks
from stores import make_store

from ensemble_ml.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    PredictConfig,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.read import TensorStore
from ensemble_ml.training import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    store = make_store(folder / "a.zarr", dates=8, members=5, shape=(17, 16), bias=0.6, dispersion=0.6).path
    data = DataConfig(store=store, train=["2001-01-01/2001-01-09"], members=[2, 4])
    config = TrainConfig(
        run="a", output=str(folder), steps=3, batch_size=2, threads=1, data=data,
        model=ModelConfig(hidden=8, max_hidden=8, points=16, depth=2, precision=Precision.float64),
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip
    return store, str(train(config) / "checkpoints" / "last")


def config_of(trained, output, **parallel):
    store, checkpoint = trained
    return PredictConfig(
        checkpoint=checkpoint, input=store, output=str(output), members_in=3, members_out=True, threads=1,
        thresholds={"t2m": [280.0]}, parallel=ParallelConfig(**parallel),
    )  # fmt: skip


def forecast(session, config):
    """Predict within a session that is there already; tell which rows were read."""
    import sys

    rows, read = set(), TensorStore.read

    def told(self, part, date, selection=None):
        rows.add(selection.rows)
        return read(self, part, date, selection)

    TensorStore.read = told
    sys.modules["ensemble_ml.inference.predict"].start = lambda _: nullcontext(session)
    paths = predict(config, open_store(config.input))
    return rows, [p.name for p in paths]


@pytest.fixture(scope="module")
def serial(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("serial")
    predict(config_of(trained, output), open_store(trained[0]))
    return output


@pytest.mark.parametrize(("lat", "lon", "data"), [(2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 1, 2)])
def test_the_same_files_as_from_one_process(trained, serial, tmp_path, lat, lon, data):
    config = config_of(trained, tmp_path, lat=lat, lon=lon, data=data)
    found = run_ranks(forecast, lat * lon * data, config, lat=lat, lon=lon, data=data)
    bands = [{(0, 12)}, {(12, 17)}] if lat == 2 else [{None}]
    assert [rows for rows, _ in found] == [bands[rank // lon % lat] for rank in range(len(found))]
    assert same_files(serial, tmp_path) == found[0][1]


def overlapping(session, config):
    """Predict; tell how many convolutions computed while their halos travelled."""
    from ensemble_ml.distributed import overlap

    calls, real = [], overlap._forward
    overlap._forward = lambda *args: calls.append(1) or real(*args)
    forecast(session, config)
    return len(calls)


@pytest.mark.parametrize("overlap", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_overlap_changes_no_forecast(trained, serial, tmp_path, overlap):
    calls = run_ranks(overlapping, 2, config_of(trained, tmp_path, lat=2, overlap=overlap), lat=2)
    assert all(calls) if overlap is True else not any(calls)  # auto is of training
    same_files(serial, tmp_path)


def with_an_unread_date(session, config):
    """Predict; the second rank cannot read its first date, and the first rank is slow."""
    read = TensorStore.read

    def failing(self, part, date, selection=None):
        if part is Part.FORECAST and not session.first and date == 1:
            raise UserError("damaged")
        time.sleep(0.3 * session.first)
        return read(self, part, date, selection)

    TensorStore.read = failing
    try:
        return forecast(session, config)
    except UserError as error:
        return str(error)


def test_a_date_that_cannot_be_read_costs_no_other_rank_its_forecasts(trained, serial, tmp_path):
    found = run_ranks(with_an_unread_date, 2, config_of(trained, tmp_path, data=2), data=2)
    names = sorted(p.name for p in serial.iterdir())
    assert found[0][1] == names and "no forecast, because the input cannot be read: damaged" in found[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [name for name in names if name != names[1]]


def with_an_old_listing(session, config):
    """Predict; all but the first rank see a folder's state of before."""
    import sys

    if not session.first:
        sys.modules["ensemble_ml.inference.predict"].made_already = lambda *_: set()
    return forecast(session, config)


def test_a_group_leaves_out_what_its_first_rank_finds(trained, serial, tmp_path):
    shutil.copytree(serial, tmp_path / "out")
    config = replace(config_of(trained, tmp_path / "out", lat=2), resume=True)
    assert [rows for rows, _ in run_ranks(with_an_old_listing, 2, config, lat=2, timeout=20)] == [set(), set()]


def with_a_slow_rank(session, config):
    """Predict; the second rank reads for longer than ranks wait for each other in an exchange."""
    read = TensorStore.read

    def slow(self, part, date, selection=None):
        time.sleep(0.4 * (not session.first))
        return read(self, part, date, selection)

    TensorStore.read = slow
    return forecast(session, config)


def test_ranks_that_are_done_wait_for_the_others_as_long_as_these_take(trained, serial, tmp_path):
    names = sorted(p.name for p in serial.iterdir())
    for name in names[::2]:  # made already: a run was stopped, and the first rank has nothing left to do
        shutil.copy(serial / name, tmp_path / name)
    config = replace(config_of(trained, tmp_path, data=2), resume=True)
    assert [made for _, made in run_ranks(with_a_slow_rank, 2, config, data=2, timeout=1)] == [names, names]
    assert same_files(serial, tmp_path) == names


def same_files(serial, output):
    """Compare the forecasts of two folders; return their names."""
    names = sorted(p.name for p in serial.iterdir())
    assert sorted(p.name for p in output.iterdir()) == names
    for name in names:
        with xr.open_dataset(serial / name) as one, xr.open_dataset(output / name) as other:
            assert list(one.variables) == list(other.variables) and one.sizes == other.sizes
            for key, values in one.variables.items():
                if values.dtype.kind == "f":  # written as float32
                    np.testing.assert_allclose(other[key].values, values.values, rtol=3e-7, atol=1e-9, err_msg=key)
                else:
                    assert np.array_equal(other[key].values, values.values), key
            assert one.attrs.keys() == other.attrs.keys()
            assert {k: v for k, v in one.attrs.items() if k != "history"} == {
                k: v for k, v in other.attrs.items() if k != "history"
            }
    return names


def refused(session, config):
    """What is said of a member whose sea surface has no value anywhere."""
    import sys

    if session is not None:
        sys.modules["ensemble_ml.inference.predict"].start = lambda _: nullcontext(session)
    source = open_store(config.input)
    whole = source.read

    def read(part, date, selection):
        fields = whole(part, date, selection)
        fields.surface[2] = np.nan
        return fields

    source.read = read
    with pytest.raises(UserError) as caught:
        predict(config, source)
    return str(caught.value)


@pytest.mark.slow
def test_masks_are_those_of_one_process(tmp_path):
    made = dict(dates=8, members=5, shape=(17, 16), surface=("sst",), masked=("sst",), variables=("t",))
    store = make_store(tmp_path / "a.zarr", **made).path
    data = DataConfig(store=store, train=["2001-01-01/2001-01-09"], members=[2, 4])
    model = ModelConfig(hidden=8, max_hidden=8, points=16, depth=2, precision=Precision.float64)
    config = TrainConfig(
        run="a", output=str(tmp_path), steps=1, batch_size=2, threads=1, data=data, model=model,
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip
    trained = store, str(train(config) / "checkpoints" / "last")
    given = [replace(config_of(trained, tmp_path / str(n), lat=n), thresholds={}, members_out=False) for n in (1, 2)]
    predict(given[0], open_store(store))
    run_ranks(forecast, 2, given[1], lat=2, lon=1, data=1)
    for path in sorted((tmp_path / "1").iterdir()):
        with xr.open_dataset(path) as one, xr.open_dataset(tmp_path / "2" / path.name) as other:
            assert np.isnan(one.sst_mean).any() and np.isfinite(one.sst_mean).any()
            np.testing.assert_allclose(other.sst_mean, one.sst_mean, rtol=3e-7)
    blank = [replace(one, output=str(tmp_path / "blank")) for one in given]
    said = {refused(None, blank[0]), *run_ranks(refused, 2, blank[1], lat=2, lon=1, data=1)}
    assert len(said) == 1 and "member 3, is missing or holds NaN" in said.pop()
