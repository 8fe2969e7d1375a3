"""Lay out the init times of an archive. A split has model years, and a year has series of init times, 48 h apart."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from ensemble_ml.config import SimulateConfig

CYCLE_DAYS = 2
STEPS = (0, 24, 48)  # hours
_EPOCH = date(1970, 1, 1)


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
        """Return the file that holds the fields of a cycle until the archive is assembled.

        Args:
            output: folder of the archive.
            cycle: the cycle.
        """
        return output / ".parts" / str(self.year) / f"{cycle.start:%Y%m%d}.npz"

    def complete(self, output: Path) -> bool:
        """Return whether the parts of all cycles that are kept exist.

        Args:
            output: folder of the archive.
        """
        return all(self.part(output, cycle).exists() for cycle in self.written)


def when(day: int) -> datetime:
    """Return 0 UTC of a day, counted from 1970-01-01, as a datetime without a time zone."""
    return datetime.fromtimestamp(day * 86400, tz=UTC).replace(tzinfo=None)


def model_years(config: SimulateConfig) -> list[ModelYear]:
    """Lay out all years of an archive: training years first, then validation, then test."""
    splits = [("train", config.train_years, config.train_dates)]
    splits += [
        ("validation", config.validation_years, config.validation_dates),
        ("test", config.test_years, config.test_dates),
    ]
    longest = max(dates for _, _, dates in splits)
    years = [(split, dates) for split, count, dates in splits for _ in range(count)]
    return [_model_year(config, config.first_year + k, split, dates, longest) for k, (split, dates) in enumerate(years)]


def _model_year(config: SimulateConfig, year: int, split: str, dates: int, longest: int) -> ModelYear:
    """Return one year of a split.

    Args:
        config: settings of the archive.
        year: the model year.
        split: train, validation or test.
        dates: number of init times to keep in each window.
        longest: the largest `dates` of all splits.
    """
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
