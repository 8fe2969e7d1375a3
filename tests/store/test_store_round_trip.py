"""What is written is read back bit for bit, by our reader and by zarr-python and xarray alike."""

import json
import os
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import make_layout, make_store

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, Selection, StoreWriter, TensorStore, decode, open_store, select_dates
from ensemble_ml.store import read as reading
from ensemble_ml.store.climate import write_climate
from ensemble_ml.store.schema import Kind, array_specs, chunk_rows

LAYOUT = dict(dates=2, members=3, leads=(0, 24), variables=("t", "z"), levels=(500, 700, 850), surface=("t2m", "tp"))
SHAPE = (37, 10)  # rows are no multiple of a chunk


def random_block(rng, fields, shape, absent=0.2):
    """Packed fields as GRIB gives them: any codes, any reference, some decimal scale, some fields missing."""
    codes = rng.integers(0, 65536, (*fields, *shape), dtype=np.uint16)
    decimal = np.where(rng.random(fields) < 0.3, 0.1, 1.0)
    scale = np.ldexp(1.0, rng.integers(-12, 3, fields))
    return PackedBlock(codes, rng.normal(0, 100, fields), scale, decimal, rng.random(fields) >= absent)


def write_random(path, *, parts=(Part.FORECAST, Part.TRUTH, Part.CONTROL), packing=Packing.uint16, seed=0, absent=0.2):
    layout, rng, blocks = make_layout(shape=SHAPE, **LAYOUT), np.random.default_rng(seed), {}
    with StoreWriter(path, layout, parts=parts, packing=packing) as writer:
        for date in range(2):
            for part in parts:
                members = 3 if part is Part.FORECAST else 1
                pressure = random_block(rng, (members, 2, 2, 3), SHAPE, absent)
                surface = random_block(rng, (members, 2, 2), SHAPE, absent)
                writer.write(part, date, pressure, surface)
                blocks[part, date] = pressure, surface
    return open_store(path), blocks


@pytest.fixture(scope="module", params=list(dict.fromkeys(Packing)), ids=lambda packing: packing.value)
def written(request, tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("store") / "random.zarr", packing=request.param)


def same(left, right):
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_everything_comes_back_bit_for_bit(written):
    store, blocks = written
    for (part, date), (pressure, surface) in blocks.items():
        fields = store.read(part, date)
        assert same(fields.pressure, decode(pressure)) and same(fields.surface, decode(surface))
        present = store.present(part, date)
        assert same(present[0], pressure.present) and same(present[1], surface.present)


def test_layout_comes_back(written):
    store, _ = written
    wanted = make_layout(shape=SHAPE, **LAYOUT)
    assert same(store.layout.init_time, wanted.init_time) and store.layout.init_time.dtype == wanted.init_time.dtype
    for name in ("realization", "lead_hours", "variables", "levels", "surface"):
        assert getattr(store.layout, name) == getattr(wanted, name)
    assert same(store.layout.grid.latitude, wanted.grid.latitude)
    assert same(store.layout.grid.longitude, wanted.grid.longitude)


def test_zarr_python_reads_the_same_integers_and_factors(written):
    store, blocks = written
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(store.path, mode="r")
        plain = xr.open_zarr(store.path)
    for (part, date), (pressure, surface) in blocks.items():
        for kind, block in (("pressure", pressure), ("surface", surface)):
            name = f"{part.value}_{kind}"
            there = block.present if part is Part.FORECAST else block.present[0]
            values = group[name][date]
            assert same(plain[name][date].values, values)
            if store.packing is Packing.uint16:
                reference, scale, decimal = (
                    group[f"{name}_{key}"][date][..., None, None] for key in ("reference", "scale", "decimal")
                )
                codes = block.values if part is Part.FORECAST else block.values[0]
                assert same(values[there], codes[there]) and not values[~there].any()
                values = (((values * scale) + reference) * decimal).astype(np.float32)
            decoded = decode(block) if part is Part.FORECAST else decode(block)[0]
            assert same(values[there], decoded[there])
            assert same(group[f"{name}_present"][date], there)


def test_plain_xarray_shows_coordinates(written):
    plain = xr.open_zarr(written[0].path)
    assert plain.forecast_pressure.dims == (
        "init_time", "realization", "lead_time", "variable", "level", "latitude", "longitude",
    )  # fmt: skip
    assert list(plain.variable.values) == ["t", "z"] and list(plain.surface_variable.values) == ["t2m", "tp"]
    assert plain.lead_time.values[1] == np.timedelta64(24, "h")
    assert plain.init_time.values[1] == np.datetime64("2001-01-03")


