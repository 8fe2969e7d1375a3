"""Score members as vectors over variables and levels, for forecasts that hold members.

A distribution at each point does not say whether variables, levels and places fit together. Members do. The members of
a forecast (`predict members_out=true`: raw members moved to the predicted distribution) are compared with the raw
ensembles, and with ensemble copula coupling of the corrected reduced ensemble (`baselines.couple`). The coupled
distribution has the corrected mean, and is normal, or censored where the variable has bounds.

Points that lack a value of any field or entrant are left out, and their share of the area is reported. Fields that do
not vary on the fit dates, or have a truth on too few of them, are left out and reported as well. Scores are ordinary
and not fair, because members that were moved are not independent. Each field is divided by the square root of the
global mean of its climate's variance on the fit dates, so that all fields have one scale.

Memory holds one date: M x V x Y x X values in float32 for each entrant. Scores are computed for some rows at a time.

Axes: B draw of the bootstrap, D initialisation time, M member, V field (variable and level), Z level, Y latitude, X
longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.verification.baselines import Correction, couple
from ensemble_ml.verification.families import location_of_mean
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.members import crps_members, energy_score, variogram_score
from ensemble_ml.verification.samples import Group, Setting, read_sample
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.statistics import ensemble_moments

CORRECTED = "blend"  # the entry of `baselines.CORRECTIONS` that is coupled
METRICS = ("crps_members", "energy", "variogram")
_MOST_FIELDS = 16  # most fields of a variogram, because its pairs grow with the square of their number
_VALUES = 1 << 22  # values of an entrant that are scored at a time


@dataclass(frozen=True, eq=False)
class Known:
    """The results of a group's fits that the scores of vectors need.

    Attributes:
        correction: Correction of the reduced ensemble.
        scale: (Z,) standard deviation of the climate on the fit dates, in the units of the variable; zero where the
            truth does not vary, or is known on too few dates.
    """

    correction: Correction
    scale: np.ndarray

    @classmethod
    def of(cls, setting: Setting, fit: Fit) -> Known | None:
        """Return the needed parts of a fit; None for a reduced ensemble of one member, or with too few dates."""
        corrections = fit.corrections.get(setting.reduced, {})
        if CORRECTED not in corrections or fit.climatology is None or setting.reduced < 2:
            return None
        deviation = fit.climatology[1]
        area = np.where(np.isfinite(deviation), setting.weights[0], 0.0)  # weights of cells with a climatology
        variance = (area * np.nan_to_num(deviation) ** 2).sum((-2, -1)) / np.maximum(area.sum((-2, -1)), 1e-300)
        return cls(corrections[CORRECTED], np.sqrt(variance))


@dataclass(eq=False)
class Vectors:
    """The mean scores of vectors at one lead.

    Attributes:
        lead: Lead time in hours.
        fields: Number of fields V.
        paired: Names of the fields of the variogram.
        without_scale: Names of the fields that are left out, because they have no fit or `Known.scale` is zero.
        covered: (D,) share of the area that counts.
        means: (D,) area-weighted means by entrant and metric; NaN where a date has no complete point.
    """

    lead: int
    fields: int
    paired: tuple[str, ...]
    without_scale: tuple[str, ...]
    covered: np.ndarray
    means: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def put(self, entrant: str, metric: str, date: int, values: np.ndarray, weight: np.ndarray) -> None:
        """Add the scores (Y, X) of one date, a position on D. Weights (Y, X) are zero at points that are left out."""
        found = self.means.setdefault((entrant, metric), np.full(len(self.covered), np.nan))
        if weight.any():
            found[date] = (np.where(weight > 0, values, 0.0) * weight).sum() / weight.sum()


def score_vectors(
    setting: Setting, groups: Sequence[tuple[Group, Known | None]], dates: np.ndarray, lead: int
) -> Vectors | None:
    """Return the mean scores of all members at one lead on the test dates, given as positions in the source.

    A group without results of its fits (None) is left out. The result is None if there is no truth, no forecast has
    members of all fields, or no field has a fit and a scale above zero.
    """
    every = [(group, known) for group, known in groups if group.lead_hours == lead]
    mine = [(group, known) for group, known in every if known is not None]
    labels = [one.label for one in setting.forecasts if all(one.has_members(group.variable) for group, _ in mine)]
    if not mine or not labels or not setting.truth:
        return None
    names = [f"{group.variable}{'' if level is None else level}" for group, _ in every for level in group.levels]
    levels = [level for group, _ in every for level in group.levels]
    scales = [np.zeros(len(group.levels)) if known is None else known.scale for group, known in every]
    kept = np.concatenate(scales) > 0
    there = np.flatnonzero(kept)
    if not len(there):
        return None
    pairs = _paired([levels[i] for i in there])
    paired = tuple(names[there[i]] for i in pairs)
    without_scale = tuple(names[i] for i in np.flatnonzero(~kept))
    found = Vectors(lead, len(there), paired, without_scale, np.zeros(len(dates)))
    for position, date in enumerate(dates.tolist()):
        given, truth, whole = _date(setting, mine, labels, date, kept)
        # One mask for all entrants and fields: a vector with a missing component has no score.
        weight = np.where(whole, setting.weights[0], 0.0)
        found.covered[position] = weight.sum() / setting.weights[0].sum()
        for entrant, members in given.items():
            for metric, values in zip(METRICS, _scores(members, truth, whole, pairs), strict=False):
                found.put(entrant, metric, position, values, weight)
    return found


def _scores(members: np.ndarray, truth: np.ndarray, whole: np.ndarray, pairs: Sequence[int]) -> np.ndarray:
    """Return the scores of `METRICS` at each point, (3, Y, X); (2, Y, X) if a single field has no variogram.

    The values have no meaning where `whole` is false.
    """
    made = np.empty((len(METRICS) - (len(pairs) < 2), *whole.shape))
    # Scores need float64 and arrays of pairs. Taking some rows at a time bounds their memory on fine grids.
    step = max(1, _VALUES // members[..., 0, :].size)
    for first in range(0, len(whole), step):
        rows = slice(first, first + step)
        x, y = (np.where(whole[rows], values[..., rows, :], 0.0).astype(np.float64) for values in (members, truth))
        each = [crps_members(x[:, v], y[v], fair=False) for v in range(len(y))]
        made[0, rows], made[1, rows] = np.mean(each, 0), energy_score(x, y)
        if len(pairs) > 1:
            made[2, rows] = variogram_score(x[:, pairs], y[pairs])
    return made


def _paired(every: Sequence[int | None]) -> list[int]:
    """Choose the fields of the variogram: all if they are few, else those at the surface and nearest to 500 hPa."""
    if len(every) <= _MOST_FIELDS:
        return list(range(len(every)))
    upper = sorted({level for level in every if level is not None}, key=lambda level: abs(level - 500))
    return [i for i, level in enumerate(every) if level in (None, *upper[:1])][:_MOST_FIELDS]


def _date(
    setting: Setting, groups: Sequence[tuple[Group, Known]], labels: Sequence[str], date: int, kept: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Read the members (M, V, Y, X) of every entrant and the truth (V, Y, X), each field divided by its scale.

    Only the fields that `kept` marks are returned. Also return where all of them are complete, (Y, X) bool.
    """
    m, n = setting.reduced, setting.full
    shape, whole = setting.weights.shape[1:], np.ones(setting.weights.shape[1:], bool)
    members, truth = dict[str, np.ndarray](), np.empty((kept.sum(), *shape), np.float32)
    start, first = setting.source.layout.init_time[date], 0
    for group, known in groups:
        there = known.scale > 0
        place, scale = slice(first, first + there.sum()), known.scale[there][:, None, None]
        first = place.stop
        sample = read_sample(setting, group, date)
        mean, deviation = known.correction(*ensemble_moments(sample.raw[:m]))
        own = registered(group.variable).family
        # Variables that cannot be negative are coupled as a censored normal, which keeps a mass at zero (dry points).
        family = Family.CENSORED_NORMAL if own.bounds == (0, np.inf) else own
        law = location_of_mean(family, mean, deviation), deviation
        every = {f"raw_{n}": sample.raw, f"ecc_{m}": couple(sample.raw[:m], *law, family)}
        for one in setting.forecasts:
            if one.label in labels:
                every[one.label] = one.members(start, group.variable, group.lead_hours, group.levels)
        for entrant, values in every.items():
            if entrant not in members:
                members[entrant] = np.empty((len(values), *truth.shape), np.float32)
            members[entrant][:, place] = values[:, there] / scale
            whole &= np.isfinite(values[:, there]).all((0, 1))
        truth[place] = np.asarray(sample.truth)[there] / scale
        whole &= np.isfinite(truth[place]).all(0)
    # The reduced ensemble is the first members of the full one, so it needs no memory of its own.
    raw = members[f"raw_{n}"]
    return {f"raw_{size}": raw[:size] for size in sorted({m, n})} | members, truth, whole


