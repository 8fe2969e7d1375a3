"""Files that tell of the package say the same as the package itself, and what they name is there."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ensemble_ml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def requirements() -> list[Requirement]:
    """Return what the package and its extras depend on, without the package itself."""
    texts = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    return [one for one in map(Requirement, texts) if one.name != PROJECT["name"]]


def test_there_is_one_version():
    assert PROJECT["version"] == ensemble_ml.__version__


def test_the_citation_is_of_this_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] == ensemble_ml.__name__ and citation["message"]
    assert [citation["version"], citation["license"]] == [ensemble_ml.__version__, PROJECT["license"]]
    assert [citation["abstract"], citation["keywords"]] == [PROJECT["description"], PROJECT["keywords"]]
    assert [author["name"] for author in citation["authors"]] == ["ensemble_ml contributors"]


@pytest.mark.parametrize("one", requirements(), ids=str)
def test_every_dependency_is_pinned(one):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert pins[canonicalize_name(one.name)] in one.specifier


def named_paths() -> set[str]:
    """Return the paths that CONTRIBUTING.md names: in backticks, behind a link, or as a word of a command."""
    words = set(re.findall(r"\]\(([^)#:]+)\)", GUIDE))
    for code in [*re.findall(r"`([^`]+)`", GUIDE), *re.findall(r"^ {4}(\S.*)$", GUIDE, re.MULTILINE)]:
        words |= set(shlex.split(code, comments=True))
    return {word for word in words if re.fullmatch(r"[\w.-]+(/[\w.-]*)+|[\w-]+\.(md|txt|toml)|LICENSE", word)}


def test_paths_that_contributors_are_sent_to_are_there():
    paths = named_paths()
    assert {"ensemble_ml/fields.py", "ARCHITECTURE.md", "constraints.txt", ".ci/run", "docs/"} <= paths
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(("name", "file"), re.findall(r"`(\w+)` (?:of|in) `([\w/]+\.py)`", GUIDE))
def test_names_that_contributors_are_sent_to_are_there(name, file):
    assert re.search(rf"^(class |def )?{name}\b", (ROOT / file).read_text(), re.MULTILINE)
