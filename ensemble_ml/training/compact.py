"""Compact a trained model: cut it to an ordinary, smaller one that predicts faster, and train that one further.

1. Measure the importance of channels and hidden units, and how much of it a refit restores (`training.importance`).
2. Choose sizes. Every part of the forward pass is timed at the sizes that are tried, because three channels fewer may
   save nothing. The cut that loses least importance for each millisecond saved is made, again and again, until the sum
   of the parts is as fast as requested. The smaller model is then timed as a whole, and cut further if it is too slow.
3. Train it in an ordinary run with a lower learning rate, by the forecasts of the whole model as well.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from ensemble_ml.config import (
    CompactConfig,
    ExchangeName,
    Launcher,
    OptimConfig,
    ParallelConfig,
    Precision,
    TournamentConfig,
    TrainConfig,
    require,
)
from ensemble_ml.distributed.world import read_world
from ensemble_ml.errors import UserError
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, build_model, choose
from ensemble_ml.models.compact import POINTS, cut, described, groups, in_words
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.speed import Speed, settle
from ensemble_ml.models.unet3d import Convolution, ResidualBlock
from ensemble_ml.store import open_store
from ensemble_ml.training import setup
from ensemble_ml.training.assemble import Run, assemble
from ensemble_ml.training.checkpoint import Checkpoint, copies, find_checkpoint, load_checkpoint, load_meta, mend_links
from ensemble_ml.training.importance import BATCHES, Importance, measure_importance, refitted
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.state import learned
from ensemble_ml.training.trainer import train

log = logging.getLogger(__name__)

# Fewest and most timed calls, of which the fastest counts; seconds after which no more than the fewest are made.
_PASSES, _SECONDS = (5, 30), 0.3
_MARGIN = 1.05  # factor by which to exceed the requested speedup, because two measurements of a pass differ
_LEAST = 8  # fewest channels; fewer are slower again
_SMALL = 0.002  # fraction of the time of a pass; a cut that saves less is not made


def compact(config: CompactConfig) -> Path:
    """Compact a model, train the smaller one, and return the folder of its run. `docs/compact.md` explains it.

    A run that is resumed keeps the settings with which it began. Of `config`, only `data.store`, `output`, `run`,
    `threads` and `limit` are then used, and `checkpoint` if it is no longer where it was. A run that was killed before
    its first checkpoint begins again.

    Raises:
        UserError: the checkpoint cannot be compacted, the run exists or cannot be resumed, the speed cannot be reached,
            or several processes were started.
    """
    if read_world(dict(os.environ), Launcher.auto).size > 1:
        raise UserError("compact: runs in one process; start one, then go on with ensemble-ml train on several ranks")
    last = Path(config.output) / config.run / "checkpoints" / "last"
    if config.resume:
        mend_links(last.parent)  # a copy without links would be cut again, and refused as a run of other settings
    if config.resume and last.exists():
        meta = load_meta(last)
        require("resume", config.resume, "compacted" in meta, f"{last} is of a run of train; resume it with train")
        own: dict[str, Any] = {"output": config.output, "run": config.run, "threads": config.threads}
        settings = replace(train_config(meta["config"], config.data.store), resume=True, **own)
        if settings.teacher and not Path(settings.teacher).exists():
            settings = replace(settings, teacher=config.checkpoint)
        for key in ("steps", "distill"):
            new, old = getattr(config, key), getattr(settings, key)
            if new not in (getattr(CompactConfig, key), old):
                log.warning("resume: %s=%s is not used; the run began with %s=%s and keeps it", key, new, key, old)
        folder, facts = train(settings), meta["compacted"]
    else:
        settings, begin = _begin(config)
        folder, facts = train(settings, begin), begin.meta["compacted"]
    _report(config, folder, facts)
    return folder


def _begin(config: CompactConfig) -> tuple[TrainConfig, Checkpoint]:
    """Cut the model, and return the settings of the new run and the state that it begins with."""
    path = find_checkpoint(config.checkpoint)
    checkpoint = load_checkpoint(path, training=True)
    _refuse(path, checkpoint)
    # The teacher of the former run is not needed, and may no longer exist.
    former = replace(train_config(checkpoint.meta["config"], config.data.store), teacher=None)
    settings = fine_tuning(config, former, checkpoint)
    setup.open_run(settings)  # refuses a run that exists; measuring takes minutes
    setup.use_threads(settings)
    reader = setup.open_reader(former, open_store(config.data.store), checkpoint.spec)
    run = assemble(former, reader, checkpoint, torch.get_num_threads())
    with run.state.predicting() as model:
        assert isinstance(model, EnsembleModel)
        spec, weights, speed, facts = shrink(run, model, config.speedup)
        facts |= {"from": checkpoint.sha256, "step": checkpoint.meta["step"]}
    named = [name for name, _ in learned(build_model(spec, Climate.default(spec)))]
    training = {"spread_error": checkpoint.training["spread_error"]}
    training |= {f"raw.{name}": weights[name] for name in named} if settings.average else {}
    kept = "data_fingerprint", "input_range", "earlier_dates", "widths", "widths_by_size"
    meta = {name: checkpoint.meta[name] for name in kept if name in checkpoint.meta}
    meta |= {"step": 0, "steps": settings.steps, "best": None, "scores": {}, "precision": speed.to_json()}
    meta |= {"compacted": facts, "files": {}}
    sizes: dict[str, Any] = {name: getattr(spec.config, name) for name in ("widths", "inner", POINTS)}
    settings = replace(settings, model=replace(settings.model, **sizes))
    return settings, Checkpoint(checkpoint.path, spec, weights, training, meta)


def _refuse(path: Path, checkpoint: Checkpoint) -> None:
    """Raise a UserError if a checkpoint is of a network that cannot be cut, or of step 0."""
    name, step = checkpoint.spec.config.name, checkpoint.meta["step"]
    if name != "unet3d":
        raise UserError(f"checkpoint {path}: is of model.name={name}; compact needs model.name=unet3d")
    if checkpoint.spec.config.bank:
        raise UserError(
            f"checkpoint {path}: its kernels share a bank, so none can be cut alone; compact needs model.bank=0"
        )
    if not step:
        raise UserError(
            f"checkpoint {path}: is of step 0, where no channel has done anything; give one of a later step"
        )


def train_config(plain: Mapping[str, Any], store: str) -> TrainConfig:
    """Return the settings that a checkpoint recorded, for one rank, without a tournament, and with another store path.

    Raises:
        UserError: a setting is unknown to this version, or has a value that it does not allow.
    """
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), dict(plain)))
    except OmegaConfBaseException as error:
        raise UserError(
            f"checkpoint: its settings are not those of this version ({str(error).splitlines()[0]})"
        ) from error
    assert isinstance(settings, TrainConfig)
    data = replace(settings.data, store=store)
    return replace(settings, data=data, parallel=ParallelConfig(), tournament=TournamentConfig())


def fine_tuning(config: CompactConfig, former: TrainConfig, checkpoint: Checkpoint) -> TrainConfig:
    """Return the settings of the training after the cut, from `former`, those of the checkpoint.

    By default it takes a quarter of the steps, at half the learning rate.
    """
    whole = checkpoint.meta["steps"]
    steps = -(-whole // 4) if config.steps is None else config.steps
    optim, usual = former.optim, OptimConfig()
    # Settings of exchanges between ranks have no meaning for one rank.
    alone: dict[str, Any] = {"exchange": ExchangeName.allreduce, "quorum": "all", "bound": usual.bound, "replay": None}
    momenta = "momentum_sync", "momentum_kept", "momentum_every", "momentum_mb"
    alone |= {key: getattr(usual, key) for key in ("bits", "scale", "hierarchical", "clip_by", "rank", *momenta)}
    optim = replace(optim, lr=optim.lr / 2, warmup=optim.warmup // 4, **alone)
    return replace(
        former, run=config.run, output=config.output, steps=steps, optim=optim, threads=config.threads,
        resume=config.resume, init_from=None, max_minutes=0.0, until=0.0,
        validate_every=max(1, min(former.validate_every, -(-steps // 2))),
        teacher=str(checkpoint.path) if config.distill else None, distill=config.distill,
    )  # fmt: skip


def shrink(
    run: Run, model: EnsembleModel, speedup: float
) -> tuple[ModelSpec, dict[str, Tensor], Speed, dict[str, Any]]:
    """Cut a model, with the weights that predict, so that a forward pass becomes `speedup` times as fast.

    Returns:
        The spec, the weights and the speed of the smaller model, and the facts that its checkpoints record.

    Raises:
        UserError: the model cannot become so fast.
    """
    log.info("compact: importance of channels and hidden units, on %d batches", BATCHES)
    importance = measure_importance(run, model)
    clock = Clock(model, first_of(run.batches(0, 1).batch(0).to(run.device, run.dtype).inputs))
    small, times = reach(clock, importance, speedup, run.config.model.precision)
    bare = without_network(model)
    scores = {name: _scores(run, one).get("crps_ratio") for name, one in (("whole", model), ("without", bare))}
    facts = _sizes_of(model.spec, importance.terms) | {
        "ms": times, "crps_ratio": scores["whole"],
        "without": {"ms": clock.passes(bare), "crps_ratio": scores["without"]},
    }  # fmt: skip
    after = _sizes_of(small.spec, importance.terms)
    text = "compact: %.4g ms a pass before (%s), %.4g after (%s)"
    log.info(text, times[0], described(facts), times[1], described(after))
    return small.spec, copies(small.state_dict()), small.speed, facts


def reach(
    clock: Clock, importance: Importance, speedup: float, precision: Precision
) -> tuple[EnsembleModel, list[float]]:
    """Cut the model of a clock until its forward pass is `speedup` times as fast.

    Returns:
        The smaller model, and the milliseconds of a pass of the whole model and of the smaller one.

    Raises:
        UserError: the model cannot become so fast.
    """
    whole = clock.passes(clock.model)
    wanted = whole / (_MARGIN * speedup)
    sizes, target = dict(clock.sizes), wanted
    lost = cache(partial(importance.lost, clock.model))
    while True:  # each time smaller, until it is fast enough or no cut saves time
        sizes, reached = choose_sizes(clock, lost, sizes, target, whole)
        small = _built(*cut_to(clock.model, importance, sizes), clock.model)
        if precision is Precision.auto:  # another precision may be fastest for the smaller model
            choose(small, partial(_quietly, small, clock.inputs))
        measured = clock.passes(small)
        if measured <= wanted or not reached:
            break
        target = clock.total(sizes, whole) - (measured - wanted)
    if measured <= whole / speedup:
        return small, [whole, measured]
    raise UserError(
        f"speedup={speedup:g}: {whole / measured:.2f} times is the most (of {whole:.3g} ms the point network takes"
        f" {clock.points(clock.sizes):.3g}, and parts of the rest do not depend on channels); give less, or train"
        " with a smaller model.points"
    )


def _sizes_of(spec: ModelSpec, names: Iterable[str]) -> dict[str, Any]:
    """Return the channels of a model, and the hidden units of its point network if `names` has one."""
    widths, inner = spec.config.channels()
    return {"widths": widths, "inner": inner} | ({POINTS: spec.config.points} if POINTS in names else {})


def first_of(inputs: EnsembleInput) -> EnsembleInput:
    """Return the first sample of a batch of inputs."""
    first = {k: v[:1] if isinstance(v, Tensor) else v for k, v in vars(inputs).items()}
    return replace(inputs, **first)


def _built(spec: ModelSpec, weights: Mapping[str, Tensor], like: EnsembleModel) -> EnsembleModel:
    """Return a model with these weights, of the dtype, device and speed of another."""
    model, reference = build_model(spec, Climate.default(spec)), next(like.parameters())
    assert isinstance(model, EnsembleModel)
    model.to(reference.device, reference.dtype)
    like.speed.apply(model)
    model.load_state_dict(dict(weights))
    return model.eval()


@torch.no_grad()
def _quietly(model: nn.Module, inputs: Any) -> Any:
    """Run a forward pass without gradients."""
    return model(inputs)


def _scores(run: Run, model: EnsembleModel) -> dict[str, float]:
    """Return the scores of a model on the validation dates of a run."""
    return Judge(replace(run, state=replace(run.state, model=model, average=None))).scores(None).scores


def without_network(model: EnsembleModel) -> EnsembleModel:
    """Return a copy of a model in which the U-Net is not run and adds nothing."""
    bare = copy.deepcopy(model)
    width, planes = bare.plane_bias.shape
    for part in bare._parts():
        nn.init.zeros_(part.out.bias)

    def nothing(channels_p: Tensor, channels_s: Tensor, common: Tensor) -> Tensor:
        return common.new_zeros(len(common), width, *common.shape[-2:], planes)

    bare._trunk = nothing  # type: ignore[method-assign]
    return bare


def cut_to(
    model: EnsembleModel, importance: Importance, sizes: Mapping[str, int]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Cut a model to `sizes`, the channels or units to keep by group, and refit the last layer of its point network.

    Returns:
        The spec and the weights of the smaller model.
    """
    state = model.state_dict()
    kept = {name: importance.kept(name, size) for name, size in sizes.items()}
    spec, weights = cut(model.spec, state, kept)
    if POINTS in kept:
        assert importance.moments is not None
        weights[f"{POINTS}.second"] = refitted(state[f"{POINTS}.second"], importance.moments, kept[POINTS])[0]
    return spec, weights


