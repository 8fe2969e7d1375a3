"""Coverage is measured in the tests that are not slow: its tracer makes a test 1.5 to 1.9 times as long.

The marker `no_cover` of pytest-cov does not do: where xdist runs the tests, the tracer stays on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

import pytest

# Coverage counts calls and returns. A frame that takes the tracer away has to bring it back itself, or lines after it
# are counted to other files; so the same lines stand twice here.


def untraced(function: Callable) -> Callable:
    """Return the function as it is, but run without a tracer."""

    @functools.wraps(function)
    def call(*arguments, **settings):
        own = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*arguments, **settings)
        finally:
            sys.settrace(own)

    return call


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Take the tracer away while a slow test runs, its fixtures among it, and from threads that start meanwhile.

    It stays in tests that are marked `slow("traced")`: much of what they run is run by no other.
    """
    slow = item.get_closest_marker("slow")
    if slow is None or "traced" in slow.args:
        return (yield)
    own, others = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(own)
        threading.settrace(others)
