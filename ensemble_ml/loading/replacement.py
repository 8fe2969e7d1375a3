"""The optimal cache for chunks that are used at irregular times, because each sample shows a random subset of members.

Belady's rule (1966, doi:10.1147/sj.52.0078) with bypass: what comes in must be needed sooner than what it displaces, or
it does not come in. Optimal for chunks of one size, and near it for the nearly equal sizes of packed members.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a cache does at each use of a trace (A,): whether it has the chunk, keeps it after, and what it drops.

    `dropped` lists (use, chunk): the chunk leaves the cache when that use begins.
    """

    hit: np.ndarray
    keep: np.ndarray
    dropped: tuple[tuple[int, int], ...]


def next_uses(chunks: np.ndarray) -> np.ndarray:
    """For each use of a trace (A,), when its chunk is used next: (A,) int64, NEVER where it is not."""
    order = np.argsort(chunks, kind="stable")
    same = chunks[order][1:] == chunks[order][:-1]
    following = np.full(len(chunks), NEVER)
    following[order[:-1][same]] = order[1:][same]
    return following


def decide(chunks: np.ndarray, sizes: np.ndarray, capacity: int) -> Decisions:
    """Run Belady's rule with bypass over a trace.

    Args:
        chunks: (A,) the chunk of each use, in order.
        sizes: bytes of each chunk.
        capacity: bytes of the cache.
    """
    following = next_uses(chunks).tolist()
    hit, keep = np.zeros(len(chunks), bool), np.zeros(len(chunks), bool)
    resident: dict[int, int] = {}  # chunk -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, chunk), with entries that are out of date
    room, dropped = int(capacity), []
    size_of = np.asarray(sizes).tolist()
    for use, (chunk, soon) in enumerate(zip(chunks.tolist(), following, strict=True)):
        if chunk in resident:
            hit[use] = True
        elif soon == NEVER or size_of[chunk] > capacity:
            continue
        else:
            victims, gained = _victims(resident, farthest, size_of, size_of[chunk] - room, soon)
            if gained < size_of[chunk] - room:
                for victim in victims:
                    heapq.heappush(farthest, (-resident[victim], victim))
                continue
            for victim in victims:
                del resident[victim]
                dropped.append((use, victim))
            room += gained - size_of[chunk]
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
    """Take chunks that are needed later than `soon` off the heap, farthest first, until `needed` bytes are gained."""
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
