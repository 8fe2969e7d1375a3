"""Build one init time: take fields in cells of one lead and one variable, and write them to the shards chunk by chunk.

A cell holds all members and levels. Mean, spread and statistics are computed in the same pass in which its chunks are
compressed, block of rows by block of rows, on the threads of a pool. At most three cells are in memory: while two are
compressed, the caller reads the next one. Chunks are written in the order of the cells, then of members and rows. The
files therefore do not depend on the number of threads.

A build remembers a finished init time in one file, its `DateEntry`. It is written by rename when all shards of the init
time exist. It holds the packing factors of every field, the moments of the fields, the shards with their checksums, the
parts of the archive that were read, and the quantisation error. `Build.finalise` makes the store's own arrays and
statistics from these entries.

Axes: M member, T lead, V variable of one kind, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import errno
import io
import json
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.folders import write_whole
from ensemble_ml.store.fuse import Members, fuse, scratch
from ensemble_ml.store.manifest import Entry, Sources, Stamps
from ensemble_ml.store.packing import PackedBlock, check_finite, decode, error_bound, exact_fields, quantise
from ensemble_ml.store.schema import FACTORS, ArraySpec, Kind, describe_field
from ensemble_ml.store.shard import Encoded, ShardWriter, damaged, encode
from ensemble_ml.store.source import Layout, Part
from ensemble_ml.store.statistics import NAMES, Moments, merge_all

AHEAD = 2  # cells that are compressed while the caller reads the next

Specs = dict[tuple[Part, Kind], ArraySpec]


class DateWriter:
    """A writer of the shards of one init time below `root`, whose chunks are compressed by the threads of `pool`.

    `date` is an index into `layout.init_time`. `close` returns the entry of the date, from which the store is finished
    later.
    """

    def __init__(self, root: Path, layout: Layout, specs: Specs, date: int, pool: ThreadPoolExecutor):
        self._root, self._layout, self._specs, self._date, self._pool = root, layout, specs, date, pool
        self._shards: dict[str, ShardWriter] = {}
        self._under_way: deque[tuple[_Cell, list[Future[_Packed]]]] = deque()
        self.entry = DateEntry()

    def cell(self, part: Part, kind: Kind, lead: int, variable: int, block: PackedBlock) -> None:
        """Take the fields of one lead and variable, as `block` (M, Z, Y, X).

        Float32 blocks are quantised where the store is packed, and packed blocks are decoded where it is not. The
        caller may change the block after it has passed AHEAD more. `lead` and `variable` are positions in the layout,
        `variable` among those of its kind.

        Raises:
            UserError: A present field holds NaN or infinity that is not masked, or the system cannot write a file.
            ValueError: The block has another shape.
        """
        spec = self._specs[part, kind]
        wanted = (spec.fields[0], spec.fields[3], *spec.grid)
        if block.values.shape != wanted:
            raise ValueError(f"{spec.name}: block of shape {block.values.shape}; {wanted} is needed")
        block = self._admit(spec, lead, variable, block)
        self._note(spec, lead, variable, block)
        cell = _Cell(spec, lead, variable, block, exact_fields(block.reference, block.scale, block.decimal))
        derived = self._specs.get((Part.MEAN, kind)) if part is Part.FORECAST else None
        with self._refusals(spec.shard(self._date)):
            self._shard(spec)
        futures = [self._pool.submit(_pack, cell, number, derived) for number in range(spec.blocks)]
        self._under_way.append((cell, futures))
        # This bounds memory: the caller waits until the oldest cell is written.
        while len(self._under_way) > AHEAD:
            self._write()

    def close(self) -> DateEntry:
        """Write the cells in progress, rename the shards, and return the entry of the date.

        Raises:
            UserError: The system cannot write a file.
        """
        while self._under_way:
            self._write()
        for name, shard in list(self._shards.items()):
            with self._refusals(name):
                self.entry.files[name] = Entry(*shard.close())
                del self._shards[name]
        return self.entry

    def abort(self) -> None:
        """Remove what is half-written. After `close` it does nothing."""
        for _, futures in self._under_way:
            # Futures that have not started are cancelled; their chunks would be thrown away.
            for future in futures:
                future.cancel()
        for shard in self._shards.values():
            shard.abort()
        self._under_way.clear()
        self._shards.clear()

    def _admit(self, spec: ArraySpec, lead: int, variable: int, block: PackedBlock) -> PackedBlock:
        """Bring a block to the packing of the store.

        Absent fields become 0, or NaN in float32. Masked points of float32 become NaN. A present field with NaN or
        infinity that is not masked is refused.
        """

        def where(index: tuple[int, ...]) -> str:
            """Name a field of the block for a message."""
            place = (index[0], lead, variable, index[1])
            return describe_field(self._layout, spec.part, self._date, spec.kind, place)

        mask = None if block.mask is None else block.mask & block.present[..., None, None]
        if block.packed:
            check_finite(block.reference[..., None, None], block.present, where=where)
        else:
            check_finite(block.values, block.present, mask=mask, where=where)
        block = replace(block, mask=mask)
        if not block.present.all():
            block = _without_absent(block)
        if block.packed and not spec.packed:
            return _as_floats(PackedBlock.plain(decode(block), block.present, mask), mask)
        if spec.packed and not block.packed:
            block = replace(quantise(block.values, mask=mask), present=block.present)
            name = _names(self._layout, spec.kind)[variable]
            bound = float(error_bound(block).max())
            self.entry.errors[name] = max(bound, self.entry.errors.get(name, 0.0))
        return block if spec.packed else _as_floats(block, mask)

    def _note(self, spec: ArraySpec, lead: int, variable: int, block: PackedBlock) -> None:
        """Keep the packing factors of a cell in the entry, and whether its variable is masked."""
        factors = self._factors(spec)
        for name in factors:
            factors[name][:, lead, variable] = getattr(block, name)
        if block.mask is not None and block.mask.any():
            self.entry.masked.add(_names(self._layout, spec.kind)[variable])

    def _factors(self, spec: ArraySpec) -> dict[str, np.ndarray]:
        """Return the factors of an array in the entry; they start with every field absent."""
        if spec.name not in self.entry.factors:
            self.entry.factors[spec.name] = empty_factors(spec)
        return self.entry.factors[spec.name]

    def _shard(self, spec: ArraySpec) -> ShardWriter:
        """Return the writer of the shard of an array."""
        name = spec.shard(self._date)
        if name not in self._shards:
            self._shards[name] = ShardWriter(self._root / name, spec)
        return self._shards[name]

    def _write(self) -> None:
        """Write the chunks of the cell that has waited longest."""
        cell, futures = self._under_way.popleft()
        blocks = [future.result() for future in futures]
        with self._refusals(cell.spec.shard(self._date)):
            self._append(cell.spec, cell, [block.values for block in blocks])
            if any(mask is not None for block in blocks for mask in block.masks):
                self.entry.masks.add(cell.spec.mask.name)
                self._append(cell.spec.mask, cell, [block.masks for block in blocks])
            self._derive(cell, blocks)

    def _append(self, spec: ArraySpec, cell: _Cell, blocks: Sequence[Sequence[Encoded | None]]) -> None:
        """Append the chunks of a cell to a shard, by member and then by block of rows."""
        members, leads, variables, rows = spec.chunks
        # Position of each member's cell among all cells of the array. A cell has one chunk for each block of rows, so
        # position times number of blocks is the number of its first chunk.
        first = (np.arange(members) * leads + cell.lead) * variables + cell.variable
        self._shard(spec).append(
            (int(first[member]) * rows + number, chunks[member])
            for member in range(members)
            for number, chunks in enumerate(blocks)
        )

    def _derive(self, cell: _Cell, blocks: Sequence[_Packed]) -> None:
        """Append mean and spread, and keep the moments of the cell."""
        if blocks[0].moments is None:
            return
        kind = cell.spec.kind
        _keep_moments(self.entry.moments, kind, cell, (block.moments for block in blocks if block.moments))
        # A spread needs two members, and the mean is left out with it (`fuse`).
        there = cell.block.present.sum(0) > 1
        for place, part in enumerate((Part.MEAN, Part.SPREAD)):
            spec = self._specs.get((part, kind))
            if spec is not None:
                self._factors(spec)["present"][0, cell.lead, cell.variable] = there
                chunks = [chunk for block in blocks for chunk in block.derived[place][0]]
                self._append(spec, cell, [[chunk if there.any() else None] for chunk in chunks])
                _keep_moments(self.entry.derived, (part, kind), cell, (block.derived[place][1] for block in blocks))

    @contextmanager
    def _refusals(self, name: str) -> Iterator[None]:
        """Turn an error of the system into a UserError that names the file and a remedy."""
        try:
            yield
        except OSError as error:
            raise refused(self._root, name, error) from error


@dataclass(frozen=True, eq=False)
class _Cell:
    """One lead and variable of one array: `block` (M, Z, Y, X) in the packing of the store."""

    spec: ArraySpec
    lead: int
    variable: int
    block: PackedBlock
    exact: np.ndarray  # (M, Z) bool (`exact_fields`)


@dataclass(frozen=True, eq=False)
class _Packed:
    """The chunks of one block of rows, and what is derived from it.

    Attributes:
        values: Encoded values by member, None for a chunk that is left out.
        masks: Encoded masks by member, None where no point is masked.
        moments: Moments of the members' values, (Z,); None for parts other than the forecast.
        derived: Encoded chunks of mean and of spread, each with its moments as a field, (Z,); empty where not stored.
    """

    values: list[Encoded | None]
    masks: list[Encoded | None]
    moments: Moments | None = None
    derived: Sequence[tuple[list[Encoded], Moments]] = ()


def refused(root: Path, name: str, error: OSError) -> UserError:
    """Make the error for a file that the system cannot write."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free space or choose another output" if full else "check the output folder"
    return UserError(f"store {root}: cannot write {name}: {error.strerror or error}; {remedy}")


