r"""What a spectrum says, by name, since effective ranks differ by a factor of ten.

All functions take the energies of the directions, the squared singular values
:math:`\sigma_i^2` of a Jacobian, descending and complete, ``(K,)``. With
:math:`p_i = \sigma_i^2 / \sum_j \sigma_j^2`, always
``rank_stable <= rank_participation <= rank_entropy <= rank_roy_vetterli <=`` rank.
"""

import torch
from torch import Tensor

__all__ = [
    "kappa_cap",
    "rank_90",
    "rank_entropy",
    "rank_participation",
    "rank_roy_vetterli",
    "rank_stable",
    "take_statistics",
]


def kappa_cap(energies: Tensor, rank: int) -> float:
    r"""Share of the energy in the leading directions, :math:`\sum_{i \le r} p_i`.

    No metric of rank r catches more of a Jacobian's sensitivity.

    Args:
        energies: Squared singular values.
        rank: Leading directions, r; all of them if there are fewer.

    Returns:
        A number in (0, 1].
    """
    return float(energies[:rank].sum() / energies.sum())


def rank_entropy(energies: Tensor) -> float:
    r"""Exponential of the entropy of the energies, :math:`\exp(-\sum_i p_i \log p_i)`."""
    return _perplexity(energies)


def rank_roy_vetterli(energies: Tensor) -> float:
    r"""Exponential of the entropy of the singular values: as above with :math:`\sigma_i`.

    Long tails weigh far more than in :func:`rank_entropy`.

    Args:
        energies: Squared singular values.

    Returns:
        At least 1.

    References:
        Roy and Vetterli, "The effective rank: a measure of effective dimensionality",
        EUSIPCO 2007.
    """
    return _perplexity(energies.sqrt())


def rank_participation(energies: Tensor) -> float:
    r"""Equal directions with the same second moment, :math:`1 / \sum_i p_i^2`."""
    share = energies / energies.sum()
    return float(1 / share.square().sum())


def rank_stable(energies: Tensor) -> float:
    r"""Energy over that of the first direction, :math:`1 / p_1`."""
    return float(energies.sum() / energies[0])


def rank_90(energies: Tensor) -> float:
    r"""Fewest directions with 90 % of the energy; an integer."""
    caught = energies.cumsum(0) / energies.sum()
    # One rounding error below 90 % must not cost a direction.
    return float((caught < 0.9 * (1 - 1e-12)).sum() + 1)


def _perplexity(values: Tensor) -> float:
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def take_statistics(energies: Tensor, rank: int) -> dict[str, float]:
    """Take all of the above, by name; ``kappa_cap`` at the given rank."""
    ranks = (rank_entropy, rank_roy_vetterli, rank_participation, rank_stable, rank_90)
    caught = {"kappa_cap": kappa_cap(energies, rank)}
    return caught | {function.__name__: function(energies) for function in ranks}
