"""Forecasts by others: those of `predict`, written otherwise."""

import xarray as xr


def rewritten(folder, path, change, parts=("mean", "stddev")):
    """The files of a forecast's `parts` of t and tp after `change`."""
    path.mkdir()
    for file in folder.glob("*.nc"):
        with xr.open_dataset(file, decode_timedelta=False) as data:
            change(data[[f"{name}_{part}" for name in ("t", "tp") for part in parts]].load()).to_netcdf(
                path / file.name
            )
    return path


def in_other_units(folder, path, parts):
    """Files with some of the parts, of t in degrees Celsius and of tp in millimetres."""

    def change(data):
        for part in parts:
            data[f"t_{part}"] -= 0.0 if part in ("stddev", "scale") else 273.15
            data[f"tp_{part}"] *= 1000
            data[f"t_{part}"].attrs["units"], data[f"tp_{part}"].attrs["units"] = "degC", "mm"
        return data

    return rewritten(folder, path, change, parts)
