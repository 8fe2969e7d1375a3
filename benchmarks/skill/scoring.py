"""Score the forecasts on the test dates, together with the raw ensemble and its corrections, one step after another.

Axes: D init time, M member, T lead, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import netCDF4
import numpy as np

from benchmarks.skill.table import Table
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.inference import file_name
from ensemble_ml.store import TensorStore
from ensemble_ml.store.climate import ModelClimate
from ensemble_ml.store.source import Part
from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.bootstrap import blocks_of
from ensemble_ml.verification.families import location_of_mean
from ensemble_ml.verification.heights import Heights
from ensemble_ml.verification.probability import bin_of, pit
from ensemble_ml.verification.samples import Group, held_out_error, held_out_spread, on_truths_ground, read_group
from ensemble_ml.verification.scoring import extreme_forecast_index
from ensemble_ml.verification.statistics import c4, crps, crps_members, ensemble_moments

EXTREME = 0.7  # |EFI| above which a forecast counts as extreme
BINS = 10
CHANCE = "chance"  # label of the error that remains even if the distribution of the members is known


@dataclass(frozen=True, eq=False)
class Data:
    """The data that is scored.

    Attributes:
        store: the tensor store.
        train: indices of the training dates.
        test: indices of the test dates.
        members: size of the reduced ensemble.
        seasons: cache of the model climate.
        heights: orographies of model and truth, or None if they are not known.
    """

    store: TensorStore
    train: np.ndarray
    test: np.ndarray
    members: int
    seasons: dict[int, np.ndarray] = field(default_factory=dict)
    heights: Heights | None = None

    @property
    def full(self) -> int:
        """Return N, the size of the full ensemble."""
        return len(self.store.layout.realization)

    def read(self, part: Part, date: int, group: Group) -> np.ndarray:
        """Return the fields of a group at one init time, (M, Z, Y, X) float64. For the truth, M is 1.

        Args:
            part: forecast or truth.
            date: index of the init time.
            group: the fields.
        """
        return read_group(self.store, part, int(date), group)

    def raw(self, date: int, group: Group, members: np.ndarray) -> np.ndarray:
        """Return members of an init time, corrected to the orography of the truth.

        Args:
            date: index of the init time.
            group: the fields.
            members: (M, Z, Y, X).
        """
        return on_truths_ground(self.store, self.heights, group, int(date), members)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The fits of one group to the training dates, and a mask of extreme points on the test dates.

    Attributes:
        correction: corrections of the reduced ensemble.
        spread: regression of the full ensemble's spread.
        held_out: regression of the held-out members' spread, or None.
        extreme: (D, Z, Y, X) whether |EFI| of the full ensemble is above `EXTREME`.
    """

    correction: base.Correction
    spread: base.SpreadFit
    held_out: base.SpreadFit | None
    extreme: np.ndarray


def groups_of(store: TensorStore, leads: tuple[int, ...]) -> tuple[tuple[Group, ...], tuple[Column, ...]]:
    """Return the groups of fields that are read together, and the columns in the same order.

    A group is one variable at one lead.

    Args:
        store: the tensor store.
        leads: lead times in hours.
    """
    layout = store.layout
    groups: list[Group] = []
    columns: list[Column] = []
    for lead in leads:
        for name, levels in [(v, layout.levels) for v in layout.variables] + [(s, (None,)) for s in layout.surface]:
            groups.append(Group(name, lead, tuple(levels), slice(len(columns), len(columns) + len(levels))))
            columns += [Column(lead, name, level) for level in levels]
    return tuple(groups), tuple(columns)


def fit(data: Data, group: Group) -> Fitted:
    """Fit the corrections of one group, and find the points that are extreme on the test dates.

    Args:
        data: the store and its dates.
        group: the fields.
    """
    grid = data.store.layout.grid
    shape = (len(group.levels), *grid.shape)
    halves = blocks_of(data.store.layout.init_time[data.train], 10) % 2
    errors, spreads, held = base.CellSums.zeros(shape), base.CellSums.zeros(shape), None
    every = np.ones(shape, bool)
    for date, half in zip(data.train.tolist(), halves.tolist(), strict=True):
        members = data.read(Part.FORECAST, date, group)
        truth = data.read(Part.TRUTH, date, group)[0]
        raw = ensemble_moments(data.raw(date, group, members)[: data.members])
        errors.record(half, base.error_terms(*raw, truth), np.isfinite(truth))
        variance = ensemble_moments(members[: data.members])[1]
        held = held_out_spread(members, data.members)
        full = np.sqrt(ensemble_moments(members)[1])
        spreads.record(half, base.spread_terms(np.sqrt(variance), full, held), every)
    area = grid.area_weights()
    corrections = base.fit_corrections(errors, area)
    regressed = None if held is None else base.fit_spread(spreads, area, "h")
    return Fitted(corrections["shrunk"], base.fit_spread(spreads, area), regressed, _extremes(data, group))


