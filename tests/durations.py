"""How long each test file took, kept in durations.json, so that the longest come first and workers end together."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("durations.json")
FIRST = "tests/data_prep/test_simulate.py"  # makes the archive for which other files would wait


def file_of(nodeid: str) -> str:
    """Return the test file that a test is in, as durations.json names it."""
    return nodeid.partition("::")[0]


def longest_first(items: list, file: Path = FILE) -> None:
    """Sort tests by how long their files took, the longest first; `FIRST` and files not known come before all."""
    seconds = json.loads(file.read_text()) | {FIRST: math.inf}
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), math.inf))


class Durations:
    """A plugin that sums the seconds of each file, as workers report them, and writes them at the end of the run."""

    def __init__(self, file: Path = FILE):
        self.file, self.seconds = file, Counter[str]()

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        measured = {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        known = json.loads(self.file.read_text()) | measured
        rows = {name: known[name] for name in sorted(known) if (session.config.rootpath / name).exists()}
        self.file.write_text(json.dumps(rows, indent=0) + "\n")
