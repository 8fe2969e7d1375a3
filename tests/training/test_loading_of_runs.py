"""Loading by plan in training: what it tells, the memory it takes, what it reads of a band, what is predicted."""

import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from planning import CPU, readers_of, run, schedule_of
from stores import make_store
from synthetic import make_layout

from ensemble_ml.config import LoaderName, LoadingConfig, Packing
from ensemble_ml.distributed import Topology
from ensemble_ml.distributed.topology import bands
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Reader, run_loader
from ensemble_ml.loading.run_loader import Lane, PlannedLoader
from ensemble_ml.store import Part
from ensemble_ml.store.schema import array_specs
from ensemble_ml.training import train
from ensemble_ml.training.feed import checked_dates, describe
from ensemble_ml.training.setup import build_spec
from ensemble_ml.training.tracking import read_log


def test_logs_and_picture(config_of, caplog):
    caplog.set_level("INFO")
    # one batch ahead: how far reading runs ahead of the first lines is chance
    settings = {"loading__ram": "80MB", "loading__ahead": 1, "loading__timeline": "run"}
    run = train(config_of(**settings, tracking__tensorboard=True, tracking__log_every=4))
    lines = [line["loading"] for line in read_log(run / "log.jsonl") if "loss" in line]
    assert len(lines) == 3 and set(lines[0]) == {"hits", "storage", "ram", "disk", "peers"}
    assert lines[0]["storage"] > 0 and lines[-1]["ram"] > 0 and lines[0]["hits"] < 0.6 < 0.85 < lines[-1]["hits"]
    told = f"hits {lines[-1]['hits']:.0%}"
    assert "wait " in caplog.text and told in caplog.text and "MB/s storage" in caplog.text
    assert (run / "loading.png").stat().st_size > 5000
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert {"loading/hits", "loading/storage", "loading/ram", "train/wait"} <= set(board.Tags()["scalars"])


