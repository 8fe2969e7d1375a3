"""The embedded archive: synthesis, vertical interpolation, GRIB, breeding, realism, and a whole tiny archive."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import eccodes
import numpy as np
import pytest
from fixtures_archive import tiny_archive, tiny_config  # noqa: F401
from scipy.special import sph_harm_y

from data_prep.simulate import simulate
from data_prep.simulate.assemble import assemble, realism
from data_prep.simulate.breeding import Amplitude, deviations, initial_states, mix, norm, rotation
from data_prep.simulate.grib import Encoder, Stamp, accumulation, forecast_messages
from data_prep.simulate.layout import NORM_PLANE, PLANES, SIGMA, ModelFacts, truncate
from data_prep.simulate.pressure import geopotential, surface_fields, to_pressure
from data_prep.simulate.realism import cell_weights, measure, report
from data_prep.simulate.run import describe
from data_prep.simulate.schedule import model_years
from data_prep.simulate.synthesis import Synthesis, bilinear, legendre, legendre_gradients, regular_grid, sigma_fields
from data_prep.simulate.workers import _follow, _Progress
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError

TRUNCATION = 7
SHAPE = (2 * TRUNCATION + 1, TRUNCATION + 2)
GRID = regular_grid(17, 32)


def coefficient(m: int, l: int) -> np.ndarray:
    x = np.zeros(SHAPE)
    x[2 * abs(m) - (m > 0), l] = 1.0
    return x


def real_harmonic(m: int, l: int) -> np.ndarray:
    """Orthonormal real spherical harmonic from SciPy's complex one (which has the Condon-Shortley phase too)."""
    latitude, longitude = np.meshgrid(*map(np.deg2rad, GRID), indexing="ij")
    y = sph_harm_y(l, abs(m), np.pi / 2 - latitude, longitude)
    return y.real if m == 0 else math.sqrt(2) * (y.real if m > 0 else y.imag)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return ModelFacts(
        truncation=TRUNCATION,
        reference_temperature=np.full(8, 280.0),
        orography_ml=coefficient(0, 0) * 100.0,
        land_yx=np.ones((8, 16)),
        latitude=np.linspace(-80, 80, 8),
        longitude=np.arange(16) * 22.5,
        gas_constant=287.0,
        vapour_constant=461.0,
        gravity=9.81,
        reference_pressure=1e5,
        radius=6.371e6,
    )


