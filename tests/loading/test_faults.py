"""What goes wrong around a loader: full disks, killed processes, caches too small, starts and stops without end."""

import errno
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fresh import in_fresh_process

from ensemble_ml.errors import UserError
from ensemble_ml.loading import slab
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.items import DatasetItems

ROOT = Path(__file__).resolve().parents[2]
F, BATCH, EPOCHS = 24, 4, 3
SIZE = 1024


class Samples:
    """Sample i is full of i."""

    def __init__(self):
        self.reads = 0
        self.lock = threading.Lock()

    def __len__(self):
        return F

    def __getitem__(self, i):
        with self.lock:
            self.reads += 1
        return np.full(SIZE // 4, i, np.float32)


def use_up(loader):
    seen = []
    for batch in loader:
        assert np.array_equal(batch["0"][:, 0].numpy(), batch.samples)
        assert np.array_equal(batch["0"][:, -1].numpy(), batch.samples)
        seen += batch.samples.tolist()
    assert sorted(seen) == sorted(list(range(F)) * EPOCHS)


@pytest.mark.parametrize("ram", [0, SIZE - 1, SIZE])
def test_caches_of_less_than_a_sample(ram):
    data = Samples()
    with ClairvoyantLoader(data, BATCH, EPOCHS, 0, ram=ram) as loader:
        use_up(loader)
        held = ram // SIZE
        assert data.reads == loader.tiers.counters.storage / SIZE == F + (EPOCHS - 1) * (F - held)


def test_a_full_disk_is_a_smaller_cache(tmp_path, monkeypatch, caplog):
    write, room = slab.write_all, [5]

    def full(fd, data, offset):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        write(fd, data, offset)

    monkeypatch.setattr(slab, "write_all", full)
    data = Samples()
    with ClairvoyantLoader(data, BATCH, EPOCHS, 0, ram=0, disk=F * SIZE, folder=tmp_path) as loader:
        use_up(loader)
        assert loader.tiers.counters.disk == (EPOCHS - 1) * 5 * SIZE
    assert data.reads == F + (EPOCHS - 1) * (F - 5)
    assert "No space left" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_small_file_system_runs_full(tmp_path, caplog):
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        with ClairvoyantLoader(Samples(), BATCH, EPOCHS, 0, ram=0, disk=F * SIZE, folder=tmp_path) as loader:
            use_up(loader)
            assert 0 < loader.tiers.counters.disk < (EPOCHS - 1) * F * SIZE
        assert "is not kept" in caplog.text
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"loading.disk=.*file"):
        ClairvoyantLoader(Samples(), BATCH, EPOCHS, 0, ram=0, disk=SIZE, folder=tmp_path / "file")


def test_a_dataset_that_uses_its_arrays_again():
    """The sample that says what all are like is kept until its first use, which comes after others'."""

    class Reusing:
        room = np.zeros(4, np.float32)

        def __len__(self):
            return 3

        def __getitem__(self, sample):
            self.room[:] = sample
            return self.room

    items, out = DatasetItems(Reusing()), bytearray(16)
    for sample in (2, 1, 0):
        items.read(sample, memoryview(out))
        assert np.frombuffer(out, np.float32).tolist() == [sample] * 4


PROGRAM = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from test_faults import *
items = DatasetItems(Samples(), "full of their number")
loader = ClairvoyantLoader(items, BATCH, EPOCHS, 0, ram=8 * SIZE, disk=8 * SIZE, folder={folder!r})
for batch in loader:
    print(batch.step, flush=True)
    if batch.step == 8:
        time.sleep(60)
