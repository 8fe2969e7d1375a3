"""Fits that are kept: the same for all trials of a seed, made anew where what they depend on differs."""

import logging
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest

from ensemble_ml.folders import hash_of_code
from ensemble_ml.training import fit_cache, load_checkpoint, train
from ensemble_ml.training.checkpoint import digest

pytestmark = pytest.mark.usefixtures("own_fits")


@pytest.fixture
def config_of(config_of):
    """Settings with little to fit."""
    return lambda **changes: config_of(**{"model__linear": False} | changes)


@pytest.fixture(scope="module")
def fitted():
    """Keep the first fit without a linear correction: all such fits of this store have one shape."""
    return []


@pytest.fixture
def counted(monkeypatch, fitted):
    """Count how often something is fitted, and hand out one fit for those of little, of which the number alone
    matters."""
    made, fit = [], fit_cache.fit_climate

    def counting(reader, *args):
        made.append(1)
        if reader.spec.linear:
            return fit(reader, *args)
        if not fitted:
            fitted.append(fit(reader, *args))
        return deepcopy(fitted[0])  # a run may change what it begins with

    monkeypatch.setattr(fit_cache, "fit_climate", counting)
    return made


@pytest.fixture
def counted_and_fitted(monkeypatch):
    """Count how often something is fitted."""
    made, fit = [], fit_cache.fit_climate
    monkeypatch.setattr(fit_cache, "fit_climate", lambda *args: (made.append(1), fit(*args))[1])
    return made


def files(config):
    return sorted((Path(config.output) / ".fits").iterdir())


@pytest.mark.slow
def test_another_trial_takes_the_same_fit(config_of, counted, caplog):
    whole = {"steps": 2, "model__linear": True}
    with caplog.at_level(logging.INFO):
        first, second = (train(config_of(run=f"rate{rate}", optim__lr=rate, **whole)) for rate in (1e-3, 1e-4))
    assert len(counted) == 1
    assert "climate: as fitted before" in caplog.text
    one, other = (load_checkpoint(run / "checkpoints" / "last") for run in (first, second))
    same = [k for k in one.state_dict if "points" in k or k.endswith("inflation")]
    assert len(same) == 3 and all((one.state_dict[k] == other.state_dict[k]).all() for k in same)
    assert one.meta["clock"]["fit_seconds"] == pytest.approx(other.meta["clock"]["fit_seconds"], abs=0.1)
    assert digest(one.meta | {"clock": {}}) == one.sha256


@pytest.mark.slow
def test_another_seed_has_a_point_network_of_its_own(config_of, counted):
    """Fitted to other points from other weights; what has no chance in it is the same."""
    found = []
    for seed in (0, 1, 0):
        run = train(config_of(run=f"run{len(found)}", seed=seed, steps=1, model__linear=True))
        found.append(load_checkpoint(run / "checkpoints" / "best").state_dict)
    assert len(counted) == 2
    first, second, again = (state["points.first"] for state in found)
    assert (first != second).float().mean() > 0.9
    assert (first == again).all()
    assert (found[0]["linear.weight"] == found[1]["linear.weight"]).all()


def test_without_a_point_network_seeds_share_a_fit(config_of, counted):
    for seed in (0, 1):
        train(config_of(run=f"seed{seed}", seed=seed, steps=1))
    assert len(counted) == 1


def test_a_kept_fit_is_the_fit_itself(config_of, counted_and_fitted):
    train(config_of(run="a", steps=3))
    once = load_checkpoint(train(config_of(run="b", steps=3)) / "checkpoints" / "last")
    files(config_of())[0].unlink()
    again = load_checkpoint(train(config_of(run="c", steps=3)) / "checkpoints" / "last")
    assert len(counted_and_fitted) == 2
    assert once.state_dict.keys() == again.state_dict.keys()
    assert all((once.state_dict[k] == again.state_dict[k]).all() for k in once.state_dict)


@pytest.mark.parametrize(
    "changes",
    [
        {"data__train": ["2001-01-01/2001-01-14"]}, {"data__validation": ["2001-02-01/2001-02-02"]},
        {"data__members": [1, 2]}, {"data__validation_members": 2}, {"model__points": 8},
    ],
)  # fmt: skip
def test_other_settings_are_fitted_anew(config_of, counted, changes):
    train(config_of(run="a", steps=1))
    train(config_of(run="b", steps=1, **changes))
    assert len(counted) == 2 and len(files(config_of())) == 2


