"""An archive's index in memory: ENS-10 has 5.5 million messages, and a machine has to have room for other things."""

import tracemalloc

import numpy as np

from data_prep import catalogue
from data_prep.archive import ArchiveSource
from data_prep.catalogue import Catalogue
from data_prep.grib_io import Stamp
from data_prep.records import FIELD_INDEX, RECORD, Origin
from ensemble_ml.grid import Grid

BYTES_A_MESSAGE = 260  # at the peak; 1.44 GB for all of ENS-10


class Indexed:
    """A file's index without the file: one calendar date of some years, as ENS-10 has it."""

    grid, skipped, stamp = Grid(np.linspace(90, -90, 19), np.arange(0, 360, 10.0)), {}, Stamp(1, 1)
    origins = (Origin(),)

    def __init__(self, number: int):
        self.path = f"{number}.grib"
        fields = [(FIELD_INDEX[name], level) for name in ("t", "z", "u", "v") for level in range(100, 1000, 50)]
        years, members, leads, place = np.indices((20, 10, 3, len(fields))).reshape(4, -1)
        self.records = np.zeros(len(place), RECORD)
        self.records["init"] = (np.arange(1998, 2018) - 1970).astype("datetime64[Y]")[years] + np.timedelta64(
            number, "D"
        )
        self.records["member"], self.records["lead"] = members + 1, leads * 24
        self.records["lead_start"] = self.records["lead"]
        self.records["field"], self.records["level"] = np.array(fields)[place].T
        self.records["offset"], self.records["length"] = np.arange(len(place)) * 100, 100

    def close(self) -> None:
        """Nothing is open."""


def test_the_index_of_an_archive_takes_few_bytes_a_message(monkeypatch):
    monkeypatch.setattr(catalogue, "archive_files", lambda paths, role, wanted: [f"{n}.grib" for n in range(6)])
    monkeypatch.setattr(
        catalogue, "open_readers", lambda files, index, overrides, wanted: [Indexed(n) for n in range(len(files))]
    )
    tracemalloc.start()
    try:
        source = ArchiveSource(Catalogue("archive", role="forecast"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    messages = len(source.catalogue.records)
    assert messages == 6 * 20 * 10 * 3 * 72 and len(source.layout.init_time) == 120
    assert peak / messages < BYTES_A_MESSAGE
    assert all(not len(reader.records) and reader.records.base is None for reader in source.catalogue.readers)
