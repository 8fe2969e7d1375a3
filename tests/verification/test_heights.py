"""Raw fields at the height of the truth's ground: the standard atmosphere, an ensemble that was lowered, the report."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import DATES, FEW, TEST, TRAIN, corrected, entry, settings, write_forecasts
from scipy.integrate import solve_ivp
from synthetic import make_store

from ensemble_ml.config import EvaluateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Fields, Part, Selection
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.heights import Heights, note
from ensemble_ml.verification.samples import Group, Setting, read_sample

SHAPE = (9, 16)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heights")
    return make_store(
        folder / "a.zarr", dates=DATES, members=6, leads=(48,), variables=("t",), levels=(850,), shape=SHAPE,
        surface=("t2m", "sp", "msl"), bias=0.3, dispersion=0.8,
    )  # fmt: skip


def made(folder, store, dates):
    rule = corrected(inflate=1 / 0.8, members=3)
    return write_forecasts(folder / "forecast", store, dates, rule, leads=(48,), train=TRAIN, members_in="1 2 3")


@pytest.fixture(scope="module")
def forecast(store, tmp_path_factory):
    return made(tmp_path_factory.mktemp("made"), store, FEW)


@pytest.fixture(scope="module")
def heights():
    rng = np.random.default_rng(0)
    return Heights(rng.uniform(0, 800, SHAPE), rng.uniform(0, 1500, SHAPE))


class Lowered:
    """A store whose members stand on the ground of another model, as a lapse rate of 6.5 K/km leaves them there."""

    def __init__(self, store, heights):
        self.store, self.rise = store, heights.rise

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, part, date, selection=Selection()):  # noqa: B008 - frozen
        found = self.store.read(part, date, selection)
        names = self.store.layout.surface if selection.surface is None else selection.surface
        if part is not Part.FORECAST or not {"t2m", "sp"} & {*names}:
            return found
        warm = self.store.read(part, date, replace(selection, variables=(), levels=(), surface=("t2m",))).surface
        warm = warm[:, :, 0].astype(float)
        lower = warm + 0.0065 * self.rise
        values = found.surface.astype(float)
        for at, name in enumerate(names):
            if name == "t2m":
                values[:, :, at] = lower
            if name == "sp":
                values[:, :, at] *= (lower / warm) ** (9.80665 / (287.0528 * 0.0065))
        return Fields(found.pressure, values)


@pytest.mark.parametrize(("metres", "kelvin", "pascal"), [(1000, 281.65, 89874.6), (3000, 268.65, 70108.5)])
def test_the_standard_atmosphere_is_followed(metres, kelvin, pascal):
    """Figures of ICAO Doc 7488 at geopotential heights; up, and down again."""
    sea, ground = np.zeros((1, 1)), np.full((1, 1), float(metres))
    up, down = Heights(sea, ground), Heights(ground, sea)
    given = np.full((1, 1, 1, 1), 288.15), np.full((1, 1, 1, 1), 101_325.0)
    assert up.temperature(given[0]).item() == pytest.approx(kelvin)
    high = up.pressure(given[1], given[0])
    assert high.item() == pytest.approx(pascal, abs=0.5)
    assert up.pressure(given[1], None).item() == high.item()  # the standard temperature, where none is known
    assert down.pressure(high, up.temperature(given[0])).item() == pytest.approx(101_325)
    assert down.pressure(high, None).item() == pytest.approx(101_325)


def test_pressure_is_the_integral_of_the_hydrostatic_equation():
    heights = Heights(np.array([[100.0]]), np.array([[1400.0]]))

    def fall(z, p):
        return -9.80665 * p / (287.0528 * (275.0 - 0.0065 * (z - 100.0)))

    wanted = solve_ivp(fall, (100.0, 1400.0), [98_000.0], rtol=1e-10, atol=1e-6).y[0, -1]
    found = heights.pressure(np.full((1, 1, 1, 1), 98_000.0), np.full((1, 1, 1, 1), 275.0))
    assert found.item() == pytest.approx(wanted, rel=1e-8)


@pytest.mark.slow
def test_an_ensemble_on_other_ground_scores_as_on_the_truths(store, forecast, heights, tmp_path, plain):
    found, lowered = {}, Lowered(store, heights)
    for name, source, ground in (("plain", store, None), ("lowered", lowered, None), ("brought", lowered, heights)):
        config = settings(forecast, store, tmp_path / name, members_in=3, climate_days=0)
        found[name] = json.loads((evaluate(config, source, None, ground) / "scores.json").read_text())
    for entrant in ("raw_3", "raw_6", "blend_3", "global_3"):
        for variable in ("sp", "t2m"):
            wanted, raw, again = (
                entry(content, entrant, variable, None)["crps"]["value"] for content in found.values()
            )
            assert again == pytest.approx(wanted, rel=1e-3)
            if entrant != "blend_3":  # whose bias is the cell's own takes a constant of the cell for nothing
                assert raw > 1.1 * wanted
        for variable, level in (("msl", None), ("t", 850)):
            values = {entry(content, entrant, variable, level)["crps"]["value"] for content in found.values()}
            assert len(values) == 1
    # spreads are those of the ensemble as it is, on its own ground
    spreads = [entry(found[n], "raw_3", "sp", None)["spread_rmse"]["value"] for n in ("lowered", "brought")]
    assert spreads[0] == spreads[1]
    told = found["brought"]["heights"]
    assert max(told["rmse_ratio_on_fit_dates"].values()) < 1
    assert told["corrected"] == ["sp", "t2m"] and told["largest_m"] == np.abs(heights.rise).max()
    assert found["plain"]["heights"] == {"corrected": []}
    assert any("not corrected for height" in text for text in found["plain"]["notes"])
    assert any("corrected for the height of the truth's ground" in text for text in found["brought"]["notes"])


def test_a_correction_that_makes_forecasts_worse_is_left(store, forecast, heights, tmp_path, plain):
    """The members stand on the truth's ground already: what files say of another is not believed."""
    found = []
    for name, ground in (("plain", None), ("left", heights)):
        config = settings(forecast, store, tmp_path / name, members_in=3, climate_days=0)
        found.append(json.loads((evaluate(config, store, None, ground) / "scores.json").read_text()))
    assert found[1]["scores"] == found[0]["scores"]
    told = found[1]["heights"]
    assert told["corrected"] == [] and min(told["rmse_ratio_on_fit_dates"].values()) > 1
    [text] = [text for text in found[1]["notes"] if "which would raise its RMSE" in text]
    assert "Raw surface pressure: not corrected" in text and "Raw 2 m temperature: not corrected" in text


