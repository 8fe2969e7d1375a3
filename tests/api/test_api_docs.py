"""What documentation shows of the Python API runs: examples in docstrings, the page, and the README's names."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import ensemble_ml as eml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh(place, tmp_path, monkeypatch):
    """Let the test stand in a folder of its own with archive, store and run."""
    for name in ("archive", "store.zarr", "runs"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["api.model", "api.opening", "api.preparing", "api.training", "api.verifying", "plot"])
def test_examples_in_docstrings(fresh, name):
    found = doctest.testmod(importlib.import_module(f"ensemble_ml.{name}"))
    assert found.attempted and not found.failed


@pytest.mark.slow
def test_the_page_runs(fresh):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert len(blocks) == 8 and names["plain"].sizes["forecast_reference_time"] == 2
    assert {"spread.png", "fan.png", "reliability.png", "report.html"} <= {path.name for path in fresh.iterdir()}


def test_names_in_the_readme_are_there():
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("In Python, with") :].split("##")[0]
    used = set(re.findall(r"eml\.(\w+)", section))
    assert used == {"open", "prepare", "train", "load", "calibrate", "verify", "plot"} and used < set(eml.__all__)


@pytest.mark.parametrize("name", [name for name in eml.__all__ if name not in ("__version__", "plot")])
def test_docstrings_of_public_names_are_whole(name):
    public = getattr(eml, name)
    methods = [one for _, one in inspect.getmembers(public, inspect.isfunction)]
    functions = [public] if inspect.isfunction(public) else methods
    for one in functions:
        if one.__name__.startswith("_"):
            continue
        text = inspect.getdoc(one) or ""
        assert text.split()[0] not in ("The", "A", "What") and text.split("\n")[0].endswith("."), one
        arguments = [name for name in inspect.signature(one).parameters if name not in ("self", "overwrite")]
        if len(arguments) > 1:
            assert all(part in text for part in ("Args:", "Returns:", "Raises:", "Example:")), one
            assert all(re.search(rf"\b{argument}\b", text) for argument in arguments), one
