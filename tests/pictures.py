"""What libraries do for long: pictures take most of the time of a page, and are left out, or drawn without a tracer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure
from tracing import untraced

from ensemble_ml import cli


@contextmanager
def undrawn_figures() -> Iterator[None]:
    """Make the figures and the page around them, but no pictures, for tests that look at the page's words alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, out, **_: out.write(b"\x89PNG"))
        yield


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Draw no picture in this test."""
    with undrawn_figures():
        yield


@pytest.fixture(autouse=True, scope="session")
def libraries_untraced() -> Iterator[None]:
    """Draw pictures and compose settings without a tracer: nothing of ours runs there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", untraced(Figure.savefig))
        patch.setattr(cli, "compose", untraced(cli.compose))
        yield
