"""Programs of workflow engines, and the servers and workers that they need, each for as long as a block of code runs.

The engines have an environment of their own: $ENSEMBLE_ML_ENGINES, or .engines in the checkout, which .ci/run makes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from ensemble_ml.distributed.world import free_port

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("ENSEMBLE_ML_ENGINES", ROOT / ".engines"))
QUEUE = "[merlin]_merlin"
_PASSWORD = "not-a-secret"
_COMMAND = """#!/bin/sh
exec env PYTHONPATH={root} {python} -m ensemble_ml "$@"
"""


def find(name: str) -> str | None:
    """Return the path of a program, or None.

    Args:
        name: name of the program.
    """
    return shutil.which(name, path=f"{HOME / 'bin'}:{os.environ['PATH']}:/usr/sbin")


def environment(folder: Path, command: str = "") -> dict[str, str]:
    """Return the environment of an engine, in which `ensemble-ml` is that of this checkout or a script.

    Args:
        folder: takes the home folder of the engine, and the script.
        command: the script; empty for this checkout's program.
    """
    (folder / "home").mkdir(parents=True, exist_ok=True)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "ensemble-ml"
    program.write_text(command or _COMMAND.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    own = {"HOME": str(folder / "home"), "C_FORCE_ROOT": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PATH": f"{programs}:{HOME / 'bin'}:{os.environ['PATH']}"}


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Wait until a condition holds.

    Args:
        condition: the condition.
        what: what is waited for, in words.
        seconds: how long at most.

    Raises:
        TimeoutError: it did not hold in time.
    """
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def kill_tree(pid: int) -> None:
    """End a process and all that it started at once, as a node does that loses power.

    Args:
        pid: its id.
    """
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:  # the parents first, so that nobody starts a child anew
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)


@contextmanager
def _running(command: list[str], log: Path, environ: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen]:
    """Run a program in a folder, and end it with all that it started."""
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


@contextmanager
def redis(folder: Path) -> Iterator[int]:
    """Run a redis server with a password on the loopback, and leave Merlin's settings for it in `folder`/app.yaml.

    Args:
        folder: takes files of the server.

    Yields:
        Its port.
    """
    port, password = free_port(), folder / "password"
    password.write_text(_PASSWORD)
    place = f"name: redis, username: '', password: {password}, server: 127.0.0.1, port: {port}, db_num: 0"
    key = folder / "key"
    (folder / "app.yaml").write_text(f"broker: {{{place}}}\nresults_backend: {{{place}, encryption_key: {key}}}\n")
    log = folder / "redis.log"
    command = [find("redis-server") or "redis-server", "--bind", "127.0.0.1", "--port", str(port)]
    command += ["--dir", str(folder), "--requirepass", _PASSWORD, "--save", "", "--appendonly", "no"]
    with _running(command, log, os.environ, folder):
        wait_for(lambda: "Ready to accept" in log.read_text(), "redis to start", 30)
        yield port


@contextmanager
def worker(folder: Path, environ: Mapping[str, str], processes: int = 1) -> Iterator[subprocess.Popen]:
    """Run a worker of Merlin's queue, which reads `folder`/app.yaml.

    Args:
        folder: its working folder.
        environ: its environment.
        processes: tasks at once.

    Yields:
        Its process.
    """
    # Merlin takes a task's worker from the name, and fails where that has no dot.
    command = [find("celery") or "celery", "-A", "merlin", "worker", "-c", str(processes), "-O", "fair", "-l", "INFO"]
    command += ["--prefetch-multiplier", "1", "-n", "worker.%h", "-Q", QUEUE]
    with _running(command, folder / "worker.log", environ, folder) as process:
        yield process


@contextmanager
def ecflow(folder: Path, environ: Mapping[str, str]) -> Iterator[Callable[..., str]]:
    """Run an ecFlow server.

    Args:
        folder: takes files of the server.
        environ: its environment.

    Yields:
        A function that calls the client with arguments, and returns what it prints, or nothing if it fails.
    """
    home = folder / "server"
    home.mkdir()
    environ = {**environ, "ECF_PORT": str(free_port()), "ECF_HOST": "localhost", "ECF_HOME": str(home)}
    client = find("ecflow_client") or "ecflow_client"

    def call(*arguments: str) -> str:
        done = subprocess.run([client, *arguments], env=environ, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    command = [find("ecflow_server") or "ecflow_server", "--port", environ["ECF_PORT"]]
    with _running(command, folder / "server.log", environ, home):
        wait_for(lambda: call("--ping"), "the ecFlow server", 60)
        call("--restart")  # it is halted at first
        yield call
