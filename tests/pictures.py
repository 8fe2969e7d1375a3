"""What libraries do for long, drawing pictures and composing settings, is done without a tracer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure
from tracing import untraced

from ensemble_ml import compose


@pytest.fixture(autouse=True, scope="session")
def libraries_untraced() -> Iterator[None]:
    """Draw pictures and compose settings without a tracer: nothing of ours runs there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", untraced(Figure.savefig))
        patch.setattr(compose, "compose", untraced(compose.compose))
        yield
