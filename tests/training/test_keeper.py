"""Checkpoints written beside the training: whole or not there, by one rank or several, and no disk holds it up."""

import errno
import gc
import resource
import threading
import time
import weakref

import pytest
import torch
from parallel.ranks import run_ranks
from safetensors import SafetensorError
from test_checkpoint import SPEC

from ensemble_ml.config import ExchangeName, MomentumKept
from ensemble_ml.distributed.choice import OwnState
from ensemble_ml.errors import UserError
from ensemble_ml.training import keeper as module
from ensemble_ml.training import load_checkpoint, train
from ensemble_ml.training.checkpoint import RANK
from ensemble_ml.training.keeper import Keeper, Snapshot
from ensemble_ml.training.state import State
from ensemble_ml.training.tracking import read_log

META = {"spec": SPEC.to_json(), "best": None}


def shot(step, *, own=None, value=1.0, best=False):
    return Snapshot(step, {"w": torch.full((3,), value)}, {"m": torch.full((3,), -value)}, META, own, best)


@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing is written before this event is set."""
    gate, write = threading.Event(), module._write_tensors

    def held(*args):
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(module, "_write_tensors", held)
    return gate


def test_training_goes_on_while_the_disk_is_slow(tmp_path, slow_disk):
    keeper = Keeper(tmp_path / "c")
    keeper.begin(shot(1, best=True))
    keeper.follow(True)
    assert not keeper.done and not (tmp_path / "c" / "last").exists()
    slow_disk.set()
    keeper.finish()
    assert keeper.done and load_checkpoint(tmp_path / "c" / "best").meta["step"] == 1
    keeper.close()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["best", "last", "step_00000001"]


def test_what_is_written_is_let_go(tmp_path):
    """Or copies of weights and moments would lie in memory from one checkpoint to the next."""
    keeper, weight = Keeper(tmp_path), torch.zeros(3)
    gone = weakref.ref(weight)
    keeper.begin(Snapshot(1, {"w": weight}, meta=META))
    del weight
    while not keeper.done:
        time.sleep(0.01)
    keeper.follow(True)
    gc.collect()
    assert gone() is None and keeper.done
    keeper.finish()
    keeper.close()


def test_what_ranks_hold_apart_is_copied(tmp_path, slow_disk):
    momentum, keeper = torch.arange(4.0), Keeper(tmp_path)
    keeper.begin(shot(1, own=OwnState(0, 1, {"momentum.0": momentum}, True)))
    momentum.zero_()
    slow_disk.set()
    keeper.finish()
    found = load_checkpoint(tmp_path / "last")
    assert found.ranks == 1 and torch.equal(found.of_rank(0)["momentum.0"], torch.arange(4.0))
    keeper.close()


def test_a_full_disk_is_told_at_the_next_step_and_leaves_the_checkpoint_before(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.begin(shot(1))
    keeper.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        keeper.begin(Snapshot(2, {"w": torch.zeros(1 << 19)}, meta=META))
        while not keeper.done:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(OSError, match="File too large") as told:  # the limit's words; a disk's go the same way
        keeper.follow(True)
    assert told.value.errno == errno.EFBIG
    assert told.value.filename == str(tmp_path / ".partial-step_00000002" / "model.safetensors")
    keeper.close()
    assert load_checkpoint(tmp_path / "last").meta["step"] == 1


def test_what_safetensors_says_without_a_number_is_an_error_of_the_system_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise SafetensorError("Error while serializing: of another kind")

    monkeypatch.setattr(module, "save_file", refuse)
    with pytest.raises(OSError, match="of another kind") as told:
        module.save_checkpoint(tmp_path, shot(1))
    assert told.value.errno == errno.EIO and told.value.filename.endswith("model.safetensors")


def test_a_checkpoint_of_another_process_is_not_taken_for_our_own(tmp_path):
    """Two processes train in one run, where no lock keeps them apart."""
    module.save_checkpoint(tmp_path, shot(10, value=1.0))
    module.save_checkpoint(tmp_path, shot(10, value=1.0, best=True))  # stopped at a step that was kept already
    with pytest.raises(UserError, match=r"step_00000010: exists already, with other weights: another process trains"):
        module.save_checkpoint(tmp_path, shot(10, value=2.0))
    assert torch.equal(load_checkpoint(tmp_path / "best").state_dict["w"], torch.ones(3))


def several(session, folder):
    """Two checkpoints of three ranks; the second is left when two of them have written."""
    rank, keeper, world = session.topology.rank, Keeper(folder, session.mesh.model), session.mesh.model

    def own(step):
        return OwnState(rank, 3, {"momentum.0": torch.full((2,), float(10 * step + rank))}, True)

    common = {"state_dict": {"w": torch.ones(3)}, "meta": META} if rank == 0 else {}
    keeper.begin(Snapshot(1, own=own(1), **common))
    keeper.follow(False)
    before = (folder / "last").exists()
    world.barrier()
    while not keeper.done:
        pass
    world.barrier()
    keeper.follow(True)
    keeper.finish()
    world.barrier()
    if rank == 2:
        module._write_tensors = _never
    keeper.begin(Snapshot(2, own=own(2), **common))
    keeper.close()
    return before


def _never(*_):
    raise OSError(errno.EIO, "broken")


def test_ranks_write_their_own_files_and_only_whole_checkpoints_count(tmp_path):
    assert run_ranks(several, 3, tmp_path) == [False] * 3
    found = load_checkpoint(tmp_path / "last", training=True)
    assert found.meta["step"] == 1 and found.ranks == 3
    assert [found.of_rank(r)["momentum.0"].tolist() for r in range(3)] == [[10, 10], [11, 11], [12, 12]]
    file = tmp_path / "step_00000001" / f"{RANK}00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"rank_00001.safetensors is damaged"):
        found.of_rank(1)


@pytest.mark.parametrize("kept", MomentumKept)
def test_the_clock_asks_for_checkpoints(config_of, monkeypatch, kept):
    """Every step is late under so short a limit."""
    complete = State.complete
    monkeypatch.setattr(State, "complete", lambda self: (time.sleep(0.05), complete(self)))  # a part of the wait
    settings = dict(steps=4, validate_every=100, checkpoint_every=100)
    settings |= dict(optim__exchange=ExchangeName.vote, optim__momentum_kept=kept)
    run = train(config_of(checkpoint_minutes=1e-9, **settings))
    lines = read_log(run / "log.jsonl")
    assert [x["step"] for x in lines if "checkpoint" in x] == [0, 1, 2, 3, 4]
    assert all(x["checkpoint"]["held_s"] >= 0.05 for x in lines if "checkpoint" in x)
    assert load_checkpoint(run / "checkpoints" / "last").meta["step"] == 4


def patient(session, folder):
    """The first rank's disk takes longer than any collective waits."""
    keeper = Keeper(folder, session.mesh.model, meet=session.meet)
    if session.first:
        write = module._write_common
        module._write_common = lambda *given: (time.sleep(3), write(*given))[1]
    own = OwnState(session.topology.rank, 2, {"momentum.0": torch.ones(3)}, True)
    for step, apart in ((1, None), (2, own)):
        keeper.begin(shot(step, own=apart))
        keeper.finish()
        x = torch.ones(1)
        session.mesh.world.all_reduce(x)  # what a step does next
    keeper.close()
    return x.item()


@pytest.mark.slow
def test_a_slow_disk_outlasts_the_patience_of_collectives(tmp_path):
    assert run_ranks(patient, 2, tmp_path, timeout=2.0, data=2) == [2.0, 2.0]
    assert (tmp_path / "last").resolve().name == "step_00000002"
