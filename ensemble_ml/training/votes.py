"""Records which ranks are in each vote of a run, so that the run can be repeated bit for bit.

    runs/NAME/votes.jsonl

The first line identifies the run: {"run": hash, "ranks": P, "quorum": N, "bound": B}. Each further line is a vote:
{"vote": k, "ranks": [...]}, where k counts from 1. A rank begins its next gradient after each vote that it was in, so
the record determines which gradient it casts in each vote. A repetition needs nothing else but settings and data.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed.quorum import QuorumVote
from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.training.agreement import deciding_settings

log = logging.getLogger(__name__)

VOTES = "votes.jsonl"


class VoteLog:
    """A writer of the votes of a run, on the first rank.

    Args:
        folder: the run folder.
        first: the first line.
        step: number of steps that are done. Later votes in the file are removed: a killed run wrote them after its last
            checkpoint.
    """

    def __init__(self, folder: Path, first: dict[str, Any], step: int):
        path = folder / VOTES
        old = path.read_text().splitlines()[1 : 1 + step] if step and path.exists() else []
        if len(old) < step:
            log.warning(
                "resume: %s holds %d of the %d votes so far, so the run cannot be repeated", path, len(old), step
            )
        write_whole(path, "".join(f"{line}\n" for line in [json.dumps(first), *old]))
        self._stream = open(path, "a")  # noqa: SIM115 - closed by `close`

    def __call__(self, vote: int, ranks: tuple[int, ...]) -> None:
        """Write a vote.

        Args:
            vote: its number, from 0.
            ranks: the ranks whose ballots it counted.
        """
        self._stream.write(json.dumps({"vote": vote + 1, "ranks": ranks}) + "\n")

    def flush(self) -> None:
        """Flush the file. Call this before a checkpoint, which needs the votes before it."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def first_line(config: TrainConfig, fingerprint: str, exchange: QuorumVote) -> dict[str, Any]:
    """Return the first line of a run's record.

    Args:
        config: settings of the run.
        fingerprint: fingerprint of the data.
        exchange: the exchange, with the rule by which votes end.
    """
    settings = json.dumps([deciding_settings(config), fingerprint], sort_keys=True)
    rule = {"quorum": exchange.rule.ballots, "bound": exchange.rule.bound}
    return {"run": hashlib.sha256(settings.encode()).hexdigest()[:16], "ranks": exchange.group.size, **rule}


def read_votes(path: Path, expected: dict[str, Any], meets: Callable[[int], bool]) -> dict[int, list[int]]:
    """Read the votes of an earlier run.

    Args:
        path: the record.
        expected: the first line that a record of this run would have.
        meets: returns whether all ranks have to be in a vote, from the number of steps done after it.

    Returns:
        The ranks of each vote, by its number, which counts from 0.

    Raises:
        UserError: the file cannot be read, is damaged, or is of another run.
    """
    key = f"optim.replay={path}"
    try:
        first, *votes = [json.loads(line) for line in path.read_text().splitlines()]
        found = {line["vote"] - 1: list(map(int, line["ranks"])) for line in votes}
        of_run = {name: first[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: cannot be read ({error}); give the {VOTES} of a run with optim.quorum") from error
    for name in ("ranks", "quorum", "bound"):
        if of_run[name] != expected[name]:
            raise UserError(f"{key}: its run had {name}={of_run[name]}, this one has {expected[name]}; give the same")
    if of_run != expected:
        raise UserError(f"{key}: is of a run with other settings or data; give those of that run, seed included")
    if [*found] != [*range(len(votes))]:
        raise UserError(f"{key}: its votes do not count from 1, or some are missing; the file is damaged")
    size = expected["ranks"]
    for vote, ranks in found.items():
        least = size if meets(vote + 1) else expected["quorum"]
        if not least <= len({*ranks} & {*range(size)}) == len(ranks):
            raise UserError(f"{key}: vote {vote + 1} cannot be of ranks {ranks}; the file is damaged")
    return found
