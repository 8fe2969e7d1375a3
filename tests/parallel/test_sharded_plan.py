"""The memory of shards and of recomputed blocks: planned against measured, what would fit, what is refused."""

from dataclasses import replace

import pytest
from models.small_models import make_spec
from parallel.ranks import run_ranks

from benchmarks.common.memory import peak_bytes
from ensemble_ml.config import DataConfig, ParallelConfig, Precision, TrainConfig
from ensemble_ml.distributed import Topology, solo
from ensemble_ml.distributed.choice import consecutive_groups, process_group
from ensemble_ml.distributed.costs import Link
from ensemble_ml.distributed.echo import sums_of_copies
from ensemble_ml.distributed.sharding import shard_weights
from ensemble_ml.errors import UserError
from ensemble_ml.models import Climate, EnsembleModel, Speed
from ensemble_ml.training import plan, scaling
from ensemble_ml.training.rehearsal import Rehearsal, trace


def config_of(shard=1):
    return TrainConfig(run="a", data=DataConfig(store="x"), parallel=ParallelConfig(shard=shard), batch_size=4)


def peak(session, spec, shards):
    """Most bytes that torch's allocator gave at once in a step, beyond those from before it."""
    mine = Rehearsal(config_of(), spec, session.mesh, 2, Speed())
    if shards > 1:
        shard_weights(mine.model, session.mesh, *consecutive_groups(session.topology, shards, process_group))
    mine.step()  # FSDP2 makes its lists in the first one
    mine.model.zero_grad(set_to_none=True)
    return peak_bytes(mine.step)


@pytest.mark.parametrize(("recompute", "shards"), [(True, 1), (True, 2)])
@pytest.mark.parametrize(
    "size",
    [
        (33, 64, 16, 64),
        *(pytest.param(size, marks=pytest.mark.slow) for size in ((33, 64, 64, 256), (61, 120, 32, 64))),
    ],
    ids=str,
)
def test_memory_is_what_the_plan_says(size, recompute, shards):
    """Mostly fields, as many weights as fields, and a larger grid."""
    rows, columns, hidden, most = size
    spec = make_spec(rows, columns, hidden=hidden, max_hidden=most, recompute=recompute)
    found = trace(config_of(shards), spec, Topology(data=2), 2, Speed()).activations
    measured = max(run_ranks(peak, 2, spec, shards, data=2))
    assert found == pytest.approx(measured, rel=0.05)


def test_weights_of_a_rank_are_its_part():
    spec = make_spec(9, 16, hidden=64, max_hidden=256, variables=("t",), surface=("t2m",), linear=False)
    alone, shared = (trace(config_of(n), spec, Topology(data=4), 1, Speed()) for n in (1, 4))
    assert shared.weights == alone.weights and shared.whole == alone.whole == alone.resident
    assert shared.resident < 0.3 * alone.resident
    assert shared.state < 0.16 * alone.state  # no buffer of gradients for the exchange, either
    gathered = [m for m in shared.traffic.messages if m.axes == ("shard",)]
    kinds = [m.kind for m in gathered]
    blocks = 5 + 1  # two poolings, and what lies between blocks
    assert kinds.count("all_gather") == 2 * blocks and kinds.count("reduce_scatter") == blocks
    assert len(shared.parameters) + 5 * 7 + 8 == len(alone.parameters)


def test_groups_that_hold_all_weights_add_up_their_gradients():
    spec = make_spec(9, 16, hidden=64, max_hidden=256, variables=("t",), surface=("t2m",), linear=False)
    messages = trace(config_of(4), spec, Topology(data=4), 1, Speed()).traffic.messages
    assert not sums_of_copies(messages, 1)
    found = sums_of_copies(messages, 256)
    unet = sum(p.numel() for p in EnsembleModel(spec, Climate.default(spec)).unet.parameters())
    # Each rank sums a fourth of all gradients over 256 ranks, by a ring or what is no worse.
    assert sum(m.sent for m in found) == pytest.approx(2 * 255 / 256 * 4 * unet / 4, rel=1e-3)
    assert {(m.kind, m.ranks) for m in found} == {("all_reduce", 256)} and len(found) == 6


def test_scaling_to_a_thousand_devices():
    """Four ranks share the weights; more are groups of four, which sum their gradients in messages of their own."""
    spec = make_spec(33, 64, hidden=16, max_hidden=64, recompute=True)
    settings = plan.PlanSettings(gflops=1e4, alpha=1e-5, beta=1e-11, memory_gb=100.0, devices=1024)
    planner = plan.Planner(config_of(4), spec, settings, solo(), 4)
    found = planner.candidates()
    points = scaling.simulated(planner, [c for c in found if not c.why], {}, {(): Link(1e-5, 1e-11)})
    weak = {p.devices: p for p in points if p.kind == "weak"}
    assert list(weak) == [4 * 2**k for k in range(9)]
    assert weak[1024].best.data * weak[1024].best.lat * weak[1024].best.lon == 1024
    # Beside one group there are sums of 2 alpha log2(256) for each unit of the network.
    assert weak[1024].cost.norm - weak[4].cost.norm > 6 * 2 * 1e-5 * 8
    last = scaling.table(points, 4).splitlines()[-1].split()
    assert last[:4] == ["weak", "1024", "4", "1024"] and last[-1] == "GB"


