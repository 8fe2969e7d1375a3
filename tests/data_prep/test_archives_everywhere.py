"""The public archives in a folder, in memory and behind a URL: listed alike, and with ecCodes' and xarray's values."""

from pathlib import Path

import cfgrib
import eccodes
import numpy as np
import public_archives
import public_grib
import pytest
import xarray as xr

from benchmarks.remote.server import Plan, serving
from data_prep import open_archive
from data_prep.inspect import describe_archive
from data_prep.records import field_of

pytest.importorskip("obstore", reason="URLs need the extra `remote`")
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")
MOST = 300_000  # bytes of an archive

ARCHIVES = {
    "wb2:ifs_ens": lambda folder: public_archives.weatherbench(folder, degrees=30, dates=2, members=2, whole=True)[0],
    "wb2:era5": lambda folder: public_archives.weatherbench(folder, degrees=30, dates=2, members=2, whole=True)[1],
    "wb2:neuralgcm": public_archives.neuralgcm,
    "dynamical:ifs": lambda folder: public_archives.dynamical(folder, "ifs"),
    "dynamical:gefs": lambda folder: public_archives.dynamical(folder, "gefs"),
    "dynamical:ifs 46 days": public_archives.dynamical_46_days,
    "gefs:reforecast": public_grib.gefs_reforecast,
    "gefs": lambda folder: public_grib.gefs(folder, degrees=30, dates=1, members=2, leads=(24,))[0],
    "opendata": public_grib.ecmwf_open_data,
    "opendata since 50r1": lambda folder: public_grib.ecmwf_open_data(folder, since_50r1=True),
    "mogreps": public_archives.mogreps,
    "euppbench": public_archives.euppbench,
    "euppbench reforecasts": lambda folder: public_archives.euppbench(folder, years=2),
    "earth2studio": public_archives.earth2studio,
    "ens10": public_grib.ens10,
    "arco:era5": public_archives.arco_era5,
}  # fmt: skip
# What cfgrib's Datasets do not state: where a range of steps begins, and that ECMWF's deterministic run is one.
LOST_BY_CFGRIB = {"gefs": {"lead_bounds", "left_out"}, "opendata since 50r1": {"control", "fields", "left_out"}}
AXES = {
    "init": ("time", "init_time", "forecast_reference_time"),
    "member": ("number", "realization", "ensemble_member", "ensemble"),
    "lead": ("prediction_timedelta", "lead_time", "step", "forecast_period"),
    "level": ("level", "isobaricInhPa", "pressure", "pressure_level"),
}
GRAVITY = 9.80665


def data_files(path):
    """Return the Zarr stores of an archive, or its files without their indexes."""
    if "zarr" in path.name:
        return [path]
    stores = sorted(path.rglob("*.zarr"))
    files = [one for one in sorted(path.rglob("*")) if one.is_file() and one.suffix not in (".index", ".idx")]
    return stores or files


@pytest.fixture(scope="module", params=list(ARCHIVES))
def archive(request, tmp_path_factory):
    """Return name and path of an archive, what `inspect` says of it, and its fields."""
    path = Path(ARCHIVES[request.param](tmp_path_factory.mktemp("archive")))
    return request.param, path, described(str(path)), *read_all(str(path))


def described(paths):
    """Return what `inspect` says, without the places of files."""
    found = describe_archive(paths)
    return {key: value for key, value in found.items() if key not in ("archive", "files", "other_files")}


def read_all(paths):
    """Return the readers of an archive, the records of the fields that are made of it, and their values."""
    source = open_archive(paths, several_grids=True)
    records = source.catalogue.records[source.rows()]
    return source.catalogue.readers, records, [raw.decode() for raw in source.catalogue.values(records)]


def test_it_is_small(archive):
    assert sum(one.stat().st_size for one in archive[1].rglob("*") if one.is_file()) <= MOST


