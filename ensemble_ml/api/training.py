"""Train a model in Python: `ensemble-ml train`, with its settings and its defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble_ml.api.inputs import is_store_path, path_of
from ensemble_ml.api.opening import resolve
from ensemble_ml.api.preparing import split_dates
from ensemble_ml.compose import build_config, compose_config, groups_of, in_quotes, set_values
from ensemble_ml.config import TrainConfig, as_list, shown_input
from ensemble_ml.errors import UserError
from ensemble_ml.store import open_store

if TYPE_CHECKING:
    from ensemble_ml.api.model import Model

_ARGUMENTS = {  # settings that `train` makes of its arguments
    "output": "run",
    "data.store": "store",
    "data.train": "train",
    "data.validation": "validation",
}


def train(
    store: Any,
    *,
    run: str | os.PathLike[str],
    train: str | list[str] | None = None,
    validation: str | list[str] | None = None,
    **settings: Any,
) -> Model:
    """Train a model on a tensor store: by default the statistical fits, the point network, then the U-Net.

    The result is bit for bit that of `ensemble-ml train`. It logs its progress, and `log.jsonl` in the folder of the
    run keeps losses and validations. An interrupted training continues with `resume=True`.

    Args:
        store: a tensor store as `prepare` returns it: its path, or the Dataset that `open` gives for it.
        run: the folder to make for the run, e.g. "runs/first".
        train: init times to train on: a year, an ISO date or a range, or a list of these; None takes those of the
            experiment if it states any, else all dates that are not for validation.
        validation: init times that choose the best checkpoint. If the experiment states init times to train on, None
            takes its init times for validation, which may be none. Otherwise None takes all that `train` leaves, or the
            last fifth if that is None as well.
        **settings: other settings of `ensemble-ml train` by their names: `steps`, `batch_size`, `max_minutes`, `resume`
            ... The name of a file in `conf/` may be given for a group: `experiment="quickstart"`, `model="small"`,
            `optim="adamw"`. Names with a dot go in braces: `**{"model.hidden": 8, "data.levels": [500]}`.

    Returns:
        The model at its best checkpoint, or at the last one if validation dates cannot be scored.

    Raises:
        UserError: the input is no tensor store; the run exists and `resume` is off; a setting is not known, or its
            value is not allowed; there are too few init times to split; memory does not suffice; or a loss, gradient or
            forecast is not finite.
        KeyboardInterrupt: a signal stopped the training (see `ensemble_ml.training.train`).

    Example:
        >>> import ensemble_ml as eml
        >>> networks = {"model.points": 16}
        >>> dates = {"train": ["2001"], "validation": ["2002"]}
        >>> model = eml.train("store.zarr", run="runs/tiny", **dates, steps=1, threads=1, model="small", **networks)
        >>> model.path.parent.name
        'checkpoints'
    """
    # torch takes seconds to import, so wrong settings are reported before that.
    paths, _ = resolve(store)
    if not is_store_path(paths):
        raise UserError(
            f"{shown_input(paths)}: is no tensor store, and training reads no other; give what"
            ' eml.prepare(ensemble, truth, "store.zarr") returns'
        )
    config = train_config(os.fspath(paths), path_of("run", run), train, validation, settings)
    from ensemble_ml.api.model import trained
    from ensemble_ml.training import train as run_training

    return trained(run_training(config))


def train_config(
    store: str,
    run: Path,
    train: str | list[str] | None,
    validation: str | list[str] | None,
    settings: Mapping[str, Any],
) -> TrainConfig:
    """Compose the settings of a training from the arguments of `train`, as the command line does.

    The store is opened only if init times have to be split.

    Raises:
        UserError: there is no such setting or file of `conf/`, a value is not allowed, or there are too few init times
            to split.
    """
    groups = groups_of("train")
    files = {name: value for name, value in settings.items() if name in groups}
    values = {name: value for name, value in settings.items() if name not in groups}
    if reserved := sorted(values.keys() & _ARGUMENTS.keys()):
        raise UserError(f"{reserved[0]}: is given by the argument {_ARGUMENTS[reserved[0]]}= of eml.train")
    words = [f"{name}={'null' if value is None else in_quotes(str(value))}" for name, value in files.items()]
    composed = compose_config("train", words)
    set_values("train", composed, values)
    # If an experiment states init times, its own split holds, as on the command line.
    if validation is None and composed.data.validation:
        validation = list(composed.data.validation)
    if not composed.data.train and (train is None or validation is None):
        train, validation = split_dates(open_store(store), train, validation)
    dates = {"data.train": train, "data.validation": validation}
    ours: dict[str, Any] = {"run": run.name, "output": str(run.parent), "data.store": store}
    ours |= {name: as_list(value) for name, value in dates.items() if value is not None}
    set_values("train", composed, ours)
    config = build_config("train", composed)
    assert isinstance(config, TrainConfig)
    return config
