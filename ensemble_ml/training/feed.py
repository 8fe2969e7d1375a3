"""The data loading of a run: its schedule of batches, and the ranks that share what is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ensemble_ml.config import LoaderName, LoadingConfig, TrainConfig
from ensemble_ml.distributed import Session, Topology
from ensemble_ml.distributed.communicator import gather_bytes
from ensemble_ml.distributed.partition import shard_of
from ensemble_ml.loading import Reader
from ensemble_ml.loading.batches import Device, Draw, Schedule, fixed_draws
from ensemble_ml.loading.explain import explain
from ensemble_ml.loading.run_loader import Lane, PlannedLoader, RunLoader, TorchLoader, make_plan
from ensemble_ml.training.assemble import Run, batches_of, whole_dates

ONE = Topology()


def open_loader(run: Run, folder: Path, *, resumed: bool) -> RunLoader:
    """Open the loader that gives a run its batches, from its current step to its end. All ranks must call this.

    A run that is not `resumed` begins with a validation.

    Raises:
        UserError: settings do not fit the store.
    """
    config, session, parts = run.config.loading, run.session, run.session.topology.data
    draws = _validation_draws(run.config, run.reader, run.validation_dates, parts)
    batches = run.batches(run.state.step, run.state.steps)
    schedule = Schedule(batches, draws, run.config.validate_every, not resumed, parts)
    # Torch's own DataLoader plans nothing and shares nothing between ranks.
    if config.name is LoaderName.torch:
        return TorchLoader(config, schedule, run.reader, session.topology.place.data)
    device = Device(run.device, run.dtype)
    exchange = run.state.exchange
    return PlannedLoader(
        config, schedule, run.reader, device, lane_of(session), _timeline(run.config, folder, session.topology.rank),
        meets=exchange.meets, slack=exchange.slack,
    )  # fmt: skip


def _validation_draws(config: TrainConfig, reader: Reader, dates: Iterable[int], parts: int) -> list[list[Draw]]:
    """Return the samples of a validation, grouped into batches of the size `validation_size(config, parts)`."""
    members = np.arange(min(config.data.validation_members, reader.most))
    return fixed_draws(reader, dates, members, validation_size(config, parts))


def validation_size(config: TrainConfig, parts: int) -> int:
    """Return the number of dates of a validation batch, if a training batch is divided into `parts`.

    It is the number of samples of a training batch that a rank holds, because memory was planned for these.
    """
    return -(-config.batch_size // parts)


def lane_of(session: Session) -> Lane:
    """Describe the group of ranks that read the same rows of the grid as this one, with a function to gather bytes."""
    topology, place = session.topology, session.topology.place
    # A rank that shares its rows with nobody has nobody to fetch samples from.
    if topology.data * topology.lon == 1:
        return Lane(on_host=session.world.local_size)

    def gather(data: bytes) -> list[bytes]:
        """Gather bytes from the ranks of the group, in the order of its parts and columns."""
        # All ranks of the model take part, because they have one communicator; each keeps what its own group sent.
        found = gather_bytes(data, session.mesh.model, session.device)
        return [
            found[(part * topology.lat + place.lat) * topology.lon + column]
            for part in range(topology.data)
            for column in range(topology.lon)
        ]

    local = session.world.local_size
    return Lane(place.data, place.lon, topology.data, topology.lon, gather, local, topology.rank)


def checked_dates(config: TrainConfig, whole: Reader) -> tuple[np.ndarray, np.ndarray]:
    """Check the settings, and return the indices of the training and of the validation dates.

    Raises:
        UserError: settings do not fit the store.
    """
    train, validation = whole_dates(config, whole)
    batches_of(config, whole, train, 0, 1)  # raises a UserError if no date has the numbers of members asked for
    return train, validation


def describe(
    config: TrainConfig, whole: Reader, dates: tuple[np.ndarray, np.ndarray], topology: Topology = ONE,
    step: float | None = None, on_host: int = 0,
) -> str:  # fmt: skip
    """Describe what the loading of a run will read, from where, and in what time (see `ensemble_ml.loading.explain`).

    Args:
        config: settings of the run.
        whole: reads the whole grid.
        dates: the result of `checked_dates`.
        topology: the ranks that are planned for, as seen by a rank with the first rows of the grid.
        step: seconds that a training step computes, if known.
        on_host: ranks that share the memory of a host; all of them if 0.

    Raises:
        UserError: settings do not fit the store.
    """
    if config.loading.name is LoaderName.torch:
        return "Loading by torch's DataLoader: nothing is planned, and each batch is read when it is needed"
    train, validation = dates
    # The planned ranks do not run here, so the rows come from the topology, not from a session.
    reader = whole
    if topology.spatial > 1:
        shard = shard_of(whole.spec, topology)
        reader = whole.within((shard.own_rows, shard.own_columns))
    schedule = Schedule(
        batches_of(config, reader, train, 0, config.steps),
        _validation_draws(config, reader, validation, topology.data),
        config.validate_every,
        True,
        topology.data,
    )
    lane = Lane(parts=topology.data, columns=topology.lon, on_host=on_host or topology.size)
    plan, units, schedule, ahead = make_plan(config.loading, schedule, reader, lane)
    return explain(config.loading, plan, units, schedule, ahead=ahead, step=step, lanes=topology.lat)


def _timeline(config: TrainConfig, folder: Path, rank: int) -> Path | None:
    """Return the file for the picture of a rank's loading; None if `loading.timeline` is not set."""
    wanted = config.loading.timeline
    if wanted is None:
        return None
    path = folder / "loading.png" if wanted == "run" else Path(wanted)
    return path.with_stem(f"{path.stem}_rank{rank}") if rank else path


def beside(step: float, read: float, loading: LoadingConfig) -> float:
    """Return the seconds from one step to the next.

    Args:
        step: seconds that a rank computes in a step.
        read: seconds that one thread or process needs to read a batch.
        loading: settings of loading, with the number of readers.

    Returns:
        Without readers, the sum of both. Otherwise the longer of `step` and `read` / readers, because they read while
        the rank computes.
    """
    readers = loading.threads if loading.name is LoaderName.clairvoyant else loading.workers
    return max(step, read / readers) if readers else read + step
