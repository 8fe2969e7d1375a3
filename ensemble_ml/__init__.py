"""Predict from a few ensemble members how uncertain a weather forecast is.

    import ensemble_ml as eml
    ensemble = eml.open("ens/")
    forecast = eml.load("runs/first").predict(ensemble, members=5)
    scores = eml.verify(forecast, ensemble, eml.open("truth/"))

A name of `__all__` is imported when it is first used, so that `import ensemble_ml` takes hardly any time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {  # the module of each name that is imported at its first use
    "Model": "api.model",
    "Scores": "api.verifying",
    "calibrate": "api.preparing",
    "load": "api.model",
    "open": "api.opening",
    "prepare": "api.preparing",
    "train": "api.training",
    "verify": "api.verifying",
}
__all__ = ["Model", "Scores", "__version__", "calibrate", "load", "open", "plot", "prepare", "train", "verify"]

if TYPE_CHECKING:
    from ensemble_ml import plot
    from ensemble_ml.api.model import Model, load
    from ensemble_ml.api.opening import open
    from ensemble_ml.api.preparing import calibrate, prepare
    from ensemble_ml.api.training import train
    from ensemble_ml.api.verifying import Scores, verify


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` at its first use (PEP 562)."""
    if name == "plot":
        return import_module("ensemble_ml.plot")
    if name in _PLACES:
        return getattr(import_module(f"ensemble_ml.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
