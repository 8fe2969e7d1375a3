"""Draw the picture of README.md from a finished quickstart: mean and spread of a forecast, truth and full spread.

    python scripts/readme_picture.py [runs/quickstart] [DATE]

It shows 850 hPa temperature 48 hours after the init time DATE, and is written to docs/pictures/forecast.png.
"""

import sys
from pathlib import Path

import numpy as np
import xarray as xr

import ensemble_ml as eml
from ensemble_ml.grid import canonical
from ensemble_ml.verification.plots import draw_map, new_figure

TARGET = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "forecast.png"
LEAD = 48  # hours


def main(run: Path, date: str | None) -> None:
    """Draw the four maps of one date; None takes the first forecast."""
    files = sorted((run / "forecast").glob(f"forecast_{date or ''}*.nc"))
    forecast = xr.open_dataset(files[0], decode_timedelta=True).squeeze("forecast_reference_time")
    at = {"forecast_period": np.timedelta64(LEAD, "h"), "level": 850}
    mean, spread = forecast["t_mean"].sel(at), forecast["t_ensemble_spread"].sel(at)
    store = eml.open(f"{run}-data/store.zarr").sel(
        init_time=forecast["forecast_reference_time"].values, lead_time=np.timedelta64(LEAD, "h"), level=850
    )
    panels = {
        "predicted mean, from 5 members": mean.values - 273.15,
        "what came": store["t_truth"].values - 273.15,
        "predicted spread, from 5 members": spread.values,
        "spread of all ten members": store["t"].std("realization", ddof=1).values,
    }
    grid = canonical(store["latitude"].values, store["longitude"].values)[0]
    figure, axes = new_figure(9.6, 5.2, rows=2, columns=2)
    for number, (title, values) in enumerate(panels.items()):
        axis = axes[number // 2, number % 2]
        limits = [panels[name] for name in list(panels)[number // 2 * 2 :][:2]]
        low, high = min(float(one.min()) for one in limits), max(float(one.max()) for one in limits)
        colours = {"cmap": "RdYlBu_r" if number < 2 else "viridis", "vmin": low, "vmax": high}
        mesh = draw_map(axis, values, grid, store["lsm"].values, title, **colours)
        figure.colorbar(mesh, ax=axis, shrink=0.8, label="°C" if number < 2 else "K")
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=100)
    print(f"-> {TARGET}, of {files[0].name}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0] if given else "runs/quickstart"), given[1] if len(given) > 1 else None)
