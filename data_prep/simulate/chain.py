"""Run one model year: the nature run and the forecast cycles side by side.

Parts of the archive are written date by date. After each cycle its part and then the state of the year are renamed into
place, so a kill costs the cycle that is under way. A kill in the spin-up, or on the way to the next window, costs the
nature run since the last cycle. Each cycle has its own random generator (seed, year, number), so a resumed year writes
the same bytes as one that was never stopped.

Analysis errors and member perturbations are bred from the 48 h forecasts of the cycle before. The deviations of the
trajectories from their mean have grown in the last two days, so they are errors that fit the flow of the day (Toth and
Kalnay 1997, doi:10.1175/1520-0493(1997)125<3297:EFANAT>2.0.CO;2). A random rotation mixes them. It keeps their
covariance, and makes bred vectors that have become alike differ again. Each mixture is scaled to a given norm. One
mixture is the error of the analysis, and the others are the perturbations of the members around the analysis. So with
an inflation of 1, truth and members are draws from one distribution: spread and error agree at the start. The error of
the forecast model comes in addition.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from data_prep.simulate.archive import (
    GATE,
    STEPS,
    Cycle,
    Encoder,
    ModelYear,
    Stamp,
    forecast_messages,
    opened,
    valid_times,
)
from data_prep.simulate.model import BATCH, Atmosphere, Recipe
from data_prep.simulate.synthesis import (
    NORM_PLANE,
    Synthesis,
    bilinear,
    regular_grid,
    sigma_fields,
    surface_fields,
    to_pressure,
    truncate,
)
from ensemble_ml.config import SimulateConfig
from ensemble_ml.folders import draft_of, write_whole

STATIC_DATE = datetime(2000, 1, 1)  # stated in the files of static fields


@dataclass
class State:
    """The state of a model year before cycle `index`.

    Attributes:
        index: number of the cycle.
        day: days since 1970-01-01.
        nature: the state of the nature run, 1KML (see `data_prep.simulate.model`).
        rain: (1, Y, X) its rain of the last 24 h on its own grid, m.
        dev: NKML deviations of N trajectories from their mean, from which the next perturbations are bred.
    """

    index: int
    day: int
    nature: np.ndarray
    rain: np.ndarray
    dev: np.ndarray


class Weather:
    """A model, with the conversion of its states to fields on the archive's grid."""

    def __init__(self, recipe: Recipe, config: SimulateConfig):
        """Build the model of `recipe` and its tables. Nothing is compiled yet."""
        self.model = Atmosphere(recipe)
        self.facts = self.model.facts
        self.grid = regular_grid(config.rows, config.columns)
        self.levels = config.levels
        self._synthesis = Synthesis(recipe.truncation, *self.grid, self.facts.radius)
        self._land = self.from_gaussian(self.facts.land_yx)

    def from_gaussian(self, field_yx: np.ndarray) -> np.ndarray:
        """Interpolate fields (..., Y, X) of the model's own Gaussian grid to the archive's grid."""
        return bilinear(field_yx, (self.facts.latitude, self.facts.longitude), self.grid)

    def fields(self, x_nkml: np.ndarray, rain_nyx: np.ndarray) -> tuple[dict, dict]:
        """Convert the states of N trajectories and their rain (N, Y, X) in m on the model's own grid to fields.

        Returns:
            Fields on pressure levels (N, level, Y, X) and at the surface (N, Y, X), by name. Their units are those of
            `to_pressure` and `surface_fields`; `tp` is in m.
        """
        sigma = sigma_fields(x_nkml, self._synthesis, self.facts)
        surface = surface_fields(sigma, self._land, self.facts)
        return to_pressure(sigma, self.levels, self.facts), surface | {"tp": self.from_gaussian(rain_nyx)}

    def static(self) -> dict[str, np.ndarray]:
        """Return the model's orography (`orog`, m) and land fraction (`lsm`) on the archive's grid, (Y, X) each."""
        return {"orog": self._synthesis.scalar(self.facts.orography_ml), "lsm": self._land}


