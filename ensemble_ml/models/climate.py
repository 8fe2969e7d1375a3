"""What the training dates say before any network is trained: scales, local bias and inflation, static fields.

A `Climate` holds numpy arrays that the training fits on its own dates; the model keeps them as buffers, so that a
state_dict is self-contained. Axes: T lead, V pressure-level variable, S surface variable, Z level, Y latitude,
X longitude. Names end in `_p` for pressure-level and `_s` for surface variables.
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
_LEAST_CELL = 1e-3  # of its level's typical spread: a cell where no member ever differed
_LEAST = 1e-6  # of a level's standard deviation: a level where none did


@dataclass(eq=False)
class Climate:
    """Statistics of the train dates, float32; physical units unless said otherwise.

    | name | `_p` | `_s` | meaning |
    |---|---|---|---|
    | mean, std | (V, Z) | (S,) | of the values, for standardising inputs; maps (V, Z, Y, X), (S, Y, X) where local |
    | spread | (T_out, V, Z, Y, X) | (T_out, S, Y, X) | s_clim: root of the mean variance of the full ensemble |
    | shrink | (T_out, V, Z) | (T_out, S) | k in s0^2 = ((M-1) s^2 + k s_clim^2) / (M-1+k), in members |
    | spread_shrink, spread_gain, spread_level | as shrink | as shrink | of `features.unbiased_spread` |
    | anchor | as spread | as spread | mean of the ensemble mean |
    | bias | as spread | as spread | shrunk mean error (truth - ensemble mean) |
    | inflation | as spread | as spread | log(sigma / s0), shrunk |
    | dry_share, dry_mean | as shrink | as shrink | a and b of `models.dry`; None: one and zero |
    | error | (T_out, V, Z) | (T_out, S) | a typical CRPS, which the loss is divided by |
    | level_spread | (T_in, V, Z) | (T_in, S) | typical spread of an input lead; None: taken from `spread` |

    `static` (n_static, Y, X): the fields that `spec.static` names, in its order; `correction`: W of `models.linear`;
    `surroundings_first`, `surroundings_second`, `residuals_first`, `residuals_second`: W1 to W4 of
    `models.surroundings`; None: a network that adds nothing.
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
        """Zeros and ones of the right shapes: a place for a state_dict to be loaded into."""
        arrays = {}
        for name, shape in climate_shapes(spec).items():
            arrays[name] = np.full(shape, _unknown(name), np.float32)
        return cls(**arrays)

    def checked(self, spec: ModelSpec) -> Climate:
        """A float32 copy with every default filled in.

        Raises:
            UserError: an array has the wrong shape or is not finite; a scale is not positive.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for suffix in ("p", "s"):
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
    """What an array holds where nothing is known: one for scales, zero for all else."""
    return float(name.rsplit("_", 1)[0] in _SCALES)


def climate_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a `Climate`."""
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
    """Root mean square of s_clim over cells; a lead that is not predicted borrows the mean over those that are."""
    typical = np.sqrt(np.mean(np.asarray(spread, np.float64) ** 2, axis=(-2, -1)))
    borrowed = typical.mean(0)
    by_lead = dict(zip(spec.leads_out, typical, strict=True))
    return np.stack([by_lead.get(lead, borrowed) for lead in spec.leads_in])


def _checked_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise UserError(f"climate {name}: shape {array.shape}; the model needs {shape}")
    if not np.isfinite(array).all():
        raise UserError(f"climate {name}: holds NaN or infinite values; fit it again on dates without gaps")
    if name.rsplit("_", 1)[0] in _SCALES and (array < 0).any():
        raise UserError(f"climate {name}: smallest value {array.min():g}; a scale cannot be negative")
    return array.copy()


def _lift_zeros(values: dict[str, np.ndarray], suffix: str) -> None:
    """Keep divisors above zero, each variable by its own size: humidity is a billionth of geopotential."""
    std = values[f"std_{suffix}"]
    std[std == 0] = 1  # a field that never varies stands at its mean, whatever it is divided by
    if std.ndim > values[f"error_{suffix}"].ndim - 1:  # maps: what counts for a level is their typical value
        std = np.sqrt(np.mean(np.square(std, dtype=np.float64), (-2, -1))).astype(np.float32)
    spread, least = values[f"spread_{suffix}"], np.float32(_LEAST) * std
    typical = np.sqrt(np.mean(np.square(spread, dtype=np.float64), (-2, -1))).astype(np.float32)
    floor = np.maximum(np.float32(_LEAST_CELL) * typical, least)
    np.maximum(spread, floor[..., None, None], out=spread)
    np.maximum(values[f"level_spread_{suffix}"], least, out=values[f"level_spread_{suffix}"])
    np.maximum(values[f"shrink_{suffix}"], np.float32(_LEAST), out=values[f"shrink_{suffix}"])
    error = values[f"error_{suffix}"]
    error[error == 0] = 1