def test_shards_hold_one_date_and_chunks_one_variable_lead_and_member(written):
    array = zarr.open_group(written[0].path, mode="r")["forecast_pressure"]
    assert array.shards == (1, 3, 2, 2, 3, 37, 10) and array.chunks == (1, 1, 1, 1, 3, 37, 10)
    names = [
        codec["name"] for codec in json.loads((written[0]._root / "forecast_pressure/zarr.json").read_text())["codecs"]
    ]
    assert names == ["sharding_indexed"]


@pytest.mark.parametrize(
    ("levels", "grid", "itemsize", "rows"),
    [(11, (361, 720), 2, 16), (1, (361, 720), 2, 64), (4, (181, 360), 2, 32), (1, (37, 10), 4, 37), (1, (1, 1), 2, 1)],
)
def test_chunks_hold_16_rows_or_64_kilobytes(levels, grid, itemsize, rows):
    assert chunk_rows(levels, grid, itemsize) == rows


def test_several_blocks_of_rows_with_an_uneven_last_one(tmp_path):
    store = make_store(tmp_path / "s.zarr", dates=1, members=2, leads=(0,), shape=(75, 500), surface=())
    (spec,) = [s for s in store.specs if s.part is Part.FORECAST]
    assert (spec.rows, spec.blocks) == (64, 2)
    whole = store.read(Part.FORECAST, 0).pressure
    group = zarr.open_group(store.path, mode="r")
    factors = [group[f"forecast_pressure_{key}"][0][..., None, None] for key in ("scale", "reference")]
    assert same(whole, (group["forecast_pressure"][0] * factors[0] + factors[1]).astype(np.float32))
    for rows in ((0, 64), (60, 70), (64, 75), (74, 75)):
        part = store.read(Part.FORECAST, 0, Selection(rows=rows, levels=(850,))).pressure
        assert same(part, whole[:, :, :, 1:, rows[0] : rows[1]])
    assert store.read(Part.FORECAST, 0).surface.shape == (2, 1, 0, 75, 500)


def any_choice(values):
    return st.one_of(st.none(), st.lists(st.sampled_from(values), min_size=1, max_size=len(values) + 1).map(tuple))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_selection_is_the_same_part_of_the_whole(written, data):
    store, _ = written
    lay = store.layout
    chosen = {
        name: data.draw(any_choice(getattr(lay, name)), label=name)
        for name in ("realization", "lead_hours", "variables", "levels", "surface")
    }
    first = data.draw(st.integers(0, 36))
    rows = data.draw(st.one_of(st.none(), st.tuples(st.just(first), st.integers(first + 1, 37))))
    part = data.draw(st.sampled_from([Part.FORECAST, Part.TRUTH, Part.MEAN]))
    whole, some = store.read(part, 1), store.read(part, 1, Selection(**chosen, rows=rows))
    at = {n: [getattr(lay, n).index(v) for v in (getattr(lay, n) if c is None else c)] for n, c in chosen.items()}
    members = at["realization"] if part is Part.FORECAST else [0]
    cut = slice(*rows) if rows else slice(None)
    pressure = whole.pressure[np.ix_(members, at["lead_hours"], at["variables"], at["levels"])][..., cut, :]
    assert same(some.pressure, pressure)
    assert same(some.surface, whole.surface[np.ix_(members, at["lead_hours"], at["surface"])][..., cut, :])


def test_mean_and_spread_are_those_of_the_members_present(written):
    store, blocks = written
    for date in range(2):
        values = decode(blocks[Part.FORECAST, date][0]).astype(np.float64)
        enough = blocks[Part.FORECAST, date][0].present.sum(0) >= 2
        assert not enough.all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fields with no member at all
            mean, spread = np.nanmean(values, 0), np.nanstd(values, 0, ddof=1)
        for part, wanted in ((Part.MEAN, mean), (Part.SPREAD, spread)):
            found = store.read(part, date).pressure[0]
            np.testing.assert_allclose(found[enough], wanted[enough], rtol=1e-6, atol=1e-4)
            assert np.isnan(found[~enough]).all()
            assert same(store.present(part, date)[0][0], enough)


def test_a_single_member_has_neither_mean_nor_spread(tmp_path):
    store = make_store(tmp_path / "s.zarr", members=1, dates=1)
    assert not store.has(Part.MEAN) and not store.has(Part.SPREAD) and store.has(Part.FORECAST)
    with pytest.raises(UserError, match="has no spread; it holds forecast, truth"):
        store.read(Part.SPREAD, 0)


