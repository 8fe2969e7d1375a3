"""Build a run from its settings or from its last checkpoint: climate, model, precision, optimizer and loss.

Each rank holds all weights (unless `parallel.shard` divides them) and its part of the grid of the fields. All ranks
make the fits to the training dates together, each from whole fields of its own dates (`training.progress.Team`).

A lack of memory in a step becomes an error that names settings which need less.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ensemble_ml.config import Objective, Precision, TrainConfig
from ensemble_ml.distributed import Communicator, NullCommunicator, Session, solo
from ensemble_ml.distributed.choice import consecutive_groups, process_group
from ensemble_ml.distributed.overlap import Overlap, choose_overlap
from ensemble_ml.distributed.partition import partition_model, shard_of
from ensemble_ml.distributed.sharding import shard_weights, split_groups
from ensemble_ml.distributed.topology import Shard
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batches, Reader
from ensemble_ml.loading.batches import Batch
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.reader import iso
from ensemble_ml.models import AnyModel, Climate, EnsembleModel, ModelSpec, Speed, build_model, choose
from ensemble_ml.models.rivals.emos import EmosModel
from ensemble_ml.models.speed import candidates, device_name, has_bfloat16, settle
from ensemble_ml.optim import Exchange, build
from ensemble_ml.optim.schedule import schedule_of
from ensemble_ml.store.source import bounds_at, hour_of_day
from ensemble_ml.training import agreement, setup
from ensemble_ml.training.checkpoint import (
    CLOCK,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_weights,
    predicts_members,
)
from ensemble_ml.training.climate_data import ranges, widest
from ensemble_ml.training.emos_fit import fit_emos_model
from ensemble_ml.training.exchanges import run_exchange
from ensemble_ml.training.fit_cache import kept_fit
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.progress import Progress
from ensemble_ml.training.recorded import cuda_graph, may_record
from ensemble_ml.training.state import Average, State
from ensemble_ml.wording import duration

log = logging.getLogger(__name__)
# Torch has no exception class for a lack of host memory, only the first of these texts. The second is from oneDNN if it
# cannot allocate memory for a primitive. The third is from a GPU's libraries, which allocate memory of their own.
_WORDS = ("can't allocate memory", "could not create a primitive", "STATUS_ALLOC_FAILED")


@dataclass(eq=False)
class Run:
    """A run on this rank."""

    config: TrainConfig  # settings of this trainer
    reader: Reader  # reads this rank's part of the grid
    train_dates: np.ndarray  # indices of init times in the store
    validation_dates: np.ndarray  # likewise
    state: State
    loss: Loss
    facts: dict[str, Any]  # what each checkpoint of the run repeats
    session: Session = field(default_factory=solo)
    base: TrainConfig = field(init=False)  # the settings that all trainers of the job have in common

    def __post_init__(self) -> None:
        self.base = self.config
        if self.session.topology.trainer > 1:
            self.take_settings(self.state.varied)

    def take_settings(self, varied: int) -> None:
        """Take the values of `tournament.vary` of trainer number `varied`."""
        self.state.varied = varied
        self.config = setup.own_settings(self.base, self.session.topology.place.trainer, varied)
        self.state.schedule = schedule_of(self.config.optim, self.state.steps)
        self.loss.spread_weight = self.config.spread_weight

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.state.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, which is that of inputs and targets too."""
        return next(self.state.model.parameters()).dtype

    def batches(self, start_step: int, steps: int) -> Batches:
        """Return this rank's part of the training batches of steps `start_step` to `steps` - 1."""
        return batches_of(self.config, self.reader, self.train_dates, start_step, steps, self.share)

    def part_of(self, batch: Batch, step: int) -> float:
        """Return the fraction of the samples and grid points of a step that this rank's batch holds.

        Ranks that share a sample count as equal parts, even if their shards of the grid differ in size.
        """
        return len(batch) / (self._order.samples(step) * self.session.topology.spatial)

    def ranks_with_samples(self, step: int) -> int:
        """Return how many ranks have a sample of a step; these are the first ones.

        The last batch of an epoch may have fewer samples than there are ranks.
        """
        topology = self.session.topology
        return min(self._order.samples(step), topology.data) * topology.spatial

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps that use each training date once."""
        return self._order.steps_per_epoch

    @property
    def _order(self) -> Order:
        """Return the order of the training dates, which follows from the seed alone."""
        return Order(self.config.seed, len(self.train_dates), self.config.batch_size)

    @property
    def share(self) -> tuple[int, int]:
        """Return the index of this rank's part of a batch, and the number of parts."""
        return self.session.topology.place.data, self.session.topology.data


