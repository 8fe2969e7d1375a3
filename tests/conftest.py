"""Tests see no GPU, but where TEST_GPU=1 says so: it is for those marked `gpu`, and others start their ranks as forks,
which no process that has met CUDA survives.

Property tests draw the same examples each time; HYPOTHESIS_PROFILE=search draws new ones, to look for more.

No test leaves the root logger changed for those after it. Fits are short and shared (`quick_fits`).

Files come in the order of durations.json, the longest first, so that workers end together; a file that it lacks comes
before all. `python -m pytest -n 2 --dist loadscope --write-durations` writes it anew.
"""

import contextlib
import gc
import logging
import os
import sys

if os.environ.get("TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
# As the command line does, before torch looks: beside other programs, the fits of a lesson took many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from durations import Durations, longest_first
from hypothesis import settings
from pictures import libraries_untraced  # noqa: F401
from quick_fits import fields_read_once, fits_folder, golden_fits, own_fits, short_fits, whole_fits  # noqa: F401
from stores import stores_made_once  # noqa: F401
from tracing import pytest_runtest_protocol  # noqa: F401

from ensemble_ml.machine import return_freed_memory

gc.disable()  # while all test files are imported: the collector would take a fifth of the time

settings.register_profile(
    "same", derandomize=True, deadline=None
)  # machines are shared: a slow example is none that fails
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


with contextlib.suppress(ImportError):
    import absl.logging

    # A sweep of Hydra's closes all handlers, and absl's (TensorBoard's logger) closes the stream that it found as
    # sys.stderr, which is pytest's file of captured output.
    absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help="write how long each test file took, to order them")


def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        gc.enable()  # workers collect the tests, not this process
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):  # workers tell the controller
        config.pluginmanager.register(Durations())


def pytest_collection_modifyitems(items):
    """Put the longest files first, and leave out what needs a GPU where none is to be seen."""
    longest_first(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here, or TEST_GPU is not 1"))


def pytest_collection_finish():
    """Keep the collector from what is there to stay: half a second each time where torch and jax are imported, in the
    tests and in their ranks."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def freed_memory_returned():
    """Ranks are forks, and the kernel copies the table of this process's pages for each: of 4 GB that takes long.

    A training keeps the memory that it has freed.
    """
    yield
    gc.collect()
    return_freed_memory()


@pytest.fixture(autouse=True)
def root_logger_as_it_was():
    """A sweep of Hydra's within the process replaces its handlers, and its level, for good."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for added in set(root.handlers).difference(handlers):
        added.close()
    root.setLevel(level)
    root.handlers[:] = handlers
