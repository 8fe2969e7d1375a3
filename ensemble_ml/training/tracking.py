"""The log of a run: a progress bar or plain lines, `log.jsonl`, and TensorBoard if it is installed."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

from ensemble_ml.folders import strict, write_whole
from ensemble_ml.loading.counters import Counters
from ensemble_ml.machine import taken_memory
from ensemble_ml.training.mllog import FILE, MUTE, Mute, RunLog

log = logging.getLogger(__name__)

LOG = "log.jsonl"
TIERS = ("storage", "ram", "disk", "peers")


class Tracker:
    """The logs of one run folder, used as a context.

    Each line of `log.jsonl` is a JSON object, with null for numbers that are not finite. It has `step` and one of
    these:

    - the loss and its parts: means over the steps since the line before, without skipped ones (null if all were).
      Beside them stand skipped (how many, if any), lr, samples_per_s, memory_mb and wait (the fraction of the time that
      was spent waiting for data). Over several ranks there are sent_mb (what this rank sent in a step) and
      exchange_wait (the fraction of the time that it waited for others at halos, sums and gradients; the time that NCCL
      lets the GPU wait is not seen). With a planned loader there is `loading`: hits (the fraction of packed bytes that
      are not from slow storage), MB/s of each tier and, if peers or caches failed, fallback_mb (read from slow storage
      in their place). samples_per_s, wait, exchange_wait and `loading` only cover the steps since the last validation
      or checkpoint, if that is later than the line before;
    - `validation`: its scores, and `best`, whether they are the best so far;
    - `momentum_sync`: the layers whose momenta were averaged, the bytes sent and, if measured, the variances;
    - `tournament`: the scores of all trainers, `from` (the trainer whose state each has now) and the seconds that
      this one `waited` for the others and `swapped` states;
    - `checkpoint`: the seconds that the training waited for it (`held_s`).

    A resumed run removes the lines that a killed one wrote beyond its last checkpoint, because it takes their steps
    again.

    Args:
        run: the run folder.
        steps: steps of the whole run.
        start_step: steps that are done before.
        resumed: the run goes on from a checkpoint.
        every: steps between lines.
        tensorboard: also write to TensorBoard.
        unwritten: what the checkpoint holds of the next line.
        mllog: also write this log.
        shown: show a progress bar or lines; false where another trainer of the job shows them.
    """

    def __init__(
        self,
        run: Path,
        *,
        steps: int,
        start_step: int,
        resumed: bool,
        every: int,
        tensorboard: bool,
        unwritten: Mapping[str, Any] | None = None,
        mllog: RunLog | Mute = MUTE,
        shown: bool = True,
    ):
        self._run, self._steps, self._every = run, steps, every
        if resumed:
            _cut(run / LOG, start_step)
        else:
            (run / LOG).unlink(missing_ok=True)
        self._stream = open(run / LOG, "a")  # noqa: SIM115 - closed by __exit__
        self._board = _board(run, start_step) if tensorboard else None
        self._mllog = mllog
        self._mllog.open(run / FILE)
        terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=start_step, unit="step", disable=not terminal, dynamic_ncols=True)
        self._plain, self._shown = not terminal, shown
        known = unwritten or {}
        # The steps since the last line were taken before the checkpoint, so their sums come from there.
        self._sums: dict[str, float] = dict(known.get("sums", {}))
        self._count, self._sent, self._skipped = (known.get(name, 0) for name in ("count", "sent", "skipped"))
        self._latest: tuple[int, float] | None = None  # number and learning rate of the last step
        self.counters = Counters()  # those of the loader
        self.restart_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._mllog.ended(well=kind is None)
        self._bar.close()
        self._stream.close()
        if self._board is not None:
            self._board.close()

    def step(
        self,
        step: int,
        *,
        samples: int,
        waited: float,
        lr: float,
        loss: dict[str, float],
        sent: int = 0,
        exchanged: float = 0.0,
        skipped: bool = False,
    ) -> None:
        """Log a step that is done.

        Args:
            step: its number, counted from 1.
            samples: samples of the whole batch.
            waited: seconds that this rank waited for data.
            lr: learning rate.
            loss: the loss and its parts.
            sent: bytes that this rank sent in the step.
            exchanged: seconds that this rank waited for others.
            skipped: the step was left out, because loss or gradients were not finite.
        """
        self._samples += samples
        self._waited += waited
        self._sent += sent
        self._exchanged += exchanged
        self._count += 1
        self._skipped += skipped
        self._sums = {name: self._sums.get(name, 0.0) + (0.0 if skipped else value) for name, value in loss.items()}
        self._bar.update()
        self._mllog.stepped(step, self._steps)
        self._latest = step, lr
        if step % self._every == 0 or step == self._steps:
            self.write_line()

    def write_line(self) -> None:
        """Log the steps since the last line; also where the run ends before its last planned step."""
        if self._latest is None or not self._count:
            return
        step, lr = self._latest
        took = max(time.perf_counter() - self._began, 1e-9)
        # Computed once, so that the file and the screen agree.
        values, loading = self._values(took, lr), self._loading(took)
        self._write({"step": step, **values, **({"loading": loading} if loading else {})})
        self._scalars(step, {f"train/{k}": v for k, v in values.items()})
        self._scalars(step, {f"loading/{k}": v for k, v in loading.items()})
        short = self._in_words(values, loading)
        self._bar.set_postfix_str(short)
        if self._plain and self._shown:
            log.info("step %d/%d: %s", step, self._steps, short)
        self._sums, self._count, self._sent, self._skipped = {}, 0, 0, 0
        self.restart_clock()

    def _values(self, took: float, lr: float) -> dict[str, Any]:
        """Return the values of a line. `took` is the number of seconds since `restart_clock`."""
        # Skipped steps have no loss that means anything, so the means are over the others.
        taken = self._count - self._skipped
        values = {
            **{name: _digits(value / taken) if taken else None for name, value in self._sums.items()},
            **({"skipped": self._skipped} if self._skipped else {}),
            "lr": lr,
            "samples_per_s": _digits(self._samples / took, 4),
            "memory_mb": round(memory_mb()),
            "wait": round(self._waited / took, 3),
        }
        # Only jobs of several ranks send anything.
        if self._sent:
            values |= {"sent_mb": _digits(self._sent / self._count / 1e6, 4)}
            values |= {"exchange_wait": round(self._exchanged / took, 3)}
        return values

    def _in_words(self, values: Mapping[str, Any], loading: Mapping[str, float]) -> str:
        """Return a line as it is shown."""
        short = "no loss" if values["loss"] is None else f"loss {values['loss']:.4f}"
        if self._skipped:
            short += f" ({self._skipped} of {self._count} steps left out)"
        where = " of the GPU" if torch.cuda.is_initialized() else ""
        short += f", {values['samples_per_s']:.3g} samples/s, {values['memory_mb']} MB{where}"
        if self._sent:
            short += f", {values['sent_mb']:.3g} MB sent a step, {values['exchange_wait']:.0%} waiting for ranks"
        if loading:
            tiers = ", ".join(f"{tier} {loading[tier]:.3g}" for tier in TIERS if loading.get(tier))
            short += f", wait {values['wait']:.1%}, hits {loading['hits']:.0%}" + (f", MB/s {tiers}" if tiers else "")
        return short

    @property
    def unwritten(self) -> dict[str, Any]:
        """Return what the steps since the last line add to the next one, in JSON's types.

        It is empty if there are no such steps, or if a sum is not finite.
        """
        if not self._count or not all(map(math.isfinite, self._sums.values())):
            return {}
        return {"sums": self._sums, "count": self._count, "sent": self._sent, "skipped": self._skipped}

    def validation(self, step: int, scores: dict[str, float], *, best: bool) -> None:
        """Log the scores on the validation dates after a step, and whether they are the best so far."""
        self._write({"step": step, "validation": scores, "best": best})
        self._mllog.validated(step, scores)
        self._scalars(step, {f"validation/{k}": v for k, v in scores.items()})
        told = ", ".join(f"{name} {value:.4f}" for name, value in scores.items()) or "no target to score"
        self.say(f"step {step}: validation {told}{' (best so far)' if best else ''}")

    def note(self, step: int, momentum: dict[str, Any]) -> None:
        """Log whose momenta the exchange averaged after a step, the bytes sent, and the variances that chose them."""
        self._write({"step": step, "momentum_sync": momentum})
        self._scalars(step, {f"momentum_variance/{k}": v for k, v in (momentum.get("variance") or {}).items()})
        self.say(f"step {step}: momentum of {len(momentum['layers'])} layers averaged, {momentum['bytes']} bytes sent")

    def tournament(self, held: dict[str, Any], text: str, seconds: dict[str, float]) -> None:
        """Log a tournament.

        Args:
            held: the record of the tournament (`tournament.compete`).
            text: the same in words.
            seconds: how long this trainer waited for the others (`waited`), and sent or took over a state (`swapped`).
        """
        plain = {"scores": held["scores"], "from": held["from"]}
        self._write({"step": held["step"], "tournament": plain | {k: _digits(v, 3) for k, v in seconds.items()}})
        self.say(f"step {held['step']}: tournament: {text}")

    def checkpoint(self, step: int, held: float) -> None:
        """Log that the checkpoint of a step is being written, and the seconds that the training waited for it."""
        self._write({"step": step, "checkpoint": {"held_s": _digits(held, 3)}})

    def say(self, text: str) -> None:
        """Print a line for the person who watches."""
        if not self._shown:
            return
        if self._plain:
            log.info("%s", text)
        else:
            self._bar.write(text, file=sys.stderr)

    def restart_clock(self) -> None:
        """Start a new interval for rates and waits, so that it contains training alone."""
        self._began, self._samples, self._waited, self._exchanged = time.perf_counter(), 0, 0.0, 0.0
        self._counted = self.counters.snapshot()

    def _loading(self, took: float) -> dict[str, float]:
        """Return hits, MB/s by tier and fallback_mb of the `took` seconds since `restart_clock`.

        The result is empty if nothing was counted in the whole run.
        """
        now = self.counters.snapshot()
        # Counters run through the whole run, so the bytes of an interval are differences.
        moved = {tier: now[tier] - self._counted.get(tier, 0) for tier in TIERS}
        if not any(now[tier] for tier in TIERS):
            return {}
        total = sum(moved.values())
        found = {"hits": round(1 - moved["storage"] / total, 4) if total else 1.0}
        found |= {tier: _digits(count / took / 1e6, 4) for tier, count in moved.items()}
        if failed := now["fallback"] - self._counted.get("fallback", 0):
            found["fallback_mb"] = _digits(failed / 1e6, 4)
        return found

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line to `log.jsonl`."""
        self._stream.write(_json(line) + "\n")
        # Every line reaches the file at once, so that a killed run loses none.
        self._stream.flush()

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write numbers to TensorBoard."""
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)


class Silent(Mute):
    """The tracker of a rank that logs nothing."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.unwritten: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def memory_mb() -> float:
    """Return the memory in use, in units of 1e6 bytes: of the process, or the peak on the GPU if it is in use."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    taken = taken_memory()
    if taken is None:  # no /proc: take the peak so far, which macOS gives in bytes and others in kilobytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return taken / 1e6


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `log.jsonl`. A line that a killed run left unfinished is skipped."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _cut(path: Path, step: int) -> None:
    """Remove the lines of later steps from a log."""
    if not path.exists():
        return
    kept = [line for line in read_log(path) if line["step"] <= step]
    write_whole(path, "".join(_json(line) + "\n" for line in kept))


def _board(run: Path, start_step: int) -> Any:
    """Return a TensorBoard writer, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info("tensorboard: not installed, so only %s is written; pip install 'ensemble-ml[tracking]'", LOG)
        return None
    # `purge_step` hides points that a killed run wrote beyond its checkpoint.
    return SummaryWriter(str(run / "tensorboard"), purge_step=start_step + 1 if start_step else None)


def _json(line: dict[str, Any]) -> str:
    """Return a line as JSON."""
    return json.dumps(strict(line), allow_nan=False)


def _digits(value: float, digits: int = 9) -> float:
    """Return a number rounded to some significant digits."""
    return float(f"{value:.{digits}g}")
