"""A build of a store that may be interrupted, taken up again and shared: start date by start date, in any order.

Each finished date leaves its shards and one entry, both by rename, so that whatever is there is whole. A later run
passes over the dates whose entry and shards stand. Any number of builders may work at one store: a lock a date keeps
them apart. `finalise` merges the entries in the order of the dates, so the store does not depend on who built what.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.store.climate_arrays import write_climate
from ensemble_ml.store.date import DateWriter, refused
from ensemble_ml.store.entry import DateEntry
from ensemble_ml.store.finish import finish_store
from ensemble_ml.store.folder import building_folder, check_target, give_name, make_folders, named_already
from ensemble_ml.store.locks import claimed, exclusive, leads_to, shared
from ensemble_ml.store.metadata import plan_digest
from ensemble_ml.store.plan import FINGERPRINT, BuildPlan, read_facts
from ensemble_ml.store.sources import changed

_AT_WORK = "at-work.lock"  # shared by all who have a claim: one file to try where a build is to be thrown away
_SEEN_WITHIN = 3.0  # seconds that a name may take to be seen by all hosts


class Build:
    """The build of the store at `path`, begun or taken up again.

    Args:
        path: the store to make.
        plan: what it will hold.
        overwrite: replace a store that stands at `path`; it stays as it is until the new one is complete.
        restart: throw away an unfinished build.
        work: the folder to build in; by default the one that all builders of that store share.

    Raises:
        UserError: something stands at `path` that may not be replaced; an unfinished build has another plan; or the
            folder cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        plan: BuildPlan,
        *,
        overwrite: bool = False,
        restart: bool = False,
        work: Path | None = None,
    ):
        path = Path(path).absolute()
        path = path.resolve() if path.is_symlink() else path  # a link goes on leading to the store
        self.path, self.plan, self._overwrite = path, plan, overwrite
        self.work, self.shared = work or building_folder(self.path), work is None
        self.complete = False  # whether the store has its name
        self.outdated: dict[str, set[int]] = {}  # files that changed since start dates were built from them
        self.superseded: set[int] = set()  # start dates that were built from other fields than the archive has by now
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._source_changed = False
        if restart:
            self._throw_away()
        if named_already(self.work, self.path):
            plan_file = self.work / "plan.json"
            self.complete = plan_file.exists() and plan.differs(read_facts(plan_file)) is None
            self.remove()
            if self.complete:
                return
        self._join(overwrite)

    def _join(self, overwrite: bool) -> None:
        """Make the work folder, or find it made; begin again where another builder finished and tidied it away."""
        while True:
            check_target(self.path, overwrite)
            make_folders(self.work, self.path)
            with suppress(FileNotFoundError), exclusive(self.work / "lock") as held:
                if leads_to(self.work / "lock", held):
                    return self._agree()
            # While we waited for it, another builder finished: it may have built what we were to.
            if plan_digest(self.path) == self.plan.digest and not self.unfinished(self.path):
                self.complete = True
                self.remove()
                return

    def _agree(self) -> None:
        """Write the plan down, or check that the one that stands there is ours."""
        file = self.work / "plan.json"
        if file.exists():
            before = read_facts(file)
            difference = self.plan.differs(before)
            if difference:
                raise UserError(
                    f"output={self.path}: an unfinished build has other settings ({difference}); "
                    "give the same to go on, or add restart=true to throw it away"
                )
            if before.get(FINGERPRINT) == self.plan.facts.get(FINGERPRINT):
                return
            self._source_changed = True
        write_whole(file, json.dumps(self.plan.facts))

    @staticmethod
    def unfinished(path: Path) -> bool:
        """Whether a build of the store at `path` has been begun."""
        return (building_folder(path) / "plan.json").exists()

    @property
    def _changed(self) -> str:
        return (
            f"output={self.path}: the archive has changed since this run began, and another builder goes on with it"
            " as it is by now; run again"
        )

    @property
    def dates(self) -> int:
        """Number of start dates."""
        return len(self.plan.layout.init_time)

    @property
    def store(self) -> Path:
        """The folder that will be the store."""
        return self.work / "store"

    def entry_file(self, date: int) -> Path:
        """Where the entry of a start date stands."""
        return self.work / "entries" / f"{date:06d}.npz"

    def done(self, date: int) -> bool:
        """Whether a start date is finished: an entry of this plan and of the fields that the archive has by now, all
        shards with their sizes, no source changed."""
        file = self.entry_file(date)
        if not file.exists():
            return False
        try:
            files, stamps, plan, fingerprint = DateEntry.files_of(file)
        except UserError:
            return False
        if plan != self.plan.of_date(date):
            return False
        others = list(changed(stamps, self._stamps, lost=self._source_changed))
        for path in others:
            self.outdated.setdefault(path, set()).add(date)
        if others or (fingerprint != self.plan.facts.get(FINGERPRINT) and self._other_fields(date)):
            return False
        return all(_size(self.store / name) == entry.bytes for name, entry in files.items())

    def _other_fields(self, date: int) -> bool:
        """Whether an entry was made of other fields than would be read now: an archive that grew may have better ones.

        Raises:
            UserError: the newer archive is another builder's; each would build again what the other has built.
        """
        if self.plan.reads is None:
            return False
        sources = DateEntry.load(self.entry_file(date)).sources
        if {part: one.fields() for part, one in sources.items()} == self.plan.reads(date):
            return False
        plan_file = self.work / "plan.json"
        if plan_file.exists() and read_facts(plan_file).get(FINGERPRINT) != self.plan.facts.get(FINGERPRINT):
            raise UserError(self._changed)
        self.superseded.add(date)
        return True

    def missing(self, dates: Iterable[int] | None = None) -> list[int]:
        """The start dates, of all or of `dates`, that are not finished; none once the store has its name.

        Files are looked at anew: `outdated` are those that have changed by now, `superseded` the dates that the archive
        has other fields for.
        """
        self._stamps.clear()
        self.outdated.clear()
        self.superseded.clear()
        found = [date for date in (range(self.dates) if dates is None else dates) if not self.done(date)]
        return [] if found and self.over else found  # in this order: shards leave the work folder with the store

    @property
    def over(self) -> bool:
        """Whether a builder has given the store its name, and tidies up or has done so."""
        return not (self.work / "plan.json").exists() or named_already(self.work, self.path)

    @contextmanager
    def claim(self, date: int) -> Iterator[bool]:
        """Try to have a start date for oneself; whether it is ours to build (nobody has it, and it is not done)."""
        with ExitStack() as stack:
            try:
                stack.enter_context(shared(self.work / _AT_WORK))
                held = stack.enter_context(claimed(self.work / "claims" / f"{date:06d}"))
            except FileNotFoundError as error:
                if not self._named_within(_SEEN_WITHIN):
                    where = f"{self.work} is not there on {socket.gethostname()}"
                    raise UserError(f"output={self.path}: {where}; give a folder that all workers share") from error
                held = False  # another builder has finished the store
            yield held and not self.done(date) and not self.over

    def _named_within(self, seconds: float) -> bool:
        """Whether the store of this plan stands at its name; a file system on the network may show it late."""
        latest = time.monotonic() + seconds
        while plan_digest(self.path) != self.plan.digest:
            if time.monotonic() > latest:
                return False
            time.sleep(0.1)
        return True

    @contextmanager
    def date(self, date: int, pool: ThreadPoolExecutor) -> Iterator[DateWriter]:
        """Build one start date; its entry is written when all went well, and nothing of it is left else."""
        writer = DateWriter(self.store, self.plan.layout, self.plan.specs, date, pool)
        try:
            yield writer
            entry = writer.close()
            entry.plan, entry.fingerprint = self.plan.of_date(date), self.plan.facts.get(FINGERPRINT)
            entry.save(self.entry_file(date))
        except OSError as error:
            raise refused(self.store, error.filename or f"start date {date}", error) from error
        finally:
            writer.abort()

    def finalise(self) -> Path:
        """Make the store of its dates, and give it its name; only one builder does it, the others find it done.

        Raises:
            UserError: no field was written, or something else stands at its name now.
        """
        try:
            with exclusive(self.work / "lock"):
                if self.complete or self._finished_by_another():
                    return self.path
                now = read_facts(self.work / "plan.json") if self.shared else self.plan.facts
                if now.get(FINGERPRINT) != self.plan.facts.get(FINGERPRINT):
                    raise UserError(self._changed)  # dates that are done for us may be another's to build again
                self._finish()
                give_name(self.work, self.path, self._overwrite)
                self.complete = True
                self.remove()
        except FileNotFoundError:
            if not self._finished_by_another():
                raise
        return self.path

    def _finish(self) -> None:
        left = self.missing() if self.shared else []
        if left:
            raise UserError(f"output={self.path}: {len(left)} of {self.dates} start dates are not built yet")
        try:
            finish_store(self.store, self.plan, self._entries())
            if self.plan.climate_days:
                write_climate(self.store, self.plan.climate_days)
        except OSError as error:
            raise refused(self.store, error.filename or "metadata", error) from error

    def _finished_by_another(self) -> bool:
        """Whether another builder has given the store its name while we waited; where it died then, tidy up for it."""
        if not self.over:
            return False
        if not self.path.exists():
            raise UserError(f"output={self.path}: somebody removed its unfinished build; start anew")
        self.complete = True
        if named_already(self.work, self.path):
            self.remove()
        return True

    def _entries(self) -> Iterator[tuple[int, DateEntry]]:
        for date in range(self.dates):
            file = self.entry_file(date)
            if file.exists():
                try:
                    entry = DateEntry.load(file)
                except UserError as error:
                    if isinstance(error.__cause__, OSError):  # the system does not give it, which may pass
                        raise
                    file.unlink(missing_ok=True)
                    raise UserError(f"{file}: damaged ({error.__cause__}); the same command makes it anew") from error
                yield date, entry

    def discard(self) -> None:
        """Remove an unfinished build of which no start date is done, unless another builder is at work on it."""
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.work / "lock"))
                alone = stack.enter_context(claimed(self.work / _AT_WORK))
            except FileNotFoundError:
                return
            if alone and not any((self.work / "entries").glob("*.npz")):
                self.remove()

    def _throw_away(self) -> None:
        """Remove an unfinished build, whatever is done of it.

        Raises:
            UserError: another builder is at work on it; it would write into ours.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.work / "lock"))
                alone = stack.enter_context(claimed(self.work / _AT_WORK))
            except FileNotFoundError:
                alone = True
            if not alone:
                raise UserError(f"output={self.path}: another builder is at work on it; stop it before restart=true")
            self.remove()

    def remove(self) -> None:
        """Remove the work folder; what says that the store has its name goes last, after the plan."""
        for name in ("store", "entries", "claims"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        (self.work / "plan.json").unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
