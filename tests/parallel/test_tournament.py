"""Trainers of one job that compete: who takes whose weights, NaN, kills, resumes, the best of all, bad input."""

import math
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel.ranks import run_ranks
from parallel.test_parallel_training import config_of, joined
from stores import make_store

from ensemble_ml import cli
from ensemble_ml.config import (
    ExchangeName,
    OptimName,
    ParallelConfig,
    Precision,
    TournamentConfig,
    TournamentData,
    TournamentKeep,
)
from ensemble_ml.errors import UserError
from ensemble_ml.inference.card import model_card
from ensemble_ml.training import load_checkpoint, setup, trainer
from ensemble_ml.training.checkpoint import find_checkpoint, load_meta, load_spec
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.tournament import lineage, partners, sources
from ensemble_ml.training.tracking import read_log


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tournament")
    return make_store(folder / "a.zarr", dates=16, members=5, shape=(9, 16), bias=0.6, dispersion=0.6).path


def contest(store, output, trainers=4, **changes):
    given = {"every": 4, **changes.pop("tournament", {})}
    settings = {"steps": 12, "validate_every": 4, "checkpoint_every": 3, "average": 0.0, "batch_size": 1} | changes
    parallel = settings.pop("parallel", {})
    config = config_of(
        store, output, optimizer=OptimName.lion, precision=Precision.float32,
        parallel=ParallelConfig(trainer=trainers, **parallel), tournament=TournamentConfig(**given), **settings,
    )  # fmt: skip
    config.model.depth = 1
    config.model.points = 0
    return config


def start(config, work=joined, *args, **changes):
    """Run the job of a configuration."""
    parallel = config.parallel
    data = 1 if parallel.data == "auto" else parallel.data
    return run_ranks(
        work,
        parallel.trainer * data * parallel.lat,
        config,
        *args,
        trainer=parallel.trainer,
        **{"seconds": 300} | changes,
    )


def folders(run):
    return sorted(run.glob("trainer_*"))


def rounds(folder):
    lines = [line for line in read_log(folder / "log.jsonl") if "tournament" in line]
    return [(line["step"], line["tournament"]["scores"], line["tournament"]["from"]) for line in lines]


def tensors(checkpoint):
    found = load_checkpoint(checkpoint, training=True)
    apart = {f"rank{r}.{name}": value for r in range(found.ranks) for name, value in found.of_rank(r).items()}
    return found.state_dict | found.training | apart, found.meta


def assert_equal_jobs(one, other):
    """All trainers are equal bit for bit, with their scores and tournaments, and so is the best of all."""
    for a, b in zip(folders(one), folders(other), strict=True):
        assert rounds(a) == rounds(b)
        for link in ("last", "best"):
            (first, meta), (second, meta2) = tensors(a / "checkpoints" / link), tensors(b / "checkpoints" / link)
            assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
            for key in ("step", "best", "scores", "widths", "widths_by_size", "tournaments"):
                assert meta.get(key) == meta2.get(key), key
    (first, _), (second, _) = (tensors(run / "checkpoints" / "best") for run in (one, other))
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def output(store, tmp_path_factory):
    """A folder of runs with one that was not disturbed, whose fits the others take."""
    folder = tmp_path_factory.mktemp("runs")
    start(contest(store, folder, run="whole"))
    return folder


