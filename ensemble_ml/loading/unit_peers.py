"""Exchange packed units between ranks: through shared memory on one node, over TCP between nodes.

A unit is one member, or the targets, of an init time (`unit_plan.py`). A use is one read of a unit in the plan of the
run, and the plan names the rank that holds the unit for it. Other ranks ask this holder. The holder reads the unit from
slow storage if it has not done so yet. To a rank on the same node it may name a place in its cache, from which that
rank copies the unit. If the holder fails, is late or sends damaged bytes, the asking rank reads the unit from slow
storage and counts it as a fallback.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.arena import read_extents
from ensemble_ml.loading.slab import checksum
from ensemble_ml.loading.unit_cache import Others, UnitCache
from ensemble_ml.loading.wire import Gather, Server, Wire, fill

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q?")  # use, whether the asker is on this node
_REPLY = struct.Struct("!BIq")  # kind of answer, crc32c of the unit, number of bytes that follow
_NOTHING, _BYTES, _PLACE = range(3)
_LONGEST = 1 << 20  # most bytes of an answer that names a place: such an answer lists only a few extents
_FOREIGN = "its answer does not have the form that ranks of this run send"
_SECONDS = 60.0  # a rank that sends no byte for so many seconds is late, and slow storage is read instead


class UnitPeers(Others):
    """The connections to all other ranks of a plan. `host`, `node` and `number` are those of `Wire`.

    Raises:
        UserError: Ranks have planned different runs.
    """

    def __init__(
        self,
        cache: UnitCache,
        gather: Gather,
        host: str | None = None,
        node: str | None = None,
        number: int | None = None,
    ):
        self._cache = cache
        arenas = {str(tier): f"{arena.address}@{_identity(arena.fd)}" for tier, arena in cache.arenas.items()}
        self._wire = Wire(
            Server(_REQUEST, self._answer), cache.rank, arenas, cache.plan.hash, gather, host=host, node=node,
            seconds=_SECONDS, number=number,
        )  # fmt: skip
        self._files: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def _answer(self, connection: socket.socket, use: int, near: bool) -> None:
        """Answer another rank that asks for the unit of a use."""
        try:
            data = self._cache.own(use)
        except UserError as error:  # the asking rank reads slow storage itself and reports the error
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

    def get(self, holder: int, use: int) -> np.ndarray | None:
        """Return the unit of a use from its holder.

        None stands for a holder that has failed, is late, must not be asked now or could not read the unit, and for
        damaged bytes.
        """
        return self._wire.attempt(holder, lambda: self._ask(holder, use))

    def _ask(self, holder: int, use: int) -> np.ndarray | None:
        """Ask the holder for the unit of a use; return None where it has none or the bytes are damaged.

        Raises:
            OSError: The connection failed, or the answer cannot come from a rank of this run.
        """
        question = _REQUEST.pack(use, self._shared(holder))
        connection, (kind, expected, size) = self._wire.ask(holder, question, _REPLY)
        if kind == _NOTHING:
            return None
        planned = int(self._cache.plan.sizes[self._cache.plan.trace.unit[use]])
        if not (kind == _BYTES and size == planned) and not (kind == _PLACE and 0 < size <= _LONGEST):
            raise ConnectionError(_FOREIGN)
        out = np.empty(size, np.uint8)
        fill(connection, out.data)
        if kind == _PLACE:
            try:
                tier, extents = json.loads(out.tobytes())
                out = read_extents(self._file(holder, int(tier)), extents)
            except (ValueError, TypeError, KeyError) as error:
                raise ConnectionError(_FOREIGN) from error
        if checksum(out.data) == expected and len(out) == planned:
            return out
        number = self._wire.addresses[holder].number
        log.warning("loading: a cache unit from rank %d is damaged and is read anew", number)
        return None

    def _shared(self, holder: int) -> bool:
        """Return whether this rank can open the cache files of the holder."""
        tiers = self._wire.addresses[holder].memory
        return self._wire.near(holder) and all(self._file(holder, int(tier)) >= 0 for tier in tiers)

    def _file(self, holder: int, tier: int) -> int:
        """Return a descriptor of the holder's cache file in a tier, or -1 where it cannot be opened."""
        with self._lock:
            if (holder, tier) not in self._files:
                try:
                    path, _, known = self._wire.addresses[holder].memory[str(tier)].rpartition("@")
                    self._files[holder, tier] = _opened(path, known)
                except OSError as error:  # another user's file, or /proc is not accessible: the units travel over TCP
                    text = "loading: memory of rank %d cannot be shared (%s), so its units are sent over TCP"
                    log.info(text, self._wire.addresses[holder].number, error)
                    self._files[holder, tier] = -1
            return self._files[holder, tier]

    def close(self) -> bool:
        """End all connections, after which no rank may ask any more.

        Return False if a read of storage for another rank is still in progress.
        """
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            if file >= 0:
                os.close(file)
        return self._wire.close()


def _identity(file: int) -> str:
    """Return device and inode of an open file, by which another process checks that it has opened the same file.

    Paths under /proc may lead to another file in a container, which may number its processes by itself.
    """
    facts = os.fstat(file)
    return f"{facts.st_dev}.{facts.st_ino}"


def _opened(path: str, known: str) -> int:
    """Open the file at `path`.

    Raises:
        OSError: It cannot be opened, or its identity is not `known`.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if _identity(file) != known:
        os.close(file)
        raise OSError(errno.ESTALE, f"{path} leads to another file in this process")
    return file
