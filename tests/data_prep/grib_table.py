"""What is read of GRIB messages of every kind that ecCodes can write, found by reading them; `docs/grib.md` shows it.

python tests/data_prep/grib_table.py > docs/grib.md
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import eccodes

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from gribfiles import message, write  # noqa: E402 - this may be run as a program

from data_prep.grib import GribFile  # noqa: E402

TEMPLATES = range(210)
LOCAL = (
    1, 2, 5, 7, 9, 11, 12, 14, 15, 16, 18, 20, 21, 24, 25, 26, 28, 30, 36, 38, 39, 40, 41, 42, 43, 44, 45, 49, 50, 60,
    192, 300, 500,
)  # fmt: skip
HEAD = """# Which GRIB messages are read

A GRIB message is read where each key that could make it something else than a field of one run has a value of the
lists below (`data_prep/grib_fields.py`). All others are left out, and named in the log with the reason. This page is
written by a test, which encodes a message of every kind that ecCodes knows and reads it.
"""


def changed(made: bytes, **keys: object) -> bytes | None:
    """The message with other keys; None where ecCodes cannot write it."""
    handle = eccodes.codes_new_from_message(made)
    try:
        for key, value in keys.items():
            eccodes.codes_set(handle, key, value)
        return eccodes.codes_get_message(handle)
    except eccodes.CodesInternalError:
        return None
    finally:
        eccodes.codes_release(handle)


def says(made: bytes, key: str) -> str:
    """A key of a message as text; empty where it has none."""
    handle = eccodes.codes_new_from_message(made)
    try:
        return str(eccodes.codes_get_string(handle, key))
    except eccodes.CodesInternalError:
        return ""
    finally:
        eccodes.codes_release(handle)


def read(made: bytes, folder: Path) -> tuple[bool, str]:
    """Whether a message becomes a record beside a member, and what is said of it where it does not."""
    path = write(folder / "one.grib", [message("t", member=99, level=1000), made])
    file = GribFile(str(path))
    assert len(file.records) + sum(file.skipped.values()) == 2, "a message is neither read nor named"
    return len(file.records) == 2, ", ".join(file.skipped)


def templates() -> Iterator[tuple[str, bytes]]:
    """Edition 2: temperature at 500 hPa by each product definition template, as a forecast."""
    base = message("t", edition=2, member=None)
    for number in TEMPLATES:
        made = changed(base, productDefinitionTemplateNumber=number, typeOfGeneratingProcess=2)
        if made is not None:
            with contextlib.suppress(eccodes.CodesInternalError):
                same = changed(made, typeOfFirstFixedSurface=100, scaleFactorOfFirstFixedSurface=0)
                made = changed(same, scaledValueOfFirstFixedSurface=50000) or made if same else made
            yield f"4.{number}", made


def types() -> Iterator[tuple[str, bytes]]:
    """Edition 1: all MARS types."""
    for number in range(256):
        made = changed(message("t"), marsType=number)
        if made is not None and not (name := says(made, "marsType")).isdigit():
            yield name, made


def streams() -> Iterator[tuple[str, bytes]]:
    """Edition 1: all MARS streams."""
    for number in range(1020, 1300):
        made = changed(message("t"), marsStream=number)
        if made is not None and not (name := says(made, "marsStream")).isdigit():
            yield name, made


def local_definitions() -> Iterator[tuple[str, bytes]]:
    """Edition 2: all local definitions of ECMWF for which ecCodes has keys."""
    for number in LOCAL:
        made = changed(message("t", edition=2, member=2), setLocalDefinition=1, grib2LocalSectionNumber=number)
        made = made and changed(made, type="pf", stream="enfo")
        if made is not None:
            yield str(number), made


def levels(name: str, edition: int) -> Iterator[tuple[str, bytes]]:
    """All kinds of level of one variable, at 2, which is a height of its own."""
    key = "indicatorOfTypeOfLevel" if edition == 1 else "typeOfFirstFixedSurface"
    for number in range(256):
        made = changed(message(name, edition=edition), **{key: number})
        made = made and (changed(made, level=2) or made)
        if made is not None and (kind := says(made, "typeOfLevel")):
            yield f"{kind} ({number})", made


def kinds() -> dict[str, dict[str, tuple[bool, str]]]:
    """Heading -> kind of message -> whether it is read, and what is said of it."""
    sources = {
        "Product definition templates (edition 2, code table 4.0)": templates(),
        "Types of MARS": types(),
        "Streams of MARS": streams(),
        "Local definitions of ECMWF, edition 2": local_definitions(),
        "Levels of temperature, edition 1": levels("t", 1),
        "Levels of temperature, edition 2 (at a height of 2 m it is the 2 metre temperature)": levels("t", 2),
        "Levels of 2 metre temperature, edition 1": levels("t2m", 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        return {
            heading: {name: read(made, Path(folder)) for name, made in source} for heading, source in sources.items()
        }


def table(found: dict[str, dict[str, tuple[bool, str]]]) -> str:
    """The page of the documentation."""
    parts = [HEAD]
    for heading, by_name in found.items():
        taken = [name for name, (is_read, _) in by_name.items() if is_read]
        others = [name for name, (is_read, _) in by_name.items() if not is_read]
        parts += [f"\n## {heading}\n\n", _filled(f"Read: {', '.join(taken)}.")]
        parts += ["\n", _filled(f"Left out by name: {', '.join(_short(others))}.")]
    return "".join(parts)


def _short(names: list[str]) -> list[str]:
    """The names; codes that have none are counted together."""
    unnamed = [name for name in names if name.startswith("unknown (")]
    named = [name for name in names if name not in unnamed]
    return named + [f"and {len(unnamed)} codes without a name"] * bool(unnamed)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print(table(kinds()), end="")
