"""A loader from its making to its end, and what it leaves on disk for those to come."""

import fcntl
import gc
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fresh import in_fresh_process
from test_clairvoyant import BATCH, EPOCHS, SIZE, F, Numbers, check

from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.items import DatasetItems
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.slab import Shape, Slab

DATA = [np.full(15, i, np.float32) for i in range(F)]
BYTES = DATA[0].nbytes


def held_in_memory():
    return Path("/proc/self/maps").read_text().count("memfd:ensemble_ml"), len(os.listdir("/proc/self/fd"))


def test_two_loaders_of_a_run_leave_each_other_their_caches(tmp_path):
    """Of training and validation, one after the other in one folder; a new plan of the same data takes the old one's
    place."""

    def loader_of(name, seed=3):
        return ClairvoyantLoader(DatasetItems(DATA, name), BATCH, 1, seed, ram=0, disk=10 * BYTES, folder=tmp_path)

    for expected in (0, 10 * BYTES):
        for name in ("training", "validation"):
            with loader_of(name) as loader:
                assert sum(len(batch.samples) for batch in loader) == F
                assert loader.tiers.counters.disk == expected
    before = set(tmp_path.iterdir())
    assert len(before) == 2
    with loader_of("training", seed=4):
        pass
    assert len(before & set(tmp_path.iterdir())) == 1 and len(list(tmp_path.iterdir())) == 2


def test_one_loop_at_a_time_and_the_next_goes_on():
    loader = ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * BYTES)
    loop = iter(loader)
    first = next(loop)
    with pytest.raises(UserError, match="another loop over it is under way"):
        next(iter(loader))
    loop.close()
    assert [first.step, *(batch.step for batch in loader)] == list(range(loader.steps))


def test_a_state_loaded_within_a_loop_is_refused_and_not_ignored():
    with ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * BYTES) as loader:
        begun, loop = loader.state_dict(), iter(loader)
        next(loop)
        with pytest.raises(UserError, match="a loop over it is under way"):
            loader.load_state_dict(begun)
        assert next(loop).step == 1
        loop.close()
        loader.load_state_dict(begun)
        assert next(iter(loader)).step == 0


def test_a_loader_that_has_ended_says_so():
    loader = ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * BYTES)
    begun = loader.state_dict()
    assert len(list(loader)) == loader.steps
    with pytest.raises(UserError, match="has handed out all batches; make another loader"):
        loader.load_state_dict(begun)
    with ClairvoyantLoader(DATA, BATCH, 1, 3, ram=10 * BYTES) as closed:
        pass
    with pytest.raises(UserError, match="it was closed"):
        next(iter(closed))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_loop_over_a_loader_that_is_closed_ends_with_an_error(elsewhere):
    class Slow(list):
        def __getitem__(self, i):
            time.sleep(0.05)
            return super().__getitem__(i)

    loader, seen = ClairvoyantLoader(Slow(DATA), BATCH, 3, 3, ram=0, threads=1), []

    def loop():
        try:
            for _ in loader:
                seen.append(None)
                if not elsewhere:
                    loader.close()
        except UserError as error:
            seen.append(str(error))

    thread = threading.Thread(target=loop, daemon=True)  # a loop that waits forever does not hold up the tests
    thread.start()
    if elsewhere:
        time.sleep(0.02)
        loader.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "it was closed" in seen[-1]


def test_disk_is_reused_by_the_next_run_and_bounded(tmp_path, monkeypatch):
    for attempt, reads in enumerate((F + (EPOCHS - 1) * (F - 15), EPOCHS * (F - 10 - 5) + 5)):
        data = Numbers()
        first = int(Order(3, F, BATCH).step(0)[1][0])  # read when the loader is made, and kept until it is used
        items = DatasetItems(data, "numbers", first)
        with ClairvoyantLoader(items, BATCH, EPOCHS, 3, ram=5 * SIZE, disk=10 * SIZE, folder=tmp_path) as loader:
            for batch in loader:
                check(batch, batch.samples)
            assert loader.tiers.counters.disk == (EPOCHS - 1 + attempt) * 10 * SIZE
        assert data.reads.sum() == reads
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size <= 10 * SIZE + 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 4, ram=0, disk=3 * SIZE, folder=tmp_path) as loader:
        assert not list(
            tmp_path.iterdir()
        )  # the other run's cache is gone, and this one, of no named content, nameless
        for batch in loader:
            check(batch, batch.samples)
        assert loader.tiers.counters.disk == (EPOCHS - 1) * 3 * SIZE
    assert not list(tmp_path.iterdir())


