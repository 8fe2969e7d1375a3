"""Settings of the network and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ensemble_ml.config.base import opt, require


class Vertical(Enum):
    """How the weights of the 3D U-Net act across pressure levels."""

    shared = "shared"
    affine = "affine"
    separable = "separable"
    full = "full"


class Pole(Enum):
    """What a convolution sees beyond a pole."""

    cross = "cross"
    replicate = "replicate"
    zero = "zero"


class Precision(Enum):
    """Arithmetic of the convolutions; `auto` times a step of each and takes the fastest that the hardware has."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class OptimName(Enum):
    """Optimizers."""

    lion = "lion"
    adamw = "adamw"


NETWORKS = ("unet3d", "emos", "drn", "ens10_unet", "poet")


@dataclass
class ModelConfig:
    """The network and its heads."""

    name: str = opt("unet3d", "unet3d | emos | drn | ens10_unet | poet: our network, or a published rival")
    hidden: int = opt(32, "channels of the finest level, doubled at each pooling up to max_hidden; drn: of every layer")
    max_hidden: int = opt(128, "most channels of a level")
    depth: int = opt(3, "number of poolings L; latitude is processed in blocks of 2^L rows; drn: hidden layers")
    blocks: int = opt(1, "residual blocks a level")
    vertical: Vertical = opt(Vertical.affine, "shared | affine | separable | full: how weights act across pressure levels")
    pole: Pole = opt(Pole.cross, "cross | replicate | zero: what a convolution sees beyond a pole")
    local_terms: bool = opt(True, "one learned correction a grid cell (locally connected), started from the training dates")
    spread: bool = opt(True, "head that predicts the full ensemble's spread")
    postprocess: bool = opt(True, "head that predicts the distribution of the truth; off where the store has none")
    one_member: bool = opt(False, "also give the network one single member")
    min_members: int = opt(1, "fewest members that predict accepts")
    precision: Precision = opt(Precision.auto, "auto | float32 | bfloat16 | float64")

    def __post_init__(self) -> None:
        require("model.name", self.name, self.name in NETWORKS, f"{', '.join(NETWORKS)} are allowed")
        require("model.depth", self.depth, 0 <= self.depth <= 6, "0 to 6 poolings are allowed")
        require("model.hidden", self.hidden, self.hidden >= 4 and self.hidden % 4 == 0, "a positive multiple of 4 is needed")
        require("model.blocks", self.blocks, self.blocks >= 1, "must be 1 or more")
        require("model.min_members", self.min_members, self.min_members >= 1, "must be 1 or more")
        require("model", "heads", self.spread or self.postprocess, "turn on model.spread or model.postprocess")

    @property
    def pools(self) -> bool:
        """Whether `depth` counts poolings of the grid."""
        return self.name not in ("emos", "drn")


@dataclass
class OptimConfig:
    """Optimizer and schedule."""

    name: OptimName = opt(OptimName.lion, "lion | adamw")
    lr: float = opt(3e-4, "peak learning rate")
    beta1: float = opt(0.9, "weight of the momentum in the update")
    beta2: float = opt(0.99, "decay of the momentum (Lion) or of the second moment (AdamW)")
    weight_decay: float = opt(0.1, "decoupled decay")
    warmup: int = opt(50, "steps of linear warm-up")
    final_lr: float = opt(0.02, "share of the peak that the cosine schedule ends at")
    clip: float = opt(0.0, "largest norm of the gradient; 0 leaves it alone")

    def __post_init__(self) -> None:
        require("optim.lr", self.lr, self.lr > 0, "must be above 0")
        for key in ("beta1", "beta2"):
            require(f"optim.{key}", getattr(self, key), 0 <= getattr(self, key) < 1, "must be in [0, 1)")
