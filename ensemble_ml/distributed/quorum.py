"""A vote that ends when enough ballots are in, so that no rank waits for a straggler.

    vote k           ends shortly after the hub holds the ballots of `quorum` ranks that no earlier vote has counted. If
                     a meeting follows, the vote ends only when the hub holds the ballots of all ranks
    a late rank      abstains in the votes that ended without it. When its gradient is complete, it casts its ballot in
                     the vote that is open then, and applies the winners of all votes up to that one, in order
    a meeting        is a step after which all ranks have done the same number of steps. There is one every `bound`
                     votes, and wherever the run validates, writes a checkpoint or ends

The weights of every rank are therefore the same function of the sequence of winners. After the same vote, the weights
of all ranks are equal bit for bit. Only the momenta differ, as in every vote, because the momentum of a rank follows
the rank's own gradients. A ballot is at most `bound` - 1 votes older than the vote that counts it.

Each rank's loss is the mean over its own samples, since a sum over ranks would wait for all of them. Losses and flags
travel in the heads of the ballots. So all ranks see the same numbers of a vote, and take the same decisions.

In wait-avoiding averages of weights (WAGMA-SGD, Li et al. 2020, arXiv:2005.00124), the old weights of a straggler enter
the average. Here a straggler's old gradient enters a single vote on signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.hub import Hub, Link, opened
from ensemble_ml.distributed.pack import unpack_signs
from ensemble_ml.distributed.vote import Take, cast
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.errors import UserError
from ensemble_ml.optim.exchange import Outcome, total_norm

# A function that returns a rank's connection to the hub of its group. Its second argument makes the hub.
Join = Callable[[Communicator, Callable[[], Hub]], Link]


@dataclass(frozen=True)
class Quorum:
    """The rule by which votes end.

    Attributes:
        bound: largest number of votes from one meeting to the next.
        seconds: how long, in seconds, a vote waits for the ballots that it needs.
    """

    ballots: int
    bound: int = 10
    seconds: float = float("inf")


def quorum_of(text: str, ranks: int) -> int:
    """Return the number of ballots that end a vote of `ranks` ranks.

    `text` is `all`, `auto` (three quarters of the ranks, rounded up) or a number.

    Raises:
        UserError: the number is larger than that of the ranks, or smaller than half of it: a minority must not decide
            for all. Only with more than half do two successive votes always have a rank in common.
        ValueError: `text` is neither `all` nor `auto` nor a number.
    """
    if text == "all":
        return ranks
    if text == "auto":
        return -(-3 * ranks // 4)
    ballots = int(text)
    if ballots > ranks:
        raise UserError(f"optim.quorum={ballots}: larger than the number of ranks; give {ranks} or less, or auto")
    if 2 * ballots < ranks:
        raise UserError(
            f"optim.quorum={ballots}: fewer than half of {ranks} ranks cannot decide for all; give {-(-ranks // 2)} or"
            " more"
        )
    return ballots


class QuorumVote(Vote):
    """A vote that `rule.ballots` ranks can end.

    Args:
        join: connects a rank with the hub that closes the votes.
        settings: passed to `Vote`, except for `overlap`, which is always off.

    Attributes:
        milestone: function that takes a number of steps and returns whether there is a meeting after that many, in
            addition to those every `bound` votes. It must return the same on all ranks.
        script: the ranks whose ballots each vote counted in an earlier run, by number of the vote, if that run is to be
            repeated. Only the first rank uses it. None repeats no run.
        record: called for each vote in order, with the number of the vote and the ranks whose ballots it counted.
    """

    def __init__(self, group: Communicator, rule: Quorum, join: Join, **settings: object):
        super().__init__(group, **(settings | {"overlap": False}))  # type: ignore[arg-type]
        self.rule, self._join = rule, join
        self.milestone: Callable[[int], bool] = lambda step: False
        self.script: Mapping[int, Sequence[int]] | None = None
        self.record: Callable[[int, tuple[int, ...]], object] = lambda vote, ranks: None
        self._link: Link | None = None
        self._cast, self._missed, self._samples = False, False, True

    def meets(self, step: int) -> bool:
        """Return whether there is a meeting after `step` steps, where all ranks have done the same number of steps."""
        return step % self.rule.bound == 0 or self.milestone(step)

    @property
    def slack(self) -> int:
        """Return an upper bound on the number of steps that ranks may be apart."""
        return self.rule.bound

    @property
    def abstains(self) -> bool:
        """Return whether this rank's momentum stays unchanged: its ballot missed the vote, or it has no sample."""
        return self._missed or not self._samples

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent; on the first rank, with the outcomes that its hub has sent."""
        return super().bytes_sent + (self._link.bytes_sent if self._link is not None else 0)

    def _prepare(self) -> None:
        super()._prepare()
        size, bits = self.group.size, self.bits

        def needed(vote: int) -> int:
            return size if self.meets(vote + 1) else self.rule.ballots

        def hub() -> Hub:
            return Hub(size, bits, self.step, needed, seconds=self.rule.seconds, script=self.script)

        self._link = self._join(self.group, hub)

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`."""
        self.step = step  # the first call makes the hub, whose first vote gets this number
        super().begin(step)
        self._cast, self._missed = False, False

    def finish(self) -> Outcome:
        """Cast this rank's ballot unless it has been cast, and return the outcome of the next vote in order.

        If `missed` is set in the outcome, the vote ended before this rank's ballot came. The caller then takes the step
        and calls this method again, until `missed` is not set.

        Raises:
            UserError: the vote did not get the ballots that it needs within `Quorum.seconds`.
            ConnectionError: the hub is gone.
        """
        assert self._arrivals is not None and self._link is not None
        if not self._cast:
            self._before_flush()
            self._arrivals.flush()
            wait(self._jobs)
            for job in self._jobs:
                job.result()
            self._grads_of_own = [p.grad for p in self.params]
            self._norm = torch.stack(self._squares).sum().sqrt() if self._squares else total_norm(self.params)
            numbers = dict(self.tells())
            self._names, self._samples = list(numbers), numbers.get("samples", 1.0) > 0
            tail = torch.tensor(list(numbers.values()), dtype=torch.float64).view(torch.int64)
            self._head = torch.cat([torch.tensor([int(self._samples)]), self._header_words, tail])
            self._link.send(torch.cat([torch.tensor([len(self._head)]), self._head, self._codes]))
            self._cast = True
        began = time.perf_counter()
        vote, ranks, heads, winner = opened(self._link.receive(), self.group.size, len(self._head))
        waited = time.perf_counter() - began
        self.record(vote, ranks)
        self._missed = self.group.rank not in ranks
        self._take_outcome(heads, winner)
        self.checked = True
        culprits = tuple(rank for rank, row in zip(ranks, heads.tolist(), strict=True) if row[1])
        values = heads[:, len(self._head) - len(self._names) :].contiguous().view(torch.float64).sum(0).tolist()
        sums = dict(zip(self._names, values, strict=True))
        sent, self._sent = self.bytes_sent - self._sent, self.bytes_sent
        return Outcome(float(self._norm), culprits, waited, sent, self._missed, sums)

    def close(self) -> None:
        """Remove the hooks, and end the threads and the connection to the hub."""
        super().close()
        if self._link is not None:
            self._link.close()
            self._link = None

    @torch.no_grad()
    def _take_outcome(self, heads: Tensor, winner: Tensor) -> None:
        """Turn winning words into signs, and leave a gradient to just those parameters that a voting rank used."""
        [bucket], [flat] = self.buckets, self._flats
        unpack_signs(winner.to(flat.device), flat)
        rows = heads[:, 2:].tolist()
        for i, slot in enumerate(bucket.slots):
            p, own = self.params[slot.index], self._grads_of_own[slot.index]
            used = any(row[i // 63] >> (i % 63) & 1 for row in rows)
            if not used:
                p.grad = None
            elif own is None:
                p.grad = torch.zeros_like(p)
            else:
                p.grad = own

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        """Keep the ballot for `finish`, which sends it with the numbers that are known only then."""
        if self.bits > 1:
            self._to_units(views, magnitude)
        self._codes = cast(flat, self.bits, 1, self.step)[0].cpu()
        self._header_words = header.cpu()
