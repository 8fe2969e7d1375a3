"""What a loader hands out: samples that lie packed on slow storage and are decoded into arrays."""

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
    """Shape and type of one array of a sample, without the batch axis."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def shapes_to_json(arrays: Mapping[str, ArrayShape]) -> str:
    """What all samples are like, in words for other ranks; the order of the arrays stays."""
    return json.dumps([[name, one.shape, one.dtype.str] for name, one in arrays.items()])


def shapes_from_json(text: str) -> dict[str, ArrayShape]:
    """The same back."""
    return {name: ArrayShape(tuple(shape), np.dtype(dtype)) for name, shape, dtype in json.loads(text)}


@runtime_checkable
class Items(Protocol):
    """Samples 0 to F-1.

    `sizes` (F,) are their bytes in a cache; all samples become arrays of the same shapes.
    """

    sizes: np.ndarray

    @property
    def arrays(self) -> Mapping[str, ArrayShape]:
        """Name -> shape and type of one sample's array."""

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the packed sample, from slow storage; any thread may call it."""

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Unpack into one array for each of `arrays`; any thread may call it.

        Raises:
            UserError: the packed bytes are damaged; it names their file.
        """

    def name(self, sample: int) -> str:
        """What messages call the sample: its file, where it has one."""

    def fingerprint(self) -> str:
        """A short hash of the data, so that a cache on disk is not taken for another's.

        Where it stands for every byte, `lasting = True` says so, and a cache on disk may serve later runs.
        """


@runtime_checkable
class Divisible(Items, Protocol):
    """Items that can be read from any place on: a cache may hold the head of one, and only the rest is read again."""

    def read_from(self, start: int, sample: int, out: memoryview) -> None:
        """Fill `out` with bytes of the packed sample from `start` on, from slow storage; any thread may call it."""


@runtime_checkable
class Openable(Items, Protocol):
    """Items that can also be kept decompressed, which costs room and saves the decompression of every later use."""

    def opened(self) -> Opened:
        """The same samples, decompressed as they are read; reading them raises UserError where they are damaged."""


class Opened(Items, Protocol):
    """Items whose `sizes` (F,) are those of decompressed samples, and `stored` (F,) their bytes on slow storage."""

    stored: np.ndarray


def check_map_style(dataset: Any, name: str = "dataset") -> None:
    """Refuse a dataset without samples 0 to len - 1 with a UserError."""
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
    """Any map-style dataset (`len` and `[i]`) whose samples are arrays or tensors of fixed shape.

    A sample may be one array, a tuple of them, or a dictionary; numbers count as arrays without axes. It is packed as
    its bytes, one array after another, so that cached samples need no unpickling.

    Args:
        dataset: where samples come from; `[i]` is called from several threads and has to give the same each time: what
            is held is not asked for again, so draw random transforms after the loader.
        name: what stands for it in messages and fingerprints, of this content and no other: with a name, a cache on
            disk serves later runs; without one it serves the run that made it.
        first: the sample that says what all are like; it is kept until its first use, so that it is read once.
        like: what all are like, where another process has said so: none is read for it.

    Raises:
        UserError: it is no map-style dataset, it is empty, or its first sample is no array, or a masked one.
    """

    def __init__(
        self, dataset: Any, name: str | None = None, first: int = 0, *, like: Mapping[str, ArrayShape] | None = None
    ):
        self.dataset, self._name, self.lasting = dataset, name or "dataset", name is not None
        check_map_style(dataset, self._name)
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        if like is None:
            found = self._kept[first] = self._unpacked(first, kept=True)  # the dataset may use its arrays again
            like = {key: ArrayShape(value.shape, value.dtype) for key, value in found.items()}
        self.arrays = dict(like)
        self.bytes = sum(one.bytes for one in self.arrays.values())
        self.sizes = np.full(len(dataset), self.bytes, np.int64)

    def _unpacked(self, sample: int, *, kept: bool = False) -> dict[str, np.ndarray]:
        value = self.dataset[sample]
        if isinstance(value, Mapping):
            parts = {str(key): part for key, part in value.items()}
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            parts = {str(place): part for place, part in enumerate(value)}
        else:
            parts = {"0": value}
        arrays = {}
        for key, part in parts.items():
            try:
                array = np.asarray(part.detach() if hasattr(part, "detach") else part)
            except (TypeError, ValueError, RuntimeError) as error:  # a tensor of a type that NumPy has not
                raise UserError(f"{self.name(sample)}: {key} makes no array ({error}); float32 would do") from error
            if array.dtype.hasobject or array.dtype.kind in "USV":
                raise UserError(f"{self.name(sample)}: {key} is {type(part).__name__}; arrays or numbers are needed")
            if array.dtype.kind in "mM" or array.dtype.char in "gG":
                raise UserError(
                    f"{self.name(sample)}: {key} is {array.dtype}, which torch has not; float64 or int64 would do"
                )
            if np.ma.is_masked(part):
                raise UserError(
                    f"{self.name(sample)}: {key} has masked values, which would be lost; fill them, with NaN"
                )
            arrays[key] = array.astype(array.dtype.newbyteorder("="), copy=kept)
        return arrays

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the sample's bytes.

        Raises:
            UserError: its arrays have other names, shapes or types than those of the first sample.
        """
        start = 0
        found = self._kept.pop(sample, None) or self._unpacked(sample)
        if more := [key for key in found if key not in self.arrays]:
            raise UserError(
                f"{self.name(sample)}: {', '.join(more)} is not in the first sample; samples must be alike, so leave it"
                " out or give it to all"
            )
        for key, shape in self.arrays.items():
            array = found.get(key)
            if array is None or (array.shape, array.dtype) != (shape.shape, shape.dtype):
                has = "nothing" if array is None else f"{array.dtype} {array.shape}"
                raise UserError(
                    f"{self.name(sample)}: {key} is {has}, that of the first sample {shape.dtype} {shape.shape};"
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
        """The dataset's name and the sample's number."""
        return f"{self._name}: sample {sample}"

    def fingerprint(self) -> str:
        """A hash of name, length and shapes: a dataset cannot be asked for more."""
        said = repr((self._name, len(self.dataset), sorted((k, str(v)) for k, v in self.arrays.items())))
        return hashlib.sha256(said.encode()).hexdigest()[:16]
