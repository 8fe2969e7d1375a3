"""A trial of a partitioned network before its first pass: does a part get what the whole field has there?

A forward may make positions, weights, divisors or random numbers of the shape at hand: `linspace(-1, 1, x.shape[2])`,
`x / x.shape[2]`, the first rows of a table. Each works point by point and differs from part to part; no list of
functions tells it from a harmless use of the same shape. So copies of the network run three times in this process, on a
field of the size of the job's where that is small: once on the whole, whose layers' inputs and outputs are kept, then
on its first and on its last part. There each layer, which is known to be right, must be given its part of what it was
given on the whole, and hands over its part of what it made. What differs was made between the layers.

Layers are played from the record, so parts need no neighbours, no rank waits for another, and rounding does not grow
from layer to layer. A large field is tried in small, and in its own size on fake tensors, which have no values: there
each pass must take the same way, with the same numbers.

Nothing may hide behind the values. So parameters that the forward itself uses, the record and the field have no zeros
(behind a gate whose weight is zero at first, anything would pass) and no two numbers alike, and small parameters grow.
What differs, as positions do, must not meet a field at all, however small the factor before it.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble_ml.distributed.between import watch_first_pass
from ensemble_ml.distributed.follow import works_by_point
from ensemble_ml.distributed.views import Axes, tensors
from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_POINTS = 2**15  # of a whole field that is tried as it is; larger ones are tried in small
_ROWS = 4  # at least, of a small part at its coarsest
_LARGEST = 0.1  # at least, of the numbers of a free parameter: weights of Linear have about that
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CASTS = frozenset({"to", "type_as"})  # a field among their arguments lends its kind alone
Way = list[tuple[str, list[float]]]  # functions and the numbers among their arguments
# For latitude and longitude, the lengths in a part and in the whole of the trial by the length here.
Lengths = tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]


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
        """Return the names of the layers that know their neighbours, and the layers."""
        return [(name, module) for name, module in model.named_modules() if type(module) in self.stock]


class _Small(Enum):
    """Which axes of a field are shorter in a trial than in the job."""

    none = "none"
    split = "split"  # a buffer may have the length of an axis that is not shared out
    both = "both"


class _UnknownError(Exception):
    """The trial cannot tell."""


class _DifferentError(UserError):
    """A part is not what the whole has there."""


@dataclass
class _Record:
    """What happened on the whole field, in its order."""

    layers: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, input and output
    made: list[tuple[str, list[Tensor], list[float]]] = field(default_factory=list)  # by functions between the layers

    def way(self) -> Way:
        """Return the functions that work by point, and their numbers, which are no sizes."""
        return [(name, numbers) for name, _, numbers in self.made if works_by_point(name)]


def try_parts(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], layout: Layout) -> None:
    """Compare the passes of parts of a field with that of the whole. Where the model cannot be tried, warn.

    Raises:
        UserError: they differ; the function where they begin to is named. Or a part cannot be computed.
    """
    fields = [one for one in tensors((args, named)) if one.ndim > max(layout.axes)]
    if not all(one.numel() for one in fields):  # a rank without samples
        return
    why = (
        _why_unknown(model, args, named, layout, fields) if fields else "none of its arguments has the axes of a field"
    )
    if why:
        log.warning(
            "partition: the model could not be tried on a part of a field (%s); compare its results with one process",
            why,
        )


def _why_unknown(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], layout: Layout, fields: Sequence[Tensor]
) -> str:
    """Try the model; return why that could not be done, and nothing where parts equal the whole."""
    large = max(one.numel() // one.shape[1] for one in fields) * layout.ranks[0] * layout.ranks[1] > _POINTS
    try:
        trial = _Trial(_template(model, layout), layout, (args, named))
    except Exception as error:  # something in the model cannot be copied
        return str(error)
    steps = _steps(model, layout)
    failure = None
    for small in (_Small.both, _Small.split) if large else (_Small.none,):
        try:
            failure = _attempt(trial, _lengths(fields, layout, steps, small))
        except _UnknownError as error:
            failure = error
        if failure is None:
            break
    if large:
        _attempt(trial, _lengths(fields, layout, steps, _Small.none), FakeTensorMode(allow_non_fake_inputs=True))
    return "" if failure is None else str(failure)


def _attempt(trial: _Trial, lengths: Lengths, fake: FakeTensorMode | None = None) -> Exception | None:
    """Return None where parts equal the whole, and what went wrong where nobody can say."""
    failures: list[Exception] = []
    # Vectors that go with an axis, as latitudes, grow with it; what does not go with one, as a step, must not.
    for vectors in (False, True):
        try:
            trial.compare(_Sizes(trial.layout.axes, lengths, vectors), fake)
            return None
        except _DifferentError:
            raise
        except UserError as error:
            if fake is None:
                raise
            failures.append(error)
        except Exception as error:
            failures.append(error)
    return failures[0]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of the tensors of a trial."""

    axes: Axes
    lengths: Lengths
    vectors: bool  # also of tensors with fewer axes than a field

    @property
    def real(self) -> bool:
        """Return whether parts are as long as here."""
        return all(here == part for lengths in self.lengths for here, (part, _) in lengths.items())

    def of(self, x: Tensor) -> dict[int, tuple[int, int]]:
        """Return the lengths in a part and in the whole of those axes of `x` that are shared out."""
        if x.ndim > max(self.axes):
            return {axis: lengths[x.shape[axis]] for axis, lengths in zip(self.axes, self.lengths, strict=True)}
        split: dict[int, tuple[int, int]] = {}
        for lengths in self.lengths if self.vectors else ():
            axes = [a for a, size in enumerate(x.shape) if size > 1 and a not in split and size in lengths]
            if axes:
                split[axes[0]] = lengths[x.shape[axes[0]]]
        return split

    def shape(self, x: Tensor) -> list[int]:
        """Return the shape that a part of the trial has where the job has `x`."""
        lengths = self.of(x)
        return [lengths[axis][0] if axis in lengths else size for axis, size in enumerate(x.shape)]