class TestSynthesis:
    @pytest.mark.parametrize(("m", "l"), [(0, 0), (0, 3), (1, 1), (-1, 4), (5, 7), (-7, 7)])
    def test_equals_scipys_harmonics(self, m, l):
        synthesis = Synthesis(TRUNCATION, *GRID, 1.0)
        np.testing.assert_allclose(synthesis.scalar(coefficient(m, l)), real_harmonic(m, l), atol=1e-13)

    def test_legendre_functions_have_unit_norm(self):
        nodes, weights = np.polynomial.legendre.leggauss(40)
        p = legendre(nodes, 32)
        norms = (p**2 * weights).sum(-1)
        np.testing.assert_allclose(norms[np.triu_indices(33)], 1.0, atol=1e-12)

    def test_gradients_equal_numerical_ones(self):
        latitude = np.linspace(-1.4, 1.4, 15)
        step = 1e-5
        p = legendre(np.sin(latitude), 6)
        over_cosine, slope = legendre_gradients(p)
        numerical = (legendre(np.sin(latitude + step), 6) - legendre(np.sin(latitude - step), 6)) / (2 * step)
        np.testing.assert_allclose(slope, numerical[:6, :6], atol=1e-8)
        m = np.arange(6)[:, None, None]
        np.testing.assert_allclose(over_cosine, m * p[:6, :6] / np.cos(latitude), atol=1e-12)

    def test_solid_rotation_has_its_analytic_wind(self):
        radius, speed = 6.371e6, 40.0
        # u = U cos(latitude) has vorticity 2 U sin(latitude) / a; Y_1^0 = sqrt(3 / 4 pi) sin(latitude).
        vorticity = coefficient(0, 1) * 2 * speed / radius * math.sqrt(4 * math.pi / 3)
        east, north = Synthesis(TRUNCATION, *GRID, radius).wind(vorticity, np.zeros(SHAPE))
        expected = speed * np.cos(np.deg2rad(GRID[0]))[:, None] * np.ones(32)
        np.testing.assert_allclose(east, expected, atol=1e-9)
        np.testing.assert_allclose(north, 0, atol=1e-9)

    def test_wind_at_a_pole_is_one_vector(self):
        rng = np.random.default_rng(0)
        vorticity, divergence = rng.standard_normal((2, *SHAPE))
        east, north = Synthesis(TRUNCATION, *GRID, 1.0).wind(vorticity, divergence)
        longitude = np.deg2rad(GRID[1])
        for row, side in ((0, 1), (-1, -1)):
            x = -np.sin(longitude) * east[row] - side * np.cos(longitude) * north[row]
            y = np.cos(longitude) * east[row] - side * np.sin(longitude) * north[row]
            np.testing.assert_allclose([np.ptp(x), np.ptp(y)], 0, atol=1e-12)
            assert np.hypot(x[0], y[0]) > 1e-3

    def test_bilinear_keeps_bounds_and_linear_fields(self):
        latitude, longitude = np.linspace(-80, 80, 17), np.arange(24) * 15.0
        rain = np.random.default_rng(1).gamma(0.3, size=(2, 17, 24))
        out = bilinear(rain, (latitude, longitude), GRID)
        assert out.min() >= 0 and out.max() <= rain.max()
        np.testing.assert_allclose(np.ptp(out[:, [0, -1]], axis=-1), 0, atol=1e-12)
        slope = bilinear(np.repeat(latitude[:, None], 24, 1), (latitude, longitude), GRID)
        inner = np.abs(GRID[0]) <= 80
        np.testing.assert_allclose(slope[inner], np.repeat(GRID[0][inner, None], 32, 1), atol=1e-12)

    def test_states_become_fields(self, facts):
        x = np.zeros((2, 33, *SHAPE), np.float32)
        x[1, PLANES["temperature"], 0, 0] = 5 * math.sqrt(4 * math.pi)
        x[:, PLANES["humidity"], 0, 0] = -1.0
        fields = sigma_fields(x, Synthesis(TRUNCATION, *GRID, facts.radius), facts)
        np.testing.assert_allclose(fields["t"][0], 280.0)
        np.testing.assert_allclose(fields["t"][1], 285.0, rtol=1e-6)
        np.testing.assert_allclose(fields["ps"], 1e5)
        assert (fields["q"] == 0).all()
        np.testing.assert_allclose(fields["phis"], 981 / math.sqrt(4 * math.pi))


def column(facts: ModelFacts, ps: float, height: float, lapse: float = 0.0) -> dict[str, np.ndarray]:
    """A dry column with temperature 280 K at 1000 hPa, changing by `lapse` K a unit of log pressure."""
    log_p = np.log(np.array(SIGMA) * ps / 1e5)
    shape = (1, 8, 1, 1)
    return {
        "t": (280.0 + lapse * log_p).reshape(shape),
        "u": (10.0 + 3.0 * log_p).reshape(shape),
        "v": np.full(shape, -4.0),
        "q": np.zeros(shape),
        "ps": np.full((1, 1, 1), ps),
        "phis": np.full((1, 1), height * facts.gravity),
    }