"""


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "ensemble_ml" in name}


def test_killed_it_leaves_nothing_that_breaks_the_next(tmp_path):
    text = PROGRAM.format(root=str(ROOT), tests=str(ROOT / "tests" / "loading"), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "8":
                break
        assert shared_memory() == set()  # the cache in memory has no name
        files = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any("memfd:ensemble_ml" in name for name in files)
        os.kill(process.pid, signal.SIGKILL)
    assert shared_memory() == set()
    (left,) = tmp_path.iterdir()  # the cache on disk, which is used again
    with left.open("r+b") as file:  # as if the kill had come while a sample was written
        file.seek(-SIZE // 2, os.SEEK_END)
        file.write(b"\xff" * (SIZE // 2))
    data = Samples()
    items = DatasetItems(data, "full of their number")
    with ClairvoyantLoader(items, BATCH, EPOCHS, 0, ram=8 * SIZE, disk=8 * SIZE, folder=tmp_path) as loader:
        use_up(loader)
    # Seven of the eight on disk were there: the eighth is damaged, and is read once more than those.
    assert data.reads == F + (EPOCHS - 1) * (F - 16) - 7


def test_a_cache_of_another_content_is_not_taken(tmp_path):
    """Same length, same shapes: nothing but a name tells a dataset's content."""

    class Others(Samples):
        def __getitem__(self, i):
            return super().__getitem__(i) + 100

    options = dict(ram=0, disk=8 * SIZE, folder=tmp_path)
    with ClairvoyantLoader(Others(), BATCH, EPOCHS, 0, **options) as loader:
        assert all((batch["0"] >= 100).all() for batch in loader)
    with ClairvoyantLoader(Samples(), BATCH, EPOCHS, 0, **options) as loader:
        use_up(loader)


def test_a_cache_cut_short_is_made_anew(tmp_path):
    options = dict(ram=0, disk=8 * SIZE, folder=tmp_path)
    with ClairvoyantLoader(DatasetItems(Samples(), "s"), BATCH, EPOCHS, 0, **options) as loader:
        use_up(loader)
    (file,) = tmp_path.iterdir()
    os.truncate(file, 100)
    data = Samples()
    with ClairvoyantLoader(DatasetItems(data, "s"), BATCH, EPOCHS, 0, **options) as loader:
        use_up(loader)
    assert data.reads == F + (EPOCHS - 1) * (F - 8)


