"""The archive of a simulation: its init times, its GRIB files in ENS-10's layout, and the realism of its errors.

A split of the archive has model years, and a year has series of init times, 48 h apart. The archive is assembled from
parts, each of which holds one init time. In ENS-10's layout, a file holds one calendar date of all years. GRIB is
encoded as in ECMWF's reforecasts: edition 1, 16-bit simple packing, `pf` for members, `an` for the truth.

The errors of the simulated ensemble should be like those of operational ensembles, which are mildly under-dispersive
and biased. With an ensemble that is far from that, any post-processing looks good. The figures of its realism are for
one lead, over all init times of the archive, weighted with exact cell areas.

The error of the forecast model (`MODEL_ERROR`) was tuned on the limits of realism alone, and was frozen before any
training. The values were found on one window of 12 init times (January and February of a model year that no archive
contains), at 48 h and T31:

    changed                                              norm    spread/skill   bias^2, %     correlation
    trcnv 7, entmax 0.45, trlsc 5, cds 1.1e-3,           0.40 K  1.15, 1.16     3.0, 2.4      0.41, 0.48
      cdl 2.7e-3, epslw 0.06, trshc 7
    the values below                                     0.35 K  0.90, 0.85     5.1, 6.2      0.36, 0.45

The norm is that of the analysis error (`data_prep.simulate.chain`). The other columns give z500, then t850: `bias^2`
is the share of the mean squared error that is squared bias, without sampling noise, and the correlation is that of
spread and absolute error. The model of the first row is too good: its ensemble is over-dispersive. At T21 the
truncation dominates: bias^2 is 13 % with either set of values, and perturbations of 0.35 K are far too small.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data_prep.simulate.synthesis import regular_grid
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.folders import draft_of, write_whole
from ensemble_ml.grid import Grid

CYCLE_DAYS = 2  # from one init time to the next
STEPS = (0, 24, 48)  # hours
_EPOCH = date(1970, 1, 1)
GATE = {"z500": ("z", 500), "t850": ("t", 850)}  # fields whose realism is checked: variable and level in hPa
SPREAD_SKILL = (0.7, 1.0)  # lowest and highest spread/skill
LARGEST_BIAS = 0.15  # share of the mean squared error that is squared bias
SMALLEST_CORRELATION = 0.2  # of spread and absolute error
# Files with orography and land mask: of the truth's model, then of the forecast's, which has another orography.
STATIC = ("static.grib", "forecast_static.grib")
PARAM_ID = {  # ECMWF's, by short names of the registry
    "t": 130, "z": 129, "u": 131, "v": 132, "q": 133, "w": 135, "d": 155,
    "sp": 134, "msl": 151, "t2m": 167, "u10": 165, "v10": 166, "tp": 228,
    "orog": 228002, "lsm": 172,
}  # fmt: skip
# Changed values of SPEEDY's parameters, by group; everything else is as in the nature run.
MODEL_ERROR: dict[str, dict[str, float]] = {
    "convection": {
        "trcnv": 9.0,  # hours in which deep convection relaxes a column (nature: 6)
        "entmax": 0.35,  # largest entrainment, as a share of cloud-base mass flux (0.5)
        "smf": 0.65,  # secondary over primary mass flux (0.8)
    },
    "condensation": {"trlsc": 7.0},  # hours in which large-scale condensation removes supersaturation (4)
    "surface_flux": {
        "cds": 1.3e-3,  # drag coefficient over sea (1.0e-3)
        "cdl": 3.2e-3,  # drag coefficient over land (2.4e-3)
    },
    "mod_radcon": {"epslw": 0.08},  # share of the longwave spectrum that only the boundary layer sees (0.05)
    "vertical_diffusion": {
        "trshc": 9.0,  # relaxation time of shallow convection, hours (6)
        "trvdi": 36.0,  # relaxation time of moisture diffusion, hours (24)
    },
}


def assemble(output: Path, years: list[ModelYear]) -> None:
    """Write ensemble/, truth/ and the static files from the parts. Each file appears only when it is complete."""
    starts: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    truths: dict[datetime, tuple[Path, int]] = {}
    for year in years:
        for cycle in year.written:
            part = year.part(output, cycle)
            starts[f"{cycle.start:%m%d}"].append((part, 0))
            # A cycle ends at the valid time at which the next one begins. The truth is the same in both parts.
            truths |= {time: (part, k) for k, time in enumerate(valid_times(cycle))}
    by_date: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for time in sorted(truths):
        by_date[f"{time:%m%d}"].append(truths[time])
    for kind in ("pl", "sfc"):
        for name, parts in starts.items():
            _join(output / "ensemble" / f"{kind}_{name}.grib", [(part, f"ensemble_{kind}") for part, _ in parts])
        for name, parts in by_date.items():
            _join(output / "truth" / f"{kind}_{name}.grib", [(part, f"truth_{kind}_{k}") for part, k in parts])
    for name in STATIC:
        write_whole(output / name, (output / ".parts" / name).read_bytes())


def _join(path: Path, pieces: list[tuple[Path, str]]) -> None:
    """Write the messages of several parts to one file, in one step."""
    path.parent.mkdir(exist_ok=True)
    # Two machines may write the same file at once, so each has its own draft. Drafts of killed runs are removed with
    # the parts.
    draft = draft_of(path.parent.parent / ".parts" / path.name)
    with open(draft, "wb") as file:
        for part, key in pieces:
            with opened(part) as arrays:
                file.write(arrays[key].tobytes())
    os.replace(draft, path)


@contextmanager
def opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open a file of arrays of the archive in the making for the duration of a `with` block.

    Raises:
        UserError: the file is damaged, as it may be after a failure of power.
        OSError: it is not there, or cannot be read.
    """
    try:
        with np.load(path) as arrays:
            yield arrays
    except (BadZipFile, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it, and run the same command again") from error


def realism(output: Path, years: list[ModelYear], config: SimulateConfig) -> dict[str, Realism]:
    """Measure the realism of each field in `GATE` at 48 h over all dates of the archive."""
    parts = [year.part(output, cycle) for year in years for cycle in year.written]
    grid = Grid(*regular_grid(config.rows, config.columns))
    figures = {}
    for name in GATE:
        stacks: dict[str, list[np.ndarray]] = {kind: [] for kind in ("mean", "variance", "truth")}
        for part in parts:
            with opened(part) as arrays:
                for kind, stack in stacks.items():
                    stack.append(arrays[f"{name}_{kind}"])
        mean, variance, truth = (np.stack(stack) for stack in stacks.values())
        figures[name] = measure(mean, variance, truth, config.members, grid)
    return figures


@dataclass(frozen=True)
class Cycle:
    """An init time, from which forecast and truth run for `CYCLE_DAYS`."""

    day: int  # since 1970-01-01
    fresh: bool  # whether its perturbations come from earlier days of the nature run, not from the cycle before
    written: bool  # whether its forecasts are in the archive; else it only lets the perturbations grow

    @property
    def start(self) -> datetime:
        """Return the init time, at 0 UTC."""
        return when(self.day)


@dataclass(frozen=True)
class ModelYear:
    """A year of one split: a nature run that is spun up from rest, and its cycles."""

    year: int
    split: str
    cycles: tuple[Cycle, ...]
    spin_up_days: int

    @property
    def first_day(self) -> int:
        """Return the day on which the nature run starts from rest, since 1970-01-01."""
        return self.cycles[0].day - self.spin_up_days

    @property
    def written(self) -> list[Cycle]:
        """Return the cycles whose forecasts are kept."""
        return [cycle for cycle in self.cycles if cycle.written]

    def part(self, output: Path, cycle: Cycle) -> Path:
        """Return the file that holds the fields of a cycle until the archive in the folder `output` is assembled."""
        return output / ".parts" / str(self.year) / f"{cycle.start:%Y%m%d}.npz"

    def complete(self, output: Path) -> bool:
        """Return whether the parts of all cycles that are kept exist in the folder `output` of the archive."""
        return all(self.part(output, cycle).exists() for cycle in self.written)


def when(day: int) -> datetime:
    """Return 0 UTC of a day, counted from 1970-01-01, as a datetime without a time zone."""
    return datetime.fromtimestamp(day * 86400, tz=UTC).replace(tzinfo=None)


def model_years(config: SimulateConfig) -> list[ModelYear]:
    """Lay out all years of an archive: training years first, then validation, then test."""
    splits = [
        ("train", config.train_years, config.train_dates),
        ("validation", config.validation_years, config.validation_dates),
        ("test", config.test_years, config.test_dates),
    ]
    longest = max(dates for _, _, dates in splits)
    years = [(split, dates) for split, count, dates in splits for _ in range(count)]
    return [_model_year(config, config.first_year + k, split, dates, longest) for k, (split, dates) in enumerate(years)]


def _model_year(config: SimulateConfig, year: int, split: str, dates: int, longest: int) -> ModelYear:
    """Return one year of a split, with `dates` init times in each window; `longest` is the most that any split has."""
    cycles: list[Cycle] = []
    for window in config.windows:
        month, day = (int(part) for part in window.split("-"))
        # A split with fewer dates takes the middle of the window, so that all splits have the same mean season.
        first = (date(year, month, day) - _EPOCH).days + (longest - dates) // 2 * CYCLE_DAYS
        first -= config.warm_up_cycles * CYCLE_DAYS
        for k in range(config.warm_up_cycles + dates):
            cycles.append(Cycle(first + k * CYCLE_DAYS, fresh=k == 0, written=k >= config.warm_up_cycles))
    return ModelYear(year, split, tuple(cycles), config.spin_up_days)


def valid_times(cycle: Cycle) -> list[datetime]:
    """Return the valid times of a cycle at `STEPS`."""
    return [cycle.start + timedelta(hours=hours) for hours in STEPS]


@dataclass(frozen=True)
class Realism:
    """The figures of one field (see `measure`), which are compared with the limits."""

    dates: int
    members: int
    rmse: float  # of the ensemble mean, in the field's units
    spread: float  # sqrt(mean((M + 1) / M s^2)), in the field's units
    spread_skill: float
    raw_bias_share: float  # squared bias over the mean squared error
    bias_share: float  # the same without sampling noise
    correlation: float

    @property
    def misses(self) -> list[str]:
        """Return the limits that the ensemble misses, in words; empty if it passes. A NaN misses its limit."""
        low, high = SPREAD_SKILL
        found = []
        if not low <= self.spread_skill <= high:
            found.append(f"spread/skill {self.spread_skill:.3f} outside {low}-{high}")
        if not self.raw_bias_share <= LARGEST_BIAS:
            found.append(f"bias^2 {self.raw_bias_share:.1%} of the error, above {LARGEST_BIAS:.0%}")
        if not self.correlation >= SMALLEST_CORRELATION:
            found.append(f"spread-error correlation {self.correlation:.2f} below {SMALLEST_CORRELATION}")
        return found

    def as_dict(self) -> dict:
        """Return the figures, and whether they are within the limits, as archive.json stores them."""
        return asdict(self) | {"passes": not self.misses, "misses": self.misses}


def measure(mean_byx: np.ndarray, variance_byx: np.ndarray, truth_byx: np.ndarray, members: int, grid: Grid) -> Realism:
    """Measure the realism of one field from the ensemble mean, the members' variance (ddof = 1) and the truth.

        spread/skill = sqrt(mean((M + 1) / M s^2)) / RMSE of the ensemble mean

        M  number of members
        s  spread of the members, ddof = 1

    Source: Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1. The arrays are (init time, Y, X). The bias is each
    point's mean error. Its square contains the sampling noise of a mean over n init times, var / n, if they are
    independent; `bias_share` leaves it out. The correlation is that of spread and absolute error over all points and
    init times, after each point's means are removed.

    Returns:
        The figures. `bias_share` is NaN for a single init time, and `spread_skill` and both shares of the bias if the
        error is zero. The correlation is 0 if spread or error does not vary from init time to init time.
    """
    weight_yx = grid.area_weights() / np.prod(grid.shape)
    error = mean_byx.astype(np.float64) - truth_byx
    spread = np.sqrt(variance_byx.astype(np.float64))
    n = len(error)
    area = lambda x_yx: float((x_yx * weight_yx).sum())  # noqa: E731
    mse = area((error**2).mean(0))
    bias = area(error.mean(0) ** 2)
    noise = area(error.var(0, ddof=1)) / n if n > 1 else np.nan
    variance = area((spread**2).mean(0)) * (members + 1) / members
    # Each point's means are removed, because the geography of spread and error alone would correlate them.
    a, b = spread - spread.mean(0), np.abs(error) - np.abs(error).mean(0)
    scale = np.sqrt(area((a**2).mean(0)) * area((b**2).mean(0)))
    return Realism(
        dates=n,
        members=members,
        rmse=float(np.sqrt(mse)),
        spread=float(np.sqrt(variance)),
        spread_skill=float(np.sqrt(variance / mse)) if mse else float("nan"),
        raw_bias_share=bias / mse if mse else float("nan"),
        bias_share=max(bias - noise, 0.0) / mse if mse else float("nan"),
        correlation=area((a * b).mean(0)) / scale if scale else 0.0,
    )


def report(figures: dict[str, Realism]) -> list[str]:
    """Return one line for each field, for the terminal."""
    lines = []
    for name, r in figures.items():
        verdict = "passes" if not r.misses else "misses: " + "; ".join(r.misses)
        lines.append(
            f"realism {name} 48 h, {r.dates} dates: spread/skill {r.spread_skill:.2f}, bias^2 {r.raw_bias_share:.1%} "
            f"({r.bias_share:.1%} without sampling noise), spread-error correlation {r.correlation:.2f} - {verdict}"
        )
    return lines


@dataclass(frozen=True)
class Stamp:
    """The time and the member of a field, which is valid at `start` plus `hours`."""

    start: datetime
    hours: int = 0
    member: int | None = None  # None for an analysis
    members: int = 0  # size of the ensemble
    since: int | None = None  # hours after `start` at which an accumulation begins; None for an instantaneous field


@dataclass
class Encoder:
    """An encoder for fields on one regular grid, given by its latitudes and longitudes in degrees.

    It keeps ecCodes' handles, because to make one takes longer than to fill it.
    """

    latitude: np.ndarray
    longitude: np.ndarray
    _handles: dict[tuple, int] = field(default_factory=dict, repr=False)

    def encode(self, name: str, values_yx: np.ndarray, stamp: Stamp, level: int | None = None) -> bytes:
        """Return one GRIB message of a field (Y, X), north to south, in the registry's units.

        `name` is a key of `PARAM_ID`. `level` is in hPa, or None at the surface.
        """
        import eccodes  # an extra: a missing jcm is to be named first

        handle = self._handle(name, stamp, level)
        eccodes.codes_set(handle, "dataDate", int(stamp.start.strftime("%Y%m%d")))
        eccodes.codes_set(handle, "dataTime", stamp.start.hour * 100)
        if stamp.member is not None:
            eccodes.codes_set(handle, "number", stamp.member)
        steps = str(stamp.hours) if stamp.since is None or stamp.hours == 0 else f"{stamp.since}-{stamp.hours}"
        eccodes.codes_set(handle, "stepRange", steps)
        # A constant field sets the handle to zero bits, with which the next field would lose its values.
        if eccodes.codes_get(handle, "bitsPerValue") != 16:
            eccodes.codes_set(handle, "bitsPerValue", 16)
        eccodes.codes_set_values(handle, np.ascontiguousarray(values_yx, np.float64).ravel())
        return eccodes.codes_get_message(handle)

    def _handle(self, name: str, stamp: Stamp, level: int | None) -> int:
        """Return the handle for messages of this kind, made at the first use."""
        accumulated = stamp.since is not None and stamp.hours > 0
        key = (name, level, stamp.member is None, stamp.members, accumulated)
        if key not in self._handles:
            self._handles[key] = self._template(name, stamp, level, accumulated)
        return self._handles[key]

    def _template(self, name: str, stamp: Stamp, level: int | None, accumulated: bool) -> int:
        """Return a new handle with all keys that do not change between messages of this kind."""
        import eccodes

        sample = "regular_ll_sfc_grib1" if level is None else "regular_ll_pl_grib1"
        handle = eccodes.codes_grib_new_from_samples(sample)
        keys = self._grid_keys() | self._mars_keys(stamp) | {"paramId": PARAM_ID[name], "bitsPerValue": 16}
        if level is not None:
            keys |= {"level": level}
        if accumulated:
            keys |= {"timeRangeIndicator": 4}
        for key, value in keys.items():
            eccodes.codes_set(handle, key, value)
        return handle

    def _grid_keys(self) -> dict[str, float | int]:
        """Return the keys of section 2 for the grid."""
        lat, lon = self.latitude, self.longitude
        return {
            "Ni": len(lon),
            "Nj": len(lat),
            "latitudeOfFirstGridPointInDegrees": float(lat[0]),
            "latitudeOfLastGridPointInDegrees": float(lat[-1]),
            "longitudeOfFirstGridPointInDegrees": float(lon[0]),
            "longitudeOfLastGridPointInDegrees": float(lon[-1]),
            "iDirectionIncrementInDegrees": float(lon[1] - lon[0]),
            "jDirectionIncrementInDegrees": float(lat[0] - lat[1]),
        }

    @staticmethod
    def _mars_keys(stamp: Stamp) -> dict[str, str | int]:
        """Return the keys of ECMWF's local section: ensemble members, or analyses for the truth."""
        keys: dict[str, str | int] = {
            "centre": "ecmf",
            "setLocalDefinition": 1,
            "localDefinitionNumber": 1,
            "experimentVersionNumber": "jcm3",
        }
        if stamp.member is None:
            return keys | {"stream": "oper", "dataType": "an"}
        return keys | {"stream": "enfo", "dataType": "pf", "numberOfForecastsInEnsemble": stamp.members}


def forecast_messages(
    encoder: Encoder, upper: dict[str, np.ndarray], surface: dict[str, np.ndarray], levels: list[int], stamp: Stamp
) -> tuple[bytes, bytes]:
    """Encode the fields of one state into GRIB messages: those on pressure levels, and those at the surface.

    The fields are (level, Y, X) in `upper` and (Y, X) in `surface`, by short name. `levels` are in hPa.
    """
    pl = [encoder.encode(n, x[k], stamp, level) for n, x in upper.items() for k, level in enumerate(levels)]
    sfc = [encoder.encode(n, x, stamp) for n, x in surface.items() if n != "tp"]
    if "tp" in surface:
        sfc.append(encoder.encode("tp", surface["tp"], accumulation(stamp)))
    return b"".join(pl), b"".join(sfc)


def accumulation(stamp: Stamp) -> Stamp:
    """Return the stamp of precipitation, which is counted from the start of a forecast.

    In the truth it is counted from 24 h before the valid time.
    """
    if stamp.member is None:
        return Stamp(stamp.start - timedelta(hours=24), 24, since=0)
    return replace(stamp, since=0)
