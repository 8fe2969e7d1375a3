"""One number a field: reference, scale, decimal and whether it is present; written and read some start dates at a time.

They lie in Zarr arrays (D, ...) beside the fields, in chunks of so many dates that one is about 128 KB: whoever reads
one date of an archive of thousands does not load those of the others. A loader, which uses all, keeps all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from itertools import groupby
from pathlib import Path
from threading import Lock

import numpy as np
import zarr

from ensemble_ml.store.date import empty_factors
from ensemble_ml.store.entry import DateEntry
from ensemble_ml.store.manifest import Entry, check_file
from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import damaged

_CHUNK = 128 * 1024  # bytes of the largest chunk
_HELD = 8  # chunks of each factor that a reader keeps


def dates_together(specs: Iterable[ArraySpec]) -> int:
    """Start dates in a chunk."""
    largest = max(8 * int(np.prod(spec.fields)) for spec in specs)
    return max(1, _CHUNK // largest)


def write_factors(
    root: Path, specs: Iterable[ArraySpec], entries: Iterable[tuple[int, DateEntry]], together: int
) -> Iterator[tuple[int, DateEntry]]:
    """Write the factors of `entries` (ascending dates) into the group at `root`, and pass the entries on.

    Dates without an entry have no field. No more than `together` entries are held.
    """
    specs = list(specs)
    group = zarr.open_group(root, mode="r+")
    arrays = {spec.name: {key: _create(group, spec, key, together) for key in empty_factors(spec)} for spec in specs}
    for number, some in groupby(entries, key=lambda pair: pair[0] // together):
        first, held = number * together, []
        for date, entry in some:
            held.append((date, entry))
        for spec in specs:
            stop = min(first + together, spec.dates)
            for key, array in arrays[spec.name].items():
                values = np.stack([empty_factors(spec)[key]] * (stop - first))
                for date, entry in held:
                    if spec.name in entry.factors:
                        values[date - first] = entry.factors[spec.name][key]
                array[first:stop] = spec.drop_fields(values)
        yield from held


def _create(group: zarr.Group, spec: ArraySpec, key: str, together: int) -> zarr.Array:
    shape = spec.drop_shape()
    dtype = bool if key == "present" else np.float64
    return group.create_array(
        f"{spec.name}_{key}",
        shape=(spec.dates, *shape),
        chunks=(min(together, spec.dates), *shape),
        dtype=dtype,
        fill_value=1 if key == "decimal" else 0,
        dimension_names=spec.dimensions[:-2],
    )


class FactorReader:
    """Reads factors of single dates; keeps the chunks used last, or `keep`s more. May be used by several threads.

    A wrong bit in a factor makes all of its field wrong, and fields alone carry checksums: each chunk is held to its
    digest in the manifest, `files`.
    """

    def __init__(self, root: Path, together: int, files: Mapping[str, Entry]):
        self._root, self._together, self._files = root, together, files
        self._arrays: dict[str, zarr.Array] = {}
        self._kept: dict[tuple[str, int], np.ndarray] = {}
        self._held: dict[str, OrderedDict[int, np.ndarray]] = {}
        self._lock = Lock()

    def keep(self, specs: Iterable[ArraySpec], dates: Iterable[int], pool: Executor) -> None:
        """Read the factors of all `dates` now and keep them: 8 bytes a field of GRIB, 16 where they are no float32.

        That is less than the index of the field's chunks, which a loader keeps as well.

        Raises:
            UserError: they are damaged.
        """
        wanted = [(f"{spec.name}_{key}", spec) for spec in specs for key in empty_factors(spec)]
        list(pool.map(self._array, [name for name, _ in wanted]))  # each is opened once
        numbers = sorted({date // self._together for date in dates})
        chunks = [(name, spec, number) for name, spec in wanted for number in numbers]
        found = pool.map(lambda one: self._chunk(*one), chunks)
        self._kept |= {(name, number): _small(values) for (name, _, number), values in zip(chunks, found, strict=True)}

    def of_date(self, spec: ArraySpec, key: str, date: int) -> np.ndarray:
        """One factor of all fields of a date, (M, T, V, Z).

        Raises:
            UserError: it is damaged.
        """
        name, number = f"{spec.name}_{key}", date // self._together
        place = date - number * self._together
        if (name, number) in self._kept:
            found = self._kept[name, number][place]
            return found if found.dtype == bool else found.astype(np.float64)
        with self._lock:
            held = self._held.setdefault(name, OrderedDict())
            if number not in held:
                held[number] = self._chunk(name, spec, number)
                while len(held) > _HELD:
                    held.popitem(last=False)
            held.move_to_end(number)
            return held[number][place]

    def _chunk(self, name: str, spec: ArraySpec, number: int) -> np.ndarray:
        array, first = self._array(name), number * self._together
        file = "/".join([name, "c", str(number), *["0"] * (array.ndim - 1)])
        if file in self._files:  # of nothing but fill values, none is written
            check_file(self._root / file, self._files[file])
        try:
            return np.asarray(array[first : first + self._together]).reshape(-1, *spec.fields)
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(self._root / name, str(error)) from error

    def _array(self, name: str) -> zarr.Array:
        try:
            if name not in self._arrays:
                self._arrays[name] = zarr.open_array(self._root / name, mode="r")
            return self._arrays[name]
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(self._root / name, str(error)) from error


def _small(values: np.ndarray) -> np.ndarray:
    """The same numbers in less memory: one, where all are equal; float32 where that holds them."""
    if values.size and (values == values.flat[0]).all():
        return np.broadcast_to(values.flat[0], values.shape)
    if values.dtype == bool:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values
