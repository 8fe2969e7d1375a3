"""Hold the state of a run between two steps, and convert it to a checkpoint and back.

The next step depends on the weights, the moments of the optimizer and the number of steps done. Dates and members
follow from the seed and the step (`loading.order`), and the learning rate from the step. The climate and the scale of
the CRPS loss are buffers of the model. So a resumed run equals an uninterrupted one bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.distributed.choice import OwnState, own_state, restore_state
from ensemble_ml.distributed.sharding import first_row, like, local, place_among_shards, shards_of, whole
from ensemble_ml.models import AnyModel
from ensemble_ml.optim import Exchange
from ensemble_ml.optim.schedule import Schedule
from ensemble_ml.training.checkpoint import Checkpoint, copies

_OPTIMIZER, _RAW, _SPREAD_ERROR = "optimizer.", "raw.", "spread_error"
_AVERAGE, _APART = "average.", "apart."


def learned(model: AnyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that steps change: parameters, and the running statistics of batch norms."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if ".running_" in name)


class Average:
    """A running average of the weights.

    Args:
        model: the model whose weights are averaged.
        decay: the factor of the old average in each step. It is smaller in the first steps, because the first weights
            would otherwise count for too long.
    """

    def __init__(self, model: AnyModel, decay: float):
        self.decay = decay
        self.weights = {name: local(p).clone() for name, p in learned(model)}

    @torch.no_grad()
    def update(self, model: AnyModel, step: int) -> None:
        """Add the weights after a step, counted from 1, to the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in learned(model):
            self.weights[name].lerp_(local(p), 1 - decay)

    @contextmanager
    def in_place(self, model: AnyModel) -> Iterator[None]:
        """Give `model` the averaged weights within the context."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _exchange(self, model: AnyModel) -> None:
        """Swap the weights of the model with the averaged ones, without a copy where they are not sharded."""
        for name, p in learned(model):
            if shards_of(p) is None:
                p.data, self.weights[name] = self.weights[name], p.data
            else:  # FSDP2 gathers from the memory that it knows, and would not notice another one
                own = local(p)
                before = own.clone()
                own.copy_(self.weights[name])
                self.weights[name].copy_(before)


@dataclass(eq=False)
class State:
    """The state of a run between two steps.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        schedule: the schedule of the learning rate.
        steps: number of steps of the whole run.
        spread_error: (N + 1, T, F), the scale of the spread loss for each number of members.
        average: the averaged weights, or None.
        exchange: the exchange of gradients between ranks.
        step: number of steps done.
        best: step and scores of the best validation, or None.
        scores: scores of the latest validation; empty before the first, and if one of them was not finite.
        widths: calibration factors (T, F) of the latest validation, or None.
        validated: the step of the latest validation; None before the first, and if a score was not finite.
        by_size: ratios of the factors for other numbers of members to `widths` (`widths.widths_for`).
        varied: number of the trainer whose values of `tournament.vary` this one has.
        rounds: the tournaments so far, as `tournament.compete` returns them.
    """

    model: AnyModel
    optimizer: Optimizer
    schedule: Schedule
    steps: int
    spread_error: Tensor
    average: Average | None = None
    exchange: Exchange = field(default_factory=Exchange)
    step: int = 0
    best: dict[str, Any] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    widths: list[list[float]] | None = None
    validated: int | None = None
    by_size: dict[str, list[list[float]]] = field(default_factory=dict)
    varied: int = 0
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best_step(self) -> int:
        """Return the step of the best validation, or zero if there is none."""
        return int(self.best["step"]) if self.best else 0

    def stalled(self, patience: int, every: int) -> bool:
        """Return whether the last `patience` validations were no better than the best one before them; never for 0.

        There are `every` steps between validations. The result depends only on the step and on what checkpoints hold,
        so a resumed run ends at the same step as an uninterrupted one.
        """
        if not patience or self.best is None or self.step % every:
            return False
        return self.step - self.best_step >= patience * every

    @contextmanager
    def predicting(self) -> Iterator[AnyModel]:
        """Provide the model as it predicts: in evaluation mode, and with averaged weights if there are any."""
        self.model.eval()
        try:
            if self.average is None:
                yield self.model
            else:
                with self.average.in_place(self.model):
                    yield self.model
        finally:
            self.model.train()

    def complete(self) -> None:
        """Gather parameters of which each rank has updated only its own grid points, with their moments and averages.

        All ranks call this before any of them reads such a parameter as a whole.
        """
        names = {id(p): name for name, p in learned(self.model)}
        for p in self.exchange.apart:
            held = [p.data, *(v for v in self.optimizer.state[p].values() if torch.is_tensor(v) and v.shape == p.shape)]
            if self.average is not None:
                held.append(self.average.weights[names[id(p)]])
            self.exchange.complete(p, held)

    def tensors(self, *, keep: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor], OwnState | None]:
        """Return copies on the CPU of the tensors of a checkpoint. All ranks must call this.

        Args:
            keep: whether this rank writes the common tensors. If not, it only helps to gather sharded weights, and the
                first two results are empty.

        Returns:
            The state_dict that predicts, with whole weights; the other tensors that a resumed run needs, except sharded
            ones; and this rank's parts of the sharded ones, or None if no weight is sharded.
        """
        training: dict[str, Tensor] = {_SPREAD_ERROR: self.spread_error}
        parts: dict[str, Tensor] = {}
        sharded = {name for name, p in learned(self.model) if shards_of(p) is not None}
        for index, (name, p) in enumerate(self._stepped()):
            for key, value in self.optimizer.state.get(p, {}).items():
                held = parts if name in sharded and shards_of(value) is not None else training
                held[f"{_OPTIMIZER}{index}.{key}"] = local(torch.as_tensor(value))
        if self.average is not None:
            for name, p in learned(self.model):
                (parts if name in sharded else training)[f"{_RAW}{name}"] = local(p)
        training = copies(training) if keep else {}
        with self.predicting() as model:
            # One tensor at a time is whole on the device of each rank.
            gathered = ((name, whole(value)) for name, value in model.state_dict().items() if keep or name in sharded)
            state_dict = {name: copies({name: value})[name] for name, value in gathered if keep}
        which, of, copy, _ = self.shards
        return state_dict, training, OwnState(which, of, parts, copy == 0) if sharded else None

    def _stepped(self) -> list[tuple[str, Tensor]]:
        """Return the parameters with their names, in the order in which checkpoints number them."""
        names = {id(p): name for name, p in learned(self.model)}
        return [(names[id(p)], p) for group in self.model.param_groups() for p in group["params"]]

    def meta(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint holds beside the tensors."""
        latest = {"scores": self.scores, "widths": self.widths, "validated_step": self.validated}
        found = {"steps": self.steps, "best": self.best, **latest, "widths_by_size": self.by_size}
        found |= {"shards": self.shards[1]} if self.shards[1] > 1 else {}
        # A run of one trainer has neither.
        return found | ({"varied": self.varied, "tournaments": self.rounds} if self.varied or self.rounds else {})

    @property
    def shards(self) -> tuple[int, int, int, int]:
        """Return (part, number of parts, copy, number of copies) of the weights on this rank (`place_among_shards`)."""
        return max((place_among_shards(p) for p in self.model.parameters()), key=lambda place: place[1])

    def changing(self) -> dict[str, Tensor]:
        """Return copies on the CPU of all tensors that steps change: weights, moments, average and own momenta."""
        found = {f"{_RAW}{name}": p for name, p in learned(self.model)} | self._moments()
        if self.average is not None:
            found |= {f"{_AVERAGE}{name}": values for name, values in self.average.weights.items()}
        own = own_state(self.exchange)
        return copies(found | {f"{_APART}{name}": values for name, values in (own.tensors if own else {}).items()})

    @torch.no_grad()
    def take_over(self, tensors: dict[str, Tensor]) -> None:
        """Take the tensors of another trainer's `changing`."""
        for name, p in learned(self.model):
            p.copy_(tensors[f"{_RAW}{name}"])
        stepped = [p for _, p in self._stepped()]
        moments = {key: value for key, value in tensors.items() if key.startswith(_OPTIMIZER)}
        for key, value in moments.items():
            p = stepped[int(key.split(".")[1])]
            if value.shape == p.shape:  # a moment gets the memory layout of its weight
                moments[key] = torch.empty_like(p, dtype=value.dtype).copy_(value)
        self._restore_optimizer(moments)
        for name, values in self.average.weights.items() if self.average is not None else ():
            values.copy_(tensors[f"{_AVERAGE}{name}"])
        own = {name.removeprefix(_APART): values for name, values in tensors.items() if name.startswith(_APART)}
        self.exchange.load_local_state(own)

    def _moments(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, by names with the number of the parameter."""
        found: dict[str, Tensor] = {}
        for index, (_, p) in enumerate(self._stepped()):
            held = self.optimizer.state.get(p, {})
            found |= {f"{_OPTIMIZER}{index}.{name}": torch.as_tensor(value) for name, value in held.items()}
        return found

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore all but the weights, which the model already has, from a checkpoint with the tensors for training.

        Raises:
            UserError: a file with the tensors of one rank is absent or damaged.
        """
        shards = checkpoint.meta.get("shards", 1)
        kept = self._restored(checkpoint, shards if shards > 1 else 0)
        self._restore_optimizer(kept)
        if shards == 1:
            restore_state(self.exchange, checkpoint.ranks, checkpoint.of_rank)
        if self.average is not None:
            # The checkpoint's model holds the averaged weights, because these predict. They go into the average, and
            # the weights of the last step into the model.
            self.average.weights = {name: local(p).clone() for name, p in learned(self.model)}
            for name, p in learned(self.model):
                local(p).copy_(kept[f"{_RAW}{name}"])
        self.step = checkpoint.meta["step"]
        self.best, self.scores = checkpoint.meta["best"], checkpoint.meta["scores"]
        self.widths, self.validated = checkpoint.meta.get("widths"), checkpoint.meta.get("validated_step")
        self.by_size = checkpoint.meta.get("widths_by_size", {})
        self.varied, self.rounds = checkpoint.meta.get("varied", 0), checkpoint.meta.get("tournaments", [])

    def _restored(self, checkpoint: Checkpoint, ranks: int) -> dict[str, Tensor]:
        """Return this rank's part of the tensors of a checkpoint that any number of ranks wrote.

        `ranks` is the number of files that hold parts of tensors; zero if weights were not sharded.
        """
        by_name = dict(learned(self.model))
        by_name |= {f"{_RAW}{name}": p for name, p in by_name.items()}
        stepped = self._stepped()
        kept: dict[str, Tensor] = {}
        begins: dict[str, int] = {}
        for part in (checkpoint.training, *map(checkpoint.of_rank, range(ranks))):
            for key, value in part.items():
                p = stepped[int(key.split(".")[1])][1] if key.startswith(_OPTIMIZER) else by_name.get(key)
                # Scalars, such as AdamW's number of steps, have no rows.
                if p is None or not value.ndim or value.ndim != p.ndim:
                    kept[key] = value
                    continue
                own, start, begin = local(p), first_row(p), begins.get(key, 0)
                begins[key] = begin + len(value)
                # A moment gets the memory layout of its weight, as in the run that wrote it.
                into = kept.setdefault(key, torch.empty_like(own, dtype=value.dtype))
                low, high = max(start, begin), min(start + len(own), begin + len(value))
                if low < high:
                    into[low - start : high - start].copy_(value[low - begin : high - begin])
        return kept

    def _restore_optimizer(self, kept: dict[str, Tensor]) -> None:
        """Restore the moments of the optimizer."""
        for index, (_, p) in enumerate(self._stepped()):
            prefix = f"{_OPTIMIZER}{index}."
            own = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
            if own:
                self.optimizer.state[p] = {k: like(p, v) if v.ndim == p.ndim else v for k, v in own.items()}
