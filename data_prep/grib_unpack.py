"""Unpacking of the integers and bitmaps of GRIB messages with NumPy.

Integers of n bits follow each other without gaps, most significant bit first (simple packing, data template 7.0).
Integers of 8 and 16 bits are read as a view, those of 24 are copied. Of other widths, 8 / gcd(n, 8) neighbouring
integers form a group of whole octets. The k-th integers of all groups need the same shift, so they are unpacked
together, by a few NumPy operations on whole arrays.
"""

from __future__ import annotations

import math

import numpy as np

MOST_BITS = 24


def packed_size(points: int, bits: int) -> int:
    """Return the number of octets that `points` integers of `bits` bits take."""
    return (points * bits + 7) // 8


def unpack(octets: np.ndarray, bits: int, points: int) -> np.ndarray:
    """Unpack unsigned integers of 1 to 24 bits.

    Args:
        octets: uint8, `packed_size(points, bits)` of them.
        bits: bits of each integer.
        points: number of integers.

    Returns:
        (points,). 16 bits are a big-endian view of `octets`, 8 bits are `octets` themselves; other widths below 16 are
        uint16, and above 16 uint32 (big-endian for 24).
    """
    if bits == 16:
        return octets[: 2 * points].view(">u2")
    if bits == 8:
        return octets[:points]
    if bits == 24:
        wide = np.zeros((points, 4), np.uint8)
        wide[:, 1:] = octets[: 3 * points].reshape(-1, 3)
        return wide.reshape(-1).view(">u4")
    members = 8 // math.gcd(bits, 8)  # integers of a group
    width = members * bits // 8  # octets of a group
    groups = -(-points // members)
    padded = np.zeros(groups * width, np.uint8)  # the last group may be incomplete
    padded[: len(octets)] = octets
    out = np.empty((groups, members), np.uint16 if bits <= 16 else np.uint32)
    for place in range(members):
        first, shift = divmod(place * bits, 8)
        value = np.zeros(groups, np.uint32)
        used = (shift + bits + 7) // 8  # at most four octets
        for octet in range(used):
            value <<= 8
            value |= padded[first + octet :: width]
        value >>= used * 8 - bits - shift
        value &= (1 << bits) - 1
        out[:, place] = value
    return out.reshape(-1)[:points]


def bitmap(octets: np.ndarray, points: int) -> np.ndarray:
    """Return which points have a value, (points,) bool.

    Args:
        octets: the bitmap, one bit for each point, most significant bit first.
        points: number of points.
    """
    return np.unpackbits(octets, count=points).view(bool)
