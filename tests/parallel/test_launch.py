"""How a job starts under each launcher, and how it ends when a rank fails."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parallel.ranks import run_ranks

from ensemble_ml.config import Backend, ParallelConfig
from ensemble_ml.distributed import launch, start
from ensemble_ml.distributed.world import World, free_port, read_world
from ensemble_ml.errors import UserError

SAY = """
import torch
from ensemble_ml.config import ParallelConfig
from ensemble_ml.distributed import start
with start(ParallelConfig(lat=2)) as session:
    x = torch.tensor([session.topology.rank + 1.0])
    session.mesh.world.all_reduce(x)
    words = "place", *session.topology.place, "sum", x.item(), session.world.launcher.value
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
        ("mpich", [os.path.join(os.path.dirname(sys.executable), "mpiexec"), "-n", "2", sys.executable]),
    ],
)
def test_under_a_launcher(tmp_path, name, command):
    if name == "mpich":
        pytest.importorskip("mpi4py")
    script = tmp_path / "say.py"
    script.write_text(SAY)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("place"))
    assert lines == [f"place 0 0 {rank} 0 sum 3.0 {name}" for rank in range(2)]


def test_under_slurm_variables():
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost"}
    with start(ParallelConfig(), env) as session:
        assert session.topology.size == 1 and session.first


def speaks(session):
    log = logging.getLogger("ensemble_ml.training")
    return log.isEnabledFor(logging.INFO), log.isEnabledFor(logging.WARNING)


def test_what_all_ranks_would_say_one_says():
    before = logging.getLogger("ensemble_ml").level
    logging.getLogger("ensemble_ml").setLevel(logging.INFO)
    try:
        assert run_ranks(speaks, 3) == [(True, True), (False, True), (False, True)]
    finally:
        logging.getLogger("ensemble_ml").setLevel(before)


def test_exchanges_are_as_patient_as_the_settings_say():
    def patience(session):
        backend = session.mesh.world.group._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    assert run_ranks(patience, 2, timeout=123) == [123, 123]


def pretends(kind):
    """A rank's answer to what it computes on, where it has a GPU of its own or none."""
    launch.torch = SimpleNamespace(
        cuda=SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid=kind), device_count=lambda: 1)
    )
    launch.device_name = lambda device: f"GPU {kind}" if kind else "AVX2"
    return SimpleNamespace(type="cuda" if kind else "cpu")


def devices(session, kinds):
    store = torch.distributed.PrefixStore("again", session._store)
    return launch._devices(store, session.world, pretends(kinds[session.topology.rank]))


@pytest.mark.parametrize(("kinds", "apart"), [("ab", True), ("aa", False), (["", ""], False)])
def test_whether_each_rank_has_a_gpu_of_its_own(kinds, apart):
    one, other = run_ranks(devices, 2, kinds)
    assert one == other and one["apart"] is apart and one["hosts"] == {os.uname().nodename: 2}
    assert one["names"] == sorted({f"GPU {k}" if k else "AVX2" for k in kinds})


def test_ranks_of_a_node_are_counted_where_the_launcher_does_not_tell(monkeypatch):
    def on_two_hosts(store, world, device, real=launch._devices):
        monkeypatch.setattr(launch, "socket", SimpleNamespace(gethostname=lambda: "aab"[world.rank]))
        return real(store, world, device)

    monkeypatch.setattr(launch, "_devices", on_two_hosts)
    assert run_ranks(lambda session: session.world.local_size, 3) == [2, 2, 1]
    env = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    assert [read_world(more | env).counted for more in ({}, {"LOCAL_WORLD_SIZE": "3"})] == [False, True]


@pytest.mark.parametrize("names", ["ab", "aa"], ids=["two hosts", "one host"])
def test_hosts_whose_own_names_lead_to_themselves(monkeypatch, names):
    """Debian gives the own name 127.0.1.1, which gloo tells the others."""

    def on_hosts(store, world, device, real=launch._devices):
        own = SimpleNamespace(gethostname=lambda: names[world.rank], gethostbyname=lambda name: "127.0.1.1")
        monkeypatch.setattr(launch, "socket", own)
        return real(store, world, device)

    def refused(*_, **__):
        raise RuntimeError("connectFullMesh failed with\nConnection refused")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(launch, "_devices", on_hosts)
    monkeypatch.setattr(launch.dist, "init_process_group", refused)
    said = [text for _, _, text in run_ranks(lambda session: None, 2, statuses=True)]
    told = "does not reach the ranks of other hosts (connectFullMesh failed with Connection refused); it tells them the"
    wanted = ["UserError: rank", told, "is 127.0.1.1 here; set GLOO_SOCKET_IFNAME (now not set)"]
    assert any(all(text in one for text in wanted) for one in said) == (names == "ab"), said


def test_a_rank_without_a_gpu_among_others_is_named():
    ends = run_ranks(devices, 3, ["a", "", "c"], statuses=True)
    assert all(code for code, *_ in ends)
    assert all("ranks without a GPU: 1; the others have GPU a, GPU c" in text for *_, text in ends)


