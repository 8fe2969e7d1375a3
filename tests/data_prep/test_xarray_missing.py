"""Values of packed NetCDF that were never written, or that the file says are none."""

import netCDF4
import numpy as np
import pytest
import xarray as xr
from gribfiles import dataset

from data_prep import open_archive
from data_prep.limits import plausible
from data_prep.zarr_chunks import valid_limits
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, field
from ensemble_ml.store import Part


def packed(path, name="t", **attributes):
    """Member 2 of the first start date is never written; no attribute says how that looks."""
    data = dataset(t=name).transpose("time", "number", "step", "isobaricInhPa", "latitude", "longitude")
    data.drop_vars(name).to_netcdf(path)
    whole = np.rint((data[name].values - 270) / 0.002).astype(np.int16)
    with netCDF4.Dataset(path, "a") as file:
        made = file.createVariable(name, "i2", data[name].dims)
        made.setncatts({"units": "K", "scale_factor": 0.002, "add_offset": 270.0} | attributes)
        made.set_auto_maskandscale(False)
        made[1], made[0, 0], made[0, 2] = whole[1], whole[0, 0], whole[0, 2]
    return whole


def test_packed_values_that_were_never_written_are_absent(tmp_path):
    whole = packed(tmp_path / "a.nc")
    source = open_archive(tmp_path / "a.nc")
    found = source.read(Part.FORECAST, 1).pressure[:, :, 0]
    np.testing.assert_allclose(found, (whole * 0.002 + 270)[1][:, :, ::-1], atol=1e-4)
    with pytest.raises(
        UserError, match=r"member 2, .*, lead 0 h: 84 of 84 values are NaN, infinite or beyond 1e\+15; if it is absent"
    ):
        source.read(Part.FORECAST, 0)


@pytest.mark.parametrize(
    "attributes",
    [
        {"valid_range": np.array([-30000, 100], np.int16)},
        {"valid_max": np.int16(100)},
        {"valid_max": 270.2},
        {"valid_range": [0.0, 270.2], "_FillValue": np.int16(-1)},
    ],
)
def test_values_outside_the_valid_range_are_absent(tmp_path, attributes):
    whole = packed(tmp_path / "a.nc", **{k: v for k, v in attributes.items() if k != "_FillValue"})
    beyond = int((whole[1, 0, 0, 0] > 100).sum())
    assert 0 < beyond < 84
    with pytest.raises(UserError, match=f"{beyond} of 84 values are NaN, infinite or beyond 1e\+15, or outside of"):
        open_archive(tmp_path / "a.nc").read(Part.FORECAST, 1)


def test_limits_of_packed_and_of_unpacked_values():
    array = xr.DataArray(0.0, attrs={"valid_min": np.int16(10)})
    array.encoding = {"scale_factor": -0.5, "add_offset": 3.0}
    assert valid_limits(array) == (-np.inf, 3 - 9.5 / 2)
    array.attrs = {"valid_range": np.array([0, -2], np.int16)}
    array.encoding = {"scale_factor": 1.0, "_Unsigned": "true"}
    assert valid_limits(array) == (-0.5, 65534.5)
    array.attrs = {"valid_range": np.array([-40.5, 60.5])}
    array.encoding = {"scale_factor": 0.5, "add_offset": -40.0, "_Unsigned": "true"}
    assert valid_limits(array) == pytest.approx((-40.5, 60.5), rel=1e-5)
    array.attrs = {"valid_range": "none"}
    assert valid_limits(array) == (-np.inf, np.inf)


@pytest.mark.parametrize("missing", [np.int16(-1), np.int16([-1]), "-1"])
@pytest.mark.parametrize("zarr", [False, True])
def test_missing_values_of_integers_that_are_taken_as_unsigned(tmp_path, missing, zarr):
    data = dataset(t="sst").isel(isobaricInhPa=0, drop=True)
    whole = np.rint((data.sst.values - 200) / 0.002).astype(np.uint16)
    whole[..., 0, :3] = 65535
    data["sst"] = data.sst.copy(data=whole.view(np.int16))
    packed = {"scale_factor": 0.002, "add_offset": 200.0, "_Unsigned": "true", "missing_value": missing}
    if zarr:
        data["sst"].attrs |= packed | {"missing_value": missing if isinstance(missing, str) else missing.tolist()}
        data.to_zarr(tmp_path / "a.zarr", consolidated=False)
    else:
        data["sst"].attrs |= packed
        data.to_netcdf(tmp_path / "a.nc")
    found = open_archive(tmp_path / ("a.zarr" if zarr else "a.nc")).read(Part.FORECAST, 1).surface[:, :, 0]
    np.testing.assert_array_equal(np.isnan(found), whole[1] == 65535)
    np.testing.assert_allclose(found[whole[1] != 65535], (whole[1] * 0.002 + 200)[whole[1] != 65535], atol=1e-3)


@pytest.mark.parametrize("missing", [np.float64(1e20), "1e20", np.array([1e20]), np.int32(-9999)])
@pytest.mark.parametrize("zarr", [False, True])
def test_missing_values_of_another_type(tmp_path, missing, zarr):
    """Of text and float64 beside values of float32: 1e20 as one is not 1e20 as the other."""
    data = dataset(t="sst").isel(isobaricInhPa=0, drop=True)
    wanted = data.sst.values.copy()
    wanted[..., 0, :3] = np.nan
    data["sst"] = data.sst.copy(
        data=np.where(np.isnan(wanted), np.float32(missing.item() if np.ndim(missing) else missing), wanted)
    )
    data["sst"].attrs["missing_value"] = missing
    data["sst"].encoding["_FillValue"] = None
    path = tmp_path / ("a.zarr" if zarr else "a.nc")
    if zarr:
        data["sst"].attrs["missing_value"] = missing if isinstance(missing, str) else np.ravel(missing).tolist()
        data.to_zarr(path, consolidated=False)
    else:
        data.to_netcdf(path)
    found = open_archive(path).read(Part.FORECAST, 1).surface[:, :, 0]
    np.testing.assert_array_equal(found, wanted[1])


