"""Training's batches by plan: the same as without, and the bytes that the plan says."""

import gc
import multiprocessing
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fresh import in_fresh_process
from planning import CPU, Ranks, config_of, equal, plain, readers_of, run, run_ranks, schedule_of, spec_of, tensors
from stores import make_store

from ensemble_ml.config import Assign, LoaderName
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Reader
from ensemble_ml.loading.arena import PAGE
from ensemble_ml.loading.batches import Draw, read_sample
from ensemble_ml.loading.counters import Timeline
from ensemble_ml.loading.run_loader import Lane, PlannedLoader, TorchLoader, decoded_bytes, make_plan
from ensemble_ml.loading.unit_cache import UnitCache
from ensemble_ml.loading.unit_peers import _identity, _opened
from ensemble_ml.store import open_store

DATES, VALIDATION = np.arange(2, 10), np.array([0, 1, 10, 11])
NAMES = ("storage", "ram", "disk", "peers")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    return make_store(folder / "a.zarr", dates=12, members=6, shape=(17, 24), levels=(300, 500, 700, 850))


def assert_same(ours, theirs):
    assert [x[:2] for x in ours] == [x[:2] for x in theirs]
    assert all(equal(a[2], b[2]) for a, b in zip(ours, theirs, strict=True))


def exactly(counters, traffic):
    assert {name: int(counters[name]) for name in NAMES} == {name: traffic[name] for name in NAMES}
    assert counters["fallback"] == 0


def ram_for(schedule, reader, cache):
    """`loading.ram` that leaves so many bytes for the cache."""
    with PlannedLoaderOf(config_of(ram=10**12), schedule, reader) as loader:
        return 10**12 - loader.plan.room.ram + cache


class PlannedLoaderOf(PlannedLoader):
    def __init__(self, config, schedule, reader):
        super().__init__(config, schedule, reader, CPU, Lane())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.mark.parametrize("held", [pytest.param(0.0, marks=pytest.mark.slow), 0.3, 2.0])
def test_the_same_batches_and_the_bytes_of_the_plan(store, held):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    with PlannedLoaderOf(config_of(ram=10**12), schedule, reader) as loader:
        whole = int(loader.plan.sizes[np.unique(loader.plan.trace.unit)].sum())
    ram = ram_for(schedule, reader, int(held * whole))
    with PlannedLoaderOf(config_of(ram=ram), schedule, reader) as loader:
        assert_same(run(loader, schedule), plain(schedule, reader))
        counters, traffic = loader.counters.snapshot(), loader.plan.traffic()
        exactly(counters, traffic)
        if held == 2:
            assert traffic["storage"] == whole  # each byte once
        if held == 0:
            assert traffic["storage"] == traffic["used"] > whole
        assert loader.plan.held(0)[1] <= held * whole


def test_disk_takes_what_memory_does_not(store, tmp_path):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    ram = ram_for(schedule, reader, 20 * PAGE)
    folder = tmp_path / "cache"
    with PlannedLoaderOf(config_of(ram=ram, disk="1MB", folder=str(folder)), schedule, reader) as loader:
        assert_same(run(loader, schedule), plain(schedule, reader))
        exactly(loader.counters.snapshot(), traffic := loader.plan.traffic())
        assert traffic["ram"] > 0 and traffic["disk"] > 0
        assert not list(folder.iterdir())  # it has no name that could be left over


def test_a_cache_that_cannot_be_made_leaves_no_file_open(store, tmp_path):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    (tmp_path / "file").write_text("no folder")
    before = memory_files()
    with pytest.raises(UserError, match="file"):
        PlannedLoaderOf(config_of(ram="50MB", disk="1MB", folder=str(tmp_path / "file")), schedule, reader)
    assert memory_files() == before


