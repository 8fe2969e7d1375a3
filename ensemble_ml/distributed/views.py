"""Where the split axes of a field lie in a view of it, or in what an index takes, by trying these on a probe.

The probe has the field's shape and no memory; an axis is known again by its stride, or is not there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Axes = tuple[int, int]  # latitude and longitude among the axes of a tensor
At = Callable[[Tensor], Axes | None]  # where they lie in a tensor; None where it is no field
_APART = 1009  # a prime, by which strides of the probe are no products of sizes


class TogetherError(Exception):
    """A function takes points together along a split axis, or nobody knows whether it does."""


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))


def agreed(places: Sequence[Axes]) -> Axes:
    """The place on which all agree: fields that lie otherwise against each other would pair other points."""
    if len(set(places)) != 1:
        raise TogetherError
    return places[0]


def reshaped(function: Any, name: str, args: Sequence[Any], given: Mapping[str, Any], at: At) -> Axes:
    """Where the split axes are, whole and in their order, in a view of a probe.

    Raises:
        TogetherError: the split axes are not there any more, or only in part.
    """
    x = next(tensors((args, given)))
    axes = at(x)
    if axes is None:  # brought to the shape of a field
        return agreed([place for one in tensors((args, given)) if (place := at(one)) is not None])
    if name == "view" and any(isinstance(one, torch.dtype) for one in (*args, *given.values())):
        return axes
    probe = _probe(x, axes)
    try:
        swapped = [probe if one is x else one for one in args]
        seen = function(*swapped, **{key: probe if one is x else one for key, one in given.items()})
    except RuntimeError as error:  # no view: points would have to be moved
        raise TogetherError from error
    return _seen(probe, next(tensors(seen)), axes, whole=True)


def _probe(x: Tensor, axes: Axes) -> Tensor:
    """Nothing of the shape of `x`, whose split axes are known by their strides; other axes lie as densely as ever."""
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
    """Where a view of the probe has the split axes; `whole`: with all their points."""
    places = []
    for axis in axes:
        size, stride = probe.shape[axis], probe.stride(axis)
        there = [i for i in range(view.ndim) if view.shape[i] == size or (view.shape[i] < size and not whole)]
        if size > 1:  # the stride of an axis of one point says nothing
            there = [i for i in there if view.stride(i) == stride]
        if not there:
            raise TogetherError
        places.append(min(there, key=lambda i: (i != axis + view.ndim - probe.ndim, i != axis)))
    return agreed([(places[0], places[1])])


def taken(args: Sequence[Any], at: At, last: tuple[bool, bool]) -> Axes:
    """What an index takes, which may be no part of a split axis.

    Raises:
        TogetherError: the split axes are not there any more, or only in part.
    """
    x, index = args
    axes = at(x)
    if axes is None:  # what stands in a table for a field of numbers
        if not isinstance(index, Tensor) or index.dtype is torch.bool:
            raise TogetherError
        return agreed([place for place in (at(index),) if place is not None])
    basic = _basic(index)
    if _cuts(basic, x.shape, axes, [axis for axis, end in zip(axes, last, strict=True) if end]):
        raise TogetherError
    probe = _probe(x, axes)
    return _seen(probe, probe[basic], axes, whole=False)


def set_in(args: Sequence[Any], at: At, last: tuple[bool, bool]) -> Axes:
    """Where the split axes are in what values are set in.

    Raises:
        TogetherError: the split axes are not there any more, or only in part.
    """
    x, index, value = args
    single = not isinstance(value, Tensor) or value.ndim == 0
    axes = at(x)
    if axes is None:  # memory for several fields, side by side
        place = None if single else at(value)
        if place is None:
            raise TogetherError
        more = x.ndim - value.ndim
        axes = place[0] + more, place[1] + more
        if any(x.shape[axis] != value.shape[axis - more] for axis in axes):
            raise TogetherError
    points = isinstance(index, Tensor) and index.dtype is torch.bool and single  # one value at the points of a mask
    if not points and _cuts(_basic(index), x.shape, axes, ()):
        raise TogetherError
    return axes


def _basic(index: Any) -> tuple[Any, ...]:
    """The same index with places for all that it chooses by values: one of each axis, in the room of what is chosen."""
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
    """Whether an index takes a part of a split axis, which would be a part of each rank's part; at the end of the last
    rank's (`ends`) it may."""
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
    """Whether it takes all, or the first so many, `least` or more: how an upsampled field is cut to the size of what it
    is added to."""
    if not isinstance(place, slice) or place.start not in (None, 0) or place.step not in (None, 1):
        return False
    return place.stop is None or place.stop >= least
