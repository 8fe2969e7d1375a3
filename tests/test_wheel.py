"""The wheel works away from the checkout: configuration, entry points and the second package travel in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next(folder.glob("*.whl"))
    target = folder / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    assert zipfile.ZipFile(wheel).testzip() is None
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, env=environment, capture_output=True, text=True, check=False
    )


def test_configuration_is_found_inside_the_wheel(installed):
    where = run(installed, "-c", "from ensemble_ml import cli; print(cli.conf_folder())")
    assert Path(where.stdout.strip()) == installed / "ensemble_ml" / "conf", where.stderr
    composed = run(installed, "-m", "ensemble_ml", "train", "--cfg", "experiment=quickstart", "data.store=x")
    assert composed.returncode == 0 and "run: quickstart" in composed.stdout, composed.stderr


def test_every_file_of_conf_travels(installed):
    wanted = {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    found = {p.relative_to(installed / "ensemble_ml" / "conf") for p in installed.glob("ensemble_ml/conf/**/*.yaml")}
    assert found == wanted


def test_both_packages_and_the_xarray_engine_are_there(installed):
    code = "import data_prep, xarray; print(data_prep.__file__); print(xarray.backends.list_engines()['ensemble_ml'])"
    done = run(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout


def test_benchmarks_stay_in_the_checkout(installed):
    assert {path.parent.name for path in installed.glob("*/__init__.py")} == {"data_prep", "ensemble_ml"}
    done = run(installed, "-m", "ensemble_ml", "benchmark", "benchmark=step")
    assert done.returncode == 2 and not done.stdout
    command = "python -m ensemble_ml benchmark benchmark=step"
    assert done.stderr == (
        "ensemble-ml: benchmark=step: benchmarks are not part of an installed package; "
        f"run `{command}` in the folder of a checkout of the source\n"
    )


@pytest.mark.skipif(shutil.which("cc") is None or "CC" in os.environ, reason="without cc, no loops are compiled")
def test_compiled_loops_travel_and_are_used(installed):
    assert [wheel.name.split("-", 2)[2][:9] for wheel in installed.parent.glob("*.whl")] == ["py3-none-"]
    code = "from ensemble_ml.store import native; print(native.__file__, native.available())"
    done = run(installed, "-c", code)
    assert done.stdout.split() == [str(installed / "ensemble_ml" / "store" / "native.py"), "True"], done.stderr
