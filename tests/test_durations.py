"""The order of test files, and how their durations are kept."""

import json
from types import SimpleNamespace

from durations import FIRST, Durations, longest_first


def test_the_longest_files_come_first_and_unknown_ones_before_them(tmp_path):
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"a.py": 1.0, "b.py": 20.0}))
    names = ["a.py::one", "b.py::one", "b.py::two", "new.py::one", f"{FIRST}::one"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(items, file)
    assert [item.nodeid for item in items] == ["new.py::one", f"{FIRST}::one", "b.py::one", "b.py::two", "a.py::one"]


def test_durations_of_a_part_of_the_files_leave_the_others(tmp_path):
    """Of files that are no more nothing is kept."""
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"a.py": 1.0, "b.py": 20.0, "gone.py": 3.0}))
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    plugin = Durations(file)
    for nodeid, seconds in (("a.py::one", 2.0), ("a.py::two", 0.25), ("a.py::two", 0.25)):  # a setup and a call
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    plugin.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path)))
    assert json.loads(file.read_text()) == {"a.py": 2.5, "b.py": 20.0}
