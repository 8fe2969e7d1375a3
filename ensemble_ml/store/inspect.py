"""Run `ensemble-ml inspect`: show what a store holds, what it lacks, how large it is and how fast it is read.

The pages that it prints, for a tensor store and for an archive, are formatted here, too.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ensemble_ml.config import Gaps, InspectConfig, OutputFormat
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store.climate import PROBABILITIES
from ensemble_ml.store.contents import Contents, contents_of
from ensemble_ml.store.manifest import CLIMATE, stamp
from ensemble_ml.store.schema import FORMAT, Kind
from ensemble_ml.store.source import Part, Selection
from ensemble_ml.wording import date_text, dates_of, shortened

_FLOAT32 = 4  # bytes of a value
_GAPS_LISTED = 20  # most init times with gaps that are listed for each part
_LONGEST = 400  # characters of a line at most; the JSON output is complete
_STARTS = 10  # init times in a line at most, and lines of one kind at most
_PROVENANCE = {"fingerprint": "archive's fingerprint"}  # the page also shows the fingerprint of the store


def inspect(config: InspectConfig) -> dict[str, Any]:
    """Print what the tensor store at `config.store` holds, as text or JSON, and return it as plain values.

    Raises:
        UserError: There is no store, or it is damaged. With `verify`, a file has changed. With `complete`, the store is
            not finished or lacks init times.
    """
    contents = contents_of(str(config.store))
    found = describe(contents)
    if config.complete:
        _refuse_incomplete(contents)
    if config.verify:
        contents.verify()
        found["verified"] = f"all {len(contents.files)} files have the sha256 of the manifest"
    if config.speed and contents.source is not None:
        found["speed"] = read_speed(contents, int(np.random.default_rng().choice(contents.done)))
    print(json.dumps(found, indent=1, allow_nan=False) if config.format is OutputFormat.json else as_text(found))
    return found


def describe(contents: Contents) -> dict[str, Any]:
    """Return everything that can be known without reading a field, as plain values that JSON can hold."""
    lay, times = contents.layout, contents.layout.init_time.astype("datetime64[m]")
    years, counts = np.unique(times[contents.done].astype("datetime64[Y]").astype(int) + 1970, return_counts=True)
    presence = Presences(contents)
    return {
        "store": contents.path,
        "format": FORMAT,
        "complete": contents.source is not None,
        "dates": {
            "count": len(times),
            "done": len(contents.done),
            "first": str(times[0]),
            "last": str(times[-1]),
            "by_year": {str(year): int(count) for year, count in zip(years, counts, strict=True)},
        },
        "members": list(lay.realization),
        "lead_hours": list(lay.lead_hours),
        "lead_bounds": contents.lead_bounds,
        "variables": list(lay.variables),
        "levels": list(lay.levels),
        "surface": list(lay.surface),
        "grid": lay.grid.describe(),
        "parts": [part.value for part in contents.parts],
        "packing": contents.packing.value,
        "static": list(contents.static),
        "gaps": presence.gaps(),
        "masked": _masked(contents, presence),
        "statistics": _statistics(contents),
        "quantisation_error": dict(contents.errors),
        "sizes": _sizes(contents, presence),
        "climate": _climate(contents),
        "sources": _sources(contents.sources),
        "fingerprint": contents.source.fingerprint() if contents.source else None,
        "provenance": contents.provenance,
    }


def _refuse_incomplete(contents: Contents) -> None:
    """Raise a UserError if the store is unfinished, or if the archive lacked init times or `prepare` left some out."""
    times = contents.layout.init_time
    missing = np.delete(times, contents.done)
    if len(missing):
        said = f"{len(missing)} of {len(times)} init times are not built: {shortened([date_text(t) for t in missing])}"
        raise UserError(f"{contents.path}: {said}; run prepare again, or those of its shares that failed")
    if contents.source is None:
        raise UserError(f"{contents.path}: all init times are built, but the store is not finished; run prepare again")
    gaps = contents.provenance.get("gaps", {})
    # Init times that the archive's regular series lacks, and those that prepare left out because they lack fields.
    lacking = [gaps.get("starts", ""), gaps.get("dates", "") if gaps.get("policy") == Gaps.skip.value else ""]
    left_out = dates_of(" ".join(text if isinstance(text, str) else " ".join(text) for text in lacking))
    if len(left_out):
        said = shortened([date_text(start) for start in left_out])
        raise UserError(f"{contents.path}: {len(left_out)} init times are not in the store: {said}")


class Presences:
    """The number of built init times that have each field, by part: (M, T, V, Z) and (M, T, S) integers."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self.counts = {part: self._count(part) for part in contents.parts}

    def _count(self, part: Part) -> list[np.ndarray]:
        """Count the built init times that have each field of a part."""
        lay = self.contents.layout
        members, leads = len(lay.realization) if part is Part.FORECAST else 1, len(lay.lead_hours)
        shapes = (members, leads, len(lay.variables), len(lay.levels)), (members, leads, len(lay.surface))
        totals = [np.zeros(shape, int) for shape in shapes]
        for date in self.contents.done:
            for total, there in zip(totals, self.contents.present(part, date), strict=True):
                total += there
        return totals

    def fields(self, part: Part) -> int:
        """Return the number of fields of a part, over all built init times."""
        return int(sum(count.sum() for count in self.counts[part]))

    def gaps(self) -> dict[str, Any]:
        """Return the fields that some init times lack and others have.

        For each part with gaps, these are the number of fields and of init times, and the first gaps in words.
        """
        found: dict[str, Any] = {}
        for part in self.contents.parts:
            lacking = list(self._lacking(part))
            if lacking:
                found[part.value] = {
                    "fields": sum(count for _, count, _ in lacking),
                    "dates": len(lacking),
                    "first": [f"{when}: {text}" for when, _, text in lacking[:_GAPS_LISTED]],
                }
        return found

    def _lacking(self, part: Part) -> Iterator[tuple[str, int, str]]:
        """Yield init time, number of missing fields and a phrase for each init time with gaps.

        A field that no init time has is not a gap: an archive may have other leads for some variables.
        """
        counts, dates = self.counts[part], len(self.contents.done)
        anywhere = [count.any(0) for count in counts]
        # If the counts show that nothing is missing, the init times need not be checked one by one.
        if all((count == dates * there).all() for count, there in zip(counts, anywhere, strict=True)):
            return
        for date in self.contents.done:
            gone = [w & ~t for w, t in zip(anywhere, self.contents.present(part, date), strict=True)]
            total = int(sum(one.sum() for one in gone))
            if total:
                when = date_text(self.contents.layout.init_time[date])
                yield when, total, self._phrase(part, gone, total)

    def _phrase(self, part: Part, gone: list[np.ndarray], total: int) -> str:
        """Describe in words which fields of an init time are missing."""
        lay = self.contents.layout
        members = np.flatnonzero(gone[0].any((1, 2, 3)) | gone[1].any((1, 2)))
        names = [lay.variables[v] for v in np.flatnonzero(gone[0].any((0, 1, 3)))]
        names += [lay.surface[v] for v in np.flatnonzero(gone[1].any((0, 1)))]
        leads = np.flatnonzero(gone[0].any((0, 2, 3)) | gone[1].any((0, 2)))
        levels = np.flatnonzero(gone[0].any((0, 1, 2)))
        who = "" if part is not Part.FORECAST else f"member {shortened([lay.realization[m] for m in members])} "
        where = f" at {shortened([lay.levels[z] for z in levels])} hPa" if 0 < len(levels) < len(lay.levels) else ""
        when = f", lead {shortened([lay.lead_hours[t] for t in leads])} h" if len(leads) < len(lay.lead_hours) else ""
        return f"{who}lacks {shortened(names)}{where}{when} ({_count(total, 'field')})"


