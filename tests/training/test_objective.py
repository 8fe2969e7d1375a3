"""Training on members that stand for the truth: which ones, what is read of them, and what such a model is good for."""

import logging
from contextlib import closing

import numpy as np
import pytest
import torch
from planning import CPU, equal, plain, run, schedule_of
from planning import config_of as planned
from stores import make_store
from training.running import assert_equal_runs, stop_at, weights

from ensemble_ml.config import Objective
from ensemble_ml.errors import UserError
from ensemble_ml.inference.card import model_card
from ensemble_ml.loading import Batches, fixed_batches
from ensemble_ml.loading.reader import mean_and_spread
from ensemble_ml.loading.run_loader import Lane, PlannedLoader
from ensemble_ml.store import Part
from ensemble_ml.training import fit_climate, load_model, train
from ensemble_ml.training.setup import build_spec, open_reader

MEMBERS = {"objective": Objective.members, "data__members": [1, 2, 4, 5]}
SHAPE = dict(dates=20, members=6, shape=(9, 16), bias=0.6, dispersion=0.6)


@pytest.fixture(scope="module")
def unverified(tmp_path_factory):
    """The dates of `store` without a truth."""
    return make_store(tmp_path_factory.mktemp("members") / "a.zarr", truth=False, **SHAPE)


@pytest.fixture
def reader(config_of, unverified):
    return reader_of(config_of, unverified)


def reader_of(config_of, store, **changes):
    config = config_of(**MEMBERS | {"data__store": store.path} | changes)
    return open_reader(config, store, build_spec(config, store))


def batches_of(reader, **changes):
    return Batches(reader, range(16), **dict(batch_size=4, seed=3, sizes=[1, 2, 4, 5], steps=12) | changes)


def at_leads_out(reader, fields):
    return fields[:, reader.spec.lead_positions]


def test_each_sample_withholds_a_member_that_it_does_not_show(reader, unverified):
    batches, withheld = batches_of(reader), {}
    for step in range(12):
        [draws] = batches.draws(step, 1)
        batch = batches.batch(step)
        for place, draw in enumerate(draws):
            assert draw.withheld not in draw.members and draw.withheld in range(6)
            withheld.setdefault(draw.date, []).append(draw.withheld)
            fields = unverified.read(Part.FORECAST, draw.date).joined()
            assert np.array_equal(batch.truth[place], at_leads_out(reader, fields)[draw.withheld])
            assert np.array_equal(batch.inputs.mean[place], mean_and_spread(fields[draw.members])[0])
    # Three epochs of 16 dates: a member that stayed the same would be the same in all of them.
    assert all(len(members) == 3 for members in withheld.values())
    assert sum(len(set(members)) > 1 for members in withheld.values()) > 12
    # A resumed run draws the same; another seed does not.
    again = [draw.withheld for draw in batches_of(reader, start_step=7).draws(7, 1)[0]]
    assert again == [draw.withheld for draw in batches.draws(7, 1)[0]]
    every = [
        [d.withheld for step in range(12) for d in batches_of(reader, seed=seed).draws(step, 1)[0]] for seed in (3, 4)
    ]
    assert every[0] != every[1]


def test_fits_and_validation_withhold_one_member_of_a_date_for_good(reader, unverified, config_of):
    of_dates = [reader.withheld(date) for date in range(20)]
    assert len(set(of_dates)) > 3 and of_dates == [reader.withheld(date) for date in range(20)]
    for date in (0, 7, 19):
        assert reader.shown(date).tolist() == [m for m in range(6) if m != of_dates[date]]
        whole = unverified.read(Part.FORECAST, date).joined()
        truth = at_leads_out(reader, whole)[of_dates[date]]
        assert np.array_equal(reader.target(Part.TRUTH, date).joined(), truth)
        [batch] = fixed_batches(reader, [date], range(5))
        assert np.array_equal(batch.truth[0], truth)
        assert np.array_equal(batch.inputs.mean[0], mean_and_spread(whole[reader.shown(date)])[0])
        # Five of six members are shown, so there is something to predict of the spread of all.
        assert torch.isfinite(batch.target_spread).all()
    other = reader_of(config_of, unverified, seed=1)
    assert of_dates != [other.withheld(date) for date in range(20)]


