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
# # Rain and wind: forecasts that know their bounds
#
# Users ask two questions: how much, and how likely is more than that? A normal distribution answers badly for rain and
# for wind, which are never below zero and often close to it. This lesson calibrates both on few past dates, reads
# quantiles and probabilities off the forecast, and checks whether the probabilities can be believed. It needs the
# archive of `open_and_look`:
#
#     ensemble-ml simulate simulate=tiny output=archive

# %%
import numpy as np

import ensemble_ml as eml

ensemble = eml.open("archive/ensemble", static="archive/static.grib")
truth = eml.open("archive/truth")
store = eml.prepare(ensemble, truth, "rain_and_wind.zarr", variables=["tp", "ws10"], overwrite=True)
model = eml.calibrate(store, train=["2001"], validation=["2002"])

# %% [markdown]
# ## Ask for quantiles and thresholds
#
# The rain of a day follows a shifted gamma distribution that is censored at zero: it can be exactly dry. Wind speed
# follows a normal distribution that is cut off at zero. Values are in SI units, so 1 mm of rain is 0.001 m.

# %%
forecast = model.predict(
    store, members=2, dates=["2003"], quantiles=[0.1, 0.5, 0.9], thresholds={"tp": [0.001], "ws10": [10]}
).load()
for name, factor, units in (("tp", 1000, "mm"), ("ws10", 1, "m/s")):
    quantiles = factor * forecast[f"{name}_quantile"]
    one = quantiles.isel(forecast_reference_time=0, forecast_period=-1).sel(latitude=48, longitude=16, method="nearest")
    low, middle, high = one.values
    family = forecast[f"{name}_location"].attrs["distribution_family"]
    print(f"{name} near Vienna, {family}: 10 % below {low:.1f}, half below {middle:.1f}, 90 % below {high:.1f} {units}")
    print(f"  smallest quantile anywhere: {float(quantiles.min()):.1f} {units}")

# %% [markdown]
# ## Where will it rain?
#
# The probability of more than 1 mm in 24 hours, one day ahead.

# %%
rain = forecast["tp_prob_above"].isel(threshold_tp=0)
eml.plot.map(rain[0, 0], title="probability of more than 1 mm of rain", cmap="Blues", vmin=0, vmax=1)

# %% [markdown]
# ## Can the probabilities be believed?
#
# Of all cases with a forecast of 30 %, 30 % should come true. The two members as they are can only say 0, 50 or 100 %.
# The Brier score is the mean square of what probability and outcome (0 or 1) differ by.

# %%
data = eml.open(store).sel(init_time="2003", lead_time=forecast["forecast_period"].values)
names = {"forecast_reference_time": "init_time", "forecast_period": "lead_time"}
weights = np.cos(np.deg2rad(data["latitude"]))
for name, threshold in (("tp", 0.001), ("ws10", 10)):
    came = data[f"{name}_truth"] > threshold
    probabilities = {
        "two members as they are": (data[name][:, :2] > threshold).mean("realization"),
        "calibrated": forecast[f"{name}_prob_above"].isel({f"threshold_{name}": 0}).drop_vars("time").rename(names),
    }
    eml.plot.reliability(probabilities, came, title=f"{name} above {threshold:g} {data[name].attrs['units']}")
    raw, ours = (float(((one - came) ** 2).weighted(weights).mean()) for one in probabilities.values())
    gain = 100 * (1 - ours / raw)
    print(f"{name} above {threshold:g}: Brier score {raw:.3f} raw, {ours:.3f} calibrated ({gain:.0f} % lower)")

# %% [markdown]
# ## What to conclude
#
# Two members that both stay dry do not make rain impossible, and two that both bring it do not make it certain. What
# was learned from four dates says how often they are wrong. The curve of the calibrated probabilities lies near the
# diagonal, and they take values between those that two members can give. Two test dates are few: `eml.verify` puts
# intervals on scores and says when there are too few dates for any.
