"""When each thread of a loader read, decoded and wrote, and when its user computed and waited: a picture of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ensemble_ml.errors import UserError

_MOST = 200_000  # spans that are kept, a few tens of megabytes; later ones are counted only
KINDS = {"read": "tab:orange", "decode": "tab:blue", "keep": "tab:purple", "wait": "tab:red", "compute": "tab:green"}


class Timeline:
    """Spans (kind, thread, begin, end) in seconds from the start; any thread may add. Without a path: none is kept."""

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path else None
        self.began = time.monotonic()
        self.spans: list[tuple[str, str, float, float]] = []
        self.lost = 0

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Note how long the block takes."""
        if self.path is None:
            yield
            return
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, begin, time.monotonic())

    def add(self, kind: str, begin: float, end: float) -> None:
        """Note a span, by `time.monotonic`."""
        if self.path is None:
            return
        if len(self.spans) >= _MOST:
            self.lost += 1
            return
        self.spans.append((kind, threading.current_thread().name, begin - self.began, end - self.began))

    def draw(self) -> None:
        """Write the picture: a row a thread, a colour a kind.

        Raises:
            UserError: the file cannot be written, or is of no known kind.
        """
        if self.path is None or not self.spans:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        threads = sorted({name for _, name, _, _ in self.spans}, key=lambda name: (name != "MainThread", name))
        figure = Figure(figsize=(14, 1.2 + 0.5 * len(threads)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for kind, colour in KINDS.items():
            for row, thread in enumerate(threads):
                bars = [(a, b - a) for k, name, a, b in self.spans if (k, name) == (kind, thread)]
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, label=kind if row == 0 else None)
        axes.set_yticks(range(len(threads)), ["training" if name == "MainThread" else name for name in threads])
        axes.set_xlabel("seconds" + (f" (the last {self.lost} spans are left out)" if self.lost else ""))
        axes.invert_yaxis()
        axes.legend(ncols=len(KINDS), loc="lower left", bbox_to_anchor=(0, 1))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"loading.timeline={self.path}: cannot be written ({error}); give a .png or .svg"
            ) from error
