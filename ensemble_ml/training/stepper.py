"""One optimizer step of one rank: forward, backward, exchange, and what ranks tell each other of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.config import Nonfinite
from ensemble_ml.errors import UserError
from ensemble_ml.loading import Batch
from ensemble_ml.loading.reader import iso
from ensemble_ml.models.running import Running
from ensemble_ml.optim import Outcome
from ensemble_ml.training.assemble import Run
from ensemble_ml.training.recorded import Pass, Recorded, cuda_graph, may_record
from ensemble_ml.training.room import told_of_memory
from ensemble_ml.wording import shortened

log = logging.getLogger(__name__)

_MOST_SKIPPED = 10  # steps in a row that nonfinite=skip leaves out: a run that learns nothing more should end
OTHERWISE = "with a lower optim.lr, optim.clip=1 or model.precision=float32"


class NotFinite(UserError):
    """A step whose loss or gradient is not finite, on every rank; the state is still the one before it."""

    def __init__(self, where: str):
        super().__init__(f"{where}; begin {OTHERWISE}")
        self.where = where


class Stepper:
    """Takes the steps of a run.

    Attributes:
        waited: seconds that the last step waited for other ranks.
        skipped: steps in a row that were left out.
        noted: what the exchange tells of the last step.
    """

    def __init__(self, run: Run):
        self.setup, self.state, self.session, self.config = run, run.state, run.session, run.config
        self.waited, self.skipped = 0.0, 0
        self.noted: dict[str, Any] = {}

    def __call__(self, batch: Batch, says: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Take a step.

        Args:
            batch: this rank's part.
            says: what this rank says of itself, asked once the pass is done: so what came meanwhile is in it.

        Returns:
            The loss and its parts, samples of the whole batch, and the sums of what ranks say.

        Raises:
            NotFinite: it ends the run.
            UserError: it needs more memory than there is.
        """
        state, self.session.step = self.state, self.state.step + 1
        for group in state.optimizer.param_groups:
            group["lr"] = state.schedule(state.step)
        state.optimizer.zero_grad(set_to_none=True)
        state.exchange.with_samples = self.setup.ranks_with_samples(state.step)
        state.exchange.begin(state.step)
        mesh, before = self.session.mesh, self.session.mesh.seconds_waited
        running = Running(state.model)  # a pass that is not finite would leave its mark there
        with told_of_memory(self.config, self.session):
            state.exchange.share = self.setup.part_of(batch, state.step)
            losses = self._pass(batch)
            outcome = state.exchange.finish()
        values = self._summed(losses, batch, says)
        # Who comes late is waited for where ranks meet first: at a halo, or at the weights of the loss.
        self.waited = outcome.waited + mesh.seconds_waited - before
        if math.isfinite(values["loss"]) and outcome.finite:  # on every rank, or on none
            self.skipped = 0
            with told_of_memory(self.config, self.session):  # the first makes its moments
                state.optimizer.step()
        else:
            running.put_back()
            self._leave_out(values["loss"], outcome, batch)
        before = state.exchange.seconds_waited
        self.noted = self._named(state.exchange.after_step())  # momenta are averaged when it is due, whatever the step
        self.waited += state.exchange.seconds_waited - before
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)
        return values

    @cached_property
    def _pass(self) -> Pass:
        """Forward and backward of a batch: leaves gradients, returns the loss and its parts."""
        model, loss = self.state.model, self.setup.loss  # not `self`, which would outlive its last user

        def run(batch: Batch) -> dict[str, Tensor]:
            losses = loss(model(batch.inputs), batch)
            losses["loss"].backward()
            return {name: value.detach() for name, value in losses.items()}

        return Recorded(model, run, cuda_graph) if may_record(model, self.session) else run

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over all of its communicators."""
        return self.session.mesh.bytes_sent + getattr(self.state.exchange, "bytes_sent", 0)

    def _named(self, told: dict[str, Any]) -> dict[str, Any]:
        """What an exchange tells of parameters by number, by their names."""
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
        """Summed over ranks: shares of the losses, samples, what each says of itself."""
        mesh = self.session.mesh
        one_of_group = mesh.spatial.rank == 0
        mine = {name: float(value) for name, value in losses.items()}
        mine |= {"samples": float(len(batch) * one_of_group), **says()}
        total = torch.tensor(list(mine.values()), dtype=torch.float64, device=self.session.device)
        mesh.model.all_reduce(total)
        return dict(zip(mine, total.tolist(), strict=True))

    def _leave_out(self, loss: float, outcome: Outcome, batch: Batch) -> None:
        """Tell of a step that is not finite; the same on every rank.

        Raises:
            NotFinite: it ends the run.
        """
        self.skipped += 1
        what = f"loss {loss}" if not math.isfinite(loss) else f"norm of the gradient {outcome.norm}"
        if self.session.topology.size > 1 and outcome.culprits:
            what = f"gradients that are not finite from ranks {', '.join(map(str, outcome.culprits))}"
        dates = f"on start dates {shortened(batch.init_time)}"
        if outcome.culprits and self.session.topology.rank not in outcome.culprits:  # this rank's dates are others
            [every] = self.setup.batches(self.state.step, self.state.step + 1).draws(self.state.step, 1)
            dates = f"on start dates among {shortened([iso(self.setup.reader.time(draw.date)) for draw in every])}"
        where = f"step {self.state.step + 1}: {what}, {dates}"
        if self.config.optim.nonfinite is Nonfinite.stop or self.skipped > _MOST_SKIPPED:
            raise NotFinite(where)
        log.warning("%s; the step is left out", where)