@pytest.mark.parametrize("spread", [True, False])
def test_the_loader_by_plan_reads_withheld_members_too(config_of, unverified, spread):
    """Without a spread head there is nothing to read of a date but its members."""
    reader = reader_of(config_of, unverified, model__spread=spread)
    schedule = schedule_of(reader, dates=range(16), validation=range(16, 20), steps=12, sizes=(1, 2, 4, 5))
    theirs = plain(schedule, reader)
    with closing(PlannedLoader(planned(), schedule, reader, CPU, Lane())) as loader:
        ours = run(loader, schedule)
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    assert all(equal(one[2], other[2]) for one, other in zip(ours, theirs, strict=True))
    assert all(("target_spread" in one[2]) is spread and "truth" in one[2] for one in ours)


def test_fits_to_members_see_an_ensemble_that_needs_no_correction(config_of, unverified, store):
    """The members of this store are biased and too much alike. Of one of themselves they are neither."""
    fits = [
        fit_climate(r, range(16), range(16, 20), 3, [1, 2, 4, 5])
        for r in (reader_of(config_of, unverified), reader_of(config_of, store, objective=Objective.truth))
    ]
    members, truth = ([np.abs(fit.climate.bias[:, :-1]).mean(), fit.climate.inflation[:, :-1].mean()] for fit in fits)
    assert members[0] < 0.3 * truth[0]
    assert abs(members[1]) < 0.2 < 0.4 < truth[1]


def test_a_store_without_a_truth_trains_and_goes_on_bit_for_bit(config_of, unverified, monkeypatch, caplog):
    settings = MEMBERS | {"data__store": unverified.path}
    whole = train(config_of(run="whole", **settings))
    assert weights(whole).meta["best"] is not None  # validation has a target, too
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config_of(run="killed", **settings))
    assert_equal_runs(whole, train(config_of(run="killed", resume=True, **settings)))
    with pytest.raises(UserError, match=r"resume: settings differ .*objective"):
        train(config_of(run="whole", resume=True, **settings | {"objective": Objective.truth}))
    with caplog.at_level(logging.WARNING):
        model, meta = load_model(whole / "checkpoints" / "last")
    assert "trained by objective=members: its distribution is that of another member" in caplog.text
    card = model_card(model.spec, meta, None)
    assert "the distribution of another member, in place of the truth" in card and "lacks the error of" in card


def test_training_on_the_truth_takes_the_weights_and_fits_anew(config_of, unverified):
    first = train(config_of(run="first", **MEMBERS | {"data__store": unverified.path, "optim__lr": 1e-2}))
    given = weights(first)
    begin = {"init_from": str(first / "checkpoints" / "last"), "optim__lr": 1e-30, "optim__weight_decay": 0.0}
    second, scratch = (
        weights(train(config_of(run="second", **begin))),
        weights(train(config_of(run="scratch", steps=0))),
    )
    names = {name for name, _ in load_model(second.path)[0].named_parameters()}
    for name, values in second.state_dict.items():
        expected = given if name in names else scratch
        assert torch.equal(values, expected.state_dict[name]), name
    assert any(not torch.equal(scratch.state_dict[name], given.state_dict[name]) for name in names)
    # Members have had no error, so their calibration says nothing about the truth.
    assert second.meta["widths"] != given.meta["widths"]
    assert second.meta["earlier_dates"]["training"] == given.meta["training_dates"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__members": [6]}, r"data.members=\[6\]: at most 5 of 6 members can be drawn here"),
        (
            {"model__postprocess": False},
            "objective=members: with model.postprocess=false the model predicts no distribution",
        ),
        ({"model__name": "emos"}, "objective=members: model.name=emos is fitted to a truth"),
    ],
)
def test_what_cannot_be_is_refused(config_of, unverified, changes, message):
    with pytest.raises(UserError, match=message):
        train(config_of(**MEMBERS | {"data__store": unverified.path} | changes))


def test_a_store_of_one_member_is_refused_and_one_without_a_truth_is_told_of_members(config_of, unverified, tmp_path):
    alone = make_store(tmp_path / "one.zarr", **SHAPE | {"members": 1, "truth": False})
    with pytest.raises(UserError, match=r"holds one member; two or more are needed to train"):
        train(config_of(**MEMBERS | {"data__store": alone.path}))
    with pytest.raises(UserError, match=r"holds no truth; .*or objective=members$"):
        train(config_of(data__store=unverified.path, model__spread=False))
