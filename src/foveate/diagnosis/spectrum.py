"""Spectrum of one image's Jacobian, and what it says, each figure with its error."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.diagnosis.lanczos import complete_spectrum, quadrature_weights
from foveate.diagnosis.sketch import Part, Sketch
from foveate.diagnosis.statistics import STATISTICS, kappa_cap


@dataclass(frozen=True)
class Estimate:
    """A figure and the standard error of its estimate; 0 on the exact route."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of one image's Jacobian with respect to some of its tokens.

    Attributes:
        energies: All squared singular values, ``(M,)``, descending, float64.
        vectors: Eigenvectors of the products of the rows, leading first, ``(D, D)``.
        num_found: How many energies belong to a row; the others complete the spectrum.
        statistics: ``kappa_cap``, ``rank_entropy``, ``rank_roy_vetterli``,
            ``rank_participation``, ``rank_stable``, ``rank_90``.
        energy: Squared Frobenius norm of the Jacobian.
    """

    energies: Tensor
    vectors: Tensor
    num_found: int
    statistics: dict[str, Estimate]
    energy: Estimate


def find_spectrum(sketch: Sketch, part: Part, image: int, rank: int) -> Spectrum:
    r"""Complete the spectrum of one image and take its statistics.

    On the exact route the energies are the eigenvalues of :math:`J J^\top`. On the randomised
    route the ``rank`` leading ones are Ritz values (from below), the others come from
    stochastic Lanczos quadrature (:mod:`foveate.diagnosis.lanczos`), and the sum is that of
    the rows plus the estimate of what they miss. Standard errors add up, in squares, what the
    error of the sum does to a statistic, and the jackknife over the probes of the quadrature.

    Args:
        sketch: Rows of the Jacobian.
        part: The tokens it is about.
        image: Index of the image.
        rank: Leading directions.

    Returns:
        The spectrum.

    Raises:
        ValueError: If the Jacobian is zero.
    """
    ritz, vectors = torch.linalg.eigh(part.gram[image])
    ritz, vectors = ritz.flip(0).clamp_min(0), vectors.flip(1)  # rounding goes below zero
    total = float(ritz.sum() + part.missed.energy[image])
    if not total > 0:
        raise ValueError(
            "the task output must depend on the tokens; its Jacobian with respect to those "
            f"from token {part.first} on is zero."
        )
    error = float(part.missed.standard_error[image])
    num_start = sketch.num_start
    leading = min(rank, len(ritz))
    weights = quadrature_weights(vectors, num_start, sketch.num_outputs)

    def complete(total: float, probes: list[int]) -> Tensor:
        if not num_start:
            return ritz
        weight = weights[probes].mean(0)
        return complete_spectrum(ritz, weight, leading, total, sketch.num_outputs)

    everyone = list(range(num_start))
    energies = complete(total, everyone)
    shifted = [complete(total + sign * error, everyone) for sign in (-1, 1) if error > 0]
    left_out = [
        complete(total, everyone[:i] + everyone[i + 1 :]) for i in everyone[1:] and everyone
    ]

    def estimate(statistic: Callable[[Tensor], float]) -> Estimate:
        of_total = _half_difference([statistic(e) for e in shifted])
        of_probes = _jackknife([statistic(e) for e in left_out])
        return Estimate(statistic(energies), (of_total**2 + of_probes**2) ** 0.5)

    statistics = {"kappa_cap": estimate(lambda e: kappa_cap(e, rank))}
    statistics |= {name: estimate(statistic) for name, statistic in STATISTICS.items()}
    return Spectrum(energies, vectors, len(ritz), statistics, Estimate(total, error))


def _half_difference(values: list[float]) -> float:
    return abs(values[-1] - values[0]) / 2 if values else 0.0


def _jackknife(values: list[float]) -> float:
    """Standard error from the values with one probe left out at a time."""
    if not values:
        return 0.0
    spread = torch.tensor(values, dtype=torch.float64)
    return float(((len(values) - 1) * spread.var(correction=0)).sqrt())
