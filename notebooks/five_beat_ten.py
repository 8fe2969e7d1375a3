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
# # Why five members may beat ten
#
# A small ensemble has two handicaps: its mean is noisy, and so is its spread. A score that does not know this punishes
# it twice. This lesson draws members and truth from one known distribution, so every answer can be checked by hand.

# %%
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from ensemble_ml.verification import api

rng = np.random.default_rng(0)
members = xr.DataArray(rng.normal(size=(40_000, 10)), dims=["case", "realization"])
truth = xr.DataArray(rng.normal(size=40_000), dims="case")

# %% [markdown]
# ## One ensemble, three scores
#
# The CRPS is an absolute error for distributions: small is good. A perfect distribution N(0, 1) scores
# 1/sqrt(pi) = 0.564. The **ordinary** CRPS of M members is (1 + 1/M) times that, however good they are: it counts the
# smallness of the ensemble as an error. The **fair** CRPS takes that out.

# %%
sizes = [2, 3, 5, 10]
ordinary, fair = ([float(api.crps_ensemble(members[:, :M], truth, fair=f)) for M in sizes] for f in (False, True))
for M, o, f in zip(sizes, ordinary, fair, strict=True):
    print(f"{M:>2} members: ordinary {o:.3f} (by hand {(1 + 1 / M) / np.sqrt(np.pi):.3f}), fair {f:.3f}")

# %% [markdown]
# ## Five calibrated members against ten raw ones
#
# Real members are too sure and biased. Let these have a bias of 0.4 and 0.7 of the right spread. Ten of them, taken as
# they are, are then beaten by five whose bias and spread were corrected on past cases (the first half here).

# %%
raw = 0.4 + 0.7 * members
past, test = slice(0, 20_000), slice(20_000, None)


def normal(ensemble):
    """Return the mean of M members and the standard deviation of a new one around it."""
    inflation = np.sqrt(1 + 1 / ensemble.sizes["realization"])
    return ensemble.mean("realization"), ensemble.std("realization", ddof=1) * inflation


def crps(mean, sigma):
    return float(api.crps_distribution(mean, sigma, truth[test], family="normal"))


ten = crps(*normal(raw[test]))
mean, sigma = normal(raw[:, :5])
bias = float((truth - mean)[past].mean())
factor = float(np.sqrt(((truth - mean - bias)[past] ** 2).mean() / (sigma[past] ** 2).mean()))
five = crps((mean + bias)[test], (factor * sigma)[test])
print(f"ten raw members {ten:.3f}, five corrected {five:.3f}: {100 * (1 - five / ten):.1f} % better")

# %% [markdown]
# ## What is left to gain
#
# The spread of five members scatters by a third around the right one. What ten would have said can be predicted
# from other fields and other days; that is what this package's networks do, and why they ask for the spread of all.

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for M in (5, 10):
    spread = members[:, :M].std("realization", ddof=1).values
    axis.hist(spread, bins=80, density=True, histtype="step", label=f"{M} members")
axis.set(xlabel="spread (the right one is 1)", ylabel="density")
axis.legend(frameon=False)