def _keep_moments(kept: dict[Any, Moments], key: Any, cell: _Cell, blocks: Iterable[Moments]) -> None:
    """Merge the moments of a cell's blocks of rows, and keep them in those of the init time under `key`."""
    if key not in kept:
        kept[key] = Moments.nothing(cell.spec.fields[1:])
    merged = merge_all(blocks, (cell.spec.fields[3],))
    for name in NAMES:
        getattr(kept[key], name)[cell.lead, cell.variable] = getattr(merged, name)


def _pack(cell: _Cell, number: int, derived: ArraySpec | None) -> _Packed:
    """Compress one block of rows of all members, and compute its mean, spread and moments.

    `number` is that of the block. `derived` is the array of the mean, in whose chunks mean and spread are compressed;
    None where they are not stored.
    """
    spec, block = cell.spec, cell.block
    rows = slice(number * spec.rows, min((number + 1) * spec.rows, spec.grid[0]))
    height = rows.stop - rows.start
    chunks = scratch("chunks", (spec.fields[0], *spec.chunk), spec.dtype.type)
    np.copyto(chunks[:, :, :height], block.values[:, :, rows])
    chunks[:, :, height:] = spec.fill
    there = chunks[:, :, :height]
    mask = None if block.mask is None else block.mask[:, :, rows]
    masks: list[Encoded | None] = [None] * len(there)
    if mask is not None and spec.packed:
        there[mask] = 0
        masks = [_pack_mask(spec, one) for one in mask]
    # A chunk of nothing but the fill value is left out of the shard. The extremes show this at no extra pass, because
    # the moments need them anyway.
    ends = np.stack([there.min((2, 3)), there.max((2, 3))]) if spec.packed else None
    empty = ~ends[1].any(1) if ends is not None else ~np.isfinite(there).any((1, 2, 3))
    values = [None if blank else encode(chunk) for chunk, blank in zip(chunks, empty, strict=True)]
    if spec.part is not Part.FORECAST:
        return _Packed(values, masks)
    fused = fuse(_members(cell, there, mask, ends))
    if derived is None:
        return _Packed(values, masks, fused.moments)
    mean = _chunks(derived, fused.mean), fused.of_mean
    spread = _chunks(derived, fused.spread), fused.of_spread
    return _Packed(values, masks, fused.moments, (mean, spread))