def assemble(
    config: TrainConfig,
    reader: Reader,
    checkpoint: Checkpoint | None,
    threads: int,
    session: Session | None = None,
    progress: Progress | None = None,
) -> Run:
    """Build the run of `config`, or restore it from a checkpoint.

    Args:
        config: settings of the run.
        reader: reads whole fields of the store; the run reads only this rank's part of the grid.
        checkpoint: the checkpoint to resume from; None for a new run.
        threads: torch's number of threads, which checkpoints record.
        session: the ranks of the job; None for one rank.
        progress: shows how far the fits are, and limits their time.

    Raises:
        UserError: settings, store, ranks and checkpoint do not fit together, too few members or fields are there, or
            memory does not suffice.
    """
    session, progress = session or solo(), progress or Progress()
    topology = session.topology
    train, validation = whole_dates(config, reader)
    own_train = setup.own_dates(config, train, topology.place.trainer)
    _refuse_idle_voters(config, session, len(own_train))
    _tell_of_short_batches(config, topology.data, len(own_train))
    setup.refuse_shards(config.parallel.shard, topology.data * topology.spatial, session)
    shard = _shard(reader.spec, session)
    own = reader if shard is None else reader.within((shard.own_rows, shard.own_columns))
    if checkpoint is None:
        state, found = _begin(config, reader, own, train, validation, session, progress)
        state.varied = topology.place.trainer
    else:
        agreement.check_same_data(reader.source, checkpoint)
        state, found = _go_on(config, checkpoint, session)
    overlap = Overlap(config.parallel.overlap is True)
    # The baselines train on one rank and are never partitioned.
    if isinstance(state.model, EnsembleModel):
        partition_model(state.model, session.mesh, overlap)
        if config.parallel.shard > 1:
            _share_weights(config, state, session)
    facts = _facts(config, reader, train, validation, session) | {"threads": threads, **found}
    # If ranks may be some steps apart, each takes the mean over its own samples: a sum over ranks would wait for all.
    sharing = session.mesh.spatial if state.exchange.slack else session.mesh.model
    loss = _loss(config, reader.spec, state, shard, sharing)
    if config.teacher is not None:
        given = _given("teacher", config.teacher, session)
        agreement.refuse_other_teacher(given, checkpoint)
        facts["teacher"] = given.sha256
        loss.teacher, loss.distill = _teacher(given, reader.spec, state, session, overlap), config.distill
    run = Run(config, own, own_train, validation, state, loss, facts, session)
    # Without a partition there is no halo exchange, and nothing to overlap.
    if config.parallel.overlap == "auto" and shard is not None:
        _settle_overlap(run, overlap, checkpoint)
    if checkpoint is not None:
        # The state is restored last. Which terms belong to a rank alone is known only after the model is partitioned. A
        # restored exchange may wait for gradients, so all timing has to come before.
        state.restore(checkpoint)
        run.take_settings(state.varied)
    return run


def _facts(
    config: TrainConfig, reader: Reader, train: np.ndarray, validation: np.ndarray, session: Session
) -> dict[str, Any]:
    """Return what every checkpoint of a run records beside its state and what its fits have found."""
    source, spec, topology = reader.source, reader.spec, session.topology
    # With a number in the place of `data=auto`, a run that is resumed with `lat=auto` knows its mesh.
    recorded = replace(config, parallel=replace(config.parallel, data=topology.data))
    return {
        "config": agreement.plain_config(recorded),
        "spec": spec.to_json(),
        "training_dates": [iso(t) for t in source.layout.init_time[train]],
        "validation_dates": [iso(t) for t in source.layout.init_time[validation]],
        "versions": setup.versions(),
        "data_fingerprint": source.fingerprint(),
        "lead_bounds": bounds_at(source, (*spec.variables, *spec.surface), spec.leads_in),
        "full_members": reader.full_size,
        "device": device_name(session.device),
        "seeds": {"seed": config.seed},
        "trainer": topology.place.trainer,
    }


