"""MosaicML Streaming as a rival: its packages in a folder of their own, and the data in its format.

Its dependencies would bring another torch, so that it is installed without them, and beside, not into, the environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from ensemble_ml.benchmarks.loaders.data import Size

_PACKAGES = (
    "mosaicml-streaming==0.13.0", "brotli", "python-snappy", "cramjam", "zstd", "xxhash", "boto3", "botocore",
    "s3transfer", "jmespath", "urllib3", "python-dateutil", "six", "catalogue", "requests", "charset-normalizer",
    "idna", "certifi", "filelock",
)  # fmt: skip
_WRITE = """
import sys
sys.path.insert(0, {packages!r})
from ensemble_ml.benchmarks.loaders.entrant import stand_in_for_unused_modules
stand_in_for_unused_modules()
import numpy as np
from streaming import MDSWriter
with MDSWriter(out={out!r}, columns={{"sample": "int", "values": "bytes"}}, size_limit={limit}) as writer:
    for sample in range({samples}):
        values = np.fromfile({raw!r} + f"/{{sample:05d}}.f32", np.float32)
        writer.write({{"sample": sample, "values": values.tobytes()}})
"""


def streaming_packages(folder: Path) -> Path | None:
    """Install Streaming into `folder`; None where that fails (no network)."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder), *_PACKAGES]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return None
    return folder


def write_shards(packages: Path, data: Path, size: Size) -> None:
    """Write `data`/mds: the raw samples in Streaming's format, one a shard, so that it evicts sample by sample."""
    text = _WRITE.format(
        packages=str(packages), out=str(data / "mds"), raw=str(data / "raw"), samples=size.samples,
        limit=size.bytes + 4096,
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)
    assert np.any([path.suffix == ".mds" for path in (data / "mds").iterdir()])
