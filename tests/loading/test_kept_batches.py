"""Batches that a user keeps keep their values, and the memory of those that nobody holds is used again."""

import ctypes
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader

F, SHAPE, BATCH, EPOCHS, AHEAD = 23, (3, 5), 4, 3, 2
STEPS = EPOCHS * 6
BYTES = BATCH * 4 * 15


class Numbers:
    """Samples that are told apart by their values."""

    def __len__(self):
        return F

    def __getitem__(self, i):
        return {"x": sample(i), "i": i}


def sample(i):
    return np.random.default_rng(i).normal(size=SHAPE).astype(np.float32)


def rows(samples):
    return np.stack([sample(i) for i in samples])


def loader(**options):
    return ClairvoyantLoader(Numbers(), BATCH, EPOCHS, 7, ram=10**6, threads=2, ahead=AHEAD, **options)


def live_buffers(monkeypatch):
    """Count the batches' buffers that are alive, made as those that are pinned: NumPy arrays of torch's memory."""
    alive = weakref.WeakSet()

    def pages(size):
        memory = torch.empty(size, dtype=torch.uint8)
        if size == BYTES:
            alive.add(memory.untyped_storage())
        return memory.numpy()

    monkeypatch.setattr("ensemble_ml.loading.clairvoyant.pages", pages)
    return alive


HOLDERS = {
    "batch": (lambda batch: batch, lambda held: held["x"].numpy()),
    "tensor": (lambda batch: batch["x"], lambda held: held.numpy()),
    "view": (lambda batch: batch["x"][:, 1:], lambda held: held.numpy()),
    "array": (lambda batch: batch["x"].numpy(), lambda held: held),
    "part of the array": (lambda batch: batch["x"].numpy()[:, 1:][..., ::2], lambda held: held),
    "buffer of the array": (lambda batch: memoryview(batch["x"].numpy()), np.asarray),
    "storage": (
        lambda batch: batch["x"].untyped_storage(),
        lambda held: np.frombuffer(bytes(held), np.float32),
    ),
}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_what_is_kept_of_a_batch_keeps_its_values(name):
    keep, read = HOLDERS[name]
    held, values = [], []
    for batch in loader():
        held.append(keep(batch))
        values.append(read(keep(batch)).copy())
        np.testing.assert_array_equal(batch["x"], rows(batch.samples))
    assert len(held) == STEPS
    for kept, expected in zip(held, values, strict=True):
        np.testing.assert_array_equal(read(kept), expected)


def test_a_list_of_the_loader_holds_every_batch():
    batches = list(loader())
    assert [batch.step for batch in batches] == list(range(STEPS))
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], rows(batch.samples))
        assert batch["i"].tolist() == batch.samples.tolist()


def test_losses_that_are_summed_before_backward_have_the_gradient_of_all_batches():
    """Autograd saves the batch for the gradient of the weight; the names of the batch are gone by then."""
    weight = torch.ones(5, dtype=torch.float32, requires_grad=True)
    losses = [(batch["x"] @ weight).square().sum() for batch in loader()]
    sum(losses).backward()
    every = np.concatenate([rows(batch.samples) for batch in loader()]).reshape(-1, 5).astype(np.float64)
    np.testing.assert_allclose(weight.grad, 2 * every.T @ every.sum(1), rtol=1e-4)


def test_the_memory_of_batches_that_nobody_holds_is_used_again(monkeypatch):
    alive = live_buffers(monkeypatch)
    addresses = set()
    for batch in loader():
        addresses.add(batch["x"].data_ptr())
        assert len(alive) <= AHEAD + 2
    assert len(addresses) <= AHEAD + 2


def test_the_memory_of_batches_that_were_kept_for_a_while_is_given_back(monkeypatch):
    alive, kept, most = live_buffers(monkeypatch), [], 0
    for batch in loader():
        kept.append(batch)
        most = max(most, len(alive))
        if batch.step == 11:
            kept.clear()
        if batch.step == 13:
            assert len(alive) <= AHEAD + 4  # those ahead, the last one, and the two that are kept since
    assert most >= 11
    del batch
    kept.clear()
    gc.collect()
    assert not alive


def test_a_kept_batch_of_pinned_memory_keeps_its_values(monkeypatch):
    live_buffers(monkeypatch)
    for batch in list(loader()):
        np.testing.assert_array_equal(batch["x"], rows(batch.samples))


