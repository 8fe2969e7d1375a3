"""The house keeps its order: imports point one way, and two rooms know nothing of Hydra or of ranks."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"errors", "fields", "units", "grid", "domains", "folders", "machine", "config", "pulse", "signals",
          "strict_json", "wording", "closed_forms"}  # fmt: skip
FLOORS = [GROUND | {"distributions"}, {"store"}, {"loading", "models", "distributed", "optim"},
          {"training", "inference", "verification"}, {"arguments", "compose"}, {"api", "plot"}, {"tasks"},
          {"cli", "__main__"}]  # fmt: skip
# A room may also use its own floor: training's checkpoints are read by inference.
FILES = sorted((ROOT / "ensemble_ml").rglob("*.py"))


def floor(room: str) -> int:
    return next(height for height, rooms in enumerate(FLOORS) if room in rooms)


def imported(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = path.relative_to(ROOT / "ensemble_ml").parts[0].removesuffix(".py")
    names = imported(path)
    if room != "__init__":
        rooms = {n.split(".")[1] for n in names if n.startswith("ensemble_ml.") and n.split(".")[1] != "__version__"}
        above = {other for other in rooms if floor(other) > floor(room)}
        assert not above, f"{room} imports {above}"
    tops = {n.split(".")[0] for n in names}
    if room not in {"cli", "compose"}:
        assert not tops & {"hydra"}, "settings are composed in one place, and only sweeps are run by Hydra"
    if room != "distributed":
        assert not any(n.startswith("torch.distributed") for n in names)
    if room in GROUND | {"store", "verification"}:
        assert "torch" not in tops
    if room not in {"tasks", "api"}:
        assert "data_prep" not in tops
    assert not tops & {"benchmarks", "examples"}, "no installed package has them"


@pytest.mark.parametrize("path", sorted((ROOT / "data_prep").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_data_preparation_needs_no_torch(path):
    names = imported(path)
    assert "torch" not in {n.split(".")[0] for n in names}
    rooms = {n.split(".")[1] for n in names if n.startswith("ensemble_ml.") and n.split(".")[1] != "__version__"}
    assert rooms <= GROUND | {"store"}
    assert not {n.split(".")[0] for n in names} & {"benchmarks", "examples"}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_benchmarks_use_what_the_command_line_does(path):
    # torch's own averagers of models and its split tensors are competitors.
    rivals = "torch.distributed" + ".algorithms.model_averaging" * (path.name != "rival_convolutions.py")
    names = [name for name in imported(path) if not name.startswith(rivals)]
    assert not {
        n for n in names if n.startswith(("hydra", "torch.distributed", "ensemble_ml.cli", "ensemble_ml.tasks"))
    }


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_know_ranks_and_padding_alone(path):
    names = imported(path)
    assert not any(n.startswith("torch.distributed") for n in names)
    rooms = {n.split(".")[1] for n in names if n.startswith("ensemble_ml.")}
    assert rooms <= GROUND | {"distributed", "models"}
