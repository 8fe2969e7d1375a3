"""What the vote is compared with does what its papers say: numbers by hand, on two ranks."""

import pytest
import torch
from parallel.simulated import on_ranks
from torch import nn

from ensemble_ml.config import VoteScale
from ensemble_ml.distributed.powersgd import PowerSGD
from ensemble_ml.distributed.voting import LionCub, Vote
from ensemble_ml.optim import Lion

RANKS, LR = 2, 0.1


class Weights(nn.Module):
    """A matrix, and a vector that is too small to be compressed."""

    def __init__(self):
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(16, 12)), nn.Parameter(torch.zeros(5))


def stepped(make, gradients):
    """Gradients after the exchange, weights after one step and momenta of each rank, from given gradients."""

    def work(group):
        net, exchange = Weights(), make(group)
        optimizer = Lion(net.parameters(), lr=LR, weight_decay=0.0, exchange=exchange)
        exchange.begin(0)
        loss = sum((p * g).sum() for p, g in zip(net.parameters(), gradients[group.rank], strict=True))
        loss.backward()
        exchange.finish()
        after = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        exchange.close()
        momenta = [optimizer.momentum(p) for p in net.parameters()]
        return after, [p.detach() for p in net.parameters()], momenta

    return on_ranks(RANKS, work)


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 12, generator=generator), torch.randn(5, generator=generator)]


def test_powersgd_gives_a_mean_gradient_of_its_rank_exactly():
    left, right = torch.randn(16, 2, generator=torch.Generator().manual_seed(5)), drawn(6)[0][:2]
    apart, vectors = drawn(7)[0], [drawn(8)[1], drawn(9)[1]]
    gradients = [[left @ right + sign * apart, vector] for sign, vector in zip((1, -1), vectors, strict=True)]
    for after, _, _ in stepped(lambda g: PowerSGD(g, rank=2), gradients):
        torch.testing.assert_close(after[0], left @ right, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after[1], (vectors[0] + vectors[1]) / 2)


def test_eight_bits_of_lion_cub_are_signs_of_sums_of_whole_numbers():
    gradients = [drawn(seed) for seed in range(RANKS)]
    levels = 127 // RANKS
    found = stepped(lambda g: LionCub(g, bits=8, scale=VoteScale.linf), gradients)
    for place in (0, 1):
        steps = [torch.round(one[place] / one[place].abs().max() * levels) for one in gradients]
        total = sum(steps)
        assert (total != 0).float().mean() > 0.5  # ties are broken elsewhere
        for _, weights, _ in found:
            assert torch.equal(torch.sign(weights[place])[total != 0], -torch.sign(total)[total != 0])


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clipping_leaves_a_gradient_of_the_bound_or_its_own(clip):
    gradients = [drawn(seed) for seed in range(RANKS)]
    for rank, (_, _, momenta) in enumerate(stepped(lambda g: Vote(g, clip=clip), gradients)):
        own = torch.cat([g.flatten() for g in gradients[rank]])
        kept = torch.cat([m.flatten() for m in momenta]) / (1 - 0.99)  # beta2 of Lion
        torch.testing.assert_close(kept, own * min(1.0, clip / float(own.norm())), rtol=1e-4, atol=1e-9)
