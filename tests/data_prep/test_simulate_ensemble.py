"""The ensemble of the embedded archive: GRIB messages, breeding, realism, schedule."""

from __future__ import annotations

import math
from datetime import datetime

import eccodes
import numpy as np
import pytest
from fixtures_archive import tiny_archive, tiny_config  # noqa: F401
from simulating import GRID, SHAPE, small_facts

from data_prep.simulate.archive import Encoder, Stamp, accumulation, forecast_messages, measure, model_years, report
from data_prep.simulate.chain import Amplitude, deviations, initial_states, mix, norm, rotation
from data_prep.simulate.synthesis import NORM_PLANE, ModelFacts, truncate
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return small_facts()


def decode(message: bytes, *keys: str) -> tuple[list, np.ndarray]:
    handle = eccodes.codes_new_from_message(message)
    try:
        return [eccodes.codes_get(handle, key) for key in keys], eccodes.codes_get_values(handle)
    finally:
        eccodes.codes_release(handle)


class TestGrib:
    encoder = Encoder(*GRID)

    def test_member_round_trip(self):
        field = 280 + np.random.default_rng(2).standard_normal((17, 32)) * 10
        message = self.encoder.encode("t", field, Stamp(datetime(2001, 1, 7), 48, 3, 10), 850)
        keys = ("shortName", "level", "dataType", "number", "dataDate", "stepRange", "bitsPerValue", "packingType")
        found, values = decode(message, *keys)
        assert found == ["t", 850, "pf", 3, 20010107, "48", 16, "grid_simple"]
        np.testing.assert_allclose(values.reshape(field.shape), field, atol=np.ptp(field) / 2**16)

    def test_grid_is_exact(self):
        keys = (
            "Ni",
            "Nj",
            "latitudeOfFirstGridPointInDegrees",
            "longitudeOfLastGridPointInDegrees",
            "iDirectionIncrementInDegrees",
        )
        found, _ = decode(self.encoder.encode("sp", np.ones((17, 32)), Stamp(datetime(2001, 1, 7))), *keys)
        assert found == [32, 17, 90.0, 348.75, 11.25]

    def test_a_constant_field_does_not_blunt_the_next(self):
        stamp = Stamp(datetime(2001, 1, 7), 24, 1, 10)
        self.encoder.encode("q", np.zeros((17, 32)), stamp, 300)
        field = np.random.default_rng(3).random((17, 32))
        _, values = decode(self.encoder.encode("q", field, stamp, 300))
        np.testing.assert_allclose(values, field.ravel(), atol=2**-15)

    def test_an_encoder_of_ensembles_of_two_sizes(self):
        for members in (10, 20):
            message = self.encoder.encode("t", np.ones((17, 32)), Stamp(datetime(2001, 1, 7), 48, 3, members), 500)
            assert decode(message, "numberOfForecastsInEnsemble")[0] == [members]

    def test_precipitation_says_its_interval(self):
        rain = np.random.default_rng(4).random((17, 32))
        surface = {"tp": rain}
        _, member = forecast_messages(self.encoder, {}, surface, [], Stamp(datetime(2001, 1, 7), 48, 2, 10))
        _, truth = forecast_messages(self.encoder, {}, surface, [], Stamp(datetime(2001, 1, 7)))
        keys = ("stepRange", "dataType", "validityDate", "units")
        assert decode(member, *keys)[0] == ["0-48", "pf", 20010109, "m"]
        assert decode(truth, *keys)[0] == ["0-24", "an", 20010107, "m"]
        assert accumulation(Stamp(datetime(2001, 1, 7))).start == datetime(2001, 1, 6)


class TestBreeding:
    def states(self, count: int) -> np.ndarray:
        return np.random.default_rng(5).standard_normal((count, 33, *SHAPE)).astype(np.float32)

    def test_norm_is_a_temperature(self):
        x = np.zeros((3, 33, *SHAPE))
        x[:, NORM_PLANE, 0, 0] = 0.5 * math.sqrt(4 * math.pi)
        assert norm(x) == pytest.approx(0.5)

    def test_mixture_is_scaled_and_spans(self):
        dev = deviations(self.states(12))
        np.testing.assert_allclose(dev.sum(0), 0, atol=1e-4)
        mixed = mix(dev, 13, 0.35, np.random.default_rng(6))
        assert norm(mixed) == pytest.approx(0.35)
        assert np.linalg.matrix_rank(mixed.reshape(13, -1), tol=1e-4) == 11

    def test_rotation_is_orthogonal(self):
        q = rotation(7, np.random.default_rng(7))
        np.testing.assert_allclose(q @ q.T, np.eye(7), atol=1e-12)

    def test_truth_is_as_far_from_the_members_as_they_from_each_other(self):
        truth = self.states(1)[0]
        dev = deviations(self.states(8)) * 0.1
        apart, between = [], []
        for seed in range(60):
            x = initial_states(truth, dev, 8, Amplitude(0.4), np.random.default_rng(seed)).astype(np.float64)
            apart.append(((x[0] - truth)[NORM_PLANE] ** 2).sum())
            between.append(((x[0] - x[1])[NORM_PLANE] ** 2).sum())
        assert np.mean(apart) == pytest.approx(np.mean(between), rel=0.15)

    def test_zero_deviations_are_refused(self):
        with pytest.raises(ValueError, match="length zero"):
            mix(np.zeros((4, 33, *SHAPE)), 3, 0.3, np.random.default_rng(0))

    def test_truncation_is_a_projection(self):
        cut = truncate(self.states(1), 5)
        assert cut.shape[-2:] == (11, 7) and (cut[..., 6:] == 0).all()
        np.testing.assert_array_equal(truncate(cut, 5), cut)


