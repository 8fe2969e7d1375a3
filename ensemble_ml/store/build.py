"""Build a store init time by init time, in any order, so that the build can be interrupted, continued and shared.

Each finished init time leaves its shards and one entry. Both are written by rename, so every file that exists is
complete. A later run skips the init times whose entry and shards are there. Any number of builders may work on one
store at the same time: a lock for each init time keeps them apart. `finalise` merges the entries in the order of the
init times, so the store does not depend on who built which. It then writes everything but the shards: arrays, packing
factors, statistics, attributes, sources, the model climate if there is one, and the manifest.
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
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.store.climate import write_climate
from ensemble_ml.store.date import DateEntry, DateWriter, refused
from ensemble_ml.store.factors import dates_together, write_factors
from ensemble_ml.store.folder import (
    building_folder,
    check_target,
    claimed,
    exclusive,
    give_name,
    leads_to,
    make_folders,
    named_already,
    private_folder,
    shared,
)
from ensemble_ml.store.manifest import Entry, SourceTable, changed, make_manifest, write_manifest
from ensemble_ml.store.metadata import create_arrays, plan_digest, write_metadata
from ensemble_ml.store.plan import FINGERPRINT, BuildPlan, read_facts
from ensemble_ml.store.schema import PLAN_KEY, Kind
from ensemble_ml.store.source import Part
from ensemble_ml.store.statistics import Moments, stack

_AT_WORK = "at-work.lock"  # runs and claims share it, so one attempt to lock it alone shows whether any is at work
_SEEN_WITHIN = 3.0  # seconds until all hosts see a new name on a network file system


class Build:
    """The build of the store at `path`, started or continued.

    Args:
        path: The store to make.
        plan: Plan of its contents.
        overwrite: Whether to replace a store that stands at `path`. It stays as it is until the new one is complete.
        restart: Whether to throw away an unfinished build.
        private: Whether to build in a folder of this process alone, and not in the one that all builders of this store
            share.

    Raises:
        UserError: Something stands at `path` that may not be replaced, an unfinished build has another plan, the folder
            cannot be written or has no locks, or `restart` is on while another builder is at work.
    """

    def __init__(
        self,
        path: str | Path,
        plan: BuildPlan,
        *,
        overwrite: bool = False,
        restart: bool = False,
        private: bool = False,
    ):
        path = Path(path).absolute()
        path = path.resolve() if path.is_symlink() else path  # keep the link, and replace the store behind it
        self.path, self.plan, self._overwrite = path, plan, overwrite
        self.work, self.shared = (private_folder if private else building_folder)(self.path), not private
        self.complete = False  # whether the finished store stands at `path`
        self.outdated: dict[str, set[int]] = {}  # files that changed since init times were built from them
        self.superseded: set[int] = set()  # init times for which the archive now has other fields
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._source_changed = False
        if restart:
            self._throw_away()
        if named_already(self.work, self.path):
            self.complete = (self.work / "plan.json").exists() and plan_digest(self.path) == plan.digest
            self.remove()
            if self.complete:
                return
        self._join()

    def _join(self) -> None:
        """Make or find the work folder, and agree on the plan with the other builders.

        Another builder may finish and remove the folder at this moment; then the loop starts again.
        """
        while True:
            check_target(self.path, self._overwrite)
            make_folders(self.work, self.path)
            # The lock counts only if its file still exists: a builder that finished may have removed the folder between
            # the two calls.
            with suppress(FileNotFoundError), exclusive(self.work / "lock") as held:
                if leads_to(self.work / "lock", held):
                    return self._agree()
            # Another builder finished while this one waited for the lock. It may have built the same store.
            if plan_digest(self.path) == self.plan.digest and not self.unfinished(self.path):
                self.complete = True
                self.remove()
                return

    def _agree(self) -> None:
        """Write the plan, or check that the plan of an unfinished build is the same.

        If only the archive's fingerprint differs, the plan of this run replaces the other.

        Raises:
            UserError: The unfinished build has other settings, or its plan cannot be read.
        """
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
        """Return whether a build of the store at `path` has been started and not finished."""
        return (building_folder(path) / "plan.json").exists()

    @property
    def _changed(self) -> str:
        """Return the message for the case that the archive has changed and another builder uses its new state."""
        return (
            f"output={self.path}: the archive has changed since this run began, and another builder uses its new state;"
            " run again"
        )

    @property
    def dates(self) -> int:
        """Return the number of init times."""
        return len(self.plan.layout.init_time)

    @property
    def store(self) -> Path:
        """Return the folder that will be renamed to `path`."""
        return self.work / "store"

    def entry_file(self, date: int) -> Path:
        """Return the path of the entry of an init time."""
        return self.work / "entries" / f"{date:06d}.npz"

    def done(self, date: int) -> bool:
        """Return whether an init time is finished.

        It is finished if its entry belongs to this plan and to the fields that the archive holds now, no source file
        has changed, and all its shards are there with their sizes.

        Raises:
            UserError: The archive has changed, and another builder uses its new state.
        """
        try:
            files, stamps, plan, fingerprint = DateEntry.files_of(self.entry_file(date))
        except UserError:  # there is no entry, or it is damaged
            return False
        if plan != self.plan.of_date(date):
            return False
        # A complete shard may come from a source file that has changed since; then its init time is built again.
        others = list(changed(stamps, self._stamps, lost=self._source_changed))
        for path in others:
            self.outdated.setdefault(path, set()).add(date)
        if others or (fingerprint != self.plan.facts.get(FINGERPRINT) and self._other_fields(date)):
            return False
        return all(_size(self.store / name) == entry.bytes for name, entry in files.items())

    def _other_fields(self, date: int) -> bool:
        """Return whether an entry was made from other fields than would be read now, as an archive may have grown.

        Raises:
            UserError: Another builder uses a newer state of the archive; each would rebuild what the other has built.
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
        """Return the init times that are not finished; none once the finished store stands at `path`.

        All files are checked again. Afterwards, `outdated` holds the source files that have changed, and `superseded`
        the init times for which the archive has other fields. `dates` are the init times to check; None checks all.

        Raises:
            UserError: The archive has changed, and another builder uses its new state.
        """
        self._stamps.clear()
        self.outdated.clear()
        self.superseded.clear()
        found = [date for date in (range(self.dates) if dates is None else dates) if not self.done(date)]
        # `over` must be asked after the shards were checked: they leave the work folder with the rename of the store,
        # and would seem to be missing.
        return [] if found and self.over else found

    @property
    def over(self) -> bool:
        """Return whether the build is over: a builder has renamed the finished store, or the plan is gone.

        The builder that renamed the store may still be tidying up.
        """
        return not (self.work / "plan.json").exists() or named_already(self.work, self.path)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep other builders from removing the build for the duration of a `with` block.

        If one has just removed it, it is started again. If one has just finished the store, `complete` is set.

        Raises:
            UserError: As in `Build`.
        """
        with ExitStack() as stack:
            while not self.complete:
                with suppress(FileNotFoundError):
                    held = stack.enter_context(shared(self.work / _AT_WORK))
                    if leads_to(self.work / _AT_WORK, held):
                        break
                stack.close()
                self._join()
            yield

    @contextmanager
    def claim(self, date: int) -> Iterator[bool]:
        """Try to claim an init time.

        Yields:
            Whether this builder shall build the date: no other builder holds it, and it is not finished.

        Raises:
            UserError: The work folder is not there, so the builders do not share it; its file system has no locks; or
                the archive has changed, and another builder uses its new state.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(shared(self.work / _AT_WORK))
                held = stack.enter_context(claimed(self.work / "claims" / f"{date:06d}"))
            except FileNotFoundError as error:
                if not self._named_in_time():
                    where = f"{self.work} is not there on {socket.gethostname()}"
                    raise UserError(f"output={self.path}: {where}; give a folder that all workers share") from error
                held = False  # another builder has finished the store and removed the work folder
            yield held and not self.done(date) and not self.over

    def _named_in_time(self) -> bool:
        """Wait at most `_SEEN_WITHIN` seconds until the store of this plan stands at `path`; return whether it does.

        A network file system may show the new name late.
        """
        latest = time.monotonic() + _SEEN_WITHIN
        while plan_digest(self.path) != self.plan.digest:
            if time.monotonic() > latest:
                return False
            time.sleep(0.1)
        return True

    @contextmanager
    def date(self, date: int, pool: ThreadPoolExecutor) -> Iterator[DateWriter]:
        """Build one init time with the writer that is yielded. The threads of `pool` compress.

        Its entry is written only if everything went well. Otherwise its half-written files are removed.

        Raises:
            UserError: The system cannot write a file.
        """
        writer = DateWriter(self.store, self.plan.layout, self.plan.specs, date, pool)
        try:
            yield writer
            entry = writer.close()
            entry.plan, entry.fingerprint = self.plan.of_date(date), self.plan.facts.get(FINGERPRINT)
            entry.save(self.entry_file(date))
        except OSError as error:
            raise refused(self.store, error.filename or f"init time {date}", error) from error
        finally:
            writer.abort()

    def finalise(self) -> Path:
        """Make the store from its init times, rename it to `path`, and return `path`.

        Only one builder does so; the others find it done.

        Raises:
            UserError: An init time is missing or its entry is damaged, no field was written, a file cannot be written,
                the archive has changed, something else stands at `path` now, or somebody removed the work folder.
        """
        try:
            # The lock lets one builder finish. The others wait here and then find the store complete.
            with exclusive(self.work / "lock"):
                if self.complete or self._finished_by_another():
                    return self.path
                now = read_facts(self.work / "plan.json") if self.shared else self.plan.facts
                if now.get(FINGERPRINT) != self.plan.facts.get(FINGERPRINT):
                    raise UserError(self._changed)  # the other builder may yet rebuild dates that seem finished here
                self._finish()
                give_name(self.work, self.path, self._overwrite)
                self.complete = True
                self.remove()
        except FileNotFoundError:
            if not self._finished_by_another():
                raise
        return self.path

    def _finish(self) -> None:
        """Write all but the shards, with the model climate if the plan has one; refuse if init times are missing."""
        left = self.missing() if self.shared else []
        if left:
            raise UserError(f"output={self.path}: {len(left)} of {self.dates} init times are not built yet")
        try:
            finish_store(self.store, self.plan, self._entries())
            if self.plan.climate_days:
                write_climate(self.store, self.plan.climate_days)
        except OSError as error:
            raise refused(self.store, error.filename or "metadata", error) from error

    def _finished_by_another(self) -> bool:
        """Return whether the build is over and the store of this plan stands at `path`.

        If the builder that finished it died before it could tidy up, this one does so. A UserError is raised if the
        work folder is gone and the store is not there.
        """
        if not self.over:
            return False
        if not self._named_in_time():
            raise UserError(f"output={self.path}: somebody removed its unfinished build; start anew")
        self.complete = True
        if named_already(self.work, self.path):
            self.remove()
        return True

    def _entries(self) -> Iterator[tuple[int, DateEntry]]:
        """Yield the entries of the init times, in order. Remove a damaged one, so that the next run builds it again."""
        for date in range(self.dates):
            file = self.entry_file(date)
            if file.exists():
                try:
                    entry = DateEntry.load(file)
                except UserError as error:
                    if isinstance(error.__cause__, OSError):  # the system cannot read it now, which may pass
                        raise
                    file.unlink(missing_ok=True)
                    raise UserError(f"{file}: damaged ({error.__cause__}); run the same command again") from error
                yield date, entry

    @contextmanager
    def _alone(self) -> Iterator[bool | None]:
        """Hold the lock of the build, and yield whether no builder is at work on it; None without a work folder."""
        with ExitStack() as stack:
            alone: bool | None = None
            with suppress(FileNotFoundError):
                stack.enter_context(exclusive(self.work / "lock"))
                alone = stack.enter_context(claimed(self.work / _AT_WORK))
            yield alone

    def discard(self) -> None:
        """Remove an unfinished build if no init time is finished and no other builder is at work on it."""
        with self._alone() as alone:
            if alone and not any((self.work / "entries").glob("*.npz")):
                self.remove()

    def _throw_away(self) -> None:
        """Remove an unfinished build, even if init times are finished; refuse if another builder is at work on it."""
        with self._alone() as alone:
            if alone is False:
                raise UserError(f"output={self.path}: another builder is at work on it; stop it before restart=true")
            self.remove()

    def remove(self) -> None:
        """Remove the work folder.

        Store, entries and claims go first, then the plan, then the rest with `swap.json`. So while the plan exists,
        `swap.json` shows the next builder whether the finished store stands at `path`.
        """
        for name in ("store", "entries", "claims"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        (self.work / "plan.json").unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)


