"""The documentation builds as a site without a warning, its links lead somewhere, and its commands are understood."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scoringrules

from ensemble_ml.cli import build_config, compose_config
from ensemble_ml.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"^ {4,}(?:\$ )?ensemble-ml +(\S.*)$", re.MULTILINE)


def commands():
    """Return (page, words after the program's name) of every command in the pages and the README."""
    for page in [ROOT / "README.md", *PAGES]:
        for line in COMMAND.findall(page.read_text()):
            words = shlex.split(line, comments=True)
            if words[0] in TASKS and "..." not in words:
                yield pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    assert {page.stem for page in PAGES} - {"index"} | {"commands", "design", "changes"} <= pages
    for word in ("ensemble-ml simulate", "optim.quorum", "Groups"):
        assert word in (tmp_path / "site" / "commands" / "index.html").read_text()
    assert "calibrate" in (tmp_path / "site" / "api" / "index.html").read_text()
    assert "https://fonts." not in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize("words", commands())
def test_every_command_is_understood(words):
    task, *overrides = words
    if task == "inspect":  # whose argument is a path
        overrides = [f"store={word}" if "=" not in word else word for word in overrides]
    build_config(task, compose_config(task, overrides))


def test_there_are_commands_of_every_task_that_users_begin_with():
    tasks = {param.values[0][0] for param in commands()}
    assert {"inspect", "prepare", "train", "predict", "evaluate", "plan", "export"} <= tasks


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and not [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert len(text.splitlines()) <= 80


def test_the_gallery_lists_every_notebook():
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "gallery.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.py")) and len(listed) == 8


def test_the_curves_of_the_concepts_are_those_of_simulated_members():
    """Both figures of the text, and the curves behind the pictures, against draws."""
    spec = importlib.util.spec_from_file_location("concept_pictures", ROOT / "scripts" / "concept_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    draw = np.random.default_rng(1)
    truth = draw.standard_normal(40_000)
    members = pictures.BIAS + pictures.DISPERSION * draw.standard_normal((5, 40_000))
    raw = scoringrules.crps_ensemble(truth, members.T).mean()
    mean = members.mean(0) - pictures.BIAS
    calibrated = scoringrules.crps_normal(truth, mean, np.sqrt(1 + pictures.DISPERSION**2 / 5)).mean()
    few = np.array([5])
    assert raw == pytest.approx(pictures.raw_crps(few, pictures.BIAS, pictures.DISPERSION)[0], rel=0.01)
    assert calibrated == pytest.approx(pictures.calibrated_crps(few, pictures.DISPERSION)[0], rel=0.01)
    spread = members.std(0, ddof=1) / pictures.DISPERSION
    told = pictures.spread_of(few)
    drawn = [np.quantile(spread, 0.05), spread.mean(), np.quantile(spread, 0.95)]
    assert drawn == pytest.approx([told["low"][0], told["mean"][0], told["high"][0]], rel=0.02)
