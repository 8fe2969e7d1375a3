"""The sections of the loading benchmark that race loaders, and the table of bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.results import LOST, Claim
from benchmarks.loading.track import Rival, Track, rivals
from ensemble_ml.config import RaceConfig
from ensemble_ml.errors import UserError
from ensemble_ml.machine import cores

SAME, OWN = "same bytes", "own formats"
_DATALOADER = "DataLoader, raw files"


def same_bytes(one: Track, race: RaceConfig, tools: Path) -> list[Claim]:
    """Race all loaders on raw float32 files, each competitor with its best settings.

    Args:
        one: the track.
        race: the settings of the race.
        tools: folder in which competitors are installed.
    """
    _enter(one, race, tools, SAME)
    claims = _ahead(one, race.caches, SAME)
    ours = _ours(SAME, 1.0)
    if 1.0 in race.caches and _DATALOADER in one.outcomes:
        value = one.seconds(_DATALOADER).median / one.seconds(ours).median
        claims.append(Claim("cache 1.0, same bytes: throughput over the DataLoader's", value, "times", 5.4))
    return [*claims, *_waits(one, race.caches, SAME), *_predictions(one, race.caches, SAME)]


def own_formats(one: Track, race: RaceConfig, tools: Path) -> list[Claim]:
    """Race our loader on the packed store against competitors on the formats that suit them best.

    The DataLoader also reads raw files.

    Args:
        one: the track.
        race: the settings of the race.
        tools: folder in which competitors are installed.
    """
    if "dataloader" in race.rivals and _DATALOADER not in one.outcomes:
        raw = rivals(one, ["dataloader"], race.workers, tools, same_bytes=True)[0]
        one.run(raw.name, one.spec(**raw.spec(one, 0), **one.tuned(raw.name, raw.settings, raw.spec(one, 0))))
    _enter(one, race, tools, OWN)
    claims = _ahead(one, race.caches, OWN)
    for cache in (c for c in (0.25, 0.5) if c in race.caches):
        mine = one.seconds(_ours(OWN, cache)).median
        for rival, words, target in (
            (_DATALOADER, "the DataLoader on raw files", 4.0),
            ("DataLoader, packed files", "the DataLoader given our packed files", 1.8),
        ):
            if rival in one.outcomes:
                value = one.seconds(rival).median / mine
                claims.append(Claim(f"cache {cache:g}, own format: throughput over {words}", value, "times", target))
    return [*claims, *_waits(one, race.caches, OWN), *_predictions(one, race.caches, OWN)]


@contextmanager
def _noted(one: Track, name: str) -> Iterator[None]:
    """Note a competitor that does not finish a run. It has no result there; other results stay."""
    try:
        yield
    except UserError as error:
        one.notes.append(f"{name}: did not finish ({error}).")
        one.outcomes.pop(name, None)


def losses(one: Track, race: RaceConfig, tools: Path) -> None:
    """Run the loaders for one epoch, and for all epochs without a cache, where knowing the future helps least.

    Args:
        one: the track.
        race: the settings of the race.
        tools: folder in which competitors are installed.
    """
    for same in (True, False):
        kind = SAME if same else OWN
        for rival in rivals(one, race.rivals, race.workers, tools, same_bytes=same):
            epoch, bare = f"one epoch, {kind}: {rival.name}", f"no cache, {kind}: {rival.name}"
            with _noted(one, epoch):
                best = one.tuned(f"{rival.name} ({kind})", rival.settings, rival.spec(one, 1.0))
                one.run(epoch, one.spec(**rival.spec(one, 1.0), **best, epochs=1))
                with _noted(one, bare):
                    if not rival.cached:
                        one.run(bare, one.spec(**rival.spec(one, 0), **best))
        ours = "ours raw" if same else "ours packed"
        one.run(f"one epoch, {kind}: ours", one.spec(ours, one.raw, epochs=1))
        one.run(f"no cache, {kind}: ours", one.spec(ours, 0))


def fast_storage(one: Track, race: RaceConfig, tools: Path) -> None:
    """Run the loaders on storage faster than 3 GB/s a core, with a cache for the whole dataset.

    Args:
        one: the track.
        race: the settings of the race.
        tools: folder in which competitors are installed.
    """
    for same in (True, False):
        kind = SAME if same else OWN
        for rival in rivals(one, race.rivals, race.workers, tools, same_bytes=same):
            name = f"fast storage, {kind}: {rival.name}"
            with _noted(one, name):
                best = one.tuned(f"fast storage, {rival.name} ({kind})", rival.settings, rival.spec(one, 1.0))
                one.run(name, one.spec(**rival.spec(one, 1.0), **best))
        one.run(f"fast storage, {kind}: ours", one.spec("ours raw" if same else "ours packed", one.raw))


def lost(one: Track) -> list[str]:
    """Return a line for each run of these sections in which a competitor was faster than ours.

    Args:
        one: the track.
    """
    lines = []
    for name in one.outcomes:
        place, _, who = name.rpartition(": ")
        if who not in ("ours", "") and f"{place}: ours" in one.outcomes:
            ratio = one.seconds(f"{place}: ours").median / one.seconds(name).median
            if ratio > 1:
                lines.append(f"{LOST}{place}: {who} is {ratio:.3f} times as fast as ours.")
    return lines


def bytes_table(one: Track, race: RaceConfig) -> list[Claim]:
    """Compare the bytes from storage with the bound and with the plan.

    This is done at every cache size, on 1, 2 and 4 ranks, in both formats.

    Args:
        one: the track.
        race: the settings of the race.
    """
    above, differ, beyond = [], [], []
    for kind, size in (("raw", one.raw), ("packed", one.packed)):
        for ranks in (1, 2, 4):
            for cache in race.caches:
                name = f"{kind}, cache {cache:g}, {ranks} rank{'s' * (ranks > 1)}"
                found = one.run(name, one.spec(f"ours {kind}", cache * size, ranks=ranks, compute_ms=0.0), 1)[0]
                assert found.traffic is not None
                above.append(100 * (found.counted("storage") / found.traffic.bound - 1))
                differ.append(abs(found.counted("storage") - found.traffic.storage))
                if kind == "raw":
                    differ.append(abs(found.read - found.traffic.storage))
                else:
                    beyond.append(100 * (found.read / found.traffic.storage - 1))
    where = f"caches {', '.join(f'{c:g}' for c in race.caches)}; 1, 2 and 4 ranks; raw and packed; the worst"
    words = "bytes read from slow storage above the bound F + (E-1)(F-K)"
    one.notes.append(
        f"The store's own indexes and factors, read once by each rank, are not in its plan: {min(beyond):.1f} to"
        f" {max(beyond):.1f} % of these small samples' bytes."
    )
    return [
        Claim(f"{words}: {where}", max(above), "%", 1.0, at_most=True),
        Claim(f"bytes by which the plan and the counters differ: {where}", max(differ), "bytes", 0.0, at_most=True),
    ]


def _ours(kind: str, cache: float) -> str:
    return f"{kind}, cache {cache:g}: ours"


def _enter(one: Track, race: RaceConfig, tools: Path, kind: str) -> None:
    """Run ours and every competitor of a class at every cache size."""
    for cache in race.caches:
        one.run(_ours(kind, cache), one.spec("ours raw" if kind == SAME else "ours packed", cache * one.raw))
    for rival in rivals(one, race.rivals, race.workers, tools, same_bytes=kind == SAME):
        _race_rival(one, race, kind, rival)


def _race_rival(one: Track, race: RaceConfig, kind: str, rival: Rival) -> None:
    for cache in [c for c in race.caches if c >= 0.25] if rival.cached else [0.0]:
        name = f"{kind}, cache {cache:g}: {rival.name}" if rival.cached else rival.name
        with _noted(one, name):
            best = one.tuned(name, rival.settings, rival.spec(one, cache))
            one.run(name, one.spec(**rival.spec(one, cache), **best))


def _ahead(one: Track, caches: Sequence[float], kind: str) -> list[Claim]:
    """Claim, for each cache, by how much ours is ahead of the fastest competitor of its class."""
    claims = []
    plain = "DataLoader, raw files" if kind == SAME else "DataLoader, packed files"
    for cache in (c for c in caches if c >= 0.25):
        prefix = f"{kind}, cache {cache:g}: "
        times = {
            name.removeprefix(prefix): one.seconds(name).median
            for name, found in one.outcomes.items()
            if found and (name == plain or name.startswith(prefix)) and name != _ours(kind, cache)
        }
        if times:
            fastest = min(times, key=lambda name: times[name])
            value = times[fastest] / one.seconds(_ours(kind, cache)).median
            count = f"{len(times)} rivals" if len(times) > 1 else "one rival that ran"
            words = f"cache {cache:g}, {kind}: throughput over the fastest of {count} ({fastest})"
            claims.append(Claim(words, value, "times", 1.0))
    return claims


def _waits(one: Track, caches: Sequence[float], kind: str) -> list[Claim]:
    """Claim the wait for batches once the cache holds the dataset."""
    if 1.0 not in caches:
        return []
    value = statistics.median(100 * outcome.waited for outcome in one.outcomes[_ours(kind, 1.0)])
    return [Claim(f"wait after the first epoch, {kind}, cache 1.0", value, "% of a step", 1.0, at_most=True)]


def _predictions(one: Track, caches: Sequence[float], kind: str) -> list[Claim]:
    """Claim the difference of predicted and measured time, at the cache where it is largest."""
    at_a_time = min(cores(), 4 * one.ranks)
    decode, again = (one.decode_seconds(opened=opened) if kind == OWN else 0.0 for opened in (False, True))
    compute = one.size.samples / one.ranks * one.compute_ms / 1e3
    worst = 0.0
    for cache in caches:
        found = one.outcomes[_ours(kind, cache)]
        assert found[0].traffic is not None
        first, later = (one.size.samples * each / at_a_time for each in (decode, again if found[0].opened else decode))
        predicted, limit = found[0].traffic.seconds(
            storage_rate=one.crew.storage.mb_s * 1e6, compute=compute, decode=first, again=later
        )
        measured = statistics.median(outcome.seconds for outcome in found)
        worst = max(worst, abs(predicted / measured - 1))
        one.notes.append(f"{_ours(kind, cache)}: predicted {predicted:.2f} s (by {limit}), measured {measured:.2f} s.")
    return [Claim(f"predicted time against measured, {kind}, the worst cache", 100 * worst, "%", 15.0, at_most=True)]
