"""The check of what a partitioned network does between its layers, made in its first forward pass.

A partitioned layer exchanges data with its neighbours. A function that the user's `forward` calls between layers (an
interpolation, a mean over the map) sees only this rank's shard. It keeps its shape and would silently give other
numbers than one process. So every function that is not known to work point by point (see `follow`) is refused. Values
that a forward makes from sizes alone, such as coordinates by `linspace(-1, 1, x.shape[2])`, pass this check, because
such functions work point by point; `trial` finds these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble_ml.errors import UserError
from examples.stock_layers.follow import follow, name_of
from examples.stock_layers.views import Axes, TogetherError, tensors

# A callback that receives a function's name, the tensors that it made, those among its arguments (both with a flag that
# marks fields), and the numbers among its arguments.
Seen = Callable[[str, list[tuple[Tensor, bool]], list[tuple[Tensor, bool]], list[float]], None]


def watch_first_pass(
    model: nn.Module,
    axes: tuple[int, int],
    layers: Collection[nn.Module],
    last: tuple[bool, bool] = (False, False),
    *,
    before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
    seen: Seen | None = None,
) -> None:
    """Watch the next forward pass of `model`, and refuse functions outside `layers` that may need other ranks' points.

    The pass raises a UserError that names the function. Later passes are not watched, except for the first one in the
    other mode (training or evaluation), which may do other things.

    Args:
        model: the partitioned network.
        axes: latitude and longitude among the axes of a field.
        layers: the layers of the network; functions inside them are not watched.
        last: whether this rank's shard is the last one along each of the `axes`. Only that one may be cut at its end.
        before: called with the arguments of the pass before it begins, while the model has no hooks of these.
        seen: called after each function between the layers that makes tensors.
    """
    mode = _Between(axes, last, seen)
    handles: list[RemovableHandle] = []
    watched: set[bool] = set()  # the values of `model.training` that have been watched

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
        if model.training in watched:
            return
        watched.add(model.training)
        handles.pop().remove()
        if before is not None:
            before(given, named)
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(enter))
            handles.append(layer.register_forward_hook(leave, always_call=True))
        handles.append(model.register_forward_hook(end, always_call=True))
        fields = [one for one in tensors((given, named)) if one.ndim > max(axes)]
        mode.ndim = fields[0].ndim if fields else 0
        mode.known.update(dict.fromkeys(fields, axes))
        mode.__enter__()
        # If the model is a single layer, torch is already calling its pre-hooks and would miss the new one.
        if model in layers:
            enter(model, given)

    def end(*_: Any) -> None:
        mode.__exit__(None, None, None)
        for handle in handles:
            handle.remove()
        handles.clear()
        if len(watched) == 1:
            wait()

    def wait() -> None:
        handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))

    wait()


def _refusal(name: str) -> UserError:
    """Return the error for a function between layers that cannot be partitioned."""
    return UserError(
        f"partition: {name}() between the layers of the model would see one rank's shard of the field alone, or is not"
        " known to work point by point; use a layer for it (nn.Upsample, nn.AvgPool2d, ...), or leave it out"
    )


class _Between(TorchFunctionMode):
    """A mode that refuses functions which do not work point by point along split axes, while no layer runs.

    `inside` counts the layers that are running. `known` holds where the split axes lie in fields that were made on the
    way, of whatever shape.
    """

    def __init__(self, axes: tuple[int, int], last: tuple[bool, bool], seen: Seen | None = None):
        super().__init__()
        self.axes, self.last, self.seen, self.inside = axes, last, seen, 0
        self.ndim = 0  # number of axes of the model's input; zero if unknown
        self.known: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        fields = [] if self.inside else [one for one in tensors((args, given)) if self.at(one) is not None]
        found = function(*args, **given)
        # On a rank without a sample, fields are empty and cannot be followed.
        if fields and all(one.numel() for one in fields):
            name = name_of(function)
            try:
                axes = follow(function, args, given, found, self.at, self.last)
            except (TogetherError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
                # Errors other than TogetherError mean arguments of a form that `follow` does not know.
                raise _refusal(name) from None
            # Layers would take latitude for longitude. Einsum without an arrow orders axes by the alphabet and may swap
            # them, which is found when a layer gets the result.
            if axes and self.turned(axes) and name != "einsum" and not any(self.turned(self.at(one)) for one in fields):
                raise _refusal(name)
            for one in tensors(args[0] if found is None else found):
                if axes:
                    self.known[one] = axes
        if self.seen is not None and not self.inside:
            made = [(one, self.at(one) is not None) for one in tensors(found)]
            used = [(one, self.at(one) is not None) for one in tensors((args, given))]
            numbers = [one for one in (*args, *given.values()) if isinstance(one, int | float)]
            self.seen(name_of(function), made, used, numbers)
        return found

    def turned(self, axes: Axes | None) -> bool:
        """Return whether longitude and latitude have changed places."""
        return axes is not None and (axes[0] < axes[1]) != (self.axes[0] < self.axes[1])

    def at(self, value: Tensor) -> Axes | None:
        """Return where the split axes lie in a tensor, or None if it is not a field.

        A tensor from elsewhere with the axes of the model's input counts as a field, too.
        """
        known = self.known.get(value)
        if known is not None:
            return known  # type: ignore[no-any-return]
        alike = value.ndim > max(self.axes) and self.ndim in (0, value.ndim)
        return self.axes if alike and all(value.shape[axis] > 1 for axis in self.axes) else None
