"""A trial of a partitioned network before its first pass: does a shard get the numbers that the whole field has there?

A forward may make positions, weights, divisors or random numbers by the shape of its input: `linspace(-1, 1,
x.shape[2])`, `x / x.shape[2]`, the first rows of a table. Each of these works point by point and still differs from
shard to shard. No list of functions can tell them from a harmless use of the same shape.

So copies of the network run three times in this process, on a field of the job's size if that is small. The first run
computes the whole field and records the inputs and outputs of all layers. The other two compute its first and its last
shard. There, each layer must receive its shard of the recorded input, and passes on its shard of the recorded output,
since layers are known to be right. A difference was therefore made between the layers.

Because layers are replayed from the record, shards need no neighbours, no rank waits for another, and rounding does not
grow from layer to layer. A large field is tried twice: in a smaller size, and in its own size on fake tensors. These
have no values, so each pass must call the same functions with the same numbers.

No value may hide a difference. A gate whose weight is zero at first would let anything pass. So the field, the recorded
outputs and the parameters that the forward itself uses are changed: they have no zeros and no two equal numbers, and
small parameters grow. A tensor that differs between shards, as positions do, must not meet a field at all, however
small the factor before it.
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

from ensemble_ml.errors import UserError
from examples.stock_layers.between import watch_first_pass
from examples.stock_layers.follow import works_by_point
from examples.stock_layers.views import Axes, tensors

log = logging.getLogger(__name__)

_POINTS = 2**15  # largest number of points of a field that is tried in its own size
_ROWS = 4  # least number of rows of a small shard at its coarsest level
_LARGEST = 0.1  # least magnitude of a free parameter's largest number, about that of a Linear layer's weights
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CASTS = frozenset({"to", "type_as"})  # a field among their arguments only gives its type or device
Way = list[tuple[str, list[float]]]  # functions and the numbers among their arguments
# For latitude and longitude: (length in a shard, length of the whole) in the trial, by the length in the job.
Lengths = tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class Layout:
    """The partition of a field, and the layers that know it.

    Attributes:
        axes: latitude and longitude among the axes of a field.
        ranks: number of ranks along each.
        stock: torch's class for each class of layers that exchange with neighbours.
        rate: `rate(layer, axis)` returns the number of output points for each input point.
    """

    axes: Axes
    ranks: tuple[int, int]
    stock: Mapping[type[nn.Module], type[nn.Module]]
    rate: Callable[[nn.Module, int], Fraction]

    def played(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the names of the layers that exchange with neighbours, and the layers."""
        return [(name, module) for name, module in model.named_modules() if type(module) in self.stock]


class _Small(Enum):
    """A choice of the axes of a field that are shorter in a trial than in the job."""

    none = "none"
    split = "split"  # only the split axes, since a buffer may have the length of the other axis
    both = "both"


class _UnknownError(Exception):
    """An error that means that the trial cannot decide."""


class _DifferentError(UserError):
    """An error for a shard that differs from the whole field."""


@dataclass
class _Record:
    """The record of what happened on the whole field, in order."""

    layers: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, input and output
    made: list[tuple[str, list[Tensor], list[float]]] = field(default_factory=list)  # by functions between the layers

    def way(self) -> Way:
        """Return the pointwise functions and their numbers.

        The numbers of other functions may be sizes, which differ between a shard and the whole.
        """
        return [(name, numbers) for name, _, numbers in self.made if works_by_point(name)]


def try_parts(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], layout: Layout) -> None:
    """Compare the results on shards of a field with that on the whole field.

    Log a warning if the model cannot be tried.

    Args:
        model: the partitioned model.
        args: the positional arguments of its pass.
        named: the keyword arguments of its pass.
        layout: the partition.

    Raises:
        UserError: the results differ; the message names the first function that makes a difference. Or a shard cannot
            be computed.
    """
    fields = [one for one in tensors((args, named)) if one.ndim > max(layout.axes)]
    # A rank without samples has nothing to try.
    if not all(one.numel() for one in fields):
        return
    why = (
        _why_unknown(model, args, named, layout, fields) if fields else "none of its arguments has the axes of a field"
    )
    if why:
        log.warning(
            "partition: the model could not be tried on a shard of a field (%s); compare its results with one process",
            why,
        )


