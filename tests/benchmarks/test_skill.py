"""benchmark=skill in small: every stage, what it leaves, nothing done twice; its sums against brute force."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scoringrules import crps_normal
from stores import make_store

from benchmarks.skill import benchmark as skill
from benchmarks.skill import entrants
from benchmarks.skill.claims import Contest, _sizes, report
from benchmarks.skill.realistic import realism_of
from benchmarks.skill.scoring import CHANCE, Data, _Scorer, fit, groups_of, score
from benchmarks.skill.table import Board, Table
from ensemble_ml.cli import conf_folder
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, SkillConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store.climate import PROBABILITIES
from ensemble_ml.store.source import Part
from ensemble_ml.verification.bootstrap import draw_dates
from ensemble_ml.verification.extremes import efi
from ensemble_ml.verification.heights import Heights
from ensemble_ml.verification.samples import Group
from ensemble_ml.verification.statistics import c4


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Ten dates of 2001, three of 2002, six of 2003 in two blocks."""
    days = [f"2001-01-{d:02}" for d in range(1, 21, 2)] + [f"2002-01-{d:02}" for d in (1, 3, 5)]
    days += [f"2003-{m:02}-{d:02}" for m in (1, 2) for d in (1, 3, 5)]
    folder = tmp_path_factory.mktemp("skill")
    return make_store(
        folder / "a.zarr", dates=days, members=6, leads=(0, 48), variables=("t",), surface=("t2m", "tp"),
        shape=(9, 16), bias=0.5, dispersion=0.7,
    )  # fmt: skip


def config(store, folder, **changes):
    settings = dict(
        store=store.path, steps=4, patience=1, seeds=2, trials=2, members=3, sizes=[1, 3], bootstrap=100, threads=1
    )
    return BenchmarkConfig(
        benchmark="skill", output=str(folder), size=BenchmarkSize.tiny, skill=SkillConfig(**settings | changes)
    )


@pytest.mark.slow
def test_the_whole_of_it(store, tmp_path, monkeypatch, capsys):
    path = skill.run(config(store, tmp_path))
    content = json.loads(path.read_text())
    runs = {p.name for p in (tmp_path / "skill" / "runs").iterdir()}
    for name in ("unet3d", "drn", "ens10_unet", "poet"):
        mine = {r for r in runs if r.startswith(name)}
        assert len(mine) == 3 and {f"{name}-trial0-seed0", f"{name}-trial1-seed0"} < mine
    assert {r for r in runs if r.startswith("emos")} == {"emos-trial0-seed0"}
    assert {r for r in runs if r.startswith("start")} == {"start-trial0-seed0", "start-trial0-seed1"}
    assert any(note.startswith("Best on the validation dates at steps, by seed: ") for note in content["notes"])
    rows = content["tables"]["Trials, on the validation dates"]
    assert len(rows) == 9 and sum(row["taken"] for row in rows) == 5
    assert next(row for row in rows if row["model"] == "emos")["emos"]["form"]
    claims = {claim["claim"]: claim for claim in content["claims"]}
    assert len(claims) == len(content["claims"]) == 20
    # What is extreme here lies in one block for some fields: no interval. Of two blocks none is sure.
    ends = [claim for text, claim in claims.items() if text.endswith("lower end of the interval")]
    assert len(ends) == 6 and all(end["value"] is None and not end["holds"] for end in ends)
    others = {text: claim for text, claim in claims.items() if claim not in ends and "|EFI| > 0.7" not in text}
    assert others and all(np.isfinite(claim["value"]) for claim in others.values())
    figures = {name: figure["median"] for name, figure in content["figures"].items()}
    whole = figures["CRPS from 3 of 6 members at 48 h, 10 training dates: emos below raw 6"]
    assert whole > 5  # the ensemble is biased and under-dispersive
    begun = figures["CRPS from 3 of 6 members at 48 h, 10 training dates: start below raw 6"]
    ours = figures["CRPS from 3 of 6 members at 48 h, 10 training dates: unet3d below raw 6"]
    assert begun == pytest.approx(ours, abs=2)  # four steps change little
    assert "DOES NOT HOLD" in capsys.readouterr().out  # four steps win nothing

    def never(*_, **__):
        raise AssertionError("done already")

    monkeypatch.setattr(entrants, "train", never)
    monkeypatch.setattr(entrants, "predict", never)
    assert json.loads(skill.run(config(store, tmp_path)).read_text())["figures"] == content["figures"]


