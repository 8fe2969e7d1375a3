"""What several ranks do before the first step: time steps for `max_minutes`, and choose what they compute in."""

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.test_parallel_training import config_of, joined
from parallel.test_parallel_training import store as store

from ensemble_ml.config import Precision
from ensemble_ml.models.speed import Speed
from ensemble_ml.training import assemble, load_checkpoint, trainer


def _bytes_of_steps(session, config):
    """Bytes that steps send: of those that are timed for `max_minutes`, and of the run's."""
    found, step = {"timed": [], "run": []}, trainer.Trainer._step

    def counted(self, batch, stop=None):
        before = self.stepper.bytes_sent
        try:
            return step(self, batch, stop)
        finally:
            found["timed" if stop is None else "run"].append(self.stepper.bytes_sent - before)

    trainer.Trainer._step = counted  # in this rank's process alone
    joined(session, config)
    return found


@pytest.mark.slow
def test_a_step_that_is_timed_sends_what_a_step_of_the_run_does(store, tmp_path):
    """Terms of one cell stay with their rank in both."""
    config = config_of(store, tmp_path, steps=2, max_minutes=5.0)
    for found in run_ranks(_bytes_of_steps, 2, config, lat=2):
        timed, run = (found[which][-1] for which in ("timed", "run"))
        assert run > 0 and abs(timed - run) < 100  # the samples and the votes of a step of the run


def _groups_of_a_run(session, config):
    """Process groups that stand once the steps are counted."""
    found, loop = [], trainer.Trainer._loop

    def counted(self, *given):
        found.append(len(torch.distributed.distributed_c10d._world.pg_map))
        loop(self, *given)

    trainer.Trainer._loop = counted
    joined(session, config)
    return found


def test_steps_that_are_timed_leave_no_connections(store, tmp_path):
    counts = []
    for name, minutes in (("a", None), ("b", 5.0)):
        config = config_of(store, tmp_path, steps=1, run=name, **({"max_minutes": minutes} if minutes else {}))
        counts += run_ranks(_groups_of_a_run, 2, config, data=2)
    assert len({tuple(count) for count in counts}) == 1


def _without_bfloat16_on_one(session, config):
    """Rank 0 has bfloat16, and would choose it."""
    assemble.has_bfloat16 = lambda _: session.first
    assemble.choose = lambda model, step, *, wanted, record: Speed(
        Precision.bfloat16 if session.first and wanted is Precision.auto else Precision.float32
    )
    joined(session, config)


def test_ranks_compute_in_what_all_of_them_have(store, tmp_path):
    """Else the run could not be resumed on the nodes that it began on."""
    config = config_of(store, tmp_path, steps=2, precision=Precision.auto)
    run_ranks(_without_bfloat16_on_one, 2, config, data=2)
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["precision"]["precision"] == "float32"
    config.resume, config.steps = True, 2
    run_ranks(_without_bfloat16_on_one, 2, config, data=2)
