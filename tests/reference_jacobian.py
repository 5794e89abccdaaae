"""Jacobians formed row by row in float64, and what they say. Only tests import this."""

import torch
from torch import Tensor, nn

from foveate.diagnosis.jacobian import TokenJacobian


def materialise(tail, tokens: Tensor) -> Tensor:
    """Each image's Jacobian on its own, one output at a time, ``(B, M, T, C)``."""
    return torch.stack([_of_image(tail, image[None]) for image in tokens])


def _of_image(tail, image: Tensor) -> Tensor:
    x = image.clone().requires_grad_(True)
    output = tail(x)[0]
    rows = [torch.autograd.grad(y, x, retain_graph=True)[0][0] for y in output]
    return torch.stack(rows)


def singular(jacobian: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors ``(K, T, C)`` of one ``(M, T, C)``."""
    _, values, right = torch.linalg.svd(jacobian.double().flatten(1), full_matrices=False)
    return values, right.unflatten(1, jacobian.shape[1:])


def importance_of(jacobian: Tensor, rank: int) -> Tensor:
    """The definition, token by token."""
    values, right = singular(jacobian)
    leading = range(min(rank, len(values)))
    squares = [
        sum((values[j] * right[j, t].norm()) ** 2 for j in leading)
        for t in range(jacobian.shape[1])
    ]
    return torch.stack(squares).sqrt()


def cv_of(jacobian: Tensor, rank: int) -> float:
    """Standard deviation over mean of the energies of the tokens."""
    energy = singular(jacobian)[1][:rank].square().sum((0, 2))
    return float(((energy - energy.mean()).square().mean()).sqrt() / energy.mean())


class Bend(nn.Module):
    """A tail that is not linear: ``(B, T, C) -> (B, M)``, float64."""

    def __init__(self, num_tokens: int, num_channels: int, num_outputs: int, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (num_outputs, num_tokens * num_channels)
        self.weight = torch.randn(shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin().flatten(1) @ self.weight.T).tanh() * 3


def matrix_with(values: Tensor, num_columns: int, seed: int = 0) -> Tensor:
    """A random matrix with given singular values, ``(M, num_columns)``, float64."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)
    right = torch.randn(num_columns, len(values), generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
    return left @ torch.diag(values.double()) @ right.T


def linear_jacobian(
    matrices: Tensor, num_tokens: int, dtype: torch.dtype = torch.float64
) -> TokenJacobian:
    """Jacobian of ``y_b = A_b x_b``, for ``(B, M, T * C)``."""
    matrices = matrices.to(dtype)
    shape = (len(matrices), num_tokens, matrices.shape[2] // num_tokens)

    def tail(x: Tensor) -> Tensor:
        return (matrices @ x.flatten(1)[..., None])[..., 0]

    return TokenJacobian(tail, torch.zeros(shape, dtype=dtype))