def whole_dates(config: TrainConfig, reader: Reader) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and validation dates that have enough complete members, as indices.

    Warn if no spread is left to predict, or if dates mix hours.

    A training date needs the smallest of `data.members`, and one more if a member stands for the truth or only the
    spread is learned. A validation date needs `data.validation_members`, and one more if a member stands for the truth.
    Neither needs more members than the store has.

    Raises:
        UserError: no date is left of those that the settings name.
    """
    train, validation = setup.split_dates(config.data, reader.source.layout.init_time)
    least = min(config.data.members, default=1) + reader.spare
    most = min(config.data.validation_members, reader.most) + (reader.full_size - reader.most)
    if reader.spec.config.spread and config.data.validation_members >= reader.full_size:
        text = "data.validation_members=%d: the store has %d members, so no spread is left to predict; give fewer"
        log.warning(text, config.data.validation_members, reader.full_size)
    # Errors that depend on local time differ between 00 and 12 UTC, and one bias map cannot hold both.
    hours = np.unique(hour_of_day(reader.source.layout.init_time[train]))
    if len(hours) > 1:
        text = (
            "data.train: init times at %s UTC share one correction, so errors that depend on local time stay;"
            " train a model for each hour (data.hours=[%d])"
        )
        log.warning(text, ", ".join(f"{h:02d}" for h in hours), hours[0])
    chosen = reader.usable(validation, most, "validation") if len(validation) else validation
    return reader.usable(train, min(least, reader.full_size), "training"), chosen


def _tell_of_short_batches(config: TrainConfig, parts: int, dates: int) -> None:
    """Warn if there are fewer training dates than a batch has samples, or than there are ranks that share a batch."""
    most = min(config.batch_size, dates)
    if most < config.batch_size:
        text = "batch_size=%d: there are %d init times to train on, so a step has no more"
        log.warning(text, config.batch_size, dates)
    # A batch is divided by samples among the data ranks, so ranks beyond its samples get none.
    if parts > most:
        text = "batch_size=%d: parallel.data=%d ranks share the %d init times of a step, so %d compute nothing; %s"
        remedy = f"give batch_size={parts} or more" if most < dates else "start fewer ranks, or give more init times"
        log.warning(text, config.batch_size, parts, most, parts - most, remedy)


def _refuse_idle_voters(config: TrainConfig, session: Session, dates: int) -> None:
    """Raise a UserError if some ranks would vote without ever having a date.

    A rank without a gradient has no sign to vote for. Its vote would be arbitrary, and could outvote other ranks.
    """
    parts, most = session.topology.data, min(config.batch_size, dates)
    together = max(1, session.world.local_size // session.topology.spatial) if config.optim.hierarchical else 1
    if config.optim.votes and parts - together >= most:  # the last ranks, which vote together, have no date
        raise UserError(
            f"optim.exchange={config.optim.exchange.value}: parallel.data={parts} ranks vote, and a step has {most} of"
            f" the {dates} training dates (batch_size={config.batch_size}); give parallel.data={most}, or"
            " exchange=allreduce"
        )


def _shard(spec: ModelSpec, session: Session) -> Shard | None:
    """Return this rank's part of the grid, None if it is the whole grid; refuse a baseline on several ranks."""
    topology = session.topology
    if topology.size > 1 and spec.config.name != "unet3d":
        raise UserError(
            f"model.name={spec.config.name}: trains on one rank; start one process, or use model.name=unet3d"
        )
    if topology.spatial == 1:
        return None
    return shard_of(spec, topology)


