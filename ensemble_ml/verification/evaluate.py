"""Score forecasts, the raw ensemble and its statistical corrections, and write scores.json, lineage.json and a report.

This is the top of the package: it makes the plan, fits the baselines, scores field by field, and composes the results.
No setting can leave out a baseline.

scores.json holds

- `format`: 1.
- `settings`: the configuration.
- `definitions`: the meaning of each score.
- `dates`: `test`, `fit` (ISO dates), `dropped` ({date, reason}), `blocks`, `block_days`.
- `ensemble`: `members`, `reduced`, `held_out` (member numbers), `path`, `grid`, `fingerprint`.
- `heights`: {corrected (variables of raw members that were brought to the truth's ground), rmse_ratio_on_fit_dates
  (by variable, RMSE with this correction over that without), largest_m, mean_m (absolute difference of the two
  grounds), lapse_rate_K_per_m}. Where the grounds are not known, only `corrected` is there, and it is empty.
- `forecasts`: {label, path, members_in (of the date with the most; empty if a file states none), checkpoints (sha256),
  sources (program, checkpoint, model and step that made the files), dates (their number), baseline}.
- `entrants`: {name: description} of every forecast, raw ensemble and baseline.
- `families`: {entrant: {"FIELD LEAD h": distribution}}, the distribution chosen for each baseline that has two.
- `scores`: {entrant, lead_hours, variable, level, METRIC: {value, low, high, unweighted}, ...}. A metric that is not
  defined is missing.
- `summary`: {lead_hours, metric, entrant, reference, ratio, low, high, unweighted, better, best_baseline, without_sp}.
- `comparisons`: {forecast, reference, metric, lead_hours, variable, level, difference, gain_percent (both {value, low,
  high, blocks}), better}. Each forecast is also compared with all others.
- `claims`: {claim, value, unit, target, holds, low, high, certain, enough_blocks, advantage, forecast, reference,
  without_sp}. `advantage` names input that the forecast has and the reference lacks; with it, a gain is not certain.
  `without_sp`, here and in `summary`, is {value, low, high} without surface pressure. It is null where surface pressure
  is not among the fields or is the only one.
- `strata`: {kind (region, season, extreme), stratum, lead_hours, forecast, reference, metric, ratio, low, high, better,
  worse, dates, blocks}. Each is a geometric mean of ratios over variables and levels, in a region, in a season, or
  where the raw full ensemble's extreme forecast index (EFI) is large, or weighted by |EFI|. `blocks` is the smallest
  number of blocks of any field. With fewer than five, `better` and `worse` are false.
- `calibration`: {kind (pit, rank), entrant, lead_hours, variable, level, shares, low, high, flatness}.
- `vectors`: {lead_hours, entrant, metric (crps_members, energy, variogram), fields (their number), blocks,
  left_out_area, left_out_fields (without variance or a fit on the fit dates), paired (fields of the variogram), value,
  value_low, value_high, over_ENTRANT (a ratio), ...}: scores of members over all variables and levels, where forecasts
  hold members.
- `case`: {date, lead_hours, field, mean_abs_efi, region ([north, west, south, east]), and at its marked point latitude,
  longitude, efi, truth, forecasts} of the test date and the region with the largest mean |EFI|.
- `left_out`: points that a mask left out, with their share of the area, by entrant, statistic and field.
- `notes`: sentences that a reader should know.
- `headline`: the result in sentences.

Scores are in the units of the variable; log scores are in nats. Brier scores, spread_skill and scores of vectors have
no units. A number that is not known, such as an end of an interval, is null.

lineage.json records what the scores were made from:

- `format`: 1.
- `scores`: {path, sha256} of scores.json, which holds the settings of the evaluation.
- `ensemble`, and `truth` if it is read from another place: {path, fingerprint} of what forecasts were scored against.
  A store also has its `provenance`: paths, settings and fingerprint of the archive that it was built from.
- `forecasts`: {label, path, files}. `files` holds, by file name, the attributes of each forecast that state its origin:
  `source` (version, checkpoint and input), `checkpoint_step`, `checkpoint_sha256` (the checkpoint's checkpoint.json has
  settings and data of the training), `training_data_fingerprint`, `data_fingerprint` (of the input's init time) and
  `settings_digest` (of `predict`). A file of another program may have none of these.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ensemble_ml.config import EvaluateConfig, as_list, require
from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable, draft_of, give_name, strict
from ensemble_ml.grid import Grid
from ensemble_ml.pulse import Pulse
from ensemble_ml.store.source import Source
from ensemble_ml.verification import heights, summary, vectors
from ensemble_ml.verification.aggregation import WEIGHTINGS, AggregationState, Column
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.bootstrap import blocks_of, draw_dates, merged
from ensemble_ml.verification.fits import fit_group
from ensemble_ml.verification.forecasts import ForecastSet, open_forecasts
from ensemble_ml.verification.heights import Heights
from ensemble_ml.verification.kept import Kept, part_of, put_part, some_kept
from ensemble_ml.verification.page import DEFINITIONS
from ensemble_ml.verification.pictures import Pictures, cells_together
from ensemble_ml.verification.plan import Plan, make_plan
from ensemble_ml.verification.probability import Calibration
from ensemble_ml.verification.report import write_report
from ensemble_ml.verification.samples import Group, Setting, check_members, check_predictions, settled
from ensemble_ml.verification.scores import HEADLINE_LEAD, Scores
from ensemble_ml.verification.scoring import (
    EFI_WEIGHTED,
    EVERYWHERE,
    EXTREME,
    OF_THE_LIMIT,
    Tables,
    climate_note,
    left_out,
    score_group,
    unfitted,
)
from ensemble_ml.verification.strata import Case, box_of, calibration_rows, extreme_case, region_masks, strata_rows
from ensemble_ml.verification.values import CLIMATOLOGY, settle_families
from ensemble_ml.verification.vectors import Known, score_vectors
from ensemble_ml.wording import date_text, duration

log = logging.getLogger(__name__)

FORMAT = 1
FILES = ("scores.json", "report.html")
_LINEAGE = "lineage.json"
_PREFERRED = ("t850", "z500", "t2m", "msl")  # fields that the report shows, where they are scored


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation: the content of scores.json, and everything that its report is drawn from.

    Attributes:
        content: The content of scores.json.
        scores: The scores with their draws.
        tables: Sums, histograms and maps.
        case: The most unusual test date; None without a model climate.
        grid: Grid of the fields.
        land: (Y, X) land fraction, where it is known.
        kept: Folder of the intermediate results.
        lineage: The content of lineage.json but for the scores.
    """

    content: dict[str, Any]
    scores: Scores
    tables: Tables
    case: Case | None
    grid: Grid
    land: np.ndarray | None
    kept: Kept
    lineage: dict[str, Any]

    def page(self) -> str:
        """Return the report, an HTML page that needs no other file."""
        return write_report(self.content, self.scores, self.tables, self.case, self.grid, self.land)

    def json(self) -> str:
        """Return the text of scores.json."""
        return json.dumps(strict(self.content), indent=1, allow_nan=False)


