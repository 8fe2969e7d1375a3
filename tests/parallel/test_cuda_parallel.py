"""Several ranks on one GPU over gloo, and NCCL with one rank; both skip where there is no GPU."""

import json
import subprocess
import sys

import pytest
import torch

from ensemble_ml.benchmarks.common.hosts import Hosts, python

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

NCCL = """
import torch, torch.distributed as dist
from ensemble_ml.distributed import TorchCommunicator
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
comm = TorchCommunicator(dist.group.WORLD)
for device in ("cuda", "cpu"):
    x, out = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    comm.all_reduce(x)
    comm.all_gather(out, x)
    assert out.tolist() == x.tolist() == [0, 1, 2, 3]
    comm.reduce_scatter(out.zero_(), x, async_op=True).wait()
    assert out.tolist() == [0, 1, 2, 3]
    comm.all_to_all_single(out.zero_(), x, [4], [4], async_op=True).wait()
    assert out.tolist() == [0, 1, 2, 3]
    comm.broadcast(x)
comm.barrier()
assert comm.bytes_sent == 0
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("lat", "lon"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_convolutions_on_a_gpu(tmp_path, lat, lon):
    job = {"work": "convolutions", "lat": lat, "lon": lon, "kernels": [2, 3, 5], "device": "cuda"}
    command = python("-m", "ensemble_ml.benchmarks.partitioning.worker", json.dumps(job), str(tmp_path))
    Hosts(lat * lon).run(command, seconds=300)
    rows = json.loads((tmp_path / "results.json").read_text())
    names = ("forward", "input gradient", "weight gradient")
    assert len(rows) == 3 * 2 * 2 * 7 * 4
    assert [r for r in rows if not max(r[name] for name in names) < 1e-12] == []


def test_nccl_with_one_rank():
    done = subprocess.run([sys.executable, "-c", NCCL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
