"""Slow tests run without a tracer, and leave it to those after them."""

import sys
import threading
from types import SimpleNamespace

import pytest
import tracing


@pytest.mark.parametrize(
    ("mark", "slow"), [(pytest.mark.slow.mark, True), (pytest.mark.slow("traced").mark, False), (None, False)]
)
def test_slow_tests_alone_are_not_traced(mark, slow):
    def tracer(*_):
        return None

    item = SimpleNamespace(get_closest_marker=lambda name: mark)
    before = sys.gettrace(), threading.gettrace()
    sys.settrace(tracer)
    threading.settrace(tracer)
    try:
        around = tracing.pytest_runtest_protocol(item)
        next(around)
        meanwhile = sys.gettrace(), threading.gettrace()
        with pytest.raises(StopIteration, match="ran"):
            around.send("ran")
        after = sys.gettrace(), threading.gettrace()
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
    assert meanwhile == ((None, None) if slow else (tracer, tracer)) and after == (tracer, tracer)


def test_a_function_runs_untraced_and_its_caller_is_traced_on():
    seen = []

    def tracer(frame, event, _):
        if frame.f_code.co_filename == __file__:
            seen.append((frame.f_code.co_name, event))
        return tracer

    def within():
        return sys.gettrace()

    def caller():
        first = tracing.untraced(within)()
        return first

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert caller() is None and sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert seen.count(("caller", "line")) == 2 and ("caller", "return") in seen
    assert not any(name == "within" for name, _ in seen)


@pytest.mark.slow
def test_a_slow_test_sees_no_tracer():
    assert sys.gettrace() is None and threading.gettrace() is None
