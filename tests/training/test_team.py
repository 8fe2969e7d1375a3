"""Fits that several ranks make together are those of one rank, and each date is read by one of them."""

import numpy as np
import pytest
import torch
from models.small_models import make_spec
from parallel.ranks import run_ranks
from synthetic import make_store

from ensemble_ml.grid import Grid
from ensemble_ml.loading import Reader
from ensemble_ml.store import open_store
from ensemble_ml.training import point_fit
from ensemble_ml.training.climate_data import Dates
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.fit_cache import kept_fit
from ensemble_ml.training.progress import Progress, Team
from ensemble_ml.training.smoothing import MapMean, Scales

TRAIN, VALIDATION = np.arange(22), np.arange(22, 30)


class Noted:
    """A source that notes which dates were read of it."""

    def __init__(self, source):
        self.source, self.dates = source, set()

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, part, date, selection=None):
        self.dates.add(int(date))
        return self.source.read(part, date, selection)


def spec_of(store, **config):
    lay = store.layout
    axes = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    given = {"hidden": 8, "max_hidden": 8, "depth": 0, "points": 8} | config
    spec = make_spec(**given)
    return type(spec)(spec.config, lay.variables, lay.levels, lay.surface, lay.lead_hours, (24, 48), *axes)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("team") / "store.zarr"
    return make_store(path, dates=30, members=6, shape=(9, 16), surface=("t2m", "tp"), bias=0.5, dispersion=0.7)


def fitted(reader, team=None, progress=None):
    point_fit._DROPOUT = 0.0  # of its own points each rank drops others
    return fit_climate(reader, TRAIN, VALIDATION, 3, [1, 3, 5], progress=progress, team=team)


def arrays(fit):
    found = {name: values for name, values in vars(fit.climate).items() if values is not None}
    return found | {"spread_error": fit.spread_error, "input_range": fit.input_range}


def fitted_by(session, path):
    source = Noted(open_store(path))
    reader = Reader(source, spec_of(source))
    found = [arrays(fitted(reader, Team(session.mesh.world))) for _ in range(session.world.size - 1)]
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[-1][name], name)  # additions come in one order
    return found[0], source.dates


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_fit_what_one_rank_fits(store, ranks, monkeypatch):
    monkeypatch.setattr(point_fit, "_DROPOUT", 0.0)
    alone = arrays(fitted(Reader(store, spec_of(store))))
    found = run_ranks(fitted_by, ranks, store.path)
    for (theirs, _), (first, _) in zip(found, found[:1] * ranks, strict=True):
        for name, values in first.items():
            np.testing.assert_array_equal(theirs[name], values, name)
    for name, values in alone.items():
        size = np.abs(values).max(initial=1e-6)
        learned = "points" in name  # hundreds of steps, each rounded
        tolerance = 0.05 if learned else 1e-4
        np.testing.assert_allclose(found[0][0][name] / size, values / size, atol=tolerance, err_msg=name)
    seen = [dates for _, dates in found]
    assert set().union(*seen) == set(range(30))
    assert all(len(dates) <= 30 / ranks + 4 for dates in seen)  # but for the one before its stretch, and those asked
    # of by all which errors are known


def fails_on_one(session, path):
    source = open_store(path)
    if session.world.rank == 1:
        source = Broken(source)
    return fitted(Reader(source, spec_of(source)), Team(session.mesh.world))


class Broken(Noted):
    def read(self, part, date, selection=None):
        if date > 20:
            raise OSError("a disk that is gone")
        return self.source.read(part, date, selection)


def test_a_rank_that_cannot_read_ends_all(store):
    found = run_ranks(fails_on_one, 2, store.path, statuses=True, seconds=60)
    assert all(code for code, *_ in found) and "a disk that is gone" in found[1][2]


def out_of_time(session, path):
    source = open_store(path)
    progress = Progress(0.0 if session.world.rank else None)  # one rank's clock alone says that it is late
    fit = fitted(Reader(source, spec_of(source)), Team(session.mesh.world), progress)
    return progress.cut, np.abs(fit.climate.points_second).max()


def test_ranks_agree_when_time_is_over(store):
    for cut, weights in run_ranks(out_of_time, 2, store.path):
        assert cut and weights == 0


def kept_by(session, path, folder):
    source = Noted(open_store(path))
    reader = Reader(source, spec_of(source))
    found = kept_fit(folder, reader, TRAIN, VALIDATION, 3, [1, 3, 5], 0, None, session)
    return arrays(found), len(source.dates)


@pytest.mark.slow
def test_a_fit_is_kept_once_for_all_ranks(store, tmp_path, own_fits):
    made = run_ranks(kept_by, 2, store.path, str(tmp_path))
    again = run_ranks(kept_by, 2, store.path, str(tmp_path))
    assert len(list((tmp_path / ".fits").iterdir())) == 1
    assert all(count for _, count in made) and not any(count for _, count in again)
    for found, _ in [*made, *again]:
        for name, values in made[0][0].items():
            np.testing.assert_array_equal(found[name], values, name)


def lagged(session, maps):
    team = Team(session.mesh.world)
    dates, scales = torch.from_numpy(maps), Scales(Grid(np.linspace(75, -75, 6), np.arange(12) * 30.0))
    mean, mine = MapMean(scales, maps.shape[1:3]), team.stretch(len(dates))
    valid = torch.ones(maps.shape[1:3], dtype=torch.bool)
    if mine and mine.start:
        mean.stand_before(dates[mine.start - 1], valid)
    for at in mine:
        mean.add(dates[at], valid, follows=at > 0)
    mean.add_up(team)
    return mean.estimate().map().numpy(), mean.estimate().dates.numpy()


def test_dates_follow_each_other_across_ranks():
    maps = np.random.default_rng(0).normal(size=(7, 1, 2, 6, 12)).cumsum(0).astype(np.float32)
    [alone], several = run_ranks(lagged, 1, maps), run_ranks(lagged, 3, maps)
    for found in several:
        for values, wanted in zip(found, alone, strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5)


def teamwork(session):
    team = Team(session.mesh.world)
    rank = session.world.rank
    mine = torch.arange(rank + 1.0)[:, None] + 10 * rank
    flags, numbers = torch.tensor([rank == 1, False]), torch.full((2, 3), float(rank)).T
    team.add_up(flags, numbers)
    taken = list(team.mine(range(7)))
    return team.joined(mine).flatten().tolist(), flags.tolist(), numbers.tolist(), team.first_says(rank + 5), taken


def test_what_a_team_does():
    found = run_ranks(teamwork, 3)
    assert all(rows == [0, 10, 11, 20, 21, 22] for rows, *_ in found)
    assert all(flags == [True, False] for _, flags, *_ in found)
    assert all(numbers == [[3, 3]] * 3 for _, _, numbers, *_ in found)
    assert all(said == 5 for *_, said, _ in found)
    assert [item for *_, taken in found for item in taken] == list(range(7))
    alone = Team()
    assert alone.mine([1, 2]) == [1, 2] and alone.first_says(3) == 3 and not alone.anywhere(False)


def test_one_rank_draws_all_points_of_a_pool(store):
    pool = point_fit.Pool(torch.zeros(5, 1), [], first=7, rows=20)
    assert pool.held(torch.tensor([3, 7, 11, 12])).tolist() == [0, 4]
    assert list(range(7, 12))[pool.spaced(5)] == [8]  # of rows 0, 4, 8, 12, 16
    assert Dates(Reader(store, spec_of(store)), 3).team.alone
