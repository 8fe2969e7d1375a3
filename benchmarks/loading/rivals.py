"""The competitors of the race: their packages in separate environments, and the data in their formats.

The dependencies of Streaming would bring another torch. It is therefore installed without them, beside the environment
and not into it. insitubatch needs Python 3.12, and no torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.loading.lap import Size
from ensemble_ml.errors import UserError

_STREAMING = (
    "mosaicml-streaming==0.13.0", "brotli", "python-snappy", "cramjam", "zstd", "xxhash", "boto3", "botocore",
    "s3transfer", "jmespath", "urllib3", "python-dateutil", "six", "catalogue", "requests", "charset-normalizer",
    "idna", "certifi", "filelock",
)  # fmt: skip
_INSITUBATCH = "insitubatch==0.2.0"
_WRITE_SHARDS = """
import sys
sys.path.insert(0, {packages!r})
from benchmarks.loading.entrant import stand_in_for_unused_modules
stand_in_for_unused_modules()
import numpy as np
from streaming import MDSWriter
options = dict(out={out!r}, columns={{"sample": "int", "values": "bytes"}}, size_limit={limit}, compression={code!r})
with MDSWriter(**options) as writer:
    for sample in range({samples}):
        values = np.fromfile({raw!r} + f"/{{sample:05d}}.f32", np.float32)
        writer.write({{"sample": sample, "values": values.tobytes()}})
"""
_WRITE_ZARR = """
import numpy as np, zarr
from zarr.codecs import BloscCodec
shape = {shape!r}
codecs = [BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")] if {compress} else None
group = zarr.open_group({out!r}, mode="w", zarr_format=3)
array = group.create_array("values", shape=({samples}, *shape), chunks=(1, *shape), dtype="float32", compressors=codecs)
for sample in range({samples}):
    array[sample] = np.fromfile({raw!r} + f"/{{sample:05d}}.f32", np.float32).reshape(shape)
"""


def streaming_packages(folder: Path) -> tuple[Path | None, str]:
    """Install Streaming below a folder. Return where it is, or None and the reason if that fails.

    Args:
        folder: the folder.
    """
    where = folder / "streaming"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(where), *_STREAMING]
    return _made(where, [command])


def insitubatch_python(folder: Path) -> tuple[Path | None, str]:
    """Return the interpreter of an environment with insitubatch, or None and the reason if there is none.

    Args:
        folder: the folder of the environment.
    """
    python = _python()
    if python is None:
        return None, "it needs Python 3.12 or later, and there is none here"
    where = folder / "insitubatch"
    install = [str(where / "bin" / "python"), "-m", "pip", "install", "-qq", _INSITUBATCH]
    found, why = _made(where, [[python, "-m", "venv", str(where)], install])
    return (where / "bin" / "python" if found else None), why


def _python() -> str | None:
    """Return an interpreter of Python 3.12 or later that starts, or None."""
    for name in (sys.executable, *filter(None, map(shutil.which, ("python3.12", "python3.13", "python3.14")))):
        check = [name, "-c", "import sys, venv; print(sys.executable); sys.exit(sys.version_info < (3, 12))"]
        told = subprocess.run(check, capture_output=True, text=True, check=False)
        if told.returncode == 0:
            return told.stdout.strip()
    return None


def _made(where: Path, commands: list[list[str]]) -> tuple[Path | None, str]:
    """Run commands once. A complete result of an earlier run is kept."""
    done = where.with_suffix(".complete")
    if done.exists():
        return where, ""
    shutil.rmtree(where, ignore_errors=True)
    where.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.CalledProcessError as error:
            return None, (error.stderr.strip().splitlines() or ["failed"])[-1]
        except (OSError, subprocess.SubprocessError) as error:
            return None, str(error)
    done.touch()
    return where, ""


def write_shards(packages: Path, data: Path, size: Size, compression: str | None = None) -> str:
    """Write the samples in Streaming's format, one a shard, so that it can evict sample by sample. Return the folder.

    Args:
        packages: the folder in which Streaming is installed.
        data: the folder of the data.
        size: number and shape of the samples.
        compression: name of the compression, or None.
    """
    name = "mds" if compression is None else f"mds-{compression.replace(':', '-')}"
    text = _WRITE_SHARDS.format(
        packages=str(packages), out=str(data / name), raw=str(data / "raw"), samples=size.samples,
        limit=size.bytes + 4096, code=compression,
    )  # fmt: skip
    return _write([sys.executable, "-c", text], data / name, size)


def write_zarr(python: Path, data: Path, size: Size, *, compress: bool) -> str:
    """Write the samples as a Zarr array with one sample a chunk, which insitubatch reads best. Return its folder.

    Args:
        python: the interpreter.
        data: the folder of the data.
        size: number and shape of the samples.
        compress: whether chunks are compressed.
    """
    name = "lz4.zarr" if compress else "plain.zarr"
    text = _WRITE_ZARR.format(
        shape=size.shape, compress=compress, out=str(data / name), samples=size.samples, raw=str(data / "raw")
    )
    return _write([str(python), "-c", text], data / name, size)


def _write(command: list[str], folder: Path, size: Size) -> str:
    """Run the writer of a folder once for samples of a size."""
    done, told_size = folder.with_suffix(folder.suffix + ".complete"), repr(size)
    if not done.exists() or done.read_text() != told_size:
        done.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        if told.returncode:
            raise UserError(f"{folder}: {(told.stderr.strip().splitlines() or ['was not written'])[-1]}")
        done.write_text(told_size)
    return folder.name
