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
# # How much spread does one forecast know?
#
# Each member of an ensemble costs a whole forecast. How well can the spread of all members be told from one, two or
# five of them? This lesson makes a toy atmosphere in which the best possible answer is known, learns from past dates,
# and puts intervals on what it finds on later ones.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

import ensemble_ml as eml

rng = np.random.default_rng(0)
dates, members = 60, 8
grid = {"latitude": np.linspace(78.75, -78.75, 8), "longitude": np.arange(0, 360, 22.5)}
start = np.datetime64("2001-01-01", "ns") + np.arange(dates) * np.timedelta64(
    18, "D"
)  # twenty dates in each of 3 years
lead = np.array([24], "timedelta64[h]").astype("timedelta64[ns]")

# %% [markdown]
# ## A toy atmosphere
#
# Each date has waves of warm and cold air, here `w`. Forecasts are unsure where the air is warm: the standard deviation
# of members is 1 K where `w` is 0, and 2 K where it is 2. The truth is one more draw from the same distribution.

# %%
waves = np.exp(1j * np.arange(1, 4)[:, None] * np.deg2rad(grid["longitude"]))
size = rng.normal(size=(dates, 1, 8, 3)) + 1j * rng.normal(size=(dates, 1, 8, 3))
w = (size @ waves).real / np.sqrt(3)
sigma = 2 ** (w / 2)
draws = (285 + 4 * w + sigma * rng.normal(size=(dates, members + 1, 8, 16))).astype("float32")

axes = ("init_time", "realization", "lead_time", "latitude", "longitude")
ensemble = xr.Dataset(
    {"t2m": (axes, draws[:, :members, None], {"units": "K"})},
    {"init_time": start, "realization": np.arange(members), "lead_time": lead, **grid},
)
truth = xr.Dataset(
    {"t2m": (("time", "latitude", "longitude"), draws[:, members], {"units": "K"})}, {"time": start + lead, **grid}
)

# %% [markdown]
# ## Learn from the past, predict from few
#
# `calibrate` fits how the spread follows from the members at hand *and* from the flow around a point, for every number
# of members. A single member has no spread of its own, but it does show where the air is warm.

# %%
store = eml.prepare(ensemble, truth, f"{tempfile.mkdtemp()}/store.zarr")
model = eml.calibrate(store, train=["2001", "2002-01/2002-06"], validation=["2002-07/2002-12"])
counts = [1, 2, 5]
scores = {}
for count in counts:
    forecast = model.predict(store, members=count, dates=["2003"])
    scores[count] = eml.verify({"predicted": forecast}, store, bootstrap=300).to_xarray().isel(lead_time=0, field=0)

# %% [markdown]
# ## How good is it?
#
# The error is the root mean square of the difference to the spread of all eight members, in K, with an interval of 95 %
# over the test dates. It is not zero even for who knows the true `sigma` (the dotted line), for those eight are a
# sample, too.

# %%
rows = {
    "raw": "raw_{}",
    "size-corrected": "size_corrected_{}",
    "regression": "spread_regression_{}",
    "predicted": "predicted",
}
weights = np.cos(np.deg2rad(grid["latitude"]))[:, None] * np.ones(16)
test = start.astype("datetime64[Y]").astype(str) == "2003"
full = draws[test, :members].std(1, ddof=1)
floor = float(np.sqrt(np.average((full - sigma[test, 0]) ** 2, weights=np.broadcast_to(weights, full.shape))))

figure, axis = plt.subplots(figsize=(6.4, 3.6))
for place, (label, entrant) in enumerate(rows.items()):
    for count in counts:
        if entrant.format(count) not in scores[count].entrant:
            continue
        one = scores[count].sel(entrant=entrant.format(count))
        error, low, high = (float(one[f"spread_rmse{part}"]) for part in ("", "_low", "_high"))
        if np.isnan(error):
            continue  # a single member has no spread of its own
        print(f"{label} from {count}: {error:.2f} K ({low:.2f} to {high:.2f})")
        axis.errorbar(count + 0.15 * place, error, [[error - low], [high - error]], fmt="o", color=f"C{place}",
                      label=label if count == 5 else None)  # fmt: skip
axis.axhline(floor, color="black", ls=":", label="known sigma")
axis.set(xlabel="members at hand", ylabel="error of the spread, K", ylim=(0, None), xticks=counts)
axis.legend(frameon=False)
print(f"known sigma: {floor:.2f} K")

# %% [markdown]
# ## What to conclude
#
# What two members are apart is mostly chance: the sample spread of two errs more than any other. One member *with the
# flow around it* does far better, and errs little more than who knows `sigma`. From five members, all errors lie
# below the dotted line, because five of the eight whose spread is asked for are known by then; what was learned from
# the flow still helps, but less.
#
# Real air is less obliging, since one member shows less of what makes forecasts unsure. How much less, is in
# [Results](../docs/results.md): there, one trajectory has not yet beaten four raw members.
