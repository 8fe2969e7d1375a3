"""Define the samples of a loader, which lie packed on slow storage and are decoded into arrays.

`Items` is the interface. `DatasetItems` adapts any map-style dataset to it; `store_items.StoreItems` does so for a
tensor store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import IterableDataset

from ensemble_ml.errors import UserError


@dataclass(frozen=True)
class ArrayShape:
    """The shape and type of one array of a sample, without the batch axis."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Return the bytes of one array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def shapes_to_json(arrays: Mapping[str, ArrayShape]) -> str:
    """Encode the shapes of a sample's arrays for other ranks, in the order of the arrays."""
    return json.dumps([[name, one.shape, one.dtype.str] for name, one in arrays.items()])


def shapes_from_json(text: str) -> dict[str, ArrayShape]:
    """Decode shapes that `shapes_to_json` has encoded."""
    return {name: ArrayShape(tuple(shape), np.dtype(dtype)) for name, shape, dtype in json.loads(text)}


@runtime_checkable
class Items(Protocol):
    """The interface of samples 0 to F - 1.

    `sizes` (F,) are their bytes in a cache. All samples become arrays of the same shapes.
    """

    sizes: np.ndarray

    @property
    def arrays(self) -> Mapping[str, ArrayShape]:
        """Return shape and type of each array of a sample, by name."""

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the packed sample from slow storage. Any thread may call it."""

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Unpack a sample into one array for each of `arrays`. Any thread may call it.

        Raises:
            UserError: The packed bytes are damaged. The message names their file.
        """

    def name(self, sample: int) -> str:
        """Return the name of a sample in messages: its file, where it has one."""

    def fingerprint(self) -> str:
        """Return a short hash of the data, so that a cache on disk is not used for other data.

        If equal hashes mean equal content, the items have the attribute `lasting = True`. A cache on disk may then
        serve later runs.
        """


@runtime_checkable
class Divisible(Items, Protocol):
    """The interface of items that can be read from any offset on.

    A cache may hold the head of such a sample; only the rest is then read again.
    """

    def read_from(self, start: int, sample: int, out: memoryview) -> None:
        """Fill `out` with bytes of the packed sample from `start` on, from slow storage. Any thread may call it."""


@runtime_checkable
class Openable(Items, Protocol):
    """The interface of items that can also be held decompressed.

    This costs memory and saves the decompression at every later use.
    """

    def opened(self) -> Opened:
        """Return the same samples, which are decompressed when they are read.

        Reading them raises a UserError where they are damaged.
        """


class Opened(Items, Protocol):
    """The interface of decompressed items: `sizes` (F,) are decompressed bytes, `stored` (F,) those on slow storage."""

    stored: np.ndarray


def check_map_style(dataset: Any, name: str = "dataset") -> None:
    """Check that a dataset has samples 0 to len - 1. The message calls it `name`.

    Raises:
        UserError: It has no `len` or no samples by number, or it is empty.
    """
    try:
        size = len(dataset)
    except TypeError:
        size = None
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | Mapping)
    if size is None or not by_number:
        raise UserError(
            f"{name}: {type(dataset).__name__} has no `len` or no samples by number; give a map-style dataset, or"
            " list(...) of it where it fits into memory"
        )
    if not size:
        raise UserError(f"{name}: is empty; at least one sample is needed")


