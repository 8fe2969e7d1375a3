"""Weighted means that can be put together from parts: sums of weighted values and of weights.

Axes: D start date, W weighting (exact cell area first, then one a point, then area in regions and strata), C column (a
lead, variable and level).
A state of some dates, rows or columns is added to that of others; the sum is the state of all, whatever the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.verification.statistics import Key, Statistic

WEIGHTINGS = ("area", "unweighted")
Strata = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Column:
    """One field that is scored: `level` in hPa, None at the surface."""

    lead_hours: int
    variable: str
    level: int | None

    @property
    def name(self) -> str:
        """As t850 or msl."""
        return self.variable if self.level is None else f"{self.variable}{self.level}"


@dataclass(eq=False)
class AggregationState:
    """Sums over points for each start date, weighting and column: `total` and `weight` (D, W, C).

    `left_out` and `points` (D, C) count the points that a mask left out, and all.
    """

    dates: int
    columns: int
    weightings: tuple[str, ...] = WEIGHTINGS
    total: dict[Key, np.ndarray] = field(default_factory=dict)
    weight: dict[Key, np.ndarray] = field(default_factory=dict)
    left_out: dict[Key, np.ndarray] = field(default_factory=dict)
    points: dict[Key, np.ndarray] = field(default_factory=dict)

    def record(
        self,
        date: int,
        columns: slice,
        statistics: Mapping[Key, np.ndarray],
        mask: np.ndarray,
        weights: np.ndarray,
        strata: Strata | None = None,
    ) -> None:
        """Add the points of one start date, or of some rows of it.

        Args:
            date: position on D.
            columns: the Z columns that the values belong to.
            statistics: (Z, Y, X) values. A NaN under a true mask makes the mean NaN, which the report shows.
            mask: (Z, Y, X) bool, points that count.
            weights: (W, Y, X) of the first weightings.
            strata: by name of a further weighting, what multiplies the values and what counts as their weight, each
                (Z, Y, X): points that belong to it on this date.
        """
        flat_w = weights.reshape(len(weights), -1).T
        flat_mask = mask.reshape(len(mask), -1)
        weight = (flat_mask @ flat_w).T  # (W, Z)
        left_out = (~flat_mask).sum(1)
        further: list[tuple[int, np.ndarray, np.ndarray]] = []
        for name, parts in (strata or {}).items():
            factor, counted = (np.where(mask, part, 0.0).reshape(flat_mask.shape) for part in parts)
            further.append((self.weightings.index(name), factor, counted))
        for key in self._counting(list(statistics)):
            self.weight[key][date, : len(weight), columns] += weight
            for at, _, counted in further:
                self.weight[key][date, at, columns] += counted.sum(1)
            self.left_out[key][date, columns] += left_out
            self.points[key][date, columns] += flat_mask.shape[1]
        for key, values in statistics.items():
            kept = np.where(flat_mask, values.reshape(flat_mask.shape), 0.0)
            with np.errstate(invalid="ignore"):  # an infinite log score times the weight zero
                self.total[key][date, : len(weight), columns] += (kept @ flat_w).T
                for at, factor, _ in further:
                    self.total[key][date, at, columns] += (kept * factor).sum(1)

    def _counting(self, keys: Sequence[Key]) -> list[Key]:
        """Open `keys`, and return one for each array of weights among theirs: what is always recorded together, under
        one mask, shares it, and `left_out` and `points` likewise."""
        fresh = [key for key in keys if key not in self.total]
        if fresh:
            self._open(fresh)
        users = Counter(id(weight) for weight in self.weight.values())
        sharing: dict[int, list[Key]] = {}
        for key in keys:
            sharing.setdefault(id(self.weight[key]), []).append(key)
        for address, mine in sharing.items():
            if users[address] > len(mine):  # the others are not recorded now
                self._part(mine)
        return [mine[0] for mine in sharing.values()]

    def _part(self, keys: Sequence[Key]) -> None:
        """Give `keys`, which share their weights, a copy that no others share."""
        for table in (self.weight, self.left_out, self.points):
            table.update(dict.fromkeys(keys, table[keys[0]].copy()))  # type: ignore[attr-defined]

    def _open(self, keys: Sequence[Key]) -> None:
        shape = self.dates, len(self.weightings), self.columns
        self.total.update({key: np.zeros(shape) for key in keys})
        self.weight.update(dict.fromkeys(keys, np.zeros(shape)))
        for counts in (self.left_out, self.points):
            counts.update(dict.fromkeys(keys, np.zeros((self.dates, self.columns), np.int64)))

    def __add__(self, other: AggregationState) -> AggregationState:
        if (self.dates, self.columns, self.weightings) != (other.dates, other.columns, other.weightings):
            raise ValueError("states of different dates, columns or weightings cannot be added")
        merged = AggregationState(self.dates, self.columns, self.weightings)
        for name in ("total", "weight", "left_out", "points"):
            mine, theirs = getattr(self, name), getattr(other, name)
            getattr(merged, name).update(mine)
            for key, array in theirs.items():
                getattr(merged, name)[key] = mine[key] + array if key in mine else array
        return merged

    def part(self, columns: slice) -> dict[str, dict]:
        """The sums of some columns: `total` by key, `counts` (weight, left out, points) by the keys that share them."""
        sharing: dict[int, list[Key]] = {}
        for key in self.total:
            sharing.setdefault(id(self.weight[key]), []).append(key)
        tables = self.weight, self.left_out, self.points
        counts = {tuple(keys): tuple(t[keys[0]][..., columns] for t in tables) for keys in sharing.values()}  # type: ignore[attr-defined]
        return {"total": {key: total[..., columns] for key, total in self.total.items()}, "counts": counts}

    def put(self, columns: slice, part: dict[str, dict]) -> None:
        """Let columns of which nothing is recorded be those of a `part`, and let share what shares there."""
        if fresh := [key for key in part["total"] if key not in self.total]:
            self._open(fresh)
        for keys, counts in part["counts"].items():
            self._counting(keys)
            for table, values in zip((self.weight, self.left_out, self.points), counts, strict=True):
                table[keys[0]][..., columns] = values  # type: ignore[attr-defined]
        for key, values in part["total"].items():
            self.total[key][..., columns] = values

    def mean(self, key: Key, weighting: str = "area", draws: np.ndarray | None = None) -> np.ndarray:
        """Weighted mean over dates and points: (C,), or (B, C) for the dates' counts `draws` (B, D) of a bootstrap.

        NaN where nothing was recorded or every point was left out.
        """
        which = self.weightings.index(weighting)
        total, weight = self.total[key][:, which], self.weight[key][:, which]
        if draws is None:
            total, weight = total.sum(0), weight.sum(0)
        else:
            total, weight = draws @ total, draws @ weight
        return np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight > 0)

    def choose(self, entrant: str, targets: Mapping[Statistic, Sequence[Statistic]]) -> dict[int, int]:
        """Make the first of `targets` of an entrant, column by column, that of its options with the smallest mean, and
        each further one its option at the same place; return which place.
        """
        first = next(iter(targets.values()))
        means = np.stack([self.mean(Key(entrant, option)) for option in first])
        known = np.flatnonzero(np.isfinite(means).any(0))
        best = {int(column): int(np.nanargmin(means[:, column])) for column in known}
        for target, options in targets.items():
            keys = [Key(entrant, option) for option in options]
            if any(key not in self.total for key in keys):
                continue
            new = Key(entrant, target)
            if new in self.total:
                self._part([new])
            else:
                self._open([new])
            for name in ("total", "weight", "left_out", "points"):
                table = getattr(self, name)
                for column, place in best.items():
                    table[new][..., column] = table[keys[place]][..., column]
        return best
