"""The asynchronous writer of checkpoints: tensors are copied at once, and a thread of each rank writes them to disk.

Every rank writes its files into a folder that has a temporary name until it is whole. The files are synced to disk and
hashed. Then rank 0 renames the folder and changes the links one by one.

If ranks have tensors of their own (momenta under votes), the renaming waits until all ranks have written. Each reports
this as one more number in the sum over ranks that every step makes. So no step waits for a disk, and the thread that
writes takes no part in collectives. Only before the next checkpoint and at the end do all ranks wait for the disk.

Files are safetensors and JSON. Reading them runs no code; reading the pickled metadata of torch.distributed.checkpoint
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
    BEFORE,
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

_HASH = ".sha256"  # suffix of the file with the hash of a rank's file, until the folder is whole


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The contents of the checkpoint of one step.

    Attributes:
        step: the step.
        state_dict: weights and buffers; tensors that nobody will change. Empty on ranks other than the first.
        training: what a resumed run needs besides. Empty on ranks other than the first.
        meta: contents of checkpoint.json, with `spec` (`ModelSpec.to_json`); format, step and hashes are added.
        own: tensors of this rank alone; None, on all ranks, if they have none.
        best: the link `best` shall lead here.
        before: the tournament that follows the step is still to come. Such a checkpoint has a folder of its own, beside
            which that of the state after the tournament can be written.
    """

    step: int
    state_dict: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    own: OwnState | None = None
    best: bool = False
    before: bool = False

    @property
    def name(self) -> str:
        """Return the name of the checkpoint's folder."""
        return f"{STEP}{self.step:08d}{BEFORE if self.before else ''}"


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint that needs one rank alone, and let `last` (and `best`) lead to it.

    Args:
        folder: the folder of checkpoints.
        snapshot: contents of the checkpoint.
    """
    partial = _partial(folder, snapshot)
    shutil.rmtree(partial, ignore_errors=True)
    return _finish(folder, snapshot, _write_common(partial, snapshot), None)


@dataclass(eq=False)
class _Pending:
    """A checkpoint that is being written, and the job of the thread that writes it."""

    snapshot: Snapshot
    job: Future[dict[str, str]] | Future[Path] | None


class Keeper:
    """The writer of a run's checkpoints on one rank of its job. All ranks call its methods at the same steps.

    Args:
        folder: the folder of checkpoints.
        world: all ranks that train these weights.
        minutes: longest time between checkpoints, by the first rank's clock; 0 for no limit.
        meet: returns when all ranks have called it, however long a disk takes. The default is a barrier, which gives up
            after some time.
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
        """Return True on the first rank."""
        return self._world.rank == 0

    @property
    def due(self) -> bool:
        """Return True if this rank's clock asks for a checkpoint; only the first rank's clock counts."""
        return self._first and bool(self._seconds) and time.monotonic() - self._last >= self._seconds

    @property
    def done(self) -> bool:
        """Return True if this rank has written everything it was given."""
        pending = self._pending
        return pending is None or pending.job is None or pending.job.done()

    def begin(self, snapshot: Snapshot) -> None:
        """Copy what a checkpoint needs, and start to write it while the training goes on.

        Args:
            snapshot: contents of the checkpoint.

        Raises:
            OSError: this checkpoint or the previous one cannot be written, for example because the disk is full.
        """
        self.finish()
        partial = _partial(self.folder, snapshot)
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)  # left by an earlier attempt at the same step
            partial.mkdir(parents=True)
        if snapshot.own is not None:
            self._world.barrier()  # no rank may write before the first rank has removed the old folder and made the new
            own = snapshot.own  # a rank that need not keep its tensors has none to copy
            snapshot = replace(snapshot, own=replace(own, tensors=copies(own.tensors) if own.keep else {}))
        self._pending = _Pending(snapshot, self._submit(partial, snapshot))
        self._last = time.monotonic()

    def follow(self, all_done: bool) -> None:
        """Rename the folder once every rank has written. Call this after every step.

        Args:
            all_done: every rank has written its files; all ranks must have agreed on it.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        pending = self._pending
        if self._renaming is not None and self._renaming.done():
            self._renaming.result()
        # Either there is nothing to rename, or some rank is still writing.
        if pending is None or pending.snapshot.own is None or not all_done:
            if pending is not None and pending.job is not None and pending.job.done():
                pending.job.result()  # raises an error now, and not only at the next checkpoint
                if pending.snapshot.own is None:
                    self._pending = None  # frees the copies of its tensors
            return
        self._rename(pending)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole. All ranks must call this at once.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        pending = self._pending
        if pending is not None:
            if pending.job is not None:
                pending.job.result()
            if pending.snapshot.own is not None:
                self._meet()  # returns when every rank has written
                self._rename(pending)
            self._pending = None
        if self._renaming is not None:
            self._renaming.result()
            self._renaming = None
        # The other ranks wait for the first one's disk here, and not in the next collective, which has a timeout.
        self._meet()

    def close(self) -> None:
        """Let the thread finish what it was given, and end it; also for a run that ends with an error."""
        self._threads.shutdown()

    def _submit(self, partial: Path, snapshot: Snapshot) -> Future[dict[str, str]] | Future[Path] | None:
        """Give the writing of a checkpoint to the thread; None on ranks that have nothing to write."""
        # Nothing is kept apart: the first rank writes, renames and changes the links in one go, and nobody has to
        # agree.
        if snapshot.own is None:
            return self._threads.submit(save_checkpoint, self.folder, snapshot) if self._first else None
        return self._threads.submit(_write_part, partial, snapshot, self._first)

    def _rename(self, pending: _Pending) -> None:
        """Let the first rank's thread rename the folder and change the links."""
        self._pending = None
        assert pending.job is not None
        files = pending.job.result()  # on every rank, so that one that could not write raises its error
        if self._first:
            assert isinstance(files, dict)
            own = pending.snapshot.own
            self._renaming = self._threads.submit(_finish, self.folder, pending.snapshot, files, own)


