"""Read archives (GRIB, NetCDF, Zarr) and build tensor stores from them.

All formats share the names and units of the registry (`ensemble_ml.fields`). GRIB integers of up to 16 bits in simple
packing stay as the archive holds them; all other values are read as float32.
"""

from data_prep.archive import open_archive
from data_prep.file_index import user_index
from data_prep.gaps import find_gaps
from data_prep.identity import Overrides
from data_prep.pairs import Pair, open_orographies, open_pair, open_source
from data_prep.prepare import prepare, whole_path
