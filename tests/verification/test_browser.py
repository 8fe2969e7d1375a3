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
    broken = page.evaluate("[...document.images].filter(i => !i.complete || i.naturalWidth === 0).length")
    assert broken == 0 and page.evaluate("document.images.length") >= 8
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_the_first_screen_answers(page, report):
    page.goto(report.as_uri())
    for selector in ("h1", ".answer", ".choice table"):
        box = page.locator(selector).first.bounding_box()
        assert box is not None and box["y"] + min(box["height"], 200) < 900, selector
    answer = page.locator(".answer").inner_text()
    assert "CRPS" in answer and "interval" in answer and "too few blocks of dates to be sure in any of" in answer
    assert page.locator("#extreme").count() == 1


def test_the_scorecard_shows_what_is_chosen(page, report):
    page.goto(report.as_uri())
    cards = page.locator(".choice details")
    assert cards.count() > 20 and page.locator(".choice details:visible").count() == 1
    first, globe = page.locator(".choice table:visible"), page.locator(".choice table:visible").inner_text()
    assert "850 hPa temperature, K" in globe and "total precipitation, m" in globe and "48 h" in globe
    page.get_by_label("region").select_option("tropics")
    page.get_by_label("score").select_option("CRPS vs climatology")
    assert page.locator(".choice details:visible").count() == 1 and first.inner_text() != globe
    assert page.locator(".choice summary:visible").inner_text() == "forecast, CRPS vs climatology, tropics"
    assert "Compared with climatology of the fit dates" in first.inner_text()


def test_the_scorecard_can_be_read_without_a_script(page, report):
    context = page.context.browser.new_context(java_script_enabled=False, offline=True)
    plain = context.new_page()
    plain.goto(report.as_uri())
    assert plain.locator(".choice summary:visible").count() == plain.locator(".choice details").count() > 20
    assert plain.locator(".choice table:visible").count() == 1
    plain.locator(".choice summary").nth(1).click()
    assert plain.locator(".choice table:visible").count() == 2
    context.close()
