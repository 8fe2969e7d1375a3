"""How start dates reach the model: the order of an epoch, member subsets, batches read ahead."""

from ensemble_ml.loading.batches import Batch, Batches, fixed_batches
from ensemble_ml.loading.order import Order, epoch_order, member_subset
from ensemble_ml.loading.reader import Reader

__all__ = ["Batch", "Batches", "Order", "Reader", "epoch_order", "fixed_batches", "member_subset"]