def test_years_are_split_as_the_archive_has_them():
    times = np.array([f"{year}-01-07" for year in range(2001, 2008)], "datetime64[ns]")
    found = entrants.split(SkillConfig(), times)
    assert found == entrants.Dates([str(y) for y in range(2001, 2005)], ["2005"], ["2006", "2007"])
    with pytest.raises(UserError, match=r"skill.train, skill.test: share 1 init times \(first 2007"):
        entrants.split(SkillConfig(train=["2001/2003", "2007"]), times)


def contest():
    """Twenty dates in as many blocks, two fields, ours and two rivals from one and five members; steady scores."""
    scores = {
        "crps": {
            "raw_10": 2.0, "fair_10": 2.1, "raw_5": 2.2, "debiased_5": 2.0, "corrected_5": 1.9, "own_law_5": 1.85,
            "unet3d-from5": 1.6, "unet3d-from1": 1.9, "start-from5": 1.65,
            "emos-from5": 1.7, "emos-from1": 1.95, "drn-from5": 1.75, "drn-from1": 2.0,
        },
        "crps_extreme": {"raw_10": 4.0, "unet3d-from5": 3.0, "emos-from5": 3.3, "drn-from5": 3.2},
        "spread": {
            "unet3d-from5": 0.64, "unet3d-from1": 1.44, "raw_4": 1.0, "spread_regression_5": 1.0,
            "size_corrected_5": 1.21,
        },
        "held_out": {
            "unet3d-from5": 0.81, "unet3d-from1": 1.0, "raw_4": 1.21, "spread_regression_5": 1.0,
            "held_out_regression_5": 0.9025, "size_corrected_5": 1.44, "chance": 0.7225,
        },
        "held_out_as_it_is": {"unet3d-from5": 1.0, "spread_regression_5": 1.21},
        "square": {"unet3d-from5": 1.0, "unet3d-from1": 4.0},
    }  # fmt: skip
    table, ones = Table(20, 2), np.ones((20, 2))
    for statistic, entrants_ in scores.items():
        for name, value in entrants_.items():
            table.total[statistic, name], table.weight[statistic, name] = value * ones, ones
    columns = {"variance": (1.0, 1.3)} | {f"bin_{n}": (0.1, 0.1) for n in range(1, 9)}
    columns |= {"bin_0": (0.08, 0.1), "bin_9": (0.13, 0.09)}
    for statistic, values in columns.items():
        for size in (1, 5):
            key = statistic, f"unet3d-from{size}"
            table.total[key], table.weight[key] = values * ones, ones
    board = Board(table, np.ones((9, 20)), np.arange(2), 0.95, np.arange(20))
    labels = {name: {n: (f"{name}-from{n}",) for n in (1, 5)} for name in ("unet3d", "emos", "drn")}
    return Contest(board, labels | {"start": {5: ("start-from5",)}}, 5, 10, 48, 40, ("t850", "tp"), {})


def test_the_best_of_first_seeds_is_the_best_by_these():
    """Where first seeds are compared; by all of its seeds another one is."""
    found = contest()
    table = found.board.table
    for name, value in (("drn-seed0", 1.5), ("drn-seed1", 1.99)):
        table.total["crps", name], table.weight["crps", name] = value * np.ones((20, 2)), np.ones((20, 2))
    found.labels["drn"] = {1: ("drn-from1",), 5: ("drn-seed0", "drn-seed1")}
    assert (found.best(5), found.best(5, seeds=1)) == ("emos", "drn")
    said: list = []
    _sizes(found, {}, said)
    assert min(claim.value for claim in said) == pytest.approx(100 * (1 - 1.6 / 1.5))


