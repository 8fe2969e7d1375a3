"""A trial of a partitioned network before its first pass: does a part get what the whole field has there?

A forward may make positions, weights, divisors or random numbers of the shape at hand: `linspace(-1, 1, x.shape[2])`,
`x / x.shape[2]`, the first rows of a table. Each works point by point and differs from part to part; no list of
functions tells it from a harmless use of the same shape. So copies of the network run three times in this process, on a
field of the size of the job's where that is small: once on the whole, whose layers' inputs and outputs are kept, then
on its first and on its last part. There each layer, which is known to be right, must be given its part of what it was
given on the whole, and hands over its part of what it made. What differs was made between the layers.

Layers are played from the record, so parts need no neighbours, no rank waits for another, and rounding does not grow
from layer to layer. Values are such that nothing hides: parameters that the forward itself uses, the record and the
field have no zeros (weights that are zero at first, as those of a gate, would let anything pass) and nothing that is
the same at all points.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.distributed.between import watch_first_pass
from ensemble_ml.distributed.views import Axes, tensors
from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_POINTS = 2**15  # of a whole field that is tried as it is; larger ones are tried in small
_ROWS = 4  # at least, of a small part at its coarsest


@dataclass(frozen=True)
class Layout:
    """How fields are shared out, and which layers know it.

    `stock` maps classes of layers that know their neighbours to those of torch; `rate(layer, axis)` tells how many
    points come out of one for a point that goes in.
    """

    axes: Axes
    ranks: tuple[int, int]
    stock: Mapping[type[nn.Module], type[nn.Module]]
    rate: Callable[[nn.Module, int], Fraction]

    def played(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The layers that know their neighbours, and their names."""
        return [(name, module) for name, module in model.named_modules() if type(module) in self.stock]


class _UnknownError(Exception):
    """The trial cannot tell."""


@dataclass
class _Record:
    """What happened on the whole field, in its order."""

    layers: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, input and output
    made: list[tuple[str, list[Tensor]]] = field(default_factory=list)  # by functions between the layers


def try_parts(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], layout: Layout) -> None:
    """Compare the passes of parts of a field with that of the whole.

    Raises:
        UserError: they differ; the function where they begin to is named. Or a part cannot be computed.
    """
    fields = [one for one in tensors((args, named)) if one.ndim > max(layout.axes)]
    if not fields or not all(one.numel() for one in fields):
        return
    why = "its fields are of several sizes"
    try:
        template = _template(model, layout)
        sizes = _sizes(fields, layout, _steps(model, layout))
    except Exception as error:
        why, sizes = str(error), None
    # Vectors that go with an axis, as latitudes, grow with it; what does not go with one, as a step, must not.
    for vectors in (False, True) if sizes is not None else ():
        try:
            return _compare(template, (args, named), _Sizes(layout.axes, sizes, vectors), layout)
        except UserError:
            raise
        except Exception as error:
            why = why if vectors else str(error)
    log.warning("partition: the model could not be tried on a part of a field (%s); compare it with one process", why)


@dataclass(frozen=True)
class _Sizes:
    """The lengths of the split axes here, in a part and in the whole of the trial, for each length here."""

    axes: Axes
    lengths: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]
    vectors: bool

    @property
    def real(self) -> bool:
        """Whether parts are as long as here."""
        return all(here == part for lengths in self.lengths for here, (part, _) in lengths.items())

    def of(self, x: Tensor) -> dict[int, tuple[int, int]]:
        """The lengths in a part and in the whole of those axes of `x` that are shared out."""
        if x.ndim > max(self.axes):
            return {axis: lengths[x.shape[axis]] for axis, lengths in zip(self.axes, self.lengths, strict=True)}
        found: dict[int, tuple[int, int]] = {}
        for lengths in self.lengths if self.vectors else ():
            axis = next((a for a in range(x.ndim) if a not in found and x.shape[a] in lengths), None)
            if axis is not None:
                found[axis] = lengths[x.shape[axis]]
        return found


def _steps(model: nn.Module, layout: Layout) -> list[int]:
    """The products of all strides along the split axes: parts begin at their multiples."""
    rates = [[layout.rate(layer, axis) for _, layer in layout.played(model)] for axis in layout.axes]
    steps = []
    for along in rates:
        step = 1
        for rate in along:
            step *= rate.denominator
        steps.append(step)
    return steps


