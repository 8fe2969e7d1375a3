"""Parameters in fixed buckets, and the hooks that tell when a bucket's gradients are there.

Buckets go in the reverse order of the parameters, which is about the order in which backward finishes them. Small ones
from all over the network, among them those that it reaches last, come behind (`late` of an optimizer's group): else
the first bucket would wait for the end of backward, and all others for it. Buckets never change;
DistributedDataParallel makes its own anew after the first step, so that a resumed run differs. Each parameter starts on
a word of 64 elements, and its elements lie as they do in memory.
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
    """A parameter's place: its number, the element it starts at, its elements."""

    index: int
    start: int
    elements: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are exchanged together; `elements` is a multiple of 64."""

    slots: tuple[Slot, ...]
    elements: int

    def flat(self, params: Sequence[Tensor], *, multiple: int = WORD) -> Tensor:
        """Zeros (n,) float32 with room for the bucket, n a multiple of `multiple`."""
        size = -(-self.elements // multiple) * multiple
        return torch.zeros(size, device=params[self.slots[0].index].device)

    def views(self, flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """The parts of `flat` in the shapes of the parameters, axes in their order in memory."""
        return [_like(flat[s.start : s.start + s.elements], params[s.index]) for s in self.slots]


def make_buckets(params: Sequence[Tensor], limit: float, late: Collection[int] = ()) -> tuple[Bucket, ...]:
    """Buckets of at most `limit` elements; a larger parameter has one of its own.

    Args:
        late: places in `params` of those that come last.
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
    dense = torch.empty_like(p).stride() == p.stride()
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if dense else flat.view(p.shape)


class Arrivals:
    """Calls `full(bucket number)` for each bucket in turn as backward fills them: 0, 1, 2, ... on every rank alike.

    A bucket waits for those before it. What backward leaves unfilled (parameters that it did not use, or a rank without
    a sample) is handed on by `flush`, so every rank joins every exchange. Nothing is expected of parameters that are
    frozen as the step begins.
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
                if i not in self._hooks:  # it may have been frozen so far
                    self._hooks[i] = p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))  # type: ignore[misc]
        self._next = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let gradients add up without handing them on."""
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
        if self._held or self.defer:
            return
        bucket = self._home[index]
        if bucket < self._next:
            raise RuntimeError(
                f"parameter {index}: a second gradient in one step, after its bucket was exchanged; run all backward"
                " passes but the last inside exchange.hold()"
            )
        self._missing[bucket].discard(index)
        while self._next < len(self._sizes) and not self._missing[self._next]:
            self._hand_on()

    def _hand_on(self) -> None:
        self._next += 1
        self._full(self._next - 1)
