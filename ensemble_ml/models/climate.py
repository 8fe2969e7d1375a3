"""The statistics of the training dates that a model needs before its network is trained.

They are scales, climatological means and spreads, bias and inflation of each grid cell, corrections fitted in closed
form, and static fields. The package `training` fits them. The model keeps them as buffers, so that a state_dict is
complete.

Axes: T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude. Names end in `_p` for
pressure-level and in `_s` for surface variables.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import correction_shape
from ensemble_ml.models.surroundings import surroundings_shapes

_SCALES = (
    "std", "spread", "shrink", "spread_shrink", "spread_gain", "spread_level", "error", "level_spread", "dry_share"
)  # fmt: skip
_LEAST_CELL = 1e-3  # typical spreads: least spread of a cell, for one at which members never differed
_LEAST = 1e-6  # standard deviations: least spread of a level, for one on which members never differed


@dataclass(eq=False)
class Climate:
    """The statistics of the training dates, float32, in physical units unless the table says otherwise.

    | name | `_p` | `_s` | meaning |
    |---|---|---|---|
    | mean, std | (V, Z) | (S,) | for standardising inputs; maps (V, Z, Y, X) and (S, Y, X) if `ModelSpec.local` |
    | spread | (T_out, V, Z, Y, X) | (T_out, S, Y, X) | s_clim: root of the mean variance of the full ensemble |
    | shrink | (T_out, V, Z) | (T_out, S) | k of the prior spread s0 (`features.shrunk_spread`), in members |
    | spread_shrink, spread_gain, spread_level | as shrink | as shrink | k, g, l of `features.unbiased_spread` |
    | anchor | as spread | as spread | climatological mean: mean of the ensemble mean |
    | bias | as spread | as spread | shrunk mean error (truth - ensemble mean) |
    | inflation | as spread | as spread | log(sigma / s0), shrunk |
    | dry_share, dry_mean | as shrink | as shrink | a and b of `models.dry`; None: one and zero |
    | error | (T_out, V, Z) | (T_out, S) | a typical CRPS, by which the loss is divided |
    | level_spread | (T_in, V, Z) | (T_in, S) | typical spread of an input lead; None: taken from `spread` |

    `static` (n_static, Y, X) are the fields that `spec.static` names, in its order. `correction` is W of
    `models.linear`. `surroundings_first`, `surroundings_second`, `residuals_first` and `residuals_second` are W1 to W4
    of `models.surroundings`; None stands for a network that adds nothing.
    """

    mean_p: np.ndarray
    std_p: np.ndarray
    mean_s: np.ndarray
    std_s: np.ndarray
    spread_p: np.ndarray
    spread_s: np.ndarray
    shrink_p: np.ndarray
    shrink_s: np.ndarray
    spread_shrink_p: np.ndarray
    spread_shrink_s: np.ndarray
    spread_gain_p: np.ndarray
    spread_gain_s: np.ndarray
    spread_level_p: np.ndarray
    spread_level_s: np.ndarray
    anchor_p: np.ndarray
    anchor_s: np.ndarray
    bias_p: np.ndarray
    bias_s: np.ndarray
    inflation_p: np.ndarray
    inflation_s: np.ndarray
    error_p: np.ndarray
    error_s: np.ndarray
    static: np.ndarray
    correction: np.ndarray
    level_spread_p: np.ndarray | None = None
    level_spread_s: np.ndarray | None = None
    dry_share_p: np.ndarray | None = None
    dry_share_s: np.ndarray | None = None
    dry_mean_p: np.ndarray | None = None
    dry_mean_s: np.ndarray | None = None
    surroundings_first: np.ndarray | None = None
    surroundings_second: np.ndarray | None = None
    residuals_first: np.ndarray | None = None
    residuals_second: np.ndarray | None = None

    @classmethod
    def default(cls, spec: ModelSpec) -> Climate:
        """Return zeros and ones of the right shapes, for a model into which a state_dict will be loaded.

        Args:
            spec: the model's spec.

        Returns:
            Statistics that change nothing.
        """
        arrays = {}
        for name, shape in climate_shapes(spec).items():
            arrays[name] = np.full(shape, _unknown(name), np.float32)
        return cls(**arrays)

    def checked(self, spec: ModelSpec) -> Climate:
        """Return a float32 copy in which every default is filled in and every divisor is above zero.

        Args:
            spec: the model's spec.

        Returns:
            The copy.

        Raises:
            UserError: an array has the wrong shape or is not finite, or a scale is negative.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for suffix in ("p", "s"):
            # Without fitted values, the typical spread of the input leads comes from s_clim of the predicted leads.
            if values[f"level_spread_{suffix}"] is None:
                values[f"level_spread_{suffix}"] = _level_spread(spec, values[f"spread_{suffix}"])
        for name, shape in climate_shapes(spec).items():
            if values[name] is None:
                values[name] = np.full(shape, _unknown(name))
            values[name] = _checked_array(name, np.asarray(values[name], np.float32), shape)
        for suffix in ("p", "s"):
            _lift_zeros(values, suffix)
        return Climate(**values)


