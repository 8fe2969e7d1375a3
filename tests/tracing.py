"""Coverage is measured in the tests that are not slow: its tracer makes a test 1.5 times as long.

The marker `no_cover` of pytest-cov does not do: where xdist runs the tests, the tracer stays on.
"""

from __future__ import annotations

import sys
import threading

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Take the tracer away while a slow test runs, its fixtures among it, and from threads that start meanwhile."""
    if not item.get_closest_marker("slow"):
        return (yield)
    own, others = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(own)
        threading.settrace(others)
