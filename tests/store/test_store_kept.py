"""A store that keeps what it reads gives the same bits, and asks its files for nothing twice."""

from pathlib import Path

import numpy as np
import pytest
from stores import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection


@pytest.fixture
def store(tmp_path):
    # Large enough for shards of several blocks of 64 kB.
    return make_store(tmp_path / "store.zarr", dates=2, members=6, shape=(45, 90), absent=[(Part.FORECAST, 1, 2, "t")])


def remove_shards(store, date):
    for spec in store.specs:
        for of in (spec, *((spec.mask,) if spec.packed else ())):
            (Path(store.path) / of.shard(date)).unlink(missing_ok=True)


def same(one, other):
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def choices(store, count=12):
    """Return random parts of a date: members in any order, some leads, levels and rows."""
    draw, layout = np.random.default_rng(0), store.layout
    numbers = np.asarray(layout.realization)
    for _ in range(count):
        members = tuple(draw.permutation(numbers)[: draw.integers(1, 7)].tolist())
        first = int(draw.integers(0, 40))
        rows = first, int(draw.integers(first + 1, 46))
        levels = tuple(draw.permutation(layout.levels)[: draw.integers(1, len(layout.levels) + 1)].tolist())
        yield Selection(realization=members, levels=levels, rows=rows)


@pytest.mark.parametrize("most", [0, 100_000, 1 << 30])
def test_any_part_of_a_date_is_the_same_bits_whatever_is_kept(store, most):
    kept = store.keeping(most)
    for date in (0, 1, 0):
        for chosen in choices(store):
            assert same(kept.read(Part.FORECAST, date, chosen), store.read(Part.FORECAST, date, chosen))
        assert same(kept.read(Part.TRUTH, date), store.read(Part.TRUTH, date))


def test_what_was_read_needs_no_file_any_more(store):
    kept, whole = store.keeping(1 << 30), store.read(Part.FORECAST, 1)
    kept.read(Part.FORECAST, 1)
    remove_shards(store, 1)
    assert same(kept.read(Part.FORECAST, 1), whole)
    with pytest.raises(UserError, match=r"cannot be read|damaged"):
        kept.read(Part.TRUTH, 1)  # which nobody has read


def test_without_room_the_first_dates_stay(store):
    size = sum(entry.bytes for name, entry in store.files.items() if name.startswith("forecast"))
    kept = store.keeping(int(0.7 * size))
    first = store.read(Part.FORECAST, 0)
    for date in (0, 1, 0, 1):
        kept.read(Part.FORECAST, date)
    remove_shards(store, 0)
    remove_shards(store, 1)
    assert same(kept.read(Part.FORECAST, 0), first)
    with pytest.raises(UserError):
        kept.read(Part.FORECAST, 1)


def test_a_store_that_was_replaced_meanwhile_is_noticed(store, tmp_path):
    kept = store.keeping(1 << 30)
    kept.read(Part.FORECAST, 0)
    other = make_store(tmp_path / "other.zarr", dates=2, members=6, shape=(45, 90), bias=0.5)
    Path(store.path).rename(tmp_path / "gone")
    Path(other.path).rename(store.path)
    with pytest.raises(UserError, match="has been replaced"):
        kept.read(Part.FORECAST, 1)
