"""Ranks that ask each other: a server that outlives failures and strangers, and what comes from where a rank was."""

import contextlib
import errno
import json
import socket
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ensemble_ml.distributed.topology import Topology
from ensemble_ml.loading import wire
from ensemble_ml.loading.unit_peers import UnitPeers
from ensemble_ml.training.feed import lane_of


def test_a_server_goes_on_after_connections_that_failed(monkeypatch, caplog):
    """Too many open files for a moment, or a network's error, which accept(2) hands on."""
    monkeypatch.setattr(wire, "_AGAIN", 0.01)
    request = struct.Struct("!q")
    server = wire.Server(request, lambda connection, value: connection.sendall(request.pack(value + 1)))
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EPROTO, "")]

    def refused(listener):
        if errors:
            raise errors.pop()
        return accept(listener)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refused)
        for value in (1, 2, 3):  # the first is let in by the call that waited already
            with socket.create_connection(("localhost", server.port), 10) as connection:
                connection.sendall(server.word.encode() + request.pack(value))
                assert request.unpack(connection.recv(8, socket.MSG_WAITALL)) == (value + 1,)
    assert not errors and caplog.text.count("cannot be accepted") == 1
    server.close()
    assert not [thread for thread in server._threads if thread.is_alive()]


def test_who_does_not_know_the_word_is_not_answered():
    """A scan of ports, or a rank of another run that has the port from before."""
    asked, request = [], struct.Struct("!q")
    server = wire.Server(request, lambda connection, value: asked.append(value))
    for said in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64), b"0" * 32 + request.pack(1)):
        with socket.create_connection(("localhost", server.port), 10) as connection:
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    server.close()
    assert not asked


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack("!BIq", 2, 0, 4) + b"[0, ", struct.pack("!BIq", 1, 0, -5)],
    ids=["of a web server", "a place cut short", "a size below zero"],
)
def test_rubbish_from_the_port_of_a_rank_is_a_miss(reply, caplog):
    """A rank has died, and its port is another service's now; or "localhost" is another's network."""
    trace = SimpleNamespace(unit=np.array([0]))
    cache = SimpleNamespace(rank=0, arenas={}, plan=SimpleNamespace(hash="", sizes=np.array([4]), trace=trace))
    rubbish = socket.create_server(("localhost", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                rubbish.accept()[0].sendall(reply)

    threading.Thread(target=serve, daemon=True).start()

    def gather(mine):
        told = json.loads(mine) | {
            "port": rubbish.getsockname()[1],
            "host": "localhost",
            "node": "elsewhere",
            "number": 1,
        }
        return [mine, json.dumps(told).encode()]

    peers = UnitPeers(cache, gather, node="here")
    assert peers.get(1, 0) is None and peers.get(1, 0) is None
    assert caplog.text.count("rank 1 is not asked any more") == 1
    peers.close()
    rubbish.close()


def test_a_rank_that_is_lost_is_told_by_its_number_in_the_job(caplog):
    """Rank 6, which stands second among those that share what they hold with rank 2."""

    def gather(mine):
        return [mine, json.dumps(json.loads(mine) | {"number": 6}).encode()]

    server = wire.Server(struct.Struct("!q"), lambda *_: None)
    one = wire.Wire(server, 0, {}, "plan", gather, host=None, node=None, seconds=1.0, number=2)
    one.lose(1, OSError("it has gone"))
    one.close()
    assert [address.number for address in one.addresses] == [2, 6]
    assert "rank 6 is not asked any more (it has gone)" in caplog.text
    session = SimpleNamespace(topology=Topology(data=2, lat=2, rank=3), world=SimpleNamespace(local_size=4))
    assert (lane_of(session).rank, lane_of(session).number) == (1, 3)


def test_all_connections_end_although_a_thread_leaves_its_own_meanwhile():
    server = wire.Server(struct.Struct("!q"), lambda *_: None)
    one = wire.Wire(server, 0, {}, "plan", lambda mine: [mine], host=None, node=None, seconds=1.0)
    ended = []

    def leave():
        ended.append("first")
        one._connections.remove(first)

    first, second = SimpleNamespace(close=leave), SimpleNamespace(close=lambda: ended.append("second"))
    one._connections += [first, second]
    one.close()
    assert ended == ["first", "second"]


def late(monkeypatch, seconds, pauses):
    """A wire to a rank 1 that answers each number with the next once `go` is set, and says what it was asked."""
    monkeypatch.setattr(wire, "_PAUSES", pauses)
    request, go, asked = struct.Struct("!q"), threading.Event(), []

    def answer(connection, value):
        asked.append(value)
        go.wait(10)
        connection.sendall(request.pack(value + 1))

    other = wire.Server(request, answer)

    def gather(mine):
        told = json.loads(mine) | {"port": other.port, "word": other.word, "number": 1}
        return [mine, json.dumps(told).encode()]

    mine = wire.Server(request, lambda *_: None)
    one = wire.Wire(mine, 0, {}, "plan", gather, host=None, node=None, seconds=seconds)

    def ask(value):
        if one.silent(1):
            return "silent"
        try:
            found = one.ask(1, request.pack(value), request)[1][0]
        except OSError as error:
            one.lose(1, error)
            return None
        one.heard(1)
        return found

    return one, other, ask, go, asked


def test_a_rank_that_is_late_once_is_asked_again(monkeypatch, caplog):
    """It reads slow storage; what it answers then is of no question that anybody still has."""
    one, other, ask, go, _ = late(monkeypatch, 0.3, (0.0, 0.0, 60.0))
    assert ask(1) is None and ask(2) is None
    go.set()
    assert ask(5) == 6 and not one._late
    go.clear()
    assert ask(7) is None and not one.silent(1) and not one.dead
    go.set()
    assert ask(8) == 9
    assert len(one._connections) == 1
    assert caplog.text.count("rank 1 has not answered in 0 s; this request is read from slow storage") == 3
    one.close(), other.close()


def test_threads_that_wait_at_a_time_are_one_delay(monkeypatch):
    one, other, ask, go, asked = late(monkeypatch, 0.3, (0.0, 60.0))
    threads = [threading.Thread(target=ask, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    go.set()
    assert len(asked) == 4 and not one.silent(1) and ask(1) == 2
    one.close(), other.close()


def test_a_rank_that_stays_silent_costs_a_few_patiences(monkeypatch, caplog):
    """After each pause one thread tries it, others go on without."""
    one, other, ask, go, asked = late(monkeypatch, 0.05, (0.0, 0.0, 60.0, 600.0))
    clock = [0.0]
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0], sleep=time.sleep))
    answers = []
    for _ in range(40):
        answers += [ask(value) for value in range(3)]
        clock[0] += 40.0
    assert answers.count(None) == len(asked) == 5 and one.dead == {1}
    assert answers[:6] == [None, None, None, "silent", "silent", "silent"]
    assert "is read from slow storage for 1 minutes" in caplog.text and "rank 1 is not asked any more" in caplog.text
    go.set()
    one.close(), other.close()


def test_a_rank_is_tried_again_after_a_pause(monkeypatch):
    one, other, ask, go, _ = late(monkeypatch, 0.3, (60.0,))
    assert ask(1) is None and ask(1) == "silent"
    go.set()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 61, sleep=time.sleep)
    monkeypatch.setattr(wire, "time", later)
    assert not one.silent(1) and one.silent(1)  # who has asked first tries it
    one._until[1] = 0.0
    assert ask(1) == 2 and ask(2) == 3 and not one.dead
    one.close(), other.close()


def test_connections_of_threads_that_have_ended_are_closed():
    # Each loop over a loader has threads of its own, so many short loops would use up all descriptors.
    request = struct.Struct("!q")
    server = wire.Server(request, lambda connection, value: connection.sendall(request.pack(value)))
    one = wire.Wire(server, 0, {}, "plan", lambda mine: [mine], host="localhost", node=None, seconds=5.0)
    try:
        for number in range(6):
            thread = threading.Thread(target=lambda n=number: one.ask(0, request.pack(n), request))
            thread.start()
            thread.join()
        assert len(one._connections) <= 2
        until = time.monotonic() + 10
        while sum(thread.is_alive() for thread in server._threads) > 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert sum(thread.is_alive() for thread in server._threads) <= 3
    finally:
        one.close()
