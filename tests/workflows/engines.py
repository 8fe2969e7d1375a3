"""Programs of workflow engines, which have an environment of their own, and servers and workers that tests start."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "scripts" / "workflows"
HOME = Path(os.environ.get("ENSEMBLE_ML_ENGINES", ROOT / ".engines"))
_CALLS = """#!/bin/sh
exec env PYTHONPATH={root} {python} -m ensemble_ml "$@"
"""


def engine(name: str) -> str:
    """Return the path of an engine's program, or skip the test."""
    found = shutil.which(name, path=f"{HOME / 'bin'}:{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed; pip install -r scripts/workflows/requirements.txt, or .ci/run, does so")
    return found


def environment(folder: Path, command: str = "") -> dict[str, str]:
    """Return the environment of an engine, in which `ensemble-ml` is that of this checkout or a script."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    program = programs / "ensemble-ml"
    program.write_text(command or _CALLS.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    (folder / "home").mkdir(exist_ok=True)
    own = {"HOME": str(folder / "home"), "C_FORCE_ROOT": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PATH": f"{programs}:{HOME / 'bin'}:{os.environ['PATH']}"}


def free_port() -> int:
    """Return a port of the loopback that is free now, below those that the kernel hands out: ecFlow takes no other."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as asked:
            asked.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return asked.getsockname()[1]


@contextmanager
def redis(folder: Path):
    """Run a redis server with a password on the loopback, and leave Merlin's settings for it in `folder`/app.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    port, password = free_port(), folder / "password"
    password.write_text("not-a-secret")
    place = f"name: redis, username: '', password: {password}, server: 127.0.0.1, port: {port}, db_num: 0"
    key = folder / "key"
    (folder / "app.yaml").write_text(f"broker: {{{place}}}\nresults_backend: {{{place}, encryption_key: {key}}}\n")
    command = [engine("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    command += ["--requirepass", "not-a-secret", "--save", "", "--appendonly", "no"]
    with (folder / "redis.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: "Ready to accept" in (folder / "redis.log").read_text(), "redis to start", 30)
        yield port
    finally:
        server.kill()
        server.wait()


@contextmanager
def worker(folder: Path, environ: dict[str, str], processes: int = 1):
    """Run a worker of Merlin's queue; it reads app.yaml of `folder`."""
    command = [engine("celery"), "-A", "merlin", "worker", "-c", str(processes), "-O", "fair", "-l", "INFO"]
    command += ["--prefetch-multiplier", "1", "-n", "worker.%h", "-Q", "[merlin]_merlin"]
    with (folder / "worker.log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def kill_tree(pid: int) -> None:
    """End a process and all that it started at once, as a node does that loses power."""
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:  # the parents first, so that nobody starts a child anew
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    psutil.wait_procs(processes, timeout=30)


def wait_for(condition, what: str, seconds: float) -> None:
    """Wait until a condition holds; fail after a time."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)
