"""Training whole runs whose votes need not wait: log, record, replay, resume, gradients that are not finite."""

import json
import math
import threading
import time

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.test_parallel_training import config_of, joined
from stores import make_store

from ensemble_ml.config import ExchangeName, OptimConfig, OptimName, Precision
from ensemble_ml.errors import UserError
from ensemble_ml.training import load_checkpoint, trainer
from ensemble_ml.training.exchanges import VoteLog, read_votes
from ensemble_ml.training.tracking import read_log


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quorum")
    return make_store(folder / "a.zarr", dates=12, members=5, shape=(9, 16), bias=0.6, dispersion=0.6).path


def quorum(store, output, **changes):
    replay = changes.pop("replay", None)
    settings = {"steps": 12, "validate_every": 6, "checkpoint_every": 6} | changes
    config = config_of(store, output, optimizer=OptimName.lion, precision=Precision.float32, **settings)
    config.model.depth = 1
    config.optim = OptimConfig(
        exchange=ExchangeName.vote, quorum="2", bound=4, warmup=2, lr=1e-3, clip=1.0,
        replay=None if replay is None else str(replay),
    )  # fmt: skip
    return config


def late(session, config, slow=(), bad=None):
    """Train in a session that is there.

    `slow`: (rank, step) of gradients that take 0.4 s longer. `bad`: a rank whose gradients
    after its first are NaN.

    Returns the digest of this rank's weights after each of its gradients, by the number of steps that are done.
    """
    real, weights, backward = trainer.Trainer._step, {}, torch.Tensor.backward

    def step(self, batch, stop=None):
        at = session.topology.rank, self.state.step
        if at in slow:
            time.sleep(0.4)
        if at[0] == bad and at[1]:
            torch.Tensor.backward = lambda loss, *args: backward(loss * torch.nan, *args)
        try:
            found = real(self, batch, stop)
        finally:
            torch.Tensor.backward = backward
        flat = torch.cat([p.detach().flatten() for p in self.state.model.parameters()])
        weights[self.state.step] = hash(flat.numpy().tobytes())
        return found

    trainer.Trainer._step = step
    joined(session, config)
    return weights


SLOW = ((2, 1), (1, 5), (2, 8))


def tensors(run):
    found = load_checkpoint(run / "checkpoints" / "last", training=True)
    apart = {f"rank{r}.{name}": value for r in range(found.ranks) for name, value in found.of_rank(r).items()}
    return found.state_dict | found.training | apart


def votes(run):
    first, *rest = [json.loads(line) for line in (run / "votes.jsonl").read_text().splitlines()]
    return first, [line["ranks"] for line in rest]


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run with stragglers, and what its ranks return."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(late, 3, quorum(store, folder), SLOW)


