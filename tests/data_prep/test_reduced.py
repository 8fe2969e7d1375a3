"""Reduced Gaussian grids: read as ecCodes reads them, interpolated exactly with `regrid=`, and refused without it."""

import eccodes
import numpy as np
import pytest
from gribfiles import finished, write

from data_prep import open_archive, prepare
from data_prep.geometry import Geometry, GridChange, gaussian_latitudes, reduced_grid
from data_prep.inspect import describe_archive
from ensemble_ml.config import Packing, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.store import Part, open_store

OCTAHEDRAL = tuple(20 + 4 * min(row, 15 - row) for row in range(16))  # O8
FULL = (32,) * 16  # F8
GRIDS = {"O8": OCTAHEDRAL, "F8": FULL}
TARGET = Grid(90 - np.arange(13) * 15.0, np.arange(24) * 15.0)


def places(counts):
    """Return latitude and longitude of all points, (N,) each, from north to south and eastwards."""
    rows = gaussian_latitudes(len(counts))
    longitude = [np.arange(count) * 360 / count for count in counts]
    return np.repeat(rows, counts), np.concatenate(longitude)


def weather(latitude, longitude, member=0):
    """Return a field of low wave number in K."""
    lat, lon = np.deg2rad(latitude), np.deg2rad(longitude)
    return 280 + 3 * member + 20 * np.cos(lat) * np.sin(2 * lon + 0.3) - 10 * np.sin(lat)


