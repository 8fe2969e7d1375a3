"""Parameters in fixed buckets, and the hooks that detect when a bucket's gradients are complete.

Buckets go in the reverse order of the parameters, which is roughly the order in which the backward pass finishes them.
Small parameters from all over the network come last (`late` in a group of the optimizer). Some of them are finished at
the very end, so in the first bucket they would delay it and all others.

Buckets never change. DistributedDataParallel rebuilds its buckets after the first step, so a resumed run would not be
bit-equal to an uninterrupted one. Each parameter starts at a multiple of 64 elements, the length of a word of signs.
Its elements keep their order in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.distributed.pack import WORD, words


@dataclass(frozen=True)
class Slot:
    """The place of a parameter in a bucket: its index, the element at which it starts, and how many elements it has."""

    index: int
    start: int
    elements: int


@dataclass(frozen=True)
class Bucket:
    """A set of parameters that are exchanged together. `elements` is a multiple of 64."""

    slots: tuple[Slot, ...]
    elements: int

    def flat(self, params: Sequence[Tensor], *, multiple: int = WORD) -> Tensor:
        """Return zeros (n,) float32 for the elements of the bucket; n is a multiple of `multiple`."""
        size = -(-self.elements // multiple) * multiple
        return torch.zeros(size, device=params[self.slots[0].index].device)

    def views(self, flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of `flat` as views in the shapes of the parameters, in their memory formats."""
        return [_like(flat[s.start : s.start + s.elements], params[s.index]) for s in self.slots]


def make_buckets(params: Sequence[Tensor], limit: float, late: Collection[int] = ()) -> tuple[Bucket, ...]:
    """Distribute parameters over buckets of at most `limit` elements. A larger parameter gets a bucket of its own.

    Args:
        params: all parameters, in the order of the model.
        limit: most elements of a bucket, including the padding of each parameter to a multiple of 64.
        late: indices into `params` of those that come last.

    Returns:
        The buckets in the order in which they are exchanged.
    """
    made: list[Bucket] = []
    slots: list[Slot] = []
    start = 0
    for index in sorted(reversed(range(len(params))), key=lambda i: i in late):
        size = words(params[index].numel()) * WORD
        if slots and start + size > limit:
            made.append(Bucket(tuple(slots), start))
            slots, start = [], 0
        slots.append(Slot(index, start, params[index].numel()))
        start += size
    if slots:
        made.append(Bucket(tuple(slots), start))
    return tuple(made)


def _like(flat: Tensor, p: Tensor) -> Tensor:
    """Return a view of `flat` with the shape of `p`, and with its strides if its memory has no gaps."""
    # `empty_like` keeps the strides of a tensor without gaps, so equal strides mean that there are none.
    dense = torch.empty_like(p).stride() == p.stride()
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if dense else flat.view(p.shape)


class Arrivals:
    """A set of hooks that call `full(number)` for each bucket, in the order 0, 1, 2, ... on every rank.

    A bucket waits for those before it, but not for parameters that are frozen when the step begins. `flush` hands on
    the buckets that the backward pass leaves incomplete (parameters that it did not use, or a rank without a sample),
    so every rank joins every exchange. With `defer`, all buckets wait for `flush`.
    """

    def __init__(self, params: Sequence[Tensor], buckets: Sequence[Bucket], full: Callable[[int], None]):
        self._params, self._full, self._sizes = params, full, [len(b.slots) for b in buckets]
        self._home = {slot.index: i for i, b in enumerate(buckets) for slot in b.slots}
        self._held, self.defer = False, False
        self._hooks: dict[int, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Expect a new set of gradients."""
        self._missing: list[set[int]] = [set() for _ in self._sizes]
        for i, p in enumerate(self._params):
            if p.requires_grad:
                self._missing[self._home[i]].add(i)
                # A parameter may have been frozen until now and have no hook yet.
                if i not in self._hooks:
                    self._hooks[i] = p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))  # type: ignore[misc]
        self._next = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let gradients accumulate without handing on buckets, within this context."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def flush(self) -> None:
        """Hand on all buckets that are left."""
        while self._next < len(self._sizes):
            self._hand_on()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()

    def _arrived(self, index: int) -> None:
        """Note that a gradient is complete, and hand on the buckets that it completes.

        Do nothing inside `hold` or with `defer`.

        Raises:
            RuntimeError: its bucket was handed on before in this step.
        """
        if self._held or self.defer:
            return
        bucket = self._home[index]
        if bucket < self._next:
            raise RuntimeError(
                f"parameter {index}: a second gradient in one step, after its bucket was exchanged; run all backward"
                " passes but the last inside exchange.hold()"
            )
        # A bucket may be complete before an earlier one. It is handed on once all before it are complete, so that every
        # rank exchanges the buckets in the same order.
        self._missing[bucket].discard(index)
        while self._next < len(self._sizes) and not self._missing[self._next]:
            self._hand_on()

    def _hand_on(self) -> None:
        self._next += 1
        self._full(self._next - 1)
