"""Spectrum of one image's Jacobian, and what it says, each figure with its error."""

from dataclasses import dataclass
from math import hypot, sqrt
from statistics import pvariance

import torch
from torch import Tensor

from foveate.diagnosis.lanczos import (
    complete_spectrum,
    geometric_spectrum,
    quadrature_weights,
)
from foveate.diagnosis.sketch import Part, Sketch
from foveate.diagnosis.statistics import rank_roy_vetterli, take_statistics

Values = dict[str, float]

_UNSEEN = 0.01  # share of a completed rank that the quadrature is off in the mean
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
    over the probes of the quadrature, and (3) what the quadrature does not see: 1 % of the
    entropy rank and of ``rank_90``; for the Roy-Vetterli rank, half its distance to that of
    :func:`foveate.diagnosis.lanczos.geometric_spectrum`.

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
        def take(total: float, probes: slice | list[int] = slice(None)) -> Values:
            return take_statistics(self.spectrum(total, probes), rank)

        values, error = take(energy.value), energy.standard_error
        low, high = take(energy.value - error), take(energy.value + error)
        fewer = [take(energy.value, probes) for probes in self._fewer()]
        unseen = self._unseen(values, energy.value)
        estimates = {}
        for name, value in values.items():
            of_probes = _jackknife([v[name] for v in fewer])
            parts = ((high[name] - low[name]) / 2, of_probes, unseen.get(name, 0.0))
            estimates[name] = Estimate(value, hypot(*parts))
        return estimates

    def _fewer(self) -> list[list[int]]:
        """All probes but one, in turn; none if that would leave nothing."""
        everyone = range(len(self.weights))
        return [[i for i in everyone if i != out] for out in everyone if len(everyone) > 1]

    def _unseen(self, values: Values, total: float) -> Values:
        """Error from how the quadrature spreads the smallest energies."""
        if self.leading == len(self.ritz):
            return {}
        geometric = geometric_spectrum(self.spectrum(total), self.leading)
        distance = values["rank_roy_vetterli"] - rank_roy_vetterli(geometric)
        small = {name: _UNSEEN * values[name] for name in ("rank_entropy", "rank_90")}
        return {"rank_roy_vetterli": distance / 2, **small}


def _jackknife(values: list[float]) -> float:
    """Standard error from the values with one probe left out at a time."""
    if not values:
        return 0.0
    return sqrt((len(values) - 1) * pvariance(values))
