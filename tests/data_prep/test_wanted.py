"""Files with very many fields are listed in part, and read as if they were listed whole."""

import numpy as np
import public_archives
import pytest

from data_prep import open_archive, prepare, selecting
from data_prep.selecting import ALL, Wanted
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store import Part, open_store

PART = {"variables": ["ws", "z", "t2m"], "levels": [850], "leads": [48], "dates": ["2020-01-02/2020-01-03"]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return public_archives.weatherbench(tmp_path_factory.mktemp("wb2"), degrees=30, dates=3, members=2)


def read(path):
    """Return what is read of the part, and the number of records."""
    source = open_archive(path, **PART)
    fields = [source.read(Part.FORECAST, date) for date in range(2)]
    return (
        source.layout,
        np.stack([one.pressure for one in fields]),
        np.stack([one.surface for one in fields]),
        len(source.catalogue.records),
    )


def test_a_part_of_many(paths, monkeypatch):
    whole = read(paths[0])
    monkeypatch.setattr(selecting, "MANY", 1)
    part = read(paths[0])
    assert part[0].names == whole[0].names and part[0].init_time.tolist() == whole[0].init_time.tolist()
    np.testing.assert_array_equal(part[1], whole[1])
    np.testing.assert_array_equal(part[2], whole[2])
    assert part[3] == 2 * 2 * 5  # dates, members; ws with its components, z and t2m at one level and lead
    assert whole[3] > 10 * part[3]


def test_a_store_of_a_part_is_the_same(paths, tmp_path, monkeypatch):
    def made(name):
        config = PrepareConfig(input=str(paths[0]), truth=str(paths[1]), output=str(tmp_path / name), workers=1, **PART)
        return open_store(prepare(config))

    whole = made("whole.zarr")
    monkeypatch.setattr(selecting, "MANY", 1)
    part = made("part.zarr")
    assert part.layout.names == whole.layout.names
    for kind in whole.parts:
        for date in range(2):
            mine, theirs = part.read(kind, date), whole.read(kind, date)
            np.testing.assert_array_equal(mine.pressure, theirs.pressure)
            np.testing.assert_array_equal(mine.surface, theirs.surface)


def test_sums_keep_the_lead_before(paths, monkeypatch):
    monkeypatch.setattr(selecting, "MANY", 1)
    ticks = {"init": np.array(["2020-01-01"], "M8[s]"), "member": np.arange(2), "lead": np.array([24, 48]),
             "level": np.array([0])}  # fmt: skip
    one = Wanted.of(None, None, [48], None)
    assert one.places(field("tp"), ticks, "tp", over_time=True).shape == (4, 4)
    assert one.places(field("t2m"), ticks, "t2m", over_time=False).shape == (4, 2)


def test_more_than_can_be_listed(monkeypatch):
    monkeypatch.setattr(selecting, "MANY", 1)
    monkeypatch.setattr(selecting, "_MOST", 3)
    ticks = {
        "init": np.array(["2020-01-01"], "M8[s]"),
        "member": np.arange(2),
        "lead": np.arange(2),
        "level": np.zeros(1),
    }
    with pytest.raises(
        UserError, match=r"t2m: 4 fields are more than can be listed; prepare takes a part, by variables="
    ):
        ALL.places(field("t2m"), ticks, "t2m", over_time=False)
