"""Decide what a cache keeps when units are used at irregular times.

Each training sample shows a random subset of members, so the packed bytes of a member (here called a chunk) are used at
irregular intervals. All future uses are known in advance, so Belady's rule (1966, doi:10.1147/sj.52.0078) gives the
fewest misses: evict the chunk whose next use is farthest in the future. With bypass, a new chunk enters the cache only
if its next use comes before that of the chunks that it would evict.

The rule is optimal for chunks of one size. It is close to optimal for packed members, whose sizes are nearly equal.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decisions of a cache over a trace of A uses.

    Attributes:
        hit: (A,) bool, whether the cache holds the chunk of the use when it begins.
        keep: (A,) bool, whether the cache holds the chunk of the use after it.
        dropped: Pairs (use, chunk): the chunk leaves the cache when that use begins; A stands for the end of the trace.
    """

    hit: np.ndarray
    keep: np.ndarray
    dropped: tuple[tuple[int, int], ...]


def next_uses(chunks: np.ndarray) -> np.ndarray:
    """Return, for each use, the position of the next use of the same chunk.

    Args:
        chunks: (A,) chunk of each use, in order of time.

    Returns:
        (A,) int64 positions in the trace; NEVER where a chunk is not used again.
    """
    # A stable sort puts all uses of one chunk side by side and keeps them in order of time, so each is followed by its
    # successor.
    order = np.argsort(chunks, kind="stable")
    same = chunks[order][1:] == chunks[order][:-1]
    following = np.full(len(chunks), NEVER)
    following[order[:-1][same]] = order[1:][same]
    return following


def decide(chunks: np.ndarray, sizes: np.ndarray, capacity: int) -> Decisions:
    """Run Belady's rule with bypass over a trace.

    Args:
        chunks: (A,) chunk of each use, in order of time.
        sizes: Size of each chunk in bytes.
        capacity: Size of the cache in bytes.

    Returns:
        The decision at each use, and the evictions.
    """
    following = next_uses(chunks).tolist()
    hit, keep = np.zeros(len(chunks), bool), np.zeros(len(chunks), bool)
    resident: dict[int, int] = {}  # chunk -> its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, chunk); some entries are out of date
    room, dropped = int(capacity), []
    size_of = np.asarray(sizes).tolist()
    for use, (chunk, soon) in enumerate(zip(chunks.tolist(), following, strict=True)):
        # A chunk that is not in the cache enters it only if it is used again and is not larger than the whole cache.
        if chunk in resident:
            hit[use] = True
        elif soon == NEVER or size_of[chunk] > capacity:
            continue
        else:
            # Bypass: only chunks whose next use is later than that of the new one are evicted. If they do not free
            # enough space, nothing is evicted and their heap entries are restored.
            victims, gained = _victims(resident, farthest, size_of, size_of[chunk] - room, soon)
            if gained < size_of[chunk] - room:
                for victim in victims:
                    heapq.heappush(farthest, (-resident[victim], victim))
                continue
            for victim in victims:
                del resident[victim]
                dropped.append((use, victim))
            room += gained - size_of[chunk]
        # After its last use a chunk leaves the cache at once, so the next use can have its space.
        if soon == NEVER:
            del resident[chunk]
            room += size_of[chunk]
            dropped.append((use + 1, chunk))
            continue
        keep[use] = True
        resident[chunk] = soon
        heapq.heappush(farthest, (-soon, chunk))
    return Decisions(hit, keep, tuple(dropped))


def _victims(
    resident: dict[int, int], farthest: list[tuple[int, int]], sizes: list[int], needed: int, soon: int
) -> tuple[list[int], int]:
    """Pop the chunks to evict, those with the farthest next use first.

    Only chunks whose next use is later than `soon` are popped, and only until `needed` bytes are gained. Heap entries
    whose chunk has been evicted or used since they were pushed are discarded on the way.
    """
    victims: list[int] = []
    gained = 0
    while gained < needed and farthest:
        later, chunk = farthest[0]
        if resident.get(chunk) != -later:
            heapq.heappop(farthest)
            continue
        if -later <= soon:
            break
        heapq.heappop(farthest)
        victims.append(chunk)
        gained += sizes[chunk]
    return victims, gained
