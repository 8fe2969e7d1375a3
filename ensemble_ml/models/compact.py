"""Cut channels of the U-Net, and hidden units of the point network, out of a model.

The result is an ordinary, smaller model with an ordinary spec (`model.widths`, `model.inner`, `model.points`). Nothing
is masked.

Channels that add up, or that one layer hands to the next, have to go together. They form these groups:

    stream L      the channels of level L outside its residual blocks: the blocks add to them, `down` and `up` connect
                  them to other levels, and at level 0 stems write and last layers read them
    inner K       the channels between the two convolutions of residual block K, in the order of `model.inner`
    points        hidden units of the point network
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.models.inputs import ModelSpec

POINTS = "points"  # the group of the point network


@dataclass(frozen=True)
class Group:
    """Channels or hidden units that are cut together.

    Attributes:
        size: how many there are.
        parts: the names of the tensors that have them, with the axis.
    """

    size: int
    parts: tuple[tuple[str, int], ...]


def groups(spec: ModelSpec, names: Iterable[str]) -> dict[str, Group]:
    """Return the groups of an `EnsembleModel` whose kernels share no bank, in the order of this module's docstring.

    `names` are those of its state_dict.
    """
    # Padding layers also have buffers, but along the channels of inputs, which are not cut.
    keys = [name for name in names if name.endswith((".weight", ".bias", ".first"))]
    config = spec.config
    widths, inner = config.channels()

    def those(*prefixes: str, axis: int = 0) -> list[tuple[str, int]]:
        """Return all tensors of some modules, each with `axis`."""
        return [(key, axis) for key in keys if key.startswith(tuple(f"{prefix}." for prefix in prefixes))]

    def made(*convolutions: str) -> list[tuple[str, int]]:
        """Return all tensors with the outputs of convolutions, each with their axis.

        The second kernel of a separable convolution has them on two axes.
        """
        both = [(key, 1) for key, _ in those(*(f"{one}.along" for one in convolutions)) if key.endswith("weight")]
        return those(*convolutions) + both

    def read(*layers: str) -> list[tuple[str, int]]:
        """Return all tensors with the inputs of convolutions and linear layers, each with their axis."""
        weights = [(key, axis) for key, axis in those(*layers, axis=1) if key.endswith("weight")]
        return [(key, axis) for key, axis in weights if ".along." not in key]

    stages = [("encoder", level) for level in range(len(widths))] + [("decoder", n) for n in range(len(widths) - 1)]
    blocks = [(f"unet.{side}.{level}.{n}", level) for side, level in stages for n in range(config.blocks)]
    found: dict[str, Group] = {}
    for level, width in enumerate(widths):
        own = [block for block, of in blocks if of == level]
        parts = those(*(f"{block}.scale1" for block in own), axis=-1)
        parts += read(*(f"{block}.conv1" for block in own)) + made(*(f"{block}.conv2" for block in own))
        parts += read(f"unet.down.{level}", f"unet.up.{level - 1}") + those(
            f"unet.down.{level - 1}", f"unet.up.{level}"
        )
        if level == 0:
            parts += [*made("common_stem", "pressure.stem", "surface.stem"), ("plane_bias", 0)]
            parts += those("scale", axis=-1) + read("pressure.out", "surface.out")
        found[f"stream {level}"] = Group(width, tuple(parts))
    for number, (block, _) in enumerate(blocks):
        parts = made(f"{block}.conv1") + those(f"{block}.scale2", axis=-1) + read(f"{block}.conv2")
        found[f"inner {number}"] = Group(inner[number], tuple(parts))
    if f"{POINTS}.first" in keys:
        found[POINTS] = Group(config.points, ((f"{POINTS}.first", 0), (f"{POINTS}.second", 1)))
    return found


def cut(
    spec: ModelSpec, tensors: Mapping[str, Tensor], kept: Mapping[str, Sequence[int]]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Keep some channels and hidden units of an `EnsembleModel`, and drop all others.

    Args:
        spec: its spec.
        tensors: its state_dict, or some of it; not changed.
        kept: indices of the channels or units that stay, by group. Groups that are not named stay whole.

    Returns:
        The spec and the tensors of the smaller model.
    """
    found, every = dict(tensors), groups(spec, tensors)
    for name, indices in kept.items():
        for key, axis in every[name].parts:
            tensor = found[key]
            # The last column of the point network's second layer belongs to the constant, not to a hidden unit. It
            # stays.
            behind = range(every[name].size, tensor.shape[axis])
            index = torch.tensor([*indices, *behind], device=tensor.device)
            found[key] = tensor.index_select(axis, index)
    return resized(spec, {name: len(indices) for name, indices in kept.items()}), found


def resized(spec: ModelSpec, sizes: Mapping[str, int]) -> ModelSpec:
    """Return the spec of an `EnsembleModel` whose groups have other sizes. Groups that are not named keep theirs."""
    widths, inner = spec.config.channels()
    changes: dict[str, Any] = {
        "widths": [sizes.get(f"stream {level}", width) for level, width in enumerate(widths)],
        "inner": [sizes.get(f"inner {number}", width) for number, width in enumerate(inner)],
    }
    if POINTS in sizes:
        changes[POINTS] = sizes[POINTS]
    return replace(spec, config=replace(spec.config, **changes))


def described(sizes: Mapping[str, Any]) -> str:
    """Return the sizes of a model in words: `widths`, `inner` and the hidden units of any point network, `points`."""
    units = [f"{sizes[POINTS]} hidden units of the point network"] if POINTS in sizes else []
    return "; ".join([f"channels {sizes['widths']}, inside blocks {sizes['inner']}", *units])


def in_words(facts: Mapping[str, Any], after: float | None) -> str:
    """Return how time and CRPS have changed by a compaction, as a sentence for the log and the model card.

    Args:
        facts: the checkpoint's record of the compaction. It has `ms` before and after, `crps_ratio` before, and both
            `without` the U-Net.
        after: the CRPS ratio of the compacted model. If it or the one before is None, the sentence gives times only.
    """
    before, without = facts["crps_ratio"], facts["without"]
    text = f"a forward pass takes {facts['ms'][1]:.3g} ms instead of {facts['ms'][0]:.3g}"
    bare = f"without the U-Net: {without['ms']:.3g} ms"
    if before is None or after is None:
        return f"{text}; {bare}"
    gain, rise = without["crps_ratio"] - before, 100 * (after / before - 1)
    share = "the U-Net gained nothing"
    if gain > 0:
        share = f"{100 * (without['crps_ratio'] - after) / gain:.0f} % of what the U-Net gains"
    scores = f"crps_ratio {before:.4f} before, {after:.4f} after ({rise:+.2f} %, {share})"
    return f"{text}; {scores}; {bare}, crps_ratio {without['crps_ratio']:.4f}"
