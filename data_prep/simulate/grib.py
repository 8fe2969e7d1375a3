"""Encode GRIB as in ECMWF's reforecasts: edition 1, 16-bit simple packing, `pf` for members, `an` for the truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import eccodes
import numpy as np

PARAM_ID = {
    "t": 130, "z": 129, "u": 131, "v": 132, "q": 133, "w": 135, "d": 155,
    "sp": 134, "msl": 151, "t2m": 167, "u10": 165, "v10": 166, "tp": 228,
    "orog": 228002, "lsm": 172,
}  # fmt: skip


@dataclass(frozen=True)
class Stamp:
    """The time and the member of a field, which is valid at `start` plus `hours`."""

    start: datetime
    hours: int = 0
    member: int | None = None  # None for an analysis
    members: int = 0  # size of the ensemble
    since: int | None = None  # hours after `start` at which an accumulation begins; None for an instantaneous field


@dataclass
class Encoder:
    """An encoder for fields on one regular grid, given by its latitudes and longitudes in degrees.

    It keeps ecCodes' handles, because to make one takes longer than to fill it.
    """

    latitude: np.ndarray
    longitude: np.ndarray
    _handles: dict[tuple, int] = field(default_factory=dict, repr=False)

    def encode(self, name: str, values_yx: np.ndarray, stamp: Stamp, level: int | None = None) -> bytes:
        """Return one GRIB message.

        Args:
            name: short name of the registry, a key of `PARAM_ID`.
            values_yx: the field (Y, X), north to south, in the registry's units.
            stamp: start, step and member.
            level: hPa, or None at the surface.
        """
        handle = self._handle(name, stamp, level)
        eccodes.codes_set(handle, "dataDate", int(stamp.start.strftime("%Y%m%d")))
        eccodes.codes_set(handle, "dataTime", stamp.start.hour * 100)
        if stamp.member is not None:
            eccodes.codes_set(handle, "number", stamp.member)
        steps = str(stamp.hours) if stamp.since is None or stamp.hours == 0 else f"{stamp.since}-{stamp.hours}"
        eccodes.codes_set(handle, "stepRange", steps)
        # A constant field sets the handle to zero bits, with which the next field would lose its values.
        if eccodes.codes_get(handle, "bitsPerValue") != 16:
            eccodes.codes_set(handle, "bitsPerValue", 16)
        eccodes.codes_set_values(handle, np.ascontiguousarray(values_yx, np.float64).ravel())
        return eccodes.codes_get_message(handle)

    def _handle(self, name: str, stamp: Stamp, level: int | None) -> int:
        """Return the handle for messages of this kind, made at the first use."""
        accumulated = stamp.since is not None and stamp.hours > 0
        key = (name, level, stamp.member is None, stamp.members, accumulated)
        if key not in self._handles:
            self._handles[key] = self._template(name, stamp, level, accumulated)
        return self._handles[key]

    def _template(self, name: str, stamp: Stamp, level: int | None, accumulated: bool) -> int:
        """Return a new handle with all keys that do not change between messages of this kind."""
        sample = "regular_ll_sfc_grib1" if level is None else "regular_ll_pl_grib1"
        handle = eccodes.codes_grib_new_from_samples(sample)
        keys = self._grid_keys() | self._mars_keys(stamp) | {"paramId": PARAM_ID[name], "bitsPerValue": 16}
        if level is not None:
            keys |= {"level": level}
        if accumulated:
            keys |= {"timeRangeIndicator": 4}
        for key, value in keys.items():
            eccodes.codes_set(handle, key, value)
        return handle

    def _grid_keys(self) -> dict[str, float | int]:
        """Return the keys of section 2 for the grid."""
        lat, lon = self.latitude, self.longitude
        return {
            "Ni": len(lon),
            "Nj": len(lat),
            "latitudeOfFirstGridPointInDegrees": float(lat[0]),
            "latitudeOfLastGridPointInDegrees": float(lat[-1]),
            "longitudeOfFirstGridPointInDegrees": float(lon[0]),
            "longitudeOfLastGridPointInDegrees": float(lon[-1]),
            "iDirectionIncrementInDegrees": float(lon[1] - lon[0]),
            "jDirectionIncrementInDegrees": float(lat[0] - lat[1]),
        }

    @staticmethod
    def _mars_keys(stamp: Stamp) -> dict[str, str | int]:
        """Return the keys of ECMWF's local section: ensemble members, or analyses for the truth."""
        keys: dict[str, str | int] = {
            "centre": "ecmf",
            "setLocalDefinition": 1,
            "localDefinitionNumber": 1,
            "experimentVersionNumber": "jcm3",
        }
        if stamp.member is None:
            return keys | {"stream": "oper", "dataType": "an"}
        return keys | {"stream": "enfo", "dataType": "pf", "numberOfForecastsInEnsemble": stamp.members}


def forecast_messages(
    encoder: Encoder, upper: dict[str, np.ndarray], surface: dict[str, np.ndarray], levels: list[int], stamp: Stamp
) -> tuple[bytes, bytes]:
    """Encode the fields of one state into GRIB messages.

    Args:
        encoder: the encoder.
        upper: fields on pressure levels (level, Y, X) by short name.
        surface: surface fields (Y, X) by short name.
        levels: levels of `upper`, hPa.
        stamp: start, step and member.

    Returns:
        The messages on pressure levels, and those at the surface.
    """
    pl = [encoder.encode(n, x[k], stamp, level) for n, x in upper.items() for k, level in enumerate(levels)]
    plain = Stamp(stamp.start, stamp.hours, stamp.member, stamp.members)
    sfc = [encoder.encode(n, x, plain) for n, x in surface.items() if n != "tp"]
    if "tp" in surface:
        sfc.append(encoder.encode("tp", surface["tp"], accumulation(plain)))
    return b"".join(pl), b"".join(sfc)


def accumulation(stamp: Stamp) -> Stamp:
    """Return the stamp of precipitation, which is counted from the start of a forecast.

    In the truth it is counted from 24 h before the valid time.
    """
    if stamp.member is None:
        return Stamp(stamp.start - timedelta(hours=24), 24, since=0)
    return Stamp(stamp.start, stamp.hours, stamp.member, stamp.members, since=0)
