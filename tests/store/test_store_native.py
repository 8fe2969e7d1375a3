"""Compiled loops give NumPy's bits, and are left alone where they cannot be used."""

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ml.store import native
from ensemble_ml.store.fuse import Members, fuse
from ensemble_ml.store.packing import PackedBlock, decode, exact_fields, quantise

ROOT = Path(__file__).parents[2]
SHAPES = st.one_of(
    st.tuples(st.integers(2, 51), st.integers(1, 4), st.integers(1, 9), st.integers(1, 160)),
    st.tuples(st.integers(2, 4), st.just(2), st.just(16), st.integers(500, 720)),  # beyond NumPy's buffer of 8192
)


def build_hook():
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    place = importlib.util.spec_from_file_location("hatch_build", ROOT / "scripts" / "hatch_build.py")
    hook = importlib.util.module_from_spec(place)
    place.loader.exec_module(hook)
    return hook


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library, compiled as an installation does it."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no C compiler: {compiler} is not there")
    folder = tmp_path_factory.mktemp("native")
    build_hook().compile_library(native._SOURCE, folder / "_native.so")
    return folder


@pytest.fixture(scope="module")
def library(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_LIBRARY", folder / "_native.so")
        patch.delenv("ENSEMBLE_ML_NATIVE", raising=False)
        loaded = native._load()
    assert loaded is not None
    return loaded


def both_ways(library, work):
    """What `work` returns with the library and without."""
    found = []
    for one in (library, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_library", one)
            found.append(work())
    return found


def drawn(seed, shape, decimal=1.0, constant=False):
    rng = np.random.default_rng(seed)
    centre, spread = rng.choice([0.0, 280.0, 5e4, -3e-5]), 10 ** rng.uniform(-6, 3)
    values = np.full(shape, centre) if constant else rng.normal(centre, spread, shape)
    block = quantise(values.astype(np.float32))
    return PackedBlock(block.values, block.reference, block.scale, block.decimal / decimal, block.present)


def fused(block):
    exact = exact_fields(block.reference, block.scale, block.decimal)
    codes = np.stack([block.values.min((2, 3)), block.values.max((2, 3))])
    ends = ((codes * block.scale + block.reference) * block.decimal).astype(np.float32)
    return arrays_of(Members(block.values, block.reference, block.scale, block.decimal, block.present, exact, ends))


def arrays_of(members):
    """All that `fuse` makes; the arrays that it will use again are copied."""
    found = fuse(members)
    moments = [found.moments, found.of_mean, found.of_spread]
    return [found.mean.copy(), found.spread.copy(), *(a for one in moments for a in one.arrays().values())]


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=SHAPES,
    decimal=st.sampled_from([1.0, 1e2]),
    constant=st.booleans(),
)
def test_mean_spread_and_moments_are_numpys_bit_for_bit(library, seed, shape, decimal, constant):
    block = drawn(seed, shape, decimal, constant)
    for compiled, plain in zip(*both_ways(library, lambda: fused(block)), strict=True):
        np.testing.assert_array_equal(compiled.view(f"u{compiled.itemsize}"), plain.view(f"u{plain.itemsize}"))


def fused_plain(values, count):
    found = arrays_of(Members.plain(values, np.isfinite(values).any((2, 3))))
    assert (found[2] == count).all()
    return found


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=SHAPES,
    kind=st.sampled_from(["values", "zeros of both signs", "points without a value", "a field that is absent"]),
)
def test_float32_members_are_numpys_bit_for_bit(library, seed, shape, kind):
    rng = np.random.default_rng(seed)
    whole = rng.normal(rng.choice([0.0, 280.0, 5e4]), 10 ** rng.uniform(-6, 3), (*shape[:3], shape[3] + 1))
    values = whole.astype(np.float32)[..., : shape[3]] if shape[2] == 1 else whole.astype(np.float32)
    if kind == "zeros of both signs":
        values[...] = rng.choice(np.float32([-0.0, 0.0]), values.shape)
    elif kind == "points without a value":
        values[rng.integers(shape[0]), 0, :, rng.integers(shape[3])] = np.nan
    elif kind == "a field that is absent":
        values[rng.integers(shape[0]), rng.integers(shape[1])] = np.nan
    count = np.isfinite(values).sum((0, 2, 3))
    for compiled, plain in zip(*both_ways(library, lambda: fused_plain(values, count)), strict=True):
        np.testing.assert_array_equal(compiled.view(f"u{compiled.itemsize}"), plain.view(f"u{plain.itemsize}"))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9), st.integers(2, 300)),
    decimal=st.sampled_from([1.0, 1e2]),
)
def test_values_are_numpys_bit_for_bit(library, seed, shape, decimal):
    block = drawn(seed, shape, decimal)
    compiled, plain = both_ways(library, lambda: decode(block))
    np.testing.assert_array_equal(compiled.view("u4"), plain.view("u4"))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.just(1), st.just(1), st.integers(1, 9), st.integers(1, 300)),
    decimal=st.sampled_from([1.0, 1e2]),
    order=st.sampled_from("<>"),
)
def test_one_field_of_either_byte_order_is_numpys_bit_for_bit(library, seed, shape, decimal, order):
    block = drawn(seed, shape, decimal)
    factors = [float(part[0, 0]) for part in (block.reference, block.scale, block.decimal)]
    out = np.empty(shape[2:], np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_library", library)
        exact = bool(exact_fields(block.reference, block.scale, block.decimal))
        assert native.decode_field(block.values[0, 0].astype(f"{order}u2"), factors, exact, out)
        patch.setattr(native, "_library", None)
        np.testing.assert_array_equal(out.view("u4"), decode(block)[0, 0].view("u4"))


def test_the_library_does_the_work(library, monkeypatch):
    """Else the tests above compare NumPy with itself."""
    monkeypatch.setattr(native, "_library", library)
    block, out = drawn(1, (4, 2, 6, 40)), np.empty((2, 6, 40), np.float32)
    factors = [part[0] for part in (block.reference, block.scale, block.decimal)]
    assert native.decode(block.values[0], factors, True, out)
    np.testing.assert_array_equal(out, decode(block)[0])
    assert native.decode(block.values[0, :, 2:5], factors, True, out[:, 2:5])  # rows of a chunk
    asked = []
    monkeypatch.setattr(
        native, "fuse", lambda *arguments, real=native.fuse: asked.append(real(*arguments)) or asked[-1]
    )
    fused(block)
    assert asked == [True]
    real, asked = native.fuse_plain, []
    monkeypatch.setattr(native, "fuse_plain", lambda *arguments: asked.append(real(*arguments)) or asked[-1])
    fuse(Members.plain(np.ones((4, 2, 6, 40), np.float32), np.ones((4, 2), bool)))
    assert asked == [True]


def test_arrays_that_it_is_not_made_for_are_left_to_numpy(library, monkeypatch):
    monkeypatch.setattr(native, "_library", library)
    block, out = drawn(1, (4, 2, 6, 40)), np.empty((2, 6, 40), np.float32)
    one = [np.ones(2)] * 3
    assert not native.decode(block.values[0, :, :, ::2], one, True, out[:, :, ::2])
    assert not native.decode(block.values[0].astype(">u2"), one, True, out)
    assert not native.decode(block.values[0], [np.ones(1)] * 3, True, out)  # one factor for two fields
    apart = np.zeros(2 * 6 * 40 * 2 + 1, np.uint8)[1:].view(np.uint16).reshape(2, 6, 40)  # at an odd address
    assert not native.decode(apart, one, True, out)
    assert not native.decode_field(apart[0], [1.0] * 3, True, out[0])
    assert not native.decode_field(block.values[0, 0, :, ::2], [1.0] * 3, True, out[0, :, ::2])
    assert not native.decode_field(out[0], [1.0] * 3, True, out[0])


def test_another_text_than_was_compiled_is_not_called(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("ENSEMBLE_ML_NATIVE", raising=False)
    monkeypatch.setattr(native, "_LIBRARY", folder / "_native.so")
    assert native._load() is not None
    changed = tmp_path / "native.c"
    changed.write_bytes(native._SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "_SOURCE", changed)
    assert native._load() is None


def test_it_can_be_switched_off(folder, monkeypatch):
    monkeypatch.setattr(native, "_LIBRARY", folder / "_native.so")
    monkeypatch.setenv("ENSEMBLE_ML_NATIVE", "0")
    assert native._load() is None


@pytest.mark.parametrize(("compiler", "said"), [("no-such-compiler", "No such file"), ("false", "false failed")])
def test_without_a_compiler_the_build_says_why(monkeypatch, tmp_path, compiler, said):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(RuntimeError, match=said):
        build_hook().compile_library(native._SOURCE, tmp_path / "_native.so")


def test_a_folder_that_cannot_be_written_is_no_failure_of_the_build(folder, tmp_path):
    with pytest.raises(RuntimeError, match="No such file"):
        build_hook().put(folder / "_native.so", tmp_path / "none" / "_native.so")
