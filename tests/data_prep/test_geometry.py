"""Regions, coarser grids and conservative regridding: areas and means kept, constants exact, oracles from outside."""

from itertools import pairwise

import gribfiles
import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import open_pair, prepare
from data_prep.geometry import Geometry, GridChange
from data_prep.records import RawField
from ensemble_ml.config import Packing, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid, settings_for
from ensemble_ml.store import Part, Selection, open_store

HALF = Grid(np.linspace(90, -90, 361), np.arange(720) * 0.5)  # ENS-10's
QUARTER = Grid(90 - np.arange(25) * 7.5, np.arange(48) * 7.5)
BETWEEN = Grid(86.25 - np.arange(24) * 7.5, 3.75 + np.arange(48) * 7.5)
LOCAL = Grid(np.linspace(66, 55, 12), np.linspace(-12, 5, 18))
CHANGES = {
    "coarsen": GridChange(coarsen=(2, 2)),
    "rows and columns": GridChange(coarsen=(4, 3)),
    "even": GridChange(regrid=10.0),
    "finer": GridChange(regrid=5.0),
}


def mean(grid: Grid, values: np.ndarray) -> float:
    area = grid.area_weights()
    return float((area * values).sum() / area.sum())


def noise(grid: Grid, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(280, 10, grid.shape)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grid", [QUARTER, BETWEEN], ids=["rows on the poles", "rows between"])
def test_means_are_conserved(grid, change):
    geometry = Geometry(grid, change.of(grid).target)
    values = noise(grid)
    assert mean(geometry.target, geometry.means(values)) == pytest.approx(mean(grid, values), rel=1e-12)


def test_means_are_conserved_on_ens10s_grid():
    for change in (GridChange(coarsen=(2, 2)), GridChange(regrid=1.5), GridChange(coarsen=(9, 8))):
        geometry = Geometry(HALF, change.of(HALF).target)
        assert mean(geometry.target, geometry.means(noise(HALF))) == pytest.approx(mean(HALF, noise(HALF)), rel=1e-12)


@given(
    rows=st.integers(4, 30),
    columns=st.integers(4, 40),
    pole=st.booleans(),
    degrees=st.sampled_from([4.0, 7.5, 12.0, 22.5]),
    first=st.floats(0, 5),
)
@settings(max_examples=40)
def test_any_global_grid_keeps_means_constants_and_cells(rows, columns, pole, degrees, first):
    latitude = np.linspace(90, -90, rows) if pole else 90 - 180 / rows * (np.arange(rows) + 0.5)
    grid = Grid(latitude, min(first, 350 / columns) + np.arange(columns) * 360 / columns)
    geometry = Geometry(grid, GridChange(regrid=degrees).of(grid).target)
    values = noise(grid)
    assert mean(geometry.target, geometry.means(values)) == pytest.approx(mean(grid, values), rel=1e-12)
    assert np.array_equal(geometry.means(np.full(grid.shape, 0.1)), np.full(geometry.target.shape, 0.1))
    brute = brute_force(geometry, values, 1, 1)
    assert geometry.means(values)[1, 1] == pytest.approx(brute, rel=1e-10)


def brute_force(geometry: Geometry, values: np.ndarray, row: int, column: int) -> float:
    """Mean of the old values at many points of one new cell, evenly spread in area: exact where no cell is cut."""
    old, new = geometry.source, geometry.target
    top, bottom = np.sin(np.deg2rad(new.latitude_bounds()[row : row + 2]))
    west, east = new.longitude_bounds()[column : column + 2]
    edges_y = np.sin(np.deg2rad(old.latitude_bounds()))
    cuts_y = np.unique(np.r_[bottom, edges_y[(edges_y > bottom) & (edges_y < top)], top])
    wrapped = np.concatenate([old.longitude_bounds() + shift for shift in (-360, 0, 360)])
    cuts_x = np.unique(np.r_[west, wrapped[(wrapped > west) & (wrapped < east)], east])
    total = 0.0
    for low, high in pairwise(cuts_y):
        for left, right in pairwise(cuts_x):
            y = np.flatnonzero(edges_y[1:] < (low + high) / 2)[0]
            x = np.flatnonzero(old.longitude_bounds()[1:] > np.mod((left + right) / 2 - old.longitude_bounds()[0], 360)
                               + old.longitude_bounds()[0])[0]  # fmt: skip
            total += (high - low) * (right - left) * values[y, x]
    return total / ((top - bottom) * (east - west))


def test_a_field_linear_in_sine_and_longitude_keeps_its_value_at_the_middle_of_each_cell():
    """The mean of a + b sin(lat) over a cell is its value at the mean sine: an answer in closed form."""
    grid = Grid(np.linspace(60, 30, 61), np.linspace(-20, 19.5, 80))
    geometry = Geometry(grid, GridChange(coarsen=(1, 4)).of(grid).target)
    values = 3 + 0.25 * grid.longitude + 0 * grid.latitude[:, None]
    wanted = 3 + 0.25 * geometry.target.longitude + 0 * grid.latitude[:, None]
    np.testing.assert_allclose(geometry.means(values), wanted)
    fine = Grid(89.75 - np.arange(360) * 0.5, 22.5 + np.arange(8) * 45.0)
    both = Geometry(fine, GridChange(coarsen=(4, 1)).of(fine).target)
    found = both.means(np.broadcast_to(middle_sine(fine)[:, None], fine.shape))
    np.testing.assert_allclose(found, np.broadcast_to(middle_sine(both.target)[:, None], found.shape), atol=1e-14)


def middle_sine(grid: Grid) -> np.ndarray:
    return np.convolve(np.sin(np.deg2rad(grid.latitude_bounds())), [0.5, 0.5], "valid")


@pytest.mark.parametrize(("degrees", "close"), [(2.0, 1e-9), (4.0, 1e-9), (2.5, 2e-4)])
def test_agrees_with_xarray_regrid_away_from_poles(degrees, close):
    """It takes half of a cut cell in degrees for half of its area, so cells that are cut (2.5) differ slightly."""
    pytest.importorskip("xarray_regrid")
    grid = Grid(59.5 - np.arange(120), 0.5 + np.arange(360))
    target = Grid(60 - degrees / 2 - np.arange(int(120 / degrees)) * degrees, np.arange(degrees / 2, 360, degrees))
    values = noise(grid)
    data = xr.DataArray(values, [("latitude", grid.latitude), ("longitude", grid.longitude)])
    wanted = xr.Dataset(coords={"latitude": target.latitude, "longitude": target.longitude})
    theirs = (
        data.sortby("latitude").regrid.conservative(wanted, latitude_coord="latitude").sel(latitude=target.latitude)
    )
    np.testing.assert_allclose(Geometry(grid, target).means(values), theirs.values, rtol=close)


def test_coarsening_ens10_keeps_the_poles():
    target = GridChange(coarsen=(2, 2)).of(HALF).target
    assert target.same_as(Grid(np.linspace(90, -90, 181), np.arange(360.0)))
    rows, _ = Geometry(HALF, target).weights
    np.testing.assert_allclose(rows.toarray()[0, :3], rows.toarray()[-1, :-4:-1])
    cap = np.sin(np.deg2rad([90, 89.75, 89.5]))
    assert rows[0, 0] == pytest.approx((cap[0] - cap[1]) / (cap[0] - cap[2]))


def test_masked_points_count_for_nothing_and_half_a_cell_decides():
    grid = Grid(np.linspace(1.5, -1.5, 4), np.linspace(0, 3, 4))
    geometry = Geometry(grid, GridChange(coarsen=(2, 2)).of(grid).target)
    values = np.arange(16.0).reshape(4, 4)
    values[0, 0] = values[0, 1] = np.nan  # the smaller half of the first block: rows nearer the equator are larger
    values[:2, 2] = np.nan  # one half of the second, to the west
    values[2:, :2] = np.nan
    values[2, 2] = values[3, 2] = values[3, 3] = np.nan
    found = geometry.means(values)
    assert found[0, 0] == pytest.approx(4.5)
    area = grid.area_weights()[:2, 3]
    assert found[0, 1] == pytest.approx((area * [3, 7]).sum() / area.sum())
    assert np.isnan(found[1]).all()
    assert np.isnan(geometry.means(np.full((4, 4), np.nan))).all()


@pytest.mark.parametrize("masked", [False, True])
def test_where_there_is_no_rain_there_is_none(masked):
    """Not some 1e-18 m, which is rain to whoever asks whether there is any; wherever the first point lies."""
    grid = Grid(np.linspace(90, -90, 37), np.arange(0, 360, 5.0))
    geometry = Geometry(grid, GridChange(regrid=9.0).of(grid).target)
    values = np.random.default_rng(0).gamma(0.5, 3e-3, grid.shape)
    values[10:25] = 0.0
    if masked:
        values[30, 4:9] = np.nan
    found = geometry.means(values)
    rows, _ = geometry.weights
    dry = np.asarray(rows[:, 10:25].sum(1)).ravel() > 1 - 1e-12
    assert dry.any() and (found[dry] == 0).all() and np.nanmin(found) == 0


def test_a_crop_keeps_packed_integers_and_crosses_greenwich():
    change = GridChange(region=(60, -20, 40, 20))
    geometry = Geometry(HALF, change.of(HALF).target)
    assert not geometry.target.wraps and geometry.target.longitude[0] == -20 and geometry.target.shape == (41, 81)
    codes = np.arange(361 * 720).reshape(361, 720).astype(np.uint16)
    raw = geometry.field(RawField(codes, 250.0, 0.25, 1.0))
    columns = np.r_[680:720, 0:41]
    assert raw.packed and (raw.reference, raw.scale) == (250.0, 0.25)
    assert np.array_equal(raw.values, codes[60:101][:, columns])


def test_a_region_is_cut_from_the_coarser_grid():
    change = GridChange(region=(60, 350, 40, 10), coarsen=(4, 4))
    target = change.of(HALF).target
    assert target.same_as(Grid(np.arange(60, 39, -2.0), np.arange(-10, 11, 2.0)))
    whole = Geometry(HALF, GridChange(coarsen=(4, 4)).of(HALF).target).means(noise(HALF))
    part = Geometry(HALF, target).means(noise(HALF))
    assert np.array_equal(part, whole[15:26][:, np.r_[175:180, 0:6]])
    assert np.array_equal(change.of(HALF).means(noise(HALF)), part)


@pytest.mark.parametrize("region", [(41, 9, 39, 11), (40, 8, 39, 12), (41, 9, 36, 11), (41, 9, 39, 14)])
def test_cells_of_one_row_or_column_are_as_large_as_those_of_their_grid(region):
    """A single row does not say how far apart rows are, nor a single point whether it is one of the archive's."""
    values, coarse = noise(HALF), GridChange(coarsen=(4, 4)).of(HALF).target
    found = GridChange(region=region, coarsen=(4, 4)).of(HALF)
    whole = Geometry(HALF, coarse).means(values)
    rows, columns = np.isin(coarse.latitude, found.target.latitude), np.isin(coarse.longitude, found.target.longitude)
    assert 1 in found.target.shape
    np.testing.assert_array_equal(found.means(values), whole[rows][:, columns])
    with pytest.raises(UserError, match="one row or column does not say how large a cell is"):
        Geometry(HALF, Grid(np.array([40.25]), np.array([10.0, 12.0])))


@pytest.mark.parametrize(
    ("source", "region"),
    [
        (Grid(np.array([30.0]), np.arange(48) * 7.5), (31, 0, 29, 60)),  # a row, that or more of its columns
        (Grid(np.array([30.0]), np.arange(9) * 7.5), (31, 0, 29, 60)),
        (Grid(np.array([30.0]), np.array([7.5])), (31, 7, 29, 8)),
        (Grid(QUARTER.latitude[2:20], QUARTER.longitude), (60, 0, 0, 90)),  # a part of the globe, cut further
    ],
)
def test_a_part_of_a_grid_is_cut_where_its_points_are_those_asked_for(source, region):
    target = GridChange(region=region).of(QUARTER).target
    found = Geometry(source, target, QUARTER)
    assert found.crop is not None
    rows, columns = np.isin(source.latitude, target.latitude), np.isin(source.longitude, target.longitude)
    values = noise(source)
    np.testing.assert_array_equal(found.means(values), values[rows][:, columns])


def test_regional_grids_are_joined_in_blocks_and_regridded_within_their_cells():
    blocks = GridChange(coarsen=(3, 2)).of(LOCAL).target
    assert blocks.shape == (4, 9) and blocks.latitude[0] == 65 and blocks.longitude[0] == -11.5
    even = GridChange(regrid=2.0).of(LOCAL).target
    np.testing.assert_allclose(even.latitude, np.arange(64, 55, -2.0))
    np.testing.assert_allclose(even.longitude, np.arange(-10, 5, 2.0))
    Geometry(LOCAL, even)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (GridChange(coarsen=(7, 7)), r"coarsen=7: does not divide the 24 intervals between rows of the grid; 2, 3, 4"),
        (GridChange(coarsen=(1, 5)), r"coarsen=5: does not divide the 48 columns"),
        (GridChange(regrid=7.0), r"regrid=7: does not divide 180"),
        (GridChange(region=(95, 0, 0, 10)), "reaches beyond the grid"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        change.of(QUARTER)


def test_a_target_beyond_the_data_is_refused():
    with pytest.raises(UserError, match="reaches beyond the data"):
        Geometry(LOCAL, Grid(np.linspace(70, 50, 11), np.linspace(-12, 4, 9)))


@pytest.mark.parametrize(
    "change",
    [
        GridChange(region=(60, -20, 40, 20)),
        GridChange(coarsen=(4, 4)),
        GridChange(coarsen=(4, 3)),
        GridChange(regrid=2.5, region=(60, -20, 40, 20)),
        GridChange(coarsen=(3, 3), region=(60, 0, 0, 180)),
    ],
    ids=str,
)
def test_settings_are_found_from_two_grids(change):
    target = change.of(HALF).target
    said = dict(part.split("=") for part in settings_for(HALF, target).split())
    again = GridChange(
        tuple(map(float, said["region"][1:-1].split(","))) if "region" in said else None,
        pair(said["coarsen"]) if "coarsen" in said else None,
        float(said["regrid"]) if "regrid" in said else None,
    )
    assert again.of(HALF).target.same_as(target)


def pair(text: str) -> tuple[int, int]:
    numbers = [int(n) for n in text.strip("[]").split(",")]
    return numbers[0], numbers[-1]


@pytest.fixture
def archive(tmp_path):
    """Two members over the globe, truth and static fields on the same grid (7 x 12)."""
    gribfiles.ensemble(tmp_path / "ens.grib", members=(1, 2), names=("t", "t2m"), levels=(500, 850))
    truth = [
        gribfiles.message(name, date=20010101 + day, member=None, level=level, seed=day)
        for day in range(3)
        for name, level in (("t", 500), ("t", 850), ("t2m", 0))
    ]
    gribfiles.write(tmp_path / "truth.grib", truth)
    gribfiles.write(tmp_path / "static.grib", [gribfiles.message("orog", member=None, seed=9)])
    return tmp_path


def make(folder, name="out.zarr", **changes):
    given = {"input": str(folder / "ens.grib"), "truth": str(folder / "truth.grib")}
    return open_store(prepare(PrepareConfig(**(given | {"output": str(folder / name)} | changes))))


def test_prepare_brings_forecast_truth_and_static_to_one_grid(archive):
    plain = make(archive, "plain.zarr", static=str(archive / "static.grib"))
    store = make(archive, coarsen=2, packing=Packing.float32, static=str(archive / "static.grib"))
    grid = Grid(*GLOBE)
    geometry = Geometry(grid, GridChange(coarsen=(2, 2)).of(grid).target)
    assert store.layout.grid.same_as(geometry.target) and store.layout.grid.shape == (4, 6)
    assert store.provenance["coarsen"] == 2
    for part in (Part.FORECAST, Part.TRUTH):
        before, after = plain.read(part, 1), store.read(part, 1)
        assert np.array_equal(after.pressure[0, 0, 0, 1], geometry.floats(before.pressure[0, 0, 0, 1]))
        assert np.array_equal(after.surface[0, 1, 0], geometry.floats(before.surface[0, 1, 0]))
    assert np.array_equal(store.static()["orog"], geometry.floats(plain.static()["orog"]))
    assert open_store(plain.path).layout.grid.same_as(grid)


def test_prepare_quantises_regridded_fields_within_the_bound_that_it_prints(archive, caplog):
    exact = make(archive, "exact.zarr", coarsen=[3, 2], packing=Packing.float32)
    with caplog.at_level("INFO"):
        packed = make(archive, coarsen=[3, 2])
    assert "t: packed into 16 bits, error at most" in caplog.text and "conservative means of 7 x 12" in caplog.text
    bound = packed.quantisation_error["t"]
    assert 0 < np.abs(packed.read(Part.FORECAST, 0).pressure - exact.read(Part.FORECAST, 0).pressure).max() <= bound


def test_prepare_cuts_a_region_without_touching_integers(archive):
    plain, store = make(archive, "plain.zarr"), make(archive, region=[60, -60, -30, 60])
    assert store.layout.grid.same_as(Grid(np.arange(60, -31, -30.0), np.arange(-60, 61, 30.0)))
    assert store.quantisation_error == plain.quantisation_error or not any(store.quantisation_error.values())
    whole = plain.read(Part.FORECAST, 0).pressure[..., 1:5, :][..., np.r_[10:12, 0:3]]
    assert np.array_equal(store.read(Part.FORECAST, 0).pressure, whole)


def test_truth_on_another_grid_is_regridded_only_when_asked(archive):
    finer = np.linspace(90, -90, 13), np.arange(0.0, 360.0, 15.0)
    messages = [gribfiles.message("t2m", date=20010101 + day, member=None, grid=finer, seed=day) for day in range(3)]
    gribfiles.write(archive / "truth.grib", messages)
    with pytest.raises(UserError, match=r"grid 13 x 24 points.*differs from the forecast's.*truth_regrid=true"):
        make(archive, variables=["t2m"])
    store = make(archive, variables=["t2m"], truth_regrid=True)
    same = make(archive, "degrees.zarr", variables=["t2m"], regrid=30)
    fine, coarse = Grid(*finer), Grid(*GLOBE)
    values = next(iter(gribfiles.decoded(archive / "truth.grib")))[1]
    bound = store.quantisation_error["t2m"]
    wanted = Geometry(fine, coarse).floats(values)
    for one in (store, same):
        found = one.read(Part.TRUTH, 0, Selection(lead_hours=(0,), surface=("t2m",))).surface[0, 0, 0]
        np.testing.assert_allclose(found, wanted, atol=bound)


def test_a_grid_is_taken_from_a_store(archive):
    first = make(archive, "first.zarr", coarsen=3)
    second = make(archive, regrid=first.path)
    assert second.layout.grid.same_as(first.layout.grid)
    assert np.array_equal(second.read(Part.TRUTH, 0).pressure, first.read(Part.TRUTH, 0).pressure)


def test_an_archive_is_opened_on_the_grid_of_a_store(archive):
    store = make(archive, coarsen=2, packing=Packing.float32)
    source = open_pair(str(archive / "ens.grib"), str(archive / "truth.grib"), grid=store.layout.grid)
    for part in (Part.FORECAST, Part.SPREAD, Part.TRUTH):
        found, there = source.read(part, 0), store.read(part, 0)
        assert np.array_equal(found.pressure, there.pressure) and np.array_equal(found.surface, there.surface)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"coarsen": 0}, "coarsen=0: give a whole number"),
        ({"coarsen": [2, 2, 2]}, "coarsen="),
        ({"regrid": -1}, "regrid=-1: give a spacing"),
        ({"regrid": 2, "coarsen": 2}, "exclude each other"),
        ({"region": [40, 0, 60, 10]}, r"region=\[40, 0, 60, 10\]: give \[north"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(UserError, match=message):
        PrepareConfig(input="a", output="b.zarr", **setting)


def test_no_settings_are_found_for_a_finer_grid_that_begins_at_a_pole():
    source = Grid(90 - np.arange(10) * 10.0, np.arange(36) * 10.0)
    assert settings_for(source, Grid(90 - np.arange(60) * 1.5, np.arange(36) * 10.0)) == ""


def test_an_even_grid_has_the_first_column_whatever_its_rounding():
    region = Grid(50 - np.arange(11) * 0.1, (1.1 + np.arange(11) * 0.1).astype(np.float32))
    assert GridChange(regrid=0.1).of(region).target.same_as(region)
