"""The whole spectrum from a Krylov basis: stochastic Lanczos quadrature, leading part exact."""

import numpy as np
import torch
from torch import Tensor


def quadrature_weights(vectors: Tensor, num_start: int, num_values: int) -> Tensor:
    r"""How many singular directions each Ritz vector speaks for, probe by probe.

    For a random unit vector u of output space,
    :math:`M\,\mathbb{E}\,u^\top f(J J^\top) u = \sum_i f(\sigma_i^2)`, and with Ritz pairs
    :math:`(\theta_i, c_i)` of a basis that holds u and its Krylov space of s products, the
    Gauss rule :math:`u^\top f(J J^\top) u = \sum_i (c_i^\top u)^2 f(\theta_i)` is exact for
    polynomials f of degree 2 s - 1.

    Args:
        vectors: Ritz vectors in the basis, ``(D, D)``, as columns; the first ``num_start``
            directions of the basis are the probes.
        num_start: Number of probes, S.
        num_values: Directions of output space, M.

    Returns:
        ``(S, D)``, nonnegative; each row sums to M.
    """
    return num_values * vectors[:num_start].square()


def complete_spectrum(
    energies: Tensor, weights: Tensor, leading: int, total: float, num_values: int
) -> Tensor:
    r"""Complete the leading energies of a spectrum to all of them.

    The leading Ritz values are taken as they are, one direction each. The others are nodes of
    a quadrature rule for the rest (deflation): sorted, with weights scaled to the number of
    directions that are left, they give the logarithm of the energy at the middle of each
    node's range of directions, linear in between. An exponent, common to all, then gives the
    tail exactly the energy that is left, without ever exceeding the last leading one:
    :math:`\lambda \mapsto \lambda_r (\lambda / \lambda_r)^s`.

    Bias: the number of values and the energy are right by construction; what the rule cannot
    see is how the smallest ones (below the last node) are spread.

    Args:
        energies: Ritz values, ``(D,)``, descending, float64.
        weights: Directions each speaks for, ``(D,)``.
        leading: How many are taken as exact, fewer than D.
        total: Energy of the whole Jacobian.
        num_values: Length of the spectrum.

    Returns:
        ``(num_values,)``, descending, with sum ``total``.
    """
    head, left = energies[:leading], num_values - leading
    rest = max(total - float(head.sum()), 0.0)
    if left == 0 or rest <= 1e-12 * total:
        return torch.nn.functional.pad(head, (0, left))
    counts = weights[leading:].numpy().copy()
    counts *= left / counts.sum()
    middle = counts.cumsum() - counts / 2
    floor = 1e-14 * float(head[0])
    logs = np.log(energies[leading:].clamp_min(floor).numpy())
    logs = np.interp(np.arange(left) + 0.5, middle, logs)
    depth = torch.from_numpy(logs) - head[-1].log()  # at most 0
    tail = head[-1] * (depth * _exponent(depth, rest / float(head[-1]))).exp()
    return torch.cat([head, tail * (rest / tail.sum())])


def _exponent(depth: Tensor, target: float) -> float:
    """The s with ``sum(exp(s * depth)) == target``, by bisection."""
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = float((depth * middle).exp().sum()) > target
        low, high = (middle, high) if is_low else (low, middle)
    return high
