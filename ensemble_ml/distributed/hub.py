"""A hub that closes votes: it collects ballots, decides who is in a vote, counts, and sends the outcome to all ranks.

The hub is a thread of the first rank. Every rank has one connection to it, on which it sends a ballot when its gradient
is complete and receives the outcome of every vote in order. On the first rank each remote connection has threads of its
own, so a remote rank that computes, sleeps or is stopped does not delay a vote that can close without it.

A hub was chosen over collectives because a collective needs every rank in every vote. The price is that the network
link of the first rank carries the ballots of all others. In a vote of one bit these are (P - 1) n / 8 bytes each way (P
ranks, n parameters), against about n / 4 for each rank of a vote by all_to_all.

Messages are 64-bit words. A ballot is

    length of the head | head | codes

and an outcome is

    number of the vote | for each rank, whether its ballot was in | heads (P, h) | winning words

The head of a rank whose ballot was not in is zero. If a vote does not get its ballots in time, the outcome is

    -1 | for each rank, whether its ballot is missing | number of the vote

and the hub ends.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.meeting import first_host
from ensemble_ml.distributed.vote import count
from ensemble_ml.errors import UserError

_WORD = 16  # bytes of the secret with which a connection begins, so that no stranger can cast a ballot
# When a vote has the ballots that it needs, it stays open for this fraction of the time that it has taken. Ranks of
# equal speed, which differ by a few milliseconds, are then all in it. Otherwise, if three of four ballots close a vote,
# each vote would miss one rank.
_GRACE = 0.05
_LEAVE = 5.0  # seconds that the hub waits for slow receivers when it ends, and for the secret of a new connection
_FAILED = -1  # first word of the outcome of a vote that has failed, in place of its number


class Link(Protocol):
    """One rank's connection to the hub."""

    bytes_sent: int

    def send(self, ballot: Tensor) -> None:
        """Send a ballot of any number of words."""

    def receive(self) -> Tensor:
        """Wait for the outcome of the next vote, and return it. Raise a ConnectionError if the hub is gone."""

    def close(self) -> None:
        """End the connection; on the first rank, also the hub."""


class Relay(Protocol):
    """The interface of an object that receives words from all ranks and queues words for each of them."""

    @property
    def outboxes(self) -> Sequence[queue.Queue[Tensor | None]]:
        """Return a queue of words for each rank, in the order of ranks."""

    def put(self, rank: int, words: Tensor) -> None:
        """Take the words of a rank."""

    def close(self) -> None:
        """Put None into all queues, which says that no words follow."""


class Hub:
    """A hub that closes votes one after another in its own thread.

    Args:
        first: number of the first vote.
        needed: takes the number of a vote and returns how many ballots close it.
        seconds: time that a vote may wait for the ballots that it needs, from the first one on.
        script: the ranks that are in a vote, by its number, whichever ballots come first. Votes without an entry are
            closed by `needed`. None stands for no entries.
    """

    def __init__(
        self,
        size: int,
        bits: int,
        first: int,
        needed: Callable[[int], int],
        *,
        seconds: float = float("inf"),
        script: Mapping[int, Sequence[int]] | None = None,
    ):
        self._size, self._bits, self._needed, self._seconds = size, bits, needed, seconds
        self._vote, self._script = first, script or {}
        self._inbox: queue.Queue[tuple[int, Tensor] | None] = queue.Queue()
        self.outboxes: list[queue.Queue[Tensor | None]] = [queue.Queue() for _ in range(size)]
        self._waiting: dict[int, Tensor] = {}  # ballots that have come and are in no vote yet, by rank
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def put(self, rank: int, ballot: Tensor) -> None:
        """Hand in the ballot of a rank."""
        self._inbox.put((rank, ballot))

    def close(self) -> None:
        """End the thread, and tell all receivers that no vote follows."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Close one vote after the other, until the hub is closed or a vote has failed."""
        try:
            while (voters := self._chosen()) is not None:
                if not voters:
                    absent = torch.ones(self._size, dtype=torch.int64)
                    absent[list(self._waiting)] = 0
                    self._tell(torch.cat([torch.tensor([_FAILED]), absent, torch.tensor([self._vote])]))
                    break
                self._tell(outcome(self._vote, {r: self._waiting.pop(r) for r in voters}, self._size, self._bits))
                self._vote += 1
        finally:
            self._tell(None)  # also after an error, such as a lack of memory: the ranks would wait forever

    def _chosen(self) -> list[int] | None:
        """Wait until the next vote can close, and return its ranks.

        The list is empty if ballots are missing for too long. The result is None if the hub was closed.
        """
        script, began = self._script.get(self._vote), time.monotonic()
        until, enough = float("inf"), False
        while True:
            # The time is limited from the first ballot on. Before, no rank waits: all may validate, however long.
            if self._waiting and until == float("inf"):
                until = time.monotonic() + self._seconds
            if script is not None and self._waiting.keys() >= set(script):
                return sorted(script)
            if script is None and not enough and len(self._waiting) >= self._needed(self._vote):
                now = time.monotonic()
                until, enough = now + _GRACE * (now - began), True
            if enough and len(self._waiting) == self._size:
                return sorted(self._waiting)
            try:
                left = until - time.monotonic()
                item = self._inbox.get(timeout=None if left == float("inf") else max(left, 0.0))
            except queue.Empty:
                return sorted(self._waiting) if enough else []
            if item is None:
                return None
            self._waiting[item[0]] = item[1]

    def _tell(self, words: Tensor | None) -> None:
        for outbox in self.outboxes:
            outbox.put(words)