def test_memory_that_is_let_go_is_not_written_to_before_its_copies_are_made(monkeypatch):
    """A stand-in for a GPU that lags: the batches are gone when it reads their memory."""
    asked, copied, kept = [], [], []

    def synchronize(device):
        for address, samples in asked:
            values = np.ctypeslib.as_array((ctypes.c_float * (len(samples) * 15)).from_address(address))
            np.testing.assert_array_equal(values.reshape(-1, *SHAPE), rows(samples))
            copied.append(address)
        asked.clear()

    with loader() as one:
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 1)
        monkeypatch.setattr("torch.cuda.synchronize", synchronize)
        for batch in one:
            kept.append(batch)
            if len(kept) == 3:
                asked += [(each["x"].data_ptr(), each.samples.tolist()) for each in kept]
                kept.clear()
    assert len(copied) == STEPS // 3 * 3


def test_buffers_that_are_reused_by_request_hold_later_batches():
    batches = list(loader(reuse_buffers=True))
    assert len({batch["x"].data_ptr() for batch in batches}) <= AHEAD + 1
    whole = [batch for batch in batches if np.array_equal(batch["x"], rows(batch.samples))]
    assert len(whole) <= AHEAD + 1


def test_reused_buffers_give_the_same_batches():
    for kept, reused in zip(loader(), loader(reuse_buffers=True), strict=True):
        assert torch.equal(kept["x"], reused["x"]) and kept.samples.tolist() == reused.samples.tolist()
        np.testing.assert_array_equal(reused["x"], rows(reused.samples))


def test_reused_buffers_take_the_memory_of_one_batch_less():
    assert loader().memory - loader(reuse_buffers=True).memory == BYTES + 8 * BATCH


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1.0, 2.0])


class SizedStream(Stream):
    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "dataset",
    [Stream(), SizedStream(), iter([1.0]), {"x": np.zeros(3)}, {1.0, 2.0}, None, np.array(1.0)],
    ids=lambda one: type(one).__name__,
)
def test_what_has_no_samples_by_number_is_refused(dataset):
    with pytest.raises(UserError, match=rf"^dataset: {type(dataset).__name__} has no .*; give a map-style dataset"):
        ClairvoyantLoader(dataset, BATCH, EPOCHS, 0, ram=0)


def test_an_empty_dataset_is_refused():
    with pytest.raises(UserError, match=r"^dataset: is empty; at least one sample is needed$"):
        ClairvoyantLoader([], BATCH, EPOCHS, 0, ram=0)


def test_an_array_that_the_first_sample_lacks_is_refused():
    """It would be left out in silence."""
    data = [{"x": 1.0, "y": 2.0} if i == 4 else {"x": 1.0} for i in range(8)]
    with pytest.raises(UserError, match="sample 4: y is not in the first sample; samples must be alike"):
        list(ClairvoyantLoader(data, 2, 1, 0, ram=0))


@pytest.mark.parametrize("key", ["batch_size", "epochs", "seed", "threads", "ahead"])
@pytest.mark.parametrize("value", [2.5, "4", None])
def test_settings_that_are_no_whole_numbers_are_refused(key, value):
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 0, "ram": 0} | {key: value}
    with pytest.raises(UserError, match=f"^{key}={value!r}: must be a whole number$"):
        ClairvoyantLoader(Numbers(), **settings)


def test_numbers_of_numpy_are_whole_numbers():
    with ClairvoyantLoader(Numbers(), np.int64(BATCH), np.int32(1), np.uint8(0), ram=0) as one:
        assert sum(len(batch.samples) for batch in one) == F


def test_two_threads_may_let_go_of_a_batch_at_once():
    """One is stopped after the first line of what is called when an array goes; the other array goes meanwhile."""
    stopped, on = threading.Event(), threading.Event()

    def trace(frame, event, argument):
        if frame.f_code.co_name != "let_go":
            return None
        events = []

        def within(frame, event, argument):
            events.append(event)
            if len(events) == 2:
                stopped.set()
                on.wait(10)
            return within

        return within

    def drop(holder):
        sys.settrace(trace)
        holder.clear()
        sys.settrace(None)

    steps = []
    with loader() as batches:
        for batch in batches:
            np.testing.assert_array_equal(batch["x"], rows(batch.samples))
            steps.append(batch.step)
            if batch.step == 1:
                holder, other = [batch.pop("x")], [batch.pop("i")]
                thread = threading.Thread(target=drop, args=(holder,))
                thread.start()
                assert stopped.wait(10)
                other.clear()
                on.set()
                thread.join()
            del batch
    assert steps == list(range(STEPS))