def rows(scores: Scores, found: Sequence[Vectors]) -> list[dict]:
    """Return the `vectors` of scores.json.

    Each entry holds the mean score of an entrant, and its ratios to the coupled and to the raw full ensemble.
    """
    made = []
    for one in found:
        every = dict.fromkeys(entrant for entrant, _ in one.means)
        for entrant in every:
            for metric in (metric for metric in METRICS if (entrant, metric) in one.means):
                values = one.means[entrant, metric]
                mine, blocks = _mean(values, one.covered, scores.counts), scores.blocks_among(np.isfinite(values))
                row: dict = {"lead_hours": one.lead, "entrant": entrant, "metric": metric, "fields": one.fields}
                row |= {"blocks": blocks, "left_out_area": round(1 - float(one.covered.mean()), 6)}
                row |= {"left_out_fields": list(one.without_scale)} if one.without_scale else {}
                row |= {"paired": list(one.paired)} if metric == "variogram" else {}
                row |= _ends(scores, mine, "value", blocks)
                for other in (f"ecc_{scores.reduced}", f"raw_{scores.full}"):
                    if other != entrant:
                        theirs = _mean(one.means[other, metric], one.covered, scores.counts)
                        row |= _ends(scores, mine / theirs, f"over_{other}", blocks)
                made.append(row)
    return made


def _mean(values: np.ndarray, covered: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean over dates, weighted by their covered area, followed by that of each draw, (1 + B,)."""
    # A date with few complete points must not weigh as much as a whole one.
    draws = np.vstack([np.ones(len(values)), counts]) * covered
    there = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (draws @ np.where(there, values, 0.0)) / (draws @ there.astype(float))


def _ends(scores: Scores, values: np.ndarray, name: str, blocks: int) -> dict[str, float]:
    ends = scores.interval(values[0], values[1:], blocks)
    return {name: ends.value, f"{name}_low": ends.low, f"{name}_high": ends.high}
