"""Property tests draw the same examples each time; HYPOTHESIS_PROFILE=search draws new ones, to look for more.

No test leaves the root logger changed for those after it.
"""

import logging
import os

import pytest
from hypothesis import settings

settings.register_profile(
    "same", derandomize=True, deadline=None
)  # machines are shared: a slow example is none that fails
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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
