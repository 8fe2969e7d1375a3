"""Make the forecasts of many init times.

One thread reads ahead, the main thread predicts, and a third thread writes. With several ranks, the groups of ranks
that share a date take turns at the init times. Each rank of a group reads and predicts its part of the grid, and the
first rank of the group writes. Everything that can be refused is refused before the first computation. Each file
appears under its name only when it is complete.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ensemble_ml.config import Precision, PredictConfig
from ensemble_ml.distributed import Session, start
from ensemble_ml.distributed.communicator import agreed_extremes, check_same_model, gather, sharing_cores
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.distributed.topology import Shard, make_shard
from ensemble_ml.errors import UserError
from ensemble_ml.inference.inputs import Sample, Samples, Start, collate, replace_static
from ensemble_ml.inference.job import Job, header, made_already, plan_job, targets
from ensemble_ml.inference.netcdf import write_forecast
from ensemble_ml.inference.outputs import outputs
from ensemble_ml.loading.reader import iso
from ensemble_ml.loading.threads import read_ahead
from ensemble_ml.machine import cores
from ensemble_ml.models import AnyModel, EnsembleModel, ModelSpec, Prediction, Speed
from ensemble_ml.models.speed import candidates
from ensemble_ml.store.source import Fields, Source
from ensemble_ml.training.checkpoint import find_checkpoint, load_model
from ensemble_ml.wording import shortened

log = logging.getLogger(__name__)

_LARGEST_BATCH = 8  # init times
# Grid values of the mean fields of a batch. A larger batch takes more memory and is not faster.
_BATCH_VALUES = 4_000_000
# Batches that are read ahead; only one if a batch is a single date, because its fields are large then.
_READ_AHEAD = 2
_NAMED = 10  # init times in a message


@dataclass(frozen=True, eq=False)
class _Job(Job):
    """A job of several ranks, with this rank's place among them and its part of the grid."""

    session: Session
    shard: Shard


def predict(config: PredictConfig, source: Source) -> list[Path]:
    """Write one NetCDF forecast for each init time of `source`.

    Args:
        config: `checkpoint`, `members_in`, `dates` and what to write; `input` is only quoted, `source` is what is read.
        source: a tensor store or an archive with the reduced ensemble, on the checkpoint's grid.

    Returns:
        The paths of the forecasts, in the order of the dates.

    Raises:
        UserError: before the first forecast, if the checkpoint is damaged; the source does not fit it; the ranks cannot
            be used as `config.parallel` says; something that the settings name is not there; a forecast exists already,
            or `resume` is on without `overwrite` and a forecast was made in another way. At the end, if the input of
            some init times could not be read, or was NaN or infinite; all other forecasts are made then. If ranks share
            a date, the first such date ends the run.
    """
    config = replace(config, checkpoint=str(find_checkpoint(config.checkpoint)))
    with start(config.parallel) as session:
        return _predict(config, source, session)


