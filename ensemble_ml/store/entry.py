"""Keep what a build must remember of a finished init time, in one file.

The file is written by rename when all shards of the init time exist. It holds the packing factors of every field, the
moments of the fields, the shards with their checksums, the parts of the archive that were read, and the
quantisation error. `Build.finalise` makes the store's own arrays and statistics from these entries.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ensemble_ml.folders import write_whole
from ensemble_ml.store.manifest import Entry
from ensemble_ml.store.schema import Kind
from ensemble_ml.store.shard import damaged
from ensemble_ml.store.source import Part
from ensemble_ml.store.sources import Sources, Stamps
from ensemble_ml.store.statistics import NAMES, Moments


@dataclass(eq=False)
class DateEntry:
    """The entry of one init time.

    Attributes:
        files: Size and digest of each shard, by its path in the store.
        factors: Packing factors (M, T, V, Z) by array and factor.
        moments: Moments of the forecast by kind, (T, V, Z).
        derived: Moments of the ensemble's mean and spread as fields of their own, by part and kind.
        errors: Largest quantisation error by variable, in its unit.
        masked: Variables with points that have no value.
        masks: Names of the mask arrays that have a shard.
        sources: Files and fields from which each part was read.
        plan: Digest of the settings for which the init time was built (`BuildPlan.of_date`).
        fingerprint: Fingerprint of the archive that was read; None for fields in memory.
    """

    files: dict[str, Entry] = field(default_factory=dict)
    factors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    moments: dict[Kind, Moments] = field(default_factory=dict)
    derived: dict[tuple[Part, Kind], Moments] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    sources: dict[str, Sources] = field(default_factory=dict)
    plan: str = ""
    fingerprint: str | None = None

    def add(self, other: DateEntry) -> None:
        """Add an entry of other parts of the same init time, in place. `plan` and `fingerprint` stay as they are."""
        self.files |= other.files
        self.factors |= other.factors
        self.moments |= other.moments
        self.derived |= other.derived
        self.masked |= other.masked
        self.masks |= other.masks
        self.sources |= other.sources
        for name, bound in other.errors.items():
            self.errors[name] = max(bound, self.errors.get(name, 0.0))

    def save(self, path: Path) -> None:
        """Write the entry to `path` by rename, so that a file that exists is complete.

        Raises:
            OSError: The system cannot write the file.
        """
        facts = {
            "files": {name: [entry.bytes, entry.sha256] for name, entry in sorted(self.files.items())},
            "errors": dict(sorted(self.errors.items())),
            "masked": sorted(self.masked),
            "masks": sorted(self.masks),
            "plan": self.plan,
            "fingerprint": self.fingerprint,
            "sources": {part: [one.checksum, one.files] for part, one in self.sources.items()},
        }
        # All that is not an array is kept as JSON bytes in one, so that loading never unpickles.
        arrays = {"json": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        for name, factors in self.factors.items():
            arrays |= {f"factor/{name}/{key}": values for key, values in factors.items()}
        for kind, moments in self.moments.items():
            arrays |= {f"moments/{kind.value}/{key}": values for key, values in moments.arrays().items()}
        for (part, kind), moments in self.derived.items():
            arrays |= {f"derived/{part.value}_{kind.value}/{key}": values for key, values in moments.arrays().items()}
        arrays |= {f"sources/{part}": one.places for part, one in self.sources.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)  # type: ignore[arg-type]
        write_whole(path, buffer.getbuffer(), sync=True)

    @classmethod
    def load(cls, path: Path) -> DateEntry:
        """Read an entry.

        Raises:
            UserError: The file is damaged, or cannot be read (then the cause is an OSError).
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls._from(dict(arrays))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise damaged(path, str(error)) from error

    @classmethod
    def files_of(cls, path: Path) -> tuple[dict[str, Entry], Stamps, str, str | None]:
        """Read only the part of an entry that shows whether it is still valid.

        Returns:
            The attribute `files`, the stamps of the source files, and the attributes `plan` and `fingerprint`.

        Raises:
            UserError: The file is damaged or cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                # `np.load` reads arrays on demand, so the factors, which may be large, are not read here.
                facts = json.loads(arrays["json"].tobytes())
            stamps = {path: stamp for _, files in facts["sources"].values() for path, stamp in files.items()}
            files = {name: Entry(size, digest) for name, (size, digest) in facts["files"].items()}
            return files, stamps, str(facts["plan"]), facts.get("fingerprint")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise damaged(path, str(error)) from error

    @classmethod
    def _from(cls, arrays: dict[str, np.ndarray]) -> DateEntry:
        """Make an entry from the arrays of its file."""
        facts = json.loads(arrays.pop("json").tobytes())
        files = {name: Entry(size, digest) for name, (size, digest) in facts["files"].items()}
        entry = cls(files, errors=facts["errors"], masked=set(facts["masked"]), masks=set(facts["masks"]))
        entry.plan, entry.fingerprint = facts["plan"], facts.get("fingerprint")
        found: dict[Kind, dict[str, np.ndarray]] = {}
        derived: dict[str, dict[str, np.ndarray]] = {}
        for key, values in arrays.items():
            group, name, *last = key.split("/")
            if group == "factor":
                entry.factors.setdefault(name, {})[last[0]] = values
            elif group == "moments":
                found.setdefault(Kind(name), {})[last[0]] = values
            elif group == "derived":
                derived.setdefault(name, {})[last[0]] = values
            else:
                checksum, stamps = facts["sources"][name]
                entry.sources[name] = Sources({path: tuple(one) for path, one in stamps.items()}, values, checksum)
        entry.moments = {kind: Moments(*(parts[name] for name in NAMES)) for kind, parts in found.items()}
        for name, parts in derived.items():
            part, kind = name.split("_")
            entry.derived[Part(part), Kind(kind)] = Moments(*(parts[key] for key in NAMES))
        return entry
