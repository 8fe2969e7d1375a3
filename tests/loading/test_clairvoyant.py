"""The loader gives the batches of the order, and reads what the plan says, byte for byte."""

import errno
import os
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ensemble_ml.config import Assign
from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.items import DatasetItems
from ensemble_ml.loading.order import Order

F, SHAPE, BATCH, EPOCHS = 23, (3, 5), 4, 3
SIZE = 3 * 5 * 4 + 8


class Numbers:
    """Samples that say which they are, and how often each was read."""

    def __init__(self, n=F):
        self.reads = np.zeros(n, int)
        self.lock = threading.Lock()

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, i):
        with self.lock:
            self.reads[i] += 1
        return {"x": np.random.default_rng(i).normal(size=SHAPE).astype(np.float32), "i": i}


def expected(i):
    return np.random.default_rng(i).normal(size=SHAPE).astype(np.float32)


def check(batch, samples):
    assert batch["i"].tolist() == list(samples)
    for row, sample in zip(batch["x"], samples, strict=True):
        assert np.array_equal(row.numpy(), expected(sample))


class Gathering:
    """An all-gather among the threads of a test."""

    def __init__(self, ranks):
        self.barrier, self.values = threading.Barrier(ranks), [b""] * ranks

    def of(self, rank):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait(20)
            found = list(self.values)
            self.barrier.wait(20)
            return found

        return gather


def run_ranks(ranks, body, timeout=60):
    errors = []

    def one(rank):
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("held", [0, 1, 9, F, 2 * F])
@pytest.mark.parametrize("threads", [1, 4])
def test_one_rank_reads_the_bound(held, threads):
    data = Numbers()
    with ClairvoyantLoader(data, BATCH, EPOCHS, 7, ram=held * SIZE, threads=threads) as loader:
        order = Order(7, F, BATCH)
        steps = 0
        for step, batch in enumerate(loader):
            assert batch.step == step
            check(batch, order.step(step)[1])
            steps += 1
        counted, told = loader.tiers.counters, loader.plan.explain()
    assert steps == loader.steps == EPOCHS * 6
    reads = F + (EPOCHS - 1) * (F - min(F, held))
    assert data.reads.sum() == reads
    assert (counted.storage, counted.ram, counted.peers) == (told.storage, told.ram, 0) == (reads * SIZE, told.ram, 0)


@pytest.mark.parametrize("assign", list(Assign))
@pytest.mark.parametrize("apart", [False, True], ids=["one node", "own nodes"])
@pytest.mark.parametrize("ranks, held", [(2, 5), (2, F), (3, 4)])
def test_ranks_share_one_cache(ranks, held, apart, assign):
    data, gathering = Numbers(), Gathering(ranks)
    seen: dict[int, dict[int, int]] = {}
    loaders: list = [None] * ranks

    def body(rank):
        node = f"node{rank}" if apart else None
        options = dict(ram=held * SIZE, assign=assign, node=node, host="localhost")
        with ClairvoyantLoader(
            data, BATCH, EPOCHS, 3, rank=rank, ranks=ranks, gather=gathering.of(rank), **options
        ) as one:
            loaders[rank] = one
            for batch in one:
                check(batch, batch.samples)
                seen.setdefault(batch.step, {}).update(
                    zip(batch.positions.tolist(), batch.samples.tolist(), strict=True)
                )

    run_ranks(ranks, body)
    order = Order(3, F, BATCH)
    for step, batch in seen.items():
        assert [batch[p] for p in sorted(batch)] == order.step(step)[1].tolist()
    told = loaders[0].plan.explain()
    for name in ("storage", "peers"):
        assert sum(getattr(one.tiers.counters, name) for one in loaders) == getattr(told, name), name
    assert data.reads.sum() * SIZE == told.storage
    assert sum(one.tiers.counters.fallback for one in loaders) == 0


