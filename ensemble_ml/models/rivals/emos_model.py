"""EMOS as a model: coefficients for each lead, field and grid point, one set for each of some `sizes` of an ensemble.

They are fitted on all training dates at once (`training.emos_fit`), not step by step, and carry no gradient. An
ensemble of another size takes the coefficients of the nearest one, by the logarithm of the size.

Axes: K ensemble size, B date, T lead, F field, V pressure-level variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction
from ensemble_ml.models.place import seasonal_terms
from ensemble_ml.models.rivals.emos import Emos
from ensemble_ml.models.rivals.rival import Rival

SIZES = (1, 2, 3, 5, 10)  # before the fit, and of checkpoints that say none
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
        self.sizes: Tensor
        self.register_buffer("sizes", torch.tensor(SIZES))  # that the rows of `coefficients` are of

    def put(self, size: int, lead: int, field: int, fitted: Emos, reference: Tensor | float = 0.0) -> None:
        """Take over what was fitted for row `size`.

        Coefficients broadcast against the map. The reference r of each point goes into its intercept: r + a +
        b (m - r) is m + [a - (b - 1) r] + (b - 1) m.

        Args:
            reference: r, (Y * X,), or one for all.
        """
        shape = self.spec.grid.shape
        season = fitted.season if fitted.season.shape[-1] else fitted.season.new_zeros(*fitted.a.shape, 2)
        slope = fitted.b - 1
        values = [fitted.a - slope * reference, slope, season[..., 0], season[..., 1], fitted.c, fitted.d]
        maps = [v.reshape(shape) if v.numel() > 1 else v.reshape(1, 1).expand(shape) for v in values]
        self.coefficients.data[size, :, lead, field] = torch.stack(maps).to(self.coefficients)

    def row(self, count: float) -> int:
        """Of the coefficients that an ensemble of `count` members takes."""
        sizes = self.sizes.tolist()
        return min(range(len(sizes)), key=lambda i: abs(math.log(count / sizes[i])))

    def forward(self, x: EnsembleInput) -> Prediction:
        rows = [self.row(float(count)) for count in x.count]
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


def rows_for(members: int, sizes: Collection[int]) -> list[int]:
    """Sizes to fit for, ascending: `members` and as many of `sizes` as there are rows, without those whose neighbours
    are nearest, which give way to them."""
    found = sorted({members, *sizes})
    while len(found) > len(SIZES):
        inner = [at for at in range(1, len(found) - 1) if found[at] != members]
        found.pop(min(inner, key=lambda at: found[at + 1] / found[at - 1]))
    return found
