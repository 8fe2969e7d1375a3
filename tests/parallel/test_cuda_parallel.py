"""Several ranks on one GPU over gloo, and NCCL with one rank; all skip where there is no GPU."""

import json
import subprocess
import sys

import pytest
import torch
from stores import make_store

from benchmarks.common.hosts import Hosts, python
from ensemble_ml.training import load_checkpoint
from ensemble_ml.training.tracking import read_log

pytestmark = pytest.mark.gpu

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


def found_by(folder, work, lat, lon, **job):
    job = {"work": work, "lat": lat, "lon": lon, "device": "cuda", **job}
    command = python("-m", "benchmarks.spatial.worker", json.dumps(job), str(folder))
    Hosts(lat * lon).run(command, seconds=300)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("lat", "lon"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_convolutions_on_a_gpu(tmp_path, lat, lon):
    rows = found_by(tmp_path, "convolutions", lat, lon, kernels=[2, 3, 5])
    names = ("forward", "input gradient", "weight gradient")
    assert len(rows) == 3 * 2 * 2 * 7 * 4
    assert [r for r in rows if not max(r[name] for name in names) < 1e-12] == []


@pytest.mark.parametrize(("lat", "lon"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_networks_on_a_gpu(tmp_path, lat, lon):
    rows = found_by(tmp_path, "networks", lat, lon)
    assert len(rows) == 4
    assert max(max(r["forward"], r["weight gradient"]) for r in rows) < 1e-12
    assert max(max(r["step of lion"], r["step of adamw"]) for r in rows) < 1e-6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return make_store(folder / "a.zarr", dates=12, members=5, shape=(17, 16), bias=0.6, dispersion=0.6).path


def trained(store, output, ranks, *settings):
    """Six steps in float64 as one of `ranks`, all on one GPU; the weights, and the log's lines of steps."""
    small = ["hidden=8", "max_hidden=8", "points=16", "depth=1", "precision=float64"]
    given = [
        "run=a", f"output={output}", "steps=6", "validate_every=3", "batch_size=4", "threads=1", "optim.warmup=2",
        f"data.store={store}", "data.train=[2001-01-01/2001-01-16]", "data.validation=[2001-01-17/2001-01-31]",
        "data.members=[1,2,5]", "data.validation_members=3", "tracking.tensorboard=false", "tracking.log_every=1",
        *(f"model.{one}" for one in small), *settings,
    ]  # fmt: skip
    Hosts(ranks).run(python("-m", "ensemble_ml", "train", *given), seconds=300)
    checkpoint = load_checkpoint(output / "a" / "checkpoints" / "last")
    assert checkpoint.meta["device"] == torch.cuda.get_device_name()
    return checkpoint.state_dict, [line for line in read_log(output / "a" / "log.jsonl") if "loss" in line]


@pytest.mark.parametrize("share", ["data=2", "lat=2", "lon=2"])
def test_ranks_on_one_gpu_train_as_one_does(store, tmp_path, share):
    optim = ["optim=adamw", "optim.exchange=allreduce", "optim.bucket_mb=0.01"]
    alone, losses = trained(store, tmp_path / "alone", 1, *optim)
    weights, shared = trained(store, tmp_path / "shared", 2, *optim, f"parallel.{share}")
    assert len(losses) == len(shared) == 6
    for one, other in zip(losses, shared, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["sent_mb"] > 0
    for name, value in alone.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("bits", [1, 4])
def test_ranks_on_one_gpu_vote(store, tmp_path, bits):
    vote = ["optim=lion", "optim.exchange=vote", f"optim.bits={bits}", "optim.bucket_mb=0.01", "parallel.data=2"]
    weights, steps = trained(store, tmp_path / "a", 2, *vote)
    again, _ = trained(store, tmp_path / "b", 2, *vote)
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    assert len(steps) == 6 and steps[-1]["sent_mb"] > 0


def test_nccl_with_one_rank():
    done = subprocess.run([sys.executable, "-c", NCCL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
