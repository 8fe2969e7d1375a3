"""Take one optimizer step on one rank: forward, backward, exchange with the other ranks, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.config import Nonfinite
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batch
from ensemble_ml.loading.reader import iso
from ensemble_ml.models.speed import Running
from ensemble_ml.optim import Outcome
from ensemble_ml.training.assemble import Run, told_of_memory
from ensemble_ml.training.recorded import Pass, Recorded, cuda_graph, may_record
from ensemble_ml.wording import shortened

log = logging.getLogger(__name__)

_MOST_SKIPPED = 10  # most steps in a row that nonfinite=skip leaves out before the run ends with an error
_BESIDE = ("samples", "stop", "written", "due", "late")  # numbers of a step other than the loss and its parts
OTHERWISE = "with a lower optim.lr, optim.clip=1 or model.precision=float32"


class NotFinite(UserError):
    """An error for a step whose loss or gradient is not finite.

    It is raised on every rank, and the state is still that before the step.

    Args:
        where: the step, the reason and the dates, in words.
    """

    def __init__(self, where: str):
        super().__init__(f"{where}; begin {OTHERWISE}")
        self.where = where


class Stepper:
    """An object that takes the steps of a run.

    Attributes:
        waited: seconds that the last call waited for other ranks.
        skipped: how many steps in a row were left out.
        noted: the report of the exchange on the last step, such as the layers whose momenta it averaged.
        missed: the steps that other ranks took without this one in the last call: by number of the step, its numbers
            as a call returns them, and whether it was left out.
    """

    def __init__(self, run: Run):
        self.setup, self.state, self.session, self.config = run, run.state, run.session, run.config
        self.waited, self.skipped = 0.0, 0
        self.noted: dict[str, Any] = {}
        self.missed: dict[int, tuple[dict[str, float], bool]] = {}

    def __call__(self, batch: Batch, says: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Take one step, and before it the steps that other ranks took while this one computed its gradient.

        Args:
            batch: this rank's part of the batch.
            says: returns numbers of this rank to sum over ranks, such as flags. It is called after the backward pass.

        Returns:
            The loss and its parts, the number of samples of the whole batch, and the sums of the numbers from `says`.

        Raises:
            NotFinite: loss or gradient is not finite, and the step may not be left out.
            UserError: there is not enough memory.
        """
        state, self.session.step = self.state, self.state.step + 1
        state.optimizer.zero_grad(set_to_none=True)
        # In the last batch of an epoch, some ranks may have no sample. The exchange must not count their votes.
        state.exchange.with_samples = self.setup.ranks_with_samples(state.step)
        state.exchange.begin(state.step)
        mesh, before = self.session.mesh, self.session.mesh.seconds_waited
        running = Running(state.model)  # a pass that is not finite would spoil the running statistics
        with told_of_memory(self.config, self.session):
            state.exchange.share = self.setup.part_of(batch, state.step)
            losses = self._pass(batch)
        if state.exchange.slack:
            state.exchange.tells = lambda: self._weighed(losses, batch, says)
        self.waited, self.missed = 0.0, {}
        while True:
            with told_of_memory(self.config, self.session):
                outcome = state.exchange.finish()
            values = self._summed(losses, batch, says) if outcome.sums is None else _means(losses, outcome.sums)
            # Ranks wait for a slow one where they first meet: at a halo exchange, or at the sum of the loss's weights.
            self.waited += outcome.waited + mesh.seconds_waited - before
            self._take(values, outcome, batch, running)
            if not outcome.missed:
                return values
            self.missed[state.step], before = (values, self.skipped > 0), mesh.seconds_waited

    def _take(self, values: dict[str, float], outcome: Outcome, batch: Batch, running: Running) -> None:
        """Update the weights, or leave the step out if loss or gradient is not finite."""
        state = self.state
        for group in state.optimizer.param_groups:
            group["lr"] = state.schedule(state.step)
        # Loss and outcome are those of all ranks, so every rank takes the same branch.
        if math.isfinite(values["loss"]) and outcome.finite:
            self.skipped = 0
            with told_of_memory(self.config, self.session):  # the first step allocates the optimizer's moments
                state.optimizer.step()
        else:
            running.put_back()
            self._leave_out(values["loss"], outcome, batch)
        before = state.exchange.seconds_waited
        self.noted = self._named(state.exchange.after_step())  # averages momenta when due, even if the step is left out
        self.waited += state.exchange.seconds_waited - before
        # A step that is left out counts too: the next one takes the next batch.
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)

    @cached_property
    def _pass(self) -> Pass:
        """Return the forward and backward pass of a batch, recorded as a CUDA graph if that is possible and faster."""
        model, loss = self.state.model, self.setup.loss  # a closure over `self` would make a reference cycle

        def run(batch: Batch) -> dict[str, Tensor]:
            losses = loss(model(batch.inputs), batch)
            losses["loss"].backward()
            return {name: value.detach() for name, value in losses.items()}

        return Recorded(model, run, cuda_graph) if may_record(model, self.session) else run

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes this rank has sent so far, over all of its communicators."""
        return self.session.mesh.bytes_sent + getattr(self.state.exchange, "bytes_sent", 0)

    def _named(self, told: dict[str, Any]) -> dict[str, Any]:
        """Replace the numbers of parameters in an exchange's report by their names."""
        names = {id(p): name for name, p in self.state.model.named_parameters()}
        order = [names[id(p)] for p in self.state.exchange.params]
        if "layers" in told:
            told["layers"] = [order[i] for i in told["layers"]]
        if told.get("variance"):
            told["variance"] = dict(zip(order, told["variance"], strict=True))
        return told

    def _summed(
        self, losses: Mapping[str, Tensor], batch: Batch, says: Callable[[], Mapping[str, float]]
    ) -> dict[str, float]:
        """Sum losses, samples and the numbers from `says` over all ranks."""
        mesh = self.session.mesh
        one_of_group = mesh.spatial.rank == 0
        mine = {name: float(value) for name, value in losses.items()}
        # Ranks of one spatial group share their samples, so only one of each group counts them.
        mine |= {"samples": float(len(batch) * one_of_group), **says()}
        # One collective for all numbers of a step: each would cost a round trip of its own.
        total = torch.tensor(list(mine.values()), dtype=torch.float64, device=self.session.device)
        mesh.model.all_reduce(total)
        return dict(zip(mine, total.tolist(), strict=True))

    def _weighed(
        self, losses: Mapping[str, Tensor], batch: Batch, says: Callable[[], Mapping[str, float]]
    ) -> dict[str, float]:
        """Return this rank's numbers for an exchange to sum: losses times samples, samples, and those from `says`."""
        samples = float(len(batch))
        return {name: float(value) * samples for name, value in losses.items()} | {"samples": samples, **says()}

    def _leave_out(self, loss: float, outcome: Outcome, batch: Batch) -> None:
        """Log that a step is left out, or raise `NotFinite` if `optim.nonfinite` is stop, or too many were in a row.

        The decision is the same on every rank. One of several trainers may leave out any number of steps: if that makes
        its score worse, it loses the next tournament.
        """
        self.skipped += 1
        what = f"loss {loss}" if not math.isfinite(loss) else f"norm of the gradient {outcome.norm}"
        if self.session.topology.size > 1 and outcome.culprits:
            what = f"gradients that are not finite from ranks {', '.join(map(str, outcome.culprits))}"
        dates = f"on init times {shortened(batch.init_time)}"
        # If other ranks have the gradients that are not finite, the message names the dates of the whole batch.
        if outcome.culprits and self.session.topology.rank not in outcome.culprits:
            [every] = self.setup.batches(self.state.step, self.state.step + 1).draws(self.state.step, 1)
            dates = f"on init times among {shortened([iso(self.setup.reader.time(draw.date)) for draw in every])}"
        where = f"step {self.state.step + 1}: {what}, {dates}"
        if self.session.topology.trainer > 1:
            if self.skipped == 1:
                trainer = self.session.topology.place.trainer
                log.warning("trainer %d: %s; such steps are left out until the next tournament", trainer, where)
            return
        if self.config.optim.nonfinite is Nonfinite.stop or self.skipped > _MOST_SKIPPED:
            raise NotFinite(where)
        log.warning("%s; the step is left out", where)


def _means(losses: Iterable[str], sums: Mapping[str, float]) -> dict[str, float]:
    """Return the sums, with each loss divided by the number of samples."""
    return dict(sums) | {name: sums[name] / max(sums["samples"], 1.0) for name in losses}


def only_losses(values: Mapping[str, float]) -> dict[str, float]:
    """Return the loss and its parts, without the other numbers of a step."""
    return {name: value for name, value in values.items() if name not in _BESIDE}
