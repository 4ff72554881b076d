"""What calibration tells of the inputs of a matrix: the sum of their outer products.

Shapes: T tokens, I inputs, O outputs, R some of the outputs.
"""

from dataclasses import dataclass, field

import torch

DAMPING = 0.01
_MORE_DAMPING = (1.0, 10.0, 100.0)  # times `DAMPING`, until the matrix is positive definite


@dataclass(slots=True)
class InputSum:
    """H = Σ xᵀx over the tokens seen, in float64; each call adds one window, in the order given."""

    columns: int
    num_tokens: int = 0
    _sum_II: torch.Tensor | None = None

    def add(self, x_TI: torch.Tensor) -> None:
        x_TI = x_TI.detach().float()
        self.num_tokens += len(x_TI)
        if self._sum_II is None:
            self._sum_II = torch.zeros(self.columns, self.columns, dtype=torch.float64)
        self._sum_II += x_TI.T @ x_TI

    def add_sum(self, other: "InputSum") -> None:
        if other._sum_II is not None:
            if self._sum_II is None:
                self._sum_II = torch.zeros_like(other._sum_II)
            self._sum_II += other._sum_II
        self.num_tokens += other.num_tokens

    def take(self) -> torch.Tensor:
        """The mean over tokens, float32 ``[I, I]``; of none, the identity. The sum is freed."""
        found, self._sum_II = self._sum_II, None
        if found is None or not self.num_tokens:
            return torch.eye(self.columns)
        return found.div_(self.num_tokens).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """H with what GPTQ needs of it.

    Attributes:
        hessian_II: mean of xᵀx, with its diagonal damped.
        order_I: the order in which columns are rounded: by falling diagonal, or as they are.
        factor_II: upper triangular U with H⁻¹ = UᵀU, in that order; ``None`` where H has no
            inverse in float32, however damped.
        num_dead: inputs that were always zero.
    """

    hessian_II: torch.Tensor
    order_I: torch.Tensor
    factor_II: torch.Tensor | None = field(repr=False)
    num_dead: int

    @classmethod
    def of(cls, hessian_II: torch.Tensor, *, by_diagonal: bool = True) -> "Curvature":
        """Takes ``hessian_II`` over, and damps it in place."""
        diagonal = hessian_II.diagonal()
        mean, num_dead = float(diagonal.mean()) or 1.0, int((diagonal == 0).sum())
        order = torch.arange(len(diagonal))
        if by_diagonal:
            order = diagonal.argsort(descending=True, stable=True)
        factor, before = None, 0.0
        for more in _MORE_DAMPING:
            damping = DAMPING * more * mean
            diagonal += damping - before
            before = damping
            if (factor := _inverse_factor(hessian_II, order)) is not None:
                break
        return cls(hessian_II=hessian_II, order_I=order, factor_II=factor, num_dead=num_dead)

    @classmethod
    def plain(cls, hessian_II: torch.Tensor) -> "Curvature":
        """As it is, without a factor."""
        order, num_dead = torch.arange(len(hessian_II)), int((hessian_II.diagonal() == 0).sum())
        return cls(hessian_II=hessian_II, order_I=order, factor_II=None, num_dead=num_dead)

    def error(self, difference_RI: torch.Tensor) -> torch.Tensor:
        """What a change of the weights does to the outputs ``[R]``: dᵀHd of each row."""
        return ((difference_RI @ self.hessian_II) * difference_RI).sum(-1)


def _inverse_factor(hessian_II: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor | None:
    """U with H⁻¹ = UᵀU: the inverse of the triangle M of H = M Mᵀ, by the last column first."""
    backwards = order_I.flip(0)
    lower, info = torch.linalg.cholesky_ex(hessian_II[backwards][:, backwards])
    if int(info):
        return None
    inverse = torch.eye(len(lower)).mT  # in the order of LAPACK, so that no copy is made
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1) if bool(inverse.isfinite().all()) else None
