"""How inputs are opened, for the command line and for Python alike: archives and stores by paths, or open Datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from data_prep import Overrides, Pair, open_orographies, open_pair, user_index
from data_prep.file_index import FileIndex
from ensemble_ml.config import EvaluateConfig, PredictConfig, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import is_store

if TYPE_CHECKING:
    from ensemble_ml.verification import Heights

C = TypeVar("C")


def index_in_place(*, look: bool = True) -> FileIndex:
    """Return the index of archives that are read in place.

    Args:
        look: whether fields that are there and all NaN, as xarray writes absent ones, are looked for, so that they
            count as absent here, too.
    """
    return FileIndex(user_index().folder, look=look)


def holds_dataset(paths: Any) -> bool:
    """Return whether any of some inputs is an open Dataset. To look for fields of its that are all NaN would compute
    all of them, before anything is asked for."""
    return any(is_dataset(path) for path in as_list(paths))


def open_input(config: PredictConfig) -> Pair:
    """Open what `config.input` names, as the checkpoint of `config` needs it.

    Raises:
        UserError: the checkpoint or the input cannot be read.
    """
    from ensemble_ml.inference.starts import sum_cuts
    from ensemble_ml.training.checkpoint import load_meta, load_spec

    spec = load_spec(config.checkpoint)
    cuts = sum_cuts(spec, load_meta(config.checkpoint).get("lead_bounds"))
    return open_pair(
        config.input,
        None,
        config.static,
        control=config.control,
        grid=spec.grid if config.regrid else None,
        index=index_in_place(look=not holds_dataset(config.input)),
        cuts=cuts,
        overrides=Overrides(config.names, config.units),
    )


def open_verified(config: EvaluateConfig) -> Pair:
    """Open the ensemble and the truth of `config`.

    Raises:
        UserError: one of them cannot be read, or they do not fit each other.
    """
    from ensemble_ml.verification import open_forecasts

    grid = open_forecasts(as_list(config.forecast))[0].grid if config.regrid else None
    return open_pair(
        config.ensemble,
        config.truth,
        None,
        control=config.control,
        grid=grid,
        index=index_in_place(),
        overrides=Overrides(config.names, config.units),
    )


def open_ground(config: EvaluateConfig, both: Pair) -> Heights | None:
    """Open the orographies of forecast model and truth that `config` names; return None where it names none.

    Raises:
        UserError: a file holds no orography, or one of another grid.
    """
    from ensemble_ml.verification import Heights

    given = config.orography, config.truth_orography
    found = open_orographies(*given, both, regrid=config.regrid, index=index_in_place())
    return None if found is None else Heights(*found)


def is_store_path(paths: Any) -> bool:
    """Return whether `paths` is that of one tensor store."""
    return isinstance(paths, str | os.PathLike) and is_store(Path(paths))


class Reopened:
    """A source that another process opens for itself: all that is sent there is how.

    Args:
        opener: a function of a module, which opens the source.
        config: what it is called with.
    """

    def __init__(self, opener: Callable[[Any], Any], config: Any):
        self._opener, self._config, self._source = opener, config, None

    @property
    def source(self) -> Any:
        """The source itself, opened at the first use."""
        if self._source is None:
            self._source = self._opener(self._config)
        return self._source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # else copies, which have nothing yet, would look for ever
            raise AttributeError(name)
        return getattr(self.source, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        return {"_opener": self._opener, "_config": self._config, "_source": None}

    def __deepcopy__(self, _: Any) -> Reopened:
        return self


def settings_of(cls: type[C], given: Mapping[str, Any], ours: Mapping[str, Any], refused: Mapping[str, str]) -> C:
    """Return the settings of a task, some of which a user gives by their names.

    Args:
        cls: the schema of the task.
        given: what the user says; choices may be given by their names.
        ours: settings that stand for other arguments.
        refused: those that have no meaning here, and what to do in their place.

    Raises:
        UserError: there is no such setting, or a value is not allowed.
    """
    known = {part.name: part.default for part in fields(cls)}  # type: ignore[arg-type]
    made = dict(ours)
    for name, value in given.items():
        if name in refused:
            raise UserError(f"{name}={value}: {refused[name]}")
        if name not in known or name in ours:
            others = ", ".join(sorted(set(known) - set(ours) - set(refused)))
            raise UserError(f"{name}: no such setting here; there are {others}")
        made[name] = _chosen(name, value, known[name])
    return cls(**made)


def _chosen(name: str, value: Any, default: Any) -> Any:
    """Return the choice that a word names, and a list for a tuple."""
    if isinstance(default, Enum) and not isinstance(value, Enum):
        try:
            return type(default)(value)
        except ValueError:
            raise UserError(f"{name}={value}: {', '.join(one.value for one in type(default))} are allowed") from None
    return list(value) if isinstance(value, tuple) else value