def evaluate(
    config: EvaluateConfig, source: Source, unverified: Mapping[str, str] | None = None, ground: Heights | None = None
) -> Path:  # fmt: skip
    """Score the forecasts of a configuration, and write scores.json, lineage.json and report.html.

    The results of each group of fields are kept in the output folder until all files are written. If the evaluation is
    stopped, the same command continues from there.

    Args:
        config: Settings.
        source: The full ensemble, and the truth where there is one.
        unverified: Sentences on what the truth cannot verify, by variable. Those of scored variables become notes.
        ground: Height of the ground in model and truth; None where it is not known.

    Returns:
        The folder with these files.

    Raises:
        UserError: No forecast is given, one cannot be read, a report exists or cannot be written, forecasts or `ground`
            have another grid, `members_in` exceeds the ensemble, no date is common, or the source lacks the dates to
            fit baselines on.
    """
    output = Path(config.output)
    overwrite = _check(config, output)
    # Intermediate results are removed only when all files are written, or when another process has written them.
    found = score(config, source, unverified, ground)
    try:
        with Pulse("evaluate: the report is drawn"):
            _write(output, overwrite, found)
    except UserError:  # another process has made the report meanwhile
        found.kept.drop()
        raise
    found.kept.drop()
    for line in found.content["headline"]:
        log.info("%s", line)
    log.info("-> %s, %s", output / FILES[1], output / FILES[0])
    return output