PEER = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from test_faults import *
from benchmarks.loading.lap import Meeting
meeting = Meeting(Path({folder!r}), 1, 2)
options = dict(ram=F // 2 * SIZE, rank=1, ranks=2, gather=meeting.gather, node={node!r}, host="localhost")
with ClairvoyantLoader(Samples(), BATCH, 200, 0, **options) as loader:
    for batch in loader:
        print(batch.step, flush=True)
        if batch.step > 20:
            time.sleep(60)
"""


@pytest.mark.parametrize("apart", [False, True], ids=["one node", "own nodes"])
def test_a_peer_killed_in_the_middle(tmp_path, apart):
    from benchmarks.loading.lap import Meeting

    node = "b" if apart else "a"
    text = PEER.format(root=str(ROOT), tests=str(ROOT / "tests" / "loading"), folder=str(tmp_path), node=node)
    meeting = Meeting(tmp_path, 0, 2)
    with (
        subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process,
        ClairvoyantLoader(
            Samples(),
            BATCH,
            200,
            0,
            ram=F // 2 * SIZE,
            rank=0,
            ranks=2,
            gather=meeting.gather,
            node="a",
            host="localhost",
        ) as loader,
    ):
        loader._peers.finish = lambda: None  # nobody will come
        for batch in loader:
            assert np.array_equal(batch["0"][:, 0].numpy(), batch.samples)
            if batch.step == 20:
                for line in process.stdout:
                    if line.strip() == "20":
                        break
                process.kill()
                process.wait()
        counted = loader.tiers.counters
        assert counted.peers > 0
        # On one node the memory of the dead stays mapped, and goes on serving; between nodes storage steps in.
        assert (counted.fallback > 0) == apart


def test_a_peer_that_answers_nonsense_is_a_miss():
    class Meeting:
        """A second rank that accepts connections and sends rubbish."""

        def __init__(self):
            self.server = socket.create_server(("localhost", 0))
            threading.Thread(target=self.serve, daemon=True).start()

        def serve(self):
            while True:
                try:
                    connection, _ = self.server.accept()
                except OSError:
                    return
                connection.sendall(b"\x00" * 64)

        def gather(self, mine):
            if mine == b"0":  # the step where ranks stand
                return [mine, mine]
            port = self.server.getsockname()[1]
            other = mine.replace(b'"node": "a"', b'"node": "b"')
            told = json.loads(other) | {"port": port, "host": "localhost"}
            return [mine, json.dumps(told).encode()]

    meeting = Meeting()
    with ClairvoyantLoader(
        Samples(), BATCH, EPOCHS, 0, ram=F * SIZE, rank=0, ranks=2, gather=meeting.gather, node="a", host="localhost"
    ) as loader:
        loader._peers.finish = lambda: None
        for batch in loader:
            assert np.array_equal(batch["0"][:, 0].numpy(), batch.samples)
        assert loader.tiers.counters.fallback > 0
        assert loader.tiers.counters.peers == 0
    meeting.server.close()


def test_a_rank_may_be_asked_before_it_knows_the_others():
    """Another rank can have all addresses, and ask, before this one has."""
    asked, answers = [], []

    def gather(mine):
        told = json.loads(mine)
        for sample in asked:
            with socket.create_connection(("localhost", told["port"]), 10) as connection:
                connection.sendall(told["word"].encode() + struct.pack("!q?", sample, True))
                size, _ = struct.unpack("!qI", connection.recv(12, socket.MSG_WAITALL))
                answers.append(connection.recv(size, socket.MSG_WAITALL))
        return [mine, json.dumps(told | {"node": "b"}).encode()]

    def start():
        return ClairvoyantLoader(
            Samples(), BATCH, EPOCHS, 0, ram=F * SIZE, rank=0, ranks=2, gather=gather, node="a", host="localhost"
        )

    for _ in range(2):
        with start() as loader:
            loader._peers.finish = lambda: None
            asked = np.flatnonzero(loader.plan.placement.owner == 0)[:1].tolist()
    assert answers == [np.full(SIZE // 4, asked[0], np.float32).tobytes()]


def open_after_starts_and_stops(folder, cycles):
    """Open descriptors and threads of this process after the first cycle and after the last."""

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    data = Samples()
    options = dict(ram=5 * SIZE, disk=5 * SIZE, folder=folder)
    for cycle in range(cycles):
        with ClairvoyantLoader(data, BATCH, EPOCHS, 0, **options) as loader:
            next(iter(loader))
        if cycle == 0:
            before = count()
    return before, count()


@pytest.mark.slow
def test_hundreds_of_starts_and_stops(tmp_path):
    before, after = in_fresh_process(open_after_starts_and_stops, tmp_path, 301)
    assert after == before
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_stays_within_the_budget_for_fifty_epochs():
    from benchmarks.loading.memory import measure

    taken, budget = measure(128 << 20, 50)
    assert max(taken) < 1.1 * budget
    assert max(taken) > 0.8 * budget  # else something is not counted
    assert max(taken[1:]) - taken[1] < 0.02 * budget


@pytest.mark.parametrize("error", [OSError("the disk says no"), ValueError("nonsense"), None])
def test_one_bad_read_of_a_healthy_peer_costs_that_read(error, monkeypatch):
    """A dataset may raise anything, or (None) be slow for once; its rank still serves all that it has."""
    monkeypatch.setattr("ensemble_ml.loading.peers._SECONDS", 0.5 if error is None else 30.0)
    go = threading.Event()

    class Stumbling(Samples):
        def __getitem__(self, i):
            if threading.current_thread().name == "loading-server" and not self.stumbled:
                self.stumbled = True
                if error is not None:
                    raise error
                go.wait(20)
            return super().__getitem__(i)

    data, barrier, told = Stumbling(), threading.Barrier(2), [b"", b""]
    data.stumbled, found = False, []

    def gather_of(rank):
        def gather(mine):
            told[rank] = mine
            barrier.wait(20)
            both = list(told)
            barrier.wait(20)
            return both

        return gather

    def work(rank):
        options = dict(rank=rank, ranks=2, gather=gather_of(rank), node=f"node{rank}", host="localhost")
        with ClairvoyantLoader(data, BATCH, EPOCHS, 0, ram=F * SIZE, **options) as loader:
            sample = int(np.flatnonzero(loader.plan.placement.owner == 1)[0])
            if rank == 0:
                scratch = memoryview(bytearray(int(loader.items.sizes[sample])))
                found.append(loader._peers.get(1, sample, scratch))
                go.set()
                found.append(loader._peers.get(1, sample, scratch))
                assert not loader._peers._wire.dead
            barrier.wait(20)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert data.stumbled and found[0] is None and found[1] is not None
