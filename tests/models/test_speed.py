"""Choosing precision and memory order by measuring."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from small_models import make_climate, make_input, make_model, make_spec, tensors
from torch import nn

from ensemble_ml.config import Precision
from ensemble_ml.errors import UserError
from ensemble_ml.models import Speed, build_model, choose
from ensemble_ml.models import speed as module


def passes(model, x):
    return lambda: sum(v.mean() for v in tensors(model(x)).values()).backward()


def test_choice_is_logged_set_and_leaves_weights_alone(caplog):
    spec = make_spec()
    model, x = make_model(spec), make_input(spec)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with caplog.at_level(logging.INFO):
        chosen = choose(model, passes(model, x), seconds=1)
    assert model.speed == chosen and len(caplog.records) == 1 and "taken: " in caplog.text and " ms" in caplog.text
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_choice_leaves_running_statistics_alone():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, changed = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)), []

    def step():
        model(x).mean().backward()
        changed.append(not torch.equal(model[1].running_mean, before["1.running_mean"]))

    choose(model, step, seconds=0.5)
    assert all(changed) and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("fits", [True, False])
def test_a_speed_that_does_not_fit_is_left_out(monkeypatch, caplog, fits):
    """As float32 may where bfloat16 does; what a failed pass had come to is not held."""
    model, held = make_model(make_spec()), []
    monkeypatch.setattr(module, "candidates", lambda *_: [Speed(Precision.float32, last) for last in (True, False)])
    monkeypatch.setattr(module, "settle", lambda device: None)

    def step():
        if not (fits and not model.speed.channels_last):
            activations = torch.zeros(3)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. More")

    gc.disable()
    try:
        with caplog.at_level(logging.INFO), nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
            assert not choose(model, step, seconds=100).channels_last
        assert held and all(one() is None for one in held)
    finally:
        gc.enable()
    assert "speed: float32 channels last: CUDA out of memory" in caplog.text and "More" not in caplog.text


def test_fixed_precision_is_kept():
    spec = make_spec(depth=1)
    model = make_model(spec)
    assert choose(model, passes(model, make_input(spec)), wanted=Precision.float32).precision is Precision.float32


@pytest.mark.skipif(not module.has_bfloat16(torch.device("cpu")), reason="this CPU has no bfloat16")
def test_bfloat16_stays_inside_the_network():
    spec = make_spec()
    model, x = make_model(spec), make_input(spec)
    wide = model(x)
    Speed(Precision.bfloat16).apply(model)
    low = model(x)
    for key, value in tensors(low).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, getattr(wide, key), rtol=0.1, atol=0.1)
    passes(model, x)()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_float64():
    spec = make_spec()
    model = make_model(spec)
    Speed(Precision.float64).apply(model)
    assert model(make_input(spec).to(torch.float64)).scale.dtype == torch.float64


@pytest.mark.parametrize("name", ["unet3d", "drn", "ens10_unet"])
def test_an_input_of_float64_for_weights_of_float32_is_refused(name):
    spec = make_spec(name=name)
    model = build_model(spec, make_climate(spec))
    with pytest.raises(UserError, match="float64; the weights of this model are"):
        model(make_input(spec).to(torch.float64))
    Speed(Precision.float64).apply(model)
    assert model(make_input(spec)).spread.dtype == torch.float64  # float32 for weights of float64 loses nothing


def test_json_round_trip():
    for speed in (Speed(), Speed(Precision.bfloat16, False)):
        assert Speed.from_json(speed.to_json()) == speed


def test_bfloat16_without_hardware_is_refused(monkeypatch):
    monkeypatch.setattr(module, "has_bfloat16", lambda device: False)
    cpu = torch.device("cpu")
    assert {s.precision for s in module.candidates(cpu, Precision.auto)} == {Precision.float32}
    with pytest.raises(UserError, match="bfloat16"):
        module.candidates(cpu, Precision.bfloat16)


def test_freed_memory_stays_with_the_process():
    """Page faults of five large tensors after such were freed: none where memory stays."""
    work = """
import platform, resource, sys
import torch
import ensemble_ml.models  # as where training runs: how large blocks fit together hangs on what lies between them
from ensemble_ml.machine import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(1 << 24)
before = faults()
for _ in range(5):
    torch.ones(1 << 24)
print(faults() - before, platform.libc_ver()[0])
"""

    def run(how):
        told = subprocess.run([sys.executable, "-c", work, how], capture_output=True, text=True, check=True).stdout
        return told.split()

    (kept, libc), (given_back, _) = run("keep"), run("leave")
    if libc != "glibc":
        pytest.skip("the C library is not glibc")
    assert int(kept) < 20 < 150 < int(given_back)  # 64 MiB are at least 32 pages each time
