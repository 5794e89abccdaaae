"""What the Jacobian with respect to a latent says, and how well probes of it do."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from foveate.bottleneck.alignment import (
    alignment,
    leading_subspace,
    probe_subspace,
    random_subspace,
)
from foveate.diagnosis.findings import examine
from foveate.diagnosis.output_metric import Jacobian
from foveate.diagnosis.sketch import Sketch, exact_sketch, randomised_sketch, split_budget

__all__ = ["LatentFinding", "examine_latent"]

_PROBES, _ITERATIONS = 100, 2  # those of a diagnosis, so that ranks compare
_REFERENCE = 2  # times as many products for the subspace that others are compared with


@dataclass(frozen=True)
class LatentFinding:
    """One image's Jacobian with respect to its latent.

    Attributes:
        statistics: Of :mod:`foveate.diagnosis.statistics` and ``cv``, by name.
        alignment: Share of the reference subspace that each route covers, by name.
    """

    statistics: dict[str, float]
    alignment: dict[str, float]


def examine_latent(
    jacobian: Jacobian,
    rank: int,
    generators: Sequence[Generator],
    exact: bool = False,
    widths: Sequence[int] = (),
) -> list[LatentFinding]:
    """Take the statistics, and compare ways to find the leading r directions.

    The reference is the exact subspace, or that of a block Krylov search with twice
    the products of a diagnosis. The alignments with it are: ``random``, where probes start;
    ``deterministic``, the search of a diagnosis, which is the best that products reach and
    hence the ceiling (on the exact route the exact subspace itself); ``randomised``, one
    round (q = 1) of randomised iteration with as many directions as a diagnosis has probes;
    and ``randomised_W`` for every further width W. Cost: about 620 JVPs and 520 VJPs, and
    2 W JVPs and W VJPs for each width; on the exact route M VJPs or R * d JVPs more.

    Args:
        jacobian: Jacobian of B images with respect to the latent, ``(B, R, d)``.
        rank: Leading directions, r.
        generators: One source of randomness on the CPU for each image.
        exact: Whether to form the Jacobian.
        widths: Further numbers of directions, at least r each.

    Returns:
        One finding an image.

    Raises:
        ValueError: If ``rank`` exceeds what the Jacobian can have, or a width does not fit.
    """
    whole = min(jacobian.num_outputs, jacobian.tokens[0].numel())
    if not 1 <= rank <= whole:
        raise ValueError(f"rank must be from 1 to {whole} here; got {rank}.")
    sketch = _search(jacobian, rank, generators, 1)
    reference = exact_sketch(jacobian, 0) if exact else None
    best = reference or sketch
    truth = leading_subspace(
        reference or _search(jacobian, rank, generators, _REFERENCE), rank
    )
    found = {
        "random": random_subspace(jacobian.tokens, rank, generators),
        "deterministic": leading_subspace(best, rank),
        "randomised": probe_subspace(
            jacobian, rank, min(whole, max(rank, _PROBES)), 1, generators
        ),
    }
    for width in widths:
        found[f"randomised_{width}"] = probe_subspace(jacobian, rank, width, 1, generators)
    aligned = {name: alignment(u, truth).tolist() for name, u in found.items()}
    return [
        LatentFinding(of["all"].statistics(), {name: v[i] for name, v in aligned.items()})
        for i, of in enumerate(examine(best, rank))
    ]


def _search(
    jacobian: Jacobian, rank: int, generators: Sequence[Generator], times: int
) -> Sketch:
    budget = split_budget(rank, times * _PROBES, times * _ITERATIONS, jacobian.num_outputs)
    return randomised_sketch(jacobian, 0, rank, budget, generators)
