"""Runs whose weights are sharded, against one process; and checkpoints that other numbers of ranks go on from."""

import shutil
from dataclasses import replace

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.test_parallel_training import config_of, joined, logged, stopped_at
from stores import make_store

from ensemble_ml.config import ExchangeName, ModelConfig, OptimConfig, OptimName, ParallelConfig, TrainConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Reader
from ensemble_ml.store import open_store
from ensemble_ml.training import load_checkpoint, train
from ensemble_ml.training.assemble import assemble


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return make_store(folder / "a.zarr", dates=12, members=5, shape=(17, 16), bias=0.6, dispersion=0.6).path


def settings(store, output, shard=1, **changes):
    optimizer = changes.pop("optimizer", OptimName.lion)
    parallel = ParallelConfig(shard=shard, **changes.pop("degrees", {}))
    config = config_of(store, output, optimizer=optimizer, parallel=parallel, **changes)
    # Of three ranks, two lack a sample in the last batch of an epoch, and in the second batch of a validation.
    return replace(config, steps=8, validate_every=4, checkpoint_every=4)


def everything(run):
    """All tensors of a checkpoint, with the parts of sharded ones put together."""
    found = load_checkpoint(run / "checkpoints" / "last", training=True)
    parts = [found.of_rank(rank) for rank in range(found.meta.get("shards", 0))]
    joint = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    assert not set(joint) & set(found.training)
    return {f"model.{k}": v for k, v in found.state_dict.items()} | found.training | joint


@pytest.fixture(scope="module")
def serial(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("serial")
    for optimizer in OptimName:
        train(settings(store, output / optimizer.value, optimizer=optimizer))
    return output


@pytest.mark.parametrize(
    ("optimizer", "shard", "degrees"),
    [
        (OptimName.lion, 2, {"data": 2}),
        pytest.param(OptimName.adamw, 2, {"data": 2, "lat": 2}, marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(store, serial, tmp_path, optimizer, shard, degrees):
    """Validation, checkpoints, the running average and both optimizers; shards and copies of them."""
    config = settings(store, tmp_path, shard, degrees=degrees, optimizer=optimizer)
    config.model.recompute = True
    ranks = degrees["data"] * degrees.get("lat", 1)
    run_ranks(joined, ranks, config, **degrees, shard=shard)
    alone, ours = serial / optimizer.value / "a", tmp_path / "a"
    for one, other in zip(logged(alone)[0], logged(ours)[0], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-8) if "grad_norm" in one else True
    assert logged(ours)[1][-1] == pytest.approx(logged(alone)[1][-1], rel=1e-9)
    a, b = everything(alone), everything(ours)
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert len(list((ours / "checkpoints" / "last").glob("rank_*"))) == shard


def restored(session, config):
    """What a rank holds of a checkpoint that it goes on from."""
    checkpoint = load_checkpoint(f"{config.output}/a/checkpoints/last", training=True)
    run = assemble(config, Reader(open_store(config.data.store), checkpoint.spec), checkpoint, 1, session)
    return run.state.tensors()


@pytest.fixture(scope="module")
def stopped(store, tmp_path_factory):
    """A run of two shards that was stopped after three steps."""
    output = tmp_path_factory.mktemp("stopped")
    config = settings(store, output, 2, degrees={"data": 2})
    assert run_ranks(stopped_at, 2, config, 3, data=2, shard=2) == [True] * 2
    return output


@pytest.mark.parametrize(("shard", "degrees"), [(3, {"data": 3}), (2, {"data": 2, "lat": 2}), (1, {"data": 2})])
def test_other_ranks_hold_the_same_bits(store, stopped, shard, degrees):
    config = settings(store, stopped, shard, degrees=degrees)
    ranks = degrees["data"] * degrees.get("lat", 1)
    found = run_ranks(restored, ranks, config, **degrees, shard=shard)
    wanted = everything(stopped / "a")
    for rank, (state_dict, training, own) in enumerate(found):
        assert (own is None) == (shard == 1)
        assert own is None or (own.rank, own.keep) == (rank % shard, rank < shard)
        held = {f"model.{k}": v for k, v in state_dict.items()} | training
        assert all(torch.equal(value, wanted[name]) for name, value in held.items())
    if shard > 1:
        joint = {k: torch.cat([own.tensors[k] for *_, own in found[:shard]]) for k in found[0][2].tensors}
        assert held.keys() | joint.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in joint.items())
        assert any(name.endswith(".exp_avg") for name in joint) and any(name.startswith("raw.") for name in joint)


@pytest.mark.slow
def test_goes_on_as_if_never_stopped(store, serial, stopped, tmp_path):
    """On two ranks bit for bit; on one and on three with the weights of one process, for Lion's signs are the same."""
    whole = settings(store, tmp_path / "whole", 2, degrees={"data": 2})
    run_ranks(joined, 2, whole, data=2, shard=2)
    for ranks in (2, 1, 3):
        output = tmp_path / f"on{ranks}"
        shutil.copytree(stopped, output, symlinks=True)
        config = replace(settings(store, output, ranks, degrees={"data": ranks}), resume=True)
        run_ranks(joined, ranks, config, data=ranks, shard=ranks) if ranks > 1 else train(config)
        a, b = everything(tmp_path / "whole" / "a"), everything(output / "a")
        assert a.keys() == b.keys()
        for name, value in b.items():
            if ranks == 2 or name.startswith("raw."):
                assert torch.equal(value, a[name]), name
            torch.testing.assert_close(value, a[name], rtol=1e-9, atol=1e-9)


def test_a_lost_part_of_a_checkpoint_is_named(store, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "lost", symlinks=True)
    (tmp_path / "lost" / "a" / "checkpoints" / "last" / "rank_00001.safetensors").unlink()
    config = replace(settings(store, tmp_path / "lost"), resume=True)
    with pytest.raises(UserError, match=r"rank_00001\.safetensors is absent; use another checkpoint"):
        train(config)


def refused(session, config):
    with pytest.raises(UserError) as told:
        joined(session, config)
    return str(told.value)


def test_what_cannot_be_sharded_is_refused_by_name(store, tmp_path):
    for name in ("vote", "bf16", "powersgd"):
        with pytest.raises(UserError, match=rf"parallel.shard=2: optim.exchange={name} needs all weights on each rank"):
            TrainConfig(parallel=ParallelConfig(shard=2), optim=OptimConfig(exchange=ExchangeName(name)))
    with pytest.raises(UserError, match=r"parallel.shard=2: model.name=emos trains on one rank"):
        TrainConfig(parallel=ParallelConfig(shard=2), model=ModelConfig(name="emos"))
    with pytest.raises(UserError, match=r"parallel.shard=0"):
        ParallelConfig(shard=0)
    with pytest.raises(UserError, match=r"model.recompute=True: model.name=drn has no residual blocks"):
        ModelConfig(name="drn", recompute=True)
    with pytest.raises(UserError, match=r"parallel.shard=2: one rank has nobody to share weights with"):
        train(settings(store, tmp_path, 2))
    told = run_ranks(refused, 2, settings(store, tmp_path, 3, degrees={"data": 2}), data=2, shard=3)
    assert told == ["parallel.shard=3: does not divide 2 ranks; give a factor of 2, or auto"] * 2
