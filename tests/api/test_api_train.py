"""`eml.train` has the settings of the command, and reports wrong ones in a line before torch is loaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import ensemble_ml as eml
from ensemble_ml import compose as composing
from ensemble_ml.api import training
from ensemble_ml.api.training import train_config
from ensemble_ml.cli import build_config, compose_config
from ensemble_ml.errors import UserError
from ensemble_ml.folders import conf_folder

WORDS = ["run=first", "output=runs", "data.store=store.zarr"]
DATES = ["data.train=['2001']", "data.validation=['2002']"]
EXPERIMENTS = sorted(path.stem for path in conf_folder().glob("experiment/*.yaml"))


def settings_in_python(settings, train=("2001",), validation=("2002",)):
    return train_config("store.zarr", Path("runs/first"), train, validation, settings)


def settings_of_command(*words):
    return build_config("train", compose_config("train", [*WORDS, *words]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"model": "small", "optim": "adamw", "steps": 5}, ["model=small", "optim=adamw", "steps=5"]),
        ({"model": "emos", "resume": "auto"}, ["model=emos", "resume=auto"]),
        (
            {"loading": "torch", "model.hidden": 8, "data.members": (1, 3), "model.families": {"q": "lognormal"}},
            ["loading=torch", "model.hidden=8", "data.members=[1,3]", "model.families={q: lognormal}"],
        ),
    ],
)
def test_settings_are_those_of_the_command(settings, words):
    assert settings_in_python(settings) == settings_of_command(*DATES, *words)
    assert settings_in_python(settings, "2001", "2002") == settings_of_command(*DATES, *words)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_are_those_of_the_command(experiment):
    """With its init times, which take the place of a split; what is given beside it wins over it."""
    words = [f"experiment={experiment}"]
    assert settings_in_python({"experiment": experiment}, None, None) == settings_of_command(*words)
    given = settings_in_python({"experiment": experiment, "steps": 3, "optim": "lion"}, ["2005"], None)
    assert given == settings_of_command(*words, "steps=3", "optim=lion", "data.train=['2005']")
    assert given.optim.name.value == "lion" and given.data.train == ["2005"]


def test_validation_of_an_experiment_without_training_dates_holds(monkeypatch, tmp_path):
    folder = shutil.copytree(conf_folder(), tmp_path / "conf")
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\ndata:\n  validation: ['2002']\n")
    monkeypatch.setattr(composing, "conf_folder", lambda: folder)
    monkeypatch.setattr(training, "open_store", lambda path: path)
    monkeypatch.setattr(training, "split_dates", lambda store, train, validation: (["2003"], validation))
    mine = settings_in_python({"experiment": "mine"}, None, None).data
    assert (mine.train, mine.validation) == (["2003"], ["2002"])
    mine = settings_in_python({"experiment": "mine"}, ["2001"], None).data
    assert (mine.train, mine.validation) == (["2001"], ["2002"])


def test_a_program_of_hydra_keeps_its_state(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
        settings_in_python({"model": "small"})
        assert compose("mine").a == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 8}, "hidden: no such setting of train; did you mean model.hidden"),
        ({"data.train": ["2001"]}, "data.train: is given by the argument train= of eml.train"),
        ({"model": "large"}, "model=large: no such file in conf; there are drn, emos"),
        ({"experiment": "large"}, "experiment=large: no such file in conf; there are era5_members, quickstart"),
        ({"model": {"hidden": 8}}, "model={'hidden': 8}: no such file in conf; there are drn, emos"),
        ({"steps": "few"}, "steps=few: Value 'few' of type 'str' could not be converted to Integer"),
        ({"batch_size": 0}, "batch_size=0: must be 1 or more"),
        ({"optim.lr": float("nan")}, "optim.lr=nan: must be a finite number"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(UserError) as raised:
        settings_in_python(settings)
    assert str(raised.value).startswith(message)


def test_an_archive_is_no_store(here):
    with pytest.raises(UserError, match=r"archive/ensemble: is no tensor store, .* give what eml\.prepare"):
        eml.train("archive/ensemble", run="runs/none")


@pytest.mark.slow
def test_waiting_threads_sleep_as_under_the_command():
    """Else a fit in Python takes many times as long as the command's where other programs run beside it."""
    code = "import os, ensemble_ml as eml; eml.train; print(os.environ['OMP_WAIT_POLICY'])"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        printed = subprocess.check_output([sys.executable, "-c", code], env=clean | given, text=True)
        assert printed.strip() == policy