def _why_unknown(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], layout: Layout, fields: Sequence[Tensor]
) -> str:
    """Try the model. Return why this was impossible, or an empty text if shards equal the whole."""
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
    """Return None if shards equal the whole, and the failure if the trial cannot decide."""
    failures: list[Exception] = []
    # It is unknown whether a vector of an axis's length belongs to that axis. A vector of latitudes must be resized
    # with it, others must not. So both are tried.
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
    vectors: bool  # whether tensors with fewer axes than a field are resized too

    @property
    def real(self) -> bool:
        """Return whether shards are as long as in the job."""
        return all(here == part for lengths in self.lengths for here, (part, _) in lengths.items())

    def of(self, x: Tensor) -> dict[int, tuple[int, int]]:
        """Return (length in a shard, length of the whole) for the axes of `x` that are split."""
        if x.ndim > max(self.axes):
            return {axis: lengths[x.shape[axis]] for axis, lengths in zip(self.axes, self.lengths, strict=True)}
        split: dict[int, tuple[int, int]] = {}
        for lengths in self.lengths if self.vectors else ():
            axes = [a for a, size in enumerate(x.shape) if size > 1 and a not in split and size in lengths]
            if axes:
                split[axes[0]] = lengths[x.shape[axes[0]]]
        return split

    def shape(self, x: Tensor) -> list[int]:
        """Return the shape that a shard of the trial has in place of the job's tensor `x`."""
        lengths = self.of(x)
        return [lengths[axis][0] if axis in lengths else size for axis, size in enumerate(x.shape)]


def _steps(model: nn.Module, layout: Layout) -> list[int]:
    """Return the product of all strides along each split axis. Shards begin at multiples of it."""
    layers = layout.played(model)
    return [math.prod(layout.rate(layer, axis).denominator for _, layer in layers) for axis in layout.axes]


