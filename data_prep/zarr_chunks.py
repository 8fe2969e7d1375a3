"""Detection of fields of a Zarr variable that were never written.

A missing chunk reads as the array's fill value. If that is NaN, or if an attribute declares it as missing, the values
are NaN already. Otherwise they look like real values: 0 K, or `add_offset`. So a field counts as unwritten if one of
its chunks is missing. If the field shares a chunk with an init time that was written, the chunk exists. So a field also
counts as unwritten if all its values equal the fill value.

Chunks of Zarr version 3 may be stored together in a file, a shard, whose index lists the chunks that exist.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from data_prep.cf_missing import unsigned
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, Field
from ensemble_ml.store.remote import has_object, is_remote, open_zarr_array, read_part


class Written:
    """The existing chunks of a variable in a Zarr store, used to find fields that were never written.

    `doubtful` is True if fields have to be checked, because unwritten values are not NaN. Quantities that may be zero
    over a whole chunk (rain, cloud, humidity, land) are not checked if a missing chunk reads as zero: the writer may
    have left the chunk out on purpose. Other quantities, such as temperature, never have a field of equal values.

    Args:
        path: folder or URL of the Zarr store.
        array: the variable.
        field: the variable of the registry that it is.
        fixed: positions along dimensions other than those of init time, member, lead, level, latitude and longitude.
    """

    def __init__(self, path: str, array: xr.DataArray, field: Field, fixed: Mapping[Hashable, int] | None = None):
        self._fixed = dict(fixed or {})
        self._store, self._name, self._dims, self._shape = path, str(array.name), array.dims, array.shape
        made: Any = open_zarr_array(path, self._name)
        said, fill = array.encoding | array.attrs, made.fill_value
        marks = [np.ravel(said[name]) for name in ("_FillValue", "missing_value") if name in said]
        # `_Unsigned` reinterprets the bits of the values, so the fill value and the marks are reinterpreted alike.
        if made.dtype.kind == "i" and unsigned(said):
            kind = f"u{made.dtype.itemsize}"
            fill, marks = None if fill is None else fill.astype(kind), [mark.astype(kind) for mark in marks]
        declared = fill is not None and any((mark == fill).any() for mark in marks)
        not_finite = fill is not None and not np.isfinite(np.asarray(fill, np.float64))
        factor, offset = (float(said.get(name, usual)) for name, usual in (("scale_factor", 1), ("add_offset", 0)))
        self._unwritten = None if fill is None or not_finite else float(fill) * factor + offset
        may_be_zero = field.static or field.family is not Family.NORMAL or field.accumulated
        zero = offset == 0 if fill is None else self._unwritten == 0
        self.doubtful = not declared and not not_finite and not (may_be_zero and zero)
        self._metadata = made.metadata
        self._chunk: Sequence[int] = made.chunks
        together = made.shards or made.chunks
        self._in_file = tuple(whole // part for whole, part in zip(together, made.chunks, strict=True))
        self._codec: Any = made.metadata.codecs[0] if made.shards else None
        self._there: dict[tuple[int, ...], np.ndarray] = {}  # file -> which of its chunks exist

    def mark(self, values: np.ndarray, leading: Sequence[Hashable | None], first: Sequence[int]) -> np.ndarray:
        """Return `values` with NaN in fields that were never written. Writable floats are changed in place.

        Args:
            values: (member, lead, level, Y, X) of one init time.
            leading: the array's dimensions for init time, member, lead and level; None for each that it lacks.
            first: (4,) positions of the first field along these dimensions.

        Raises:
            UserError: the index of a shard cannot be read.
        """
        for place in np.ndindex(*values.shape[:3]):
            at = {dim: start + step for dim, start, step in zip(leading, first, (0, *place), strict=True)} | self._fixed
            if not self._complete(at) or self._equals_fill(values[place]):
                values = values.astype(np.result_type(values.dtype, np.float32), copy=False)
                values = values if values.flags.writeable else values.copy()
                values[place] = np.nan
        return values

    def _equals_fill(self, values: np.ndarray) -> bool:
        """Return whether all values of a field equal what a missing chunk reads as."""
        first = values.flat[0]
        return self._unwritten is not None and bool(
            np.isclose(first, self._unwritten, rtol=1e-6) and (values == first).all()
        )

    def _complete(self, at: dict[Hashable | None, int]) -> bool:
        """Return whether all chunks exist that hold a part of the field at the given positions."""
        ranges = [
            range(at[dim] // size, at[dim] // size + 1) if dim in at else range(-(-length // size))
            for dim, size, length in zip(self._dims, self._chunk, self._shape, strict=True)
        ]
        return all(self._exists(chunk) for chunk in product(*ranges))

    def _exists(self, chunk: tuple[int, ...]) -> bool:
        """Return whether a chunk exists, by its file or by the index of its shard."""
        file, inside = zip(*map(divmod, chunk, self._in_file), strict=True)
        if file not in self._there:
            key = f"{self._name}/{self._metadata.encode_chunk_key(file)}"
            path = os.path.join(self._store, key)
            there = has_object(self._store, key) if is_remote(self._store) else os.path.exists(path)
            self._there[file] = self._indexed(path, key) if there and self._codec else np.full(self._in_file, there)
        return bool(self._there[file][inside])

    def _indexed(self, path: str, key: str) -> np.ndarray:
        """Return which chunks of a shard exist, in the shape of `_in_file`.

        The index holds offset and size of each chunk as uint64, both with all bits set for a missing chunk (Zarr v3,
        `sharding_indexed` codec).

        Raises:
            UserError: the index cannot be read.
        """
        kinds = [type(codec).__name__ for codec in self._codec.index_codecs]
        size = 16 * math.prod(self._in_file)
        whole = size + 4 * kinds.count("Crc32cCodec")
        at_end = self._codec.index_location.value == "end"
        try:
            if is_remote(self._store):
                content = read_part(self._store, key, -whole if at_end else 0, size)
            else:
                with open(path, "rb") as file:
                    if at_end:
                        file.seek(-whole, os.SEEK_END)
                    content = file.read(size)
            # The byte order does not matter here, because only pairs with all bits set are looked for.
            pairs = np.frombuffer(content, "u8").reshape(*self._in_file, 2)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the index of its chunks cannot be read ({error}); fetch it again") from error
        return (pairs != np.iinfo(np.uint64).max).any(-1)
