"""An HTTP server of a folder's files with ranges of bytes and ETags, which answers late or wrongly where that is asked.

    python -m benchmarks.remote.server FOLDER ADDRESS PORT SECONDS

serves a folder until it is ended; every answer begins after SECONDS, as if the server were so far away. The body of a
request to /asked is JSON: the number of requests so far, and the bytes that were sent.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RESET, TRUNCATED, CHANGED = "reset", "truncated", "changed ETag"
Fault = int | str  # a status code, or one of the words above


@dataclass
class Plan:
    """What a server does beside serving files.

    Attributes:
        seconds: time before each answer.
        answers: for a part of a path, the fault that answers it: one always, or those of a list once each.
        nth: for the number of a request, counted from 0, its fault.
        asked: paths that were asked for, in their order.
        sent: bytes of bodies that were sent.
    """

    seconds: float = 0.0
    answers: dict[str, Fault | list[Fault]] = field(default_factory=dict)
    nth: dict[int, Fault] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, path: str) -> Fault | None:
        """Return the fault that answers a request, and note the request."""
        with self.lock:
            number = len(self.asked)
            self.asked.append(path)
            for part, faults in self.answers.items():
                if part in path and faults != []:
                    return faults.pop(0) if isinstance(faults, list) else faults
            return self.nth.get(number)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers to the requests of one connection, which stays open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise small answers wait for the acknowledgement of those before

    def __init__(self, *arguments: object, plan: Plan, directory: str):
        self.plan = plan
        super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with a file or a part of it."""
        if self.path == "/asked":
            self._send(200, json.dumps({"requests": len(self.plan.asked), "bytes": self.plan.sent}).encode())
            return
        fault = self.plan.fault(self.path)
        time.sleep(self.plan.seconds)
        if fault == RESET:
            # Without lingering, closing sends a reset in the place of an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._send(fault, b"")
            return
        place = Path(self.translate_path(self.path))
        if not place.is_file():
            self._send(404, b"")
            return
        status = place.stat()
        tag = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} {fault == CHANGED}".encode()).hexdigest()[:16]
        first, end, part = _range(self.headers.get("Range", ""), status.st_size)
        if first >= end and part:
            self._send(416, b"")
            return
        with place.open("rb") as file:
            file.seek(first)
            content = b"" if self.command == "HEAD" else file.read(end - first)
        told = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if part:
            told["Content-Range"] = f"bytes {first}-{end - 1}/{status.st_size}"
        self._send(206 if part else 200, content, told, length=end - first, cut=fault == TRUNCATED)

    do_HEAD = do_GET

    def _send(
        self,
        code: int,
        content: bytes,
        told: dict[str, str] | None = None,
        length: int | None = None,
        cut: bool = False,
    ) -> None:
        """Send an answer; half of what is announced if it is to be `cut`."""
        self.send_response(code)
        for name, value in (told or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        content = content[: len(content) // 2] if cut else content
        with self.plan.lock:
            self.plan.sent += len(content)
        self.wfile.write(content)
        self.close_connection = self.close_connection or cut

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def handle(self) -> None:
        """Answer until the connection ends, however the other side ends it."""
        try:
            super().handle()
        except OSError:
            self.close_connection = True


def _range(asked: str, size: int) -> tuple[int, int, bool]:
    """Return first byte and end of what a request asks for, and whether it asks for a part."""
    if not asked.startswith("bytes="):
        return 0, size, False
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, size - int(last))
    return start, min(int(last) + 1, size) if first and last else size, True


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """Print nothing of connections that the other side ended."""


@contextmanager
def serving(
    folder: str | os.PathLike, plan: Plan | None = None, address: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[str]:
    """Serve a folder from a thread of this process for the duration of a `with` block.

    Args:
        folder: the folder.
        plan: what to do beside.
        address: address and port; port 0 takes a free one.

    Yields:
        The URL of the folder.
    """
    handler = functools.partial(Handler, plan=plan or Plan(), directory=os.fspath(folder))
    server = _Server(address, handler)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    folder, host, port, seconds = sys.argv[1:]
    with serving(folder, Plan(seconds=float(seconds)), (host, int(port))):
        threading.Event().wait()
