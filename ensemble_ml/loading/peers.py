"""Packed samples between ranks: through shared memory on one node, over TCP between nodes.

Each rank serves what it holds. On the same node a rank opens the other's slab and reads it in place; it asks over the
socket only for what is not there yet. A peer that dies, is late or sends damaged bytes is a miss: the sample comes from
slow storage, and is counted as such.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import struct
import threading

from ensemble_ml.loading.slab import Slab, checksum
from ensemble_ml.loading.tiers import Tiers, slab_shape
from ensemble_ml.loading.wire import Gather, Server, Wire, fill

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q?")  # sample, whether its bytes are wanted or only that it be there
_REPLY = struct.Struct("!qI")  # bytes that follow (-1: cannot be had), and their crc32c
_SECONDS = 30.0  # without a byte, after which a peer is late, and storage is read instead


def _planned(tiers: Tiers) -> str:
    """What ranks have to agree on: the plan, and what the samples are that it moves."""
    like = repr(sorted((name, str(one)) for name, one in tiers.items.arrays.items()))
    said = f"{tiers.plan.hash} {tiers.items.fingerprint()} {like}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


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
        self._tiers, self._gather = tiers, gather
        self._slabs: dict[tuple[int, int], Slab | None] = {}
        self._buffers = threading.local()
        self._lock = threading.Lock()
        slabs = {str(tier): slab.address for tier, slab in tiers.slabs.items()}
        self._wire = Wire(
            Server(_REQUEST, self._answer), tiers.rank, slabs, _planned(tiers), gather, host=host, node=node,
            seconds=_SECONDS,
        )  # fmt: skip

    def _answer(self, connection: socket.socket, sample: int, wanted: bool) -> None:
        try:
            data = self._tiers.own(sample, self._buffer(int(self._tiers.plan.placement.kept[sample])))
        except Exception as error:  # a dataset's, of any kind: the asker reads it itself, and says what is wrong
            log.warning("loading: sample %d cannot be served: %s", sample, error)
            connection.sendall(_REPLY.pack(-1, 0))
            return
        if wanted:
            connection.sendall(_REPLY.pack(len(data), checksum(data)))
            connection.sendall(data)
        else:
            connection.sendall(_REPLY.pack(0, 0))

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread of the server."""
        held: bytearray = getattr(self._buffers, "held", bytearray())
        if len(held) < size:
            held = self._buffers.held = bytearray(size)
        return memoryview(held)[:size]

    def finish(self) -> None:
        """Wait until all ranks need nothing more of each other."""
        self._gather(b"")

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """The sample from `owner`; None where it is dead, late or refuses, or what it sends is damaged."""
        try:
            slab = self._slab(owner, int(self._tiers.plan.placement.tier[sample]))
            found = None if slab is None else slab.get(sample)
            if found is not None or self._wire.silent(owner):  # what shared memory holds outlives its owner
                return found
            given = self._ask(owner, sample, scratch if slab is None else None)
            self._wire.heard(owner)
            if slab is None:
                return scratch if given else None
            return slab.get(sample) if given else None  # it is there when the owner answers
        except OSError as error:
            self._wire.lose(owner, error)
            return None

    def _slab(self, owner: int, tier: int) -> Slab | None:
        """The other's slab, where it is on this node and can be opened."""
        if not self._wire.near(owner):
            return None
        with self._lock:
            if (owner, tier) not in self._slabs:
                shape = slab_shape(self._tiers.plan, self._tiers.items, owner, tier)
                try:
                    self._slabs[owner, tier] = Slab.of_peer(self._wire.addresses[owner].memory[str(tier)], shape)
                except (OSError, ValueError, KeyError) as error:  # another user's, or /proc is closed: TCP works too
                    log.info("loading: memory of rank %d cannot be shared (%s), so its samples are sent", owner, error)
                    self._slabs[owner, tier] = None
            return self._slabs[owner, tier]

    def _ask(self, owner: int, sample: int, out: memoryview | None) -> bool:
        connection, (size, expected) = self._wire.ask(owner, _REQUEST.pack(sample, out is not None), _REPLY)
        if size < 0 or out is None:
            return size >= 0
        if size != len(out):
            raise ConnectionError("it sent too little")
        fill(connection, out)
        if checksum(out) == expected:
            return True
        log.warning("loading: sample %d from rank %d is damaged and is read anew", sample, owner)
        return False

    def close(self) -> bool:
        """End all connections; nobody may ask any more."""
        for slab in self._slabs.values():
            if slab is not None:
                slab.close()
        return self._wire.close()
