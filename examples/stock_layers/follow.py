"""The split axes of a field followed through functions that do not combine points along them.

A list of all functions that combine points could never be complete. So the lists here are of what is known to be safe:
functions that torch itself tags as pointwise, changes of shape, which are tried on a probe, and functions whose axes
can be read from their arguments. Every other function is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from examples.stock_layers.views import At, Axes, TogetherError, agreed, reshaped, set_in, taken, tensors

# Functions that work along axes, which they get as an argument. They are allowed along all but the split axes.
_ALONG = {
    "mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "amax", "amin", "max", "min",
    "median", "nanmean", "nansum", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "argmax", "argmin",
    "sort", "roll", "flip", "diff", "any", "all", "count_nonzero", "quantile", "fft", "ifft", "rfft", "irfft",
    "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn", "index_select", "index_copy", "index_fill",
    "cummax", "cummin", "logcumsumexp", "argsort", "aminmax", "topk", "kthvalue", "mode", "nanmedian", "nanquantile",
    "gather", "scatter", "scatter_add", "index_add", "trapezoid", "trapz", "cumulative_trapezoid", "gradient",
    "softmin", "take_along_dim", "normalize", "cosine_similarity", "cross", "vecdot", "glu",
}  # fmt: skip
# Those of them that take the axes as their third argument, and not as the second.
_SECOND = {
    "roll", "quantile", "nanquantile", "norm", "vector_norm", "diff", "topk", "kthvalue", "take_along_dim", "normalize",
    "cosine_similarity", "cross", "vecdot", *(name for name in _ALONG if "fft" in name),
}  # fmt: skip
# The axes along which these work if none are given. The other functions of `_ALONG` then work along all axes.
_LAST: dict[str, Any] = {
    **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "argsort", "topk", "kthvalue", "mode"), -1),
    **dict.fromkeys(("trapezoid", "trapz", "cumulative_trapezoid", "diff", "cross", "vecdot", "glu"), -1),
    **dict.fromkeys(("fft2", "ifft2", "rfft2", "irfft2"), (-2, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), 1),
}
_VIEWS = {
    "flatten", "ravel", "unflatten", "reshape", "view", "reshape_as", "view_as", "transpose", "swapaxes", "swapdims",
    "permute", "movedim", "moveaxis", "T", "mT", "H", "mH", "t", "adjoint", "squeeze", "unsqueeze", "select", "narrow",
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "expand", "expand_as", "broadcast_to",
}  # fmt: skip
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "einsum", "tensordot", "linear"}
# Functions that leave the axes of the first argument where they are. Their values are its own, or those of no field.
_ALIKE = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
    "cfloat", "cdouble", "cpu", "cuda", "contiguous", "detach", "data", "requires_grad", "clone", "alias", "real",
    "imag", "resolve_conj", "resolve_neg", "zeros_like", "ones_like", "full_like", "empty_like", "zero", "fill",
    "retain_grad", "register_hook", "pin_memory", "bucketize", "channel_shuffle", "embedding", "one_hot",
    "view_as_real", "view_as_complex",
}  # fmt: skip
# Pointwise functions that torch does not tag, most of them because they are composed of others.
_POINTWISE = {
    *(f"__{way}{name}__" for way in ("", "r", "i") for name in ("and", "or", "xor", "lshift", "rshift", "add", "sub",
    "mul", "div", "truediv", "floordiv", "mod", "pow")), "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__neg__", "__pos__", "__abs__", "__invert__", "divide", "multiply", "subtract", "floor_divide", "absolute",
    "negative", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "fix", "greater",
    "greater_equal", "less", "less_equal", "not_equal", "softsign", "tanhshrink", "logsigmoid", "log_sigmoid",
    "hardswish", "prelu", "selu", "expit", "gammaln", "psi", "multigammaln", "isreal", "isclose", "complex", "polar",
    "copy", "_threshold", "broadcast_tensors", "gammainc", "gammaincc", "log_ndtr", "ndtr",
}  # fmt: skip
# Functions that return no tensors: facts about a tensor, and access to attributes.
_FACTS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_tensor", "is_same_size", "element_size", "get_device", "storage_offset", "data_ptr",
    "result_type", "is_inference", "is_pinned", "has_names", "is_conj", "is_neg", "__len__", "__hash__", "__repr__",
    "__format__", "__set__", "__get__",
}  # fmt: skip
_ELLIPSIS = "".join(map(chr, range(0x3B1, 0x3C9)))  # Greek letters for the axes of an ellipsis in einsum


def follow(
    function: Any, args: Sequence[Any], given: Mapping[str, Any], found: Any, at: At, last: tuple[bool, bool]
) -> Axes | None:
    """Return where the split axes lie in the tensors that `function` has returned; None if these are not fields.

    Args:
        function: a torch function.
        args: its positional arguments.
        given: its keyword arguments.
        found: its result.
        at: returns where the split axes lie in a tensor.
        last: whether this rank's shard is the last one along each axis. Only that one may be cut at its end.

    Raises:
        TogetherError: the function combines points along a split axis, or is not known.
    """
    name = name_of(function)
    own = name if name.endswith("__") else name.rstrip("_")
    # A view in place would change the axes of a tensor whose place is already recorded.
    if own in _VIEWS and own != name:
        raise TogetherError
    field, axes = next((one, place) for one in tensors((args, given)) if (place := at(one)) is not None)
    if name == "__setitem__":
        return set_in(args, at, last)
    if name == "__getitem__":
        return taken(args, at, last)
    if own in _VIEWS:
        return reshaped(function, name, args, given, at)
    if own in _PRODUCTS:
        return _multiplied(own, args, given, at)
    if own in ("cat", "concat", "concatenate", "stack"):
        return _joined(own, args, given, at)
    if own in ("repeat", "tile", "repeat_interleave"):
        return _repeated(own, args, given, found, field, axes)
    if own in ("interpolate", "pad", "layer_norm", "rms_norm"):
        return _if(not _crosses(own, field, args, given, axes), axes)
    if own in _ALONG and not (own in ("max", "min") and any(True for _ in tensors((args[1:], given.get("other"))))):
        return _along(own, args or (field,), given, found, field, axes)
    if own in _ALIKE:
        return at(next(tensors((args, given))))
    made = next(tensors(found), None)
    if own.startswith("new_"):
        return axes if made is not None and made.shape == field.shape else None
    if made is None:
        return _if(own in _FACTS or getattr(function, "__name__", "") == "__get__", None)
    # With a condition alone, `where` lists the points at which it holds.
    by_point = own != "where" or len(args) + len(given) > 1
    return _if(by_point and works_by_point(own), _aligned(args, given, made, at))


def name_of(function: Any) -> str:
    """Return the name of a function as users write it, without the module; for a property, the property's name."""
    name = str(getattr(function, "__name__", ""))
    if name == "__get__":
        name = str(getattr(function.__self__, "__name__", name))
    return name.removeprefix("fft_").removeprefix("linalg_").removeprefix("special_")


