"""The functions of torch that `ensemble_ml.closed_forms` needs.

The incomplete gamma function is computed in float64 by its callers, because it loses digits in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.special import erfcx, gammainc, log_ndtr, ndtr, ndtri

from ensemble_ml.closed_forms import LOWEST, TINY, Maths

_STEP = 1e-5  # relative step of the shape k in the central difference


class _Incomplete(torch.autograd.Function):
    """The regularised lower incomplete gamma function F_k(x), with a derivative by its shape, which torch lacks.

    The derivative by the shape k is a central difference. At the largest k, it gives derivatives of scores to six
    digits.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, x: Tensor) -> Tensor:
        """Return F_k(x)."""
        ctx.save_for_backward(k, x)
        return gammainc(k, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        k, x = ctx.saved_tensors
        # The step is relative, because shapes range over many powers of ten.
        by_shape = (gammainc(k * (1 + _STEP), x) - gammainc(k * (1 - _STEP), x)) / (2 * _STEP * k)
        by_x = torch.exp((k - 1) * x.clamp(min=TINY).log() - x - torch.lgamma(k))
        return grads[0] * by_shape, grads[0] * by_x


def density(k: Tensor, x: Tensor) -> Tensor:
    """Return x^k exp(-x) / Gamma(k + 1), which is F_k(x) - F_{k + 1}(x) (DLMF 8.8.5)."""
    return torch.exp(k * x.clamp(min=TINY).log() - x - torch.lgamma(k + 1))


def survivals(k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - F(x) of the gamma distributions of shapes k, k + 1 and k + 2."""
    whole = 1 - gammainc(k, x)
    first = whole + density(k, x)
    return whole, first, first + density(k + 1, x)


def _gammaincinv(k: Tensor, p: Tensor) -> Tensor:
    """Return the inverse of the incomplete gamma function, which torch lacks: SciPy computes it on the CPU."""
    shape, share = np.broadcast_arrays(k.detach().cpu().numpy(), p.detach().cpu().numpy())
    return torch.from_numpy(np.asarray(scipy.special.gammaincinv(shape, share))).to(k.device)


TORCH = Maths(
    where=torch.where,
    exp=torch.exp,
    log=torch.log,
    log1p=torch.log1p,
    expm1=torch.expm1,
    sqrt=torch.sqrt,
    maximum=torch.maximum,
    erf=torch.erf,
    erfcx=erfcx,
    ndtr=ndtr,
    log_ndtr=log_ndtr,
    ndtri=ndtri,
    lgamma=torch.lgamma,
    double=torch.Tensor.double,
    like=lambda x, other: x.to(other.dtype),
    at_least=lambda x, bound: torch.clamp(x, min=bound),
    at_most=lambda x, bound: torch.clamp(x, max=bound),
    ratio=lambda x: softplus(x.clamp(min=LOWEST), beta=2.0),
    gammainc=gammainc,
    gammaincinv=_gammaincinv,
    incomplete=_Incomplete.apply,
    next_incomplete=lambda k, x, found: found - density(k, x),
)
