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

    Let A be :math:`J J^\top` on the n output directions outside those that were searched
    for. The last k rows are pull-backs of a uniformly random orthonormal frame there: k of
    n directions, drawn without replacement. What all rows together miss has then the
    unbiased estimate

    .. math:: (n/k - 1) \sum_{j=1}^k A_{jj}, \qquad
        \mathrm{Var} = \frac{n^2}{k} \, \frac{n-k}{n-1} \, \frac{2\tau}{n(n+2)}, \qquad
        \tau = \lVert A \rVert_F^2 - (\mathrm{tr} A)^2 / n,

    where :math:`\tau = (n-1)(n+2)\,\mathbb{E} A_{ij}^2` comes from the products of two
    different rows. Random signs that were pushed forward give the same energy, with
    variance at most :math:`2 \lVert A \rVert_F^2` each. The two are weighted by inverse
    variance.

    Args:
        gram: Products of the rows, ``(B, D, D)``, float64.
        num_probes: Random rows, k >= 2 unless k = n; the last ones.
        outside: Directions outside those that were searched for, n >= k.
        misses: Energy outside the rows of random signs pushed forward, ``(B, S)``, S >= 0.

    Returns:
        The estimate; exactly zero if the rows are complete.

    References:
        Meyer, Musco, Musco and Woodruff, "Hutch++", SOSA 2021, for the deflation; Epperly,
        Tropp and Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45(1), 2024, for directions
        of unit length.
    """
    n, k = outside, num_probes
    if n == k:
        return Missed(*torch.zeros(2, len(gram), dtype=torch.float64))
    block = gram[:, -k:, -k:]
    diagonal = block.diagonal(dim1=1, dim2=2)
    square = (block.square().sum((1, 2)) - diagonal.square().sum(1)) / (k * (k - 1))
    tau = (n - 1) * (n + 2) * square
    seen = n / k * diagonal.sum(1)  # tr A
    from_rows = (1 - k / n) * seen
    of_rows = n**2 / k * (n - k) / (n - 1) * 2 * tau / (n * (n + 2))
    if misses.shape[1] == 0:
        return Missed(from_rows, of_rows.sqrt())
    of_signs = 2 * (tau + seen**2 / n) * (1 - k / n) / misses.shape[1]
    share = torch.where(of_signs > 0, of_signs / (of_rows + of_signs), 1.0)
    energy = share * from_rows + (1 - share) * misses.mean(1)
    return Missed(energy, (share * of_rows).sqrt())
