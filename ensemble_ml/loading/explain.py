"""Predict what a plan of loading will do before anything is loaded: bytes from each tier, time, and what limits it.

The prediction follows a pipeline with three stages: each `batches.Turn` is read from slow storage, decoded by threads,
and computed by the model. Reading is never further ahead than the buffers allow. All ranks share one storage, whose
speed is measured or given.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ensemble_ml.config import LoadingConfig
from ensemble_ml.loading.batches import Draw, Schedule, read_sample
from ensemble_ml.loading.unit_plan import UnitPlan, Units

_SAMPLE = 64e6  # bytes after which a measurement of storage stops


@dataclass(frozen=True)
class Speeds:
    """The speeds on which a prediction is based.

    Attributes:
        storage: Bytes per second of slow storage, for all ranks together.
        decode: Seconds that one thread takes to decode a sample.
        step: Seconds that a training step computes.
    """

    storage: float
    decode: float
    step: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a run, in seconds: in all, computing, and waiting for batches; and what limits it."""

    total: float
    compute: float
    waited: float
    limit: str


def measure(units: Units, schedule: Schedule) -> Speeds:
    """Measure the speed of storage and of decoding, on the first rank's samples of at most eight turns.

    The operating system may have these samples in its cache, which makes storage look faster than it is.
    """
    draws: list[Draw] = [draw for turn in islice(iter(schedule), 8) for draw in turn.read_by(0)]
    bytes_read, reading, decoding, done = 0, 0.0, 0.0, 0
    for draw in draws:
        began = time.perf_counter()
        packed = []
        for unit in units.of(draw).tolist():
            packed.append(data := np.empty(int(units.sizes[unit]), np.uint8))
            units.read(unit, data.data)
            bytes_read += len(data)
        read = time.perf_counter()
        read_sample(units.over(draw, packed), draw)
        reading, decoding, done = reading + read - began, decoding + time.perf_counter() - read, done + 1
        if bytes_read > _SAMPLE:
            break
    return Speeds(bytes_read / max(reading, 1e-9), decoding / max(1, done))


def predict(
    plan: UnitPlan, units: Units, speeds: Speeds, *, ahead: int, threads: int, validations: np.ndarray, lanes: int = 1
) -> Prediction:
    """Predict the time of a run by following the pipeline of the rank with most samples through all turns.

    Each of the `lanes`, groups of ranks, reads its own rows of every sample from the same storage. `validations` (N,)
    tells which turns belong to a validation. Such a turn is assumed to cost a third of a training step.
    """
    trace = plan.trace
    turns = len(validations)
    # Only uses that no cache serves cost time on slow storage.
    size = plan.sizes[trace.unit] * ~plan.hit
    stored = np.bincount(trace.turn, size, turns) * lanes / speeds.storage
    targets = trace.unit % units.each == units.each - 1  # each sample has exactly one unit of targets
    samples = np.bincount(trace.turn[targets], minlength=turns) * plan.columns / max(1, plan.ranks)
    decoded = np.ceil(samples) * speeds.decode / threads
    computed = np.where(validations, speeds.step / 3, speeds.step)
    return _pipeline(stored, decoded, computed, ahead)


def _pipeline(stored: np.ndarray, decoded: np.ndarray, computed: np.ndarray, ahead: int) -> Prediction:
    """Compute the end of each turn from its seconds of storage, decoding and compute.

    The three stages of one turn follow each other; the stages of different turns overlap.
    """
    ended: list[float] = []
    read = ready = end = waited = 0.0
    for turn, (storing, decoding, computing) in enumerate(zip(stored, decoded, computed, strict=True)):
        # A buffer becomes free when the turn that used it before has been computed.
        free = ended[turn - ahead - 1] if turn > ahead else 0.0
        read = max(read, free) + storing
        ready = max(ready, read) + decoding
        waited += max(0.0, ready - end)
        end = max(end, ready) + computing
        ended.append(end)
    compute = float(computed.sum())
    slower = "slow storage" if stored.sum() >= decoded.sum() else "decoding"
    return Prediction(float(end), compute, float(waited), "compute" if waited < 0.05 * end else slower)


def explain(
    config: LoadingConfig, plan: UnitPlan, units: Units, schedule: Schedule, *, ahead: int, step: float | None = None,
    lanes: int = 1,
) -> str:  # fmt: skip
    """Describe in lines of text what a plan of loading reads, from where, in what time, and what limits it.

    Without `step`, the seconds that a training step computes, the time is predicted without compute. `lanes` is the
    number of groups of ranks, each of which reads its own rows of every sample.
    """
    validations = np.array([turn.validation for turn in schedule], bool)
    found = measure(units, schedule)
    rate = found.storage if config.bandwidth is None else 1e6 * config.bandwidth
    speeds = Speeds(rate, found.decode, step or 0.0)
    then = predict(plan, units, speeds, ahead=ahead, threads=config.threads, validations=validations, lanes=lanes)
    seconds = plan.traffic()["storage"] * lanes / rate
    source = "measured now, perhaps from the system's cache" if config.bandwidth is None else "given"
    lines = [
        *_what(plan, ahead),
        f"  slow storage at {rate / 1e6:.0f} MB/s ({source}): {seconds:.3g} s in all, if it reads without pauses",
        f"  decoding: {1e3 * found.decode:.3g} ms a sample on each of {config.threads} threads",
    ]
    if step is None:
        each = 1e3 * then.total / max(1, int((~validations).sum()))
        lines.append(f"  predicted without compute: {then.total:.3g} s, {each:.3g} ms a step; limit: {then.limit}")
    else:
        lines.append(
            f"  predicted: {then.total:.3g} s, of it {then.compute:.3g} s compute, {then.waited:.3g} s waiting for data"
            f"; limit: {then.limit}"
        )
    return "\n".join(lines)


def _what(plan: UnitPlan, ahead: int) -> list[str]:
    """Return lines on what is read, how it is cached, and from where it is read."""
    traffic, trace = plan.traffic(), plan.trace
    distinct = np.unique(trace.unit)
    whole, used = max(1, int(plan.sizes[distinct].sum())), max(1, traffic["used"])
    rule = "a cache that never changes" if trace.regular else "Belady's rule with bypass"
    if not plan.exact:
        rule = "the most used units are kept (the run is too long for Belady's rule)"
    room = f"memory {_mb(plan.room.ram)}, disk {_mb(plan.room.disk)}"
    lines = [
        f"Loading by plan: {len(np.unique(trace.turn))} batches over {plan.ranks} ranks, {len(trace.unit)} uses of"
        f" {len(distinct)} cache units (a member, or the targets, of an init time)",
        f"  packed {_mb(whole)}, used {used / whole:.1f} times each",
        f"  cache of a rank: {room}; {rule}; {ahead} batches ahead",
    ]
    names = {"storage": "slow storage", "ram": "memory", "disk": "local disk", "peers": "other ranks"}
    return lines + [
        f"  from {label:<12} {_mb(traffic[name]):>14} {traffic[name] / used:7.2%}" for name, label in names.items()
    ]


def _mb(count: float) -> str:
    """Format a number of bytes in MB (1e6 bytes)."""
    return f"{count / 1e6:,.1f} MB"