def test_values_that_no_variable_has_are_named(tmp_path):
    data = dataset()
    data["t"][1, 0, 0, 0, 0, 0] = 1e20
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"1 of 84 values are NaN, infinite or beyond 1e\+15"):
        open_archive(tmp_path / "a.nc").read(Part.FORECAST, 1)


@pytest.mark.parametrize(
    ("name", "units", "missing", "text"),
    [
        ("u", "m s-1", -9999.0, "not between -500 and 500 m s-1"),
        ("q", "kg kg-1", -9999.0, "not between -0.002 and 0.5 kg kg-1"),
        ("q", "kg kg-1", 9999.0, "not between -0.002 and 0.5 kg kg-1"),
        ("t", "K", 9999.0, "not between 100 and 400 K"),
        ("w", "Pa s-1", 9999.0, "not between -900 and 900 Pa s-1"),
        ("z", "m2 s-2", -32767.0, r"not between -6\d+\.?\d* and 35\d+\.?\d* m2 s-2"),
        ("tp", "m", 9999.0, "not between -0.00015 and 9.5 m"),
        ("tcwv", "kg m-2", 9999.0, "not between -1 and 500 kg m-2"),
        ("tcc", "1", 9999.0, "not between -0.01 and 1.01 1"),
        ("msl", "Pa", 9999.0, r"not between 30000 and 120000 Pa"),
    ],
)
def test_a_missing_value_beyond_all_weather(tmp_path, name, units, missing, text):
    data = dataset(t=name)
    if field(name).surface:
        data = data.isel(isobaricInhPa=[0]).squeeze("isobaricInhPa", drop=True).isel(step=[1])
    usual = {"K": 270.0, "Pa": 1e5, "m2 s-2": 3.2e4}  # the latter within the limits of both levels
    data[name].values[:] = usual.get(units, 0.001)
    data[name].values[0, 0, 0, ..., 2, 3] = missing
    data[name].attrs["units"] = units
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=rf"1 of 84 values .*{text} \(a missing value that no attribute declares"):
        open_archive(tmp_path / "a.nc").read(Part.FORECAST, 0)


EXTREMES = {  # of stations, the upper air to 1 hPa, the highest mountains, and sums over the wettest weeks
    "t": (130.0, 335.0), "z": (-1.2e4, 5e5), "u": (-200.0, 250.0), "v": (-200.0, 200.0), "q": (-1e-4, 0.04),
    "w": (-500.0, 500.0), "d": (-0.1, 0.1), "ws": (0.0, 250.0), "t2m": (170.0, 335.0), "msl": (86e3, 109e3),
    "sp": (32e3, 111e3), "u10": (-120.0, 120.0), "v10": (-120.0, 120.0), "ws10": (0.0, 120.0), "fg10": (0.0, 150.0),
    "tp": (-1e-4, 9.0), "cp": (-1e-4, 9.0), "tcw": (-1e-3, 300.0), "tcwv": (-1e-3, 120.0), "tcc": (-1e-3, 1.001),
    "sst": (270.0, 311.0), "skt": (170.0, 370.0), "orog": (-600.0, 8850.0), "lsm": (-1e-3, 1.001),
    "r": (-0.1, 2.0), "r2m": (0.0, 1.2), "d2m": (160.0, 310.0), "u100m": (-130.0, 130.0), "v100m": (-130.0, 130.0),
    "ws100m": (0.0, 130.0), "sf": (-1e-4, 3.0), "ssrd": (-1e3, 2e9), "strd": (0.0, 2e9), "swe": (-1e-3, 10.5),
    "cape": (0.0, 9e3), "lcc": (-1e-3, 1.001), "mcc": (-1e-3, 1.001), "hcc": (-1e-3, 1.001), "swh": (0.0, 25.0),
}  # fmt: skip


@pytest.mark.parametrize("known", FIELDS, ids=lambda known: known.name)
def test_what_weather_reaches_is_no_missing_value(known):
    low, high = plausible(known)
    least, most = EXTREMES[known.name]
    assert low < least and most < high
    assert not low < -32767 and not (low < 9999 < high and known.name not in ("z", "ssrd", "strd"))


def test_packed_integers_that_were_not_decoded_are_no_values(tmp_path):
    """Half metres per second above -60 m/s would pass for a wind of 70 m/s."""
    encoding = {"dtype": "uint8", "scale_factor": 0.5, "add_offset": -60.0, "_FillValue": 255}
    data = dataset(t="u").assign(u=lambda made: (made.u - 270.0).assign_attrs(units="m s-1"))
    data.to_netcdf(tmp_path / "a.nc", encoding={"u": encoding})
    with xr.open_dataset(tmp_path / "a.nc", mask_and_scale=False, decode_timedelta=True) as raw:
        with pytest.raises(UserError, match="u: its integers are packed"):
            open_archive(raw)
        found = open_archive(xr.decode_cf(raw)).read(Part.FORECAST, 0).pressure
    np.testing.assert_array_equal(found, open_archive(tmp_path / "a.nc").read(Part.FORECAST, 0).pressure)