def test_a_date_without_truth_is_absent_not_zero(tmp_path):
    layout = make_layout(shape=SHAPE, **LAYOUT)
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST, Part.TRUTH]) as writer:
        for date in range(2):
            writer.write(
                Part.FORECAST, date, random_block(rng, (3, 2, 2, 3), SHAPE), random_block(rng, (3, 2, 2), SHAPE)
            )
        writer.write(Part.TRUTH, 1, random_block(rng, (1, 2, 2, 3), SHAPE), random_block(rng, (1, 2, 2), SHAPE))
    store = open_store(tmp_path / "s.zarr")
    assert np.isnan(store.read(Part.TRUTH, 0).pressure).all() and np.isnan(store.read(Part.TRUTH, 0).surface).all()
    assert not store.present(Part.TRUTH, 0)[0].any() and store.present(Part.TRUTH, 1)[0].any()
    assert not store.has(Part.CONTROL)


def test_extras_come_back(tmp_path):
    layout = make_layout(shape=SHAPE, **LAYOUT)
    orog = np.random.default_rng(0).normal(0, 500, SHAPE).astype(np.float32)
    bounds = {"tp": [None, [0, 24]]}
    block = random_block(np.random.default_rng(0), (3, 2, 2, 3), SHAPE)
    with StoreWriter(
        tmp_path / "s.zarr", layout, parts=[Part.FORECAST], static={"orog": orog}, lead_bounds=bounds,
        provenance={"input": ["a.grib"]},
    ) as writer:  # fmt: skip
        writer.write(Part.FORECAST, 0, block, None)
    store = open_store(tmp_path / "s.zarr")
    assert same(store.static()["orog"], orog) and list(store.static()) == ["orog"]
    assert store.lead_bounds == bounds and store.provenance == {"input": ["a.grib"]}


def test_fingerprint_is_of_the_contents_not_of_the_path_or_the_order_of_writing(tmp_path):
    one, _ = write_random(tmp_path / "one.zarr")
    two, blocks = write_random(tmp_path / "two.zarr")
    other, _ = write_random(tmp_path / "other.zarr", seed=1)
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    parts = (Part.TRUTH, Part.CONTROL, Part.FORECAST)
    with StoreWriter(tmp_path / "back.zarr", one.layout, parts=parts, provenance={"x": 1}) as writer:
        for (part, date), (pressure, surface) in reversed(blocks.items()):
            writer.write(part, date, pressure, surface)
    assert open_store(tmp_path / "back.zarr").fingerprint() == one.fingerprint()


def test_threads_and_pickled_copies_read_the_same(written):
    store, blocks = written
    copy = pickle.loads(pickle.dumps(store))
    wanted = [decode(blocks[Part.FORECAST, date][0]).tobytes() for date in range(2)]
    with ThreadPoolExecutor(8) as pool:
        tasks = [(source, date) for source in (store, copy) for date in (0, 1)] * 8
        found = list(pool.map(lambda task: task[0].read(Part.FORECAST, task[1]).pressure.tobytes(), tasks))
    assert found == [wanted[date] for _, date in tasks]


def test_float_blocks_are_quantised_within_the_error_that_is_reported(tmp_path):
    layout, rng = make_layout(shape=SHAPE, **LAYOUT), np.random.default_rng(0)
    values = rng.normal(280, 20, (3, 2, 2, 3, *SHAPE)).astype(np.float32)
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST]) as writer:
        writer.write(Part.FORECAST, 0, PackedBlock.plain(values), None)
    store = open_store(tmp_path / "s.zarr")
    error = np.abs(store.read(Part.FORECAST, 0).pressure - values).max()
    assert 0 < error <= max(store.quantisation_error.values()) < 0.004
    assert set(store.quantisation_error) == {"t", "z"}


def test_specs_cover_only_what_the_layout_has():
    layout = make_layout(shape=SHAPE, **{**LAYOUT, "variables": (), "surface": ("t2m",)})
    assert [spec.kind for spec in array_specs(layout, Part.TRUTH, Packing.uint16)] == [Kind.SURFACE]


def test_dates_are_chosen_by_period():
    times = np.array(["2001-01-31T12", "2001-02-01", "2003-06-01"], "datetime64[ns]")
    assert select_dates(times, ["2001"]).tolist() == [0, 1]
    assert select_dates(times, ["2001-01-31", "2003"]).tolist() == [0, 2]
    assert select_dates(times, ["2001-02/2003-06-01"]).tolist() == [1, 2]
    with pytest.raises(UserError, match="dates 1999: no init time lies there; the data span 2001-01-31T12 to 2003"):
        select_dates(times, ["1999"])


def test_a_store_that_was_replaced_is_not_read_with_old_factors(tmp_path):
    store = make_store(tmp_path / "s.zarr")
    store.read(Part.FORECAST, 0)
    make_store(tmp_path / "new.zarr", seed=1)
    (tmp_path / "s.zarr").rename(tmp_path / "old.zarr")
    (tmp_path / "new.zarr").rename(tmp_path / "s.zarr")
    for read in (lambda: store.read(Part.FORECAST, 0), store.static, lambda: store.statistics(store.years)):
        with pytest.raises(UserError, match="has been replaced since it was opened"):
            read()


