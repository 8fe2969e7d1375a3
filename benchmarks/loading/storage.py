"""Emulate slow shared storage on one machine.

A preloaded library charges all reads under a folder to one token bucket.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ensemble_ml.errors import UserError


@dataclass(frozen=True)
class Storage:
    """The emulated storage of everything under `folder`.

    Attributes:
        folder: the folder.
        work: folder of the library and its counters.
        mb_s: bandwidth that all processes share.
        latency_us: latency of each request.
    """

    folder: Path
    work: Path
    mb_s: float = 300.0
    latency_us: float = 500.0

    @property
    def counters(self) -> Path:
        """Return the file that holds the counters of reads."""
        return self.work / "counters"

    def build(self) -> None:
        """Compile the library.

        Raises:
            UserError: there is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise UserError("benchmark=loading: needs a C compiler (cc) for the emulated storage; install gcc")
        self.work.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_name("throttle.c")
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(self.work / "throttle.so"), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    def environment(self) -> dict[str, str]:
        """Return the variables of the environment with which a process reads slowly."""
        return {
            "LD_PRELOAD": str(self.work / "throttle.so"),
            "STORAGE_PREFIX": str(self.folder.resolve()),
            "STORAGE_MB_S": str(self.mb_s),
            "STORAGE_LATENCY_US": str(self.latency_us),
            "STORAGE_COUNTERS": str(self.counters),
        }

    def reset(self) -> None:
        """Set the counters to zero. Running processes notice it, because the file stays the same."""
        with open(self.counters, "ab") as file:
            file.truncate(4096)
        with open(self.counters, "r+b") as file:
            file.write(bytes(32))

    def bytes_read(self) -> int:
        """Return the bytes that all processes have read since `reset`."""
        if not self.counters.exists():
            return 0
        return int(struct.unpack("4q", self.counters.read_bytes()[:32])[1])
