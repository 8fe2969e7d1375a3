"""Packed samples between ranks: through shared memory on one node, over TCP between nodes.

Each rank serves what it holds. On the same node a rank opens the other's slab and reads it in place; it asks over the
socket only for what is not there yet. A peer that dies, stalls or sends damaged bytes is a miss: the sample comes from
slow storage, and is counted as such.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from ensemble_ml.errors import UserError
from ensemble_ml.loading.slab import Slab, checksum
from ensemble_ml.loading.tiers import Tiers, slab_shape

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q?")  # sample, whether its bytes are wanted or only that it be there
_REPLY = struct.Struct("!qI")  # bytes that follow (-1: cannot be had), and their crc32c
_SECONDS = 30.0  # without a byte, after which a peer counts as dead

Gather = Callable[[bytes], list[bytes]]  # every rank's bytes, in rank order, on every rank


@dataclass(frozen=True)
class Address:
    """Where a rank serves its samples, and where its memory can be opened on the same node."""

    node: str
    host: str
    port: int
    slabs: dict[str, str]
    plan: str

    def pack(self) -> bytes:
        """As bytes for the other ranks."""
        return json.dumps(asdict(self)).encode()


def this_node() -> str:
    """A name that two processes share only where they share memory: host name and the device of /dev/shm."""
    if name := os.environ.get("ENSEMBLE_ML_NODE"):
        return name
    device = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()}:{device}"


class Server:
    """Gives other ranks what this one holds, one thread a connection."""

    def __init__(self, tiers: Tiers, host: str = ""):
        self._tiers = tiers
        self._listener = socket.create_server((host, 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="loading-server", daemon=True)
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
        sizes = self._tiers.plan.sizes
        buffer = bytearray()
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    asked = bytearray(_REQUEST.size)
                    if not receive(connection, memoryview(asked)):
                        return
                    sample, wanted = _REQUEST.unpack(asked)
                    size = int(sizes[sample])
                    if len(buffer) < size:
                        buffer = bytearray(size)
                    self._answer(connection, sample, memoryview(buffer)[:size], wanted)
        except OSError:  # the other side has gone, or this one closes
            return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, sample: int, data: memoryview, wanted: bool) -> None:
        try:
            data = self._tiers.own(sample, data)
        except UserError as error:  # the asker reads slow storage itself, and says what is wrong with it
            log.warning("loading: sample %d cannot be served: %s", sample, error)
            connection.sendall(_REPLY.pack(-1, 0))
            return
        if wanted:
            connection.sendall(_REPLY.pack(len(data), checksum(data)))
            connection.sendall(data)
        else:
            connection.sendall(_REPLY.pack(0, 0))

    def close(self) -> None:
        """End all connections and threads."""
        for end in (self._listener, *self._open.copy()):
            with suppress(OSError):  # not connected
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()


class Peers:
    """The way to all other ranks (implements `ensemble_ml.loading.tiers.Others`).

    Args:
        tiers: of this rank.
        gather: brings every rank's address to all.
        host: under which other nodes reach this one.
        node: a name that ranks share only where they share memory.

    Raises:
        UserError: ranks have planned different runs.
    """

    def __init__(self, tiers: Tiers, gather: Gather, host: str | None = None, node: str | None = None):
        self._tiers, self._rank, self._gather = tiers, tiers.rank, gather
        self._server = Server(tiers)
        slabs = {str(tier): slab.address for tier, slab in tiers.slabs.items()}
        mine = Address(node or this_node(), host or socket.gethostname(), self._server.port, slabs, tiers.plan.hash)
        self._addresses = [Address(**json.loads(text)) for text in gather(mine.pack())]
        others = {address.plan for address in self._addresses}
        if len(others) > 1:
            self._server.close()
            raise UserError(f"loading: ranks have planned different runs ({', '.join(sorted(others))}); same settings")
        self._slabs: dict[tuple[int, int], Slab | None] = {}
        self._dead: set[int] = set()
        self._local = threading.local()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Wait until all ranks need nothing more of each other."""
        self._gather(b"")

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """The sample from `owner`; None where it is dead, refuses, or what it sends is damaged."""
        if owner in self._dead:
            return None
        try:
            slab = self._slab(owner, int(self._tiers.plan.placement.tier[sample]))
            if slab is None:
                return scratch if self._ask(owner, sample, scratch) else None
            found = slab.get(sample)
            if found is None and self._ask(owner, sample, None):  # it is there when the owner answers
                found = slab.get(sample)
            return found
        except OSError as error:
            if owner not in self._dead:
                self._dead.add(owner)
                log.warning(
                    "loading: rank %d is no longer heard (%s); its samples come from slow storage", owner, error
                )
            return None

    def _slab(self, owner: int, tier: int) -> Slab | None:
        """The other's slab, where it is on this node and can be opened."""
        address = self._addresses[owner]
        if address.node != self._addresses[self._rank].node:
            return None
        with self._lock:
            if (owner, tier) not in self._slabs:
                shape = slab_shape(self._tiers.plan, self._tiers.items, owner, tier)
                try:
                    self._slabs[owner, tier] = Slab.of_peer(address.slabs[str(tier)], shape)
                except (OSError, ValueError, KeyError) as error:  # another user's, or /proc is closed: TCP works too
                    log.info("loading: memory of rank %d cannot be shared (%s), so its samples are sent", owner, error)
                    self._slabs[owner, tier] = None
            return self._slabs[owner, tier]

    def _ask(self, owner: int, sample: int, out: memoryview | None) -> bool:
        connection = self._connection(owner)
        connection.sendall(_REQUEST.pack(sample, out is not None))
        reply = bytearray(_REPLY.size)
        if not receive(connection, memoryview(reply)):
            raise ConnectionError("it has closed the connection")
        size, expected = _REPLY.unpack(reply)
        if size < 0 or out is None:
            return bool(size >= 0)
        if size != len(out) or not receive(connection, out):
            raise ConnectionError("it sent too little")
        if checksum(out) == expected:
            return True
        log.warning("loading: sample %d from rank %d is damaged and is read anew", sample, owner)
        return False

    def _connection(self, owner: int) -> socket.socket:
        """One connection a thread and peer, so that several streams run at a time."""
        mine: dict[int, socket.socket] | None = getattr(self._local, "connections", None)
        if mine is None:
            mine = self._local.connections = {}
        if owner not in mine:
            address = self._addresses[owner]
            here = address.node == self._addresses[self._rank].node
            connection = socket.create_connection(("localhost" if here else address.host, address.port), _SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine[owner] = connection
            with self._lock:
                self._connections.append(connection)
        return mine[owner]

    def close(self) -> None:
        """End all connections; nobody may ask any more."""
        for connection in self._connections:
            connection.close()
        for slab in self._slabs.values():
            if slab is not None:
                slab.close()
        self._server.close()


def receive(connection: socket.socket, out: memoryview) -> bool:
    """Fill `out`; False where the other side has closed before."""
    done = 0
    while done < len(out):
        count = connection.recv_into(out[done:])
        if count == 0:
            return False
        done += count
    return True
