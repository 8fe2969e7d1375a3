"""The benchmark of compressed Lion, tiny, over the loopback; and its tools against their definitions."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from parallel.simulated import on_ranks

from benchmarks.common.hosts import Hosts, python
from benchmarks.lion import benchmark as lion
from benchmarks.lion import quality, simulation, worker
from benchmarks.lion.trials import Training, quickstart_config
from benchmarks.lion.worker import interface_bytes
from ensemble_ml.cli import build_config, compose_config
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, CompressionConfig
from ensemble_ml.errors import UserError


@pytest.mark.slow("traced")
def test_tiny_run(tmp_path):
    settings = CompressionConfig(ranks=2, rates=[], elements=1 << 12)
    config = BenchmarkConfig(
        benchmark="lion", output=str(tmp_path), repeats=1, size=BenchmarkSize.tiny, lion=settings,
        only=["packing", "simulation", "communication", "steps", "replicas"],
    )  # fmt: skip
    found = json.loads(lion.run(config).read_text())
    claims = {c["claim"]: c for c in found["claims"]}
    assert not any("hosts" in claim for claim in claims), "no claim about networks without links"
    for words in ("replicas", "resume"):
        [claim] = [c for name, c in claims.items() if name.startswith(f"{words} equal bit for bit")]
        assert claim["holds"] and claim["value"] == 1
    sent = {k.split(": ")[1]: v["median"] for k, v in found["figures"].items() if k.startswith("bytes a step and rank")}
    assert len(sent) == 12 and 20 * sent["vote, 1 bit"] < sent["fp32 DDP"] < 40 * sent["vote, 1 bit"]
    names = ("vote, 1 bit", "fp32 all-reduce")
    ahead = [found["figures"][f"predicted, the loopback, 4096 ranks: {name}"]["median"] for name in names]
    assert all(value > 0 for value in ahead)
    assert any("Loopback" in note for note in found["notes"])
    signs = "right signs by magnitude, 64 ranks, "
    assert found["figures"][signs + "8 bits"]["median"] > found["figures"][signs + "1 bit"]["median"]


def test_bytes_on_the_loopback_are_of_this_process(monkeypatch):
    """Only what this process sends over TCP counts: not what another process sends, nor pipes and Unix sockets."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        port = server.getsockname()[1]
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        stack.enter_context(server.accept()[0])
        left, _ = (stack.enter_context(end) for end in socket.socketpair())
        before = interface_bytes()
        client.sendall(bytes(12345))
        left.sendall(bytes(99))
        words = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(bytes(777))"
        subprocess.run([sys.executable, "-c", words], check=True)
        assert interface_bytes() - before == 12345


def test_agreement_is_of_the_exact_mean():
    """Without noise all ranks agree: every form gives every sign that it can."""
    clear = simulation.agreement(5, noise=0.0, elements=640)
    assert clear["1 bit"] == 1 and clear["8 bits"] == 1
    noisy = simulation.agreement(64, noise=3.0, elements=640)
    assert 0.9 < noisy["1 bit"] < noisy["2 bits"] < noisy["8 bits"]
    assert simulation.agreement(128, noise=3.0, elements=640)["Lion Cub, 8 bits"] == 0.5  # no level is left


def test_predicted_step_time():
    costs = simulation.Costs(alpha=10.0, beta=1.0, pack=0.5)
    # 8 numbers of one bit out and one back, half of which goes to the other rank: one byte
    assert costs.vote(8, 1, 2) == 2 * 10 + 1 + 4
    assert costs.average(8, 2) == 2 * 10 + 8 * 4
    # 3 messages in 0.3 s; 64 elements are 8 bytes, 6 of which go to the three others
    seconds = {"all-to-all, small": [0.3], "all-to-all, large": [0.9], "packing": [6.4]}
    found = simulation.Costs.measured(seconds, 64, 4)
    assert (found.alpha, found.beta, found.pack) == pytest.approx((0.1, 0.1, 0.1))


def test_exchanges_alone_take_turns(monkeypatch):
    """Each had all its runs in a row, so that load that came and went hit one and spared another."""
    bits = []
    monkeypatch.setattr(worker, "sign_allreduce", lambda u, n, *_, **__: bits.append(n))
    job = {"elements": 1 << 12, "repeats": 2}
    [found] = on_ranks(
        1, lambda group: worker.communication(SimpleNamespace(mesh=SimpleNamespace(world=group), topology=group), job)
    )
    assert bits == [1, 2, 4, 8] * 3 and {len(times) for times in found.values()} == {2}


