"""Turn scores into figures and claims.

Labels of forecasts are NAME-seedS-fromM. A score of several seeds is their mean. The "best" baseline is the one with
the lowest score on the test dates themselves, which favours it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.results import Claim, Figure
from benchmarks.skill.entrants import OURS, START
from benchmarks.skill.scoring import BINS, CHANCE
from benchmarks.skill.table import Board
from data_prep.simulate.archive import Realism
from ensemble_ml.verification.bootstrap import Interval

_OUTSIDE, _SHOWN = 0.02, 3  # distance of a PIT bin from a tenth; fields that a note names
_NAMES = {"emos": "EMOS", "drn": "DRN", "ens10_unet": "ENS-10's U-Net", "poet": "the PoET-like net"}


@dataclass(frozen=True, eq=False)
class Contest:
    """The entrants that were scored, with their scores.

    Attributes:
        board: the scores.
        labels: labels of each model by ensemble size: all seeds at `members`, the first seed at other sizes.
        members: size of the reduced ensemble.
        full: size of the full ensemble.
        lead: lead time in hours.
        dates: number of training dates, the same for all.
        fields: names of the fields, in the order of the columns.
        realism: the realism of the ensemble, by field.
        heights: a sentence on the orography of the raw ensemble, or None.
    """

    board: Board
    labels: dict[str, dict[int, tuple[str, ...]]]
    members: int
    full: int
    lead: int
    dates: int
    fields: tuple[str, ...]
    realism: dict[str, Realism]
    heights: str | None = None  # the sentence on the raw ensemble's ground

    def of(self, name: str, members: int | None = None) -> tuple[str, ...]:
        """Return the labels of one model.

        Args:
            name: the model.
            members: ensemble size; None takes the reduced ensemble.
        """
        return self.labels[name][members or self.members]

    def boards(self) -> dict[str, Board]:
        """Return the board of all fields, and the one without surface pressure if that leaves any.

        The keys are words that a figure's name ends with.
        """
        some = [c for c, name in enumerate(self.fields) if name != "sp"]
        whole = {"": self.board}
        if 0 < len(some) < len(self.fields):
            whole[", without surface pressure"] = replace(self.board, columns=self.board.columns[some])
        return whole

    def rivals(self) -> list[str]:
        """Return the names of all models except ours and its start."""
        return [name for name in self.labels if name not in (OURS, START)]

    def best(self, members: int | None = None, statistic: str = "crps", seeds: int | None = None) -> str:
        """Return the competitor with the lowest score.

        Args:
            members: ensemble size; None takes the reduced ensemble.
            statistic: the score.
            seeds: number of seeds to average; None takes all.
        """
        full = [f"raw_{self.full}"]
        ratios = {n: self.board.ratio(statistic, self.of(n, members)[:seeds], full).value for n in self.rivals()}
        return min(ratios, key=lambda name: ratios[name])


def report(contest: Contest) -> tuple[dict[str, Figure], list[Claim], list[str]]:
    """Return figures, claims and notes.

    Args:
        contest: the entrants and their scores.
    """
    figures: dict[str, Figure] = {}
    claims: list[Claim] = []
    for part in (_crps, _extremes, _spread, _calibration, _sizes, _realism):
        part(contest, figures, claims)
    return figures, claims, _notes(contest)


def _put(figures: dict[str, Figure], name: str, found: Interval, unit: str = "%") -> Interval:
    """Add an interval as a figure, and return it."""
    figures[name] = Figure(found.value, found.low, found.high, unit)
    return found


def _two(claims: list[Claim], text: str, found: Interval, target: float) -> None:
    """Add two claims: a gain reaches a target, and its interval excludes zero."""
    claims.append(Claim(text, found.value, "%", target))
    claims.append(Claim(f"{text}: lower end of the interval", _sure(found), "%", 1e-9))


def _sure(found: Interval) -> float:
    """Return the lower end of an interval, or NaN if there are too few blocks for any certainty."""
    return found.low if found.enough else math.nan


def _crps(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and claims on the CRPS, and the share that each step of correction has in the gain."""
    board, m, n = contest.board, contest.members, contest.full
    ours, raw = contest.of(OURS), [f"raw_{n}"]
    where = f"from {m} of {n} members at {contest.lead} h, {contest.dates} training dates"
    for name in contest.labels:
        for ending, part in contest.boards().items():
            _put(figures, f"CRPS {where}: {name} below raw {n}{ending}", part.gain("crps", contest.of(name), raw))
        seeds = [board.gain("crps", [label], raw).value for label in contest.of(name)]
        figures[f"CRPS {where}: {name} below raw {n}, by seed"] = Figure.of(seeds, "%")
    best = contest.best()
    text = f"{where}, geometric mean over variables and levels, test years: CRPS below the best of "
    text += f"{', '.join(_NAMES.get(name, name) for name in contest.rivals())} (here {_NAMES.get(best, best)})"
    for ending, part in contest.boards().items():
        gain = _put(figures, f"CRPS {where}: ours below {best}{ending}", part.gain("crps", ours, contest.of(best)))
        _two(claims, f"{text}{ending}", gain, 2.0)
        if START in contest.labels:
            begun = part.gain("crps", ours, contest.of(START))
            _put(figures, f"CRPS {where}: ours below its own start (the fits, no step){ending}", begun)
        against_raw = part.gain("crps", ours, raw).value
        claims.append(
            Claim(f"{where}: CRPS below the raw full ensemble's N(m, (1+1/M) s^2){ending}", against_raw, "%", 13.0)
        )
    _put(figures, f"CRPS {where}: ours below fair CRPS of the raw {n}", board.gain("crps", ours, [f"fair_{n}"]))
    steps = [f"raw_{n}", f"raw_{m}", f"debiased_{m}", f"corrected_{m}", f"own_law_{m}"]
    words = ["fewer members (a loss)", "bias", "dispersion", "a law that cannot be negative", "flow-dependence"]
    for before, after, word in zip(steps, [*([s] for s in steps[1:]), ours], words, strict=True):
        for ending, part in contest.boards().items():
            # Shares of the raw score, so that all add up to the whole gain field by field.
            less = part.score("crps", [before]) - part.score("crps", list(after))
            share = np.nanmean(100 * less / part.score("crps", raw), 1)
            _put(figures, f"share of the gain over raw {n}: {word}{ending}", part.interval(share))


