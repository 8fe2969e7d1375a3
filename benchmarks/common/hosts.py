"""Run commands on several hosts: network namespaces joined by shaped links, or processes on this host's loopback.

Namespaces need root, `ip`, `tc` and scripts/links.sh. Ranks on the loopback share the memory bus of one machine and
have no link, so their times say nothing about networks. In both cases a rank finds its place in RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, and the kernel counts the bytes that cross its interface.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ensemble_ml.distributed.world import free_port
from ensemble_ml.errors import UserError
from ensemble_ml.machine import cores

log = logging.getLogger(__name__)

_WORDS = {"none": "unshaped", "100mbit": "100 Mbit", "1gbit": "1 Gbit"}
_LOCK = Path("/run/ensemble_ml-links.lock")  # /run is where the namespaces have their names, too
LINKS = Path(__file__).resolve().parents[2] / "scripts" / "links.sh"


@dataclass(frozen=True)
class Hosts:
    """Several hosts.

    Attributes:
        count: number of hosts.
        rate: rate of their links as tc writes it, or None for the loopback.
        cores: cores that each linked host has for itself, or None if they share all.
    """

    count: int
    rate: str | None = None
    cores: float | None = None

    @property
    def where(self) -> str:
        """Return the links in words."""
        return _WORDS.get(self.rate, self.rate) if self.rate is not None else "the loopback"

    def run(self, command: Sequence[str], *, seconds: float, environment: dict[str, str] | None = None) -> None:
        """Run a command once on every host.

        Args:
            command: the command.
            seconds: time limit.
            environment: further variables of the environment.

        Raises:
            UserError: the command failed on a host, or took longer than `seconds`.
        """
        common = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())} | (environment or {})
        if self.rate is not None:
            common |= {} if self.cores is None else {"HOST_CORES": f"{self.cores:g}"}
            started = [_start(["bash", str(LINKS), "run", str(self.count), *command], common)]
        else:
            common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(self.count)}
            started = [
                _start(command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(self.count)
            ]
        _wait(started, command, seconds)


def address_of(rank: int) -> str:
    """Return the address of another host of the same run, by what `run` sets in the environment.

    Args:
        rank: its number.
    """
    first = os.environ["MASTER_ADDR"]
    return first if first.startswith("127.") else f"{first.rpartition('.')[0]}.{rank + 1}"


def available() -> str:
    """Return why linked hosts cannot be made here, or an empty text if they can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "unshare", "bash") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "" if LINKS.exists() else f"{LINKS} is absent: run from a checkout"


def fair_share(count: int) -> float | None:
    """Return the cores for each host if there are fewer cores than hosts, so that no host works while another waits.

    The result is None if there are enough cores, or if control groups cannot be made.

    Args:
        count: number of hosts.
    """
    if cores() >= count:
        return None
    return cores() / count if _control_groups() else None


def _control_groups(root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return whether control groups (version 1 or 2) that limit the processor can be made."""
    if (root / "cpu").is_dir():
        return os.access(root / "cpu", os.W_OK)
    try:
        (root / "cgroup.subtree_control").write_text("+cpu")
    except OSError:  # no such file, not root, or a container whose processes are in the root group
        return False
    return os.access(root, os.W_OK)


@contextmanager
def linked(count: int, rate: str, cores: float | None = None) -> Iterator[Hosts]:
    """Provide hosts joined by links of `rate`, which are removed at the end.

    Their names are the same for all programs of a machine, so another that has such hosts is waited for.

    Args:
        count: number of hosts.
        rate: rate of the links as tc writes it.
        cores: cores for each host, or None.
    """
    with _LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another program has hosts joined by links; they are waited for")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            up = ["bash", str(LINKS), "up", str(count), rate]
            made = subprocess.run(up, check=False, capture_output=True, text=True)
            if made.returncode:
                told = " | ".join(made.stderr.strip().splitlines()[-2:])
                raise UserError(f"links of {rate} between {count} hosts: {told}")
            yield Hosts(count, rate, cores)
        finally:
            subprocess.run(["bash", str(LINKS), "down", str(count)], check=False, capture_output=True)


def python(*arguments: str) -> list[str]:
    """Return a command of this interpreter.

    Args:
        *arguments: its arguments.
    """
    return [sys.executable, *arguments]


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command with further variables of the environment."""
    # Each command gets its own process group, so that all of its processes can be ended.
    return subprocess.Popen(
        list(command), env=os.environ | environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def _wait(started: Sequence[subprocess.Popen[str]], command: Sequence[str], seconds: float) -> None:
    """Wait for all commands. End those that are left, and raise a UserError, once one fails or they take too long."""
    with ThreadPoolExecutor(len(started)) as pool:
        waiting = {pool.submit(process.communicate): process for process in started}  # a full pipe would stop a rank
        try:
            for one in as_completed(waiting, seconds):
                if status := waiting[one].returncode:
                    last = " | ".join(one.result()[1].strip().splitlines()[-3:])
                    raise UserError(f"{' '.join(command)}: ended with status {status}: {last}")
        except TimeoutError as error:
            raise UserError(f"{' '.join(command)}: took longer than {seconds:g} s") from error
        finally:
            for process in started:
                if process.poll() is None:
                    with suppress(ProcessLookupError):  # it has ended since
                        os.killpg(process.pid, 9)