def _extremes(data: Data, group: Group) -> np.ndarray:
    """Return where |EFI| of the full ensemble is large on the test dates, (D, Z, Y, X) bool."""
    found = np.zeros((len(data.test), len(group.levels), *data.store.layout.grid.shape), bool)
    if len(np.unique(data.store.layout.init_time.astype("datetime64[Y]"))) < 2:
        return found  # a model climate needs members of other years
    climate = ModelClimate(data.store, seasons=data.seasons)
    for position, date in enumerate(data.test.tolist()):
        index = extreme_forecast_index(climate, group, date, data.read(Part.FORECAST, date, group))
        if index is not None:
            found[position] = np.abs(index) > EXTREME
    return found


def score(
    data: Data, groups: tuple[Group, ...], columns: int, forecasts: Mapping[str, Path], extremes: Set[str],
    calibration: Set[str],
) -> Table:  # fmt: skip
    """Score forecasts on all test dates.

    Args:
        data: the store and its dates.
        groups: the fields.
        columns: number of columns.
        forecasts: folders of forecasts by label.
        extremes: labels that are also scored where the ensemble is extreme.
        calibration: labels whose dispersion and PIT are measured.
    """
    table = Table(len(data.test), columns)
    fitted = [fit(data, group) for group in groups]
    for position, date in enumerate(data.test):
        name = file_name(data.store.layout.init_time[date])
        files = {label: netCDF4.Dataset(folder / name) for label, folder in forecasts.items()}
        try:
            for group, known in zip(groups, fitted, strict=True):
                _Scorer(data, table, position, group, known).run(int(date), files, extremes, calibration)
        finally:
            for file in files.values():
                file.close()
    return table


