"""What this process may use of its machine, and takes: cores, and memory, of which a control group may leave it less.

A batch system limits a job by its own control group, which lies below the root: /proc/self/cgroup says where.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP, _MEMINFO = Path("/proc/self/cgroup"), Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of mallopt(3)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> list[str]:
    """Models of the machine's processors, each once; none where /proc/cpuinfo is absent or names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith("model name")))


def let_waiting_threads_sleep() -> None:
    """Let threads of OpenMP that wait for work sleep; it takes effect where no library has loaded OpenMP yet.

    By default they look for work in a loop, which is a little faster on cores that nobody else wants. Beside other
    work a thread that looks takes the core from the one that it waits for: 150 steps of a small network by two threads
    on two cores, at a load of four, took 14.3 s of processor time, and take 6.0 s with threads that sleep, to the same
    bits. What the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory(*, arenas: int | None = None) -> None:
    """Let this process keep what freed arrays held for those to come, until it ends.

    glibc gives large blocks back to the kernel, which clears them page by page when the next step asks again: 190,000
    page faults a step of the U-Net at 8 x 128 x 256 and a sixth of its time on two cores; the largest resident size
    stayed the same. `arenas`: pools of blocks that threads begun from now on share; by default each has its own, and
    what one thread compresses and another writes wanders from pool to pool. Where the C library is another, nothing
    happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_MAX, 0)
    if arenas is not None:
        mallopt(_ARENA_MAX, arenas)


def taken_memory(*, addresses: bool = False) -> int | None:
    """Bytes that this process has in memory, or has `addresses` for; None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0 if addresses else 1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit() -> int:
    """Bytes that the processes of this job may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits())])


def free_memory() -> int:
    """Bytes that this process may still take; what the system keeps of files and gives up when asked counts as free."""
    return max(0, min([_available(), *(limit - used for limit, used in _limits())]))


def _available() -> int:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    """Limit, and what is used of it less what files take, of this process's control group and of those above it."""
    for folder, names in _groups():
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])  # "max" is none
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat.get(names[2], 0))
        except (OSError, ValueError):
            continue


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, names
            if folder == root:
                break
