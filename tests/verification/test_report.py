"""What the report draws: maps, charts and cards, read back from the page and compared with the numbers behind them."""

import base64
import io
import json
import re

import numpy as np
import pytest
import scoringrules
from fakes import TEST
from PIL import Image

from ensemble_ml.grid import Grid
from ensemble_ml.store import Part
from ensemble_ml.verification.aggregation import AggregationState
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.page import choice
from ensemble_ml.verification.pictures import Pictures, cells_together, together
from ensemble_ml.verification.report import _made_by
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.strata import box_of
from ensemble_ml.verification.svg import Atlas, Curve, chart, gains

GRID = Grid(np.linspace(90, -90, 19), np.arange(0, 360, 20.0))
AREA = GRID.area_weights()


def levels(figure):
    """Return the numbers of the colours of a map, as a browser finds them in its image."""
    uri = re.search(r'<image [^>]*href="data:image/png;base64,([^"]+)"', figure)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))


def ends(figure):
    """Return the values of the first and the last colour, as the legend states them."""
    low, high = re.search(r'<p class="legend">(\S+) <i class="\w+"></i> (\S+)', figure).groups()
    return float(low), float(high)


def drawn(figure):
    """Return the values that a reader takes from the colours and the legend of a map, NaN where they are grey."""
    low, high = ends(figure)
    number = levels(figure)
    return np.where(number < 64, low + (number + 0.5) / 64 * (high - low), np.nan)


def test_a_map_shows_its_values_within_a_colour():
    values = np.random.default_rng(0).normal(280, 10, GRID.shape)
    values[3, 4] = np.nan
    figure = Atlas(GRID, 1, None, {}).map("t & q", values, "viridis", (250.0, 310.0), "K")
    found = drawn(figure)
    assert np.isnan(found[3, 4]) and np.isnan(found).sum() == 1
    np.testing.assert_allclose(found, np.clip(values, 250, 310), atol=60 / 64 / 2 + 1e-6)
    assert "310 K" in figure and "t &amp; q" in figure


def test_a_gain_that_is_significant_has_a_dot_and_a_perfect_reference_is_not_left_out():
    gain, sure = np.full(GRID.shape, 10.0), np.zeros(GRID.shape, bool)
    gain[0, 0], gain[1, 1], sure[2, 3] = -np.inf, np.nan, True
    number = levels(Atlas(GRID, 1, None, {}).gain_map("tp", gain, sure, 20.0))
    assert number.shape == (57, 54) and (number == 65).sum() == 1 and number[7, 10] == 65
    assert (number[:3, :3] == 0).all() and (number[3:6, 3:6] == 64).all() and number[9, 9] == 48
    wide = Grid(np.linspace(89.5, -89.5, 180), np.arange(360.0))
    dotted = levels(Atlas(wide, 1, None, {}).gain_map("tp", np.zeros(wide.shape), np.ones(wide.shape, bool), 20.0))
    assert dotted.shape == wide.shape and (dotted == 65).mean() == pytest.approx(1 / 9)
    coarse = levels(Atlas(wide, 9, None, {}).gain_map("tp", np.zeros((20, 40)), np.ones((20, 40), bool), 20.0))
    assert coarse.shape == (20, 40) and (coarse == 65).mean() == pytest.approx(7 * 13 / 800)


def test_pictures_of_a_coarse_grid_are_means_of_areas_and_reach_as_far_as_the_grid():
    """19 rows make 7 of three each, of which the last has one."""
    assert together(AREA, 3)[-1, 0] == pytest.approx(AREA[18, :3].sum())
    figure = Atlas(GRID, 3, np.ones(GRID.shape), {"north": np.arange(19)[:, None] < 9}).map(
        "t", np.zeros((7, 6)), "magma", (0.0, 1.0), "K"
    )
    assert 'viewBox="-190 -90 360 180"' in figure
    assert 'x="-10" y="-95" width="360" height="210"' in figure


