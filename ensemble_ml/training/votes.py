"""The record of who was in each vote of a run, by which the run can be repeated bit for bit.

    runs/NAME/votes.jsonl

The first line says what the record belongs to: {"run": hash, "ranks": P, "quorum": N, "bound": B}. Each further line is
a vote: {"vote": k, "ranks": [...]}, where k counts from 1. Which gradient a rank casts follows from the votes that it
was in, since it begins with the next gradient after each of them. So this is all that a repetition needs besides the
settings and the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed.quorum import QuorumVote
from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.training.agreement import deciding_settings

VOTES = "votes.jsonl"


class VoteLog:
    """The record of the votes of a run, written by the first rank.

    Args:
        folder: the run folder.
        first: the first line.
        step: number of steps that are done. Lines of later votes are of a run that was killed, and are removed.
    """

    def __init__(self, folder: Path, first: dict[str, Any], step: int):
        path = folder / VOTES
        old = path.read_text().splitlines()[1 : 1 + step] if step and path.exists() else []
        write_whole(path, "".join(f"{line}\n" for line in [json.dumps(first), *old]))
        self._stream = open(path, "a")  # noqa: SIM115 - closed by `close`

    def __call__(self, vote: int, ranks: tuple[int, ...]) -> None:
        """Write a vote, whose number counts from 0."""
        self._stream.write(json.dumps({"vote": vote + 1, "ranks": ranks}) + "\n")

    def flush(self) -> None:
        """Hand over to the system what is written so far, before a checkpoint that needs it."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def first_line(config: TrainConfig, fingerprint: str, exchange: QuorumVote) -> dict[str, Any]:
    """Return the first line of a run's record.

    Args:
        config: settings of the run.
        fingerprint: fingerprint of the data.
        exchange: the exchange.
    """
    settings = json.dumps([deciding_settings(config), fingerprint], sort_keys=True)
    rule = {"quorum": exchange.rule.ballots, "bound": exchange.rule.bound}
    return {"run": hashlib.sha256(settings.encode()).hexdigest()[:16], "ranks": exchange.group.size, **rule}


def read_votes(path: Path, expected: dict[str, Any], meets: Callable[[int], bool]) -> dict[int, list[int]]:
    """Read the votes of an earlier run.

    Args:
        path: the record.
        expected: the first line that a record of this run would have.
        meets: returns whether all ranks have to be in a vote, by the number of steps that are done after it.

    Returns:
        The ranks of each vote, by its number, which counts from 0.

    Raises:
        UserError: the file cannot be read, or is of another run.
    """
    key = f"optim.replay={path}"
    try:
        first, *votes = [json.loads(line) for line in path.read_text().splitlines()]
        found = {line["vote"] - 1: list(map(int, line["ranks"])) for line in votes}
        told = {name: first[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: cannot be read ({error}); give the {VOTES} of a run with optim.quorum") from error
    for name in ("ranks", "quorum", "bound"):
        if told[name] != expected[name]:
            raise UserError(f"{key}: its run had {name}={told[name]}, this one has {expected[name]}; give the same")
    if told != expected:
        raise UserError(f"{key}: is of a run with other settings or data; give those of that run, seed included")
    size = expected["ranks"]
    for vote, ranks in found.items():
        least = size if meets(vote + 1) else expected["quorum"]
        if not least <= len({*ranks} & {*range(size)}) == len(ranks):
            raise UserError(f"{key}: vote {vote + 1} cannot be of ranks {ranks}; the file is damaged")
    return found
