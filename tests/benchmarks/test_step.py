"""The step benchmark: a fair race, and truthful results."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from scipy import stats

from benchmarks.common import results
from benchmarks.common.results import Claim, Figure, summary, write_results
from benchmarks.step import benchmark as step
from ensemble_ml.config import BenchmarkConfig, Pole, Precision, Vertical
from ensemble_ml.models import Climate, EnsembleModel, Speed


def awake(spec):
    torch.manual_seed(0)
    model = EnsembleModel(spec, Climate.default(spec))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("pole", list(Pole))
@pytest.mark.parametrize("vertical", [Vertical.shared, Vertical.affine])
@pytest.mark.parametrize("rows", [16, 17])
def test_naive_gives_the_same_numbers(vertical, pole, rows):
    spec = step.benchmark_spec(3, rows, 32, hidden=8, max_hidden=16, vertical=vertical, pole=pole)
    ours, batch = awake(spec), step.random_batch(spec, 2)
    naive = step.naive_form(ours)
    a, b = ours(batch), naive(batch)
    for name in ("location", "scale", "spread"):
        torch.testing.assert_close(getattr(b, name), getattr(a, name), rtol=1e-4, atol=1e-4)
    a.spread.square().mean().backward()
    b.spread.square().mean().backward()
    ours_grad, naive_grad = ours.pressure.stem.conv.weight.grad, naive.pressure.stem.conv.weight.grad
    torch.testing.assert_close(naive_grad.permute(0, 1, 3, 4, 2), ours_grad, rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in naive.parameters()) == sum(p.numel() for p in ours.parameters())


def test_naive_in_bfloat16_is_in_bfloat16():
    spec = step.benchmark_spec(3, 16, 32, hidden=8, max_hidden=16)
    exact, low = step.naive_form(ours := awake(spec)), step.naive_form(ours)
    Speed(Precision.bfloat16, False).apply(low)
    batch = step.random_batch(spec, 2)
    a, b = exact(batch).spread, low(batch).spread
    assert b.dtype is torch.float32 and not torch.equal(a, b)
    torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_other_forms_have_no_naive_form():
    spec = step.benchmark_spec(3, 16, 32, hidden=8, vertical=Vertical.full)
    with pytest.raises(ValueError, match="vertical=full"):
        step.naive_form(EnsembleModel(spec, Climate.default(spec)))


@pytest.mark.slow
def test_run_writes_results(tmp_path, monkeypatch):
    small = (step.Case("small", (2, 16, 32), 2, {"hidden": 8}),)
    monkeypatch.setattr(step, "CASES", small)
    monkeypatch.setattr(step, "GPU_CASES", small)
    monkeypatch.setattr(step, "_LARGE", 3 << 20)
    path = step.run(BenchmarkConfig(benchmark="step", output=str(tmp_path), repeats=2))
    found = json.loads(path.read_text())
    assert path == tmp_path / "step" / "results.json"
    assert {"machine", "commit", "runs", "figures", "claims"} <= set(found)
    assert found["figures"]["small: naive over ours"]["median"] > 0
    claims = {claim["claim"]: claim for claim in found["claims"]}
    # These are counted, not measured: they hold at any size and on any machine.
    assert claims["small, float32: bytes of a step below naive"]["value"] > 30
    assert claims["small, bfloat16: bytes of a step below naive"]["value"] > 40
    assert claims["small, float32: kept by the U-Net for the backward pass, below autograd's activation"]["value"] > 25
    predicted = claims["small, float32: predicted time of a pass above the measured: size of the median"]
    assert predicted["holds"] == (predicted["value"] <= 25) and not any("faster" in claim for claim in claims)
    assert len(found["tables"]["Bytes of a training step"]) == 4
    assert found["figures"]["small: step, naive"]["unit"] == "ms" and found["runs"] == 2
    page = (tmp_path / "step" / "report.html").read_text()
    assert "threads" in page and "<script" not in page and "http" not in page


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.1, -0.3], [3.0, 2.0, 5.0, 1.0, 1.5]])
def test_the_interval_of_a_mean_is_students(values):
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = Figure.of_mean(values, "%")
    assert (found.min, found.max) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.median == pytest.approx(sum(values) / len(values))
    assert Figure.of_mean(values[:1], "%").min == values[0]


def test_claims_are_truthful(tmp_path):
    slow, small = Claim("fast", 4.99, "times", 5.0), Claim("small", 3.0, "s", 4.0, at_most=True)
    assert not slow.holds and small.holds and not Claim("nothing", float("nan"), "s", 1.0).holds
    figure = Figure.of([3.0, 1.0, 2.0], "ms")
    assert (figure.median, figure.min, figure.max) == (2.0, 1.0, 3.0)
    path = write_results(tmp_path / "a" / "b", title="<x>", runs=3, figures={"f": figure}, claims=[slow, small])
    assert [c["holds"] for c in json.loads(path.read_text())["claims"]] == [False, True]
    assert "&lt;x&gt;" in path.with_name("report.html").read_text()
    assert "DOES NOT HOLD: fast" in summary({"f": figure}, [slow])
    before = path.read_text()
    assert write_results(path.parent, title="other", runs=3, figures={}, claims=[]) == path
    assert (path.parent / "results.previous.json").read_text() == before != path.read_text()


def test_the_commit_of_somebody_elses_repository_is_not_ours(tmp_path, monkeypatch):
    """The package may be installed in an environment inside one."""
    assert results.commit() == "unknown" or len(results.commit().rstrip("+")) == 40
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "results.py").touch()
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    assert results.commit() == "unknown"