def _members(cell: _Cell, values: np.ndarray, mask: np.ndarray | None, ends: np.ndarray | None) -> Members:
    """Describe a block of rows for `fuse`, with the extremes of each member where no point is masked."""
    block, extremes = cell.block, None
    if ends is not None and mask is None:  # decoding keeps the order of integers, so extremes stay extremes
        extremes = ((ends * block.scale + block.reference) * block.decimal).astype(np.float32)
    return Members(values, block.reference, block.scale, block.decimal, block.present, cell.exact, extremes, mask)


def _pack_mask(spec: ArraySpec, mask: np.ndarray) -> Encoded | None:
    """Compress the mask of a block of rows; None where no point is masked."""
    if not mask.any():
        return None
    chunk = np.zeros(spec.chunk, np.uint8)
    chunk[:, : mask.shape[1]] = mask
    return encode(chunk)


def _chunks(spec: ArraySpec, values: np.ndarray) -> list[Encoded]:
    """Compress a block of rows (Z, R, X) in the chunks of `spec`, of which it holds one or more."""
    chunks = []
    for first in range(0, values.shape[1], spec.rows):
        part = values[:, first : first + spec.rows]
        if part.shape == spec.chunk:
            chunk = np.ascontiguousarray(part)
        else:
            chunk = np.full(spec.chunk, spec.fill, spec.dtype)
            chunk[:, : part.shape[1]] = part
        chunks.append(encode(chunk))
    return chunks


