"""Puts a run together: climate, model, precision, optimizer and loss, anew or from its last checkpoint.

Over several ranks every one holds all weights, and its part of the grid of everything else; what is fitted to the
training dates is fitted by all of them together, each from whole fields of dates of its own (`team`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ensemble_ml.config import Precision, TrainConfig
from ensemble_ml.distributed import Communicator, NullCommunicator, Session, solo
from ensemble_ml.distributed.overlap import Overlap, choose_overlap
from ensemble_ml.distributed.partition import partition_model, shard_of
from ensemble_ml.distributed.shard import Shard
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batches, Reader
from ensemble_ml.loading.batches import Batch, spare_members
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.reader import iso
from ensemble_ml.models import AnyModel, Climate, EnsembleModel, ModelSpec, Speed, build_model, choose
from ensemble_ml.models.rivals.emos_model import EmosModel
from ensemble_ml.models.speed import candidates, device_name, has_bfloat16, settle
from ensemble_ml.optim import Exchange, build
from ensemble_ml.store.source import bounds_at, hour_of_day
from ensemble_ml.training import agreement, setup
from ensemble_ml.training.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, load_weights
from ensemble_ml.training.climate_data import ranges, split, widest
from ensemble_ml.training.emos_fit import fit_emos_model
from ensemble_ml.training.exchanges import run_exchange
from ensemble_ml.training.fit_cache import kept_fit
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.progress import Progress
from ensemble_ml.training.recorded import cuda_graph, may_record
from ensemble_ml.training.room import told_of_memory
from ensemble_ml.training.state import Average, State
from ensemble_ml.wording import duration

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """A run's settings, its data, its state, its loss, and the facts that every checkpoint of it repeats."""

    config: TrainConfig
    reader: Reader
    train_dates: np.ndarray
    validation_dates: np.ndarray
    state: State
    loss: Loss
    facts: dict[str, Any]
    session: Session = field(default_factory=solo)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.state.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and so of inputs and targets."""
        return next(self.state.model.parameters()).dtype

    def batches(self, start_step: int, steps: int) -> Batches:
        """Training batches of global steps start_step to steps."""
        return batches_of(self.config, self.reader, self.train_dates, start_step, steps, self.share)

    def part_of(self, batch: Batch, step: int) -> float:
        """Of the samples of a step, and of their cells, what this rank's `batch` is."""
        return len(batch) / (self._order.samples(step) * self.session.topology.spatial)

    def ranks_with_samples(self, step: int) -> int:
        """How many ranks, the first ones, have a sample of a step: of the last one of an epoch maybe not all."""
        topology = self.session.topology
        return min(self._order.samples(step), topology.data) * topology.spatial

    @property
    def _order(self) -> Order:
        return Order(self.config.seed, len(self.train_dates), self.config.batch_size)

    @property
    def share(self) -> tuple[int, int]:
        """(which, of how many) of the shares of a batch this rank takes."""
        return _share(self.session)


def assemble(
    config: TrainConfig,
    reader: Reader,
    checkpoint: Checkpoint | None,
    threads: int,
    session: Session | None = None,
    progress: Progress | None = None,
) -> Run:
    """Make the run of `config` over the reader's store, going on from `checkpoint` where there is one.

    Args:
        reader: of the whole grid; the run reads this rank's part of it.
        session: of the job; one rank where it is None.
        progress: of the fits: it is told how far they are, and bounds them.

    Raises:
        UserError: settings, store and ranks do not go together.
    """
    session, progress = session or solo(), progress or Progress()
    if (parts := session.topology.data) > config.batch_size:
        idle = "batch_size=%d: parallel.data=%d share it, so %d compute nothing; give batch_size=%d or more"
        log.warning(idle, config.batch_size, parts, parts - config.batch_size, parts)
    train, validation = setup.split_dates(config.data, reader.source.layout.init_time)
    train, validation = whole_dates(config, reader, train, validation)
    _refuse_idle_voters(config, session, len(train))
    shard = _shard(reader.spec, session)
    own = reader if shard is None else _part_reader(reader, shard)
    if checkpoint is None:
        state, found = _begin(config, reader, own, train, validation, session, progress)
    else:
        agreement.check_same_data(reader.source, checkpoint)
        state, found = _go_on(config, checkpoint, session)
    overlap = Overlap(config.parallel.overlap is True)
    if isinstance(state.model, EnsembleModel):
        partition_model(state.model, session.mesh, overlap)
    facts = {
        "config": agreement.plain_config(config),
        "spec": reader.spec.to_json(),
        "training_dates": [iso(t) for t in reader.source.layout.init_time[train]],
        "validation_dates": [iso(t) for t in reader.source.layout.init_time[validation]],
        "versions": setup.versions(),
        "data_fingerprint": reader.source.fingerprint(),
        "lead_bounds": bounds_at(reader.source, (*reader.spec.variables, *reader.spec.surface), reader.spec.leads_in),
        "full_members": reader.full_size,
        "threads": threads,
        "device": device_name(session.device),
        "seeds": {"seed": config.seed},
        **found,
    }
    loss = _loss(config, reader.spec, state, shard, session.mesh.model)
    run = Run(config, own, train, validation, state, loss, facts, session)
    if config.parallel.overlap == "auto" and shard is not None:
        _settle_overlap(run, overlap, checkpoint)
    if checkpoint is not None:
        # Which terms a rank holds apart is known once the model is shared out; from here on an exchange may wait for
        # gradients, so what is measured comes before.
        state.restore(checkpoint)
    return run