def _begin(
    config: TrainConfig, reader: Reader, own: Reader, train: np.ndarray, validation: np.ndarray, session: Session,
    progress: Progress,
) -> tuple[State, dict[str, Any]]:  # fmt: skip
    """Make the fits and the model of a new run, and choose its precision."""
    # These three refuse impossible settings, so they come before the fits, which may take long.
    exchange = run_exchange(config, session)
    candidates(session.device, config.model.precision)
    first = batches_of(config, own, train, 0, 1, (session.topology.place.data, session.topology.data))
    given = _given("init_from", config.init_from, session) if config.init_from is not None else None
    # A run that starts from another one must not choose by dates on which that one was trained.
    if given is not None:
        agreement.refuse_other_layout(reader.spec, given)
        earlier = agreement.earlier_dates(given)
        agreement.refuse_taught_validation(config, reader.source.layout.init_time[validation], earlier)
    members, sizes = config.data.validation_members, config.data.members
    fit = kept_fit(config.output, reader, train, validation, members, sizes, config.seed, progress, session)
    if progress.took:
        log.info("fits: done in %s; the longest: %s", duration(fit.seconds), progress.longest())
    progress.doing("fits are done; the model is built, and a step in each precision is timed")
    # The fits draw random numbers, too. The seed is set after them, so that the first weights depend on it alone.
    torch.manual_seed(config.seed)
    model = build_model(reader.spec, fit.climate)
    found: dict[str, Any] = {"input_range": ranges(reader.spec, fit.input_range)}
    found[CLOCK] = {"fit_seconds": round(fit.seconds, 1)}
    if progress.cut:
        found["fits_cut"] = True
    if given is not None:
        if config.model.precision is Precision.float64:
            model.double()  # before the weights are loaded, which would be rounded to float32
        # A climate that was fitted to members does not hold for the truth, nor the other way round. Then only weights
        # are taken.
        same = predicts_members(given.meta) is (config.objective is Objective.members)
        load_weights(model, given, climate=same)
        what = "weights and climate" if same else "weights"
        log.info("init_from: %s of %s, step %d", what, given.path, given.meta["step"])
        found["earlier_dates"] = earlier
        found["input_range"] = widest(found["input_range"], given.meta.get("input_range"))
    steps = config.steps
    if isinstance(model, EmosModel):  # it is fitted here, and takes no steps
        steps = 0
        found["emos"] = fit_emos_model(model, reader, train, validation, members, sizes, progress)
    state = _state(config, model.to(session.device), steps, torch.from_numpy(fit.spread_error), exchange)
    if given is not None and same:  # the old calibration factors stay until the first validation
        state.widths = given.meta.get("widths")
        # The factors for other numbers of members are relative to those for `validation_members`.
        if given.meta["config"]["data"]["validation_members"] == members:
            state.by_size = given.meta.get("widths_by_size", {})
    speed = _fastest(config, own, first, state, session) if steps else Speed()
    if state.average is not None:
        state.average = Average(model, config.average)  # again, because the choice of speed may change the dtype
    return state, found | {"precision": speed.to_json()}


def _given(key: str, path: str, session: Session) -> Checkpoint:
    """Load the checkpoint that a setting names, as a run or by its folder.

    Raises:
        UserError: there is none, or ranks have read different ones, because the best of the run has just changed.
    """
    found = load_checkpoint(find_checkpoint(path))
    which = {f"checkpoint of {key}": f"{found.path.name}, {found.sha256[:16]}"}
    session.agree(which, f"give {key} the folder of a step, so that all ranks read the same weights")
    return found


def _fastest(config: TrainConfig, own: Reader, first: Batches, state: State, session: Session) -> Speed:
    """Choose precision and memory order of axes for a step of this run, set the model to them, and return them.

    A precision that the settings name is taken. Otherwise all are timed: each rank times a model of its own part of the
    grid, all at the same time, and rank 0 chooses among the precisions that all ranks have. So two runs may choose
    differently, and then their results differ by rounding errors.
    """
    device = session.device
    if config.model.precision is not Precision.auto:
        speed = candidates(device, config.model.precision)[0]
        speed.apply(state.model)
        log.info("speed: %s, from model.precision, channels last", speed.precision.value)
        return speed

    model, spec, batch = state.model, own.spec, first.batch(0)
    # Timing the partitioned model would need halo exchanges. An unpartitioned one on the same rows and columns takes
    # the same local work.
    if session.topology.spatial > 1:
        (top, bottom), (left, right) = own.window
        spec = replace(spec, latitude=spec.latitude[top:bottom], longitude=spec.longitude[left:right])
        model = build_model(spec, Climate.default(spec)).to(device)
    loss = _loss(config, spec, state, None, NullCommunicator())

    lacking = torch.tensor(float(not has_bfloat16(device)), device=device)
    session.mesh.world.all_reduce(lacking)
    # If one rank lacks bfloat16, all take float32: a run in bfloat16 could not be resumed on that rank.
    wanted = Precision.float32 if lacking else Precision.auto
    if session.first and 0 < lacking < session.world.size:
        log.warning("speed: %d of %d ranks have no bfloat16, so all compute in float32", lacking, session.world.size)
    with told_of_memory(config, session):
        moved = batch.to(device, next(model.parameters()).dtype)
        record = cuda_graph if may_record(model, session) else None
        speed = choose(
            model, lambda: loss(model(moved.inputs), moved)["loss"].backward(), wanted=wanted, record=record,
        )  # fmt: skip
    speed = session.once(lambda: speed)
    speed.apply(state.model)
    return speed