def _size(path: Path) -> int:
    """Return the size of a file in bytes, or -1 if it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def finish_store(root: Path, plan: BuildPlan, entries: Iterable[tuple[int, DateEntry]]) -> None:
    """Write everything but the shards into `root`, and remove shards that no entry names.

    All other files that stand there are removed first, so this may be called again after an interruption. `entries` are
    pairs of the index of an init time and its entry, in ascending order.

    Raises:
        UserError: There is no field at all.
        OSError: A file cannot be written.
    """
    specs = list(plan.specs.values())
    _clear(root)
    create_arrays(root, specs)
    years = plan.layout.init_time.astype("datetime64[Y]").astype(int) + 1970
    together, total = (dates_together(specs) if specs else 1), _Sum()
    for date, entry in write_factors(root, specs, entries, together):
        total.add(entry, plan, int(years[date]))
        total.sources.add(str(plan.layout.init_time[date].astype("datetime64[m]")), entry.sources)
    if not total.whole.files:
        raise UserError(f"store {root}: nothing was written; the input holds no field that was asked for")
    # Masks are known only now: an array gets one only where a field of it has points without a value.
    create_arrays(root, [spec.mask for spec in specs if spec.mask.name in total.whole.masks])
    attributes = {
        "packing": plan.packing.value,
        "parts": [part.value for part in plan.parts],
        "held": [part.value for part in plan.parts if part in total.held],
        "factor_dates": together,
        "lead_bounds": plan.lead_bounds,
        "masked": [name for name in plan.layout.names if name in total.whole.masked],
        "quantisation_error": dict(sorted(total.whole.errors.items())),
        "provenance": plan.provenance,
        PLAN_KEY: plan.digest,
    }
    unique = np.unique(years)
    write_metadata(root, plan.layout, attributes, plan.static, (unique, _yearly(plan, unique, total)))
    total.sources.write(root)
    _remove_strangers(root, total.whole.files)
    write_manifest(root, make_manifest(root, total.whole.files))


@dataclass
class _Sum:
    """The sum of the entries of all init times. The moments of a year are merged in the order of the dates."""

    whole: DateEntry = field(default_factory=DateEntry)  # of all init times only in files, errors, masked and masks
    held: set[Part] = field(default_factory=set)
    moments: dict[tuple[Part, Kind, int], Moments] = field(default_factory=dict)
    sources: SourceTable = field(default_factory=SourceTable)

    def add(self, entry: DateEntry, plan: BuildPlan, year: int) -> None:
        """Add one entry, whose init time lies in `year`."""
        self.whole.add(entry)
        for (part, _), spec in plan.specs.items():
            if spec.name in entry.factors and entry.factors[spec.name]["present"].any():
                self.held.add(part)
        of_members = {(Part.FORECAST, kind): moments for kind, moments in entry.moments.items()}
        for key, moments in {**of_members, **entry.derived}.items():
            before = self.moments.get((*key, year))
            self.moments[(*key, year)] = moments if before is None else before.merge(moments)


def _yearly(plan: BuildPlan, years: np.ndarray, total: _Sum) -> dict[tuple[Part, Kind], Moments]:
    """Return by part and kind the moments of each of `years`, stacked along a first axis.

    The parts are the members' values, the fields of the ensemble mean, and the fields of the spread. A year without
    values has the moments of nothing.
    """
    yearly = {}
    for part, kind in product((Part.FORECAST, Part.MEAN, Part.SPREAD), Kind):
        spec = plan.specs.get((part, kind))
        if spec is not None:
            nothing = Moments.nothing(spec.fields[1:])
            yearly[part, kind] = stack(total.moments.get((part, kind, int(year)), nothing) for year in years)
    return yearly


def _clear(root: Path) -> None:
    """Remove everything that an interrupted call has left, except shards."""
    for path in list(root.iterdir()):
        if path.is_file():
            path.unlink()
        elif not any(item.name.startswith("c.") for item in path.iterdir()):
            shutil.rmtree(path)
        else:
            for item in list(path.iterdir()):
                if not item.name.startswith("c."):  # metadata, drafts of it (zarr-python's *.partial) and of shards
                    item.unlink()


def _remove_strangers(root: Path, files: dict[str, Entry]) -> None:
    """Remove shards that no entry names; killed builders have left them."""
    for path in root.glob("*/*"):
        if path.name.startswith("c.") and path.relative_to(root).as_posix() not in files:
            path.unlink()
