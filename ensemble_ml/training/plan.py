"""Predicts the cost of every partition of a training run over ranks, and chooses the best.

plan(config)                       `ensemble-ml plan`: prints the result, and writes OUTPUT/RUN/plan.json
shared_out(config, spec, session)  `parallel=auto`: makes the same choice on all ranks before training
settled(config, spec, session)     `parallel.shard=auto`, `model.recompute=auto`: chooses these for a given partition
"""

from __future__ import annotations

import base64
import html
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ensemble_ml.config import ExchangeName, LoaderName, PlanConfig, PlanSettings, Precision, TrainConfig
from ensemble_ml.distributed import Session, Topology, start
from ensemble_ml.distributed.communicator import sharing_cores
from ensemble_ml.distributed.costs import Link, Links, Piece, reckoned, step_cost
from ensemble_ml.distributed.echo import MODEL_AXES, Message, check_exchange, exchange_traffic, sums_of_copies
from ensemble_ml.distributed.partition import shard_of
from ensemble_ml.distributed.planner import (
    Candidate,
    candidates,
    check_any,
    in_use,
    pick,
    rank_memory,
    reasons,
    table,
    to_json,
)
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable, write_whole
from ensemble_ml.machine import cores
from ensemble_ml.models import ModelSpec, Speed
from ensemble_ml.models.speed import candidates as candidate_speeds
from ensemble_ml.store import open_store
from ensemble_ml.training import scaling, setup
from ensemble_ml.training.feed import checked_dates, describe
from ensemble_ml.training.fit_costs import describe_fits, work_of
from ensemble_ml.training.probing import Found, Job, Shape, cache_folder, measured_here, probe
from ensemble_ml.training.rehearsal import Tracing, trace

log = logging.getLogger(__name__)

_BUDGET = 0.95  # fraction of a rank's memory that a plan may use


