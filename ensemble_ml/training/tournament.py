"""Holds tournaments between the models that one job trains (LTFB: Jacobs et al. 2017, doi:10.1145/3146347.3146356).

All trainers validate on the same init times, so a tournament compares the scores that they have. From these, every rank
computes which trainer takes whose weights. Then each rank of a winner sends weights, moments of the optimizer, scores
and the varied settings to its counterpart in the losing trainer. Winners keep their state.

The trainer with the smaller score wins, and one whose score is not finite loses. With equal scores, both keep their
state. The result depends only on the scores, the seed and the number of the tournament, and only losers change. So
after a kill, a tournament can be held again, even if some trainers already have its result, and ends the same way bit
for bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ensemble_ml.config import TournamentKeep, TrainConfig
from ensemble_ml.distributed.communicator import gathered
from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Stream, words
from ensemble_ml.training import setup
from ensemble_ml.training.assemble import Run
from ensemble_ml.training.checkpoint import META, load_meta, mend_links, point, step_of
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.keeper import Snapshot, save_checkpoint
from ensemble_ml.training.state import learned

_TOLD = "told"  # name of the JSON text that is sent with the tensors
_LOOK = 0.05  # seconds between two checks of the other trainers' checkpoints


def partners(seed: int, number: int, trainers: int) -> list[tuple[int, int]]:
    """Draw the pairs of tournament `number` from the seed of the run. If `trainers` is odd, one is in no pair."""
    order = np.argsort(words(seed, Stream.PAIRS, number, 0, trainers), kind="stable").tolist()
    return list(zip(order[::2], order[1::2], strict=False))


def sources(keep: TournamentKeep, scores: Sequence[float], seed: int, number: int) -> list[int]:
    """Return for each trainer the number of the trainer whose state it has after a tournament.

    Args:
        keep: pairs: the loser of each pair takes the winner's state; truncation: the worst quarter of the trainers, but
            at least one, take that of the best quarter.
        scores: the score of each trainer; lower is better.
        seed: seed of the run, for pairs.
        number: number of the tournament.
    """

    def key(trainer: int) -> tuple[bool, float, int]:
        # NaN cannot be ordered.
        finite = math.isfinite(scores[trainer])
        return not finite, scores[trainer] if finite else 0.0, trainer

    found = list(range(len(scores)))
    if keep is TournamentKeep.pairs:
        matches = [sorted(pair, key=key) for pair in partners(seed, number, len(scores))]
    else:
        ranking = sorted(found, key=key)
        matches = [[ranking[place], ranking[-1 - place]] for place in range(max(1, len(scores) // 4))]
    for winner, loser in matches:
        if key(winner)[:2] != key(loser)[:2]:
            found[loser] = winner
    return found


def due(config: TrainConfig, step: int, steps: int) -> bool:
    """Return whether a tournament follows a step. None follows the last step, after which the best trainer is taken."""
    return config.parallel.trainer > 1 and 0 < step < steps and step % config.tournament.every == 0


def pending(run: Run) -> tuple[bool, bool]:
    """Return whether a resumed run begins with a tournament, and whether its checkpoint has the result already.

    A killed job may leave some trainers before the latest tournament and others after it. All then hold it again. All
    ranks of the job must call this.
    """
    step, group = run.state.step, run.session.mesh.trainers
    held = run.state.rounds[-1]["step"] if run.state.rounds else 0
    every = gathered(torch.tensor([held]), group)
    if held == step:
        return step > 0 and int(every.min()) < step, True
    return due(run.config, step, run.state.steps), False


def compete(run: Run, scores: Sequence[float]) -> dict[str, Any]:
    """Hold a tournament, which changes the state of the losers. All ranks of the job must call this.

    Args:
        run: the run.
        scores: the score of each trainer.

    Returns:
        The tournament: `step`, `scores` (None where not finite), and `from`, the trainer whose state each now has.

    Raises:
        UserError: no score is finite.
    """
    state, own = run.state, run.session.topology.place.trainer
    if not any(map(math.isfinite, scores)):
        raise UserError(
            f"step {state.step}: no trainer has a score that is finite; begin again with lower values of optim.lr"
        )
    tournament = run.base.tournament
    chosen = sources(tournament.keep, scores, run.base.seed, state.step // tournament.every)
    if chosen != list(range(len(chosen))):
        data = _swapped(run, chosen)
        if chosen[own] != own:
            take_over(run, data)
    told = [score if math.isfinite(score) else None for score in scores]
    return {"step": state.step, "scores": told, "from": chosen}


def in_words(held: dict[str, Any]) -> str:
    """Return a tournament as text: each trainer's score, and whose weights it took."""
    return ", ".join(f"trainer {trainer} {cell}" for trainer, cell in enumerate(tree([held])[0][1:]))