def score(
    config: EvaluateConfig, source: Source, unverified: Mapping[str, str] | None = None, ground: Heights | None = None
) -> Evaluation:  # fmt: skip
    """Score as `evaluate` does, from the same arguments, but write no report.

    The intermediate results for a rerun are still written to the output folder. Errors are those of `evaluate`, apart
    from those about the report.
    """
    with Pulse("evaluate: forecasts are opened") as pulse:
        return _evaluated(config, source, unverified or {}, ground, pulse)


def _evaluated(
    config: EvaluateConfig, source: Source, unverified: Mapping[str, str], ground: Heights | None, pulse: Pulse
) -> Evaluation:
    """Score the forecasts, and set the text of `pulse` at each step."""
    check_members(source, config.members_in)
    # Heights are checked before forecasts are opened, because all later work is useless if they have a wrong grid.
    if ground is not None:
        ground.check(source.layout.grid)
    forecasts = open_forecasts(as_list(config.forecast) + as_list(config.baselines or []))
    ours = forecasts[: len(as_list(config.forecast))]
    try:
        plan = make_plan(config, source, forecasts)
        scored = dict.fromkeys(column.variable for column in plan.columns)
        plan.notes[:0] = [text for name, text in unverified.items() if name in scored]
        if not plan.truth:
            ground = None  # no member is compared with what stands on other ground
        if ground is not None:
            area = source.layout.grid.area_weights()
            # A correction for height that makes raw members worse would make the comparison too easy for forecasts.
            ground = settled(source, ground, plan.groups, plan.fit.tolist(), area)
        if plan.truth and (of_heights := heights.note(ground, {*scored})):
            plan.notes.append(of_heights)
        for note in plan.notes:
            log.info("%s", note)
        setting, regions = _setting(config, source, forecasts, plan, ground)
        plan.notes.append(climate_note(setting))
        log.info("%s", plan.notes[-1])
        # A mistake that all files share must surface now, and not after hours of fitting.
        blocks = blocks_of(source.layout.init_time[plan.test], config.block_days)
        check_predictions(setting, plan.groups, int(plan.test[0]))
        kept = Kept.of(config, setting, plan)
        tables = _score(setting, len(ours), plan, regions, blocks, kept, pulse)
        pulse.doing("evaluate: intervals are computed from draws of blocks of dates")
        state, pictures = tables.state, tables.pictures
        case = extreme_case(setting, plan, pictures)
    finally:
        for forecast in forecasts:
            forecast.close()
    names = [f"{name}_{size}" for size in (setting.reduced, setting.full) for name in CORRECTIONS]
    # This must come before any score is computed, because it fills in the statistics of baselines that were scored as
    # two distributions.
    families = settle_families(state, plan.columns, [*names, CLIMATOLOGY])
    scores = Scores(
        state, plan.columns, draw_dates(blocks, config.bootstrap, config.seed), int(blocks.max()) + 1,
        config.confidence, tuple(f.label for f in ours), setting.reduced, setting.full,
        tuple(f.label for f in forecasts[len(ours) :]),
        {f.label: len(f.members_in) for f in forecasts if f.members_in},
    )  # fmt: skip
    content = _content(config, setting, plan, scores, families)
    content |= {
        "strata": strata_rows(scores, source.layout.init_time[plan.test], regions),
        "calibration": calibration_rows(scores, tables.calibration),
        "vectors": vectors.rows(scores, tables.vectors),
        "case": None if case is None else case.as_dict(),
    }
    return Evaluation(
        content, scores, tables, case, source.layout.grid, source.static().get("lsm"), kept, _lineage(source, forecasts)
    )


