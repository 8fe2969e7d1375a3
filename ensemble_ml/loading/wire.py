"""Connect the ranks over TCP: addresses, a server for each rank, and connections between them.

The questions and answers themselves belong to the caller (`peers.py`, `unit_peers.py`).

A rank whose connection fails is not asked again. A rank that is late may only be waiting for slow storage; the asking
rank then reads slow storage itself. If a rank is late several times in a row, it is not asked for some minutes, and
finally never again. A host that no longer answers therefore costs only a few timeouts in all.

Each connection begins with a secret word that only the ranks know, so a port scanner gets no answer.
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
from typing import TypeVar

from ensemble_ml.errors import UserError
from ensemble_ml.loading.threads import ended

log = logging.getLogger(__name__)
_AGAIN = 0.1  # seconds before the server accepts again after an error
_PAUSES = (0.0, 0.0, 300.0, 1800.0)  # seconds for which a rank is not asked after being late 1, 2, ... times in a row
_WORD = 32  # characters of the secret word

Gather = Callable[[bytes], list[bytes]]  # every rank's bytes, in rank order, on every rank
T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """The address of a rank: where it serves what it holds, and where its memory can be opened on the same node.

    Attributes:
        node: Name that ranks share only where they share memory.
        host: Name under which other nodes reach it.
        port: Port of its server.
        word: Secret word with which a connection begins.
        memory: Text by which ranks on the same node open its cache file, by tier. It begins with a path.
        plan: Hash of its plan.
        number: Number of the rank in the job, as users know it.
    """

    node: str
    host: str
    port: int
    word: str
    memory: dict[str, str]
    plan: str
    number: int


def this_node() -> str:
    """Return a name that two processes share only where they share memory.

    It is the host name with the device number of /dev/shm. The variable ENSEMBLE_ML_NODE overrides it.
    """
    if name := os.environ.get("ENSEMBLE_ML_NODE"):
        return name
    device = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()}:{device}"


class Server:
    """A server that answers other ranks, with one thread for each connection.

    Args:
        request: Binary format of a question.
        answer: Function that gets the connection and the values of the question, and sends the answer. Questions may
            arrive as soon as the server is made.
    """

    def __init__(self, request: struct.Struct, answer: Callable[..., None]):
        self._request, self._answer = request, answer
        self.word = secrets.token_hex(_WORD // 2)  # a connection must begin with it
        self._listener = socket.create_server(("", 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Return the port on which the server listens."""
        return int(self._listener.getsockname()[1])

    def _start(self, run: Callable[..., None], *args: object) -> None:
        """Start a thread of the server."""
        thread = threading.Thread(target=run, args=args, name="loading-server", daemon=True)
        # The list is changed in place, because `close` may be going through it.
        self._threads[:] = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        told = False
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # The error may concern one connection only, or pass when open files are closed, so the server keeps
                # listening.
                if not told:
                    log.warning("loading: a connection cannot be accepted (%s); trying again until it can", error)
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
        """Check the secret word of a connection, then answer its questions."""
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
        """End all connections and threads. Return False if a thread still waits for storage."""
        with self._lock:
            self._closing = True
            ends = (self._listener, *self._open)
        for end in ends:
            with suppress(OSError):  # not connected
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        return ended(self._threads)