@pytest.mark.parametrize("assign", list(Assign))
@pytest.mark.parametrize("apart", [False, True], ids=["one node", "own nodes"])
@pytest.mark.parametrize("ranks, held, disk", [(2, 5, 0), (2, 4, 5), (2, F, 0), (3, 4, 2)])
def test_ranks_count_their_own_uses_as_the_plan_does(ranks, held, disk, apart, assign, tmp_path):
    """What a rank serves to others is theirs to count: each use comes from one tier."""
    gathering, steps, loaders = Gathering(ranks), threading.Barrier(ranks), [None] * ranks
    order = Order(3, F, BATCH)
    # In step and one batch ahead, so that nobody is at a sample's second use before its holder is at the first.
    assert not set(order.step(5)[1]) & set(order.step(6)[1])

    def body(rank):
        node = f"node{rank}" if apart else None
        room = dict(ram=held * SIZE, disk=disk * SIZE, folder=tmp_path)
        options = dict(rank=rank, ranks=ranks, gather=gathering.of(rank), assign=assign, node=node, host="localhost")
        with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ahead=1, **room, **options) as one:
            loaders[rank] = one
            for batch in one:
                check(batch, batch.samples)
                steps.wait(20)

    run_ranks(ranks, body)
    told = loaders[0].plan.explain()
    counted = {n: sum(getattr(one.tiers.counters, n) for one in loaders) for n in ("storage", "ram", "disk", "peers")}
    assert counted == {name: getattr(told, name) for name in counted}
    assert sum(counted.values()) == EPOCHS * F * SIZE


@pytest.mark.parametrize("held", [0, 2 * F])
@pytest.mark.parametrize(("ranks", "batch", "samples"), [(4, 2, 12), (3, 2, 5), (4, 8, 3)])
def test_ranks_without_a_sample_of_the_first_batch_read_none_for_its_shape(ranks, batch, samples, held):
    data, gathering, loaders, seen = Numbers(samples), Gathering(ranks), [None] * ranks, []

    def body(rank):
        options = dict(rank=rank, ranks=ranks, gather=gathering.of(rank), ram=held * SIZE, host="localhost")
        with ClairvoyantLoader(data, batch, 2, 3, **options) as one:
            loaders[rank] = one
            for found in one:
                check(found, found.samples)
                seen.extend(found.samples.tolist())

    run_ranks(ranks, body)
    assert sorted(seen) == sorted(2 * list(range(samples)))
    reads = samples if held else 2 * samples
    assert data.reads.sum() == sum(one.tiers.counters.storage for one in loaders) // SIZE == reads


def test_resume_at_every_step_equals_the_uninterrupted_run():
    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 1, ram=5 * SIZE) as loader:
        whole = [(batch.step, batch["i"].tolist()) for batch in loader]
    for stop in range(0, len(whole), 4):
        with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 1, ram=5 * SIZE) as loader:
            for _ in zip(range(stop), loader):  # noqa: B905 - stops where the range does
                pass
            state = loader.state_dict()
        assert len(str(state)) < 200
        with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 1, ram=9 * SIZE) as loader:
            loader.load_state_dict(state)
            assert [(batch.step, batch["i"].tolist()) for batch in loader] == whole[state["step"] :]


def test_a_state_of_another_order_is_refused():
    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 1, ram=0) as loader:
        state = loader.state_dict()
        for change in ({"seed": 2}, {"batch_size": 5}, {"samples": 9}, {"data": "x"}, {"algorithm": "y"}):
            with pytest.raises(UserError, match=next(iter(change))):
                loader.load_state_dict(state | change)


def test_a_dead_peer_is_a_miss():
    data, gathering, ranks = Numbers(), Gathering(2), 2
    loaders: list = [None, None]

    def body(rank):
        options = dict(ram=F * SIZE, node=f"node{rank}", host="localhost")
        one = ClairvoyantLoader(data, BATCH, EPOCHS, 3, rank=rank, ranks=ranks, gather=gathering.of(rank), **options)
        loaders[rank] = one

    run_ranks(2, body)
    loaders[1].close()  # dies before the first batch
    loaders[0]._peers.finish, loaders[0]._gather = lambda: None, None
    with loaders[0] as one:
        for batch in one:
            check(batch, batch.samples)
        assert one.tiers.counters.fallback > 0
        assert one.tiers.counters.peers == 0