def _check(config: EvaluateConfig, output: Path) -> bool:
    """Return whether files in the output folder may be replaced.

    Refuse a configuration without a forecast, or one whose output cannot be written, or exists and may not be replaced.
    """
    check_writable(output)
    require(
        "forecast", config.forecast, bool(as_list(config.forecast)), "give a folder of forecasts, or a list of them"
    )
    overwrite = config.overwrite or _without_report(config, output)
    for name in FILES:
        free = overwrite or not (output / name).exists()
        require("output", config.output, free, f"{name} exists there; set overwrite=true or choose another output")
    return overwrite


def _without_report(config: EvaluateConfig, output: Path) -> bool:
    """Return whether the same evaluation was stopped in this folder when its scores were written, but not its report.

    Its intermediate results are still there, and scores.json holds its settings.
    """
    scores, report = (output / name for name in FILES)
    if report.exists() or not some_kept(output):
        return False
    try:
        return bool(json.loads(scores.read_text(encoding="utf-8"))["settings"] == strict(asdict(config)))
    except (OSError, ValueError, TypeError, KeyError):  # there are no scores yet, or they are of another program
        return False


def _setting(
    config: EvaluateConfig, source: Source, forecasts: list[ForecastSet], plan: Plan, ground: Heights | None
) -> tuple[Setting, tuple[str, ...]]:
    """Return the setting that all fields share, and the names of the regions.

    The weights of the regions follow the two weightings of the globe.
    """
    land, taken = source.static().get("lsm"), (*WEIGHTINGS, EXTREME, EFI_WEIGHTED, EVERYWHERE)
    regions = region_masks(source.layout.grid, land, config.regions, taken)
    area = source.layout.grid.area_weights()
    weights = np.stack([area, np.ones(area.shape), *(area * mask for mask in regions.values())])
    # Odd and even blocks of the fit dates form two halves, so that both see all seasons (`baselines`).
    halves = blocks_of(source.layout.init_time[plan.fit], config.block_days) % 2
    rest = plan.reduced, plan.fit, halves, weights, plan.truth, config.climate_days
    return Setting(source, tuple(forecasts), *rest, heights=ground), tuple(regions)


def _references(setting: Setting) -> tuple[str, ...]:
    """Return the entrants that maps may compare forecasts with. The best baseline is known only after scoring."""
    perhaps = (*(f"{name}_{setting.reduced}" for name in CORRECTIONS), CLIMATOLOGY)
    return (f"raw_{setting.full}", *perhaps, *(forecast.label for forecast in setting.forecasts))


