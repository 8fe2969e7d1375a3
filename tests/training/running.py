"""What tests of runs share: looking at their checkpoints, stopping them, spoiling a step."""

import os
import signal

import torch

from ensemble_ml.training import load_checkpoint, trainer
from ensemble_ml.training.tracking import Tracker


def weights(run, link="last"):
    return load_checkpoint(run / "checkpoints" / link, training=True)


def assert_equal_runs(a, b):
    first, second = weights(a), weights(b)
    assert first.meta["step"] == second.meta["step"]
    for one, other in ((first.state_dict, second.state_dict), (first.training, second.training)):
        assert one.keys() == other.keys()
        assert all(torch.equal(v, other[k]) for k, v in one.items())


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """Send a signal to this process when `step` is done."""
    real = Tracker.step

    def told(self, done, **values):
        real(self, done, **values)
        if done == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Tracker, "step", told)


def spoil(monkeypatch, step):
    """Let the gradients of `step` be NaN, whenever it is taken."""
    real, backward = trainer.Trainer._step, torch.Tensor.backward

    def spoiled(self, batch, stop=None):
        with monkeypatch.context() as patch:
            if self.state.step + 1 == step:
                patch.setattr(torch.Tensor, "backward", lambda loss, *args: backward(loss * torch.nan, *args))
            return real(self, batch, stop)

    monkeypatch.setattr(trainer.Trainer, "_step", spoiled)