def test_other_code_fits_anew(config_of, counted, monkeypatch):
    train(config_of(run="a", steps=1))
    monkeypatch.setattr(fit_cache, "_CODE", "other")
    train(config_of(run="b", steps=1))
    assert len(counted) == 2


def test_all_code_that_fits_run_is_part_of_the_key():
    text = """
import sys
import ensemble_ml.training.climate_fit

packages = (name for name, module in sys.modules.items() if hasattr(module, "__path__"))
print(*{name.split(".")[1] for name in packages if name.startswith("ensemble_ml.")})
"""
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    packages = {*run.stdout.split()} - {"config"}  # settings are in the key themselves
    assert hash_of_code(*packages) == fit_cache._CODE


def test_a_file_that_may_not_be_read_is_told_of(config_of, counted, caplog, monkeypatch):
    def refuse(path, *given):
        raise PermissionError(13, "Permission denied") if path.suffix == ".fit" else FileNotFoundError

    train(config_of(run="a", steps=1))
    (kept,) = files(config_of())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        assert fit_cache._read(kept) is None
    assert "cannot be read ([Errno 13] Permission denied), so it is fitted anew" in caplog.text


@pytest.mark.slow
def test_a_broken_file_is_told_of_and_made_anew(config_of, counted, caplog):
    train(config_of(run="a", steps=1))
    (kept,) = files(config_of())
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100] + bytes(100))  # as a node leaves it that dies before the disk has all
    train(config_of(run="b", steps=1))
    assert len(counted) == 2
    assert "cannot be read" in caplog.text and str(kept) in caplog.text
    train(config_of(run="c", steps=1))
    assert len(counted) == 2
    kept.write_bytes(whole[:20])
    train(config_of(run="d", steps=1))
    assert len(counted) == 3


def test_the_network_behind_the_fits_may_differ(config_of, counted):
    train(config_of(run="a", steps=1))
    train(config_of(run="b", steps=1, model__hidden=12, model__blocks=2))
    assert len(counted) == 1


def test_less_memory_fits_anew(config_of, counted, monkeypatch):
    train(config_of(run="a", steps=1))
    monkeypatch.setattr(fit_cache, "memory_limit", lambda: 1 << 30)
    train(config_of(run="b", steps=1))
    assert len(counted) == 2


def test_a_folder_that_takes_no_more_ends_no_run(config_of, counted, monkeypatch, caplog):
    def full(file, sync=os.fsync):
        if fit_cache.FOLDER in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    assert train(config_of(run="a", steps=1)).is_dir()
    assert "the fit is not kept for other runs" in caplog.text
    assert not files(config_of())  # nor a part of one


def test_a_file_in_the_place_of_the_folder_ends_no_run(config_of, counted, caplog):
    folder = Path(config_of().output)
    folder.mkdir()
    (folder / ".fits").write_text("")
    assert train(config_of(run="a", steps=1)).is_dir()
    assert "the fit is not kept for other runs" in caplog.text


def test_another_users_file_is_taken(config_of, counted, monkeypatch):
    train(config_of(run="a", steps=1))

    def refuse(_path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fit_cache.os, "utime", refuse)
    train(config_of(run="b", steps=1))
    assert len(counted) == 1


def test_the_oldest_are_cleared_away(config_of, counted, monkeypatch):
    monkeypatch.setattr(fit_cache, "_KEPT", 2)
    seen = []
    for units in (4, 8, 12):
        train(config_of(run=f"u{units}", steps=1, model__points=units))
        seen.append(set(files(config_of())))
    assert seen[1] > seen[0] and len(seen[2]) == 2
    assert not seen[0] & seen[2]


def test_what_a_fit_had_to_say_is_said_of_a_kept_one_too(config_of, counted, caplog):
    caplog.set_level(logging.INFO)
    few = {"steps": 1, "data__train": ["2001-01-01/2001-01-05"], "data__validation": [], "model__linear": True}
    for run in ("a", "b"):
        caplog.clear()
        train(config_of(run=run, **few))
        assert caplog.text.count("linear correction: 3 dates are too few, so there is none") == 1
    assert len(counted) == 1


def test_everything_of_a_fit_is_kept():
    names = {field.name for field in fields(fit_cache.Fit)}
    assert names == {"climate", "spread_error", "input_range", "seconds"}, "a new field must be written and read, too"


def test_what_a_killed_run_left_behind_is_cleared_away_a_day_later(config_of, counted):
    folder = Path(config_of().output) / ".fits"
    folder.mkdir(parents=True)
    old, new = (folder / f".{name}.fit.{name}" for name in ("old", "new"))
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (0, 0))
    train(config_of(steps=1))
    assert not old.exists() and new.exists()