def test_losers_have_the_weights_of_winners(output):
    run = output / "whole"
    every = [rounds(folder) for folder in folders(run)]
    assert len(every) == 4 and all(one == every[0] for one in every)
    assert [step for step, *_ in every[0]] == [4, 8]
    for step, scores, chosen in every[0]:
        takes = {(loser, winner) for loser, winner in enumerate(chosen) if loser != winner}
        assert takes == {tuple(sorted(pair, key=lambda k: -scores[k])) for pair in partners(0, step // 4, 4)}
    # The last steps begin from the winners' weights, with samples in another order.
    lines = [read_log(folder / "log.jsonl") for folder in folders(run)]
    losses = [[line["loss"] for line in log if "loss" in line] for log in lines]
    assert len({tuple(loss) for loss in losses}) == 4


def test_the_best_trainer_is_found_without_being_told(output):
    run = output / "whole"
    bests = [load_meta(folder / "checkpoints" / "best")["best"]["score"] for folder in folders(run)]
    found = load_meta(find_checkpoint(run))
    assert found["best"]["score"] <= min(bests)
    if "soup" not in found:
        where = (run / "checkpoints" / "best").resolve()
        assert where.parts[-3] == f"trainer_{bests.index(min(bests)):02d}"


def test_the_model_card_shows_who_won(output):
    run = output / "whole"
    spec, meta = load_spec(run / "trainer_00" / "checkpoints" / "last"), load_meta(run / "trainer_00/checkpoints/last")
    card = model_card(spec, meta, None)
    assert "## Tournaments\n\n4 trainers competed" in card and "these weights are trained by trainer 0 last" in card
    for step, scores, chosen in rounds(run / "trainer_00"):
        [row] = [line for line in card.splitlines() if line.startswith(f"| {step} |")]
        cells = [cell.strip() for cell in row.strip("| ").split("|")][1:]
        whose = ["" if source == k else f" <- {source}" for k, source in enumerate(chosen)]
        assert cells == [f"{score:.4f}{source}" for score, source in zip(scores, whose, strict=True)]


def test_the_lineage_of_weights():
    held = [{"step": 5, "from": [0, 0, 2]}, {"step": 10, "from": [0, 1, 1]}]
    assert lineage(held, 2) == "begun by trainer 0, by trainer 1 from step 5, by trainer 2 from step 10"
    assert lineage(held, 1) == "begun by trainer 0, by trainer 1 from step 5"
    assert lineage(held, 0) == lineage([], 0) == "begun by trainer 0"


class Killed:
    """Hooks that end one rank at a moment of the tournament after step 8."""

    def __init__(self, where, victim):
        self.where, self.victim = where, victim

    def __call__(self, session, config):
        own = session.topology.place.trainer
        if own == self.victim:
            getattr(self, self.where)(config)
        return joined(session, config)

    def before_the_swap(self, config):
        trainer.tournament.compete = lambda run, scores: os.kill(os.getpid(), signal.SIGKILL)

    def before_it_is_kept(self, config):
        """Die when all others have kept the tournament."""
        real, run = trainer.Trainer._save, Path(config.output) / config.run

        def save(self, *args, **kwargs):
            if self.state.step == 8:
                others = [folder for folder in folders(run) if folder != self.folder]
                while any(load_meta(folder / "checkpoints" / "last")["step"] < 8 for folder in others):
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *args, **kwargs)

        trainer.Trainer._save = save

    def by_a_signal(self, config):
        """Be asked to stop before the tournament for which the others wait."""
        real = trainer.Trainer._step

        def step(self, batch, stop=None):
            if self.state.step == 6:
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, batch, stop)

        trainer.Trainer._step = step


