# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # An extreme case: raw, post-processed and truth
#
# Finds the forecast date on which the raw ensemble is furthest from its own climate, and looks at it closely: what did
# all members say, what did the post-processed forecast make of a few of them, and what came?
#
# Needs a run as `scripts/quickstart.sh` leaves it. Environment variables name another one: `ENSEMBLE_ML_RUN`,
# `ENSEMBLE_ML_FORECAST`, `ENSEMBLE_ML_STORE`, `ENSEMBLE_ML_VARIABLE` (a short name, with a level in hPa where it has
# one). Forecasts of a region (`predict region=...`) are looked at in that region; those at points are not read. Dates
# that had a part in the training are left out.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from ensemble_ml.fields import field
from ensemble_ml.store.climate import DAYS, FEWEST_VALUES, PROBABILITIES, quantiles, same_season
from ensemble_ml.verification import api, open_forecasts

root = Path.cwd().parent if Path.cwd().name == "notebooks" else Path.cwd()
run = root / os.environ.get("ENSEMBLE_ML_RUN", "runs/quickstart")
folder = root / os.environ.get("ENSEMBLE_ML_FORECAST", run / "forecast")
store = root / os.environ.get("ENSEMBLE_ML_STORE", f"{run}-data/store.zarr")
name, *level = os.environ.get("ENSEMBLE_ML_VARIABLE", "t 850").split()
units = field(name).units
label = f"{field(name).long_name}{f' at {level[0]} hPa' if level else ''}"

archive = xr.open_dataset(store, engine="ensemble_ml")
choices = []
for key in (key for key in archive.data_vars if f"{key}_truth" in archive):
    levels = archive[key].level.values if "level" in archive[key].dims else [""]
    choices += [f"{key} {number}".strip() for number in levels]
if " ".join([name, *level]) not in choices:
    raise ValueError(f"ENSEMBLE_ML_VARIABLE={' '.join([name, *level])}: {store} holds {', '.join(choices)}")
archive = archive.sel(level=int(level[0]), drop=True) if level else archive
files = sorted(folder.glob("forecast_*.nc"))
if not files:
    raise ValueError(f"{folder}: holds no forecast_*.nc; set ENSEMBLE_ML_FORECAST to the folder that predict wrote")
with xr.open_dataset(files[0], decode_timedelta=True) as first:
    archive = api.at_places_of(archive, first)
[held] = open_forecasts([str(folder)])
both = np.intersect1d(np.array(held.lead_hours, "timedelta64[h]"), archive.lead_time.values)
if not len(both):
    raise ValueError(
        f"{folder}: shares no lead with {store}, which has {archive.lead_time.values.astype('timedelta64[h]')}"
    )
lead = both[-1]
hours = int(lead / np.timedelta64(1, "h"))
truths = archive[f"{name}_truth"].sel(lead_time=lead)
if lacking := [f"{name}_{part}" for part in ("mean", "stddev", "location", "scale") if f"{name}_{part}" not in first]:
    holds = ", ".join(map(str, first.data_vars))
    given = f"give forecasts of the distribution of {name} (a model trained with model.postprocess=true)"
    raise ValueError(f"{folder}: holds {holds}, no {', '.join(lacking)}; {given}")
seen = np.concatenate([held.training_dates, held.validation_dates, held.earlier_dates])  # they are no test
files = {start: path for start, path in held.files.items() if start not in seen}
print(f"{len(held.files) - len(files)} of {len(held.files)} init times had a part in the training and are left out")
files = {start: path for start, path in files.items()
         if start in truths.init_time.values and truths.sel(init_time=start).notnull().any()}  # fmt: skip
if not files:
    raise ValueError(f"{folder}: none of {len(held.files)} init times can be looked at; forecast other dates")


# %% [markdown]
# ## How unusual is each forecast?
#
# The extreme forecast index (EFI) compares the members with the model's own climate: members of other years' forecasts
# that started around the same day, at the same hour. It is 1 where all members lie above everything the climate holds,
# -1 where they lie below. With one year in the archive, its other init times have to stand in for the climate. Dates
# whose climate has too few values are left out. Where a member has no value (the sea's temperature on land) there is no
# index.

# %%
members = archive[name].sel(lead_time=lead)
times = members.init_time.values
one_year = len(np.unique(times.astype("datetime64[Y]"))) == 1
source = "the other init times of the archive's only year" if one_year else f"other years, within {DAYS} days"


def climate_of(chosen):
    """Quantiles of the members of the chosen init times, NaN of too few: (quantile, latitude, longitude)."""
    pooled = members.isel(init_time=chosen).values
    found = quantiles(pooled.reshape(-1, *pooled.shape[2:]), PROBABILITIES, FEWEST_VALUES)
    places = {"latitude": members.latitude, "longitude": members.longitude}
    return xr.DataArray(found, {"quantile": list(PROBABILITIES), **places}, ["quantile", *places])


efi = {}
for start in files:
    chosen = times != start if one_year else same_season(times, start, DAYS)
    if chosen.sum() * members.sizes["realization"] >= FEWEST_VALUES:
        ensemble = members.sel(init_time=start).load().dropna("realization", how="all")  # a date may lack a member
        index = api.efi(ensemble, climate_of(chosen)).where(ensemble.notnull().all("realization"))
        efi |= {start: index} if index.notnull().any() else {}
