"""Make tensor stores in Python (`prepare`), and fit the statistical stages of a model to one (`calibrate`)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep import prepare as prepare_store
from data_prep.notices import once
from data_prep.truth import TruthRefused
from ensemble_ml.api.inputs import is_store_path, path_of, settings_of
from ensemble_ml.api.opening import notices_of, resolve, resolve_pair, settings_of_both
from ensemble_ml.config import DataConfig, ModelConfig, PrepareConfig, TrackingConfig, TrainConfig, as_list
from ensemble_ml.errors import UserError
from ensemble_ml.store import TensorStore, open_store, select_dates

if TYPE_CHECKING:
    from ensemble_ml.api.model import Model

_SIZES = (1, 2, 3, 5, 8, 10)  # sizes of reduced ensembles to fit corrections to; only those below the full size count
_VALIDATION = 5  # the last fifth of the init times is for validation
_FEWEST = 4  # least number of init times for validation; calibration factors need as many


def prepare(ensemble: Any, truth: Any, output: str | os.PathLike[str], **settings: Any) -> Path:
    """Convert an ensemble and its truth to a tensor store, which training reads.

    The store is that of `ensemble-ml prepare`, bit for bit. Packed integers of GRIB are kept for a path and for an
    unchanged Dataset of `open`. Any other Dataset is computed date by date with the active Dask scheduler, and packed
    into 16 bits. After an interruption, the same call continues where it stopped.

    Args:
        ensemble: a Dataset of `open`, any Dataset of an ensemble (a list of them if variables lie in several), or a
            path.
        truth: the same for the truth, at its own valid times; None if there is none.
        output: the folder to make, ending in .zarr.
        **settings: other settings of `ensemble-ml prepare` by their names: `static`, `variables`, `levels` (hPa),
            `leads` (h), `dates`, `region`, `coarsen`, `regrid`, `packing`, `gaps`, `workers`, `overwrite`, `names`,
            `units`, `intervals`, `truth_intervals` ...

    Returns:
        The path of the store.

    Raises:
        UserError: fields are missing, or grids or times do not fit each other; the output exists; a setting is not
            known.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble, truth = eml.open("archive/ensemble"), eml.open("archive/truth")
        >>> path = eml.prepare(ensemble, truth, "small.zarr", variables=["t", "t2m"], dates=["2003"])
        >>> eml.open(path).sizes["init_time"]
        2
    """
    (paths, of_ensemble), (of_truth, of_its_own) = resolve_pair(ensemble, truth)
    opened = settings_of_both(of_ensemble, of_its_own)
    ours = {"input": paths, "truth": of_truth, "output": str(path_of("output", output))}
    config = settings_of(PrepareConfig, {**opened, **settings}, ours, {})
    try:
        with once(notices_of(ensemble, truth)):
            return prepare_store(config)
    except TruthRefused as error:
        raise error.in_python() from error


def calibrate(
    ensemble: Any,
    truth: Any = None,
    *,
    train: str | list[str] | None = None,
    validation: str | list[str] | None = None,
    networks: bool = False,
    output: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Model:
    """Fit only the statistical stages of a model: bias, inflation, a linear correction, and calibration factors.

    This is `ensemble-ml train steps=0`. Training of the whole model begins with the same fits. They need no GPU.

    Args:
        ensemble: a Dataset of `open`, any Dataset of an ensemble, or a path. An archive is first prepared into a
            temporary store; a tensor store is read as it is.
        truth: the same for the truth; None takes that of a tensor store.
        train: init times to fit on: a year, an ISO date or a range, or a list of these; None takes all dates that are
            not for validation.
        validation: init times that choose penalties and calibration factors; None takes all that `train` leaves, or
            the last fifth if `train` is None too.
        networks: whether to fit the point network, too, which takes minutes.
        output: a folder to keep the run in, e.g. "runs/calibrated"; None keeps it only as long as the model exists.
        **settings: for an archive, other settings of `ensemble-ml prepare` by their names: `static`, `variables`,
            `levels`, `leads`, `gaps` ...

    Returns:
        The model; `Model.save` keeps it.

    Raises:
        UserError: ensemble and truth do not fit each other; there are too few init times; a setting is not known, or a
            truth or setting is given with a tensor store.

    Example:
        >>> import ensemble_ml as eml
        >>> ensemble, truth = eml.open("archive/ensemble"), eml.open("archive/truth")
        >>> model = eml.calibrate(ensemble, truth, train=["2001"], validation=["2002"], variables=["t2m"])
        >>> model.meta["step"]
        0
    """
    # torch takes seconds to import, and `prepare` does not need it.
    from ensemble_ml.api.model import trained
    from ensemble_ml.training import train as run_training

    folder = tempfile.TemporaryDirectory(prefix="ensemble_ml-") if output is None else None
    root = path_of("output", output if folder is None else folder.name).absolute()
    TrainConfig(run=root.name)  # a name that no run may have is refused before a store is prepared
    # The store is needed only during the fits.
    with tempfile.TemporaryDirectory(prefix="ensemble_ml-") as scratch:
        store = _store_of(ensemble, truth, Path(scratch) / "store.zarr", settings)
        config = _fits(store, root, train, validation, networks)
        run = run_training(config)
    return trained(run, keep=folder)


def _store_of(ensemble: Any, truth: Any, path: Path, settings: dict[str, Any]) -> TensorStore:
    """Open the tensor store `ensemble`, or prepare one at `path`."""
    paths, _ = resolve(ensemble)
    if is_store_path(paths):
        # A store already has its truth and settings, so any given here would be ignored without a word.
        if truth is not None or settings:
            given = "truth" if truth is not None else min(settings)
            raise UserError(f"{given}: {paths} is a tensor store, made with its own truth and settings; leave it out")
        return open_store(paths)
    return open_store(prepare(ensemble, truth, path, **settings))


def _fits(
    store: TensorStore, root: Path, train: str | list[str] | None, validation: str | list[str] | None, networks: bool
) -> TrainConfig:
    """Return the settings of a run that ends after its fits."""
    if train is None or validation is None:
        train, validation = split_dates(store, train, validation)
    members = len(store.layout.realization)
    data = DataConfig(
        store=store.path,
        train=as_list(train),
        validation=as_list(validation),
        members=[size for size in _SIZES if size < members] or [1],
        validation_members=min(5, max(1, members - 1)),
    )
    # The U-Net is as small as it can be. Its last layer is zero until it is trained, so it does not change the result.
    model = ModelConfig(hidden=4, max_hidden=4, depth=0, points=ModelConfig().points if networks else 0)
    tracking = TrackingConfig(tensorboard=False)
    return TrainConfig(run=root.name, output=str(root.parent), steps=0, data=data, model=model, tracking=tracking)


def split_dates(
    store: TensorStore, train: str | list[str] | None, validation: str | list[str] | None
) -> tuple[list[str], list[str]]:
    """Choose the init times for the fits and those for validation.

    If one of the two is given, the other gets all remaining dates. If neither is given, the last fifth is for
    validation.

    Raises:
        UserError: given dates are wrong or match no init time, or a fifth of all is fewer than four.
    """
    times = store.layout.init_time
    every = np.arange(len(times))
    if validation is not None:
        left = np.setdiff1d(every, select_dates(times, as_list(validation), "validation"))
        return _iso(times[left]), as_list(validation)
    if train is not None:
        left = np.setdiff1d(every, select_dates(times, as_list(train), "train"))
        return as_list(train), _iso(times[left])
    count = len(times) // _VALIDATION
    if count < _FEWEST:
        raise UserError(
            f"{store.path}: {len(times)} init times, of which a {_VALIDATION}th is for validation, but {_FEWEST} are"
            " needed there; give train= and validation=, or more init times"
        )
    return _iso(times[:-count]), _iso(times[-count:])


def _iso(times: np.ndarray) -> list[str]:
    """Return dates as ISO texts, to the minute."""
    return [str(time.astype("datetime64[m]")) for time in times]
