"""Archives that start at several hours of the day, whose errors follow the sun."""

import json

import pytest
from stores import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.training import train


@pytest.fixture(scope="module")
def twice_a_day(tmp_path_factory):
    days = [f"2001-{month:02}-{day:02}" for month, count in ((1, 8), (2, 4)) for day in range(1, count + 1)]
    dates = [f"{day}T{hour}" for day in days for hour in ("00", "12")]
    return make_store(tmp_path_factory.mktemp("hours") / "s.zarr", dates=dates, members=4, shape=(9, 16))


@pytest.mark.slow
def test_a_run_of_several_hours_is_told_of_and_one_of_each_can_be_made(config_of, twice_a_day, caplog):
    given = {"data__store": twice_a_day.path, "data__members": [2, 4], "steps": 1, "validate_every": 1}
    train(config_of(run="both", **given))
    assert "init times at 00, 12 UTC share one correction" in caplog.text
    caplog.clear()
    run = train(config_of(run="noon", data__hours=[12], **given))
    assert "UTC" not in caplog.text
    meta = json.loads((run / "checkpoints" / "last" / "checkpoint.json").read_text())
    assert len(meta["training_dates"]) == 8 and len(meta["validation_dates"]) == 4
    assert {date[11:13] for part in ("training", "validation") for date in meta[f"{part}_dates"]} == {"12"}
    with pytest.raises(
        UserError, match=r"data.hours=\[6\]: no chosen init time is at these hours; they are at 00, 12 UTC"
    ):
        train(config_of(run="none", data__hours=[6], **given))
    with pytest.raises(UserError, match=r"data.hours=\[24\]: hours from 0 to 23"):
        config_of(data__hours=[24])
