"""Score forecasts in Python: the scores of `ensemble-ml evaluate`, with their confidence intervals and their report."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from data_prep.notices import once
from ensemble_ml.api.inputs import check_inputs, open_ground, open_verified, path_of, settings_of
from ensemble_ml.api.opening import notices_of, resolve_pair, settings_of_both
from ensemble_ml.config import EvaluateConfig, as_list, is_dataset, shown_input
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable
from ensemble_ml.verification import Evaluation, score
from ensemble_ml.verification.evaluate import FILES, put
from ensemble_ml.verification.forecasts import RESERVED

_REFUSED = dict.fromkeys(
    ("output", "overwrite"), "belongs to the command line; use Scores.save, or ensemble-ml evaluate"
)
_START = "forecast_reference_time"
_METRICS_OF = ("value", "low", "high")


class Scores:
    """The scores of forecasts, as `verify` returns them.

    Attributes:
        content: the content of scores.json (`ensemble_ml.verification.evaluate` lists its keys).
    """

    def __init__(self, found: Evaluation):
        self.content, self._found = found.content, found

    def __repr__(self) -> str:
        return "\n".join(["<ensemble_ml.Scores>", *self.headline])

    @property
    def headline(self) -> list[str]:
        """Return sentences that say whether the forecasts are better, by how much, and how sure that is."""
        return list(self.content["headline"])

    def to_xarray(self) -> xr.Dataset:
        """Return the scores as a Dataset.

        Returns:
            For each metric a float64 array (entrant, lead_time, field), with its confidence interval as METRIC_low and
            METRIC_high; NaN where a score is not defined. Scores are in the units of the variable; log scores are in
            nats, and Brier scores and spread_skill have no units. An entrant is a forecast, a raw ensemble or a
            baseline. A field is a variable and its level in hPa, as t850, or a surface variable, as t2m.
        """
        rows = self.content["scores"]
        names = [f"{row['variable']}{'' if row['level'] is None else row['level']}" for row in rows]
        axes = {
            "entrant": list(dict.fromkeys(row["entrant"] for row in rows)),
            "lead_time": sorted({row["lead_hours"] for row in rows}),
            "field": list(dict.fromkeys(names)),
        }
        shape = tuple(len(values) for values in axes.values())
        found: dict[str, np.ndarray] = {}
        for row, name in zip(rows, names, strict=True):
            place = tuple(
                values.index(one)
                for values, one in zip(axes.values(), (row["entrant"], row["lead_hours"], name), strict=True)
            )
            for metric, value in row.items():
                # A metric is a dict of a value and its interval. All other entries of a row say what was scored.
                for part in _METRICS_OF if isinstance(value, dict) else ():
                    label = metric if part == "value" else f"{metric}_{part}"
                    made = found.setdefault(label, np.full(shape, np.nan))
                    made[place] = np.nan if value.get(part) is None else value[part]
        hours = np.asarray(axes.pop("lead_time")).astype("timedelta64[h]").astype("timedelta64[ns]")
        dims = ("entrant", "lead_time", "field")
        return xr.Dataset({k: (dims, v) for k, v in found.items()}, {**axes, "lead_time": hours})

    def report(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the report, one HTML file that needs no network.

        Args:
            path: the file to write.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path of the file.

        Raises:
            UserError: the file exists and `overwrite` is off, or it cannot be written.
        """
        return _written(path_of("path", path), self._found.page(), overwrite)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write scores.json and report.html to a folder. They are those of the command, which writes lineage.json too.

        Args:
            folder: the folder to write to; it is made if it does not exist.
            overwrite: whether existing files may be replaced.

        Returns:
            The path of the folder.

        Raises:
            UserError: a file exists and `overwrite` is off, or it cannot be written.
        """
        place = path_of("folder", folder)
        pages = {FILES[0]: self._found.json, FILES[1]: self._found.page}
        for name in pages:
            _check_free(place / name, overwrite)
        # Both are made before one is written, so that no old report stays beside new scores.
        texts = {name: make() for name, make in pages.items()}
        for name, text in texts.items():
            _written(place / name, text, overwrite)
        return place


def _check_free(path: Path, overwrite: bool) -> None:
    """Refuse a folder, and a file that exists, unless it may be replaced."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; choose another name")
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists; set overwrite=True, or choose another name")


