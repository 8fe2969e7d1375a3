"""The script that scores a real ensemble, on a stand-in of the same layout behind a URL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import public_archives
import pytest

from benchmarks.remote.server import Plan, serving

pytest.importorskip("obstore", reason="URLs need the extra `remote`")
SCRIPT = Path(__file__).parents[1] / "scripts" / "realdata.sh"
QUICK = [
    "size=tiny", "skill.models=[unet3d,emos]", "skill.seeds=1", "skill.trials=1", "skill.patience=1", "skill.steps=2",
    "skill.members=3", "skill.sizes=[3]", "skill.bootstrap=100", "skill.threads=1",
]  # fmt: skip


@pytest.mark.slow
def test_the_cut_is_fetched_trained_on_and_scored(tmp_path):
    public_archives.weatherbench(tmp_path, degrees=22.5, dates=18, members=4)
    plan = Plan()
    with serving(tmp_path, plan) as url:
        names = {
            "WB2_ENSEMBLE": f"{url}/ifs_ens.zarr",
            "WB2_TRUTH": f"{url}/era5.zarr",
            "WB2_RUN": str(tmp_path / "run"),
        }
        names |= {"WB2_TRAIN": "2020-01-01/2020-01-10", "WB2_VALIDATION": "2020-01-11/2020-01-14"}
        names |= {"WB2_TEST": "2020-01-15/2020-01-18", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", str(SCRIPT), "wb2", *QUICK], env=os.environ | names, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "run" / "skill" / "results.json").read_text())
    scored = [name for name in found["figures"] if name.startswith("CRPS from 3 of 4 members at 48 h")]
    assert scored and all(name in done.stdout + done.stderr for name in scored)
    # Of what is not asked for, a chunk is looked at where nothing states units, and nothing else.
    assert not [one for one in plan.asked if "/u_component_of_wind/" in one]
    assert len([one for one in plan.asked if "/ifs_ens.zarr/total_precipitation_6hr/" in one]) == 1


def test_it_says_what_it_takes():
    done = subprocess.run(["bash", str(SCRIPT), "all"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: scripts/realdata.sh wb2" in done.stderr
