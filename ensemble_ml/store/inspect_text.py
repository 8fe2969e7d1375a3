"""Format the pages that `ensemble-ml inspect` prints, for a tensor store and for an archive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ensemble_ml.fields import field
from ensemble_ml.wording import dates_of, hour_text, shortened

_LONGEST = 400  # characters of a line at most; the JSON output is complete
_STARTS = 10  # init times in a line at most, and lines of one kind at most

_PROVENANCE = {"fingerprint": "archive's fingerprint"}  # the page also shows the fingerprint of the store


def as_text(found: dict[str, Any]) -> str:
    """Format the description of a store as headings, tables and lines.

    Args:
        found: Result of `inspect.describe`.
    """
    return "\n".join(_lines(found))


def archive_text(found: dict[str, Any]) -> str:
    """Format the description of an archive as headings, tables and lines.

    Args:
        found: Description of the archive by `data_prep.inspect`.
    """
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
            "model climate": _climate(found["climate"]),
            "fingerprint": found["fingerprint"] or "none yet",
        }
    )
    yield from _gaps(found)
    yield from _statistics(found)
    yield from _sizes(found)
    yield from _sources(found["sources"])
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
        dates = [hour_text(start) for start in dates_of(starts if isinstance(starts, str) else " ".join(starts))]
        yield f"Regularly spaced except for {_count(len(dates), 'init time')}: {shortened(dates, _STARTS)}"
    for name, share in found["masked"].items():
        yield f"Masked: {name} has no value at {100 * share:.1f} % of the forecast's points"


def _statistics(found: dict[str, Any]) -> Iterator[str]:
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


def _sizes(found: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the size of each part."""
    sizes = found["sizes"]
    rows = [("part", "on disk, MB", "as float32, MB", "ratio")]
    for name, one in (*sizes["parts"].items(), ("total", sizes["total"])):
        rows.append((name, f"{one['bytes'] / 1e6:.2f}", f"{one['decoded'] / 1e6:.2f}", f"{one['ratio']:.2f}"))
    rows.insert(-1, ("rest", f"{sizes['rest'] / 1e6:.2f}", "", ""))
    yield from _table(f"Sizes ({sizes['files']} files)", rows)


def _sources(found: dict[str, Any] | None) -> Iterator[str]:
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


def _intervals(found: dict[str, list[list[int] | None]]) -> str:
    """Format the intervals in hours of accumulated and other variables that have one."""
    spans = {name: [f"{pair[0]}-{pair[1]}" for pair in pairs if pair is not None] for name, pairs in found.items()}
    return "; ".join(f"{name} {_list(of)} h" for name, of in spans.items()) or "none"


def _climate(found: dict[str, Any] | None) -> str:
    """Format the model climate of a store."""
    if found is None:
        return "none"
    quantiles = f"{len(found['probabilities'])} quantiles of other years within {found['days']} days of the date"
    return f"{quantiles}, {found['bytes'] / 1e6:.2f} MB"


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
