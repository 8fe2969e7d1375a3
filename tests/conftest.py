"""Property tests draw the same examples each time; HYPOTHESIS_PROFILE=search draws new ones, to look for more."""

import os

from hypothesis import settings

settings.register_profile(
    "same", derandomize=True, deadline=None
)  # machines are shared: a slow example is none that fails
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
