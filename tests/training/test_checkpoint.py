"""Checkpoints: whole or not there, verified when they are read, and free of code."""

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from ensemble_ml.config import ModelConfig
from ensemble_ml.errors import UserError
from ensemble_ml.models import Climate, EnsembleModel, ModelSpec
from ensemble_ml.store.manifest import hash_file
from ensemble_ml.training import checkpoint as module
from ensemble_ml.training import train
from ensemble_ml.training.checkpoint import (
    clean,
    find_checkpoint,
    load_checkpoint,
    load_meta,
    load_model,
    load_spec,
    load_weights,
    mend_links,
    point,
)
from ensemble_ml.training.keeper import Snapshot, save_checkpoint

SPEC = ModelSpec(
    ModelConfig(hidden=8, max_hidden=8, depth=1), ("t",), (500, 850), ("t2m",), (0, 24), (24,),
    tuple(np.linspace(90, -90, 9)), tuple(np.arange(16) * 22.5),
)  # fmt: skip


def model_of(seed=0):
    torch.manual_seed(seed)
    return EnsembleModel(SPEC, Climate.default(SPEC))


def save(folder, step=7, best=True, seed=0, before=False):
    training = {"optimizer.0.exp_avg": torch.arange(3.0)}
    meta = {"spec": SPEC.to_json(), "config": {"run": "a"}, "best": None}
    weights = model_of(seed).state_dict()
    return save_checkpoint(folder, Snapshot(step, weights, training, meta, best=best, before=before))


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "c")
    return tmp_path / "c"


def test_round_trip(folder):
    found = load_checkpoint(folder / "best", training=True)
    assert found.spec.to_json() == SPEC.to_json() and found.meta["step"] == 7 and found.meta["format"] == module.FORMAT
    assert torch.equal(found.training["optimizer.0.exp_avg"], torch.arange(3.0))
    model, meta = load_model(folder / "last")
    assert not model.training and meta["sha256"] == found.sha256
    assert all(torch.equal(v, found.state_dict[k]) for k, v in model.state_dict().items())
    assert load_checkpoint(folder / "last").training == {}


@pytest.fixture
def run(tmp_path):
    """A run whose best checkpoint is not its last."""
    save(tmp_path / "first" / "checkpoints", step=3, seed=1)
    save(tmp_path / "first" / "checkpoints", step=7, best=False)
    (tmp_path / "first" / "config.yaml").write_text("")
    return tmp_path / "first"


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_a_run_stands_for_its_best_checkpoint(run, given, caplog):
    caplog.set_level("INFO")
    best = run / "checkpoints" / "best"
    assert find_checkpoint(run / given) == best and load_checkpoint(best).meta["step"] == 3
    assert caplog.messages == [f"checkpoint {run / given}: takes its best, {best} (step 3)"]


@pytest.mark.parametrize("given", ["best", "last", "step_00000007"])
def test_a_checkpoint_stands_for_itself(run, given, caplog):
    caplog.set_level("INFO")
    assert find_checkpoint(str(run / "checkpoints" / given)) == run / "checkpoints" / given and not caplog.messages


def test_a_run_without_a_best_checkpoint_is_refused_and_names_what_is_there(run):
    (run / "checkpoints" / "best").unlink()
    for given in (run, run / "checkpoints"):
        there = r"has no best, only last, step_0+3, step_0+7; give \S+first/checkpoints/last"
        with pytest.raises(UserError, match=rf"checkpoint {given}: {there}$"):
            find_checkpoint(given)


def test_a_folder_without_a_checkpoint_is_refused_and_names_what_is_there(tmp_path):
    with pytest.raises(UserError, match=rf"checkpoint {tmp_path}: is empty; give a run like runs/NAME"):
        find_checkpoint(tmp_path)
    for name in ("a.nc", "b.nc", *(f"c{number}" for number in range(9))):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"holds no checkpoint, but a.nc, b.nc, c0, .*c5 and 3 more; give a run"):
        find_checkpoint(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_files_that_were_read_are_not_kept_open(folder):
    """A mapped file that is removed stays in its folder on NFS, and in its place on other disks."""
    held = load_checkpoint(folder / "last", training=True), load_model(folder / "last")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    del held


def test_channels_last_weights_are_kept(tmp_path):
    weight = torch.randn(4, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d)
    meta = {"spec": SPEC.to_json()}
    saved = save_checkpoint(tmp_path, Snapshot(0, {"w": weight}, {"w": weight}, meta))
    assert torch.equal(load_checkpoint(saved).state_dict["w"], weight)


def test_old_checkpoints_go_unless_a_link_leads_there(folder):
    save(folder, 8, best=False)
    save(folder, 9, best=False)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "last", "step_00000007", "step_00000009"]
    assert os.readlink(folder / "best") == "step_00000007" and os.readlink(folder / "last") == "step_00000009"
    save(folder, 10, best=True)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "last", "step_00000010"]


