"""Start dates of a store through the clairvoyant loader: the store's own values, and only the bytes that are used."""

import numpy as np
import pytest
from synthetic import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.store_items import StoreItems
from ensemble_ml.store import Part, Selection


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


def test_only_the_chunks_that_are_used_are_read(store):
    whole = StoreItems(store, parts=[Part.FORECAST]).sizes.sum()
    members = Selection(realization=store.layout.realization[:1])
    share = StoreItems(store, parts=[Part.FORECAST], selection=members).sizes.sum() / whole
    assert share == pytest.approx(1 / len(store.layout.realization), rel=0.05)


def test_damage_names_the_file(tmp_path):
    store = make_store(tmp_path / "s.zarr")
    items = StoreItems(store)
    shard = items.name(0)
    with open(shard, "r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff\xff\xff")
    with ClairvoyantLoader(items, 3, 1, 0, ram=0) as loader, pytest.raises(UserError, match=shard):
        list(loader)


def test_fingerprints_tell_selections_apart(store):
    items = [StoreItems(store), StoreItems(store, selection=chosen(store)), StoreItems(store, dates=[0, 1])]
    assert len({one.fingerprint() for one in items}) == 3
    with pytest.raises(UserError, match="no start date"):
        StoreItems(store, dates=[])
