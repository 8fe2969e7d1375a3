"""Memory of tensors while some code runs: what is there now, and the most there ever was.

Counts storages, each once, from the operation that made them until they are freed; on real tensors or on fake ones
(`torch._subclasses.FakeTensorMode`), which have shapes and no memory. Rounding by the allocator and scratch memory
inside an operation are not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Footprint(TorchDispatchMode):
    """Counts bytes while it is active: `now`, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves(args):  # what was there before is not counted when an operation returns it
            if isinstance(leaf, Tensor):
                self._seen.setdefault(leaf.untyped_storage(), 0)
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size
