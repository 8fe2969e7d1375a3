"""Two ranks as srun would start them: SLURM's variables alone; a signal ahead of the time limit, and on again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stores import make_store

from ensemble_ml.distributed.world import free_port
from ensemble_ml.training import load_checkpoint
from ensemble_ml.training.tracking import read_log


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("slurm") / "a.zarr", dates=6, members=4, shape=(12, 16)).path


def ranks(store, output, steps, restarts=0):
    """Start both ranks of a job step."""
    port = free_port()
    settings = [
        "run=a", f"output={output}", f"data.store={store}", "data.train=[2001]", "data.members=[2]", f"steps={steps}",
        "model.hidden=4", "model.linear=false",
        "model.max_hidden=4", "model.depth=1", "model.precision=float32", "parallel.lat=2",
        "tracking.tensorboard=false", "tracking.log_every=1", "resume=auto", "threads=1", "checkpoint_every=100000",
    ]  # fmt: skip
    common = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "PMI_", "SLURM_"))}
    common |= {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    common |= {
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    started = []
    for rank in range(2):
        env = {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        command = [sys.executable, "-m", "ensemble_ml", "train", *settings]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    return started


def hears(process):
    """Return once a process handles SIGUSR1, which is long before its first step."""
    bit, until = 1 << (signal.SIGUSR1 - 1), time.monotonic() + 60
    while time.monotonic() < until:
        told = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        if int(told["SigCgt"], 16) & bit:
            return
        time.sleep(0.01)
    raise AssertionError("handles no signal")


def ended(processes):
    texts = [p.communicate(timeout=90)[1] for p in processes]
    return [p.returncode for p in processes], texts


@pytest.mark.slow
def test_stops_ahead_of_the_time_limit_and_goes_on(store, tmp_path):
    running = ranks(store, tmp_path, 2000)
    log, until = tmp_path / "a" / "log.jsonl", time.monotonic() + 60
    while time.monotonic() < until and not (log.exists() and len(read_log(log)) > 4):
        time.sleep(0.1)
    running[1].send_signal(signal.SIGUSR1)  # one rank alone hears it
    codes, texts = ended(running)
    assert codes == [75, 0], texts  # srun --kill-on-bad-exit ends the others at the first status that is not 0
    assert "go on with resume=true" in texts[0] and "failed" not in "".join(texts)
    done = load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["step"]
    assert 0 < done < 2000
    assert max(line["step"] for line in read_log(log)) == done
    codes, texts = ended(ranks(store, tmp_path, 2000))  # another job of the same name, by mistake
    assert codes[0] == 2 and codes[1] and "exists; go on with resume=true" in texts[0]
    running = ranks(store, tmp_path, 2000, restarts=1)  # requeued: the same command, and again little time
    hears(running[1])
    running[1].send_signal(signal.SIGUSR1)
    codes, texts = ended(running)
    assert codes == [75, 0], texts
    assert "rank 1" in texts[0] and "stopped at step 0: Stopped: SIGUSR1 before the first step; go on" in texts[0]
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["step"] == done
    running = ranks(store, tmp_path, 2000, restarts=2)
    until = time.monotonic() + 60
    while time.monotonic() < until and max(line["step"] for line in read_log(log)) <= done:
        time.sleep(0.1)
    for process in running:  # scancel
        process.send_signal(signal.SIGTERM)
    codes, texts = ended(running)
    assert codes == [130, 130], texts
    assert f"resumed after step {done} of 2000" in texts[0]
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last").meta["step"] > done


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "codes"), [(0, [75, 0]), (3, [130, 70])])
def test_stopped_before_there_is_a_checkpoint(store, tmp_path, restarts, codes):
    """A new run is to be started again, but not for ever."""
    running = ranks(store, tmp_path, 2000, restarts)
    hears(running[0])
    running[0].send_signal(signal.SIGUSR1)
    found, texts = ended(running)
    assert found == codes, texts
    assert "SIGUSR1 before the first step" in texts[0] and not (tmp_path / "a").exists()


def test_the_batch_script_is_sound():
    script = os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "slurm", "train.sbatch")
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.mark.parametrize(
    ("status", "requeued", "refused"), [(0, False, 0), (75, True, 0), (75, True, 1), (2, False, 0), (143, False, 0)]
)
def test_the_batch_script_starts_and_requeues(tmp_path, status, requeued, refused):
    """`srun` and `scontrol` are stand-ins that write down how they are called. A job that is not queued again has not
    done what others, which wait for it, need."""
    said = tmp_path / "said"
    for name, code in (("srun", status), ("scontrol", refused), ("scancel", 0)):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/bash\necho {name} "$@" >> {said}\nexit {code}\n')
        stand_in.chmod(0o755)
    script = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_CPUS_PER_TASK": "3",
    }
    done = subprocess.run(["bash", script, "run=big one", "steps=5"], env=environment, timeout=60)
    first, *others = said.read_text().splitlines()
    for option in (
        "--cpus-per-task=3",
        "--kill-on-bad-exit=1",
        "--cpu-bind=cores",
        "resume=auto",
        "run=big one",
        "steps=5",
    ):
        assert option in first
    assert first.startswith("srun") and (others == ["scontrol requeue 17"]) is requeued
    assert done.returncode == (0 if requeued and not refused else status)
    assert {"#SBATCH --requeue", "#SBATCH --signal=USR1@300"} <= set(script.read_text().splitlines())