def outcome(vote: int, ballots: Mapping[int, Tensor], size: int, bits: int) -> Tensor:
    """Count a vote.

    If the first word of a ballot's head is not above zero, its rank had no sample. Such ballots count only if there are
    no others.

    `vote` is the number of the vote, which decides how ties fall. `ballots` has the words of each rank in the vote,
    (1 + h + w,): length h of the head, head, codes. The result is described at the top of this file.
    """
    head = int(next(iter(ballots.values()))[0])
    heads, flags = torch.zeros(size, head, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for rank, words in ballots.items():
        heads[rank], flags[rank] = words[1 : 1 + head], 1
    with_samples = [words for rank, words in ballots.items() if heads[rank, 0] > 0] or list(ballots.values())
    winner = count(torch.stack([words[1 + head :] for words in with_samples]), bits, vote)
    return torch.cat([torch.tensor([vote]), flags, heads.flatten(), winner])


def opened(words: Tensor, size: int, head: int) -> tuple[int, tuple[int, ...], Tensor, Tensor]:
    """Take the words of an outcome, with heads of `head` words, apart.

    Returns:
        The number of the vote, the ranks that were in it, their heads (ranks in it, h), and the winning words.

    Raises:
        UserError: ballots were missing when the time limit was reached.
    """
    vote, flags, rest = int(words[0]), words[1 : 1 + size], words[1 + size :]
    ranks = tuple(torch.nonzero(flags).flatten().tolist())
    if vote == _FAILED:
        raise UserError(
            f"optim.quorum: vote {int(rest[0]) + 1} still waits for a ballot of rank {', '.join(map(str, ranks))} after"
            " parallel.timeout; see what holds it up, or raise parallel.timeout"
        )
    return vote, ranks, rest[: size * head].view(size, head)[list(ranks)], rest[size * head :]


class LocalLink:
    """The connection of a rank in the hub's own process. Closing it ends the hub if it is the `owner`."""

    def __init__(self, hub: Relay, rank: int, owner: bool = False):
        self._hub, self._rank, self._owner, self.bytes_sent = hub, rank, owner, 0

    def send(self, ballot: Tensor) -> None:
        """Hand the ballot to the hub."""
        self._hub.put(self._rank, ballot)

    def receive(self) -> Tensor:
        """Wait for the outcome of the next vote, and return it (see `Link.receive`)."""
        return _taken(self._hub.outboxes[self._rank])

    def close(self) -> None:
        """End the hub if this rank owns it."""
        if self._owner:
            self._hub.close()


class _Served(LocalLink):
    """The first rank's connection, which also serves the others over TCP."""

    def __init__(self, hub: Relay, listener: socket.socket, word: bytes, ranks: Sequence[int], seconds: float):
        super().__init__(hub, 0, owner=True)
        self._open, self._senders = dict[int, socket.socket](), list[threading.Thread]()
        try:
            with listener:
                self._meet(listener, word, ranks, seconds)
        except BaseException:
            self.close()
            raise
        for rank, connection in self._open.items():
            threading.Thread(target=self._pass_on, args=(rank, connection), name="ballots", daemon=True).start()
            sender = threading.Thread(target=self._tell, args=(rank, connection), name="outcomes", daemon=True)
            sender.start()
            self._senders.append(sender)

    def _meet(self, listener: socket.socket, word: bytes, ranks: Sequence[int], seconds: float) -> None:
        """Accept the connections of all other ranks; raise a UserError if some do not come within `seconds`."""
        until = time.monotonic() + seconds
        # Other programs may connect as well, so connections are accepted until all ranks are among them.
        while missing := [rank for rank in ranks if rank not in self._open]:
            left = until - time.monotonic()
            listener.settimeout(None if left == float("inf") else max(left, 0.0))
            try:
                connection, _ = listener.accept()
            except (TimeoutError, BlockingIOError) as error:
                raise UserError(
                    f"optim.quorum: rank {', '.join(map(str, missing))} did not connect to rank 0 at port"
                    f" {listener.getsockname()[1]} within {seconds:g} s; let a firewall pass ports between the hosts,"
                    " raise parallel.timeout, or use quorum=all"
                ) from error
            connection.settimeout(_LEAVE)
            greeting = None
            with suppress(OSError):
                greeting = _read(connection, _WORD + 8)
            rank = -1
            if greeting is not None and secrets.compare_digest(greeting[:_WORD], word):
                rank = int.from_bytes(greeting[_WORD:], "little")
            if rank not in missing:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open[rank] = connection

    def close(self) -> None:
        """End the hub. Then close the connections when all outcomes have been sent, or after `_LEAVE` seconds."""
        super().close()
        until = time.monotonic() + _LEAVE
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))
        for connection in self._open.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _pass_on(self, rank: int, connection: socket.socket) -> None:
        """Hand the ballots of a rank to the hub until it closes its connection; missing heartbeats show if it died."""
        with suppress(OSError):
            while (words := _words(connection)) is not None:
                self._hub.put(rank, words)

    def _tell(self, rank: int, connection: socket.socket) -> None:
        """Send the outcomes to a rank."""
        with suppress(OSError):
            while (words := self._hub.outboxes[rank].get()) is not None:
                self.bytes_sent += _send(connection, words)
            connection.shutdown(socket.SHUT_WR)


