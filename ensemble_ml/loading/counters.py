"""Count what a loader has moved from each tier and how long its user has waited, and record what its threads do.

`Timeline` draws a picture of what the threads do and when: they read, decode and write to caches, while the thread of
the user computes and waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ensemble_ml.errors import UserError

_MOST = 200_000  # spans that are kept, a few tens of megabytes; later ones are only counted
# kinds of spans, and their colours in the picture
KINDS = {"read": "tab:orange", "decode": "tab:blue", "keep": "tab:purple", "wait": "tab:red", "compute": "tab:green"}


@dataclass
class Counters:
    """The counters of a loader. Bytes of samples are counted by where they came from, in the size that they have there.

    Attributes:
        storage: Bytes read from slow storage, fallbacks included.
        ram: Bytes taken from the rank's own memory.
        disk: Bytes taken from the rank's own local disk.
        peers: Bytes taken from other ranks.
        fallback: Bytes that the plan expected from a peer or a cache, and that were read from slow storage instead.
        samples: Number of uses of samples.
        waited: Seconds for which the user of the loader waited for batches.
        lock: Lock for the threads that add to them.
    """

    storage: int = 0
    ram: int = 0
    disk: int = 0
    peers: int = 0
    fallback: int = 0
    samples: int = 0
    waited: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **more: float) -> None:
        """Add amounts to some of the counters, by name."""
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def snapshot(self) -> dict[str, float]:
        """Return all counters by name."""
        with self.lock:
            return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "lock"}


class Timeline:
    """A record of spans (kind, thread, begin, end) in seconds from the start. Any thread may add one.

    Without a path nothing is recorded.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path else None
        self.began = time.monotonic()
        self.spans: list[tuple[str, str, float, float]] = []
        self.lost = 0

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record how long the block takes."""
        if self.path is None:
            yield
            return
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, begin, time.monotonic())

    def add(self, kind: str, begin: float, end: float) -> None:
        """Record a span, given by two readings of `time.monotonic`."""
        if self.path is None:
            return
        if len(self.spans) >= _MOST:
            self.lost += 1
            return
        self.spans.append((kind, threading.current_thread().name, begin - self.began, end - self.began))

    def draw(self) -> None:
        """Draw the picture, with one row for each thread and one colour for each kind. Without spans, do nothing.

        Raises:
            UserError: The file cannot be written, or its ending is not a known format.
        """
        if self.path is None or not self.spans:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        # The main thread, which trains, gets the first row.
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