def test_claims_are_the_scores_worked_out_by_hand():
    figures, claims, notes = report(contest())
    where = "from 5 of 10 members at 48 h, 40 training dates"
    best = (
        f"{where}, geometric mean over variables and levels, test years: CRPS below the best of EMOS, DRN (here EMOS)"
    )
    extreme = "in the stratum |EFI| > 0.7 (EFI of the raw ten): CRPS below the best baseline"
    one = "one trajectory through the net: RMSE against the spread of the 5 held-out members below that of four raw"
    one += " members' spread"
    five = "5 members through the net: spread RMSE below spread regression's"
    held_out = f"{five}, what it says of the 5 held-out members' spread, against the better of two"
    sizes = "1, 5 members in: none but 1 is worse than the best baseline with as many members; the smallest gain"
    ends = {f"{text}: lower end of the interval": value for text, value in (
        (best, 100 / 17), (extreme, 6.25), (one, 100 * (1 - 1 / 1.1)), (five, 20.0), (held_out, 100 * (1 - 0.9 / 0.95)),
    )}  # fmt: skip
    expected = {name.removesuffix(": lower end of the interval"): value for name, value in ends.items()} | ends
    expected |= {
        f"{where}: CRPS below the raw full ensemble's N(m, (1+1/M) s^2)": 20.0,
        "sqrt(mean sigma^2) / RMSE of every variable and level has a 95 % interval that meets 0.95-1.05: share of them":
            50.0,
        "ten PIT bins between 0.08 and 0.12, all fields together: the smallest": 0.09,
        "ten PIT bins between 0.08 and 0.12, all fields together: the largest": 0.11,
        "ten PIT bins between 0.08 and 0.12, of every variable and level: the smallest": 0.08,
        "ten PIT bins between 0.08 and 0.12, of every variable and level: the largest": 0.13,
        "1, 5 members in: CRPS over raw improves monotonically; the largest step (negative is better)": -0.15,
        sizes: 100 / 17, f"{sizes}: lower end of the interval": 100 / 17,
    }  # fmt: skip
    assert {claim.claim: claim.value for claim in claims} == pytest.approx(expected, abs=1e-9)
    chance = figures["held_out RMSE: chance alone (normal members whose law is known) below held_out_regression_5"]
    assert chance.median == pytest.approx(100 * (1 - 0.85 / 0.95))
    shares = {name.rpartition(": ")[2]: f.median for name, f in figures.items() if name.startswith("share of the gain")}
    parts = {"fewer members (a loss)": -10, "bias": 10, "dispersion": 5, "a law that cannot be negative": 2.5}
    assert shares == pytest.approx(parts | {"flow-dependence": 12.5})
    as_it_is = figures["held_out_as_it_is RMSE: ours from 5 below spread_regression_5"]
    assert as_it_is.median == pytest.approx(100 * (1 - 1 / 1.1))
    assert figures["spread RMSE: ours from 1 below raw_4"].median == pytest.approx(-20)
    each = figures["share in a PIT bin, over ten bins of each field"]
    assert (each.min, each.max) == pytest.approx((0.08, 0.13))
    assert figures["CRPS from 1: ours below emos"].median == pytest.approx(100 * (1 - 1.9 / 1.95))
    assert figures["sqrt(mean sigma^2) / RMSE from 1, over fields"].min == pytest.approx(0.5)
    assert figures["share in a PIT bin from 1, over ten bins"].max == pytest.approx(0.11)
    told = "PIT bins of single fields: 1 of 2 have one outside 0.08-0.12; furthest from a tenth: t850 0.080 to 0.130,"
    assert any(note.startswith(told) for note in notes)


def test_claims_stand_with_and_without_surface_pressure():
    """Where ours is better in surface pressure alone, nothing is left without it."""
    found = replace(contest(), fields=("t850", "sp"))
    total = found.board.table.total
    for name in ("unet3d-from5", "emos-from5", "drn-from5"):
        total["crps", name] = np.array([1.6, total["crps", name][0, 1]]) * np.ones((20, 2))
    figures, claims, _ = report(found)
    values = {claim.claim: claim.value for claim in claims}
    [(text, whole)] = [(t, v) for t, v in values.items() if "the best of" in t and t.endswith("(here EMOS)")]
    assert whole == pytest.approx(100 * (1 - (1.6 / 1.7) ** 0.5))
    assert values[f"{text}, without surface pressure"] == pytest.approx(0)
    where = "from 5 of 10 members at 48 h, 40 training dates"
    assert figures[f"CRPS {where}: emos below raw 10, without surface pressure"].median == pytest.approx(20)
    assert not any("without surface pressure" in name for name in report(contest())[0])


def test_of_few_blocks_nothing_is_sure():
    few = contest()
    blocks = np.arange(20) // 5  # four of them
    few = replace(few, board=replace(few.board, block=blocks))
    ends = {claim.claim: claim for claim in report(few)[1] if "lower end of the interval" in claim.claim}
    assert len(ends) == 6 and all(np.isnan(end.value) and not end.holds for end in ends.values())
    [share] = [claim for claim in report(few)[1] if "meets 0.95-1.05" in claim.claim]
    assert share.value == 0 and not share.holds


