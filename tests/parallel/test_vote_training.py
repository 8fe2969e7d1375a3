"""Training whole runs that vote: replicas, resume, log, bad gradients."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.simulated import on_ranks
from parallel.test_parallel_training import config_of, joined, stopped_at
from stores import make_store

from benchmarks.lion import trials
from ensemble_ml.config import (
    Assign,
    ExchangeName,
    MomentumKept,
    MomentumSync,
    Nonfinite,
    OptimConfig,
    OptimName,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from ensemble_ml.distributed import NullCommunicator
from ensemble_ml.distributed.choice import restore_state
from ensemble_ml.distributed.exchange import BucketExchange, Reduction
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Exchange
from ensemble_ml.training import load_checkpoint, trainer
from ensemble_ml.training.exchanges import run_exchange
from ensemble_ml.training.tracking import read_log


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voting")
    return make_store(folder / "a.zarr", dates=12, members=5, shape=(9, 16), bias=0.6, dispersion=0.6).path


def voting(store, output, **changes):
    changes = {"batch_size": 4, "validate_every": 10} | changes  # a validation changes no weight
    config = config_of(store, output, optimizer=OptimName.lion, precision=Precision.float32, **changes)
    config.model.depth = 1
    config.optim.clip = 0.0
    config.optim.exchange, config.optim.bits = ExchangeName.vote, 2
    config.optim.momentum_sync, config.optim.momentum_every = MomentumSync.selective, 3
    return config


def weights(folder):
    found = load_checkpoint(folder / "checkpoints" / "last", training=True)
    apart = {f"rank{r}.{name}": value for r in range(found.ranks) for name, value in found.of_rank(r).items()}
    return found.state_dict | found.training | apart


@pytest.mark.slow
def test_resume_of_a_vote_is_equal_bit_for_bit(store, tmp_path):
    """A run of ten steps, and one that ended after five: weights, momenta of both ranks, and the log."""
    a, b = whole_and_gone_on(store, tmp_path, {}, (_until_five,), data=2)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    apart = [k for k in a if k.startswith("rank1.momentum")]
    assert apart and any(not torch.equal(a[k], a[k.replace("rank1", "rank0")]) for k in apart)
    lines = read_log(tmp_path / "whole" / "a" / "log.jsonl")
    trained, synced = [x for x in lines if "loss" in x], [x for x in lines if "momentum_sync" in x]
    assert all(x["sent_mb"] > 0 and 0 <= x["exchange_wait"] <= 1 for x in trained)
    assert [x["step"] for x in synced] == [3, 6, 9]
    told = synced[0]["momentum_sync"]
    assert set(told["layers"]) <= set(told["variance"]) and told["bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("assign", [Assign.fixed, Assign.locality])
def test_ranks_as_threads_train_as_processes_do(store, tmp_path, assign):
    """What the benchmark's quality section stands on: the same weights and scores, bit for bit."""
    config = voting(store, tmp_path)
    config.loading.assign = assign
    config.batch_size = 5  # one rank takes three of the five
    run_ranks(joined, 2, config, data=2)
    found = trials.train(config, trials.prepare(config), 2, every=1)
    saved = load_checkpoint(tmp_path / "a" / "checkpoints" / "last", training=True)
    assert all(torch.equal(saved.training[f"raw.{name}"], w) for name, w in found.weights.items())
    lines = read_log(tmp_path / "a" / "log.jsonl")
    assert found.crps == [x["validation"]["crps_ratio"] for x in lines if "validation" in x][-1]
    assert found.losses == pytest.approx([x["loss"] for x in lines if "loss" in x], rel=1e-6)


@pytest.mark.slow
def test_a_stop_leaves_momenta_apart_that_checkpoints_average(store, tmp_path):
    """A stop comes at any step; averaging there would make another run of it."""
    whole, stopped = whole_and_gone_on(store, tmp_path, {"momentum_kept": MomentumKept.mean}, (stopped_at, 4), data=2)
    assert whole.keys() == stopped.keys() and all(torch.equal(whole[k], stopped[k]) for k in whole)


@pytest.mark.slow
def test_checkpoints_that_the_clock_asks_for_leave_momenta_apart(store, tmp_path):
    """Those by steps average them, and the run goes on from there; no run may depend on the time."""
    found = []
    for name, minutes in (("steps", 1e6), ("clock", 1e-9)):
        config = voting(store, tmp_path / name, checkpoint_minutes=minutes)
        config.optim.momentum_kept = MomentumKept.mean
        run_ranks(joined, 2, config, data=2)
        lines = read_log(tmp_path / name / "a" / "log.jsonl")
        found.append((weights(tmp_path / name / "a"), [x["step"] for x in lines if "checkpoint" in x]))
    (whole, few), (clocked, many) = found
    assert len(many) > len(few) > 1
    assert whole.keys() == clocked.keys() and all(torch.equal(whole[k], clocked[k]) for k in whole)


