"""Write the log of MLPerf HPC, from which time to solution is read.

    :::MLLOG {"namespace": "", "time_ms": 1764300000000, "event_type": ..., "key": ..., "value": ..., "metadata": {...}}

Each line is what the package `mlperf_logging` writes, byte for byte but for file and line number. Its checker reads the
file with the rules of scripts/mlperf/ensemble_ml.yaml. Times count from `run_start`, before the first byte of training
data is read, to `run_stop`: the fits before the first step lie between them, and `prepare`, which stages the data, does
not (MLPerf HPC training rules, version 3.0).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed import Session
from ensemble_ml.folders import strict

log = logging.getLogger(__name__)

FILE = "mllog.txt"
BENCHMARK = "ensemble_ml"
_PREFIX = ":::MLLOG "
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class Mllog:
    """A log file of MLPerf. Lines wait in memory until `open` names the file; from then on each is flushed.

    The clock returns seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock, self._latest = clock, 0
        self._waiting: list[str] = []
        self._stream: TextIO | None = None

    def open(self, path: Path) -> None:
        """Write the lines so far to a new file. An older one is replaced: the checker wants `run_start` once."""
        self._stream = open(path, "w")  # noqa: SIM115 - closed by `close`
        self._stream.write("".join(self._waiting))
        self._stream.flush()
        self._waiting.clear()

    def close(self) -> None:
        """Close the file. Later lines wait in memory and are not written."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def point(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log a fact.

        Args:
            key: one of the keys in `mlperf_logging.mllog.constants`, or a key of our own.
            value: any value that JSON has; a number that is not finite becomes null.
            **metadata: further facts, such as epoch_num.
        """
        self._log(_POINT, key, value, metadata)

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log that an interval begins; the arguments are those of `point`."""
        self._log(_START, key, value, metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log that an interval ends; the arguments are those of `point`."""
        self._log(_END, key, value, metadata)

    def _log(self, kind: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        """Write a line with file and line number of the caller of `point`, `start` or `end`."""
        caller = sys._getframe(2)
        where = {"file": caller.f_code.co_filename, "lineno": caller.f_lineno}
        # The clock of a machine may be set back. The checker takes the order of times for the order of events.
        self._latest = max(self._latest, int(self._clock() * 1e3))
        line = encoded(self._latest, kind, key, value, where | metadata)
        if self._stream is None:
            self._waiting.append(line + "\n")
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def encoded(time_ms: int, kind: str, key: str, value: Any, metadata: dict[str, Any]) -> str:
    """Return a line of the log; `metadata` are file and line number of the event, and further facts."""
    event = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key}
    return _PREFIX + json.dumps(event | {"value": strict(value), "metadata": strict(metadata)})


def staged(lines: str, began: float, ended: float) -> str:
    """Return the log of a run, with the times at which `prepare` began and ended before its other lines."""
    times = ("staging_start", began, _START), ("staging_stop", ended, _END)
    where = {"file": __file__, "lineno": 0}
    return "".join(encoded(int(at * 1e3), kind, key, None, where) + "\n" for key, at, kind in times) + lines


class RunLog(Mllog):
    """The log of a training run, from its settings to its last step.

    A run that ends by an error or a signal, or without reaching the score of `until`, ends with the status "aborted".
    """

    def __init__(self, config: TrainConfig):
        super().__init__()
        self._until, self._reached = config.until, False
        self._steps_per_epoch, self._epoch = 1, 0  # the epoch that is under way, from 1; 0 between epochs
        tracking = config.tracking
        self.point("cache_clear", tracking.cache_clear)
        self.start("init_start")
        facts = {
            "submission_benchmark": BENCHMARK,
            "submission_org": tracking.org,
            "submission_platform": tracking.platform,
            "submission_division": "open",
            "submission_status": "research",
            "seed": config.seed,
            "global_batch_size": config.batch_size,
            "opt_name": config.optim.name.value,
            "opt_base_learning_rate": config.optim.lr,
        }
        if config.until:
            facts["quality_target"] = config.until
        for key, value in facts.items():
            self.point(key, value)

    def reads_data(self) -> None:
        """Log the end of initialisation and the start of the measured time. The caller may read training data now."""
        self.end("init_stop")
        self.start("run_start")

    def knows_data(self, ranks: int, train: int, validation: int, steps_per_epoch: int) -> None:
        """Log the size of the job: ranks and dates. In `steps_per_epoch` steps all training dates are seen once."""
        self._steps_per_epoch = steps_per_epoch
        for key, value in {"number_of_ranks": ranks, "train_samples": train, "eval_samples": validation}.items():
            self.point(key, value)

    def trains(self, step: int) -> None:
        """Log the beginning of an epoch after `step` steps."""
        self._epoch = step // self._steps_per_epoch + 1
        self.start("epoch_start", epoch_num=self._epoch)

    def stepped(self, step: int, steps: int) -> None:
        """Log the end of the epoch if a step was its last, and the beginning of the next epoch if there is one."""
        if step % self._steps_per_epoch == 0:
            self._close_epoch()
            if step < steps:
                self.trains(step)

    def validates(self, step: int) -> None:
        """Log that a validation begins after `step` steps."""
        self.start("eval_start", epoch_num=step // self._steps_per_epoch)

    def validated(self, step: int, scores: Mapping[str, float]) -> None:
        """Log the scores of a validation by name, of which crps_ratio is the one to reach."""
        epoch = step // self._steps_per_epoch
        error = scores.get("crps_ratio")
        if error is not None:
            self.point("eval_error", error, epoch_num=epoch)
            self._reached = self._reached or error <= self._until
        for name, value in scores.items():
            self.point(f"{BENCHMARK}_{name}", value, epoch_num=epoch)
        self.end("eval_stop", epoch_num=epoch)

    def ended(self, *, well: bool) -> None:
        """Log the end of the run, which was cut short unless it ended `well`, and close the file."""
        self._close_epoch()
        success = well and (self._reached or not self._until)
        self.end("run_stop", status="success" if success else "aborted")
        self.close()

    def _close_epoch(self) -> None:
        """Log the end of the epoch that is under way, if there is one."""
        if self._epoch:
            self.end("epoch_stop", epoch_num=self._epoch)
            self._epoch = 0


class Mute:
    """A log that nobody keeps: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


MUTE = Mute()


def run_log(config: TrainConfig, session: Session, *, resumed: bool) -> RunLog | Mute:
    """Return the log of a run: mute if `tracking.mllog` is off, on ranks after the first, and for a resumed run."""
    if not config.tracking.mllog or not session.first:
        return MUTE
    if resumed:
        log.warning("tracking.mllog: a run that is resumed has no time to solution, so its log is left as it is")
        return MUTE
    return RunLog(config)
