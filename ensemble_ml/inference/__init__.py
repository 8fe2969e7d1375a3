"""Inference: read a checkpoint and a reduced ensemble, and write the forecast as CF NetCDF files."""

from ensemble_ml.inference.contents import Header, Kind, Output
from ensemble_ml.inference.export import export
from ensemble_ml.inference.netcdf import file_name, write_forecast
from ensemble_ml.inference.predict import predict
from ensemble_ml.inference.select import Places, select
