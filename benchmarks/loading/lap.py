"""The work of every rank of every entrant of the loading race, in any interpreter: only numpy is needed.

An entrant yields (epoch, sample numbers, values) batch by batch. The rank checks a probe of each sample's values,
sleeps for the time of the computation, and writes which samples it used, how long that took and how long it waited.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.status import process_bytes
from ensemble_ml.folders import write_whole

Batches = Iterator[tuple[int, list[int], Any]]  # epoch, samples, values (b, M, V, Z, Y, X)
N_VARIABLES, N_LEVELS = 2, 4


@dataclass(frozen=True)
class Size:
    """The amount of data: the number of samples, and the axes of each."""

    samples: int
    members: int
    grid: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return M, V, Z, Y, X of a sample."""
        return self.members, N_VARIABLES, N_LEVELS, *self.grid

    @property
    def bytes(self) -> int:
        """Return the bytes of a sample as float32."""
        return 4 * int(np.prod(self.shape))


@dataclass(frozen=True)
class Spec:
    """The description of a run for an entrant. `ram` and `disk` are bytes of cache for each rank."""

    entrant: str
    data: str
    work: str
    size: dict[str, Any]
    ranks: int
    epochs: int
    batch: int
    compute_ms: float
    ram: int = 0
    disk: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Size:
        """Return number and axes of the samples."""
        return Size(self.size["samples"], self.size["members"], tuple(self.size["grid"]))

    def to_json(self) -> str:
        """Return the description as JSON, for the command line."""
        return json.dumps(asdict(self))


class Meeting:
    """A group of ranks that exchange bytes through files. An all-gather also serves as a barrier."""

    def __init__(self, folder: Path, rank: int, ranks: int, name: str = "meeting"):
        self.folder, self.rank, self.ranks, self.name, self.count = folder, rank, ranks, name, 0

    def gather(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order.

        Args:
            value: this rank's bytes.
        """
        paths = [self.folder / f"{self.name}-{self.count}-{rank}" for rank in range(self.ranks)]
        write_whole(paths[self.rank], value)
        self.count += 1
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]


def probe(values: np.ndarray) -> np.ndarray:
    """Return values that stand for a sample in checks: one in a thousand, spread over all of it.

    Args:
        values: the sample.
    """
    return np.asarray(values).reshape(-1)[:: max(1, values.size // 1000)]


def run(spec: Spec, rank: int, batches: Batches) -> None:
    """Iterate over the batches, and write `work`/result{rank}.json.

    Args:
        spec: the run.
        rank: this rank.
        batches: the batches of the entrant.
    """
    expected = np.load(Path(spec.work) / "probes.npy")
    meeting = Meeting(Path(spec.work), rank, spec.ranks, "start")
    used: list[list[int]] = [[] for _ in range(spec.epochs)]
    waits, ends, wrong = [0.0] * spec.epochs, [0.0] * spec.epochs, 0
    meeting.gather(b"")
    before = process_bytes("VmRSS")
    began = asked = time.perf_counter()
    for epoch, samples, values in batches:
        waits[epoch] += time.perf_counter() - asked
        used[epoch] += samples
        for sample, one in zip(samples, values, strict=True):
            wrong += not np.array_equal(probe(np.asarray(one)), expected[sample])
        time.sleep(spec.compute_ms / 1e3 * len(samples))
        asked = time.perf_counter()
        ends[epoch] = asked - began
    meeting.gather(b"")
    seconds = time.perf_counter() - began
    result = {"seconds": seconds, "used": used, "wrong": wrong, "ends": ends, "waits": waits}
    result["peak"] = process_bytes("VmHWM") - before
    (Path(spec.work) / f"result{rank}.json").write_text(json.dumps(result))


def serve(batches: Callable[[Spec, int], Batches]) -> None:
    """Run the specs that arrive on standard input, one a line, each in a fork, so that imports happen only once.

    Each line is answered by one word, `done` or `failed`. Errors are written to `work`/error{rank}. A spec that cannot
    be forked (Streaming has threads and locks of its own) is the last one of its process.

    Args:
        batches: returns the batches of a spec on a rank.
    """
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        told = json.loads(line)
        child = os.fork() if told["fork"] else 0
        if child == 0:
            os.environ.update(told["environment"])
            status = _lap(Spec(**told["spec"]), told["rank"], batches)
            if told["fork"]:
                os._exit(status)
        else:
            status = os.waitpid(child, 0)[1]
        print("failed" if status else "done", file=answers, flush=True)
        if not told["fork"]:
            os._exit(status)


def _lap(spec: Spec, rank: int, batches: Callable[[Spec, int], Batches]) -> int:
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(Path(spec.work) / f"output{rank}", os.O_WRONLY | os.O_CREAT), 1)
        run(spec, rank, batches(spec, rank))
        return 0
    except BaseException:
        (Path(spec.work) / f"error{rank}").write_text(traceback.format_exc())
        return 1


def main(batches: Callable[[Spec, int], Batches]) -> None:
    """Serve specs or, if one is given as argument, run it once as rank $RANK.

    Args:
        batches: returns the batches of a spec on a rank.
    """
    if len(sys.argv) > 1:
        run(spec := Spec(**json.loads(sys.argv[1])), rank := int(os.environ["RANK"]), batches(spec, rank))
    else:
        serve(batches)