@dataclass
class Planner:
    """A planner of a run over some number of ranks.

    Args:
        config: settings of the run.
        spec: the model's spec.
        settings: settings of the plan.
        session: the ranks that were started, and which measure. A single one starts more processes on its machine.
        ranks: number of ranks that are planned for.
        known: dry runs of steps that were made before. New ones are added.
    """

    config: TrainConfig
    spec: ModelSpec
    settings: PlanSettings
    session: Session
    ranks: int
    known: dict[tuple[int, ...], Tracing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measured = Found({}, {})
        started = self.session.world
        here = started.local_size if started.size > 1 else self.ranks
        self.local = min(self.settings.ranks_per_node or here, self.ranks)
        gpus = torch.cuda.device_count()
        self.busy = min(self.local, gpus or cores()) if started.size == 1 else started.size
        device = self.session.device
        if device.type == "cuda":  # a GPU holds only batches read ahead; the loader's other memory is the host's
            self.config = replace(self.config, loading=replace(self.config.loading, ram=None))
        # All ranks plan with the first one's memory, because they have to make the same choice.
        own = rank_memory(self.local, device)
        self.base, budget = self.session.once(lambda: (in_use(device, own), int(_BUDGET * own)))
        self.memory = int(1e9 * self.settings.memory_gb) or budget
        # Messages are counted at the speed that is probably the fastest. Memory is counted in float32, because a run
        # with precision=auto tries that as well.
        wanted = self.config.model.precision
        self.speed = self.widest = Speed(Precision.float32 if wanted is Precision.auto else wanted)
        if wanted is Precision.auto:
            self.speed = self.session.once(lambda: candidate_speeds(device, wanted)[0])

    def computed(self, traced: Tracing) -> Piece:
        """Compute the local work of a step in seconds from the speeds in `plan.gflops` and `plan.bandwidth`.

        Convolutions and products take operations / speed, everything else bytes / bandwidth, or no time if
        `plan.bandwidth` is zero. This is the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785) without
        overlap of the two. Two thirds of the work is in the backward pass.
        """
        seconds = traced.flops / 1e9 / self.settings.gflops
        if self.settings.bandwidth:
            seconds += traced.moved / 1e9 / self.settings.bandwidth
        return Piece(seconds, 2 / 3 * seconds, measured=False)

    def _completed(self, fitting: Sequence[Candidate], traced: dict[tuple[int, int, int], Tracing]) -> list[Piece]:
        """Return the local work of every partition: computed, measured, or estimated from the measured ones."""
        own, pieces = [traced[c.degrees] for c in fitting], self.measured.pieces
        if self.settings.gflops:
            return [self.computed(one) for one in own]
        known = [(own[i].flops, piece) for i, piece in pieces.items()]
        return [pieces[i] if i in pieces else reckoned(known, one.flops) for i, one in enumerate(own)]

    def shard(self, topology: Topology) -> tuple[int, int]:
        """Return the shape (Y, X) of a rank's shard of the grid; raise a UserError if it cannot be partitioned so."""
        return shard_of(self.spec, topology).shape

    def fits(self, ranks: int) -> bool:
        """Return True if grid, batch, model and optimizer allow a partition over `ranks`. Memory is not checked."""
        return any(not isinstance(self.followed(c), str) for c in self.open(ranks, self.config.batch_size))

    def open(self, ranks: int, batch: int) -> list[Candidate]:
        """Return the partitions over `ranks` that fit the grid, a job's `batch` and the settings; possibly none."""
        if ranks % self.config.parallel.shard:
            return []
        try:
            found = candidates(ranks, batch, self.config.parallel, self.shard)
        except UserError:  # the degrees in the settings do not divide this number of ranks
            return []
        return [c for c in found if not c.why]

    def candidates(self) -> list[Candidate]:
        """Return all partitions, with a cost for those that fit and a reason for the others.

        All ranks must call this, because they measure together.

        Raises:
            UserError: the settings cannot be planned for, no partition has the degrees that they fix, or none fits the
                grid, the batch, the model, the optimizer and the memory.
        """
        found = candidates(self.ranks, self.config.batch_size, self.config.parallel, self.shard)
        if (trainers := self.config.parallel.trainer) > 1:
            raise UserError(f"parallel.trainer={trainers}: one trainer is planned; give parallel.trainer=1")
        setup.refuse_shards(self.config.parallel.shard, self.ranks)
        if self.spec.config.name != "unet3d":
            raise UserError(f"model.name={self.spec.config.name}: trains on one rank, so nothing is planned")
        check_any(found, self.ranks, self.fits)
        # The first rank makes the dry runs for all: they take time, and all ranks must see the same result.
        followed = self.session.once(lambda: {c.degrees: self.followed(c) for c in found if not c.why})
        found = [replace(c, why=why) if isinstance(why := followed.get(c.degrees), str) else c for c in found]
        check_any(found, self.ranks, self.fits)
        traced = {degrees: trace for degrees, trace in followed.items() if not isinstance(trace, str)}
        found = [self._within_memory(c, traced) for c in found]
        if all(c.why for c in found):
            raise UserError(self._too_little(traced))
        fitting = [c for c in found if not c.why]
        self.measured = measured = self._measured(fitting)
        pieces = self._completed(fitting, traced)
        links = [measured.links[i] for i in range(len(fitting))]
        costed = iter(zip(fitting, pieces, links, strict=True))
        return [c if c.why else self.costed(*next(costed), traced[c.degrees]) for c in found]

    def followed(self, candidate: Candidate) -> Tracing | str:
        """Make a dry run of a step, or return the reason why model or optimizer do not allow this partition."""
        try:
            check_exchange(self.config.optim, candidate.topology, self._on_node)
            return self.traced(candidate)
        except UserError as error:
            return str(error)

    def traced(self, candidate: Candidate) -> Tracing:
        """Make a dry run of a step of a partition's busiest rank, with the messages of the rank that sends most.

        Raises:
            UserError: model or optimizer do not allow this partition.
        """
        largest = candidate.busiest(self.shard)
        found = self._followed(largest, candidate.samples)
        # If the busiest rank lies at a pole, it has one neighbour less. A rank between two others may then send more.
        if candidate.lat > 2 and largest.place.lat in (0, candidate.lat - 1):
            other = self._followed(largest.at(candidate.lon), candidate.samples)
            found = replace(found, traffic=max(found.traffic, other.traffic, key=attrgetter("sent")))
        return found

    def _followed(self, rank: Topology, samples: int) -> Tracing:
        """Make a dry run of one rank, once for all partitions in which such a rank occurs."""
        # The number of data ranks matters only in whether gradients are exchanged at all.
        alike = (rank.lat, rank.lon, rank.place.lat, rank.place.lon, samples, rank.data > 1)
        if alike not in self.known:
            given, gloo = (self.config, self.spec, rank, samples), self.session.device.type == "cpu"
            found = trace(*given, self.widest, gloo=gloo)
            if self.speed.precision is not self.widest.precision:
                found = replace(found, traffic=trace(*given, self.speed, gloo=gloo).traffic)
            if self.session.device.type == "cuda":  # a checkpoint is copied to the host's memory
                found = replace(found, snapshot=0)
            self.known[alike] = found
        return self.known[alike]

    def _within_memory(self, c: Candidate, traced: dict[tuple[int, int, int], Tracing]) -> Candidate:
        """Return a partition with the memory that it needs, and a reason why it is not feasible if that is too much."""
        if c.why:
            return c
        needed = traced[c.degrees].memory + self.base
        if needed <= self.memory:
            return replace(c, memory=needed)
        return replace(c, memory=needed, why=f"needs {needed / 1e9:.3g} GB of {self.memory / 1e9:.3g} GB a rank")

    def _too_little(self, traced: dict[tuple[int, int, int], Tracing]) -> str:
        """Return the message for too little memory, with a number of ranks that would do."""
        degrees, least = min(traced.items(), key=lambda item: item[1].memory)
        limit = f"{self.memory / 1e9:.3g}"
        given = bool(self.settings.memory_gb)
        place = f"plan.memory_gb={limit}" if given else f"{limit} GB a rank, {self.local} on a machine"
        text = f"{place}: {self.ranks} ranks need {(least.memory + self.base) / 1e9:.3g} GB each at the least" + (
            " (plan.ranks_per_node sets how many share one)" if self.local > self.busy else ""
        )
        ram = self.config.loading.ram_bytes if self.config.loading.name is LoaderName.clairvoyant else 0
        # Weights and optimizer take the same memory on any number of ranks. If they alone are too much, more ranks do
        # not help.
        fixed = least.resident + least.state + least.snapshot + self.base + (ram or 0)
        if fixed >= self.memory:
            more, less = (", and loading.ram", " or loading.ram") if ram else ("", "")
            fixed_for = f"{fixed / 1e9:.3g} GB of it for weights, optimizer and libraries{more}"
            return f"{text}, {fixed_for}; use {self._would_do(degrees)}a smaller model{less}"
        cells = least.shape[0] * least.shape[1] * -(-self.config.batch_size // degrees[0])
        a_cell = (least.memory + self.base - fixed) / cells  # an estimate, because halos add to it
        # A dry run takes time, so partitions with too many cells by this estimate are skipped.
        for ranks in range(self.ranks + 1, 64 * self.ranks + 1):
            for c in self.open(ranks, self.config.batch_size):
                own = c.shape[0] * c.shape[1] * c.samples
                if fixed + 0.9 * a_cell * own > self.memory:
                    continue
                followed = self.followed(c)
                if not isinstance(followed, str) and followed.memory + self.base <= self.memory:
                    return f"{text}; {ranks} ranks would do ({c}), or {self._would_do(degrees)}a smaller batch_size"
        return f"{text}; no number of ranks up to {64 * self.ranks} would do; use a smaller model or batch_size"

    def needed(self, candidate: Candidate) -> int:
        """Return the bytes that a rank of a partition needs at the peak of a step, interpreter and libraries included.

        Raises:
            UserError: model or optimizer do not allow this partition.
        """
        return self.traced(candidate).memory + self.base

    def _would_do(self, degrees: tuple[int, int, int]) -> str:
        """Return settings of shards and recomputation with which a partition would fit, as part of a message, or ''."""
        if self.base >= self.memory:  # nothing would help, and each dry run takes seconds
            return ""
        for recompute, shards in ways(self.config, self.spec, self.ranks, every=True):
            other = replace(self, **with_way(self.config, self.spec, recompute, shards), known={})
            candidate = Candidate(*degrees, samples=-(-self.config.batch_size // degrees[0]))
            needed = other.needed(candidate)
            if needed <= self.memory:
                return f"{way_text(recompute, shards)} ({needed / 1e9:.3g} GB a rank), "
        return ""

    def _measured(self, fitting: Sequence[Candidate]) -> Found:
        """Measure local work and links where the settings do not give them."""
        settings = self.settings
        shapes = tuple(Shape(c.busiest(self.shard), c.samples) for c in fitting)
        given: Links = {(): Link(settings.alpha or 0.0, settings.beta or 0.0)}
        ask = self._asks
        job = Job(self.config, self.spec, shapes, settings.seconds, cache_folder(settings.cache), settings.gflops, ask)
        everywhere = dict.fromkeys(range(len(fitting)), given)
        if settings.gflops and not ask:
            return Found({}, everywhere)
        # A single process starts as many as will share the machine, because they slow each other down.
        if self.session.world.size > 1 or self.busy == 1:
            found = probe(job, self.session)
        else:
            found = measured_here(job, self.busy, max(1, cores() // self.busy))
        return Found(found.pieces, found.links or everywhere)

    @property
    def _asks(self) -> bool:
        """Return True if links have to be timed."""
        return self.settings.alpha is None and self.ranks > 1

    def refuse_no_link(self) -> None:
        """Refuse a plan that needs the time of a message where no link can be timed.

        Raises:
            UserError: `plan.alpha` is not given, and a single process measures for several ranks, or `plan.simulate`
                is set and one rank is planned.
        """
        if self.settings.simulate and self.settings.alpha is None and not self._asks:
            raise UserError(
                "plan.simulate=true: one rank has no link to time, and messages would be predicted to take no time;"
                " give seconds a message and seconds a byte (plan.alpha=2e-5 plan.beta=1e-9), or plan.ranks=2 or more"
            )
        if self._asks and self.session.world.size == 1 and self.busy == 1:
            raise UserError(
                f"plan.alpha, plan.beta: one process measures here for {self.ranks} ranks, so there is no link to time;"
                " give seconds a message and seconds a byte of the links (plan.alpha=2e-5 plan.beta=1e-9), or start"
                " two ranks or more"
            )

    @property
    def _on_node(self) -> int:
        """Return the number of ranks on a node."""
        return self.session.world.local_size if self.session.world.size > 1 else self.local

    def costed(self, c: Candidate, piece: Piece, links: Links, traced: Tracing) -> Candidate:
        """Return a partition with the cost of its step, from the local work of its busiest rank and its dry run."""
        buckets, overlap = exchange_traffic(
            self.config.optim, traced.parameters, c.topology, self._on_node, traced.parts, traced.late
        )
        messages = [_between(m, c.topology) for m in traced.traffic.messages]
        messages += sums_of_copies(messages, c.data * c.lat * c.lon // self.config.parallel.shard)
        cost = step_cost(piece, messages, buckets, links, overlap=overlap)
        return replace(c, cost=cost)


def ways(config: TrainConfig, spec: ModelSpec, ranks: int, *, every: bool = False) -> list[tuple[bool, int]]:
    """Return the pairs (`model.recompute`, `parallel.shard`) to try until one fits into memory, the fastest pair first.

    With `every`, return all possible pairs, and not only those that the settings allow.
    """
    recompute, shard = spec.config.recompute, config.parallel.shard
    if spec.config.bank:  # a bank allows neither: its kernels are made once a pass, on each rank
        return [(False, 1)]
    again = [False, True] if every or recompute == "auto" else [recompute]
    free = shard == "auto" or (every and config.optim.exchange is ExchangeName.allreduce)
    shards = [n for n in range(1, ranks + 1) if ranks % n == 0] if free else [shard]
    return [(one, n) for one in again for n in shards]


def with_way(config: TrainConfig, spec: ModelSpec, recompute: bool, shards: int) -> dict[str, Any]:
    """Return settings and spec with one of the `ways`, in a dictionary with the keys `config` and `spec`."""
    parallel, model = replace(config.parallel, shard=shards), replace(config.model, recompute=recompute)
    changed = replace(spec, config=replace(spec.config, recompute=recompute))
    return {"config": replace(config, parallel=parallel, model=model), "spec": changed}


def way_text(recompute: bool, shards: int) -> str:
    """Return one of the `ways` as settings of the command line."""
    return f"parallel.shard={shards} model.recompute={str(recompute).lower()}"


def settled(config: TrainConfig, spec: ModelSpec, session: Session) -> tuple[TrainConfig, ModelSpec]:
    """Replace `parallel.shard=auto` and `model.recompute=auto` by the first of the `ways` that fits into memory.

    The session has the mesh of the run. The spec may be that of a run that is resumed.

    Raises:
        UserError: none fits; the message says how much the last one needs.
    """
    spec = replace(spec, config=replace(spec.config, recompute=config.model.recompute))
    topology = session.topology
    samples, ranks = -(-config.batch_size // topology.data), topology.data * topology.spatial
    candidate = Candidate(topology.data, topology.lat, topology.lon, samples=samples)
    for recompute, shards in ways(config, spec, ranks):
        changed = with_way(config, spec, recompute, shards)
        planner = Planner(**changed, settings=PlanSettings(), session=session, ranks=ranks)
        # The first rank makes the dry run for all, because they have to make the same choice.
        needed, weights = session.once(lambda: (planner.needed(candidate), planner.traced(candidate).weights))  # noqa: B023
        way, rank = way_text(recompute, shards), f"{needed / 1e9:.3g} GB a rank of {ranks}"
        if needed <= planner.memory:
            log.info("plan: %s: %s weights: %s, of %.3g GB", way, number_text(weights), rank, planner.memory / 1e9)
            return changed["config"], changed["spec"]
    raise UserError(
        f"{way}: {number_text(weights)} weights: {rank}, where each has {planner.memory / 1e9:.3g} GB; start more"
        " ranks, use a smaller model, or a smaller batch_size"
    )


def number_text(weights: int) -> str:
    """Return a number of weights in short, such as `1.3 M`."""
    units = (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")
    size, unit = next((s, u) for s, u in units if weights >= 0.9995 * s or s == 1)  # 999,999 are 1 M
    return f"{weights / size:.3g} {unit}".strip()


def _between(message: Message, topology: Topology) -> Message:
    """Convert a message of a dry run with fewer data ranks to the same message among the ranks of `topology`."""
    ranks = topology.data * topology.spatial
    # Only sums over all ranks of the model change with the number of data ranks. Halos do not.
    if message.axes != MODEL_AXES or message.ranks == ranks:
        return message
    size = message.sent * message.ranks // (2 * (message.ranks - 1))  # bytes of the tensor that is summed over ranks
    sent = 2 * size * (ranks - 1) // ranks
    return replace(message, ranks=ranks, sent=sent, received=sent)


def plan(config: PlanConfig) -> Path:
    """Print the predicted cost of every partition, write plan.json, and return its path.

    Raises:
        UserError: there is no store, settings do not fit it, no link can be timed, no partition fits the ranks or their
            memory, or the output folder cannot be written.
    """
    check_writable(config.output)
    # The degrees in the settings are those of the planned run, not of the ranks that measure here.
    with start(replace(config.parallel, data="auto", lat="auto", lon="auto")) as session:
        setup.use_threads(config, None, sharing_cores(session.mesh.world, session.device))
        source = open_store(config.data.store)
        spec = setup.build_spec(config, source)
        config = setup.with_depth(config, spec)
        # Impossible settings are refused before the measurements, which take a minute.
        reader = setup.open_reader(config, source, spec)
        dates = checked_dates(config, reader) if config.data.train else None
        here = torch.cuda.device_count() or cores()
        ranks = config.plan.ranks or (session.world.size if session.world.size > 1 else here)
        possible = ways(config, spec, ranks)
        for recompute, shards in possible:
            planner = Planner(
                **with_way(config, spec, recompute, shards), settings=config.plan, session=session, ranks=ranks
            )
            planner.refuse_no_link()
            try:
                found = planner.candidates()
                break
            except UserError:  # raised on all ranks
                if (recompute, shards) == possible[-1]:
                    raise
        config, best = replace(config, parallel=planner.config.parallel, model=planner.config.model), pick(found)
        folder = Path(config.output) / config.run
        if not session.first:
            return folder / "plan.json"
        folder.mkdir(parents=True, exist_ok=True)
        _tell(config, found, best)
        weights = planner.traced(best).weights
        print(
            f"{way_text(config.model.recompute, config.parallel.shard)}: {number_text(weights)} weights:"
            f" {best.memory / 1e9:.3g} GB a rank of {ranks}"
        )
        assert best.cost is not None
        if dates is not None:
            loading = _with_memory(config, best, session)
            print(describe(loading, reader, dates, best.topology, best.cost.seconds, config.plan.ranks_per_node))
            sizes = sorted({*config.data.members, config.data.validation_members})
            print(describe_fits(reader, work_of(reader, *dates, sizes), ranks, config.data.validation_members))
        else:
            print("data.train names no init times, so neither loading nor fits are predicted.")
        content: dict[str, Any] = {"ranks": ranks, "best": to_json(best), "partitions": [to_json(c) for c in found]}
        if config.plan.simulate:
            content["scaling"] = _scaling(planner, found, folder)
        return write_whole(folder / "plan.json", json.dumps(content, indent=2) + "\n")


def _with_memory(config: PlanConfig, best: Candidate, session: Session) -> PlanConfig:
    """Return settings whose `loading.ram` is half of what a step leaves of `plan.memory_gb`.

    A run takes as much if it finds that much free. The settings stay as they are if `plan.memory_gb` is zero or
    `loading.ram` is given, and on a GPU, because `plan.memory_gb` is then the GPU's memory, and not the host's.
    """
    if not config.plan.memory_gb or config.loading.ram is not None or session.device.type != "cpu":
        return config
    left = max(0, int(1e9 * config.plan.memory_gb) - best.memory) // 2
    return replace(config, loading=replace(config.loading, ram=left))


def _tell(config: PlanConfig, found: Sequence[Candidate], best: Candidate) -> None:
    """Print the table of partitions and the settings of the best."""
    print(table(found, config.batch_size, best))
    hidden = sum(bool(c.why) for c in found)
    if config.plan.why:
        for line in reasons(found):
            print(line)
    elif hidden:
        print(f"{hidden} other partition{'s do' if hidden > 1 else ' does'} not fit; plan.why=true gives the reasons")
    print(f"parallel.data={best.data} parallel.lat={best.lat} parallel.lon={best.lon}")


def _scaling(planner: Planner, found: Sequence[Candidate], folder: Path) -> list[dict[str, Any]]:
    """Predict the scaling, print and plot it, write report.html, and return it as JSON values; none if nothing fits."""
    fitting = [c for c in found if not c.why]
    links = {axes: link for some in planner.measured.links.values() for axes, link in some.items()}
    points = scaling.simulated(planner, fitting, planner.measured.pieces, links)
    if not points:
        print(f"plan.devices={planner.settings.devices}: so few cannot train; give {planner.ranks} or more")
        return []
    text = scaling.table(points, planner.config.parallel.shard)
    print(f"\n{text}")
    plot = scaling.plot(points, folder / "scaling.png")
    image = base64.b64encode(plot.read_bytes()).decode()
    body = f'<img alt="scaling" src="data:image/png;base64,{image}"><pre>{html.escape(text)}</pre>'
    page = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Predicted scaling</title></head>'
    write_whole(folder / "report.html", f"{page}<body><h1>Predicted scaling</h1>{body}</body></html>\n")
    return [{"scaling": p.kind, "devices": p.devices, "batch": p.batch, **to_json(p.best)} for p in points]


def shared_out(
    config: TrainConfig, spec: ModelSpec, session: Session, before: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Choose the partition if `parallel.lat` or `parallel.lon` is auto, and set up its mesh. All ranks must call this.

    A run that is resumed on as many ranks keeps its mesh, to continue bit for bit, unless its settings name another.
    `before` is the configuration of the run that is resumed.

    Raises:
        UserError: no partition fits, or the settings cannot be planned for.
    """
    if not config.parallel.planned:
        return config
    ranks = session.world.size
    known = [before["parallel"].get(key) for key in ("data", "lat", "lon")] if before else []
    wanted = (getattr(config.parallel, key) for key in ("data", "lat", "lon"))
    kept = all(now in ("auto", then) for now, then in zip(wanted, known, strict=False))
    if known and kept and all(isinstance(n, int) for n in known) and math.prod(known) == ranks:
        chosen = Candidate(*known)
    elif ranks == 1 or spec.config.name != "unet3d":
        chosen = Candidate(ranks, 1, 1)
    else:
        planner = Planner(config, spec, PlanSettings(), session, ranks)
        found = planner.candidates()
        chosen = session.once(lambda: pick(found))
        if session.first:
            log.info("parallel=auto: %s\n%s", chosen, table(found, config.batch_size, chosen))
    session.share_out(chosen.topology)
    parallel = replace(config.parallel, data=chosen.data, lat=chosen.lat, lon=chosen.lon)
    return replace(config, parallel=parallel)
