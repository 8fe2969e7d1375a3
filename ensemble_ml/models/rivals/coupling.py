"""Members of a corrected ensemble that hang together as the raw ones do.

Ensemble copula coupling: quantiles of the predicted law in the rank order of the raw members (Schefzik et al. 2013,
doi:10.1214/13-STS443, ECC-Q). Member by member: each raw member moved and stretched (Van Schaeybroeck & Vannitsem
2015, doi:10.1002/qj.2397); with EMOS's location and scale that is `distributions.remap_members`, which `predict
members_out=true` writes for every model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models.distributions import quantile


def couple(members: Tensor, location: Tensor, scale: Tensor, family: Family = Family.NORMAL) -> Tensor:
    """ECC-Q: quantiles at i / (M + 1) of the law, put where raw members of the same rank stand.

    Args:
        members: (M, ...) raw members, two or more; equal ones keep their order.
        location, scale: (...) of the predicted law.

    Returns:
        (M, ...), in the dtype of `location`.

    Raises:
        UserError: there is only one member.
    """
    if len(members) < 2:
        raise UserError(f"ensemble copula coupling: {len(members)} member given; it needs two or more")
    levels = torch.arange(1, len(members) + 1, dtype=torch.float64, device=members.device) / (len(members) + 1)
    drawn = torch.stack([quantile(family, location, scale, float(level)) for level in levels])
    ranks = members.argsort(dim=0, stable=True).argsort(dim=0)
    return drawn.gather(0, ranks)
