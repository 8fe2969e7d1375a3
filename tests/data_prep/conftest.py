"""The archive that builds are tried on, and what becomes of it; a file may have its own."""

import building
import pytest
from building import config

from data_prep import prepare


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return building.archive(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def whole(archive):
    """Files of the store that an uninterrupted build on one thread makes."""
    return building.contents(prepare(config(archive, archive.parent / "whole.zarr", workers=1)))