@pytest.mark.parametrize("name", [module.MODEL, module.TRAINING, module.META])
@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_damage_is_found(folder, name, harm):
    file = folder / "step_00000007" / name
    data = bytearray(file.read_bytes())
    if harm == "cut":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"checkpoint .*last: {name} is damaged"):
        load_checkpoint(folder / "last", training=True)


def test_a_file_that_is_not_needed_may_be_absent(folder):
    (folder / "last" / module.TRAINING).unlink()
    load_model(folder / "last")
    with pytest.raises(UserError, match=r"optimizer.safetensors is absent"):
        load_checkpoint(folder / "last", training=True)


def test_what_storage_refuses_is_said_in_one_line(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    for method in ("exists", "is_file", "read_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            for read in (find_checkpoint, load_checkpoint, load_meta, load_spec):
                if method == "is_file" or read is not find_checkpoint:
                    with pytest.raises(UserError, match=r"checkpoint .*: cannot be read \(Permission denied\)"):
                        read(folder / "step_00000007")


def test_another_format_is_refused(folder):
    file = folder / "last" / module.META
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match=f"format 99; this version reads {module.FORMAT}"):
        load_checkpoint(folder / "last")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"waves": 3}, "unexpected keyword argument 'waves'"),
        ({"pole": None}, "'pole' is missing"),
        ({"pole": "spiral"}, "'spiral' is not a valid Pole"),
        ({"name": "gnn"}, "model.name=gnn: unet3d"),
    ],
)
def test_settings_of_another_version_are_refused_in_one_line(folder, changes, why):
    file = folder / "last" / module.META
    meta = json.loads(file.read_text())
    settings = meta["spec"]["config"] | changes
    meta["spec"]["config"] = {name: value for name, value in settings.items() if name not in changes or value}
    file.write_text(json.dumps(meta | {"sha256": module.digest(meta)}))
    for read in (load_spec, load_checkpoint, load_model):
        with pytest.raises(UserError, match=rf"^checkpoint {folder}/last: this version cannot .*{why}.*; use the"):
            read(folder / "last")


def test_what_is_no_checkpoint_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"holds no checkpoint.json"):
        load_checkpoint(tmp_path)
    (tmp_path / module.META).write_text("[1, 2]")
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(tmp_path)


