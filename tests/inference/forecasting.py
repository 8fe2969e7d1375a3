"""A source in memory and a checkpoint of an untrained model, for the tests of `ensemble_ml.inference`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xarray as xr

from ensemble_ml.config import ModelConfig
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid
from ensemble_ml.models import Climate, EnsembleModel, ModelSpec, Speed, climate_shapes
from ensemble_ml.store import Fields, Layout, Part, Selection
from ensemble_ml.training.keeper import Snapshot, save_checkpoint

CENTRES = {"t": 250.0, "z": 5e4, "t2m": 280.0, "tp": 0.002, "fg10": 12.0, "ws10": 8.0, "tcc": 0.6}
SCALES = {"t": 8.0, "z": 900.0, "t2m": 8.0, "tp": 0.002, "fg10": 4.0, "ws10": 3.0, "tcc": 0.5}


class MemorySource:
    """A `Source` over arrays: pressure (D, M, T, V, Z, Y, X), surface (D, M, T, S, Y, X); a field of NaN is absent."""

    path = "memory"

    def __init__(self, layout: Layout, pressure: np.ndarray, surface: np.ndarray, lead_bounds=None, static=None):
        self.layout, self.pressure, self.surface = layout, pressure, surface
        self.lead_bounds, self.fields = lead_bounds or {}, static or {}
        self.reads: list[tuple[int, ...]] = []

    def has(self, part: Part) -> bool:
        return part is Part.FORECAST

    def read(self, part: Part, date: int, selection: Selection) -> Fields:
        assert part is Part.FORECAST
        lay = self.layout
        self.reads.append(selection.realization)
        members = [lay.realization.index(m) for m in selection.realization or lay.realization]
        leads = [lay.lead_hours.index(lead) for lead in selection.lead_hours or lay.lead_hours]
        upper = [lay.variables.index(v) for v in selection.variables or ()]
        levels = [lay.levels.index(z) for z in selection.levels or ()]
        flat = [lay.surface.index(v) for v in selection.surface or ()]
        return Fields(
            self.pressure[date][np.ix_(members, leads, upper, levels)], self.surface[date][np.ix_(members, leads, flat)]
        )

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(~np.isnan(x[date]).all((-2, -1)) for x in (self.pressure, self.surface))

    def static(self) -> dict[str, np.ndarray]:
        return self.fields

    def fingerprint(self) -> str:
        return "0123456789abcdef"


def make_grid(shape=(9, 16)) -> Grid:
    return Grid(np.linspace(90, -90, shape[0]), np.arange(shape[1]) * 360 / shape[1])


def make_source(
    *,
    dates=3,
    members=6,
    leads=(0, 24, 48),
    variables=("t", "z"),
    levels=(500, 850),
    surface=("t2m", "tp"),
    grid=None,
    seed=0,
) -> MemorySource:
    grid = grid or make_grid()
    rng = np.random.default_rng(seed)
    start = np.datetime64("2001-01-30T12", "ns") + np.arange(dates) * np.timedelta64(1, "D")
    numbers = tuple(range(1, members + 1))
    layout = Layout(start, numbers, tuple(leads), tuple(variables), tuple(levels), tuple(surface), grid)

    def draw(names, *depth):
        shape = (dates, members, len(leads), len(names), *depth, *grid.shape)
        values = rng.standard_normal(shape)
        for position, name in enumerate(names):
            at = (slice(None),) * 3 + (position,)
            values[at] = CENTRES[name] + SCALES[name] * values[at]
            values[at] = np.clip(values[at], *field(name).family.bounds)
        return values.astype(np.float32)

    flat = draw(surface)
    if "tp" in surface and 0 in leads:
        flat[:, :, leads.index(0), surface.index("tp")] = np.nan  # archives hold no rain over no time
    bounds = {"tp": [None if lead == 0 else [0, lead] for lead in leads]} if "tp" in surface else {}
    return MemorySource(layout, draw(variables, len(levels)), flat, bounds)


def make_spec(source: MemorySource, *, leads_out=(24, 48), static=(), **config) -> ModelSpec:
    lay = source.layout
    model = ModelConfig(**({"hidden": 8, "max_hidden": 8, "depth": 1} | config))
    levels = lay.levels if lay.variables else ()
    return ModelSpec(
        model,
        lay.variables,
        levels,
        lay.surface,
        lay.lead_hours,
        leads_out,
        lay.grid.latitude,
        lay.grid.longitude,
        static,
    )


def make_checkpoint(folder: Path, spec: ModelSpec, *, ranges: tuple[float, float] = (-6, 6), seed=1, **more) -> Path:
    """Random climate, head weights moved away from zero; `ranges` of the inputs in deviations around their centre."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in climate_shapes(spec).items():
        kind = "points" if name.startswith("points_") else name
        bounds = {"bias": (-0.2, 0.2), "inflation": (-0.3, 0.3), "static": (0, 1), "shrink": (1, 3)}
        bounds |= {"anchor": (-0.5, 0.5), "correction": (-0.01, 0.01)}
        bounds |= {"points": (-0.02, 0.02)}
        low, high = bounds.get(kind, (0.5, 2))
        arrays[name] = rng.uniform(low, high, shape).astype(np.float32)
        in_units = kind in ("mean", "std", "spread", "bias", "level_spread", "anchor")
        for position, (variable, _) in enumerate(spec.names if in_units else ()):
            at = (position,) if kind in ("mean", "std") else (slice(None), position)
            arrays[name][at] *= SCALES[variable]
            arrays[name][at] += CENTRES[variable] if kind in ("mean", "anchor") else 0
    torch.manual_seed(seed)
    model = EnsembleModel(spec, Climate(**arrays))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    limits = {name: [CENTRES[name] + x * SCALES[name] for x in ranges] for name in (*spec.variables, *spec.surface)}
    meta = {
        "spec": spec.to_json(),
        "config": {},
        "training_dates": ["2000-01-01T12:00", "2000-01-02T12:00"],
        "data_fingerprint": "feedfeedfeedfeed",
        "precision": Speed().to_json(),
        **more,
        "input_range": {
            name: pair if name in spec.surface else {str(level): pair for level in spec.levels}
            for name, pair in limits.items()
        },
    }
    return save_checkpoint(folder, Snapshot(7, model.state_dict(), {}, meta))


def opened(path):
    """A written forecast of its one start date, read whole."""
    with xr.open_dataset(path, decode_timedelta=True) as data:
        return data.isel(forecast_reference_time=0).load()