def _extremes(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and claims on the CRPS where the extreme forecast index is large."""
    board, ours = contest.board, contest.of(OURS)
    if not board.table.weight["crps_extreme", ours[0]].any():
        return  # nothing is extreme, or there is no other year to be so against
    best = contest.best(statistic="crps_extreme")
    gain = _put(
        figures, f"CRPS where |EFI| > 0.7: ours below {best}", board.gain("crps_extreme", ours, contest.of(best))
    )
    _two(claims, "in the stratum |EFI| > 0.7 (EFI of the raw ten): CRPS below the best baseline", gain, 1e-9)
    against = board.gain("crps_extreme", ours, [f"raw_{contest.full}"])
    _put(figures, f"CRPS where |EFI| > 0.7: ours below raw {contest.full} (26 % in the paper)", against)


def _spread(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and claims on the predicted spread."""
    board, m = contest.board, contest.members

    def gain(statistic: str, ours: Sequence[str], other: str) -> Interval:
        name = f"{statistic} RMSE: ours from {ours[0].rpartition('-from')[2]} below {other}"
        return _put(figures, name, board.gain(statistic, ours, [other], power=0.5))

    ours = contest.of(OURS)
    if ("spread", ours[0]) not in board.table.total:
        return
    if 1 in contest.labels[OURS]:
        gain("spread", contest.of(OURS, 1), "raw_4")
    text = f"{m} members through the net: spread RMSE below spread regression's"
    _two(claims, text, gain("spread", ours, f"spread_regression_{m}"), 5.0)
    gain("spread", ours, f"size_corrected_{m}")
    if ("held_out", ours[0]) in board.table.total:
        # The regression may be fitted to the spread of all members, as ours is, and converted to an expectation for the
        # held-out ones; or it may be fitted to the spread of the held-out members.
        kinds = f"spread_regression_{m}", f"held_out_regression_{m}"
        gains = {kind: gain("held_out", ours, kind) for kind in kinds}
        better = min(gains, key=lambda kind: gains[kind].value)
        found = gains[better]
        left = f"what it says of the {contest.full - m} held-out members' spread, against the better of two"
        _two(claims, f"{text}, {left}", found, 5.0)
        gain("held_out", ours, f"size_corrected_{m}")
        gain("held_out_as_it_is", ours, kinds[0])
        if 1 in contest.labels[OURS] and m >= 4:
            # Four raw members are a part of the full spread, and their noise is in it. So both are held against members
            # that neither has.
            one = f"one trajectory through the net: RMSE against the spread of the {contest.full - m} held-out members"
            found = gain("held_out", contest.of(OURS, 1), "raw_4")
            _two(claims, f"{one} below that of four raw members' spread", found, 1e-9)
        told = f"held_out RMSE: chance alone (normal members whose law is known) below {better}"
        _put(figures, told, board.gain("held_out", [CHANCE], [better], power=0.5))


def _calibration(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and claims on dispersion and PIT."""
    board, ours = contest.board, contest.of(OURS)
    for size in sorted(contest.labels[OURS]):
        if size != contest.members:
            some = contest.of(OURS, size)
            figures[f"sqrt(mean sigma^2) / RMSE from {size}, over fields"] = Figure.of(
                _dispersion(board, some)[0].tolist(), "ratio"
            )
            shares = [float(np.nanmean(share)) for share in _bins(board, some)]
            figures[f"share in a PIT bin from {size}, over ten bins"] = Figure.of(shares, "share")
    ratios = _dispersion(board, ours)
    ends = [board.interval(ratios[:, c]) for c in range(ratios.shape[1])]
    meets = [end.enough and end.low <= 1.05 and end.high >= 0.95 for end in ends]  # few blocks have wide intervals
    figures["sqrt(mean sigma^2) / RMSE, over fields"] = Figure.of([end.value for end in ends], "ratio")
    figures["width of its 95 % interval, over fields"] = Figure.of([end.high - end.low for end in ends], "ratio")
    text = (
        "sqrt(mean sigma^2) / RMSE of every variable and level has a 95 % interval that meets 0.95-1.05: share of them"
    )
    claims.append(Claim(text, 100 * float(np.mean(meets)), "%", 100.0))
    each = _bins(board, ours)
    shares = [float(np.nanmean(share)) for share in each]
    figures["share in a PIT bin, over ten bins"] = Figure.of(shares, "share")
    # All fields together may hide errors: a field that is too warm compensates for one that is too cold.
    alone = each[np.isfinite(each)].tolist()
    figures["share in a PIT bin, over ten bins of each field"] = Figure.of(alone, "share")
    for whose, values in (("all fields together", shares), ("of every variable and level", alone)):
        text = f"ten PIT bins between 0.08 and 0.12, {whose}: the "
        claims.append(Claim(f"{text}smallest", min(values), "share", 0.08))
        claims.append(Claim(f"{text}largest", max(values), "share", 0.12, at_most=True))


def _dispersion(board: Board, labels: Sequence[str]) -> np.ndarray:
    """Return sqrt(mean sigma^2) / RMSE, (B, C)."""
    return np.sqrt(board.score("variance", labels) / board.score("square", labels))


def _bins(board: Board, labels: Sequence[str]) -> np.ndarray:
    """Return the shares of the bins of the PIT, (bin, C)."""
    return np.array([board.score(f"bin_{number}", labels)[0] for number in range(BINS)])


def _sizes(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and claims on forecasts from different ensemble sizes."""
    board, raw = contest.board, [f"raw_{contest.full}"]
    sizes = sorted(contest.labels[OURS])
    first = {size: contest.of(OURS, size)[:1] for size in sizes}
    ratios = [board.ratio("crps", first[size], raw).value for size in sizes]
    for size in sizes:
        _put(figures, f"CRPS from {size}: ours below raw {contest.full}", board.gain("crps", first[size], raw))
    told = ", ".join(map(str, sizes))
    if len(sizes) > 1:
        text = f"{told} members in: CRPS over raw improves monotonically; the largest step (negative is better)"
        claims.append(Claim(text, float(np.max(np.diff(ratios))), "ratio", 0.0, at_most=True))
    gains = []
    for size in sizes:
        best = contest.best(size, seeds=1)
        gain = board.gain("crps", first[size], contest.of(best, size)[:1])
        _put(figures, f"CRPS from {size}: ours below {best}", gain)
        gains += [gain] * (size > 1)
    if gains:
        text = f"{told} members in: none but 1 is worse than the best baseline with as many members; the smallest gain"
        claims.append(Claim(text, min(gain.value for gain in gains), "%", 0.0))
        claims.append(
            Claim(f"{text}: lower end of the interval", float(np.min([_sure(gain) for gain in gains])), "%", 0.0)
        )


def _realism(contest: Contest, figures: dict[str, Figure], claims: list[Claim]) -> None:
    """Add figures and a claim on the realism of the raw ensemble."""
    if not contest.realism:
        return  # the store has none of the fields that are looked at
    for name, found in contest.realism.items():
        told = f"{name} of the raw {contest.full} at {contest.lead} h, test dates"
        figures[f"{told}: spread/skill"] = Figure.of([found.spread_skill], "ratio")
        figures[f"{told}: bias^2 in the mean square error"] = Figure.of([100 * found.raw_bias_share], "%")
        figures[f"{told}: correlation of spread and absolute error"] = Figure.of([found.correlation], "1")
    missing = sum(bool(found.misses) for found in contest.realism.values())
    text = f"the ensemble is realistic by the archive's own check, on the test dates: of {', '.join(contest.realism)}"
    claims.append(Claim(f"{text}, fields that miss it", float(missing), "fields", 0.0, at_most=True))


def _notes(contest: Contest) -> list[str]:
    """Return the notes of the report."""
    board = contest.board
    return [
        f"{board.table.dates} test dates in {board.blocks} blocks; figures of seeds are their means, ranges are 95 %"
        " intervals of the block bootstrap over start dates (of figures by seed and over fields: least and most).",
        "The best baseline is taken on the test dates themselves, which favours it.",
        "Bias and dispersion are those per grid point, shrunk to the global ones, fitted on the training dates.",
        "Ensembles are simulated by the embedded archive; figures hold for it alone.",
        _worst_bins(contest),
        *([contest.heights] if contest.heights else []),
    ]


def _worst_bins(contest: Contest) -> str:
    """Return a sentence on the fields whose PIT bins are farthest from uniform."""
    shares = _bins(contest.board, contest.of(OURS))
    furthest = np.nan_to_num(np.abs(shares - 1 / BINS).max(0))
    outside = int(np.sum(furthest > _OUTSIDE))
    shown = [
        f"{contest.fields[c]} {shares[:, c].min():.3f} to {shares[:, c].max():.3f}"
        for c in np.argsort(-furthest, kind="stable")[:_SHOWN]
    ]
    told = (
        f"PIT bins of single fields: {outside} of {len(furthest)} have one outside 0.08-0.12; furthest from a tenth: "
    )
    return f"{told}{', '.join(shown)}."
