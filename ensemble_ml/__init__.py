"""Predict from a few ensemble members how uncertain a weather forecast is."""

__version__ = "0.1.0"