def _partial(folder: Path, snapshot: Snapshot) -> Path:
    """Return the temporary folder for a checkpoint."""
    return folder / f"{PARTIAL}{snapshot.name}"


def _write_part(partial: Path, snapshot: Snapshot, first: bool) -> dict[str, str]:
    """Write one rank's files of a checkpoint that several ranks write; return the hashes of the common files."""
    own = snapshot.own
    assert own is not None
    if own.keep:
        name = rank_file(own.rank)
        found = _write_tensors(partial / name, own.tensors)
        # The first rank needs this hash for checkpoint.json, and reads it from the folder.
        note = partial / f"{name}{_HASH}"
        note.write_text(found)
        sync(note)
    return _write_common(partial, snapshot) if first else {}


def _write_common(partial: Path, snapshot: Snapshot) -> dict[str, str]:
    """Write the files that all ranks have in common; return their hashes by name."""
    partial.mkdir(parents=True, exist_ok=True)
    parts = ((MODEL, snapshot.state_dict), (TRAINING, snapshot.training))
    return {name: _write_tensors(partial / name, tensors) for name, tensors in parts}


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, wait until it is on disk, and return its hash."""
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(file))
    except SafetensorError as error:  # it lacks the number and the path of the system's error
        raise _os_error(error, file) from error
    sync(file)
    return hash_file(file)


def _os_error(error: SafetensorError, file: Path) -> OSError:
    """Return the OSError that caused an error of safetensors."""
    # safetensors gives the number of a system error only within its message.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error), str(file))


def _other(final: Path, files: Mapping[str, str]) -> bool:
    """Return True if a checkpoint holds other tensors than `files`.

    Only the common files are compared. A run that is stopped at a step may write its checkpoint twice, and then perhaps
    the tensors of single ranks for the first time.
    """
    there = json.loads((final / META).read_text())["files"]
    return any(there.get(name) != files[name] for name in (MODEL, TRAINING))


def _finish(folder: Path, snapshot: Snapshot, files: dict[str, str], own: OwnState | None) -> Path:
    """Write the JSON, rename the folder, and change the links."""
    final = folder / snapshot.name
    partial = _partial(folder, snapshot)
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
        shutil.rmtree(final)  # left by a run that died between the rename and the change of the link
    # A step that is there already, and that a link leads to, is kept if it holds the same tensors.
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
