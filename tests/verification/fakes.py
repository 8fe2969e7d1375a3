"""Forecasts made up for the tests: written by the real writer, with numbers of the test's own choosing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stores import make_store

from ensemble_ml.config import EvaluateConfig
from ensemble_ml.inference import Header, Kind, Output, Places, file_name, write_forecast
from ensemble_ml.store import Part, TensorStore
from ensemble_ml.verification import evaluate

TRAIN, TEST = list(range(12)), list(range(12, 30))
FEW = TEST[:6]  # where an evaluation shows what it reads, not how good it finds it
DATES = [str(np.datetime64(year, "D") + 3 * i) for year, n in (("2001", 12), ("2003", 18)) for i in range(n)]
Numbers = dict[Kind, np.ndarray]
Rule = Callable[[str, np.ndarray], Numbers]


def corrected(shift: float = 0.0, inflate: float = 1.0, members: int = 5) -> Rule:
    """N((1 + ...) m + shift, inflate^2 (1 + 1/M) s^2) of the first members, and the size-corrected spread."""

    def rule(name: str, members_m: np.ndarray) -> Numbers:
        given = members_m[:members]
        mean, spread = given.mean(0), given.std(0, ddof=1)
        scale = inflate * np.sqrt(1 + 1 / members) * spread
        return {
            Kind.MEAN: mean + shift, Kind.STDDEV: scale, Kind.LOCATION: mean + shift, Kind.SCALE: scale,
            Kind.SPREAD: 1.035 * spread,
        }  # fmt: skip

    return rule


def write_forecasts(
    folder: Path,
    store: TensorStore,
    dates: list[int],
    rule: Rule,
    *,
    leads: tuple[int, ...] = (24, 48),
    names: tuple[str, ...] | None = None,
    train: list[int] = (),
    members_in: str = "1 2 3 4 5",
    rows: slice = slice(None),
    lead_bounds: dict[str, list] | None = None,
    **more: str,
) -> Path:
    """Forecasts of `dates` (indices into the store's start dates), one file each."""
    layout, steps = store.layout, [store.layout.lead_hours.index(lead) for lead in leads]
    grid = layout.grid
    latitude = grid.latitude[rows]
    y, x = len(latitude), len(grid.longitude)
    places = Places(np.arange(y), np.arange(x), latitude, grid.longitude, None)
    trained = " ".join(str(layout.init_time[date])[:19] for date in train)
    attributes = {"members_in": members_in, "training_dates": trained, "title": "made up", **more}
    for date in dates:
        fields = store.read(Part.FORECAST, date)
        outputs = []
        for name in names or layout.names:
            if name in layout.variables:
                values = fields.pressure[:, steps, layout.variables.index(name)]
            else:
                values = fields.surface[:, steps, layout.surface.index(name)]
            numbers = rule(name, values.astype(np.float64))
            outputs += [Output(name, kind, value[..., rows, :]) for kind, value in numbers.items()]
        many = next((value.shape[0] for o in outputs if o.kind is Kind.MEMBER for value in [o.values]), 0)
        members = tuple(range(1, many + 1))
        header = Header(
            layout.init_time[date], leads, layout.levels, places, members=members, lead_bounds=lead_bounds or {},
            attributes=attributes,
        )  # fmt: skip
        write_forecast(folder / file_name(layout.init_time[date]), header, outputs)
    return folder


def known_store(path: Path) -> TensorStore:
    """Under-dispersive and biased; 12 dates to fit on, 18 to test on."""
    return make_store(
        path,
        dates=DATES,
        members=10,
        variables=("t", "q"),
        levels=(500, 850),
        surface=("tp",),
        bias=0.6,
        dispersion=0.7,
    )


def known_forecast(folder: Path, store: TensorStore, test: list[int] = TEST) -> Path:
    """Wider than raw by what the ensemble lacks; also made for two dates of training."""
    made = {"source": "ensemble_ml 0.1.0, runs/a (unet3d, step 7), from x.zarr", "checkpoint_sha256": "0123abcd" * 8}
    return write_forecasts(folder, store, TRAIN[-2:] + test, corrected(inflate=1 / 0.7), train=TRAIN, **made)


def settings(forecast: Path | list[str], store: TensorStore, output: Path, **kw: Any) -> EvaluateConfig:
    """Few draws, unless told."""
    given = forecast if isinstance(forecast, list) else str(forecast)
    return EvaluateConfig(forecast=given, ensemble=store.path, output=str(output), **({"bootstrap": 100} | kw))


def scores_of(
    forecast: Path | list[str], store: TensorStore, output: Path, source: Any = None, **kw: Any
) -> dict[str, Any]:
    """Evaluate forecasts against `source`, or the store, and return what scores.json holds."""
    folder = evaluate(settings(forecast, store, output, **kw), store if source is None else source)
    return json.loads((folder / "scores.json").read_text())


def entry(content: dict, entrant: str, variable: str, level: int | None, lead: int = 48) -> dict:
    """What scores.json says of one field of an entrant."""
    wanted = {"entrant": entrant, "variable": variable, "level": level, "lead_hours": lead}
    return next(row for row in content["scores"] if all(row[k] == v for k, v in wanted.items()))
