"""How far around a point errors can be foretold, where this is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.skill import reach
from ensemble_ml.grid import Grid
from ensemble_ml.store.source import Fields, Part

ROWS, COLUMNS, TRAIN = 17, 32, 40
WHERE = "17 x 32 points, 40 training dates: RMSE of"
FOUR = f"{WHERE} the mean, linearly corrected by points up to 4 away, over that of the mean without its bias"


class Store:
    """White noise. The error of t2m is its mean over a box four points to the east; that of v is v one row poleward.

    In the south, where the mirror turns v, the row poleward is the next one to the south.
    """

    def __init__(self, size=TRAIN + 20):
        days = np.arange(size) * np.timedelta64(5, "D")
        self.layout = SimpleNamespace(
            init_time=np.datetime64("2001-01-01", "ns") + days, realization=(0, 1, 2), lead_hours=(0, 24),
            variables=("v",), levels=(500,), surface=("t2m",),
            grid=Grid(np.linspace(80, -80, ROWS), np.arange(COLUMNS) * 360 / COLUMNS),
        )  # fmt: skip

    def read(self, part, date, selection):
        assert selection.lead_hours == (24,)
        noise = np.random.default_rng(date).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)
        if part is Part.FORECAST:
            apart = np.array([-1, 1], np.float32)[:, None, None, None] + noise  # both members, whose mean is the noise
            return Fields(apart[:, None, :1, None], apart[:, None, 1:])
        v, t2m = noise
        boxes = np.stack([np.roll(np.roll(np.pad(t2m, ((2, 2), (0, 0)), "edge"), -k, 1), 0, 0) for k in range(2, 7)])
        rows = np.stack([boxes.mean(0)[k : k + ROWS] for k in range(5)]).mean(0)
        poleward = np.where(np.arange(ROWS)[:, None] < ROWS // 2, np.roll(v, 1, 0), np.roll(v, -1, 0))
        return Fields((v + poleward)[None, None, None, None], (t2m + rows)[None, None, None])


def test_errors_are_foretold_from_where_they_come_from():
    store = Store()
    found, claims = reach.measure(store, np.arange(TRAIN), np.arange(TRAIN, TRAIN + 20), 2, 100, 10)
    values = {name: figure.median for name, figure in found.items()}
    itself, one, two, four, *farther = list(values.values())[:6]
    assert itself > 0.97 and two < one < 0.7  # v is known with its neighbours; boxes around 2 and 4 overlap
    assert four < 0.7 * two and farther == pytest.approx([four, four], abs=0.06)  # t2m with points four away
    [(words, gain)] = list(values.items())[6:]
    assert words.endswith("below that with 3 x 3") and gain > 30
    assert (claims[0].claim, claims[0].value) == (words, gain) and all(one.holds for one in claims)
    assert found[FOUR].min <= four <= found[FOUR].max


def test_boxes_of_a_ring_and_the_mirror():
    values = torch.arange(60.0).view(1, 3, 20)
    rows, columns, south = torch.arange(3), torch.tensor([0, 4]), torch.tensor([False, False, True])
    points = list(reach._around(values, rows, columns, south))
    assert len(points) == 1 + 8 * len(reach.DISTANCES)
    # The first of ring 1 lies one row up and one column left: in the south one row down, where the last is repeated.
    assert points[1][0].tolist() == [[19, 3], [19, 3], [59, 43]]
    assert points[9][0, 0].tolist() == pytest.approx([(17 + 18 + 19) / 3 + 20 / 3, (1 + 2 + 3) / 3 + 20 / 3])