def test_a_run_with_stragglers_is_whole(whole):
    folder, found = whole
    first, ranks = votes(folder / "a")
    assert (first["ranks"], first["quorum"], first["bound"]) == (3, 2, 4)
    assert len(ranks) == 12 and any(len(those) == 2 for those in ranks)
    assert all(those == [0, 1, 2] for those in (ranks[3], ranks[5], ranks[7], ranks[11]))
    assert all(a[step] == b[step] for a in found for b in found for step in {*a} & {*b})
    assert len(found[2]) < 12, "the straggler was waited for"
    lines = [line for line in read_log(folder / "a" / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(math.isfinite(line["loss"]) and line["loss"] > 0 for line in lines)


def threads_after(session, config):
    """The threads of votes that are there after a run."""
    joined(session, config)
    mine = [t for t in threading.enumerate() if t.name in ("hub", "ballots", "outcomes")]
    for one in mine:
        one.join(5.0)
    return sorted(t.name for t in mine if t.is_alive())


def test_a_run_leaves_no_hub(store, tmp_path):
    """A process may train several times, and the hub holds the model."""
    assert run_ranks(threads_after, 3, quorum(store, tmp_path, steps=2)) == [[], [], []]


def test_a_replay_repeats_a_run_bit_for_bit_whatever_is_slow(store, whole, tmp_path):
    folder, _ = whole
    config = quorum(store, tmp_path, replay=folder / "a" / "votes.jsonl")
    run_ranks(late, 3, config, ((0, 2), (1, 3)))
    assert (tmp_path / "a" / "votes.jsonl").read_text() == (folder / "a" / "votes.jsonl").read_text()
    a, b = tensors(folder / "a"), tensors(tmp_path / "a")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    losses = [
        [line["loss"] for line in read_log(run / "a" / "log.jsonl") if "loss" in line] for run in (folder, tmp_path)
    ]
    assert losses[0] == losses[1]


def until_six(session, config):
    """End as if killed after the checkpoint of step 6, with two more votes in the record."""
    real = trainer.Trainer._step

    def step(self, batch, stop=None):
        if self.state.step >= 8:
            self.keeper.finish()
            if session.first:
                self._votes.flush()
            session.meet()
            raise UserError("killed")
        return real(self, batch, stop)

    trainer.Trainer._step = step
    with pytest.raises(UserError, match="killed"):
        joined(session, config)


def test_a_run_that_goes_on_with_the_record_equals_the_whole_one(store, whole, tmp_path):
    folder, _ = whole
    record = folder / "a" / "votes.jsonl"
    run_ranks(until_six, 3, quorum(store, tmp_path, replay=record))
    assert len(votes(tmp_path / "a")[1]) == 8
    run_ranks(late, 3, quorum(store, tmp_path, replay=record, resume=True))
    assert (tmp_path / "a" / "votes.jsonl").read_text() == record.read_text()
    a, b = tensors(folder / "a"), tensors(tmp_path / "a")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def spoiled(session, config):
    with pytest.raises(UserError, match=r"not finite from ranks 1,.*checkpoints/last is the state before") as error:
        late(session, config, ((2, 0), (2, 1), (2, 2)), 1)
    return str(error.value)


def test_gradients_that_are_not_finite_end_the_run_on_late_ranks_too(store, tmp_path):
    """Rank 1 has NaN while rank 2 is late; all end before the same vote, and name rank 1."""
    began = time.monotonic()
    found = run_ranks(spoiled, 3, quorum(store, tmp_path))
    assert time.monotonic() - began < 30
    [step] = {int(text.removeprefix("step ").split(":")[0]) for text in found}
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["step"] == step - 1


LINE = {"run": "a", "ranks": 3, "quorum": 2, "bound": 4}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        (json.dumps(LINE | {"run": "b"}), "is of a run with other settings or data"),
        (json.dumps(LINE | {"ranks": 4}), "its run had ranks=4, this one has 3"),
        (json.dumps(LINE | {"bound": 5}), "its run had bound=5"),
        (json.dumps(LINE) + '\n{"vote": 1, "ranks": [0]}', "vote 1 cannot be of ranks"),
        (json.dumps(LINE) + '\n{"vote": 4, "ranks": [0, 1]}', "its votes do not count from 1"),
        (json.dumps(LINE) + '\n{"vote": 1, "ranks": [0, 3]}', "vote 1 cannot be of ranks"),
        (
            json.dumps(LINE) + '\n{"vote": 1, "ranks": [0, 1]}\n{"vote": 3, "ranks": [0, 1]}',
            "or some are missing",
        ),
    ],
)
def test_records_that_are_of_another_run_or_damaged(tmp_path, text, message):
    path = tmp_path / "votes.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_votes(path, LINE, lambda step: step % 4 == 0)


def test_a_record_that_lacks_votes_of_a_run_that_goes_on_is_told_of(tmp_path, caplog):
    for step, votes in ((0, 0), (2, 2), (3, 2)):
        VoteLog(tmp_path, LINE, step).close()
        assert (f"holds {votes} of the {step} votes so far" in caplog.text) is (votes < step)
        with (tmp_path / "votes.jsonl").open("a") as file:
            file.write('{"vote": 1, "ranks": [0, 1]}\n{"vote": 2, "ranks": [0, 1]}\n' if not step else "")


@pytest.mark.parametrize("changed", [{"ranks": 2}, {"ranks": 4}, {"run": "b"}], ids=str)
def test_a_record_holds_no_votes_of_other_ranks_or_settings(tmp_path, caplog, changed):
    """A run may go on with other ranks, but neither part of its record can then be repeated."""
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps(LINE) + '\n{"vote": 1, "ranks": [0, 1]}\n{"vote": 2, "ranks": [0, 1]}\n')
    VoteLog(tmp_path, LINE | changed, 2).close()
    assert "holds 0 of the 2 votes so far with these ranks and settings, so the run cannot be rep" in caplog.text
    assert path.read_text() == json.dumps(LINE | changed) + "\n"


def test_a_record_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_votes(tmp_path / "votes.jsonl", LINE, lambda step: False)
