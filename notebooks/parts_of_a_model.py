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

# %% [markdown]
# # Train a small network, and see what each part gave
#
# A model is made of parts: corrections that are fitted in closed form, a point network that looks at the points
# around, and a U-Net that sees the whole globe. Is each worth its time? This lesson trains on a toy atmosphere in which
# a perfect forecast is known, draws the learning curve, and scores the parts one by one on dates that none of them saw.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

import ensemble_ml as eml
from ensemble_ml.verification import api

folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
dates, members = 60, 6
grid = {"latitude": np.linspace(78.75, -78.75, 8), "longitude": np.arange(0, 360, 22.5)}
start = np.datetime64("2001-01-01", "ns") + np.arange(dates) * np.timedelta64(
    18, "D"
)  # twenty dates in each of 3 years
lead = np.array([24], "timedelta64[h]").astype("timedelta64[ns]")

# %% [markdown]
# ## A toy atmosphere
#
# Each date has waves of warm and cold air, here `w`. The forecast model has three faults: it is too cold by 0.5 K
# everywhere, it errs by up to 1 K with the sine of `w` (which is not linear), and it does not see that the air follows
# what the waves are on the other side of the globe.

# %%
waves = np.exp(1j * np.arange(1, 4)[:, None] * np.deg2rad(grid["longitude"]))
size = rng.normal(size=(dates, 8, 3)) + 1j * rng.normal(size=(dates, 8, 3))
w = (size @ waves).real / np.sqrt(3)
forecasts = 285 + 4 * w[:, None] + 0.7 * rng.normal(size=(dates, members, 8, 16))
perfect = 285.5 + 4 * w + np.sin(2 * w) + 0.4 * np.roll(w, 8, axis=-1)  # the mean of what may come; deviation 1 K
came = perfect + rng.normal(size=w.shape)

axes = ("init_time", "realization", "lead_time", "latitude", "longitude")
ensemble = xr.Dataset(
    {"t2m": (axes, forecasts[:, :, None].astype("float32"), {"units": "K"})},
    {"init_time": start, "realization": np.arange(members), "lead_time": lead, **grid},
)
truth = xr.Dataset(
    {"t2m": (("time", "latitude", "longitude"), came.astype("float32"), {"units": "K"})}, {"time": start + lead, **grid}
)

# %% [markdown]
# ## Train
#
# The corrections alone, then with the point network (a training of no step), then with the U-Net. The last training
# finds the fits of the one before. Sizes are those of a toy; the defaults suit a globe of a few degrees.

# %%
store = eml.prepare(ensemble, truth, folder / "store.zarr")
split = {"train": ["2001", "2002-01/2002-06"], "validation": ["2002-07/2002-12"]}
sizes = {
    "model.points": 64,
    "model.hidden": 8,
    "model.max_hidden": 16,
    "data.members": [5],
}
more = {"validate_every": 20, "threads": 1, "optim": "adamw", "tracking.tensorboard": False}
parts = {
    "corrections": eml.calibrate(store, **split),
    "and_network": eml.train(store, run=folder / "networks", steps=0, **split, **sizes, **more),
    "and_unet": eml.train(store, run=folder / "unet", steps=60, **split, **sizes, **more),
}

# %% [markdown]
# ## The learning curve
#
# `log.jsonl` of a run has a line for each validation. The CRPS is divided by that of the raw members, so 1 is no gain;
# step 0 is what the fits gave.

# %%
with open(folder / "unet" / "log.jsonl") as lines:
    log = [json.loads(line) for line in lines]
curve = {line["step"]: line["validation"]["crps_ratio"] for line in log if "validation" in line}
figure, axis = plt.subplots(figsize=(6.4, 3.2))
axis.plot(list(curve), list(curve.values()), "o-")
axis.set(xlabel="step", ylabel="CRPS over raw, validation dates")

# %% [markdown]
# ## What each part gave
#
# On the test dates, in K, with intervals of 95 %. The best that is possible is the score of the distribution from which
# the toy drew what came.

# %%
forecasts = {name: model.predict(store, members=5, dates=["2003"]) for name, model in parts.items()}
scores = eml.verify(forecasts, store, bootstrap=300).to_xarray().isel(lead_time=0, field=0)
for name in ("raw_5", *parts):
    one = scores.sel(entrant=name)
    print(f"{name}: {float(one.crps):.3f} K ({float(one.crps_low):.3f} to {float(one.crps_high):.3f})")
test = start.astype("datetime64[Y]").astype(str) == "2003"
normal = xr.DataArray(perfect[test], dims=["date", "latitude", "longitude"], coords=grid)
crps = api.crps_distribution(normal, xr.ones_like(normal), normal.copy(data=came[test]), family="normal")
print(f"best possible: {float(crps):.3f} K")

# %% [markdown]
# ## What to conclude
#
# The corrections find the cold bias, what is linear, and how wide the distribution has to be. The point network finds
# the sine, which is not linear: together the fits bring more than half of what can be gained. The U-Net could see the
# other side of the globe, but sixty steps on thirty dates give it next to nothing. So look at step 0 of a learning
# curve before you add steps, and at the number of dates before you add channels.