def test_torch_tells_nothing_of_tiers(config_of):
    run = train(config_of(loading__name=LoaderName.torch, loading__workers=1, steps=4))
    assert not any("loading" in line for line in read_log(run / "log.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ram": "4 apples"}, "loading.ram=4 apples: give bytes"),
        ({"disk": "1GB"}, "loading.disk=1GB: needs loading.folder"),
        ({"ahead": 0}, "loading.ahead=0"),
        ({"name": LoaderName.torch, "assign": next(a for a in type(LoadingConfig().assign) if a.value == "locality")},
         "loading.assign=locality: loading=torch holds nothing"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(UserError, match=message):
        LoadingConfig(**changes)


def test_a_cache_on_disk_that_cannot_be_is_refused_before_the_fits(config_of, tmp_path, monkeypatch):
    monkeypatch.setattr("ensemble_ml.training.setup.build_spec", lambda *_: pytest.fail("began to work"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^loading.folder=.*/file/cache: .*/file is a file; give a folder$"):
        train(config_of(loading__disk="1MB", loading__folder=str(tmp_path / "file" / "cache")))


def test_sizes_in_words():
    assert LoadingConfig(ram="1.5GB").ram_bytes == 1_500_000_000
    assert LoadingConfig(ram="2 MiB").ram_bytes == 2**21 and LoadingConfig(ram=7).ram_bytes == 7
    assert LoadingConfig().ram_bytes is None


def test_what_the_plan_says_is_what_is_read(config_of, store, monkeypatch):
    config = config_of(loading__ram="20MB", loading__bandwidth=100.0, steps=16)
    whole = Reader(store, build_spec(config, store))
    dates = checked_dates(config, whole)
    text = describe(config, whole, dates)
    told = {line.split()[1]: line for line in text.splitlines() if line.strip().startswith("from")}
    seen = []
    close = run_loader.PlannedLoader.close
    monkeypatch.setattr(
        run_loader.PlannedLoader, "close", lambda self: (seen.append(self.counters.snapshot()), close(self))
    )
    train(config)
    for name, word in (("storage", "slow"), ("ram", "memory")):
        assert f" {seen[0][name] / 1e6:,.1f} MB" in told[word]
    assert "slow storage at 100 MB/s (given)" in text and "limit: " in text
    two = describe(config, whole, dates, Topology(data=2), 0.1)
    assert "over 2 ranks" in two and "s compute" in two


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_band_reads_its_own_rows(tmp_path, ranks):
    """57 rows in chunks of 16: what the ranks read together is what one would, and each its share."""
    store = make_store(
        tmp_path / "a.zarr", dates=3, members=3, leads=(0, 24), variables=("t",), levels=tuple(range(100, 1200, 100)),
        surface=(), shape=(57, 192),
    )  # fmt: skip
    [whole] = readers_of(store, 1)

    def read(reader):
        schedule = schedule_of(reader, dates=np.arange(3), sizes=(2,), steps=3)
        with closing(PlannedLoader(LoadingConfig(ram="1GB"), schedule, reader, CPU, Lane())) as loader:
            run(loader, schedule)
            return int(loader.counters.storage)

    rows = bands(57, ranks, 16)
    parts = [read(Reader(store, whole.spec, window=(band, (0, 192)))) for band in rows]
    everything = read(whole)
    assert sum(parts) <= 1.05 * everything
    for (first, last), part in zip(rows, parts, strict=True):
        assert part == pytest.approx(everything * (last - first) / 57, rel=0.12)  # rows compress differently


def test_bands_of_ens10():
    """Half a degree, 7 variables on 11 levels and 11 at the surface, 4 ranks: rows read over own rows, by bytes."""
    surface = [f"s{i}" for i in range(11)]
    layout = make_layout(shape=(361, 720), levels=range(11), variables=list("tzquvwd"), surface=surface)
    read = own = 0
    for part in (Part.FORECAST, Part.TRUTH, Part.SPREAD):
        for spec in array_specs(layout, part, Packing.uint16):
            fields = spec.fields[2] * spec.fields[3] * spec.dtype.itemsize
            for first, last in bands(361, 4, 16):
                blocks = -(-last // spec.rows) - first // spec.rows
                read += fields * min(361 - first // spec.rows * spec.rows, blocks * spec.rows)
                own += fields * (last - first)
    assert 1 <= read / own <= 1.05


MEMORY = """
import os, sys, resource
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import numpy as np, torch
from planning import CPU, PlannedLoader, Lane, config_of, readers_of, schedule_of
from ensemble_ml.store import open_store
torch.set_num_threads(1)
[reader] = readers_of(open_store(sys.argv[1]), 1)
def used():
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(status[k].split()[0]) for k in ("RssAnon", "RssFile"))
def turn(budget, epochs):
    schedule = schedule_of(reader, dates=np.arange(40), validation=np.arange(4), sizes=(2, 4, 6), steps=10 * epochs,
                           batch_size=4, every=25)
    most = 0
    loader = PlannedLoader(config_of(ram=budget, ahead=3), schedule, reader, CPU, Lane())
    list(loader.validation(0))
    train = loader.train()
    for step in range(10 * epochs):
        next(train)
        if (step + 1) % 25 == 0 or step + 1 == 10 * epochs:
            list(loader.validation(step + 1))
        shared = sum(os.fstat(arena.fd).st_blocks * 512 for arena in loader.cache.arenas.values())
        most = max(most, used() - before + shared)
    loader.close()
    return most
before = used()
turn(10**7, 2)  # imports, threads and the allocator's own
before = used()
budget = int(os.environ["BUDGET"])
print(turn(budget, 50))
"""


@pytest.mark.slow
def test_memory_stays_within_its_budget(tmp_path):
    """RSS and shared memory over 50 epochs, cache smaller than the data."""
    store = make_store(
        tmp_path / "a.zarr", dates=40, members=6, leads=(0, 24, 48), variables=("t", "z", "q"),
        levels=(300, 500, 700, 850), surface=("t2m", "msl"), shape=(33, 64),
    )  # fmt: skip
    budget = 120_000_000
    here = os.path.dirname(__file__)
    paths = [os.path.join(here, "..", "loading"), os.path.join(here, "..")]
    command = [sys.executable, "-c", MEMORY, store.path, *paths]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "BUDGET": str(budget)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 1.1 * budget
