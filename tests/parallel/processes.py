"""Ranks as processes on this machine that talk over gloo."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(work, size, *args, timeout=120.0) -> list[Any]:
    """work(rank, *args) of each rank, run in processes of an initialised process group; fails where one fails."""
    context, port = mp.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_main, args=(work, r, size, port, folder, args)) for r in range(size)]
        for process in started:
            process.start()
        for process in started:
            process.join(timeout)
        stuck = [i for i, process in enumerate(started) if process.is_alive()]
        for process in started:
            process.kill()
        found = {}
        for file in sorted(Path(folder).iterdir()):
            good, value = pickle.loads(file.read_bytes())
            assert good, f"rank {file.name}: {value}"
            found[int(file.name)] = value
    assert not stuck, f"ranks {stuck} did not end within {timeout} s"
    assert sorted(found) == list(range(size)), f"only ranks {sorted(found)} answered"
    return [found[rank] for rank in range(size)]


def _main(work, rank, size, port, folder, args):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        told = (True, work(rank, *args))
    except BaseException:
        told = (False, traceback.format_exc())
    Path(folder, str(rank)).write_bytes(pickle.dumps(told))
    if told[0]:
        dist.barrier()
    dist.destroy_process_group()
