"""Limits of memory are those of the job's own control group, wherever it lies."""

import os
import subprocess
import sys

import pytest

from ensemble_ml import machine

GB = 10**9


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch, given):
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_WAIT_POLICY": given})
    machine.let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


def test_the_command_says_so_before_a_task_loads_torch():
    code = (
        "import os, sys; from ensemble_ml import cli;"
        "cli._dispatch = lambda _: print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules);"
        "cli.main(['train'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PASSIVE", "False"]


def group(folder, names, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


V2 = "memory.max", "memory.current", "inactive_file"
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemFree: 100 kB\nMemAvailable: 400000000 kB\n")
    (tmp_path / "membership").write_text("0::/\n")
    return tmp_path


def test_what_files_take_is_free(system):
    assert machine.free_memory() == 400_000_000 * 1024


@pytest.mark.parametrize("names", [V2, V1], ids=["version 2", "version 1"])
def test_the_group_of_a_batch_job(system, names):
    root = system / "cgroup" / ("" if names is V2 else "memory")
    group(root, names, "max" if names is V2 else 2**63 - 4096, 50 * GB, 0)
    group(root / "slurm" / "job_1", names, 32 * GB, 20 * GB, 15 * GB)
    (system / "membership").write_text(f"{'0:' if names is V2 else '4:memory'}:/slurm/job_1/step_0\n")
    assert machine.free_memory() == 27 * GB
    assert machine.memory_limit() <= 32 * GB


def test_nothing_is_left_of_a_full_group(system):
    group(system / "cgroup", V2, GB, 2 * GB, 0)
    assert machine.free_memory() == 0


def test_without_any_of_these_files(system):
    for name in ("meminfo", "membership"):
        (system / name).unlink()
    assert machine.free_memory() > 0 and machine.memory_limit() > 0
