"""Sum what the report draws besides scores: mean maps, the spread of one date, and spread against error in bins.

Maps and bins are kept for a few headline fields only. They are summed date by date like everything else.

Axes: C column, D initialisation time, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ensemble_ml.verification.statistics import Key, Statistic, ensemble_moments
from ensemble_ml.wording import hour_text

if TYPE_CHECKING:
    from ensemble_ml.verification.forecasts import Predicted
    from ensemble_ml.verification.samples import Sample

# Upper edges of all bins but the last, in units of the first date's root mean square outcome.
_BINS = np.geomspace(0.1, 6.0, 16)


@dataclass(eq=False)
class Bins:
    """A set of sums over points, in bins of the predicted standard deviation.

    A predicted width is right if its square equals the squared error on average (power 2). A prediction of the spread
    is one of the mean spread (power 1), which is below the root mean square.

    Attributes:
        edges: Upper edges of all bins but the last.
        power: Power of prediction and outcome in the sums, 1 or 2.
        weight: Sum of weights.
        predicted: Weighted sum of the prediction to the power.
        actual: Weighted sum of the outcome to the power.
    """

    edges: np.ndarray
    power: int
    weight: np.ndarray
    predicted: np.ndarray
    actual: np.ndarray

    @classmethod
    def around(cls, typical: float, power: int) -> Bins:
        """Return empty bins whose edges are geometric around a typical value.

        Args:
            typical: A typical value of the outcome.
            power: 1 or 2.
        """
        n = len(_BINS) + 1
        return cls(_BINS * max(typical, 1e-30), power, np.zeros(n), np.zeros(n), np.zeros(n))

    def record(self, predicted: np.ndarray, actual: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add the points of a field.

        Args:
            predicted: (Y, X) predicted standard deviation.
            actual: (Y, X) outcome.
            weights: (Y, X) weights.
            mask: (Y, X) bool, true at points that count.
        """
        # Both axes are binned by the prediction: binning by the outcome would make calibrated forecasts look wrong.
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
        actual: (Y, X) spread of the full ensemble.
        reduced: (Y, X) spread of the reduced ensemble.
        predicted: (Y, X) predicted spread by forecast.
    """

    date: str
    actual: np.ndarray
    reduced: np.ndarray
    predicted: dict[str, np.ndarray]


@dataclass(eq=False)
class Pictures:
    """A set of sums for the maps and bins of the headline columns.

    Attributes:
        headline: Positions of the headline columns on C.
        area: (Y, X) cell areas.
        reduced: Number of members of the reduced ensemble.
        starts: (D,) initialisation time of each test date.
        blocks: (D,) block of each test date, for significance at each point.
        drawn: The scores that maps are kept of.
        maps: (Y, X) sums of scores by column and key.
        counts: (Y, X) number of dates by column.
        error_bins: Error of the mean by predicted width, by column and entrant.
        spread_bins: Spread of the full ensemble by predicted spread, by column and entrant.
        snapshots: Spread of the last date, by column.
        index: Mean |EFI| over the sphere, by column and date.
        by_block: (block, Y, X) sums of scores by column and key.
        block_counts: (block, Y, X) number of dates by column.
    """

    headline: tuple[int, ...]
    area: np.ndarray
    reduced: int
    starts: np.ndarray
    blocks: np.ndarray
    drawn: frozenset[Key]
    maps: dict[tuple[int, Key], np.ndarray] = field(default_factory=dict)
    counts: dict[int, np.ndarray] = field(default_factory=dict)
    error_bins: dict[tuple[int, str], Bins] = field(default_factory=dict)
    spread_bins: dict[tuple[int, str], Bins] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    index: dict[int, dict[int, float]] = field(default_factory=dict)
    by_block: dict[tuple[int, Key], np.ndarray] = field(default_factory=dict)
    block_counts: dict[int, np.ndarray] = field(default_factory=dict)

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
        """Add one date of a group, as far as its columns are headline columns.

        Args:
            columns: Positions of the group's levels on C.
            date: Position on D.
            values: (Z, Y, X) scores by key.
            verified: (Z, Y, X) bool, true where scores against the truth count.
            sample: Members and truth of the date.
            said: Predictions by label.
            spread_mask: (Z, Y, X) bool, true where scores of the spread count.
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            if column in self.headline:
                fields = {key: value[z] for key, value in values.items()}
                self._maps(column, fields, verified[z])
                self._blocks(column, fields, verified[z], int(self.blocks[date]))
                self._spread(column, z, date, sample, said, spread_mask[z])

    def record_index(self, columns: slice, date: int, index: np.ndarray) -> None:
        """Add the mean size of the extreme forecast index of one date.

        Args:
            columns: Positions of the group's levels on C.
            date: Position on D.
            index: (Z, Y, X) extreme forecast index.
        """
        for z, column in enumerate(range(columns.start, columns.stop)):
            # A date without any index is left out, rather than counted as zero.
            known = np.isfinite(index[z])
            if known.any():
                mean = np.average(np.abs(index[z][known]), weights=self.area[known])
                self.index.setdefault(column, {})[date] = float(mean)

    def block_means(self, column: int, key: Key) -> np.ndarray | None:
        """Return the mean of a score over the dates of each block.

        Args:
            column: Position on C.
            key: Entrant and statistic.

        Returns:
            (block, Y, X) means, NaN where no date counts; None if nothing was kept.
        """
        total = self.by_block.get((column, key))
        if total is None:
            return None
        count = self.block_counts[column]
        return np.divide(total, count, out=np.full(total.shape, np.nan, np.float32), where=count > 0)

    def _blocks(self, column: int, values: dict[Key, np.ndarray], mask: np.ndarray, block: int) -> None:
        """Add scores block by block, from which significance at each point is computed."""
        if not values:
            return
        shape = (int(self.blocks.max()) + 1, *mask.shape)
        self.block_counts.setdefault(column, np.zeros(shape, np.float32))[block] += mask
        for key, value in values.items():
            if key in self.drawn:
                table = self.by_block.setdefault((column, key), np.zeros(shape, np.float32))
                table[block] += np.where(mask, value, 0.0)

    def mean_map(self, column: int, key: Key) -> np.ndarray | None:
        """Return the mean of a score over the test dates.

        Args:
            column: Position on C.
            key: Entrant and statistic.

        Returns:
            (Y, X) means, NaN where no date counts; None if nothing was kept.
        """
        total = self.maps.get((column, key))
        if total is None:
            return None
        count = self.counts[column]
        return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)

    def _maps(self, column: int, values: dict[Key, np.ndarray], mask: np.ndarray) -> None:
        """Add the scores of one date to the mean map of a column, and its errors to the bins."""
        if not values:
            return
        self.counts[column] = self.counts.get(column, 0) + mask
        for key, value in values.items():
            if key in self.drawn:
                self.maps[column, key] = self.maps.get((column, key), 0) + np.where(mask, value, 0.0)
        for entrant in dict.fromkeys(key.entrant for key in values):  # the first entrant sets the bins of all
            variance = values.get(Key(entrant, Statistic.VARIANCE))
            squared = values.get(Key(entrant, Statistic.SQUARED_ERROR))
            if variance is not None and squared is not None:
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
            self.snapshots[column] = Snapshot(hour_text(self.starts[date]), actual, given, predicted)

    def _bin(
        self, table: dict, column: int, entrant: str, predicted: np.ndarray, actual: np.ndarray, mask: np.ndarray,
        power: int,
    ) -> None:  # fmt: skip
        """Add a field to the bins of an entrant, which are made when the entrant is first seen."""
        if (column, entrant) not in table:
            # One set of bins for all entrants of a field, or their curves could not be compared.
            shared = next((bins.edges for (c, _), bins in table.items() if c == column), None)
            typical = float(np.sqrt(np.mean(actual[mask] ** 2))) if mask.any() else 0.0
            if shared is None and not typical:
                return  # edges around zero would be wrong for every later date
            table[column, entrant] = Bins.around(typical if shared is None else float(shared[0] / _BINS[0]), power)
        table[column, entrant].record(predicted, actual, self.area, mask)