def test_what_computes_is_told(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    with start(ParallelConfig(), {}):
        assert "one rank" not in caplog.text  # where there is nothing to tell
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with start(ParallelConfig(), {}) as session:
        assert session.device.type == "cpu"
    assert "this torch is for GPUs, and sees none" in caplog.text
    nccl = ParallelConfig(backend=Backend.nccl)
    with pytest.raises(UserError, match=r"parallel\.backend=nccl: .* 0 GPUs"), start(nccl, {}):
        pass


@pytest.mark.parametrize(
    ("kinds", "text"), [("ab", "this torch has no NCCL"), ("aa", rf"ranks 0, 1 share a GPU of {os.uname().nodename};")]
)
def test_why_there_is_no_nccl(monkeypatch, kinds, text):
    found = run_ranks(devices, 2, kinds)[0]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match=f"parallel.backend=nccl: {text}"):
        launch._backend(Backend.nccl, World(size=2, local_size=2), found["apart"], found["shared"])


def test_nobody_knows_where_rank_0_is():
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(UserError, match="set MASTER_ADDR and MASTER_PORT"), start(ParallelConfig(), env):
        pass


@pytest.mark.parametrize("rank", ["0", "1"])
def test_mpiexec_and_mpi4py_of_two_libraries(monkeypatch, rank):
    alone = SimpleNamespace(rank=0, size=1, bcast=lambda value: value)
    mpi = SimpleNamespace(COMM_WORLD=alone, Get_library_version=lambda: "MPICH Version: 4.2\nDevice: ch4")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi, rc=SimpleNamespace(finalize=False)))
    env = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"}
    told = rf"openmpi started rank {rank} of 2, but mpi4py uses MPICH Version: 4\.2, which sees rank 0 of 1; .* MASTER_"
    with pytest.raises(UserError, match=told):
        start(ParallelConfig(), env).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_others_can_be_stopped(tmp_path, rank):
    """Alone at the start of a job: rank 0 with nobody to meet, and another one with nobody to reach."""
    script = tmp_path / "say.py"
    script.write_text("print('begins', flush=True)" + SAY)
    job = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    env = {
        **os.environ,
        **job,
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background ignores it
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, preexec_fn=heard
    ) as one:
        assert one.stdout.readline() == b"begins\n"
        time.sleep(8)  # torch is imported, and the waiting has begun
        began = time.monotonic()
        one.send_signal(signal.SIGINT)
        _, said = one.communicate(timeout=60)
    assert time.monotonic() - began < 20 and b"KeyboardInterrupt" in said


def test_a_free_port_is_none_that_a_connection_may_take_meanwhile():
    """A job listens there seconds later, when torch is imported."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if handed_out < 32_000:
        pytest.skip("the kernel of this machine hands out nearly all ports")
    ports = {free_port() for _ in range(20)}
    assert max(ports) < handed_out and len(ports) > 1
    with socket.socket() as taken:
        taken.bind(("", min(ports)))
        assert min(ports) not in {free_port() for _ in range(20)}


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr("ensemble_ml.distributed.launch.MEETING", timedelta(seconds=1))
    # A process that has met others ends with its first failure; the tests after this one in the same process do not.
    monkeypatch.setattr("ensemble_ml.distributed.meeting._meetings", {})
    env = {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with pytest.raises(UserError, match=r"rank 0: 2 of 3 ranks \(first \[1, 2\]\) have not come in 1 s"):
        start(ParallelConfig(data=3, timeout=1), env).__enter__()
    env["MASTER_PORT"] = str(free_port())
    with pytest.raises(UserError, match="have not come in 2 s"):  # as patient as exchanges are, where that is longer
        start(ParallelConfig(data=3, timeout=2), env).__enter__()


@pytest.mark.parametrize("seconds", [0.0, 1e10, 1e15])
def test_a_timeout_that_the_libraries_cannot_hold_is_refused(seconds):
    """They count in 64 bits; 1e10 s ended as if the port were taken, and more in a traceback."""
    with pytest.raises(UserError, match=r"parallel.timeout=.*: must be above 0 and at most 1e9"):
        ParallelConfig(timeout=seconds)


def agrees(session, mine):
    try:
        session.agree({"lr": mine[session.topology.rank], "steps": 7})
    except UserError as error:
        return str(error)
    return ""


def test_ranks_of_other_settings_are_told_which():
    assert run_ranks(agrees, 3, [1e-3] * 3) == [""] * 3
    told = run_ranks(agrees, 3, [1e-3, 1e-3, 1e-4])
    assert told == ["", "", "rank 2: lr=0.0001, on rank 0 lr=0.001; give every rank the same"]


def comes(session, port, job):
    """While two ranks run, another job's rank 1 comes to the same port, and goes."""
    session.meet()
    if session.first:
        code = (
            "from ensemble_ml.config import ParallelConfig\nfrom ensemble_ml.distributed import start, launch\n"
            "from datetime import timedelta\nlaunch.MEETING = timedelta(seconds=2)\n"
            f"env = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}') | {job}\n"
            "with start(ParallelConfig(timeout=2), env): pass"
        )
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=80)
        assert done.returncode != 0
        return done.stderr
    time.sleep(3)  # heartbeats, in which a failure would be heard of
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "have met at"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "8"}, "1 of 2 ranks"),
    ],
)
def test_a_rank_of_another_job_at_the_same_port_does_no_harm(job, text, monkeypatch):
    port = free_port()
    monkeypatch.setattr("parallel.ranks.free_port", lambda: port)
    told = run_ranks(comes, 2, port, job, data=2)
    assert text in told[0]