def test_a_damaged_cache_is_read_anew(caplog):
    data = Numbers()
    with ClairvoyantLoader(data, BATCH, EPOCHS, 3, ram=F * SIZE, threads=1, ahead=1) as loader:
        slab = loader.tiers.slabs[1]
        for batch in loader:
            check(batch, batch.samples)
            if batch.step == 6:  # all are held by now
                os.pwrite(slab.fd, b"\xff" * 16, slab.shape.header + int(slab.shape.offset[5]))
    assert "damaged" in caplog.text
    assert data.reads.sum() >= F + 1


def test_copies_to_a_gpu_that_lags_are_waited_for(monkeypatch):
    """A stand-in for a GPU, which copies what it was asked for only when somebody waits for it."""
    asked, copied, waited = [], [], set()

    def synchronize(device):
        waited.add(device)
        for batch in asked:
            check(batch, batch.samples)  # else it has been written over
            copied.append(batch.step)
        asked.clear()

    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=F * SIZE, threads=2, ahead=1) as loader:
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 7 * (device == 1))  # of others' GPUs, nothing
        monkeypatch.setattr("torch.cuda.synchronize", synchronize)
        for batch in loader:
            asked.append(batch)
            if batch.step == 7:
                break
        for batch in loader:
            asked.append(batch)
        assert copied == list(range(loader.steps)) and waited == {1}


def test_ranks_that_take_half_of_free_memory_agree(monkeypatch):
    """Each process sees another amount; two ranks of one node share what is free there."""
    amounts = iter(range(10**9, 10**10, 12345))
    monkeypatch.setattr("ensemble_ml.loading.clairvoyant.free_memory", lambda: next(amounts))
    gathering, found = Gathering(3), {}

    def body(rank):
        node = "shared" if rank else "own"
        gather = gathering.of(rank)
        with ClairvoyantLoader(
            Numbers(), BATCH, 1, 3, rank=rank, ranks=3, gather=gather, node=node, host="localhost"
        ) as one:
            found[rank] = one.plan.tiers.ram
            assert sum(len(batch.samples) for batch in one) > 0

    run_ranks(3, body)
    assert len(set(found.values())) == 1 and 10**9 // 4 - 4096 < found[0] < 10**9 // 4 + 12345


def test_what_goes_wrong_in_a_thread_is_raised_here():
    class Broken(Numbers):
        def __getitem__(self, i):
            if i == 4 and self.reads.any():
                raise OSError("disk on fire")
            return super().__getitem__(i)

    with ClairvoyantLoader(Broken(), BATCH, EPOCHS, 3, ram=0) as loader, pytest.raises(OSError, match="on fire"):
        list(loader)


def test_a_stalled_read_is_named(monkeypatch, caplog):
    monkeypatch.setattr("ensemble_ml.loading.threads._STALL", 0.05)
    go = threading.Event()

    class Slow(Numbers):
        def __getitem__(self, i):
            if i == 9 and self.reads[0]:
                go.wait(5)
            return super().__getitem__(i)

    with ClairvoyantLoader(Slow(), BATCH, EPOCHS, 3, ram=0) as loader:
        loader.items.dataset.reads[0] = 1
        threading.Timer(0.5, go.set).start()
        list(loader)
    assert "sample 9 has been read for" in caplog.text


def test_ragged_samples_are_refused():
    class Ragged(Numbers):
        def __getitem__(self, i):
            return np.zeros(3 + (i == 8))

    with ClairvoyantLoader(Ragged(), BATCH, 1, 0, ram=0) as loader, pytest.raises(UserError, match="sample 8"):
        list(loader)
    with pytest.raises(UserError, match="str"):
        DatasetItems(["text"])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("text", "sample 0: 0 is str; arrays or numbers are needed"),
        ({"x": np.ma.masked_array([1.0, 2.0], [0, 1])}, "sample 0: x has masked values, and the mask would be lost"),
        (torch.ones(2, dtype=torch.bfloat16), "sample 0: 0 cannot become an array .*BFloat16"),
        ({"t": np.datetime64("2001-01-01")}, r"sample 0: t is datetime64\[D\], which torch does not have"),
        (np.ones(2, np.longdouble), "sample 0: 0 is float128, which torch does not have"),
        ({1: 1.0, "1": 2.0}, "sample 0: two of its keys are '1' as text"),
    ],
)
def test_samples_that_make_no_arrays(sample, message):
    with pytest.raises(UserError, match=message):
        DatasetItems([sample])