def message(
    values,
    counts,
    *,
    edition=2,
    packing="grid_simple",
    bits=16,
    member=1,
    lead=24,
    kind="pf",
    date=20260101,
    name=167,
    missing=None,
):
    """Encode a field on a Gaussian grid."""
    full = len(set(counts)) == 1
    handle = eccodes.codes_grib_new_from_samples(f"{'regular' if full else 'reduced'}_gg_sfc_grib{edition}")
    latitude = gaussian_latitudes(len(counts))
    keys = {"productDefinitionTemplateNumber": 1, "numberOfForecastsInEnsemble": 10, "perturbationNumber": member}
    if kind == "an":
        keys = {"typeOfProcessedData": "an"}
    if edition == 1:
        keys = {"setLocalDefinition": 1, "localDefinitionNumber": 1, "stream": "enfo", "type": kind}
        keys["perturbationNumber"] = member
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    if full:
        eccodes.codes_set(handle, "Ni", counts[0])
        eccodes.codes_set(handle, "iDirectionIncrementInDegrees", 360 / counts[0])
    else:
        eccodes.codes_set_array(handle, "pl", list(counts))
    about = {"Nj": len(counts), "N": len(counts) // 2, "latitudeOfFirstGridPointInDegrees": latitude[0]}
    about |= {"latitudeOfLastGridPointInDegrees": latitude[-1], "longitudeOfFirstGridPointInDegrees": 0}
    about |= {"longitudeOfLastGridPointInDegrees": 360 - 360 / max(counts)}
    about |= {"dataDate": date, "dataTime": 0, "step": lead, "paramId": name}
    for key, value in about.items():
        eccodes.codes_set(handle, key, value)
    if missing is not None:
        eccodes.codes_set(handle, "bitmapPresent", 1)
        eccodes.codes_set(handle, "missingValue", -1e9)
        values = np.where(missing, -1e9, values)
    eccodes.codes_set(handle, "bitsPerValue", bits)
    eccodes.codes_set_values(handle, values.astype(float))
    if packing != "grid_simple":
        eccodes.codes_set(handle, "packingType", packing)
    return finished(handle)


def decoded(made):
    """Return ecCodes' values, latitudes and longitudes of a message, (N,) each."""
    handle = eccodes.codes_new_from_message(made)
    found = [eccodes.codes_get_array(handle, key) for key in ("values", "latitudes", "longitudes")]
    eccodes.codes_release(handle)
    return found


def interpolated(values, latitude, longitude, target):
    """Return the values at the points of a grid by NumPy's own interpolation, along the rows and then between two."""
    rows = np.unique(np.round(latitude, 6))[::-1]
    along = []
    for row in rows:
        mine = np.abs(latitude - row) < 1e-4
        along.append(np.interp(target.longitude, longitude[mine], values[mine], period=360))
    along = np.array(along)
    return np.array([np.interp(target.latitude, rows[::-1], column[::-1]) for column in along.T]).T


def ensemble(path, counts=OCTAHEDRAL, **how):
    """Write two members at two leads, and return the messages."""
    latitude, longitude = places(counts)
    made = [
        message(weather(latitude, longitude, member), counts, member=member, lead=lead, **how)
        for member in (1, 2) for lead in (0, 24)
    ]  # fmt: skip
    write(path, made)
    return made


@pytest.mark.parametrize("counts", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize(("edition", "packing", "bits"), [
    (1, "grid_simple", 16), (2, "grid_simple", 16), (2, "grid_simple", 12), (2, "grid_simple", 24),
    (2, "grid_ccsds", 16),
])  # fmt: skip
def test_values_are_ecCodes_interpolated(tmp_path, counts, edition, packing, bits):
    made = ensemble(tmp_path / "a.grib", counts, edition=edition, packing=packing, bits=bits)
    values, latitude, longitude = decoded(made[1])
    np.testing.assert_allclose(latitude, places(counts)[0], atol=1e-3)
    source = open_archive(tmp_path / "a.grib", change=GridChange(regrid=15.0))
    assert source.layout.grid.same_as(TARGET) and source.layout.realization == (1, 2)
    expected = interpolated(values, places(counts)[0], longitude, TARGET)
    np.testing.assert_allclose(source.read(Part.FORECAST, 0).surface[0, 1, 0], expected, rtol=2e-7)


@pytest.mark.parametrize("counts", GRIDS.values(), ids=GRIDS)
def test_a_field_that_is_linear_in_latitude_is_exact(counts):
    grid = reduced_grid(counts)
    values = np.broadcast_to(250 + 0.5 * grid.latitude[:, None], grid.shape)
    found = Geometry(grid, TARGET).means(values)
    within = np.clip(TARGET.latitude, grid.latitude[-1], grid.latitude[0])
    np.testing.assert_allclose(found, np.broadcast_to(250 + 0.5 * within[:, None], TARGET.shape), rtol=1e-13)


def test_a_wave_is_as_near_as_the_spacing_allows():
    """The error of linear interpolation over a distance h is at most h^2 / 8 times the second derivative."""
    counts = tuple(20 + 4 * min(row, 63 - row) for row in range(64))  # O32
    grid = reduced_grid(counts)
    latitude, longitude = (np.zeros(grid.shape) for _ in range(2))
    latitude += grid.latitude[:, None]
    longitude += np.minimum(np.arange(grid.shape[1]), np.array(counts)[:, None] - 1) * 360 / np.array(counts)[:, None]
    fine = Grid(60 - np.arange(25) * 5.0, np.arange(72) * 5.0)  # not near the poles, where rows are short
    found = Geometry(grid, fine).means(weather(latitude, longitude))
    error = np.abs(found - weather(fine.latitude[:, None], fine.longitude[None])).max()
    rows = np.array(counts)[np.abs(grid.latitude) < 65]
    bound = (20 * 4 * (2 * np.pi / rows.min()) ** 2 + 30 * np.deg2rad(180 / 63) ** 2) / 8
    assert 0 < error <= bound < 1.5


def test_weights_are_of_two_points_in_two_rows():
    weights = Geometry(reduced_grid(OCTAHEDRAL), TARGET).points
    assert np.diff(weights.indptr).max() <= 4 and weights.min() >= 0
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-14)


def test_points_without_a_value(tmp_path):
    """A new point has a value where at least half of the weight has; it is that of the points that have one."""
    latitude, longitude = places(OCTAHEDRAL)
    missing = (longitude > 90) & (longitude < 200)
    values = np.full(len(latitude), 290.0)
    write(tmp_path / "a.grib", [message(values, OCTAHEDRAL, missing=missing, name=34, member=m) for m in (1, 2)])
    source = open_archive(tmp_path / "a.grib", change=GridChange(regrid=15.0))
    found = source.read(Part.FORECAST, 0).surface[0, 0, 0]
    share = interpolated(1.0 - missing, latitude, longitude, TARGET)
    clear = np.abs(share - 0.5) > 1e-9
    np.testing.assert_array_equal(np.isnan(found)[clear], (share < 0.5)[clear])
    assert np.isnan(found).any() and (found[~np.isnan(found)] == 290).all()


def test_prepare_with_truth_and_a_region(tmp_path):
    """Truth on the same Gaussian grid is interpolated in the same way."""
    made = ensemble(tmp_path / "a.grib")
    latitude, longitude = places(OCTAHEDRAL)
    truth = [
        message(weather(latitude, longitude, 5), OCTAHEDRAL, kind="an", lead=0, date=date)
        for date in (20260101, 20260102)
    ]
    write(tmp_path / "b.grib", truth)
    settings = {
        "input": str(tmp_path / "a.grib"),
        "regrid": 15,
        "region": [60, 0, -30, 90],
        "workers": 1,
        "truth": str(tmp_path / "b.grib"),
    }
    store = open_store(prepare(PrepareConfig(output=str(tmp_path / "s.zarr"), packing=Packing.float32, **settings)))
    values, _, east = decoded(made[1])
    region = Grid(60 - np.arange(7) * 15.0, np.arange(7) * 15.0)
    assert store.layout.grid.same_as(region)
    expected = interpolated(values, latitude, east, region)
    np.testing.assert_allclose(store.read(Part.FORECAST, 0).surface[0, 1, 0], expected, rtol=2e-7)
    expected = interpolated(decoded(truth[1])[0], latitude, east, region)
    np.testing.assert_allclose(store.read(Part.TRUTH, 0).surface[0, 1, 0], expected, rtol=2e-7)


@pytest.mark.parametrize("change", [None, GridChange(coarsen=(2, 2)), GridChange(region=(60.0, 0.0, 0.0, 90.0))])
def test_without_regrid_it_is_refused(tmp_path, change):
    ensemble(tmp_path / "a.grib")
    text = r"a reduced Gaussian grid of 16 rows with 20 to 48 points is read with regrid=DEGREES alone"
    with pytest.raises(UserError, match=text):
        open_archive(tmp_path / "a.grib", change=change)
    found = describe_archive(str(tmp_path / "a.grib"))
    assert found["grid"] == "a reduced Gaussian grid of 16 rows with 20 to 48 points (prepare with regrid=DEGREES)"


def test_a_kept_table_knows_the_rows(tmp_path):
    ensemble(tmp_path / "a.grib")
    settings = {"input": str(tmp_path / "a.grib"), "regrid": 15, "workers": 1, "index": str(tmp_path / "index")}
    stores = [
        open_store(prepare(PrepareConfig(output=str(tmp_path / f"{name}.zarr"), **settings))) for name in ("a", "b")
    ]
    assert list((tmp_path / "index").iterdir()) and stores[0].fingerprint() == stores[1].fingerprint()


def test_a_part_of_a_gaussian_grid_is_refused(tmp_path):
    latitude, longitude = places(FULL)
    handle = eccodes.codes_new_from_message(message(weather(latitude, longitude), FULL))
    eccodes.codes_set(handle, "latitudeOfFirstGridPointInDegrees", 60.0)
    write(tmp_path / "a.grib", [eccodes.codes_get_message(handle)])
    with pytest.raises(UserError, match="a part of a Gaussian grid, or one that is turned; only whole ones are read"):
        open_archive(tmp_path / "a.grib", change=GridChange(regrid=15.0))
