"""A network of odd sizes, trained on a few ranks of this process with any exchange."""

import torch
from parallel.simulated import on_ranks
from torch import nn

from ensemble_ml.distributed.exchange import GradientAverage
from ensemble_ml.distributed.powersgd import PowerSGD
from ensemble_ml.distributed.voting import DistributedLion, LionCub, Vote
from ensemble_ml.optim import Lion


class Net(nn.Module):
    """Odd sizes, one weight with its axes permuted in memory, one that is used only where asked."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(7, 13, generator=generator))
        self.b = nn.Parameter(torch.randn(13, 5, 3, generator=generator).permute(2, 0, 1))
        self.c = nn.Parameter(torch.randn(1, generator=generator))
        self.unused = nn.Parameter(torch.randn(70, generator=generator))
        self.never = nn.Parameter(torch.randn(3, generator=generator))

    def forward(self, x, use=False):
        y = torch.relu(x @ self.a) @ self.b.sum(0) * self.c
        return y.square().mean() + (self.unused.square().sum() if use else 0)


def batch(rank, step):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(make, size, steps=5, use=lambda rank, step: False, batches=batch, before=None, dtype=None, net=Net):
    """Weights, momenta and outcomes of each rank after some steps."""
    make_net = net

    def work(group):
        net, exchange = make_net().to(dtype), make(group)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        outcomes = []
        for step in range(steps):
            optimizer.zero_grad()
            exchange.begin(step)
            net(batches(group.rank, step).to(dtype), use(group.rank, step)).backward()
            if before:
                before(net, group.rank, step)
            outcomes.append(exchange.finish())
            if outcomes[-1].finite:
                optimizer.step()
                exchange.after_step()
        exchange.close()
        return [p.detach() for p in net.parameters()], [optimizer.momentum(p) for p in net.parameters()], outcomes

    return on_ranks(size, work)


def same(found):
    return all(torch.equal(a, b) for weights, *_ in found for a, b in zip(weights, found[0][0], strict=True))


RIVALS = {
    "vote": lambda g, **k: Vote(g, **k),
    "cub8": lambda g, **k: LionCub(g, bits=8, **k),
    "cub1": lambda g, **k: LionCub(g, bits=1, **k),
    "distributed": lambda g, **k: DistributedLion(g, **k),
    "fp32": lambda g, **k: GradientAverage(g, **k),
    "fp16": lambda g, **k: GradientAverage(g, dtype=torch.float16, **k),
    "powersgd": lambda g, **k: PowerSGD(g, rank=2, **k),
}
