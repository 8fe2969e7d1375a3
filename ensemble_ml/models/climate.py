"""The statistics of the training dates that a model needs before its network is trained.

They are scales, climatological means and spreads, bias and inflation of each grid cell, corrections fitted in closed
form, and static fields. The package `training` fits them. The model keeps them as buffers, so that a state_dict is
complete.

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import correction_shape
from ensemble_ml.models.points import point_shapes

_SCALES = (
    "std", "spread", "shrink", "spread_shrink", "spread_gain", "spread_level", "error", "level_spread", "dry_share"
)  # fmt: skip
_LEAST_CELL = 1e-3  # least spread of a cell, as a fraction of the field's typical spread
_LEAST = 1e-6  # least spread of a field, as a fraction of its standard deviation; also the least `shrink`


@dataclass(eq=False)
class Climate:
    """The statistics of the training dates, in physical units unless the table says otherwise.

    | name | shape | meaning |
    |---|---|---|
    | mean, std | (F,) | for standardising inputs; maps (F, Y, X) if `ModelSpec.local` |
    | spread | (T_out, F, Y, X) | s_clim: root of the mean variance of the full ensemble |
    | shrink | (T_out, F) | k of the prior spread s0 (`features.shrunk_spread`), in members |
    | spread_shrink, spread_gain, spread_level | as shrink | k, g, l of `features.unbiased_spread` |
    | anchor | as spread | climatological mean: mean of the ensemble mean |
    | bias | as spread | shrunk mean error (truth - ensemble mean) |
    | inflation | as spread | log(sigma / s0), shrunk |
    | dry_share, dry_mean | as shrink | a and b of `models.heads`; None: one and zero |
    | error | as shrink | a typical CRPS, by which the loss is divided |
    | level_spread | (T_in, F) | typical spread of an input lead; None: taken from `spread` |

    `static` (n_static, Y, X) are the fields that `spec.static` names, in its order. `correction` is W of
    `models.linear`. `points_first` and `points_second` are W1 and W2 of `models.points`; None gives zeros, with which
    that network adds nothing.
    """

    mean: np.ndarray
    std: np.ndarray
    spread: np.ndarray
    shrink: np.ndarray
    spread_shrink: np.ndarray
    spread_gain: np.ndarray
    spread_level: np.ndarray
    anchor: np.ndarray
    bias: np.ndarray
    inflation: np.ndarray
    error: np.ndarray
    static: np.ndarray
    correction: np.ndarray
    level_spread: np.ndarray | None = None
    dry_share: np.ndarray | None = None
    dry_mean: np.ndarray | None = None
    points_first: np.ndarray | None = None
    points_second: np.ndarray | None = None

    @classmethod
    def default(cls, spec: ModelSpec) -> Climate:
        """Return zeros and ones of the right shapes, for a model into which a state_dict will be loaded."""
        return cls(**{k: np.full(shape, _unknown(k), np.float32) for k, shape in climate_shapes(spec).items()})

    def checked(self, spec: ModelSpec) -> Climate:
        """Return a float32 copy with defaults in the place of None. Scales that are divided by become positive.

        Raises:
            UserError: an array has the wrong shape or is not finite, or a scale is negative.
        """
        values = dict(vars(self))
        for name, shape in climate_shapes(spec).items():
            # Without fitted values, the typical spread of the input leads comes from s_clim of the predicted leads,
            # which has been checked by then.
            if values[name] is None and name == "level_spread":
                values[name] = _level_spread(spec, values["spread"])
            elif values[name] is None:
                values[name] = np.full(shape, _unknown(name))
            values[name] = _checked_array(name, np.asarray(values[name], np.float32), shape)
        _lift_zeros(values)
        return Climate(**values)


def _unknown(name: str) -> float:
    """Return the default value of an array: one for scales, zero for all others."""
    return float(name in _SCALES)


def climate_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a `Climate`."""
    leads, count, *points = spec.shape
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= dict.fromkeys(("mean", "std"), (count, *points) if spec.local else (count,))
    shapes |= dict.fromkeys(("spread", "anchor", "bias", "inflation"), spec.shape)
    by_field = "shrink", "spread_shrink", "spread_gain", "spread_level", "error", "dry_share", "dry_mean"
    shapes |= dict.fromkeys(by_field, (leads, count))
    return shapes | {
        "level_spread": (len(spec.leads_in), count),
        "static": (len(spec.static), *points),
        "correction": correction_shape(spec),
        **point_shapes(spec),
    }


def _level_spread(spec: ModelSpec, spread: np.ndarray) -> np.ndarray:
    """Return the root mean square of s_clim over cells, (T_in, F).

    A lead that is not predicted gets the mean over the leads that are.
    """
    typical = np.sqrt(np.mean(np.asarray(spread, np.float64) ** 2, axis=(-2, -1)))
    borrowed = typical.mean(0)
    by_lead = dict(zip(spec.leads_out, typical, strict=True))
    return np.stack([by_lead.get(lead, borrowed) for lead in spec.leads_in])


def _checked_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a copy of an array, whose shape and values are checked."""
    if array.shape != shape:
        raise UserError(f"climate {name}: shape {array.shape}; the model needs {shape}")
    if not np.isfinite(array).all():
        raise UserError(f"climate {name}: holds NaN or infinite values; fit it again on dates without gaps")
    if name in _SCALES and (array < 0).any():
        raise UserError(f"climate {name}: smallest value {array.min():g}; a scale cannot be negative")
    return array.copy()


def _lift_zeros(values: dict[str, np.ndarray]) -> None:
    """Replace zeros in `std` and `error` by one, and raise spreads and `shrink` to a least value.

    The least spread of a field is relative to its own typical values, because no absolute value suits all fields:
    geopotential has far larger numbers than humidity.
    """
    std, spread, error = values["std"], values["spread"], values["error"]
    std[std == 0] = 1  # a field that never varies is at its mean, so its anomaly is zero whatever it is divided by
    if std.ndim > 1:  # for maps, the floor of a field comes from the typical value of its map
        std = np.sqrt(np.mean(np.square(std, dtype=np.float64), (-2, -1))).astype(np.float32)
    least = np.float32(_LEAST) * std
    typical = np.sqrt(np.mean(np.square(spread, dtype=np.float64), (-2, -1))).astype(np.float32)
    floor = np.maximum(np.float32(_LEAST_CELL) * typical, least)
    np.maximum(spread, floor[..., None, None], out=spread)
    np.maximum(values["level_spread"], least, out=values["level_spread"])
    np.maximum(values["shrink"], np.float32(_LEAST), out=values["shrink"])
    error[error == 0] = 1  # the loss divides by it