def _go_on(config: TrainConfig, checkpoint: Checkpoint, session: Session) -> tuple[State, dict[str, Any]]:
    """Build model and state of a resumed run in the precision of its checkpoint; refuse one that this device lacks."""
    model = build_model(checkpoint.spec, Climate.default(checkpoint.spec))
    speed = Speed.from_json(checkpoint.meta["precision"])
    was, now = checkpoint.meta.get("device"), device_name(session.device)
    if speed.precision is Precision.bfloat16 and not has_bfloat16(session.device):
        raise UserError(
            f"resume: {checkpoint.path} computes in bfloat16, chosen on {was or 'another device'}, which {now} cannot;"
            " resume it on such a device, or begin another run with init_from"
        )
    if was not in (None, now) and session.first:  # the checkpoint records the device of the first rank
        text = "device: %s now, %s before: results will not be equal bit for bit; precision stays %s"
        log.warning(text, now, was, speed.precision.value)
    if session.first:
        setup.tell_of_other_versions(checkpoint.meta.get("versions", {}))
    speed.apply(model)
    load_weights(model, checkpoint)
    state = _state(
        config, model.to(session.device), checkpoint.meta["steps"], checkpoint.training["spread_error"],
        run_exchange(config, session),
    )  # fmt: skip
    kept = "precision", "input_range", "emos", CLOCK, "fits_cut", "earlier_dates", "unwritten", "compacted"
    return state, {k: checkpoint.meta[k] for k in kept if k in checkpoint.meta}


def _state(config: TrainConfig, model: AnyModel, steps: int, spread_error: torch.Tensor, exchange: Exchange) -> State:
    """Build the state of a run: model, optimizer, schedule and running average."""
    optimizer, schedule = build(config.optim, model.param_groups(), steps, exchange)
    average = Average(model, config.average) if config.average else None
    return State(model, optimizer, schedule, steps, spread_error, average, exchange)


def batches_of(
    config: TrainConfig, reader: Reader, dates: np.ndarray, start_step: int, steps: int,
    share: tuple[int, int] = (0, 1),
) -> Batches:  # fmt: skip
    """Return the batches of steps `start_step` to `steps` - 1 of `dates`, which are indices of init times in the store.

    `share` is the index of the part of each batch to return, and the number of parts.
    """
    return Batches(
        reader,
        dates,
        batch_size=config.batch_size,
        seed=config.seed,
        sizes=config.data.members,
        steps=steps,
        start_step=start_step,
        share=share,
    )


def _share_weights(config: TrainConfig, state: State, session: Session) -> None:
    """Shard the weights of the U-Net over ranks, and make an optimizer for the weights that this rank keeps."""
    model, shards = state.model, config.parallel.shard
    assert isinstance(model, EnsembleModel)
    shard_weights(model, session.mesh, *consecutive_groups(session.topology, shards, process_group))
    groups = split_groups(model.param_groups())
    state.optimizer, state.schedule = build(config.optim, groups, state.steps, state.exchange)
    state.average = Average(model, config.average) if config.average else None
    log.info("weights: each of %d ranks holds its part of the U-Net, and gathers a block to compute it", shards)


def _loss(config: TrainConfig, spec: ModelSpec, state: State, shard: Shard | None, ranks: Communicator) -> Loss:
    """Build the loss of this rank's part of the grid."""
    device = next(state.model.parameters()).device
    area = torch.from_numpy(spec.grid.area_weights()).float()
    # Area weights have a mean of one over the whole grid. Each rank cuts its part out of them, so that sums over ranks
    # have the weights of the whole grid.
    area = area if shard is None else shard.cut(area)
    error, spread_error = state.model.get_buffer("error"), state.spread_error.float().to(device)
    return Loss(spec, error, spread_error, area.to(device), config.spread_weight, ranks)