def _sizes(fields: Sequence[Tensor], layout: Layout, steps: Sequence[int]) -> Any:
    """For each split axis, lengths in a part and in the whole by the length here."""
    whole = layout.ranks[0] * layout.ranks[1]
    small = max(one.numel() // one.shape[1] for one in fields) * whole > _POINTS
    found = []
    for axis, ranks, step in zip(layout.axes, layout.ranks, steps, strict=True):
        lengths = {}
        for here in {one.shape[axis] for one in fields}:
            part = here - here % step or here
            if ranks == 1:
                part = here
            if small:
                part, ranks = min(part, _ROWS * step), min(ranks, 2)
            lengths[here] = part, part * ranks
        if small and len(lengths) > 1:
            raise _UnknownError("its fields are large and of several sizes")
        found.append(lengths)
    return tuple(found)


def _template(model: nn.Module, layout: Layout) -> nn.Module:
    """A copy with weights that hide nothing; those of layers that are played stay the same tensors."""
    layers = layout.played(model)
    kept = [p for _, layer in layers for p in layer.parameters(recurse=False)]
    kept += [vars(layer)[name] for _, layer in layers for name in ("part_mesh", "part_overlap")]
    found = copy.deepcopy(model, {id(one): one for one in kept})
    numbers = torch.Generator().manual_seed(0)
    theirs = {id(layer) for _, layer in layout.played(found)}
    for module in found.modules():
        if id(module) not in theirs:
            for one in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                one.data = _generic(one.data, numbers)
        elif isinstance(module, nn.Dropout):
            module.eval()
    return found


def _generic(x: Tensor, numbers: torch.Generator) -> Tensor:
    """`x` without zeros, and without two numbers alike; signs and sizes stay what they are."""
    if not x.is_floating_point():
        return x
    noise = torch.rand(x.shape, generator=numbers).to(x)
    return torch.where((x == 0) | ~x.isfinite(), noise, x * (1 + noise / 8))


def _copied(template: nn.Module) -> nn.Module:
    """A copy whose parameters are the same; what a pass keeps (running means, caches of grids) is its own."""
    kept = [*template.parameters()]
    kept += [value for module in template.modules() for name, value in vars(module).items() if name.startswith("part_")]
    return copy.deepcopy(template, {id(one): one for one in kept})


def _compare(template: nn.Module, given: tuple[Any, Any], sizes: _Sizes, layout: Layout) -> None:
    numbers = torch.Generator().manual_seed(1)
    device = next(tensors(given)).device
    whole = _mapped(given, lambda x: _grown(x, sizes.of(x), numbers))
    record = _Record()
    results = _pass(_recording(_copied(template), record, layout, numbers), whole, device)
    for end in (False, True):
        part = _mapped(given, lambda x: x)
        part = _both(given, whole, lambda x, y, end=end: _part(y, _shape(x, sizes.of(x)), end).clone())
        try:
            found = _pass(_playing(_copied(template), record, layout, end), part, device)
        except (UserError, _UnknownError):
            raise
        except Exception as error:
            if not sizes.real:
                raise
            raise UserError(
                f"partition: a rank's part of the field fails where the whole does not ({error}); parameters and"
                " buffers of the size of the whole field cannot be shared out: give such as channels of the input"
            ) from error
        pairs = list(zip(tensors(results), tensors(found), strict=False))
        if len(list(tensors(results))) != len(list(tensors(found))) or not all(_same(a, b, end) for a, b in pairs):
            raise _refusal("the result of the model")


def _refusal(what: str) -> UserError:
    return UserError(
        f"partition: {what} differs on one rank's part of the field from what the whole has there: it is made of the"
        " part's own size, positions or random numbers; give coordinates and weights as channels of the input, and the"
        " whole field's size as a constant"
    )


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and dictionaries with other tensors."""
    return _both(value, value, lambda x, _: change(x))


def _both(value: Any, other: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value, other)
    if isinstance(value, list | tuple):
        made = [_both(a, b, change) for a, b in zip(value, other, strict=True)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        return {key: _both(one, other[key], change) for key, one in value.items()}
    return value


def _shape(x: Tensor, lengths: Mapping[int, tuple[int, int]]) -> list[int]:
    """The shape of a part of the trial."""
    return [lengths[axis][0] if axis in lengths else size for axis, size in enumerate(x.shape)]


def _grown(x: Tensor, lengths: Mapping[int, tuple[int, int]], numbers: torch.Generator) -> Tensor:
    """A field of the trial from values of `x` at random places."""
    x = x.detach()
    for axis, (_, size) in lengths.items():
        places = torch.randint(x.shape[axis], (size,), generator=numbers)
        x = x.index_select(axis, places.to(x.device))
    return _generic(x, numbers) if lengths else x.clone()


def _part(whole: Tensor, shape: Sequence[int], end: bool) -> Tensor:
    """The first or the last part of this shape; axes of the whole's length stay whole."""
    for axis, size in enumerate(shape):
        if whole.shape[axis] > size:
            whole = whole.narrow(axis, whole.shape[axis] - size if end else 0, size)
    return whole


def _same(whole: Tensor, part: Tensor, end: bool) -> bool:
    """Whether a part is what the whole has there, but for rounding."""
    if whole.ndim != part.ndim or whole.dtype != part.dtype:
        return False
    whole = _part(whole, part.shape, end)
    if whole.shape != part.shape:
        return False
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(whole, part)
    largest = whole.abs().nan_to_num(0, 0, 0).amax().item() if whole.numel() else 0.0
    rounding = min(1000 * torch.finfo(whole.dtype).eps, 0.05)  # sums over channels, whose order may differ
    return torch.allclose(part, whole, rtol=0, atol=rounding * largest, equal_nan=True)


@contextmanager
def _random_as_before(device: torch.device) -> Iterator[None]:
    """Let all passes draw the same random numbers, and the job those that it would have drawn."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _pass(net: nn.Module, given: tuple[Any, Any], device: torch.device) -> Any:
    with _random_as_before(device), torch.no_grad():
        return net(*given[0], **given[1])


def _leaves(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if next(module.children(), None) is None]


def _recording(net: nn.Module, record: _Record, layout: Layout, numbers: torch.Generator) -> nn.Module:
    """Let `net` compute the whole field, and keep what happens."""

    def keep(name: str, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], found: Tensor) -> Tensor:
        found = _generic(found, numbers)
        record.layers.append((name, next(tensors((given, named))).clone(), found.clone()))
        return found

    def seen(name: str, made: list[tuple[Tensor, bool]]) -> None:
        record.made.append((name, [one.clone() for one, _ in made]))

    for name, layer in layout.played(net):
        layer.__class__ = layout.stock[type(layer)]
        layer.register_forward_hook(partial(keep, name), with_kwargs=True)
    watch_first_pass(net, layout.axes, _leaves(net), (True, True), seen=seen)
    return net


def _playing(net: nn.Module, record: _Record, layout: Layout, end: bool) -> nn.Module:
    """Let `net` compute a part of the field, and its layers hand over their parts of the record.

    Its pass raises a UserError at the first field that is not the part of the whole's.
    """
    layers, made = iter(record.layers), iter(record.made)
    first = ""  # function of which the values differ, of a field or not
    aligned = True

    def play(name: str, layer: nn.Module, *given: Any, **named: Any) -> Tensor:
        recorded, before, after = next(layers, (None, None, None))
        x = next(tensors((given, named)))
        if recorded != name or before is None or after is None or not _same(before, x, end):
            raise _refusal(f"what reaches layer {name}")
        for axis, ranks in zip(layout.axes, layout.ranks, strict=True):
            if ranks > 1:
                start, stop = _place(before.shape[axis], x.shape[axis], layout.rate(layer, axis), end)
                after = after.narrow(axis, start, (after.shape[axis] if end else stop) - start)
        return after.clone()

    def seen(name: str, results: list[tuple[Tensor, bool]]) -> None:
        nonlocal first, aligned
        recorded, wholes = next(made, ("", []))
        aligned = aligned and recorded == name and len(wholes) == len(results)
        if not aligned or "empty" in name:  # another way was taken, which may lead to the same; memory of nothing
            return
        for whole, (one, is_field) in zip(wholes, results, strict=True):
            if not _same(whole, one, end):
                first = first or name
                if is_field:
                    raise _refusal(f"{first}() between the layers of the model")

    for name, layer in layout.played(net):
        layer.forward = partial(play, name, layer)
    last = (end or layout.ranks[0] == 1, end or layout.ranks[1] == 1)
    watch_first_pass(net, layout.axes, _leaves(net), last, seen=seen)
    return net


def _place(whole: int, part: int, rate: Fraction, end: bool) -> tuple[int, int]:
    """Where the output of a part begins and ends, unless it is the last, in that of the whole."""
    start = (whole - part) * rate if end else Fraction(0)
    stop = start + part * rate
    if start.denominator != 1 or (stop.denominator != 1 and not end):
        raise _UnknownError(f"{part} of {whole} points are no multiple of a stride")
    return int(start), int(stop)
