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


def test_the_first_screen_answers(page, report):
    page.goto(report.as_uri())
    for selector in ("h1", ".answer", "img"):
        box = page.locator(selector).first.bounding_box()
        assert box is not None and box["y"] + min(box["height"], 200) < 900, selector
    answer = page.locator(".answer").inner_text()
    assert "CRPS" in answer and "interval" in answer and "too few blocks of dates to be sure in any of" in answer
    assert page.locator("#extreme").count() == 1
