"""Commands on several hosts: network namespaces joined by shaped links, or processes on this host's loopback.

Namespaces need root, `ip`, `tc` and scripts/links.sh; ranks on the loopback share one machine's memory bus and no link,
so their times say nothing of networks. In both cases a rank finds its place in RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, and the kernel counts the bytes that cross its interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ensemble_ml.distributed.world import free_port
from ensemble_ml.errors import UserError
from ensemble_ml.machine import cores

_WORDS = {"none": "unshaped", "100mbit": "100 Mbit", "1gbit": "1 Gbit"}
LINKS = Path(__file__).resolve().parents[3] / "scripts" / "links.sh"


@dataclass(frozen=True)
class Hosts:
    """`count` hosts; `rate` of their links as tc writes it, None for the loopback; `cores`: how much processor each
    linked host has of its own, None where they share what there is."""

    count: int
    rate: str | None = None
    cores: float | None = None

    @property
    def where(self) -> str:
        """The links in words."""
        return _WORDS.get(self.rate, self.rate) if self.rate is not None else "the loopback"

    def run(self, command: Sequence[str], *, seconds: float, environment: dict[str, str] | None = None) -> None:
        """Run `command` once on every host.

        Raises:
            UserError: one of them failed or took longer than `seconds`.
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


def available() -> str:
    """Why hosts with links of their own cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "unshare", "bash") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "" if LINKS.exists() else f"{LINKS} is absent: run from a checkout"


def fair_share(count: int) -> float | None:
    """Cores for each of `count` hosts where there are fewer than hosts, so that none works while another waits; None
    where there are enough, or where control groups cannot be made."""
    if cores() >= count:
        return None
    return cores() / count if _control_groups() else None


def _control_groups(root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether groups that limit the processor can be made, of the first version or the second."""
    if (root / "cpu").is_dir():
        return os.access(root / "cpu", os.W_OK)
    try:
        (root / "cgroup.subtree_control").write_text("+cpu")
    except OSError:  # none, not root, or a container whose processes stand in the root group
        return False
    return os.access(root, os.W_OK)


@contextmanager
def linked(count: int, rate: str, cores: float | None = None) -> Iterator[Hosts]:
    """Hosts joined by links of `rate`, gone at the end."""
    try:
        made = subprocess.run(["bash", str(LINKS), "up", str(count), rate], check=False, capture_output=True, text=True)
        if made.returncode:
            raise UserError(
                f"links of {rate} between {count} hosts: {' | '.join(made.stderr.strip().splitlines()[-2:])}"
            )
        yield Hosts(count, rate, cores)
    finally:
        subprocess.run(["bash", str(LINKS), "down", str(count)], check=False, capture_output=True)


def python(*arguments: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *arguments]


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    # A group of its own, so that all of its processes can be ended.
    return subprocess.Popen(
        list(command), env=os.environ | environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def _wait(started: Sequence[subprocess.Popen[str]], command: Sequence[str], seconds: float) -> None:
    try:
        told = [process.communicate(timeout=seconds)[1] for process in started]
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{' '.join(command)}: took longer than {seconds:g} s") from error
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    for process, text in zip(started, told, strict=True):
        if process.returncode:
            last = " | ".join(text.strip().splitlines()[-3:])
            raise UserError(f"{' '.join(command)}: ended with status {process.returncode}: {last}")