class TestPressure:
    def test_log_linear_profiles_are_exact(self, facts):
        lapse, ps = 20.0, 1.02e5
        out = to_pressure(column(facts, ps, 0.0, lapse), [300, 500, 850], facts)
        log_p = np.log(np.array([0.3, 0.5, 0.85]))
        np.testing.assert_allclose(out["t"][0, :, 0, 0], 280 + lapse * log_p, rtol=1e-12)
        np.testing.assert_allclose(out["u"][0, :, 0, 0], 10 + 3 * log_p, rtol=1e-12)
        np.testing.assert_allclose(out["v"], -4.0)
        low = math.log(SIGMA[-1] * ps / 1e5)  # the core takes the lowest half layer as isothermal
        start = -facts.gas_constant * math.log(SIGMA[-1]) * (280 + lapse * low)
        integral = facts.gas_constant * (280 * (low - log_p) + lapse / 2 * (low**2 - log_p**2))
        np.testing.assert_allclose(out["z"][0, :, 0, 0], start + integral, rtol=1e-12)

    def test_layers_meet(self, facts):
        fields = column(facts, 1e5, 200.0, 15.0)
        phi, _ = geopotential(fields, facts)
        for k in (3, 5, 7):
            at = to_pressure(fields, [SIGMA[k] * 1000], facts)
            np.testing.assert_allclose(at["z"][0, 0], phi[0, k], rtol=1e-12)
            np.testing.assert_allclose(at["t"][0, 0], fields["t"][0, k], rtol=1e-12)

    def test_below_ground_follows_the_rule(self, facts):
        ps = 8e4
        fields = column(facts, ps, 1000.0, 15.0)
        out = to_pressure(fields, [850], facts)
        exponent = facts.gas_constant * 0.0065 / facts.gravity
        ground = fields["t"][0, -1, 0, 0] * (1 + exponent * (1 / SIGMA[-1] - 1))
        y = exponent * math.log(8.5e4 / ps)
        # 6.5 K/km: T = T0 (p / ps)^a, to the third order of its exponent.
        np.testing.assert_allclose(out["t"][0, 0], ground * math.exp(y), rtol=1e-8)
        thickness = facts.gas_constant * ground / exponent * (math.exp(y) - 1)
        np.testing.assert_allclose(out["z"][0, 0], 1000 * facts.gravity - thickness, rtol=1e-6)
        np.testing.assert_allclose(out["u"][0, 0], fields["u"][0, -1])

    def test_continuous_at_the_ground(self, facts):
        fields = column(facts, 8e4, 1000.0, 15.0)
        above, below = (to_pressure(fields, [level], facts) for level in (800 - 1e-6, 800 + 1e-6))
        for name in ("t", "z", "u", "q"):
            np.testing.assert_allclose(above[name], below[name], rtol=1e-7)

    def test_under_high_ground_the_air_stays_below_298_kelvin(self, facts):
        fields = column(facts, 5.5e4, 4800.0)
        free = 281 * (8.5 / 5.5) ** (facts.gas_constant * 0.0065 / facts.gravity)
        assert 290 < to_pressure(fields, [850], facts)["t"].item() < 298 < free

    def test_surface_fields(self, facts):
        fields = column(facts, 1e5, 0.0, 20.0)
        out = surface_fields(fields, np.zeros((1, 1)), facts)
        np.testing.assert_allclose(out["msl"], 1e5)
        np.testing.assert_allclose(out["u10"], 0.95 * fields["u"][:, -1])
        assert 278 < out["t2m"].item() < 281
        high = surface_fields(column(facts, 8.9e4, 1000.0, 20.0), np.ones((1, 1)), facts)
        assert high["msl"].item() == pytest.approx(1.003e5, rel=5e-3)


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
    latitude = np.linspace(90, -90, 9)

    def ensemble(self, inflate: float = 1.0, bias: float = 0.0, members: int = 10):
        """A perfect ensemble whose spread varies by date and place, spoiled as asked."""
        rng = np.random.default_rng(8)
        shape = (400, 9, 16)
        sigma = rng.gamma(4.0, 0.25, size=shape)
        centre = rng.standard_normal(shape)
        x = centre + inflate * sigma * rng.standard_normal((members, *shape))
        truth = centre + sigma * rng.standard_normal(shape) - bias
        return measure(x.mean(0), x.var(0, ddof=1), truth, members, self.latitude)

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

    def test_weights_are_cell_areas(self):
        weights = cell_weights(self.latitude)
        assert weights.sum() == pytest.approx(1) and weights[0] == pytest.approx(
            (1 - math.sin(math.radians(78.75))) / 2
        )


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
            ("members", 1, "simulate.members=1: at least 2 are needed for breeding"),
            ("rows", 32, "simulate.rows=32"),
            ("columns", 60, "divisible by 16"),
            ("levels", [300, 500], "500 and 850"),
            ("windows", ["13-01"], "simulate.windows=13-01"),
            ("windows", ["01-07", "02-07"], "overlap"),
            ("forecast_truncation", 30, "21, 31 and 42"),
            ("forecast_minutes", 50, "simulate.forecast_minutes=50"),
            ("norm", 0.0, "simulate.norm=0.0"),
        ],
    )
    def test_bad_settings(self, key, value, text):
        with pytest.raises(UserError, match=text):
            self.config(**{key: value})


def messages(folder: Path, pattern: str):
    for path in sorted(folder.glob(pattern)):
        with open(path, "rb") as file:
            while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
                yield path, handle
                eccodes.codes_release(handle)