def _score(
    setting: Setting, judged: int, plan: Plan, regions: tuple[str, ...], blocks: np.ndarray, kept: Kept, pulse: Pulse
) -> Tables:
    """Score all groups of fields and all vectors of members, continuing where an earlier run stopped.

    The first `judged` forecasts of the setting are those that are judged; the others serve as baselines.
    """
    dates, columns = len(plan.test), len(plan.columns)
    area, ours = setting.weights[0], tuple(one.label for one in setting.forecasts[:judged])
    known: list[tuple[Group, Known | None]] = []
    tables = Tables(
        AggregationState(dates, columns, (*WEIGHTINGS, *regions, EXTREME, EFI_WEIGHTED)),
        Calibration(dates, columns, area),
        Pictures(
            _headline_columns(plan.columns), area, cells_together(area.shape, columns, judged), setting.reduced,
            setting.full, setting.source.layout.init_time[plan.test], merged(blocks), ours, _references(setting),
            box_of(setting.source.layout.grid),
        ),
    )  # fmt: skip
    # Groups are scored in this order, so a stopped run leaves results up to the first one that is missing.
    for group in plan.groups:
        if (found := kept.load(_name(group))) is None:
            break
        part, one = found
        put_part(tables, group.columns, part)
        known.append((group, one))
    done, every = len(known), len(plan.groups)
    if done:
        log.info(
            "%d of %d groups of fields are taken from an evaluation that was stopped (%s)", done, every, kept.folder
        )
    started, before = time.monotonic(), columns - sum(len(group.levels) for group in plan.groups[done:])
    scored = before
    pulse.doing(
        lambda: f"evaluate: {scored} of {columns} fields are scored{_left(started, scored - before, columns - scored)}"
    )
    for group in tqdm(
        plan.groups[done:], desc="evaluate", unit="field", initial=done, total=every, disable=not sys.stderr.isatty()
    ):
        fit = fit_group(setting, group)
        score_group(setting, group, fit, plan.test, tables)
        known.append((group, Known.of(setting, fit)))
        kept.save(_name(group), (part_of(tables, group.columns), known[-1][1]))
        scored = group.columns.stop
        # After the first group, the time for the others is logged, so that a user can decide to wait or to stop.
        if len(known) == done + 1 and scored < columns:
            seconds, left = time.monotonic() - started, columns - scored
            text = "%s at %d h scored in %s; the other %d fields take about %s"
            about = duration(seconds * left / len(group.levels))
            log.info(text, group.variable, group.lead_hours, duration(seconds), left, about)
    pulse.doing("evaluate: vectors of several fields are scored")
    # Vectors need all fields of a lead at once, so they are scored after the groups, from what was kept of their fits.
    for lead in sorted({group.lead_hours for group in plan.groups}):
        if (found := kept.load(f"members_{lead}")) is None:
            found = (score_vectors(setting, known, plan.test, lead),)
            kept.save(f"members_{lead}", found)
        tables.vectors.extend(one for one in found if one is not None)
    return tables


def _left(started: float, done: int, left: int) -> str:
    """Return the end of a sentence: about how long the other fields take. It is empty while none is done."""
    return f", about {duration((time.monotonic() - started) * left / done)} left" if done else ""


def _name(group: Group) -> str:
    return f"{group.variable}_{group.lead_hours}"


def _headline_columns(columns: tuple[Column, ...]) -> tuple[int, ...]:
    """Return the positions of the first two fields at the headline lead, where `_PREFERRED` ones come first."""
    leads = {column.lead_hours for column in columns}
    lead = HEADLINE_LEAD if HEADLINE_LEAD in leads else max(leads)
    there = {column.name: c for c, column in enumerate(columns) if column.lead_hours == lead}
    order = [name for name in _PREFERRED if name in there] + [name for name in there if name not in _PREFERRED]
    return tuple(there[name] for name in order[:2])