@pytest.mark.slow
def test_low_ranks_go_on_where_ranks_share_a_sample(store, tmp_path):
    """Terms of one cell stay with the rank that has it, in the resumed run as in the whole one."""
    changes = {"exchange": ExchangeName.powersgd, "clip": 1.0}
    whole, half = whole_and_gone_on(store, tmp_path, changes, (_until_five,), lat=2)
    assert whole.keys() == half.keys() and all(torch.equal(whole[k], half[k]) for k in whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"lat": 2}, {"data": 2}),
        ({"data": 2}, {"lat": 2}),
        pytest.param({"data": 2}, {"lat": 2, "overlap": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_low_ranks_go_on_where_the_grid_is_shared_out_otherwise(store, tmp_path, before, after):
    """Which terms are exchanged depends on it; those of both keep what was left out of them."""
    config = voting(store, tmp_path)
    config.optim.exchange, config.optim.clip = ExchangeName.powersgd, 1.0
    run_ranks(_until_five, 2, config, **before)
    left = load_checkpoint(tmp_path / "a" / "checkpoints" / "last", training=True).of_rank(0)
    config.resume, config.parallel = True, ParallelConfig(**after)
    told = run_ranks(_errors_at_start, 2, config, **after)
    kept = {name: value for name, value in left.items() if name in told[0]}
    assert len(kept) > 5 and all(torch.equal(told[0][name], value) for name, value in kept.items())
    assert read_log(tmp_path / "a" / "log.jsonl")[-1]["step"] == 10


@pytest.mark.parametrize(
    ("before", "after", "hierarchical"),
    [
        ({"data": 2}, {"lat": 2}, False),
        pytest.param({"data": 4}, {"lat": 4}, False, marks=pytest.mark.slow),
        pytest.param({"data": 2, "lat": 2}, {"lat": 2}, False, marks=pytest.mark.slow),
        ({"data": 2}, {"data": 2}, True),  # two nodes of one rank become one node of two
    ],
)
def test_a_vote_that_becomes_one_group_goes_on_from_the_mean_momentum(store, tmp_path, before, after, hierarchical):
    """Ranks that average gradients form signs alike only with one momentum, also where there are as many as voted."""
    config = voting(store, tmp_path)
    config.optim.momentum_sync, config.optim.hierarchical = MomentumSync.never, hierarchical
    run_ranks(_on_nodes_of_one, math.prod(before.values()), config, **before)
    kept = load_checkpoint(tmp_path / "a" / "checkpoints" / "last", training=True)
    parts = [kept.of_rank(rank) for rank in range(kept.ranks)]
    config.resume, config.parallel = True, ParallelConfig(**after)
    told = run_ranks(_momenta_and_weights, math.prod(after.values()), config, **after)
    momenta, ends = zip(*told, strict=True)
    for i, momentum in enumerate(momenta[0]):
        torch.testing.assert_close(momentum, sum(part[f"momentum.{i}"] for part in parts) / len(parts))
    assert len(ends[0]) > 5
    assert all(torch.equal(value, other[name]) for name, value in ends[0].items() for other in ends[1:])


def _on_nodes_of_one(session, config):
    session.world = replace(session.world, local_size=1)
    _until_five(session, config)


def _momenta_and_weights(session, config):
    """A rank's momenta as the run goes on, and its weights at the end, save those of single cells."""
    momenta, weights = [], {}
    step, end = trainer.Trainer._step, trainer.Trainer._say_end

    def first(self, batch, stop=None):
        if not momenta:
            momenta.extend(self.state.optimizer.momentum(p).clone() for p in self.state.exchange.params)
        return step(self, batch, stop)

    def last(self, tracker):
        alone = {id(p) for p in self.state.exchange.apart}
        named = self.state.model.named_parameters()
        weights.update({name: p.detach().clone() for name, p in named if id(p) not in alone})
        end(self, tracker)

    trainer.Trainer._step, trainer.Trainer._say_end = first, last
    config.steps = 10
    joined(session, config)
    return momenta, weights


def _errors_at_start(session, config):
    """What the exchange of a rank holds as the run goes on."""
    found = {}
    step = trainer.Trainer._step

    def told(self, batch, stop=None):
        if not found:
            found.update({name: value.clone() for name, value in self.state.exchange.local_state().items()})
        return step(self, batch, stop)

    trainer.Trainer._step = told
    config.steps = 10
    joined(session, config)
    return found


def test_what_was_left_out_adds_up_over_ranks():
    """Four ranks' errors on two ranks, and on one: their sum stays."""
    parts = [{"error.0": torch.full((2, 2), r + 1.0), "factor.0": torch.full((2, 2), 3.0)} for r in range(4)]
    for size in (1, 2):
        got = []
        exchange = BucketExchange(NullCommunicator())
        exchange.group = SimpleNamespace(size=size, rank=0)
        exchange.load_local_state = got.append
        restore_state(exchange, 4, lambda rank: parts[rank])
        assert torch.equal(size * got[0]["error.0"], torch.full((2, 2), 10.0))
        assert torch.equal(got[0]["factor.0"], torch.full((2, 2), 3.0))


def test_one_rank_says_that_it_loses_what_was_left_out(caplog):
    parts = [{"error.0": torch.ones(2, 2), "factor.0": torch.ones(2, 2)}] * 2
    restore_state(Exchange(), 2, lambda rank: parts[rank])
    assert "what 2 ranks had left to send of their gradients is lost, as nothing is sent any more" in caplog.text
    assert "momenta" not in caplog.text


def _uneven(session, numbers):
    session.world = replace(session.world, local_size=numbers[session.topology.rank])
    told = told_of_exchange(session)
    # A rank that has its groups must not end while others still connect theirs.
    session.mesh.world.barrier()
    return told


def told_of_exchange(session):
    """What a hierarchical exchange refuses."""
    config = TrainConfig(optim=OptimConfig(name=OptimName.lion, exchange=ExchangeName.vote, hierarchical=True))
    return told_by(run_exchange, config, session)


def told_by(function, *args):
    try:
        function(*args)
    except UserError as error:
        return str(error)
    return ""


def test_nodes_of_different_sizes_are_refused_by_all_ranks():
    told = run_ranks(_uneven, 4, [2, 2, 1, 1], data=4)
    assert all("nodes have different numbers of ranks" in text for text in told)
    assert run_ranks(_uneven, 4, [2, 2, 2, 2], data=4) == [""] * 4


def whole_and_gone_on(store, folder, changes, broken_off, **mesh):
    """Weights of a run on two ranks, and of one that `broken_off` (a function and its arguments) ends before."""
    found = []
    for name in ("whole", "half"):
        config = voting(store, folder / name)
        for key, value in changes.items():
            setattr(config.optim, key, value)
        if name == "half":
            end, *given = broken_off
            run_ranks(end, 2, config, *given, **mesh)
            config.resume = True
        run_ranks(joined, 2, config, **mesh)
        found.append(weights(folder / name / "a"))
    return found


def _until_five(session, config):
    config.steps = 10
    loop = trainer.Trainer._keep

    def keep(self, tracker, *, due):
        loop(self, tracker, due=due)
        if self.state.step == 5:
            self.keeper.finish()
            raise KeyboardInterrupt

    trainer.Trainer._keep = keep
    try:
        joined(session, config)
    except KeyboardInterrupt:
        pass
    finally:
        trainer.Trainer._keep = loop


@pytest.mark.parametrize(
    ("exchange", "step", "mesh"),
    [
        (ExchangeName.vote, 4, {"data": 2}),
        pytest.param(
            ExchangeName.vote, 1, {"data": 2}, marks=pytest.mark.slow
        ),  # of which there is a checkpoint already
        pytest.param(ExchangeName.vote, 3, {"data": 2}, marks=pytest.mark.slow),  # after which momenta are averaged
        pytest.param(ExchangeName.allreduce, 6, {"lat": 2}, marks=pytest.mark.slow),
    ],
)
def test_bad_gradients_are_left_out_or_end_the_run(store, tmp_path, exchange, step, mesh):
    """And a run that they have ended goes on without them, as if it had left them out at once."""
    skipping, stopping = (voting(store, tmp_path / name) for name in ("skip", "stop"))
    skipping.optim.nonfinite = Nonfinite.skip
    skipping.optim.exchange = stopping.optim.exchange = exchange
    assert run_ranks(_poisoned, 2, skipping, 1, step, **mesh) == ["", ""]
    whole = weights(tmp_path / "skip" / "a")
    assert all(torch.isfinite(v).all() for k, v in whole.items() if "momentum" in k)
    synced = [line["step"] for line in read_log(tmp_path / "skip" / "a" / "log.jsonl") if "momentum_sync" in line]
    assert synced == ([3, 6, 9] if exchange is ExchangeName.vote else [])
    told = run_ranks(_poisoned, 2, stopping, 1, step, **mesh)
    named = "1" if "data" in mesh else "0, 1"  # parts of one sample hand them on
    assert all(f"step {step}: gradients that are not finite from ranks {named}, on" in text for text in told)
    assert all("checkpoints/last is the state before" in text for text in told)
    assert load_checkpoint(tmp_path / "stop" / "a" / "checkpoints" / "last").meta["step"] == step - 1
    stopping.resume, stopping.optim.nonfinite = True, Nonfinite.skip
    assert run_ranks(_poisoned, 2, stopping, 1, step, **mesh) == ["", ""]
    gone_on = weights(tmp_path / "stop" / "a")
    assert whole.keys() == gone_on.keys() and all(torch.equal(v, gone_on[k]) for k, v in whole.items())


def test_bad_gradients_right_after_going_on_with_more_ranks(store, tmp_path):
    """They take the mean of the momenta, which is no checkpoint of another process."""
    config = voting(store, tmp_path)
    run_ranks(_poisoned, 2, config, data=2)
    config.resume, config.optim.nonfinite = True, Nonfinite.stop
    told = run_ranks(_poisoned, 4, config, data=4)
    assert all(text.startswith("step 4: gradients that are not finite from ranks 1, on") for text in told), told
    assert all("checkpoints/last is the state before" in text for text in told)


@pytest.mark.parametrize("name", [ExchangeName.vote, pytest.param(ExchangeName.lion_cub, marks=pytest.mark.slow)])
def test_ranks_that_average_before_they_vote_are_all_named(store, tmp_path, name):
    """Rank 3's are in the mean of ranks 2 and 3, which is what the others see of them."""
    config = voting(store, tmp_path)
    config.optim.exchange, config.optim.bits = name, 8
    told = run_ranks(_poisoned, 4, config, 3, data=2, lat=2)
    assert all("step 4" in text and "from ranks 2, 3," in text for text in told)


def _poisoned(session, config, rank=1, step=4):
    """The gradients of `rank` hold a NaN in `step`."""
    backward = torch.Tensor.backward

    def poisoned(self, *args, **kwargs):
        bad = session.step == step and session.topology.rank == rank
        backward(self * torch.nan if bad and torch.is_grad_enabled() else self, *args, **kwargs)

    torch.Tensor.backward = poisoned
    try:
        joined(session, config)
    except UserError as error:
        return str(error)
    finally:
        torch.Tensor.backward = backward
    return ""


def _elsewhere(session, hosts):
    session.world = replace(session.world, local_size=2)
    session._store.set(f"host/{session.topology.rank}", hosts[session.topology.rank])
    session.meet()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("socket.gethostname", lambda: hosts[session.topology.rank])
    return told_of_exchange(session)


def test_ranks_in_a_row_have_to_be_of_one_node():
    told = run_ranks(_elsewhere, 4, ["a", "b", "a", "b"], data=4)
    assert all("of 2 consecutive ranks, taken as one node, some are on another" in text for text in told)
    assert run_ranks(_elsewhere, 4, ["a", "a", "b", "b"], data=4) == [""] * 4


def test_ranks_that_never_have_a_date_do_not_vote(store, tmp_path):
    config = voting(store, tmp_path)
    config.batch_size = 1
    told = run_ranks(joined_or_told, 2, config, data=2)
    assert all("parallel.data=2 ranks vote, and a step has 1 of the" in text for text in told)


def joined_or_told(session, config):
    return told_by(joined, session, config)


def test_a_rank_with_more_of_a_batch_does_not_speak_louder():
    """Gradients of a rank's share are brought to the whole batch's by that share, whatever it is; nothing stays."""

    def scaled(group, shares):
        exchange = Vote(group, reduction=Reduction.sum)
        p = torch.nn.Parameter(torch.zeros(3))
        p.grad = torch.full((3,), shares[group.rank])
        exchange.share = shares[group.rank]
        exchange._scale([p])
        return p.grad[0].item()

    assert on_ranks(3, lambda group: scaled(group, [0.5, 0.25, 0.25])) == pytest.approx([1.0, 1.0, 1.0])
    assert on_ranks(3, lambda group: scaled(group, [1.0, 0.0, 0.0])) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_shares_of_a_batch_are_of_its_samples(store, tmp_path):
    """Of eight dates in threes the last two leave one rank without; some show all members, and have no spread."""
    config = voting(store, tmp_path)
    config.batch_size, config.steps, config.data.members = 3, 3, [2, 5]
    assert run_ranks(_shares, 3, config, data=3) == [[1 / 3, 1 / 3, 1 / 2], [1 / 3, 1 / 3, 1 / 2], [1 / 3, 1 / 3, 0]]
    shares = run_ranks(_shares, 2, voting(store, tmp_path / "lat", batch_size=3, steps=3), lat=2)
    assert shares == [[1 / 2] * 3] * 2


def _shares(session, config):
    seen, step = [], trainer.Trainer._step

    def noted(self, batch, stop=None):
        found = step(self, batch, stop)
        seen.append(self.state.exchange.share)
        return found

    trainer.Trainer._step = noted  # in this rank's process alone
    joined(session, config)
    return seen
