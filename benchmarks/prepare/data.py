"""Make an archive as large as ENS-10's in a minute: one GRIB file for a calendar date, and its truth.

Fields are sums of a few random ones with the power spectra of the free atmosphere: energy k^-5 for geopotential, k^-3
for temperature and wind, k^-5/3 for humidity, vertical velocity and divergence. So compressors meet the same as in a
real archive: neighbours that differ little, and noise in the last bits. The fields are not weather.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from ensemble_ml.config import BenchmarkSize
from ensemble_ml.units import GRAVITY

_BASES = 6  # random fields of each spectrum, of which all other fields are sums
_MEMBER_SHARE = 0.3  # departure of a member, relative to the part that all members share
_FIRST = datetime(1998, 1, 5)
_SCALE_HEIGHT = 7.4e3  # m, scale height of pressure in an isothermal atmosphere of 253 K
_SCALES = {  # typical value, standard deviation, exponent of the amplitude spectrum
    "t": (250.0, 12.0, 2.0),
    "q": (0.02, 1.5e-3, 1.33),
    "w": (0.0, 0.2, 1.33),
    "u": (8.0, 12.0, 2.0),
    "v": (0.0, 9.0, 2.0),
    "z": (0.0, 1.5e3, 3.0),  # about the height of its level
    "d": (0.0, 2e-5, 1.33),
}


@dataclass(frozen=True)
class Shape:
    """The extent of the archive. The long file has `years` init times, the short file has one."""

    rows: int
    columns: int
    levels: tuple[int, ...]
    members: int
    leads: tuple[int, ...]
    years: int
    variables: tuple[str, ...] = tuple(_SCALES)

    @property
    def fields(self) -> int:
        """Return the number of messages of one init time."""
        return self.members * len(self.leads) * len(self.variables) * len(self.levels)


SHAPES = {
    BenchmarkSize.full: Shape(361, 720, (10, 50, 100, 200, 300, 400, 500, 700, 850, 925, 1000), 10, (0, 24, 48), 3),
    BenchmarkSize.small: Shape(181, 360, (100, 300, 500, 850, 1000), 10, (0, 24, 48), 3),
    BenchmarkSize.tiny: Shape(33, 64, (500, 850), 10, (0, 24), 3),
}


_FILES = ("member", "forecast", "truth", "forecast_years", "truth_years")


@dataclass(frozen=True)
class Archive:
    """The files of the archive: one member, all members and the truth of one date, and the same of several years."""

    member: Path
    forecast: Path
    truth: Path
    years: Path
    truth_years: Path


def archive(folder: Path, shape: Shape) -> Archive:
    """Return the archive in a folder. It is made if it does not exist.

    Args:
        folder: the folder.
        shape: the extent of the archive.
    """
    files = Archive(*(folder / f"{name}.grib" for name in _FILES))
    mark = folder / "shape.json"
    wanted = json.dumps(asdict(shape) | {"scales": _SCALES})
    if not mark.is_file() or mark.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        mark.unlink(missing_ok=True)
        for date, years in ((files.forecast, files.years), (files.truth, files.truth_years)):
            _write(date, years, _messages(shape, members=date is files.forecast), shape.years)
        size = files.forecast.stat().st_size // shape.members
        with open(files.forecast, "rb") as file:
            files.member.write_bytes(file.read(size))
        mark.write_text(wanted)
    return files


def _write(date: Path, years: Path, messages: Iterator[bytes], count: int) -> None:
    with open(date, "wb") as file:
        for chunk in messages:
            file.write(chunk)
    content = np.fromfile(date, np.uint8)
    length = int.from_bytes(content[4:7].tobytes(), "big")
    table = content.reshape(-1, length)  # all messages have one length: 16 bits a point and the same sections
    with open(years, "wb") as file:
        for year in range(_FIRST.year, _FIRST.year + count):
            # Section 1 begins at octet 9; its octets 13 and 25 hold year of century and century.
            table[:, 8 + 12], table[:, 8 + 24] = (year - 1) % 100 + 1, (year - 1) // 100 + 1
            table.tofile(file)


def _messages(shape: Shape, *, members: bool) -> Iterator[bytes]:
    """Yield encoded fields, member by member. The truth counts as a member of its own."""
    bases = {slope: _bases(shape, slope) for slope in sorted({slope for *_, slope in _SCALES.values()})}
    numbers = list(range(1, shape.members + 1)) if members else [0]
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda number: _member(shape, bases, number), numbers)


def _member(shape: Shape, bases: dict[float, np.ndarray], number: int) -> bytes:
    from data_prep.simulate.archive import Encoder, Stamp

    latitude, longitude = np.linspace(90, -90, shape.rows), np.arange(shape.columns) * 360 / shape.columns
    encoder, made = Encoder(latitude, longitude), []
    for lead in shape.leads:
        for place, name in enumerate(shape.variables):
            for depth, level in enumerate(shape.levels):
                values = _field(bases, name, (place, depth, lead), number)
                if name == "z":
                    values = values + np.float32(GRAVITY * _SCALE_HEIGHT * np.log(1013.25 / level))
                stamp = Stamp(_FIRST, lead, number, shape.members) if number else Stamp(valid(lead))
                made.append(encoder.encode(name, values, stamp, level))
    return b"".join(made)


def valid(lead: int) -> datetime:
    """Return the valid time of a lead of the first init time.

    Args:
        lead: hours.
    """
    return _FIRST.replace(day=_FIRST.day + lead // 24, hour=lead % 24)


def _field(bases: dict[float, np.ndarray], name: str, key: tuple[int, int, int], number: int) -> np.ndarray:
    """Return a field (Y, X) float32.

    `key` seeds the part that all members share; `number` seeds the rest as well.
    """
    typical, deviation, slope = _SCALES[name]
    shared = np.random.default_rng(key).normal(size=_BASES)
    own = np.random.default_rng((*key, number)).normal(size=_BASES)
    weights = ((shared + _MEMBER_SHARE * own) / np.sqrt(_BASES)).astype(np.float32)
    return np.tensordot(weights, bases[slope], 1) * np.float32(deviation) + np.float32(typical)


def _bases(shape: Shape, slope: float) -> np.ndarray:
    """Return random fields (_BASES, Y, X) float32 with mean 0 and deviation 1. Amplitudes fall as wavenumber^-slope."""
    rng = np.random.default_rng(int(100 * slope))
    rows, columns = np.fft.fftfreq(2 * shape.rows, 1 / (2 * shape.rows)), np.arange(shape.columns // 2 + 1)
    wavenumber = np.hypot(rows[:, None], columns)
    amplitude = (wavenumber + 3.0) ** -slope  # constant at planetary scales
    noise = np.fft.rfft2(rng.normal(size=(_BASES, 2 * shape.rows, shape.columns)))
    values = np.fft.irfft2(noise * amplitude, s=(2 * shape.rows, shape.columns))[:, : shape.rows]
    values = _as_on_a_sphere(values)
    values -= values.mean((1, 2), keepdims=True)
    return (values / values.std((1, 2), keepdims=True)).astype(np.float32)


def _as_on_a_sphere(values: np.ndarray) -> np.ndarray:
    """Remove zonal wavenumbers that do not fit on a circle of latitude. Rows near the poles become smooth."""
    rows, columns = values.shape[-2:]
    longest = np.cos(np.deg2rad(np.linspace(90, -90, rows))) * columns / 2
    keep = np.exp(-((np.arange(columns // 2 + 1) / np.maximum(longest[:, None], 1.0)) ** 8))
    return np.fft.irfft(np.fft.rfft(values, axis=-1) * keep, n=columns, axis=-1)
