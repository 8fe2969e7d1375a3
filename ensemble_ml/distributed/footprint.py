"""A count of the memory of tensors while some code runs (the current number of bytes and the peak), and of arithmetic.

Each storage counts once, from the operation that makes it until it is freed. This works on real tensors and on fake
ones (`torch._subclasses.FakeTensorMode`), which have shapes and no memory. Rounding by the allocator and scratch memory
inside an operation are not seen. Torch's own counter of operations would keep what is computed again in the backward
pass; its formulas are taken here.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Footprint(TorchDispatchMode):
    """A context that counts the bytes of tensors made while it is active, `now` and `peak`, and operations, `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A storage that existed before must not count when an operation returns it, such as a view of an argument.
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):
                self._seen.setdefault(leaf.untyped_storage(), 0)
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=found)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        """Add a storage that was not seen before, and subtract it when it is freed."""
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size
