"""What the fits begin with: a start of which nothing is fitted yet."""

from dataclasses import replace

import numpy as np
import torch

from ensemble_ml.models import Climate
from ensemble_ml.models.heads import typical_spread
from ensemble_ml.models.model import Start
from ensemble_ml.training.linear_fit import mean_state

TRAIN, VALIDATION = np.arange(16), np.arange(16, 20)
SIZES = [1, 2, 3, 5]


def start_of(dates, weight=None):
    """A start whose linear correction has these weights, and none where there are none; the point network has none."""
    spec = dates.spec
    known = replace(Climate.default(spec), anchor=mean_state(dates, TRAIN).numpy())
    if weight is not None:
        known.correction = weight
    start = Start(spec, known)
    know(start, climatology=0.7, shrink=2.0, spread_shrink=2.0)
    return start


def know(start, **terms):
    """Set terms of the heads: numbers or tensors by name."""
    for name, values in terms.items():
        getattr(start.heads, name).copy_(torch.as_tensor(values))
    start.heads.typical.copy_(typical_spread(start.heads.climatology))


def typical_of(start):
    """Typical spreads, (T, F, 1, 1)."""
    return start.heads.typical[..., None, None]


def added(start, sample, members):
    """What the linear correction adds to mean and spread, two tensors (T, F, Y, X) in physical units."""
    mean, spread, count, _ = sample.batch(members)
    return tuple(start.linear_part(start.anomalies(mean, spread, count), count)[0] * typical_of(start))


def said(start, sample, members):
    """Outputs of the point network, (3, T, F, Y, X)."""
    return start.corrections(*sample.batch(members))[1][0]


def alike(dates):
    """The same weights in all bands."""
    shape = Climate.default(dates.spec).correction.shape
    return np.broadcast_to(np.random.default_rng(3).normal(0, 0.2, shape[1:]), shape)


def missing_often(errors, kind):
    """The same errors, of which those of the first field's mean (0) or spread (1) are missing every other date."""

    def gaps(date, sample, members):
        found = [values.clone() for values in errors(date, sample, members)]
        if date % 2 == 0:
            found[kind][:, 0] = torch.nan
        return tuple(found)

    return gaps
