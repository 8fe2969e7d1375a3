"""Build hook: compiles the loops of `ensemble_ml/store/native.c` where there is a compiler.

The library has no ties to a version of Python (it is called by ctypes). Where it cannot be made, the package is
installed without it, and NumPy does that work.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("ensemble_ml/store/native.c")
LIBRARY = Path("ensemble_ml/store/_native.so")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared"]


class NativeLoops(BuildHookInterface):
    """Adds the library to wheels, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform; called by hatchling."""
        failure = compile_library(Path(self.root))
        if failure:
            self.app.display_warning(f"{SOURCE} was not compiled ({failure}); NumPy does its work")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(root: Path) -> str:
    """Make `root`/LIBRARY; return why not, or nothing. Renamed into place: another process may have it loaded."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    draft = (root / LIBRARY).with_suffix(f".{os.getpid()}")
    source = zlib.crc32((root / SOURCE).read_bytes())
    command = [*compiler, *FLAGS, f"-DSOURCE={source}u", "-o", str(draft), str(root / SOURCE), "-lm"]
    (root / LIBRARY).unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    if done.returncode:
        draft.unlink(missing_ok=True)
        return (done.stderr.strip().splitlines() or [f"{compiler[0]} failed"])[0]
    draft.rename(root / LIBRARY)
    return ""
