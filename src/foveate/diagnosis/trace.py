"""Energy of a Jacobian outside the rows that are known."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Missed:
    """Energy outside the known rows, for each image.

    Attributes:
        energy: Estimate, ``(B,)``, float64.
        standard_error: Of the estimate, ``(B,)``, float64.
    """

    energy: Tensor
    standard_error: Tensor


def estimate_missed(gram: Tensor, num_probes: int, outside: int, misses: Tensor) -> Missed:
    r"""Combine two estimates of the energy that the rows of a sketch miss.

    Let A be :math:`J J^\top` on the n output directions outside those that were searched for.
    The last k rows are pull-backs of a random orthonormal frame there (uniform over frames),
    so that their energies have mean :math:`\mathrm{tr} A / n`, and, since they are n
    directions drawn without replacement, what all rows miss has the unbiased estimate

    .. math:: (n/k - 1) \sum_{j=1}^k A_{jj}, \qquad
        \mathrm{Var} = \frac{n^2}{k}\,\frac{n-k}{n-1}\,\frac{2\tau}{n(n+2)}, \qquad
        \tau = \lVert A \rVert_F^2 - (\mathrm{tr} A)^2 / n,

    where :math:`\tau = (n-1)(n+2)\,\mathbb{E} A_{ij}^2` is known from the products of two
    different rows. Random signs pushed forward give the same energy with variance at most
    :math:`2 \lVert A \rVert_F^2` each. The two are weighted by their inverse variances.

    Args:
        gram: Products of the rows, ``(B, D, D)``, float64.
        num_probes: Random rows, k; the last ones.
        outside: Directions outside those that were searched for, n >= k.
        misses: Energies outside the rows of random signs pushed forward, ``(B, S)``.

    Returns:
        The estimate; exactly zero if the rows are complete.
    """
    zero = torch.zeros(len(gram), dtype=torch.float64)
    if outside == num_probes:
        return Missed(zero, zero)
    n, k = outside, num_probes
    block = gram[:, -k:, -k:]
    seen = block.diagonal(dim1=1, dim2=2).sum(1)
    off_diagonal = block.square().sum((1, 2)) - block.diagonal(dim1=1, dim2=2).square().sum(
        1
    )
    tau = (n - 1) * (n + 2) * off_diagonal / (k * (k - 1))
    of_rows = n**2 / k * (n - k) / (n - 1) * 2 * tau / (n * (n + 2))
    energy = (n / k - 1) * seen
    if misses.shape[1] == 0:
        return Missed(energy, of_rows.sqrt())
    square_norm = tau + (n / k * seen) ** 2 / n
    of_signs = 2 * square_norm * (n - k) / n / misses.shape[1]
    both = of_rows + of_signs
    share = torch.where(both > 0, of_signs / both, 1.0)
    return Missed(share * energy + (1 - share) * misses.mean(1), (share * of_rows).sqrt())