def _settle_overlap(run: Run, overlap: Overlap, checkpoint: Checkpoint | None) -> None:
    """Set the switch to what is faster; where a run goes on over the same mesh, as it was, for it moves last bits."""
    mesh = list(run.session.topology.shape)
    kept = checkpoint.meta.get("overlap") if checkpoint is not None else None
    if kept is not None and kept["mesh"] == mesh:
        overlap.on = kept["on"]
    else:
        _measure_overlap(run, overlap)
    run.facts["overlap"] = {"mesh": mesh, "on": overlap.on}


def _measure_overlap(run: Run, overlap: Overlap) -> None:
    """Set the switch to what is faster for a forward and backward pass of this run; weights are untouched."""
    model, batch = run.state.model, run.batches(0, 1).batch(0).to(run.device, run.dtype)

    def step() -> None:
        run.loss(model(batch.inputs), batch)["loss"].backward()
        model.zero_grad(set_to_none=True)
        settle(run.device)

    with told_of_memory(run.config, run.session):
        seconds = choose_overlap(overlap, step, run.session.mesh.model)
    text = "overlap: %.0f ms a step without, %.0f ms with; taken: %s"
    log.info(text, 1e3 * seconds["off"], 1e3 * seconds["on"], "on" if overlap.on else "off")


def _shard(spec: ModelSpec, session: Session) -> Shard | None:
    """This rank's part of the grid; None for all of it."""
    topology = session.topology
    setup.refuse_trainers(topology.trainer)
    if topology.size > 1 and spec.config.name != "unet3d":
        raise UserError(
            f"model.name={spec.config.name}: trains on one rank; start one process, or use model.name=unet3d"
        )
    if topology.spatial == 1:
        return None
    return shard_of(spec, topology)


def _part_reader(reader: Reader, shard: Shard) -> Reader:
    window = shard.own_rows, shard.own_columns
    return Reader(reader.source, reader.spec, window=window)


def _share(session: Session) -> tuple[int, int]:
    return session.topology.place.data, session.topology.data