class Wire:
    """The server of this rank, and its connections to the servers of the others.

    Args:
        server: Server of this rank; it is closed with the wire.
        rank: Place of this rank in the result of `gather`.
        memory: Text by which ranks on the same node open this rank's cache file, by tier.
        plan: Hash of this rank's plan.
        gather: All-gather of bytes, which exchanges the addresses.
        host: Name under which other nodes reach this one; None takes the host name.
        node: Name that ranks share only where they share memory; None takes that of `this_node`.
        seconds: Seconds without a byte after which a rank counts as late.
        number: Number of this rank in the job; None if it is `rank`.

    Raises:
        UserError: Ranks have planned different runs.
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
                raise UserError(
                    f"loading: ranks have planned different runs ({', '.join(plans)}); give all ranks the same settings"
                )
        except BaseException:
            server.close()
            raise
        self.dead: set[int] = set()
        self._late: dict[int, tuple[int, float]] = {}  # rank -> times late in a row, and time of the last one
        self._until: dict[int, float] = {}  # rank -> when it may be asked again
        self._local = threading.local()
        self._connections: list[socket.socket] = []
        self._of_threads: list[tuple[threading.Thread, dict[int, socket.socket]]] = []
        self._lock = threading.Lock()

    def near(self, rank: int) -> bool:
        """Return whether `rank` shares memory with this one."""
        return self.addresses[rank].node == self.addresses[self._rank].node

    def silent(self, rank: int) -> bool:
        """Return whether `rank` must not be asked now.

        When a pause ends, one thread tries the rank, while the others still go on without it.
        """
        with self._lock:
            now = time.monotonic()
            if rank in self.dead or now < self._until.get(rank, now):
                return True
            if rank in self._until:
                self._until[rank] = now + self._seconds
            return False

    def heard(self, rank: int) -> None:
        """Record that `rank` has answered completely, which ends its count of late answers."""
        if rank in self._late:
            with self._lock:
                self._late.pop(rank, None)
                self._until.pop(rank, None)

    def lose(self, rank: int, error: OSError) -> None:
        """Give up an answer of `rank`.

        After a timeout the rank counts as late. If it is late repeatedly, it is paused as `_PAUSES` says, and finally
        counts as dead. After any other error it counts as dead at once. A dead rank is not asked again.
        """
        self._leave(rank)  # on the same connection, a late answer would be taken for that to the next question
        with self._lock:
            if rank in self.dead:
                return
            number, what = self.addresses[rank].number, "what it holds is read from slow storage"
            if isinstance(error, TimeoutError):
                count, last = self._late.get(rank, (0, 0.0))
                if count and self._local.asked < last:  # several threads timed out together, which counts once
                    return
                self._late[rank] = count + 1, time.monotonic()
                if count < len(_PAUSES):
                    if pause := _PAUSES[count]:
                        self._until[rank] = time.monotonic() + pause
                        what += f" for {pause / 60:.0f} minutes"
                    else:
                        what = "this request is read from slow storage, later ones still go to the rank"
                    log.warning("loading: rank %d has not answered in %.0f s; %s", number, self._seconds, what)
                    return
            self.dead.add(rank)
            log.warning("loading: rank %d is not asked any more (%s); %s", number, error, what)

    def _leave(self, rank: int) -> None:
        """End the connection of this thread to `rank`."""
        connection = getattr(self._local, "connections", {}).pop(rank, None)
        if connection is not None:
            connection.close()
            with self._lock:
                self._connections.remove(connection)

    def connection(self, rank: int) -> socket.socket:
        """Return the connection of this thread to `rank`.

        Each thread has its own, so several transfers run at the same time.

        Raises:
            OSError: `rank` cannot be reached.
        """
        mine: dict[int, socket.socket] | None = getattr(self._local, "connections", None)
        if mine is None:
            mine = self._local.connections = {}
            self._forget_ended(mine)
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

    def _forget_ended(self, mine: dict[int, socket.socket]) -> None:
        """Close the connections of threads that have ended, and note `mine`, those of this thread.

        Each loop over a loader has threads of its own, so many short loops would else use up all descriptors.
        """
        with self._lock:
            gone = [one for one in self._of_threads if not one[0].is_alive()]
            self._of_threads = [one for one in self._of_threads if one not in gone]
            self._of_threads.append((threading.current_thread(), mine))
            for connection in [connection for _, held in gone for connection in held.values()]:
                connection.close()
                self._connections.remove(connection)

    def attempt(self, rank: int, ask: Callable[[], T]) -> T | None:
        """Return what `ask` gets from `rank`; None if the rank must not be asked now, is late or has gone.

        Args:
            rank: Rank that is asked.
            ask: Function that asks it, and raises an OSError if the rank is late or has gone.
        """
        if self.silent(rank):
            return None
        try:
            answer = ask()
        except OSError as error:
            self.lose(rank, error)
            return None
        self.heard(rank)
        return answer

    def ask(self, rank: int, question: bytes, reply: struct.Struct) -> tuple[socket.socket, tuple[int, ...]]:
        """Send a question to `rank`.

        Returns:
            The connection, from which the caller reads what follows, and the values of the reply.

        Raises:
            OSError: `rank` is late or has gone.
        """
        self._local.asked = time.monotonic()
        connection = self.connection(rank)
        connection.sendall(question)
        head = bytearray(reply.size)
        if not receive(connection, memoryview(head)):
            raise ConnectionError("it has closed the connection")
        return connection, reply.unpack(head)

    def close(self) -> bool:
        """End all connections and the server, after which no rank may ask any more.

        Return False if the server still reads what was requested.
        """
        with self._lock:  # threads may still leave connections
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        return self._server.close()


def fill(connection: socket.socket, out: memoryview) -> None:
    """Receive exactly as many bytes as `out` holds.

    Raises:
        ConnectionError: The other side closed the connection too early.
    """
    if not receive(connection, out):
        raise ConnectionError("it sent too little")


def receive(connection: socket.socket, out: memoryview) -> bool:
    """Receive as many bytes as `out` holds; return False if the other side closed the connection too early."""
    done = 0
    while done < len(out):
        count = connection.recv_into(out[done:])
        if count == 0:
            return False
        done += count
    return True
