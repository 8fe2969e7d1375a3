"""Files that tell of the package say the same as the package itself, and what they name is there."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import ensemble_ml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
CONTAINER = (ROOT / "Containerfile").read_text()
APPTAINER = (ROOT / "scripts" / "apptainer.def").read_text()
OF_CONDA = {  # packages of PyPI that conda-forge has under another name
    "dask": "dask-core", "eccodes": "python-eccodes", "matplotlib": "matplotlib-base", "torch": "pytorch",
}  # fmt: skip


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


def conda_specs(texts: list[str]) -> dict[str, SpecifierSet]:
    """Return versions by conda's names, of requirements as PyPI writes them."""
    named = {canonicalize_name(one.name): one.specifier for one in map(Requirement, texts)}
    return {OF_CONDA.get(name, name): specifier for name, specifier in named.items()}


def test_the_recipe_asks_for_what_the_package_does():
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    needs = recipe["requirements"]
    python = f"python{PROJECT['requires-python']}"
    assert conda_specs(needs["run"]) == conda_specs([python, *PROJECT["dependencies"]])
    assert conda_specs(needs["run_constraints"]) == conda_specs(PROJECT["optional-dependencies"]["grib"])
    assert conda_specs(needs["host"]) == conda_specs(["python", "pip", *SETTINGS["build-system"]["requires"]])
    assert [recipe["context"]["version"], recipe["package"]["name"]] == [PROJECT["version"], PROJECT["name"]]
    about = recipe["about"]
    assert [about["license"], about["summary"]] == [PROJECT["license"], PROJECT["description"]]
    assert [about["license_file"]] == PROJECT["license-files"]


def copied(text: str) -> set[str]:
    """Return the paths in the checkout that the description of an image copies into it."""
    if text.startswith("Bootstrap"):
        [section] = re.findall(r"^%files\n((?: .+\n)+)", text, re.MULTILINE)
        return {line.split()[0] for line in section.splitlines()}
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    return {word for line in lines for word in line.split()[:-1]}


@pytest.mark.parametrize("text", [CONTAINER, APPTAINER], ids=["Containerfile", "apptainer.def"])
def test_images_get_all_that_the_wheel_is_made_of(text):
    wheel = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = {*wheel["packages"], *wheel["force-include"], wheel["hooks"]["custom"]["path"]}
    made_of |= {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt", ".gitignore"}
    assert copied(text) == made_of
    assert not [path for path in made_of if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    "script",
    [
        *re.findall(r"^RUN ((?:.*\\\n)*.*)$", CONTAINER, re.MULTILINE),
        *re.findall(r"^%(?:post|test|runscript|environment)\n((?:(?: .*)?\n)+)", APPTAINER, re.MULTILINE),
    ],
    ids=lambda script: script.split("\n")[0].strip()[:40],
)
def test_scripts_of_images_are_shell(script):
    assert script.strip()
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_the_program_in_an_image_is_not_run_by_root():
    last = CONTAINER.rpartition("\nFROM ")[2]
    [user] = re.findall(r"^USER (\w+)$", last, re.MULTILINE)
    assert user != "root" and re.search(rf"useradd .*\b{user}\b", last)
    [command] = re.findall(r"^ENTRYPOINT (.+)$", last, re.MULTILINE)
    assert yaml.safe_load(command) == list(PROJECT["scripts"])
