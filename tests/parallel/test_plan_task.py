"""The task `plan`: what it prints and writes, its mistakes, what a training takes of it, and the times it keeps."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from parallel.ranks import run_ranks
from stores import make_store

from data_prep.file_index import user_index
from ensemble_ml import cli, folders
from ensemble_ml.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from ensemble_ml.distributed.costs import Piece
from ensemble_ml.errors import UserError
from ensemble_ml.training import probing, trainer
from ensemble_ml.training.plan import Planner
from ensemble_ml.training.probing import _keep, _load, cache_folder
from ensemble_ml.training.tracking import read_log

AUTO = ParallelConfig(data="auto", lat="auto", lon="auto")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "a.zarr"
    return make_store(path, dates=4, members=3, shape=(17, 16), surface=("tp",)).path


def plan(store, tmp_path, *more):
    given = ["plan", f"data.store={store}", "data.train=[2001]", "model=small", "model.depth=2", "batch_size=2"]
    # A named precision: `auto` makes two dry runs of each partition, one for the memory and one for the messages.
    given += ["plan.gflops=10", "plan.alpha=1e-5", "plan.beta=1e-9", "model.precision=float32", "model.linear=false"]
    given += [f"output={tmp_path}", *more]
    return cli.main(given)


@pytest.mark.slow
def test_plan_prints_and_writes(store, tmp_path, capsys):
    assert plan(store, tmp_path, "plan.ranks=4", "plan.why=true", "parallel.lat=1", "model.precision=auto") == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    best = found["best"]
    assert f"parallel.data={best['data']} parallel.lat={best['lat']} parallel.lon={best['lon']}" in text
    assert "data=4 lat=1 lon=1: parallel.data=4: batch_size=2 does not divide" in text
    assert best["seconds"] == min(p["seconds"] for p in found["partitions"] if "why" not in p)


@pytest.mark.slow
def test_bytes_take_the_time_of_the_memory(store, tmp_path):
    """A convolution takes the time of its arithmetic, and everything else that of its bytes."""
    seconds = []
    for speeds in ([], ["plan.bandwidth=1"], ["plan.bandwidth=2"]):
        assert plan(store, tmp_path, "plan.ranks=1", *speeds) == 0
        seconds.append(json.loads((tmp_path / "plan" / "plan.json").read_text())["best"]["compute"])
    assert seconds[0] < seconds[2] < seconds[1]
    assert seconds[1] - seconds[0] == pytest.approx(2 * (seconds[2] - seconds[0]), rel=1e-3)


@pytest.mark.slow
def test_settings_of_the_optimizer_that_some_partitions_cannot_follow(store, tmp_path, capsys):
    votes = ["optim.name=lion", "optim.exchange=vote", "optim.clip=1", "plan.ranks=4", "data.train=[]"]
    assert plan(store, tmp_path, *votes, "plan.why=true") == 0
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    by_mesh = {(p["data"], p["lat"], p["lon"]): p for p in found["partitions"]}
    assert "optim.clip" in by_mesh[2, 2, 1]["why"] and "why" not in by_mesh[1, 2, 2]
    assert "data.train names no init times" in capsys.readouterr().out


@pytest.mark.slow
def test_simulated_scaling(store, tmp_path):
    assert plan(store, tmp_path, "plan.ranks=1", "plan.simulate=true", "plan.devices=4", "parallel.lat=1") == 0
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    one = next(p for p in found["scaling"] if p["devices"] == 1)
    assert one["halo"] == one["exposed"] == 0
    weak = [p for p in found["scaling"] if p["scaling"] == "weak"]
    assert [p["batch"] for p in weak] == [2 * p["devices"] for p in weak] and weak[-1]["devices"] == 4
    assert (tmp_path / "plan" / "scaling.png").stat().st_size > 5000
    assert "base64" in (tmp_path / "plan" / "report.html").read_text()


def test_scaling_without_links_is_refused(store, tmp_path, capsys):
    """One rank can time none, and links that cost nothing would scale for ever."""
    assert plan(store, tmp_path, "plan.ranks=1", "plan.simulate=true", "plan.alpha=null", "plan.beta=null") == 2
    assert "one rank has no link to time" in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(["plan.ranks=7"], "7 ranks: none of 3 partitions fits", marks=pytest.mark.slow),
        pytest.param(
            ["plan.ranks=2", "plan.memory_gb=1e-3"],
            "of it for weights, optimizer and libraries; use a smaller model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["plan.ranks=1", "plan.memory_gb=0.0132", "batch_size=8", "parallel.lat=1"],
            "ranks would do (data=",
            marks=pytest.mark.slow,
        ),
        (["plan.beta=null"], "give plan.alpha and plan.beta, or neither"),
        (["plan.gflops=0", "plan.bandwidth=100"], "plan.bandwidth=100.0: give plan.gflops too"),
        (
            ["plan.alpha=null", "plan.beta=null", "plan.ranks=4", "plan.ranks_per_node=1"],
            "plan.alpha, plan.beta: one process measures here for 4 ranks, so there is no link to time; give seconds",
        ),
        (["data.store=nowhere.zarr"], "nowhere.zarr"),
    ],
)
def test_bad_input_ends_in_one_line(store, tmp_path, capsys, monkeypatch, more, message):
    if "would do" in message:  # the interpreter itself is larger than this model
        monkeypatch.setattr("ensemble_ml.training.plan.in_use", lambda *_: 0)
    assert plan(store, tmp_path, *more) == 2
    text = capsys.readouterr().err.strip()
    assert message in text and len([line for line in text.splitlines() if line.startswith("ensemble-ml:")]) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.validation=[1999]"], "data.validation 1999: no init time"),
        (["data.members=[9]"], "data.members=[9]"),
        (["model.depth=4"], "use model.depth=3 or less"),
        (["plan.ranks=1", "plan.simulate=true", "plan.alpha=null", "plan.beta=null"], "one rank has no link to time"),
    ],
)
def test_mistakes_are_found_before_anything_is_followed_or_measured(
    store, tmp_path, capsys, monkeypatch, more, message
):
    monkeypatch.setattr(Planner, "candidates", lambda _: pytest.fail("began to work"))
    assert plan(store, tmp_path, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


def train_on(session, config):
    trainer.start = lambda _: nullcontext(session)
    trainer.train(config)
    return session.topology.shape


@pytest.mark.slow
def test_training_takes_the_planners_choice(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = DataConfig(store=str(store), train=["2001"], members=[1, 2], validation_members=2)
    model = ModelConfig(hidden=8, max_hidden=8, depth=2, linear=False, precision=Precision.float32)
    config = TrainConfig(
        run="a", output=str(tmp_path), steps=2, batch_size=1, threads=1, data=data, model=model, parallel=AUTO
    )
    chosen = run_ranks(train_on, 2, config, data="auto", lat="auto", lon="auto")
    assert chosen[0] == chosen[1] and chosen[0] in ((1, 1, 2, 1), (1, 1, 1, 2))  # one date cannot go to two ranks
    kept = OmegaConf.load(tmp_path / "a" / "config.yaml").parallel
    assert (kept.data, kept.lat, kept.lon) == chosen[0][1:]
    named = dict(zip(("data", "lat", "lon"), chosen[0][1:], strict=True))
    elsewhere = replace(config, output=str(tmp_path / "by_hand"), parallel=ParallelConfig(**named))  # fits of its own
    run_ranks(train_on, 2, elsewhere, **named)
    auto, by_hand = (list(read_log(folder / "a" / "log.jsonl")) for folder in (tmp_path, tmp_path / "by_hand"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (auto, by_hand)]
    assert losses[0] == losses[1] and losses[0]
    times = sorted(p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.json"))
    assert len(times) == 2
    again = run_ranks(train_on, 2, replace(config, run="b"), data="auto", lat="auto", lon="auto")
    assert again[0] == again[1] and again[0] in (
        (1, 1, 2, 1),
        (1, 1, 1, 2),
    )  # links, which are near equal, are timed anew
    # Steps are not: what was measured is kept.
    assert sorted(p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.json")) == times


def test_a_user_without_a_home_plans_all_the_same(tmp_path, monkeypatch, caplog):
    """As a container's user whom /etc/passwd does not know."""
    monkeypatch.setattr(folders, "_warned", set())
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "ensemble_ml" / "plan"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert [cache_folder(None) for _ in range(2)] == [None] * 2 and caplog.text.count("no home") == 1
    assert cache_folder(str(tmp_path)) == tmp_path
    assert user_index().folder is None  # and no folder named ~