@pytest.mark.parametrize(
    ("where", "victim", "steps"),
    [
        pytest.param("before_it_is_kept", 0, {6, 8}, marks=pytest.mark.slow),
        pytest.param("before_it_is_kept", 2, {6, 8}, marks=pytest.mark.slow),
        pytest.param("before_the_swap", 1, {3}, marks=pytest.mark.slow),
        pytest.param("by_a_signal", 3, {7, 8}, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_it_is_the_same_job(store, output, where, victim, steps):
    config = contest(store, output, run=f"{where}{victim}")
    ends = start(config, Killed(where, victim), statuses=True, silence=8)
    assert all(status for status, *_ in ends)
    run = output / config.run
    assert {load_meta(folder / "checkpoints" / "last")["step"] for folder in folders(run)} == steps
    start(replace(config, resume=True))
    assert_equal_jobs(output / "whole", run)
    assert not list(run.glob("trainer_*/checkpoints/*b"))


def poisoned(session, config, victims, at):
    """Train; the weights of some trainers are NaN before a step."""
    real, own = trainer.Trainer._step, session.topology.place.trainer

    def step(self, batch, stop=None):
        if self.state.step == at and own in victims:
            next(self.state.model.parameters()).data.fill_(torch.nan)
        return real(self, batch, stop)

    trainer.Trainer._step = step
    return joined(session, config)


def test_a_trainer_with_nan_is_gone_after_the_next_tournament(store, output):
    start(contest(store, output, run="nan"), poisoned, {1}, 5)
    held = rounds(output / "nan" / "trainer_00")
    assert held[0] == rounds(output / "whole" / "trainer_00")[0]
    step, scores, chosen = held[1]
    assert step == 8 and [score is None for score in scores] == [False, True, False, False]
    assert chosen[1] != 1 and 1 not in (chosen[0], *chosen[2:])
    for folder in folders(output / "nan"):
        found, meta = tensors(folder / "checkpoints" / "last")
        assert meta["step"] == 12 and all(value.isfinite().all() for value in found.values())


def measured(session, config):
    """Train; the second trainer has NaN before step 2. Tell after which steps factors were measured."""
    steps, real = [], Judge.measure_widths_by_size

    def told(self, **given):
        steps.append(self.state.step)
        return real(self, **given)

    Judge.measure_widths_by_size = told
    poisoned(session, config, {1}, 1)
    return steps


def test_a_loser_measures_the_factors_of_the_weights_that_it_takes(store, output):
    """Those of its own former weights would otherwise stand beside the winner's until a better validation."""
    config = contest(store, output, trainers=2, run="factors", steps=5, tournament={"soup": False})
    config.optim.lr = 0.3  # nobody is better than at the start
    winner, loser = start(config, measured)
    assert rounds(output / "factors" / "trainer_00")[0][2] == [0, 0]
    assert [load_meta(folder / "checkpoints" / "best")["step"] for folder in folders(output / "factors")] == [0, 0]
    assert 4 not in winner and 4 in loser


@pytest.mark.slow
def test_a_job_whose_trainers_all_have_nan_ends(store, output):
    ends = start(contest(store, output, run="all"), poisoned, {0, 1, 2, 3}, 1, statuses=True)
    assert all(code and "step 4: no trainer has a score that is finite" in text for code, _, text in ends)


@pytest.mark.slow
def test_settings_travel_with_the_winner(store, output):
    vary = {"optim.lr": [1e-7, 1e-7, 1e-7, 3e-3], "spread_weight": [0.1, 0.2, 0.3, 0.4]}
    config = contest(store, output, run="vary", tournament={"vary": vary, "keep": TournamentKeep.truncation})
    start(config)
    run = output / "vary"
    _, scores, chosen = rounds(run / "trainer_00")[0]
    best, worst = scores.index(min(scores)), scores.index(max(scores))
    assert [chosen[k] for k in range(4) if k != worst] == [k for k in range(4) if k != worst]
    assert chosen[worst] == best == 3
    rates = [line["lr"] for line in read_log(folders(run)[worst] / "log.jsonl") if "lr" in line]
    winner = [line["lr"] for line in read_log(folders(run)[best] / "log.jsonl") if "lr" in line]
    assert max(rates[:4]) <= 1e-7 and rates[4:8] == winner[4:8]
    assert load_meta(folders(run)[worst] / "checkpoints" / "last")["varied"] in (best, *range(3))


@pytest.mark.slow
def test_trainers_whose_ranks_share_a_sample_are_as_trainers_of_one_rank(store, output):
    for name, parallel in (("one", {}), ("lat", {"lat": 2})):
        config = contest(store, output, trainers=2, run=name, parallel=parallel, tournament={"every": 8})
        config.model.precision = Precision.float64
        start(config, **parallel)
    (step, scores, chosen), (step2, scores2, chosen2) = (
        rounds(output / run / "trainer_00")[0] for run in ("one", "lat")
    )
    assert (step, chosen) == (step2, chosen2) and sorted(chosen) != [0, 1]
    assert scores2 == pytest.approx(scores, rel=1e-9)
    for trainer_of in ("trainer_00", "trainer_01"):
        first, second = (tensors(output / run / trainer_of / "checkpoints/last")[0] for run in ("one", "lat"))
        for name, value in first.items():
            # Lion steps by signs, which rounding may turn where a gradient is nearly zero.
            wrong = (second[name] - value).abs() > 1e-9
            assert wrong.float().mean() < 0.01, name


@pytest.mark.slow
def test_trainers_of_two_ranks_whose_momenta_differ(store, output):
    """Each rank takes the momentum of its counterpart; parts of the dates; killed and resumed."""
    settings = {"parallel": {"data": 2}, "batch_size": 2, "tournament": {"data": TournamentData.parted, "every": 8}}

    def votes(run):
        config = contest(store, output, trainers=2, run=run, validate_every=4, checkpoint_every=4, **settings)
        config.optim.exchange = ExchangeName.vote
        return config

    start(votes("votes"), data=2)
    _, _, chosen = rounds(output / "votes" / "trainer_00")[0]
    assert sorted(chosen) != [0, 1]
    killed = votes("votes_killed")
    loser = next(trainer for trainer, source in enumerate(chosen) if trainer != source)
    ends = start(killed, Killed("before_it_is_kept", loser), statuses=True, data=2, silence=8)
    assert all(status for status, *_ in ends)
    start(replace(killed, resume=True), data=2)
    assert_equal_jobs(output / "votes", output / "votes_killed")


@pytest.mark.parametrize("lost", ["links", "last"])
def test_a_copy_without_links_goes_on(store, output, lost):
    """As cp -rL makes it, or a store that knows no links. No trainer's checkpoints are removed."""
    run = Path(shutil.copytree(output / "whole", output / f"copied_{lost}", symlinks=False))
    for folder in (run, *folders(run)) if lost == "last" else ():
        for link in {"last", "best"} & {path.name for path in (folder / "checkpoints").iterdir()}:
            shutil.rmtree(folder / "checkpoints" / link)
    before = [load_meta(found) for found in sorted(run.glob("trainer_*/checkpoints/step_*"))]
    config = contest(store, output, run=run.name, resume=True)
    start(config)
    after = [load_meta(found) for found in sorted(run.glob("trainer_*/checkpoints/step_*"))]
    assert after and [meta for meta in before if meta["step"] == 12] == [meta for meta in after if meta["step"] == 12]
    assert [load_meta(folder / "checkpoints" / "last")["step"] for folder in folders(run)] == [12] * 4
    assert (run / "checkpoints" / "best").is_symlink() and find_checkpoint(run)


@pytest.mark.parametrize("place", ["step_00000009", "last", "step_00000009_good"])
def test_checkpoints_that_cannot_be_gone_on_from_are_not_removed(store, output, tmp_path, place):
    """Whatever is in the folder of one trainer, and whatever the others lack."""
    kept = tmp_path / "runs" / "a" / "trainer_01" / "checkpoints" / place
    shutil.copytree((output / "whole" / "trainer_01" / "checkpoints" / "last").resolve(), kept)
    if place == "step_00000009":
        (kept / "model.safetensors").write_bytes(b"rubbish")
    for number in range(4):
        with suppress(UserError):
            setup.open_run(contest(store, tmp_path / "runs", run="a", resume=True), trainer=number)
    assert list(kept.parent.glob("*/checkpoint.json"))


def test_another_number_of_trainers_is_refused(store, output):
    for trainers in (2, 1):
        config = (
            contest(store, output, trainers=trainers, run="whole", resume=True)
            if trainers > 1
            else config_of(store, output, run="whole", resume=True)
        )
        ends = start(config, statuses=True)
        assert all(code and f"parallel.trainer={trainers} (was 4" in text for code, _, text in ends)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tournament": {"every": 0}}, r"parallel.trainer=4: trainers compete in tournaments; give tournament.every"),
        ({"tournament": {"every": 5}}, r"tournament.every=5: .* multiple of validate_every=4; the nearest is 4$"),
        ({"trainers": 1}, r"tournament.every=4: one trainer has nobody to compete with"),
        ({"tournament": {"vary": {"optim.lr": [1e-3]}}}, r"tournament.vary.optim.lr=\[0.001\]: give 4 values"),
        ({"tournament": {"vary": {"model.hidden": [8, 8, 8, 8]}}}, r"vary.model.hidden=.*: changes the shape of"),
        ({"tournament": {"vary": {"optim.lr": 0.1}}}, r"tournament.vary.optim.lr=0.1: give a list of numbers"),
        ({"tournament": {"vary": {"optim.lr": [1, 1, -3, 1]}}}, r"optim.lr=-3: must be above 0"),
        ({"tournament": {"vary": {"spread_weight": [1, 1, -3, 1]}}}, r"tournament.vary.spread_weight=-3: must be 0"),
        (
            {"tournament": {"vary": {"optim.warmup": [1, 1, 1.5, 1]}}},
            r"vary.optim.warmup=1.5: give a whole number of st",
        ),
        ({"tournament": {"vary": "optim.lr"}}, r"tournament.vary=optim.lr: give a list of values by setting"),
        ({"patience": 3}, r"patience=3: parallel.trainer=4 models take the same number of steps"),
        ({"max_minutes": 3.0}, r"max_minutes=3.0: parallel.trainer=4 models take the same number of steps"),
        ({"parallel": {"lat": "auto"}}, r"parallel.trainer=4: the planner works for one model only"),
    ],
)
def test_bad_settings(store, output, changes, message):
    with pytest.raises(UserError, match=message):
        contest(store, output, **changes)


def test_settings_that_vary_are_read_from_the_command_line():
    words = ["run=a", "data.store=b.zarr", "data.validation=[2002]", "parallel.trainer=2", "tournament.every=100"]
    for given in ("tournament.vary={optim.lr: [1e-4, 3e-4]}", "+tournament.vary={optim.lr: [1e-4, 3e-4]}"):
        config = cli.build_config("train", cli.compose_config("train", [*words, given]))
        assert config.tournament.vary == {"optim.lr": [1e-4, 3e-4]}


def test_settings_that_do_not_fit_the_data(store, output):
    few = contest(store, output, run="few", batch_size=4, tournament={"data": TournamentData.parted})
    for code, _, text in start(few, statuses=True):
        assert code and "tournament.data=parted: 8 training dates do not give 4 trainers a batch of 4 each" in text


def test_ties_and_values_that_are_not_finite():
    nan = math.nan
    for number in range(20):
        for keep in TournamentKeep:
            assert sources(keep, [0.5] * 5, 3, number) == [0, 1, 2, 3, 4]
            assert sources(keep, [nan] * 5, 3, number) == [0, 1, 2, 3, 4]
        chosen = sources(TournamentKeep.pairs, [nan, 0.5, math.inf, 0.4, 0.3], 3, number)
        for a, b in partners(3, number, 5):
            assert {chosen[a], chosen[b]} in ({a}, {b}) or not {a, b} - {0, 2}
        assert all(chosen[k] in (k, 1, 3, 4) for k in range(5))
    scores = [nan, 0.5, math.inf, 0.4, 0.3, 0.6, 0.7, 0.8]
    assert sources(TournamentKeep.truncation, scores, 3, 0) == [3, 1, 4, 3, 4, 5, 6, 7]


def test_all_pairs_are_drawn_and_depend_on_the_seed_alone():
    drawn = [frozenset(map(frozenset, partners(1, number, 4))) for number in range(60)]
    assert len(set(drawn)) == 3 and drawn == [frozenset(map(frozenset, partners(1, n, 4))) for n in range(60)]
    assert drawn != [frozenset(map(frozenset, partners(2, number, 4))) for number in range(60)]
