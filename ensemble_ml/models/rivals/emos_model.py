"""EMOS as a model: coefficients for each lead, field and grid point, one set for each of a few ensemble sizes.

They are fitted on all training dates at once (`training.emos_fit`), not step by step, and carry no gradient. An
ensemble of another size takes the coefficients of the nearest one, by the logarithm of the size.

Axes: K ensemble size, B date, T lead, F field, V pressure-level variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction
from ensemble_ml.models.place import seasonal_terms
from ensemble_ml.models.rivals.emos import Emos
from ensemble_ml.models.rivals.rival import Rival

SIZES = (1, 2, 3, 5, 10)
COEFFICIENTS = 6  # a, b - 1, sine, cosine, c, d


class EmosModel(Rival):
    """location = m + a + (b - 1) m + season, scale^2 = c + d s^2; before the fit c = d = 1, and the rest is zero."""

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        if not spec.config.postprocess:
            raise UserError(
                "model.name=emos: needs the truth; prepare the store with truth=..., model.postprocess=true"
            )
        start = torch.zeros(len(SIZES), COEFFICIENTS, len(spec.leads_out), self.spec.fields, *spec.grid.shape)
        start[:, 4:] = 1.0
        self.coefficients = nn.Parameter(start, requires_grad=False)

    def put(self, size: int, lead: int, field: int, fitted: Emos) -> None:
        """Take over what was fitted for row `size` of `SIZES`; coefficients broadcast against the map."""
        shape = self.spec.grid.shape
        season = fitted.season if fitted.season.shape[-1] else fitted.season.new_zeros(*fitted.a.shape, 2)
        values = [fitted.a, fitted.b - 1, season[..., 0], season[..., 1], fitted.c, fitted.d]
        maps = [v.reshape(shape) if v.numel() > 1 else v.reshape(1, 1).expand(shape) for v in values]
        self.coefficients.data[size, :, lead, field] = torch.stack(maps).to(self.coefficients)

    def forward(self, x: EnsembleInput) -> Prediction:
        rows = [nearest_size(float(count)) for count in x.count]
        season = seasonal_terms(x.day_of_year)
        found: dict[str, Tensor | None] = {}
        reduced = self.reduced(x)
        for suffix, chosen in zip("ps", self.split(self.coefficients[rows], 3), strict=True):
            fields = reduced.get(suffix)
            if fields is None:
                continue
            a, slope, sine, cosine, c, d = chosen.unbind(1)
            terms = (season[:, i].reshape(-1, *[1] * (a.ndim - 1)) for i in (0, 1))
            shift = a + slope * fields.mean + sum(k * term for k, term in zip((sine, cosine), terms, strict=True))
            least = (1e-3 * fields.typical) ** 2
            found |= {
                f"location_{suffix}": fields.mean + shift,
                f"scale_{suffix}": torch.sqrt(torch.maximum(c + d * fields.spread**2, least)),
            }
            if self.spec.config.spread:
                found[f"spread_{suffix}"] = fields.s1
        return Prediction(**found)


def nearest_size(count: float) -> int:
    """Row of `SIZES` for an ensemble of `count` members."""
    return min(range(len(SIZES)), key=lambda i: abs(math.log(count / SIZES[i])))
