"""Run a function on several ranks, fast: forked processes that meet as under a launcher, and tell what they return."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # optimizers do: once here, not for two seconds in each rank

from ensemble_ml.config import ParallelConfig
from ensemble_ml.distributed import start
from ensemble_ml.distributed.world import free_port


def run_ranks(function, size, *args, seconds=100, statuses=False, **parallel):
    """Call `function(session, *args)` on `size` ranks; return what each returns, in rank order.

    `parallel`: settings of ParallelConfig. `statuses`: return (exit status, seconds until the end, text of stderr) of
    each rank instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        port, began = free_port(), time.monotonic()
        children = [_fork(function, rank, size, port, Path(folder), args, parallel) for rank in range(size)]
        ends = _wait(children, began + seconds)
        errors = [(Path(folder) / f"{rank}.err").read_text() for rank in range(size)]
        if statuses:
            return [(code, at - began, text) for (code, at), text in zip(ends, errors, strict=True)]
        assert all(code == 0 for code, _ in ends), "\n".join(f"rank {r}: {e}" for r, e in enumerate(errors))
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(size)]


def until_gone(session, *ranks):
    """Return a shell's words that wait until some ranks have ended. All ranks call this."""
    pids = torch.zeros(session.topology.size, dtype=torch.int64)
    pids[session.topology.rank] = os.getpid()
    session.mesh.world.all_reduce(pids)
    return "; ".join(f"while kill -0 {pids[rank]} 2>/dev/null; do sleep 0.1; done" for rank in ranks)


def _fork(function, rank, size, port, folder, args, parallel) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.settrace(None)  # coverage would slow the rank down, and loses what it has seen where a process ends so
        threading.settrace(None)
        errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        torch.set_num_threads(1)
        env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {k: str(v) for k, v in env.items()}
        with start(ParallelConfig(**parallel), env) as session:
            found = function(session, *args)
        (folder / f"{rank}.out").write_bytes(pickle.dumps(found))
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _wait(children, until):
    ends = {}
    while len(ends) < len(children):
        for child in children:
            if child not in ends:
                done, code = os.waitpid(child, os.WNOHANG)
                if done:
                    ends[child] = os.waitstatus_to_exitcode(code), time.monotonic()
        if time.monotonic() > until:
            for child in children:
                if child not in ends:
                    os.kill(child, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.01)
    return [ends[child] for child in children]
