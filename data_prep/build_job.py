"""Build one init time of a tensor store: read its fields slice by slice, and hand them to the store."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.archive import ArchiveSource, open_archive
from data_prep.catalogue import Catalogue
from data_prep.file_index import FileIndex
from data_prep.gaps import Gap, holes, kept_gaps, settle
from data_prep.gathered import Allocate, Gathered, zeros
from data_prep.geometry import GridChange, as_change
from data_prep.identity import Overrides
from data_prep.pairs import Pair, pair
from data_prep.selecting import slices_of
from data_prep.truth import ArchiveTruth
from ensemble_ml.config import Gaps, Packing, PrepareConfig, as_list, shown_input
from ensemble_ml.store import Part, Selection, is_store, open_store
from ensemble_ml.store.build import Build
from ensemble_ml.store.date import AHEAD, DateWriter
from ensemble_ml.store.manifest import Sources
from ensemble_ml.store.plan import BuildPlan
from ensemble_ml.store.schema import Kind
from ensemble_ml.wording import date_text

log = logging.getLogger(__name__)

# Limits for archives that are read by URL, where each answer takes long.
_SLICES_AHEAD, _BYTES_AHEAD = 24, 512 << 20  # slices of a part that are requested ahead, and their bytes
_READS, _DATES_AHEAD = 16, 8  # slices of all init times that are read at a time, and init times under way
_KEPT = ("variables", "levels", "leads", "dates", "region", "coarsen", "regrid")


class _Buffers(threading.local):
    """Arrays for the slices that a thread reads, each used again after `AHEAD` other slices.

    By then its slice is written. The operating system would have to clear new arrays, which takes about as long as
    reading into them.
    """

    def __init__(self) -> None:
        self._held = [np.empty(0, np.uint16)] * (AHEAD + 1)
        self._turn = 0

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        if not size:
            return np.empty(shape, np.uint16)
        self._turn = (self._turn + 1) % len(self._held)
        if self._held[self._turn].size < size:
            self._held[self._turn] = np.empty(size, np.uint16)
        return self._held[self._turn][:size].reshape(shape)


_buffers = _Buffers()


class Stopped(Exception):
    """An error for an init time that is left unfinished because the build was asked to stop."""


class Job:
    """The opened archives of a build, and the plan that follows from them.

    Raises:
        UserError: a file is missing or damaged, grids differ, the settings leave nothing to store, or the policy for
            gaps does not allow those of the archive.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        # Without a limit, all init times under way would be read at the same pace and end at the same time. The link
        # would then be idle while all of them are packed.
        self._reading = threading.BoundedSemaphore(_READS)
        index = index_of(config)
        overrides = Overrides.of(config)
        source = open_archive(
            config.input,
            control=config.control,
            variables=config.variables,
            levels=config.levels,
            leads=config.leads,
            dates=config.dates,
            change=_grid_change(config),
            index=index,
            overrides=overrides,
        )
        # A truth on another grid is regridded if the settings say so, or if the forecast is regridded as well.
        regrid = config.truth_regrid or config.regrid is not None
        opened = pair(source, config.truth, config.static, regrid=regrid, index=index, overrides=overrides)
        self.both, self.gaps = settle(opened, config.gaps)
        assert isinstance(self.both.forecast, ArchiveSource)
        self.source = self.both.forecast
        self.truth = self.both.truth if isinstance(self.both.truth, ArchiveTruth) else None
        parts = [part for part in (Part.FORECAST, Part.CONTROL) if self.source.has(part)]
        parts += [Part.TRUTH] if self.truth else []
        self.plan = BuildPlan(
            self.both.layout,
            tuple(parts),
            config.packing,
            self.both.static(),
            self.both.lead_bounds,
            _provenance(config, self.both, self.gaps),
            config.climate_days,
            self._reads,
        )

    @property
    def dates_ahead(self) -> int:
        """Return the number of init times to work on at a time if forecast or truth are read by URL, else 0.

        It is at least two, so that one init time is read while another is packed and written. If init times have few
        slices, it is the number that has twice `_READS` slices together, as far as `_DATES_AHEAD` and `_BYTES_AHEAD`
        allow.
        """
        if not (self.source.catalogue.remote or (self.truth is not None and self.truth.catalogue.remote)):
            return 0
        lay = self.plan.layout
        fields = len(lay.lead_hours) * (len(lay.variables) * len(lay.levels) + len(lay.surface))
        size = 4 * len(lay.realization) * fields * math.prod(self.source.catalogue.geometry.source.shape)
        slices = len(list(slices_of(lay)))
        return max(2, min(_DATES_AHEAD, -(-2 * _READS // max(slices, 1)), _BYTES_AHEAD // max(size, 1)))

    @property
    def files(self) -> str:
        """Return 16 hex digits that identify the files of forecast and truth.

        They depend on paths, sizes and modification times, as they were when the files were opened.
        """
        catalogues = [self.source.catalogue] + ([self.truth.catalogue] if self.truth else [])
        return hashlib.sha256(repr([one.stamps for one in catalogues]).encode()).hexdigest()[:16]

    def run(self, build: Build, date: int, pool: ThreadPoolExecutor, stopped: Callable[[], bool]) -> bool:
        """Build one init time, unless it is done or another process is building it; return whether it was built here.

        Raises:
            UserError: a field cannot be read or decoded, a value is NaN or not plausible, or the disk refuses to write.
            Stopped: `stopped` returned True.
        """
        # The claim keeps other builders from building the same date.
        with build.claim(date) as ours:
            if not ours:
                return False
            with build.date(date, pool) as writer:
                for part in self.plan.wanted:
                    self._part(writer, part, date, stopped)
        log.debug("init time %s: built", date_text(self.plan.layout.init_time[date]))
        return True

    def _part(self, writer: DateWriter, part: Part, date: int, stopped: Callable[[], bool]) -> None:
        """Read one part of an init time slice by slice, and write each slice to the store."""
        for selection, gathered in self._gathered(part, date):
            # This is checked for each slice, so that a build can stop in the middle of an init time.
            if stopped():
                raise Stopped
            if self.config.packing is Packing.float32:
                pressure, surface = gathered.plain()
            else:
                pressure, surface = gathered.quantised(writer.entry.errors)
            catalogue = self.truth.catalogue if part is Part.TRUTH and self.truth is not None else self.source.catalogue
            sources = writer.entry.sources.setdefault(part.value, Sources())
            sources.add(catalogue.stamps, gathered.places, gathered.checksum)
            kind, lead, variable = self._place(selection)
            # A slice has one lead and one variable, so these axes are dropped. A surface field gets an axis of one
            # level.
            block = pressure[:, 0, 0] if kind is Kind.PRESSURE else surface[:, 0, 0][:, None]
            writer.cell(part, kind, lead, variable, block)

    def _gathered(self, part: Part, date: int) -> Iterator[tuple[Selection, Gathered]]:
        """Yield the slices of one part of an init time; those of archives behind URLs are read ahead."""
        truth = self.truth if part is Part.TRUTH else None
        catalogue = self.source.catalogue if truth is None else truth.catalogue

        def gather(selection: Selection, allocate: Allocate) -> Gathered:
            if truth is not None:
                return truth.gather(date, selection, allocate)
            return self.source.gather(part, date, selection, allocate)

        selections = list(slices_of(self.plan.layout))
        if not catalogue.remote:
            yield from ((selection, gather(selection, _buffers)) for selection in selections)
            return
        lay = self.plan.layout
        largest = 4 * len(lay.realization) * max(1, len(lay.levels)) * math.prod(catalogue.geometry.source.shape)
        count = max(1, min(_SLICES_AHEAD, _BYTES_AHEAD // largest))

        def fetched(selection: Selection) -> Gathered:
            with self._reading:
                # Many slices wait to be written here, so the few arrays of `_buffers` do not suffice.
                return gather(selection, zeros)

        with ThreadPoolExecutor(count, "fetch") as pool:
            asked = deque((one, pool.submit(fetched, one)) for one in selections[:count])
            try:
                for number in range(len(selections)):
                    selection, coming = asked.popleft()
                    gathered = coming.result()
                    asked.extend((one, pool.submit(fetched, one)) for one in selections[number + count :][:1])
                    yield selection, gathered
            finally:
                pool.shutdown(cancel_futures=True)

    def _reads(self, date: int) -> dict[str, set[tuple[str, int, int]]]:
        """Return the path, offset and length of each field of an init time, by part."""
        found = {}
        for part in self.plan.wanted:
            if part is Part.TRUTH and self.truth is not None:
                found[part.value] = self.truth.catalogue.fields(self.truth.rows_of(date))
            else:
                found[part.value] = self.source.catalogue.fields(self.source.rows_of(part, date))
        return found

    def _place(self, selection: Selection) -> tuple[Kind, int, int]:
        """Return the kind of variable of a slice, and the positions of its lead and its variable."""
        lay = self.plan.layout
        lead = lay.lead_hours.index((selection.lead_hours or ())[0])
        if selection.variables:
            return Kind.PRESSURE, lead, lay.variables.index(selection.variables[0])
        return Kind.SURFACE, lead, lay.surface.index((selection.surface or ())[0])


def index_of(config: PrepareConfig) -> FileIndex:
    """Return the index of files: in the folder of the setting `index`, or beside the output; null keeps none."""
    output = Path(config.output).absolute()
    folder = None if config.index is None else config.index or output.with_name(f".{output.name}.index")
    return FileIndex(folder, look=config.gaps is not Gaps.error)


def _provenance(config: PrepareConfig, both: Pair, gaps: list[Gap]) -> dict[str, Any]:
    """Return what the store records about its origin: inputs, settings and missing init times."""
    kept = {name: getattr(config, name) for name in _KEPT}
    skipped = {gap.start for gap in gaps} if config.gaps is Gaps.skip else set()
    starts = [start for date in holes(both.layout.init_time) if (start := date_text(date)) not in skipped]
    if gaps or starts:
        kept["gaps"] = kept_gaps(gaps, config.gaps, starts)
    return {
        "input": [shown_input(path) for path in as_list(config.input)],
        "truth": [shown_input(path) for path in as_list(config.truth)],
        "static": config.static,
        "control": config.control.value,
        "fingerprint": both.fingerprint(),
        **{name: value for name, value in kept.items() if value is not None},
    }


def _grid_change(config: PrepareConfig) -> GridChange | None:
    """Return the change of grid that the settings ask for; None if they ask for none."""
    wanted: Any = config.regrid
    if isinstance(wanted, str):
        wanted = open_store(wanted).layout.grid if is_store(Path(wanted)) else Catalogue(wanted, role="grid").grid
    return as_change(config.region, config.coarsen, wanted)
