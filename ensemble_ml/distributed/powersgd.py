"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): gradients averaged as products of two thin matrices.

    M     = gradient / ranks + error
    P     = orthonormal(sum(M Q))
    Q     = sum(M^T P)
    error = M - P P^T M

    M       this rank's part of the mean gradient, plus `error`, as a matrix (first axis, all others);
            `reduction=sum` does not divide by the number of ranks
    P, Q    factors of the approximation P Q^T, summed over the ranks; Q starts from the Q of the step before
    error   the part of M that the approximation left out in the step before, zero at first

Parameters that are not larger than their two factors are averaged as they are. All parameters are exchanged after the
backward pass, in two all-reduces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.exchange import ADDS_UP, GradientAverage, Reduction


class PowerSGD(GradientAverage):
    """An exchange that averages low-rank approximations of the gradients.

    Args:
        rank: number of columns of the factors.
        settings: passed to `BucketExchange`, but without overlap; `clip` bounds the norm of the averaged gradient.
    """

    def __init__(self, group: Communicator, *, rank: int = 4, **settings: object):
        super().__init__(group, **(settings | {"overlap": False}))  # type: ignore[arg-type]
        self.rank = rank

    def _prepare(self) -> None:
        """Choose the parameters that are approximated and make their factors and errors."""
        self._under_way = []  # this class waits for each collective immediately
        # All ranks must start from the same factors, so the generator has a fixed seed.
        generator = torch.Generator().manual_seed(1)
        self.factors: dict[int, Tensor] = {}
        self.errors: dict[int, Tensor] = {}
        self._new_errors: dict[int, Tensor] = {}
        self._new_factors: dict[int, Tensor] = {}
        # A parameter is named by its number among all parameters. Its number among the exchanged ones depends on the
        # partition of the grid, and a run may be resumed with another partition.
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        self._numbers = {id(p): number for number, p in enumerate(every)}
        for i, p in enumerate(self.params):
            rows, columns = _shape(p)
            if self.rank * (rows + columns) < rows * columns:
                start = torch.randn(columns, self.rank, generator=generator, dtype=self._wide)
                self.factors[i] = start.to(p.device)
                self.errors[i] = torch.zeros(rows, columns, device=p.device, dtype=self._wide)

    def _exchange(self, number: int) -> None:
        """Exchange all gradients in two all-reduces.

        The first sums P, the gradients without factors, and flags of each rank. The second sums Q.
        """
        scale = 1.0 if self.reduction is Reduction.sum else 1 / self.group.size
        # M of each approximated parameter.
        matrices = {i: self._flat_grad(i).view(_shape(self.params[i])) * scale + self.errors[i] for i in self.factors}
        left = {i: m @ self.factors[i] for i, m in matrices.items()}
        used = torch.tensor([float(p.grad is not None) for p in self.params], dtype=self._wide)
        health = torch.zeros(self.group.size, dtype=self._wide)
        rest = {i: self._flat_grad(i) * scale for i in range(len(self.params)) if i not in self.factors}
        total = sum((t.sum() for t in (*left.values(), *rest.values())), start=torch.zeros((), dtype=self._wide))
        health[self.group.rank] = float(not torch.isfinite(total))
        device = self.params[0].device
        parts = [*left.values(), *rest.values(), used.to(device), health.to(device)]
        self._sum(parts)
        right = {}
        for i, m in matrices.items():
            left[i] = torch.linalg.qr(torch.nan_to_num(left[i]))[0]
            right[i] = m.T @ left[i]
        self._sum(list(right.values()))
        ranks_used = parts[-2].tolist()
        self._new_errors, self._new_factors, self._sick = {}, {}, parts[-1]
        for i, m in matrices.items():
            # A parameter that no rank used is not stepped. Its error is kept for its next gradient.
            if ranks_used[i]:
                self._put(i, left[i] @ right[i].T)
                # This rank's part of what was left out: its M less its part of the approximation.
                self._new_errors[i], self._new_factors[i] = m - left[i] @ (left[i].T @ m), right[i]
        for i, values in rest.items():
            if ranks_used[i]:
                self._put(i, values)

    def _health(self) -> Tensor:
        return self._sick

    def _conclude(self) -> tuple[float, tuple[int, ...]]:
        """Clip gradients as the base class does. Keep the new errors and factors only if all gradients are finite."""
        norm, culprits = super()._conclude()
        if not culprits:
            self.errors.update(self._new_errors)
            self.factors.update(self._new_factors)
        return norm, culprits

    def local_state(self) -> dict[str, Tensor]:
        """Return errors (rows, columns) and factors Q (columns, rank), named by the numbers of their parameters."""
        self.ready()
        names = {i: self._numbers[id(self.params[i])] for i in self.factors}
        errors = {f"{ADDS_UP}{names[i]}": v for i, v in self.errors.items()}
        return errors | {f"factor.{names[i]}": v for i, v in self.factors.items()}

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore errors and factors in place."""
        held = self.local_state()
        # A parameter that the saved run did not exchange starts with an error of zero.
        for name in held.keys() & state.keys():
            held[name].copy_(state[name])

    def _flat_grad(self, i: int) -> Tensor:
        """Return the gradient of a parameter as a vector; zeros if this rank has none."""
        p = self.params[i]
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        return grad.to(self._wide).reshape(-1)

    def _sum(self, parts: list[Tensor]) -> None:
        """Sum all parts over the ranks in one all-reduce, in place."""
        if not parts:
            return
        flat = torch.cat([t.reshape(-1) for t in parts])
        self.group.all_reduce(flat, async_op=True).wait()
        for t, part in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
            t.copy_(part.view(t.shape))


def _shape(p: Tensor) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix: (first axis, all others), with one row for a vector."""
    rows = p.shape[0] if p.ndim > 1 else 1
    return rows, p.numel() // max(rows, 1)
