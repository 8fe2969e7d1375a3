"""What the planner reckons with where ranks hold unequal parts, and what a run that goes on keeps of its mesh."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from models.small_models import make_spec
from parallel.ranks import run_ranks
from parallel.test_planner import half_degree

from ensemble_ml.config import DataConfig, ParallelConfig, Precision, TrainConfig
from ensemble_ml.distributed import Topology, solo
from ensemble_ml.distributed.planner import Candidate
from ensemble_ml.errors import UserError
from ensemble_ml.models import Speed
from ensemble_ml.training import plan, probing
from ensemble_ml.training.plan import Planner, shared_out


@dataclass
class _Traced:
    shape: tuple[int, int]
    traffic: SimpleNamespace


@pytest.mark.parametrize("lat", [2, 3, 4, 11, 22])
def test_messages_are_those_of_a_rank_between_two_others(monkeypatch, lat):
    """Half-degree rows make 23 blocks: of 11 or 22 ranks the first alone has one more, and a neighbour less."""

    def trace(config, spec, rank, samples, speed, gloo):
        neighbours = (rank.place.lat > 0) + (rank.place.lat < rank.lat - 1)
        return _Traced(half_degree(rank), SimpleNamespace(sent=100 * neighbours))

    monkeypatch.setattr(plan, "trace", trace)
    planner = Planner.__new__(Planner)
    planner.config = planner.spec = None
    planner.speed = planner.widest = Speed()
    planner.known, planner.shard = {}, half_degree
    planner.session = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    found = planner.traced(Candidate(1, lat, 1))
    ranks = [Topology(lat=lat).at(rank) for rank in range(lat)]
    assert found.shape == max(map(half_degree, ranks))
    assert found.traffic.sent == (200 if lat > 2 else 100)


def counted_groups(session):
    """Process groups of a rank before and after links are measured, and after a mesh is taken twice."""
    counts, here = [], torch.distributed.distributed_c10d._world.pg_map
    counts.append(len(here))
    topologies = Topology(data=2, lat=2), Topology(lat=4), Topology(lat=2, lon=2)
    probing._links(SimpleNamespace(shapes=[probing.Shape(t, 1) for t in topologies]), session)
    counts.append(len(here))
    for _ in range(2):
        session.share_out(topologies[0])
        counts.append(len(here))
    x = torch.ones(1)
    session.mesh.world.all_reduce(x)
    session.mesh.lat.all_reduce(x)
    return counts, x.item()


def test_what_the_planner_measures_with_does_not_stay(monkeypatch):
    monkeypatch.setattr(probing, "measured_links", lambda mesh, *_: mesh.lat.all_reduce(torch.ones(1)) and {})
    for counts, x in run_ranks(counted_groups, 4, data=4):
        assert counts[0] == counts[1] and counts[2] == counts[3] and x == 8


def test_a_speed_is_chosen_before_weights_are_sharded(tmp_path):
    spec = make_spec(9, 16, hidden=8, depth=1, precision=Precision.auto)
    config = TrainConfig(run="a", data=DataConfig(store="x"), model=spec.config, batch_size=2)
    topology = Topology(data=2).at(0)
    found = []
    for shard in (2, 1):
        settings = replace(config, parallel=ParallelConfig(shard=shard))
        job = probing.Job(settings, spec, (probing.Shape(topology, 1),), 0.1, tmp_path, 0.0, False)
        found.append(probing.probe(job, solo()).pieces[0].seconds)
    assert min(found) > 0 and len(list(tmp_path.iterdir())) == 2  # times with and without shards are kept apart


def test_other_numbers_of_ranks_are_named_that_model_and_optimizer_can_follow(monkeypatch):
    planner = Planner.__new__(Planner)
    parallel = ParallelConfig(data="auto", lat=1, lon=1)
    planner.config = replace(TrainConfig(run="a"), batch_size=12, parallel=parallel)
    planner.spec, planner.ranks, planner.shard = make_spec(17, 16), 4, half_degree
    planner.session = SimpleNamespace(once=lambda f: f())
    monkeypatch.setattr(
        planner, "followed", lambda c: "no clip of a vote" if c.data in (3, 4) else _Traced(c.shape, None)
    )
    with pytest.raises(UserError, match=r"^4 ranks: none of 1 .*\(no clip of a vote\); 2 or 6 ranks would do$"):
        planner.candidates()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(lat="auto"), (2, 1, 1)),
        (dict(data=2, lat="auto", lon="auto"), (2, 1, 1)),
        (dict(data=1, lat="auto"), (1, 2, 1)),
    ],
)
def test_a_run_that_goes_on_keeps_its_mesh_unless_other_degrees_are_given(monkeypatch, given, expected):
    chosen = []
    session = SimpleNamespace(world=SimpleNamespace(size=2), first=False, once=lambda f: f(), share_out=chosen.append)
    planned = SimpleNamespace(candidates=lambda: [Candidate(1, 2, 1)])
    monkeypatch.setattr(plan, "Planner", lambda *_: planned)
    monkeypatch.setattr(plan, "pick", lambda found: found[0])
    config = replace(TrainConfig(run="a"), parallel=ParallelConfig(**given))
    before = {"parallel": dict(data=2, lat=1, lon=1)}
    config = shared_out(config, make_spec(17, 16), session, before)
    assert (config.parallel.data, config.parallel.lat, config.parallel.lon) == expected
    assert chosen == [Topology(data=expected[0], lat=expected[1], lon=expected[2])]
