"""Start dates of a store through the clairvoyant loader: the store's own values, and only the bytes that are used."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from stores import make_store
from synthetic import make_layout
from test_clairvoyant import Gathering, run_ranks

from ensemble_ml.config import Assign, Packing
from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.plan import RAM
from ensemble_ml.loading.store_items import OpenedItems, StoreItems
from ensemble_ml.store import PackedBlock, Part, Selection, StoreWriter, open_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("items") / "s.zarr")


def chosen(store):
    lay = store.layout
    return Selection(
        realization=lay.realization[:2], lead_hours=lay.lead_hours[-1:], variables=lay.variables[:1], rows=(0, 8)
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("held", [0.0, 0.5, 1.0])
def test_batches_hold_what_the_store_reads(store, narrow, held):
    selection = chosen(store) if narrow else Selection()
    items = StoreItems(store, selection=selection, parts=[Part.FORECAST, Part.SPREAD])
    with ClairvoyantLoader(items, 3, 2, 0, ram=int(held * items.sizes.sum())) as loader:
        for batch in loader:
            for row, sample in enumerate(batch.samples.tolist()):
                for part in items.parts:
                    expected = store.read(part, sample, selection)
                    for kind in ("pressure", "surface"):
                        got = batch[f"{part.value}_{kind}"][row].numpy()
                        np.testing.assert_array_equal(got, getattr(expected, kind))
        assert loader.tiers.counters.storage == loader.plan.explain().storage


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("assign", list(Assign))
def test_heads_of_samples_fill_the_ends_of_caches(store, ranks, apart, assign):
    """Every byte beyond the bound F + (E-1)(F-K) is one too many: through shared memory, and over TCP."""
    items = StoreItems(store, parts=[Part.FORECAST])
    ram = int(items.sizes.sum() * 0.55 / ranks) + 3
    meeting, counters = Gathering(ranks), [None] * ranks

    def body(rank):
        with ClairvoyantLoader(
            items, 4, 3, 1, rank=rank, ranks=ranks, ram=ram, gather=meeting.of(rank), assign=assign, threads=2,
            node=f"host{rank}" if apart else "one", host="localhost",
        ) as loader:  # fmt: skip
            heads = (loader.plan.placement.kept < items.sizes) & (loader.plan.placement.kept > 0)
            assert 1 <= heads.sum() <= ranks and loader.plan.explain().storage == loader.plan.explain().bound
            for batch in loader:
                for row, sample in enumerate(batch.samples.tolist()):
                    expected = store.read(Part.FORECAST, sample)
                    np.testing.assert_array_equal(batch["forecast_pressure"][row].numpy(), expected.pressure)
                    np.testing.assert_array_equal(batch["forecast_surface"][row].numpy(), expected.surface)
            counters[rank] = loader.tiers.counters.snapshot(), loader.plan.explain()

    run_ranks(ranks, body)
    told = counters[0][1]
    for name in ("storage", "peers"):
        assert sum(int(count[name]) for count, _ in counters) == getattr(told, name), name
    assert not any(count["fallback"] for count, _ in counters)


@pytest.mark.parametrize("differ", [dict(ram=[10**9, 0]), dict(epochs=[1, 2])])
def test_ranks_that_differ_are_told_on_all(store, differ):
    """Also where one of them would keep samples decompressed, and the other not."""
    items, meeting, told = StoreItems(store), Gathering(2), [""] * 2
    ram, epochs = differ.get("ram", [10**9] * 2), differ.get("epochs", [2] * 2)

    def body(rank):
        with pytest.raises(UserError, match="ranks have planned different runs") as error:
            ClairvoyantLoader(
                items, 2, epochs[rank], 0, rank=rank, ranks=2, ram=ram[rank], gather=meeting.of(rank), host="localhost"
            )
        told[rank] = str(error.value)

    run_ranks(2, body)
    assert told[0] == told[1]


def test_a_sample_can_be_read_from_any_place_on(store):
    items = StoreItems(store)
    whole = memory(items.sizes[1])
    items.read(1, whole)
    rng = np.random.default_rng(0)
    for start, stop in [(0, len(whole)), (len(whole), len(whole)), *np.sort(rng.integers(0, len(whole), (50, 2)))]:
        part = memory(stop - start)
        items.read_from(int(start), 1, part)
        assert part == whole[start:stop]


def test_a_damaged_head_is_read_anew(store, caplog):
    items = StoreItems(store, parts=[Part.FORECAST])
    with ClairvoyantLoader(items, 1, 3, 0, ram=int(items.sizes[0] // 2)) as loader:
        tiers, [one] = loader.tiers, np.flatnonzero(loader.plan.placement.kept).tolist()
        expected, size = memory(items.sizes[one]), int(items.sizes[one])
        items.read(one, expected)
        head = int(loader.plan.placement.kept[one])
        for read in (size, size - head):
            before = tiers.counters.storage
            assert tiers.fetch(one, memory(size)) == expected
            assert tiers.counters.storage - before == read
        slab = tiers.slabs[RAM]
        slab._all[slab.shape.header] ^= 255
        for read in (size, size - head):  # the head is kept anew
            before = tiers.counters.storage
            assert tiers.fetch(one, memory(size)) == expected
            assert tiers.counters.storage - before == read
    assert f"cached sample {one} is damaged" in caplog.text


def test_only_the_chunks_that_are_used_are_read(store):
    whole = StoreItems(store, parts=[Part.FORECAST]).sizes.sum()
    members = Selection(realization=store.layout.realization[:1])
    share = StoreItems(store, parts=[Part.FORECAST], selection=members).sizes.sum() / whole
    assert share == pytest.approx(1 / len(store.layout.realization), rel=0.05)


@pytest.mark.parametrize(("epochs", "room"), [(1, 0), (2, 10)])
def test_damage_names_the_file(tmp_path, epochs, room):
    """Of samples that are decoded at every use, and of those that are opened."""
    store = make_store(tmp_path / "s.zarr")
    items = StoreItems(store)
    shard = items.name(0)
    with open(shard, "r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff\xff\xff")
    with ClairvoyantLoader(items, 3, epochs, 0, ram=room * int(items.opened().sizes.sum())) as loader:
        assert isinstance(loader.items, OpenedItems) == (room > 0)
        with pytest.raises(UserError, match=shard):
            list(loader)


def test_fingerprints_tell_selections_apart(store):
    items = [StoreItems(store), StoreItems(store, selection=chosen(store)), StoreItems(store, dates=[0, 1])]
    assert len({one.fingerprint() for one in items}) == 3
    with pytest.raises(UserError, match="no init time"):
        StoreItems(store, dates=[])


def memory(size):
    return memoryview(bytearray(int(size)))


def decoded(items, sample, packed):
    out = {name: np.full(one.shape, 7, one.dtype) for name, one in items.arrays.items()}
    items.decode(sample, packed, out)
    return out


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", [(13, 24), (37, 72)])  # a block of rows, and three of which the last is cut short
def test_opened_samples_hold_the_same_values(tmp_path, packing, narrow, shape):
    absent = [(Part.FORECAST, 0, 1, "t"), (Part.TRUTH, 1, 0, "t2m")]
    store = make_store(
        tmp_path / "s.zarr", dates=2, packing=packing, shape=shape, masked=["t2m"], absent=absent, surface=("t2m", "tp")
    )
    items = StoreItems(store, selection=chosen(store) if narrow else None)
    opened = items.opened()
    assert opened.fingerprint() == items.fingerprint() and opened.name(0) == items.name(0)
    for sample in range(2):
        packed, wide = memory(items.sizes[sample]), memory(opened.sizes[sample])
        items.read(sample, packed)
        opened.read(sample, wide)
        expected, got = decoded(items, sample, packed), decoded(opened, sample, wide)
        assert expected.keys() == got.keys()
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    whole = sum(array.bytes for array in items.arrays.values())
    if packing is Packing.uint16 and not narrow:  # half a float32 value, no rows that fill up; and masks of a byte
        assert opened.sizes.max() <= whole / 2 + sum(a.bytes for n, a in items.arrays.items() if "surface" in n) / 4


@pytest.mark.parametrize("kind", ["forecast_pressure_reference", "forecast_surface_present", "truth_pressure_scale"])
def test_decoding_reads_nothing_more(tmp_path, kind):
    """What decoding needs besides chunks is read at the opening: small reads would else wait behind large ones."""
    store = make_store(tmp_path / "s.zarr", dates=3)
    expected = store.read(Part.FORECAST, 2)
    items = StoreItems(open_store(store.path))
    packed = memory(items.sizes[2])
    items.read(2, packed)
    shutil.rmtree(Path(store.path) / kind)
    np.testing.assert_array_equal(decoded(items, 2, packed)["forecast_pressure"], expected.pressure)


def use(items, ranks, room, **more):
    """What every rank of a run saw and kept, what it read from storage, what was planned, and where it stands."""
    gathering, told = Gathering(ranks), []

    def body(rank):
        values = {}
        with ClairvoyantLoader(
            items, 2, 3, 0, ram=room, rank=rank, ranks=ranks, gather=gathering.of(rank),
            **{"assign": Assign.locality} | {name: value[rank] for name, value in more.items()},
        ) as loader:  # fmt: skip
            for batch in loader:
                for row, sample in enumerate(batch.samples.tolist()):
                    values |= {(batch.step, sample, name): value[row].numpy().copy() for name, value in batch.items()}
            read, planned = loader.tiers.counters.storage, loader.plan.explain().storage
            told.append((values, loader.items, read, planned, loader.state_dict()))

    run_ranks(ranks, body)
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_room_that_is_left_holds_samples_decompressed(store, ranks):
    items = StoreItems(store, parts=[Part.FORECAST])
    packed = int(items.sizes.sum())
    without, held = use(items, ranks, 0), use(items, ranks, 2 * packed)
    assert all(one is items for _, one, *_ in without) and all(isinstance(one, OpenedItems) for _, one, *_ in held)
    expected, got = ({k: v for values, *_ in told for k, v in values.items()} for told in (without, held))
    assert expected.keys() == got.keys() and len(got) == 3 * len(items.sizes) * len(items.arrays)
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value)
    for told, storage in ((without, 3 * packed), (held, packed)):
        assert sum(read for _, _, read, *_ in told) == told[0][3] == storage
    assert all(state == without[0][4] for *_, state in held)


def test_nothing_is_opened_that_would_then_travel_between_nodes(tmp_path):
    """Decompressed samples would take the room in which packed ones are kept a second time, and be sent every epoch."""
    store = make_store(tmp_path / "s.zarr", dates=8, shape=(33, 64), masked=["t2m"])
    items = StoreItems(store, parts=[Part.TRUTH, Part.MEAN, Part.SPREAD])
    opened = int(items.opened().sizes.sum())
    assert opened > 1.05 * items.sizes.sum()
    room, where = opened // 2 + int(items.opened().sizes.max()), ["here", "there"]
    assert all(one is items for _, one, *_ in use(items, 2, room, node=where, assign=[Assign.fixed] * 2))
    assert all(isinstance(one, OpenedItems) for _, one, *_ in use(items, 2, room, assign=[Assign.fixed] * 2))


def test_a_date_without_a_truth_is_a_date_all_the_same(tmp_path):
    """Nothing of it was written: it is absent, as the store's own reader has it, and no file is missed."""
    layout, rng = make_layout(dates=3, members=2, leads=(24,), variables=("t",), levels=(500,), shape=(9, 16)), 0
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST, Part.TRUTH]) as writer:
        for date in range(3):
            for part, count in ((Part.FORECAST, 2), (Part.TRUTH, 1))[: 1 + (date != 1)]:
                values = np.random.default_rng(rng := rng + 1).normal(280, 5, (count, 1, 1, 1, 9, 16))
                writer.write(part, date, PackedBlock.plain(values.astype(np.float32)), None)
    there = open_store(tmp_path / "s.zarr")
    with ClairvoyantLoader(StoreItems(there), 2, 2, 0, ram=10**6) as loader:
        for batch in loader:
            for place, date in enumerate(batch.samples):
                truth = there.read(Part.TRUTH, int(date)).pressure
                assert np.isnan(truth).all() == (date == 1)
                np.testing.assert_array_equal(batch["truth_pressure"][place], truth)


def test_dates_may_be_a_mask_and_nothing_but_positions(store):
    count = len(store.layout.init_time)
    mask = np.arange(count) % 2 == 1
    assert StoreItems(store, dates=mask).dates.tolist() == np.flatnonzero(mask).tolist()
    for wrong in (mask[1:], [0.0, 1.0], [count], [-1], store.layout.init_time[:2]):
        with pytest.raises(UserError, match="positions of init times from 0"):
            StoreItems(store, dates=wrong)
