"""What NetCDF and Zarr hold beside the variables: other heights, other quantities, what was made of members."""

import re

import numpy as np
import pytest
from gribfiles import archive_of, dataset

from data_prep import open_archive
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part


def flat(**coordinates):
    """Wind without a pressure axis, at what scalar coordinates say."""
    data = dataset(t="u").isel(isobaricInhPa=0, drop=True)
    data["u"].attrs["units"] = "m s-1"
    return data.assign_coords(coordinates)


@pytest.mark.parametrize(
    ("coordinates", "names"),
    [
        ({}, None),  # on one pressure level, as likely as not
        ({"heightAboveGround": 10.0}, ("u10",)),
        ({"height": ((), 10.0, {"axis": "Z", "units": "m"})}, ("u10",)),
        ({"surface": 0.0}, ("u10",)),
        ({"heightAboveGround": 80.0}, None),
        ({"hybrid": 40.0}, None),
        ({"tropopause": 0.0}, None),
    ],
)
def test_a_field_at_another_height_is_not_the_surface_variable(tmp_path, coordinates, names):
    flat(**coordinates).to_netcdf(tmp_path / "a.nc")
    if names:
        assert open_archive(tmp_path / "a.nc").layout.surface == names
        return
    reason = "" if coordinates else r"; it has u \(no pressure level\)"
    with pytest.raises(UserError, match=f"no field that the registry knows{reason}"):
        open_archive(tmp_path / "a.nc")


def test_the_temperature_of_the_skin_is_not_that_at_2_m(tmp_path):
    """As cfgrib writes NCEP's temperature of the surface."""
    about = {"units": "K", "standard_name": "air_temperature", "GRIB_paramId": 130, "GRIB_typeOfLevel": "surface"}
    data = dataset().isel(isobaricInhPa=0, drop=True).assign_coords(surface=0.0)
    data["t"] = data.t.assign_attrs(about)
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"it has t \(typeOfLevel surface\)"):
        open_archive(tmp_path / "a.nc")
    data.t.attrs["GRIB_paramId"] = 167
    assert archive_of(data, tmp_path).layout.surface == ("t2m",)


def test_levels_of_a_model_are_not_those_of_pressure(tmp_path):
    data = dataset(isobaricInhPa="level").assign_coords(level=[60, 59])
    data.level.attrs = {"long_name": "model_level_number"}
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="level: counts model levels; only pressure levels are read"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"GRIB_paramId": 121, "GRIB_stepType": "max"}, ""),  # mx2t6, to which cfgrib gives the name of what it is of
        ({"GRIB_paramId": 167, "GRIB_stepType": "avg"}, r" \(GRIB_stepType avg, over an interval that is not stated\)"),
        ({"GRIB_paramId": 167, "GRIB_stepType": "avgua"}, r" \(of stepType avgua\)"),
        ({"cell_methods": "time: range"}, r" \(range over time\)"),
        ({"cell_methods": "step: area: standard_deviation"}, r" \(standard_deviation over time\)"),
    ],
)
def test_what_bears_the_name_of_another_quantity_is_left_out(tmp_path, attributes, reason):
    data = dataset(t="t2").isel(isobaricInhPa=0, drop=True).assign_coords(heightAboveGround=2.0)
    data["t2"].attrs |= {"standard_name": "air_temperature"} | attributes
    data["t2m"] = data.t2.copy().assign_attrs(units="K")
    data["t2m"].attrs = {"units": "K"}
    data["skt"] = data.t2m
    source = archive_of(data.drop_vars("t2m"), tmp_path)
    assert source.layout.surface == ("skt",)
    assert any(re.fullmatch(f"t2{reason}", name) for file in source.catalogue.readers for name in file.skipped)
    data["t2"].attrs = {"standard_name": "air_temperature", "units": "K", "cell_methods": "time: point"}
    data.drop_vars("t2m").to_netcdf(tmp_path / "b.nc")
    assert open_archive(tmp_path / "b.nc").layout.surface == ("t2m", "skt")


def test_levels_and_variables_that_cannot_be_read_are_left_out(tmp_path):
    """Levels between whole hPa, and a velocity in m/s under the name of that in Pa/s."""
    data = dataset().assign_coords(isobaricInhPa=[0.4, 500.0])
    data["w"] = data.t.copy().assign_attrs(units="m s-1")
    source = archive_of(data, tmp_path)
    assert source.layout.levels == (500,) and source.layout.variables == ("t",)
    np.testing.assert_array_equal(source.read(Part.FORECAST, 1).pressure[:, :, 0, 0], data.t.values[1, :, :, 1])
    assert source.catalogue.readers[0].skipped == {"t (at levels of no whole hPa)": 12, "w (units m s-1)": 1}


def with_ensemble_moments(**attributes):
    """Members, their spread and a field of no member, all of them air temperature."""
    data = dataset()
    data["t"].attrs["standard_name"] = "air_temperature"
    spread = data.t.std("number", ddof=1)
    data["made"] = spread.assign_attrs(units="K", standard_name="air_temperature", **attributes)
    return data


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"cell_methods": "number: standard_deviation"}, "made (standard_deviation over members)"),
        ({"cell_methods": "area: mean realization: mean"}, "made (mean over members)"),
        ({}, "made (without members; t has them)"),
    ],
)
def test_what_was_made_of_members_is_no_member(tmp_path, attributes, reason):
    source = archive_of(with_ensemble_moments(**attributes), tmp_path)
    assert source.layout.realization == (1, 2, 3) and source.catalogue.readers[0].skipped == {reason: 1}


def test_a_mean_of_members_alone_is_refused(tmp_path):
    data = dataset().mean("number", keep_attrs=True)
    data["t"].attrs["cell_methods"] = "number: mean"
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="holds no field"):
        open_archive(tmp_path / "a.nc")
