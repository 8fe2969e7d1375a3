"""Ranks that fail, stop or are slow: the others hear of it within seconds, and who it was."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from parallel.ranks import run_ranks, until_gone

from ensemble_ml import cli
from ensemble_ml.config import ParallelConfig
from ensemble_ml.distributed import launch, watch
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.distributed.world import World
from ensemble_ml.errors import STATUS_REQUEUE, Stopped


def fails(session, how):
    session.step = 17
    if session.topology.rank == 1:
        if how == "raise":
            raise ValueError("the 3rd shard is damaged")
        if how == "kill":
            time.sleep(1.2)  # two heartbeats tell the step
            os.kill(os.getpid(), signal.SIGKILL)
    if session.topology.rank == 0:
        time.sleep(60)  # busy with its own work
    session.mesh.world.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("how", "cause", "limit"),
    [
        ("raise", "failed at step 17: ValueError: the 3rd shard is damaged; this rank leaves", 10),
        ("kill", "failed at step 17: no heartbeat for 2 s: killed, out of memory, or its host is gone", 20),
    ],
)
def test_a_rank_that_fails_takes_the_others_down(how, cause, limit):
    ends = run_ranks(fails, 3, how, statuses=True, silence=2)
    assert ends[1][0] == (1 if how == "raise" else -signal.SIGKILL)
    for rank in (0, 2):
        code, seconds, text = ends[rank]
        assert code != 0 and seconds < limit
        assert f"rank 1 ({os.uname().nodename}) {cause}" in text


def fails_with_much_to_close(session):
    """As a rank whose loader waits for storage that has gone, until the other has left and longer."""
    other_leaves = until_gone(session, 0)
    if session.topology.rank == 1:
        try:
            raise OSError("the 3rd shard is damaged")
        except OSError as error:
            session.report(error)
            raise
        finally:
            subprocess.run(["sh", "-c", other_leaves], timeout=12)
    session.mesh.world.all_reduce(torch.zeros(1))


@pytest.mark.slow
def test_the_others_hear_of_a_failure_before_all_is_closed():
    ends = run_ranks(fails_with_much_to_close, 2, statuses=True, silence=30)
    assert ends[0][1] < 8 and ends[0][1] < ends[1][1]
    assert "rank 1" in ends[0][2] and "OSError: the 3rd shard is damaged" in ends[0][2]


def interrupted(session, first, folder):
    """Ctrl-C at all ranks but the last, one of which is soon done; the other still ends a file."""
    session.step = 17
    rank = session.topology.rank
    try:
        if rank == 2:
            time.sleep(30)
        raise KeyboardInterrupt
    finally:
        if rank != first:
            time.sleep(1.2)
        (folder / str(rank)).touch()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_are_interrupted_end_by_themselves(tmp_path, monkeypatch, first):
    for name, seconds in (("_PERIOD", 0.1), ("_FAREWELL", 0.4), ("_UNWIND", 2.0)):
        monkeypatch.setattr(watch, name, seconds)
    ends = run_ranks(interrupted, 3, first, tmp_path, statuses=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert [code for code, *_ in ends] == [1, 1, 70] and ends[2][1] < 10
    assert all("KeyboardInterrupt" in text and "leaves" not in text for *_, text in ends[:2])
    assert f"rank {first} ({os.uname().nodename}) was interrupted at step 17; this rank leaves" in ends[2][2]


def stopped_alone(session):
    """A signal ahead of the time limit reaches one rank of a forecast, while the others wait for all to be done."""
    if session.topology.rank == 1:
        raise Stopped(requeue=True, why="stopped by SIGUSR1")
    session.meet()


def test_who_waits_for_a_rank_that_was_stopped_stops_too(monkeypatch):
    monkeypatch.setattr(launch, "LAST", 0.0)
    ends = run_ranks(stopped_alone, 3, statuses=True, seconds=20)
    assert [code for code, *_ in ends] == [1, 1, 1]
    assert all("Stopped: another rank was stopped; the same command goes on" in ends[rank][2] for rank in (0, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_asks_for_a_restart(monkeypatch, rank):
    """A launcher ends all ranks at the first status that is not 0."""
    monkeypatch.setattr(launch, "LAST", 0.0)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    session = launch.Session(World(rank=rank, size=2), Topology(data=2, rank=rank), ParallelConfig())
    session._watch, session._store = SimpleNamespace(leave=lambda: None), SimpleNamespace(set=lambda *_: None)
    error = Stopped(requeue=True, why="stopped by SIGUSR1")  # as the handler of a signal raises it
    session.__exit__(Stopped, error, None)
    assert cli._stopped(error) == (0 if rank else STATUS_REQUEUE)


def slow(session):
    if session.topology.rank == 1:
        time.sleep(4)  # longer than `silence`, but its heart beats
    x = torch.ones(1)
    session.mesh.world.all_reduce(x)
    return x.item()


def shares_out(session, fails):
    """Ranks that never meet, as in a forecast of many dates: the first is done long before the last."""
    if session.topology.rank == 1:
        time.sleep(2.5)
        if fails:
            raise ValueError("the disk is full")
    return session.topology.rank


def test_who_is_done_waits_for_the_others():
    assert run_ranks(shares_out, 3, False, silence=2) == [0, 1, 2]


def test_a_rank_that_fails_after_others_are_done_is_named():
    ends = run_ranks(shares_out, 2, True, statuses=True, silence=2)
    assert ends[0][0] == 70 and "rank 1" in ends[0][2] and "ValueError: the disk is full" in ends[0][2]
    assert ends[0][1] < 15


def test_a_slow_rank_is_not_a_dead_one():
    assert run_ranks(slow, 2, silence=2) == [2, 2]


def dies_first(session):
    if session.topology.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    session.mesh.world.all_reduce(torch.zeros(1))


def test_the_rank_that_serves_the_others_dies():
    ends = run_ranks(dies_first, 2, statuses=True, silence=2)
    assert ends[1][0] != 0 and ends[1][1] < 20
    assert "rank 0" in ends[1][2]


def freezes(session):
    """Rank 0 stops until the other has left, its connections stay."""
    other_leaves = until_gone(session, 1)
    if session.topology.rank == 0:
        time.sleep(1.2)
        subprocess.Popen(["sh", "-c", f"{other_leaves}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    session.mesh.world.all_reduce(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [3, 600], ids=["exchanges fail", "exchanges wait"])
def test_the_rank_that_serves_the_others_freezes(timeout):
    ends = run_ranks(freezes, 2, statuses=True, silence=2, timeout=timeout)
    assert ends[1][0] == 70 and ends[1][1] < 14
    assert "rank 0 failed at step 0: no longer answers; this rank leaves" in ends[1][2]
    assert ends[0][0] == 70 and "no heartbeat for 2 s" in ends[0][2]


def test_a_rank_that_can_print_nothing_leaves_all_the_same():
    """Its log is on a full disk."""
    text = """
import json, time
import torch.distributed as dist
from ensemble_ml.distributed.watch import Watch

store = dist.HashStore()
failure = {"rank": 0, "host": "", "step": 1, "cause": "", "requeue": False, "interrupted": False}
store.set("failed", json.dumps(failure))
Watch(store, 1, 2, 30.0, lambda: 1)
time.sleep(20)
"""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", text], stderr=full, timeout=60)
    assert ended.returncode == watch.STATUS_ABORTED