class Clock:
    """A clock for the parts of a forward pass of one init time. Each part is timed once for each of its sizes."""

    def __init__(self, model: EnsembleModel, inputs: EnsembleInput):
        self.model, self.inputs = model, inputs
        self.device, self.dtype = model.plane_bias.device, model.plane_bias.dtype
        config, self.planes = model.spec.config, model.plane_bias.shape[1]
        self.sizes = {name: group.size for name, group in groups(model.spec, model.state_dict()).items()}
        self.levels = geometries(model.spec.grid, config.pole, config.depth)
        numbers = [*range(len(self.levels)), *range(len(self.levels) - 1)]
        self.of_block = [level for level in numbers for _ in range(config.blocks)]  # the level of each block
        self.block, self.stem, self.network = cache(self._block), cache(self._stem), cache(self._network)
        # Only multiples of the length of a processor's vectors, or of a GPU's tiles, save time.
        self.unit = 8 if self.device.type == "cuda" else 16

    def smaller(self, name: str, size: int) -> list[int]:
        """Return the sizes to which a group of `size` channels or units may be cut, ascending."""
        if name == POINTS:
            return [size * eighths // 8 for eighths in range(1, 8)] if size >= 64 else []
        return [_LEAST] * (size > _LEAST < self.unit) + list(range(self.unit, size, self.unit))

    def passes(self, model: EnsembleModel) -> float:
        """Return the milliseconds of a forward pass of a model."""
        return self._fastest(partial(_quietly, model, self.inputs))

    def points(self, sizes: Mapping[str, int]) -> float:
        """Return the milliseconds of the point network."""
        return self.network(sizes[POINTS]) if POINTS in sizes else 0.0

    def total(self, sizes: Mapping[str, int], whole: float) -> float:
        """Estimate the milliseconds of a pass at some sizes from those of the whole model and of the parts."""
        return whole + self._parts(sizes) - self._parts(self.sizes)

    def _parts(self, sizes: Mapping[str, int]) -> float:
        """Return the milliseconds of all parts whose sizes can change."""
        blocks = (
            self.block(level, sizes[f"stream {level}"], sizes[f"inner {n}"]) for n, level in enumerate(self.of_block)
        )
        return sum(blocks) + self.stem(sizes["stream 0"]) + self.points(sizes)

    def _block(self, level: int, stream: int, inner: int) -> float:
        """Time a residual block."""
        geometry = self.levels[level]
        return self._of_grid(
            ResidualBlock(stream, self.planes, self.model.spec.config.vertical, geometry, inner), stream, level
        )

    def _stem(self, stream: int) -> float:
        """Time the stem of the variables on pressure levels, or that of the surface if there are none."""
        surface = self.model.pressure is None
        channels = self.model.features.channels(surface=surface)
        pad = Padder(self.levels[0])
        stem = Convolution(channels, stream, self.planes, self.model.spec.config.vertical, pad, bias=True)
        return self._of_grid(stem, channels, 0)

    def _of_grid(self, module: nn.Module, channels: int, level: int) -> float:
        """Time a module of the U-Net on random values."""
        geometry, speed = self.levels[level], self.model.speed
        module.to(self.device, self.dtype)
        speed.apply(module)
        shape = 1, channels, geometry.rows, geometry.columns, self.planes
        return self._alone(module, speed.arrange(torch.randn(shape, device=self.device, dtype=self.dtype)))

    def _network(self, units: int) -> float:
        """Time the point network on a strip of points, and scale to all points of the grid."""
        network = copy.deepcopy(self.model.points)
        assert network is not None
        network.first, network.second = network.first[:units].clone(), network.second[:, : units + 1].clone()
        points, (rows, columns) = 4096, self.model.cells
        cells = min(points, rows * columns)
        x = torch.randn(1, network.first.shape[1] - 1, 1, cells, device=self.device, dtype=self.dtype)
        return self._alone(network, x) * rows * columns / cells

    def _alone(self, module: nn.Module, x: Tensor) -> float:
        """Time a part of the model in the model's precision."""

        def call() -> None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.speed.low):
                _quietly(module, x)

        return self._fastest(call)

    def _fastest(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of the fastest of some calls."""
        # The processor time of a single thread does not include time that other processes take.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        now = time.process_time if alone else time.perf_counter
        call()  # loads kernels and fills caches
        settle(self.device)
        found: list[float] = []
        while len(found) < _PASSES[0] or (len(found) < _PASSES[1] and sum(found) < 1e3 * _SECONDS):
            began = now()
            call()
            settle(self.device)
            found.append(1e3 * (now() - began))
        return min(found)


def choose_sizes(
    clock: Clock, lost: Callable[[str, int], float], sizes: Mapping[str, int], target: float, whole: float
) -> tuple[dict[str, int], bool]:
    """Cut what loses least importance for each millisecond saved, until the estimated time reaches the target.

    Args:
        clock: times parts of the pass.
        lost: returns the importance that a group loses if it is cut to a size.
        sizes: the sizes to begin with.
        target: milliseconds to reach.
        whole: milliseconds of the whole model.

    Returns:
        The sizes by group, and whether the target is reached. If not, no further cut saves enough time.
    """
    found = dict(sizes)
    now = clock.total(found, whole)
    while now > target:
        steps = []
        for name, size in found.items():
            for smaller in clock.smaller(name, clock.sizes[name]):
                if smaller < size:
                    saved = now - clock.total(found | {name: smaller}, whole)
                    steps.append(((lost(name, smaller) - lost(name, size)) / max(saved, 1e-9), saved, name, smaller))
        useful = [step for step in steps if step[1] > _SMALL * whole]
        if not useful:
            return found, False
        _, saved, name, smaller = min(useful)
        found[name], now = smaller, now - saved
    return found, True


def _report(config: CompactConfig, folder: Path, facts: Mapping[str, Any]) -> None:
    """Log speed and scores before and after, and warn if the CRPS rose by more than the limit."""
    meta = load_meta(folder / "checkpoints" / ("best" if (folder / "checkpoints" / "best").exists() else "last"))
    after, before = meta["scores"].get("crps_ratio"), facts["crps_ratio"]
    log.info("compact: %s", in_words(facts, after))
    if after is not None and before is not None and 100 * (after / before - 1) > config.limit:
        text = (
            "limit=%g: crps_ratio rose by %.2f %%, from %.4f to %.4f; the run is kept; give more steps or less speedup"
        )
        log.warning(text, config.limit, 100 * (after / before - 1), before, after)
