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
# # Open an archive and look
#
# An archive is a folder of GRIB, NetCDF or Zarr: members of an ensemble in one, truth (an analysis) in another. This
# lesson opens the smallest archive that the package can simulate, and looks at what an ensemble knows about its own
# error. Make the archive once, beside this notebook; it takes a minute:
#
#     ensemble-ml simulate simulate=tiny output=archive

# %%
import numpy as np

import ensemble_ml as eml

ensemble = eml.open("archive/ensemble", static="archive/static.grib")
truth = eml.open("archive/truth")
print(ensemble)

# %% [markdown]
# Whatever the files call them, names, units and axes are the package's own. Nothing has been read so far: Dask reads a
# field when it is computed. One forecast of 2 m temperature, with its members beside each other:

# %%
field = ensemble["t2m"].isel(init_time=0, lead_time=-1).load()
mean = float(field.weighted(np.cos(np.deg2rad(field.latitude))).mean())
print(f"{field.sizes['realization']} members; global mean {mean:.1f} K")

# %% [markdown]
# The **spread** is the standard deviation of the members. It says where the ensemble is unsure: over storm tracks, and
# hardly at all over tropical seas.

# %%
spread = field.std("realization", ddof=1, keep_attrs=True)
eml.plot.map(spread, land=ensemble["lsm"], title="spread of 2 metre temperature")

# %% [markdown]
# Does it know its error? A good ensemble errs by about as much as its members differ, times the square root of
# (1 + 1/M), because the mean of M members is uncertain itself. Here is that comparison, over all init times:

# %%
members = ensemble["t2m"].load()
valid = (
    members.init_time + members.lead_time
)  # an analysis is a forecast of lead zero from the time that it is valid at
came = truth["t2m"].isel(realization=0, lead_time=0, drop=True).rename(init_time="time").sel(time=valid).load()
weights = np.cos(np.deg2rad(members.latitude))
everywhere = ["init_time", "latitude", "longitude"]
error = np.sqrt(((members.mean("realization") - came) ** 2).weighted(weights).mean(everywhere))
M = members.sizes["realization"]
known = np.sqrt((members.var("realization", ddof=1) * (1 + 1 / M)).weighted(weights).mean(everywhere))
for lead, e, s in zip(members.lead_time.values, error.values, known.values, strict=True):
    print(f"+{lead / np.timedelta64(1, 'h'):.0f} h: error {e:.2f} K, predicted by the spread {s:.2f} K")

# %% [markdown]
# Here the two agree within a tenth, on the average over the globe: what is left to correct in this simulated archive is
# local. Members of real ensembles are mostly too close to each other near the ground. The lesson `calibrate_and_verify`
# corrects both.
