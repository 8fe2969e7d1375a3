"""Open the inputs of a task: archives and stores given by paths, or Datasets that are already open.

The command line and the functions of `ensemble_ml.api` both open their inputs here, so that they read the same data.
Some modules are imported inside functions, because the import of torch, which inference needs, takes seconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep import Overrides, Pair, open_orographies, open_pair, user_index
from data_prep.file_index import FileIndex
from data_prep.notices import once
from ensemble_ml.config import EvaluateConfig, PredictConfig, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.store import is_store

if TYPE_CHECKING:
    from ensemble_ml.verification import Heights

C = TypeVar("C")
E = TypeVar("E", bound=Enum)


def index_in_place(*, look: bool = True) -> FileIndex:
    """Return the index of archives that are read in place.

    Args:
        look: whether to search for fields that are present but all NaN. xarray writes absent fields in that way, and
            the search makes them count as absent.
    """
    return FileIndex(user_index().folder, look=look)


def holds_dataset(paths: Any) -> bool:
    """Return whether one or more of the inputs is an open Dataset.

    The search for fields that are all NaN would compute every field of a lazy Dataset at once. Opening an archive and
    prediction therefore leave it out for Datasets.
    """
    return any(is_dataset(path) for path in as_list(paths))


def check_inputs(key: str, given: Any) -> None:
    """Raise a UserError for inputs that are neither paths nor Datasets, and for empty paths; None is not looked at."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if not (one is None or is_dataset(one) or isinstance(one, str | os.PathLike)):
            made = ", which to_dataset() makes of it" if hasattr(one, "to_dataset") else ""
            raise UserError(f"{key} is {type(one).__name__}; give a path, or a Dataset{made}")
        if isinstance(one, str) and not one:  # as a path it would be the current folder
            raise UserError(f"{key} is an empty text; give a path, or a Dataset")


def path_of(key: str, value: Any) -> Path:
    """Return a path that a user gave, or raise a UserError if it is none."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{key} is {type(value).__name__}; give a path")
    return Path(value)


def open_input(config: PredictConfig) -> Pair:
    """Open `config.input` for the checkpoint of `config`, with sums over the same intervals as in its training.

    Raises:
        UserError: the checkpoint or the input cannot be read.
    """
    from ensemble_ml.inference.inputs import sum_cuts
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
        overrides=Overrides.of(config),
    )


def open_verified(config: EvaluateConfig) -> Pair:
    """Open the ensemble and the truth of `config`, brought to the grid of the first forecast if `regrid` is on.

    Raises:
        UserError: an input cannot be read, or the inputs do not fit each other.
    """
    from ensemble_ml.verification import open_forecasts

    # Ensemble and truth are brought to the grid of the forecasts, so one of these has to be opened first.
    grid = open_forecasts(as_list(config.forecast))[0].grid if config.regrid else None
    return open_pair(
        config.ensemble,
        config.truth,
        None,
        control=config.control,
        grid=grid,
        index=index_in_place(),
        overrides=Overrides.of(config),
    )


def open_ground(config: EvaluateConfig, both: Pair) -> Heights | None:
    """Open the orographies of forecast model and truth that `config` names; None if it names none.

    They have to fit the grid of `both`. If only that of the forecast model is named, the truth's is the one in `both`.

    Raises:
        UserError: a file cannot be read, holds no orography, or one of another grid; or the truth's is missing.
    """
    from ensemble_ml.verification import Heights

    given = config.orography, config.truth_orography
    found = open_orographies(*given, both, regrid=config.regrid, index=index_in_place())
    return None if found is None else Heights(*found)


def is_store_path(paths: Any) -> bool:
    """Return whether `paths` is the path of one tensor store."""
    return isinstance(paths, str | os.PathLike) and is_store(Path(paths))


class Reopened:
    """A source that each process opens for itself.

    Workers of Dask receive only the opener and its argument, because an open file cannot be sent to another process.

    Args:
        opener: a function that opens the source, at the top level of a module; pickle sends only its name.
        config: the argument of the opener.
        logged: texts of notices about these data that have been logged before, and are not logged again.
    """

    def __init__(self, opener: Callable[[Any], Any], config: Any, logged: Iterable[str] = ()):
        self._opener, self._config, self._source = opener, config, None
        self._logged = set(logged)
        self._state = ""

    @property
    def source(self) -> Any:
        """Return the source, which is opened at the first use.

        Raises:
            UserError: it cannot be opened, or has changed since another process opened it.
        """
        if self._source is None:
            with once(self._logged):
                source = self._opener(self._config)
            # Init times are read by their positions, and an archive may have grown since they were counted. Dask also
            # names arrays by this digest, and takes arrays of one name for the same.
            state = _digest(source, stated=not any(map(holds_dataset, vars(self._config).values())))
            if self._state not in ("", state):
                raise UserError(f"{source.path}: has changed since it was opened; open it again")
            self._source, self._state = source, state
        return self._source

    def logged(self) -> set[str]:
        """Return the texts of the notices that have been logged about the source."""
        return set(self._logged)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods before the copy has its attributes. Without this check, such a look-up
        # would read `source`, which needs the missing `_source` and so would call this method again, without end.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to open the source, without logging the same notices again."""
        return self.__dict__ | {"_source": None}

    def __deepcopy__(self, _: Any) -> Reopened:
        return self


