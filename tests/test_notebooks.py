"""Every notebook runs from its first cell to its last on a tiny run."""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from synthetic import make_store

from ensemble_ml.config import DataConfig, ModelConfig, PredictConfig, TrackingConfig, TrainConfig
from ensemble_ml.inference import predict
from ensemble_ml.store import Part
from ensemble_ml.training import train

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run as scripts/quickstart.sh leaves it, made in seconds."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    absent = [(Part.TRUTH, 8, 0, name) for name in ("t", "t2m")]  # one of six dates that are forecast
    store = make_store(
        folder.parent / "tiny-data" / "store.zarr", dates=12, levels=(850,), variables=("t",), shape=(9, 16), bias=0.3,
        absent=absent,
    )  # fmt: skip
    train(
        TrainConfig(
            run="tiny",
            output=str(folder.parent),
            steps=3,
            batch_size=2,
            data=DataConfig(store=store.path, train=["2001-01-01/2001-01-10"], validation=["2001-01-11"], members=[3]),
            model=ModelConfig(hidden=8, max_hidden=8, surroundings=16, residuals=16, depth=1),
            tracking=TrackingConfig(tensorboard=False),
        )
    )
    given = PredictConfig(
        checkpoint=str(folder / "checkpoints" / "last"),
        input=store.path,
        output=str(folder / "forecast"),
        members_in=3,
        dates=["2001-01-12/2001-01-31"],
    )
    predict(given, store)
    return folder


@pytest.mark.parametrize("variable", ["t 850", "t2m"])
def test_evaluate_forecast(run, monkeypatch, variable):
    monkeypatch.setenv("ENSEMBLE_ML_RUN", str(run))
    monkeypatch.setenv("ENSEMBLE_ML_VARIABLE", variable)
    notebook = jupytext.read(NOTEBOOKS / "evaluate_forecast.py")
    ran = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    nbformat.validate(ran)
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "5 of 6 start dates have a truth; 3 of 6 members in" in text and "95 % interval" in text.splitlines()[-1]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


@pytest.mark.parametrize("name", ["evaluate_forecast", "extreme_case"])
@pytest.mark.parametrize("variable", ["t 500", "t", "t2m 850", "z 850"])
def test_what_the_store_does_not_hold_is_named(run, monkeypatch, name, variable):
    monkeypatch.setenv("ENSEMBLE_ML_RUN", str(run))
    monkeypatch.setenv("ENSEMBLE_ML_VARIABLE", variable)
    first = next(cell for cell in jupytext.read(NOTEBOOKS / f"{name}.py").cells if cell.cell_type == "code")
    with pytest.raises(ValueError, match=rf"^ENSEMBLE_ML_VARIABLE={variable}: .* holds t 850, t2m$"):
        exec(first.source, {})


def test_extreme_case(run, monkeypatch):
    monkeypatch.setenv("ENSEMBLE_ML_RUN", str(run))
    notebook = jupytext.read(NOTEBOOKS / "extreme_case.py")
    ran = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert text.count("<- the case") == 1 and "EECRPS" in text and "standard deviations away" in text
    assert "the most unusual of" in text.splitlines()[-1]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