class _Remote:
    """The connection of any other rank, with a thread that receives outcomes while the rank computes."""

    def __init__(self, connection: socket.socket):
        self._connection, self.bytes_sent = connection, 0
        self._outcomes: queue.Queue[Tensor | None] = queue.Queue()
        threading.Thread(target=self._receive, name="outcomes", daemon=True).start()

    def send(self, ballot: Tensor) -> None:
        """Send the ballot."""
        self.bytes_sent += _send(self._connection, ballot)

    def receive(self) -> Tensor:
        """Wait for the outcome of the next vote, and return it (see `Link.receive`)."""
        return _taken(self._outcomes)

    def close(self) -> None:
        """End the connection and its thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        with suppress(OSError):
            while (words := _words(self._connection)) is not None:
                self._outcomes.put(words)
        self._outcomes.put(None)


def join_hub(group: Communicator, make: Callable[[], Relay], seconds: float) -> Link:
    """Return this rank's connection to a hub on the first rank of `group`. All ranks of the group must call this.

    `make`, called on the first rank, makes the hub. Ranks wait `seconds` for each other, which may be infinite.

    Raises:
        UserError: the first rank is not reached; on the first rank, another rank has not connected within `seconds`.
    """
    announced = torch.zeros(1 + _WORD, dtype=torch.int64)
    listener, word = None, secrets.token_bytes(_WORD)
    if group.rank == 0:
        listener = socket.create_server(("", 0), backlog=group.size)
        announced[0], announced[1:] = listener.getsockname()[1], torch.tensor(list(word))
    group.broadcast(announced).wait()
    port, *code = announced.tolist()
    if listener is not None:
        return _Served(make(), listener, word, range(1, group.size), seconds)
    host = first_host()
    try:
        connection = socket.create_connection((host, port), timeout=None if seconds == float("inf") else seconds)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes(code) + group.rank.to_bytes(8, "little"))
    except OSError as error:
        raise UserError(
            f"optim.quorum: rank {group.rank} does not reach rank 0 at {host}:{port} ({error}); let a firewall pass"
            " ports between the hosts, or use quorum=all"
        ) from error
    return _Remote(connection)


def _taken(outcomes: queue.Queue[Tensor | None]) -> Tensor:
    words = outcomes.get()
    if words is None:
        raise ConnectionError("the hub of the votes is gone, and rank 0 with it")
    return words


def _send(connection: socket.socket, words: Tensor) -> int:
    """Send the number of bytes and then the words; return how many bytes were sent."""
    data = words.contiguous().numpy().tobytes()
    connection.sendall(len(data).to_bytes(8, "little") + data)
    return len(data) + 8


def _words(connection: socket.socket) -> Tensor | None:
    """Return the next words, None after the last ones."""
    size = _read(connection, 8)
    data = None if size is None else _read(connection, int.from_bytes(size, "little"))
    return None if data is None else torch.frombuffer(data, dtype=torch.int64)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Return exactly `size` bytes, None if the connection ends before them."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = connection.recv_into(view[done:])
        if not got:
            return None
        done += got
    return data
