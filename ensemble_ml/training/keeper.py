"""Writes checkpoints asynchronously: tensors are copied at once, and a thread of each rank writes them to disk.

Every rank writes its files into a folder that has a temporary name until it is complete. The files are synced to disk
and hashed. Then rank 0 renames the folder and changes the links one by one.

If ranks have tensors of their own, such as momenta under votes, rank 0 renames only after all ranks have written. Each
rank reports this as one more number in the sum over ranks that every step makes. So no step waits for a disk, and the
writing threads take no part in collectives. All ranks wait for the disk only before the next checkpoint and at the end.

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
    FORMAT,
    META,
    MODEL,
    PARTIAL,
    TRAINING,
    clean,
    copies,
    digest,
    is_target,
    point,
    rank_file,
    step_name,
    sync,
)

_HASH = ".sha256"  # suffix of the file with the hash of a rank's file, until the folder is whole


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The contents of the checkpoint of one step.

    Attributes:
        step: the step.
        state_dict: weights and buffers, as tensors that nothing changes later. Empty on ranks other than the first.
        training: other tensors that a resumed run needs. Empty on ranks other than the first.
        meta: contents of checkpoint.json, with `spec` (`ModelSpec.to_json`); format, step and hashes are added.
        own: tensors of this rank alone; None on all ranks if no rank has any.
        best: let the link `best` point to this checkpoint, too.
        before: this is the state before the tournament at this step. Its folder has another name than that of the state
            after the tournament.
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
        return step_name(self.step, self.before)


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint without tensors of single ranks, let its links lead to it, and return its folder.

    Raises:
        OSError: the checkpoint cannot be written.
        UserError: the folder already has a checkpoint of this step with other weights.
    """
    partial = _partial(folder, snapshot)
    shutil.rmtree(partial, ignore_errors=True)
    return _finish(folder, snapshot, _write_common(partial, snapshot), None)


@dataclass(eq=False)
class _Pending:
    """A checkpoint that is being written, and the task of the thread that writes it."""

    snapshot: Snapshot
    job: Future[dict[str, str]] | Future[Path] | None


class Keeper:
    """The writer of a run's checkpoints on one rank of its job. All ranks call its methods at the same steps.

    Args:
        folder: the folder of checkpoints.
        world: all ranks that train these weights.
        minutes: longest time between checkpoints, by the first rank's clock; 0 for no limit.
        meet: returns when all ranks have called it, however long a disk takes. The default is a barrier, which has a
            timeout.
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
        """Return True if this rank has written all of its files, or has failed to."""
        pending = self._pending
        return pending is None or pending.job is None or pending.job.done()

    def begin(self, snapshot: Snapshot) -> None:
        """Wait for the previous checkpoint, copy this rank's own tensors, and start to write while training goes on.

        Raises:
            OSError: the previous checkpoint or the new folder cannot be written, for example because the disk is full.
            UserError: the previous checkpoint exists already, with other weights.
        """
        self.finish()
        partial = _partial(self.folder, snapshot)
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)  # left by an earlier attempt at the same step
            partial.mkdir(parents=True)
        if snapshot.own is not None:
            self._world.barrier()  # no rank may write before the first rank has made the new folder
            own = snapshot.own  # a rank that need not keep its tensors has none to copy
            snapshot = replace(snapshot, own=replace(own, tensors=copies(own.tensors) if own.keep else {}))
        self._pending = _Pending(snapshot, self._submit(partial, snapshot))
        self._last = time.monotonic()

    def follow(self, all_done: bool) -> None:
        """Rename the folder once every rank has written (`all_done`, equal on all ranks). Call this after every step.

        Raises:
            OSError: the checkpoint cannot be written.
            UserError: it exists already, with other weights.
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
        """Wait until the last checkpoint is complete. All ranks must call this together.

        Raises:
            OSError: the checkpoint cannot be written.
            UserError: it exists already, with other weights.
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
        """End the thread once it has written what it was given. Call this also if the run ends with an error."""
        self._threads.shutdown()

    def _submit(self, partial: Path, snapshot: Snapshot) -> Future[dict[str, str]] | Future[Path] | None:
        """Let the thread write a checkpoint. Return its task, or None on ranks that have nothing to write."""
        # If no rank has tensors of its own, the first rank writes and renames without waiting for the others.
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

    Only the common files are compared: a run that is stopped may write the checkpoint of its last step a second time,
    and the tensors of single ranks may be in only one of the two.
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
    before = {"before": True} if snapshot.before else {}  # so that `mend_links` knows its name
    meta = {"format": FORMAT, "step": snapshot.step, **before, **snapshot.meta, "files": files}
    meta["sha256"] = digest(meta)
    (partial / META).write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")
    sync(partial / META)
    sync(partial)
    if final.exists() and not is_target(folder, final.name):
        shutil.rmtree(final)  # left by a run that died between the rename and the change of the link
    # A checkpoint that a link points to is kept if it holds the same tensors.
    if not final.exists():
        os.rename(partial, final)
    elif _other(final, files):
        raise UserError(
            f"checkpoint {final}: exists already, with other weights: another process trains in this run; stop one of"
            " them, and choose another run=NAME for it"
        )
    sync(folder)
    for link in ("last", "best") if snapshot.best else ("last",):
        point(folder, link, final.name)
    clean(folder)
    return final
