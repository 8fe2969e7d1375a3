"""Packed units between ranks: out of the other's memory on one node, over TCP between nodes.

A rank asks the holder for what a use needs; the holder reads it from slow storage if it has not yet. On one node the
answer may be a place in the holder's memory, which the asker copies from. A peer that dies, stalls or sends damaged
bytes is a miss: the unit comes from slow storage, and is counted as such.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.arena import read_extents
from ensemble_ml.loading.peers import Gather, receive, this_node
from ensemble_ml.loading.slab import checksum
from ensemble_ml.loading.unit_cache import UnitCache

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q?")  # use, whether the asker is on this node
_REPLY = struct.Struct("!BIq")  # what follows, crc32c of the unit, bytes that follow
_NOTHING, _BYTES, _PLACE = range(3)
_SECONDS = 60.0  # without a byte, after which a peer counts as dead


@dataclass(frozen=True)
class Address:
    """Where a rank gives its units, and where its memory can be opened on the same node."""

    node: str
    host: str
    port: int
    arenas: dict[str, str]
    plan: str

    def pack(self) -> bytes:
        """As bytes for the other ranks."""
        return json.dumps(asdict(self)).encode()


class UnitServer:
    """Gives other ranks what this one holds, one thread a connection."""

    def __init__(self, cache: UnitCache):
        self._cache = cache
        self._listener = socket.create_server(("", 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="loading-serve", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._open.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        asked = bytearray(_REQUEST.size)
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while receive(connection, memoryview(asked)):
                    self._answer(connection, *_REQUEST.unpack(asked))
        except OSError:  # the other side has gone, or this one closes
            return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, use: int, near: bool) -> None:
        try:
            data = self._cache.own(use)
        except UserError as error:  # the asker reads slow storage itself, and says what is wrong with it
            log.warning("loading: use %d cannot be served: %s", use, error)
            connection.sendall(_REPLY.pack(_NOTHING, 0, 0))
            return
        place = self._cache.where(use) if near else None
        if place is None:
            connection.sendall(_REPLY.pack(_BYTES, checksum(data.data), len(data)))
            connection.sendall(data.data)
        else:
            told = json.dumps([place[0], place[1]]).encode()
            connection.sendall(_REPLY.pack(_PLACE, checksum(data.data), len(told)))
            connection.sendall(told)

    def close(self) -> None:
        """End all connections and threads."""
        for end in (self._listener, *self._open.copy()):
            with suppress(OSError):  # not connected
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()


class UnitPeers:
    """The way to all other ranks of a plan (implements `ensemble_ml.loading.unit_cache.Others`).

    Args:
        cache: of this rank.
        gather: brings the bytes of every rank of the plan to all.
        host: under which other nodes reach this one.
        node: a name that ranks share only where they share memory.

    Raises:
        UserError: ranks have planned different runs.
    """

    def __init__(self, cache: UnitCache, gather: Gather, host: str | None = None, node: str | None = None):
        self._cache, self._rank = cache, cache.rank
        self._server = UnitServer(cache)
        arenas = {str(tier): arena.address for tier, arena in cache.arenas.items()}
        mine = Address(node or this_node(), host or socket.gethostname(), self._server.port, arenas, cache.plan.hash)
        self._addresses = [Address(**json.loads(text)) for text in gather(mine.pack())]
        plans = {address.plan for address in self._addresses}
        if len(plans) > 1:
            self._server.close()
            raise UserError(f"loading: ranks have planned different runs ({', '.join(sorted(plans))}); same settings")
        self._files: dict[tuple[int, int], int] = {}
        self._dead: set[int] = set()
        self._local = threading.local()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def get(self, holder: int, use: int) -> np.ndarray | None:
        """What a use needs from `holder`; None where it is dead, refuses, or what it sends is damaged."""
        if holder in self._dead:
            return None
        try:
            return self._ask(holder, use)
        except OSError as error:
            if holder not in self._dead:
                self._dead.add(holder)
                log.warning("loading: rank %d is no longer heard (%s); its units come from slow storage", holder, error)
            return None

    def _ask(self, holder: int, use: int) -> np.ndarray | None:
        connection = self._connection(holder)
        near = self._near(holder)
        connection.sendall(_REQUEST.pack(use, near))
        reply = bytearray(_REPLY.size)
        if not receive(connection, memoryview(reply)):
            raise ConnectionError("it has closed the connection")
        kind, expected, size = _REPLY.unpack(reply)
        if kind == _NOTHING:
            return None
        out = np.empty(size, np.uint8)
        if not receive(connection, out.data):
            raise ConnectionError("it sent too little")
        if kind == _PLACE:
            tier, extents = json.loads(out.tobytes())
            out = read_extents(self._file(holder, int(tier)), extents)
        if checksum(out.data) == expected and len(out) == self._cache.plan.sizes[self._cache.plan.trace.unit[use]]:
            return out
        log.warning("loading: a unit from rank %d is damaged and is read anew", holder)
        return None

    def _near(self, holder: int) -> bool:
        """Whether the holder's memory can be opened."""
        if self._addresses[holder].node != self._addresses[self._rank].node:
            return False
        try:
            return all(self._file(holder, int(tier)) >= 0 for tier in self._addresses[holder].arenas)
        except OSError:
            return False

    def _file(self, holder: int, tier: int) -> int:
        with self._lock:
            if (holder, tier) not in self._files:
                try:
                    path = self._addresses[holder].arenas[str(tier)]
                    self._files[holder, tier] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:  # another user's, or /proc is closed: TCP works too
                    log.info("loading: memory of rank %d cannot be shared (%s): its units are sent", holder, error)
                    self._files[holder, tier] = -1
            return self._files[holder, tier]

    def _connection(self, holder: int) -> socket.socket:
        """One connection a thread and peer, so that several streams run at a time."""
        mine: dict[int, socket.socket] | None = getattr(self._local, "connections", None)
        if mine is None:
            mine = self._local.connections = {}
        if holder not in mine:
            address = self._addresses[holder]
            here = address.node == self._addresses[self._rank].node
            connection = socket.create_connection(("localhost" if here else address.host, address.port), _SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine[holder] = connection
            with self._lock:
                self._connections.append(connection)
        return mine[holder]

    def close(self) -> None:
        """End all connections; nobody may ask any more."""
        for connection in self._connections:
            connection.close()
        for file in self._files.values():
            if file >= 0:
                os.close(file)
        self._server.close()
