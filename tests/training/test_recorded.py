"""Recordings of a pass, by a recorder that calls again: what is played equals what is called; what may go wrong."""

import logging
from dataclasses import replace

import pytest
import torch

from benchmarks.spatial.network import perturbed
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.loading import Batch
from ensemble_ml.training.recorded import Recorded


class Recorder:
    """Plays by calling again and writing over what the first call left; counts calls and plays."""

    def __init__(self, model, error=None):
        self.model, self.error, self.plays, self.made = model, error, 0, 0

    def __call__(self, call):
        if self.error is not None:
            raise self.error
        found, self.made = call(), self.made + 1
        params = list(self.model.parameters())
        kept = [p.grad for p in params]

        def play():
            self.plays += 1
            for p in params:
                p.grad = None
            again = call()
            for name, value in again.items():
                found[name].copy_(value)
            for p, own in zip(params, kept, strict=True):
                if own is not None:
                    own.copy_(p.grad)

        return play, found


@pytest.fixture
def model():
    spec = benchmark_spec(2, 9, 16, hidden=8, max_hidden=8, depth=1)
    return perturbed(spec)


def batches(model, sizes):
    """One for each size, all different."""
    found = []
    for number, size in enumerate(sizes):
        inputs = random_batch(model.spec, size)
        found.append(Batch(replace(inputs, mean=inputs.mean + number), [f"{number}"] * size))
    return found


def pass_of(model, calls):
    def run(batch):
        calls.append(batch.init_time[0])
        loss = model(batch.inputs).spread.square().mean()
        loss.backward()
        return {"loss": loss.detach()}

    return run


def followed(call, model, given):
    """Losses and gradients of each batch, as a step would take them."""
    found = []
    for batch in given:
        model.zero_grad(set_to_none=True)
        losses = call(batch)
        found.append([losses["loss"], *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
    return found


def make(model, monkeypatch, *, play=1.0, error=None):
    """A `Recorded` whose called passes take a second, and whose plays take `play`."""
    recorder, calls = Recorder(model, error), []
    recorded = Recorded(model, pass_of(model, calls), recorder)

    def timed(call, device):
        return call(), play if call.__name__ == "play" else 1.0

    monkeypatch.setattr("ensemble_ml.training.recorded._timed", timed)
    return recorded, recorder, calls


def test_played_equals_called(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    given = batches(model, [2, 2, 2, 1, 2, 1, 2])
    recorded, recorder, _ = make(model, monkeypatch, play=0.5)
    wanted = followed(pass_of(model, []), model, given)
    found = followed(recorded, model, given)
    # A play to begin with, a timed one, then batches 2, 4 and 6; those of one date are called.
    assert recorder.made == 1 and recorder.plays == 2 + 3
    assert "captured a pass on a batch of 2 as a CUDA graph: 500.0 ms, in place of 1000.0 ms" in caplog.text
    for one, other in zip(wanted, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_a_short_batch_that_comes_first_is_not_recorded(model, monkeypatch):
    """A run may go on with the last batch of an epoch."""
    recorded, recorder, _ = make(model, monkeypatch, play=0.5)
    given = batches(model, [1, 2, 2, 2, 2])
    wanted = followed(pass_of(model, []), model, given)
    found = followed(recorded, model, given)
    assert recorder.made == 1 and recorder.plays == 2 + 2
    assert all(torch.equal(a[0], b[0]) for a, b in zip(wanted, found, strict=True))


def test_losses_outlast_the_next_play(model, monkeypatch):
    given = batches(model, [1] * 6)
    recorded, _, _ = make(model, monkeypatch, play=0.5)
    kept = [recorded(batch)["loss"] for batch in given]
    assert len({float(loss) for loss in kept}) == 6


@pytest.mark.parametrize(
    "error", [None, RuntimeError("operation not permitted when stream is capturing\nmore"), RuntimeError()]
)
def test_what_is_not_faster_or_cannot_be_recorded_is_called(model, monkeypatch, caplog, error):
    caplog.set_level(logging.INFO)
    given = batches(model, [2] * 5)
    recorded, recorder, calls = make(model, monkeypatch, play=0.95, error=error)
    wanted = followed(pass_of(model, []), model, given)
    found = followed(recorded, model, given)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(wanted, found, strict=True))
    told = "950.0 ms, and 1000.0 ms without" if error is None else (str(error) or "RuntimeError").split("\n")[0]
    assert (
        caplog.text.count("passes are not captured as CUDA graphs: ") == 1
        and told in caplog.text
        and "more" not in caplog.text
    )
    assert calls[-2:] == ["3", "4"] and recorder.plays == (2 if error is None else 0)


def test_other_errors_are_not_hidden(model, monkeypatch):
    recorded, _, _ = make(model, monkeypatch, error=KeyboardInterrupt())
    for batch in batches(model, [2] * 2):
        recorded(batch)
    with pytest.raises(KeyboardInterrupt):
        recorded(*batches(model, [2]))


def test_a_recording_makes_room_for_what_is_called(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    recorded, _, _ = make(model, monkeypatch, play=0.5)
    usual, [short, other] = batches(model, [2] * 4), batches(model, [1] * 2)
    followed(recorded, model, usual)
    run, tried = recorded.run, []

    def short_of_memory(batch):
        tried.append(batch)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(batch)

    recorded.run = short_of_memory
    [found] = followed(recorded, model, [short])
    [wanted] = followed(pass_of(model, []), model, [short])
    assert torch.equal(found[0], wanted[0]) and len(tried) == 2 and "needs their memory" in caplog.text
    tried.clear()
    with pytest.raises(torch.OutOfMemoryError):  # nothing is left to give up
        recorded(other)


def test_what_broke_a_recording_is_told(model, monkeypatch, caplog):
    """The end of a CUDA graph's recording says no more than that it has failed."""
    caplog.set_level(logging.INFO)
    recorded, _, _ = make(model, monkeypatch)

    def record(call):
        try:
            raise RuntimeError("operation not permitted")
        finally:
            raise RuntimeError("capture failed") from None

    recorded.record = record
    followed(recorded, model, batches(model, [2] * 3))
    assert "passes are not captured as CUDA graphs: operation not permitted" in caplog.text
