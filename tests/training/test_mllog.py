"""The log of MLPerf HPC: line by line that of the package, and read by its own checker."""

import json
import logging
from pathlib import Path

import pytest
from training.running import stop_at

from ensemble_ml.config import DataConfig, TrackingConfig, TrainConfig
from ensemble_ml.errors import UserError
from ensemble_ml.training import train
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.mllog import FILE, Mllog, encoded, staged
from ensemble_ml.training.tracking import read_log
from ensemble_ml.training.validation import Validation

RULES = Path(__file__).parents[2] / "scripts" / "mlperf" / "ensemble_ml.yaml"
WHO = {"tracking__mllog": True, "tracking__org": "a centre", "tracking__platform": "two cores"}


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in (run / FILE).read_text().splitlines()]


def passes(text: str, folder: Path, rules: str) -> bool:
    """Return what the package's checker says of a log."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    path = folder / "checked.txt"
    path.write_text(text)
    return compliance.ComplianceChecker("hpc", "3.0.0", True, False).check_file(str(path), rules)


def solved(config_of):
    """Return a run that reaches its target after some steps, which its start misses, and that target."""
    settings = {"validate_every": 2, "optim__lr": 3e-3}
    log = read_log(train(config_of(**settings)) / "log.jsonl")
    scores = [line["validation"]["crps_ratio"] for line in log if "validation" in line]
    assert min(scores) < scores[0], scores
    target = (scores[0] + min(scores)) / 2
    return train(config_of(run="b", until=target, tracking__cache_clear=True, **settings, **WHO)), target


def test_lines_are_those_of_the_package(tmp_path):
    mllog = pytest.importorskip("mlperf_logging.mllog.mllog")
    logger = logging.Logger("mllog")
    theirs = logging.FileHandler(tmp_path / "theirs.txt")
    logger.addHandler(theirs)
    package, ours = mllog.MLLogger(logger, default_stack_offset=1), Mllog(lambda: 1764300000.5678)
    ours.open(tmp_path / "ours.txt")
    given = [
        ("seed", 3, {}),
        ("eval_error", 0.125, {"epoch_num": 2}),
        ("submission_org", 'Zürich "x"', {}),
        ("run_stop", None, {"status": "success"}),
    ]
    for key, value, metadata in given:
        for write, also in ((package.event, ours.point), (package.start, ours.start), (package.end, ours.end)):
            write(key, value, metadata, time_ms=1764300000567)
            also(key, value, **metadata)
    theirs.close()
    ours.close()
    apart = [(tmp_path / name).read_text().splitlines() for name in ("theirs.txt", "ours.txt")]
    assert len(apart[0]) == len(apart[1]) == 12
    for line, other in zip(*apart, strict=True):
        places = [json.loads(one.removeprefix(":::MLLOG "))["metadata"] for one in (line, other)]
        where = [f'"file": {json.dumps(place["file"])}, "lineno": {place["lineno"]}' for place in places]
        assert places[1]["file"] == __file__ and where[1] in other
        assert line.replace(where[0], where[1]) == other


def test_a_clock_that_is_set_back_does_not_turn_the_order(tmp_path):
    times = iter([5.0, 2.0, 6.0])
    log = Mllog(lambda: next(times))
    for _ in range(3):
        log.point("seed", float("nan"))
    log.open(tmp_path / FILE)
    log.close()
    found = lines_of(tmp_path)
    assert [line["time_ms"] for line in found] == [5000, 5000, 6000] and found[0]["value"] is None


def test_a_run_that_reaches_its_target_passes_both_checkers(config_of, tmp_path):
    run, target = solved(config_of)
    found = lines_of(run)
    keys = [line["key"] for line in found]
    assert keys.index("cache_clear") < keys.index("init_stop") < keys.index("run_start") < keys.index("train_samples")
    errors = [line["value"] for line in found if line["key"] == "eval_error"]
    assert len(errors) > 1 and errors[-1] <= target < min(errors[:-1])  # it ends where it is reached, and not before
    assert found[-1]["key"] == "run_stop" and found[-1]["metadata"]["status"] == "success"
    epochs = [line["metadata"]["epoch_num"] for line in found if line["key"] == "epoch_stop"]
    assert epochs == list(range(1, len(epochs) + 1))
    text = (run / FILE).read_text()
    whole = staged(text, 1.0, 2.0)
    assert passes(whole, tmp_path, str(RULES))
    assert not passes(text, tmp_path, str(RULES))  # of staging it says nothing
    assert not passes(
        whole.replace('"cache_clear", "value": true', '"cache_clear", "value": false'), tmp_path, str(RULES)
    )
    assert not passes(whole + encoded(3, "POINT_IN_TIME", "seed", 0, {})[:-2] + "\n", tmp_path, str(RULES))  # broken
    # The checker's own rules know this benchmark by no name. Under one that they know, form and order are right.
    renamed = whole.replace('"value": "ensemble_ml"', '"value": "cosmoflow"')
    for error in errors:
        renamed = renamed.replace(f'"eval_error", "value": {error}', '"eval_error", "value": 0.1')
    assert passes(renamed, tmp_path, "hpc_3.0.0/common.yaml")


def test_a_target_that_is_missed_fails(config_of, tmp_path):
    run = train(config_of(until=0.01, tracking__cache_clear=True, **WHO))
    assert lines_of(run)[-1]["metadata"]["status"] == "aborted"
    assert not passes(staged((run / FILE).read_text(), 1.0, 2.0), tmp_path, str(RULES))


def test_a_run_that_is_stopped_is_aborted_and_one_that_is_resumed_leaves_its_log(config_of, caplog, monkeypatch):
    config = config_of(**WHO)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    run = Path(config.output) / config.run
    before = (run / FILE).read_text()
    assert lines_of(run)[-1]["metadata"]["status"] == "aborted"
    config.resume = True
    train(config)
    assert (run / FILE).read_text() == before and "has no time to solution" in caplog.text


def test_a_start_that_is_good_enough_takes_no_step(config_of):
    run = train(config_of(until=5.0))
    train(config_of(until=5.0, resume=True))
    assert not [line for line in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if "loss" in line]


def test_a_validation_without_any_target_has_an_end(config_of, monkeypatch):
    real = Judge.scores
    monkeypatch.setattr(Judge, "scores", lambda *given: real(*given) and Validation({}))
    keys = [line["key"] for line in lines_of(train(config_of(**WHO)))]
    assert keys.count("eval_start") == keys.count("eval_stop") == 3


def test_bad_settings():
    with pytest.raises(UserError, match=r"must state org and platform: give tracking\.org=\.\.\. tracking\.platform="):
        TrackingConfig(mllog=True)
    with pytest.raises(UserError, match="must state platform"):
        TrackingConfig(mllog=True, org="a centre")
    with pytest.raises(UserError, match=r"until=0\.9: needs data.validation"):
        TrainConfig(until=0.9, data=DataConfig(store="x", train=["2001"]))
    with pytest.raises(UserError, match="until=-1"):
        TrainConfig(until=-1)


def test_a_score_that_the_model_does_not_have_is_refused(config_of):
    config = config_of(until=0.9, model__postprocess=False)
    with pytest.raises(UserError, match=r"until=0\.9: is a value of crps_ratio, which a model of the spread alone"):
        train(config)
    assert not (Path(config.output) / config.run).exists()
