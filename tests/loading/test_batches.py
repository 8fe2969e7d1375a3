"""Batches: what is in them, that they depend on seed and step alone, and that the thread behind them ends."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from stores import make_store

from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batches, Reader, batches_by_size, fixed_batches
from ensemble_ml.loading.order import member_subset
from ensemble_ml.loading.reader import mean_and_spread
from ensemble_ml.loading.threads import read_ahead
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.inputs import valid_shares
from ensemble_ml.store import Fields, Part

DATES = 7


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("batches") / "a.zarr", dates=DATES, members=6, shape=(9, 16))


def spec_of(store, **config):
    lay = store.layout
    model = ModelConfig(hidden=8, depth=1, **config)
    grid = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    return ModelSpec(model, lay.variables, lay.levels, lay.surface, lay.lead_hours, (24, 48), *grid)


def reader_of(store, **config):
    return Reader(store, spec_of(store, **config))


def batches_of(reader, **changes):
    settings = dict(batch_size=3, seed=5, sizes=[1, 2, 4], steps=9) | changes
    return Batches(reader, np.arange(1, DATES), **settings)


def same(a, b):
    tensors = [(k, v) for k, v in {**vars(a.inputs), **vars(a)}.items() if isinstance(v, torch.Tensor)]
    other = {**vars(b.inputs), **vars(b)}
    equal = all(torch.equal(torch.nan_to_num(v), torch.nan_to_num(other[k])) for k, v in tensors)
    return equal and a.init_time == b.init_time


def pressure(values, store):
    """Return the variables on pressure levels of fields (..., F, Y, X) as the store has them, (..., V, Z, Y, X)."""
    counts = len(store.layout.variables), len(store.layout.levels)
    return values[..., : counts[0] * counts[1], :, :].unflatten(-3, counts)


def surface(values, store):
    """Return the surface variables of fields (..., F, Y, X), (..., S, Y, X)."""
    return values[..., -len(store.layout.surface) :, :, :]


def test_mean_and_spread_keep_their_digits():
    values = 5e4 + np.random.default_rng(0).normal(size=(5, 4, 300)).astype(np.float32)
    mean, spread = mean_and_spread(values)
    np.testing.assert_array_equal(mean, values.astype(np.float64).mean(0).astype(np.float32))
    np.testing.assert_allclose(spread, values.astype(np.float64).std(0, ddof=1), rtol=1e-6)
    assert not mean_and_spread(values[:1])[1].any()


def test_shares_of_members_with_a_value_stand_in_the_order_of_the_fields(store):
    layout, rng = store.layout, np.random.default_rng(0)
    masked = layout.surface[-1], layout.variables[-1]
    fields = store.read(Part.FORECAST, 2)
    for values in (fields.pressure, fields.surface):
        values[rng.random(values.shape) < 0.3] = np.nan
    for names in (masked, masked[:1], masked[1:]):
        spec = replace(spec_of(store), masked=names)
        expected = np.isfinite(fields.joined()[:, :, spec.masked_positions]).mean(0)
        np.testing.assert_allclose(valid_shares(spec, fields.pressure, fields.surface), expected, rtol=1e-6)


def test_contents_come_from_the_store(store):
    batch = batches_of(reader_of(store, one_member=True)).batch(2)  # the first step of the second epoch
    dates = [int(np.flatnonzero(store.layout.init_time == np.datetime64(t))[0]) for t in batch.init_time]
    assert len(dates) == 3 and 0 not in dates
    for row, date in enumerate(dates):
        members = member_subset(5, 1, date - 1, 6, [1, 2, 4])
        fields, truth, spread = (store.read(part, date) for part in (Part.FORECAST, Part.TRUTH, Part.SPREAD))
        assert batch.inputs.count[row] == len(members)
        assert batch.inputs.day_of_year[row] == 1 + 2 * date
        mean, deviation = mean_and_spread(fields.pressure[members])
        np.testing.assert_array_equal(pressure(batch.inputs.mean[row], store), mean)
        np.testing.assert_array_equal(pressure(batch.inputs.spread[row], store), deviation)
        np.testing.assert_array_equal(pressure(batch.inputs.member[row], store), fields.pressure[members[0]])
        np.testing.assert_array_equal(pressure(batch.truth[row], store), truth.pressure[0, 1:])
        np.testing.assert_array_equal(pressure(batch.target_spread[row], store), spread.pressure[0, 1:])
        mean, deviation = mean_and_spread(fields.surface[members])
        np.testing.assert_array_equal(surface(batch.inputs.mean[row], store), mean)
        np.testing.assert_array_equal(surface(batch.inputs.spread[row], store), deviation)
        np.testing.assert_array_equal(surface(batch.inputs.member[row], store), fields.surface[members[0]])
        np.testing.assert_array_equal(surface(batch.truth[row], store), truth.surface[0, 1:])
        np.testing.assert_array_equal(surface(batch.target_spread[row], store), spread.surface[0, 1:])


def test_batches_do_not_depend_on_the_start(store):
    plain = list(batches_of(reader_of(store)))
    assert len(plain) == 9 and [len(b) for b in plain[:2]] == [3, 3]
    later = list(batches_of(reader_of(store), start_step=4))
    assert all(same(a, b) for a, b in zip(plain[4:], later, strict=True))


def test_short_last_batch_of_an_epoch(store):
    assert [len(b) for b in batches_of(reader_of(store), batch_size=4, steps=4)] == [4, 2, 4, 2]


def test_all_members_do_not_train_the_spread(store):
    batch = batches_of(reader_of(store), sizes=[6]).batch(0)
    assert torch.isnan(batch.target_spread).all() and not torch.isnan(batch.truth).any()
    alone = batches_of(reader_of(store, postprocess=False), sizes=[5, 6])
    assert alone.sizes == [5] and alone.batch(0).truth is None
    with pytest.raises(UserError, match=r"data.members=\[6\].*at most 5"):
        batches_of(reader_of(store, postprocess=False), sizes=[6])


def test_fixed_batches_take_the_first_members(store):
    batches = list(fixed_batches(reader_of(store), [4, 0, 2], [0, 1, 2], batch_size=2))
    assert [b.init_time for b in batches] == [["2001-01-09T00:00", "2001-01-01T00:00"], ["2001-01-05T00:00"]]
    expected = mean_and_spread(store.read(Part.FORECAST, 2).pressure[:3])[0]
    np.testing.assert_array_equal(pressure(batches[1].inputs.mean[0], store), expected)


def test_batches_of_several_sizes_are_read_once(store, monkeypatch):
    """From slow storage: each field comes once, and each number of members sees what it would see alone, to the bit."""
    reader, sizes, real, reads = reader_of(store), [1, 2, 5], type(store).read, []
    monkeypatch.setattr(type(store), "read", lambda *given: reads.append(given[1:3]) or real(*given))
    found = list(batches_by_size(reader, [4, 0, 2], sizes, batch_size=2))
    assert len(reads) == len(set(reads)) == 3 * 3  # members, truth and spread of three dates
    assert [size for size, _ in found] == sizes * 2
    for size in sizes:
        wanted = fixed_batches(reader, [4, 0, 2], range(size), batch_size=2)
        for ours, theirs in zip([batch for of, batch in found if of == size], wanted, strict=True):
            assert ours.init_time == theirs.init_time
            both = {**vars(ours), **vars(ours.inputs)}, {**vars(theirs), **vars(theirs.inputs)}
            for name, values in both[1].items():
                if isinstance(values, torch.Tensor):
                    assert torch.equal(both[0][name], values), name


def test_no_date_is_refused(store):
    with pytest.raises(UserError, match=r"data.train"):
        Batches(reader_of(store), [], batch_size=1, seed=0, sizes=[1], steps=1)


class Gaps:
    """A source in which one field of one member is bad."""

    def __init__(self, store, bad):
        self.store, self.bad = store, bad
        self.path, self.layout, self.present = store.path, store.layout, store.present

    def read(self, part, date, selection):
        fields = self.store.read(part, date, selection)
        numbers = selection.realization or self.layout.realization
        if part is Part.FORECAST and date == 3 and 2 in numbers:
            pressure = fields.pressure.copy()
            pressure[numbers.index(2), 2, 1, 0, 4, 4] = self.bad
            return Fields(pressure, fields.surface)
        return fields


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_input_names_what_is_wrong(store, bad):
    reader = Reader(Gaps(store, bad), spec_of(store))
    said = r"a.zarr: z at 500 hPa of 2001-01-07T00:00 \+48 h, member 2, is missing or holds NaN"
    with pytest.raises(UserError, match=said):
        list(batches_of(reader, steps=40))


def test_missing_targets_stay_missing(store):
    class NoTruth(Gaps):
        def read(self, part, date, selection):
            fields = self.store.read(part, date, selection)
            return replace(fields, surface=fields.surface * np.nan) if part is Part.TRUTH else fields

    batch = batches_of(Reader(NoTruth(store, 0), spec_of(store))).batch(0)
    assert torch.isnan(surface(batch.truth, store)).all() and not torch.isnan(pressure(batch.truth, store)).any()


def threads():
    return [t for t in threading.enumerate() if t.name == "read-ahead"]


def test_leaving_early_ends_the_thread():
    made = []
    items = read_ahead((made.append(i) or i for i in range(1000)), 2)
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert not threads() and len(made) < 10


def test_errors_cross_over_after_the_good_items():
    def items():
        yield from range(3)
        raise UserError("the fourth")

    seen = []
    with pytest.raises(UserError, match="the fourth"):
        for item in read_ahead(items(), 2):
            time.sleep(0.01)
            seen.append(item)
    assert seen == [0, 1, 2] and not threads()


def test_nothing_is_made_beyond_the_depth():
    made = []
    items = read_ahead((made.append(i) or i for i in range(100)), 3)
    next(items)
    time.sleep(0.2)
    assert len(made) <= 6
    items.close()
