"""Compile the loops of `ensemble_ml/store/native.c` when the package is built, if there is a compiler.

The library does not depend on the version of Python, because it is called by ctypes. If it cannot be compiled, the
package is installed without it, and NumPy does its work.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SOURCE = "ensemble_ml/store/native.c"
LIBRARY = "ensemble_ml/store/_native.so"
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared"]


class NativeLoops(BuildHookInterface):
    """A build hook that puts the library into wheels, or beside its source where the package is installed in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library. If that fails, warn and go on without it."""
        root = Path(self.root)
        self._folder = Path(tempfile.mkdtemp(prefix="ensemble-ml-"))
        library = self._folder / Path(LIBRARY).name
        try:
            compile_library(root / SOURCE, library)
            if version == "editable":
                put(library, root / LIBRARY)
        except RuntimeError as failure:
            self.app.display_warning(f"{SOURCE} was not compiled ({failure}); NumPy does its work")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def compile_library(source: Path, library: Path) -> None:
    """Compile `source` into `library` with the compiler of the environment variable CC, or cc.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    digest = zlib.crc32(source.read_bytes())
    try:
        done = subprocess.run(
            [*compiler, *FLAGS, f"-DSOURCE={digest}u", "-o", str(library), str(source), "-lm"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise RuntimeError(f"{compiler[0]}: {error.strerror}") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"{compiler[0]} failed"])[0])


def put(library: Path, place: Path) -> None:
    """Put `library` at `place` by a rename, which leaves processes that have loaded the old one undisturbed.

    Raises:
        RuntimeError: The folder cannot be written.
    """
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        shutil.copy(library, draft)
        draft.rename(place)
    except OSError as error:
        raise RuntimeError(f"{place}: {error.strerror}") from error


def _platform() -> str:
    if sys.platform == "darwin":  # there, the platform that Python was built for may not be the one that pip accepts
        return next(iter(platform_tags()))
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