def _unknown(name: str) -> float:
    """Return the default value of an array: one for scales, zero for all others."""
    return float(name.rsplit("_", 1)[0] in _SCALES)


def climate_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a `Climate`.

    Args:
        spec: the model's spec.

    Returns:
        Shapes by name.
    """
    leads, variables, levels, rows, columns = spec.pressure_shape
    surface = len(spec.surface)
    shapes: dict[str, tuple[int, ...]] = {}
    points = (rows, columns) if spec.local else ()
    for name in ("mean", "std"):
        shapes |= {f"{name}_p": (variables, levels, *points), f"{name}_s": (surface, *points)}
    for name in ("spread", "anchor", "bias", "inflation"):
        shapes |= {f"{name}_p": spec.pressure_shape, f"{name}_s": spec.surface_shape}
    for name in ("shrink", "spread_shrink", "spread_gain", "spread_level", "error"):
        shapes |= {f"{name}_p": (leads, variables, levels), f"{name}_s": (leads, surface)}
    shapes |= {
        "level_spread_p": (len(spec.leads_in), variables, levels),
        "level_spread_s": (len(spec.leads_in), surface),
        "static": (len(spec.static), rows, columns),
        "correction": correction_shape(spec),
        **surroundings_shapes(spec),
    }
    for name in ("dry_share", "dry_mean"):
        shapes |= {f"{name}_p": shapes["shrink_p"], f"{name}_s": shapes["shrink_s"]}
    return shapes


def _level_spread(spec: ModelSpec, spread: np.ndarray) -> np.ndarray:
    """Return the root mean square of s_clim over cells, (T_in, ...).

    A lead that is not predicted gets the mean over the leads that are.
    """
    typical = np.sqrt(np.mean(np.asarray(spread, np.float64) ** 2, axis=(-2, -1)))
    borrowed = typical.mean(0)
    by_lead = dict(zip(spec.leads_out, typical, strict=True))
    return np.stack([by_lead.get(lead, borrowed) for lead in spec.leads_in])


def _checked_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a copy of an array, or raise a UserError if its shape or its values are not what the model needs."""
    if array.shape != shape:
        raise UserError(f"climate {name}: shape {array.shape}; the model needs {shape}")
    if not np.isfinite(array).all():
        raise UserError(f"climate {name}: holds NaN or infinite values; fit it again on dates without gaps")
    if name.rsplit("_", 1)[0] in _SCALES and (array < 0).any():
        raise UserError(f"climate {name}: smallest value {array.min():g}; a scale cannot be negative")
    return array.copy()


def _lift_zeros(values: dict[str, np.ndarray], suffix: str) -> None:
    """Raise divisors to a small value above zero.

    Each variable has a floor of its own size: humidity is a billionth of geopotential.
    """
    std = values[f"std_{suffix}"]
    std[std == 0] = 1  # a field that never varies is at its mean, so its anomaly is zero whatever it is divided by
    if std.ndim > values[f"error_{suffix}"].ndim - 1:  # maps: the floor of a level comes from their typical value
        std = np.sqrt(np.mean(np.square(std, dtype=np.float64), (-2, -1))).astype(np.float32)
    spread, least = values[f"spread_{suffix}"], np.float32(_LEAST) * std
    typical = np.sqrt(np.mean(np.square(spread, dtype=np.float64), (-2, -1))).astype(np.float32)
    floor = np.maximum(np.float32(_LEAST_CELL) * typical, least)
    np.maximum(spread, floor[..., None, None], out=spread)
    np.maximum(values[f"level_spread_{suffix}"], least, out=values[f"level_spread_{suffix}"])
    np.maximum(values[f"shrink_{suffix}"], np.float32(_LEAST), out=values[f"shrink_{suffix}"])
    # The loss divides by the error, so an error of zero is replaced by one.
    error = values[f"error_{suffix}"]
    error[error == 0] = 1