def _masked(contents: Contents, presence: Presences) -> dict[str, float]:
    """Return the share of the forecast's stored points without a value, for each variable masked in any part.

    The share is 0 if no field of the forecast is stored.
    """
    points, found = math.prod(contents.layout.grid.shape), dict[str, float]()
    for name in contents.masked:
        surface = field(name).surface
        names, kind = (contents.layout.surface, Kind.SURFACE) if surface else (contents.layout.variables, Kind.PRESSURE)
        at = names.index(name)
        counts = presence.counts.get(Part.FORECAST)
        stored = 0 if counts is None else counts[surface][:, :, at].sum() * points
        values = contents.moments[kind].count[:, at].sum() if kind in contents.moments else 0
        found[name] = round(1 - float(values) / stored, 6) if stored else 0.0
    return found


def _statistics(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return statistics over members, leads, init times and points, not weighted by area.

    They are {"t": {"500": {mean, std, min, max}}, "t2m": {...}}; the numbers of a field without values are None.
    """
    found: dict[str, dict[str, Any]] = {}
    levels = [str(level) for level in contents.layout.levels]
    for kind, moments in contents.moments.items():
        total = moments.at(0)
        for lead in range(1, len(contents.layout.lead_hours)):
            total = total.merge(moments.at(lead))
        numbers = {"mean": total.mean, "std": total.std, "min": total.minimum, "max": total.maximum}
        surface = kind is Kind.SURFACE
        names = contents.layout.surface if surface else contents.layout.variables
        for v, name in enumerate(names):
            there = total.count[v] > 0  # the mean of no values would be shown as zero
            rows = [
                {k: _number(of[v, z]) if there[z] else None for k, of in numbers.items()} for z in range(len(there))
            ]
            found[name] = rows[0] if surface else dict(zip(levels, rows, strict=True))
    return found


def _sources(table: dict[str, Any] | None) -> dict[str, Any] | None:
    """Describe the files from which the store was built, with sums by init time and part.

    The state of each file is `unchanged`, `changed` or `gone`. A file whose size and time cannot be read is `gone`.
    """
    if table is None:
        return None
    files = []
    for one in table["files"]:
        now = stamp(one["path"])
        state = "gone" if now is None else "unchanged" if now == (one["bytes"], one["mtime_ns"]) else "changed"
        files.append({**one, "state": state})
    every = [part for parts in table["dates"].values() for part in parts.values()]
    total = {key: sum(part[key] for part in every) for key in ("fields", "bytes")}
    return {"files": files, **total, "dates": table["dates"]}


def _climate(contents: Contents) -> dict[str, Any] | None:
    """Describe the model climate that a store holds, or that an unfinished one will hold."""
    if not contents.climate_days:
        return None
    size = sum(entry.bytes for name, entry in contents.files.items() if name.startswith(CLIMATE))
    return {"days": contents.climate_days, "probabilities": list(PROBABILITIES), "bytes": size}


def _number(value: float) -> float | None:
    """Return a number that JSON can hold: None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _sizes(contents: Contents, presence: Presences) -> dict[str, Any]:
    """Return the bytes of each part on disk, and those of its fields as float32.

    `rest` is the bytes of everything else: coordinates, factors, statistics, static fields, model climate.
    """
    points, left = math.prod(contents.layout.grid.shape), dict(contents.files)
    found: dict[str, dict[str, Any]] = {}
    for part in contents.parts:
        arrays = {s.name for spec in contents.specs if spec.part is part for s in (spec, spec.mask)}
        mine = [name for name in left if name.split("/")[0] in arrays]
        on_disk = sum(left.pop(name).bytes for name in mine)
        decoded = presence.fields(part) * points * _FLOAT32
        found[part.value] = {"bytes": on_disk, "decoded": decoded, "ratio": round(decoded / max(on_disk, 1), 3)}
    rest = sum(entry.bytes for entry in left.values())
    total = sum(one["bytes"] for one in found.values()) + rest
    decoded = sum(one["decoded"] for one in found.values())
    return {"parts": found, "rest": rest, "files": len(contents.files),
            "total": {"bytes": total, "decoded": decoded, "ratio": round(decoded / max(total, 1), 3)}}  # fmt: skip


def read_speed(contents: Contents, date: int) -> dict[str, Any]:
    """Measure how fast the init time at index `date` of a finished store is read, a lead and a variable at a time.

    The forecast is read, or the first part of a store without one. The bytes come from the disk, or from the operating
    system's cache if they were read lately.

    Returns:
        Part, date, seconds, and decoded float32 in MB (1e6 bytes) and MB per second.
    """
    store, lay = contents.source, contents.layout
    assert store is not None
    part = Part.FORECAST if Part.FORECAST in contents.parts else contents.parts[0]
    decoded, start = 0, time.perf_counter()
    for lead in lay.lead_hours:
        for name in lay.names:
            decoded += store.read(part, date, Selection.one(lead, name, surface=name in lay.surface)).one().nbytes
    seconds = time.perf_counter() - start
    return {
        "part": part.value,
        "date": date_text(lay.init_time[date]),
        "decoded_mb": round(decoded / 1e6, 3),
        "seconds": round(seconds, 4),
        "mb_per_s": round(decoded / 1e6 / seconds, 1),
    }


def as_text(found: dict[str, Any]) -> str:
    """Format the description of a store by `describe` as headings, tables and lines."""
    return "\n".join(_lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page of a store."""
    dates = found["dates"]
    state = "complete" if found["complete"] else f"half-built: {dates['done']} of {dates['count']} init times are done"
    yield f"{found['store']}: tensor store, format {found['format']}, {state}"
    yield ""
    yield from _pairs(
        _axes(found)
        | {
            "intervals": _intervals(found["lead_bounds"]),
            "parts": _list(found["parts"]),
            "packing": found["packing"],
            "model climate": _climate_text(found["climate"]),
            "fingerprint": found["fingerprint"] or "none yet",
        }
    )
    yield from _gaps(found)
    yield from _statistics_text(found)
    yield from _sizes_text(found)
    yield from _sources_text(found["sources"])
    if "speed" in found:
        speed = found["speed"]
        yield ""
        yield (
            f"Read speed: {speed['mb_per_s']:.0f} MB/s of decoded float32 ({speed['part']} of {speed['date']}, "
            f"{speed['decoded_mb']:.1f} MB in {speed['seconds']:.3f} s; from disk, or memory if used lately)"
        )
    if "verified" in found:
        yield f"Verified: {found['verified']}"
    yield ""
    yield "Provenance"
    yield from _pairs({_PROVENANCE.get(name, name): value for name, value in found["provenance"].items()})


def _gaps(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about missing fields, missing init times and masked points."""
    yield ""
    if not found["gaps"]:
        yield "Gaps: none"
    for part, gap in found["gaps"].items():
        yield f"Gaps in the {part}: {_count(gap['fields'], 'field')} on {_count(gap['dates'], 'init time')}"
        yield from (f"  {line}" for line in gap["first"])
        if gap["dates"] > len(gap["first"]):
            yield f"  and {gap['dates'] - len(gap['first'])} more init times"
    if starts := found["provenance"].get("gaps", {}).get("starts"):
        # Older stores hold a list of dates instead of a string.
        dates = [date_text(start) for start in dates_of(starts if isinstance(starts, str) else " ".join(starts))]
        yield f"Regularly spaced except for {_count(len(dates), 'init time')}: {shortened(dates, _STARTS)}"
    for name, share in found["masked"].items():
        yield f"Masked: {name} has no value at {100 * share:.1f} % of the forecast's points"


def _statistics_text(found: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the statistics of each variable and level."""
    rows: list[tuple[str, ...]] = [("field", "mean", "std", "min", "max", "units", "packing error")]
    for name, entry in found["statistics"].items():
        levels = {"": entry} if "mean" in entry else entry
        bound = found["quantisation_error"].get(name, 0.0)
        error = f"{bound:.2g}" if bound else "exact"
        for level, numbers in levels.items():
            values = [_short(numbers[key]) for key in ("mean", "std", "min", "max")]
            nothing = numbers["mean"] is None
            rows.append((f"{name}{level}", *values, field(name).units, "none" if nothing else error))
    yield from _table("Forecast values, all members, leads, dates and points (not weighted by area)", rows)


def _sizes_text(found: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the size of each part."""
    sizes = found["sizes"]
    rows = [("part", "on disk, MB", "as float32, MB", "ratio")]
    for name, one in (*sizes["parts"].items(), ("total", sizes["total"])):
        rows.append((name, f"{one['bytes'] / 1e6:.2f}", f"{one['decoded'] / 1e6:.2f}", f"{one['ratio']:.2f}"))
    rows.insert(-1, ("rest", f"{sizes['rest'] / 1e6:.2f}", "", ""))
    yield from _table(f"Sizes ({sizes['files']} files)", rows)


def _sources_text(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield the lines about the files from which the store was built."""
    if found is None:
        return
    files = found["files"]
    states = {state: [one["path"] for one in files if one["state"] == state] for state in ("changed", "gone")}
    yield ""
    size = f"{found['bytes'] / 1e6:.2f} MB, " if found["bytes"] else ""  # not counted for NetCDF and Zarr
    yield (
        f"Sources: {_count(found['fields'], 'field')}, {size}from {_count(len(files), 'file')}; "
        f"{len(files) - len(states['changed']) - len(states['gone'])} unchanged since"
    )
    for state, paths in states.items():
        if paths:
            yield f"  {state}: {_list(paths, 4)}"


def _climate_text(found: dict[str, Any] | None) -> str:
    """Format the model climate of a store."""
    if found is None:
        return "none"
    quantiles = f"{len(found['probabilities'])} quantiles of other years within {found['days']} days of the date"
    return f"{quantiles}, {found['bytes'] / 1e6:.2f} MB"


def archive_text(found: dict[str, Any]) -> str:
    """Format the description of an archive by `data_prep.inspect` as headings, tables and lines."""
    return "\n".join(_archive_lines(found))


def _archive_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page of an archive."""
    files, gaps = found["files"], found["gaps"]
    size = sum(one["bytes"] for one in files) / 1e6
    yield f"{_list(found['archive'], 4)}: archive, {_count(len(files), 'file')}, {size:.2f} MB"
    yield ""
    yield f"What prepare takes: {_count(found['fields'], 'field')}"
    yield from _pairs(
        _axes(found)
        | {"control": "kept apart (control=include makes it a member)" if found["control"] else "none"}
        | {"intervals": _intervals(found["lead_bounds"])}
    )
    yield from (f"  {name}: {spans}; the intervals between are at leads that are left out"
                for name, spans in found["cut"].items())  # fmt: skip
    yield ""
    if gaps["fields"]:
        policy = "as an ensemble it needs gaps=skip or gaps=mask, or its other files; as a truth it is taken as it is"
        where = f"{_count(gaps['fields'], 'field')} on {_count(gaps['dates'], 'init time')}"
        yield f"Gaps: {where}; {policy}"
        yield from _some(gaps["all"])
    else:
        yield "Gaps: none (fields that are there, but all NaN, are found when prepare reads them)"
    yield from _left_out(found["left_out"])
    yield from _archive_files(files, found["other_files"])


def _left_out(counts: dict[str, int]) -> Iterator[str]:
    """Yield a table of the fields that are left out, by reason."""
    if not counts:
        yield from ("", "Left out: nothing")
        return
    rows = [("left out", "fields"), *((label, str(count)) for label, count in sorted(counts.items()))]
    yield from _table(f"Left out: {_count(sum(counts.values()), 'field')}", rows)


def _archive_files(files: list[dict[str, Any]], others: list[str]) -> Iterator[str]:
    """Yield the lists of files that are used, that are not used, and that do not belong to the archive."""
    lists = {
        "Files that fields are taken from": [one["path"] for one in files if one["fields"]],
        "Files that nothing is taken from": [one["path"] for one in files if not one["fields"]],
        "Beside them, no files of the archive": others,
    }
    for title, paths in lists.items():
        if paths:
            yield ""
            yield f"{title}: {len(paths)}"
            yield from _some(paths)


def _some(lines: list[str]) -> Iterator[str]:
    """Yield the first lines of a list, and a line with the number of the others."""
    yield from (f"  {line}" for line in lines[:_STARTS])
    if len(lines) > _STARTS:
        yield f"  and {len(lines) - _STARTS} more (format=json lists all)"


def _axes(found: dict[str, Any]) -> dict[str, str]:
    """Return the coordinates of a store or an archive, as its page shows them."""
    dates = found["dates"]
    years = ", ".join(f"{year} ({count})" for year, count in dates["by_year"].items()) or "none"
    return {
        "init times": f"{dates['count']}, {dates['first']} to {dates['last']}; by year {years}",
        "members": f"{len(found['members'])}: {_list(found['members'])}",
        "leads": f"{_list(found['lead_hours'])} h",
        "pressure levels": f"{_list(found['variables'])} at {_list(found['levels'])} hPa",
        "surface": _list(found["surface"]),
        "static": _list(found["static"]),
        "grid": found["grid"],
    }


def _intervals(found: dict[str, list[list[int] | None]]) -> str:
    """Format the intervals in hours of accumulated and other variables that have one."""
    spans = {name: [f"{pair[0]}-{pair[1]}" for pair in pairs if pair is not None] for name, pairs in found.items()}
    return "; ".join(f"{name} {_list(of)} h" for name, of in spans.items()) or "none"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield a title and aligned rows, of which the first holds the headings."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield ""
    yield title
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()


def _pairs(entries: dict[str, Any]) -> Iterator[str]:
    """Yield aligned lines of names and values."""
    width = max((len(key) for key in entries), default=0)
    for key, value in entries.items():
        text = _list(value) if isinstance(value, list) else str(value)
        yield f"  {key:<{width}}  {text if len(text) <= _LONGEST else text[: _LONGEST - 4] + ' ...'}"


def _count(number: int, what: str) -> str:
    """Format a number with its noun in singular or plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _list(values: list[Any], most: int = 12) -> str:
    """Format a list; of more than `most` values only the first `most` and the last one."""
    text = ", ".join(str(value) for value in values[:most]) or "none"
    return text + (f" ... {values[-1]} ({len(values)})" if len(values) > most else "")


def _short(value: float | None) -> str:
    """Format a number with five significant digits; None becomes "none"."""
    return "none" if value is None else f"{value:.5g}"