def _written(path: Path, text: str, overwrite: bool) -> Path:
    """Write a text to a file, unless one exists that may not be replaced."""
    _check_free(path, overwrite)
    check_writable(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, text, overwrite)
    return path


def verify(
    forecast: Any,
    ensemble: Any,
    truth: Any = None,
    *,
    members: int | None = None,
    baselines: Any = None,
    **settings: Any,
) -> Scores:
    """Score forecasts, the raw ensemble and statistical baselines, with confidence intervals.

    A lazy forecast is computed once, chunk by chunk, into a temporary folder. The scores are bit for bit those of
    `ensemble-ml evaluate`.

    Args:
        forecast: a Dataset of `Model.predict`, a folder of forecasts, or several of either by the names under which
            they are scored: {"ours": forecast, "theirs": "folder"}.
        ensemble: the full ensemble: a Dataset of `open`, any Dataset of an ensemble, or a path.
        truth: the same for the truth; None takes that of the ensemble's tensor store. If there is none, only the spread
            is scored.
        members: how many members, from the first on, make up the raw reduced ensemble that forecasts are compared with;
            None takes as many as the first forecast was made from, or 5 if it does not state the number.
        baselines: statistical forecasts to score as further baselines, given as `forecast` is, e.g.
            {"emos": eml.train(store, model="emos", ...).predict(ensemble)}.
        **settings: other settings of `ensemble-ml evaluate` by their names: `fit`, `regions`, `climate_days`,
            `block_days`, `bootstrap`, `confidence`, `seed`, `regrid` ...

    Returns:
        The scores; `report` writes their page, `to_xarray` gives them as numbers.

    Raises:
        UserError: forecasts and ensemble have no date, field or grid in common; a setting is not known, or its value is
            not allowed; Datasets are given in a list, without names; a name is a path or that of a baseline; or the
            temporary folder has no room for a Dataset.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble = eml.open("archive/ensemble")
        >>> forecast = eml.load("runs/first").predict(ensemble, members=2, dates=["2003"])
        >>> scores = eml.verify(forecast, ensemble, eml.open("archive/truth"), bootstrap=100)
        >>> sorted(scores.to_xarray().dims)
        ['entrant', 'field', 'lead_time']
    """
    (paths, of_ensemble), (of_truth, more) = resolve_pair(ensemble, truth)
    # `score` reads forecasts from files, so Datasets are first written to a temporary folder.
    with tempfile.TemporaryDirectory(prefix="ensemble_ml-") as folder:
        ours = {
            "forecast": _folders(forecast, Path(folder), "forecast"),
            "baselines": None if baselines is None else _folders(baselines, Path(folder), "baseline"),
            "ensemble": paths,
            "truth": of_truth,
            "members_in": int(members) if isinstance(members, np.integer) else members,
            "output": folder,
        }
        opened = settings_of_both(of_ensemble, more)
        opened.pop("static", None)
        config = settings_of(EvaluateConfig, {**opened, **settings}, ours, _REFUSED)
        with once(notices_of(ensemble, truth)):
            both = open_verified(config)
            ground = open_ground(config, both)
        # An open Dataset cannot be written to scores.json.
        config = replace(config, ensemble=_shown(paths), truth=None if of_truth is None else _shown(of_truth))
        found = score(config, both, both.unverified(), ground)
    _name_inputs(found.content, forecast, baselines)
    return Scores(found)


def _name_inputs(content: dict[str, Any], forecast: Any, baselines: Any) -> None:
    """Put what the user gave in the place of paths in the temporary folder, which are gone when scores.json is read."""
    ours, theirs = (
        _shown(list(one.values()) if isinstance(one, Mapping) and not is_dataset(one) else one)
        for one in (forecast, baselines)
    )
    content["settings"] |= {"forecast": ours, "baselines": theirs or None, "output": None}
    for one, given in zip(content["forecasts"], [*ours, *theirs], strict=True):
        one["path"] = given


