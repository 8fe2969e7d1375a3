"""A trained model in Python. It turns a Dataset of an ensemble into a Dataset of its forecast."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ensemble_ml.api.inputs import Reopened, open_input, path_of, settings_of
from ensemble_ml.api.opening import notices_of, resolve, whole
from ensemble_ml.config import ExportConfig, PredictConfig
from ensemble_ml.inference.export import export
from ensemble_ml.inference.job import plan_job
from ensemble_ml.inference.lazy import forecast_dataset
from ensemble_ml.training.checkpoint import find_checkpoint, load_checkpoint

_TO_FILES = "belongs to the command line; save the result by to_netcdf or to_zarr, or use ensemble-ml predict"
_REFUSED = {name: _TO_FILES for name in ("output", "overwrite", "resume", "parallel")}


class Model:
    """A trained model, as `load`, `train` and `calibrate` return it.

    Attributes:
        path: the folder of its checkpoint, a `Path`.
        meta: the content of checkpoint.json: settings, dates, versions and checksum of the checkpoint.
        spec: the inputs and outputs of the model: variables, levels (hPa), leads (h) and grid.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: Any = None):
        # A forecast is lazy, and may be computed when the program stands in another folder.
        checkpoint = load_checkpoint(find_checkpoint(path_of("path", path).absolute()))
        self.path, self.meta, self.spec = checkpoint.path, checkpoint.meta, checkpoint.spec
        # A TemporaryDirectory is deleted when nothing refers to it any more, so it has to live as long as the model.
        self._keep = keep

    def __repr__(self) -> str:
        spec = self.spec
        names = ", ".join((*spec.variables, *spec.surface))
        leads = ", ".join(map(str, spec.leads_out))
        return f"<ensemble_ml.Model {self.path}: {names} at {leads} h, grid {spec.grid.describe()}>"

    def predict(
        self, ensemble: Any, *, members: int | list[int] | None = None, device: str | None = None, **settings: Any
    ) -> xr.Dataset:
        """Predict the distribution of the truth, and the spread of the full ensemble, from some of its members.

        The result is lazy: nothing is computed before Dask asks for it. Dask computes it in batches of init times, one
        date each on a large grid and several on a small one. So `to_zarr` can write the forecasts of any number of
        dates. Each call of `compute` predicts its batches anew, so ask for all that you need in one call, or write the
        result to a file. The values are bit for bit those of `ensemble-ml predict` on one rank, on the same device with
        as many threads.

        Args:
            ensemble: a Dataset of `open`, any Dataset of an ensemble, or a path; on the model's grid.
            members: how many members to use, from the first on, or a list of member numbers; None takes all.
            device: the device to compute on, "cpu" or "cuda"; None takes a GPU if there is one.
            **settings: other settings of `ensemble-ml predict` by their names: `dates`, `quantiles`, `thresholds`,
                `members_out`, `region`, `points`, `regrid`, `static`, `precision`, `threads` ...

        Returns:
            A Dataset equal to the command's files opened as one, with the dimensions forecast_reference_time,
            forecast_period, level, latitude, longitude (`point` in place of the last two with `points`). For each
            variable it holds `t_mean` and `t_stddev` (moments), `t_location` and `t_scale` (parameters of the
            distribution), `t_quantile`, and `t_ensemble_spread`, as far as the model predicts them, float32 in SI
            units; on request also `t_prob_above` and `t_member`.

        Raises:
            UserError: the ensemble lacks an input of the model, or is on another grid; a setting is not known, or its
                value is not allowed. When the result is computed: an input cannot be read, or a value is NaN or
                infinite.

        Example:
            >>> import ensemble_ml as eml
            >>> model = eml.load("runs/first")
            >>> forecast = model.predict(eml.open("archive/ensemble"), members=2)
            >>> forecast["t2m_mean"].dims
            ('forecast_reference_time', 'forecast_period', 'latitude', 'longitude')
            >>> bool((forecast["t2m_ensemble_spread"] > 0).all())
            True
        """
        paths, opened = resolve(ensemble)
        numbers = members if members is None else np.asarray(members).tolist()
        ours = {"checkpoint": str(self.path), "input": whole(paths), "members_in": numbers}
        config = settings_of(PredictConfig, {**opened, **settings}, ours, _REFUSED)
        config = replace(config, static=config.static and whole(config.static))
        # Workers of Dask open the input for themselves.
        source = Reopened(open_input, config, notices_of(ensemble))
        job, starts = plan_job(config, source, self.spec, self.meta)  # type: ignore[arg-type]
        return forecast_dataset(job, starts, device)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model and a model card to a folder, as `ensemble-ml export` does. `load` reads such a folder.

        Args:
            folder: the folder to make.
            overwrite: whether an existing export may be replaced.

        Returns:
            The path of the folder.

        Raises:
            UserError: the folder exists and `overwrite` is off, or it holds other files than an export; or the model's
                checkpoint is gone or damaged.
        """
        config = ExportConfig(checkpoint=str(self.path), output=str(path_of("folder", folder)), overwrite=overwrite)
        return export(config)


def load(path: str | os.PathLike[str]) -> Model:
    """Load a trained model.

    Args:
        path: the folder of a run (its best checkpoint is loaded), the folder of a checkpoint such as
            runs/first/checkpoints/best, or an exported model.

    Returns:
        The model.

    Raises:
        UserError: there is no checkpoint, or it is damaged or has another format.

    Example:
        >>> import ensemble_ml as eml
        >>> model = eml.load("runs/first/checkpoints/best")
        >>> model.spec.leads_out
        (24, 48)
    """
    return Model(path)


def trained(run: Path, *, keep: Any = None) -> Model:
    """Load the model of a run that has ended: its best checkpoint, or the last one if none could be scored."""
    best = run / "checkpoints" / "best"
    return Model(best if best.exists() else run / "checkpoints" / "last", keep=keep)
