"""What the report draws beside scores: mean maps, one date's spread, and spread against error in bins.

Kept only for a few headline fields, and summed date by date like everything else.
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

_BINS = np.geomspace(0.1, 6.0, 16)  # upper edges but the last, in units of the first date's mean spread


@dataclass(eq=False)
class Bins:
    """Sums over points by predicted standard deviation: weight, prediction and outcome, both to the `power`.

    A width is right if its square is that of the error on average (power 2); a forecast of the spread is one of its
    mean (power 1), which is below its root mean square.
    """

    edges: np.ndarray
    power: int
    weight: np.ndarray
    predicted: np.ndarray
    actual: np.ndarray

    @classmethod
    def around(cls, typical: float, power: int) -> Bins:
        """Empty bins, geometric around a typical value."""
        n = len(_BINS) + 1
        return cls(_BINS * max(typical, 1e-30), power, np.zeros(n), np.zeros(n), np.zeros(n))

    def record(self, predicted: np.ndarray, actual: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> None:
        """Add the points of a field (Y, X)."""
        where = np.digitize(predicted[mask], self.edges)
        for table, values in (
            (self.weight, weights[mask]),
            (self.predicted, (weights * predicted**self.power)[mask]),
            (self.actual, (weights * actual**self.power)[mask]),
        ):
            table += np.bincount(where, values, len(table))

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, or root mean square, of prediction and outcome in bins that hold 0.5 % of the weight or more, and that
        share."""
        share = self.weight / max(self.weight.sum(), 1e-300)
        kept = share >= 0.005
        typical = lambda table: (table[kept] / self.weight[kept]) ** (1 / self.power)  # noqa: E731
        return typical(self.predicted), typical(self.actual), share[kept]


@dataclass(eq=False)
class Snapshot:
    """One date's spread (Y, X): of the full ensemble, of the reduced one, and as each forecast has it."""

    date: str
    actual: np.ndarray
    reduced: np.ndarray
    predicted: dict[str, np.ndarray]


@dataclass(eq=False)
class Pictures:
    """Sums for the `headline` columns (positions on C).

    `starts`, `blocks` (D,): start of each test date, and its block, for tests at each point; `drawn`: the scores that
    maps are kept of; `index`: mean |EFI| over the sphere, by column and date.
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
        """Take what is needed from one date of a group whose columns are `columns`."""
        for z, column in enumerate(range(columns.start, columns.stop)):
            if column in self.headline:
                fields = {key: value[z] for key, value in values.items()}
                self._maps(column, fields, verified[z])
                self._blocks(column, fields, verified[z], int(self.blocks[date]))
                self._spread(column, z, date, sample, said, spread_mask[z])

    def record_index(self, columns: slice, date: int, index: np.ndarray) -> None:
        """Take the extreme forecast index (Z, Y, X) of one date."""
        for z, column in enumerate(range(columns.start, columns.stop)):
            known = np.isfinite(index[z])
            if known.any():
                mean = np.average(np.abs(index[z][known]), weights=self.area[known])
                self.index.setdefault(column, {})[date] = float(mean)

    def block_means(self, column: int, key: Key) -> np.ndarray | None:
        """Mean over the dates of each block (block, Y, X), NaN where none counts."""
        total = self.by_block.get((column, key))
        if total is None:
            return None
        count = self.block_counts[column]
        return np.divide(total, count, out=np.full(total.shape, np.nan, np.float32), where=count > 0)

    def _blocks(self, column: int, values: dict[Key, np.ndarray], mask: np.ndarray, block: int) -> None:
        """CRPS summed block by block: what significance at a point is found from."""
        if not values:
            return
        shape = (int(self.blocks.max()) + 1, *mask.shape)
        self.block_counts.setdefault(column, np.zeros(shape, np.float32))[block] += mask
        for key, value in values.items():
            if key in self.drawn:
                table = self.by_block.setdefault((column, key), np.zeros(shape, np.float32))
                table[block] += np.where(mask, value, 0.0)

    def mean_map(self, column: int, key: Key) -> np.ndarray | None:
        """Mean over the test dates (Y, X), NaN where no date counts; None where nothing was kept."""
        total = self.maps.get((column, key))
        if total is None:
            return None
        count = self.counts[column]
        return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)

    def _maps(self, column: int, values: dict[Key, np.ndarray], mask: np.ndarray) -> None:
        if not values:
            return
        self.counts[column] = self.counts.get(column, 0) + mask
        for key, value in values.items():
            if key in self.drawn:
                self.maps[column, key] = self.maps.get((column, key), 0) + np.where(mask, value, 0.0)
        for entrant in dict.fromkeys(key.entrant for key in values):  # the first sets the bins of all
            variance = values.get(Key(entrant, Statistic.VARIANCE))
            squared = values.get(Key(entrant, Statistic.SQUARED_ERROR))
            if variance is not None and squared is not None:
                self._bin(self.error_bins, column, entrant, np.sqrt(variance), np.sqrt(squared), mask, 2)

    def _spread(
        self, column: int, z: int, date: int, sample: Sample, said: dict[str, Predicted], mask: np.ndarray
    ) -> None:
        members = sample.members[:, z]
        if len(members) < 2:
            return
        actual = np.sqrt(ensemble_moments(members)[1])
        given = np.sqrt(ensemble_moments(members[: self.reduced])[1])
        predicted = {label: one.spread[z] for label, one in said.items() if one.spread is not None}
        entrants = predicted | ({f"raw_{self.reduced}": given} if self.reduced > 1 else {})
        for entrant, spread in entrants.items():
            self._bin(self.spread_bins, column, entrant, spread, actual, mask, 1)
        if mask.any():  # the last one stays
            self.snapshots[column] = Snapshot(hour_text(self.starts[date]), actual, given, predicted)

    def _bin(
        self, table: dict, column: int, entrant: str, predicted: np.ndarray, actual: np.ndarray, mask: np.ndarray,
        power: int,
    ) -> None:  # fmt: skip
        if (column, entrant) not in table:
            # One set of bins for all entrants of a field, or their curves could not be compared.
            shared = next((bins.edges for (c, _), bins in table.items() if c == column), None)
            typical = float(np.sqrt(np.mean(actual[mask] ** 2))) if mask.any() else 0.0
            if shared is None and not typical:
                return  # bins around nothing would be wrong for every other date
            table[column, entrant] = Bins.around(typical if shared is None else float(shared[0] / _BINS[0]), power)
        table[column, entrant].record(predicted, actual, self.area, mask)