class Cold:
    """A store of whose second member the 2 m temperature is missing."""

    def __init__(self, store):
        self.store, self.layout = store, store.layout

    def read(self, part, date, selection):
        found = self.store.read(part, date, selection)
        if part is Part.FORECAST and selection.surface == ("t2m",):
            found.surface[1] = np.nan
        return found


def test_surface_pressure_counts_where_the_temperature_is_missing(store, heights):
    """The standard atmosphere stands in for what is missing, as it does where nothing is known of the temperature."""
    setting = Setting(Cold(store), (), 3, np.arange(0), np.arange(0), np.ones(SHAPE), True, heights=heights)
    sample = read_sample(setting, Group("sp", 48, (None,), slice(0, 1)), 0)
    assert sample.verified.all()
    warm = store.read(Part.FORECAST, 0, Selection.one(48, "t2m", surface=True)).one().astype(float)
    assert np.array_equal(sample.raw[1], heights.pressure(sample.members, None)[1])
    assert np.array_equal(sample.raw[2], heights.pressure(sample.members, warm)[2])


def test_nothing_is_corrected_where_there_is_no_truth(heights, tmp_path, plain):
    store = make_store(
        tmp_path / "s.zarr", dates=4, members=6, leads=(24,), variables=(), surface=("t2m",), shape=SHAPE, truth=False
    )
    rule = corrected(inflate=1 / 0.8, members=3)
    folder = write_forecasts(tmp_path / "f", store, [3], rule, leads=(24,), train=[0, 1, 2], members_in="1 2 3")
    config = settings(folder, store, tmp_path / "r", members_in=3, climate_days=0)
    content = json.loads((evaluate(config, store, None, heights) / "scores.json").read_text())
    assert content["heights"] == {"corrected": []}


def test_headlines_stand_with_and_without_surface_pressure(store, heights, tmp_path, plain):
    source = Lowered(store, heights)
    config = settings(made(tmp_path, store, TEST), store, tmp_path / "scores", members_in=3, climate_days=0)
    content = json.loads((evaluate(config, source) / "scores.json").read_text())
    names = [("t", 850), ("t2m", None), ("msl", None), ("sp", None)]
    ratios = [
        entry(content, "forecast", *name)["crps"]["value"] / entry(content, "raw_6", *name)["crps"]["value"]
        for name in names
    ]
    claim = content["claims"][-1]
    assert claim["reference"] == "raw_6"
    assert claim["value"] == pytest.approx(100 * (1 - np.exp(np.mean(np.log(ratios)))), rel=1e-4)
    without = 100 * (1 - np.exp(np.mean(np.log(ratios[:3]))))
    assert claim["without_sp"]["value"] == pytest.approx(without, rel=1e-4)
    assert claim["without_sp"]["low"] < without < claim["without_sp"]["high"]
    [line] = [line for line in content["headline"] if "raw 6 members" in line and "CRPS" in line and "gain" not in line]
    direction = "lower" if without > 0 else "higher"
    assert f"; without surface pressure {abs(without):.1f} % {direction} (" in line
    row = next(
        row for row in content["summary"]
        if (row["entrant"], row["reference"], row["metric"]) == ("forecast", "raw_6", "crps")
    )  # fmt: skip
    assert row["without_sp"]["value"] == pytest.approx(1 - without / 100, rel=1e-4)


def test_what_is_refused(store, heights, forecast, tmp_path):
    with pytest.raises(UserError, match=r"truth_orography=b: needs orography="):
        EvaluateConfig(forecast="a", ensemble="a", output="a", truth_orography="b")
    config = settings(forecast, store, tmp_path / "scores", members_in=3)
    with pytest.raises(UserError, match=r"orography: \(8, 16\) points; the ensemble has \(9, 16\)"):
        evaluate(config, store, None, Heights(heights.forecast[1:], heights.truth))
    with pytest.raises(UserError, match="truth_orography: holds values that are not finite"):
        evaluate(config, store, None, Heights(heights.forecast, np.full(SHAPE, np.nan)))
    assert note(None, {"msl", "t"}) is None
