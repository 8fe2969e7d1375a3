"""Rank layouts and launchers' variables, without processes."""

import pytest
from parallel.ranks import run_ranks

from ensemble_ml.config import Launcher, ParallelConfig
from ensemble_ml.distributed.communicator import sharing_cores
from ensemble_ml.distributed.topology import Place, Topology, bands, make_topology, place_of, rank_of
from ensemble_ml.distributed.world import first_host, read_world
from ensemble_ml.errors import UserError


def test_longitude_runs_fastest():
    shape = (2, 3, 2, 4)
    assert place_of(shape, 0) == Place(0, 0, 0, 0)
    assert place_of(shape, 1) == Place(0, 0, 0, 1)
    assert place_of(shape, 4) == Place(0, 0, 1, 0)
    assert place_of(shape, 8) == Place(0, 1, 0, 0)
    assert place_of(shape, 24) == Place(1, 0, 0, 0)
    assert [rank_of(shape, place_of(shape, r)) for r in range(48)] == list(range(48))


def test_groups():
    mesh = Topology(data=2, lat=2, lon=2, rank=5)
    assert mesh.group("lon") == (4, 5)
    assert mesh.group("lat") == (5, 7)
    assert mesh.group("data") == (1, 5)
    assert mesh.group("lat", "lon") == (4, 5, 6, 7)
    assert list(mesh.groups("data")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("axes", [("data",), ("lat",), ("lon",), ("lat", "lon"), ("trainer",)])
def test_groups_are_a_partition_of_the_ranks(axes):
    mesh = Topology(2, 3, 2, 2)
    assert sorted(r for group in mesh.groups(*axes) for r in group) == list(range(mesh.size))


def test_data_takes_what_is_left():
    assert make_topology(ParallelConfig(lat=2, lon=2), rank=3, size=8).shape == (1, 2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "size", "text"),
    [
        ({"lat": 3}, 4, "their product 3 does not divide 4 ranks"),
        ({"lat": 2, "data": 3}, 4, "needs 6 ranks, 4 were started"),
    ],
)
def test_degrees_that_do_not_fit(settings, size, text):
    with pytest.raises(UserError, match=text):
        make_topology(ParallelConfig(**settings), rank=0, size=size)


@pytest.mark.parametrize("settings", [{"lat": 0}, {"data": "two"}, {"data": 0}, {"timeout": 0}])
def test_settings_that_are_refused(settings):
    with pytest.raises(UserError, match="parallel"):
        ParallelConfig(**settings)


def test_bands_are_whole_blocks():
    assert [b - a for a, b in bands(361, 4, 16)] == [96, 96, 96, 73]
    assert [b - a for a, b in bands(361, 3, 16)] == [128, 128, 105]
    assert [b - a for a, b in bands(33, 2, 8)] == [24, 9]
    assert [b - a for a, b in bands(17, 3, 4)] == [8, 4, 5]
    assert bands(361, 1, 16) == ((0, 361),)
    for rows in range(1, 80):
        for parts in range(1, -(-rows // 8) + 1):
            found = bands(rows, parts, 8)
            assert [b for _, b in found][:-1] == [a for a, _ in found][1:] and found[-1][1] == rows
            assert all(b > a and a % 8 == 0 for a, b in found)
            blocks = [-(-(b - a) // 8) for a, b in found]
            assert max(blocks) - min(blocks) <= 1


def test_too_many_bands():
    with pytest.raises(UserError, match=r"parallel.lat=40: 361 rows make 23 blocks of 16; use at most 23"):
        bands(361, 40, 16)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[01-02]",
         "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize("env", [TORCHRUN, SLURM, OPENMPI, MPICH], ids=["torchrun", "slurm", "openmpi", "mpich"])
def test_each_launcher(env):
    world = read_world(env)
    assert (world.rank, world.size, world.local_rank) == (3, 8, 1)


def test_no_launcher_is_one_rank():
    world = read_world({})
    assert (world.rank, world.size, world.launcher) == (0, 1, Launcher.none)


def test_meeting_points():
    assert (read_world(TORCHRUN).host, read_world(TORCHRUN).port) == ("a", 29500)
    world = read_world(SLURM)
    assert world.host == "n01" and world.port == 20000 + 77 * 16
    assert read_world(MPICH).host is None


@pytest.mark.parametrize(("nodes", "first"), [("a", "a"), ("a1,b2", "a1"), ("gpu[007-012,020]", "gpu007"),
                                              ("r[3,5]n", "r3n"), ("x2,gpu[1-4]", "x2"),
                                              ("r[0-1]n[3,4],b7", "r0n3")])  # fmt: skip
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3)])
def test_tasks_of_a_node_under_slurm(node, tasks):
    env = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": str(node),
           "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-3]"}  # fmt: skip
    assert read_world(env).local_size == tasks
    assert read_world({**env, "SLURM_STEP_TASKS_PER_NODE": "odd"}).local_size == 11


def test_the_batch_script_itself_is_no_rank():
    assert read_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}).size == 1


def test_launchers_that_disagree():
    with pytest.raises(UserError, match=r"SLURM_PROCID=3 .*but PMI_RANK=0 PMI_SIZE=8; .*launcher=slurm or .*mpich"):
        read_world({**SLURM, **MPICH, "PMI_RANK": "0"})
    assert read_world({**SLURM, **MPICH, "PMI_RANK": "0"}, Launcher.mpich).rank == 0
    assert read_world({**SLURM, **MPICH}).rank == 3  # srun --mpi=pmi2 sets both


def test_torchrun_under_srun_counts_alone():
    env = {**TORCHRUN, **SLURM, "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x"}
    assert read_world(env).launcher is Launcher.torchrun


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "1"}, "RANK=1: WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: must lie from 0 to WORLD_SIZE-1=1"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK=x: must be a whole number"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: must be 1 or more"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999: must lie from 1 to 65535; set it to a free port"),
        ({**SLURM, "MASTER_PORT": "0"}, "MASTER_PORT=0: must lie from 1 to 65535"),
    ],
)
def test_variables_that_make_no_sense(env, text):
    with pytest.raises(UserError, match=text):
        read_world(env)


def test_a_launcher_that_is_not_there():
    with pytest.raises(UserError, match=r"parallel.launcher=slurm: SLURM_PROCID is not set"):
        read_world({}, Launcher.slurm)
    with pytest.raises(UserError, match=r"slurm: SLURM_STEP_NUM_TASKS is not set; start the ranks with srun, or use"):
        read_world({"SLURM_PROCID": "0"}, Launcher.slurm)


def sharing(session):
    return sharing_cores(session.mesh.world, session.device)


def test_ranks_count_those_that_share_their_cores():
    assert run_ranks(sharing, 2, data=2) == [2, 2]


def test_cray_tells_the_ranks_of_a_node():
    found = read_world({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)


def test_a_job_is_known_by_the_variables_of_its_own_launcher():
    """Ranks of torchrun may each stand under an `srun` of their own, and still meet."""
    under = [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_PROCID": "0"} for step in ("0", "1")]
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "n", "MASTER_PORT": "1234"}
    assert read_world(under[0] | torchrun).job == read_world(under[1] | torchrun).job == "a/"
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n"}
    assert read_world(under[0] | srun).job != read_world(under[1] | srun).job
