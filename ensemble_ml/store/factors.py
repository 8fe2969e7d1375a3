"""Write and read the factors, one of each for every field: reference, scale, decimal, and whether it is present.

Arrays that are not packed have only the last of these.

They lie in Zarr arrays (D, ...) beside the fields. A chunk covers as many dates as make it about 128 KB, so a reader of
one date of an archive of thousands does not load the numbers of all. A loader, which uses all dates, keeps them all.
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

from ensemble_ml.store.date import DateEntry, empty_factors
from ensemble_ml.store.manifest import Entry, check_file
from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import damaged

_CHUNK = 128 * 1024  # bytes of the largest chunk
_HELD = 8  # number of chunks of each factor that a reader keeps


def dates_together(specs: Iterable[ArraySpec]) -> int:
    """Return the number of init times in a chunk of the factors."""
    largest = max(8 * int(np.prod(spec.fields)) for spec in specs)
    return max(1, _CHUNK // largest)


def write_factors(
    root: Path, specs: Iterable[ArraySpec], entries: Iterable[tuple[int, DateEntry]], together: int
) -> Iterator[tuple[int, DateEntry]]:
    """Write the factors of all dates into the group at `root`, and pass the entries on.

    At most `together` entries, those of a chunk, are in memory. Dates without an entry have no field. `entries`
    are pairs of the index of an init time and its entry, ascending.
    """
    specs = list(specs)
    group = zarr.open_group(root, mode="r+")
    arrays = {spec.name: {key: _create(group, spec, key, together) for key in empty_factors(spec)} for spec in specs}
    # A chunk of the arrays covers several dates. All of them are collected first, so that each chunk is written once.
    for number, some in groupby(entries, key=lambda pair: pair[0] // together):
        first, held = number * together, list(some)
        for spec in specs:
            stop = min(first + together, spec.dates)
            for key, array in arrays[spec.name].items():
                values = np.stack([empty_factors(spec)[key]] * (stop - first))
                for date, entry in held:
                    if spec.name in entry.factors:
                        values[date - first] = entry.factors[spec.name][key]
                array[first:stop] = values.reshape(len(values), *spec.factors_on_disk)
        yield from held


def _create(group: zarr.Group, spec: ArraySpec, key: str, together: int) -> zarr.Array:
    """Create the array of one factor."""
    shape = spec.factors_on_disk
    return group.create_array(
        f"{spec.name}_{key}",
        shape=(spec.dates, *shape),
        chunks=(min(together, spec.dates), *shape),
        dtype=bool if key == "present" else np.float64,
        fill_value=1 if key == "decimal" else 0,
        dimension_names=spec.dimensions[:-2],
    )


class FactorReader:
    """A reader of the factors of single dates. Several threads may use it.

    It keeps the chunks used last, and all those for which `keep` was called.

    A wrong bit in a factor makes its whole field wrong, and only fields carry checksums of their own. Each chunk is
    therefore checked against its digest in `files`, the entries of the manifest. `together` is the number of init times
    in a chunk.
    """

    def __init__(self, root: Path, together: int, files: Mapping[str, Entry]):
        self._root, self._together, self._files = root, together, files
        self._arrays: dict[str, zarr.Array] = {}
        self._kept: dict[tuple[str, int], np.ndarray] = {}
        self._held: dict[str, OrderedDict[int, np.ndarray]] = {}
        self._lock = Lock()

    def keep(self, specs: Iterable[ArraySpec], dates: Iterable[int], pool: Executor) -> None:
        """Read the factors of all `dates` now, and keep them.

        They take 8 bytes for a field from GRIB, and 16 bytes where they are not float32 numbers. That is less than the
        index of the field's chunks, which a loader keeps as well. The threads of `pool` read.

        Raises:
            UserError: They are damaged.
        """
        wanted = [(f"{spec.name}_{key}", spec) for spec in specs for key in empty_factors(spec)]
        list(pool.map(self._array, [name for name, _ in wanted]))  # opens each array only once
        numbers = sorted({date // self._together for date in dates})
        chunks = [(name, spec, number) for name, spec in wanted for number in numbers]
        found = pool.map(lambda one: self._chunk(*one), chunks)
        self._kept |= {(name, number): _small(values) for (name, _, number), values in zip(chunks, found, strict=True)}

    def of_date(self, spec: ArraySpec, key: str, date: int) -> np.ndarray:
        """Return one factor of all fields of a date, (M, T, V, Z). The caller must not write to it.

        Raises:
            UserError: It is damaged.
        """
        name, number = f"{spec.name}_{key}", date // self._together
        place = date - number * self._together
        if (name, number) in self._kept:
            found = self._kept[name, number][place]
            return found if found.dtype == bool else found.astype(np.float64)
        # The lock protects the order of use, on which the eviction of the oldest chunk depends.
        with self._lock:
            held = self._held.setdefault(name, OrderedDict())
            if number not in held:
                held[number] = self._chunk(name, spec, number)
                while len(held) > _HELD:
                    held.popitem(last=False)
            held.move_to_end(number)
            return held[number][place]

    def _chunk(self, name: str, spec: ArraySpec, number: int) -> np.ndarray:
        """Read one chunk of a factor, (dates, M, T, V, Z); refuse a damaged one."""
        array, first = self._array(name), number * self._together
        file = "/".join([name, "c", str(number), *["0"] * (array.ndim - 1)])
        if file in self._files:  # Zarr writes no file for a chunk of fill values only
            check_file(self._root / file, self._files[file])
        try:
            return np.asarray(array[first : first + self._together]).reshape(-1, *spec.fields)
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(self._root / name, str(error)) from error

    def _array(self, name: str) -> zarr.Array:
        """Open the array of a factor, once; refuse a damaged one."""
        try:
            if name not in self._arrays:
                self._arrays[name] = zarr.open_array(self._root / name, mode="r")
            return self._arrays[name]
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(self._root / name, str(error)) from error


def _small(values: np.ndarray) -> np.ndarray:
    """Return the same numbers in less memory: one number where all are equal, float32 where that is exact."""
    if values.size and (values == values.flat[0]).all():
        return np.broadcast_to(values.flat[0], values.shape)
    if values.dtype == bool:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values
