"""Runs that begin with the weights of another."""

from dataclasses import replace

import pytest
import torch
from training.running import stop_at, weights

from ensemble_ml.config import Precision
from ensemble_ml.errors import UserError
from ensemble_ml.training import train


@pytest.mark.slow
def test_init_from_takes_the_weights(config_of, monkeypatch):
    first = train(config_of(run="first", optim__lr=1e-2))
    given = weights(first)
    second = train(config_of(run="second", steps=1, optim__lr=1e-12, init_from=str(first / "checkpoints" / "last")))
    now = weights(second)
    assert all(torch.allclose(v, given.state_dict[k], atol=1e-9) for k, v in now.state_dict.items())
    assert now.meta["step"] == 1
    with pytest.raises(UserError, match=r"init_from=.*leads_out: \[24\] here, \[24, 48\] there"):
        train(config_of(run="third", data__leads_out=[24], init_from=str(first / "checkpoints" / "last")))
    assert not (first.parent / "third").exists()
    other = train(config_of(run="other", model__families={"t": "lognormal"}))
    with pytest.raises(UserError, match=r"init_from=.*config.families.t: normal here, lognormal there"):
        train(config_of(run="third", init_from=str(other / "checkpoints" / "last")))


def test_init_from_keeps_all_bits_of_float64(config_of):
    first = train(config_of(run="first", steps=1, model__precision=Precision.float64))
    begin = {"init_from": str(first / "checkpoints" / "last"), "model__precision": Precision.float64}
    second = train(config_of(run="second", steps=1, optim__lr=1e-30, optim__weight_decay=0.0, **begin))
    given = weights(first).state_dict
    # One step moves weights of zero, too.
    assert all(torch.allclose(v, given[k], rtol=0, atol=1e-25) for k, v in weights(second).state_dict.items())


@pytest.mark.slow
def test_dates_that_weights_have_seen_stay_known_through_chains_of_init_from(config_of, monkeypatch):
    dates = {"data__train": ["2001-01-01/2001-01-15"], "data__validation": ["2001-01-31"]}
    first = train(config_of(run="first", steps=1, **dates))
    assert "earlier_dates" not in weights(first).meta
    begin = {"init_from": str(first), "data__train": ["2001-01-17/2001-01-30"]}  # a run stands for its best checkpoint
    with monkeypatch.context() as patch:
        patch.setattr("ensemble_ml.training.assemble.kept_fit", lambda *_: pytest.fail("the fits began"))
        with pytest.raises(UserError, match="2 of its init times, first 2001-01-13T00, trained the weights of init"):
            train(config_of(run="second", **begin | {"data__validation": ["2001-01-13/2001-01-16"]}))
    config = config_of(run="second", steps=2, **begin)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 1)
        train(config)
    second = train(replace(config, resume=True, init_from=None))
    earlier = weights(second).meta["earlier_dates"]
    assert earlier == {"training": weights(first).meta["training_dates"], "validation": ["2001-01-31T00:00"]}
    begin = {"init_from": str(second / "checkpoints" / "last"), "data__train": ["2001-02-01/2001-02-04"]}
    with pytest.raises(UserError, match="first 2001-01-01T00, trained the weights"):
        train(config_of(run="third", **begin | {"data__validation": ["2001-01-01"]}))
    third = weights(train(config_of(run="third", steps=1, **begin | {"data__validation": ["2001-02-06"]}))).meta
    both = sorted({*weights(first).meta["training_dates"], *weights(second).meta["training_dates"]})
    assert third["earlier_dates"]["training"] == both and len(third["training_dates"]) == 2
    assert third["earlier_dates"]["validation"] == ["2001-01-31T00:00", *weights(second).meta["validation_dates"]]


def test_weights_that_go_on_keep_their_ranges_and_widths(config_of):
    """A model that learns on from one month has not forgotten the others, and its sigma is as wide as it was."""
    first = train(config_of(run="first", steps=1, data__train=["2001-01-01/2001-01-21"]))
    begin = {"init_from": str(first / "checkpoints" / "last"), "optim__lr": 1e-30, "optim__weight_decay": 0.0}
    rest = {"data__train": ["2001-01-25/2001-01-31"], "data__validation": []}
    alone, second = (
        weights(train(config_of(run=run, steps=1, **rest, **more))).meta
        for run, more in (("alone", {}), ("second", begin))
    )
    before = weights(first).meta
    for name in ("t", "z"):
        for level, (low, high) in second["input_range"][name].items():
            each = [meta["input_range"][name][level] for meta in (before, alone)]
            assert [low, high] == [min(one[0] for one in each), max(one[1] for one in each)]
    each = [meta["input_range"]["t2m"] for meta in (before, alone)]
    assert second["input_range"]["t2m"] == [min(one[0] for one in each), max(one[1] for one in each)]
    assert alone["widths"] is None and before["widths"] is not None and second["widths"] == before["widths"]
    assert second["widths_by_size"] == before["widths_by_size"] != {}
    rest["data__validation"] = ["2001-02-02/2001-02-05"]  # too few to tell
    few = weights(train(config_of(run="few", steps=1, **rest, **begin))).meta
    assert len(few["validation_dates"]) in (1, 2, 3) and few["widths"] == before["widths"]
