"""The report in a real browser cut off from every network: no error, nothing asked for, an answer on one screen.

Needs Chromium: `pip install playwright && playwright install --with-deps chromium`, or a chromium on the PATH.
"""

import shutil

import numpy as np
import pytest
from fakes import corrected, write_forecasts
from stores import make_store

from ensemble_ml.config import EvaluateConfig
from ensemble_ml.verification import evaluate

DATES = [
    str(np.datetime64(year, "D") + 3 * i) for year, n in (("2001", 8), ("2002", 8), ("2003", 10)) for i in range(n)
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser page, or a skip that says what is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(
                f"Chromium does not start ({str(error).splitlines()[0]}): playwright install --with-deps chromium"
            )
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        yield context.new_page()
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    store = make_store(
        folder / "store.zarr", dates=DATES, members=10, variables=("t",), levels=(850,), surface=("tp",), bias=0.6,
        dispersion=0.7, shape=(9, 16),
    )  # fmt: skip
    train, test = list(range(16)), list(range(16, 26))
    made = write_forecasts(folder / "forecast", store, test, corrected(inflate=1 / 0.7), train=train)
    evaluate(EvaluateConfig(str(made), ensemble=store.path, output=str(folder / "scores"), bootstrap=100), store)
    return folder / "scores" / "report.html"


@pytest.mark.slow
def test_the_report_opens_without_error_or_network(page, report):
    errors, asked = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")
    assert not errors
    assert all(url.startswith(("file:", "data:")) for url in asked)
    # Each map is an image of as many pixels as its grid has columns; that of the extreme case has seven.
    script = """async () => { const sizes = [];
      for (const one of document.querySelectorAll(".map image")) { const image = new Image();
        image.src = one.getAttribute("href"); await image.decode(); sizes.push(image.naturalWidth); }
      return sizes; }"""
    assert {*page.evaluate(script)} == {7, 16}
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_the_first_screen_answers(page, report):
    page.goto(report.as_uri())
    for selector in ("h1", ".answer", "#bar select", ".choice table"):
        box = page.locator(selector).first.bounding_box()
        assert box is not None and box["y"] + min(box["height"], 200) < 900, selector
    answer = page.locator(".answer").inner_text()
    assert "CRPS" in answer and "interval" in answer and "too few blocks of dates to be sure in any of" in answer
    assert page.locator("#extreme").count() == 1


def chosen(page, word):
    """Return the control of one part of the selection."""
    return page.locator("#bar").get_by_label(word)


def shown(page):
    """Return the titles of the cards that are shown."""
    return page.locator(".choice h4:visible").all_inner_texts()


def test_one_selection_moves_all_charts_and_maps(page, report):
    page.goto(report.as_uri())
    cards = page.locator(".choice section")
    assert cards.count() == page.locator(".choice").count() >= 6
    first, globe = page.locator(".card table"), page.locator(".card table").inner_text()
    assert "850 hPa temperature, K" in globe and "total precipitation, m" in globe and "48 h" in globe
    maps = [one.get_attribute("href") for one in page.locator(".map image").all()]
    assert "all points, 850 hPa temperature, K" in shown(page) and "850 hPa temperature, K, 48 h" in shown(page)
    chosen(page, "region").select_option("tropics")
    chosen(page, "score").select_option("CRPS vs climatology")
    chosen(page, "field").select_option("total precipitation, m")
    chosen(page, "lead").select_option("24 h")
    assert first.inner_text() != globe and "Compared with climatology of the fit dates" in first.inner_text()
    titles = shown(page)
    assert titles[:2] == ["CRPS vs climatology, tropics", "forecast, 24 h"]
    assert "tropics, total precipitation, m" in titles and titles.count("total precipitation, m, 24 h") == 3
    assert not {one.get_attribute("href") for one in page.locator(".map image").all()[:6]} & {*maps}
    veil = page.locator(".map .veil").first.get_attribute("href")
    assert page.locator(veil).get_attribute("data-region") == "tropics"
    chosen(page, "region").select_option("all points")
    assert page.locator(".map .veil").first.get_attribute("href") == "#none"


def test_a_cell_of_the_scorecard_chooses_its_field_and_lead(page, report):
    page.goto(report.as_uri())
    page.locator(".card tbody tr", has_text="total precipitation").locator("td").nth(1).click()
    lead = page.locator(".card thead th").nth(1).inner_text()
    assert chosen(page, "field").input_value() == "total precipitation, m" and lead == "24 h"
    assert shown(page).count(f"total precipitation, m, {lead}") == 3
    # The mean over all fields chooses a lead alone. All of it works by keys, too.
    page.locator(".card tbody tr", has_text="geometric mean").locator("td").nth(2).click()
    assert chosen(page, "field").input_value() == "total precipitation, m"
    chosen(page, "lead").focus()
    page.keyboard.press("ArrowUp")
    assert shown(page).count("total precipitation, m, 24 h") == 3


def test_the_report_can_be_read_without_a_script(page, report):
    context = page.context.browser.new_context(java_script_enabled=False, offline=True)
    plain = context.new_page()
    plain.goto(report.as_uri())
    assert plain.locator("#bar:visible").count() == 0
    assert plain.locator(".choice section:visible").count() == plain.locator(".choice").count() >= 6
    assert plain.locator(".map:visible").count() >= 6 and plain.locator(".chart:visible").count() >= 6
    plain.locator(".choice summary").first.click()
    assert plain.locator(".card table:visible").count() > 20
    context.close()
