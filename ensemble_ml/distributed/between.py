"""What a partitioned network does between its layers, looked at in its first pass.

A layer knows its neighbours. A function that somebody's `forward` calls (an interpolation, a mean over the map) sees
this rank's part alone, keeps its shape, and would give other numbers than one process without a word. So what is not
known to work point by point (`follow`) is refused. What is made of sizes alone, as coordinates by
`linspace(-1, 1, x.shape[2])`, is not seen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble_ml.distributed.follow import follow, name_of
from ensemble_ml.distributed.views import Axes, TogetherError, tensors
from ensemble_ml.errors import UserError


def watch_first_pass(
    model: nn.Module, axes: tuple[int, int], layers: Iterable[nn.Module], last: tuple[bool, bool] = (False, False)
) -> None:
    """Let the next forward pass of `model` refuse what needs other ranks' points, or may, but within `layers`.

    The pass raises a UserError that names the function. Later passes are not watched. `last` says whether this rank's
    part is the last one along each of the `axes`, which alone may be cut at its end.
    """
    mode = _Between(axes, last)
    handles: list[RemovableHandle] = []

    def enter(layer: nn.Module, given: tuple[Any, ...]) -> None:
        mode.inside += 1
        places = mode.at(given[0]) if given and isinstance(given[0], Tensor) else None
        if places is not None:
            mixes = isinstance(layer, nn.Linear) and given[0].ndim - 1 in places
            if mixes or mode.turned(places):
                raise _refusal(type(layer).__name__.removeprefix("Part"))

    def leave(_: nn.Module, given: tuple[Any, ...], found: Any) -> None:
        mode.inside -= 1
        for one in tensors(found):
            if one.ndim > max(axes):
                before = mode.at(given[0]) if given and isinstance(given[0], Tensor) else None
                mode.known[one] = before if before and given[0].ndim == one.ndim else axes

    def begin(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        fields = [one for one in tensors((given, named)) if one.ndim > max(axes)]
        mode.ndim = fields[0].ndim if fields else 0
        mode.known.update(dict.fromkeys(fields, axes))
        mode.__enter__()

    def end(*_: Any) -> None:
        mode.__exit__(None, None, None)
        for handle in handles:
            handle.remove()

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))
    handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    handles.append(model.register_forward_hook(end, always_call=True))


def _refusal(name: str) -> UserError:
    return UserError(
        f"partition: {name}() between the layers of the model would see one rank's part of the field alone, or is not"
        " known to work point by point; use a layer for it (nn.Upsample, nn.AvgPool2d, ...), or leave it out"
    )


class _Between(TorchFunctionMode):
    """Refuses what does not work point by point along split axes while no layer is at work (`inside` is zero).

    `known` says where the split axes lie in fields that were made on the way, in whatever shape.
    """

    def __init__(self, axes: tuple[int, int], last: tuple[bool, bool]):
        super().__init__()
        self.axes, self.last, self.inside = axes, last, 0
        self.ndim = 0  # of the model's input; zero where that is not known
        self.known: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        fields = [] if self.inside else [one for one in tensors((args, given)) if self.at(one) is not None]
        found = function(*args, **given)
        if fields and all(one.numel() for one in fields):  # without a sample there is nothing to see
            name = name_of(function)
            try:
                axes = follow(function, args, given, found, self.at, self.last)
            except (TogetherError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
                raise _refusal(name) from None  # or its arguments are none that are known
            # Layers would take the one axis for the other; einsum without an arrow turns them by the alphabet.
            if axes and self.turned(axes) and name != "einsum" and not any(self.turned(self.at(one)) for one in fields):
                raise _refusal(name)
            for one in tensors(args[0] if found is None else found):
                if axes:
                    self.known[one] = axes
        return found

    def turned(self, axes: Axes | None) -> bool:
        """Whether longitude and latitude have changed places."""
        return axes is not None and (axes[0] < axes[1]) != (self.axes[0] < self.axes[1])

    def at(self, value: Tensor) -> Axes | None:
        """Where it has the split axes; what has the model's axes and came from elsewhere is taken for a field too."""
        known = self.known.get(value)
        if known is not None:
            return known  # type: ignore[no-any-return]
        alike = value.ndim > max(self.axes) and self.ndim in (0, value.ndim)
        return self.axes if alike and all(value.shape[axis] > 1 for axis in self.axes) else None