class TestArchive:
    def test_layout(self, tiny_archive):  # noqa: F811
        record = json.loads((tiny_archive / "archive.json").read_text())
        assert record["years"] == {"train": [2001], "validation": [2002], "test": [2003]}
        assert [len(dates) for dates in record["start_dates"].values()] == [4, 1, 2]
        assert "never ENS-10" in record["statement"] and set(record["realism"]) == {"z500", "t850"}
        assert not (tiny_archive / ".parts").exists()
        found = Counter()
        for path, handle in messages(tiny_archive, "ensemble/*.grib"):
            date = str(eccodes.codes_get(handle, "dataDate"))
            assert path.stem.endswith(date[4:])
            found[date, eccodes.codes_get(handle, "number"), eccodes.codes_get(handle, "endStep")] += 1
            assert eccodes.codes_get(handle, "dataType") == "pf" and eccodes.codes_get(handle, "edition") == 1
        dates = [date[:10].replace("-", "") for split in record["start_dates"].values() for date in split]
        assert set(found) == {(d, m, s) for d in dates for m in (1, 2, 3) for s in (0, 24, 48)}
        assert set(found.values()) == {5 * 4 + 6}

    def test_truth_covers_every_valid_time_once(self, tiny_archive):  # noqa: F811
        seen = Counter()
        for path, handle in messages(tiny_archive, "truth/*.grib"):
            date = str(eccodes.codes_get(handle, "validityDate"))
            assert path.stem.endswith(date[4:]) and eccodes.codes_get(handle, "dataType") == "an"
            seen[date, eccodes.codes_get(handle, "shortName"), eccodes.codes_get(handle, "level")] += 1
        assert set(seen.values()) == {1}
        assert len({date for date, _, _ in seen}) == 9 + 3 + 5

    def test_analysis_is_near_the_truth_and_members_differ(self, tiny_archive):  # noqa: F811
        fields = {}
        for pattern in ("ensemble/pl_0107.grib", "truth/pl_0107.grib"):
            for _, handle in messages(tiny_archive, pattern):
                keys = [eccodes.codes_get(handle, k) for k in ("shortName", "level", "dataDate", "endStep")]
                member = eccodes.codes_get(handle, "number") if pattern.startswith("ens") else 0
                if keys[:2] == ["t", 850] and keys[3] == 0 and str(keys[2]).startswith("2001"):
                    fields[member] = eccodes.codes_get_values(handle)
        assert sorted(fields) == [0, 1, 2, 3]
        assert 0 < np.abs(fields[1] - fields[2]).mean() < 2
        assert 0 < np.abs(fields[1] - fields[0]).mean() < 2

    def test_static(self, tiny_archive):  # noqa: F811
        found = {
            eccodes.codes_get(h, "shortName"): eccodes.codes_get_values(h)
            for _, h in messages(tiny_archive, "static.grib")
        }
        assert set(found) == {"orog", "lsm"}
        assert found["orog"].max() > 2000 and found["lsm"].min() >= 0 and found["lsm"].max() <= 1

    def test_finished_archive_is_left_alone_or_refused(self, tiny_archive, capsys):  # noqa: F811
        before = (tiny_archive / "archive.json").stat().st_mtime_ns
        assert simulate(tiny_config(tiny_archive)) == tiny_archive
        assert "already finished" in capsys.readouterr().out
        assert (tiny_archive / "archive.json").stat().st_mtime_ns == before
        with pytest.raises(UserError, match="another configuration"):
            simulate(tiny_config(tiny_archive, seed=1))

    def test_foreign_folders_are_refused(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(UserError, match="choose a new folder"):
            simulate(tiny_config(tmp_path))
        other = tmp_path / "other" / ".parts"
        other.mkdir(parents=True)
        (other / "config.json").write_text("{}")
        with pytest.raises(UserError, match="unfinished archive of another"):
            simulate(tiny_config(tmp_path / "other"))


class FakeModel:
    """Stands for an `Atmosphere`: any deterministic map of states will do to test the bookkeeping around it."""

    def rest(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((33, 43, 23)).astype(np.float32) * 1e-3

    def advance(self, x: np.ndarray, day: int) -> tuple[np.ndarray, np.ndarray]:
        turned = np.float32(0.99) * np.roll(x, 1, axis=-1) + np.float32(1e-4 * (day % 7))
        return turned, np.abs(x[:, 0, :8, :16]).astype(np.float64)


def fake_chain(output: Path, facts: ModelFacts):
    from data_prep.simulate.chain import Chain, Weather

    config = tiny_config(output, rows=9, columns=16)
    weather = Weather.__new__(Weather)
    weather.model, weather.levels, weather.grid = FakeModel(), config.levels, regular_grid(9, 16)
    weather.facts = replace(facts, truncation=21, orography_ml=np.zeros((43, 23)))
    weather._synthesis = Synthesis(21, *weather.grid, facts.radius)
    weather._land = np.ones(weather.grid[0].shape + weather.grid[1].shape)
    return Chain(config, model_years(config)[0], weather, weather), config


class TestChain:
    def test_a_stopped_year_goes_on_to_the_same_bytes(self, tmp_path, facts):
        whole, config = fake_chain(tmp_path / "whole", facts)
        whole.run(lambda text, finished: None)
        stopped, _ = fake_chain(tmp_path / "stopped", facts)
        for stop in (2, 3):
            calls = iter(range(100))

            def interrupt(text: str, finished: bool, calls=calls, stop=stop) -> None:
                if finished and next(calls) == stop - 2:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                stopped.run(interrupt)
        stopped.run(lambda text, finished: None)
        year = model_years(config)[0]
        for cycle in year.written:
            with (
                np.load(year.part(tmp_path / "whole", cycle)) as a,
                np.load(year.part(tmp_path / "stopped", cycle)) as b,
            ):
                assert set(a) == set(b) and all((a[key] == b[key]).all() for key in a)

    def test_parts_become_files_by_calendar_date(self, tmp_path, facts):
        chain, config = fake_chain(tmp_path, facts)
        chain.run(lambda text, finished: None)
        write_static_of(chain, tmp_path)
        year = model_years(config)[0]
        assemble(tmp_path, [year])
        dates = [f"{cycle.start:%m%d}" for cycle in year.written]
        assert sorted(p.name for p in (tmp_path / "ensemble").iterdir()) == [
            f"{k}_{d}.grib" for k in ("pl", "sfc") for d in dates
        ]
        assert len(list((tmp_path / "truth").iterdir())) == 2 * 9
        figures = realism(tmp_path, [year], config)
        assert set(figures) == {"z500", "t850"} and figures["z500"].dates == 4
        assert describe(config, [year], figures)["start_dates"]["train"][0] == "2001-01-07T00"


def write_static_of(chain, output: Path) -> None:
    from data_prep.simulate.chain import write_static

    write_static(chain.nature, output / ".parts" / "static.grib")


class TestWorkers:
    def test_progress_in_plain_lines(self, capsys):
        progress = _Progress(40, 0)
        for k in range(40):
            progress.update(f"date {k}", True)
        progress.update("spin-up", False)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 21 and lines[0].startswith("simulate: 2/40 date 1")

    def test_a_failed_worker_is_an_error(self, tmp_path):
        events = queue.Queue()
        events.put(("cycle", "train 2001-01-07", True))
        events.put(("failed", "FloatingPointError: the T21 model blew up", False))
        with pytest.raises(UserError, match="blew up; what is finished stays"):
            _follow([SimpleNamespace(exitcode=None)], events, model_years(tiny_config(tmp_path)), tmp_path)

    def test_a_killed_worker_is_an_error(self, tmp_path):
        with pytest.raises(UserError, match="ended with status -9"):
            _follow([SimpleNamespace(exitcode=-9)], queue.Queue(), model_years(tiny_config(tmp_path)), tmp_path)


def test_model_steps_members_apart_from_one_another():
    from data_prep.simulate.model import Atmosphere, Recipe

    model = Atmosphere(Recipe(21, 60, wrong=True))
    a, b, c = (model.rest(seed) for seed in (1, 2, 3))
    day = 11_323
    (x, _), rain = model.advance(np.stack([a, b]), day)
    (y, _), _ = model.advance(np.stack([a, c]), day)
    np.testing.assert_array_equal(x, y)
    assert x.shape == (33, 43, 23) and rain.shape == (2, 32, 64) and rain.min() >= 0
    pressure = x[PLANES["log_pressure"]][0]
    assert pressure[0, 0] == pytest.approx(a[PLANES["log_pressure"]][0, 0, 0], abs=1e-3)
    with pytest.raises(FloatingPointError, match="blew up"):
        model.advance(np.full_like(a, np.nan)[None].repeat(2, 0), day)


SCRIPT = """
import sys
from pathlib import Path
from fixtures_archive import tiny_config
from data_prep.simulate import simulate
if __name__ == "__main__":
    simulate(tiny_config(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_killed_twice_and_resumed_gives_the_same_files(tiny_archive, tmp_path):  # noqa: F811
    root = Path(__file__).parents[2]
    script, output = tmp_path / "run.py", tmp_path / "archive"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(output)]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    for parts in (1, 4):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(output.glob(".parts/*/2*.npz"))) < parts:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wanted = sorted(path.relative_to(tiny_archive) for path in tiny_archive.rglob("*.grib"))
    assert wanted == sorted(path.relative_to(output) for path in output.rglob("*.grib"))
    for path in wanted:
        assert (tiny_archive / path).read_bytes() == (output / path).read_bytes(), path