def _teacher(teacher: Checkpoint, spec: ModelSpec, state: State, session: Session, overlap: Overlap) -> AnyModel:
    """Build the model that this one learns from, in its own precision, and partition it like the model of this run.

    On a device without bfloat16 it computes in float32. Refuse a teacher of other fields, leads, grid or distributions,
    and one that predicts nothing that this model does.
    """
    fields = ("variables", "levels", "surface", "leads_in", "leads_out", "latitude", "longitude", "static", "families")
    differ = [name for name in fields if getattr(spec, name) != getattr(teacher.spec, name)]
    if differ:
        raise UserError(f"teacher={teacher.path}: has other {', '.join(differ)}; give a model of the same fields")
    own, its = ({head for head in ("postprocess", "spread") if getattr(s.config, head)} for s in (spec, teacher.spec))
    if not own & its:
        raise UserError(
            f"teacher={teacher.path}: predicts nothing that this model does; set model.{its.pop()}=true, or leave it"
            " out"
        )
    model, like = build_model(teacher.spec, Climate.default(teacher.spec)), next(state.model.parameters())
    speed = Speed.from_json(teacher.meta["precision"])
    if speed.low and not has_bfloat16(session.device):
        speed = Speed()
    speed.apply(model)
    load_weights(model, teacher)
    model.to(like.device, like.dtype).eval().requires_grad_(False)
    if isinstance(model, EnsembleModel):
        partition_model(model, session.mesh, overlap)
    return model


def _settle_overlap(run: Run, overlap: Overlap, checkpoint: Checkpoint | None) -> None:
    """Switch the overlap of halo exchange and convolution on or off, whichever is faster.

    A run that is resumed on the same mesh keeps its choice, because the choice changes the last bits of results.
    """
    mesh = list(run.session.topology.shape)
    kept = checkpoint.meta.get("overlap") if checkpoint is not None else None
    if kept is not None and kept["mesh"] == mesh:
        overlap.on = kept["on"]
    else:
        _measure_overlap(run, overlap)
    run.facts["overlap"] = {"mesh": mesh, "on": overlap.on}


def _measure_overlap(run: Run, overlap: Overlap) -> None:
    """Time a forward and backward pass with and without overlap, and choose the faster. Weights are not changed."""
    model, batch = run.state.model, run.batches(0, 1).batch(0).to(run.device, run.dtype)

    def step() -> None:
        """Run one pass and drop its gradients."""
        run.loss(model(batch.inputs), batch)["loss"].backward()
        model.zero_grad(set_to_none=True)
        settle(run.device)

    with told_of_memory(run.config, run.session):
        seconds = choose_overlap(overlap, step, run.session.mesh.model)
    text = "overlap: %.0f ms a step without, %.0f ms with; taken: %s"
    log.info(text, 1e3 * seconds["off"], 1e3 * seconds["on"], "on" if overlap.on else "off")


@contextmanager
def told_of_memory(config: TrainConfig, session: Session) -> Iterator[None]:
    """Turn a lack of memory within the context into an error that names settings which need less.

    Raises:
        UserError: there is not enough memory, on the host or on the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Other errors pass through unchanged: other code recognises some, such as NCCL's about a rank that is gone.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(t in str(error) for t in _WORDS):
            raise
        topology, where = session.topology, session.topology.place
        shared = topology.spatial
        less = f"parallel.lat={2 * topology.lat} (a sample over {2 * shared} ranks)"
        if config.batch_size > topology.data:
            less = f"batch_size={topology.data} (now {config.batch_size}), or {less}"
        cause = (str(error) or type(error).__name__).splitlines()[0][:120]  # NumPy and Python may give no text
        raise UserError(
            f"step {session.step}: rank {topology.rank} has not enough memory for its shard of a batch (data"
            f" {where.data}, lat {where.lat}, lon {where.lon}: {cause}); try {less}; ensemble-ml plan shows the"
            " memory that each needs"
        ) from error