def test_pickled_weights_are_not_executed(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    file = folder / "last" / module.MODEL
    torch.save({"w": Evil()}, file)
    meta_file = folder / "last" / module.META
    meta = json.loads(meta_file.read_text())
    meta["files"][module.MODEL] = hash_file(file)
    meta_file.write_text(json.dumps(meta | {"sha256": module.digest(meta)}))
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(folder / "last")
    assert not (tmp_path / "executed").exists()


def test_other_layout_names_the_first_tensor(folder):
    other = ModelSpec.from_json(SPEC.to_json() | {"levels": [500]})
    with pytest.raises(UserError, match=r"layout differs .* tensors, first"):
        load_weights(EnsembleModel(other, Climate.default(other)), load_checkpoint(folder / "last"))


class Killed(BaseException):
    pass


def crash_at(monkeypatch, function, count):
    """Let the `count`-th call of a system function during the next save be the last thing that happens."""
    real, calls = getattr(module.os, function), []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == count:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(module.os, function, counted)


@pytest.mark.parametrize(
    ("function", "count"),
    [("fsync", n) for n in range(1, 8)] + [(f, n) for f in ("symlink", "replace") for n in (1, 2)] + [("rename", 1)],
)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(folder, monkeypatch, function, count):
    with monkeypatch.context() as patch:
        crash_at(patch, function, count)
        with pytest.raises(Killed):
            save(folder, 8, best=True, seed=1)
    for link in ("last", "best"):
        found = load_checkpoint(folder / link, training=True)
        weights = model_of(seed=found.meta["step"] - 7).state_dict()
        assert all(torch.equal(v, weights[k]) for k, v in found.state_dict.items())
    clean(folder)
    assert all(p.name in ("last", "best") or p.name.startswith("step_") for p in folder.iterdir())
    save(folder, 8, best=True, seed=1)
    assert load_checkpoint(folder / "best").meta["step"] == 8 and len(list(folder.iterdir())) == 3


@pytest.fixture
def copied(folder):
    """Checkpoints 7 (best) and 9 (last), as a copy that follows links makes them."""
    save(folder, 9, best=False, seed=9)
    shutil.copytree(folder, folder.with_name("copy"), symlinks=False)
    return folder.with_name("copy")


def assert_mended(folder):
    clean(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "last", "step_00000007", "step_00000009"]
    assert os.readlink(folder / "best") == "step_00000007" and os.readlink(folder / "last") == "step_00000009"
    for link in ("last", "best"):
        load_checkpoint(folder / link, training=True)


@pytest.mark.parametrize("absent", [[], ["step_00000007", "step_00000009"], ["last"]])
@pytest.mark.parametrize("function", [None, "rename", "symlink", "replace"])
@pytest.mark.parametrize("count", [1, 2])
def test_links_that_a_copy_has_lost_are_mended(copied, monkeypatch, absent, function, count):
    """Also where the mending is killed on the way."""
    for name in absent:
        shutil.rmtree(copied / name)
    if function is not None:
        with monkeypatch.context() as patch:
            crash_at(patch, function, count)
            with suppress(Killed):
                mend_links(copied)
    mend_links(copied)
    if function is not None and not (copied / "best").exists():
        point(copied, "best", "step_00000007")  # which a run knows from its last checkpoint
    assert_mended(copied)


@pytest.mark.parametrize("absent", ["last", "step_00000009b", None])
def test_a_checkpoint_before_its_tournament_keeps_its_name_in_a_copy(folder, absent):
    """Otherwise it would pass for the one after the tournament, which could not be written then."""
    save(folder, 9, best=False, before=True)
    copy = Path(shutil.copytree(folder, folder.with_name("copy"), symlinks=False))
    if absent:
        shutil.rmtree(copy / absent)
    mend_links(copy)
    clean(copy)
    assert os.readlink(copy / "last") == "step_00000009b"
    save(copy, 9, seed=1)
    assert os.readlink(copy / "last") == "step_00000009"


def test_the_checkpoint_after_a_tournament_is_newer(folder):
    save(folder, 9, best=False, before=True)
    shutil.copytree(folder / "step_00000009b", folder / "step_00000009b_good")
    save(folder, 9, best=False)
    (folder / "step_00000009b_good").rename(folder / "step_00000009b")
    (folder / "last").unlink()
    mend_links(folder)
    assert os.readlink(folder / "last") == "step_00000009"


@pytest.mark.parametrize("place", ["last", "step_00000009"])
def test_of_a_checkpoint_and_its_copy_the_whole_one_is_kept(copied, place):
    cut(copied / place / module.MODEL)
    mend_links(copied)
    assert_mended(copied)


def test_a_folder_that_is_not_the_step_beside_it_is_refused(copied):
    save(copied.with_name("other"), 9, seed=1)
    shutil.rmtree(copied / "last")
    shutil.copytree(copied.with_name("other") / "last", copied / "last")
    with pytest.raises(UserError, match=r"last: differs from step_00000009 beside it"):
        mend_links(copied)
    assert len(list(copied.iterdir())) == 4


def cut(file):
    file.write_bytes(file.read_bytes()[:-4])


def test_an_orphan_of_the_same_step_is_replaced(folder):
    shutil.copytree(folder / "step_00000007", folder / "step_00000008")
    (folder / "step_00000008" / module.MODEL).write_bytes(b"rubbish")
    save(folder, 8)
    assert load_checkpoint(folder / "last").meta["step"] == 8


def test_a_copy_that_somebody_keeps_of_a_step_is_left_alone(config_of):
    checkpoints = train(config_of(steps=2, checkpoint_every=1)) / "checkpoints"
    kept, old = checkpoints / "step_00000009_good", checkpoints / "step_00000009"
    for copy in (kept, old):
        shutil.copytree((checkpoints / "last").resolve(), copy)
    clean(checkpoints)
    assert kept.is_dir() and not old.exists()
    (checkpoints / "last").unlink()
    mend_links(checkpoints)
    assert (checkpoints / "last").resolve().name == "step_00000002"  # never a copy