def _steps(model: nn.Module, layout: Layout) -> list[int]:
    """Return the products of all strides along the split axes: parts begin at their multiples."""
    layers = layout.played(model)
    return [math.prod(layout.rate(layer, axis).denominator for _, layer in layers) for axis in layout.axes]


def _lengths(fields: Sequence[Tensor], layout: Layout, steps: Sequence[int], small: _Small) -> Lengths:
    """Choose the lengths of a trial.

    Raises:
        _UnknownError: fields of several sizes would have to be shorter, and nobody knows how these go together.
    """
    chosen = []
    for axis, ranks, step in zip(layout.axes, layout.ranks, steps, strict=True):
        here = {one.shape[axis] for one in fields}
        here = here - {1} or here
        shortest = min(here)
        shrinks = small is _Small.both or (small is _Small.split and ranks > 1)
        parts = {n: n if ranks == 1 else n - n % step or n for n in here}
        if shrinks:  # as odd as they are: what alternates from row to row must not fit by chance, or fail by chance
            if any(n % shortest for n in here):
                sizes = " and ".join(map(str, sorted(here)))
                raise _UnknownError(f"fields of {sizes} points along an axis cannot be made smaller together")
            part = min(parts[shortest], (_ROWS + parts[shortest] // step % _ROWS) * step)
            parts = {n: n // shortest * part for n in here}
        count = min(ranks, 2) if shrinks else ranks
        # Where some fields have one point and others more, that one is for all.
        chosen.append({1: (1, 1)} | {n: (part, part * count) for n, part in parts.items()})
    return chosen[0], chosen[1]


def _template(model: nn.Module, layout: Layout) -> nn.Module:
    """Return a copy with weights that hide nothing; those of layers that are played stay the same tensors."""
    shared = _shared(model, layout)
    template = copy.deepcopy(model, {**shared, **_instead(model)})
    numbers = torch.Generator().manual_seed(0)
    played = {id(layer) for _, layer in layout.played(template)}
    for module in template.modules():
        if id(module) in played:
            if isinstance(module, nn.Dropout):
                module.eval()
            continue
        for one in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if id(one) not in shared:
                one.data = one.data.contiguous()
                _reveal(one.data, numbers)
    return template


def _instead(model: nn.Module) -> dict[int, Any]:
    """Return what a copy of the model has in the place of what cannot or must not be copied, by identity.

    Hooks are left out, since they would be called with made-up values, but for those of torch that make a weight.
    Activations that a module has kept belong to a graph, which cannot be copied.
    """
    instead: dict[int, Any] = {}
    for module in model.modules():
        for kind in _HOOKS:
            hooks = vars(module)[kind]
            instead[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if _makes_weight(hook))
        activations = [one for one in tensors(list(vars(module).values())) if not one.is_leaf]
        instead |= {id(one): one.detach().clone() for one in activations}
    return instead


def _makes_weight(hook: Any) -> bool:
    return any(kind.__module__.startswith("torch.nn.utils.") for kind in type(hook).__mro__)


def _reveal(x: Tensor, numbers: torch.Generator) -> None:
    """Change free weights in place so that they hide nothing: a gate of 1e-5 would hide what it is a factor of."""
    if not (x.is_floating_point() and x.numel()):
        return
    largest = torch.linalg.vector_norm(x, math.inf).item()
    if 0 < largest < _LARGEST:
        x.mul_(_LARGEST / largest)
    for some in x.view(-1).split(_POINTS):  # not all at once, which would take several times the memory
        some.copy_(_generic(some, numbers))


def _shared(model: nn.Module, layout: Layout) -> dict[int, Any]:
    """Return what copies share with the model, by identity: weights of layers that are played, and the mesh."""
    layers = [layer for _, layer in layout.played(model)]
    shared = [p for layer in layers for p in layer.parameters(recurse=False)]
    shared += [vars(layer)[name] for layer in layers for name in ("part_mesh", "part_overlap")]
    return {id(one): one for one in shared}


def _generic(x: Tensor, numbers: torch.Generator) -> Tensor:
    """Return `x` without zeros, and without two numbers alike; signs and magnitudes stay about what they are."""
    if not x.is_floating_point():
        return x
    noise = torch.rand(x.shape, generator=numbers).to(x)
    return torch.where((x == 0) | ~x.isfinite(), noise, x * (1 + noise / 8))


@dataclass(frozen=True)
class _Trial:
    """A model to be tried, and the arguments that it was called with."""

    template: nn.Module
    layout: Layout
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def compare(self, sizes: _Sizes, fake: FakeTensorMode | None) -> None:
        """Raise a UserError where the first or the last part is not what the whole has there."""
        # Each pass has a copy of its own: running means, or a grid that is made once and kept, stay with it. Weights,
        # which no pass without gradients changes, are the template's.
        shared = _shared(self.template, self.layout) | {id(p): p for p in self.template.parameters()}
        nets = [copy.deepcopy(self.template, dict(shared)) for _ in range(3)]
        numbers = torch.Generator().manual_seed(1)
        record = _Record()
        with fake or nullcontext():
            whole = _mapped(lambda x: _grown(x, sizes.of(x), numbers), self.arguments)
            results = list(tensors(self._pass(_recording(nets[0], record, self.layout, numbers), whole)))
            for net, end in zip(nets[1:], (False, True), strict=True):
                self._compare_part(net, end, whole, results, record, sizes)

    def _compare_part(
        self, net: nn.Module, end: bool, whole: Any, results: list[Tensor], record: _Record, sizes: _Sizes
    ) -> None:
        own = _Record()
        part = _mapped(lambda x, y: _part(y, sizes.shape(x), end).clone(), self.arguments, whole)
        try:
            parts = list(tensors(self._pass(_playing(net, record, own, self.layout, end), part)))
        except (UserError, _UnknownError):
            raise
        except Exception as error:
            if not sizes.real:
                raise
            raise _DifferentError(
                f"partition: one rank's part of the field fails where the whole does not ({error}); parameters and"
                " buffers of the whole field's size are not shared out: give them as channels of the input"
            ) from error
        if len(parts) != len(results) or not all(_same(a, b, end) for a, b in zip(results, parts, strict=True)):
            raise _refusal("the result of the model")
        if any(isinstance(one, FakeTensor) for one in results):
            _compare_ways(record.way(), own.way())

    def _pass(self, net: nn.Module, arguments: tuple[Any, Any]) -> Any:
        device = next(tensors(self.arguments)).device
        with _random_as_before(device), torch.no_grad():
            return net(*arguments[0], **arguments[1])


def _compare_ways(whole: Way, part: Way) -> None:
    """Raise a UserError where a part takes another way than the whole, or with other numbers."""
    end: tuple[str, list[float]] = ("", [])
    for one, other in zip_longest(whole, part, fillvalue=end):
        if one != other:
            raise _refusal(f"{other[0] or one[0]}() between the layers of the model")


def _refusal(what: str) -> UserError:
    return _DifferentError(
        f"partition: {what} differs on one rank's part of the field from what the whole has there: it is made of the"
        " part's own size, positions or random numbers; give coordinates and weights as channels of the input, and the"
        " whole field's size as a constant (a model that knows its rank's place: partition(..., trial=False))"
    )


def _mapped(change: Callable[..., Tensor], *values: Any) -> Any:
    """Return the same lists, tuples and dictionaries with other tensors, made of those at the same place in each."""
    first = values[0]
    if isinstance(first, Tensor):
        return change(*values)
    if isinstance(first, list | tuple):
        made = [_mapped(change, *ones) for ones in zip(*values, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if isinstance(first, Mapping):
        return {key: _mapped(change, *(value[key] for value in values)) for key in first}
    return first


def _grown(x: Tensor, lengths: Mapping[int, tuple[int, int]], numbers: torch.Generator) -> Tensor:
    """Return a field of the trial, made of values of `x` at random places."""
    x = x.detach()
    for axis, (_, size) in lengths.items():
        places = torch.randint(x.shape[axis], (size,), generator=numbers)
        x = x.index_select(axis, places.to(x.device))
    return _generic(x, numbers) if lengths else x.clone()


def _part(whole: Tensor, shape: Sequence[int], end: bool) -> Tensor:
    """Return the first or the last part, of this shape; axes of the whole's length stay whole."""
    for axis, size in enumerate(shape):
        if whole.shape[axis] > size:
            whole = whole.narrow(axis, whole.shape[axis] - size if end else 0, size)
    return whole


def _same(whole: Tensor, part: Tensor, end: bool, exact: bool = False) -> bool:
    """Return whether a part is what the whole has there, but for rounding; of fake tensors, whether shapes fit.

    Args:
        exact: whether rounding is that of one function of single numbers, and not of sums over channels.
    """
    if whole.ndim != part.ndim or whole.dtype != part.dtype:
        return False
    whole = _part(whole, part.shape, end)
    if whole.shape != part.shape or isinstance(whole, FakeTensor):
        return whole.shape == part.shape
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(whole, part)
    largest = whole.abs().nan_to_num(0, 0, 0).amax().item() if whole.numel() else 0.0
    eps = torch.finfo(whole.dtype).eps
    rounding = 2 * eps if exact else min(1000 * eps, 0.05)  # the order of sums over channels may differ
    return torch.allclose(part, whole, rtol=0, atol=rounding * largest, equal_nan=True)


@contextmanager
def _random_as_before(device: torch.device) -> Iterator[None]:
    """Let all passes draw the same random numbers, and the job those that it would have drawn."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _leaves(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if next(module.children(), None) is None]


def _recording(net: nn.Module, record: _Record, layout: Layout, numbers: torch.Generator) -> nn.Module:
    """Let `net` compute the whole field, and keep what happens."""

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        output = _generic(output, numbers)
        record.layers.append((name, next(tensors((args, named))).clone(), output.clone()))
        return output

    def seen(name: str, made: list[tuple[Tensor, bool]], _: list[tuple[Tensor, bool]], numbers: list[float]) -> None:
        _fill(name, made)
        record.made.append((name, [one.clone() for one, _ in made], numbers))

    for name, layer in layout.played(net):
        layer.__class__ = layout.stock[type(layer)]
        layer.register_forward_hook(partial(keep, name), with_kwargs=True)
    watch_first_pass(net, layout.axes, _leaves(net), (True, True), seen=seen)
    return net


def _fill(name: str, made: list[tuple[Tensor, bool]]) -> None:
    """Let memory that nobody has written be the same in all passes."""
    if "empty" in name:
        for one, _ in made:
            one.zero_()


def _playing(net: nn.Module, record: _Record, own: _Record, layout: Layout, end: bool) -> nn.Module:
    """Let `net` compute a part of the field, its layers hand over their parts of the record, and `own` keep the way.

    Its pass raises a UserError at the first field that is not the part of the whole's.
    """
    layers, made = iter(record.layers), iter(record.made)
    first = ""  # function of which the values differ, of a field or not
    aligned = True
    differing: Any = WeakTensorKeyDictionary()  # its keys are tensors that are no fields

    def play(name: str, layer: nn.Module, *args: Any, **named: Any) -> Tensor:
        recorded, before, after = next(layers, (None, None, None))
        x = next(tensors((args, named)))
        if recorded != name or before is None or after is None or not _same(before, x, end):
            raise _refusal(f"what reaches layer {name}")
        for axis, ranks in zip(layout.axes, layout.ranks, strict=True):
            if ranks > 1:
                start, stop = _place(before.shape[axis], x.shape[axis], layout.rate(layer, axis), end)
                after = after.narrow(axis, start, (after.shape[axis] if end else stop) - start)
        return after.clone()

    def seen(
        name: str, results: list[tuple[Tensor, bool]], used: list[tuple[Tensor, bool]], numbers: list[float]
    ) -> None:
        nonlocal first, aligned
        _fill(name, results)
        own.made.append((name, [], numbers))
        recorded, wholes, _ = next(made, ("", [], []))
        aligned = aligned and recorded == name and len(wholes) == len(results)
        if not aligned:  # another way was taken, which may lead to the same
            return
        differs = any(one in differing for one, _ in used)
        if differs and name not in _CASTS and any(is_field for _, is_field in used):
            raise _refusal(f"{first}() between the layers of the model")
        for whole, (one, is_field) in zip(wholes, results, strict=True):
            differing.pop(one, None)
            # What was made of positions is the same only where hardly a digit differs: 1 + 1e-5 * position is not.
            if not _same(whole, one, end, exact=differs):
                first = first or name
                if is_field:
                    raise _refusal(f"{first}() between the layers of the model")
                differing[one] = True

    for name, layer in layout.played(net):
        layer.forward = partial(play, name, layer)
    last = (end or layout.ranks[0] == 1, end or layout.ranks[1] == 1)
    watch_first_pass(net, layout.axes, _leaves(net), last, seen=seen)
    return net


def _place(whole: int, part: int, rate: Fraction, end: bool) -> tuple[int, int]:
    """Return where the output of a part begins and ends in that of the whole; the last one ends with it anyway."""
    start = (whole - part) * rate if end else Fraction(0)
    stop = start + part * rate
    if start.denominator != 1 or (stop.denominator != 1 and not end):
        raise _UnknownError(f"{part} of {whole} points are no multiple of a stride")
    return int(start), int(stop)