def _digest(source: Any, *, stated: bool) -> str:
    """Return a digest of the coordinates of a source and, if its fingerprint is `stated`, of its files.

    An open Dataset may have another fingerprint in another process.
    """
    lay = source.layout
    axes = (lay.init_time, lay.grid.latitude, lay.grid.longitude)
    named = (lay.realization, lay.lead_hours, lay.variables, lay.levels, lay.surface)
    files = source.fingerprint() if stated else ""
    return hashlib.sha256(b"".join(axis.tobytes() for axis in axes) + repr((named, files)).encode()).hexdigest()


def settings_of(cls: type[C], given: Mapping[str, Any], ours: Mapping[str, Any], refused: Mapping[str, str]) -> C:
    """Make the settings of a task from keyword arguments that a user gave.

    Args:
        cls: the schema of the task.
        given: the user's settings by their names. A choice may be given as the text of its value, and a list of texts
            of length one as that text (`dates="2003"`).
        ours: settings that the caller derives from its other arguments. The user may not give these.
        refused: settings that have no meaning here, each with a text that states what to do instead.

    Returns:
        An instance of `cls`; settings that nobody gives keep their defaults.

    Raises:
        UserError: a setting is unknown, refused or one of `ours`, or its value is not allowed.
    """
    known = {part.name: part.default for part in fields(cls)}  # type: ignore[arg-type]
    types, made, schema = get_type_hints(cls), dict(ours), OmegaConf.structured(cls)
    for name, value in given.items():
        if name in refused:
            raise UserError(f"{name}={value}: {refused[name]}")
        if name not in known or name in ours:
            others = ", ".join(sorted(set(known) - set(ours) - set(refused)))
            raise UserError(f"{name}: no such setting here; there are {others}")
        made[name] = _chosen(name, value, known[name], types[name], schema)
    return cls(**made)


def _chosen(name: str, value: Any, default: Any, kind: Any, schema: DictConfig) -> Any:
    """Convert a value to the type of its setting, as Hydra does; a choice may be given as its text."""
    if isinstance(default, Enum) and not isinstance(value, Enum):
        return choice_of(type(default), name, value)
    if kind is Any:
        return list(value) if isinstance(value, tuple) else value
    if isinstance(value, str) and list[str] in (kind, *get_args(kind)):
        return [value]
    try:
        schema[name] = _plain(value)
    except OmegaConfBaseException as error:
        raise UserError(f"{name}={value}: {str(error).splitlines()[0]}") from None
    found = schema[name]
    return OmegaConf.to_object(found) if OmegaConf.is_config(found) else found


def choice_of(choices: type[E], name: str, value: Any) -> E:
    """Return the choice with this value, which may be the choice itself, or raise a UserError."""
    try:
        return choices(value)
    except ValueError:
        raise UserError(f"{name}={value}: {', '.join(one.value for one in choices)} are allowed") from None


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, its dates to texts, and iterables but texts and mappings to lists."""
    if getattr(value, "ndim", None) == 0:
        value = np.asarray(value)[()]  # a DataArray gives dates as nanoseconds
        if not isinstance(value, np.datetime64):
            return value.item()
        coarse = np.datetime_data(value.dtype)[0] in ("Y", "M", "D", "h", "m")
        return str(value if coarse else value.astype("datetime64[m]"))
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return [_plain(one) for one in value]
    return value
