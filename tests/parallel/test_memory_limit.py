"""A sample that one rank has no memory for trains on two: a limit on the process's data stands for a small device."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from stores import make_store
from test_parallel_training import config_of

from ensemble_ml.config import ParallelConfig, Precision
from ensemble_ml.distributed.world import free_port
from ensemble_ml.training import load_checkpoint

PROGRAM = Path(__file__).with_name("limited_training.py")
# What is freed goes back at once: what glibc keeps for later differs from run to run by a third of a step's memory.
EXACT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def start_ranks(config, ranks, limit=0):
    """Exit status, stdout and stderr of each rank."""
    path, port, children = Path(f"{config.output}.pickle"), str(free_port()), []
    path.write_bytes(pickle.dumps(config))
    for rank in range(ranks):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        command = [sys.executable, str(PROGRAM), str(path), str(limit)]
        env = os.environ | env | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"} | EXACT
        children.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        told = [child.communicate(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, *texts) for child, texts in zip(children, told, strict=True)]


@pytest.mark.slow
def test_a_sample_too_large_for_one_rank_trains_on_two(tmp_path):
    store = make_store(tmp_path / "a.zarr", dates=4, members=3, shape=(129, 192), variables=("t", "z"), surface=()).path

    def run(name, ranks, limit=0):
        # All runs share an output folder, and with it the fits of the first.
        settings = {"steps": 2, "batch_size": 1, "precision": Precision.float32, "average": 0.0}
        config = config_of(store, tmp_path / "runs", run=name, **settings)
        config.data.validation, config.model.hidden, config.model.max_hidden = [], 16, 16
        # What is fitted before the first step takes no part in it, and most of the time.
        config.model.linear, config.model.points = False, 0
        config.parallel = ParallelConfig(lat=ranks)
        return start_ranks(config, ranks, limit)

    # How much a step takes depends on the processor (its library of convolutions), so it is measured.
    needs = []
    for ranks in (1, 2):
        ends = run(f"free-{ranks}", ranks)
        assert all(status == 0 for status, _, _ in ends), ends
        needs.append(max(int(out.split()[-1]) for _, out, _ in ends))
    assert needs[1] < 0.8 * needs[0]
    limit = sum(needs) // 2

    [(status, _, told)] = run("one", 1, limit)
    assert status and "rank 0 has not enough memory" in told and "parallel.lat=2 (a sample over 2 ranks)" in told
    ends = run("two", 2, limit)
    assert all(status == 0 for status, _, _ in ends), ends
    assert load_checkpoint(tmp_path / "runs" / "two" / "checkpoints" / "last").meta["step"] == 2