def _shown(paths: Any) -> list[str]:
    """Return inputs as texts for scores.json."""
    return [shown_input(path) for path in as_list(paths)]


def _folders(forecast: Any, folder: Path, name: str) -> list[str]:
    """Return folders of forecasts. Datasets are written below `folder` by their names, one alone by `name`."""
    if is_dataset(forecast):
        forecast = {name: forecast}
    if not isinstance(forecast, Mapping):
        check_inputs(name, forecast)
        given = as_list(forecast)
        if any(is_dataset(one) for one in given):
            raise UserError(f"{name}: Datasets in a list have no names; give {{NAME: Dataset, ...}}")
        return given
    found = []
    for label, one in forecast.items():
        place = folder / str(label)
        # A label is the name of a folder in the temporary one, and must not lead out of it.
        if place.parent != folder or place.name == ".." or RESERVED.fullmatch(place.name) or not _made(place):
            shown = f"{name}: {str(label)[:60]!r} cannot be the name of a forecast"
            raise UserError(f"{shown}; give a word that is no path, no baseline and no other forecast's name")
        if is_dataset(one):
            found.append(_saved(one, place))
        elif not isinstance(one, str | os.PathLike):
            raise UserError(f"{name}: {label} is {type(one).__name__}; give a Dataset of a forecast, or a folder")
        else:
            found.append(_linked(Path(one).absolute(), place))
    return found


def _made(folder: Path) -> bool:
    """Make a folder. Return False if there is one, or if no folder can have its name."""
    try:
        folder.mkdir()
    except (FileExistsError, ValueError):  # a NUL in a name is a ValueError
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def _linked(there: Path, folder: Path) -> str:
    """Fill a folder with links to the forecasts of another folder, which must hold some.

    `evaluate` names the scores of forecasts by their folder, so a folder with the wanted name has to exist.
    """
    files = sorted(there.glob("*.nc")) if there.is_dir() else [there]
    # Without this check, the error of `evaluate` would name the folder of links.
    if not any(path.is_file() for path in files):
        raise UserError(f"{there}: holds no NetCDF file; make forecasts with ensemble-ml predict")
    for path in files:
        (folder / path.name).symlink_to(path)
    return str(folder)


def _saved(forecast: xr.Dataset, folder: Path) -> str:
    """Write one file for each init time, as `evaluate` reads them.

    Init times are computed chunk by chunk, because those of one chunk are predicted together.
    """
    if _START not in forecast.dims:
        held = ", ".join(map(str, forecast.dims))
        given = "give what predict returns, or a folder"
        raise UserError(f"{folder.name}: has no dimension {_START} (it has {held}); {given}")
    times = forecast.get_index(_START)
    if isinstance(times, xr.CFTimeIndex):
        raise UserError(f"{folder.name}: {_START} holds cftime objects; open the file with use_cftime=False")
    if times.has_duplicates:
        twice = times[times.duplicated()][0]
        raise UserError(f"{folder.name}: {_START} {twice} stands twice; give each init time once")
    # `xr.open_zarr` gives valid times in one chunk and fields in several. Such a Dataset refuses to state chunk sizes.
    forecast = forecast.unify_chunks()
    first = 0
    for size in forecast.chunksizes.get(_START, (1,) * forecast.sizes[_START]):
        _write_dates(forecast.isel({_START: slice(first, first + size)}).load(), folder)
        first += size
    return str(folder)


def _write_dates(some: xr.Dataset, folder: Path) -> None:
    """Write one file for each init time of a loaded forecast."""
    for at, time in enumerate(some[_START].values):
        # The names of `predict` end with the minute, and two init times may lie within one.
        path = folder / f"forecast_{time}.nc"
        try:
            some.isel({_START: [at]}).to_netcdf(path, engine="netcdf4")
        except (OSError, RuntimeError) as error:  # netCDF4 raises RuntimeError if the disk is full
            remedy = "set the environment variable TMPDIR to a folder with room for the forecast, or give its folder"
            raise UserError(f"{folder.name}: {path} cannot be written ({error}); {remedy}") from error
