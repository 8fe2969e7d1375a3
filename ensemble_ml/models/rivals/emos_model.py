"""EMOS as a model, with coefficients for each ensemble size, lead, field and grid point.

They are fitted to the training dates before the first step (`training.emos_fit`), and have no gradient. An ensemble of
another size takes the coefficients of the size whose logarithm is nearest.

Axes: K ensemble size, B date, T lead, F field, Y latitude, X longitude.
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

SIZES = (1, 2, 3, 5, 10)  # sizes before the fit; their number is that of the rows of every model
COEFFICIENTS = 6  # a, b - 1, sine, cosine, c, d


class EmosModel(Rival):
    """The EMOS baseline.

        location = m + a + (b - 1) m + season
        scale^2  = c + d s^2

    Before the fit, a = 0, b = c = d = 1 and there is no season. `models.rivals.emos` explains the symbols. The
    parameter `coefficients` holds b - 1 in place of b.

    Args:
        spec: the inputs and outputs of the model.
        climate: statistics of the training dates.

    Raises:
        UserError: `model.postprocess` is off, so there is no truth to fit to; or `climate` does not fit `spec`.
    """

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
        self.register_buffer("sizes", torch.tensor(SIZES))  # ensemble size of each row of `coefficients`

    def put(self, size: int, lead: int, field: int, fitted: Emos, reference: Tensor | float = 0.0) -> None:
        """Store the coefficients that were fitted for one ensemble size, lead and field.

        Each coefficient is one number for all points, or one for each point. The reference r of each point becomes a
        part of its intercept, because r + a + b (m - r) = m + [a - (b - 1) r] + (b - 1) m.

        Args:
            size: row of the ensemble size.
            lead: position of the lead.
            field: position of the field.
            fitted: the coefficients.
            reference: r, (Y * X,), or one number for all points.
        """
        shape = self.spec.grid.shape
        season = fitted.season if fitted.season.shape[-1] else fitted.season.new_zeros(*fitted.a.shape, 2)
        slope = fitted.b - 1
        values = [fitted.a - slope * reference, slope, season[..., 0], season[..., 1], fitted.c, fitted.d]
        maps = [v.reshape(shape) if v.numel() > 1 else v.reshape(1, 1).expand(shape) for v in values]
        self.coefficients.data[size, :, lead, field] = torch.stack(maps).to(self.coefficients)

    def row(self, count: float) -> int:
        """Return the row of the coefficients that an ensemble of `count` members takes."""
        sizes = self.sizes.tolist()
        return min(range(len(sizes)), key=lambda i: abs(math.log(count / sizes[i])))

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict the distribution of the truth and, if `model.spread` is on, the spread of the full ensemble.

        Args:
            x: a batch in physical units.

        Returns:
            Location and scale (B, T, F, Y, X) in physical units; the scale is at least 0.001 of the field's typical
            spread. The spread, which EMOS does not predict, is that expected from the members (`Reduced.s1`).

        Raises:
            UserError: the shapes of `x` are not those of the spec.
        """
        rows = [self.row(float(count)) for count in x.count]
        fields, season = self.reduced(x), seasonal_terms(x.day_of_year)[..., None, None, None, None]
        a, slope, sine, cosine, c, d = self.coefficients[rows].unbind(1)
        shift = a + slope * fields.mean + sine * season[:, 0] + cosine * season[:, 1]
        # The scale has to stay above zero, because scores divide by it.
        scale = torch.sqrt(torch.maximum(c + d * fields.spread**2, (1e-3 * fields.typical) ** 2))
        return Prediction(fields.mean + shift, scale, fields.s1 if self.spec.config.spread else None)


def rows_for(members: int, sizes: Collection[int]) -> list[int]:
    """Return the ensemble sizes to fit for, ascending.

    There are at most as many as the model has rows. If `sizes` has more, those whose neighbours are nearest to each
    other are left out, because the neighbours can stand for them.

    Args:
        members: a size that is always kept.
        sizes: other sizes.
    """
    chosen = sorted({members, *sizes})
    while len(chosen) > len(SIZES):
        # The smallest size, the largest one and `members` always stay.
        inner = [at for at in range(1, len(chosen) - 1) if chosen[at] != members]
        chosen.pop(min(inner, key=lambda at: chosen[at + 1] / chosen[at - 1]))
    return chosen
