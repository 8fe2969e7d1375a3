"""Collect what the report draws besides scores: maps, spread of one date, spread against error, unusual weather.

Each is made for every column, date by date. Maps are on a coarse grid, which bounds memory and the size of the report.

Axes: C column (a lead, variable and level), D initialisation time, Y latitude, X longitude; y and x are those of the
coarse grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ensemble_ml.verification.aggregation import AggregationState
from ensemble_ml.verification.bootstrap import p_values, significant
from ensemble_ml.verification.statistics import Key, Statistic, ensemble_moments
from ensemble_ml.wording import date_text

if TYPE_CHECKING:
    from ensemble_ml.verification.forecasts import Predicted
    from ensemble_ml.verification.samples import Sample

# Upper edges of all bins but the last, as multiples of the root mean square outcome of the first date on which it is
# not zero.
_BINS = np.geomspace(0.1, 6.0, 16)
# Limits of the points of one map, and of all maps of a report. A point takes about one byte of the page. Charts and
# tables of 26 fields at two leads take another 2 MB.
_MOST_POINTS, _ALL_POINTS = 20_000, 2_000_000
# Maps keep this many points (33 x 64) as long as all maps together have no more than the second number.
_FEW_POINTS, _ALL_FEW_POINTS = 2_112, 3_000_000


@dataclass(eq=False)
class Bins:
    """A set of sums over points, in bins of the predicted standard deviation.

    A predicted standard deviation of the error is right if its square equals the squared error on average (power 2). A
    predicted spread is right if it equals the spread on average (power 1).

    Attributes:
        edges: (E,) upper edges of all bins but the last.
        power: Power of prediction and outcome in the sums, 1 or 2.
        weight: (E + 1,) sum of weights.
        predicted: (E + 1,) weighted sum of the prediction, raised to `power`.
        actual: (E + 1,) weighted sum of the outcome, raised to `power`.
    """

    edges: np.ndarray
    power: int
    weight: np.ndarray
    predicted: np.ndarray
    actual: np.ndarray

    @classmethod
    def around(cls, typical: float, power: int) -> Bins:
        """Return empty bins with edges that grow by a constant factor, from 0.1 to 6 times a typical outcome."""
        n = len(_BINS) + 1
        return cls(_BINS * max(typical, 1e-30), power, np.zeros(n), np.zeros(n), np.zeros(n))

    def record(self, predicted: np.ndarray, actual: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add the points of a field (Y, X) where `mask` holds: standard deviation, outcome and weight."""
        # Both sums are binned by the prediction: binning by the outcome would make calibrated forecasts look wrong.
        where = np.digitize(predicted[mask], self.edges)
        for table, values in (
            (self.weight, weights[mask]),
            (self.predicted, (weights * predicted**self.power)[mask]),
            (self.actual, (weights * actual**self.power)[mask]),
        ):
            table += np.bincount(where, values, len(table))

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean prediction, the mean outcome and the share of the weight of each bin.

        With power 2 the means are root mean squares. Bins with less than 0.5 % of the weight are left out.
        """
        share = self.weight / max(self.weight.sum(), 1e-300)
        # Means of nearly empty bins are noise.
        kept = share >= 0.005
        typical = lambda table: (table[kept] / self.weight[kept]) ** (1 / self.power)  # noqa: E731
        return typical(self.predicted), typical(self.actual), share[kept]


@dataclass(eq=False)
class Snapshot:
    """The spread of one initialisation time.

    Attributes:
        date: Initialisation time as text.
        actual: (y, x) spread of the full ensemble.
        reduced: (y, x) spread of the reduced ensemble; NaN if it has one member.
        predicted: (y, x) predicted spread by forecast.
    """

    date: str
    actual: np.ndarray
    reduced: np.ndarray
    predicted: dict[str, np.ndarray]


def cells_together(shape: tuple[int, int], fields: int, forecasts: int) -> int:
    """Return how many rows and columns of a grid make one row and column of the report's maps.

    `forecasts` is their number without those given as baselines.
    """
    maps = fields * (5 * forecasts + 2)
    most = min(_MOST_POINTS, max(_ALL_POINTS // maps, min(_FEW_POINTS, _ALL_FEW_POINTS // maps)))
    size = 1
    while -(-shape[0] // size) * -(-shape[1] // size) > max(most, 1):
        size += 1
    return size


def together(values: np.ndarray, rows: int, columns: int | None = None) -> np.ndarray:
    """Return the sums (y, x) over boxes of cells of (Y, X) values; the last row and column of boxes may be smaller.

    A box has `rows` rows, and as many columns if `columns` is None.
    """
    summed = np.add.reduceat(values, np.arange(0, values.shape[0], rows), 0)
    return np.add.reduceat(summed, np.arange(0, values.shape[1], columns or rows), 1)


@dataclass(eq=False)
class Pictures:
    """A set of maps and bins of all columns.

    Attributes:
        headline: Positions of the headline columns on C.
        area: (Y, X) cell areas.
        size: Rows and columns of the grid that make one of the maps.
        reduced: Number of members of the reduced ensemble.
        full: Number of members of the full ensemble.
        starts: (D,) initialisation time of each test date.
        blocks: (D,) block of each test date, for significance at each point.
        forecasts: Labels of the forecasts, without those given as baselines.
        references: Labels of the entrants that maps may compare them with.
        box: Rows and columns of a box. On each date, the box with the most unusual weather is sought.
        gains: Gain of CRPS in percent and where it is significant, (y, x), by column, forecast and reference.
        means: (y, x) mean CRPS by column and forecast.
        error_bins: Error of the mean by predicted standard deviation, by column and entrant.
        spread_bins: Spread of the full ensemble by predicted spread, by column and entrant.
        snapshots: Spread of the last date that has the field, by column.
        index: Mean |EFI| of the most unusual box, its row of boxes and its place in that row, by column and date.
    """

    headline: tuple[int, ...]
    area: np.ndarray
    size: int
    reduced: int
    full: int
    starts: np.ndarray
    blocks: np.ndarray
    forecasts: tuple[str, ...]
    references: tuple[str, ...]
    box: tuple[int, int]
    gains: dict[tuple[int, str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    means: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    error_bins: dict[tuple[int, str], Bins] = field(default_factory=dict)
    spread_bins: dict[tuple[int, str], Bins] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    index: dict[int, dict[int, tuple[float, int, int]]] = field(default_factory=dict)
    # (block, y, x) sums of CRPS times area and of area, of the group that is being scored.
    _sums: dict[tuple[int, Key], np.ndarray] = field(default_factory=dict)
    _areas: dict[int, np.ndarray] = field(default_factory=dict)

    def record(
        self,
        columns: slice,
        date: int,
        values: dict[Key, np.ndarray],
        verified: np.ndarray,
        sample: Sample,
        said: dict[str, Predicted],
        spread_mask: np.ndarray,
    ) -> None:
        """Add one date of a group; `date` is a position on D, and `columns` are those of the group's levels on C.

        `values` are (Z, Y, X) scores. Those against the truth count where `verified` (Z, Y, X) is true. Scores of the
        spread count where `spread_mask` (Z, Y, X) is.
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            fields = {key: value[z] for key, value in values.items()}
            self._scores(column, fields, verified[z], int(self.blocks[date]))
            self._spread(column, z, date, sample, said, spread_mask[z])

    def record_index(self, columns: slice, date: int, index: np.ndarray) -> None:
        """Add the most unusual box of one date: the one with the largest mean |extreme forecast index|.

        `index` is (Z, Y, X), `date` a position on D, and `columns` are those of the group's levels on C.
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            known = np.isfinite(index[z])
            area = together(np.where(known, self.area, 0.0), *self.box)
            total = together(np.where(known, self.area * np.abs(index[z]), 0.0), *self.box)
            # A mean over a small area varies more. So boxes at a pole, at the edge or with few values are left out if
            # they have less than half the largest area.
            mean = np.where(area >= area.max() / 2, total, -1.0) / np.maximum(area, 1e-300)
            if area.any():  # a date without any index is left out, rather than counted as zero
                row, place = (int(n) for n in np.unravel_index(int(mean.argmax()), mean.shape))
                self.index.setdefault(column, {})[date] = float(mean[row, place]), row, place

    def finish(self, columns: slice, state: AggregationState) -> None:
        """Make the maps of a group once all its dates are recorded.

        The sums of the group are then dropped, because those of all groups would need too much memory. `state` decides
        between the two distributions of a baseline.
        """
        for column in range(columns.start, columns.stop):
            area = self._areas.get(column)
            for label in self.forecasts:
                ours = self._sums.get((column, Key(label, Statistic.CRPS)))
                if ours is None or area is None:
                    continue
                with np.errstate(divide="ignore", invalid="ignore"):
                    self.means[column, label] = ours.sum(0) / area.sum(0)
                    for other in self.references:
                        theirs = self._sums.get((column, self._law(column, other, state)))
                        if theirs is not None and other != label:
                            sure = significant(p_values((ours - theirs) / area))
                            self.gains[column, label, other] = 100 * (1 - ours.sum(0) / theirs.sum(0)), sure
        self._sums.clear()
        self._areas.clear()

    def _law(self, column: int, entrant: str, state: AggregationState) -> Key:
        """Return the key of the CRPS that tables show for an entrant, as `values.settle_families` chooses it."""
        keys = [Key(entrant, law) for law in (Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY)]
        if (column, Key(entrant, Statistic.CRPS)) in self._sums or any((column, key) not in self._sums for key in keys):
            return Key(entrant, Statistic.CRPS)
        return min(keys, key=lambda key: state.mean(key)[column])

    def coarse(self, values: np.ndarray) -> np.ndarray:
        """Return the area-weighted means (y, x) of values (Y, X) over the cells of each point of the maps.

        Cells without a value do not count. A point without any value is NaN.
        """
        there = np.isfinite(values)
        total, area = (together(np.where(there, x * self.area, 0.0), self.size) for x in (values, 1.0))
        return np.divide(total, area, out=np.full(area.shape, np.nan), where=area > 0)

    def _scores(self, column: int, values: dict[Key, np.ndarray], mask: np.ndarray, block: int) -> None:
        """Add the scores of one date to the sums of its block, and errors to the bins."""
        if not values:
            return
        weights = np.where(mask, self.area, 0.0)

        def put(table: dict, key: object, added: np.ndarray) -> None:
            summed = together(added, self.size)
            if key not in table:
                table[key] = np.zeros((int(self.blocks.max()) + 1, *summed.shape), np.float32)
            table[key][block] += summed

        put(self._areas, column, weights)
        for entrant in dict.fromkeys((*self.forecasts, *self.references)):
            laws = [Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY]
            for law in [Statistic.CRPS] if Key(entrant, Statistic.CRPS) in values else laws:
                if (key := Key(entrant, law)) in values:
                    put(self._sums, (column, key), np.where(mask, values[key], 0.0) * weights)
        drawn = {*self.forecasts, f"raw_{self.reduced}", f"raw_{self.full}"}
        for entrant in dict.fromkeys(key.entrant for key in values):  # the first entrant sets the bins of all
            variance = values.get(Key(entrant, Statistic.VARIANCE))
            squared = values.get(Key(entrant, Statistic.SQUARED_ERROR))
            if entrant in drawn and variance is not None and squared is not None:
                self._bin(self.error_bins, column, entrant, np.sqrt(variance), np.sqrt(squared), mask, 2)

    def _spread(
        self, column: int, z: int, date: int, sample: Sample, said: dict[str, Predicted], mask: np.ndarray
    ) -> None:
        """Add the spread of one date to the bins of a column, and keep it as the snapshot."""
        members = sample.members[:, z]
        if len(members) < 2:
            return
        actual = np.sqrt(ensemble_moments(members)[1])
        given = np.sqrt(ensemble_moments(members[: self.reduced])[1])
        predicted = {label: one.spread[z] for label, one in said.items() if one.spread is not None}
        entrants = predicted | ({f"raw_{self.reduced}": given} if self.reduced > 1 else {})
        for entrant, spread in entrants.items():
            self._bin(self.spread_bins, column, entrant, spread, actual, mask, 1)
        if mask.any():  # the last date that has the field stays
            shown = {label: self.coarse(spread) for label, spread in predicted.items()}
            when = date_text(self.starts[date])
            self.snapshots[column] = Snapshot(when, self.coarse(actual), self.coarse(given), shown)

    def _bin(
        self, table: dict, column: int, entrant: str, predicted: np.ndarray, actual: np.ndarray, mask: np.ndarray,
        power: int,
    ) -> None:  # fmt: skip
        """Add a field to the bins of an entrant, and make them with its first field.

        Fields before the first one of the column whose outcome is not zero everywhere are left out.
        """
        if (column, entrant) not in table:
            # All entrants of a column have the same edges, so that their curves can be compared.
            shared = next((bins.edges for (c, _), bins in table.items() if c == column), None)
            typical = float(np.sqrt(np.mean(actual[mask] ** 2))) if mask.any() else 0.0
            if shared is None and not typical:
                return  # edges around zero would be wrong for every later date
            table[column, entrant] = Bins.around(typical if shared is None else float(shared[0] / _BINS[0]), power)
        table[column, entrant].record(predicted, actual, self.area, mask)
