"""Settings of loading: which rank reads what, and how much it keeps in memory and on local disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import at_least, opt, require
from ensemble_ml.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)


class Assign(Enum):
    """The rule that assigns the samples of the global batch to ranks."""

    fixed = "fixed"
    locality = "locality"


class LoaderName(Enum):
    """The loader: it reads by a plan of the run, or each batch as it comes."""

    clairvoyant = "clairvoyant"
    torch = "torch"


def parse_bytes(key: str, value: Any) -> int | None:
    """Return a size such as 4GB, 512MiB or a plain number in bytes. None stays None.

    Args:
        key: name of the setting, for the message.
        value: the size.

    Raises:
        UserError: the value is no size.
    """
    if value is None:
        return None
    found = _SIZE.fullmatch(str(value).strip())
    if not found:
        raise UserError(f"{key}={value}: give bytes, or a number with KB, MB, GB, TB (powers of ten) or KiB ... TiB")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


@dataclass
class LoadingConfig:
    """The loading of batches."""

    name: LoaderName = opt(LoaderName.clairvoyant, "clairvoyant: read by plan, each byte from slow storage as rarely as possible | torch: torch's DataLoader")
    ram: Any = opt(None, "clairvoyant: memory for loading on each rank, packed cache and look-ahead together, as 4GB or 512MiB; null takes half of what is free, shared by the ranks of a host")
    disk: Any = opt(0, "clairvoyant: space for packed fields on local disk, for each rank")
    folder: str | None = opt(None, "clairvoyant: folder on local disk; needed where disk > 0")
    ahead: int = opt(3, "batches read ahead; torch: divided among the workers, at least one for each, and none without workers")
    threads: int = opt(2, "clairvoyant: threads that read and decode")
    assign: Assign = opt(Assign.fixed, "fixed: each rank gets its slice of the global batch | locality: a rank gets the samples that it holds, as far as slices stay equally long")
    workers: int = opt(0, "torch: worker processes; 0 reads in the training thread")
    timeline: str | None = opt(None, "clairvoyant: write a picture of reads, waits and compute to this file (.png, .svg, .pdf); 'run' puts it into the run folder")
    bandwidth: float | None = opt(None, "for `plan`: bandwidth of slow storage, MB/s over all ranks; null measures it while reading the store")
    host: str | None = opt(None, "clairvoyant: name under which other nodes reach this one; null takes the host name")
    node: str | None = opt(None, "clairvoyant: name that ranks share only where they share memory; null takes host name and device of /dev/shm")

    def __post_init__(self) -> None:
        at_least(self, 1, "ahead", "threads", group="loading.")
        at_least(self, 0, "workers", group="loading.")
        require("loading.bandwidth", self.bandwidth, self.bandwidth is None or self.bandwidth > 0, "must be above 0")
        parse_bytes("loading.ram", self.ram)
        disk = self.disk_bytes
        require("loading.disk", self.disk, not disk or self.folder is not None, "needs loading.folder=FOLDER on local disk")
        picture = self.timeline in (None, "run") or str(self.timeline).endswith((".png", ".svg", ".pdf"))
        require("loading.timeline", self.timeline, picture, "is written as .png, .svg or .pdf, or 'run'")
        good = self.name is LoaderName.clairvoyant or self.assign is Assign.fixed
        require("loading.assign", self.assign.value, good, "loading=torch holds nothing, so only fixed is allowed")

    @property
    def ram_bytes(self) -> int | None:
        """Return `ram` in bytes, or None if the program is to choose it."""
        return parse_bytes("loading.ram", self.ram)

    @property
    def disk_bytes(self) -> int:
        """Return `disk` in bytes, zero if it is not set."""
        return parse_bytes("loading.disk", self.disk) or 0
