"""Writes checkpoints beside the training: the tensors are copied at once, a thread of each rank brings them to disk.

Every rank writes its own files into a folder that has another name until it is whole: synced to disk, hashed, and
renamed by rank 0, which then exchanges the links one by one. Where ranks hold tensors apart (momenta under votes), that
waits until all of them have written; each says so in the sum that a step makes anyway, so no step waits for a disk, and
the thread that writes takes no part in collectives. Before the next checkpoint and at the end all wait for the disk.
Files are safetensors and JSON: reading them runs no code, which the pickled metadata of torch.distributed.checkpoint
would.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ensemble_ml.distributed import Communicator, NullCommunicator
from ensemble_ml.distributed.choice import OwnState
from ensemble_ml.errors import UserError
from ensemble_ml.store.manifest import hash_file
from ensemble_ml.training.checkpoint import (
    FORMAT,
    META,
    MODEL,
    PARTIAL,
    STEP,
    TRAINING,
    clean,
    copies,
    digest,
    is_target,
    point,
    rank_file,
    sync,
)

_HASH = ".sha256"  # beside a rank's file until the folder is whole


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a checkpoint of `step` holds.

    Attributes:
        state_dict, training, meta: see `checkpoint`; tensors that nothing changes any more; empty on ranks other than
            the first. `meta` holds `spec` (`ModelSpec.to_json`); format, step and hashes are added.
        own: what this rank holds apart; None where ranks hold all in common, the same on every rank.
        best: whether `best` is to lead here.
    """

    step: int
    state_dict: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    own: OwnState | None = None
    best: bool = False


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write the checkpoint of one rank under `folder`, point `last` (and `best`) to it, and return its folder."""
    partial = _partial(folder, snapshot.step)
    shutil.rmtree(partial, ignore_errors=True)
    return _finish(folder, snapshot, _write_common(partial, snapshot))


@dataclass(eq=False)
class _Pending:
    snapshot: Snapshot
    job: Future[dict[str, str]] | Future[Path] | None


class Keeper:
    """The checkpoints of a run, on one rank of its job; all ranks call its methods at the same steps.

    Args:
        folder: of the checkpoints.
        world: all ranks that train these weights.
        minutes: longest time between checkpoints, by the first rank's clock; 0 has no limit.
        meet: returns when all ranks have called it, however long a disk takes; by default a barrier, which gives up.
    """

    def __init__(
        self,
        folder: Path,
        world: Communicator | None = None,
        minutes: float = 0.0,
        meet: Callable[[], None] | None = None,
    ):
        self.folder, self._world, self._seconds = folder, world or NullCommunicator(), 60 * minutes
        self._meet = meet or self._world.barrier
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self._renaming: Future[Path] | None = None
        self._last = time.monotonic()

    @property
    def _first(self) -> bool:
        return self._world.rank == 0

    @property
    def due(self) -> bool:
        """Whether this rank's clock asks for a checkpoint; only the first rank's counts."""
        return self._first and bool(self._seconds) and time.monotonic() - self._last >= self._seconds

    @property
    def done(self) -> bool:
        """Whether this rank has written all that it was given."""
        pending = self._pending
        return pending is None or pending.job is None or pending.job.done()

    def begin(self, snapshot: Snapshot) -> None:
        """Copy what a checkpoint needs, and write it while the training goes on.

        Raises:
            OSError: of this checkpoint or the one before: the disk is full, and the like.
        """
        self.finish()
        partial = _partial(self.folder, snapshot.step)
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)  # of a step that is trained once more
            partial.mkdir(parents=True)
        if snapshot.own is not None:
            self._world.barrier()  # the folder is there, and the first rank has cleared away the one before
            snapshot = replace(snapshot, own=_copied(snapshot.own))
        self._pending = _Pending(snapshot, self._submit(partial, snapshot))
        self._last = time.monotonic()

    def follow(self, all_done: bool) -> None:
        """Rename the folder once every rank has written; `all_done` was agreed on by all ranks.

        Raises:
            OSError: as `begin`.
        """
        pending = self._pending
        if self._renaming is not None and self._renaming.done():
            self._renaming.result()
        if pending is None or pending.snapshot.own is None or not all_done:
            if pending is not None and pending.job is not None and pending.job.done():
                pending.job.result()  # says at this step, not at the next checkpoint, that the disk is full
                if pending.snapshot.own is None:
                    self._pending = None  # with its tensors
            return
        self._rename(pending)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole; for all ranks at once.

        Raises:
            OSError: as `begin`.
        """
        pending = self._pending
        if pending is not None:
            if pending.job is not None:
                pending.job.result()
            if pending.snapshot.own is not None:
                self._meet()  # every rank has written
                self._rename(pending)
            self._pending = None
        if self._renaming is not None:
            self._renaming.result()
            self._renaming = None
        self._meet()  # the first rank's disk is waited for here, not in the next collective, whose patience has an end

    def close(self) -> None:
        """Let the thread write what it was given, and end it; for a run that ends by an error, too."""
        self._threads.shutdown()

    def _submit(self, partial: Path, snapshot: Snapshot) -> Future[dict[str, str]] | Future[Path] | None:
        if snapshot.own is None:
            return self._threads.submit(save_checkpoint, self.folder, snapshot) if self._first else None
        return self._threads.submit(_write_part, partial, snapshot, self._first)

    def _rename(self, pending: _Pending) -> None:
        self._pending = None
        assert pending.job is not None
        files = pending.job.result()  # on every rank: one that could not write says so
        if self._first:
            assert isinstance(files, dict)
            own = pending.snapshot.own
            self._renaming = self._threads.submit(_finish, self.folder, pending.snapshot, files, own)


