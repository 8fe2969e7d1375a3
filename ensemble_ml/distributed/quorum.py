"""A vote that ends when enough ballots are in, so that no rank waits for a straggler.

    vote k ends      when `quorum` ranks have cast a ballot since vote k - 1, or all of them if k + 1 is a meeting
    a late rank      abstains in the votes that ended without it. When its gradient is complete, it casts its ballot in
                     the vote that is open then, and applies the winners of all votes up to that one, in order
    a meeting        every `bound` votes, and wherever the run validates, writes a checkpoint or ends

The weights of every rank are therefore the same function of the sequence of winners, and after the same vote replicas
are equal bit for bit. Only momenta differ, as in every vote: each follows its rank's own gradients. A ballot is at most
`bound` - 1 votes older than the vote that counts it.

Each rank's loss is the mean over its own samples, since a sum over ranks would wait for all of them. Losses and flags
travel in the heads of the ballots. So all ranks see the same numbers of a vote, and take the same decisions.

Wait-avoiding averages of weights (WAGMA-SGD, Li et al. 2020, arXiv:2005.00124) let a straggler's old weights count;
here its old gradient counts, once, by its signs.
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

# Returns the connection of a rank to the hub that the second argument makes.
Join = Callable[[Communicator, Callable[[], Hub]], Link]


@dataclass(frozen=True)
class Quorum:
    """The rule by which votes end.

    Attributes:
        ballots: number of ballots that end a vote.
        bound: votes from one meeting to the next, at most.
        seconds: time that a vote waits for the ballots that it needs.
    """

    ballots: int
    bound: int = 10
    seconds: float = float("inf")


def quorum_of(text: str, ranks: int) -> int:
    """Return the number of ballots that end a vote.

    Args:
        text: `all`, `auto` (three quarters of the ranks, rounded up) or a number.
        ranks: number of ranks that vote.

    Raises:
        UserError: more than there are ranks, or fewer than half of them. Two votes of fewer than half could be of
            different ranks altogether, so that the ranks would take turns in moving the weights.
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
        group: the ranks that vote.
        rule: when votes end.
        join: connects a rank with the hub that closes the votes.
        settings: passed to `Vote`.

    Attributes:
        milestone: returns whether a vote, by the number of steps done after it, has to be a meeting although `bound`
            does not ask for it. It must be the same on all ranks.
        script: the ranks of each vote of an earlier run, by its number, if that run is to be repeated; for the first
            rank.
        record: called for each vote in order, with its number and the ranks that were in it.
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
        """Return whether all ranks have done the same number of steps when `step` steps are done."""
        return step % self.rule.bound == 0 or self.milestone(step)

    @property
    def slack(self) -> int:
        """Return how many steps ranks may be apart."""
        return self.rule.bound

    @property
    def abstains(self) -> bool:
        """Return whether this rank's momentum stays: the vote ended without it, or it has no sample."""
        return self._missed or not self._samples

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far; on the first rank, with the outcomes for all others."""
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
        self.step = step  # the hub, which the first call makes, begins with it
        super().begin(step)
        self._cast, self._missed = False, False

    def finish(self) -> Outcome:
        """Cast this rank's ballot, and return the outcome of the next vote in order.

        While `missed` is set in it, the vote ended before the ballot came. The caller has to take the step and then
        call this again.
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
        """Remove the hooks, and end threads and connections."""
        super().close()
        if self._link is not None:
            self._link.close()
            self._link = None

    @torch.no_grad()
    def _take_outcome(self, heads: Tensor, winner: Tensor) -> None:
        """Turn the winning words into signs, and let exactly the parameters that a voter used have a gradient."""
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
        """Keep the ballot until the numbers that go with it are known."""
        if self.bits > 1:
            self._to_units(views, magnitude)
        self._codes = cast(flat, self.bits, 1, self.step)[0].cpu()
        self._header_words = header.cpu()
