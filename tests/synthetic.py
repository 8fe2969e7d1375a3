"""Small synthetic ensembles with known answers, for the tests of every room.

Truth and members are drawn from the same law around a predictable signal: N(signal, sigma^2) at each point, smooth in
space, with a sigma that depends on the flow (so that a spread is there to be learned). With `bias=0, dispersion=1` the
ensemble is calibrated exactly: spread/skill is one and the rank histogram flat.

Axes: M member, T lead, V variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid
from ensemble_ml.store import Layout, PackedBlock, Part, StoreWriter, TensorStore, open_store

# typical value, and standard deviation of the signal, in the registry's units
SCALES = {
    "t": (255.0, 10.0),
    "z": (4e4, 1e3),
    "q": (5e-3, 1.5e-3),
    "t2m": (285.0, 10.0),
    "msl": (101_000.0, 800.0),
    "sp": (99_000.0, 900.0),
    "tp": (0.0, 3e-3),
    "fg10": (14.0, 4.0),
    "sst": (290.0, 6.0),
    "tcc": (0.6, 0.5),
}


def make_store(
    path: str | Path,
    *,
    dates: int | Sequence[str] = 6,
    members: int = 6,
    leads: Sequence[int] = (0, 24, 48),
    variables: Sequence[str] = ("t", "z"),
    levels: Sequence[int] = (500, 850),
    surface: Sequence[str] = ("t2m",),
    shape: tuple[int, int] = (13, 24),
    truth: bool = True,
    control: bool = False,
    static: bool = True,
    bias: float = 0.0,
    dispersion: float = 1.0,
    packing: Packing = Packing.uint16,
    seed: int = 0,
    overwrite: bool = False,
    masked: Sequence[str] = (),
    absent: Sequence[tuple[Part, int, int, str]] = (),
    alike: Sequence[str] = (),
) -> TensorStore:
    """Write a synthetic store at `path` and open it.

    `dates` is a number (every second day from 2001-01-01) or ISO dates; `shape` (Y, X) is a global grid that holds the
    poles. `bias` shifts the members, in units of sigma, by a pattern of its own in each cell; `dispersion` multiplies
    the members' departures, so below one the ensemble is under-dispersive. Surface variables that `masked` names have
    no value on `land`, in any part; `absent` lists (part, date, position of the member, variable) that are left out.
    All members have the first one's values of surface variables that `alike` names.
    """
    layout = make_layout(
        dates=dates, members=members, leads=leads, variables=variables, levels=levels, surface=surface, shape=shape
    )
    rng = np.random.default_rng(seed)
    kinds = [([*variables], len(levels)), ([*surface], 1)]
    patterns = [bias * (1 + 0.5 * smooth(rng, (len(names), depth, *shape))) for names, depth in kinds]
    fixed = {"orog": np.maximum(0, 800 * smooth(rng, shape)), "lsm": (smooth(rng, shape) > 0) * 1.0} if static else {}
    parts = [Part.FORECAST, *([Part.TRUTH] if truth else []), *([Part.CONTROL] if control else [])]
    with StoreWriter(
        path, layout, parts=parts, packing=packing, static={k: v.astype(np.float32) for k, v in fixed.items()},
        provenance={"source": "tests/synthetic.py", "seed": seed}, overwrite=overwrite,
    ) as writer:  # fmt: skip
        for date in range(len(layout.init_time)):
            drawn = [_draw(rng, layout, names, depth, shape) for names, depth in kinds]
            for part in parts:
                blocks = [_values(rng, part, draw, pattern, members, dispersion, names)
                          for draw, pattern, (names, _) in zip(drawn, patterns, kinds, strict=True)]  # fmt: skip
                there = _present(layout, [(m, name) for p, d, m, name in absent if (p, d) == (part, date)], blocks)
                flat = blocks[1][:, :, :, 0]
                flat = np.where(np.isin(surface, alike)[:, None, None], flat[:1], flat)
                mask = np.broadcast_to(land(shape), flat.shape) & np.isin(surface, masked)[:, None, None]
                pressure = PackedBlock.plain(blocks[0], there[0])
                surf = PackedBlock.plain(np.where(mask, np.nan, flat), there[1], mask if masked else None)
                writer.write(part, date, pressure, surf)
    return open_store(path)


def land(shape: tuple[int, int]) -> np.ndarray:
    """Where masked variables have no value, bool (Y, X): a third of the globe, a pole with it."""
    rows, columns = shape
    mask = np.zeros(shape, bool)
    mask[: rows // 2, : columns // 3] = True
    mask[-2:] = True
    return mask


def _present(layout: Layout, gone: list[tuple[int, str]], blocks: list[np.ndarray]) -> list[np.ndarray]:
    there = [np.ones(block.shape[: 4 - flat], bool) for flat, block in enumerate(blocks)]
    for member, name in gone:
        at_surface = name in layout.surface
        names = layout.surface if at_surface else layout.variables
        there[at_surface][member, :, names.index(name)] = False
    return there


def make_layout(
    *,
    dates: int | Sequence[str] = 6,
    members: int = 6,
    leads: Sequence[int] = (0, 24, 48),
    variables: Sequence[str] = ("t", "z"),
    levels: Sequence[int] = (500, 850),
    surface: Sequence[str] = ("t2m",),
    shape: tuple[int, int] = (13, 24),
) -> Layout:
    """Coordinates of a synthetic store: a global grid with rows on both poles, members numbered from 1."""
    if isinstance(dates, int):
        init_time = np.datetime64("2001-01-01", "ns") + np.arange(dates) * np.timedelta64(2, "D")
    else:
        init_time = np.asarray(dates, "datetime64[ns]")
    grid = Grid(np.linspace(90, -90, shape[0]), np.arange(shape[1]) * 360 / shape[1])
    realization = tuple(range(1, members + 1))
    return Layout(init_time, realization, tuple(leads), tuple(variables), tuple(levels), tuple(surface), grid)


def smooth(rng: np.random.Generator, shape: tuple[int, ...], waves: float = 3.0) -> np.ndarray:
    """Gaussian fields (..., Y, X) of mean 0 and variance 1 at each point, with about `waves` waves around the grid."""
    ky = np.fft.fftfreq(shape[-2], 1 / shape[-2])[:, None]
    kx = np.fft.rfftfreq(shape[-1], 1 / shape[-1])
    weight = np.exp(-(ky**2 + kx**2) / (2 * waves**2))
    full = np.exp(-(ky**2 + np.fft.fftfreq(shape[-1], 1 / shape[-1]) ** 2) / (2 * waves**2))
    white = np.fft.rfft2(rng.standard_normal(shape))
    return np.fft.irfft2(white * weight, shape[-2:]) / np.sqrt((full**2).mean())


def _draw(rng: np.random.Generator, layout: Layout, names: list[str], levels: int, shape: tuple[int, int]) -> tuple:
    """The predictable part of a start date: signal and sigma, (T, V, Z, Y, X) in the fields' own scale."""
    growth = 0.15 * (1 + np.asarray(layout.lead_hours) / 24)[:, None, None, None, None]
    signal = smooth(rng, (1, len(names), levels, *shape))
    drift = smooth(rng, (len(layout.lead_hours), len(names), levels, *shape))
    signal = np.sqrt(1 - 0.3**2) * signal + 0.3 * drift
    return signal, growth * np.exp(0.5 * np.tanh(signal))


def _values(
    rng: np.random.Generator,
    part: Part,
    drawn: tuple,
    bias: np.ndarray,
    members: int,
    dispersion: float,
    names: list[str],
) -> np.ndarray:
    signal, sigma = drawn
    count = members if part is Part.FORECAST else 1
    noise = smooth(rng, (count, *signal.shape))
    model = part is not Part.TRUTH
    values = signal + sigma * (noise * (dispersion if model else 1.0) + (bias if model else 0.0))
    for position, name in enumerate(names):
        centre, scale = SCALES.get(name, (0.0, 8.0))
        values[:, :, position] = centre + scale * values[:, :, position]
        values[:, :, position] = np.clip(values[:, :, position], *field(name).family.bounds)
    return values.astype(np.float32)
