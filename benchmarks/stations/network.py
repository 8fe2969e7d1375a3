"""The model at a single point: the same features and heads as ours, with a small network in place of the U-Net.

    location = m + L + a s0
    sigma    = s0 exp(B + b)

    m       mean of the members
    s0      prior spread, as in `models.features`
    L, B    bias and inflation of the training dates
    a, b    outputs of the network, whose last layer starts at zero

So the untrained network is a statistical correction. Training draws random subsets of the members, so one network
serves any number of members. The number of steps is chosen on the last two training years. Then all training years are
used.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.stations.series import Series
from ensemble_ml.distributions import crps
from ensemble_ml.fields import Family
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.optim.lion import AdamW

_SHRINK = 2.0  # number of members that the climatological spread counts for
_BATCH, _RATE, _DECAY, _AVERAGE = 256, 3e-3, 0.1, 0.99


class PointNetwork(nn.Module):
    """A network from features (D, F) to a and b (D, 2). Its buffers are mean and deviation of m, s_clim, L and B."""

    centre: Tensor
    climate: Tensor
    bias: Tensor
    inflation: Tensor

    def __init__(self, mean: Tensor, variance: Tensor, y: Tensor, terms: int, hidden: int = 32):
        super().__init__()
        error = y - mean
        bias = error.mean()
        self.register_buffer("centre", torch.stack([mean.mean(), mean.std()]))
        self.register_buffer("climate", variance.mean().sqrt())
        self.register_buffer("bias", bias)
        self.register_buffer("inflation", ((error - bias).std() / variance.mean().sqrt()).log())
        self.layers = nn.Sequential(
            nn.Linear(3 + terms, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, members: Tensor, season: Tensor) -> tuple[Tensor, Tensor]:
        """Return location and sigma (D,) for members (D, M), two or more."""
        mean, spread = members.mean(1), members.std(1)
        count = torch.full_like(mean, members.shape[1])
        s0 = shrunk_spread(spread, count, self.climate, _SHRINK)
        features = [(mean - self.centre[0]) / self.centre[1], (s0 / self.climate).log(), 1 / count]
        a, b = self.layers(torch.cat([torch.stack(features, 1), season], 1)).unbind(1)
        return mean + self.bias + a * s0, s0 * torch.exp(self.inflation + 3 * torch.tanh(b / 3))


@dataclass(frozen=True, eq=False)
class Trained:
    """Networks of several seeds, whose locations and sigmas are averaged.

    Attributes:
        networks: the networks.
        steps: the best number of steps of each seed.
    """

    networks: list[PointNetwork]
    steps: list[int]

    def __call__(self, series: Series, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return location and sigma (D,) from the first `count` members."""
        members, _, season = tensors(series)
        with torch.no_grad():
            found = [network(members[:, :count], season) for network in self.networks]
        location, sigma = (torch.stack(part).mean(0).numpy() for part in zip(*found, strict=True))
        return location, sigma


def tensors(series: Series) -> tuple[Tensor, Tensor, Tensor]:
    """Return members, observations and two seasonal harmonics as float32 tensors.

    Args:
        series: the series of a station.
    """
    arrays = (series.members, series.observed, series.season(2))
    return tuple(torch.from_numpy(array).float() for array in arrays)  # type: ignore[return-value]


def fit_network(train: Series, inner: Series, validation: Series, *, seeds: int, steps: int) -> Trained:
    """Choose the number of steps on `validation` after training on `inner`, then train on all of `train`.

    Args:
        train: all training dates.
        inner: the training dates without the validation dates.
        validation: the validation dates.
        seeds: number of networks.
        steps: largest number of steps.
    """
    networks, taken = [], []
    for seed in range(seeds):
        best = _train(inner, seed, steps, validation)[1]
        networks.append(_train(train, seed, max(round(best * len(train.times) / len(inner.times)), 1), None)[0])
        taken.append(best)
    return Trained(networks, taken)


def _train(series: Series, seed: int, steps: int, validation: Series | None) -> tuple[PointNetwork, int]:
    """Return the network with averaged weights and, with `validation`, the step at which it was best there."""
    generator = torch.Generator().manual_seed(seed)
    members, y, season = tensors(series)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = PointNetwork(members.mean(1), members.var(1), y, season.shape[1])
    optimizer = AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
    averaged, best, best_score = copy.deepcopy(network), 1, float("inf")
    for step in range(1, steps + 1):
        rows = torch.randint(len(y), (_BATCH,), generator=generator)
        size = int(torch.randint(3, members.shape[1] + 1, (1,), generator=generator))
        columns = torch.randperm(members.shape[1], generator=generator)[:size]
        location, sigma = network(members[rows][:, columns], season[rows])
        loss = crps(Family.NORMAL, location, sigma, y[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep = min(_AVERAGE, step / (step + 10))
        with torch.no_grad():
            for mean, now in zip(averaged.parameters(), network.parameters(), strict=True):
                mean.lerp_(now, 1 - keep)
        if validation is not None and step % 25 == 0:
            score = _score(averaged, validation)
            if score < best_score:
                best, best_score = step, score
    return averaged, best


def _score(network: PointNetwork, series: Series) -> float:
    """Return the mean CRPS from five and from all members."""
    members, y, season = tensors(series)
    with torch.no_grad():
        laws = [network(members[:, :m], season) for m in (5, members.shape[1])]
        return sum(float(crps(Family.NORMAL, mu, sigma, y).mean()) for mu, sigma in laws) / 2