class Chain:
    """The cycles of one model year."""

    def __init__(self, config: SimulateConfig, year: ModelYear, nature: Weather, forecast: Weather):
        """Set up a year with the models of the nature run and of the forecasts.

        The models may serve several years of a process, which saves compiling them again.
        """
        self.config, self.year, self.nature, self.forecast = config, year, nature, forecast
        self.output = Path(config.output)
        self.encoder = Encoder(*nature.grid)
        self.trajectories = trajectories(config)
        self._state_file = self.output / ".parts" / str(year.year) / "state.npz"

    def run(self, progress: Callable[[str, bool], None]) -> None:
        """Run the cycles of the year that are missing; raise a FloatingPointError if a model blew up.

        `progress` receives a text, and whether another init time is complete that was not before.
        """
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        state = self._load()
        for index in range(state.index if state else 0, len(self.year.cycles)):
            cycle = self.year.cycles[index]
            if cycle.fresh:
                state = self._reach(cycle, index, state, progress)
            assert state is not None  # the first cycle of a year is fresh
            new = cycle.written and not self.year.part(self.output, cycle).exists()
            state = self._cycle(cycle, state)
            save(self._state_file, {**vars(state)})
            progress(f"{self.year.split} {cycle.start:%Y-%m-%d}", new)

    def _reach(self, cycle: Cycle, index: int, state: State | None, progress: Callable[[str, bool], None]) -> State:
        """Advance the nature run to the first day of a window, and return the state there.

        The first deviations are those of the nature run's last days from their mean: these days differ from each other
        as real weather does.
        """
        day = state.day if state else self.year.first_day
        x = state.nature if state else self.nature.model.rest(1000 * self.config.seed + self.year.year)[None]
        lagged: deque = deque(maxlen=self.trajectories)
        rain = np.zeros(0)  # of the last day; the loop below always sets it, because a window is at least a day away
        while day < cycle.day:
            x, rain = self.nature.model.advance(x, day)
            lagged.append(x[0])
            day += 1
            if (cycle.day - day) % 10 == 0:
                progress(f"{self.year.split} {self.year.year}: nature run, {cycle.day - day} days to the window", False)
        return State(index, day, x, rain, deviations(truncate(np.stack(lagged), self.config.forecast_truncation)))

    def _cycle(self, cycle: Cycle, state: State) -> State:
        """Perturb the truth, run forecasts and truth for two days, and return the next state.

        The fields are written if the cycle belongs to the archive.
        """
        # The generator depends only on seed, year and cycle, so a resumed year draws the same numbers.
        rng = np.random.default_rng([self.config.seed, self.year.year, state.index])
        truth = truncate(state.nature[0], self.config.forecast_truncation)
        amplitude = Amplitude(self.config.norm, self.config.inflation)
        starts = initial_states(truth, state.dev, self.trajectories, amplitude, rng)
        runs = _two_days(self.forecast.model, starts, cycle.day)
        truths = _two_days(self.nature.model, state.nature, cycle.day)
        # The rain of the 24 h before the start fell in the cycle before.
        truths[0] = (state.nature, state.rain)
        if cycle.written:
            self._write(cycle, runs, truths)
        return State(state.index + 1, cycle.day + len(STEPS) - 1, *truths[-1], deviations(runs[-1][0]))

    def _write(self, cycle: Cycle, runs: list, truths: list) -> None:
        """Encode the forecasts and the truth of a cycle as GRIB messages, and write them as one part."""
        members = self.config.members
        out: dict[str, list[bytes]] = {"ensemble_pl": [], "ensemble_sfc": []}
        fallen, upper = np.zeros(()), dict[str, np.ndarray]()
        for hours, (x, rain) in zip(STEPS, runs, strict=True):
            fallen = fallen + rain[:members]  # from the start of the forecast, as in ENS-10
            upper, surface = self.forecast.fields(x[:members], fallen)
            for m in range(members):
                stamp = Stamp(cycle.start, hours, m + 1, members)
                pl, sfc = forecast_messages(self.encoder, *_one(upper, surface, m), self.config.levels, stamp)
                out["ensemble_pl"].append(pl)
                out["ensemble_sfc"].append(sfc)
        arrays = {key: np.frombuffer(b"".join(value), np.uint8) for key, value in out.items()}
        # The check of realism looks at the last step, which `upper` holds now.
        arrays |= self._gate("mean", {k: v.mean(0) for k, v in upper.items()})
        arrays |= self._gate("variance", {k: v.var(0, ddof=1) for k, v in upper.items()})
        arrays |= self._truth(cycle, truths)
        save(self.year.part(self.output, cycle), arrays)

    def _truth(self, cycle: Cycle, truths: list) -> dict[str, np.ndarray]:
        """Encode the truth of each valid time, and add the fields of the last one for the check of realism.

        The last valid time is also the first of the next cycle of the window; `assemble` takes one of the two.
        """
        arrays: dict[str, np.ndarray] = {}
        for k, (x, rain) in enumerate(truths):
            upper, surface = self.nature.fields(x, rain)
            stamp = Stamp(valid_times(cycle)[k])
            pl, sfc = forecast_messages(self.encoder, *_one(upper, surface, 0), self.config.levels, stamp)
            arrays |= {f"truth_pl_{k}": np.frombuffer(pl, np.uint8), f"truth_sfc_{k}": np.frombuffer(sfc, np.uint8)}
        return arrays | self._gate("truth", {name: field[0] for name, field in upper.items()})

    def _gate(self, kind: str, upper: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the fields of one kind that the check of realism needs."""
        return {
            f"{name}_{kind}": upper[variable][self.config.levels.index(level)].astype(np.float32)
            for name, (variable, level) in GATE.items()
        }

    def _load(self) -> State | None:
        """Return the saved state of the year; None if no cycle is complete, or if a part of those before it is gone.

        The year then begins anew, because there is no way back to the state from which that part was made.
        """
        if not self._state_file.exists():
            return None
        with opened(self._state_file) as arrays:
            state = State(int(arrays["index"]), int(arrays["day"]), arrays["nature"], arrays["rain"], arrays["dev"])
        before = [cycle for cycle in self.year.cycles[: state.index] if cycle.written]
        return state if all(self.year.part(self.output, cycle).exists() for cycle in before) else None


def trajectories(config: SimulateConfig) -> int:
    """Return the number of trajectories that a forecast runs.

    It is at least one more than the members, and as many more as fill the last batch. The forecasts of the additional
    ones are not written, but their deviations count for breeding.
    """
    return -(-(config.members + 1) // BATCH) * BATCH


def _two_days(model: Atmosphere, x_nkml: np.ndarray, day: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the states at 0, 24 and 48 h, each with the rain of the day before. The rain at the start is zero."""
    first, rain = model.advance(x_nkml, day)
    second, more = model.advance(first, day + 1)
    return [(x_nkml, np.zeros_like(rain)), (first, rain), (second, more)]


def _one(upper: dict, surface: dict, member: int) -> tuple[dict, dict]:
    """Return the fields of one member."""
    return {k: v[member] for k, v in upper.items()}, {k: v[member] for k, v in surface.items()}


def write_static(weather: Weather, path: Path) -> None:
    """Write orography and land mask of a model to a file, completely or not at all."""
    encoder, fields = Encoder(*weather.grid), weather.static()
    write_whole(path, b"".join(encoder.encode(name, field, Stamp(STATIC_DATE)) for name, field in fields.items()))


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays to a file, completely or not at all. A file that exists is replaced in one step."""
    draft = draft_of(path)
    with open(draft, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy types its options, not the arrays
    os.replace(draft, path)


@dataclass(frozen=True)
class Amplitude:
    """The size of initial perturbations.

    `norm` is the root mean square of the analysis error, in K at sigma 0.835. `inflation` is the size of the members'
    perturbations divided by `norm`.
    """

    norm: float
    inflation: float = 1.0


def norm(x_nkml: np.ndarray) -> np.ndarray:
    """Return the root mean square over the sphere of temperature at sigma 0.835, in K, for each state (N,).

    The basis is orthonormal on the unit sphere, so the sum of squared coefficients over 4 pi is the mean square.
    """
    return np.sqrt((x_nkml[:, NORM_PLANE].astype(np.float64) ** 2).sum((-2, -1)) / (4 * np.pi))


def deviations(x_nkml: np.ndarray) -> np.ndarray:
    """Return the deviations of N trajectories from their mean, NKML."""
    return x_nkml - x_nkml.mean(0)


def rotation(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw an orthogonal matrix uniformly (Haar measure; Mezzadri 2007, Notices of the AMS 54, 592-604)."""
    q, r = np.linalg.qr(rng.standard_normal((count, count)))
    # The signs make the QR factorisation unique; without them the distribution would not be uniform.
    return q * np.sign(np.diag(r))


def mix(dev_nkml: np.ndarray, count: int, target: float, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` perturbations from the span of N deviations, each scaled to the norm `target` in K, float64 NKML.

    Raises:
        ValueError: a mixture is zero, so it cannot be scaled.
    """
    n = len(dev_nkml)
    weights = rotation(max(count, n), rng)[:count, :n]
    mixed = np.tensordot(weights, dev_nkml.astype(np.float64), axes=1)
    length = norm(mixed)
    if not length.all():
        raise ValueError("perturbations of length zero cannot be scaled")
    return mixed * (target / length)[:, None, None, None]


def initial_states(
    truth_kml: np.ndarray, dev_nkml: np.ndarray, count: int, amplitude: Amplitude, rng: np.random.Generator
) -> np.ndarray:
    """Return the `count` states that start a forecast, float32 NKML: truth - analysis error + perturbation.

    The truth is at the forecast model's truncation, and the deviations are those of the last cycle. The same `rng`
    gives the same states.

    Raises:
        ValueError: the deviations are all zero.
    """
    drawn = mix(dev_nkml, count + 1, amplitude.norm, rng)
    analysis = truth_kml - drawn[0]
    return (analysis + amplitude.inflation * drawn[1:]).astype(np.float32)