@pytest.mark.parametrize("sample", [np.arange(3, dtype=">f4"), torch.arange(3.0, requires_grad=True)])
def test_samples_of_other_byte_orders_and_with_gradients(sample):
    with ClairvoyantLoader([sample] * 4, 2, 1, 0, ram=0) as loader:
        for batch in loader:
            torch.testing.assert_close(batch["0"], torch.arange(3.0).expand(2, 3), rtol=0, atol=0)


def test_works_with_torch_datasets_and_odd_batches():
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    with ClairvoyantLoader(data, 8, 2, 0, ram=10) as loader:
        for batch in loader:
            assert sorted(batch["1"].tolist()) == [0, 1, 2, 3, 4]
            assert torch.equal(batch["0"], data.tensors[0][batch["1"]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank=1, ranks=1: ranks are numbered from 0"),
        ({"rank": -1}, "rank=-1, ranks=1"),
        ({"start_step": -1}, "start_step=-1: the run has 18 steps"),
        ({"start_step": 19}, "start_step=19: the run has 18 steps"),
        ({"start_step": 1.0}, "start_step=1.0: must be a whole number"),
        ({"ranks": "2"}, "ranks='2': must be a whole number"),
        ({"ram": "4GB"}, "ram='4GB': must be a whole number"),
        ({"assign": "near"}, "assign='near': fixed, locality are allowed"),
    ],
)
def test_ranks_and_steps_that_are_none(changes, message):
    with pytest.raises(UserError, match=message):
        ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, **{"ram": 0, **changes})


def test_a_state_beyond_the_run_is_refused():
    loader = ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=0)
    with loader, pytest.raises(UserError, match="step 19, and the run has 18; give more epochs"):
        loader.load_state_dict(loader.state_dict() | {"step": 19})
    with pytest.raises(UserError, match="step=None: must be a whole number"):
        other = ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=0, assign="locality")
        other.load_state_dict({key: value for key, value in other.state_dict().items() if key != "step"})


def test_ranks_have_to_agree_on_data_and_step():
    class Others(Numbers):
        def __getitem__(self, i):
            return {key: np.asarray(value, np.float64) for key, value in super().__getitem__(i).items()}

    def body(rank, gather, data, step):
        options = dict(rank=rank, ranks=2, gather=gather, ram=F * SIZE, host="localhost")
        with ClairvoyantLoader(data[rank], BATCH, EPOCHS, 3, **options) as loader:
            loader.load_state_dict(loader.state_dict() | {"step": step[rank]})
            list(loader)

    for data, step, message in (
        ((Numbers(), Others()), (0, 0), "ranks have planned different runs"),
        ((Numbers(), Numbers()), (3, 0), r"ranks are at steps \[3, 0\]; load the same state on all of them"),
    ):
        gathering, told = Gathering(2), []

        def one(rank, gathering=gathering, told=told, data=data, step=step):
            try:
                body(rank, gathering.of(rank), data, step)
            except UserError as error:
                told.append(str(error))

        run_ranks(2, one)
        assert len(told) == 2 and all(re.search(message, text) for text in told)


def test_a_thread_without_memory_ends_the_loop(monkeypatch):
    def none(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 3, ram=0) as loader:
        monkeypatch.setattr("ensemble_ml.loading.clairvoyant.mmap", SimpleNamespace(mmap=none))
        with pytest.raises(UserError, match=r"no 0 MB for a sample \(Cannot allocate memory\); use fewer threads"):
            list(loader)
