"""What a partitioned network does between its layers, looked at in its first pass.

A layer knows its neighbours. A function that somebody's `forward` calls (an interpolation, a mean over the map) sees
this rank's part alone, keeps its shape, and would give other numbers than one process without a word. So what is not
known to work point by point (`follow`) is refused. What a forward makes of sizes alone, as coordinates by
`linspace(-1, 1, x.shape[2])`, works point by point; `trial` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble_ml.distributed.follow import follow, name_of
from ensemble_ml.distributed.views import Axes, TogetherError, tensors
from ensemble_ml.errors import UserError

# A function's name, the tensors that it made and those among its arguments, whether these are fields, and the numbers
# among its arguments.
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
    """Let the next forward pass of `model` refuse what needs other ranks' points, or may, but within `layers`.

    The pass raises a UserError that names the function. Later passes are not watched, but for the first one in the
    other mode, of training or of evaluation, which may do other things.

    Args:
        last: whether this rank's part is the last one along each of the `axes`, which alone may be cut at its end.
        before: called with the arguments of the pass before it begins, while the model has no hook of these.
        seen: called after each function between the layers that makes tensors.
    """
    mode = _Between(axes, last, seen)
    handles: list[RemovableHandle] = []
    watched: set[bool] = set()  # modes of training

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
        if model in layers:  # torch calls its pre-hooks already, and would miss a new one
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
    return UserError(
        f"partition: {name}() between the layers of the model would see one rank's part of the field alone, or is not"
        " known to work point by point; use a layer for it (nn.Upsample, nn.AvgPool2d, ...), or leave it out"
    )


class _Between(TorchFunctionMode):
    """Refuses what does not work point by point along split axes while no layer is at work (`inside` is zero).

    `known` says where the split axes lie in fields that were made on the way, in whatever shape.
    """

    def __init__(self, axes: tuple[int, int], last: tuple[bool, bool], seen: Seen | None = None):
        super().__init__()
        self.axes, self.last, self.seen, self.inside = axes, last, seen, 0
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
        if self.seen is not None and not self.inside:
            made = [(one, self.at(one) is not None) for one in tensors(found)]
            used = [(one, self.at(one) is not None) for one in tensors((args, given))]
            numbers = [one for one in (*args, *given.values()) if isinstance(one, int | float)]
            self.seen(name_of(function), made, used, numbers)
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