class DatasetItems:
    """The samples of any map-style dataset (`len` and `[i]`), as arrays or tensors of fixed shape.

    A sample may be one array, a tuple of arrays, or a dictionary; numbers count as arrays without axes. A packed sample
    is the bytes of its arrays, one after another, so cached samples need no unpickling.

    Args:
        dataset: Source of the samples. `[i]` is called from several threads and must return the same each time. A
            sample in a cache is not requested again, so draw random transforms after the loader.
        name: Name that no other content has, for messages and fingerprints. With a name, a cache on disk serves
            later runs; without one, it serves only the run that made it.
        first: Sample that defines the shapes. It is kept until its first use, so it is read only once.
        like: Shapes of the arrays if they are known from another process; then no sample is read for them.

    Raises:
        UserError: The dataset is not map-style or is empty, or its first sample is not made of numeric arrays of types
            that torch has, or has masked values.
    """

    def __init__(
        self, dataset: Any, name: str | None = None, first: int = 0, *, like: Mapping[str, ArrayShape] | None = None
    ):
        self.dataset, self._name, self.lasting = dataset, name or "dataset", name is not None
        check_map_style(dataset, self._name)
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        if like is None:
            found = self._kept[first] = self._unpacked(first, kept=True)  # the dataset may reuse its arrays
            like = {key: ArrayShape(value.shape, value.dtype) for key, value in found.items()}
        self.arrays = dict(like)
        self.bytes = sum(one.bytes for one in self.arrays.values())
        self.sizes = np.full(len(dataset), self.bytes, np.int64)

    def _unpacked(self, sample: int, *, kept: bool = False) -> dict[str, np.ndarray]:
        """Return the arrays of a sample by name; `kept` copies them.

        Raises:
            UserError: A part is not a numeric array of a type that torch has, or has masked values; or two parts have
                the same name.
        """
        value = self.dataset[sample]
        if isinstance(value, Mapping):
            parts = {str(key): part for key, part in value.items()}
            if len(parts) < len(value):  # else one of the two would be lost
                names = [str(key) for key in value]
                same = next(name for name in names if names.count(name) > 1)
                raise UserError(f"{self.name(sample)}: two of its keys are {same!r} as text; rename one")
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            parts = {str(place): part for place, part in enumerate(value)}
        else:
            parts = {"0": value}
        arrays = {}
        for key, part in parts.items():
            try:
                array = np.asarray(part.detach() if hasattr(part, "detach") else part)
            except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor of a type that NumPy lacks
                raise UserError(f"{self.name(sample)}: {key} cannot become an array ({error}); give float32") from error
            if array.dtype.hasobject or array.dtype.kind in "USV":
                raise UserError(f"{self.name(sample)}: {key} is {type(part).__name__}; arrays or numbers are needed")
            if array.dtype.kind in "mM" or array.dtype.char in "gG":
                raise UserError(
                    f"{self.name(sample)}: {key} is {array.dtype}, which torch does not have; give float64 or int64"
                )
            if np.ma.is_masked(part):
                raise UserError(
                    f"{self.name(sample)}: {key} has masked values, and the mask would be lost; fill them, as with NaN"
                )
            arrays[key] = array.astype(array.dtype.newbyteorder("="), copy=kept)
        return arrays

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a sample.

        Raises:
            UserError: The arrays have other names, shapes or types than those of the first sample, or are no numeric
                arrays, or have masked values.
        """
        start = 0
        # The first sample was read for its shapes and is not read a second time.
        found = self._kept.pop(sample, None) or self._unpacked(sample)
        if more := [key for key in found if key not in self.arrays]:
            raise UserError(
                f"{self.name(sample)}: {', '.join(more)} is not in the first sample; samples must be alike, so leave it"
                " out or give it to all"
            )
        for key, shape in self.arrays.items():
            array = found.get(key)
            if array is None or (array.shape, array.dtype) != (shape.shape, shape.dtype):
                has = "missing" if array is None else f"{array.dtype} {array.shape}"
                raise UserError(
                    f"{self.name(sample)}: {key} is {has}, but {shape.dtype} {shape.shape} in the first sample;"
                    " samples must be alike, so pad or crop them"
                )
            out[start : start + shape.bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            start += shape.bytes

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Copy the arrays of a sample to their places."""
        start = 0
        for key, shape in self.arrays.items():
            out[key][...] = np.frombuffer(packed[start : start + shape.bytes], shape.dtype).reshape(shape.shape)
            start += shape.bytes

    def name(self, sample: int) -> str:
        """Return the name of the dataset with the number of the sample."""
        return f"{self._name}: sample {sample}"

    def fingerprint(self) -> str:
        """Return a hash of name, length and shapes. Nothing else is known of a dataset without reading it."""
        facts = repr((self._name, len(self.dataset), sorted((k, str(v)) for k, v in self.arrays.items())))
        return hashlib.sha256(facts.encode()).hexdigest()[:16]
