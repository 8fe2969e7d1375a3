"""Make the data that all entrants read: the same init times as raw float32 files and as a tensor store.

Axes: M member, V variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.loading.lap import N_LEVELS, N_VARIABLES, Size, probe
from ensemble_ml.grid import Grid
from ensemble_ml.store import Layout, PackedBlock, Part, StoreWriter, decode

VARIABLES, LEVELS = ("t", "z"), (300, 500, 700, 850)
assert (len(VARIABLES), len(LEVELS)) == (N_VARIABLES, N_LEVELS)
_SCALES = ((255.0, 12.0, 1.0), (4e4, 1.5e3, 90.0))  # typical value, amplitude of the signal, departure of a member


def make(folder: Path, size: Size) -> None:
    """Write `folder`/raw/NNNNN.f32 and `folder`/store.zarr, with equal values. Complete data is kept.

    Args:
        folder: the folder.
        size: number and shape of the samples.
    """
    done = folder / "complete"
    if done.exists() and done.read_text() == repr(size):
        return
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    base = _smooth(rng, (8, *size.grid), 6.0)
    detail = _smooth(rng, (16, *size.grid), 40.0)
    times = np.datetime64("2001-01-01", "ns") + np.arange(size.samples) * np.timedelta64(1, "D")
    grid = Grid(np.linspace(90, -90, size.grid[0]), np.arange(size.grid[1]) * 360 / size.grid[1])
    layout = Layout(times, tuple(range(1, size.members + 1)), (24,), VARIABLES, LEVELS, (), grid)
    with StoreWriter(folder / "store.zarr", layout, parts=[Part.FORECAST], overwrite=True) as writer:
        for sample in range(size.samples):
            block = _packed(_values(rng, size, base, detail)[:, None])
            writer.write(Part.FORECAST, sample, block, PackedBlock.empty((size.members, 1, 0, *size.grid)))
            decode(block)[:, 0].tofile(raw / f"{sample:05d}.f32")
    done.write_text(repr(size))


def _smooth(rng: np.random.Generator, shape: tuple[int, ...], waves: float) -> np.ndarray:
    """Return Gaussian fields of variance 1, with a red spectrum up to about `waves` waves around the grid."""
    ky = np.fft.fftfreq(shape[-2], 1 / shape[-2])[:, None]
    kx = np.fft.rfftfreq(shape[-1], 1 / shape[-1])
    weight = np.exp(-(ky**2 + kx**2) / (2 * waves**2))
    fields = np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) * weight, shape[-2:])
    return fields / fields.std(axis=(-2, -1), keepdims=True)


def _values(rng: np.random.Generator, size: Size, base: np.ndarray, detail: np.ndarray) -> np.ndarray:
    """Return one sample (M, V, Z, Y, X).

    It combines smooth fields in a new way, so that samples differ and compress like weather.
    """
    out = np.empty(size.shape, np.float32)
    for variable, (typical, signal, departure) in enumerate(_SCALES):
        for level in range(len(LEVELS)):
            field = np.tensordot(rng.standard_normal(len(base)) / np.sqrt(len(base)), base, 1)
            for member in range(size.members):
                own = np.tensordot(rng.standard_normal(len(detail)) / np.sqrt(len(detail)), detail, 1)
                out[member, variable, level] = typical + signal * field + departure * own
    return out


def _packed(values: np.ndarray) -> PackedBlock:
    """Return values (..., Y, X) packed as in 16-bit GRIB messages: a float32 reference, and a power of two as scale."""
    low, high = values.min((-2, -1)), values.max((-2, -1))
    reference, scale = low.astype(np.float64), np.exp2(np.ceil(np.log2((high - low).astype(np.float64) / 65535)))
    codes = np.rint((values - reference[..., None, None]) / scale[..., None, None])
    ones = np.ones(low.shape)
    return PackedBlock(codes.clip(0, 65535).astype(np.uint16), reference, scale, ones, ones.astype(bool))


def probes(folder: Path, size: Size) -> np.ndarray:
    """Return the probe of every sample (F, n), from the raw files.

    Args:
        folder: the folder of the data.
        size: number and shape of the samples.
    """
    files = (np.fromfile(folder / "raw" / f"{sample:05d}.f32", np.float32) for sample in range(size.samples))
    return np.stack([probe(values) for values in files])
