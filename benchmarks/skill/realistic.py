"""Check the realism of the ensemble that is scored, with the check of the simulated archive, on the test dates.

An ensemble that is far from realistic makes any post-processing look good.
"""

from __future__ import annotations

import numpy as np

from benchmarks.skill.scoring import Data
from data_prep.simulate.archive import GATE, Realism, measure
from ensemble_ml.store.source import Part
from ensemble_ml.verification.samples import Group
from ensemble_ml.verification.statistics import ensemble_moments


def realism_of(data: Data, groups: tuple[Group, ...]) -> dict[str, Realism]:
    """Return the figures of the check's fields, as far as the store has them, over the test dates with all members.

    Args:
        data: the store and its dates.
        groups: the fields that are scored.
    """
    found: dict[str, Realism] = {}
    for name, (variable, level) in GATE.items():
        for group in groups:
            if group.variable == variable and level in group.levels:
                found[name] = _measured(data, group, group.levels.index(level))
    return found


def _measured(data: Data, group: Group, level: int) -> Realism:
    fields = []
    for date in data.test.tolist():
        mean, variance = ensemble_moments(data.read(Part.FORECAST, date, group)[:, level])
        fields.append((mean, variance, data.read(Part.TRUTH, date, group)[0, level]))
    mean, variance, truth = (np.stack(part) for part in zip(*fields, strict=True))
    return measure(mean, variance, truth, data.full, data.store.layout.grid)
