"""Spectrum of one image's Jacobian, and what it says, each figure with its error."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.diagnosis.lanczos import (
    complete_spectrum,
    geometric_spectrum,
    quadrature_weights,
)
from foveate.diagnosis.sketch import Part, Sketch
from foveate.diagnosis.statistics import take_statistics

Values = dict[str, float]

_NEGLIGIBLE = 1e-9  # share of the energy; rounding in float32 alone leaves about 1e-12


@dataclass(frozen=True)
class Estimate:
    """A figure and the standard error of its estimate, 0 on the exact route."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of one image's Jacobian with respect to some of its tokens.

    Attributes:
        energies: All squared singular values, descending, float64, ``(K,)``.
        vectors: Eigenvectors of the products of the rows, leading first, ``(D, D)``.
        energy: Squared Frobenius norm of the Jacobian, the sum of ``energies``.
        statistics: Of :mod:`foveate.diagnosis.statistics`, by name.
    """

    energies: Tensor
    vectors: Tensor
    energy: Estimate
    statistics: dict[str, Estimate]

    @property
    def found(self) -> Tensor:
        """Energies that stand for a row each; the others only complete the spectrum."""
        return self.energies[: len(self.vectors)]


def find_spectrum(sketch: Sketch, part: Part, image: int, rank: int) -> Spectrum:
    r"""Complete the spectrum of one image and take its statistics.

    On the exact route the energies are the eigenvalues of :math:`J J^\top`. On the
    randomised route the ``rank`` leading ones are Ritz values, which err below; the others
    come from stochastic Lanczos quadrature; the sum is that of the rows plus what they
    miss. Standard errors are the root of the sum of squares of (1) half the change of a
    statistic when the sum moves by its standard error to either side, (2) the jackknife
    over the probes of the quadrature, and, for the Roy-Vetterli rank, (3) half its distance
    to that of :func:`foveate.diagnosis.lanczos.geometric_spectrum`.

    Args:
        sketch: Rows of the Jacobian.
        part: The tokens it is about.
        image: Index of the image.
        rank: Leading directions.

    Returns:
        The spectrum.

    Raises:
        ValueError: If the Jacobian with respect to these tokens is zero.
    """
    ritz, vectors = torch.linalg.eigh(part.gram[image])
    ritz, vectors = ritz.flip(0).clamp_min(0), vectors.flip(1)  # rounding goes below zero
    missed = float(part.missed.energy[image])
    energy = Estimate(float(ritz.sum()) + missed, float(part.missed.standard_error[image]))
    if not energy.value > 0:
        raise ValueError(
            "the task output must depend on the tokens at this depth; the Jacobian of "
            f"image {image} of the batch is zero from token {part.first} on."
        )
    if sketch.num_start == 0:
        values = take_statistics(ritz, rank)
        statistics = {name: Estimate(value, 0.0) for name, value in values.items()}
        return Spectrum(ritz, vectors, energy, statistics)
    num_columns = sketch.rows[0, 0, part.first :].numel()
    num_values = max(min(sketch.num_outputs, num_columns), len(ritz))
    weights = quadrature_weights(vectors, sketch.num_start, num_values)  # (S, D)
    is_complete = missed <= _NEGLIGIBLE * energy.value
    completion = _Completion(
        ritz, weights, len(ritz) if is_complete else min(rank, len(ritz)), num_values
    )
    return Spectrum(
        completion.spectrum(energy.value),
        vectors,
        energy,
        completion.statistics(energy, rank),
    )


@dataclass(frozen=True)
class _Completion:
    """Ritz values and the quadrature that completes them."""

    ritz: Tensor
    weights: Tensor
    leading: int
    num_values: int

    def spectrum(self, total: float, probes: slice | list[int] = slice(None)) -> Tensor:
        weights = self.weights[probes].mean(0)
        return complete_spectrum(self.ritz, weights, self.leading, total, self.num_values)

    def statistics(self, energy: Estimate, rank: int) -> dict[str, Estimate]:
        total, error = energy.value, energy.standard_error
        energies = self.spectrum(total)
        other = geometric_spectrum(energies, self.leading)
        return _with_errors(
            take_statistics(energies, rank),
            [
                take_statistics(self.spectrum(total + step), rank)
                for step in (-error, error)
            ],
            [
                take_statistics(self.spectrum(total, probes), rank)
                for probes in self._fewer()
            ],
            take_statistics(other, rank)["rank_roy_vetterli"],
        )

    def _fewer(self) -> list[list[int]]:
        """All probes but one, in turn; none if that would leave nothing."""
        everyone = range(len(self.weights))
        return [[i for i in everyone if i != out] for out in everyone if len(everyone) > 1]


def _with_errors(
    values: Values, moved: Sequence[Values], fewer: Sequence[Values], other: float
) -> dict[str, Estimate]:
    estimates = {}
    for name, value in values.items():
        of_total = (moved[1][name] - moved[0][name]) / 2
        of_probes = torch.tensor([v[name] for v in fewer] or [value], dtype=torch.float64)
        square = of_total**2 + (len(of_probes) - 1) * float(of_probes.var(correction=0))
        if name == "rank_roy_vetterli":
            square += ((value - other) / 2) ** 2
        estimates[name] = Estimate(value, square**0.5)
    return estimates
