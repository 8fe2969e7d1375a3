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
# # How good are these forecasts?
#
# Opens the NetCDF forecasts of a run with xarray, sets the verifying fields and the raw ensemble beside them, and asks:
# is the predicted uncertainty as large as the error, and is the predicted distribution worth more than the ensemble it
# was made from? `ensemble-ml evaluate` answers this for all variables at once; here every step can be seen and changed.
#
# Needs a run as `scripts/quickstart.sh` leaves it: `RUN/forecast/forecast_*.nc` and `RUN-data/store.zarr`. Environment
# variables name another one: `ENSEMBLE_ML_RUN`, `ENSEMBLE_ML_FORECAST`, `ENSEMBLE_ML_STORE`, `ENSEMBLE_ML_VARIABLE`
# (a short name, with a level in hPa where it has one: `t 850`). Forecasts of a region (`predict region=...`) are
# compared in that region; those at points are not read.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from scipy.stats import norm
from scores.continuous import rmse
from scores.probability import crps_for_ensemble

from ensemble_ml.fields import field
from ensemble_ml.verification import api, bootstrap, open_forecasts

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

# %% [markdown]
# ## The forecasts
#
# One file for each init time, with axes of init time and lead time, so that files stand side by side.


# %%
def of_variable(data):
    """This variable at this level, with the store's names of the axes."""
    held = data[[key for key in data.data_vars if key.startswith(f"{name}_") and key != f"{name}_member"]]
    if "time" in held.dims:  # files of former versions have an axis of valid times
        held = held.swap_dims(time="forecast_period").expand_dims("forecast_reference_time")
    held = held.drop_vars("time").rename(forecast_reference_time="init_time", forecast_period="lead_time")
    return held.sel(level=int(level[0]), drop=True) if level else held


def read(path):
    with xr.open_dataset(path, decode_timedelta=True) as data:
        return of_variable(data).load(), [int(number) for number in data.attrs["members_in"].split()]


files = sorted(folder.glob("forecast_*.nc"))
if not files:
    raise ValueError(f"{folder}: holds no forecast_*.nc; set ENSEMBLE_ML_FORECAST to the folder that predict wrote")
with xr.open_dataset(files[0], decode_timedelta=True) as first:
    holds = ", ".join(map(str, first.data_vars))
if lacking := [f"{name}_{part}" for part in ("mean", "stddev", "location", "scale") if f"{name}_{part}" not in first]:
    given = f"give forecasts of the distribution of {name} (a model trained with model.postprocess=true)"
    raise ValueError(f"{folder}: holds {holds}, no {', '.join(lacking)}; {given}")
dates, made_from = zip(*map(read, files), strict=True)
forecast = xr.concat(dates, "init_time", coords="minimal", compat="override", join="outer")
print(forecast)

# %% [markdown]
# ## Truth and raw ensemble, from the tensor store
#
# The engine decodes lazily; only what is selected here is read, where the forecast lies. The raw ensemble is taken
# twice: the members that the forecast was made from, and all of them. What is compared is compared at the same points:
# where the truth, the members or the forecast have no value (the sea's temperature on land), nobody is scored. Start
# dates that the model was trained on, or that chose its checkpoint, are no test: the files name them.

# %%
archive = api.at_places_of(archive, forecast)
[held] = open_forecasts([str(folder)])
seen = np.isin(forecast.init_time, np.concatenate([held.training_dates, held.validation_dates, held.earlier_dates]))
print(f"{seen.sum()} of {len(files)} init times had a part in the training and are left out")
forecast = forecast.isel(init_time=~seen & np.isin(forecast.init_time, archive.init_time))  # today's is in no archive
both = np.intersect1d(np.array(held.lead_hours, "timedelta64[h]"), archive.lead_time.values)  # leads of all files
if not len(both):
    raise ValueError(
        f"{folder}: shares no lead with {store}, which has {archive.lead_time.values.astype('timedelta64[h]')}"
    )
forecast = forecast.sel(lead_time=both)
archive = archive.sel(init_time=forecast.init_time, lead_time=forecast.lead_time)
archive = archive.sel(level=int(level[0]), drop=True) if level else archive
with_truth = archive[f"{name}_truth"].notnull().any(["latitude", "longitude"]).all("lead_time").values
if not with_truth.any():
    raise ValueError(f"{folder}: none of {len(files)} init times can be scored; forecast other dates")