def _copied(own: OwnState) -> OwnState:
    return replace(own, tensors=copies(own.tensors) if own.keep else {})


def _partial(folder: Path, step: int) -> Path:
    return folder / f"{PARTIAL}{STEP}{step:08d}"


def _write_part(partial: Path, snapshot: Snapshot, first: bool) -> dict[str, str]:
    """Write one rank's files of a checkpoint that several ranks write; returns the hashes of the common ones."""
    own = snapshot.own
    assert own is not None
    if own.keep:
        name = rank_file(own.rank)
        found = _write_tensors(partial / name, own.tensors)
        note = partial / f"{name}{_HASH}"
        note.write_text(found)
        sync(note)
    return _write_common(partial, snapshot) if first else {}


def _write_common(partial: Path, snapshot: Snapshot) -> dict[str, str]:
    partial.mkdir(parents=True, exist_ok=True)
    parts = ((MODEL, snapshot.state_dict), (TRAINING, snapshot.training))
    return {name: _write_tensors(partial / name, tensors) for name, tensors in parts}


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(file))
    except SafetensorError as error:  # which has neither number nor path of the system's error
        raise _os_error(error, file) from error
    sync(file)
    return hash_file(file)


def _os_error(error: SafetensorError, file: Path) -> OSError:
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error), str(file))


def _other(final: Path, files: Mapping[str, str]) -> bool:
    """Whether a checkpoint holds other tensors than `files`; a run that is stopped at a step may write it twice, and
    then perhaps what ranks hold apart for the first time."""
    there = json.loads((final / META).read_text())["files"]
    return any(there.get(name) != files[name] for name in (MODEL, TRAINING))


def _finish(folder: Path, snapshot: Snapshot, files: dict[str, str], own: OwnState | None = None) -> Path:
    """Describe what was written, rename its folder, and exchange the links."""
    final = folder / f"{STEP}{snapshot.step:08d}"
    partial = _partial(folder, snapshot.step)
    for rank in range(own.ranks if own is not None else 0):
        note = partial / f"{rank_file(rank)}{_HASH}"
        files[rank_file(rank)] = note.read_text()
        note.unlink()
    meta = {"format": FORMAT, "step": snapshot.step, **snapshot.meta, "files": files}
    meta["sha256"] = digest(meta)
    (partial / META).write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")
    sync(partial / META)
    sync(partial)
    if final.exists() and not is_target(folder, final.name):
        shutil.rmtree(final)  # left by a run that died between the rename and the exchange of the link
    if not final.exists():
        os.rename(partial, final)
    elif _other(final, files):
        raise UserError(
            f"checkpoint {final}: is there, with other weights: another process trains in this run; stop one of them,"
            " and choose another run=NAME for it"
        )
    sync(folder)
    for link in ("last", "best") if snapshot.best else ("last",):
        point(folder, link, final.name)
    clean(folder)
    return final