def _content(
    config: EvaluateConfig, setting: Setting, plan: Plan, scores: Scores, families: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Compose the content of scores.json but for strata, calibration, vectors and the case."""
    layout = setting.source.layout
    times = layout.init_time
    numbers = [int(number) for number in layout.realization]
    omitted = left_out(scores)
    notes = plan.notes + unfitted(scores, len(plan.fit)) + summary.known_in_few(scores)
    # Points are left out for two reasons, which a reader must not confuse: missing values, and limits without a
    # meaning.
    limits = {statistic.value for statistic in OF_THE_LIMIT}
    for words, of_the_limit in (
        ("scores leave points out that miss a value", False),
        ("Brier scores leave points out where the limit says nothing", True),
    ):
        which = [one for one in omitted if (one["statistic"] in limits) == of_the_limit]
        if which:
            most = 100 * max(one["area_share"] for one in which)
            notes.append(f"{len(which)} {words}, up to {most:.3g} % of the area: see left_out in scores.json.")
    return {
        "format": FORMAT,
        "headline": summary.headline(scores, len(plan.test)),
        "claims": [claim.as_dict() for claim in summary.claims(scores)],
        "notes": notes,
        "settings": strict(asdict(config)),
        "definitions": {name: " ".join(text.split()) for name, text in DEFINITIONS.items()},
        "dates": {
            "test": [date_text(t) for t in times[plan.test]],
            "fit": [date_text(t) for t in times[plan.fit]],
            "dropped": plan.dropped,
            "blocks": scores.blocks,
            "block_days": config.block_days,
        },
        "ensemble": {
            "path": setting.source.path,
            "members": numbers,
            "reduced": numbers[: setting.reduced],
            "held_out": numbers[setting.reduced :],
            "grid": layout.grid.describe(),
            "fingerprint": setting.source.fingerprint(),
        },
        "heights": heights.as_dict(setting.heights, {column.variable for column in plan.columns}),
        "forecasts": [
            {
                "label": f.label,
                "path": f.path,
                "members_in": list(f.members_in),
                "checkpoints": list(f.checkpoints),
                "sources": list(f.sources),
                "dates": len(f.files),
                "baseline": f.label in scores.baselines,
            }
            for f in setting.forecasts
        ],
        "entrants": {entrant: summary.describe(entrant) for entrant in scores.entrants()},
        "families": families,
        "summary": summary.summary_rows(scores),
        "comparisons": summary.comparison_rows(scores),
        "scores": summary.rows(scores),
        "left_out": omitted,
    }


def _write(output: Path, overwrite: bool, found: Evaluation) -> None:
    """Write scores.json and lineage.json, then the report.

    Scoring may take days. If the page cannot be drawn, its results must not be lost.
    """
    output.mkdir(parents=True, exist_ok=True)
    scores_json, report = (output / name for name in FILES)
    text = found.json()
    put(scores_json, text, overwrite)
    put(output / _LINEAGE, _lineage_json(found.lineage, scores_json, text), True)
    if overwrite:
        report.unlink(missing_ok=True)  # the old report belongs to other scores
    try:
        page = found.page()
    except BaseException:  # this includes Ctrl-C
        log.warning("%s holds all scores; %s could not be drawn", scores_json, report.name)
        raise
    put(report, page, overwrite)


def put(path: Path, text: str, overwrite: bool) -> None:
    """Write a text to a draft file and rename it, so that the file is either whole or missing.

    Raises:
        UserError: The file exists, and `overwrite` is false.
    """
    draft = draft_of(path)
    try:
        draft.write_text(text, encoding="utf-8")
        give_name(draft, path, replace=overwrite)
    finally:
        draft.unlink(missing_ok=True)


def _lineage(source: Source, forecasts: Sequence[ForecastSet]) -> dict[str, Any]:
    """Return the content of lineage.json but for the scores. Forecasts include those that count as baselines."""
    truth = getattr(source, "truth", None)
    parts = {"ensemble": getattr(source, "forecast", source), "truth": getattr(truth, "store", truth)}
    return {name: _described(part) for name, part in parts.items() if part is not None} | {
        "forecasts": [{"label": f.label, "path": str(Path(f.path).absolute()), "files": f.origins} for f in forecasts],
    }


def _described(source: Any) -> dict[str, Any]:
    """Return path and fingerprint of a store or an archive, and the provenance of a store."""
    facts = {"path": source.path, "fingerprint": source.fingerprint()}
    return facts | ({"provenance": source.provenance} if hasattr(source, "provenance") else {})


def _lineage_json(content: dict[str, Any], scores: Path, text: str) -> str:
    """Return the text of lineage.json. `content` is that of `_lineage`, `text` that of scores.json."""
    of_scores = {"path": str(scores.absolute()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(strict({"format": 1, "scores": of_scores} | content), indent=1, allow_nan=False)
