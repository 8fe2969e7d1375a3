"""Follow the split axes of a field through views and indices, by applying these to a probe.

The probe is a tensor of the field's shape without memory. An axis is recognised by its stride; if no axis of the result
has it, the axis is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Axes = tuple[int, int]  # latitude and longitude among the axes of a tensor
At = Callable[[Tensor], Axes | None]  # returns where they lie in a tensor; None if it is not a field
_APART = 1009  # a prime factor of the probe's strides, so that no product of sizes equals one of them


class TogetherError(Exception):
    """An error for a function that combines points along a split axis, or of which this is unknown."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))


def agreed(places: Sequence[Axes]) -> Axes:
    """Return the place on which all agree.

    If the axes of two fields lie differently, points of different places would be paired.

    Raises:
        TogetherError: they differ, or there is none.
    """
    if len(set(places)) != 1:
        raise TogetherError
    return places[0]


def reshaped(function: Any, name: str, args: Sequence[Any], given: Mapping[str, Any], at: At) -> Axes:
    """Return where the split axes lie in the result of a function that changes the shape.

    Args:
        function: a view or a change of shape.
        name: its name.
        args: its positional arguments.
        given: its keyword arguments.
        at: returns where the split axes lie in a tensor.

    Raises:
        TogetherError: the result does not have both axes whole, or is not a view.
    """
    x = next(tensors((args, given)))
    axes = at(x)
    # Another tensor is brought to the shape of a field, as by `expand_as`.
    if axes is None:
        return agreed([place for one in tensors((args, given)) if (place := at(one)) is not None])
    if name == "view" and any(isinstance(one, torch.dtype) for one in (*args, *given.values())):
        return axes
    probe = _probe(x, axes)
    try:
        swapped = [probe if one is x else one for one in args]
        seen = function(*swapped, **{key: probe if one is x else one for key, one in given.items()})
    except RuntimeError as error:  # the result is not a view, so points would have to be moved
        raise TogetherError from error
    return _seen(probe, next(tensors(seen)), axes, whole=True)


def _probe(x: Tensor, axes: Axes) -> Tensor:
    """Return a tensor of the shape of `x` without memory, whose split axes have unique strides.

    The other axes are dense among themselves.
    """
    strides, step = [0] * x.ndim, _APART
    for axis in reversed(axes):
        strides[axis] = step
        step *= _APART * x.shape[axis]
    for axis in reversed(range(x.ndim)):
        if axis not in axes:
            strides[axis] = step
            step *= x.shape[axis]
    return torch.empty_strided(x.shape, strides, dtype=torch.uint8, device="meta")


def _seen(probe: Tensor, view: Tensor, axes: Axes, *, whole: bool) -> Axes:
    """Return where a view of the probe has the split axes, with all points if `whole`; refuse one without them."""
    places = []
    for axis in axes:
        size, stride = probe.shape[axis], probe.stride(axis)
        there = [i for i in range(view.ndim) if view.shape[i] == size or (view.shape[i] < size and not whole)]
        # The stride of an axis of a single point is arbitrary and identifies nothing.
        if size > 1:
            there = [i for i in there if view.stride(i) == stride]
        if not there:
            raise TogetherError
        places.append(min(there, key=lambda i: (i != axis + view.ndim - probe.ndim, i != axis)))
    return agreed([(places[0], places[1])])


def taken(args: Sequence[Any], at: At, last: tuple[bool, bool]) -> Axes:
    """Return where the split axes lie in the result of an index, which must not take a part of a split axis.

    Args:
        args: the tensor and the index.
        at: returns where the split axes lie in a tensor.
        last: whether this rank's shard is the last one along each axis, which may be cut at its end.

    Raises:
        TogetherError: the split axes are gone, or incomplete.
    """
    x, index = args
    axes = at(x)
    # The tensor is a table, and the index a field of numbers that are looked up in it.
    if axes is None:
        if not isinstance(index, Tensor) or index.dtype is torch.bool:
            raise TogetherError
        return agreed([place for place in (at(index),) if place is not None])
    basic = _basic(index)
    if _cuts(basic, x.shape, axes, [axis for axis, end in zip(axes, last, strict=True) if end]):
        raise TogetherError
    probe = _probe(x, axes)
    return _seen(probe, probe[basic], axes, whole=False)


def set_in(args: Sequence[Any], at: At, last: tuple[bool, bool]) -> Axes:
    """Return where the split axes lie in a tensor whose values are set by index.

    Args:
        args: the tensor, the index and the values.
        at: returns where the split axes lie in a tensor.
        last: not used; it gives this function the signature of `taken`.

    Raises:
        TogetherError: the index sets a part of a split axis, or the values do not fit the tensor.
    """
    x, index, value = args
    single = not isinstance(value, Tensor) or value.ndim == 0
    axes = at(x)
    # The tensor is memory for several fields, side by side, so its axes are those of the values.
    if axes is None:
        place = None if single else at(value)
        if place is None:
            raise TogetherError
        more = x.ndim - value.ndim
        axes = place[0] + more, place[1] + more
        if any(x.shape[axis] != value.shape[axis - more] for axis in axes):
            raise TogetherError
    # A single value set at the points of a mask works point by point.
    points = isinstance(index, Tensor) and index.dtype is torch.bool and single
    if not points and _cuts(_basic(index), x.shape, axes, ()):
        raise TogetherError
    return axes


def _basic(index: Any) -> tuple[Any, ...]:
    """Return the same index with plain positions in place of indices by values, so that it can be applied to the probe.

    An index by values becomes position 0 on its axes, and as many new axes as its result has.

    Raises:
        TogetherError: the index holds a bool.
    """
    listed = index if isinstance(index, tuple) else [index]
    places = [int(place) if isinstance(place, Tensor) and place.ndim == 0 else place for place in listed]
    chosen = [i for i, place in enumerate(places) if not (place is None or isinstance(place, int | slice | type(...)))]
    if any(isinstance(place, bool) for place in places):
        raise TogetherError
    if not chosen:
        return tuple(places)
    values = {i: torch.as_tensor(places[i]) for i in chosen}
    masks = {i for i, value in values.items() if value.dtype in (torch.bool, torch.uint8)}
    room = [None] * max(1 if i in masks else value.ndim for i, value in values.items())
    together = chosen == list(range(chosen[0], chosen[-1] + 1))
    found: list[Any] = [] if together else list(room)
    for i, place in enumerate(places):
        if i == chosen[0] and together:
            found += room
        found += [0] * (values[i].ndim if i in masks else 1) if i in values else [place]
    return tuple(found)


def _cuts(index: Sequence[Any], shape: Sequence[int], axes: Axes, ends: Collection[int]) -> bool:
    """Return whether an index takes a part of a split axis, which would be a part of each rank's shard.

    Along the axes in `ends`, a cut at the end is allowed: this rank's shard is the last one there.
    """
    given = sum(place is not None and place is not Ellipsis for place in index)
    axis = 0
    for place in index:
        if place is None:
            continue
        if place is Ellipsis:
            axis += len(shape) - given
            continue
        if axis in axes and not _from_start(place, 0 if axis in ends else shape[axis]):
            return True
        axis += 1
    return False


def _from_start(place: Any, least: int) -> bool:
    """Return whether a slice takes all points, or the first `least` or more.

    An upsampled field is cut in this way to the size of the field that it is added to.
    """
    if not isinstance(place, slice) or place.start not in (None, 0) or place.step not in (None, 1):
        return False
    return place.stop is None or place.stop >= least