def test_it_is_listed_alike_behind_a_url(archive):
    _, path, found, _, _, expected = archive
    plan = Plan()
    with serving(path.parent, plan) as url:
        urls = [f"{url}/{file.relative_to(path.parent)}" for file in data_files(path)]
        assert described(urls) == found
        documents = [one for one in plan.asked if one.endswith(("zarr.json", ".zmetadata"))]
        assert len(documents) == len(set(documents))
        for mine, theirs in zip(read_all(urls)[2], expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_it_is_listed_alike_in_memory(archive):
    """Datasets as xarray opens them, and cfgrib for GRIB."""
    name, path, found, *_ = archive
    data = [one for file in data_files(path) for one in opened(file)]
    lost = LOST_BY_CFGRIB.get(name, set())
    assert {k: v for k, v in described(data).items() if k not in lost} == {
        k: v for k, v in found.items() if k not in lost
    }


def opened(file):
    """Return the Datasets of a file."""
    if any(file.glob("*/*/zarr.json")):
        return [xr.open_datatree(file, engine="zarr", decode_timedelta=True)]
    if "zarr" in f"{file.parent.name} {file.name}":
        return [xr.open_zarr(file, decode_timedelta=True)]
    if file.suffix == ".nc":
        return [xr.open_dataset(file, decode_timedelta=True)]
    return cfgrib.open_datasets(str(file), indexpath="", backend_kwargs={"indexpath": ""})


def test_values_are_those_of_eccodes_or_xarray_bit_for_bit(archive):
    *_, readers, records, values = archive
    files = {}
    for record, mine in zip(records, values, strict=True):
        reader = readers[record["file"]]
        if reader.keyed:
            theirs = by_eccodes(reader, record)
        else:
            if reader.path not in files:
                files[reader.path] = opened(Path(reader.path))[0].load()  # of a tree, the Dataset of the root
            theirs = by_xarray(files[reader.path], reader._places(np.array([record]))[0][0].name, record, reader.grid)
        assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, theirs, err_msg=str(record))


def by_eccodes(reader, record):
    """Return ecCodes' values of a message, in the units of the registry."""
    with open(reader.path, "rb") as file:
        file.seek(int(record["offset"]))
        handle = eccodes.codes_new_from_message(file.read(int(record["length"])))
    values = eccodes.codes_get_values(handle)
    factor = {"gh": GRAVITY, "tp": 1e-3}.get(eccodes.codes_get(handle, "shortName"), 1.0)
    if eccodes.codes_get(handle, "units") == "m":  # of rain
        factor = 1.0
    eccodes.codes_release(handle)
    return (values * factor if factor != 1 else values).astype(np.float32).reshape(reader.grid.shape)


def by_xarray(data, name, record, grid):
    """Return xarray's values of a field from north to south, in the units of the registry."""
    array = data[name]
    init, lead = record["init"].astype("datetime64[ns]"), np.timedelta64(int(record["lead"]), "h")
    at = {"init": init, "member": int(record["member"]), "lead": lead, "level": int(record["level"])}
    if "year" in array.dims:  # of hindcasts, which valid times date
        where = (data["valid_time"] == init + lead).values
        time, year, step = (int(axis[0]) for axis in np.nonzero(where & (data["step"].values == lead)))
        array = array.isel(time=time, year=year, step=step)
    for role, names in AXES.items():
        for dim in set(names) & set(array.dims):
            at_dim = at[role] * 100 if dim == "pressure" else at[role]
            array = array.sel({dim: at_dim}) if role != "level" or record["level"] else array.squeeze(dim)
    array = array.squeeze([dim for dim in array.dims if array.sizes[dim] == 1])
    lat, lon = ("lat", "lon") if "lat" in array.dims else ("latitude", "longitude")
    array = array.transpose(lat, lon).sortby(lat, ascending=False)
    order = [int(np.abs((array[lon].values - east + 180) % 360 - 180).argmin()) for east in grid.longitude]
    values, units = array.isel({lon: order}).values, array.attrs.get("units", "")
    if units == "degree_Celsius":
        values = values.astype(np.float64) + 273.15
    elif units == "percent":
        values = values.astype(np.float64) * 0.01
    elif field_of(record).name == "z" and units in ("gpm", "m"):
        values = values.astype(np.float64) * GRAVITY
    elif units == "kg m-2 s-1":
        values = (values.astype(np.float64) * 1e-3).astype(np.float32)
        values = values * (3600.0 * (record["lead"] - record["lead_start"]))
    return values.astype(np.float32)
