"""A folder as users of the Python API have it: the embedded archive at its smallest, a store of it, and a run."""

from __future__ import annotations

import os

import pytest
from commanding import QUICK, command
from fixtures_archive import tiny_archive  # noqa: F401


@pytest.fixture(scope="session")
def place(tiny_archive, tmp_path_factory):  # noqa: F811
    """Return a folder with archive, store.zarr, runs/first and forecast (by the command, from two members)."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "archive").symlink_to(tiny_archive)
    before = os.getcwd()
    os.chdir(folder)
    try:
        command(
            "prepare", "input=archive/ensemble", "truth=archive/truth", "static=archive/static.grib",
            "output=store.zarr",
        )  # fmt: skip
        command("train", "experiment=quickstart", "data.store=store.zarr", "run=first", *QUICK)
        command("predict", "checkpoint=runs/first", "input=archive/ensemble", "members_in=2", "output=forecast")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def here(place, monkeypatch):
    """Let the test stand in the folder."""
    monkeypatch.chdir(place)
    return place
