"""A ledger of a pass: what its operations move, compute and hold, exactly, and the same on any machine.

    moved    bytes that operations read and write; an operand counts once for each operation, a view never
    flops    floating point operations of convolutions and products, by torch's own formulas
    now      bytes of tensors that were made in the pass and are still alive
    peak     the largest `now`
    least    `moved` of convolutions and products alone: what would be left if all else were fused into them

Operations are counted by kind and by the module that runs them, in the forward and in the backward pass. This works on
real tensors and on fake ones (`torch._subclasses.FakeTensorMode`), which have shapes and no memory. Caches, rounding by
the allocator and scratch memory inside an operation are not seen. Torch's own counter of operations would keep what is
computed again in the backward pass; its formulas are taken here.

Counting bytes in the place of operations follows Ivanov et al. 2021, "Data movement is all you need"
(arXiv:2007.00072).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker


class Kind(Enum):
    """The kinds of operations that a ledger tells apart."""

    CONVOLUTION = "convolutions"
    PRODUCT = "matrix products"
    SUM = "sums over axes"
    COPY = "copies"
    POINTWISE = "pointwise"

    @property
    def computes(self) -> bool:
        """Return True for convolutions and products, which have far more arithmetic than bytes."""
        return self in (Kind.CONVOLUTION, Kind.PRODUCT)


_KINDS = {
    Kind.CONVOLUTION: {"convolution", "convolution_backward", "mkldnn_convolution", "cudnn_convolution"},
    Kind.PRODUCT: {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "linear", "mkldnn_linear"},
    Kind.SUM: {"sum", "mean", "amax", "amin", "max", "min", "argmin", "argmax", "std", "var", "any", "all", "norm"},
    Kind.COPY: {
        "clone", "copy_", "_to_copy", "cat", "stack", "roll", "flip", "index", "index_select", "gather", "scatter",
        "index_copy", "fill_", "zero_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like",
        "constant_pad_nd", "select_backward", "slice_backward", "repeat",
    },
}  # fmt: skip
_OF_NAME = {name: kind for kind, names in _KINDS.items() for name in names}
_OVERWRITES = {"copy_", "fill_", "zero_"}  # their first argument is written and not read


@dataclass
class Entry:
    """The totals of some operations.

    Attributes:
        calls: how many there were.
        moved: bytes that they read and wrote.
        flops: their floating point operations.
    """

    calls: int = 0
    moved: int = 0
    flops: int = 0

    def add(self, other: Entry) -> None:
        """Add another entry to this one.

        Args:
            other: the entry to add.
        """
        self.calls += other.calls
        self.moved += other.moved
        self.flops += other.flops


class Ledger(TorchDispatchMode):
    """A context that counts what operations move, compute and hold while it is active.

    Args:
        by_module: tell the modules apart, too. Modules of a model that is computed again in the backward pass
            (`model.recompute`) cannot be followed.

    Attributes:
        entries: totals by (module, kind); the module is "" without `by_module`, and for what no module runs.
        now: bytes of tensors made in the pass that are alive.
        peak: the largest `now`.
    """

    def __init__(self, *, by_module: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.entries: dict[tuple[str, Kind], Entry] = defaultdict(Entry)
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._tracker = ModuleTracker() if by_module else None

    def __enter__(self) -> Ledger:
        if self._tracker is not None:
            self._tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._tracker is not None:
            self._tracker.__exit__(*error)

    def total(self, kinds: Iterable[Kind] = Kind, under: str = "") -> Entry:
        """Return the totals of some kinds of operations.

        Args:
            kinds: which kinds.
            under: only modules whose name begins so.

        Returns:
            Their sum.
        """
        wanted, found = set(kinds), Entry()
        for (module, kind), entry in self.entries.items():
            if kind in wanted and module.startswith(under):
                found.add(entry)
        return found

    @property
    def flops(self) -> int:
        """Return all floating point operations."""
        return self.total().flops

    @property
    def least(self) -> int:
        """Return the bytes that convolutions and products move: those that no fusion saves."""
        return self.total(kind for kind in Kind if kind.computes).moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A storage that existed before must not count when an operation returns it, such as a view of an argument.
        for leaf in given:
            self._seen.setdefault(leaf.untyped_storage(), 0)
        found = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        name = func._overloadpacket.__name__
        if not _is_free(func, name, given, made):
            read = given[1:] if name in _OVERWRITES else given
            entry = Entry(1, sum(map(_bytes_of, {id(t): t for t in read}.values())) + sum(map(_bytes_of, made)))
            if func._overloadpacket in flop_registry:
                entry.flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=found)
            self.entries[self._module(), _OF_NAME.get(name, Kind.POINTWISE)].add(entry)
        for leaf in made:
            self._count(leaf.untyped_storage())
        return found

    def _module(self) -> str:
        """Return the innermost module that runs, without the name of the model itself; "" if there is none."""
        if self._tracker is None:
            return ""
        innermost = max(self._tracker.parents, key=len)
        return "" if innermost == "Global" else innermost.partition(".")[2]

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


def saved_bytes(call: Callable[[], Any], known: Iterable[Tensor] = ()) -> int:
    """Run a forward pass, and return the bytes that it keeps for the backward pass.

    Args:
        call: the forward pass.
        known: tensors that are alive anyway, such as weights and buffers; they do not count.

    Returns:
        Bytes; a storage that several operations keep counts once.
    """
    kept: dict[Any, int] = {}
    apart = {tensor.untyped_storage()._cdata for tensor in known}

    def keep(tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        storage = tensor.untyped_storage()
        if storage._cdata not in apart:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    del result  # until here the graph keeps all storages, so none of their numbers was used twice
    return sum(kept.values())


def _is_free(func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    """Return True for operations that touch no data: views, allocations, and questions such as "on which device?"."""
    if func.is_view or "empty" in name or not made:
        return True
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    same = all(tensor.untyped_storage()._cdata in storages for tensor in made)
    return same and not func._schema.is_mutable  # such as `_reshape_alias`


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an axis that repeats one element counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count
