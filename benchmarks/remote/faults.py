"""Prepare an archive from a server that answers wrongly once in a while: the same store, or one line and no change."""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.remote.server import CHANGED, RESET, TRUNCATED, Fault, Plan, serving
from data_prep.prepare import prepare
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError

FAULTS: tuple[Fault, ...] = (RESET, TRUNCATED, CHANGED, 403, 404, 429, 500)
_MOST = 4  # requests in a row that are answered wrongly


def digest(store: Path) -> str:
    """Return a checksum of all files of a store."""
    found = hashlib.sha256()
    for path in sorted(one for one in store.rglob("*") if one.is_file()):
        found.update(f"{path.relative_to(store)}\n".encode() + path.read_bytes())
    return found.hexdigest()


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Let preparation log errors alone, since it runs hundreds of times."""
    logger = logging.getLogger("data_prep")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def meet_faults(archive: Path, folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Prepare an archive again and again, each time with a random fault at a random request.

    A store is there already, and is to be replaced. Each time it has to be replaced by the same bits, or to stay while
    a UserError of one line says what is wrong.

    Args:
        archive: the archive, a Zarr store.
        folder: where stores are written.
        count: number of faults.
        seed: seed of the random numbers.

    Returns:
        How often the store was made all the same, and how often the fault was said.

    Raises:
        AssertionError: neither is the case.
    """
    rng, outcome = random.Random(seed), {"identical": 0, "refused": 0}

    def config(url: str) -> PrepareConfig:
        return PrepareConfig(input=url, output=str(folder / "store.zarr"), overwrite=True, restart=True, workers=2)

    plan = Plan()
    with serving(archive.parent, plan) as url, _errors_alone():
        source = f"{url}/{archive.name}"
        store = prepare(config(source))
        whole, asked = digest(store), len(plan.asked)
        for number in range(count):
            fault, first = rng.choice(FAULTS), rng.randrange(asked)
            plan.asked.clear()
            plan.nth = {first + step: fault for step in range(rng.randint(1, _MOST))}
            case = f"case {number}: {fault} at request {first} of about {asked}"
            try:
                prepare(config(source))
            except UserError as error:
                outcome["refused"] += 1
                assert re.fullmatch(r"\S.*", str(error)), f"{case}: {error}"
            else:
                outcome["identical"] += 1
            assert digest(store) == whole, f"{case}: another store"
    return outcome
