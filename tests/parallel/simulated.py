"""Ranks in one process: threads that meet at a barrier, each with a communicator that hands tensors over."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ensemble_ml.distributed.communicator import Done


class Room:
    """Where the ranks of a simulation meet."""

    def __init__(self, size):
        self.size, self.given, self.barrier = size, [None] * size, threading.Barrier(size, timeout=30)

    def swap(self, rank, value):
        """Everybody's values, in rank order."""
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class SimulatedCommunicator:
    """The collectives by their definition."""

    def __init__(self, room, rank):
        self.room, self.rank, self.size, self.bytes_sent = room, rank, room.size, 0

    def all_reduce(self, x, *, op="sum", async_op=False):
        stacked = torch.stack(self.room.swap(self.rank, x.clone()))
        x.copy_({"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op])
        return Done()

    def all_gather(self, out, x, *, async_op=False):
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1)
        out.copy_(torch.cat(self.room.swap(self.rank, x.clone())))
        return Done()

    def all_to_all_single(self, out, x, received, sent, *, async_op=False):
        self.bytes_sent += (sum(sent) - sent[self.rank]) * x.element_size()
        parts = [given[self.rank] for given in self.room.swap(self.rank, x.clone().split(list(sent)))]
        assert [len(p) for p in parts] == list(received)
        out.copy_(torch.cat(parts))
        return Done()

    def broadcast(self, x, *, source=0, async_op=False):
        x.copy_(self.room.swap(self.rank, x.clone())[source])
        return Done()

    def barrier(self):
        self.room.barrier.wait()


def on_ranks(size, work):
    """Results of work(communicator) on `size` ranks, in rank order."""
    room = Room(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [SimulatedCommunicator(room, rank) for rank in range(size)]))
