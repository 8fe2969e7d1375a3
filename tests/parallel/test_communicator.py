"""Collectives against what they are defined to give, on real processes; bytes against the formulas."""

import time
from types import SimpleNamespace

import torch
from parallel.ranks import run_ranks

from ensemble_ml.distributed import Mesh, NullCommunicator, communicator
from ensemble_ml.distributed.communicator import agreed_extremes


def collectives(session):
    comm, rank, size = session.mesh.world, session.topology.rank, session.topology.size
    found, sent = {}, {}

    def counted(name, call):
        before = comm.bytes_sent
        found[name] = call()
        sent[name] = comm.bytes_sent - before

    def reduced(op):
        x = torch.arange(6, dtype=torch.float64) * (rank + 1)
        comm.all_reduce(x, op=op, async_op=True).wait()
        return x

    def gathered():
        out = torch.empty(2 * size)
        comm.all_gather(out, torch.tensor([rank, -rank], dtype=torch.float32))
        return out

    def exchanged():
        # rank r sends r + d + 1 numbers 10 r + d to rank d
        send = [rank + d + 1 for d in range(size)]
        x = torch.cat([torch.full((n,), 10 * rank + d) for d, n in enumerate(send)])
        out = torch.empty(sum(send), dtype=x.dtype)
        comm.all_to_all_single(out, x, send, send, async_op=True).wait()
        return out

    def scattered():
        out = torch.empty(2)
        comm.reduce_scatter(out, torch.arange(2 * size, dtype=torch.float32) + rank)
        return out

    def told():
        x = torch.full((3,), rank, dtype=torch.bfloat16)
        comm.broadcast(x, source=1)
        return x

    counted("sum", lambda: reduced("sum"))
    counted("max", lambda: reduced("max"))
    counted("gather", gathered)
    counted("exchange", exchanged)
    counted("scatter", scattered)
    counted("broadcast", told)
    comm.barrier()
    return found, sent


def late(session, clock):
    """Rank 1 comes half a second late, then keeps what it began waiting half a second; and a barrier.

    `clock` (3,) is shared: seconds, which pass while rank 1 is late alone, and how often each rank has read them.
    """
    comm, rank, found = session.mesh.world, session.topology.rank, []
    x = torch.zeros(3)

    def now():
        clock[1 + rank] += 1
        return clock[0].item()

    communicator.time = SimpleNamespace(perf_counter=now)

    def waited(call):
        before = comm.seconds_waited
        call()
        found.append(comm.seconds_waited - before)

    def first_waits(call):
        comm.barrier()
        if rank == 1:
            while clock[1] <= clock[2]:  # both read the clock alike, so the other does not wait yet
                time.sleep(0.001)
            clock[0] += 0.5
        waited(call)

    first_waits(lambda: comm.all_reduce(x))
    first_waits(comm.barrier)
    first_waits(lambda: comm.all_reduce(x, async_op=True).wait())
    comm.barrier()
    pending = comm.all_reduce(x, async_op=True)
    clock[0] += 0.5 * rank  # the caller does something else
    comm.barrier()
    waited(pending.wait)
    assert session.mesh.seconds_waited >= comm.seconds_waited
    return found


def test_waits_are_those_of_the_caller():
    clock = torch.zeros(3, dtype=torch.float64).share_memory_()
    assert run_ranks(late, 2, clock) == [[0.5, 0.5, 0.5, 0.0], [0.0] * 4]
    one = NullCommunicator()
    one.all_reduce(torch.zeros(3))
    assert one.seconds_waited == 0


def test_collectives():
    size = 3
    for rank, (found, sent) in enumerate(run_ranks(collectives, size)):
        assert torch.equal(found["sum"], torch.arange(6.0).double() * 6)
        assert torch.equal(found["max"], torch.arange(6.0).double() * 3)
        assert torch.equal(found["gather"], torch.tensor([0.0, 0, 1, -1, 2, -2]))
        expected = torch.cat([torch.full((r + rank + 1,), 10 * r + rank) for r in range(size)])
        assert torch.equal(found["exchange"], expected)
        assert torch.equal(found["scatter"], 3 * torch.arange(2 * rank, 2 * rank + 2).float() + 3)
        assert found["broadcast"].tolist() == [1, 1, 1]
        other = sum(rank + d + 1 for d in range(size) if d != rank)
        assert sent == {
            "sum": 2 * 48 * 2 // 3, "max": 2 * 48 * 2 // 3, "gather": 8 * 2, "exchange": 8 * other,
            "scatter": 24 * 2 // 3, "broadcast": 6 if rank == 1 else 0,
        }  # fmt: skip


def roles(session):
    """The sum of rank numbers over each role."""
    sums = {}
    for name in ("world", "data", "lat", "lon", "spatial", "model"):
        x = torch.tensor([float(session.topology.rank)])
        getattr(session.mesh, name).all_reduce(x)
        sums[name] = x.item()
    return sums


def test_the_mesh_by_role():
    found = run_ranks(roles, 4, lat=2)
    assert [f["data"] for f in found] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
    assert [f["lat"] for f in found] == [0 + 1, 0 + 1, 2 + 3, 2 + 3]
    assert [f["lon"] for f in found] == [0, 1, 2, 3]
    assert [f["spatial"] for f in found] == [f["lat"] for f in found]
    assert [f["world"] for f in found] == [f["model"] for f in found] == [6, 6, 6, 6]


def test_one_rank_talks_to_itself():
    comm, x, out = NullCommunicator(), torch.arange(4.0), torch.empty(4)
    for call in (
        lambda: comm.all_gather(out, x),
        lambda: comm.all_to_all_single(out, x, [4], [4]),
        lambda: comm.reduce_scatter(out, x),
    ):
        out.zero_()
        call().wait()
        assert torch.equal(out, x)
    comm.all_reduce(x).wait()
    comm.broadcast(x).wait()
    comm.barrier()
    assert torch.equal(x, torch.arange(4.0)) and comm.bytes_sent == 0
    assert Mesh().world.size == Mesh().lat.size == 1


def test_extremes_may_be_infinite_and_absent():
    nan, inf = torch.nan, torch.inf
    low, high = torch.tensor([1.0, -inf, inf, nan, -inf]), torch.tensor([2.0, 3.0, inf, nan, -inf])
    found = agreed_extremes(low, high, NullCommunicator())
    for values, wanted in zip(found, (low, high), strict=True):
        torch.testing.assert_close(values, wanted, equal_nan=True)
