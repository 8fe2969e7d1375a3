"""What a partitioned network does between its layers, looked at in its first pass.

A layer knows its neighbours. A function that somebody's `forward` calls (an interpolation, a mean over the map) sees
this rank's part alone, keeps its shape, and would give other numbers than one process without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ensemble_ml.errors import UserError

_KERNELS = {
    "unfold", "fold", "im2col", "col2im", "grid_sample", "batch_norm", "instance_norm", "group_norm", "pixel_shuffle",
    "pixel_unshuffle", "local_response_norm", "rot90", "dropout", "feature_dropout", "upsample",
    *(f"{kind}{n}d" for kind in ("conv", "conv_transpose", "avg_pool", "max_pool", "lp_pool") for n in (1, 2, 3)),
    *(f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
}  # fmt: skip
_ALONG = {
    "mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "amax", "amin", "max", "min",
    "median", "nanmean", "nansum", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "argmax", "argmin",
    "sort", "roll", "flip", "diff", "any", "all", "count_nonzero", "quantile", "fft", "ifft", "rfft", "fft2", "rfft2",
}  # fmt: skip
_SECOND = {"roll", "quantile", "norm", "vector_norm", "fft", "ifft", "rfft", "fft2", "rfft2"}  # another number first


def watch_first_pass(model: nn.Module, axes: tuple[int, int], layers: Iterable[nn.Module]) -> None:
    """Let the next forward pass of `model` refuse what needs other ranks' points, but within `layers`.

    The pass raises a UserError that names the function. Later passes are not watched.
    """
    mode = _Between(axes)
    handles: list[RemovableHandle] = []

    def enter(*_: Any) -> None:
        mode.inside += 1

    def leave(*_: Any) -> None:
        mode.inside -= 1

    def begin(*_: Any) -> None:
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

    def __init__(self, axes: tuple[int, int]):
        super().__init__()
        self.axes, self.inside = axes, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", "")
        field = bool(args) and isinstance(args[0], Tensor) and args[0].ndim > max(self.axes)
        if field and not self.inside and _crosses(name, args, given, self.axes):
            raise UserError(
                f"partition: {name}() between the layers of the model would see one rank's part of the field alone;"
                " use a layer for it (nn.Upsample, nn.AvgPool2d, ...), or leave it out"
            )
        return function(*args, **given)


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
    if name not in _ALONG:
        return name in _KERNELS
    at = 2 if name in _SECOND else 1
    dims = next((given[key] for key in ("dim", "dims", "axis") if key in given), args[at] if len(args) > at else None)
    if isinstance(dims, Tensor):  # the larger of two, at each point
        return False
    if dims is None:
        return True
    listed = dims if isinstance(dims, tuple | list) else args[at:] if name == "flip" else (dims,)
    return any(isinstance(dim, int) and dim % x.ndim in axes for dim in listed)


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
