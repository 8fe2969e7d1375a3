"""The tensor store: forecasts and truth in a Zarr v3 group, as packed integers or float32.

Each array of fields has one shard for each init time.

`StoreWriter` writes a store and `open_store` opens it for reading. `Source` is the interface that stores and archives
share.
"""

from ensemble_ml.store.metadata import is_store
from ensemble_ml.store.packing import PackedBlock, decode, error_bound, grib_factors, quantise
from ensemble_ml.store.read import TensorStore, open_store
from ensemble_ml.store.source import Fields, Layout, Part, Selection, Source, select_dates
from ensemble_ml.store.statistics import Moments
from ensemble_ml.store.write import StoreWriter