@pytest.mark.slow
def test_a_run_of_other_settings_is_not_taken_for_this(store, tmp_path):
    skill.run(config(store, tmp_path, models=["unet3d", "emos"], seeds=1, trials=1))
    with pytest.raises(UserError, match="steps=5 "):
        skill.run(config(store, tmp_path, models=["unet3d", "emos"], seeds=1, trials=1, steps=5))
    with pytest.raises(UserError, match=r"skill.trials=9: there are 5 settings"):
        skill.run(config(store, tmp_path, trials=9))


@pytest.mark.slow
def test_trainings_end_by_patience_and_see_the_same(store, tmp_path):
    """Departures and place for all networks; a training that took all of its steps is told of."""
    skill.run(config(store, tmp_path, models=["unet3d", "drn"], seeds=1, trials=2, steps=40, sizes=[3]))
    content = json.loads((tmp_path / "skill" / "results.json").read_text())
    rows = content["tables"]["Trials, on the validation dates"]
    assert len(rows) == 4 and {row["lr"] for row in rows} == {1e-3, 3e-3}
    assert all(row["steps"] <= 40 and row["best_step"] <= row["steps"] for row in rows)
    ended = [row for row in rows if row["steps"] < 40]
    assert all(row["steps"] - row["best_step"] == 20 for row in ended)  # a validation every twenty steps
    taken = {row["model"] for row in rows if row["taken"] and row["steps"] == 40}
    notes = [note for note in content["notes"] if "Still within their patience" in note]
    assert len(notes) == bool(taken) and all(name in note for note in notes for name in taken)
    run = tmp_path / "skill" / "runs" / "drn-trial0-seed0"
    meta = entrants.load_checkpoint(run / "checkpoints" / "last").meta
    assert meta["spec"]["config"]["departures"] and meta["config"]["optim"]["final_lr"] == 1.0