class _Scorer:
    """The scoring of one group on one test date."""

    def __init__(self, data: Data, table: Table, position: int, group: Group, fitted: Fitted):
        self.data, self.table, self.position, self.group, self.fitted = data, table, position, group, fitted
        self.area = data.store.layout.grid.area_weights()

    def run(
        self, date: int, files: Mapping[str, netCDF4.Dataset], extremes: Set[str], calibration: Set[str]
    ) -> None:  # fmt: skip
        members = self.data.read(Part.FORECAST, date, self.group)
        truth = self.data.read(Part.TRUTH, date, self.group)[0]
        weight = np.where(np.isfinite(truth), self.area, 0.0)
        truth = np.where(np.isfinite(truth), truth, 0.0)
        extreme = weight * self.fitted.extreme[self.position]
        raw = self.data.raw(date, self.group, members)
        for label, family, location, scale in self._raw(raw):
            score = crps(family, location, scale, truth)
            self._put("crps", label, score, weight)
            self._put("crps_extreme", label, score, extreme)
        self._put("crps", f"fair_{self.data.full}", crps_members(raw, truth, fair=True), weight)
        self._spreads(members, files)
        for label, file in files.items():
            law = self._forecast(label, file, truth, weight, extreme if label in extremes else None)
            if label in calibration:
                self._calibration(label, file, truth, weight, law, date)

    def _raw(self, members: np.ndarray) -> Iterator[tuple[str, Family, np.ndarray, np.ndarray]]:
        """Yield forecasts of the raw ensemble and of its corrections, as distributions.

        The first two are N(m, (1 + 1/M) s^2) of all members and of the reduced ensemble. The next three correct the
        reduced ensemble, each on top of the one before: the bias, the dispersion, and the variable's own distribution
        in place of the normal one, with the same mean.
        """
        few, law = self.data.members, registered(self.group.variable).family
        for size in (self.data.full, few):
            mean, variance = ensemble_moments(members[:size])
            yield f"raw_{size}", Family.NORMAL, mean, np.sqrt((1 + 1 / size) * variance)
        debiased = mean + self.fitted.correction.bias
        yield f"debiased_{few}", Family.NORMAL, debiased, np.sqrt((1 + 1 / few) * variance)
        mean, scale = self.fitted.correction(mean, variance)
        yield f"corrected_{few}", Family.NORMAL, mean, scale
        yield f"own_law_{few}", law, location_of_mean(law, mean, scale), scale

    def _spreads(self, members: np.ndarray, files: Mapping[str, netCDF4.Dataset]) -> None:
        few, full = self.data.members, self.data.full
        variance = ensemble_moments(members)[1]
        actual, held = np.sqrt(variance), held_out_spread(members, few)
        four, given = (np.sqrt(ensemble_moments(members[:size])[1]) for size in (4, few))
        said = {"raw_4": four, f"raw_{few}": given, f"size_corrected_{few}": base.size_corrected(given, few, full)}
        said[f"spread_regression_{few}"] = self.fitted.spread(given)
        for label, file in files.items():
            if f"{self.group.variable}_ensemble_spread" in file.variables:
                said[label] = self._read(file, "ensemble_spread")
        everywhere = np.broadcast_to(self.area, actual.shape)
        numbers = [str(int(number)) for number in self.data.store.layout.realization]
        made_of = {k: [numbers.index(n) for n in f.members_in.split()] for k, f in files.items() if k in said}
        made_of[f"spread_regression_{few}"] = list(range(few))
        for label, spread in said.items():
            self._put("spread", label, (spread - actual) ** 2, everywhere)
            error = held_out_error(spread, members, few, made_of.get(label, ()))
            if held is not None and error is not None:
                self._put("held_out_as_it_is", label, (spread - held) ** 2, everywhere)
                self._put("held_out", label, error**2, everywhere)
        if held is not None and self.fitted.held_out is not None:
            self._put("held_out", f"held_out_regression_{few}", (self.fitted.held_out(given) - held) ** 2, everywhere)
            # If members are draws from a known normal distribution, this is the variance of `held`. No forecast has a
            # smaller mean squared error.
            known = c4(full - few)
            self._put("held_out", CHANCE, (c4(full) / known) ** 2 * (1 - known**2) * variance, everywhere)

    def _forecast(
        self, label: str, file: netCDF4.Dataset, truth: np.ndarray, weight: np.ndarray, extreme: np.ndarray | None
    ) -> tuple[Family, np.ndarray, np.ndarray]:
        """Record the CRPS, and return the distribution."""
        location, scale = self._read(file, "location"), self._read(file, "scale")
        family = Family(file.variables[f"{self.group.variable}_location"].distribution_family)
        score = crps(family, location, scale, truth)
        self._put("crps", label, score, weight)
        if extreme is not None:
            self._put("crps_extreme", label, score, extreme)
        return family, location, scale

    def _calibration(
        self, label: str, file: netCDF4.Dataset, truth: np.ndarray, weight: np.ndarray,
        law: tuple[Family, np.ndarray, np.ndarray], date: int,
    ) -> None:  # fmt: skip
        self._put("square", label, (self._read(file, "mean") - truth) ** 2, weight)
        self._put("variance", label, self._read(file, "stddev") ** 2, weight)
        uniform = np.random.default_rng([date, self.group.columns.start]).random(truth.shape)
        bins = bin_of(pit(*law, truth, uniform), BINS)
        for number in range(BINS):
            self._put(f"bin_{number}", label, (bins == number).astype(float), weight)

    def _read(self, file: netCDF4.Dataset, part: str) -> np.ndarray:
        """Return fields of a forecast file at the group's lead, (Z, Y, X) float64, with levels in its order."""
        hours = np.atleast_1d(file.variables["forecast_period"][:]).astype(int).tolist()
        found = file.variables[f"{self.group.variable}_{part}"][0, hours.index(self.group.lead_hours)]
        values = np.ma.filled(found, np.nan)
        if self.group.levels == (None,):
            return np.asarray(values, np.float64)[None]
        levels = [int(level) for level in file.variables["level"][:]]
        return np.asarray(values, np.float64)[[levels.index(int(level or 0)) for level in self.group.levels]]

    def _put(self, statistic: str, label: str, values: np.ndarray, weight: np.ndarray) -> None:
        self.table.record((statistic, label), self.position, self.group.columns, values, weight)