def works_by_point(name: str) -> bool:
    """Return whether a function, in place or not, is known to act on each point by itself."""
    own = name if name.endswith("__") else name.rstrip("_")
    return own in _POINTWISE or _tagged(own)


def _if(allowed: bool, axes: Axes | None) -> Axes | None:
    """Return `axes` if this is allowed, and raise a TogetherError otherwise."""
    if not allowed:
        raise TogetherError
    return axes


@cache
def _tagged(name: str) -> bool:
    """Return whether torch tags a function as pointwise.

    `rrelu` is excluded, because its random numbers would differ between shards.
    """
    for full in (name, f"special_{name}"):
        packet = getattr(torch.ops.aten, full, None) if name != "rrelu" else None
        kinds = packet.overloads() if packet is not None else ()
        if any(torch.Tag.pointwise in getattr(packet, kind).tags for kind in kinds):
            return True
    return False


def _aligned(args: Sequence[Any], given: Mapping[str, Any], made: Tensor, at: At) -> Axes:
    """Return the place of the split axes by the rule of broadcasting: axes are counted from the last."""
    placed = [(one, axes) for one in tensors((args, given)) if (axes := at(one)) is not None]
    return agreed([(a + made.ndim - one.ndim, b + made.ndim - one.ndim) for one, (a, b) in placed])


def _along(
    name: str, args: Sequence[Any], given: Mapping[str, Any], found: Any, field: Tensor, axes: Axes
) -> Axes | None:
    """Follow a function that works along the axes given as an argument; without one, along all axes or its default."""
    at = 2 if name in _SECOND else 1
    dims = next((given[key] for key in ("dim", "dims", "axis") if key in given), args[at] if len(args) > at else None)
    # Functions such as `trapezoid` may get the positions of points in place of an axis, and use the last axis then.
    if isinstance(dims, Tensor):
        dims = -1
    if dims is None or isinstance(dims, bool) or dims in ((), []):
        dims = _LAST.get(name)
    listed = dims if isinstance(dims, tuple | list) else args[at:] if name == "flip" and len(args) > at else (dims,)
    if not all(isinstance(dim, int) and dim % field.ndim not in axes for dim in listed):
        raise TogetherError
    q = given.get("q", args[1] if len(args) > 1 else None) if "quantile" in name else None
    before = int(isinstance(q, Tensor) and q.ndim == 1)  # several quantiles come first
    kept = next(tensors(found)).ndim - before == field.ndim
    gone = [] if kept else {dim % field.ndim for dim in listed}
    row, column = (axis - sum(dim < axis for dim in gone) + before for axis in axes)
    return row, column


