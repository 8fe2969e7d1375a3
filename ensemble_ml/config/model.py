"""Settings of the model: the network, its heads and the distributions of variables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import at_least, opt, require
from ensemble_ml.fields import Family, field


class Vertical(Enum):
    """The way in which the weights of the 3D U-Net act across pressure levels."""

    shared = "shared"
    affine = "affine"
    separable = "separable"
    full = "full"


class Pole(Enum):
    """The rule for the values that a convolution sees beyond a pole."""

    cross = "cross"
    replicate = "replicate"
    zero = "zero"


# Inputs are standardised with one mean and deviation for each level, or with maps of both (`store.las`). The Enum is
# made by a call, because `global` is a keyword of Python.
Standardise = Enum("Standardise", {"global": "global", "las": "las"})


class Precision(Enum):
    """The arithmetic of the convolutions.

    In training, `auto` times a step in float32 and, if the hardware has it, in bfloat16, and takes the faster one. In
    prediction, it is the precision of the checkpoint, or float32 if the device lacks that.
    """

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


NETWORKS = ("unet3d", "emos", "drn", "ens10_unet", "poet")  # the values of `model.name`


@dataclass
class ModelConfig:
    """The network and its heads."""

    name: str = opt("unet3d", "unet3d | emos | drn | ens10_unet | poet: our network, or a published baseline")
    hidden: int = opt(32, "channels of the finest level, doubled at each pooling up to max_hidden; drn: of every layer")
    max_hidden: int = opt(128, "most channels of a level")
    widths: list[int] | None = opt(None, "unet3d: channels of each level, finest first; null doubles hidden at each pooling up to max_hidden")
    inner: list[int] | None = opt(None, "unet3d: channels between the two convolutions of each residual block, those of the encoder first, each from the finest level on; null takes those of its level")
    depth: Any = opt("auto", "number of poolings L; latitude is processed in blocks of 2^L rows; auto takes the most that the grid allows, up to 3 (ens10_unet: 2); drn: hidden layers, auto: 2")
    blocks: int = opt(1, "residual blocks a level")
    vertical: Vertical = opt(Vertical.affine, "shared | affine | separable | full: how weights act across pressure levels")
    pole: Pole = opt(Pole.cross, "cross | replicate | zero: what a convolution sees beyond a pole")
    local_terms: bool = opt(True, "one learned correction a grid cell (locally connected), started from the training dates")
    linear: bool = opt(True, "unet3d: start from a linear correction by all fields around a point, fitted to the training dates in closed form")
    points: int = opt(1024, "unet3d: hidden units of the point network, which corrects spread and errors beyond the linear correction, by the points around; 0: none")
    departures: bool = opt(False, "drn, ens10_unet, poet: also give them the inputs of unet3d's statistical stages: departures from the training mean at the point, in units of the typical spread, with their differences and means around")
    spread: bool = opt(True, "head that predicts the full ensemble's spread")
    postprocess: bool = opt(True, "head that predicts the distribution of the truth; off where the store has none")
    one_member: bool = opt(False, "also give the network one single member")
    families: Any = opt(None, "distributions that differ from the registry's, e.g. {q: lognormal}")
    standardise: Standardise = opt(Standardise["global"], "global | las: inputs by one mean and deviation a level, or by local area-wise maps")
    min_members: int = opt(1, "fewest members that predict accepts")
    recompute: Any = opt(False, "true | false | auto, unet3d: keep only the inputs of residual blocks for the backward pass and compute the rest again there, for less memory and more time; auto: where a step would not fit otherwise, by the plan")
    bank: float = opt(0.0, "unet3d: make all kernels of the U-Net of one vector with this fraction of their numbers, so that ranks exchange fewer bytes (Shapeshifter networks); 0: each has its own")
    bank_templates: int = opt(2, "windows of that vector that each kernel combines")
    precision: Precision = opt(Precision.auto, "auto | float32 | bfloat16 | float64")

    def __post_init__(self) -> None:
        require("model.name", self.name, self.name in NETWORKS, f"{', '.join(NETWORKS)} are allowed")
        depth = self.depth == "auto" or (type(self.depth) is int and 0 <= self.depth <= 6)
        require("model.depth", self.depth, depth, "0 to 6 poolings are allowed, or auto")
        require("model.hidden", self.hidden, self.hidden >= 4 and self.hidden % 4 == 0, "a positive multiple of 4 is needed")
        at_least(self, 4, "max_hidden", group="model.")
        heads = self.name != "poet" or self.max_hidden % 4 == 0
        require("model.max_hidden", self.max_hidden, heads, "model.name=poet needs a multiple of 4")
        for key in ("widths", "inner"):
            numbers = getattr(self, key)
            require(f"model.{key}", numbers, numbers is None or self.name == "unet3d", f"model.name={self.name} has none; leave it out")
            require(f"model.{key}", numbers, all(n >= 4 and n % 4 == 0 for n in numbers or ()), "positive multiples of 4 are needed")
        at_least(self, 0, "points", group="model.")
        at_least(self, 1, "blocks", "min_members", group="model.")
        given = self.families or {}
        require("model.families", given, isinstance(given, dict), "give a distribution by variable, {q: lognormal}")
        # An empty dictionary becomes None, because Hydra cannot add keys to a dictionary that the schema holds.
        self.families = {str(k): str(getattr(v, "value", v)) for k, v in given.items()} or None
        known = [family.value for family in Family]
        for name, family in (self.families or {}).items():
            require(f"model.families.{field(name).name}", family, family in known, f"{', '.join(known)} are allowed")
        require("model.recompute", self.recompute, isinstance(self.recompute, bool) or self.recompute == "auto", "true, false or auto is allowed")
        require("model.recompute", self.recompute, not self.recompute or self.name == "unet3d", f"model.name={self.name} has no residual blocks of ours; leave it out")
        require("model.bank", self.bank, 0 <= self.bank <= 1, "a fraction between 0 and 1 is needed")
        require("model.bank", self.bank, not self.bank or self.name == "unet3d", f"model.name={self.name} has no U-Net of ours; leave it out")
        require("model.bank", self.bank, not self.bank or not self.recompute, "kernels of a bank are made once a pass; give model.recompute=false")
        at_least(self, 1, "bank_templates", group="model.")
        require("model", "heads", self.spread or self.postprocess, "turn on model.spread or model.postprocess")

    @property
    def usual_depth(self) -> int:
        """Return the depth that `auto` stands for if the grid allows it."""
        return 2 if self.name in ("ens10_unet", "drn") else 3

    @property
    def pools(self) -> bool:
        """Return whether `depth` counts poolings of the grid. In the networks of single points it does not."""
        return self.name not in ("emos", "drn")

    def channels(self) -> tuple[list[int], list[int]]:
        """Return the channels of each level of the 3D U-Net, and those inside each residual block.

        `depth` must be a number by now, not "auto".

        Raises:
            UserError: `widths` or `inner` has too few or too many numbers.
        """
        widths = self.widths or [min(self.hidden * 2**level, self.max_hidden) for level in range(self.depth + 1)]
        if not self.widths:  # `max_hidden` bounds only the coarser levels: the first layers need `hidden` channels
            widths[0] = self.hidden
        levels = self.depth + 1
        require("model.widths", widths, len(widths) == levels, f"model.depth={self.depth} has {levels} levels; give a number for each")
        inner = self.inner or [width for width in (*widths, *widths[:-1]) for _ in range(self.blocks)]
        blocks = self.blocks * (2 * levels - 1)
        require("model.inner", inner, len(inner) == blocks, f"model.depth={self.depth} model.blocks={self.blocks} make {blocks} residual blocks; give a number for each")
        return widths, inner
