"""An arena gives its descriptor back where it cannot be made, and its units are read whole."""

import os

import numpy as np
import pytest

from ensemble_ml.loading.arena import Arena, read_extents


def test_a_unit_is_read_in_as_many_calls_as_the_system_needs(monkeypatch):
    """One call gives at most 2 GiB."""
    arena, data = Arena(1 << 16), np.arange(20_000, dtype=np.uint16).view(np.uint8)
    extents = arena.put(data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:9000]], offset))
    assert np.array_equal(read_extents(arena.fd, extents), data)
    with pytest.raises(OSError, match="shorter than expected"):
        read_extents(arena.fd, ((arena.size - 4096, 8192),))
    arena.close()


def test_an_arena_that_cannot_be_mapped_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Arena(1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before
