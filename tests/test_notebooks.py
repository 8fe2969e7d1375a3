"""Every notebook runs from its first cell to its last on a tiny run."""

import ast
import re
import runpy
from pathlib import Path

import jupytext
import matplotlib.pyplot as plt
import nbformat
import netCDF4
import numpy as np
import pytest
import xarray as xr
from fixtures_archive import tiny_archive  # noqa: F401
from nbclient import NotebookClient
from scipy.stats import norm
from stores import make_store
from verification.fakes import DATES, TEST, TRAIN, corrected, write_forecasts

from ensemble_ml.config import DataConfig, ModelConfig, PredictConfig, TrackingConfig, TrainConfig
from ensemble_ml.inference import Kind, predict
from ensemble_ml.store import Part, Selection, open_store
from ensemble_ml.store.climate import ModelClimate
from ensemble_ml.training import train
from ensemble_ml.verification.extremes import efi

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PLACES = {
    "forecast": {},
    "region": {"region": [67.5, -45, -22.5, 45]},  # across Greenwich: the forecast's longitudes begin below zero
    "points": {"points": [[45.0, 0.0], [0.0, 90.0]]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run as scripts/quickstart.sh leaves it, made in seconds."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    absent = [(Part.TRUTH, 8, 0, name) for name in ("t", "t2m", "sst")]  # one of six dates that are forecast
    absent.append((Part.FORECAST, 9, 4, "t"))  # a member that the forecast was not made from
    store = make_store(
        folder.parent / "tiny-data" / "store.zarr", dates=12, levels=(850,), variables=("t",), surface=("t2m", "sst"),
        masked=("sst",), shape=(9, 16), bias=0.3, absent=absent,
    )  # fmt: skip
    train(
        TrainConfig(
            run="tiny",
            output=str(folder.parent),
            steps=3,
            batch_size=2,
            data=DataConfig(store=store.path, train=["2001-01-01/2001-01-10"], validation=["2001-01-11"], members=[3]),
            model=ModelConfig(hidden=8, max_hidden=8, points=16, depth=1),
            tracking=TrackingConfig(tensorboard=False),
        )
    )
    for name, places in PLACES.items():
        given = PredictConfig(
            checkpoint=str(folder / "checkpoints" / "last"),
            input=store.path,
            output=str(folder / name),
            members_in=3,
            dates=["2001-01-12/2001-01-31"],
            **places,
        )
        predict(given, store)
    return folder


def settings_of(run, monkeypatch, variable, forecast):
    monkeypatch.setenv("ENSEMBLE_ML_RUN", str(run))
    monkeypatch.setenv("ENSEMBLE_ML_FORECAST", str(run / forecast))
    monkeypatch.setenv("ENSEMBLE_ML_VARIABLE", variable)


def executed(run, monkeypatch, name, variable="t 850", forecast="forecast"):
    """What a notebook prints, and how many pictures it shows, cell by cell in a kernel of its own."""
    settings_of(run, monkeypatch, variable, forecast)
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    ran = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    nbformat.validate(ran)
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture
def read_out(run, monkeypatch, capsys):
    """The same without a kernel, whose start takes longer than the notebook."""

    def of(name, variable="t 850", forecast="forecast"):
        settings_of(run, monkeypatch, variable, forecast)
        monkeypatch.setenv("MPLBACKEND", "agg")
        try:
            runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
            pictures = [plt.figure(number) for number in plt.get_fignums()]
            for picture in pictures:
                picture.canvas.draw()
        finally:
            plt.close("all")
        return capsys.readouterr().out, len(pictures)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pictures"), [("evaluate_forecast", 3), ("extreme_case", 1)])
def test_in_a_kernel_it_is_what_it_is_without(run, monkeypatch, read_out, name, pictures):
    assert executed(run, monkeypatch, name) == read_out(name) and read_out(name)[1] == pictures


@pytest.mark.parametrize(
    ("variable", "forecast"), [("t 850", "forecast"), ("t2m", "forecast"), ("sst", "forecast"), ("t 850", "region")]
)
def test_evaluate_forecast(run, read_out, variable, forecast):
    text, pictures = read_out("evaluate_forecast", variable, forecast)
    assert "5 of 6 init times have a truth; 3 of 6 members in" in text and "95 % interval" in text.splitlines()[-1]
    assert pictures == 3 and not re.search(r"\bnan\b", text.split("members in\n")[1])
    error = re.search(r"raw 6 \+48 h: error of the mean (\S+)", text)[1]
    assert float(error) == pytest.approx(raw_error(run, variable, forecast), rel=1e-3)


@pytest.mark.parametrize("name", ["evaluate_forecast", "extreme_case"])
@pytest.mark.parametrize("which", [0, -1])
def test_leads_that_all_files_have_are_looked_at(run, read_out, tmp_path, name, which):
    """One file, be it the first, ends at 24 h."""
    paths = sorted((run / "forecast").glob("*.nc"))
    for path in paths:
        with xr.open_dataset(path, decode_timedelta=False) as data:
            data.isel(forecast_period=[0] if path is paths[which] else slice(None)).to_netcdf(tmp_path / path.name)
    text, _ = read_out(name, forecast=tmp_path)
    assert "at 24 h has a CRPS" in text.splitlines()[-1] and "48 h" not in text
    assert name == "extreme_case" or "5 init times" in text.splitlines()[-1]


@pytest.mark.parametrize("name", [pytest.param("evaluate_forecast", marks=pytest.mark.slow), "extreme_case"])
def test_files_with_an_axis_of_valid_times_are_read(run, read_out, tmp_path, name):
    """As former versions of predict wrote them."""
    for path in (run / "forecast").glob("*.nc"):
        with xr.open_dataset(path, decode_timedelta=False) as data:
            former = data.isel(forecast_reference_time=0).swap_dims(forecast_period="time")
            former.to_netcdf(tmp_path / path.name, unlimited_dims=[])
    former, present = (read_out(name, forecast=folder)[0] for folder in (tmp_path, "forecast"))
    assert former.splitlines()[-1] == present.splitlines()[-1].replace(str(run / "forecast"), str(tmp_path))


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_law_counts_the_members_that_are_there(lacking):
    source = ast.parse((NOTEBOOKS / "evaluate_forecast.py").read_text())
    [law] = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "normal_law")
    exec(compile(ast.Module([law], []), "law", "exec"), names := {"np": np})
    members = np.random.default_rng(0).normal(size=(5, 3))
    members[:lacking] = np.nan
    mean, sigma = names["normal_law"](xr.DataArray(members, dims=["realization", "point"]))
    there = members[lacking:]
    np.testing.assert_allclose(mean, there.mean(0))
    np.testing.assert_allclose(sigma, there.std(0, ddof=1) * np.sqrt(1 + 1 / (5 - lacking)))


def raw_error(run, variable, forecast):
    """Root mean square error of the raw mean at 48 h in the cells of the forecast, from the store's own numbers."""
    store = open_store(run.parent / "tiny-data" / "store.zarr")
    areas = store.layout.grid.area_weights()
    areas *= np.isin(np.arange(areas.size).reshape(areas.shape), cells(areas.shape, forecast))
    total = weight = 0.0
    for date in (6, 7, 9, 10, 11):
        parts = store.read(Part.FORECAST, date), store.read(Part.TRUTH, date)
        if variable == "t 850":
            x, y = (fields.pressure[:, -1, 0, 0].astype(float) for fields in parts)
        else:
            position = store.layout.surface.index(variable)
            x, y = (fields.surface[:, -1, position].astype(float) for fields in parts)
        error = (x[np.isfinite(x).any((1, 2))].mean(0) - y[0]) ** 2
        total += (areas * np.nan_to_num(error)).sum()
        weight += (areas * np.isfinite(error)).sum()
    return np.sqrt(total / weight)


def cells(shape, forecast):
    """Numbers of the cells of PLACES[forecast]."""
    every = np.arange(shape[0] * shape[1]).reshape(shape)
    return every[1:6][:, [14, 15, 0, 1, 2]] if forecast == "region" else every


@pytest.mark.parametrize("name", ["evaluate_forecast", "extreme_case"])
@pytest.mark.parametrize("variable", ["t 500", "t", "t2m 850", "z 850"])
def test_what_the_store_does_not_hold_is_named(run, monkeypatch, name, variable):
    monkeypatch.setenv("ENSEMBLE_ML_RUN", str(run))
    monkeypatch.setenv("ENSEMBLE_ML_VARIABLE", variable)
    first = next(cell for cell in jupytext.read(NOTEBOOKS / f"{name}.py").cells if cell.cell_type == "code")
    with pytest.raises(ValueError, match=rf"^ENSEMBLE_ML_VARIABLE={variable}: .* holds t 850, t2m, sst$"):
        exec(first.source, {})


@pytest.mark.parametrize(("variable", "forecast"), [("t 850", "forecast"), ("sst", "forecast"), ("t 850", "region")])
def test_extreme_case(read_out, variable, forecast):
    text, pictures = read_out("extreme_case", variable, forecast)
    assert text.count("<- the case") == 1 and "EECRPS" in text and "standard deviations away" in text
    assert "the most unusual of 5 dates" in text.splitlines()[-1]
    assert "Climate from the other init times of the archive's only year; 0 of 5 dates are left out" in text
    assert pictures == 1 and not re.search(r"\bnan\b", text)
    if forecast == "region":
        north, east = map(float, re.search(r"At (\S+) N, (\S+) E", text).groups())
        assert -22.5 <= north <= 67.5 and -45 <= east <= 45


@pytest.mark.parametrize("name", ["evaluate_forecast", "extreme_case"])
def test_forecasts_at_points_are_refused(read_out, name):
    with pytest.raises(ValueError, match=r"^forecast at points .*; give one made without points=$"):
        read_out(name, forecast="points")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store of two years, dry in places, and made-up forecasts of its test dates and two dates of training."""
    folder = tmp_path_factory.mktemp("made")
    store = make_store(
        folder / "store.zarr", dates=DATES, members=10, variables=("t",), levels=(850,), surface=("tp",), bias=0.6,
        dispersion=0.7,
    )  # fmt: skip
    write_forecasts(folder / "forecast", store, TRAIN[-2:] + TEST, corrected(inflate=1 / 0.7), train=TRAIN)
    return store


@pytest.fixture
def printed(made, monkeypatch, capsys):
    """Runs a notebook on the made-up forecasts, without a kernel, and gives what it prints."""

    def run_of(name, variable="tp", forecast=None):
        monkeypatch.setenv("MPLBACKEND", "agg")
        monkeypatch.setenv("ENSEMBLE_ML_FORECAST", str(forecast or Path(made.path).parent / "forecast"))
        monkeypatch.setenv("ENSEMBLE_ML_STORE", str(made.path))
        monkeypatch.setenv("ENSEMBLE_ML_VARIABLE", variable)
        try:
            runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
        finally:
            plt.close("all")
        return capsys.readouterr().out

    return run_of


@pytest.mark.parametrize("name", [pytest.param("evaluate_forecast", marks=pytest.mark.slow), "extreme_case"])
def test_dates_that_had_a_part_in_the_training_are_left_out(made, printed, tmp_path, name):
    text = printed(name)
    assert "2 of 20 init times had a part in the training and are left out" in text
    assert "18 of 18 init times have a truth" in text if name == "evaluate_forecast" else "\n  2001-" not in text
    write_forecasts(tmp_path, made, TEST[:4], corrected(), train=TRAIN)
    with netCDF4.Dataset(min(tmp_path.glob("*.nc")), "a") as data:  # the others do not know of it
        data.training_dates, data.validation_dates = f"{DATES[TEST[1]]}T00", f"{DATES[TEST[3]]}T00"
    text = printed(name, forecast=tmp_path)
    assert "2 of 4 init times had a part in the training and are left out" in text
    for path in tmp_path.glob("*.nc"):
        with netCDF4.Dataset(path, "a") as data:
            data.validation_dates = " ".join(f"{DATES[date]}T00" for date in TEST)
    with pytest.raises(ValueError, match=r": none of 4 init times can be .*; forecast other dates$"):
        printed(name, forecast=tmp_path)


def test_dry_points_count_for_the_raw_ensembles_too(made, printed):
    made_of, gain = map(float, re.search(r"a CRPS of (\S+) m: (\S+) % below", printed("evaluate_forecast")).groups())
    areas, total = made.layout.grid.area_weights(), 0.0
    for date in TEST:
        members = made.read(Part.FORECAST, date).surface[:5, -1, 0].astype(float)
        truth = made.read(Part.TRUTH, date).surface[0, -1, 0].astype(float)
        mean, sigma = members.mean(0), members.std(0, ddof=1) * np.sqrt(1 + 1 / 5)
        assert ((sigma == 0) & (truth == mean)).any()
        z = (truth - mean) / np.where(sigma, sigma, 1.0)
        crps = sigma * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
        total += (areas * np.where(sigma, crps, np.abs(truth - mean))).sum() / areas.sum() / len(TEST)
    assert gain == pytest.approx(100 * (1 - made_of / total), abs=0.1)


def test_dates_whose_climate_has_too_few_values_have_no_index(made, printed, tmp_path):
    text = printed("extreme_case")
    assert "Climate from other years, within 9 days; 4 of 18 dates are left out, with less than 20 values" in text
    assert "the most unusual of 14 dates" in text.splitlines()[-1] and not re.search(r"\b(nan|inf)\b", text)
    climate, areas, expected = ModelClimate(made), made.layout.grid.area_weights(), {}
    for date in filter(climate.enough, TEST):
        chosen = Selection(None, (48,), (), None, ("tp",))
        members, of_year = made.read(Part.FORECAST, date, chosen), climate.quantiles(date, chosen)
        index = efi(members.surface[:, 0, 0], of_year.surface[:, 0, 0], climate.probabilities)
        expected[f"{DATES[date]}T00"] = f"{(areas * np.abs(index)).sum() / areas.sum():.2f}"
    assert dict(re.findall(r"^  (2003\S+)  (\S+)", text, re.MULTILINE)) == expected and len(expected) == 14
    write_forecasts(tmp_path, made, TEST[-2:], corrected(), train=TRAIN)  # other years know none or one date
    with pytest.raises(ValueError, match=r"no climate for any of 2 init times; forecast others, or add years to it$"):
        printed("extreme_case", forecast=tmp_path)


@pytest.mark.parametrize("name", ["evaluate_forecast", "extreme_case"])
def test_forecasts_without_a_distribution_are_named(made, printed, tmp_path, name):
    def spread_alone(field, members):
        return {Kind.SPREAD: corrected()(field, members)[Kind.SPREAD]}

    write_forecasts(tmp_path, made, TEST[:4], spread_alone, train=TRAIN)
    with pytest.raises(ValueError, match=r": holds t_ensemble_spread, tp_ensemble_spread, no tp_mean, tp_stddev"):
        printed(name, forecast=tmp_path)


def test_one_member_has_no_raw_spread(made, printed, tmp_path):
    def spread(field, members):
        return corrected()(field, members) | {Kind.SPREAD: np.ones_like(members[0])}

    write_forecasts(tmp_path, made, TEST[:4], spread, train=TRAIN, members_in="1")
    text = printed("evaluate_forecast", forecast=tmp_path, variable="t 850").split("members in\n")[1]
    assert "predicted +24 h: error of the full ensemble's spread" in text and not re.search(r"\bnan\b", text)
    assert "raw +24 h" not in text and "that of the normal distribution of raw 10" in text


@pytest.fixture
def lesson(tiny_archive, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Run a notebook of the gallery beside the embedded archive at its smallest, and return what it prints."""

    def printed_by(name):
        (tmp_path / "archive").symlink_to(tiny_archive)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MPLBACKEND", "agg")
        try:
            runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
        finally:
            plt.close("all")
        return capsys.readouterr().out

    return printed_by


def test_open_and_look_finds_error_and_spread_alike(lesson):
    text = lesson("open_and_look")
    pairs = re.findall(r"^\+\d+ h: error (\S+) K, predicted by the spread (\S+) K$", text, re.MULTILINE)
    assert len(pairs) == 3 and all(0.85 < float(spread) / float(error) < 1.15 for error, spread in pairs)


def test_five_beat_ten_agrees_with_what_is_known_by_hand(lesson):
    text = lesson("five_beat_ten")
    rows = re.findall(r"ordinary (\S+) \(by hand (\S+)\), fair (\S+)", text)
    assert len(rows) == 4
    for ordinary, by_hand, fair in rows:
        assert float(ordinary) == pytest.approx(float(by_hand), rel=0.01)
        assert float(fair) == pytest.approx(1 / np.sqrt(np.pi), rel=0.01)
    assert float(re.search(r"(\S+) % better", text)[1]) > 3


def test_calibrate_and_verify_gains_on_the_raw_members(lesson):
    text = lesson("calibrate_and_verify")
    assert "t2m_ensemble_spread" in text and "2 test dates in 1 independent block" in text
    assert float(re.search(r"CRPS (\S+) % lower than the raw 3 members", text)[1]) > 5


@pytest.mark.slow
def test_spread_from_few_finds_more_in_the_flow_than_in_two_members(lesson):
    text = lesson("spread_from_few")
    errors = {key: float(error) for key, error in re.findall(r"^(.+): (\S+) K", text, re.MULTILINE)}
    assert errors["known sigma"] < errors["predicted from 1"] < 1.3 * errors["known sigma"]
    assert errors["predicted from 1"] < 0.7 * errors["raw from 2"] and "raw from 1" not in errors
    assert errors["predicted from 5"] < errors["regression from 5"] < errors["raw from 5"]


def test_rain_and_wind_have_bounds_and_better_probabilities(lesson):
    text = lesson("rain_and_wind")
    assert "csgamma" in text and "truncated_normal" in text
    assert min(map(float, re.findall(r"smallest quantile anywhere: (\S+)", text))) >= 0
    gains = re.findall(r"calibrated \((\S+) % lower\)", text)
    assert len(gains) == 2 and all(float(gain) > 5 for gain in gains)


@pytest.mark.slow
def test_parts_of_a_model_come_nearer_to_the_best_forecast(lesson):
    text = lesson("parts_of_a_model")
    crps = {name: float(score) for name, score in re.findall(r"^(.+): (\S+) K", text, re.MULTILINE)}
    assert crps["raw_5"] > crps["corrections"] > crps["and_network"] > crps["best possible"]
    assert crps["best possible"] < crps["and_unet"] < crps["and_network"] + 0.005
    assert crps["best possible"] == pytest.approx(1 / np.sqrt(np.pi), rel=0.05)
