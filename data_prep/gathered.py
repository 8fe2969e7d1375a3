"""The fields of one init time as they are gathered: packed integers in blocks, and unpacked fields beside them.

Axes: M member, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import google_crc32c
import numpy as np

from data_prep.intervals import Combine
from data_prep.records import RawField
from ensemble_ml.store.manifest import PLACE
from ensemble_ml.store.packing import PackedBlock, decode, error_bound, parts_of, quantise
from ensemble_ml.store.source import Layout

Allocate = Callable[[tuple[int, ...]], np.ndarray]  # shape -> an array of uint16
Masks = dict[tuple[bool, tuple[int, ...]], np.ndarray]  # (surface?, place) -> (Y, X) bool


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return a new array of zeros, uint16."""
    return np.zeros(shape, np.uint16)


@dataclass(frozen=True)
class Target:
    """A wanted field: its position in the surface or pressure block, and the rows of the table that make it."""

    surface: bool
    place: tuple[int, ...]
    rows: tuple[int, ...]
    combine: Combine = Combine.ONE


@dataclass(frozen=True, eq=False)
class Gathered:
    """The fields of one init time: packed integers if the archive has them, and float32 fields apart.

    Attributes:
        layout: coordinates of the blocks. Its members are those of the forecast, also if the blocks have one member.
        pressure: (M, T, V, Z, Y, X) uint16, with packing constants and masks.
        surface: (M, T, S, Y, X) uint16.
        loose: (surface?, position in the block) -> float32 values (Y, X), NaN at points without a value.
        places: (N,) PLACE, the positions in their files of all fields that were read.
        checksum: CRC-32C of the fields that were read singly, and of the results of combining several.
    """

    layout: Layout
    pressure: PackedBlock
    surface: PackedBlock
    loose: dict[tuple[bool, tuple[int, ...]], np.ndarray] = field(default_factory=dict)
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, PLACE))
    checksum: int = 0

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the float32 values (M, T, V, Z, Y, X) and (M, T, S, Y, X), NaN where absent or masked."""
        pressure, surface = decode(self.pressure), decode(self.surface)
        for (at_surface, place), values in self.loose.items():
            (surface if at_surface else pressure)[place] = values
        return pressure, surface

    def quantised(self, errors: dict[str, float]) -> tuple[PackedBlock, PackedBlock]:
        """Pack the float32 fields into the blocks, in place, and return both blocks, which then hold integers only.

        `errors` receives the largest packing error of each variable, in its units.
        """
        masks: Masks = {}
        loose = list(self.loose.items())
        points = loose[0][1].size if loose else 0
        for part in parts_of(len(loose), points):
            values = np.stack([field for _, field in loose[part]])
            hidden = np.isnan(values)
            some = hidden.any((-2, -1))
            packed = quantise(values, mask=hidden if some.any() else None)
            bounds = error_bound(packed).tolist()
            for number, ((at_surface, place), _) in enumerate(loose[part]):
                block = self.surface if at_surface else self.pressure
                block.values[place], block.present[place] = packed.values[number], True
                if some[number]:
                    masks[at_surface, place] = hidden[number]
                for name in ("reference", "scale", "decimal"):
                    getattr(block, name)[place] = getattr(packed, name)[number]
                variable = (self.layout.surface if at_surface else self.layout.variables)[place[2]]
                errors[variable] = max(errors.get(variable, 0.0), bounds[number])
        return with_masks(self.pressure, masks, False), with_masks(self.surface, masks, True)

    def note(self, target: Target, raw: RawField) -> None:
        """Record the packing constants of a field whose integers are in the block, or keep a float32 field apart."""
        if not raw.packed:
            self.loose[target.surface, target.place] = raw.values
            return
        block = self.surface if target.surface else self.pressure
        block.reference[target.place], block.scale[target.place] = raw.reference, raw.scale
        block.decimal[target.place], block.present[target.place] = raw.decimal, True

    def plain(self) -> tuple[PackedBlock, PackedBlock]:
        """Return both blocks as float32 values, with a mask of the points that have none."""
        blocks = []
        for at_surface, values in enumerate(self.decoded()):
            present = (self.surface if at_surface else self.pressure).present.copy()
            for surface, place in self.loose:
                if surface == bool(at_surface):
                    present[place] = True
            hidden = np.isnan(values) & present[..., None, None]
            blocks.append(PackedBlock.plain(values, present, hidden if hidden.any() else None))
        return blocks[0], blocks[1]


def summed(checksum: int, raw: RawField) -> int:
    """Return the checksum extended by one more field: its packing constants and its values."""
    constants = np.array([raw.reference, raw.scale, raw.decimal]).tobytes()
    # Readers return integers in the file's byte order or in this machine's. The checksum must not depend on that.
    values = raw.values.astype(raw.values.dtype.newbyteorder("="), order="C", copy=False)
    return google_crc32c.extend(google_crc32c.extend(checksum, constants), values.reshape(-1).view(np.uint8))


def with_masks(block: PackedBlock, masks: Masks, at_surface: bool) -> PackedBlock:
    """Return the block with the masks of its fields added; without any, return the block itself."""
    mine = {place: mask for (surface, place), mask in masks.items() if surface == at_surface}
    if not mine:
        return block
    whole = np.zeros(block.values.shape, bool) if block.mask is None else block.mask
    for place, mask in mine.items():
        whole[place] = mask
    return replace(block, mask=whole)
