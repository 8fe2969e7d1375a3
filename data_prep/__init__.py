"""Read archives (GRIB, NetCDF, Zarr) and build tensor stores from them.

All formats share one table of names. Values are decoded exactly as the archive holds them.
"""

from data_prep.archive import open_archive
from data_prep.file_index import user_index
from data_prep.gaps import find_gaps
from data_prep.identity import Overrides
from data_prep.pairs import Pair, open_orographies, open_pair, open_source
from data_prep.prepare import prepare
