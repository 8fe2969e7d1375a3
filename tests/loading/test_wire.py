"""Ranks that ask each other: a server that outlives failures and strangers, and what comes from where a rank was."""

import contextlib
import errno
import json
import socket
import struct
import threading
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
    assert not errors and caplog.text.count("is tried again") == 1
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
    assert caplog.text.count("rank 1 is no longer heard") == 1
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
    assert "rank 6 is no longer heard (it has gone)" in caplog.text
    session = SimpleNamespace(topology=Topology(data=2, lat=2, rank=3), world=SimpleNamespace(local_size=4))
    assert (lane_of(session).rank, lane_of(session).number) == (1, 3)