def _crosses(name: str, x: Tensor, args: Sequence[Any], given: Mapping[str, Any], axes: Axes) -> bool:
    """Return whether one of these functions needs neighbours along one of `axes`."""
    if name == "interpolate":
        return not _repeats(x, args, given, axes)
    if name == "pad":
        widths = args[1] if len(args) > 1 else given["pad"]
        return any(width and x.ndim - 1 - place // 2 in axes for place, width in enumerate(widths))
    shape = args[1] if len(args) > 1 else given["normalized_shape"]
    return max(axes) >= x.ndim - len(shape)


def _repeated(
    name: str, args: Sequence[Any], given: Mapping[str, Any], found: Tensor, field: Tensor, axes: Axes
) -> Axes | None:
    """Follow a function that repeats a field.

    Whole copies one after the other would be copies of the shard, so they are only allowed along other axes. Repeating
    each point several times gives what the whole field has there.
    """
    if name == "repeat_interleave":
        times, dim = (*args[1:], None, None)[:2]
        each = isinstance(given.get("repeats", times), int) and isinstance(given.get("dim", dim), int)
        return _if(each, axes)
    more = found.ndim - field.ndim
    return _if(all(found.shape[axis + more] == field.shape[axis] for axis in axes), (axes[0] + more, axes[1] + more))


def _joined(name: str, args: Sequence[Any], given: Mapping[str, Any], at: At) -> Axes:
    """Follow a function that joins fields along another axis, or along a new one."""
    row, column = agreed([axes for one in tensors((args, given)) if (axes := at(one)) is not None])
    ndim = next(tensors((args, given))).ndim
    dim = next((given[key] for key in ("dim", "axis") if key in given), args[1] if len(args) > 1 else 0)
    if name == "stack":
        return row + (dim % (ndim + 1) <= row), column + (dim % (ndim + 1) <= column)
    if dim % ndim in (row, column):
        raise TogetherError
    return row, column


def _multiplied(name: str, args: Sequence[Any], given: Mapping[str, Any], at: At) -> Axes:
    """Follow a product, which must not sum over a split axis."""
    if name == "einsum":
        return _summed(args, at)
    keys = ("input", "other", "tensor1", "tensor2", "mat2", "vec", "weight")
    first, second, *rest = [*args, *(given[key] for key in keys if key in given)]
    if name == "__rmatmul__":
        first, second = second, first
    count = 1
    over: list[tuple[int, ...]] = [(first.ndim - 1,), (max(second.ndim - 2, 0),)]
    # The second argument of `linear` is a weight (out, in), not a field.
    if name == "linear":
        over[1] = tuple(range(second.ndim))
    if name == "tensordot":
        dims = given.get("dims", rest[0] if rest else 2)
        if isinstance(dims, Tensor):
            raise TogetherError
        both = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
        count = len(both[0])
        over = [tuple(dim % x.ndim for dim in one) for x, one in zip((first, second), both, strict=True)]
    places = []
    for i, x in enumerate((first, second)):
        axes = at(x) if isinstance(x, Tensor) else None
        if axes is None:
            continue
        if any(axis in over[i] for axis in axes):
            raise TogetherError
        left = [axis - sum(dim < axis for dim in over[i]) for axis in axes]
        if name == "linear" or (name != "tensordot" and min(first.ndim, second.ndim) == 1):
            places.append((left[0], left[1]))
        elif name == "tensordot":
            before = (first.ndim - count) * i
            places.append((left[0] + before, left[1] + before))
        else:
            more = max(first.ndim, second.ndim) - x.ndim
            places.append((axes[0] + more, axes[1] + more))
    return agreed(places)


def _summed(args: Sequence[Any], at: At) -> Axes:
    """Follow einsum: the letters of the split axes must be kept in the result, in the same places for all fields."""
    if not isinstance(args[0], str):
        raise TogetherError
    inputs, arrow, out = args[0].replace(" ", "").partition("->")
    factors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    meant = [(x.ndim + 3 - len(letters), letters, x) for letters, x in zip(inputs.split(","), factors, strict=True)]
    most = max(count if "..." in letters else 0 for count, letters, _ in meant)
    if not arrow:
        once = sorted(one for one in set(inputs) - {",", "."} if inputs.count(one) == 1)
        out = "..." * ("..." in inputs) + "".join(once)
    out = out.replace("...", _ELLIPSIS[len(_ELLIPSIS) - most :])
    places = []
    for count, letters, x in meant:
        if (axes := at(x)) is not None:
            letters = letters.replace("...", _ELLIPSIS[len(_ELLIPSIS) - count :])
            places.append((out.find(letters[axes[0]]), out.find(letters[axes[1]])))
    if any(min(place) < 0 for place in places):
        raise TogetherError
    return agreed(places)


def _repeats(x: Tensor, args: Sequence[Any], given: Mapping[str, Any], axes: Axes) -> bool:
    """Return whether an interpolation repeats each point a whole number of times, for which it needs no neighbour."""
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