few = f"{len(files) - len(efi)} of {len(files)} dates are left out, with less than {FEWEST_VALUES} values there"
print(f"Climate from {source}; {few}")
if not efi:
    raise ValueError(f"{store}: no climate for any of {len(files)} init times; forecast others, or add years to it")
weights = api.area_weights(members)
unusual = {start: float(abs(index).weighted(weights).mean()) for start, index in efi.items()}
case = max(unusual, key=unusual.get)
print("Mean |EFI| by date:")
for start, value in unusual.items():
    print(f"  {str(start)[:13]}  {value:.2f}{'  <- the case' if start == case else ''}")

# %% [markdown]
# ## Raw, post-processed, truth

# %%
raw = members.sel(init_time=case).dropna("realization", how="all")  # a date may lack a member
truth = truths.sel(init_time=case)
with xr.open_dataset(files[case], decode_timedelta=True) as data:
    used = [int(number) for number in data.attrs["members_in"].split()]
    forecast = data[[f"{name}_{part}" for part in ("mean", "stddev", "location", "scale")]]
    if "time" in forecast.dims:  # files of former versions have an axis of valid times
        forecast = forecast.swap_dims(time="forecast_period").expand_dims("forecast_reference_time")
    forecast = forecast.sel(forecast_period=lead).isel(forecast_reference_time=0)
    forecast = (forecast.sel(level=int(level[0]), drop=True) if level else forecast).load()


def law(ensemble):
    """Mean and (1 + 1/M)^(1/2) s."""
    return ensemble.mean("realization"), ensemble.std("realization", ddof=1) * np.sqrt(
        1 + 1 / len(ensemble.realization)
    )


laws = {f"raw {raw.sizes['realization']}": law(raw)}
if len(used) > 1:
    laws[f"raw {len(used)}"] = law(raw.sel(realization=used))
laws["post-processed"] = (forecast[f"{name}_mean"], forecast[f"{name}_stddev"])
low, high = truth.quantile([0.01, 0.99]).values
top = max(float(sigma.quantile(0.99)) for _, sigma in laws.values())
figure, axes = plt.subplots(2, len(laws) + 1, figsize=(4 * (len(laws) + 1), 5), layout="constrained")
for column, (who, (mean, sigma)) in enumerate(laws.items()):
    mean.plot(ax=axes[0, column], vmin=low, vmax=high, add_colorbar=False)
    sigma.plot(ax=axes[1, column], vmin=0, vmax=top, cmap="magma", add_colorbar=False)
    axes[0, column].set_title(f"{who}: mean")
    axes[1, column].set_title("standard deviation")
truth.plot(ax=axes[0, -1], vmin=low, vmax=high)
axes[0, -1].set_title("truth")
efi[case].plot(ax=axes[1, -1], vmin=-1, vmax=1, cmap="RdBu_r")
axes[1, -1].set_title("EFI")
title = figure.suptitle(f"{label}, {str(case)[:13]} + {hours} h")

# %% [markdown]
# ## Where it is most unusual
#
# Scores of this date alone: over all places that have a truth, and weighted by |EFI| (EECRPS), which asks for the
# unusual ones.

# %%
there = np.isfinite(truth) & np.isfinite(efi[case]) & np.isfinite(forecast[f"{name}_mean"])
scores = {}
for who, (mean, sigma) in laws.items():
    given, family = (mean, sigma), "normal"
    if who == "post-processed":  # its own: rain and wind are not normal
        given = forecast[f"{name}_location"], forecast[f"{name}_scale"]
        family = given[0].attrs["distribution_family"]
    crps = api.crps_distribution(*given, truth, family=family, preserve_dims="all")
    plain = api.weighted_mean(crps, weights=weights, mask=there)
    scores[who] = float(plain), float(api.eecrps(efi[case], crps, weights=weights, mask=there))
    print(f"{who:>15}: CRPS {scores[who][0]:.4g} {units}, EECRPS {scores[who][1]:.4g} {units}")
place = {dim: int(at) for dim, at in abs(efi[case]).where(there).argmax(...).items()}
y = float(truth.isel(place))
position = f"{float(truth.latitude[place['latitude']]):g} N, {float(truth.longitude[place['longitude']]):g} E"
print(f"At {position}, EFI {float(efi[case].isel(place)):+.2f}, the truth was {y:.5g} {units}:")
for who, (mean, sigma) in laws.items():
    m, s = float(mean.isel(place)), float(sigma.isel(place))
    away = f"{(y - m) / s:+.1f} standard deviations" if s else f"{y - m:+.3g} {units}"  # dry members have no spread
    print(f"{who:>15}: {m:.5g} +- {s:.3g} {units}; truth {away} away")

# %% [markdown]
# ## In a sentence

# %%
reference = f"raw {raw.sizes['realization']}"
gain = [100 * (1 - ours / theirs) for ours, theirs in zip(scores["post-processed"], scores[reference], strict=True)]
words = [f"{abs(percent):.1f} % {'below' if percent > 0 else 'above'}" for percent in gain]
print(
    f"On {str(case)[:13]}, the most unusual of {len(efi)} dates, the post-processed {label} at {hours} h has a CRPS"
    f" {words[0]} that of {reference}, {words[1]} where |EFI| weighs; one date proves nothing."
)