@pytest.mark.parametrize(("devices", "numbers"), [pytest.param(6, [3, 6], marks=pytest.mark.slow), (2, [])])
def test_scaling_of_ranks_that_are_no_power_of_two(devices, numbers, tmp_path, capsys):
    """Three ranks share the weights, so 1, 2, 4, ... devices could never train."""
    spec = make_spec(9, 16, hidden=8, max_hidden=8, recompute=True, variables=("t",), surface=())
    settings = plan.PlanSettings(gflops=1e4, alpha=1e-5, beta=1e-11, memory_gb=100.0, devices=devices)
    alone = replace(config_of(), parallel=ParallelConfig(shard=3, lat=1, lon=1), batch_size=6)
    planner = plan.Planner(alone, spec, settings, solo(), 6)
    found = plan._scaling(planner, planner.candidates(), tmp_path)
    assert [point["devices"] for point in found if point["scaling"] == "strong"] == numbers
    text = capsys.readouterr().out
    assert ("plan.devices=2: so few cannot train; give 6 or more" in text) == (not numbers)


@pytest.mark.slow
def test_fifteen_billion_weights_fit_into_eight_gpus():
    """On half a degree, each rank an eighth of the latitudes, in bfloat16: 139 GiB are there."""
    levels = (500, 600, 700, 850, 925, 950, 1000)
    size = {"hidden": 1152, "max_hidden": 9216, "blocks": 2, "depth": 3}
    spec = make_spec(361, 720, levels=levels, recompute=True, linear=False, **size)
    found = trace(config_of(8), spec, Topology(lat=8), 1, Speed(Precision.bfloat16), gloo=False)
    assert plan.number_text(found.weights) == "15.3 B"
    assert 64e9 < found.activations + found.resident + found.state < 72e9
    assert found.whole < 62e9


@pytest.mark.slow
def test_the_fewest_shards_that_fit_are_taken(monkeypatch, caplog):
    """With much memory, with less than a rank needs alone, than shards alone need, and with too little."""
    spec = make_spec(
        9, 16, hidden=64, max_hidden=256, recompute=False, variables=("t",), surface=(), linear=False, depth=1
    )
    config = config_of("auto")
    config.model.recompute = "auto"
    caplog.set_level("INFO")
    session = solo()
    session.topology = Topology(data=4)  # the first of four ranks, which plans for all
    needs = []
    for way in ((False, 1), (False, 4), (True, 4)):
        given = plan.with_way(config, spec, *way)
        needs.append(trace(given["config"], given["spec"], session.topology, 1, Speed()).memory)
    assert needs[0] > needs[1] > needs[2]
    monkeypatch.setattr(plan, "in_use", lambda *_: 0)
    taken = []
    for room in (needs[0] + 1, needs[0] - 1, needs[1] - 1):
        monkeypatch.setattr(plan, "rank_memory", lambda *_, room=room: room / 0.95 + 1)
        settled, changed = plan.settled(config, spec, session)
        assert settled.model.recompute is changed.config.recompute
        taken.append((settled.parallel.shard, settled.model.recompute))
    assert taken[0] == (1, False) and taken[1] in ((2, False), (4, False)) and taken[2][1] is True
    assert f"plan: parallel.shard={taken[2][0]} model.recompute=true: 1.36 M weights: " in caplog.text
    monkeypatch.setattr(plan, "rank_memory", lambda *_: needs[2] / 2)
    with pytest.raises(
        UserError, match=r"^parallel\.shard=4 model\.recompute=true: .* GB a rank of 4, where each has .* GB"
    ):
        plan.settled(config, spec, session)


def test_what_contradicts_is_refused():
    with pytest.raises(UserError, match=r"parallel\.shard=auto: the planner needs a number here"):
        ParallelConfig(shard="auto", lat="auto")
    planner = plan.Planner(config_of(3), make_spec(), plan.PlanSettings(gflops=1.0, alpha=1e-5, beta=1e-9), solo(), 4)
    with pytest.raises(UserError, match=r"parallel\.shard=3: does not divide 4 ranks"):
        planner.candidates()
    assert plan.ways(config_of(2), make_spec(recompute=True), 4) == [(True, 2)]
    every = plan.ways(config_of(2), make_spec(), 4, every=True)
    assert every == [(again, n) for again in (False, True) for n in (1, 2, 4)]
    numbers = {1_300_000: "1.3 M", 999_999: "1 M", 25_000: "25 k", 999: "999", 0: "0"}
    assert {n: plan.number_text(n) for n in numbers} == numbers
