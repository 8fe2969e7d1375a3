"""Exchange packed samples between ranks: through shared memory on one node, over TCP between nodes.

Each rank serves the samples that it holds. On the same node a rank opens the slab (cache memory) of the other rank and
reads samples in place; it asks over the socket only for those that are not there yet. If a peer dies, is late or sends
damaged bytes, the sample is read from slow storage and counted as a fallback.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import struct
import threading

from ensemble_ml.loading.slab import Slab, checksum
from ensemble_ml.loading.threads import Scratch
from ensemble_ml.loading.tiers import Others, Tiers, slab_shape
from ensemble_ml.loading.wire import Gather, Server, Wire, fill

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q?")  # sample, and whether its bytes are wanted or only its presence in the slab
_REPLY = struct.Struct("!qI")  # bytes that follow (-1: the sample cannot be served), and their crc32c
_SECONDS = 30.0  # seconds without a byte after which a peer counts as late, and storage is read instead


class Peers(Others):
    """The connections to all other ranks. `host` and `node` are those of `Wire`.

    Raises:
        UserError: Ranks have planned different runs.
    """

    def __init__(self, tiers: Tiers, gather: Gather, host: str | None = None, node: str | None = None):
        self._tiers, self._gather = tiers, gather
        self._slabs: dict[tuple[int, int], Slab | None] = {}
        self._scratch = Scratch()
        self._lock = threading.Lock()
        slabs = {str(tier): slab.address for tier, slab in tiers.slabs.items()}
        self._wire = Wire(
            Server(_REQUEST, self._answer), tiers.rank, slabs, _planned(tiers), gather, host=host, node=node,
            seconds=_SECONDS,
        )  # fmt: skip

    def _answer(self, connection: socket.socket, sample: int, wanted: bool) -> None:
        """Answer another rank that asks for a sample, or asks this rank to put it into its slab."""
        try:
            data = self._tiers.own(sample, self._scratch.take(int(self._tiers.plan.placement.kept[sample])))
        except Exception as error:  # a dataset may raise anything; the asking rank reads it itself
            log.warning("loading: sample %d cannot be served: %s", sample, error)
            connection.sendall(_REPLY.pack(-1, 0))
            return
        if wanted:
            connection.sendall(_REPLY.pack(len(data), checksum(data)))
            connection.sendall(data)
        else:
            connection.sendall(_REPLY.pack(0, 0))

    def finish(self) -> None:
        """Wait until all ranks have got all their samples. All ranks call this."""
        self._gather(b"")

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """Return the bytes that `owner` holds of a sample.

        Args:
            owner: Rank that holds the sample.
            sample: Number of the sample.
            scratch: Memory of exactly these bytes' size. It is used if the owner's slab cannot be read in place.

        Returns:
            The bytes; None if that rank is dead, is late or refuses, or if its answer is damaged.
        """
        slab = self._slab(owner, int(self._tiers.plan.placement.tier[sample]))
        if slab is None:
            served = self._wire.attempt(owner, lambda: self._ask(owner, sample, scratch))
            return scratch if served else None
        found = slab.get(sample)  # shared memory stays readable after its owner has died
        if found is None and self._wire.attempt(owner, lambda: self._ask(owner, sample, None)):
            return slab.get(sample)  # the owner answers after it has stored the sample
        return found

    def _slab(self, owner: int, tier: int) -> Slab | None:
        """Return the slab of another rank; None where it is on another node or cannot be opened."""
        if not self._wire.near(owner):
            return None
        with self._lock:
            if (owner, tier) not in self._slabs:
                shape = slab_shape(self._tiers.plan, self._tiers.items, owner, tier)
                try:
                    self._slabs[owner, tier] = Slab.of_peer(self._wire.addresses[owner].memory[str(tier)], shape)
                except (OSError, ValueError, KeyError) as error:  # another user's, or no access to /proc: TCP remains
                    log.info("loading: memory of rank %d cannot be shared (%s), so its samples are sent", owner, error)
                    self._slabs[owner, tier] = None
            return self._slabs[owner, tier]

    def _ask(self, owner: int, sample: int, out: memoryview | None) -> bool:
        """Ask `owner` for a sample. Return whether it could be served.

        With `out` its bytes are received and checked; without it the owner only puts the sample into its slab.

        Raises:
            OSError: The connection fails, or the answer has another length than the sample.
        """
        connection, (size, expected) = self._wire.ask(owner, _REQUEST.pack(sample, out is not None), _REPLY)
        if size < 0 or out is None:
            return size >= 0
        if size != len(out):
            raise ConnectionError(f"it sent {size} bytes of {len(out)}")
        fill(connection, out)
        if checksum(out) == expected:
            return True
        log.warning("loading: sample %d from rank %d is damaged and is read from storage again", sample, owner)
        return False

    def close(self) -> bool:
        """End all connections, after which no rank may ask any more.

        Return False if the server still reads storage for another rank.
        """
        for slab in self._slabs.values():
            if slab is not None:
                slab.close()
        return self._wire.close()


def _planned(tiers: Tiers) -> str:
    """Return a hash of what all ranks must agree on: the plan, the data, and the arrays of a sample."""
    like = repr(sorted((name, str(one)) for name, one in tiers.items.arrays.items()))
    facts = f"{tiers.plan.hash} {tiers.items.fingerprint()} {like}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
