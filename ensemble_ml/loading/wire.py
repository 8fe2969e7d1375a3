"""Ranks that ask each other over TCP: addresses, a server, connections. What is asked and answered is the caller's.

A rank that dies is not asked again. One that is late may only be reading slow storage, and what was asked of it is read
here instead. If it is late several times in a row it is left alone for minutes, and at last for good: a host that is
gone without a word costs a few patiences in all. A connection begins with a word that the ranks alone know: who scans
ports is not answered.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from ensemble_ml.errors import UserError
from ensemble_ml.loading.threads import ended

log = logging.getLogger(__name__)
_AGAIN = 0.1  # seconds
_PAUSES = (0.0, 0.0, 300.0, 1800.0)  # seconds that a rank is left alone after it was late 1, 2, ... times in a row
_WORD = 32  # characters

Gather = Callable[[bytes], list[bytes]]  # every rank's bytes, in rank order, on every rank


@dataclass(frozen=True)
class Address:
    """Where a rank serves what it holds, and where its memory can be opened on the same node (by tier)."""

    node: str
    host: str
    port: int
    word: str
    memory: dict[str, str]
    plan: str
    number: int  # of the rank in the job, as users know it


def this_node() -> str:
    """A name that two processes share only where they share memory: host name and the device of /dev/shm."""
    if name := os.environ.get("ENSEMBLE_ML_NODE"):
        return name
    device = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()}:{device}"


class Server:
    """Answers other ranks, one thread a connection.

    Args:
        request: what a question looks like.
        answer: called with the connection and the question's values; it sends the answer. Questions may come as soon as
            the server is made.
    """

    def __init__(self, request: struct.Struct, answer: Callable[..., None]):
        self._request, self._answer = request, answer
        self.word = secrets.token_hex(_WORD // 2)  # with which a connection has to begin
        self._listener = socket.create_server(("", 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
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
        told = False
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Of one connection, or too many open files: what comes later may do.
                if not told:
                    log.warning("loading: a rank could not be let in (%s); it is tried again and again", error)
                told = True
                time.sleep(_AGAIN)
                continue
            told = False
            with self._lock:
                if self._closing:
                    connection.close()
                    return
                self._open.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        asked, word = bytearray(self._request.size), bytearray(_WORD)
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not receive(connection, memoryview(word)) or not secrets.compare_digest(word, self.word.encode()):
                    return
                while receive(connection, memoryview(asked)):
                    self._answer(connection, *self._request.unpack(asked))
        except OSError:  # the other side has gone, or this one closes
            return
        finally:
            with self._lock:
                self._open.discard(connection)

    def close(self) -> bool:
        """End all connections and threads; False where some wait for storage."""
        with self._lock:
            self._closing = True
            ends = (self._listener, *self._open)
        for end in ends:
            with suppress(OSError):  # not connected
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        return ended(self._threads)


class Wire:
    """This rank's server, and its connections to the others'.

    Args:
        server: of this rank; closed with the wire.
        rank: this rank's place in what `gather` gives.
        memory: where this rank's memory can be opened, by tier.
        plan: hash of what this rank has planned.
        gather: brings every rank's address to all.
        host: under which other nodes reach this one.
        node: a name that ranks share only where they share memory.
        number: this rank's in the job, where that is not its place.
        seconds: without a byte, after which a rank counts as late.

    Raises:
        UserError: ranks have planned different runs.
    """

    def __init__(
        self,
        server: Server,
        rank: int,
        memory: Mapping[str, str],
        plan: str,
        gather: Gather,
        *,
        host: str | None,
        node: str | None,
        seconds: float,
        number: int | None = None,
    ):
        self._server, self._rank, self._seconds = server, rank, seconds
        mine = Address(
            node or this_node(), host or socket.gethostname(), server.port, server.word, dict(memory), plan,
            rank if number is None else number,
        )  # fmt: skip
        try:
            self.addresses = [Address(**json.loads(text)) for text in gather(json.dumps(asdict(mine)).encode())]
            plans = sorted({address.plan for address in self.addresses})
            if len(plans) > 1:
                raise UserError(f"loading: ranks have planned different runs ({', '.join(plans)}); same settings")
        except BaseException:
            server.close()
            raise
        self.dead: set[int] = set()
        self._late: dict[int, tuple[int, float]] = {}  # rank -> how often in a row, and when the last time was
        self._until: dict[int, float] = {}  # rank -> when it may be asked again
        self._local = threading.local()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def near(self, rank: int) -> bool:
        """Whether `rank` shares memory with this one."""
        return self.addresses[rank].node == self.addresses[self._rank].node

    def silent(self, rank: int) -> bool:
        """Whether `rank` shall not be asked now. After a pause one thread tries, while others go on without."""
        with self._lock:
            now = time.monotonic()
            if rank in self.dead or now < self._until.get(rank, now):
                return True
            if rank in self._until:
                self._until[rank] = now + self._seconds
            return False

    def heard(self, rank: int) -> None:
        """`rank` has answered, to the last byte."""
        if rank in self._late:
            with self._lock:
                self._late.pop(rank, None)
                self._until.pop(rank, None)

    def lose(self, rank: int, error: OSError) -> None:
        """Give up an answer of `rank`, which was late; by any other error it has gone, and is asked no more."""
        self._leave(rank)  # an answer that comes late would be taken for the next one
        with self._lock:
            if rank in self.dead:
                return
            number, what = self.addresses[rank].number, "what it holds comes from slow storage"
            if isinstance(error, TimeoutError):
                count, last = self._late.get(rank, (0, 0.0))
                if count and self._local.asked < last:  # several threads waited at a time
                    return
                self._late[rank] = count + 1, time.monotonic()
                if count < len(_PAUSES):
                    if pause := _PAUSES[count]:
                        self._until[rank] = time.monotonic() + pause
                        what += f" for {pause / 60:.0f} minutes"
                    else:
                        what = "what was asked of it comes from slow storage, and it is asked again"
                    log.warning("loading: rank %d has not answered in %.0f s; %s", number, self._seconds, what)
                    return
            self.dead.add(rank)
            log.warning("loading: rank %d is no longer heard (%s); %s", number, error, what)

    def _leave(self, rank: int) -> None:
        """End this thread's connection to `rank`."""
        connection = getattr(self._local, "connections", {}).pop(rank, None)
        if connection is not None:
            connection.close()
            with self._lock:
                self._connections.remove(connection)

    def connection(self, rank: int) -> socket.socket:
        """The connection of this thread to `rank`: one a thread, so that several streams run at a time."""
        mine: dict[int, socket.socket] | None = getattr(self._local, "connections", None)
        if mine is None:
            mine = self._local.connections = {}
        if rank not in mine:
            address = self.addresses[rank]
            host = "localhost" if self.near(rank) else address.host
            connection = socket.create_connection((host, address.port), self._seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(address.word.encode())
            mine[rank] = connection
            with self._lock:
                self._connections.append(connection)
        return mine[rank]

    def ask(self, rank: int, question: bytes, reply: struct.Struct) -> tuple[socket.socket, tuple[int, ...]]:
        """Send a question; returns the connection, for what follows, and the values of the reply.

        Raises:
            OSError: `rank` has gone.
        """
        self._local.asked = time.monotonic()
        connection = self.connection(rank)
        connection.sendall(question)
        head = bytearray(reply.size)
        if not receive(connection, memoryview(head)):
            raise ConnectionError("it has closed the connection")
        return connection, reply.unpack(head)

    def close(self) -> bool:
        """End all connections and the server; nobody may ask any more. False where it still reads what was asked."""
        for connection in self._connections:
            connection.close()
        return self._server.close()


def fill(connection: socket.socket, out: memoryview) -> None:
    """Fill `out`.

    Raises:
        ConnectionError: the other side has closed before.
    """
    if not receive(connection, out):
        raise ConnectionError("it sent too little")


def receive(connection: socket.socket, out: memoryview) -> bool:
    """Fill `out`; False where the other side has closed before."""
    done = 0
    while done < len(out):
        count = connection.recv_into(out[done:])
        if count == 0:
            return False
        done += count
    return True