def test_times_that_cannot_be_kept_or_read_are_measured_again(tmp_path, caplog):
    piece = Piece(2.0, 1.0, (0.5, 1.0))
    _keep(piece, kept := tmp_path / "plan" / "a.json")
    assert _load(kept) == piece and _load(tmp_path / "b.json") is None and _load(None) is None
    for cut in ("", kept.read_text()[:20], "{}", "[1]"):
        kept.write_text(cut)
        assert _load(kept) is None
    (tmp_path / "file").touch()
    _keep(piece, tmp_path / "file" / "a.json")
    assert "cannot be kept" in caplog.text and "measured again each time" in caplog.text


TALKS = """
import os, pathlib, pickle, sys, time
out = pathlib.Path(sys.argv[2])
done = out.with_name("spoken")
if os.environ["RANK"] == "1":
    sys.stderr.write("a warning of many\\n" * 20_000)
    sys.stderr.flush()
    done.touch()
until = time.monotonic() + 10
while not done.exists():  # as in a collective
    if time.monotonic() > until:
        sys.exit("rank 1 does not come")
    time.sleep(0.02)
if os.environ["RANK"] == "0":
    out.write_bytes(pickle.dumps("found"))
"""


def test_a_measuring_process_that_says_much_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(probing, "_PROCESS", TALKS)
    assert probing.measured_here("job", 2, 1) == "found"
    monkeypatch.setattr(probing, "_PROCESS", "import sys; sys.exit('no\\nGPU')")
    with pytest.raises(UserError, match=r"ended with status 1: no \| GPU"):
        probing.measured_here("job", 2, 1)