def whole_dates(
    config: TrainConfig, reader: Reader, train: np.ndarray, validation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The dates that have members enough: to draw from in training, the first M of each in validation."""
    least = min(config.data.members, default=1) + spare_members(reader.spec)
    most = min(config.data.validation_members, reader.full_size)
    if reader.spec.config.spread and config.data.validation_members >= reader.full_size:
        text = "data.validation_members=%d: of %d members nothing is left to predict the spread of; give fewer"
        log.warning(text, config.data.validation_members, reader.full_size)
    hours = np.unique(hour_of_day(reader.source.layout.init_time[train]))
    if len(hours) > 1:
        text = (
            "data.train: starts at %s UTC: corrections are of all hours together, and errors that follow the sun stay;"
        )
        log.warning(f"{text} train a model for each (data.hours=[%d])", ", ".join(f"{h:02d}" for h in hours), hours[0])
    chosen = reader.usable(validation, most, "validation") if len(validation) else validation
    return reader.usable(train, min(least, reader.full_size), "training"), chosen


def _begin(
    config: TrainConfig, reader: Reader, own: Reader, train: np.ndarray, validation: np.ndarray, session: Session,
    progress: Progress,
) -> tuple[State, dict[str, Any]]:  # fmt: skip
    exchange = run_exchange(config, session)  # settings that no rank can follow are refused before the long fits
    candidates(session.device, config.model.precision)
    first = batches_of(config, own, train, 0, 1, _share(session))
    given = load_checkpoint(find_checkpoint(config.init_from)) if config.init_from is not None else None
    if given is not None:
        agreement.refuse_other_layout(reader.spec, given)
        earlier = agreement.earlier_dates(given)
        agreement.refuse_taught_validation(config, reader.source.layout.init_time[validation], earlier)
    members, sizes = config.data.validation_members, config.data.members
    fit = kept_fit(config.output, reader, train, validation, members, sizes, config.seed, progress, session)
    if progress.took:
        log.info("fits: done in %s; the longest: %s", duration(fit.seconds), progress.longest())
    progress.doing("fits are done; the model is put together, and a step of each arithmetic is timed")
    torch.manual_seed(config.seed)
    model = build_model(reader.spec, fit.climate)
    found: dict[str, Any] = {"input_range": ranges(reader.spec, fit.input_range), "fit_seconds": round(fit.seconds, 1)}
    if progress.cut:
        found["fits_cut"] = progress.cut
    if given is not None:
        if config.model.precision is Precision.float64:
            model.double()  # before its weights come, which would lose their last bits
        load_weights(model, given)
        log.info("init_from: weights and climate of %s, step %d", given.path, given.meta["step"])
        found["earlier_dates"] = earlier
        found["input_range"] = widest(found["input_range"], given.meta.get("input_range"))
    steps = config.steps
    if isinstance(model, EmosModel):  # fitted at once: there is nothing to step
        steps = 0
        found["emos"] = fit_emos_model(model, reader, train, validation, members, sizes, progress)
    state = _state(config, model.to(session.device), steps, torch.from_numpy(fit.spread_error), exchange)
    if given is not None:  # until validation dates say otherwise, sigma is as wide as before
        state.widths = given.meta.get("widths")
        if given.meta["config"]["data"]["validation_members"] == members:  # which factors are beside
            state.by_size = given.meta.get("widths_by_size", {})
    speed = _fastest(config, own, first, state, session) if steps else Speed()
    if state.average is not None:
        state.average = Average(model, config.average)  # in the type of weights that was chosen
    return state, found | {"precision": speed.to_json()}


def _go_on(config: TrainConfig, checkpoint: Checkpoint, session: Session) -> tuple[State, dict[str, Any]]:
    model = build_model(checkpoint.spec, Climate.default(checkpoint.spec))
    speed = Speed.from_json(checkpoint.meta["precision"])
    was, now = checkpoint.meta.get("device"), device_name(session.device)
    if speed.precision is Precision.bfloat16 and not has_bfloat16(session.device):
        raise UserError(
            f"resume: {checkpoint.path} computes in bfloat16, as was chosen on {was or 'another device'}, and {now}"
            " cannot; go on there, or begin another run with init_from"
        )
    if was not in (None, now) and session.first:  # whose device it is
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
    kept = "precision", "input_range", "emos", "fit_seconds", "fits_cut", "earlier_dates", "unwritten"
    return state, {k: checkpoint.meta[k] for k in kept if k in checkpoint.meta}


def batches_of(
    config: TrainConfig, reader: Reader, dates: np.ndarray, start_step: int, steps: int,
    share: tuple[int, int] = (0, 1),
) -> Batches:  # fmt: skip
    """The batches of steps `start_step` to `steps`, of which a rank takes its share (which, of how many)."""
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


def _state(config: TrainConfig, model: AnyModel, steps: int, spread_error: torch.Tensor, exchange: Exchange) -> State:
    optimizer, schedule = build(config.optim, model.param_groups(), steps, exchange)
    average = Average(model, config.average) if config.average else None
    return State(model, optimizer, schedule, steps, spread_error, average, exchange)


def _refuse_idle_voters(config: TrainConfig, session: Session, dates: int) -> None:
    """Raise a UserError where ranks would vote that never have a date: with a mask of ties, which may outvote."""
    parts, most = session.topology.data, min(config.batch_size, dates)
    together = max(1, session.world.local_size // session.topology.spatial) if config.optim.hierarchical else 1
    if config.optim.votes and parts - together >= most:  # the last ones have none
        raise UserError(
            f"optim.exchange={config.optim.exchange.value}: parallel.data={parts} ranks vote, and a step has {most} of"
            f" the {dates} training dates (batch_size={config.batch_size}); give parallel.data={most}, or"
            " exchange=allreduce"
        )


def _fastest(config: TrainConfig, own: Reader, first: Batches, state: State, session: Session) -> Speed:
    """Set and return the precision and order of axes that are fastest for a step of this run.

    Over several ranks each times a model of its own part of the grid, all at once, and rank 0 decides, among what all
    of them have. Two runs may measure differently, and then differ in the last bits; a precision that is given is taken
    unmeasured.
    """
    device = session.device
    if config.model.precision is not Precision.auto:
        speed = candidates(device, config.model.precision)[0]
        speed.apply(state.model)
        log.info("speed: %s, as model.precision says, channels last", speed.precision.value)
        return speed

    model, spec, batch = state.model, own.spec, first.batch(0)
    if session.topology.spatial > 1:
        (top, bottom), (left, right) = own.window
        spec = replace(spec, latitude=spec.latitude[top:bottom], longitude=spec.longitude[left:right])
        model = build_model(spec, Climate.default(spec)).to(device)
    loss = _loss(config, spec, state, None, NullCommunicator())

    lacking = torch.tensor(float(not has_bfloat16(device)), device=device)
    session.mesh.world.all_reduce(lacking)
    wanted = Precision.float32 if lacking else Precision.auto  # or it could not be resumed where some have no other
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


def _loss(config: TrainConfig, spec: ModelSpec, state: State, shard: Shard | None, ranks: Communicator) -> Loss:
    spread_p, spread_s = (torch.from_numpy(v) for v in split(spec, state.spread_error.cpu().numpy(), 2))
    device = next(state.model.parameters()).device
    area = torch.from_numpy(spec.grid.area_weights()).float()
    area = area if shard is None else shard.cut(area)
    buffers = dict(state.model.named_buffers())
    return Loss(
        spec,
        buffers["error_p"],
        buffers["error_s"],
        spread_p.to(device),
        spread_s.to(device),
        area.to(device),
        config.spread_weight,
        ranks,
    )