def test_no_report_has_more_points_than_a_few_megabytes():
    for shape, fields, forecasts in (
        ((33, 64), 52, 1),
        ((33, 64), 52, 3),
        ((361, 720), 52, 1),
        ((361, 720), 260, 1),
        ((721, 1440), 260, 3),
        ((361, 720), 2, 1),
    ):
        size = cells_together(shape, fields, forecasts)
        points = -(-shape[0] // size) * -(-shape[1] // size)
        assert points <= 20_000 and points * fields * (5 * forecasts + 2) <= 3_000_000
        assert points <= 2_112 or points * fields * (5 * forecasts + 2) <= 2_000_000
    assert cells_together((33, 64), 52, 1) == 1 and cells_together((361, 720), 260, 1) == 13
    assert cells_together((33, 64), 52, 4) == 1 and cells_together((361, 720), 52, 1) == 7


def test_maps_of_gain_are_those_of_the_mean_scores():
    """A forecast with half the reference's CRPS in the north, on a coarse grid; of two distributions the better one."""
    rng, dates, shape = np.random.default_rng(1), 12, GRID.shape
    pictures = Pictures(
        (0,), AREA, 2, 2, 3, np.arange(dates).astype("M8[D]"), np.arange(dates) // 2, ("ours",), ("raw_3", "blend_2"),
        (3, 3),
    )  # fmt: skip
    state, sums = AggregationState(dates, 1), {}
    names = {
        "ours": Key("ours", Statistic.CRPS), "raw_3": Key("raw_3", Statistic.CRPS),
        "normal": Key("blend_2", Statistic.CRPS_NORMAL), "family": Key("blend_2", Statistic.CRPS_FAMILY),
    }  # fmt: skip
    mask = np.ones(shape, bool)
    mask[-1, :4] = False
    for date in range(dates):
        raw = rng.gamma(9, size=shape)
        one = {"ours": raw.copy(), "raw_3": raw, "normal": 1.5 * raw, "family": 1.2 * raw}
        one["ours"][:8] /= 2
        values = {names[name]: value for name, value in one.items()}
        state.record(date, slice(0, 1), {k: v[None] for k, v in values.items()}, mask[None], np.stack([AREA, AREA]))
        pictures._scores(0, values, mask, date // 2)
        sums = {name: sums.get(name, 0) + value for name, value in one.items()}
    pictures.finish(slice(0, 1), state)
    weights = together(np.where(mask, AREA, 0), 2)
    means = {name: together(np.where(mask, AREA * value, 0), 2) / dates for name, value in sums.items()}
    percent, sure = pictures.gains[0, "ours", "raw_3"]
    assert percent.shape == (10, 9)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(percent, 100 * (1 - means["ours"] / means["raw_3"]), atol=1e-3)
        np.testing.assert_allclose(pictures.means[0, "ours"], means["ours"] / weights, rtol=1e-5)
        blend, _ = pictures.gains[0, "ours", "blend_2"]
        np.testing.assert_allclose(blend, 100 * (1 - means["ours"] / means["family"]), atol=1e-3)
    assert sure[:4].all() and not sure[4:].any() and np.isnan(percent[-1, 0]) and not pictures._sums


def test_the_most_unusual_box_is_found_and_not_one_of_few_values():
    pictures = Pictures((0,), AREA, 1, 2, 3, np.arange(2), np.arange(2), (), (), box_of(GRID))
    assert pictures.box == (3, 3)
    index = np.full((1, *GRID.shape), 0.1)
    index[0, 9:12, 6:9], index[0, 18] = -0.8, 1.0  # the last row is a pole, and a box of its own
    pictures.record_index(slice(0, 1), 1, index)
    assert pictures.index == {0: {1: (pytest.approx(0.8), 3, 2)}}
    pictures.record_index(slice(0, 1), 0, np.full_like(index, np.nan))
    assert list(pictures.index[0]) == [1]


def places(figure, kind):
    """Return the pixels of the points of the first path of a class."""
    path = re.search(rf'<path class="{kind} c0" d="([^"]+)"', figure)[1]
    return np.array([[float(x) for x in pair.split(",")] for pair in re.findall(r"[-\d.]+,[-\d.]+", path)])


def test_a_chart_places_values_and_intervals_on_one_scale():
    points = [Interval(1.0, 0.5, 2.0), Interval(3.0, 2.0, 3.5), Interval(np.nan, np.nan, np.nan)]
    figure = chart({"a<b": Curve([24, 48, 72], points)}, "CRPS, K", "lead time, h", ticks=[24, 48, 72], level=1.0)
    line, bars = places(figure, "l"), places(figure, "e")
    pixels_a_unit = (line[0, 1] - line[1, 1]) / 2
    assert len(line) == 2 and line[1, 0] > line[0, 0] and pixels_a_unit > 20
    np.testing.assert_allclose(
        bars[:, 1], line[[0, 0, 1, 1], 1] + np.array([0.5, -1, 1, -0.5]) * pixels_a_unit, atol=1.1
    )
    level = re.search(r'<path class="r" d="M[\d.]+,([\d.]+)L[\d.]+,([\d.]+)"', figure)
    assert float(level[1]) == float(level[2]) == pytest.approx(line[0, 1], abs=0.6)
    assert "a&lt;b" in figure and "a<b" not in figure and "nan" not in figure
    assert chart({"a": Curve.of([1.0], [np.nan])}, "t", "x") == "" == chart({}, "t", "x")


def test_the_chart_of_gains_fills_only_what_is_sure():
    entries = [("a", Interval(5.0, 2.0, 8.0)), ("b", Interval(-5.0, -8.0, 1.0)), ("c", Interval(-5.0, -8.0, -1.0))]
    assert re.findall(r'<circle class="(\w+)"', gains(entries, "t")) == ["better", "unsure", "worse"]


def test_cards_say_what_they_show():
    """The script finds a card by the positions of what is selected; without one all cards can be opened."""
    cards = {("a", "24 h"): "1", ("a", "48 h"): "2", ('<"b"', "48 h"): "3", ("c", "24 h"): ""}
    html = choice(["field", "lead"], cards, ("a", "48 h"))
    words = json.loads(re.search(r'data-words="([^"]+)"', html)[1].replace("&quot;", '"').replace("&lt;", "<"))
    assert words == {"field": ["a", '<"b"'], "lead": ["24 h", "48 h"]}
    assert re.findall(r'data-key="([^"]+)"><h4>([^<]+)</h4>(\d)', html) == [
        ("0 1", "a, 48 h", "2"), ("0 0", "a, 24 h", "1"), ("1 1", "&lt;&quot;b&quot;, 48 h", "3"),
    ]  # fmt: skip
    assert html.index("2</section><details>") > 0 and choice(["lead"], {("24 h",): ""}) == ""


def test_each_forecast_names_what_made_it(result):
    content, html = result
    line = (
        "<b>forecast</b>: ensemble_ml 0.1.0, runs/a (unet3d, step 7), from x.zarr; checkpoint sha256 0123abcd0123</p>"
    )
    assert line in html and content["forecasts"][0]["sources"] == [
        "ensemble_ml 0.1.0, runs/a (unet3d, step 7), from x.zarr"
    ]
    one = {"label": "<one>", "sources": ["a", "b", "c", "d"], "checkpoints": ["1" * 64, "2" * 64]}
    two = {"label": "two", "sources": [], "checkpoints": []}
    assert _made_by({"forecasts": [one, two]}) == (
        f'<p class="sub"><b>&lt;one&gt;</b>: a, b, c and 1 more; checkpoint sha256 {"1" * 12}, {"2" * 12}</p>'
        '<p class="sub"><b>two</b>: its files do not say what made them</p>'
    )


def card(html, word, title):
    """Return the card of a title among the cards that are chosen by a word first."""
    boxes = [box for box in html.split('<div class="choice" data-words="{&quot;')[1:] if box.startswith(word)]
    found = [part for box in boxes for part in box.split("<section") if f"<h4>{title}</h4>" in part]
    assert len(found) == 1, (title, len(found))
    return found[0]


def test_every_field_and_lead_has_maps_of_the_scores_that_the_tables_are_of(result, store):
    """The gain over all members at each point, worked out apart from the members and the truth."""
    _, html = result
    figure = card(html, "forecast", "forecast, 500 hPa temperature, K, 24 h").split("</figure>")
    found = next(part for part in figure if "gain in CRPS over raw 10" in part)
    layout, ours, raw = store.layout, 0, 0
    at = (slice(None), layout.lead_hours.index(24), layout.variables.index("t"), layout.levels.index(500))
    for date in TEST:
        y = store.read(Part.TRUTH, date).pressure[at][0]
        x = store.read(Part.FORECAST, date).pressure[at].astype(float)
        ours += scoringrules.crps_normal(y, x[:5].mean(0), np.sqrt(1.2) * x[:5].std(0, ddof=1) / 0.7)
        raw += scoringrules.crps_normal(y, x.mean(0), np.sqrt(1.1) * x.std(0, ddof=1))
    low, high = ends(found)
    assert high == -low
    np.testing.assert_allclose(drawn(found), np.clip(100 * (1 - ours / raw), low, high), atol=(high - low) / 128 + 0.05)


def test_absolute_scores_stand_beside_ratios_in_every_region(result):
    content, html = result
    value = next(
        row["crps"]["value"]
        for row in content["scores"]
        if (row["entrant"], row["variable"], row["level"], row["lead_hours"]) == ("forecast", "t", 850, 48)
    )
    assert f"<small>{value:.3g} | " in card(html, "score", "CRPS vs raw 10, all points")
    for region in ("all points", "tropics", "southern extratropics"):
        assert "<svg" in card(html, "region", f"{region}, 850 hPa temperature, K")
    # Maps of spread, all scores and calibration.
    assert html.count("<h4>total precipitation, m, 24 h</h4>") == 3
    assert "climatology of the fit dates" in html and "per-grid-point bias-and-inflation" in html