def empty_factors(spec: ArraySpec) -> dict[str, np.ndarray]:
    """Return the factors (M, T, V, Z) of an array in which every field is absent."""
    present = {"present": np.zeros(spec.fields, bool)}
    if not spec.packed:
        return present
    return {name: np.ones(spec.fields) if name == "decimal" else np.zeros(spec.fields) for name in FACTORS} | present


def _without_absent(block: PackedBlock) -> PackedBlock:
    """Blank the absent fields, so that values which the caller left there are neither kept nor counted."""
    present, values = block.present, block.values.copy()
    values[~present] = 0
    reference, scale = np.where(present, block.reference, 0), np.where(present, block.scale, 0)
    decimal = np.where(present, block.decimal, 1)
    return replace(block, values=values, reference=reference, scale=scale, decimal=decimal)


def _as_floats(block: PackedBlock, mask: np.ndarray | None) -> PackedBlock:
    """Set a float32 block to NaN wherever it has no value."""
    if mask is None and block.present.all():
        return block
    values = block.values.copy()
    values[~block.present] = np.nan
    if mask is not None:
        values[mask] = np.nan
    return PackedBlock.plain(values, block.present, mask)


def _names(layout: Layout, kind: Kind) -> tuple[str, ...]:
    """Return the names of the variables of a kind."""
    return layout.variables if kind is Kind.PRESSURE else layout.surface


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
        """Add an entry of other parts of the same init time, in place. `plan` and `fingerprint` stay as they are.

        Sums over init times use only its files, errors, `masked` and `masks`; the rest is that of the last init time.
        """
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
        with _opened(path) as arrays:
            return cls._from(dict(arrays))

    @classmethod
    def files_of(cls, path: Path) -> tuple[dict[str, Entry], Stamps, str, str | None]:
        """Read only the part of an entry that shows whether it is still valid.

        Returns:
            The attribute `files`, the stamps of the source files, and the attributes `plan` and `fingerprint`.

        Raises:
            UserError: The file is damaged or cannot be read.
        """
        with _opened(path) as arrays:
            # `np.load` reads arrays on demand, so the factors, which may be large, are not read here.
            facts = json.loads(arrays["json"].tobytes())
            stamps = {path: stamp for _, files in facts["sources"].values() for path, stamp in files.items()}
            files = {name: Entry(size, digest) for name, (size, digest) in facts["files"].items()}
            return files, stamps, str(facts["plan"]), facts.get("fingerprint")

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


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open the file of an entry. An error while it is open is raised as a UserError that has it as its cause."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise damaged(path, str(error)) from error