def test_a_cache_may_be_cleared_away_while_it_is_made(tmp_path, monkeypatch):
    """A run that clears away holds the lock for a moment, or takes the file's name: neither ends this one."""
    path, shape = tmp_path / "a.cache", Shape(np.array([3]), np.array([0]), np.array([8]), 1)
    lock, held = fcntl.flock, []

    def taken(fd, how):
        if not held:
            held.append(fd)
            os.unlink(path)
        return lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", taken)
    slab = Slab.on_disk(path, shape, keep=True)
    assert os.path.samestat(os.fstat(slab.fd), path.stat())
    slab.close()
    with path.open("rb") as file:
        lock(file, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: lock(file, fcntl.LOCK_UN))
        timer.start()
        Slab.on_disk(path, shape, keep=True).close()
        timer.join()


def test_two_runs_do_not_share_a_disk_cache(tmp_path):
    options = dict(ram=0, disk=10 * SIZE, folder=tmp_path)
    with (
        ClairvoyantLoader(DatasetItems(Numbers(), "numbers"), BATCH, EPOCHS, 3, **options),
        pytest.raises(UserError, match="another run"),
    ):
        ClairvoyantLoader(DatasetItems(Numbers(), "numbers"), BATCH, EPOCHS, 3, **options)


def starts_and_stops_leave_nothing():
    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    data = Numbers()
    with ClairvoyantLoader(data, BATCH, EPOCHS, 0, ram=5 * SIZE) as loader:
        next(iter(loader))
    before = count()
    for _ in range(200):
        with ClairvoyantLoader(data, BATCH, EPOCHS, 0, ram=5 * SIZE) as loader:
            next(iter(loader))
    assert count() == before


@pytest.mark.slow
def test_starts_and_stops_leave_nothing():
    in_fresh_process(starts_and_stops_leave_nothing)


def test_a_second_loop_is_refused_and_not_empty():
    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 0, ram=F * SIZE) as loader:
        assert sum(1 for _ in loader) == loader.steps and len(loader) == 0
        with pytest.raises(UserError, match="one loop gives the batches of all its 3 epochs"):
            next(iter(loader))
        ended = loader.state_dict()
    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 0, ram=F * SIZE) as loader:
        loader.load_state_dict(ended)
        assert not list(loader)


def memory_is_given_back_without_close():
    """After the last batch, and where a loop is left before it, when the loader is no longer in use."""
    gc.collect()
    before, kept = held_in_memory(), []
    for _ in range(3):
        loader = ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=F * SIZE)
        for batch in loader:
            check(batch, batch.samples)
        kept.append(loader)  # still there: it has nothing left to give
    assert held_in_memory() == before
    left = ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=F * SIZE)
    next(iter(left))
    assert held_in_memory() > before
    del left, batch
    gc.collect()
    assert held_in_memory() == before


def test_memory_is_given_back_without_close():
    in_fresh_process(memory_is_given_back_without_close)


def test_free_memory_that_changes_a_little_leaves_a_cache_on_disk(tmp_path, monkeypatch):
    """Half of it is what memory holds, and the plan decides what is left for the disk."""
    data, reads = [np.full(2048, i, np.float32) for i in range(12)], []
    for free in (70_000, 80_000):
        monkeypatch.setattr("ensemble_ml.loading.clairvoyant.free_memory", lambda free=free: free)
        items = DatasetItems(data, "numbers")
        with ClairvoyantLoader(items, BATCH, EPOCHS, 3, disk=1 << 20, folder=tmp_path) as loader:
            for batch in loader:
                assert batch["0"][:, 0].tolist() == batch.samples.tolist()
            reads.append(loader.tiers.counters.storage)
    assert loader.plan.tiers.ram == 32768 and reads[1] == reads[0] // 3  # the four that memory holds
