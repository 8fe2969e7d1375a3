"""Load init times for training: epoch order, member subsets, batches read ahead, and the clairvoyant loader."""

from ensemble_ml.loading.batches import Batch, Batches, batches_by_size, fixed_batches
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.order import member_subset
from ensemble_ml.loading.reader import Reader
from ensemble_ml.loading.store_items import StoreItems