def _lengths(fields: Sequence[Tensor], layout: Layout, steps: Sequence[int], small: _Small) -> Lengths:
    """Choose the lengths of a trial.

    Raises:
        _UnknownError: fields of several sizes would have to be shorter, and it is unknown how their sizes belong
            together.
    """
    chosen = []
    for axis, ranks, step in zip(layout.axes, layout.ranks, steps, strict=True):
        here = {one.shape[axis] for one in fields}
        here = here - {1} or here
        shortest = min(here)
        shrinks = small is _Small.both or (small is _Small.split and ranks > 1)
        parts = {n: n if ranks == 1 else n - n % step or n for n in here}
        # Small shards keep the job's number of blocks modulo `_ROWS`, so that a pattern that alternates from row to row
        # neither fits nor fails by chance.
        if shrinks:
            if any(n % shortest for n in here):
                sizes = " and ".join(map(str, sorted(here)))
                raise _UnknownError(f"fields of {sizes} points along an axis cannot be made smaller together")
            part = min(parts[shortest], (_ROWS + parts[shortest] // step % _ROWS) * step)
            parts = {n: n // shortest * part for n in here}
        count = min(ranks, 2) if shrinks else ranks
        # If some fields have one point along the axis and others more, the single point is broadcast over all.
        chosen.append({1: (1, 1)} | {n: (part, part * count) for n, part in parts.items()})
    return chosen[0], chosen[1]


def _template(model: nn.Module, layout: Layout) -> nn.Module:
    """Return a copy of the model whose weights hide nothing. Weights of replayed layers stay the same tensors."""
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
    """Return replacements for what a copy of the model cannot or must not have, by identity.

    Hooks are left out, since they would be called with made-up values, except for torch's own that compute a weight.
    Activations that a module has stored belong to a graph, which cannot be copied.
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
    """Return whether a hook is one of torch's that compute a weight, such as `weight_norm`."""
    return any(kind.__module__.startswith("torch.nn.utils.") for kind in type(hook).__mro__)


def _reveal(x: Tensor, numbers: torch.Generator) -> None:
    """Change free weights in place so that they hide nothing.

    A gate of 1e-5 would hide the values that it multiplies.
    """
    if not (x.is_floating_point() and x.numel()):
        return
    largest = torch.linalg.vector_norm(x, math.inf).item()
    if 0 < largest < _LARGEST:
        x.mul_(_LARGEST / largest)
    # In pieces, because all at once would take several times the memory.
    for some in x.view(-1).split(_POINTS):
        some.copy_(_generic(some, numbers))


def _shared(model: nn.Module, layout: Layout) -> dict[int, Any]:
    """Return what copies share with the model, by identity: weights of replayed layers, the mesh and the switch."""
    layers = [layer for _, layer in layout.played(model)]
    shared = [p for layer in layers for p in layer.parameters(recurse=False)]
    shared += [vars(layer)[name] for layer in layers for name in ("part_mesh", "part_overlap")]
    return {id(one): one for one in shared}


def _generic(x: Tensor, numbers: torch.Generator) -> Tensor:
    """Return `x` without zeros and without two equal numbers. Signs and magnitudes stay roughly the same."""
    if not x.is_floating_point():
        return x
    noise = torch.rand(x.shape, generator=numbers).to(x)
    return torch.where((x == 0) | ~x.isfinite(), noise, x * (1 + noise / 8))


@dataclass(frozen=True)
class _Trial:
    """A model to be tried, and the arguments of its pass."""

    template: nn.Module
    layout: Layout
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def compare(self, sizes: _Sizes, fake: FakeTensorMode | None) -> None:
        """Raise a UserError if the first or the last shard differs from the whole field."""
        # Each pass gets its own copy, because a pass may change running means, or make a grid once and keep it. Weights
        # do not change without gradients, so they are shared.
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
        """Compare one shard with the whole field, and raise a UserError if it differs."""
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
                f"partition: one rank's shard of the field fails where the whole does not ({error}); parameters and"
                " buffers of the whole field's size are not partitioned: give them as channels of the input"
            ) from error
        if len(parts) != len(results) or not all(_same(a, b, end) for a, b in zip(results, parts, strict=True)):
            raise _refusal("the result of the model")
        if any(isinstance(one, FakeTensor) for one in results):
            _compare_ways(record.way(), own.way())

    def _pass(self, net: nn.Module, arguments: tuple[Any, Any]) -> Any:
        """Run a network without gradients, with the same random numbers in each pass."""
        device = next(tensors(self.arguments)).device
        with _random_as_before(device), torch.no_grad():
            return net(*arguments[0], **arguments[1])


def _compare_ways(whole: Way, part: Way) -> None:
    """Raise a UserError if a shard calls other functions than the whole field, or calls them with other numbers."""
    end: tuple[str, list[float]] = ("", [])
    for one, other in zip_longest(whole, part, fillvalue=end):
        if one != other:
            raise _refusal(f"{other[0] or one[0]}() between the layers of the model")


def _refusal(what: str) -> UserError:
    """Return the error for a tensor that differs on a shard."""
    return _DifferentError(
        f"partition: {what} differs on one rank's shard of the field from what the whole has there: it is made of the"
        " shard's own size, positions or random numbers; give coordinates and weights as channels of the input, and the"
        " whole field's size as a constant (a model that knows its rank's place: partition(..., trial=False))"
    )


def _mapped(change: Callable[..., Tensor], *values: Any) -> Any:
    """Return the same lists, tuples and dictionaries with changed tensors, each made from those at the same place."""
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
    """Return a field of the trial, made from values of `x` at random places."""
    x = x.detach()
    for axis, (_, size) in lengths.items():
        places = torch.randint(x.shape[axis], (size,), generator=numbers)
        x = x.index_select(axis, places.to(x.device))
    return _generic(x, numbers) if lengths else x.clone()


def _part(whole: Tensor, shape: Sequence[int], end: bool) -> Tensor:
    """Return the first or the last shard of this shape. Axes that have the whole's length stay whole."""
    for axis, size in enumerate(shape):
        if whole.shape[axis] > size:
            whole = whole.narrow(axis, whole.shape[axis] - size if end else 0, size)
    return whole


def _same(whole: Tensor, part: Tensor, end: bool, exact: bool = False) -> bool:
    """Return whether a shard equals the whole field there, up to rounding. For fake tensors, compare shapes.

    Args:
        whole: the tensor of the whole field.
        part: the tensor of the shard.
        end: whether it is the last shard, and not the first.
        exact: whether only the rounding of a single function is allowed, and not that of sums over channels.
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
    """Let all passes draw the same random numbers, and restore the job's generators afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _leaves(net: nn.Module) -> list[nn.Module]:
    """Return the modules that have no children."""
    return [module for module in net.modules() if next(module.children(), None) is None]


def _recording(net: nn.Module, record: _Record, layout: Layout, numbers: torch.Generator) -> nn.Module:
    """Prepare `net` to compute the whole field and to record what happens."""

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
    """Set uninitialised memory to zero, so that it is the same in all passes."""
    if "empty" in name:
        for one, _ in made:
            one.zero_()


def _playing(net: nn.Module, record: _Record, own: _Record, layout: Layout, end: bool) -> nn.Module:
    """Prepare `net` to compute a shard, with its layers replayed from the record.

    Its pass raises a UserError at the first field that differs from the whole field's shard. `own` records the
    functions that the pass calls.
    """
    layers, made = iter(record.layers), iter(record.made)
    first = ""  # the first function whose values differ, of a field or not
    aligned = True
    differing: Any = WeakTensorKeyDictionary()  # its keys are tensors that differ and are not fields

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
        # The pass has called other functions than the recorded one. The result may still be the same, and is compared
        # at the next layer.
        if not aligned:
            return
        differs = any(one in differing for one, _ in used)
        if differs and name not in _CASTS and any(is_field for _, is_field in used):
            raise _refusal(f"{first}() between the layers of the model")
        for whole, (one, is_field) in zip(wholes, results, strict=True):
            differing.pop(one, None)
            # Of tensors made from differing ones, only nearly identical values count as the same: 1 + 1e-5 * position
            # does not.
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
    """Return where the output of a shard begins and ends in that of the whole field.

    The end counts for the first shard only; the last one ends with the whole.
    """
    start = (whole - part) * rate if end else Fraction(0)
    stop = start + part * rate
    if start.denominator != 1 or (stop.denominator != 1 and not end):
        raise _UnknownError(f"{part} of {whole} points are no multiple of a stride")
    return int(start), int(stop)