archive, forecast = archive.isel(init_time=with_truth), forecast.isel(init_time=with_truth)
used = max(made_from, key=len)  # a date may lack some of those that were asked for
members = archive[name].load()
there = members.notnull().any("realization") & forecast[f"{name}_mean"].notnull()
if len(used) > 1:  # a date of one of them has no spread to compare with
    there &= members.sel(realization=used).notnull().sum("realization") > 1
truth = archive[f"{name}_truth"].load().where(there)
reduced = members.sel(realization=used)
weights = api.area_weights(truth)
scored = f"{truth.sizes['init_time']} of {np.sum(~seen)} init times have a truth"
print(f"{label}: {scored}; {len(used)} of {members.sizes['realization']} members in")

# %% [markdown]
# ## What one forecast looks like

# %%
one = forecast.isel(init_time=0, lead_time=-1)
pictures = {f"mean ({units})": one[f"{name}_mean"], f"standard deviation ({units})": one[f"{name}_stddev"]}
figure, axes = plt.subplots(1, 2, figsize=(13, 3.6), layout="constrained")
for axis, (title, values), colours in zip(axes, pictures.items(), ("viridis", "magma"), strict=True):
    drawn = axis.pcolormesh(values.longitude, values.latitude, values, cmap=colours)
    if "lsm" in archive and min(archive.lsm.shape) > 1:
        axis.contour(archive.longitude, archive.latitude, archive.lsm, [0.5], colors="white", linewidths=0.6)
    figure.colorbar(drawn, ax=axis)
    axis.set(title=f"{label}: {title}", xlabel="longitude", ylabel="latitude", ylim=np.clip(axis.get_ylim(), -90, 90))

# %% [markdown]
# ## Is the uncertainty as large as the error?
#
# Root mean square of the spread over the root mean square error of the mean, weighted by cell area: one, if the
# forecast knows how good it is. A finite ensemble's mean is itself uncertain, so raw spread is taken times
# sqrt(1 + 1/M).


# %%
def root_mean_square(values):
    """Over dates and places with a truth, area-weighted; a function of lead time."""
    return np.sqrt((values**2).where(truth.notnull()).weighted(weights).mean(["init_time", "latitude", "longitude"]))


def normal_law(ensemble):
    """Mean, and the standard deviation (1 + 1/M)^(1/2) s of a new member or the truth around it."""
    inflation = np.sqrt(1 + 1 / ensemble.notnull().sum("realization"))  # a date may lack a member
    return ensemble.mean("realization"), ensemble.std("realization", ddof=1) * inflation


laws = {
    "predicted": (forecast[f"{name}_mean"], forecast[f"{name}_stddev"]),
    f"raw {members.sizes['realization']}": normal_law(members),
}
if len(used) > 1:
    laws[f"raw {len(used)}"] = normal_law(reduced)
hours = (forecast.lead_time / np.timedelta64(1, "h")).values.astype(int)
for who, (mean, sigma) in laws.items():
    error = rmse(mean, truth, preserve_dims="lead_time", weights=weights)
    ratio = root_mean_square(sigma) / error
    for hour, e, r in zip(hours, error.values, ratio.values, strict=True):
        print(f"{who:>10} +{hour} h: error of the mean {e:.4g} {units}, spread/skill {r:.2f}")
if f"{name}_ensemble_spread" in forecast:
    full = archive[f"{name}_spread"]
    spreads = {"predicted": forecast[f"{name}_ensemble_spread"]}
    if len(used) > 1:
        spreads["raw"] = reduced.std("realization", ddof=1)
    for who, spread in spreads.items():
        for hour, e in zip(hours, root_mean_square(spread - full).values, strict=True):
            print(f"{who:>10} +{hour} h: error of the full ensemble's spread {e:.3g} {units}")

# %% [markdown]
# ## Is the distribution worth more than the ensemble?
#
# The continuous ranked probability score is an absolute error for distributions: lower is better, in the variable's
# units. For a normal distribution it has a closed form (Gneiting et al. 2005), which a large sample of quantiles
# confirms; of raw members `scores` computes the fair version, which does not punish an ensemble for being small: it is
# what infinitely many such members would score, so it shows what is left to gain, and is no competitor.


