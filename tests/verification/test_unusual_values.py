"""Scores of unusual values, and the case that shows them, where the truth or the variable has limits of its own."""

import hashlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fakes import DATES, FEW, TEST, TRAIN, corrected, entry, scores_of, write_forecasts
from fakes import settings as settings_of
from matplotlib.text import Text
from stores import make_store

from ensemble_ml.store import Part
from ensemble_ml.store.source import Fields
from ensemble_ml.verification import evaluate, plots
from ensemble_ml.verification.probability import Reliability


def overcast(folder):
    """scores.json of a temperature, and of a cloud cover that is mostly whole."""
    store = make_store(
        folder / "a.zarr", dates=DATES, members=10, variables=("t",), levels=(850,), surface=("tcc",), leads=(0, 48),
        bias=0.3,
    )  # fmt: skip
    forecast = write_forecasts(folder / "f", store, TEST, corrected(), leads=(48,), train=TRAIN)
    evaluate(settings_of(forecast, store, folder / "r"), store)
    return json.loads((folder / "r" / "scores.json").read_text())


@pytest.mark.slow
def test_the_brier_score_leaves_out_what_reliability_does(tmp_path, monkeypatch):
    """Where a limit cannot be exceeded (a sky that is mostly overcast) a forecast of never is no skill."""
    kept = {}
    module = sys.modules[evaluate.__module__]
    monkeypatch.setattr(module, "write_report", lambda content, scores, tables, *_: kept.update(tables=tables) or "")
    content = overcast(tmp_path)
    reliability = kept["tables"].calibration.reliability
    points = []
    for column, (variable, level) in enumerate((("t", 850), ("tcc", None))):
        for entrant in ("f", "raw_10"):
            table = reliability[column, entrant, None]
            found = entry(content, entrant, variable, level)["brier"]["value"]
            assert found == pytest.approx(table.parts().score, rel=1e-5)
            points.append(int(table.count.sum()))
    assert points[0] == points[1] > points[2] == points[3] > 0


@pytest.mark.slow
def test_a_case_without_a_truth_is_placed_by_its_index(tmp_path, plain):
    known = dict(dates=DATES, members=10, variables=("t", "q"), levels=(500, 850), surface=("tp",), bias=0.6)
    cases = []
    for name, absent in (("a", []), ("b", [(Part.TRUTH, date, 0, "tp") for date in FEW])):
        store = make_store(tmp_path / f"{name}.zarr", absent=absent, dispersion=0.7, **known)
        forecast = write_forecasts(tmp_path / name, store, FEW, corrected(), train=TRAIN)
        evaluate(settings_of(forecast, store, tmp_path / f"r{name}"), store)
        cases.append(json.loads((tmp_path / f"r{name}" / "scores.json").read_text())["case"])
    assert cases[1]["truth"] is None
    assert [cases[0][key] for key in ("date", "latitude", "longitude", "efi")] == [
        cases[1][key] for key in ("date", "latitude", "longitude", "efi")
    ]


class TruthOfThePole:
    """A source whose truth is known on the first row alone."""

    def __init__(self, store):
        self._store, self.path, self.layout = store, store.path, store.layout

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, part, date, *given):
        found = self._store.read(part, date, *given)
        if part is not Part.TRUTH or date not in FEW:
            return found
        pole = self.layout.grid.latitude[:, None] == 90
        return Fields(*(np.where(pole, one, np.nan) for one in (found.pressure, found.surface)))


@pytest.mark.slow
def test_a_case_where_the_truth_is_known_elsewhere_is_placed_in_its_region(store, few_forecasts, tmp_path, plain):
    case = scores_of(few_forecasts, store, tmp_path / "r", source=TruthOfThePole(store))["case"]
    north, west, south, east = case["region"]
    assert south <= case["latitude"] <= north < 90 and west <= case["longitude"] <= east and case["truth"] is None


def test_cells_whose_limit_says_nothing_are_not_said_to_miss_a_value(tmp_path, plain):
    notes = overcast(tmp_path)["notes"]
    assert any("Brier scores leave points out where the limit says nothing" in note for note in notes)
    assert not any("miss a value" in note for note in notes)


def test_counts_are_written_as_numbers():
    """Not as 10^3, a formula of matplotlib."""
    table = Reliability.zeros(10)
    said = np.repeat((np.arange(10) + 0.5) / 10, np.geomspace(10, 1e5, 10).astype(int))
    table.record(said, said > 0.5, np.ones_like(said), np.ones(said.shape, bool))
    figure = plots.reliability({"t2m": {"ours": table}})
    figure.savefig(io.BytesIO())
    said = [text.get_text() for text in figure.findobj(Text)]
    assert "1000" in said or "1e+03" in said or "10000" in said
    assert not any("mathdefault" in text or "$" in text for text in said)


def test_no_two_curves_look_alike():
    looks = [tuple(plots.look_of(number).values()) for number in range(28)]
    assert len(set(looks)) == 28


@pytest.mark.slow
def test_bins_of_spread_and_error_do_not_hang_on_the_order_of_names(tmp_path, plain):
    """Edges are those of the raw ensemble, which comes first, in every process."""
    store = make_store(
        tmp_path / "a.zarr", dates=DATES, members=10, leads=(48,), variables=("t",), levels=(850,), surface=(),
        shape=(9, 16),
    )  # fmt: skip
    forecast = write_forecasts(tmp_path / "f", store, FEW, corrected(), leads=(48,), train=TRAIN)
    found = []
    code = "import sys; from ensemble_ml.cli import main; sys.exit(main(sys.argv[1:]))"
    for seed in "123":
        folder = tmp_path / seed
        command = [
            sys.executable, "-c", code, "evaluate", f"forecast={forecast}", f"ensemble={store.path}",
            f"truth={store.path}", "members_in=5", "output=r", "bootstrap=100",
        ]  # fmt: skip
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(hashlib.sha256((folder / "r" / "report.html").read_bytes()).hexdigest())
    assert len(set(found)) == 1
