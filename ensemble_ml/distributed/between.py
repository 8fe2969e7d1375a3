"""What a partitioned network does between its layers, looked at in its first pass.

A layer knows its neighbours. A function that somebody's `forward` calls (an interpolation, a mean over the map) sees
this rank's part alone, keeps its shape, and would give other numbers than one process without a word. What is made of
sizes alone, as coordinates by `linspace(-1, 1, x.shape[2])`, is not seen here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ensemble_ml.errors import UserError

_KERNELS = {
    "unfold", "fold", "im2col", "col2im", "grid_sample", "batch_norm", "instance_norm", "group_norm", "pixel_shuffle",
    "pixel_unshuffle", "local_response_norm", "rot90", "dropout", "feature_dropout", "upsample",
    "scaled_dot_product_attention",
    *(f"{kind}{n}d" for kind in ("conv", "conv_transpose", "avg_pool", "max_pool", "lp_pool") for n in (1, 2, 3)),
    *(f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
}  # fmt: skip
_ALONG = {
    "mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "amax", "amin", "max", "min",
    "median", "nanmean", "nansum", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "argmax", "argmin",
    "sort", "roll", "flip", "diff", "any", "all", "count_nonzero", "quantile", "fft", "ifft", "rfft", "irfft",
    "narrow", "select", "index_select", "chunk", "split", "unbind", "cummax", "cummin", "logcumsumexp", "argsort",
    "aminmax", "topk", "kthvalue", "mode", "nanmedian", "nanquantile", "gather", "scatter", "scatter_add", "index_add",
    "trapezoid", "trapz", "cumulative_trapezoid", "gradient", "softmin", "tensor_split", "take_along_dim",
}  # fmt: skip
_SECOND = {
    "roll", "quantile", "nanquantile", "norm", "vector_norm", "fft", "ifft", "rfft", "irfft", "chunk", "split", "topk",
    "kthvalue", "tensor_split", "take_along_dim",
}  # fmt: skip
_LAST = {  # the axis where none is given
    **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "argsort", "topk", "kthvalue", "mode"), -1),
    **dict.fromkeys(("trapezoid", "trapz", "cumulative_trapezoid"), -1),
    **dict.fromkeys(("chunk", "split", "unbind", "tensor_split"), 0),
}
_TURNED = {"transpose", "swapaxes", "swapdims", "permute"}
_PLANE = {f"{kind}{n}" for kind in ("fft", "ifft", "rfft", "irfft") for n in ("2", "n")}
_JOINED = {"flatten", "reshape", "view", "view_as", "reshape_as"}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "einsum", "tensordot", "linear"}


def watch_first_pass(
    model: nn.Module, axes: tuple[int, int], layers: Iterable[nn.Module], last: tuple[bool, bool] = (False, False)
) -> None:
    """Let the next forward pass of `model` refuse what needs other ranks' points, but within `layers`.

    The pass raises a UserError that names the function. Later passes are not watched. `last` says whether this rank's
    part is the last one along each of the `axes`, which alone may be cut at its end.
    """
    mode = _Between(axes, last)
    handles: list[RemovableHandle] = []

    def enter(*_: Any) -> None:
        mode.inside += 1

    def leave(*_: Any) -> None:
        mode.inside -= 1

    def begin(_: nn.Module, given: tuple[Any, ...]) -> None:
        fields = (value.ndim for value in given if isinstance(value, Tensor) and value.ndim > max(axes))
        mode.ndim = next(fields, 0)
        mode.__enter__()

    def end(*_: Any) -> None:
        mode.__exit__(None, None, None)
        for handle in handles:
            handle.remove()

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))
    handles.append(model.register_forward_pre_hook(begin))
    handles.append(model.register_forward_hook(end, always_call=True))


class _Between(TorchFunctionMode):
    """Refuses functions along split axes while no layer is at work (`inside` is zero)."""

    def __init__(self, axes: tuple[int, int], last: tuple[bool, bool]):
        super().__init__()
        self.axes, self.inside = axes, 0
        self.ends = {axis for axis, end in zip(axes, last, strict=True) if end}
        self.ndim = 0  # of the model's input; zero where that is not known

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", "").removeprefix("fft_").removeprefix("linalg_")
        if not self.inside and self._together(name, args, given):
            raise UserError(
                f"partition: {name}() between the layers of the model would see one rank's part of the field alone;"
                " use a layer for it (nn.Upsample, nn.AvgPool2d, ...), or leave it out"
            )
        return function(*args, **given)

    def _together(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        """Whether a function takes points together along a split axis."""
        if name in _PRODUCTS:
            return _contracts(name, args, given, self._looks_whole, self.axes)
        # A field is the first argument, or goes by its name.
        args = (*args, *(given[key] for key in ("input", "self") if key in given and not args))
        if not args or not isinstance(args[0], Tensor) or args[0].ndim <= max(self.axes):
            return False
        # A field in another shape has its axes elsewhere, so what changes shapes is judged while it has its own.
        if (name == "__getitem__" or name in _JOINED or name in _TURNED) and not self._looks_whole(args[0]):
            return False
        if name == "__getitem__":
            return _cuts(args[1], args[0].shape, self.axes, self.ends)
        return _crosses(name, args, given, self.axes)

    def _looks_whole(self, value: Any) -> bool:
        """Whether it is a field with its axes where the model's input has them."""
        return isinstance(value, Tensor) and value.ndim > max(self.axes) and self.ndim in (0, value.ndim)