def test_scores_of_the_raw_ensemble_are_those_of_brute_force(store):
    groups, columns = groups_of(store, (48,))
    assert [c.name for c in columns] == ["t500", "t850", "t2m", "tp"]
    test = np.arange(13, 19)
    table = score(Data(store, np.arange(10), test, 3), groups, len(columns), {}, set(), set())
    area = store.layout.grid.area_weights()
    group, wanted, four = groups[0], [], []
    for date in test:
        data = Data(store, test, test, 3)
        x, y = data.read(Part.FORECAST, date, group), data.read(Part.TRUTH, date, group)[0]
        crps = crps_normal(y, x.mean(0), np.sqrt(7 / 6) * x.std(0, ddof=1))
        wanted.append((crps * area).sum((-2, -1)) / area.sum())
        four.append((((x[:4].std(0, ddof=1) - x.std(0, ddof=1)) ** 2) * area).sum((-2, -1)) / area.sum())
    counts = np.array([[1.0] * 6, [2, 2, 2, 0, 0, 0]])
    board = Board(table, counts, np.arange(2), 0.95, np.arange(6) // 3)
    np.testing.assert_allclose(board.score("crps", ["raw_6"])[0], np.mean(wanted, 0))
    np.testing.assert_allclose(board.score("crps", ["raw_6"])[1], np.mean(wanted[:3], 0))
    np.testing.assert_allclose(board.score("spread", ["raw_4"])[0], np.mean(four, 0))
    # bias and dispersion each help, on dates that they were not fitted on
    steps = [board.score("crps", [name])[0].mean() for name in ("raw_3", "debiased_3", "corrected_3")]
    assert steps[0] > steps[1] > steps[2]


def test_raw_temperatures_stand_on_the_ground_of_the_truth(store):
    """What learns the difference of heights, by the cell or for the globe, gains nothing by it; spreads stay."""
    groups, columns = groups_of(store, (48,))
    shape, test = store.layout.grid.shape, np.arange(13, 19)
    found = []
    for heights in (None, Heights(np.zeros(shape), np.full(shape, 200.0))):
        data = Data(store, np.arange(10), test, 3, heights=heights)
        table = score(data, groups, len(columns), {}, set(), set())
        found.append(Board(table, np.ones((1, 6)), np.arange(len(columns)), 0.95, np.arange(6)))
    area, group, wanted = store.layout.grid.area_weights(), groups[1], []
    assert group.variable == "t2m"
    for date in test:
        x, y = data.read(Part.FORECAST, date, group) - 1.3, data.read(Part.TRUTH, date, group)[0]
        wanted.append((crps_normal(y, x.mean(0), np.sqrt(7 / 6) * x.std(0, ddof=1)) * area).mean())
    plain, brought = (
        [board.score(*of)[0] for of in (("crps", ["raw_6"]), ("crps", ["corrected_3"]))] for board in found
    )
    assert brought[0][2] == pytest.approx(np.mean(wanted)) and brought[0][2] != pytest.approx(plain[0][2], rel=0.01)
    np.testing.assert_allclose(brought[0][[0, 1, 3]], plain[0][[0, 1, 3]])
    np.testing.assert_allclose(brought[1], plain[1])
    np.testing.assert_array_equal(*(board.score("spread", ["raw_4"]) for board in found))


def test_the_ensemble_that_is_scored_is_held_to_the_check_of_the_archive(store):
    """Which looks at t850 alone here; errors by brute force, and what is biased and narrow misses."""
    groups, _ = groups_of(store, (48,))
    data = Data(store, np.arange(10), np.arange(13, 19), 3)
    found = realism_of(data, groups)
    assert set(found) == {"t850"}
    area = store.layout.grid.area_weights() / (9 * 16)
    squares, variances = [], []
    for date in data.test:
        x, y = (data.read(part, date, groups[0])[:, 1] for part in (Part.FORECAST, Part.TRUTH))
        squares.append(((x.mean(0) - y[0]) ** 2 * area).sum())
        variances.append((x.var(0, ddof=1) * area).sum() * 7 / 6)
    ratio = np.sqrt(np.mean(variances) / np.mean(squares))
    assert (found["t850"].dates, found["t850"].members) == (6, 6)
    assert found["t850"].spread_skill == pytest.approx(ratio)
    good = replace(found["t850"], spread_skill=0.9, raw_bias_share=0.1, correlation=0.3)
    for bad, misses in ((good, 0), (replace(good, spread_skill=0.6), 1), (replace(good, raw_bias_share=0.2), 1)):
        claims = report(replace(contest(), realism={"t850": bad, "z500": good}))[1]
        missed = next(claim for claim in claims if "realistic" in claim.claim)
        assert (missed.value, missed.holds) == (misses, not misses)
    figures = report(replace(contest(), realism=found))[0]
    assert figures["t850 of the raw 10 at 48 h, test dates: spread/skill"].median == pytest.approx(ratio)


def test_a_forecast_that_knows_the_law_errs_by_chance_alone():
    """Against the spread of five normal members held out of ten: the spread that is expected of them, of all sizes."""
    rng, table, few = np.random.default_rng(0), Table(1, 1), 5
    sigma = np.exp(rng.normal(0, 0.5, (1, 300, 400)))
    members = sigma * rng.normal(size=(10, *sigma.shape))
    group = Group("t2m", 48, (None,), slice(0, 1))
    nothing = SimpleNamespace(spread=lambda given: 1.1 * given, held_out=lambda _given: c4(10) * sigma)
    data = SimpleNamespace(members=few, full=10, store=SimpleNamespace(layout=SimpleNamespace(
        realization=np.arange(1, 11), grid=SimpleNamespace(area_weights=lambda: np.ones(sigma.shape[1:])),
    )))  # fmt: skip
    # what is expected of the spread of all, given five of them: half of their sampling errors are in it
    expected = c4(10) * np.sqrt((4 * members[:few].var(0, ddof=1) / c4(10) ** 2 + 5 * sigma**2) / 9)
    files = {
        name: SimpleNamespace(variables=["t2m_ensemble_spread"], members_in=members_in)
        for name, members_in in (("knows", "1 2 3 4 5"), ("other", "1 2 3"))
    }
    scorer = _Scorer(data, table, 0, group, nothing)
    scorer._read = lambda _file, _what: expected
    scorer._spreads(members, files)
    best, chance = (table.total["held_out", name].item() for name in ("held_out_regression_5", CHANCE))
    assert chance == pytest.approx(best, rel=0.02)
    assert table.total["held_out", "size_corrected_5"].item() > 1.5 * best
    assert table.total["held_out", "knows"].item() == pytest.approx(best, rel=0.02)
    assert table.total["held_out", "other"].item() > 1.1 * best  # which was not made from as many
    assert table.total["held_out_as_it_is", "knows"].item() > 1.1 * best
    assert table.total["spread", "knows"].item() == table.total["spread", "other"].item()
    given, held = members[:few].std(0, ddof=1), members[few:].std(0, ddof=1) * c4(10) / c4(5)
    rest = np.sqrt(np.maximum((9 * 1.21 - 4) / 5, 1.21 / 4)) * given
    assert table.total["held_out", "spread_regression_5"].item() == pytest.approx(((rest - held) ** 2).sum())
    whole = SimpleNamespace(variables=["t2m_ensemble_spread"], members_in=" ".join(map(str, range(1, 11))))
    scorer._spreads(members, {"all": whole})
    assert ("spread", "all") in table.total and ("held_out", "all") not in table.total  # it has seen them


def test_extremes_are_measured_against_other_years(store):
    groups, _ = groups_of(store, (48,))
    group, test = groups[0], np.arange(13, 19)
    data = Data(store, np.arange(10), test, 3)
    found = fit(data, group).extreme
    pooled = np.concatenate([data.read(Part.FORECAST, date, group) for date in (*range(6), 10, 11, 12)])
    members = data.read(Part.FORECAST, 14, group)  # 3 January 2003: 1 to 11 January of 2001 and 2002
    index = efi(members, np.quantile(pooled, PROBABILITIES, axis=0), PROBABILITIES)
    clear = np.abs(np.abs(index) - 0.7) > 1e-3
    assert 0 < (found[1] & clear).sum() < clear.sum()
    np.testing.assert_array_equal(found[1][clear], (np.abs(index) > 0.7)[clear])
    assert not found[3:].any()  # no other February


def test_a_ratio_is_a_geometric_mean_over_fields():
    table = Table(2, 2)
    one = np.ones((2, 1, 1))
    for entrant, values in (("a", (1.0, 8.0)), ("b", (2.0, 4.0)), ("c", (4.0, 4.0))):
        for date in range(2):
            table.record(("crps", entrant), date, slice(0, 2), np.reshape(values, (2, 1, 1)), one)
    board = Board(table, np.ones((3, 2)), np.arange(2), 0.95, np.arange(2))
    assert board.ratio("crps", ["a"], ["b"]).value == pytest.approx(1.0)
    assert board.ratio("crps", ["a"], ["c"], power=0.5).value == pytest.approx(np.sqrt(np.sqrt(0.25 * 2)))
    assert board.gain("crps", ["a", "b"], ["c"]).value == pytest.approx(100 * (1 - np.sqrt(1.5 / 4 * 6 / 4)))


def test_a_field_of_few_blocks_bounds_the_interval():
    rng, table = np.random.default_rng(0), Table(40, 2)
    for date in range(40):
        for entrant in "ab":
            values, there = 1 + 0.1 * rng.random((2, 1, 1)), np.array([1.0, date < 10]).reshape(2, 1, 1)
            table.record(("crps", entrant), date, slice(0, 2), values, there)
    counts = np.vstack([np.ones(40), draw_dates(np.arange(40) // 10, 200, 0)])
    whole, first = (Board(table, counts, np.array(c), 0.95, np.arange(40) // 10) for c in ([0, 1], [0]))
    assert not np.isfinite(whole.ratio("crps", ["a"], ["b"]).low)  # the second field lies in one block
    assert np.isfinite(first.ratio("crps", ["a"], ["b"]).low)


def test_networks_are_those_of_conf():
    from omegaconf import OmegaConf

    for name in ("emos", "drn", "ens10_unet", "poet"):
        assert OmegaConf.load(conf_folder() / "model" / f"{name}.yaml") == {"name": name, **entrants.NETS[name]}


def test_dates_are_split_by_years(store):
    found = entrants.split(SkillConfig(), store.layout.init_time)
    assert (found.train, found.validation, found.test) == (["2001"], ["2002"], ["2003"])
    eight = np.array([f"{y}-01-01" for y in range(2001, 2009)], "datetime64[ns]")
    assert entrants.split(SkillConfig(), eight).test == ["2007", "2008"]
    with pytest.raises(UserError, match="name the dates of each"):
        entrants.split(SkillConfig(), eight[:2])


def test_what_is_refused(store, tmp_path):
    with pytest.raises(UserError, match="6 members; 10 are needed"):
        skill.run(config(store, tmp_path, sizes=[3, 10]))
    with pytest.raises(UserError, match=r"must hold skill\.members=4"):
        config(store, tmp_path, members=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
