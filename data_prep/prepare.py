"""`ensemble-ml prepare`: an archive becomes a tensor store, one start date at a time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.archive import ArchiveSource, find_gap, open_archive
from data_prep.catalogue import Catalogue, Gathered
from data_prep.geometry import Geometry, GridChange, as_change
from data_prep.pairs import Pair, pair
from data_prep.truth import ArchiveTruth
from ensemble_ml.config import MISSING, Packing, PrepareConfig, as_list
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store import Part, StoreWriter, is_store, open_store
from ensemble_ml.store.packing import PackedBlock

log = logging.getLogger(__name__)

_GRID = ("region", "coarsen", "regrid")
_LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal


def prepare(config: PrepareConfig) -> Path:
    """Turn an archive into a tensor store and return its path.

    All checks that need no values (what is missing, which grids differ) come first; the store appears under its name
    only when it is complete.

    Raises:
        UserError: a file is missing or damaged; fields are missing for some dates or members; the truth lacks what
            the forecast has; a value is NaN; the output exists.
    """
    _check_settings(config)
    source = open_archive(
        config.input,
        control=config.control,
        variables=config.variables,
        levels=config.levels,
        leads=config.leads,
        dates=config.dates,
        change=_grid_change(config),
    )
    _check_complete(source)
    both = pair(source, config.truth, config.static, regrid=config.truth_regrid or config.regrid is not None)
    truth = both.truth if isinstance(both.truth, ArchiveTruth) else None
    if truth is not None:
        _check_truth(truth)
    _log_plan(both, source.catalogue.geometry)
    parts = [part for part in (Part.FORECAST, Part.CONTROL) if source.has(part)] + ([Part.TRUTH] if truth else [])
    writer = StoreWriter(
        config.output,
        both.layout,
        parts=parts,
        packing=config.packing,
        static=both.static(),
        lead_bounds=both.lead_bounds,
        provenance=_provenance(config, both),
        overwrite=config.overwrite,
    )
    with writer:
        for date in _progress(len(both.layout.init_time)):
            for part in parts:
                gathered = truth.gather(date) if part is Part.TRUTH and truth else source.gather(part, date)
                writer.write(part, date, *_blocks(gathered, writer))
    _log_errors(writer)
    log.info("%s: written", writer.path)
    return writer.path


def _check_settings(config: PrepareConfig) -> None:
    for key in ("input", "output"):
        if getattr(config, key) in (MISSING, None, "", []):
            raise UserError(f"{key}: is not given; say {key}=PATH")
    for key in ("input", "truth"):
        for path in as_list(getattr(config, key)):
            if is_store(Path(path)):
                raise UserError(f"{key}={path}: is a tensor store already; prepare reads archives (GRIB, NetCDF, Zarr)")
    if Path(config.output).exists() and not config.overwrite:  # the writer checks too, but hours of indexing later
        raise UserError(f"output={config.output}: exists already; choose another folder, or add overwrite=true")


def _check_complete(source: ArchiveSource) -> None:
    for part in (Part.FORECAST, Part.CONTROL):
        gap = find_gap(source, part)
        if gap:
            raise UserError(
                f"input {source.path}: {gap}, which other dates or members have; "
                "complete the archive, or leave the gap out with dates=, variables=, levels= or leads="
            )


def _check_truth(truth: ArchiveTruth) -> None:
    reasons = truth.unmatched()
    gap = truth.gap()
    if gap:
        raise UserError(f"truth {truth.path}: {gap}; complete it, choose start dates with dates=..., or say truth=null")
    for name, reason in reasons.items():
        log.warning("truth %s: %s stays without truth: %s", truth.path, name, reason)


def _blocks(gathered: Gathered, writer: StoreWriter) -> tuple[PackedBlock, PackedBlock]:
    if writer.packing is Packing.float32:
        return gathered.plain()
    return gathered.quantised(writer.errors)


def _provenance(config: PrepareConfig, both: Pair) -> dict:
    kept = {name: getattr(config, name) for name in ("variables", "levels", "leads", "dates", *_GRID)}
    return {
        "input": as_list(config.input),
        "truth": as_list(config.truth),
        "static": config.static,
        "control": config.control.value,
        "fingerprint": both.fingerprint(),
        **{name: value for name, value in kept.items() if value is not None},
    }


def _grid_change(config: PrepareConfig) -> GridChange | None:
    wanted: Any = config.regrid
    if isinstance(wanted, str):
        wanted = open_store(wanted).layout.grid if is_store(Path(wanted)) else Catalogue(wanted, role="grid").grid
    return as_change(config.region, config.coarsen, wanted)


def _log_plan(both: Pair, geometry: Geometry) -> None:
    lay = both.layout
    log.info(
        "%s: %d start dates, %d members, leads %s h, %s; levels %s hPa; grid %s",
        both.path,
        len(lay.init_time),
        len(lay.realization),
        ", ".join(map(str, lay.lead_hours)),
        ", ".join(lay.names),
        ", ".join(map(str, lay.levels)) or "none",
        lay.grid.describe(),
    )
    if not geometry.same:
        how = "cut out of" if geometry.crop else "conservative means of"
        log.info("grid: %s %s", how, geometry.source.describe())
    if not both.static():
        log.info("no static fields: orography and land mask stay off; give them with static=FILE")


def _log_errors(writer: StoreWriter) -> None:
    worst = {name: bound for name, bound in writer.errors.items() if bound > 0}
    for name, bound in sorted(worst.items()):
        log.info("%s: packed into 16 bits, error at most %.3g %s", name, bound, field(name).units)
    if not worst and writer.packing is Packing.uint16:
        log.info("all fields keep the archive's own integers: exact")


def _progress(count: int) -> Iterator[int]:
    """Positions of the start dates, with a bar on a terminal and a line now and then elsewhere."""
    if sys.stderr.isatty():
        yield from tqdm(range(count), desc="prepare", unit="date")
        return
    said = start = time.monotonic()
    for date in range(count):
        yield date
        if time.monotonic() - said > _LINE_EVERY or date == count - 1:
            said = time.monotonic()
            log.info("prepare: %d of %d start dates in %.0f s", date + 1, count, said - start)
