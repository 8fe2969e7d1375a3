"""The house keeps its order: imports point one way, and two rooms know nothing of Hydra or of ranks."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"errors", "fields", "units", "grid", "folders", "machine", "config", "pulse", "signals", "wording",
          "closed_forms"}  # fmt: skip
FLOORS = [GROUND | {"distributions"}, {"store"}, {"loading", "models", "distributed", "optim"},
          {"training", "inference", "verification"}, {"compose"}, {"api", "plot"}, {"tasks"},
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


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The imports that run when a module is imported: not those in functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef) and "TYPE_CHECKING" not in ast.dump(getattr(child, "test", child)):
            yield from run_at_import(child)


def test_no_module_imports_itself_by_way_of_others():
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in [*FILES, *sorted((ROOT / "data_prep").rglob("*.py"))]
    }
    graph = {}
    for name, path in paths.items():
        names = set()
        for node in run_at_import(ast.parse(path.read_text())):
            module = [node.module] if isinstance(node, ast.ImportFrom) else []
            names |= {*module, *(".".join([*module, alias.name]) for alias in node.names)}
        graph[name] = {other for other in names & paths.keys() if not f"{name}.".startswith(f"{other}.")}
    assert len(graph) > 200 and sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


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
