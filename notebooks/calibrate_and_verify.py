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
# # Calibrate in a minute, predict, draw and verify
#
# The statistical stages of a model need no GPU: bias, inflation, a linear correction. This lesson fits them to few init
# times of an archive, forecasts later ones from two members, and asks whether that was worth it. It needs the archive
# of `open_and_look`:
#
#     ensemble-ml simulate simulate=tiny output=archive

# %%
import ensemble_ml as eml

ensemble = eml.open("archive/ensemble", static="archive/static.grib")
truth = eml.open("archive/truth")
model = eml.calibrate(ensemble, truth, train=["2001"], validation=["2002"], variables=["t2m", "t"], levels=[850])
print(model)

# %% [markdown]
# ## Predict
#
# The forecast is a Dataset. It holds the mean and the standard deviation of what will come, its quantiles, and the
# spread that all members would have. It is lazy, and is computed here because it is used three times.

# %%
forecast = model.predict(ensemble, members=2, dates=["2003"]).load()
print(", ".join(forecast.data_vars))

# %% [markdown]
# ## Draw
#
# A map of how unsure the forecast is, and a fan: the quantiles at one place by lead time.

# %%
eml.plot.map(forecast["t2m_stddev"][0, -1], title="standard deviation of 2 metre temperature, K")

# %%
eml.plot.fan(forecast.isel(forecast_reference_time=[0]), "t2m", 48.2, 16.4)

# %% [markdown]
# ## Verify
#
# Scores come with intervals from a bootstrap over blocks of init times, beside the raw ensemble and baselines that were
# fitted to the same training dates. Two init times are too few for any interval, and the scores say so.

# %%
scores = eml.verify(forecast, ensemble, truth, bootstrap=100)
print(scores)

# %% [markdown]
# `scores.report("report.html")` writes all of it as a page that opens with a scorecard.