def test_a_store_that_is_replaced_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    """Its new integers would be decoded with the old factors."""
    store, read = make_store(tmp_path / "s.zarr"), TensorStore._read_kind
    store.read(Part.FORECAST, 0)
    make_store(tmp_path / "new.zarr", seed=1)

    def read_kind(self, part, kind, *more):
        if kind is Kind.SURFACE:
            (tmp_path / "s.zarr").rename(tmp_path / "old.zarr")
            (tmp_path / "new.zarr").rename(tmp_path / "s.zarr")
        return read(self, part, kind, *more)

    monkeypatch.setattr(TensorStore, "_read_kind", read_kind)
    with pytest.raises(UserError, match="has been replaced since it was opened"):
        store.read(Part.FORECAST, 0)


@pytest.mark.parametrize(
    ("module", "name", "read"),
    [
        (zarr, "open_array", lambda store: store.climate(0, 24, "t2m")),
        (reading, "read_array", lambda store: store.static()),
        (reading, "read_statistics", lambda store: store.statistics(store.years)),
    ],
)
def test_a_store_that_is_replaced_while_its_small_arrays_are_read_is_noticed(tmp_path, monkeypatch, module, name, read):
    for store, bias in (("s", 0.0), ("new", 5.0)):
        path, dates = tmp_path / f"{store}.zarr", ("2001-01-01", "2002-01-01", "2003-01-01")
        make_store(path, dates=dates, members=10, leads=(24,), variables=(), bias=bias)
        write_climate(path, 9)
    store, original = open_store(tmp_path / "s.zarr"), getattr(module, name)
    read(store)

    def late(*given, **more):
        if not (tmp_path / "old.zarr").exists():
            (tmp_path / "s.zarr").rename(tmp_path / "old.zarr")
            (tmp_path / "new.zarr").rename(tmp_path / "s.zarr")
        return original(*given, **more)

    monkeypatch.setattr(module, name, late)
    with pytest.raises(UserError, match="has been replaced since it was opened"):
        read(store)


@pytest.mark.slow
def test_the_folder_of_a_store_overwritten_twice_may_have_the_number_of_the_first(tmp_path):
    """File systems give the inode of what was removed to the next that comes."""
    store = make_store(tmp_path / "s.zarr")
    for seed in range(1, 5):
        make_store(tmp_path / "s.zarr", seed=seed, bias=5.0 * seed, overwrite=True)
        with pytest.raises(UserError, match="has been replaced since it was opened"):
            store.read(Part.FORECAST, 0)


def test_a_store_is_itself_when_it_is_moved_back_or_touched(tmp_path):
    """`touch`, against a purge of scratch; a copy put in its place."""
    store = make_store(tmp_path / "s.zarr")
    before = store.read(Part.FORECAST, 0).surface
    os.utime(tmp_path / "s.zarr" / "manifest.json", (1e9, 1e9))
    np.testing.assert_array_equal(store.read(Part.FORECAST, 0).surface, before)
    shutil.copytree(tmp_path / "s.zarr", tmp_path / "copy.zarr")
    shutil.rmtree(tmp_path / "s.zarr")
    with pytest.raises(UserError, match="has been replaced since it was opened"):
        store.read(Part.FORECAST, 0)
    (tmp_path / "copy.zarr").rename(tmp_path / "s.zarr")
    np.testing.assert_array_equal(store.read(Part.FORECAST, 0).surface, before)


def test_a_writer_replaces_the_store_behind_a_link_to_another_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    write_random(tmp_path / "disk" / "s.zarr")
    (tmp_path / "s.zarr").symlink_to(tmp_path / "disk" / "s.zarr")
    layout = make_layout(shape=SHAPE, **LAYOUT)
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.TRUTH], overwrite=True) as one:
        assert not list(tmp_path.glob("s.zarr.partial-*"))  # a folder here could not be renamed to the other disk
        assert len(list((tmp_path / "disk").glob("s.zarr.partial-*"))) == 1
        one.write(Part.TRUTH, 0, None, random_block(np.random.default_rng(0), (1, 2, 2), SHAPE))
    assert (tmp_path / "s.zarr").is_symlink() and not open_store(tmp_path / "s.zarr").has(Part.FORECAST)


@pytest.mark.parametrize("store", ["s.zarr", "s[1].zarr"])
def test_folders_of_another_host_are_left_alone(tmp_path, monkeypatch, store):
    """Its name begins with that of this host."""
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    other, dead = (tmp_path / f"{store}.partial-{name}" for name in ("node1-2-99999999", "node1-99999999"))
    other.mkdir()
    dead.mkdir()
    write_random(tmp_path / store)
    assert other.exists() and not dead.exists()