def _predict(config: PredictConfig, source: Source, session: Session) -> list[Path]:
    """Check everything, load the model on all ranks, and make the forecasts of this rank's group."""
    model, meta = load_model(config.checkpoint)
    spec = model.spec
    shard = _shard(spec, session)
    planned, starts = plan_job(config, source, spec, meta, warn=session.first)
    job = _Job(**vars(planned), session=session, shard=shard)
    paths = targets(config, starts)
    made = _made(job, starts, paths) if config.resume else set()
    # No rank may write before all ranks have checked which files exist.
    session.meet()
    if config.static is not None:
        replace_static(model, source)
    # Ranks that share cores divide them; otherwise each rank would start as many threads as there are cores.
    ranks = sharing_cores(session.mesh.world, session.device)
    with torch_threads(config.threads or (0 if ranks == 1 else max(1, cores() // ranks))), torch.inference_mode():
        put_on_device(model, meta, config.precision, session.device)
        # The link `best` may be moved to another checkpoint while ranks are reading it.
        check_same_model(list(model.state_dict().values()), session.mesh.world)
        if isinstance(model, EnsembleModel):
            partition_model(model, session.mesh, Overlap(config.parallel.overlap is True))
        wanted_paths = [None if path in made else path for path in paths]
        # The groups of ranks take turns at the dates.
        own = slice(session.topology.place.data, None, session.topology.data)
        _run(job, model, session.device, list(zip(starts, wanted_paths, strict=True))[own])
    return paths


def _made(job: _Job, starts: Sequence[Start], paths: Sequence[Path]) -> set[Path]:
    """Return the paths whose forecasts exist already, as the first rank of the group sees them.

    That rank writes the files. Ranks that share samples have to leave out the same dates, or they would wait for each
    other forever.
    """
    spatial = job.session.mesh.spatial
    known = job.same, job.source, job.config.overwrite
    made = made_already(starts, paths, *known) if spatial.rank == 0 else set()
    exists = torch.tensor([path in made for path in paths], dtype=torch.uint8, device=job.session.device)
    spatial.broadcast(exists)
    return {path for path, is_made in zip(paths, exists.tolist(), strict=True) if is_made}


def _shard(spec: ModelSpec, session: Session) -> Shard:
    """Return this rank's part of the grid. Raise a UserError if a forecast cannot use the ranks in this way."""
    topology, given = session.topology, session.config
    if given.planned and any(degree not in ("auto", 1) for degree in (given.lat, given.lon)):
        raise UserError(
            f"parallel.lat={given.lat} parallel.lon={given.lon}: no partition is planned for a forecast; give both, or"
            " neither (each rank then has init times of its own)"
        )
    if topology.trainer > 1:
        raise UserError(f"parallel.trainer={topology.trainer}: a forecast comes from one model; use trainer=1")
    if given.shard != 1:
        raise UserError(f"parallel.shard={given.shard}: a forecast needs all weights on each rank; leave it out")
    if topology.spatial > 1 and spec.config.name != "unet3d":
        raise UserError(
            f"model.name={spec.config.name}: its grid cannot be partitioned; use parallel.lat=1 parallel.lon=1"
        )
    # Parts of the grid are whole blocks of the U-Net's poolings, so the depth decides where they may begin.
    return make_shard(topology, spec.grid.shape, spec.config.depth if topology.spatial > 1 else 0)


def _run(job: _Job, model: AnyModel, device: torch.device, own: list[tuple[Start, Path | None]]) -> None:
    """Make the forecasts of the init times that have a path."""
    spatial = job.session.mesh.spatial
    # Each rank of a group reads only its part of the grid.
    window = (job.shard.own_rows, job.shard.own_columns) if spatial.size > 1 else None
    samples = Samples(job.source, job.spec, job.meta, window, job.wanted.members)
    writing: list[Future[Path]] = []
    unread: dict[str, str] | None = {} if spatial.size == 1 else None
    reading = read_ahead(_groups(samples, own, unread), _READ_AHEAD if batch_size(job.spec) > 1 else 1)
    count = sum(path is not None for _, path in own) if spatial.rank == 0 else 0
    with _progress(count) as done, closing(reading) as groups, _one_writer() as writer:  # type: ignore[type-var]
        for group, paths in groups:
            if window is not None and job.spec.masked:
                for sample in group:
                    samples.check_together(sample, spatial)
            whole = _whole(job, forward(model, group, device))
            group = [samples.judged(s) for s in (_whole_sample(job, sample) for sample in group) if s is not None]
            # Only the first rank of the group has the whole grid and writes.
            if whole is None:
                continue
            # One batch is written while the next is computed. `done` first waits for the batch before, so that no more
            # than two are in memory.
            done(writing)
            writing = [
                writer.submit(_write, job, whole, at, sample, path)
                for at, (sample, path) in enumerate(zip(group, paths, strict=True))
                if path is not None
            ]
        done(writing)
    # The first rank that raises ends all others, so it waits until they have written their forecasts, however long that
    # takes.
    job.session.meet()
    if unread:
        dates, (why, *_) = list(unread), unread.values()
        # If all dates failed, the cause is hardly a single date, so no dates are listed.
        if len(dates) == count:
            raise UserError(why)
        raise UserError(f"{shortened(dates, _NAMED)}: no forecast, because the input cannot be read: {why}")


def _whole(job: _Job, part: Prediction) -> Prediction | None:
    """Gather the prediction on the whole grid. Only the first rank of the group gets it; the others get None."""
    spatial = job.session.mesh.spatial
    found = {k: None if v is None else gather(v, job.shard, spatial) for k, v in vars(part).items()}
    return Prediction(**found) if spatial.rank == 0 else None


def _whole_sample(job: _Job, sample: Sample) -> Sample | None:
    """Gather what the file needs of a sample, on the first rank of the group; the others get None.

    These are the extremes over the group, the members if they are written, and the mean if it marks masked points.
    """
    spatial = job.session.mesh.spatial
    if spatial.size == 1:
        return sample
    extremes = sample.extremes
    if extremes is not None:
        low, high = agreed_extremes(torch.from_numpy(extremes[0]), torch.from_numpy(extremes[1]), spatial)
        extremes = low.numpy(), high.numpy()
    members, mean, spread = sample.members, sample.mean, sample.spread
    if job.wanted.members or job.spec.masked:
        mean = _gathered(job, mean)
    if job.wanted.members:
        members = Fields(_gathered(job, members.pressure), _gathered(job, members.surface))
        spread = _gathered(job, spread)
    return None if spatial.rank else replace(sample, members=members, mean=mean, spread=spread, extremes=extremes)


def _gathered(job: _Job, values: np.ndarray) -> np.ndarray:
    """Gather an array on the whole grid, on the first rank of the group. The others get an empty one."""
    whole = gather(torch.from_numpy(values), job.shard, job.session.mesh.spatial)
    return np.empty(0) if whole is None else whole.numpy()


def _groups(
    samples: Samples, own: list[tuple[Start, Path | None]], unread: dict[str, str] | None
) -> Iterator[tuple[list[Sample], list[Path | None]]]:
    """Yield batches in which at least one date has a forecast to write.

    The batches have the same sizes as in a run that makes all forecasts, because a convolution rounds differently in a
    batch of another size. So a date that has a file already is computed again with its batch, and another date of the
    batch takes the place of one that cannot be read.

    `unread` is filled with the dates that cannot be read and the reasons; None raises the first error.
    """
    size = batch_size(samples.spec)
    for first in range(0, len(own), size):
        starts, paths = map(list, zip(*own[first : first + size], strict=True))
        if not any(paths):
            continue
        found: list[Sample | None] = []
        for at, one in enumerate(starts):
            try:
                found.append(samples.read(one))
            except UserError as error:
                if unread is None:
                    raise
                found.append(None)
                if paths[at] is not None:
                    log.warning("%s: left out: %s", iso(one.init_time), error)
                    unread[iso(one.init_time)], paths[at] = str(error), None
        other = next((sample for sample in found if sample is not None), None)
        if other is not None and any(paths):
            yield [sample or other for sample in found], paths


def forward(model: AnyModel, group: Sequence[Sample], device: torch.device) -> Prediction:
    """Predict a batch of init times by a model on `device`, and return the parameters on the CPU."""
    dtype = torch.float64 if model.speed.precision is Precision.float64 else torch.float32
    found = model(collate(group, model.spec).to(device=device, dtype=dtype))
    return Prediction(**{name: None if values is None else values.cpu() for name, values in vars(found).items()})


def _write(job: _Job, prediction: Prediction, at: int, sample: Sample, path: Path) -> Path:
    """Write one forecast. This runs in the writing thread."""
    with torch.inference_mode():  # this mode holds only in the thread that enters it
        fields = outputs(job.spec, prediction, at, sample, job.wanted, job.places)
        return write_forecast(path, header(job, sample.start, sample.remarks), fields, replace=job.config.overwrite)


def put_on_device(model: AnyModel, meta: Mapping[str, Any], wanted: Precision, device: torch.device) -> None:
    """Move `model` to a device, in the precision that is `wanted` or that the checkpoint was trained in.

    `auto` takes that of training, from `meta`, if the device has it, and float32 otherwise.

    Raises:
        UserError: the device does not have this precision.
    """
    trained = Speed.from_json(meta["precision"])
    if wanted is Precision.auto:
        able = {speed.precision for speed in candidates(device, Precision.auto)} | {Precision.float64}
        speed = trained if trained.precision in able else Speed(Precision.float32, trained.channels_last)
        if speed is not trained:
            log.info("precision: %s has no %s as in training; float32 is used", device.type, trained.precision.value)
    else:
        # This raises a UserError if the device does not have the precision.
        candidates(device, wanted)
        speed = Speed(wanted, trained.channels_last)
    model.to(device)
    if speed.precision is not Precision.float64:
        model.float()
    speed.apply(model)


def batch_size(spec: ModelSpec) -> int:
    """Return the number of init times that are predicted at once."""
    planes = len(spec.leads_in) * spec.fields
    return max(1, min(_LARGEST_BATCH, _BATCH_VALUES // (planes * len(spec.latitude) * len(spec.longitude))))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads inside a `with` block; 0 leaves it unchanged."""
    before = torch.get_num_threads()
    if count > 0:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _one_writer() -> Iterator[ThreadPoolExecutor]:
    """Provide one thread for writing.

    If an error ends the block, the thread still writes everything that has been computed. If an interrupt ends it, the
    thread completes the file at hand and starts no other.
    """
    writer = ThreadPoolExecutor(1, thread_name_prefix="write")
    try:
        yield writer
    except Exception:
        writer.shutdown()
        raise
    finally:
        writer.shutdown(cancel_futures=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Provide a function that waits for files and shows how many are written.

    It shows a bar on a terminal. Elsewhere it logs 20 to 40 lines, or one for each file if there are fewer.
    """
    bar = tqdm(total=total, unit="date", desc="predict", disable=not sys.stderr.isatty())
    with logging_redirect_tqdm(), bar:
        count = 0

        def done(writing: Sequence[Future[Path]]) -> None:
            nonlocal count
            for future in writing:
                path = future.result()
                count += 1
                bar.update()
                if bar.disable and (count == total or count % max(1, total // 20) == 0):
                    log.info("predict: %s (%d of %d)", path, count, total)

        yield done
