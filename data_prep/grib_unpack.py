"""Packed integers and bitmaps of GRIB messages, taken apart with NumPy.

Integers of n bits lie one after the other, the most significant bit first. Those of whole octets are a view; of others
8 / gcd(n, 8) neighbours make a group of whole octets, so that a column of groups is shifted alike.
"""

from __future__ import annotations

import math

import numpy as np

MOST_BITS = 24


def packed_size(points: int, bits: int) -> int:
    """Octets that `points` integers of `bits` take."""
    return (points * bits + 7) // 8


def unpack(octets: np.ndarray, bits: int, points: int) -> np.ndarray:
    """Unsigned integers (points,) of `bits` 1 to 24 out of `octets` (packed_size,) uint8.

    16 bits come as a big-endian view of `octets`, 8 bits as `octets` themselves; fewer than 16 as uint16, more as
    uint32.
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
    padded = np.zeros((groups + 1) * width + 3, np.uint8)  # the last integer's window may reach beyond the group
    padded[: len(octets)] = octets
    if bits <= 16:
        out = np.empty((groups, members), np.uint16)
        span = 3
    else:
        out = np.empty((groups, members), np.uint32)
        span = 4
    for place in range(members):
        first, shift = divmod(place * bits, 8)
        value = np.zeros(groups, np.uint32)
        used = min(span, (shift + bits + 7) // 8)
        for octet in range(used):
            value <<= 8
            value |= padded[first + octet :: width][:groups]
        value >>= used * 8 - bits - shift
        value &= (1 << bits) - 1
        out[:, place] = value
    return out.reshape(-1)[:points]


def bitmap(octets: np.ndarray, points: int) -> np.ndarray:
    """Which points have a value: (points,) bool."""
    return np.unpackbits(octets, count=points).view(bool)
