"""A lazy forecast takes the memory of a few batches, however many start dates there are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def measured(folder, dates):
    """Return what a process of its own takes for so many start dates, in MB."""
    folder.mkdir()
    script = Path(__file__).with_name("lazy_memory.py")
    command = [sys.executable, script, "91", "180", str(dates), "8", folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dates(tmp_path):
    few, many = (measured(tmp_path / str(dates), dates) for dates in (16, 48))  # batches of eight
    more = sum(many[name] - few[name] for name in ("read", "written"))
    assert more > 700 and many["peak"] - few["peak"] < more / 2, (few, many)
