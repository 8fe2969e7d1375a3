"""The loading race at its smallest: entrants are checked and counted, and ours reads what its plan says."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.loading import benchmark as loading
from benchmarks.loading import racing
from benchmarks.loading.race import Outcome
from benchmarks.loading.track import check
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, RaceConfig
from ensemble_ml.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the emulated storage")


def results(tmp_path, *sections, **race):
    settings = RaceConfig(caches=[0.5, 1.0], workers=[0], rivals=["dataloader"], **race)
    config = BenchmarkConfig(
        benchmark="loading", output=str(tmp_path / "out"), repeats=1, size=BenchmarkSize.tiny, race=settings,
        workspace=str(tmp_path), only=list(sections),
    )  # fmt: skip
    content = json.loads(loading.run(config).read_text())
    return content["figures"], {claim["claim"].split(":")[0]: claim for claim in content["claims"]}, content


@pytest.mark.slow
def test_race(tmp_path):
    figures, _, content = results(tmp_path, "same", "own")
    for kind in ("raw", "packed"):
        assert figures[f"DataLoader, {kind} files"]["median"] > 0
    assert figures["DataLoader, raw files: read"]["median"] == pytest.approx(3, rel=0.01)
    assert figures["same bytes, cache 1: ours: read"]["median"] == pytest.approx(1, rel=0.01)
    claims = {claim["claim"] for claim in content["claims"]}
    assert "cache 1, same bytes: throughput over the fastest of one rival that ran (DataLoader, raw files)" in claims
    assert "cache 0.5, own format: throughput over the DataLoader given our packed files" in claims


@pytest.mark.slow
def test_bytes_are_those_of_the_plan(tmp_path):
    _, claims, _ = results(tmp_path, "bytes")
    assert claims["bytes by which the plan and the counters differ"]["value"] == 0
    assert claims["bytes read from slow storage above the bound F + (E-1)(F-K)"]["value"] < 10  # few samples, so uneven


@pytest.mark.parametrize("wrong", [dict(covered=False), dict(wrong=1), dict(read=99)])
def test_disqualified(wrong):
    good = dict(seconds=1.0, read=100, covered=True, wrong=0, waited=np.nan, peak=0)
    check("entrant", Outcome(**good), 100)
    with pytest.raises(UserError, match="entrant"):
        check("entrant", Outcome(**good | wrong), 100)


@pytest.mark.parametrize("section", [racing.losses, racing.fast_storage])
def test_a_rival_that_does_not_finish_loses_nothing_that_was_measured(monkeypatch, section):
    class Stuck:
        """A track on which rivals cannot be tuned."""

        raw, notes, outcomes = 1, [], {"before": ["measured"]}

        def tuned(self, name, settings, spec):
            raise UserError("ran with none of 3 settings")

        def spec(self, *given, **more):
            return given

        def run(self, name, spec):
            self.outcomes[name] = ["measured"]

    class Rival:
        name, settings, cached = "theirs", (), False

        def spec(self, one, cache):
            return {}

    monkeypatch.setattr(racing, "rivals", lambda *_, same_bytes: [Rival()])
    track = Stuck()
    track.notes, track.outcomes = [], dict(track.outcomes)
    section(track, RaceConfig(), None)
    assert "before" in track.outcomes and sum(": ours" in name for name in track.outcomes) >= 2
    assert len(track.notes) == 2 and all("theirs: did not finish (ran with none" in note for note in track.notes)


def test_a_workspace_that_the_emulator_cannot_be_loaded_from(tmp_path):
    given = BenchmarkConfig(benchmark="loading", output=str(tmp_path), workspace=str(tmp_path / "my data"))
    with pytest.raises(UserError, match=r"workspace=.*my data: must have no blank and no colon"):
        loading.run(given)