def memory_files():
    """Return the memfds of the loaders that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry))
    return sorted(name for name in found if "memfd:ensemble_ml" in name)


def test_a_batch_after_close_is_refused(store):
    """It would be waited for without end."""
    [reader] = readers_of(store, 1)
    loader = PlannedLoaderOf(config_of(ram="50MB"), schedule_of(reader, dates=DATES), reader)
    batches = loader.train()
    next(batches)
    loader.close()
    with pytest.raises(UserError, match="no batch after close"):
        list(batches)


def test_once_an_epoch_reaches_the_bound(store):
    """F + (E-1)(F-K): every date with all members, once an epoch, no validation."""
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, sizes=(6,), steps=12)  # 4 epochs
    cache = 60 * PAGE
    with PlannedLoaderOf(config_of(ram=ram_for(schedule, reader, cache)), schedule, reader) as loader:
        run(loader, schedule)
        used = np.unique(loader.plan.trace.unit)
        pages = int((-(-loader.plan.sizes[used] // PAGE)).sum())
        assert loader.plan.trace.regular and pages > 60
        whole = int(loader.plan.sizes[used].sum())
        largest = int(loader.plan.sizes.max())
        bound = whole + 3 * (whole - cache)
        # What does not divide: less than a unit that no longer fits, and the ends of the last pages.
        assert bound <= loader.counters.storage <= bound + 3 * (largest + 60 * PAGE * 0.1 + PAGE)
        exactly(loader.counters.snapshot(), loader.plan.traffic())


@pytest.mark.parametrize("start", range(1, 9))
def test_begun_at_any_step_it_is_the_same_run(store, start):
    [reader] = readers_of(store, 1)
    whole = plain(schedule_of(reader, dates=DATES, validation=VALIDATION), reader)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION, start_step=start)
    ram = ram_for(schedule, reader, 30 * PAGE)
    with PlannedLoaderOf(config_of(ram=ram), schedule, reader) as loader:
        after = [x for x in whole if x[0] > start or (x[0] == start and not x[1])]
        assert_same(run(loader, schedule), after)


@pytest.mark.parametrize(
    ("parts", "columns", "assign", "node"),
    [
        (2, 1, Assign.fixed, None),
        (3, 1, Assign.locality, None),
        pytest.param(2, 2, Assign.fixed, None, marks=pytest.mark.slow),
        (2, 1, Assign.fixed, "apart"),
    ],
)
@pytest.mark.parametrize("cache", [12 * PAGE, *(pytest.param(size, marks=pytest.mark.slow) for size in (0, 10**6))])
def test_ranks_together_read_what_the_plan_says(store, parts, columns, assign, node, cache):
    readers = readers_of(store, parts * columns)
    schedule = replace(schedule_of(readers[0], dates=DATES, validation=VALIDATION), parts=parts)
    lone = Lane(parts=parts, columns=columns)
    loader = PlannedLoader(config_of(ram=10**12, assign=assign), schedule, readers[0], CPU, lone)
    loader.close()
    config = config_of(ram=10**12 - loader.plan.room.ram + cache, assign=assign)
    found = run_ranks(schedule, readers, parts=parts, columns=columns, config=config)
    for rank, (batches, counters, traffic, plan) in enumerate(found):
        if assign is Assign.fixed:
            assert_same(batches, plain(schedule, readers[rank], rank // columns))
        exactly(counters, traffic)
        if cache == 10**6:
            once = int(plan.sizes[np.unique(plan.trace.unit)].sum())
            assert plan.traffic()["storage"] == once  # by all ranks together
    if assign is Assign.locality:
        assert_same_steps(found, plain(schedule_of(readers[0], dates=DATES, validation=VALIDATION), readers[0]))


def test_ranks_with_disks_of_other_sizes_plan_one_run(store, tmp_path):
    readers, ranks, disks = readers_of(store, 2), Ranks(2), (12 * PAGE, 20 * PAGE)
    schedule = replace(schedule_of(readers[0], dates=DATES), parts=2)

    def planned(rank):
        config = config_of(ram=10**8, disk=disks[rank], folder=str(tmp_path))
        return make_plan(config, schedule, readers[rank], Lane(rank, 0, 2, 1, ranks.gather(rank)))[0].room

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(planned, range(2))
    assert one == other and one.disk == min(disks)


def dates_of(batches):
    """Dates of every training step."""
    steps = {}
    for step, validation, batch in batches:
        if not validation and not np.isnan(batch["truth"].numpy()).all():
            steps.setdefault(step, []).extend(batch["time"])
    return {step: sorted(times) for step, times in steps.items()}


def assert_same_steps(found, whole):
    """All ranks together use in each step the dates that one would."""
    together = {}
    for batches, *_ in found:
        for step, times in dates_of(batches).items():
            together.setdefault(step, []).extend(times)
    assert {step: sorted(times) for step, times in together.items()} == dates_of(whole)


def test_two_ranks_then_one_then_three(store):
    readers = readers_of(store, 3)
    whole = dates_of(plain(schedule_of(readers[0], dates=DATES), readers[0]))
    found = {}
    for parts, first, last in ((2, 0, 3), (1, 3, 5), (3, 5, 9)):
        schedule = schedule_of(readers[0], dates=DATES, steps=last, start_step=first)
        for batches, *_ in run_ranks(schedule, readers, parts=parts, ram=10**9):
            for step, times in dates_of(batches).items():
                found.setdefault(step, []).extend(times)
    assert {step: sorted(times) for step, times in found.items()} == whole


def test_a_damaged_copy_is_read_anew(store, caplog):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    with PlannedLoaderOf(config_of(ram=10**9, ahead=1), schedule, reader) as loader:
        batches = []

        def damage():
            batches.append(0)
            if len(batches) == 6:
                arena = loader.cache.arenas[1]
                for _, extents in list(loader.cache._resident.values()):
                    for offset, size in extents:
                        os.pwrite(arena.fd, b"\xff" * (size // 2), offset)

        assert_same(run(loader, schedule, damage), plain(schedule, reader))
        assert loader.counters.fallback > 0
    assert "it is read anew" in caplog.text


@pytest.fixture
def damaged(tmp_path):
    """A reader of a store of four dates, one of which is damaged, and a schedule that comes to it."""
    make_store(tmp_path / "b.zarr", dates=4, members=3, shape=(17, 24))
    file = next((tmp_path / "b.zarr" / "forecast_pressure").glob("c.2*"))
    data = bytearray(file.read_bytes())
    data[100:110] = b"\0" * 10
    file.write_bytes(data)
    [reader] = readers_of(open_store(tmp_path / "b.zarr"), 1)
    return reader, schedule_of(reader, dates=np.arange(4), sizes=(3,), steps=3)


def test_a_damaged_store_is_named(damaged):
    reader, schedule = damaged
    with (
        PlannedLoaderOf(config_of(ram=10**9), schedule, reader) as one,
        pytest.raises(UserError, match=r"forecast_pressure/c\.2.*damaged"),
    ):
        run(one, schedule)


def test_a_worker_process_names_a_damaged_store_in_the_same_line(damaged):
    reader, schedule = damaged
    said = []
    for workers in (0, 1):
        loader = TorchLoader(config_of(name=LoaderName.torch, workers=workers), schedule, reader)
        with closing(loader), pytest.raises(UserError, match=r"forecast_pressure/c\.2.*damaged") as caught:
            list(loader.train())
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_full_disk_costs_reads_and_no_more(store, tmp_path, monkeypatch):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    real, room = os.pwrite, [40_000]

    def full(fd, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    ram = ram_for(schedule, reader, 0)
    with PlannedLoaderOf(config_of(ram=ram, disk="9MB", folder=str(tmp_path)), schedule, reader) as loader:
        assert_same(run(loader, schedule), plain(schedule, reader))
        found = loader.counters
        assert found.fallback > 0
        # What was not kept is no hit: all bytes that were used came from one place, what is read again from storage.
        used = sum(int(loader.plan.sizes[unit]) for unit in loader.plan.trace.unit)
        assert found.ram + found.disk + found.storage == used


def test_a_picture_that_cannot_be_written_ends_no_run(store, tmp_path, caplog):
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    (tmp_path / "file").touch()
    picture = tmp_path / "file" / "picture.png"
    loader = PlannedLoader(config_of(ram="50MB"), schedule, reader, CPU, Lane(), timeline=picture)
    with pytest.raises(ValueError, match="the run's own"), closing(loader):
        list(loader.validation(0))
        next(loader.train())
        raise ValueError("the run's own")
    assert "loading.timeline" in caplog.text and "cannot be written" in caplog.text


def test_memory_of_another_process_under_the_same_path_is_not_taken(tmp_path):
    """As in containers that share a host name and /dev/shm, but not their numbers of processes."""
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_text(path.name)
    descriptor = os.open(one, os.O_RDONLY)
    known = _identity(descriptor)
    taken = _opened(str(one), known)
    assert os.read(taken, 9) == b"one"
    with pytest.raises(OSError, match="leads to another file in this process"):
        _opened(str(other), known)
    for file in (descriptor, taken):
        os.close(file)


def nothing_is_left_behind(path):
    [reader] = readers_of(open_store(path), 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    for cycle in range(12):
        with PlannedLoaderOf(config_of(ram="50MB"), schedule, reader) as loader:
            next(iter(loader.validation(0)))
            if cycle % 2:
                run_on = loader.train()
                list(loader.validation(0))
                next(run_on)
        del loader
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("memfd:ensemble_ml")  # a cache that is closed and yet held
        found = (len(os.listdir("/proc/self/fd")), threading.active_count(), mapped)
        if cycle == 1:
            first = found
    assert found == first


@pytest.mark.slow
def test_nothing_is_left_behind(store):
    in_fresh_process(nothing_is_left_behind, store.path)


@pytest.mark.slow
def test_iterators_that_have_ended_are_let_go(store):
    """Each holds the pipes of its worker processes, and a run validates hundreds of times."""
    [reader] = readers_of(store, 1)
    schedule = schedule_of(reader, dates=DATES, validation=VALIDATION)
    loader, found = TorchLoader(config_of(name=LoaderName.torch, workers=1), schedule, reader, 0), []
    for _ in range(6):
        list(loader.validation(0))
        gc.collect()
        found.append(len(os.listdir("/proc/self/fd")))
    loader.close()
    assert found[-1] < found[1] + 6  # which each of them held


def test_a_signal_to_the_process_group_is_the_runs_alone(store):
    """scancel and Ctrl-C reach all of the group: a worker that died of it would end the run before it has kept its
    state."""
    [reader] = readers_of(store, 1)
    loader = TorchLoader(config_of(name=LoaderName.torch, workers=2), schedule_of(reader, dates=DATES), reader, 0)
    before, batches = set(multiprocessing.active_children()), loader.train()
    for _ in range(2):  # one of each worker, which has begun then
        next(batches)
    workers = [process.pid for process in set(multiprocessing.active_children()) - before]
    assert len(workers) == 2 and os.getpgrp() not in {os.getpgid(pid) for pid in workers}
    loader.close()


@pytest.mark.parametrize(("parts", "columns"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("share", [pytest.param(0.1, marks=pytest.mark.slow), 0.8])
def test_validations_of_several_ranks_stay_within_memory(store, monkeypatch, parts, columns, share):
    """Their turns pass together: what they read waits beside the cache, or is let go when all have had it."""
    readers, most = readers_of(store, 2), []
    schedule = replace(schedule_of(readers[0], dates=DATES, validation=np.tile(np.arange(12), 4)), parts=parts)
    lane = Lane(parts=parts, columns=columns)
    with PlannedLoaderOf(config_of(ram=10**12), replace(schedule, parts=1), readers[0]) as loader:
        whole, trace = int(loader.plan.sizes[np.unique(loader.plan.trace.unit)].sum()), loader.plan.trace
        packed = int(np.bincount(trace.turn, loader.plan.sizes[trace.unit]).max())
    config = config_of(ram=0)
    batch, scratch = decoded_bytes(schedule, readers[0], lane)
    decoded = (config.ahead + 1) * batch + config.threads * scratch
    own = UnitCache._own

    def look(cache):
        with cache._lock:
            coming = sum(len(one.result()) for one in cache._coming.values() if one.done())
            held = sum(int(cache.plan.sizes[cache.plan.trace.unit[use]]) for use in cache._resident)
        most.append(coming + held)

    monkeypatch.setattr(UnitCache, "_own", lambda cache, use: (own(cache, use), look(cache))[0])
    monkeypatch.setattr(UnitCache, "_keep", lambda cache, use, keep=UnitCache._keep: (keep(cache, use), look(cache)))
    ram = decoded + (config.ahead + 2) * packed // parts + int(share * whole)
    run_ranks(schedule, readers, parts=parts, columns=columns, config=replace(config, ram=ram))
    assert 0 < max(most) <= ram - decoded


@pytest.mark.parametrize(("masked", "columns"), [((), None), (("sst",), None), ((), (0, 90)), (("sst",), (0, 90))])
def test_decoding_a_sample_takes_what_the_budget_counts_on(tmp_path, masked, columns):
    """Fifty members, of fields with masks, and of a part of the columns, which are cut out of whole rows."""
    given = {"dates": 2, "members": 50, "variables": (), "levels": (), "surface": ("t2m", "sst", "msl")}
    store = make_store(tmp_path / "s.zarr", **given, shape=(91, 180), masked=masked)
    spec = replace(spec_of(store), masked=store.masked)
    reader = Reader(store, spec, window=columns and ((0, 91), columns))
    schedule = schedule_of(reader, dates=[0, 1], sizes=(50,), batch_size=1)
    _, scratch = decoded_bytes(schedule, reader, Lane())
    read_sample(reader, Draw(0, np.arange(50)))
    tracemalloc.start()
    try:
        read_sample(reader, Draw(1, np.arange(50)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.03 * scratch


def test_a_rank_that_is_late_still_gets_what_others_hold(store):
    """Rank 1 takes one batch of each interval before the meeting that ends it, and the others only after that meeting.

    Rank 0 then already goes on. If a meeting let it give up what is read up to there, a rank would have to go to
    storage again (266 kB here, where every step counts as a meeting).
    """
    dates, steps, bound = np.arange(12), 24, 4
    readers = readers_of(store, 2)
    schedule = schedule_of(readers[0], dates=dates, steps=steps, every=10**6, parts=2, batch_size=4)
    ranks, found = Ranks(2), [None, None]

    def work(rank):
        lane = Lane(rank, 0, 2, 1, ranks.gather(rank), 2)
        loader = PlannedLoader(
            config_of(ram=6 * 10**6),
            schedule,
            readers[rank],
            CPU,
            lane,
            meets=lambda step: step % bound == 0,
            slack=bound,
        )
        try:
            batches, own = loader.train(), []
            for _ in range(0, steps, bound):
                own += [tensors(next(batches)) for _ in range(1 if rank else bound)]
                ranks.barrier.wait()
                own += [tensors(next(batches)) for _ in range(bound - 1 if rank else 0)]
            ranks.barrier.wait()
            found[rank] = own, loader.counters.snapshot()
        except BaseException:
            ranks.barrier.abort()
            raise
        finally:
            loader.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, (own, counters) in enumerate(found):
        theirs = [batch for _, validation, batch in plain(schedule, readers[rank], rank) if not validation]
        assert all(equal(a, b) for a, b in zip(own, theirs, strict=True))
        assert counters["fallback"] == 0 and counters["ram"] > 0 and counters["peers"] > 0


def test_a_unit_that_late_ranks_wait_for_reaches_them_although_its_turn_passes(store, monkeypatch):
    """The second of two requests waits for the first, and the turn passes before the first begins to read."""
    [reader] = readers_of(store, 1)
    plan, units, *_ = make_plan(config_of(ram=10**12), schedule_of(reader, dates=DATES), reader, Lane())
    cache, awaited = UnitCache(plan, 0, units, folder=None, timeline=Timeline()), []
    bring = cache._bring

    def bring_after_the_turn(*given):
        awaited.append(cache._coming[0])
        cache.passed(0)
        return bring(*given)

    monkeypatch.setattr(cache, "_bring", bring_after_the_turn)
    with closing(cache):
        data = cache.own(0)
        assert awaited[0].done() and np.array_equal(awaited[0].result(), data)
