"""Fields of the embedded archive: spectral synthesis, and levels of pressure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fixtures_archive import tiny_archive, tiny_config  # noqa: F401
from simulating import GRID, SHAPE, TRUNCATION, coefficient, real_harmonic, small_facts

from data_prep.simulate.synthesis import (
    PLANES,
    SIGMA,
    ModelFacts,
    Synthesis,
    bilinear,
    geopotential,
    legendre,
    legendre_gradients,
    sigma_fields,
    surface_fields,
    to_pressure,
)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return small_facts()


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