def _crosses(name: str, args: Sequence[Any], given: Mapping[str, Any], axes: tuple[int, int]) -> bool:
    """Whether a function of a field takes points together along one of `axes`."""
    x = args[0]
    if name == "interpolate":
        return not _repeats(x, args, given, axes)
    if name == "pad":
        widths = args[1] if len(args) > 1 else given["pad"]
        return any(width and x.ndim - 1 - place // 2 in axes for place, width in enumerate(widths))
    if name == "layer_norm":
        shape = args[1] if len(args) > 1 else given["normalized_shape"]
        return max(axes) >= x.ndim - len(shape)
    if name in _TURNED:
        return _turns(name, args, given, axes)
    if name in _JOINED:
        return _joins(name, args, given, axes)
    if name == "normalize":
        dim = given.get("dim", args[2] if len(args) > 2 else 1)
        return any(one % x.ndim in axes for one in (dim if isinstance(dim, tuple | list) else (dim,)))
    if name in _PLANE:
        dims = given.get("dim", args[2] if len(args) > 2 else (-2, -1) if name.endswith("2") else None)
        return dims is None or any(dim % x.ndim in axes for dim in dims)
    if name not in _ALONG:
        return name in _KERNELS
    at = 2 if name in _SECOND else 1
    dims = next((given[key] for key in ("dim", "dims", "axis") if key in given), args[at] if len(args) > at else None)
    if isinstance(dims, Tensor) and name in ("max", "min"):  # the larger of two, at each point
        return False
    if isinstance(dims, Tensor):  # where points lie: the axis is the last
        dims = -1
    dims = _LAST.get(name) if dims is None else dims
    if dims is None:
        return True
    listed = dims if isinstance(dims, tuple | list) else args[at:] if name == "flip" else (dims,)
    return any(isinstance(dim, int) and dim % x.ndim in axes for dim in listed)


def _contracts(
    name: str, args: Sequence[Any], given: Mapping[str, Any], whole: Callable[[Any], bool], axes: tuple[int, int]
) -> bool:
    """Whether a product sums over a split axis of one of its factors that `whole` says is a field."""
    if name == "einsum":
        inputs, arrow, out = str(args[0]).replace(" ", "").partition("->")
        factors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        for letters, factor in zip(inputs.split(","), factors, strict=False):
            kept = out if arrow else "".join(one for one in letters if inputs.count(one) == 1)
            if whole(factor) and "." not in letters and any(letters[axis] not in kept for axis in axes):
                return True
        return False
    keys = ("input", "other", "tensor1", "tensor2", "weight")
    first, second, *rest = [*args, *(given[key] for key in keys if key in given), None, None]
    if name == "tensordot":
        dims = given.get("dims", rest[0] if rest and rest[0] is not None else 2)
        both = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
        pairs = zip((first, second), both, strict=True)
        return any(whole(x) and any(dim % x.ndim in axes for dim in over) for x, over in pairs)
    over = [(first, -1)] if name == "linear" else [(first, -1), (second, -2)]
    over = [(second, -1), (first, -2)] if name == "__rmatmul__" else over
    return any(whole(x) and dim % x.ndim in axes for x, dim in over)


def _turns(name: str, args: Sequence[Any], given: Mapping[str, Any], axes: tuple[int, int]) -> bool:
    """Whether the split axes change places with each other: layers would take the one for the other."""
    ndim, rest = args[0].ndim, [*args[1:], *(value for key, value in given.items() if key not in ("input", "self"))]
    order = [one % ndim for one in (rest[0] if isinstance(rest[0], tuple | list) else rest)]
    if name == "permute":
        return (order[axes[0]], order[axes[1]]) == axes[::-1]
    return set(order) == set(axes)


def _cuts(index: Any, shape: Sequence[int], axes: tuple[int, int], ends: Collection[int]) -> bool:
    """Whether an index takes a part of a split axis, which would be a part of each rank's part; at the end of the last
    rank's (`ends`) it may."""
    ndim = len(shape)
    places = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(place, Tensor | list) for place in places):
        return False  # a choice by values: of points, or of the first axes
    given = sum(place is not None and place is not Ellipsis for place in places)
    axis = 0
    for place in places:
        if place is None:
            continue
        if place is Ellipsis:
            axis += ndim - given
            continue
        if axis in axes and not _from_start(place, 0 if axis in ends else shape[axis]):
            return True
        axis += 1
    return False


