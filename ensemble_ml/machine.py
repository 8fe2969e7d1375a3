"""The resources of the machine that this process may use, and those that it uses: cores and memory.

A control group (cgroup) may allow a process less memory than the machine has. A batch system gives each job a cgroup of
its own; /proc/self/cgroup names it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMBERSHIP, _MEMINFO = Path("/proc/self/cgroup"), Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # parameters of mallopt(3)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> list[str]:
    """Return the models of the machine's processors, each once; none if /proc/cpuinfo is absent or names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith("model name")))


def let_waiting_threads_sleep() -> None:
    """Let OpenMP threads that wait for work sleep. This only has an effect before a library loads OpenMP.

    By default they look for work in a loop, which is slightly faster on cores that nobody else uses. On a busy machine
    such a thread takes the core from the thread for which it waits. 150 steps of a small network by two threads on two
    cores, at a load of four, took 14.3 s of processor time; with sleeping threads they take 6.0 s, with identical
    results. An OMP_WAIT_POLICY that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Switch Python's garbage collector off in this context, and exclude all objects at its end from later collections.

    While torch is imported, the collector looks through all its objects again and again, and once more at the end. A
    command that imports the training took 2.4 s of processor time with it, and takes 1.7 s without. This does nothing
    if the collector is off, or if torch is imported already: garbage that the process has made since would otherwise
    never be collected.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory(*, arenas: int | None = None) -> None:
    """Let this process keep the memory of freed arrays for later ones, until it ends.

    glibc returns large blocks to the kernel, which clears them page by page when the next step asks again. For the
    U-Net at 8 x 128 x 256 these were 190,000 page faults a step, and a sixth of its time on two cores. The largest
    resident size stayed the same. With another C library nothing happens.

    Args:
        arenas: number of memory pools that threads started from now on share. None leaves glibc's own limit, eight for
            each core, which may take more memory if one thread allocates blocks and another one frees them.
    """
    if (mallopt := _of_libc("mallopt")) is None:
        return
    # By mallopt(3), -1 turns off the trimming of the heap. Without mmap, large blocks come from the heap as well.
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_MAX, 0)
    if arenas is not None:
        mallopt(_ARENA_MAX, arenas)


def return_freed_memory() -> None:
    """Return the memory of freed arrays of all threads to the kernel.

    glibc keeps blocks of some MB for the thread that made them. Where threads of Dask made fields and another thread
    predicted, glibc held twice the memory that was in use. With another C library nothing happens.
    """
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library by its name, or None if that library does not have it."""
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, TypeError, AttributeError):
        return None


def taken_memory(*, addresses: bool = False) -> int | None:
    """Return the resident memory of this process in bytes, or its address space; None if there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0 if addresses else 1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit() -> int:
    """Return the number of bytes that the processes of this job may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits())])


def free_memory() -> int:
    """Return the number of bytes that this process may still allocate.

    Most of the memory in which the system caches files counts as free, because it is given up on demand.
    """
    return max(0, min([_available(), *(limit - used for limit, used in _limits())]))


def _available() -> int:
    """Return the bytes that the machine has available, by /proc/meminfo if it is there."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of this process's control group and of those above it.

    Cached files that were not used lately do not count as use.
    """
    for folder, names in _groups():
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])  # "max" raises: there is no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat.get(names[2], 0))
        except (OSError, ValueError):
            continue


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder of each control group that may limit memory, with three names (cgroup v2 or v1).

    The names are those of the files of its limit and its use, and that of its inactive file cache in `memory.stat`.
    """
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