def tree(rounds: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each tournament: the step, then for each trainer its score and whose weights it took."""
    rows = []
    for held in rounds:
        scores = ["not finite" if score is None else f"{score:.4f}" for score in held["scores"]]
        took = ["" if source == trainer else f" <- {source}" for trainer, source in enumerate(held["from"])]
        rows.append((str(held["step"]), *(score + source for score, source in zip(scores, took, strict=True))))
    return rows


def lineage(rounds: Sequence[dict[str, Any]], trainer: int) -> str:
    """Return as text which trainers trained the weights that `trainer` has after some tournaments."""
    steps, at = [], trainer
    for held in reversed(rounds):
        before = held["from"][at]
        if before != at:
            steps.append(f"by trainer {at} from step {held['step']}")
        at = before
    return ", ".join([f"begun by trainer {at}", *reversed(steps)])


def _swapped(run: Run, chosen: Sequence[int]) -> Tensor:
    """Send this rank's state to its counterparts in the trainers that take it, and return the state that it gets."""
    group, own = run.session.mesh.trainers, run.session.topology.place.trainer
    takers = [trainer for trainer, source in enumerate(chosen) if source == own != trainer]
    mine = packed(run) if takers else torch.empty(0, dtype=torch.uint8)
    sizes = gathered(torch.tensor([len(mine)]), group)
    sent = [len(mine) if trainer in takers else 0 for trainer in range(group.size)]
    received = [int(sizes[trainer]) if trainer == chosen[own] != own else 0 for trainer in range(group.size)]
    out = torch.empty(sum(received), dtype=torch.uint8)
    group.all_to_all_single(out, torch.cat([mine] * len(takers)) if takers else mine, received, sent)
    return out


def packed(run: Run) -> Tensor:
    """Return the state that a loser takes from this trainer, as bytes (uint8)."""
    state = run.state
    told = {"scores": state.scores, "widths": state.widths, "varied": state.varied}
    tensors = {name: values.contiguous() for name, values in state.changing().items()}
    tensors[_TOLD] = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def take_over(run: Run, data: Tensor) -> None:
    """Take the state that another trainer packed, but keep this trainer's init times, their order and the steps."""
    state, tensors = run.state, load(data.numpy().tobytes())
    told = json.loads(tensors.pop(_TOLD).numpy().tobytes())
    state.take_over(tensors)
    state.scores, state.widths = told["scores"], told["widths"]
    state.validated = state.step
    run.take_settings(told["varied"])


def mean_weights(run: Run, scores: Sequence[float]) -> None:
    """Give the model the mean of the weights with which the trainers with a finite score predict.

    All ranks of the job must call this after the last step.
    """
    state, group = run.state, run.session.mesh.trainers
    there = [math.isfinite(score) for score in scores]
    own = there[run.session.topology.place.trainer]
    weights = [p for _, p in learned(state.model)]
    with state.predicting(), torch.no_grad():
        total = torch.cat([p.flatten().double() for p in weights])
    # A weight that is NaN would spoil the sum even with the factor zero.
    total = total / sum(there) if own else torch.zeros_like(total)
    group.all_reduce(total)
    state.average = None
    with torch.no_grad():
        for p, values in zip(weights, total.split([p.numel() for p in weights]), strict=True):
            p.copy_(values.view(p.shape))


def await_written(run: Path, trainers: int, step: int) -> None:
    """Wait until every trainer has a checkpoint of `step` or later on disk.

    Before that, no trainer may replace its checkpoint of a tournament. Otherwise, if the job were killed, a trainer
    might have to hold the tournament again without the state that its opponent had.
    """
    for trainer in range(trainers):
        last = setup.trainer_folder(run, trainer) / "checkpoints" / "last"
        while (step_of(last) or 0) < step:
            time.sleep(_LOOK)


def point_to_best(run: Path) -> int:
    """Point the links of the run's own checkpoints to those of the trainer with the best score; return its number.

    If no trainer has a score, it is the first one.
    """
    folders = sorted(path.parent for path in run.glob("trainer_*/checkpoints"))
    scores = []
    for folder in folders:
        path = folder / "checkpoints" / "best"
        best = load_meta(path)["best"] if (path / META).is_file() else None
        scores.append(best["score"] if best else math.inf)
    best_trainer = scores.index(min(scores))
    (run / "checkpoints").mkdir(exist_ok=True)
    mend_links(run / "checkpoints")  # no link can take the place of a folder, which a copy leaves
    for link in ("last", "best"):
        if (folders[best_trainer] / "checkpoints" / link).exists():
            point(run / "checkpoints", link, f"../{folders[best_trainer].name}/checkpoints/{link}")
    return best_trainer


def take_best(run: Run, judge: Judge, folder: Path, say: Callable[[str], None]) -> bool:
    """Keep the best trainer, or the mean of all if that is better, and log which with `say`.

    All ranks of the job must call this at the end. `folder` is that of the run, which holds those of its trainers. The
    result is False if a trainer stopped before the end; nothing is chosen then.

    Raises:
        NotFiniteForecast: a forecast of the mean is not finite.
        UserError: there is not enough memory to score the mean.
    """
    state = run.state
    own, best = state.scores.get("score", math.nan), state.best or {"score": math.nan, "step": 0}
    texts = run.session.hear_trainers("end", repr([own, best["score"], best["step"]]).replace("nan", "NaN"))
    if texts is None:
        return False
    last, least, steps = zip(*map(json.loads, texts), strict=True)
    if run.session.first:
        point_to_best(folder)
    for step, *cells in tree(state.rounds):
        say(f"tournament after step {step}: {', '.join(cells)}")
    soup = run.base.tournament.soup and sum(map(math.isfinite, last)) > 1
    if soup and _try_soup(run, judge, folder, say, last, min(filter(math.isfinite, least))):
        say(f"done: the mean of the trainers is the best: {folder}/checkpoints/best")
    else:
        trainer = min(range(len(least)), key=lambda k: least[k] if math.isfinite(least[k]) else math.inf)
        rounds = [held for held in state.rounds if held["step"] <= steps[trainer]]
        text = f"done: trainer {trainer} is the best, at step {steps[trainer]}, score {least[trainer]:.4f}"
        say(f"{text}, {lineage(rounds, trainer)}: {folder}/checkpoints/best")
    return True


def _try_soup(
    run: Run, judge: Judge, folder: Path, say: Callable[[str], None], scores: Sequence[float], best: float
) -> bool:
    """Score the mean of the trainers' weights. If it is better than `best`, keep it as the run's best checkpoint.

    Return whether it is. Wortsman et al. 2022 (arXiv:2203.05482) call this a soup.
    """
    state = run.state
    mean_weights(run, scores)
    found = judge.scores(None)
    state.scores, state.widths, state.validated = found.scores, found.widths, state.step
    score = found.scores["score"]
    say(f"mean of {sum(map(math.isfinite, scores))} trainers: score {score:.4f}, best trainer {best:.4f}")
    if score >= best:
        return False
    state.best = {"step": state.step, **found.scores}
    judge.measure_widths_by_size(anew=True)
    if run.session.first:
        state_dict, training, _ = state.tensors()
        own = [score if math.isfinite(score) else None for score in scores]
        meta = {**run.facts, **state.meta(), "soup": own}
        save_checkpoint(folder / "checkpoints", Snapshot(state.step, state_dict, training, meta, best=True))
    return True
