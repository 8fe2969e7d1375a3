"""What rank 0 works out from whole fields, read by all ranks of its latitude axis: each its own rows.

Rank 0 asks; the ranks that hold the other rows of the same columns read theirs and send them to it. So no rank ever
reads another's rows from the store, and rank 0 sees fields as if it had read them itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.shard import Bounds, Shard
from ensemble_ml.loading import Reader
from ensemble_ml.store.source import Fields, Part, Selection, Source

T = TypeVar("T")
_ALL = Selection()
_BEAT = "at work"


def on_first(session: Session, shard: Shard | None, reader: Reader, compute: Callable[[Reader], T]) -> T:
    """What `compute` returns on rank 0, on every rank; its reader reads this rank's rows and asks others for theirs.

    Args:
        shard: how the grid is shared out; None where every rank holds all of it.
        reader: of the whole grid.
    """
    lat = session.mesh.lat
    if shard is None or lat.size == 1:
        return session.once(lambda: compute(reader))
    place = session.topology.place
    if place.trainer == place.data == place.lon == 0 and not session.first:
        _serve(reader.source, shard.rows, lat)

    def together() -> T:
        source = BandSource(reader.source, shard.rows, lat)
        found = compute(reader.over(source))
        source.close()  # not after an error: the others may wait for a part of this rank's, and the session ends them
        return found

    return session.once(together)


class BandSource:
    """A source whose fields are read by the ranks of a latitude axis, each its own rows; for the first of them."""

    def __init__(self, source: Source, rows: Bounds, comm: Communicator):
        self._source, self._rows, self._comm = source, rows, comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, part: Part, date: int, selection: Selection = _ALL) -> Fields:
        """Read one start date; rows are cut from what all ranks read."""
        wanted = selection.rows or (0, self._rows[-1][1])
        request = part, date, replace(selection, rows=None)
        _tell(self._comm, request)
        whole = _gathered(self._source, request, self._rows, self._comm)
        assert whole is not None
        return Fields(whole.pressure[..., slice(*wanted), :], whole.surface[..., slice(*wanted), :])

    def beat(self) -> None:
        """Keep the others waiting, whose patience has an end, while this rank is long at work without a read."""
        _tell(self._comm, _BEAT)

    def close(self) -> None:
        """Let the others go."""
        _tell(self._comm, None)


def _serve(source: Source, rows: Bounds, comm: Communicator) -> None:
    while (request := _asked(comm)) is not None:
        if request != _BEAT:
            _gathered(source, request, rows, comm)


def _tell(comm: Communicator, request: Any) -> None:
    payload = torch.frombuffer(bytearray(pickle.dumps(request)), dtype=torch.uint8)
    comm.broadcast(torch.tensor([len(payload)]))
    comm.broadcast(payload)


def _asked(comm: Communicator) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    comm.broadcast(size)
    payload = torch.empty(int(size), dtype=torch.uint8)
    comm.broadcast(payload)
    return pickle.loads(payload.numpy().tobytes())


def _gathered(source: Source, request: tuple[Part, int, Selection], rows: Bounds, comm: Communicator) -> Fields | None:
    """The whole fields on the first rank, None on the others."""
    part, date, selection = request
    own = source.read(part, date, replace(selection, rows=rows[comm.rank]))
    found = [_collected(values, rows, comm) for values in (own.pressure, own.surface)]
    return None if found[0] is None or found[1] is None else Fields(found[0], found[1])


def _collected(values: np.ndarray, rows: Bounds, comm: Communicator) -> np.ndarray | None:
    own = torch.from_numpy(np.ascontiguousarray(values))
    line = values.size // values.shape[-2]  # every rank has as many of everything but rows
    sizes = [(last - first) * line for first, last in rows]
    buffer = own.new_empty(sum(sizes) if comm.rank == 0 else 0)
    received = sizes if comm.rank == 0 else [0] * comm.size
    comm.all_to_all_single(buffer, own.view(-1), received, [own.numel()] + [0] * (comm.size - 1))
    if comm.rank:
        return None
    parts = [
        piece.view(*values.shape[:-2], last - first, values.shape[-1])
        for piece, (first, last) in zip(buffer.split(sizes), rows, strict=True)
    ]
    return torch.cat(parts, -2).numpy()