class TestRealism:
    grid = Grid(np.linspace(90, -90, 9), np.arange(16) * 22.5)

    def ensemble(self, inflate: float = 1.0, bias: float = 0.0, members: int = 10):
        """A perfect ensemble whose spread varies by date and place, spoiled as asked."""
        rng = np.random.default_rng(8)
        shape = (400, 9, 16)
        sigma = rng.gamma(4.0, 0.25, size=shape)
        centre = rng.standard_normal(shape)
        x = centre + inflate * sigma * rng.standard_normal((members, *shape))
        truth = centre + sigma * rng.standard_normal(shape) - bias
        return measure(x.mean(0), x.var(0, ddof=1), truth, members, self.grid)

    def test_perfect_ensemble(self):
        figures = self.ensemble()
        assert figures.spread_skill == pytest.approx(1.0, abs=0.02)
        assert figures.bias_share == pytest.approx(0.0, abs=2e-3)
        assert figures.raw_bias_share == pytest.approx(1 / 400, abs=2e-3)
        assert figures.correlation > 0.2

    @pytest.mark.parametrize("members", [2, 3, 10])
    def test_member_factor(self, members):
        assert self.ensemble(members=members).spread_skill == pytest.approx(1.0, abs=0.03)

    def test_bias_and_missing_spread_are_seen(self):
        figures = self.ensemble(inflate=0.5, bias=1.0)
        total = figures.rmse**2
        assert figures.bias_share == pytest.approx(1.0 / total, rel=0.03)
        assert figures.spread_skill < 0.7 and not figures.as_dict()["passes"] and len(figures.misses) == 2
        assert "misses" in report({"z500": figures})[0]


class TestSchedule:
    def config(self, **changes) -> SimulateConfig:
        return SimulateConfig(output="x", **changes)

    def test_short_splits_take_the_middle(self):
        train, validation, test = model_years(self.config(train_dates=20, validation_dates=4, test_dates=10))
        assert [len(y.written) for y in (train, validation, test)] == [20, 4, 10]
        assert f"{train.written[0].start:%m%d}" == "0107" and f"{validation.written[0].start:%m%d}" == "0123"
        assert sum(c.fresh for c in train.cycles) == 1 and not any(c.written for c in train.cycles[:2])

    def test_windows_and_years(self):
        years = model_years(
            self.config(train_years=2, windows=["01-07", "07-07"], train_dates=3, validation_dates=1, test_dates=1)
        )
        assert [y.split for y in years] == ["train", "train", "validation", "test"]
        assert len(years[0].written) == 6 and sum(c.fresh for c in years[0].cycles) == 2
        assert years[0].written[3].start == datetime(2001, 7, 7)

    @pytest.mark.parametrize(
        ("key", "value", "text"),
        [
            ("members", 1, "members=1: at least 2 are needed for breeding"),
            ("rows", 32, "rows=32"),
            ("columns", 60, "divisible by 16"),
            ("levels", [300, 500], "500 and 850"),
            ("windows", ["13-01"], "windows=13-01"),
            ("windows", ["01-07", "02-07"], "overlap"),
            ("windows", ["01-07", "10-02"], "runs into the first of the next year"),
            ("forecast_truncation", 30, "21, 31, 42 and 63"),
            ("parts", "4/3", "parts=4/3: write i/n"),
            ("forecast_minutes", 50, "forecast_minutes=50"),
            ("norm", 0.0, "norm=0.0"),
            ("first_year", 0, "first_year=0: give years from 1000 to 2261"),
            ("first_year", 2260, "first_year=2260"),
        ],
    )
    def test_bad_settings(self, key, value, text):
        with pytest.raises(UserError, match=text):
            self.config(**{key: value})

    def test_the_last_year(self):
        assert self.config(first_year=2261, train_years=1, validation_years=0, test_years=0).first_year == 2261