def test_a_rank_that_fails_is_told():
    with pytest.raises(UserError, match="status 3"):
        Hosts(2).run(python("-c", "import os, sys; sys.exit(3 * (os.environ['RANK'] == '1'))"), seconds=30)


def test_a_rank_that_fails_ends_those_that_would_wait_for_it():
    """They went on to the time limit, hours in some sections, and nothing said what had failed."""
    code = "import os, sys, time; sys.exit('the disk is full') if os.environ['RANK'] == '1' else time.sleep(60)"
    with pytest.raises(UserError, match="status 1: the disk is full"):
        Hosts(2).run(python("-c", code), seconds=50)


def test_a_rank_may_say_much_while_another_is_waited_for(tmp_path):
    code = (
        "import os, sys, time, pathlib; said = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '1': sys.stderr.write('x' * 300_000); said.touch()\n"
        "while not said.exists(): time.sleep(0.01)"
    )
    Hosts(2).run(python("-c", code, str(tmp_path / "said")), seconds=30)


def test_quality_reads_a_log(tmp_path):
    lines = [
        {"step": 10, "loss": 2.0, "samples_per_s": 8.0, "sent_mb": 0.5},
        {"step": 10, "momentum_sync": {"bytes": 7, "layers": ["a"]}},
        {"step": 15, "loss": None, "skipped": 5, "samples_per_s": 4.0, "sent_mb": 0.6},
        {"step": 20, "loss": 1.0, "samples_per_s": 4.0, "sent_mb": 0.7},
        {"step": 20, "validation": {"crps_ratio": 0.9}, "best": True},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = quality.read(tmp_path)
    assert found == Training(0.9, (10, 20), (2.0, 1.0), (5.0, 15.0), 0.6, 7)
    assert quality.seconds_to_loss(found, 1.5, window=1) == 15 and quality.seconds_to_loss(found, 0.5, 1) == math.inf
    [more] = quality.excess([found], [Training(0.8, (), (), (), 0, 0)])
    assert more == pytest.approx(12.5)


def test_trials_train_what_the_quickstart_trains():
    overrides = ["experiment=quickstart", "optim=lion", "data.store=x", "model.precision=float32", "steps=7", "seed=3"]
    wanted = build_config("train", compose_config("train", overrides))
    ours = quickstart_config("x", seed=3, steps=7, optim={})
    for name in ("seed", "steps", "batch_size", "spread_weight", "average", "data", "model", "optim"):
        assert getattr(ours, name) == getattr(wanted, name), name


def test_every_variant_is_one_that_the_program_takes():
    for name in quality.VARIANTS:
        overrides = ["optim=lion", "data.store=x", "run=a", *quality._overrides(name)]
        wanted = build_config("train", compose_config("train", overrides))
        assert all(getattr(wanted.optim, k) == v for k, v in quality.VARIANTS[name].items())
        assert wanted.loading.assign is quality.assigned(name)


@pytest.mark.parametrize(("rate", "over"), [("100mbit", "fp32 Lion under DDP"), ("1gbit", "the best rival")])
def test_ratios_over_links_are_theirs_over_ours_round_by_round(tmp_path, rate, over):
    names = [lion.DDP, lion._VOTE, *lion._RIVALS]
    found = {name: {"seconds": [4.0, 9.0], "bytes": [64.0]} for name in names}
    found[lion._VOTE] = {"seconds": [1.0, 3.0], "bytes": [2.0]}
    found[lion._RIVALS[0]] = {"seconds": [2.0, 9.0], "bytes": [2.0]}  # the best: 2 and 3 times, not 5.5 over 2
    bench = lion.LionBench(BenchmarkConfig(benchmark="lion", output=str(tmp_path)), tmp_path)
    lion._step_claims(bench, Hosts(4, rate), found)
    claims = {
        claim.claim.rpartition(": steps a second over ")[2].partition(" (")[0]: claim.value
        for claim in bench.claims[1:]
    }
    figure = next(figure for name, figure in bench.figures.items() if f"steps a second over {over}" in name)
    assert (figure.min, figure.max) == ((3.0, 4.0) if rate == "100mbit" else (2.0, 3.0))
    assert bench.claims[0].value == 32.0
    assert claims[over] == (3.5 if rate == "100mbit" else 2.5)
    assert len(claims) == (1 + len(lion._RIVALS) if rate == "100mbit" else 1)
