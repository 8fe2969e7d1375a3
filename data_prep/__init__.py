"""Archives in, tensor stores out: GRIB, NetCDF and Zarr by one table of names, decoded exactly."""

from data_prep.archive import ArchiveSource, find_gap, open_archive
from data_prep.pairs import Pair, open_pair, open_source, open_static
from data_prep.prepare import prepare

__all__ = ["ArchiveSource", "Pair", "find_gap", "open_archive", "open_pair", "open_source", "open_static", "prepare"]
