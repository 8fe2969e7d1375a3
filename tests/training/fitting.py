"""What the fits of small networks start from: dates of one level, one surface variable, one lead, and a correction."""

import numpy as np
import torch

from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import make_network, surroundings_shapes
from ensemble_ml.training.linear_fit import Linear, mean_state
from ensemble_ml.training.point_fit import Correction

TRAIN, VALIDATION = np.arange(16), np.arange(16, 20)
SIZES = [1, 2, 3, 5]


def linear_of(dates, weight=None):
    """A linear correction of these weights; one that adds nothing yet where there are none."""
    shape = correction_shape(dates.spec)
    module = LinearCorrection(dates.spec, np.zeros(shape) if weight is None else weight)
    anchor = mean_state(dates, TRAIN)
    return Linear(module, anchor, torch.full_like(anchor, 0.7), torch.full(anchor.shape[:2], 2.0))


def alike(dates):
    """The same weights in all bands."""
    shape = correction_shape(dates.spec)
    return np.broadcast_to(np.random.default_rng(3).normal(0, 0.2, shape[1:]), shape)


def nothing(dates):
    """A correction that adds nothing yet."""
    spec, linear = dates.spec, linear_of(dates)
    weights = {name: np.zeros(shape) for name, shape in surroundings_shapes(spec).items()}
    networks = (make_network(spec, weights, name) for name in ("surroundings", "residuals"))
    return Correction(linear, *networks, position_planes(spec, np.zeros((0, *spec.grid.shape), np.float32)))


def missing_often(errors, kind):
    """The same errors, of which those of the first field's mean (0) or spread (1) are missing every other date."""

    def gaps(date, sample, members):
        found = [values.clone() for values in errors(date, sample, members)]
        if date % 2 == 0:
            found[kind][:, 0] = torch.nan
        return tuple(found)

    return gaps
