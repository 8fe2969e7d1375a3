"""A loader from its making to its end, and what it leaves on disk for those to come."""

import numpy as np
import pytest

from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.items import DatasetItems

COUNT, BATCH = 23, 4
DATA = [np.full(15, i, np.float32) for i in range(COUNT)]
SIZE = DATA[0].nbytes


def test_two_loaders_of_a_run_leave_each_other_their_caches(tmp_path):
    """Of training and validation, one after the other in one folder; a new plan of the same data takes the old one's
    place."""

    def loader_of(name, seed=3):
        return ClairvoyantLoader(DatasetItems(DATA, name), BATCH, 1, seed, ram=0, disk=10 * SIZE, folder=tmp_path)

    for expected in (0, 10 * SIZE):
        for name in ("training", "validation"):
            with loader_of(name) as loader:
                assert sum(len(batch.samples) for batch in loader) == COUNT
                assert loader.tiers.counters.disk == expected
    before = set(tmp_path.iterdir())
    assert len(before) == 2
    with loader_of("training", seed=4):
        pass
    assert len(before & set(tmp_path.iterdir())) == 1 and len(list(tmp_path.iterdir())) == 2


def test_one_loop_at_a_time_and_the_next_goes_on():
    loader = ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * SIZE)
    loop = iter(loader)
    first = next(loop)
    with pytest.raises(UserError, match="another loop over it is under way"):
        next(iter(loader))
    loop.close()
    assert [first.step, *(batch.step for batch in loader)] == list(range(loader.steps))


def test_a_loader_that_has_ended_says_so():
    loader = ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * SIZE)
    begun = loader.state_dict()
    assert len(list(loader)) == loader.steps
    with pytest.raises(UserError, match="has handed out all; make another loader"):
        loader.load_state_dict(begun)
    with ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * SIZE) as closed:
        pass
    with pytest.raises(UserError, match="it was closed"):
        next(iter(closed))
