"""Count what a forward and backward pass moves and holds (bytes) and computes (floating point operations).

Nothing is timed.

    moved    bytes that operations read and write; an operand counts once for each operation, and views do not count
    flops    floating point operations of convolutions and matrix products, by torch's own formulas
    now      bytes of tensors that were made in the pass and are still alive
    peak     the largest `now`, plus the working memory of the convolution that runs at that moment
    least    `moved` of convolutions and products alone: what would be left if all other operations were fused into them

Operations are counted by kind and by the module that runs them, in the forward and in the backward pass. This works on
real tensors and on fake ones (`torch._subclasses.FakeTensorMode`), which have shapes and no memory. The working memory
of a convolution (`_scratch`) is a copy of its kernel, and on a CPU also the buffers of torch's algorithm. The caches
and the rounding of the allocator are not counted. Torch's own counter (`FlopCounterMode`) keeps tensors alive that
recomputation would free, so `peak` would be too large. Only its formulas are used.

Counting bytes instead of operations follows Ivanov et al. 2021, "Data movement is all you need" (arXiv:2007.00072).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker


class Kind(Enum):
    """The kinds of operations that a ledger counts separately."""

    CONVOLUTION = "convolutions"
    PRODUCT = "matrix products"
    SUM = "sums over axes"
    COPY = "copies"
    POINTWISE = "pointwise"

    @property
    def computes(self) -> bool:
        """Return True for convolutions and products, which do many operations for each byte."""
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
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
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
        """Add another entry to this one."""
        self.calls += other.calls
        self.moved += other.moved
        self.flops += other.flops


class Ledger(TorchDispatchMode):
    """A context that counts what operations move, compute and hold while it is active.

    Args:
        by_module: count each module separately. This is not possible for a model that is recomputed in the backward
            pass (`model.recompute`).
        processor: True for a pass on a CPU, False for one on a GPU. With fake tensors, the device that they stand for.

    Attributes:
        entries: totals by (module, kind); the module is "" without `by_module`, and for operations outside all modules.
        now: bytes of tensors that were made in the pass and are still alive.
        peak: the largest `now`, plus the working memory of the convolution that runs at that moment.
    """

    def __init__(self, *, by_module: bool = False, processor: bool = True) -> None:
        super().__init__()
        self._processor = processor
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

    def total(self, kinds: Iterable[Kind] = Kind) -> Entry:
        """Return the totals of some kinds of operations, over all modules."""
        wanted, found = set(kinds), Entry()
        for (_, kind), entry in self.entries.items():
            if kind in wanted:
                found.add(entry)
        return found

    @property
    def flops(self) -> int:
        """Return all floating point operations."""
        return self.total().flops

    @property
    def least(self) -> int:
        """Return the bytes that convolutions and products move, which no fusion of operations can save."""
        return self.total(kind for kind in Kind if kind.computes).moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # More than half of all calls on fake tensors only ask for a device, so these return early.
        if func is torch.ops.prim.device.default:
            return func(*args)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # An operation may return a storage of its arguments, as a view does. Such a storage must not count as new.
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
        if _OF_NAME.get(name) is Kind.CONVOLUTION:
            self.peak = max(self.peak, self.now + _scratch(func, args, made, processor=self._processor))
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

    A storage that several operations keep counts once, and the tensors `known`, which are alive anyway, do not count.
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
    del result  # until here the graph keeps all storages alive, so no two of them had the same address
    return sum(kept.values())


def _scratch(func: Any, args: Any, made: list[Tensor], *, processor: bool) -> int:
    """Return the largest working memory of a convolution in bytes, besides its arguments and its result.

    The memory profiler of torch 2.13 shows two algorithms on a CPU:

        oneDNN    holds a copy of the kernel in blocks; in the backward pass also the kernel's gradient in blocks
        unfolded  holds a matrix of each cell with its neighbours, and contiguous copies of fields that are not
                  contiguous. Torch uses it for small fields of one sample, and for float64.

    A kernel whose memory order differs from that of the fields is copied first. On a GPU only this copy is counted, and
    fields are taken to have channels last, because fake tensors do not show which order cuDNN would choose. The
    workspace of cuDNN is not counted.
    """
    backward = func is torch.ops.aten.convolution_backward.default
    if backward:
        output, field, kernel, sizes, *how, _ = args  # the last argument says which gradients are wanted
    elif func is torch.ops.aten.convolution.default:
        (field, kernel, bias, *how), output = args, made[0]
        sizes = None if bias is None else list(bias.shape)
    else:
        return 0
    if not processor:
        return kernel.nbytes * (not _is_last(kernel))
    way = torch._C._select_conv_backend(field, kernel, None, *how, sizes).name
    if way == "Slow3d":
        unfolded = output[:, 0].numel() * kernel[0].numel() * field.element_size()
        fields = sum(t.nbytes for t in ((field, output) if backward else (field,)) if not t.is_contiguous())
        copied = 0 if backward or kernel.is_contiguous() else kernel.nbytes
        return unfolded + fields + copied
    if way == "Mkldnn":
        return kernel.nbytes * (1 + backward + (_is_last(output) and not _is_last(kernel)))
    return 0


def _is_last(x: Tensor) -> bool:
    """Return True if the channels of a field or a kernel are its innermost axis in memory."""
    return x.ndim in _LAST and x.is_contiguous(memory_format=_LAST[x.ndim])


def _is_free(func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    """Return True for operations that touch no data: views, allocations, and queries such as that for the device."""
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