def _from_start(place: Any, least: int) -> bool:
    """Whether it takes all, or the first so many, `least` or more: how an upsampled field is cut to the size of what it
    is added to."""
    if not isinstance(place, slice) or place.start not in (None, 0) or place.step not in (None, 1):
        return False
    return place.stop is None or place.stop >= least


def _joins(name: str, args: Sequence[Any], given: Mapping[str, Any], axes: tuple[int, int]) -> bool:
    """Whether a change of shape takes a split axis into another, so that later layers cannot know where it is."""
    x = args[0]
    if name == "flatten":
        first = given.get("start_dim", args[1] if len(args) > 1 else 0) % x.ndim
        last = given.get("end_dim", args[2] if len(args) > 2 else -1) % x.ndim
        return first < last and any(first <= axis <= last for axis in axes)
    if name.endswith("_as"):
        shape: Any = args[1].shape if len(args) > 1 else given["other"].shape
    else:
        shape = given.get("shape", given.get("size", args[1] if len(args) == 2 else args[1:]))
    if isinstance(shape, torch.dtype) or "dtype" in given:  # a view as another type
        return False
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = x.numel() // max(known, 1)
    return not all(_kept(axis, x.shape, sizes) for axis in axes)


def _kept(axis: int, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether an axis of `shape` is one of `sizes`, with as much before it."""
    before = math.prod(shape[:axis])
    return any(math.prod(sizes[:i]) == before and size == shape[axis] for i, size in enumerate(sizes))


def _repeats(x: Tensor, args: Sequence[Any], given: Mapping[str, Any], axes: tuple[int, int]) -> bool:
    """Whether an interpolation repeats each point a whole number of times, which needs no neighbour."""
    if given.get("mode", args[3] if len(args) > 3 else "nearest") != "nearest":
        return False
    size = given.get("size", args[1] if len(args) > 1 else None)
    factor = given.get("scale_factor", args[2] if len(args) > 2 else None)
    count = x.ndim - 2
    if size is not None:
        sizes = size if isinstance(size, tuple | list | torch.Size) else [size] * count
        return all(sizes[axis - 2] % x.shape[axis] == 0 for axis in axes)
    factors = factor if isinstance(factor, tuple | list) else [factor] * count
    return all(float(factors[axis - 2]).is_integer() for axis in axes)