# %%
def crps(law, family):
    """At each place and date, in closed form; of a law without spread (where no member has rain) the absolute error."""
    return api.crps_distribution(*law, truth, family=family, preserve_dims="all")


sample = xr.DataArray(norm.ppf((np.arange(4000) + 0.5) / 4000), dims="realization")
by_hand = crps_for_ensemble(sample, xr.DataArray(0.7), "realization", method="ecdf")
closed = api.crps_distribution(xr.DataArray(0.0), xr.DataArray(1.0), xr.DataArray(0.7), family="normal")
assert abs(float(closed) - float(by_hand)) < 1e-3


def by_date(values):
    """Area-weighted mean over all places; (init_time, lead_time)."""
    return values.weighted(weights).mean(["latitude", "longitude"]).transpose("init_time", "lead_time")


predicted = forecast[f"{name}_location"], forecast[f"{name}_scale"]
family = predicted[0].attrs["distribution_family"]  # its own: rain and wind are not normal
score = {"predicted": by_date(crps(predicted, family))}
score |= {who: by_date(crps(law, "normal")) for who, law in laws.items() if who != "predicted"}
fair = crps_for_ensemble(members, truth, "realization", method="fair", preserve_dims="all")
score[f"raw {members.sizes['realization']}, fair"] = by_date(fair)

# %% [markdown]
# Start dates that follow each other share their weather, so the bootstrap draws blocks of ten days with replacement.
# The same blocks are drawn for all competitors: the interval is that of the *difference*. Where blocks are few, it
# reaches further than the draws do; one block says nothing.


# %%
def interval_of(gain, ours, theirs, days=10, draws=1000, seed=0):
    """95 % interval of 1 - mean(ours) / mean(theirs) in percent, by lead: (2, lead_time)."""
    block = bootstrap.blocks_of(ours.init_time.values, days)
    times = bootstrap.draw_dates(block, draws, seed)
    drawn = 100 * (1 - (times @ ours.values) / (times @ theirs.values))
    ends = [
        bootstrap.interval(value, column, 0.95, block.max() + 1) for value, column in zip(gain, drawn.T, strict=True)
    ]
    return np.array([[end.low for end in ends], [end.high for end in ends]])


figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for who, values in score.items():
    axis.plot(hours, values.mean("init_time"), marker="o", label=who)
axis.set(title=f"{label}: CRPS", xlabel="lead time (h)", ylabel=units, xticks=hours)
axis.legend()

rival = f"raw {len(used)}" if len(used) > 1 else f"raw {members.sizes['realization']}"
gain = 100 * (1 - score["predicted"].mean("init_time") / score[rival].mean("init_time"))
interval = interval_of(gain.values, score["predicted"], score[rival])
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
axis.axhline(0, color="grey", linewidth=0.8)
axis.errorbar(hours, gain, np.abs(interval - gain.values), marker="o", capsize=4, linestyle="none")
axis.set(title=f"CRPS gained on {rival}, with 95 % intervals", xlabel="lead time (h)", ylabel="%", xticks=hours)

# %% [markdown]
# ## In a sentence

# %%
low, high = interval[:, -1]
blocks = int(bootstrap.blocks_of(score["predicted"].init_time.values, 10).max()) + 1
if blocks < bootstrap.FEWEST_BLOCKS:
    verdict = f"and of {blocks} independent blocks nothing is sure"
else:
    verdict = "so it is better" if low > 0 else "so it is worse" if high < 0 else "which does not tell them apart"
sure = f"95 % interval {low:.1f} to {high:.1f} %" if np.isfinite(low) else "no 95 % interval: too few blocks of dates"
print(
    f"From {len(used)} of {members.sizes['realization']} members, the predicted distribution of {label} at"
    f" {hours[-1]} h has a CRPS of {score['predicted'].mean('init_time').values[-1]:.4g} {units}:"
    f" {abs(float(gain[-1])):.1f} % {'below' if gain[-1] > 0 else 'above'}"
    f" that of the normal distribution of {rival} ({sure},"
    f" {truth.sizes['init_time']} init times), {verdict}."
)
